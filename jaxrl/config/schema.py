"""Every key of a run: one frozen class per component, a docstring under each field.

The class defaults suit models of one to several billion parameters on accelerators; the built-in
quickstart (``jaxrl/assets/quickstart.yaml``) sets its own. ``student.model``, ``data.train`` and,
where the algorithm learns from a teacher, ``teacher.model`` have no default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
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

from jaxrl.config import keys as config_keys
from jaxrl.config import paths as config_paths
from jaxrl.config import template, yaml_text
from jaxrl.config.base import Base, Overrides, base_of
from jaxrl.errors import UserError
from jaxrl.losses import algorithm_table
from jaxrl.losses.algorithm_table import AlgorithmSpec, MixtureKind, find_algorithm
from jaxrl.process.plugin import anchored

CONFIG_FILE = "config.yaml"
"""Name of the config in a run directory."""
LARGEST = 2**31 - 1
"""The largest int32, the type of counters on devices; no key needs more."""
ROLES = ("actor", "rollout", "teacher", "reference", "reward", "grouper")
POLICY = "policy"
"""The `teacher.model` of self-distillation."""

Positive = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
PositiveNumber = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1)]
DType = Literal["float32", "bfloat16"]
Quantisation = Literal["int8", "nf4"]
Api = Literal["jaxrl", "openai"]
NAMED = re.compile(r"[A-Za-z0-9_.-]+")
"""Names of the user's choice that become parts of metric names."""
Rule = tuple[bool, str]
"""(whether the rule is broken, the error message for that case)."""
OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
Words = Annotated[tuple[str, ...], OneOrMore]
"""A list of strings; a single string stands for a list of one."""


class Section(BaseModel):
    """A frozen group of keys; an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        coerce_numbers_to_str=True,
    )

    def _rules(self) -> Iterator[Rule]:
        """Conditions on several keys of a section; the first one that is broken is the error."""
        return iter(())

    @model_validator(mode="before")
    @classmethod
    def _check_given(cls, given: object) -> object:
        return {} if given is None else given  # a section left empty in a file

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for broken, message in self._rules():
            if broken:
                raise ValueError(message)
        return self


ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What stands for all projections of a block, under whatever names a family has them."""
Projections = Annotated[
    tuple[Name, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: ALL_LINEAR if value == "all-linear" else value),
    OneOrMore,
    AfterValidator(lambda value: tuple(dict.fromkeys(value))),
]


class LoraConfig(Section):
    """Adapters of low rank (LoRA, arXiv 2106.09685), which are trained in place of the model's
    weights: x W becomes x W + (alpha / rank) (x A) B, where A [in, rank] is random at the start and
    B [rank, out] zero."""

    rank: Positive | None = None
    """Rank of all adapters; 8 to 64 are usual. null: no adapters, all weights are trained."""
    alpha: PositiveNumber | None = None
    """Scale of what an adapter adds, times the rank. null: twice the rank."""
    targets: Projections = ALL_LINEAR
    """The projections that have adapters: `all-linear`, or a list of `q_proj`, `k_proj`, `v_proj`,
    `o_proj`, `gate_proj`, `up_proj` and `down_proj`; of Phi-3 `qkv_proj`, `o_proj`, `gate_up_proj`
    and `down_proj`; of Qwen3.5 also `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` and
    `out_proj`. Of Qwen3-MoE `gate_proj`, `up_proj` and `down_proj` are those of each expert, of
    gpt-oss only attention has any."""
    init: Literal["default", "gaussian"] = "default"
    """A at the start. default: uniform in +-1 / sqrt(in). gaussian: normal with the standard
    deviation 1 / rank."""

    def _rules(self) -> Iterator[Rule]:
        for key, field in type(self).model_fields.items():
            given = getattr(self, key)
            yield (
                self.rank is None and given != field.default,
                f"{key}={given} is about adapters, and rank=null has none: set rank, or leave {key}"
                " out",
            )


class StudentConfig(Section):
    """The model that learns."""

    model: Name
    """Weights to start from: a Hugging Face folder, a folder of adapters (PEFT), a GGUF file, a run
    directory, `package:NAME`, `builtin:student`, or the id of a model on the hub, as in
    `Qwen/Qwen3-1.7B` or `Qwen/Qwen3-1.7B@REVISION`."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Adapters."""
    base_dtype: Literal["float32", "bfloat16", "int8", "nf4"] | None = None
    """With `student.lora.rank`: dtype in which the actor holds the weights under the adapters.
    null: `actor.dtype`. `int8` or `nf4` (QLoRA, arXiv 2305.14314): all roles that have the policy's
    weights hold the kernels of its layers in 8 or 4 bits, and the rest in their own dtype."""
    router_aux_loss_coef: NonNegative = 0.0
    """Of a mixture of experts: weight of the loss that balances the experts, which is added to the
    loss (Switch Transformer, arXiv 2101.03961, eq. 4-6, over the tokens of a micro-batch, those of
    prompts too). It is a product of two means over the micro-batch: how a minibatch is cut into
    micro-batches changes it."""

    def _rules(self) -> Iterator[Rule]:
        yield (
            self.lora.rank is None and self.base_dtype is not None,
            f"base_dtype={self.base_dtype} is for the weights under adapters: set it to null, or"
            " set lora.rank (the dtype of trained weights is actor.param_dtype)",
        )


class ParallelConfig(Section):
    """Sizes of the role's mesh axes; their product is the number of its devices. One of them may be
    -1: all devices that the others leave."""

    data: int | None = Field(default=None, strict=True)
    """Data parallelism: copies of the weights, each with its share of the sequences. null: the plan
    decides."""
    fsdp: int | None = Field(default=None, strict=True)
    """Fully sharded data parallelism: shards of weights and of sequences; each layer's weights are
    gathered when it runs. null: the plan decides."""
    tensor: int | None = Field(default=None, strict=True)
    """Tensor parallelism: shards of each layer's heads, hidden units and vocabulary. null: the plan
    decides."""
    expert: int | None = Field(default=None, strict=True)
    """Expert parallelism, for mixtures of experts: shards of the experts and of the sequences. The
    other weights are copied to each device, unless fsdp divides them. null: 1."""

    def _rules(self) -> Iterator[Rule]:
        sizes = {name: size for name, size in self if size is not None}
        for name, size in sizes.items():
            yield (
                size < 1 and size != -1,
                f"{name}={size}: an axis is at least 1, or -1 for the rest",
            )
        rest = [name for name, size in sizes.items() if size == -1]
        yield len(rest) > 1, f"{' and '.join(rest)} are both -1: one axis may take the rest"


class LongParallelConfig(ParallelConfig):
    """`ParallelConfig` of a role that computes whole sequences at once."""

    context: int | None = Field(default=None, strict=True)
    """Context parallelism, for long sequences: shards of the tokens of each sequence, and of the
    weights as with fsdp. Attention is computed on whole sequences, divided by heads, so that tensor
    times context must divide the number of heads. null: 1."""


class RoleConfig(Section):
    """Keys that every role has: devices, mesh and compute dtype."""

    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Mesh axes of the role."""
    devices: str | None = None
    """Slice `start:stop` of the pool's devices that this role uses, as in `1:2`. null: all of
    them."""
    dtype: DType | None = None
    """Dtype of activations and of the weights in matrix products. null: bfloat16 on accelerators;
    float32 on a CPU (which computes bfloat16 in float32 from copies of the weights) and on GPUs
    before compute capability 8.0 (a T4 has no tensor cores for bfloat16)."""

    @property
    def compute_dtype(self) -> DType:
        """`dtype`, which `Config.with_dtypes` has set for the devices at hand."""
        assert self.dtype is not None, "Config.with_dtypes fills it"
        return self.dtype

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


class FrozenConfig(RoleConfig):
    """A role whose model never trains."""

    lazy: Flag = False
    """Load the role's model at its first use instead of at the start of the run."""


class TeacherConfig(FrozenConfig):
    """The model to learn from; it never trains."""

    parallel: LongParallelConfig = Field(default_factory=LongParallelConfig)
    """Mesh axes of the role."""
    model: Name | None = None
    """The teacher's weights, in any form that `student.model` takes, or `builtin:teacher`.
    `policy`: the policy itself (self-distillation; `teacher.prompt` then gives it another prompt, a
    folder of this name is `./policy`). null: no teacher (algorithm sft), or the one at
    `teacher.address`, or `teacher.cache` alone."""
    ema: Fraction = 0.0
    """With `teacher.model=policy`: decay of the moving average of the policy's weights, which
    teaches: w' = ema w' + (1 - ema) w after each optimizer update. 0: the policy after the batch
    before. 1: the policy before training."""
    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Template of the prompt that the teacher reads in place of the student's, as in `{prompt}
    Hint: {answer}`. It replaces the text of the row, in a chat that of its last message. Names in
    braces: `prompt` (what is replaced), `answer`, `completion`, any other field of the row, and
    `messages` (the whole chat as text, which the template then replaces); where rewards are learnt
    from also `attempt` (the completion that is scored) and `feedback` (what the reward functions
    say of it). null: the student's prompt."""
    tokenizer: Literal["student", "own"] = "student"
    """student: the teacher's tokens must be the student's. own: they may be others. The teacher
    reads the text of prompts and completions by its own tokenizer and chat template, and its tokens
    are aligned with the student's by the bytes that they stand for."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt of the teacher where `teacher.prompt` or `teacher.tokenizer=own` is set, in
    its tokens; rows with a longer one are dropped, and counted. null: `max_prompt_tokens`, with a
    tokenizer of its own twice that."""
    max_new_tokens: Positive | None = None
    """With `teacher.tokenizer=own`: longest completion in the teacher's tokens; the student does
    not learn from what follows. null: twice `max_new_tokens`."""
    num_microbatches: Positive = 1
    """Number of micro-batches in which the teacher scores a batch; a larger number needs less
    activation memory."""
    address: Name | None = None
    """A teacher served outside the run, in place of `teacher.model`: `host:port` of `python -m
    jaxrl.serve_teacher`, `https://host:port` where it has a certificate, `host:port/NAME` for one
    of several; or the URL of a completions server, as in `http://host:8000/v1`. The environment
    variable JAXRL_TEACHER_TOKEN holds the access token of that server, if it needs one."""
    api: Api = "jaxrl"
    """Protocol at `teacher.address`. jaxrl: `serve_teacher`. openai: a completions server that
    returns the log-probs of prompts (for `distill.signal` topk and sampled)."""
    api_model: Name | None = None
    """Name of the model on the completions server at `teacher.address`. null: the only one that it
    serves."""
    service_threads: Positive = 1
    """Number of score requests sent to each served teacher in parallel."""
    ca_file: Name | None = None
    """PEM file of the certificates that a served teacher's must be signed by (or be one of), where
    its address begins with `https://`. null: those that the system trusts."""
    cache: Name | None = None
    """Folder of scores that `python -m jaxrl.score` wrote, for batches that hold the data's
    completions or (`distill.seq_kd`) the teacher's samples. By itself: training without a teacher,
    where every batch is such a batch. Beside `teacher.model`, which then scores the student's
    samples only."""

    def _rules(self) -> Iterator[Rule]:
        yield (
            self.cache is not None and self.address is not None,
            f"cache={self.cache} and address={self.address}: a cache stands alone, or beside model;"
            " set one of them to null",
        )
        yield (
            self.cache is not None and self.prompt is not None,
            f"cache={self.cache} has scores of the student's prompts: set prompt=null, or"
            " cache=null",
        )
        yield (
            self.cache is not None and self.model == POLICY,
            f"cache={self.cache} has the scores of another model: set model or cache to null",
        )
        yield (
            self.ema > 0 and self.model != POLICY,
            f"ema={self.ema:g} averages the weights of the policy: set model={POLICY}, or ema=0",
        )
        own = self.tokenizer == "own"
        yield (
            self.max_prompt_tokens is not None and self.prompt is None and not own,
            f"max_prompt_tokens={self.max_prompt_tokens} limits the prompts that teacher.prompt"
            " makes: set prompt, or max_prompt_tokens=null",
        )
        yield (
            self.max_new_tokens is not None and not own,
            f"max_new_tokens={self.max_new_tokens} limits completions in the tokens of another"
            " tokenizer: set tokenizer=own, or max_new_tokens=null",
        )
        yield (
            own and (self.model in (None, POLICY) or self.cache is not None),
            f"tokenizer=own is for a teacher of the run, with model set to another model than"
            f" {POLICY} and without cache: set tokenizer=student, or model",
        )
        yield (
            self.address is not None and self.prompt is not None,
            f"prompt needs a teacher of the run: set model, or prompt=null (the teacher at"
            f" {self.address} reads the student's prompts)",
        )
        yield from _rules_of_server(self)

    @field_validator("prompt")
    @classmethod
    def _check_template(cls, value: str | None) -> str | None:
        if value is not None:
            template.names(value)
        return value


class NamedTeacherConfig(Section):
    """One of several teachers."""

    model: Name | None = None
    """Its weights, in any form that `student.model` takes, or `builtin:teacher`."""
    address: Name | None = None
    """In place of `model`: where it is served, as of `teacher.address`; one of several teachers of
    `serve_teacher` is at `host:port/name`."""
    api: Api = "jaxrl"
    """As of `teacher.api`."""
    api_model: Name | None = None
    """As of `teacher.api_model`."""
    weight: PositiveNumber | None = None
    """Its share in the mixture of all teachers, relative to theirs; null: 1."""

    def _rules(self) -> Iterator[Rule]:
        yield self.model is None and self.address is None, "set model, or address"
        yield from _rules_of_server(self)


def _rules_of_server(one: TeacherConfig | NamedTeacherConfig) -> Iterator[Rule]:
    """Of the keys that say where a teacher is served."""
    if one.address is None:
        yield one.api != "jaxrl", f"api={one.api} needs a server: set address"
        yield one.api_model is not None, f"api_model={one.api_model} needs a server: set address"
        return
    yield (
        one.model is not None,
        f"model={one.model} and address={one.address} are two teachers: set one to null",
    )
    yield (
        one.api == "jaxrl" and one.api_model is not None,
        f"api_model={one.api_model} is for api=openai: set it to null",
    )
    url = one.address if "://" in one.address else f"http://{one.address}"
    form = "http://host:port/v1" if one.api == "openai" else "host:port, or https://host:port"
    yield (
        not _is_server(url) or (one.api == "openai" and url != one.address),
        f"address={one.address} is no server's address: write {form}",
    )


def _named_teachers(value: object) -> object:
    """Checks the names of teachers; a string stands for a model."""
    if not isinstance(value, dict):
        return value
    for name in value:
        if not isinstance(name, str) or NAMED.fullmatch(name) is None:
            raise ValueError(f"the name {name!r} may have letters, digits, `_`, `.` and `-` only")
    return {name: {"model": t} if isinstance(t, str) else t for name, t in value.items()}


def _is_server(url: str) -> bool:
    """Whether this is http(s)://host:port, perhaps with a path, and nothing else."""
    if not url.isascii() or not url.isprintable() or " " in url:
        return False
    try:
        place = urlsplit(url)
        given = place.port is not None or "/v1" in place.path
    except ValueError:
        return False
    plain = not (place.query or place.fragment or place.username or place.password)
    return place.scheme in ("http", "https") and bool(place.hostname) and given and plain


class ActorConfig(RoleConfig):
    """The role that trains the policy."""

    parallel: LongParallelConfig = Field(default_factory=LongParallelConfig)
    """Mesh axes of the role."""
    param_dtype: DType = "float32"
    """Dtype of the weights that the optimizer updates. float32: master weights. bfloat16: half the
    memory, with stochastic rounding, so that small updates are not lost on average."""
    moment_dtype: DType = "float32"
    """Dtype of gradients and moments inside the optimizer."""
    micro_batch_tokens: Positive | None = 16384
    """Most tokens per device in one micro-batch, the part of a minibatch whose gradient is computed
    at once: it has as many rows as fit if all are as long as the longest one of the batch. null:
    the whole minibatch."""
    minibatches: Positive | None = None
    """Optimizer updates per pass over a batch. null: the number in the algorithm's paper
    (docs/reinforcement-learning.md), or the next smaller one that divides `batch_size`."""
    epochs_per_batch: Positive = 1
    """Passes over each batch."""
    remat: Literal["none", "dots", "full"] = "full"
    """Activations that the backward pass recomputes to save memory. none: nothing. dots: all but
    matrix products. full: all but each layer's input."""
    max_nonfinite: Positive = 5
    """End the run after this many updates in a row were skipped because the gradient was NaN or
    infinite."""


class RolloutConfig(RoleConfig):
    """The role that samples."""

    layout: Literal["unstacked", "stacked"] = "unstacked"
    """Layout of the rollout's weights. unstacked: one array per layer; decodes fastest, but needs a
    copy. stacked: one array for all layers, as in training; if dtype and mesh axes are the actor's,
    the rollout uses the actor's arrays without a copy. Weights sharded over fsdp are then gathered
    one layer at a time."""
    slots: Positive | None = None
    """Slots: sequences decoded at once over the whole mesh. A slot whose sequence has ended takes
    the next one. null: one slot for each sequence of the batch."""
    launch_tokens: Positive = 32
    """Decode steps per device launch; free slots are refilled between launches."""
    merge: Flag = False
    """With `student.lora.rank`: sample with a copy of the weights to which the adapters are added,
    made at each weight sync. It decodes as fast as without adapters, takes the memory of the copy,
    and rounds the sum to `rollout.dtype`. false: the adapters are applied beside the weights."""


def _named_sets(value: object) -> object:
    """Checks the names of held-out sets, and that each has a source."""
    if not isinstance(value, dict):
        return value
    if not value:
        raise ValueError("the mapping should not be empty")
    for name, sources in value.items():
        if not isinstance(name, str) or NAMED.fullmatch(name) is None:
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
    """Prompts, and their completions and answers where there are any."""

    train: Annotated[Words, Field(min_length=1)]
    """One source or a list of them: a `.jsonl` or `.parquet` file; a pattern like `data/*.parquet`;
    a folder of such files, or one that `datasets` saved (`:split=NAME` chooses a split); a data set
    on the hub, as in `hf:openai/gsm8k:main:train` (`hf:ORG/NAME@REVISION:CONFIG:SPLIT`);
    `arithmetic`, `reasoning_gym/NAME` (`:key=value,...` adds options)."""
    weights: tuple[PositiveNumber, ...] | None = None
    """Share of the prompts that come from each source of `data.train`, one number per source; each
    source then has its own epochs. null: all rows together, each once per epoch."""
    eval: EvalSources | None = None
    """Held-out sources in the form of `data.train`, or several named sets, as in `{easy: a.jsonl,
    hard: [b.jsonl, c.jsonl]}`; a procedural source never repeats a prompt of its training split.
    null: no evaluation."""
    prompt_key: str = "prompt"
    """Field of a row with the prompt as text."""
    messages_key: str = "messages"
    """Field of a row with the prompt as chat messages, which the tokenizer's chat template
    renders."""
    completion_key: str = "completion"
    """Field of a row with a completion to learn from (sft and off-policy batches)."""
    tools_key: str | None = None
    """Field of a row with the JSON schemas of tools, a list or its text, which the chat template
    shows. null: none."""
    completion_turns: Literal["last", "all"] = "last"
    """What is learned of a chat that ends with a turn of the assistant (sft and off-policy
    batches). last: that turn; all before it is the prompt. all: every turn of the assistant; the
    prompt ends where the first one begins, and what others say after it is read, not learned."""
    answer_key: str = "answer"
    """Field of a row with the reference answer that a verifier compares with."""
    teacher_key: str | None = None
    """Field of a row that names one of `teachers`, from which the row's completions learn; with
    `distill.mixture` it may also hold the weights of several, as in `{math: 0.7, code: 0.3}`. null:
    every row learns from the mixture of all."""
    chat: Literal["auto", "raw"] = "auto"
    """auto: a text prompt becomes a user message where the tokenizer has a chat template. raw: text
    prompts stay as they are."""
    system_prompt: str | None = None
    """System message put before every chat prompt that has none. null: none."""
    few_shot: Annotated[Words, Field(min_length=1)] | None = None
    """Source of solved examples put before every prompt, those of `data.eval` too: as chat turns,
    or before a text prompt as `PROMPTCOMPLETION` with a blank line after each. null: none."""
    few_shot_rows: Positive = 4
    """How many rows of `data.few_shot` are used, from its first one."""
    long_prompts: Literal["drop", "cut"] = "drop"
    """What happens to prompts longer than `max_prompt_tokens`; both are counted. drop: they are
    left out. cut: the row's text (in a chat its longest user message) loses its beginning; prompts
    of procedural tasks are left out all the same."""
    shuffle: Flag = True
    """Shuffle the data differently in each epoch, by `seed`."""
    verifier: str = "auto"
    """Name of the verifier that judges completions in evaluations (docs/data.md lists them). auto:
    the one that the source defines."""

    def _rules(self) -> Iterator[Rule]:
        given, sources = len(self.weights or ()), len(self.train)
        yield (
            self.weights is not None and given != sources,
            f"weights has {given} numbers for the {sources} sources of train: give one for each,"
            " or null",
        )


class SamplingConfig(Section):
    """How training completions are sampled."""

    temperature: NonNegative = 1.0
    """Temperature that divides the logits; 0 is greedy."""
    top_k: Count = 0
    """Sample from the k most probable tokens only; 0: from all."""
    top_p: Annotated[PositiveNumber, Field(le=1)] = 1.0
    """Sample from the fewest most probable tokens that together reach this probability; 1: from
    all."""
    min_p: Decay = 0.0
    """Sample only tokens that are at least this fraction as probable as the most probable one; 0:
    from all."""
    stop: Words = ()
    """Strings that end a completion, besides the model's end-of-sequence tokens."""

    @property
    def truncated(self) -> bool:
        """True when some token of positive probability can never be sampled."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class DistillConfig(Section):
    """The divergence from a teacher (GKD, arXiv 2306.13649), by itself or beside rewards
    (`distill_weight`)."""

    signal: Literal["hidden", "topk", "student_topk", "sampled"] = "hidden"
    """What the teacher sends for each token. hidden: its last hidden states (exact divergence).
    topk, student_topk: log-probs of its own or the student's top-k tokens, and of all others
    together (a lower bound). sampled: the log-prob of the sampled token (unbiased for reverse
    KL)."""
    jsd_beta: Fraction = 0.5
    """Generalised JSD between teacher and student: 0 is KL(teacher||student), 1 is
    KL(student||teacher); the scale of the loss is discontinuous at both ends."""
    on_policy_fraction: Fraction = 1.0
    """Probability that a batch holds the student's samples; other batches hold the data's
    completions, or the teacher's samples (`distill.seq_kd`)."""
    seq_kd: Flag = False
    """Sequence-level distillation: off-policy batches hold the teacher's samples in place of the
    data's completions."""
    distill_temperature: PositiveNumber = 1.0
    """Temperature T that divides both models' logits inside the divergence. The loss is not
    multiplied by T^2."""
    top_k: Annotated[Positive, Field(le=1024)] = 64
    """Tokens per position that the signals topk and student_topk send; from about 1000 on, signal
    hidden is smaller and exact."""
    ratio_cap: PositiveNumber = 2.0
    """With `distill.signal=sampled` or `teacher.tokenizer=own`: cap on the importance ratio between
    the learner and the policy that sampled."""
    mixture: MixtureKind | None = None
    """How several `teachers` are one. arithmetic: the mixture of their distributions, sum_k w_k
    P_k. geometric: proportional to prod_k P_k ** w_k. null: arithmetic or, with `data.teacher_key`,
    none: each row learns from one teacher."""
    entropy_aware: Flag = False
    """Add KL(teacher||student) at tokens where the teacher is uncertain (arXiv 2603.07079): to the
    divergence or, where `distill_weight` is 0, to the policy loss with `policy.opd_coef`."""
    entropy_threshold: NonNegative = 0.8
    """Teacher entropy, in nats, from which a token counts in the term of
    `distill.entropy_aware`."""
    entropy_top_k: Positive = 16
    """How many of the teacher's most probable tokens the term of `distill.entropy_aware` reads."""
    chunk_tokens: Positive = 512
    """Tokens whose logits exist at once, in every loss (also with sft); a smaller number needs less
    memory."""
    lean: Flag = False
    """Recompute the loss's logits in the backward pass: less memory, more time."""

    def _rules(self) -> Iterator[Rule]:
        yield (
            self.seq_kd and self.on_policy_fraction == 1,
            "seq_kd=true with on_policy_fraction=1 leaves no batch to the teacher's samples:"
            " set on_policy_fraction below 1",
        )
        yield (
            self.signal == "student_topk" and self.on_policy_fraction < 1,
            "signal=student_topk asks about the samples of the policy that made them: it needs"
            f" on_policy_fraction=1, got {self.on_policy_fraction:g}",
        )
        yield (
            self.entropy_aware and self.signal == "topk" and self.entropy_top_k > self.top_k,
            f"entropy_top_k={self.entropy_top_k} exceeds top_k={self.top_k},"
            " all that signal topk sends",
        )
        for key in ("jsd_beta", "on_policy_fraction", "distill_temperature"):
            known = key == "on_policy_fraction" and self.seq_kd  # as the teacher's samples have it
            yield (
                self.signal == "sampled" and getattr(self, key) != 1 and not known,
                "signal=sampled estimates KL(student||teacher) on samples whose log-probs are"
                f" known: it needs {key}=1, got {getattr(self, key):g}"
                + (" (or seq_kd=true)" if key == "on_policy_fraction" else ""),
            )


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule (optax)."""

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon"] = "adamw"
    """The optax optimizer."""
    learning_rate: NonNegative = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after the warm-up."""
    warmup_steps: Count = 10
    """Optimizer updates over which the learning rate rises linearly to its peak."""
    min_lr_ratio: Fraction = 0.0
    """With the schedules linear and cosine: the last learning rate, as a fraction of the peak."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (not with adam or sgd); embeddings, norms and biases are not
    decayed."""
    b1: Decay = 0.9
    """Decay of the first moment (sgd: momentum)."""
    b2: Decay = 0.95
    """Decay of the second moment (adamw, adam, lion, muon)."""
    eps: PositiveNumber = 1e-8
    """Added to the denominator of an update (adamw, adam, muon)."""
    clip_norm: PositiveNumber | None = 1.0
    """Gradients whose global norm exceeds this are scaled down to it. null: never."""

    def _rules(self) -> Iterator[Rule]:
        yield (
            self.weight_decay > 0 and self.name in ("adam", "sgd"),
            f"weight_decay={self.weight_decay:g} has no effect with name={self.name}: set it to 0,"
            " or name=adamw",
        )


Corrections = Annotated[
    tuple[
        Literal[
            "none", "tis_token", "tis_sequence", "icepop", "sequence_mask", "sequence_geo_mask"
        ],
        ...,
    ],
    OneOrMore,
]
"""Names of `losses.correction.CORRECTIONS`; a single string stands for a list of one."""


class PolicyConfig(Section):
    """The policy loss of algorithms that learn from rewards. null is the algorithm's own value,
    which docs/reinforcement-learning.md lists, unless the key says otherwise."""

    advantages: Literal["group", "similarity"] = "group"
    """Completions with which a reward is compared. group: all of the same prompt. similarity: those
    of the same prompt with a similar text (section `grouper`)."""
    scale_by_std: Flag | None = None
    """Divide advantages by the standard deviation of the rewards that they are compared with (for
    similarity groups `grouper.std_scope` chooses which). null: the algorithm's own."""
    ratio: Literal["token", "sequence", "sequence_token"] | None = None
    """Importance ratio of the policy loss. token: of each token. sequence: of the whole completion,
    as a geometric mean (GSPO). sequence_token: the completion's value with the token's gradient
    (GSPO-token). null: the algorithm's own."""
    aggregation: Literal["sequence_mean_token_mean", "token_mean", "sum_over_constant"] | None = (
        None
    )
    """How the losses of tokens are aggregated. sequence_mean_token_mean: mean over completions of
    their token means. token_mean: mean over all tokens. sum_over_constant: mean over completions of
    their token sums / `policy.constant`. null: the algorithm's own."""
    constant: PositiveNumber | None = None
    """Tokens by which aggregation sum_over_constant divides. null: `max_new_tokens` for dr_grpo, 1
    for luspo."""
    clip_low: NonNegative | None = None
    """Lower clip: in algorithms that clip, the importance ratio is kept above 1 - clip_low. null:
    the algorithm's own."""
    clip_high: NonNegative | None = None
    """Upper clip: in algorithms that clip, the importance ratio is kept below 1 + clip_high. null:
    the algorithm's own."""
    clip_dual: PositiveNumber | None = None
    """Dual clip, in algorithms that clip: at negative advantages the importance ratio counts as no
    more than this (above 1; 3 is usual). null: it is not bounded there."""
    ratio_cap: PositiveNumber | None = None
    """CISPO: upper bound of the importance ratio that weights a token's gradient. null: the
    algorithm's own."""
    tau_positive: PositiveNumber | None = None
    """SAPO: steepness of the soft clip where the advantage is positive. null: the algorithm's
    own."""
    tau_negative: PositiveNumber | None = None
    """SAPO: steepness of the soft clip where the advantage is negative. null: the algorithm's
    own."""
    clip_log: PositiveNumber | None = None
    """GMPO: bound of each token's log-ratio, in nats. null: the algorithm's own."""
    kl_coef: NonNegative = 0.0
    """Weight of KL(policy||reference) in the loss; above 0 the role `reference` is needed. Tokens
    are aggregated as in the policy loss: with luspo a completion's KL is the sum over its tokens,
    with gspo their mean."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimator of the KL that `policy.kl_coef` weighs. On-policy, the gradient of k2 is that of
    KL(policy||reference), the gradient of k3 that of KL(reference||policy)."""
    reward_kl_coef: NonNegative = 0.0
    """KL penalty in the reward: this, times the nats of KL(policy||reference) of a whole
    completion, is subtracted from its reward."""
    reward_kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL that `policy.reward_kl_coef` weighs."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus: above 0 the loss makes the policy's entropy larger."""
    opd_coef: NonNegative = 0.0
    """On-policy distillation: this, times the nats by which the policy's log-prob of a sampled
    token exceeds the teacher's, is subtracted from the token's advantage; needs a teacher and
    `distill.signal=sampled`."""
    dynamic_sampling: Literal["off", "drop", "refill"] | None = None
    """What happens to prompts whose completions all have the same task reward (functions and reward
    model, before penalties), or no reward. off: they stay. drop: the policy loss leaves them out.
    refill: others are sampled in their place (needs `schedule=serial`). null: off, except for dapo:
    refill with `schedule=serial`, else drop."""
    max_refills: Positive = 4
    """With `policy.dynamic_sampling=refill`: how many times more prompts are sampled for one
    batch."""
    correction: Corrections | None = None
    """Off-policy correction: weights of tokens for the mismatch between the policy that sampled and
    the learner at the start of the batch. One name, or a list of one with sequence_geo_mask. null:
    tis_token where the weights that sample lag (`schedule`), else none. The mismatch is reported in
    any case (`policy/mismatch_*`)."""
    correction_cap: PositiveNumber | None = None
    """Truncated importance sampling (tis_token, tis_sequence): largest weight (default 2).
    sequence_mask: drop completions whose ratio exceeds this (default 2)."""
    correction_low: NonNegative | None = None
    """IcePop: drop tokens whose ratio is below this (default 0.5)."""
    correction_high: PositiveNumber | None = None
    """IcePop: drop tokens whose ratio exceeds this (default 5)."""
    correction_threshold: NonNegative | None = None
    """sequence_geo_mask: drop completions whose mean log-ratio exceeds this on either side, in nats
    per token (default 0.1)."""
    bypass: Flag = False
    """Use the policy that sampled as pi_old of the importance ratio, instead of the learner at the
    start of the batch: the clip acts on the whole ratio, and no off-policy correction is
    applied."""
    router_replay: Flag = False
    """Of a mixture of experts: record the experts that the sampler chose for each token of prompts
    and completions, in each layer, and let the learner's tokens pass the same ones. Rounding then
    cannot send a token elsewhere; the weights of its experts are the learner's own."""

    def _rules(self) -> Iterator[Rule]:
        yield (
            self.bypass and self.correction not in (None, ("none",)),
            f"bypass=true with correction={','.join(self.correction or ())} would correct twice:"
            " set correction=none, or bypass=false",
        )


class ReferenceConfig(FrozenConfig):
    """A frozen copy of the policy before training, for `policy.kl_coef` and
    `policy.reward_kl_coef`."""

    parallel: LongParallelConfig = Field(default_factory=LongParallelConfig)
    """Mesh axes of the role."""
    num_microbatches: Positive = 1
    """Number of micro-batches in which the reference scores a batch; a larger number needs less
    activation memory."""


class GrouperConfig(FrozenConfig):
    """Clusters of similar completions of a prompt, for `policy.advantages=similarity`."""

    model: Name | None = None
    """Text encoder that embeds the completions: a Hugging Face or sentence-transformers folder
    (BERT, MiniLM, XLM-RoBERTa, bge-m3), `package:NAME`, or the id of a model on the hub. null:
    none."""
    lazy: Flag = True
    """Load the encoder at its first use instead of at the start of the run."""
    batch_tokens: Positive = 4096
    """Tokens that one device embeds at once, padding included."""
    method: Literal["agglomerative_silhouette", "connected_components", "leader"] = (
        "agglomerative_silhouette"
    )
    """How completions of a prompt are clustered. agglomerative_silhouette: average linkage, with
    the number of clusters of the best silhouette. connected_components: joined by any chain of
    similarities of at least tau (DARLING, arXiv 2509.02534). leader: with the first earlier leader
    at least tau similar, else a new cluster (GiGPO, arXiv 2505.10978)."""
    use: Literal["subgroup", "blend", "size_weight", "distinct", "smi", "mmr"] = "subgroup"
    """What the clusters change. subgroup: a reward is compared within its cluster, so differences
    between clusters give no gradient. blend: alpha of that advantage and 1 - alpha of the prompt's
    (Stratified GRPO, arXiv 2510.06214). size_weight: |cluster|^-alpha times the prompt's advantage
    (arXiv 2601.08763). The others change the reward before it is compared within the prompt:
    distinct multiplies it by the fraction of the prompt's other completions that are in other
    clusters, at least 0.1 (DARLING); smi divides it by the sum of its similarities to all, itself
    included (DRA-GRPO, arXiv 2505.09655); mmr takes the score at which maximal marginal relevance
    picks the completion (arXiv 2601.09085)."""
    std_scope: Literal["cluster", "prompt", "none"] = "cluster"
    """Standard deviation that divides the advantages of `grouper.use` subgroup and blend: of the
    cluster (the advantages of two unequal rewards are then always +-0.707), of the prompt, or none.
    If `policy.scale_by_std` or the algorithm (such as dr_grpo) does not divide, nothing is divided
    here either."""
    alpha: NonNegative = 0.5
    """use=blend: weight of the cluster's advantage against the prompt's (0 to 1). use=size_weight:
    exponent of the cluster's size."""
    tau: Number = 0.95
    """Cosine similarity from which the methods connected_components and leader join two
    completions."""
    mmr_lambda: Fraction = 0.7
    """use=mmr: weight of the reward against novelty. 1 is the reward alone, 0 novelty alone."""
    max_clusters: Annotated[Positive, Field(ge=2)] = 7
    """method=agglomerative_silhouette: most clusters of a prompt."""
    min_silhouette: Number = 0.1
    """method=agglomerative_silhouette: if the best silhouette is below this, all completions of the
    prompt are one cluster."""

    def _rules(self) -> Iterator[Rule]:
        yield (
            self.use == "blend" and self.alpha > 1,
            f"alpha={self.alpha:g}: use=blend takes 0 (the prompt's) to 1",
        )


class RewardConfig(FrozenConfig):
    """Rewards of completions, where the algorithm learns from rewards, and the role that computes
    them."""

    functions: Words = ()
    """Reward functions: `path/to/file.py:function` (in a config file from that file's folder, else
    from the working directory) or `package.module:function`; a verifier of `data.verifier` by its
    name; `regex:PATTERN` (1 where it matches); `format` (1 for
    `<think>...</think><answer>...</answer>`); `python:NAME`, which a Python program gives, as in
    `train(config, rewards=[NAME])`."""
    weights: tuple[Number, ...] | None = None
    """Weight of each reward function in the sum, one number per function; 0: reported, not trained
    on. null: 1 each. Completions for which a function returns None have no reward, unless it
    returns None for all of their prompt: there it does not count. A completion on which a function
    fails (exception, crash, timeout) has no reward."""
    model: Name | None = None
    """Reward model, a `*ForSequenceClassification` checkpoint in a folder, in `package:NAME` or on
    the hub; its score is one more reward. null: none."""
    model_weight: Number = 1.0
    """Weight of the reward model's score in the sum."""
    batch_tokens: Positive = 4096
    """Tokens that the reward model reads at once on one device, padding included."""
    max_tokens: Positive | None = None
    """Longest text that the reward model reads, in its own tokens; longer texts lose their
    beginning. null: `max_prompt_tokens` + `max_new_tokens` + 128."""
    timeout: PositiveNumber = 10.0
    """Seconds that a reward function may take for one completion. A call that takes longer is
    killed with its process: the completion has no reward, and is counted in
    `reward/NAME/timeouts`."""
    workers: Positive | None = None
    """Processes that run the reward functions. null: half the CPU cores, at most 8."""
    memory_mb: Positive | None = None
    """Megabytes of address space for each process that runs reward functions (RLIMIT_AS): beyond it
    a function gets a MemoryError, counted in `reward/NAME/failures`. null: no limit; if the
    machine's memory runs out, the kernel kills these processes first, not the run."""
    max_processes: Positive = 256
    """Most processes that a reward function may have at once, the one that runs it included: beyond
    it all of them are killed, which counts in `reward/NAME/failures`."""
    max_failures: Fraction = 0.5
    """Share of a batch's completions on which a reward function may fail (exception, crash,
    timeout); beyond it the run ends."""
    overlong_buffer: Count | None = None
    """Soft penalty of long completions (DAPO, arXiv 2503.14476, eq. 13): over the last this many
    tokens before `max_new_tokens` it grows from 0 to `reward.overlong_penalty`. 0: no penalty.
    null: a fifth of `max_new_tokens` for dapo (as in its paper), else 0."""
    overlong_penalty: PositiveNumber = 1.0
    """Penalty that is subtracted from the reward of a completion of `max_new_tokens`, where
    `reward.overlong_buffer` is not 0."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions that end at `max_new_tokens`. keep: trained on like any other. mask: compared
    with the others of their prompt, but not trained on."""

    def _rules(self) -> Iterator[Rule]:
        given, functions = self.weights_of_functions, len(self.functions)
        yield (
            len(given) != functions,
            f"weights has {len(given)} numbers for the {functions} functions: give one for each,"
            " or null",
        )
        every = [*given, *([self.model_weight] if self.model else [])]
        yield (
            bool(every) and not any(every),
            "every weight is 0: nothing would be learned; give one another value",
        )

    @property
    def weights_of_functions(self) -> tuple[float, ...]:
        """One for each function."""
        return (1.0,) * len(self.functions) if self.weights is None else self.weights


class EnvironmentConfig(Section):
    """Episodes of several turns: after each turn of the policy an environment answers, and what it
    says is read, not learned. All turns and answers together are one completion."""

    name: Name | None = None
    """The environment: `path/to/file.py:Class` (in a config file from that file's folder, else from
    the working directory), `package.module:Class`, or a built-in one by its name. null: none; a
    completion is one turn."""
    arguments: dict[str, Any] = {}
    """Keyword arguments with which the environment's class is called, as in `{id: FrozenLake-v1}`
    with `environment.name=gymnasium`."""
    max_turns: Positive = 8
    """Most turns of the policy in an episode."""
    turn_tokens: Positive | None = None
    """Most tokens of one turn of the policy; a turn that reaches it ends the episode. null: only
    the episode is limited, by `max_new_tokens`."""
    weight: Number = 1.0
    """Weight of the environment's reward in the sum of rewards, beside `reward.functions` and
    `reward.model`. 0: reported, not trained on."""
    credit: Literal["episode", "turn"] = "episode"
    """What a turn's tokens learn from. episode: the reward of the whole episode, compared with the
    others of its prompt. turn: the rewards of this turn and of those after it, each compared with
    all turns of its prompt's episodes (process supervision of GRPO, arXiv 2402.03300, section
    4.1.3)."""
    discount: Fraction = 1.0
    """Factor by which a reward counts less for each turn between it and what learns from it: of an
    episode its beginning, with `credit=turn` the turn."""
    timeout: PositiveNumber = 30.0
    """Seconds that an environment may take for one answer. One that takes longer is killed with its
    process: its episode ends without a reward, and is counted in `environment/timeouts`."""
    workers: Positive | None = None
    """Processes that run environments; each holds many episodes. null: twice the CPU cores, at most
    16 and at most one for each episode of a batch."""
    memory_mb: Positive | None = None
    """Megabytes of address space for each of these processes. null: no limit."""
    max_processes: Positive = 256
    """Most processes that an environment may have at once, the one that runs it included."""
    max_failures: Fraction = 0.5
    """Share of a batch's episodes that may fail (exception, crash, timeout); beyond it the run
    ends."""

    def _rules(self) -> Iterator[Rule]:
        yield (
            bool(self.arguments) and self.name is None,
            f"arguments={self.arguments} are those of an environment: set environment.name too",
        )
        yield (
            not all(name.isidentifier() for name in self.arguments),
            f"arguments={self.arguments}: each name must be that of an argument in Python",
        )


class OffloadConfig(Section):
    """Move arrays to pinned host memory while other roles of the pool work; results do not change,
    bit for bit."""

    params: Flag = False
    """Offload the policy: the weights of actor, rollout and a teacher that is the current policy
    (`teacher.model=policy`), each while that role does not work. An array that they share is
    offloaded while none of them works."""
    optimizer: Flag = False
    """Offload the optimizer's state while nothing is trained, and the moving average of
    `teacher.ema`, the teacher's copy too."""
    frozen: Flag = False
    """Offload the weights of teacher, reference, reward model and grouper while they are idle, and
    the teacher's LM head on the actor."""


class EvalConfig(Section):
    """Accuracy on `data.eval` by a verifier: before the first step, during the run, at its end; and
    by `python -m jaxrl.evaluate`."""

    every: Count = 25
    """Steps between evaluations; 0: only before the first step and after the last."""
    prompts: Positive = 256
    """Held-out prompts of each set that are evaluated, the same ones each time; all of a set that
    has fewer."""
    samples: Positive = 1
    """Completions per held-out prompt; accuracy is their mean (mean@k), and above 1 pass@k is
    reported too."""
    temperature: NonNegative = 0.0
    """Sampling temperature of evaluations; 0 is greedy."""
    top_k: Count = 0
    """Evaluations sample from the k most probable tokens only; 0: from all."""
    top_p: Annotated[PositiveNumber, Field(le=1)] = 1.0
    """Evaluations sample from the fewest most probable tokens that together reach this probability;
    1: from all."""
    max_new_tokens: Positive | None = None
    """Longest completion in evaluations, in tokens. null: the run's `max_new_tokens`."""
    teacher: Flag = True
    """Evaluate the teacher once, before the first step: the accuracy that the student should
    reach."""

    def _rules(self) -> Iterator[Rule]:
        greedy = self.temperature == 0
        yield (
            greedy and self.samples > 1,
            f"samples={self.samples} greedy completions of a prompt are all the same:"
            " set temperature above 0, or samples=1",
        )
        yield (
            greedy and (self.top_k > 0 or self.top_p < 1),
            f"top_k={self.top_k} top_p={self.top_p:g} have no effect on greedy completions:"
            " set temperature above 0, or top_k=0 top_p=1",
        )


class CheckpointConfig(Section):
    """Checkpoints in `RUN/checkpoints/STEP`, with all that a run needs to resume as if it had never
    stopped."""

    every: Count = 50
    """Steps between checkpoints, which are written while training continues; 0: only at the last
    step and when interrupted."""
    keep_last: Positive = 2
    """How many of the newest checkpoints are kept."""
    keep_best: Count = 1
    """How many further checkpoints are kept for the best `eval/accuracy`, among steps that were
    evaluated."""


class DeadlinesConfig(Section):
    """Longest duration of each kind of call, in seconds. A late call ends the run with an error
    that says what it was doing."""

    startup: PositiveNumber = 600.0
    """Seconds to load weights and build a role."""
    generate: PositiveNumber = 600.0
    """Seconds to sample one batch of completions, compilation included."""
    score: PositiveNumber = 600.0
    """Seconds to score one batch (teacher, reference, reward, grouper)."""
    update: PositiveNumber = 600.0
    """Seconds to train on one batch."""
    weight_sync: PositiveNumber = 600.0
    """Seconds to send new weights to the rollout."""
    evaluate: PositiveNumber = 600.0
    """Seconds for one evaluation."""
    checkpoint: PositiveNumber = 600.0
    """Seconds to copy a checkpoint's arrays off the devices; also to finish writing checkpoints at
    the end of a run."""
    export: PositiveNumber = 600.0
    """Seconds to write the trained model at the end of a run."""
    interrupt: PositiveNumber | None = None
    """Seconds to finish the running update and save after Ctrl-C, SIGTERM or SIGHUP; a second
    Ctrl-C ends the run at once. null: what the deadlines of these calls allow."""


class RayConfig(Section):
    """Workers as processes, on one host or on the nodes of a Ray cluster (extra `ray`)."""

    address: Name | None = None
    """Ray cluster to join: `HOST:PORT` of its head, or `auto` for one that runs on this host. null:
    RAY_ADDRESS, or else a cluster of the run's own on this host."""
    devices_per_worker: Positive | None = None
    """Most devices of one Ray process; the processes of a pool are one SPMD program. null: one
    process for a pool's share of a host."""
    max_restarts: Count = 3
    """How many times dead or late workers are restarted before the run gives up. The count is reset
    after each trained step. A second count, of returns to the newest checkpoint, has the same limit
    and is reset by each newer checkpoint."""


class LoggingConfig(Section):
    """Console output, and the files and trackers that record the run."""

    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """Console output: rich (a live display), plain (lines) or quiet. auto: rich on a terminal and
    in a notebook, else plain."""
    every: Positive = 1
    """Steps between lines of the plain console (`metrics.jsonl` has every step)."""
    samples: Count = 2
    """Completions per step that are written to `samples.jsonl` and shown; 0: none."""
    timeline: Flag = True
    """Write `timeline.json`: a span for each call of each role, for Perfetto or
    chrome://tracing."""
    tensorboard: Flag = True
    """Write TensorBoard events to `RUN/tensorboard`."""
    wandb: Name | None = None
    """wandb project to which every row is sent (extra `wandb`; WANDB_MODE=offline keeps it local).
    null: none."""
    mlflow: Name | None = None
    """mlflow experiment to which every row is sent (extra `mlflow`), on the server that
    MLFLOW_TRACKING_URI names. null: none."""


class ProfileConfig(Section):
    """Profiling of some steps of a run."""

    steps: str | None = None
    """Steps `first:stop` to profile, stop excluded, as in `3:5` for the steps 3 and 4: writes a
    trace of JAX's profiler and a table of the stages to `RUN/profile`. Avoid the first two steps,
    which compile. null: none."""

    @field_validator("steps")
    @classmethod
    def _check_steps(cls, value: str | None) -> str | None:
        if value is None:
            return None
        match = re.fullmatch(r"(\d+):(\d+)", value)
        if match is None:
            raise ValueError(
                f"{value!r} is not a range of steps: write first:stop, as in 3:5 for the steps 3"
                " and 4"
            )
        first, stop = map(int, match.groups())
        if first < 1:
            raise ValueError(f"{value!r} begins with step {first}: the first step is 1")
        if first >= stop:
            raise ValueError(f"{value!r} holds no step: stop must exceed first, as in 3:5")
        return value

    @property
    def range(self) -> range:
        """The steps, none where there is nothing to profile."""
        first, _, stop = (self.steps or "1:1").partition(":")
        return range(int(first), int(stop))


class _Parsed(type(Section)):  # type: ignore[misc]
    """Makes `Config(...)` raise the same errors as `Config.load`."""

    def __call__(cls, **mapping: Any) -> Any:
        try:
            return cls.parse(mapping)
        except UserError as error:
            raise UserError(
                f"{error}\nConfig(...) takes every section as a mapping; Config.load(FILE,"
                ' overrides={"steps": 2}) takes a file or the quickstart, and sets some keys'
            ) from None


class Config(Section, metaclass=_Parsed):
    """A run: what is trained, on what, where and how."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run and, without `run_dir`, of its folder under `runs/`."""
    run_dir: Name | None = None
    """Folder of everything that the run writes: checkpoints, metrics, samples, logs. null:
    `runs/NAME`."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: resume the run in `run_dir`, or start one where there is none. never: start a new run;
    refuse a `run_dir` that holds one. must: resume; refuse a `run_dir` without a run."""
    resume_changed: bool = False
    """Resume even where files of a model, a reward function or data have changed since the
    checkpoint; each change is reported."""
    seed: Count = 0
    """Seed of the data's order, of every sample and of every other random choice."""
    deterministic: Flag = False
    """Use only kernels whose result does not depend on timing: two runs of one command on a GPU are
    then the same bit for bit, but slower; on a CPU they always are the same. Sets
    `--xla_gpu_exclude_nondeterministic_ops=true` in XLA_FLAGS."""
    mesh: str = "actor+rollout=1"
    """Devices of each role, as in `actor=2,rollout=2,teacher=4`; roles joined by `+` share
    theirs."""
    launcher: Literal["auto", "local", "ray"] = "auto"
    """Workers as threads of this process (local) or as Ray processes (ray). auto: ray where a
    cluster is named (`ray.address`, RAY_ADDRESS) or this host has too few accelerators."""
    algorithm: Annotated[str, Field(description=algorithm_table.described())] = (
        algorithm_table.DEFAULT
    )
    policy_weight: NonNegative = 1.0
    """Weight of the policy loss in algorithms that learn from rewards."""
    distill_weight: NonNegative = 0.0
    """Weight of the divergence from a teacher that is added to the policy loss; above 0 a teacher
    is needed."""
    schedule: Literal["serial", "one_step_off", "two_step_off"] = "serial"
    """How many batches the weights of the rollout may lag behind those of the actor: serial 0,
    one_step_off 1, two_step_off 2. With a lag, generating and training overlap."""
    steps: Positive = 200
    """Batches to train on."""
    batch_size: Positive = 32
    """Prompts per batch."""
    group_size: Positive = 4
    """Completions per prompt."""
    max_prompt_tokens: Positive = 512
    """Longest prompt, in tokens; longer ones are dropped or cut (`data.long_prompts`), and
    counted."""
    max_new_tokens: Positive = 512
    """Longest completion, in tokens, the end-of-sequence token included; with an environment, the
    longest episode: all turns and all that the environment says."""
    compile_cache: Name | None = "~/.cache/jaxrl/compile"
    """Folder of compiled programs that are kept between runs, unless JAX_COMPILATION_CACHE_DIR
    names one. null: none are kept."""
    student: StudentConfig = Field(default={}, validate_default=True)
    teacher: TeacherConfig = TeacherConfig()
    teachers: Annotated[dict[str, NamedTeacherConfig], BeforeValidator(_named_teachers)] = {}
    """Several teachers by names of your choice, as in `{math: {model: A}, code: {model: B}}`, in
    place of `teacher.model`; `{math: A}` is short for a model alone. They take turns on the devices
    of the role teacher, or all of them are served, as in `{math: {address: host:8790/math}}` with
    `api` and `api_model` as in `teacher`; the other keys of `teacher` are for all of them. Which
    rows learn from which: `data.teacher_key` and `distill.mixture`; in the mixture of all rows
    `weight` is the share of a teacher relative to the others' (null: 1)."""
    data: DataConfig = Field(default={}, validate_default=True)
    sampling: SamplingConfig = SamplingConfig()
    distill: DistillConfig = DistillConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    reference: ReferenceConfig = ReferenceConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    grouper: GrouperConfig = GrouperConfig()
    policy: PolicyConfig = PolicyConfig()
    offload: OffloadConfig = OffloadConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    ray: RayConfig = RayConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def run_path(self) -> Path:
        """Folder of the run."""
        return Path("runs") / self.name if self.run_dir is None else Path(self.run_dir)

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """Role -> its section."""
        return {role: getattr(self, role) for role in ROLES}

    def with_dtypes(self, own: DType) -> Self:
        """A copy in which `own`, the dtype for the devices at hand, replaces every role's null
        dtype."""
        unset = {role: section for role, section in self.roles.items() if section.dtype is None}
        filled = {role: s.model_copy(update={"dtype": own}) for role, s in unset.items()}
        return self.model_copy(update=filled)

    @property
    def lazy(self) -> tuple[str, ...]:
        """Roles that are loaded at their first use."""
        sections = self.roles.items()
        return tuple(r for r, s in sections if isinstance(s, FrozenConfig) and s.lazy)

    @property
    def spec(self) -> AlgorithmSpec:
        """The algorithm's entry in the table of algorithms."""
        return find_algorithm(self.algorithm)

    @property
    def learns_from_rewards(self) -> bool:
        return self.spec.learns_from == "rewards"

    @property
    def learns_from_teacher(self) -> bool:
        """Whether a teacher scores the completions."""
        if self.spec.learns_from == "teacher":
            return True
        return self.learns_from_rewards and (self.distill_weight > 0 or self.policy.opd_coef > 0)

    @property
    def teacher_models(self) -> dict[str, str]:
        """Name -> model of each teacher that runs here; `teacher` where it is the only one."""
        if self.teacher_model is not None:
            return {"teacher": self.teacher_model}
        return {name: one.model for name, one in self.teachers.items() if one.model is not None}

    @property
    def served(self) -> dict[str, TeacherConfig | NamedTeacherConfig]:
        """Name -> section of each teacher that is served outside the run; `teacher` where it is the
        only one."""
        if not self.teachers:
            return {} if self.teacher.address is None else {"teacher": self.teacher}
        return {name: one for name, one in self.teachers.items() if one.address is not None}

    def teacher_key(self, name: str, key: str = "model") -> str:
        """A key of the teacher that `teacher_models` or `served` has by this name."""
        return f"teachers.{name}.{key}" if self.teachers else f"teacher.{key}"

    @property
    def mixture(self) -> MixtureKind | None:
        """How several teachers are one; None where each row has one teacher."""
        if self.distill.mixture is not None or self.data.teacher_key is not None:
            return self.distill.mixture
        return "arithmetic" if len(self.teachers) > 1 else None

    @property
    def teacher_model(self) -> str | None:
        """The model whose weights the teacher has at the start of a run."""
        own = self.teacher.model == POLICY
        return self.student.model if own else self.teacher.model

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained in place of all weights."""
        return self.student.lora.rank is not None

    @property
    def base_dtype(self) -> DType:
        """Of the actor's weights under adapters, but for those that are quantised."""
        dtype = self.student.base_dtype
        if dtype == "float32" or dtype == "bfloat16":
            return dtype
        return self.actor.compute_dtype

    @property
    def quantised(self) -> Quantisation | None:
        """How the kernels under adapters are held; None: as all other weights."""
        dtype = self.student.base_dtype
        return dtype if dtype == "int8" or dtype == "nf4" else None

    @property
    def teacher_follows(self) -> bool:
        """Whether the teacher's weights come from the actor: the policy, or its moving average."""
        own = self.teacher.model == POLICY and self.teacher.ema < 1
        return self.learns_from_teacher and own

    @property
    def teacher_gets_feedback(self) -> bool:
        """Whether `teacher.prompt` tells the teacher about the completion that it scores, so that
        it scores after the reward functions."""
        late = {"feedback", "attempt"} & set(template.names(self.teacher.prompt or ""))
        return self.learns_from_rewards and bool(late)

    @property
    def keeps_ema(self) -> bool:
        """Whether the actor keeps a moving average of the policy's weights, in float32."""
        return self.teacher_follows and self.teacher.ema > 0

    @property
    def offloads_follower(self) -> bool:
        """Whether the weights of a teacher that follows the policy are offloaded while it is idle:
        where those are that it may share with the actor."""
        return self.offload.optimizer if self.keeps_ema else self.offload.params

    @property
    def teacher_prompt_tokens(self) -> int:
        """Longest prompt that the teacher reads, in its tokens."""
        more = 2 if self.teacher.tokenizer == "own" else 1
        return self.teacher.max_prompt_tokens or more * self.max_prompt_tokens

    @property
    def teacher_new_tokens(self) -> int:
        """Longest completion that the teacher reads or samples, in its tokens."""
        more = 2 if self.teacher.tokenizer == "own" else 1
        return self.teacher.max_new_tokens or more * self.max_new_tokens

    @property
    def needs_reference(self) -> bool:
        penalised = self.policy.kl_coef > 0 or self.policy.reward_kl_coef > 0
        return self.learns_from_rewards and penalised

    @property
    def minibatches(self) -> int:
        """Optimizer updates per pass over a batch. If `actor.minibatches` is null: the algorithm's
        number, or the next smaller one that divides `batch_size`.
        """
        if self.actor.minibatches is not None:
            return self.actor.minibatches
        own = range(self.spec.minibatches, 0, -1)
        return next(n for n in own if self.batch_size % n == 0)

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.actor.epochs_per_batch

    @field_validator("algorithm")
    @classmethod
    def _check_algorithm(cls, value: str) -> str:
        name = anchored(value, Path.cwd())
        find_algorithm(name)
        return name

    @property
    def correction(self) -> tuple[str, ...]:
        """Names of the off-policy corrections."""
        if self.policy.correction is not None:
            return self.policy.correction
        lags = self.schedule != "serial" and not self.policy.bypass
        return ("tis_token",) if lags else ("none",)

    @property
    def rewards(self) -> RewardConfig:
        """`reward`, with the algorithm's penalty of long completions where the config sets none."""
        if self.reward.overlong_buffer is not None:
            return self.reward
        own = int(self.max_new_tokens * self.spec.overlong_share)
        return self.reward.model_copy(update={"overlong_buffer": own})

    @property
    def dynamic_sampling(self) -> str:
        """`off`, `drop` or `refill`."""
        asked = self.policy.dynamic_sampling
        if asked is not None or not self.spec.dynamic_sampling:
            return asked or "off"
        return "refill" if self.schedule == "serial" else "drop"

    def _rules(self) -> Iterator[Rule]:
        yield from self._rules_with_ca_file()
        if self.learns_from_teacher:
            yield from self._rules_with_teacher()
        else:
            more = ", or distill_weight above 0" if self.learns_from_rewards else ""
            for key in ("model", "address", "cache", "prompt"):
                given = getattr(self.teacher, key)
                yield (
                    given is not None,
                    f"algorithm={self.algorithm} has no teacher: set teacher.{key}=null{more}"
                    f" (got {given})",
                )
            names = ", ".join(self.teachers)
            yield (
                bool(self.teachers),
                f"algorithm={self.algorithm} has no teacher: leave teachers out{more} (got"
                f" {names})",
            )
        yield (
            self.spec.learns_from == "teacher"
            and self.sampling.temperature == 0
            and self.group_size > 1,
            f"group_size={self.group_size} greedy completions of a prompt are all the same:"
            " set sampling.temperature above 0, or group_size=1",
        )
        yield (
            self.teacher.model == POLICY and self.student.base_dtype in ("int8", "nf4"),
            f"teacher.model={POLICY} with student.base_dtype={self.student.base_dtype}: the teacher"
            " would hold floats, and not begin as the policy does: set base_dtype=bfloat16",
        )
        if self.environment.name is not None:
            yield from self._rules_with_environment()
        if self.learns_from_rewards:
            yield from self._rules_with_rewards()
        else:
            for key, given in (
                ("reward.functions", self.reward.functions),
                ("reward.model", self.reward.model),
                ("distill_weight", self.distill_weight),
            ):
                yield (
                    bool(given),
                    f"algorithm={self.algorithm} learns from no reward: leave {key} out, or choose"
                    " an algorithm that does, such as gspo",
                )
        yield (
            self.rollout.merge and not self.trains_adapters,
            "rollout.merge=true adds adapters to the weights, and student.lora.rank=null has none:"
            " set rollout.merge=false",
        )
        yield (
            self.profile.range.stop > self.steps + 1,
            f"profile.steps={self.profile.steps} reaches beyond steps={self.steps}: stop is at"
            f" most {self.steps + 1}",
        )
        sequences = self.batch_size * self.group_size
        yield (
            self.minibatches > sequences,
            f"actor.minibatches={self.minibatches} exceeds the {sequences} sequences of a batch"
            f" (batch_size={self.batch_size} x group_size={self.group_size})",
        )

    def _rules_with_ca_file(self) -> Iterator[Rule]:
        ca_file = self.teacher.ca_file
        yield (
            ca_file is not None and not self.served,
            f"teacher.ca_file={ca_file} is for the certificate of a served teacher: set"
            " teacher.address, or teacher.ca_file=null",
        )
        for name, one in self.served.items():
            yield (
                ca_file is not None and urlsplit(str(one.address)).scheme != "https",
                f"teacher.ca_file={ca_file} is for https, and"
                f" {self.teacher_key(name, 'address')}={one.address} has no TLS, so that all can"
                " read the token: begin the address with https://, or set teacher.ca_file=null",
            )

    def _rules_with_teacher(self) -> Iterator[Rule]:
        why = " with distill_weight or policy.opd_coef" if self.learns_from_rewards else ""
        model, cache = self.teacher.model, self.teacher.cache
        alone = model or self.teacher.address
        yield (
            (alone or cache) is None and not self.teachers,
            f"algorithm={self.algorithm}{why} needs a teacher: set teacher.model (or"
            " teacher.address, teacher.cache, or teachers), or algorithm=sft to train without one",
        )
        share = 1.0 if self.learns_from_rewards else self.distill.on_policy_fraction
        none = f"teacher.cache={cache} has no scores of the student's samples"
        yield (
            cache is not None and share == 1,
            f"{none}, and there are no other batches: set teacher.cache=null, or, with"
            " algorithm=gkd, distill.on_policy_fraction below 1",
        )
        yield (
            cache is not None and model is None and share > 0 and not self.teachers,
            f"{none}, which distill.on_policy_fraction={share:g} of the batches hold: set it to 0,"
            " or teacher.model to the model whose scores the cache has",
        )
        yield (
            self.teacher_follows and self.trains_adapters,
            "teacher.model=policy with teacher.ema below 1 follows all weights of the policy, and"
            " student.lora trains adapters: set teacher.ema=1 (the policy before training), or"
            " student.lora.rank=null",
        )
        yield from self._rules_with_teachers(alone)
        if self.teacher.tokenizer == "own":
            yield (
                self.data.completion_turns == "all",
                "teacher.tokenizer=own aligns the text of completions, and one of several turns is"
                " no text: set data.completion_turns=last, or teacher.tokenizer=student",
            )
            yield (
                self.distill.signal == "student_topk",
                "distill.signal=student_topk asks for the probabilities of the student's tokens,"
                " and a teacher with teacher.tokenizer=own has others: set hidden, topk or sampled",
            )
            yield (
                self.distill.entropy_aware,
                "distill.entropy_aware=true reads the teacher's probabilities of the student's"
                " tokens: set it to false, or teacher.tokenizer=student",
            )
            yield (
                self.distill.lean,
                "distill.lean=true computes the loss in parts of the vocabulary, and a teacher with"
                " teacher.tokenizer=own needs all of it at once: set it to false",
            )
            d, s = self.distill, self.sampling
            sampled = self.learns_from_rewards or d.on_policy_fraction > 0
            yield (
                sampled and (s.truncated or s.temperature != 1 or d.distill_temperature != 1),
                "teacher.tokenizer=own estimates a part of the divergence from the student's"
                " samples, which must be untruncated and at temperature 1: set"
                " sampling.temperature=1 sampling.top_k=0 sampling.top_p=1 sampling.min_p=0"
                " distill.distill_temperature=1",
            )
            yield (
                d.signal == "sampled" and d.on_policy_fraction < 1 and not self.learns_from_rewards,
                "distill.signal=sampled with teacher.tokenizer=own learns from the student's"
                f" samples alone: set distill.on_policy_fraction=1 (got {d.on_policy_fraction:g})",
            )
            yield (
                self.learns_from_rewards and self.policy.opd_coef > 0,
                f"policy.opd_coef={self.policy.opd_coef:g} reads the teacher's log-prob of each"
                " token: set it to 0 (and distill_weight above 0), or teacher.tokenizer=student",
            )
            yield (
                self.teacher_gets_feedback,
                "teacher.prompt names feedback or attempt, which are for a teacher with the"
                " student's tokenizer: leave them out, or set teacher.tokenizer=student",
            )
        yield (
            self.teacher_follows and self.distill.seq_kd,
            "distill.seq_kd samples from a teacher that stays the same: set teacher.ema=1, or"
            " distill.seq_kd=false",
        )
        plain = not self.sampling.truncated and self.sampling.temperature == 1
        yield (
            self.distill.signal == "sampled" and not plain,
            "distill.signal=sampled is unbiased only for untruncated samples at temperature 1:"
            " set sampling.temperature=1 sampling.top_k=0 sampling.top_p=1 sampling.min_p=0",
        )

    def _rules_with_served_mixture(self) -> Iterator[Rule]:
        d, mixture = self.distill, self.mixture
        by_logprobs = mixture == "arithmetic" and d.signal in ("student_topk", "sampled")
        way_out = "set distill.signal=hidden, or data.teacher_key for a teacher a row"
        given = f"distill.signal={d.signal}" + " with entropy_aware" * d.entropy_aware
        yield (
            bool(self.served)
            and mixture is not None
            and d.signal != "hidden"
            and not (by_logprobs and not d.entropy_aware),
            f"{given}: the {mixture} mixture of served teachers cannot be made of what each of them"
            f" sends: {way_out}",
        )

    def _rules_with_teachers(self, alone: str | None) -> Iterator[Rule]:
        key, mixture, names = self.data.teacher_key, self.distill.mixture, ", ".join(self.teachers)
        yield (
            self.teacher.cache is not None and bool(self.teachers),
            f"teacher.cache={self.teacher.cache} has the scores of one teacher, and"
            f" teachers={names} are several: set teacher.cache to null, or leave teachers out",
        )
        yield (
            alone is not None and bool(self.teachers),
            f"teacher={alone} and teachers={names} are two ways to name teachers: set teacher.model"
            " and teacher.address to null, or leave teachers out",
        )
        yield (
            0 < len(self.served) < len(self.teachers),
            f"teachers={names} are partly served ({', '.join(self.served)}): give all of them a"
            " model, or all of them an address (jaxrl.serve_teacher serves several)",
        )
        yield (
            bool(self.served) and self.teacher.prompt is not None,
            f"teacher.prompt needs teachers of the run, and {', '.join(self.served)} read the"
            " student's prompts: set teacher.prompt to null",
        )
        yield from self._rules_with_served_mixture()
        own = [name for name, one in self.teachers.items() if one.model == POLICY]
        yield (
            bool(own),
            f"teachers.{(own or [''])[0]}.model={POLICY}: the policy is no one of several teachers:"
            " set teacher.model=policy and leave teachers out",
        )
        for name, given in (("data.teacher_key", key), ("distill.mixture", mixture)):
            yield (
                given is not None and not self.teachers,
                f"{name}={given} chooses among several teachers: set teachers, or {name}=null",
            )
        weighted = [name for name, one in self.teachers.items() if one.weight is not None]
        yield (
            key is not None and bool(weighted),
            f"teachers.{(weighted or [''])[0]}.weight is for the mixture of all rows, and"
            f" data.teacher_key={key} gives each row its own: set one of them to null",
        )
        yield (
            self.mixture is not None and self.distill.seq_kd,
            f"distill.seq_kd=true samples from one teacher, and the {self.mixture} mixture of"
            f" {names} cannot be sampled from: set data.teacher_key and distill.mixture=null, or"
            " seq_kd=false",
        )

    def _rules_with_environment(self) -> Iterator[Rule]:
        turn = self.environment.turn_tokens
        yield (
            turn is not None and turn > self.max_new_tokens,
            f"environment.turn_tokens={turn} exceeds max_new_tokens={self.max_new_tokens}, which"
            " limits the whole episode: raise that, or lower turn_tokens",
        )
        yield (
            self.distill.seq_kd,
            "distill.seq_kd=true samples from the teacher, which has no environment: set"
            " seq_kd=false, or environment.name=null",
        )
        yield (
            self.teacher.tokenizer == "own",
            "teacher.tokenizer=own aligns the text of completions, and an episode"
            f" (environment.name={self.environment.name}) is no text: give student and teacher one"
            " tokenizer, or set environment.name=null",
        )

    def _rules_with_rewards(self) -> Iterator[Rule]:
        yield (
            self.dynamic_sampling == "refill" and self.schedule != "serial",
            f"policy.dynamic_sampling=refill with schedule={self.schedule}: a batch is only"
            " complete once its rewards are known; set schedule=serial, or"
            " policy.dynamic_sampling=drop",
        )
        yield (
            not self.reward.functions
            and self.reward.model is None
            and not (self.environment.name and self.environment.weight),
            f"algorithm={self.algorithm} learns from rewards: set reward.functions, as in"
            " reward.functions=[math], or reward.model, or environment.name",
        )
        yield (
            self.environment.credit == "turn" and self.policy.advantages == "similarity",
            "environment.credit=turn compares turns, and policy.advantages=similarity whole"
            " completions: set one of them to its default",
        )
        yield (
            self.group_size < 2,
            f"group_size={self.group_size}: algorithm={self.algorithm} compares the completions"
            " of a prompt; it needs at least 2",
        )
        yield (
            self.sampling.truncated,
            f"algorithm={self.algorithm} needs every token's probability under the policy that"
            " sampled: set sampling.temperature above 0, top_k=0, top_p=1 and min_p=0",
        )
        yield (
            (self.reward.overlong_buffer or 0) > self.max_new_tokens,
            f"reward.overlong_buffer={self.reward.overlong_buffer} exceeds"
            f" max_new_tokens={self.max_new_tokens}",
        )
        yield (
            self.policy.advantages == "similarity" and self.grouper.model is None,
            "policy.advantages=similarity needs an encoder: set grouper.model, as in"
            " grouper.model=sentence-transformers/all-MiniLM-L6-v2",
        )
        yield (
            self.distill.on_policy_fraction < 1 or self.distill.seq_kd,
            f"algorithm={self.algorithm} learns from its own samples: set"
            " distill.on_policy_fraction=1 and distill.seq_kd=false",
        )
        yield (
            self.policy.opd_coef > 0 and self.distill.signal != "sampled",
            f"policy.opd_coef={self.policy.opd_coef:g} reads the teacher's log-prob of the"
            f" sampled token: set distill.signal=sampled (got {self.distill.signal})",
        )

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Overrides = ()) -> Self:
        """The config of a YAML file, with some keys overridden.

        Args:
            path: the file. None: the built-in quickstart or, where `student.model` or `data.train`
                is among the overrides, the defaults. `builtin:quickstart`: the quickstart in any
                case.
            overrides: `["steps=10", "optimizer.learning_rate=1e-5"]`, or `{"steps": 10,
                "optimizer.learning_rate": 1e-5}`.

        Raises:
            UserError: for any mistake that the user can correct; a few lines at most.
        """
        return cls.load_base(path, overrides)[0]

    @classmethod
    def load_base(
        cls, path: str | Path | None = None, overrides: Overrides = ()
    ) -> tuple[Self, Base]:
        """`load`, and the source of the keys that nobody set."""
        if isinstance(overrides, str):
            raise UserError(
                f"overrides is a list of key=value strings, or a mapping, got {overrides!r}"
            )
        base = base_of(path, overrides, config_keys.mappings(cls))
        with base.explained():
            return cls.parse(config_paths.code_here(base.mapping)), base

    @classmethod
    def parse(cls, mapping: dict[str, Any]) -> Self:
        """The config that nested dicts describe; raises ``UserError`` naming the key."""
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            raise UserError(config_keys.explain(cls, error)) from None

    def dump(self) -> str:
        """YAML of every key with its value; ``load`` reads it back to an equal config."""
        return yaml_text.dump_mapping(self.model_dump(mode="json"))
