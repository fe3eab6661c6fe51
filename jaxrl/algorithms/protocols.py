"""The methods of each role that the loop and algorithms may call, and the object that calls them.

A call names a method of a Protocol, so that a type checker knows what it takes and returns:
`ask("actor", ActorRole.publish, version=3, dtype="float32")` is a `Future[Weights]`, which may be
the first argument of the next call. Workers check their roles against the same Protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import numpy as np

from jaxrl.config.schema import Config
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.runtime.worker import Future
from jaxrl.types import (
    Completion,
    Embedded,
    Prompt,
    RoleScores,
    Rollout,
    TeacherSignal,
    Trained,
    Weights,
)

A = TypeVar("A")
T = TypeVar("T")
P = ParamSpec("P")


class ActorRole(Protocol):
    """Trains the policy."""

    def update(self, rollout: Rollout, scores: RoleScores, step: int) -> Trained:
        """Trains on one rollout batch."""

    def publish(self, version: int, dtype: str) -> Weights:
        """The policy after `version` batches, on its way to the role that samples."""

    def publish_to_teacher(self, version: int) -> Weights:
        """The policy after `version` batches, or its moving average (`teacher.ema`), on its way to
        a teacher that follows it."""

    def save(self, folder: Path, step: int) -> int:
        """Starts to write the state after `step` batches to `folder`; returns `step`."""

    def saved(self, step: int) -> str | None:
        """Waits until the save of `step` is on disk. Returns None or an error message. May be
        called from another thread."""

    def export(self, folder: Path, tokenizer_from: Path | None) -> str | None:
        """Writes the policy as a Hugging Face folder. Returns None or an error message."""


class ServedTeacherRole(Protocol):
    """A teacher served outside the run, or its scores on disk: it cannot sample."""

    def score(self, rollout: Rollout, part: int = 0, parts: int = 1) -> TeacherSignal | None:
        """The teacher's signal for the `part`-th of `parts` slices of rows; None if it is empty."""


class SamplingRole(Protocol):
    """Samples completions."""

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        """`group_size` completions of each prompt, to train on."""

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """`eval.samples` completions of each prompt, to evaluate."""


class TeacherRole(SamplingRole, Protocol):
    """Scores completions; samples, for `distill.seq_kd` and for its own accuracy."""

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """As in `ServedTeacherRole`. `rewards` are for a teacher that gets feedback."""


class FollowingTeacherRole(TeacherRole, Protocol):
    """A teacher whose weights come from the actor."""

    def load(self, weights: Weights) -> dict[str, float]:
        """Takes the next version. Returns the metrics of the transfer."""


class RolloutRole(SamplingRole, Protocol):
    """Samples with the policy's weights."""

    def generate(self, prompts: Sequence[Prompt], step: int, attempt: int = 0) -> Rollout:
        """As in `SamplingRole`; each attempt uses different random numbers."""

    def load(self, weights: Weights) -> dict[str, float]:
        """Takes the next version of the policy. Returns the metrics of the transfer."""


class ReferenceRole(Protocol):
    """Scores completions with a frozen copy of the policy before training."""

    def score(self, rollout: Rollout, part: int = 0, parts: int = 1) -> np.ndarray | None:
        """[rows, C] float32 log-probs, in nats, for the `part`-th of `parts` slices of rows; None
        if it is empty."""


class RewardRole(Protocol):
    """Judges completions."""

    def score(self, rollout: Rollout) -> RewardReport: ...


class GrouperRole(Protocol):
    """Embeds completions."""

    def score(self, rollout: Rollout) -> Embedded: ...


def protocols(config: Config) -> dict[str, type]:
    """Role -> its Protocol."""
    teacher: type = TeacherRole if config.teacher_models else ServedTeacherRole
    return {
        "actor": ActorRole,
        "rollout": RolloutRole,
        "teacher": FollowingTeacherRole if config.teacher_follows else teacher,
        "reference": ReferenceRole,
        "reward": RewardRole,
        "grouper": GrouperRole,
    }


def deadline_of(config: Config, method: str) -> float:
    """Deadline of a call of the method, in seconds."""
    d = config.deadlines
    return {
        "update": d.update,
        **dict.fromkeys(("publish", "publish_to_teacher", "load"), d.weight_sync),
        **dict.fromkeys(("save", "saved"), d.checkpoint),
        "export": d.export,
        "generate": d.generate,
        "sample": d.evaluate,
        "score": d.score,
    }[method]


@dataclass(frozen=True)
class Ask:
    """Calls a role: (role, a method of its Protocol, the method's arguments) -> the future of what
    the method returns. The first argument, and what is in lists and dicts, may be futures.
    """

    send: Callable[..., Future[Any]]
    """(role, name of the method, *args, **kwargs)."""

    @overload
    def __call__(
        self,
        role: str,
        method: Callable[Concatenate[Any, A, P], T],
        first: Future[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]: ...
    @overload
    def __call__(
        self,
        role: str,
        method: Callable[Concatenate[Any, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]: ...
    def __call__(
        self, role: str, method: Callable[..., T], /, *args: object, **kwargs: object
    ) -> Future[T]:
        return self.send(role, method.__name__, *args, **kwargs)
