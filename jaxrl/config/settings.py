"""Sections of all else: data, losses, the optimizer, evaluation, checkpoints, logging."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from jaxrl.config.section import (
    ASKED,
    FREE,
    REPORTED,
    SAMPLED,
    Count,
    Decay,
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
    Words,
    check_user_names,
    numbers,
    refused,
    unless_between,
    unread,
)
from jaxrl.errors import UserError
from jaxrl.losses.algorithm_table import MixtureKind
from jaxrl.process.json_types import JsonObject, Keywords
from jaxrl.teacher.key_rules import Rule

# The keys of a config that the evaluation of a checkpoint reads.
EVALUATED_MESH = "rollout=1"
"""Placement where none is asked for."""
EVALUATED = (
    *("seed", "mesh", "max_prompt_tokens", "max_new_tokens", "compile_cache", "data"),
    *("sampling.stop", "rollout", "eval", "environment", "student.chat_template"),
)
"""Keys, and sections, that an evaluation reads."""
NOT_EVALUATED = (
    *("data.train", "data.weights", "data.shuffle", "eval.every", "eval.teacher"),
    *("rollout.merge", "environment.weight", "environment.credit", "environment.discount"),
)
"""Keys of those sections that only training reads."""
PLACEMENT = ("mesh", "rollout.parallel", "rollout.devices")
"""Keys that belong to the machine, and are not taken over from a run."""
SLOTS = ("batch_size", "group_size")
"""Keys of a run that stand for the slots where `rollout.slots` is null."""


_RENDERED = ("messages", "tools", "add_generation_prompt", "strftime_now")
_OPTIONS = (
    "chat_template",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)


def check_arguments(arguments: Keywords) -> Keywords:
    """Returns arguments for a chat template. Raises UserError for names that a run sets itself,
    and for options of `apply_chat_template` of transformers that no template reads."""
    for name in arguments:
        if name in _RENDERED:
            raise UserError(
                f"{name!r} is what each rendering of a chat sets by itself: leave it out"
            )
        if name in _OPTIONS:
            raise UserError(
                f"{name!r} is an option of transformers' apply_chat_template, no name that a"
                " template reads: leave it out"
            )
    return arguments


def _day(value: object) -> str:
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(f"a date is needed, as in 2026-03-31, got {value!r}") from None


Sources = Annotated[Words, Field(min_length=1)]
EvalSources = Annotated[
    Annotated[Sources, Tag("[list]")]
    | Annotated[dict[str, Sources], Field(min_length=1), Tag("[mapping]")],
    Discriminator(lambda value: "[mapping]" if isinstance(value, dict) else "[list]"),
    BeforeValidator(check_user_names),
]
"""Sources of one set without a name, or of several by their names."""


class DataConfig(Section):
    """Prompts, and their completions and answers where there are any."""

    on_resume: ClassVar[OnResume] = refused("it decides which prompts each batch has")
    train: Sources
    """One source or a list of them: a `.jsonl`, `.parquet`, `.json` or `.csv` file; a pattern like
    `data/*.parquet`; a folder of such files, or one that `datasets` saved (`:split=NAME` chooses a
    split); a data set on the hub, as in `hf:openai/gsm8k:main:train`
    (`hf:ORG/NAME@REVISION:CONFIG:SPLIT`); `arithmetic`, `reasoning_gym/NAME` (`:key=value,...` adds
    options); `path/to/file.py:NAME`, rows or a function that makes them, perhaps without an end;
    `python:data`, rows that a Python program gives, as in `train(config, data=rows)`."""
    weights: tuple[PositiveNumber, ...] | None = None
    """Share of the prompts that come from each source of `data.train`, one number per source; each
    source then has its own epochs. null: all rows together, each once per epoch."""
    eval: Annotated[EvalSources | None, replace(ASKED, decides="data.eval")] = None
    """Held-out sources in the form of `data.train`, or several named sets, as in `{easy: a.jsonl,
    hard: [b.jsonl, c.jsonl]}`; a procedural source never repeats a prompt of its training split.
    null: no evaluation."""
    prompt_key: str | None = "prompt"
    """Field of a row with the prompt, as text or as chat messages, which the tokenizer's chat
    template renders. In the names of fields a dot selects an element of an object, as in
    `reward_model.ground_truth`. null: none."""
    messages_key: str | None = "messages"
    """Field of a row with a chat; if the last message is the assistant's, it is the completion.
    null: none."""
    completion_key: str | None = "completion"
    """Field of a row with a completion to learn from (sft and off-policy batches), as text or as
    chat messages. null: none."""
    text_key: str | None = "text"
    """Field of a row with a text that is learned as a whole (sft, off-policy batches), as in sets
    for language modelling; read in rows that have neither prompt nor messages. null: none."""
    tools_key: str | None = "tools"
    """Field of a row with the JSON schemas of tools, a list or its text, which the chat template
    shows. null: none."""
    system_key: str | None = "system"
    """Field of a row with the text of a system message, for a prompt that has none. null: none."""
    chat_template_arguments_key: str | None = "chat_template_kwargs"
    """Field of a row with arguments for the chat template, an object or its JSON text, which come
    before those of `data.chat_template_arguments`. null: none."""
    chat_template_arguments: Annotated[
        Keywords, BeforeValidator(numbers), AfterValidator(check_arguments)
    ] = {}
    """Arguments for the chat template of every prompt, as in `{enable_thinking: false}` or
    `{reasoning_effort: high}`: names that the template of the model reads."""
    completion_turns: Literal["last", "all"] = "last"
    """Which turns of a chat that ends with the assistant are learned (sft and off-policy batches).
    last: the last turn; everything before it is the prompt. all: every turn of the assistant; the
    prompt ends where the first one begins, and later messages of others are context without
    loss."""
    answer_key: str | None = "answer"
    """Field of a row with the reference answer that a verifier compares with. null: none."""
    teacher_key: str | None = None
    """Field of a row that names one of `teachers`, from which the row's completions learn; with
    `distill.mixture` it may also hold the weights of several, as in `{math: 0.7, code: 0.3}`. null:
    every row learns from the mixture of all."""
    chat: Literal["auto", "raw"] = "auto"
    """auto: a text prompt becomes a user message if the tokenizer has a chat template. raw: text
    prompts are not changed."""
    chat_date: Annotated[str, BeforeValidator(_day)] | None = None
    """Date, as 2026-03-31, for chat templates that show the current date (`strftime_now`). null:
    the day on which the run begins, which is recorded in its `config.yaml`, so that it resumes with
    the same prompts."""
    system_prompt: str | None = None
    """System message put before every chat prompt that has none. null: none."""
    few_shot: Sources | None = None
    """Source of solved examples that are put before every prompt, also those of `data.eval`: as
    chat turns, or before a text prompt as `PROMPTCOMPLETION` with a blank line after each. null:
    none."""
    few_shot_rows: Positive = 4
    """Number of rows of `data.few_shot` that are used, beginning with the first."""
    long_prompts: Literal["drop", "cut"] = "drop"
    """Treatment of prompts longer than `max_prompt_tokens`, which are counted. drop: they are left
    out. cut: the beginning of the row's text (in a chat, of its longest user message) is removed;
    prompts of procedural tasks are still dropped."""
    shuffle: Flag = True
    """Shuffle the data differently in each epoch, by `seed`."""
    verifier: Annotated[str, ASKED] = "auto"
    """Name of the verifier that judges completions in evaluations (docs/data.md lists them). auto:
    the one that the source defines."""

    def _rules(self) -> Iterator[Rule]:
        none = self.prompt_key is None and self.messages_key is None
        yield none, "prompt_key and messages_key are both null: one must name the rows' prompts"
        given, sources = len(self.weights or ()), len(self.train)
        why = f"weights has {given} numbers for the {sources} sources of train"
        several = self.weights is not None and given != sources
        yield several, "weights", why, "one for each, or weights=null"


class SamplingConfig(Section):
    """How training completions are sampled."""

    on_resume: ClassVar[OnResume] = SAMPLED
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
    """Strings that end a completion, besides the model's end-of-sequence tokens. Its text has none
    of them, except one that closes a tag of the text, as in `<answer>4</answer>`."""

    @property
    def truncated(self) -> bool:
        """Returns whether some token of positive probability can never be sampled."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


CHUNK_TOKENS = 512
"""`distill.chunk_tokens` where neither the config nor the plan sets it."""


BATCHES = refused("it decides what the batches hold, and what the teacher sends of them")


class DistillConfig(Section):
    """The divergence from a teacher (GKD, arXiv 2306.13649), alone or in combination with rewards
    (`distill_weight`)."""

    on_resume: ClassVar[OnResume] = ASKED
    signal: Annotated[Literal["hidden", "topk", "student_topk", "sampled", "own"], BATCHES] = (
        "hidden"
    )
    """What the teacher sends for each token. hidden: its last hidden states (exact divergence).
    topk, student_topk: log-probs of the teacher's or the student's top-k tokens, and of all other
    tokens together (a lower bound). sampled: the log-prob of the sampled token (unbiased for
    reverse KL). own: what the algorithm's `SignalSpec` says (docs/add-an-algorithm.md)."""
    jsd_beta: Fraction = 0.5
    """Generalised JSD between teacher and student, which tends to 0 at both ends. Exactly 0 selects
    KL(teacher||student) and exactly 1 KL(student||teacher), so that the scale of the loss jumps
    there."""
    on_policy_fraction: Annotated[Fraction, BATCHES] = 1.0
    """Probability that a batch holds the student's samples; other batches hold the data's
    completions, or the teacher's samples (`distill.seq_kd`)."""
    seq_kd: Annotated[Flag, BATCHES] = False
    """Sequence-level distillation: off-policy batches hold the teacher's samples in place of the
    data's completions."""
    distill_temperature: PositiveNumber = 1.0
    """Temperature T that divides both models' logits inside the divergence. The loss is not
    multiplied by T^2."""
    top_k: Annotated[Positive, Field(le=1024), BATCHES] = 64
    """Tokens per position that the signals topk and student_topk send; from about 1000 on, signal
    hidden is smaller and exact."""
    ratio_cap: PositiveNumber = 2.0
    """With `distill.signal=sampled` or `teacher.tokenizer=own`: cap on the importance ratio between
    the learner and the policy that sampled."""
    mixture: Annotated[MixtureKind | None, BATCHES] = None
    """How several `teachers` are combined. arithmetic: the mixture of their distributions, sum_k
    w_k P_k. geometric: proportional to prod_k P_k ** w_k. null: arithmetic or, with
    `data.teacher_key`, none: each row learns from one teacher."""
    entropy_aware: Flag = False
    """Add KL(teacher||student) at tokens where the teacher is uncertain (arXiv 2603.07079): to the
    divergence or, where `distill_weight` is 0, to the policy loss with `policy.opd_coef`."""
    entropy_threshold: NonNegative = 0.8
    """Teacher entropy, in nats, from which a token counts in the term of
    `distill.entropy_aware`."""
    entropy_top_k: Positive = 16
    """Number of the teacher's most probable tokens in the term of `distill.entropy_aware`."""
    chunk_tokens: Annotated[Positive | None, REPORTED] = None
    """Tokens whose logits exist at once, in the losses of all algorithms; a smaller number needs
    less memory, a larger one reads the LM head less often. null: 512; on GPUs 2048 or 1024 where
    the plan says that they fit."""
    lean: Annotated[Flag, REPORTED] = False
    """Recompute the logits of the divergence from the teacher in the backward pass: less memory,
    more time. Changes nothing for signal=sampled, sft and the policy losses, which always do so."""

    @cached_property
    def loss_chunk(self) -> int:
        """Returns the number of tokens whose logits exist at once."""
        return self.chunk_tokens or CHUNK_TOKENS

    def _rules(self) -> Iterator[Rule]:
        all_own, share = self.on_policy_fraction == 1, "on_policy_fraction"
        why, way = "no batch is left to the teacher's samples", f"{share} below 1"
        yield self.seq_kd and all_own, f"seq_kd {share}", why, way
        own = self.signal == "student_topk" and not all_own
        yield own, f"signal {share}", "it asks about samples of the student alone"
        more = self.entropy_aware and self.signal == "topk" and self.entropy_top_k > self.top_k
        why, way = (
            "the teacher sends no more than top_k",
            "a smaller entropy_top_k, or a larger top_k",
        )
        yield more, "entropy_top_k top_k", why, way
        why = "KL(student||teacher) is estimated on samples whose log-probs are known"
        for key, also in (
            ("jsd_beta", ""),
            (share, " (or seq_kd=true)"),
            ("distill_temperature", ""),
        ):
            known = key == share and self.seq_kd  # as the teacher's samples have it
            off = self.signal == "sampled" and getattr(self, key) != 1 and not known
            yield off, f"signal {key}", why, f"{key}=1{also}"


OPTIMIZER = refused("the checkpoint has the state of the other optimizer")
CLIPPED = replace(
    ASKED, unless=unless_between(None, "with a clip_norm the optimizer's state has one more part")
)


def _decays(before: float, now: float, config: JsonObject) -> str:
    more = (before == 0) != (now == 0) and config["optimizer"]["name"] == "adafactor"
    return "without decay the state of adafactor has one part less" if more else ""


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule (optax)."""

    on_resume: ClassVar[OnResume] = ASKED
    name: Annotated[
        Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon"],
        refused("the checkpoint has the state of the other optimizer"),
    ] = "adamw"
    """The optax optimizer."""
    learning_rate: NonNegative = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the learning rate after the warm-up. linear and cosine end with the last batch of
    the run: updates that are skipped, or not needed because dynamic sampling dropped prompts, count
    as made."""
    warmup_steps: Count = 10
    """Optimizer updates over which the learning rate rises linearly to its peak. A step (one batch)
    counts as `actor.minibatches` times `actor.epochs_per_batch` of them. A shorter run ends below
    the peak, and says so."""
    min_lr_ratio: Fraction = 0.0
    """With the schedules linear and cosine: fraction of the peak to which the learning rate falls.
    It would have that value at the update after the last one."""
    weight_decay: Annotated[NonNegative, replace(ASKED, unless=_decays)] = 0.0
    """Decoupled weight decay (not with adam or sgd); embeddings, norms and biases are not
    decayed."""
    b1: Annotated[Decay, refused("the averages in the checkpoint were made with it")] = 0.9
    """Decay of the first moment (adamw, adam, lion; muon: of all that is no kernel; sgd:
    momentum)."""
    b2: Annotated[Decay, refused("the averages in the checkpoint were made with it")] = 0.95
    """Decay of the second moment (adamw, adam, lion; muon: of all that is no kernel)."""
    eps: PositiveNumber = 1e-8
    """Added to the denominator of an update (adamw, adam, muon)."""
    clip_norm: Annotated[PositiveNumber | None, CLIPPED] = 1.0
    """Gradients whose global norm exceeds this are scaled down to it. null: never."""

    def _rules(self) -> Iterator[Rule]:
        keys = (key for key, names in READ_BY.items() if self.name not in names)
        yield from unread(self, keys, "name", "that optimizer has none", "another optimizer")


READ_BY = {
    "weight_decay": ("adamw", "lion", "adafactor", "muon"),
    "b1": ("adamw", "adam", "sgd", "lion", "muon"),
    "b2": ("adamw", "adam", "lion", "muon"),
    "eps": ("adamw", "adam", "muon"),
}
"""Keys of `optimizer` -> the optimizers that read them."""

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


REFERS = replace(ASKED, decides="student.model=")
"""With 0 there is no reference: of the student's folder the tokenizer alone counts."""


class PolicyConfig(Section):
    """The policy loss of algorithms that learn from rewards. null is the algorithm's own value,
    which docs/reinforcement-learning.md lists, unless the key says otherwise."""

    on_resume: ClassVar[OnResume] = ASKED
    advantages: Literal["group", "similarity"] = "group"
    """Completions with which a reward is compared. group: all of the same prompt. similarity: those
    of the same prompt with a similar text (section `grouper`)."""
    reward_combination: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several rewards are combined into one advantage. sum_then_normalize: their weighted sum
    is compared within the group. normalize_then_sum: each reward is normalised separately within
    its group, and the weighted sum is normalised over the batch (GDPO), so that weights do not
    depend on the scale of a reward, and combinations with the same sum remain distinct. Penalties
    for length and KL then count as further rewards; scale_by_std=false only subtracts the means."""
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
    """Tokens by which aggregation sum_over_constant divides. null: `max_new_tokens`; for luspo
    1."""
    clip_low: NonNegative | None = None
    """Lower clip: in algorithms that clip, the importance ratio is kept above 1 - clip_low. null:
    the algorithm's own."""
    clip_high: NonNegative | None = None
    """Upper clip: in algorithms that clip, the importance ratio is kept below 1 + clip_high. null:
    the algorithm's own."""
    clip_dual: PositiveNumber | None = None
    """Dual clip, in algorithms that clip: upper bound of the importance ratio at negative
    advantages (above 1; 3 is usual). null: no bound."""
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
    kl_coef: Annotated[NonNegative, REFERS] = 0.0
    """Weight of KL(policy||reference) in the loss; above 0 the role `reference` is needed. Tokens
    are aggregated as in the policy loss: with luspo a completion's KL is the sum over its tokens,
    with gspo their mean."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    """Estimator of the KL that `policy.kl_coef` weighs. On-policy, the gradient of k2 is that of
    KL(policy||reference), the gradient of k3 that of KL(reference||policy)."""
    reward_kl_coef: Annotated[NonNegative, REFERS] = 0.0
    """KL penalty in the reward: this coefficient times KL(policy||reference) of the completion, in
    nats, is subtracted from its reward."""
    reward_kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL that `policy.reward_kl_coef` weighs."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus; a positive value increases the policy's entropy."""
    opd_coef: NonNegative = 0.0
    """On-policy distillation: this coefficient times (policy's log-prob - teacher's log-prob) of a
    sampled token, in nats, is subtracted from the token's advantage; needs a teacher and
    `distill.signal=sampled`."""
    dynamic_sampling: Annotated[Literal["off", "drop", "refill"] | None, SAMPLED] = None
    """Treatment of prompts whose completions would all have advantage 0 without the penalties for
    length and KL: all have the same task reward (functions and reward model), or no reward. off:
    they are kept. drop: they are left out of the policy loss. refill: other prompts are sampled
    instead (needs `schedule=serial`). null: off, except for dapo: refill with `schedule=serial`,
    else drop."""
    max_refills: Annotated[Positive, SAMPLED] = 4
    """With `policy.dynamic_sampling=refill`: most additional rounds of sampling for one batch."""
    correction: Corrections | None = None
    """Off-policy correction of the difference between the sampler's log-probs and the learner's at
    the start of the batch. tis_token, tis_sequence: truncated importance weights. icepop: drop
    tokens whose ratio is out of range. sequence_mask, sequence_geo_mask: drop whole completions.
    One name, or a list of two names of which one is sequence_geo_mask. null: tis_token where the
    weights that sample lag (`schedule`), else none. The mismatch is reported in any case
    (`policy/mismatch_*`)."""
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
    router_replay: Annotated[Flag, SAMPLED] = False
    """For mixtures of experts: record the experts that the sampler chose for each token of prompts
    and completions, in each layer, and route the learner's tokens to the same experts, with the
    learner's routing weights. Rounding then cannot change the routing."""

    def _rules(self) -> Iterator[Rule]:
        twice = self.bypass and self.correction not in (None, ("none",))
        way = "correction=none, or bypass=false"
        yield twice, "bypass correction", "they would correct twice", way


class EnvironmentConfig(Section):
    """Episodes of several turns: after each turn of the policy an environment answers, and what it
    says is read, not learned. All turns and answers together are one completion."""

    on_resume: ClassVar[OnResume] = ASKED
    name: Annotated[Name | None, refused("another environment has other episodes")] = None
    """The environment: `path/to/file.py:Class` (in a config file from that file's folder, else from
    the working directory), `package.module:Class`, a built-in one by its name, or `python:NAME`,
    which a Python program gives, as in `train(config, environment=NAME)`. null: none; a completion
    is one turn."""
    arguments: Annotated[Keywords, BeforeValidator(numbers), SAMPLED] = {}
    """Keyword arguments for the environment's class, as in `{id: FrozenLake-v1}` with
    `environment.name=gymnasium`."""
    max_turns: Annotated[Positive, SAMPLED] = 8
    """Maximum number of turns of the policy in an episode."""
    turn_tokens: Annotated[Positive | None, SAMPLED] = None
    """Maximum number of tokens of one turn of the policy; a turn that reaches it ends the episode.
    null: only the episode is limited, by `max_new_tokens`."""
    weight: Number = 1.0
    """Weight of the environment's reward in the sum with those of `reward.functions` and
    `reward.model`. 0: reported, not trained on."""
    credit: Literal["episode", "turn"] = "episode"
    """Reward from which the tokens of a turn learn. episode: that of the whole episode, compared
    with the other episodes of its prompt. turn: the rewards of this turn and of those after it,
    each compared with all turns of its prompt's episodes (process supervision of GRPO, arXiv
    2402.03300, section 4.1.3). A turn with reward 0 is compared, one without a reward (None) is
    not: with 0 until a final 1, short episodes are preferred even if all succeed. The penalties of
    an episode for length and KL, less their mean over its prompt's episodes, are added to its last
    turn."""
    discount: Fraction = 1.0
    """Discount factor per turn. With `credit=episode` the reward of turn k, from 0, is multiplied
    by discount^k. With `credit=turn` a turn's return multiplies the reward that comes k turns later
    by discount^k."""
    timeout: Annotated[PositiveNumber, FREE] = 30.0
    """Seconds that an environment may take for one answer. After that its process is killed; the
    episode ends without a reward, and is counted in `environment/timeouts`."""
    workers: Annotated[Positive | None, FREE] = None
    """Processes that run environments; each holds many episodes. null: twice the CPU cores, at most
    16 and at most one for each episode of a batch."""
    memory_mb: Annotated[Positive | None, FREE] = None
    """Megabytes of address space for each of these processes. null: no limit."""
    max_processes: Annotated[Positive, FREE] = 256
    """Maximum number of simultaneous processes of an environment, including the one that runs
    it."""
    max_failures: Annotated[Fraction, FREE] = 0.5
    """Share of a batch's episodes that may fail (exception, crash, timeout); beyond it the run
    ends."""

    def _rules(self) -> Iterator[Rule]:
        yield from self.without_environment("arguments")
        names = all(name.isidentifier() for name in self.arguments)
        why = "each name must be that of an argument in Python"
        yield not names, f"arguments={self.arguments}: {why}"

    def without_environment(self, *keys: str) -> Iterator[Rule]:
        """Yields the rule that none of these keys is set where there is no environment."""
        if self.name is None:
            why = "there is no environment"
            yield from unread(self, keys, "name", why, "environment.name too")


class OffloadConfig(Section):
    """Move arrays to pinned host memory while other roles of the pool work; results do not change,
    bit for bit."""

    on_resume: ClassVar[OnResume] = FREE
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

    on_resume: ClassVar[OnResume] = ASKED
    every: Annotated[Count, REPORTED] = 25
    """Steps between evaluations; 0: only before the first step and after the last."""
    prompts: Annotated[Positive, replace(ASKED, decides="data.eval")] = 256
    """Held-out prompts per set that are evaluated, the same each time; all prompts of a set that
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
    teacher: Annotated[Flag, REPORTED] = True
    """Evaluate the teacher once, before the first step, as a target for the student."""

    def _rules(self) -> Iterator[Rule]:
        greedy = self.temperature == 0
        why, way = "greedy completions of a prompt are all the same", "temperature above 0, or {}"
        same = greedy and self.samples > 1
        yield same, "samples temperature", why, way.format("samples=1")
        unread = greedy and (self.top_k > 0 or self.top_p < 1)
        why = "they have no effect on greedy completions"
        yield unread, "top_k top_p temperature", why, way.format("top_k=0 top_p=1")


class CheckpointConfig(Section):
    """Checkpoints in `RUN/checkpoints/STEP`, with all that a run needs to resume as if it had never
    stopped."""

    on_resume: ClassVar[OnResume] = FREE
    every: Count = 50
    """Steps between checkpoints, which are written while training continues; 0: only at the last
    step and when interrupted."""
    keep_last: Positive = 2
    """Number of newest checkpoints that are kept."""
    keep_best: Count = 1
    """Number of further checkpoints that are kept for the best `eval/accuracy`, among evaluated
    steps; where only an environment judges, for the best `eval/environment_reward`."""


class DeadlinesConfig(Section):
    """Longest duration of each kind of call, in seconds. A late call ends the run with an error
    that says what it was doing."""

    on_resume: ClassVar[OnResume] = FREE
    startup: PositiveNumber = 600.0
    """Seconds to load weights and build a role."""
    generate: PositiveNumber = 600.0
    """Seconds to sample one batch of completions, including compilation; with schedule=streaming
    since the batch before it."""
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
    Ctrl-C ends the run at once. null: as long as the deadlines of these calls allow."""


class RayConfig(Section):
    """Workers as processes, on one host or on the nodes of a Ray cluster (extra `ray`)."""

    on_resume: ClassVar[OnResume] = FREE
    address: Name | None = None
    """Ray cluster to join: `HOST:PORT` of its head, or `auto` for one that runs on this host. null:
    RAY_ADDRESS, or else a new cluster on this host, for this run alone."""
    devices_per_worker: Positive | None = None
    """Maximum number of devices per Ray process; the processes of a pool run one SPMD program.
    null: one process for a pool's share of a host."""
    max_restarts: Count = 3
    """Maximum number of restarts of dead or late workers before the run ends with an error. The
    count is reset after each trained step. A second count, of returns to the newest checkpoint, has
    the same limit and is reset by each newer checkpoint."""


class LoggingConfig(Section):
    """Console output, and the files and trackers that record the run."""

    on_resume: ClassVar[OnResume] = FREE
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


def _range(value: str) -> str:
    match = re.fullmatch(r"(\d+):(\d+)", value)
    if match is None:
        raise ValueError(
            f"{value!r} is not a range of steps: write first:stop, as in 3:5 for the steps 3 and 4"
        )
    first, stop = map(int, match.groups())
    if first < 1:
        raise ValueError(f"{value!r} begins with step {first}: the first step is 1")
    if first >= stop:
        raise ValueError(f"{value!r} holds no step: stop must exceed first, as in 3:5")
    return value


class ProfileConfig(Section):
    """Profiling of some steps of a run."""

    on_resume: ClassVar[OnResume] = FREE
    steps: Annotated[str, AfterValidator(_range)] | None = None
    """Steps `first:stop` to profile, stop excluded, as in `3:5` for the steps 3 and 4: writes a
    trace of JAX's profiler and a table of the stages to `RUN/profile`. Avoid the first two steps,
    which compile. null: none."""

    @property
    def range(self) -> range:
        """Returns the steps to profile, none where there is nothing to profile."""
        first, _, stop = (self.steps or "1:1").partition(":")
        return range(int(first), int(stop))
