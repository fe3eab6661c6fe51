"""Everything a run can be told: one frozen class per component, a docstring under each field.

The class defaults suit models of one to several billion parameters on accelerators; the built-in
quickstart (``jaxrl/assets/quickstart.yaml``) sets its own. ``student.model``, ``data.train`` and,
where the algorithm learns from a teacher, ``teacher.model`` have no default.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from jaxrl import config_keys, yaml_text
from jaxrl.errors import UserError

QUICKSTART = Path(__file__).parent / "assets" / "quickstart.yaml"

Positive = Annotated[int, Field(strict=True, ge=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
PositiveNumber = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1)]
DType = Literal["float32", "bfloat16"]
Words = Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]
"""A list of strings; a single string stands for a list of one."""


class Section(BaseModel):
    """A frozen group of keys that refuses any other."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        coerce_numbers_to_str=True,
    )


class StudentConfig(Section):
    """The model that learns."""

    model: Name
    """Hugging Face folder, GGUF file, run directory, `package:NAME`, or `builtin:student`."""


class ParallelConfig(Section):
    """Sizes of a role's mesh axes; -1 (one axis at most) takes the devices the others leave."""

    data: int | None = Field(default=None, strict=True)
    """Copies of the weights, each with its share of the sequences. null: the plan decides."""
    fsdp: int | None = Field(default=None, strict=True)
    """Shards of weights and of sequences, gathered layer by layer. null: the plan decides."""
    tensor: int | None = Field(default=None, strict=True)
    """Shards of each layer's heads, hidden units and vocabulary. null: the plan decides."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = {name: getattr(self, name) for name in type(self).model_fields}
        for name, size in sizes.items():
            if size is not None and size != -1 and size < 1:
                raise ValueError(f"{name}={size}: an axis is at least 1, or -1 for the rest")
        rest = [name for name, size in sizes.items() if size == -1]
        if len(rest) > 1:
            raise ValueError(f"{' and '.join(rest)} are both -1: one axis may take the rest")
        return self


class RoleConfig(Section):
    """What every role has: its devices, its mesh and its compute dtype."""

    parallel: ParallelConfig = ParallelConfig()
    """Mesh axes of the role."""
    devices: str | None = None
    """Slice `start:stop` of the pool's devices that this role uses, as in `1:2`. null: all of
    them."""
    dtype: DType = "bfloat16"
    """Dtype of activations and of the weights that enter matrix products."""

    @field_validator("devices")
    @classmethod
    def _check_slice(cls, value: str | None) -> str | None:
        if value is None:
            return None
        match = re.fullmatch(r"(\d*):(\d*)", value)
        if match is None:
            raise ValueError(f"{value!r} is not a slice of devices: write start:stop, as in 1:2")
        start, stop = match.groups()
        if stop and int(start or "0") >= int(stop):
            raise ValueError(f"{value!r} is an empty slice of devices: stop must exceed start")
        return value


class TeacherConfig(RoleConfig):
    """The model to learn from; it never trains."""

    model: Name | None = None
    """As `student.model`, or `builtin:teacher`. null switches the teacher off (algorithm sft
    only)."""
    num_microbatches: Positive = 1
    """Slices in which a batch is scored; more take less activation memory."""


class ActorConfig(RoleConfig):
    """The role that trains the policy."""

    param_dtype: DType = "float32"
    """Dtype of the weights that the optimizer updates (float32: master weights)."""
    moment_dtype: DType = "float32"
    """Dtype of gradients and moments inside the optimizer."""
    micro_batch_tokens: Positive | None = 16384
    """Tokens (padding included) per device in one micro-batch. null: the whole minibatch at
    once."""
    minibatches: Positive = 1
    """Optimizer updates per pass over a batch."""
    epochs_per_batch: Positive = 1
    """Passes over each batch."""
    remat: Literal["none", "dots", "full"] = "full"
    """Activations kept for the backward pass: none recomputed, all but matrix products, or all."""
    max_nonfinite: Positive = 5
    """Abort after this many updates in a row were skipped for a non-finite gradient."""


class RolloutConfig(RoleConfig):
    """The role that samples."""

    slots: Positive | None = None
    """Sequences decoded at once over the whole mesh; freed ones are refilled. null: the whole
    batch."""
    launch_tokens: Positive = 32
    """Tokens decoded per device launch; slots are refilled between launches."""


def _named_sets(value: Any) -> Any:
    """Checks the names of held-out sets, and that each has a source."""
    if not isinstance(value, dict):
        return value
    if not value:
        raise ValueError("the mapping should not be empty")
    for name, sources in value.items():
        if not isinstance(name, str) or re.fullmatch(r"[A-Za-z0-9_.-]+", name) is None:
            raise ValueError(f"the name {name!r} may have letters, digits, `_`, `.` and `-` only")
        each = [sources] if isinstance(sources, str) else sources
        texts = isinstance(each, list | tuple) and all(isinstance(one, str) for one in each)
        if not texts or not each:
            raise ValueError(f"{name}: a source or a list of sources is needed, got {sources!r}")
    return value


EvalSources = Annotated[
    Annotated[Words, Field(min_length=1), Tag("a-list")]
    | Annotated[dict[str, Words], Tag("a-mapping")],
    Discriminator(lambda value: "a-mapping" if isinstance(value, dict) else "a-list"),
    BeforeValidator(_named_sets),
]
"""Sources of one set without a name, or of several by their names."""


class DataConfig(Section):
    """Prompts, and where they have them completions and answers."""

    train: Annotated[Words, Field(min_length=1)]
    """One source or a list of them: a `.jsonl` or `.parquet` file; a pattern like `data/*.parquet`;
    a folder of such files, or one that `datasets` saved (`:split=NAME` chooses a split);
    `arithmetic`, `reasoning_gym/NAME` (`:key=value,...` adds options)."""
    weights: tuple[PositiveNumber, ...] | None = None
    """Shares of the prompts, one number for each source of `data.train`; each source then has
    epochs of its own. null: all rows together, each once in an epoch."""
    eval: EvalSources | None = None
    """Held-out sources, as `data.train`, or several named sets, as in `{easy: a.jsonl, hard:
    [b.jsonl, c.jsonl]}`; a procedural source never repeats its training split. null: no
    evaluation."""
    prompt_key: str = "prompt"
    """Field or column with the prompt as text."""
    messages_key: str = "messages"
    """Field or column with the prompt as chat messages; rendered by the tokenizer's template."""
    completion_key: str = "completion"
    """Field or column with a completion to learn from."""
    answer_key: str = "answer"
    """Field or column with what the verifier compares with."""
    chat: Literal["auto", "raw"] = "auto"
    """auto: text prompts become a user message where there is a chat template. raw: never."""
    system_prompt: str | None = None
    """System message put before every chat prompt that has none."""
    few_shot: Annotated[Words, Field(min_length=1)] | None = None
    """Source of solved rows put before every prompt, also those of `data.eval`: as chat turns, or
    before a text prompt as `PROMPTCOMPLETION` with a blank line after each. null: none."""
    few_shot_rows: Positive = 4
    """How many rows of `data.few_shot`: its first ones."""
    long_prompts: Literal["drop", "cut"] = "drop"
    """Prompts longer than `max_prompt_tokens`. drop: left out. cut: the row's text (in a chat its
    longest user message) loses its beginning; tasks' prompts are left out all the same. Counted
    either way."""
    shuffle: Flag = True
    """Shuffle anew in each pass over the data, by `seed`."""
    verifier: str = "auto"
    """How a completion is judged in evaluation; auto: by the source's own verifier."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.train):
            raise ValueError(
                f"weights has {len(self.weights)} numbers for the {len(self.train)} sources of"
                " train: give one for each, or null"
            )
        return self


class SamplingConfig(Section):
    """How training completions are sampled."""

    temperature: NonNegative = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: Count = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[PositiveNumber, Field(le=1)] = 1.0
    """Keep the most probable tokens that together reach this probability; 1 keeps all."""
    min_p: Decay = 0.0
    """Keep tokens at least this fraction as probable as the best one; 0 keeps all."""
    stop: Words = ()
    """Texts that end a completion, besides the model's end-of-sequence tokens."""

    @property
    def truncated(self) -> bool:
        """True when some token of positive probability can never be sampled."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class DistillConfig(Section):
    """What algorithm gkd minimises (GKD, arXiv 2306.13649)."""

    signal: Literal["hidden", "topk", "student_topk", "sampled"] = "hidden"
    """What the teacher sends: last hidden states (exact), log-probs of its or the student's top-k
    with a tail bucket (lower bounds), or of the sampled tokens (unbiased for reverse KL)."""
    jsd_beta: Fraction = 0.5
    """Generalised JSD: 0 is KL(teacher||student), 1 is KL(student||teacher); the loss's scale jumps
    at both ends."""
    on_policy_fraction: Fraction = 1.0
    """Chance that a batch holds student samples; the others hold the data's completions, or the
    teacher's."""
    seq_kd: Flag = False
    """Off-policy batches hold the teacher's samples in place of the data's completions."""
    distill_temperature: PositiveNumber = 1.0
    """Divides both models' logits inside the loss (no T^2 factor)."""
    top_k: Annotated[Positive, Field(le=1024)] = 64
    """Tokens per position for signals topk and student_topk; from about 1000 on, hidden is smaller
    and exact."""
    ratio_cap: PositiveNumber = 2.0
    """Signal sampled: cap of the importance ratio between the learner and the policy that
    sampled."""
    entropy_aware: Flag = False
    """Add KL(teacher||student) where the teacher is uncertain (arXiv 2603.07079)."""
    entropy_threshold: NonNegative = 0.8
    """Teacher entropy, in nats, from which the entropy-aware term counts."""
    entropy_top_k: Positive = 16
    """Teacher's most probable tokens in the entropy-aware term."""
    chunk_tokens: Positive = 512
    """Tokens whose logits exist at once in any loss (sft too); fewer take less memory."""
    lean: Flag = False
    """Recompute logits in the backward pass: less memory, more time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.seq_kd and self.on_policy_fraction == 1:
            raise ValueError(
                "seq_kd=true with on_policy_fraction=1 leaves no batch to the teacher's samples:"
                " set on_policy_fraction below 1"
            )
        if self.signal == "student_topk" and self.on_policy_fraction < 1:
            raise ValueError(
                "signal=student_topk asks about the samples of the policy that made them: it needs"
                f" on_policy_fraction=1, got {self.on_policy_fraction:g}"
            )
        if self.entropy_aware and self.signal == "topk" and self.entropy_top_k > self.top_k:
            raise ValueError(
                f"entropy_top_k={self.entropy_top_k} exceeds top_k={self.top_k},"
                " all that signal topk sends"
            )
        if self.signal == "sampled":
            self._check_sampled()
        return self

    def _check_sampled(self) -> None:
        needed = {"jsd_beta": 1.0, "on_policy_fraction": 1.0, "distill_temperature": 1.0}
        for key, value in needed.items():
            if getattr(self, key) != value:
                raise ValueError(
                    "signal=sampled estimates KL(student||teacher) on the student's own samples:"
                    f" it needs {key}={value:g}, got {getattr(self, key):g}"
                )


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule (optax)."""

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon"] = "adamw"
    """The optax optimizer."""
    learning_rate: NonNegative = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: Count = 10
    """Updates over which the rate rises linearly to its peak."""
    min_lr_ratio: Fraction = 0.0
    """Last learning rate of linear and cosine, as a fraction of the peak."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (not adam, sgd); embeddings, norms and biases are left out."""
    b1: Decay = 0.9
    """Decay of the first moment (sgd: momentum)."""
    b2: Decay = 0.95
    """Decay of the second moment (adamw, adam, lion, muon)."""
    eps: PositiveNumber = 1e-8
    """Added to the denominator of an update (adamw, adam, muon)."""
    clip_norm: PositiveNumber | None = 1.0
    """Global gradient norm above which gradients are scaled down. null: never."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weight_decay > 0 and self.name in ("adam", "sgd"):
            raise ValueError(
                f"weight_decay={self.weight_decay:g} has no effect with name={self.name}: set it to"
                " 0, or name=adamw"
            )
        return self


class EvalConfig(Section):
    """Accuracy on `data.eval` by a verifier: before the first step, during the run, at its end; and
    by `python -m jaxrl.evaluate`."""

    every: Count = 25
    """Steps between evaluations; 0: only the first and the last."""
    prompts: Positive = 256
    """Held-out prompts of each set, the same ones each time; all of a set that has fewer."""
    samples: Positive = 1
    """Completions per prompt; accuracy is their mean (mean@k), and above 1 pass@k is told too."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    top_k: Count = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Annotated[PositiveNumber, Field(le=1)] = 1.0
    """Keep the most probable tokens that together reach this probability; 1 keeps all."""
    max_new_tokens: Positive | None = None
    """Longest completion. null: as `max_new_tokens`."""
    teacher: Flag = True
    """Evaluate the teacher once, at the start: what the student should reach."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples={self.samples} greedy completions of a prompt are all the same:"
                " set temperature above 0, or samples=1"
            )
        if self.temperature == 0 and (self.top_k > 0 or self.top_p < 1):
            raise ValueError(
                f"top_k={self.top_k} top_p={self.top_p:g} have no effect on greedy completions:"
                " set temperature above 0, or top_k=0 top_p=1"
            )
        return self


class CheckpointConfig(Section):
    """All that a run needs to go on as if it had never stopped, in `RUN/checkpoints/STEP`."""

    every: Count = 50
    """Steps between checkpoints, written beside training; 0: only the last step and an
    interruption."""
    keep_last: Positive = 2
    """Newest checkpoints kept."""
    keep_best: Count = 1
    """Checkpoints kept beside those for their `eval/accuracy`, of steps that were evaluated."""


class DeadlinesConfig(Section):
    """Longest wait for each kind of call, in seconds; a late call ends the run and shows where."""

    startup: PositiveNumber = 600.0
    """Loading weights and building a role."""
    generate: PositiveNumber = 600.0
    """One batch of completions, compilation included."""
    score: PositiveNumber = 600.0
    """One batch scored by the teacher."""
    update: PositiveNumber = 600.0
    """One batch trained."""
    weight_sync: PositiveNumber = 600.0
    """New weights in the rollout role."""
    evaluate: PositiveNumber = 600.0
    """One evaluation."""
    checkpoint: PositiveNumber = 600.0
    """Taking a checkpoint's arrays off the devices; writing what is unwritten at a run's end."""
    interrupt: PositiveNumber = 120.0
    """After Ctrl-C or SIGTERM: finishing the step at hand and saving. A second Ctrl-C ends at
    once."""


class LoggingConfig(Section):
    """What a run shows and records."""

    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """Live display or plain lines; auto: live on a terminal."""
    every: Positive = 1
    """Steps between plain lines (`metrics.jsonl` has every step)."""
    samples: Count = 2
    """Completions per step, written to `samples.jsonl` and shown; 0: none."""
    timeline: Flag = True
    """Write `timeline.json`: who did what when, for Perfetto or chrome://tracing."""
    tensorboard: Flag = True
    """Write TensorBoard events to `RUN/tensorboard`."""
    wandb: Name | None = None
    """wandb project that gets every row (extra `wandb`; WANDB_MODE=offline keeps it local). null:
    none."""
    mlflow: Name | None = None
    """mlflow experiment that gets every row (extra `mlflow`), on the server that
    MLFLOW_TRACKING_URI names. null: none."""


class Config(Section):
    """A run: what is trained, on what, where and how."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run and, without `run_dir`, of its folder under `runs/`."""
    run_dir: Name | None = None
    """Folder for all that the run leaves behind. null: `runs/NAME`."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on with the run that `run_dir` holds, if any. never: always begin anew. must: refuse
    to begin anew."""
    seed: Count = 0
    """Seed of the shuffle, of every sample and of every coin."""
    mesh: str = "actor+rollout=1"
    """Placement of the roles, as in `actor=2,rollout=2,teacher=4`; `+` shares devices."""
    algorithm: Literal["gkd", "sft"] = "gkd"
    """gkd: distil a teacher on the student's own samples. sft: learn the data's completions, no
    teacher."""
    schedule: Literal["serial", "one_step_off", "two_step_off"] = "serial"
    """How many batches (0, 1, 2) the weights that generate may lag behind those that train."""
    steps: Positive = 200
    """Batches to train on."""
    batch_size: Positive = 32
    """Prompts per batch."""
    group_size: Positive = 4
    """Completions per prompt."""
    max_prompt_tokens: Positive = 512
    """Longest prompt, in tokens; longer ones are left out or cut (`data.long_prompts`), and
    counted."""
    max_new_tokens: Positive = 512
    """Longest completion, in tokens."""
    compile_cache: Name | None = "~/.cache/jaxrl/compile"
    """Folder of compiled programs kept between runs, unless JAX_COMPILATION_CACHE_DIR names one.
    null: none kept."""
    student: StudentConfig
    teacher: TeacherConfig = TeacherConfig()
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    distill: DistillConfig = DistillConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def run_path(self) -> Path:
        """Folder of the run."""
        return Path("runs") / self.name if self.run_dir is None else Path(self.run_dir)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.algorithm == "gkd":
            self._check_gkd()
        elif self.teacher.model is not None:
            raise ValueError(
                f"algorithm={self.algorithm} has no teacher: set teacher.model=null"
                f" (got {self.teacher.model})"
            )
        sequences = self.batch_size * self.group_size
        if self.actor.minibatches > sequences:
            raise ValueError(
                f"actor.minibatches={self.actor.minibatches} exceeds the {sequences} sequences of a"
                f" batch (batch_size={self.batch_size} x group_size={self.group_size})"
            )
        return self

    def _check_gkd(self) -> None:
        if self.teacher.model is None:
            raise ValueError(
                "algorithm=gkd needs a teacher: set teacher.model, or algorithm=sft to train"
                " without one"
            )
        if self.sampling.temperature == 0 and self.group_size > 1:
            raise ValueError(
                f"group_size={self.group_size} greedy completions of a prompt are all the same:"
                " set sampling.temperature above 0, or group_size=1"
            )
        untruncated = not self.sampling.truncated and self.sampling.temperature == 1
        if self.distill.signal == "sampled" and not untruncated:
            raise ValueError(
                "distill.signal=sampled is unbiased only for untruncated samples at temperature 1:"
                " set sampling.temperature=1 sampling.top_k=0 sampling.top_p=1 sampling.min_p=0"
            )

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Self:
        """The run of a YAML file (None: the built-in quickstart), ``key=value`` overrides applied.

        Raises ``UserError``, of a few lines at most, for anything that the user can mend.
        """
        if isinstance(overrides, str):
            raise UserError(f"overrides is a list of key=value strings, got {overrides!r}")
        source = QUICKSTART if path is None else Path(path).expanduser()
        mapping = yaml_text.apply_overrides(
            yaml_text.read_mapping(source), overrides, tuple(config_keys.mappings(cls))
        )
        return cls.parse(mapping)

    @classmethod
    def parse(cls, mapping: dict[str, Any]) -> Self:
        """The config that nested dicts describe; raises ``UserError`` naming the key."""
        mapping = config_keys.fill_sections(cls, mapping)
        config_keys.refuse_unknown(cls, mapping)
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            raise UserError(config_keys.explain(error)) from None

    def dump(self) -> str:
        """YAML of every key with its value; ``load`` reads it back to an equal config."""
        return yaml_text.dump_mapping(self.model_dump(mode="json"))
