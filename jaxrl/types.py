"""What travels between the stages of a step, and the legend of every shape.

Shapes: P prompts, G group size, B = P * G sequences, W prompt width, C completion width, T = W + C
tokens of a sequence, V vocabulary, K top-k, D model width, N heads, KV key-value heads, H head
width, S cache positions, L layers; t is the teacher's: Dt, Vt.

A sequence is a left-padded prompt followed by a right-padded completion. Arrays of width C are
aligned with the completion: entry j belongs to token ``T - C + j``, which the hidden state at ``T -
C + j - 1`` predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

FinishReason = Literal["stop", "length"]
JsonObject = dict[str, Any]
"""An object of JSON or a mapping of YAML, as it is parsed or written."""
Row = Mapping[str, Any]
"""The metrics of a step by their names, and its number under `step`; None where a value was not
finite."""
Tree = Any
"""A pytree: of arrays, or of what stands for them (shardings, shapes); None is an empty one."""
Array = Any
"""A `jax.Array` in a traced program, a numpy array on the host; None where a field does not apply.
"""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready to be sampled from."""

    id: int
    """Position in the data order: unique within a run, and part of the seed of every sample."""
    tokens: tuple[int, ...]
    text: str
    completion: tuple[int, ...] | None = None
    """Tokens of the data set's own completion (EOS included), where there is one."""
    answer: str | None = None
    """What a verifier compares with."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """Every other field of the data row."""


@dataclass(frozen=True)
class Completion:
    """One sampled completion of one prompt."""

    tokens: tuple[int, ...]
    """Sampled ids, EOS included."""
    logprobs: np.ndarray
    """[len(tokens)] float32, nats: full softmax at the sampling temperature (at 1 when greedy)."""
    sampler_logprobs: np.ndarray
    """[len(tokens)] float32, nats: of the distribution that was sampled from, after truncation."""
    finish_reason: FinishReason
    text: str = ""
    """Decoded, without EOS and without the stop string."""


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
    """So many rows after each other share their prompt, and a pass may compute it once for them;
    set inside a program, which has it checked before (`roles.microbatch.shared_group`)."""


@dataclass(frozen=True)
class Rollout:
    """A batch of completions under one set of weights, on the host."""

    sequences: Sequences
    """numpy arrays."""
    prompts: tuple[Prompt, ...]
    """One for each row (a prompt stands G times); rows beyond these are padding, all-False in the
    mask.
    """
    completions: tuple[Completion, ...]
    """One for each row that has a prompt."""
    group_ids: np.ndarray
    """[B] int32: rows with one id are samples of one prompt; -1 at padding rows."""
    logprobs: np.ndarray
    """[B, C] float32, nats, 0 at padding."""
    sampler_logprobs: np.ndarray
    """[B, C] float32, nats, 0 at padding."""
    policy_version: int
    """Batches trained into the weights that generated this; -1 for the data set's or the teacher's
    completions.
    """
    decode_steps: int = 0
    """Steps that decoding took; 0 where nothing was decoded."""
    student_topk: Array = None
    """[B, C, K] int32: the policy's K most probable tokens, for the `student_topk` teacher signal.
    """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TeacherSignal:
    """What a teacher says about each completion position; only the fields of its signal are set."""

    hidden: Array = None
    """[B, C, Dt]: last hidden states, after the final norm."""
    topk_ids: Array = None
    """[B, C, K] int32."""
    topk_logprobs: Array = None
    """[B, C, K] float32, nats."""
    tail_logprob: Array = None
    """[B, C] float32, nats: log of the probability outside the K ids."""
    token_logprobs: Array = None
    """[B, C] float32, nats: of the token in the sequence."""
    best_ids: Array = None
    """[B, C, K'] int32: the teacher's own most probable tokens, for the entropy-aware term."""
    best_logprobs: Array = None
    """[B, C, K'] float32, nats."""
    best_tail: Array = None
    """[B, C] float32, nats: log of the probability outside the K' ids."""
    entropy: Array = None
    """[B, C] float32, nats."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainBatch:
    """What one update sees; every leaf has the sequences as its first dim."""

    sequences: Sequences
    teacher: TeacherSignal | None = None
    sampler_logprobs: Array = None
    """[B, C] float32, nats."""
    advantages: Array = None
    """[B] float32; where the algorithm learns from rewards."""
    ref_logprobs: Array = None
    """[B, C] float32, nats, under the reference."""
    old_logprobs: Array = None
    """[B, C] float32, nats, under the policy at the start of the batch; None where that is the
    policy in training, because there is one update."""
    in_policy: Array = None
    """[B] bool: rows of the policy loss and of what goes with it (KL, entropy); None: all. The
    others train on the divergence from a teacher only."""

    @property
    def policy_mask(self) -> Array:
        """[B, C] bool: tokens of the policy loss."""
        mask = self.sequences.loss_mask
        return mask if self.in_policy is None else mask & self.in_policy[..., None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Totals:
    """What the terms of one update are divided by, over all its micro-batches and devices."""

    tokens: Array
    """Scalar: tokens that train, in whichever loss; the divergence from a teacher has them all."""
    policy_tokens: Array
    """Scalar: tokens of the policy loss."""
    policy_sequences: Array
    """Scalar: sequences with such a token."""


@dataclass(frozen=True)
class Weights:
    """A version of the policy, on its way to the roles that sample."""

    version: int
    """Batches trained into it."""
    params: dict[str, Tree]
    """In the receiver's layout and dtype. Arrays on the receiver's mesh, or on the actor's where
    that is not of this worker; in place of these, `Shards` arrive there."""
    nbytes: int
    """Bytes that are copied, here or on their way; leaves shared with the sender are not."""
    seconds: float
    """Cast, unstacking and transfer."""


@dataclass(frozen=True)
class Trained:
    """The metrics of training on a batch."""

    metrics: dict[str, float]
    """Of the whole batch."""
    by_row: dict[str, np.ndarray]
    """Of each row, [B], in the first pass over the batch; NaN where nothing of it was trained."""


@dataclass(frozen=True)
class Embedded:
    """The answers of a batch of completions, for the similarity of one to another."""

    vectors: np.ndarray
    """[n, D] float32 of length 1, one for each completion; zeros where there is no answer."""
    texts: tuple[str | None, ...]
    """What was embedded; None for a thought that never ended."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


RoleScores = Mapping[str, Any]
"""Role -> what it said of a rollout, a list of parts: each a `TeacherSignal`, an array, a report.
"""
Frozen = Mapping[str, Tree]
"""Name -> arrays that a loss reads and nobody trains, such as the teacher's head."""
SumCount = tuple[Array, Array]
Sums = dict[str, SumCount]
LossParts = tuple[SumCount, Sums, dict[str, Array]]
Loss = Callable[[Tree, Frozen, TrainBatch, Totals], LossParts]
"""(parameters, frozen arrays, micro-batch, totals of the update) -> ((loss sum, count), metrics as
(sum, count), metrics of which the largest counts); differentiable sum. A metric whose sum and count
are [b], one for each row, is also reported per row.
"""
Prepare = Callable[[Rollout, RoleScores], tuple[TrainBatch, dict[str, float]]]
"""(rollout, what each scorer said of it) -> what is trained on, on the host or on its way; and what
to tell of it.
"""
Finish = Callable[[Mapping[str, tuple[float, float]], Mapping[str, float]], dict[str, float]]
"""(sums of all updates, maxima) -> the metrics of the batch."""
