"""The data that travels between the stages of a step, and the legend of all array shapes.

Shapes: P prompts, G group size, B = P * G sequences, W prompt width, C completion width, T = W + C
tokens of a sequence, V vocabulary, K top-k, D model width, N heads, KV key-value heads, H head
width, S cache positions, L layers. A trailing t stands for the teacher's: Dt, Vt.

A sequence is a left-padded prompt followed by a right-padded completion. Arrays of width C are
aligned with the completion: entry j belongs to token ``T - C + j``, which the hidden state at ``T -
C + j - 1`` predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Self, overload

import jax
import numpy as np

FinishReason = Literal["stop", "length", "unfinished"]
"""`unfinished`: still being sampled, as a checkpoint holds some (`schedule=streaming`)."""
Row = Mapping[str, Any]
"""The metrics of a step by name, with the number of the step under `step`. None stands for a value
that was not finite."""
Tree = Any
"""A pytree of arrays, shardings or shapes; None is the empty pytree."""
Array = Any
"""A `jax.Array`, its shape where a program is lowered only, a numpy array on the host, or None for
a field that is unused."""


class TokenIds(Sequence[int]):
    """Token ids that compare and hash as a tuple of ints, in an int32 array: a million of them are
    4 MB, and travel between processes in milliseconds where ints take a third of a second."""

    __slots__ = ("array",)

    def __init__(self, ids: Sequence[int] | np.ndarray):
        """Copies ids, [n]."""
        self.array = np.array(ids, np.int32)
        self.array.flags.writeable = False  # its hash must stay

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...
    def __getitem__(self, index: int | slice) -> int | TokenIds:
        found = self.array[index]
        return TokenIds(found) if isinstance(index, slice) else int(found)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return np.array_equal(self.array, other.array)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[int]) -> tuple[int, ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[int]) -> tuple[int, ...]:
        return (*other, *self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype, copy=copy)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenIds, (self.array,)

    def __repr__(self) -> str:
        return repr(tuple(self))


class _Tokenized:
    """Has fields of token ids, which are pickled as `TokenIds`."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name, value in state.items():
            if name.endswith(("tokens", "completion")) and isinstance(value, tuple):
                state[name] = TokenIds(value)
        return state


@dataclass(frozen=True)
class Turn:
    """A part of an episode: what the model wrote until it ended its turn, or what follows of it in
    the environment's words, the chat template's tokens around these included."""

    role: Literal["assistant", "environment"]
    tokens: int
    """How many of the completion's tokens it has."""
    text: str
    reward: float | None = None
    """Reward that the environment gave a turn of the assistant; None where it gave none."""
    roles: tuple[str, ...] = ()
    """Of what follows a turn: the roles of its messages, such as `tool`, each once. A message of
    the assistant that the data mark as not learned is among them."""

    @property
    def speaker(self) -> str:
        """Returns who says it, for who reads it: `assistant`, `tool`, `user` ..."""
        return ", ".join(self.roles) or self.role


@dataclass(frozen=True)
class TemplateInputs:
    """What a chat template reads beside the messages."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of tools."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values of names that only some templates have, such as `enable_thinking`."""


NO_INPUTS = TemplateInputs()


@dataclass(frozen=True)
class Prompt(_Tokenized):
    """One prompt, ready to be sampled from."""

    id: int
    """Position in the data order: unique within a run, and part of the seed of every sample."""
    tokens: Sequence[int]
    text: str
    completion: Sequence[int] | None = None
    """Tokens of the data set's own completion (EOS included), where there is one and the run may
    learn from it."""
    answer: str | None = None
    """The reference answer that a verifier compares with."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Every other field of the data row."""
    answer_value: object = None
    """The answer as the data have it, for code of users; None where that is the text itself."""
    inputs: TemplateInputs = NO_INPUTS
    """What the chat template read with the messages."""
    conversational: bool = False
    """Whether the data row, or the environment, has the prompt as messages; a text that a chat
    template makes a message is none."""
    teacher_tokens: Sequence[int] | None = None
    """The prompt that the teacher reads before a completion (`teacher.prompt`); None where it is
    `tokens`."""
    teacher_generation_tokens: Sequence[int] | None = None
    """The prompt that the teacher samples from, where its chat template opens thoughts otherwise
    than the student's; None: `teacher_tokens`."""
    teacher_prompt: str | tuple[Mapping[str, str], ...] | None = None
    """Text or chat of that prompt where it is only complete once a completion is judged
    (`data.prompt_encoder`)."""
    turns: tuple[Turn, ...] = ()
    """The parts of `completion`, where it has several turns of the assistant."""
    sampling_tokens: Sequence[int] | None = None
    """The prompt to sample from, where the data's completion does not continue it (a chat template
    whose generation prompt opens thoughts that the completion does not have); None: `tokens`."""
    teacher_sampling_tokens: Sequence[int] | None = None
    """Then `teacher_tokens` of the prompt to sample from."""

    @property
    def to_sample(self) -> Prompt:
        """Returns the prompt whose `tokens` are sampled from."""
        if self.sampling_tokens is None:
            return self
        return replace(
            self,
            tokens=self.sampling_tokens,
            teacher_tokens=self.teacher_sampling_tokens,
            sampling_tokens=None,
            teacher_sampling_tokens=None,
        )


@dataclass(frozen=True)
class Completion(_Tokenized):
    """One sampled completion of one prompt; of an environment, a whole episode (`turns`)."""

    tokens: Sequence[int]
    """Sampled ids, EOS included; of an episode, those of its environment too."""
    logprobs: np.ndarray
    """[len(tokens)] float32, nats: log-probs of the full softmax at the sampling temperature (at
    temperature 1 when greedy); 0 at tokens of an environment."""
    sampler_logprobs: np.ndarray
    """[len(tokens)] float32, nats: log-probs under the distribution that was sampled from, after
    truncation (top-k, top-p, min-p); 0 at tokens of an environment."""
    finish_reason: FinishReason
    text: str = ""
    """Decoded (`data.tokenizer.decode_text`), without EOS, and without the stop string unless that
    closes a tag; of an episode, the assistant's last turn, "" where it called tools."""
    turns: tuple[Turn, ...] = ()
    """The parts of an episode, in order; they have all tokens between them. Empty without an
    environment."""
    failure: str | None = None
    """Why the environment could not go on, "timeout: " or "exception: " first; such an episode has
    no reward."""
    experts: np.ndarray | None = None
    """[n, L, k] int8 or int16: the experts that each token passed in each layer of a mixture as the
    next one was sampled, prompt first, n = len(prompt) + len(tokens) - 1: the last token is never
    read. -1 before what an environment said. None: not recorded (`policy.router_replay`), or not
    begun."""
    opening: str = ""
    """What opened thoughts just before `text`: at the end of the prompt, or of an environment's
    answer. "" where nothing did."""
    versions: tuple[tuple[int, int], ...] = ()
    """(index of a token, version of the weights from there on), in order; the first index is 0."""

    @property
    def whole_text(self) -> str:
        """Returns the text from where its thoughts were opened on: what verifiers read."""
        return self.opening + self.text

    @property
    def token_versions(self) -> np.ndarray:
        """Returns the version of the weights of each token, as [len(tokens)] int."""
        at, versions = zip(*(self.versions or [(0, -1)]), strict=True)
        return np.repeat(versions, np.diff([*at, len(self.tokens)]))

    @property
    def sampled(self) -> np.ndarray:
        """Returns which tokens the model wrote, as [len(tokens)] bool."""
        sampled, end = np.ones(len(self.tokens), bool), 0  # also those of a turn that goes on
        for turn in self.turns:
            end += turn.tokens
            sampled[end - turn.tokens : end] = turn.role == "assistant"
        return sampled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """Prompts with their completions as rectangular arrays."""

    tokens: Array
    """[B, T] int32."""
    mask: Array
    """[B, T] bool: True at real tokens."""
    loss_mask: Array
    """[B, C] bool: True where a completion token trains (EOS included)."""
    group: int = field(default=1, metadata={"static": True})
    """Number of consecutive rows that share a prompt, which a forward pass may then compute once.
    1: none. `roles.microbatch.shared_group` checks the rows before this is set."""
    capacity: tuple[int, int] | None = field(default=None, metadata={"static": True})
    """Tokens that each device computes, all and those of completions: at least what its rows have
    (`models.packing.capacity_of`), and no more than their padding holds. None: as much as that."""
    experts: Array = None
    """[B, T, L, k] int8 or int16: the experts that each token passes in each layer of a mixture, to
    be replayed; -1 where the router chooses. None: it always does."""


class Aligned(IntEnum):
    """How a token of a completion is aligned with the tokens of a teacher with another tokenizer
    (`data.token_alignment`)."""

    NOT = 0
    """No span of the teacher's tokens stands for the text around it; or it is within a span of a
    completion that no policy sampled."""
    EXACT = 1
    """It is a span by itself, and the teacher's token is the same."""
    START = 2
    """The first token of another span."""
    INSIDE = 3
    """Another token of that span."""
    START_ONLY = 4
    """`START` in a completion that no policy sampled: only the beginning is compared."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenAlignment:
    """The student's tokens of completions, C to a row, and the teacher's, C' to a row."""

    kinds: Array
    """[B, C] int32: `Aligned`."""
    sizes: Array
    """[B, C] int32: bytes that a token stands for; one that ends a completion has 0."""
    index: Array
    """[B, C] int32: the first of the teacher's tokens in the same span; 0 where not aligned."""
    starts: Array
    """[B, C'] bool: the teacher's tokens that begin a span."""


@dataclass(frozen=True)
class SampleCounts:
    """Sums over completions that were sampled."""

    prompts: int = 0
    completions: int = 0
    tokens: int = 0
    """Tokens of the completions, EOS included; in episodes also those of the environment."""
    generated: int = 0
    """Tokens that the model wrote."""
    truncated: int = 0
    """Completions cut by a limit."""
    turns: int = 0
    """The model's, in episodes."""
    failures: int = 0
    """Episodes whose environment failed; those that were too late are counted in `timeouts`."""
    timeouts: int = 0
    failure: str | None = None
    """The first one's."""
    unscored_groups: int = 0
    """Prompts without a reward, where dynamic sampling replaced them."""
    degenerate_groups: int = 0
    """Likewise prompts with rewards, but no advantage other than 0."""
    prompt_tokens: int = 0
    """Of the prompts, each once, where these were replaced."""

    @classmethod
    def count(cls, prompts: int, completions: Sequence[Completion], **of_prompts: int) -> Self:
        """Counts the completions of so many prompts."""
        failures = [c.failure for c in completions if c.failure is not None]
        late = sum(failure.startswith("timeout") for failure in failures)
        return cls(
            prompts,
            len(completions),
            sum(len(c.tokens) for c in completions),
            sum(int(c.sampled.sum()) for c in completions),
            sum(c.finish_reason == "length" for c in completions),
            sum(turn.role == "assistant" for c in completions for turn in c.turns),
            len(failures) - late,
            late,
            next(iter(failures), None),
            **of_prompts,
        )

    def __add__(self, other: SampleCounts) -> SampleCounts:
        fields = ((n, x, getattr(other, n)) for n, x in vars(self).items() if n != "failure")
        total = {name: mine + theirs for name, mine, theirs in fields}
        return SampleCounts(**total, failure=self.failure or other.failure)


class StreamEvent(NamedTuple):
    """A call, or answers of environments, that came while completions were sampled, after so many
    launches: all that timing decides of a run whose `schedule` is `streaming`."""

    call: str
    """`load`, `sample` (an evaluation), `generate`, `save` (a checkpoint), `made` (a batch has
    ended) or `answers`."""
    number: int
    """The version of the weights; of `generate` and `made`, the batch; of `answers`, which ones
    (`stream_log.ANSWERS`)."""
    launches: int
    """Since the event before."""


@dataclass(frozen=True)
class StreamEvents:
    """What happened to a sampler, from some time on."""

    sampler: str
    """Another one after a restart."""
    first: int
    """How many events of it came before these."""
    events: tuple[StreamEvent, ...]


@dataclass(frozen=True)
class Rollout:
    """A batch of completions under one set of weights, on the host."""

    sequences: Sequences
    """numpy arrays."""
    prompts: tuple[Prompt, ...]
    """One for each row, so that each prompt is repeated G times. Rows beyond these are padding,
    with an all-False mask."""
    completions: tuple[Completion, ...]
    """One for each row that has a prompt."""
    group_ids: np.ndarray
    """[B] int32: rows with equal ids are samples of one prompt; -1 at padding rows."""
    logprobs: np.ndarray
    """[B, C] float32, nats, 0 at padding."""
    sampler_logprobs: np.ndarray
    """[B, C] float32, nats, 0 at padding."""
    policy_version: int
    """Version of the weights that sampled this, the oldest of several: the number of batches they
    were trained on. -1 for completions of the data set or of the teacher."""
    decode_steps: int = 0
    """Number of decode steps; 0 where nothing was decoded."""
    sent_back: int = 0
    """How often a completion lost its slot for want of pages of the cache, and was read again."""
    read_again: int = 0
    """Tokens that were prefilled a second time, for want of pages or with new weights."""
    read_again_s: float = 0.0
    """Seconds for that, but for prompts that were prefilled with new ones."""
    waited_s: float = 0.0
    """Seconds in which sampling waited for environments alone."""
    notes: tuple[str, ...] = ()
    """Messages for the user about the environments, or the teacher's samples."""
    events: StreamEvents | None = None
    """What happened up to its end, at least since the batch before it was begun; None where batches
    are not streamed."""
    replaced: SampleCounts = SampleCounts()
    """What was sampled for this batch and is not in it (`policy.dynamic_sampling=refill`)."""
    student_topk: Array = None
    """[B, C, K] int32: the policy's K most probable tokens, for the `student_topk` teacher signal.
    """
    experts: Array = None
    """As in `Sequences`: those that the sampler chose, which only the policy replays."""
    alignment: TokenAlignment | None = None
    """numpy arrays. Set where `sequences` are the teacher's tokens and the completions' are not."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HiddenSignal:
    """The teacher's last hidden states; the actor holds its LM head."""

    hidden: Array
    """[B, C, Dt], after the final norm; of a mixture of teachers, those of each one after the
    other. Where rows have teachers of several widths, zeros follow the narrower."""


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """What the entropy-aware term reads of a teacher that sends log-probs; None without it."""

    best_ids: Array = None
    """[B, C, K'] int32: the teacher's own most probable tokens."""
    best_logprobs: Array = None
    """[B, C, K'] float32, nats."""
    best_tail: Array = None
    """[B, C] float32, nats: log of the probability outside the K' ids."""
    entropy: Array = None
    """[B, C] float32, nats."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TopKSignal(Uncertainty):
    """The teacher's log-probs of K tokens: its own most probable ones, or the student's."""

    topk_ids: Array
    """[B, C, K] int32."""
    topk_logprobs: Array
    """[B, C, K] float32, nats."""
    tail_logprob: Array
    """[B, C] float32, nats: log of the probability outside the K ids."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledSignal(Uncertainty):
    """The teacher's log-probs of the completion's tokens."""

    token_logprobs: Array
    """[B, C] float32, nats."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AlignedSignal:
    """What a teacher with another tokenizer sends, at the student's tokens
    (`losses.token_spans`). Hidden states or the most probable outcomes, in the place of tokens, are
    those of the beginning of each token's span; neither is set for the signal `sampled`."""

    span_logprobs: Array
    """[B, C] float32, nats: at each token the log-prob of its span."""
    kinds: Array = None
    """[B, C] int32: as in `TokenAlignment`."""
    sizes: Array = None
    """[B, C] int32: as in `TokenAlignment`."""
    hidden: Array = None
    """[B, C, Dt], where spans begin."""
    topk_ids: Array = None
    """[B, C, K] int32: outcomes."""
    topk_logprobs: Array = None
    """[B, C, K] float32, nats."""
    tail_logprob: Array = None
    """[B, C] float32, nats: log of the probability of all other outcomes."""
    baseline: Array = None
    """[B, C] float32, nats: `losses.token_spans.span_baseline`. Set by the actor, of a whole batch.
    """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnSignal:
    """What an algorithm of the user's has its teacher send (`SignalSpec`)."""

    tensors: dict[str, Array]
    """Each [B, C, ...]."""


TeacherSignal = HiddenSignal | TopKSignal | SampledSignal | AlignedSignal | OwnSignal
"""What a teacher sends for each completion position (`distill.signal`)."""


def signal_of(tensors: Mapping[str, Array]) -> HiddenSignal | TopKSignal | SampledSignal:
    """Returns the signal whose fields these tensors are, as they are sent and stored by name."""
    for signal, name in ((HiddenSignal, "hidden"), (TopKSignal, "topk_ids")):
        if name in tensors:
            return signal(**tensors)
    return SampledSignal(**tensors)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainBatch:
    """The data that the actor trains on; the first dim of every leaf is the sequences."""

    sequences: Sequences
    teacher: TeacherSignal | None = None
    sampler_logprobs: Array = None
    """[B, C] float32, nats."""
    advantages: Array = None
    """[B] float32; where the algorithm learns from rewards."""
    ref_logprobs: Array = None
    """[B, C] float32, nats, under the reference."""
    old_logprobs: Array = None
    """[B, C] float32, nats, under the policy at the start of the batch. None with one update per
    batch, where that is the policy in training."""
    in_policy: Array = None
    """[B] bool: rows that the policy loss, its KL and its entropy include; None: all. The other
    rows train on the divergence from a teacher only."""
    teacher_weights: Array = None
    """[B, C, K] float32: the share of each of several teachers; they sum to 1 in rows with a
    prompt. None: there is one teacher."""

    @property
    def policy_mask(self) -> Array:
        """Returns which tokens count for the policy loss, as [B, C] bool."""
        mask = self.sequences.loss_mask
        return mask if self.in_policy is None else mask & self.in_policy[..., None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """Counts that divide the terms of the loss, over all micro-batches and devices of an update."""

    tokens: Array
    """Scalar: tokens that train in any loss. The divergence from a teacher includes all of them."""
    policy_tokens: Array
    """Scalar: tokens of the policy loss."""
    policy_sequences: Array
    """Scalar: sequences with such a token."""
    of_experts: Array = None
    """[E + 1] float32 (`experts.tokens_of_experts`): where there are several micro-batches, and a
    term that balances the experts."""


@dataclass(frozen=True)
class Weights:
    """A version of the policy, on its way from actor to rollout."""

    version: int
    """Number of batches that it was trained on."""
    params: dict[str, Tree]
    """In the receiver's layout and dtype. If actor and receiver are in one process: arrays on the
    receiver's mesh. Else: arrays on the actor's mesh, which arrive at the receiver as `Shards`."""
    nbytes: int
    """Bytes that are copied; leaves shared with the actor do not count."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Path -> checksum (`reshard.checksums`) of each array that moves to other devices, taken
    before it does."""


@dataclass(frozen=True)
class Trained:
    """The metrics of training on a batch."""

    metrics: dict[str, float]
    """Metrics of the whole batch."""
    by_row: dict[str, np.ndarray]
    """Metrics of each row, [B], from the first pass over the batch; NaN for a row that did not
    train."""
    learned: np.ndarray
    """[B] int: tokens of each row that trained, those of `actor/tokens`."""
    advantages: np.ndarray | None = None
    """[B] float32, or [B, C] of tokens; where the algorithm learns from rewards."""


@dataclass(frozen=True)
class TokenValues:
    """What the policy in training makes of the tokens of completions; 0 at padding."""

    logprobs: np.ndarray
    """[B, C] float32, nats, at the sampling temperature."""
    entropy: np.ndarray
    """[B, C] float32, nats, at the sampling temperature."""
    divergence: np.ndarray | None
    """[B, C] float32, nats: from the teacher, as `distill/divergence` is its mean; of the signal
    `sampled` the estimate k1 of the reverse KL. None without a teacher's scores."""


@dataclass(frozen=True)
class Embedded:
    """Embeddings of the answers in a batch of completions, for their similarity."""

    vectors: np.ndarray
    """[n, D] float32 of length 1, one for each completion; zeros where there is no answer."""
    texts: tuple[str | None, ...]
    """The texts that were embedded; None for a completion whose `<think>` never ended."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""


RoleScores = Mapping[str, Any]
"""Role -> the list of the parts of its scores. A part is a `TeacherSignal`, an array or a
`RewardReport`, depending on the role."""
Frozen = Mapping[str, Tree]
"""Name -> arrays that a loss reads and that are not trained, such as the teacher's head."""
SumCount = tuple[Array, Array]
Sums = dict[str, SumCount]
"""Metric name -> (sum, count), to be added up over micro-batches and divided once; both are
scalars, or both [B] where each row has its own."""
LossParts = tuple[SumCount, Sums, dict[str, Array]]
Loss = Callable[[Tree, Frozen, TrainBatch, Totals], LossParts]
"""(parameters, frozen arrays, micro-batch, totals of the update) -> ((loss sum, count), metrics as
(sum, count), metrics that are combined by their maximum). The loss sum is differentiable. A metric
whose sum and count are [b], one per row, is also reported per row."""
Prepare = Callable[[Rollout, RoleScores], tuple[TrainBatch, dict[str, float]]]
"""(rollout, scores of each role) -> (the batch to train on, metrics). The arrays of the batch may
be on the host or on another mesh."""
Finish = Callable[[Mapping[str, tuple[float, float]], Mapping[str, float]], dict[str, float]]
"""(sums over all updates, maxima) -> the metrics of the batch."""
