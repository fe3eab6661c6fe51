"""Sections of the models of a run: what each role loads, its devices and its dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from jaxrl.config import paths
from jaxrl.config.section import (
    ASKED,
    FREE,
    REPORTED,
    Api,
    Count,
    DType,
    Flag,
    Fraction,
    Name,
    NonNegative,
    Number,
    OneOrMore,
    OnResume,
    Positive,
    PositiveNumber,
    Section,
    Spelt,
    Words,
    refused,
    unread,
)
from jaxrl.process.plugin import anchor
from jaxrl.teacher.key_rules import Rule, section_rules, server_rules

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What stands for all projections of a block, under whatever names a family has them."""


def _projections(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield from ALL_LINEAR if name == "all-linear" else (name,)


Projections = Annotated[
    tuple[Name, ...],
    Field(min_length=1),
    OneOrMore,
    AfterValidator(lambda value: tuple(dict.fromkeys(_projections(value)))),
]


class LoraConfig(Section):
    """Adapters of low rank (LoRA, arXiv 2106.09685), which are trained in place of the model's
    weights: x W becomes x W + (alpha / rank) (x A) B, where A [in, rank] is random at the start and
    B [rank, out] zero."""

    on_resume: ClassVar[OnResume] = refused("the adapters in the checkpoint were made with it")
    rank: Positive | None = None
    """Rank of all adapters; 8 to 64 are usual. null: no adapters, all weights are trained."""
    alpha: PositiveNumber | None = None
    """An adapter's output is multiplied by alpha / rank. null: alpha is twice the rank, so that the
    factor is 2."""
    targets: Projections = ALL_LINEAR
    """The projections that have adapters: `all-linear`, or a list of `q_proj`, `k_proj`, `v_proj`,
    `o_proj`, `gate_proj`, `up_proj` and `down_proj`. Phi-3 has `qkv_proj`, `o_proj`, `gate_up_proj`
    and `down_proj`. Qwen3.5 also has `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` and
    `out_proj`. In Qwen3-MoE `gate_proj`, `up_proj` and `down_proj` add one adapter per expert. In
    gpt-oss only projections of attention can have adapters."""
    init: Literal["default", "gaussian"] = "default"
    """A at the start. default: uniform in +-1 / sqrt(in). gaussian: normal with the standard
    deviation 1 / rank."""

    def _rules(self) -> Iterator[Rule]:
        if self.rank is None:
            keys = type(self).model_fields
            yield from unread(self, keys, "rank", "there are no adapters", "rank too")


def _other_codes(before: object, now: object, _: object) -> str:
    coded = {before, now} & {"int8", "nf4"}
    return "the adapters correct what quantising the weights changed" if coded else ""


BASE = replace(REPORTED, unless=_other_codes)
TEMPLATE = refused("it decides what the prompts are")


def read_family(text: str) -> str:
    """Has a family of the user's own read in this process; returns its name with a whole path."""
    from jaxrl.models.families import use_family  # which imports jax

    text = anchor(text, paths.working_directory())
    use_family(text)
    return text


class StudentConfig(Section):
    """The model that learns."""

    on_resume: ClassVar[OnResume] = refused("the weights in the checkpoint are those of that model")
    model: Name
    """Weights to start from: a Hugging Face folder, a folder of adapters (PEFT), a GGUF file, a run
    directory, `package:NAME`, `builtin:student`, or the id of a model on the hub, as in
    `Qwen/Qwen3-1.7B` or `Qwen/Qwen3-1.7B@REVISION`."""
    chat_template: Annotated[Name | None, TEMPLATE] = None
    """Chat template in place of the model's own: a Jinja file, or the folder or GGUF file of a
    model whose template it is. The trained model is exported with it. null: the model's own."""
    family: Annotated[str, AfterValidator(read_family)] | None = None
    """`path/to/file.py:NAME` or `package.module:NAME`: a model family of your own
    (docs/add-a-model-family.md), for the student and any other model of the run whose `config.json`
    has its `model_type`. The run folder keeps the file. null: the families of jaxrl."""
    lora: LoraConfig = LoraConfig()
    base_dtype: Annotated[Literal["float32", "bfloat16", "int8", "nf4"] | None, BASE] = None
    """With `student.lora.rank`: dtype in which the actor holds the frozen base weights. null:
    `actor.dtype`. `int8` or `nf4` (QLoRA, arXiv 2305.14314): all roles with the policy's weights
    hold the kernels of its layers in 8 or 4 bits, and the other weights in the role's dtype."""
    router_aux_loss_coef: Annotated[NonNegative, ASKED] = 0.0
    """For mixtures of experts: weight of the load-balancing loss (Switch Transformer, arXiv
    2101.03961, eq. 4-6, over the tokens of a minibatch; tokens of a prompt count once per
    completion). If a minibatch has several micro-batches, each update needs an additional forward
    pass without the LM head, which counts the tokens of each expert."""

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        if self.family is not None:  # in another process
            read_family(self.family)

    def _rules(self) -> Iterator[Rule]:
        yield (
            self.lora.rank is None and self.base_dtype is not None,
            "base_dtype lora.rank",
            "it is for the frozen base weights of adapters",
            "base_dtype=null, or lora.rank (the dtype of trained weights is actor.param_dtype)",
        )


class ParallelConfig(Section):
    """Sizes of the role's mesh axes; their product is the number of its devices. One of them may be
    -1: all devices that the others leave."""

    on_resume: ClassVar[OnResume] = FREE
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
            bad = size < 1 and size != -1
            yield bad, f"{name}={size}: an axis is at least 1, or -1 for the rest"
        rest = [name for name, size in sizes.items() if size == -1]
        yield len(rest) > 1, f"{' and '.join(rest)} are both -1: one axis may take the rest"


class LongParallelConfig(ParallelConfig):
    """Sizes of the axes of the role's mesh. Their product must be the number of the role's devices.
    -1: all devices that the others leave. A role that computes whole sequences at once also has the
    axis `context`."""

    context: int | None = Field(default=None, strict=True)
    """Context parallelism, for long sequences: shards of the tokens of each sequence, and of the
    weights as with fsdp. Attention is computed on whole sequences, divided by heads, so that tensor
    times context must divide the number of heads. null: 1."""


def _slice(value: str) -> str:
    match = re.fullmatch(r"(\d*):(\d*)", value)
    if match is None:
        raise ValueError(f"{value!r} is not a slice of devices: write start:stop, as in 1:2")
    start, stop = match.groups()
    if stop and int(start or "0") >= int(stop):
        raise ValueError(f"{value!r} is an empty slice of devices: stop must exceed start")
    return value


class RoleConfig(Section):
    """Keys that every role has: devices, mesh and compute dtype."""

    on_resume: ClassVar[OnResume] = REPORTED
    parallel: ParallelConfig = ParallelConfig()
    devices: Annotated[Annotated[str, AfterValidator(_slice)] | None, FREE] = None
    """Slice `start:stop` of the pool's devices that this role uses, as in `1:2`. null: all of
    them."""
    dtype: Annotated[DType | None, REPORTED] = None
    """Dtype of activations and of the weights in matrix products. null: bfloat16 on accelerators;
    float32 on a CPU (which computes bfloat16 in float32 from copies of the weights) and on GPUs
    before compute capability 8.0 (a T4 has no tensor cores for bfloat16)."""

    @cached_property
    def compute_dtype(self) -> DType:
        """Returns `dtype`, which `Config.with_dtypes` has set for the devices at hand."""
        assert self.dtype is not None, "Config.with_dtypes fills it"
        return self.dtype


class FrozenConfig(RoleConfig):
    """A role whose model no gradient updates."""

    lazy: Annotated[Flag, FREE] = False
    """Load the role's model at its first use instead of at the start of the run."""


def template_names(text: str) -> tuple[str, ...]:
    """Returns the names that stand in braces for values, as in `{prompt} Hint: {answer}`, each
    once; doubled braces are braces of the text. Raises ValueError where the braces do not fit."""
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; write {{{{ or }}}} for a brace of the text") from None
    for _, name, spec, conversion in parsed:
        if name is not None and (not name or spec or conversion):
            shown = f"{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}"
            raise ValueError(
                f"{text!r}: {{{shown}}} names no field: write {{NAME}}, or {{{{ and }}}} for braces"
                " of the text"
            )
    return tuple(dict.fromkeys(name for _, name, *_ in parsed if name is not None))


def _template(value: str) -> str:
    template_names(value)
    return value


class TeacherConfig(FrozenConfig):
    """The model to learn from. No gradient updates it; with `teacher.model=policy` it takes the
    policy's weights."""

    on_resume: ClassVar[OnResume] = refused("another teacher teaches something else")
    parallel: LongParallelConfig = LongParallelConfig()
    model: Name | None = None
    """The teacher's weights, in any form that `student.model` takes, or `builtin:teacher`.
    `policy`: the policy itself (self-distillation; `teacher.prompt` then gives it another prompt, a
    folder of this name is `./policy`). null: no teacher (sft, or rewards alone), or the one at
    `teacher.address`, or `teacher.cache` alone."""
    ema: Fraction = 0.0
    """With `teacher.model=policy`: decay of the moving average of the policy's weights, which
    teaches: w' = ema w' + (1 - ema) w after each optimizer update. 0: the teacher has the policy's
    newest weights. 1: it keeps the weights from before training."""
    prompt: Annotated[Name, AfterValidator(_template)] | None = None
    """Template of the prompt that the teacher reads instead of the student's, as in `{prompt} Hint:
    {answer}`. It replaces the text of the row, or the last message of a chat. Names in braces:
    `prompt` (what is replaced), `answer`, `completion`, any other field of the row, and `messages`
    (the chat as text, all of which the template then replaces); in algorithms that learn from
    rewards also `attempt` (the completion that is scored) and `feedback` (messages of the reward
    functions about it). null: the student's prompt."""
    tokenizer: Literal["student", "own"] = "student"
    """student: the teacher must have the student's tokenizer. own: the teacher encodes the text of
    prompts and completions with its own tokenizer and chat template, and its tokens are aligned
    with the student's by bytes."""
    chat_template: Annotated[Name | None, TEMPLATE] = None
    """Chat template for `teacher.model`, as `student.chat_template` is for the student. null: the
    teacher's own."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt of the teacher, in its tokens, if `teacher.prompt` or `teacher.tokenizer=own`
    is set; rows with a longer prompt are dropped and counted. null: `max_prompt_tokens`, or twice
    that with `teacher.tokenizer=own`."""
    max_new_tokens: Positive | None = None
    """With `teacher.tokenizer=own`: longest completion in the teacher's tokens; the student does
    not learn from tokens beyond it. null: twice `max_new_tokens`."""
    num_microbatches: Annotated[Positive, REPORTED] = 1
    """Number of micro-batches in which the teacher scores a batch; a larger number needs less
    activation memory."""
    address: Annotated[Name | None, FREE] = None
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
    service_threads: Annotated[Positive, FREE] = 1
    """Number of score requests sent to each served teacher in parallel."""
    ca_file: Annotated[Name | None, FREE] = None
    """PEM file with the trusted CA certificates for a teacher whose address begins with `https://`:
    its certificate must be in the file, or be signed by one in it. null: those that the system
    trusts."""
    cache: Name | None = None
    """Folder of scores that `python -m jaxrl.score` wrote, for batches that hold the data's
    completions or (`distill.seq_kd`) the teacher's samples. Alone: no teacher's weights are loaded,
    and every batch must be of these kinds. Together with `teacher.model`: the model scores only the
    student's samples."""

    def _rules(self) -> Iterator[Rule]:
        return section_rules(self)


class NamedTeacherConfig(Section):
    """One of several teachers."""

    model: Name | None = None
    """Its weights, in any form that `student.model` takes, or `builtin:teacher`."""
    address: Annotated[Name | None, FREE] = None
    """In place of `model`: where it is served, as of `teacher.address`; one of several teachers of
    `serve_teacher` is at `host:port/name`."""
    api: Api = "jaxrl"
    """As of `teacher.api`."""
    api_model: Name | None = None
    """As of `teacher.api_model`."""
    weight: PositiveNumber | None = None
    """Its share in the mixture of all teachers, relative to theirs; null: 1."""

    @model_validator(mode="before")
    @classmethod
    def _check_model(cls, given: object) -> object:
        return {"model": given} if isinstance(given, str | Spelt) else given

    def _rules(self) -> Iterator[Rule]:
        yield self.model is None and self.address is None, "set model, or address"
        yield from server_rules(self)


UPDATES = refused("the schedule of the learning rate counts the updates of a batch")


class ActorConfig(RoleConfig):
    """The role that trains the policy."""

    parallel: LongParallelConfig = LongParallelConfig()
    param_dtype: DType = "float32"
    """Dtype of the weights that the optimizer updates. float32: master weights. bfloat16: half the
    memory, with stochastic rounding, so that small updates are not lost on average."""
    moment_dtype: DType = "float32"
    """Dtype of gradients inside the optimizer, and of their average (first moment, momentum).
    Averages of squared gradients are float32, and so is an average whose decay exceeds 0.92, as
    with muon and, by default, lion: in bfloat16 they would not follow the gradients."""
    reduce_dtype: Literal["float32"] | None = None
    """Dtype in which devices add their parts of the gradients of kernels, other than experts'.
    null: `actor.dtype`. float32: with bfloat16 twice the bytes between devices, and only the sum
    is rounded. Parts of the other gradients, but for experts', are added in float32 anyway."""
    micro_batch_tokens: Positive | None = 16384
    """Upper bound of the tokens per device in one micro-batch, the part of a minibatch whose
    gradient is computed at once. The number of rows is such that the bound holds even if every row
    is as long as the longest one of the batch. null: the whole minibatch."""
    minibatches: Annotated[Positive | None, UPDATES] = None
    """Optimizer updates per pass over a batch. null: the number in the algorithm's paper
    (docs/reinforcement-learning.md), or the next smaller one that divides `batch_size`. With
    schedule=streaming each minibatch is trained as soon as it is sampled."""
    epochs_per_batch: Annotated[Positive, UPDATES] = 1
    """Passes over each batch."""
    remat: Literal["none", "dots", "full"] = "full"
    """Activations that the backward pass recomputes to save memory. none: nothing. dots: all but
    matrix products. full: all but each layer's input."""
    max_nonfinite: Annotated[Positive, FREE] = 5
    """End the run after this many updates in a row were skipped because the gradient was NaN or
    infinite."""


class RolloutConfig(RoleConfig):
    """The role that samples."""

    slots: Positive | None = None
    """Slots: sequences decoded at once over the whole mesh. A slot whose sequence has ended takes
    the next one. null: one slot for each sequence of the batch, or on accelerators, if these do not
    fit, as many as fit according to the plan."""
    launch_tokens: Positive = 32
    """Decode steps per device launch, in each of which every slot samples one token; free slots are
    refilled between launches."""
    cache_tokens: Positive | None = None
    """Capacity of a paged KV cache for completions, in tokens per device: memory for the tokens
    that exist instead of for `max_new_tokens` in every slot. A page has 64 tokens and belongs to
    one completion, so that at least 64 tokens per slot are needed to use every slot. The cache must
    hold the longest completion. If pages run out, the youngest completion is preempted, and a
    prefill recomputes it later, which changes numbers by rounding. null: every slot has memory for
    `max_new_tokens`."""
    merge: Flag = False
    """With `student.lora.rank`: sample with a copy of the weights to which the adapters are added,
    made at each weight sync. It decodes as fast as without adapters, needs memory for the copy, and
    rounds the sum to `rollout.dtype`. false: the adapters are applied separately, with additional
    products."""


class ReferenceConfig(FrozenConfig):
    """A frozen copy of the policy before training, for `policy.kl_coef` and
    `policy.reward_kl_coef`."""

    parallel: LongParallelConfig = LongParallelConfig()
    num_microbatches: Positive = 1
    """Number of micro-batches in which the reference scores a batch; a larger number needs less
    activation memory."""


class GrouperConfig(FrozenConfig):
    """Clusters of similar completions of a prompt, for `policy.advantages=similarity`."""

    on_resume: ClassVar[OnResume] = ASKED
    model: Name | None = None
    """Text encoder that embeds the completions: a Hugging Face or sentence-transformers folder
    (BERT, MiniLM, XLM-RoBERTa, bge-m3), `package:NAME`, or the id of a model on the hub. null:
    none."""
    lazy: Annotated[Flag, FREE] = True
    """Load the encoder at its first use instead of at the start of the run."""
    batch_tokens: Annotated[Positive, REPORTED] = 4096
    """Tokens that one device embeds at once, including padding."""
    method: Literal["agglomerative_silhouette", "connected_components", "leader"] = (
        "agglomerative_silhouette"
    )
    """Method that clusters the completions of a prompt. agglomerative_silhouette: average linkage,
    with the number of clusters of the best silhouette. connected_components: joined by any chain of
    similarities of at least tau (DARLING, arXiv 2509.02534). leader: with the first earlier leader
    at least tau similar, else a new cluster (GiGPO, arXiv 2505.10978)."""
    use: Literal["subgroup", "blend", "size_weight", "distinct", "smi", "mmr"] = "subgroup"
    """Effect of the clusters. subgroup: a reward is compared within its cluster, so differences
    between clusters give no gradient. blend: alpha of that advantage and 1 - alpha of the prompt's
    (Stratified GRPO, arXiv 2510.06214). size_weight: |cluster|^-alpha times the prompt's advantage
    (arXiv 2601.08763). The others change the task reward, before penalties for length and KL are
    added and it is compared within the prompt: distinct multiplies it by the fraction of the
    prompt's other completions that are in other clusters, at least 0.1 (DARLING); smi divides it by
    the sum of its similarities to all, itself included (DRA-GRPO, arXiv 2505.09655); mmr takes the
    score at which maximal marginal relevance picks the completion (arXiv 2601.09085)."""
    std_scope: Literal["cluster", "prompt", "none"] = "cluster"
    """Standard deviation that divides the advantages within clusters, of `grouper.use` subgroup and
    blend: of the cluster (the advantages of two unequal rewards are then always +-0.707) or of the
    prompt. The advantages within prompts, of the other uses and of blend, are divided by that of
    the prompt. none: nothing is divided, whatever the use. If `policy.scale_by_std` or the
    algorithm (such as dr_grpo) does not divide, nothing is divided here either."""
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
        outside = self.use == "blend" and self.alpha > 1
        yield outside, "alpha use", "it blends from 0 (the prompt's) to 1"


class RewardConfig(FrozenConfig):
    """Rewards of completions, where the algorithm learns from rewards, and the role that computes
    them."""

    on_resume: ClassVar[OnResume] = ASKED
    functions: Words = ()
    """Reward functions: `path/to/file.py:function` (in a config file from that file's folder, else
    from the working directory) or `package.module:function`; a verifier of `data.verifier` by its
    name; `regex:PATTERN` (1 where it matches); `format` (1 for
    `<think>...</think><answer>...</answer>`); `python:NAME`, a function passed from Python, as in
    `train(config, rewards=[NAME])`."""
    weights: tuple[Number, ...] | None = None
    """Weight of each reward function in the sum, one number per function; 0: reported, not trained
    on. null: 1 each. A completion on which a function fails (exception, crash, timeout) has no
    reward."""
    missing: Literal["ignore", "drop"] = "ignore"
    """Treatment of a completion for which a reward function returns None. ignore: the sum of its
    other rewards counts, as if the function's weight were 0 there; the same as in TRL. drop: it has
    no reward, unless the function returns None for all completions of the prompt. A completion for
    which every function returns None has no reward in either case."""
    model: Name | None = None
    """Reward model, a `*ForSequenceClassification` checkpoint in a folder, in `package:NAME` or on
    the hub; its score is one more reward. null: none."""
    model_weight: Number = 1.0
    """Weight of the reward model's score in the sum."""
    batch_tokens: Annotated[Positive, REPORTED] = 4096
    """Tokens that the reward model reads at once on one device, including padding."""
    max_tokens: Positive | None = None
    """Longest text that the reward model reads, in its tokens; the beginning of longer texts is
    cut. null: `max_prompt_tokens` + `max_new_tokens` + 128."""
    timeout: Annotated[PositiveNumber, FREE] = 10.0
    """Seconds that a reward function may take for one completion. After that its process is killed;
    the completion has no reward, and is counted in `reward/NAME/timeouts`."""
    workers: Annotated[Positive | None, FREE] = None
    """Processes that run the reward functions. null: half the CPU cores, at most 8."""
    memory_mb: Annotated[Positive | None, FREE] = None
    """Megabytes of address space for each process that runs reward functions (RLIMIT_AS): beyond it
    a function gets a MemoryError, counted in `reward/NAME/failures`. null: no limit; if the
    machine's memory runs out, the kernel kills these processes first, not the run."""
    max_processes: Annotated[Positive, FREE] = 256
    """Maximum number of simultaneous processes of a reward function, including the one that runs
    it; if it is exceeded, all of them are killed, which counts in `reward/NAME/failures`."""
    max_failures: Annotated[Fraction, FREE] = 0.5
    """Share of a batch's completions on which a reward function may fail (exception, crash,
    timeout); beyond it the run ends."""
    overlong_buffer: Count | None = None
    """Soft penalty of long completions (DAPO, arXiv 2503.14476, eq. 13): length of the penalty zone
    in tokens, counted back from `max_new_tokens`. Inside it the penalty grows from 0 to
    `reward.overlong_penalty`. 0: no penalty. null: a fifth of `max_new_tokens` for dapo (as in its
    paper), else 0."""
    overlong_penalty: PositiveNumber = 1.0
    """Penalty that is subtracted from the reward of a completion of `max_new_tokens`, where
    `reward.overlong_buffer` is not 0."""
    truncated: Literal["keep", "mask"] = "keep"
    """Treatment of truncated completions: those that reach `max_new_tokens`, and episodes that
    reach `environment.max_turns` or `environment.turn_tokens`. keep: trained on like any other.
    mask: compared with the others of their prompt, but not trained on."""

    def _rules(self) -> Iterator[Rule]:
        given = self.weights_of_functions
        why = f"weights has {len(given)} numbers for the {len(self.functions)} functions"
        yield len(given) != len(self.functions), "weights", why, "one for each, or weights=null"
        every = [*given, *([self.model_weight] if self.model else [])]
        none = every and not any(every)
        yield none, "every weight is 0: nothing would be learned; give one another value"

    @cached_property
    def weights_of_functions(self) -> tuple[float, ...]:
        """Returns one weight for each function."""
        return (1.0,) * len(self.functions) if self.weights is None else self.weights
