"""The methods of each role that the loop and algorithms may call, and the object that calls them.

A call names a method of a Protocol, so that a type checker knows what it takes and returns:
`ask("actor", ActorRole.publish, version=3, dtype="float32")` is a `Future[Weights]`, which may be
the first argument of the next call. Workers check their roles against the same Protocols.
`Sources` are the calls and the data as an algorithm sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import numpy as np

from jaxrl.config.schema import Config
from jaxrl.data.batch import DATA, data_rollout, make_rollout
from jaxrl.data.stream import REFILL_OFFSET
from jaxrl.formats.hf import TokenizerFiles
from jaxrl.process.json_types import Keywords
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.runtime.worker import Future, Wait, done_future
from jaxrl.types import (
    Completion,
    Embedded,
    Prompt,
    RoleScores,
    Rollout,
    StreamEvent,
    StreamEvents,
    TeacherSignal,
    TokenValues,
    Trained,
    Weights,
)

A = TypeVar("A")
T = TypeVar("T")
P = ParamSpec("P")


class ActorRole(Protocol):
    """Trains the policy: `roles.actor.Actor`."""

    def update(
        self,
        rollout: Rollout,
        scores: RoleScores,
        step: int,
        part: int = 0,
        whole: Rollout | None = None,
    ) -> Trained | None: ...
    def inspect(self, rollout: Rollout, scores: RoleScores | None) -> TokenValues: ...
    def publish(self, version: int) -> Weights: ...
    def publish_to_teacher(self, version: int) -> Weights: ...
    def save(self, folder: Path, step: int) -> int: ...
    def saved(self, step: int) -> str | None: ...
    def export(self, folder: Path, tokenizer_from: TokenizerFiles | None) -> str | None: ...


class TeacherRole(Protocol):
    """Every teacher; what it needs to score, and whether it follows the policy, is in
    `role_calls`."""

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """Returns the signal for each completion position of the `part`-th of `parts` slices of
        rows; None if the slice is empty. Only a teacher that needs `rewards` reads them."""


class SamplingRole(Protocol):
    """Samples completions, to train on or to evaluate: `roles.rollout.Sampler`."""

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout: ...
    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]: ...


class SamplingTeacherRole(TeacherRole, SamplingRole, Protocol):
    """A teacher of the run's own, which samples for `distill.seq_kd` and for its own accuracy."""


class ReceivingRole(Protocol):
    """Works with weights that the actor sends."""

    def load(self, weights: Weights) -> dict[str, float]:
        """Takes the next version. Returns the metrics of the transfer."""


class FollowingTeacherRole(SamplingTeacherRole, ReceivingRole, Protocol):
    """A teacher that follows the policy."""


class RolloutRole(SamplingRole, ReceivingRole, Protocol):
    """Samples with the policy's weights; each attempt uses different random numbers."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        step: int,
        attempt: int = 0,
        begun: Rollout | None = None,
    ) -> Rollout: ...
    def part(self, step: int, number: int) -> Rollout: ...
    def unfinished(self, saved: int) -> tuple[dict[int, Rollout], StreamEvents]: ...
    def follow(self, expected: Sequence[StreamEvent], exact: bool) -> None: ...


class ReferenceRole(Protocol):
    """Scores completions with a frozen copy of the policy: `roles.reference.Reference`."""

    def score(self, rollout: Rollout, part: int = 0, parts: int = 1) -> np.ndarray | None: ...


class RewardRole(Protocol):
    """Judges completions."""

    def score(self, rollout: Rollout) -> RewardReport: ...
    def use(self, config: Config, given: Mapping[str, bytes]) -> None: ...


class GrouperRole(Protocol):
    """Embeds completions."""

    def score(self, rollout: Rollout) -> Embedded: ...


@dataclass(frozen=True)
class RoleCalls:
    """How a role is called: what the loop asks in place of the role's name."""

    protocol: Any
    """Has its methods."""
    parts: int | None = None
    """Slices of the rows that it scores, one in a call; None: all at once."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Argument of its `score` -> the role whose scores of the batch that is."""
    publish: Callable[..., Weights] | None = None
    """The actor's method that sends it the policy; None: it takes no weights."""
    consumed: bool = False
    """Its scores are freed once the actor has them."""
    concurrent: bool = False
    """It takes several calls at once."""


def role_calls(config: Config) -> dict[str, RoleCalls]:
    """Maps each role to how it is called."""
    teacher: Any = SamplingTeacherRole if config.teacher_models else TeacherRole
    follows = config.teacher_follows
    return {
        "actor": RoleCalls(ActorRole),
        "rollout": RoleCalls(RolloutRole, publish=ActorRole.publish),
        "teacher": RoleCalls(
            FollowingTeacherRole if follows else teacher,
            config.slices("teacher") // config.parts,
            needs={"rewards": "reward"} if config.teacher_gets_feedback else {},
            publish=ActorRole.publish_to_teacher if follows else None,
            consumed=True,  # the largest scores there are
            concurrent=bool(config.served),
        ),
        "reference": RoleCalls(ReferenceRole, config.slices("reference") // config.parts),
        "reward": RoleCalls(RewardRole),
        "grouper": RoleCalls(GrouperRole),
    }


def protocols(config: Config) -> dict[str, type]:
    """Maps each role to its Protocol."""
    return {role: calls.protocol for role, calls in role_calls(config).items()}


def call_deadlines(config: Config) -> dict[str, float]:
    """Maps each method that a run calls to the deadline of its calls, in seconds."""
    d = config.deadlines
    return {
        **dict.fromkeys(("update", "inspect"), d.update),
        **dict.fromkeys(("use", "follow"), d.startup),
        **dict.fromkeys(("publish", "publish_to_teacher", "load"), d.weight_sync),
        **dict.fromkeys(("save", "saved", "unfinished"), d.checkpoint),
        "export": d.export,
        **dict.fromkeys(("generate", "part"), d.generate),
        "sample": d.evaluate,
        "score": d.score,
    }


class CallRole(Protocol):
    """Calls a role: (role, a method of its Protocol, the method's arguments) -> the future of what
    the method returns. The first argument, and what is in lists and dicts, may be futures."""

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


@dataclass
class Sources:
    """The roles and the data, as an algorithm sees them. Every call returns a future at once."""

    config: Config
    prompts: Callable[[int], Sequence[Prompt]]
    """Batch index -> its prompts; a pure function. As in `PromptStream.batch`, refills included."""
    packing: Mapping[str, int]
    """Arguments of `make_rollout`: widths, pad id, row multiple."""
    call: CallRole
    """(role, method, *args, **kwargs) -> the future of the call."""
    wait: Wait
    """future -> its value. Raises `Stopped` if the run was asked to end and does not need the
    call."""
    held_out: Sequence[Prompt] = ()
    """Prompts of the evaluations."""
    decode: Callable[[Sequence[int]], str] = str
    """The text of tokens, for the data's own completions."""
    stored: Callable[[Sequence[Prompt]], list[list[Completion]]] | None = None
    """The teacher's samples of prompts, where `teacher.cache` holds them."""
    early_scores: dict[int, dict[str, Sequence[Future[object]]]] = field(default_factory=dict)
    """Batch index -> role -> scores that were computed while the batch was being sampled (dynamic
    sampling)."""
    beside_actor: Sequence[str] = ()
    """Roles that share the actor's devices."""
    evaluated: Sequence[str] = ()
    """Roles beside the rollout whose accuracy is measured, before the first step."""

    def __post_init__(self) -> None:
        self.role_calls = role_calls(self.config)
        self.refills = self.config.dynamic_sampling == "refill"
        """Whether other prompts replace those that teach nothing."""

    def student_samples(self, index: int, attempt: int = 0) -> Future[Rollout]:
        """Samples the completions of batch `index` from the policy; a further attempt samples other
        prompts, with random numbers of its own."""
        prompts = self.prompts(index + attempt * REFILL_OFFSET)
        return self.call("rollout", RolloutRole.generate, prompts, step=index, attempt=attempt)

    def teacher_samples(self, index: int) -> Future[Rollout]:
        prompts = self.prompts(index)
        if self.stored is None:
            return self.call("teacher", SamplingTeacherRole.generate, prompts, step=index)
        prompts = [prompt.to_sample for prompt in prompts]
        return done_future(
            make_rollout(prompts, self.stored(prompts), policy_version=DATA, **self.packing)
        )

    def data_completions(self, index: int) -> Future[Rollout]:
        packed = data_rollout(self.prompts(index), decode=self.decode, **self.packing)
        return done_future(packed)

    def parts_of(self, rollout: Rollout) -> list[Future[Rollout]]:
        """Returns the `Config.parts` of a whole batch; none where it is one."""
        count, n = self.config.parts, self.config.group_size
        rows = self.config.batch_rows // count
        cuts = [slice(i * rows, (i + 1) * rows) for i in range(count if count > 1 else 0)]
        return [
            done_future(
                make_rollout(
                    rollout.prompts[cut][::n],
                    [rollout.completions[i : i + n] for i in range(cut.start, cut.stop, n)],
                    policy_version=rollout.policy_version,
                    **self.packing,
                )
            )
            for cut in cuts
        ]

    def scores(
        self, role: str, rollout: Future[Rollout], others: Mapping[str, Sequence[Future[object]]]
    ) -> Sequence[Future[object]]:
        """Asks a role for its scores of a rollout. Returns a future for each of its parts.

        Args:
            others: scores of the rollout by other roles; those that the role needs are among them.
        """
        calls = self.role_calls[role]
        score: Callable[..., object] = calls.protocol.score
        needed: Keywords = {name: others[of][0] for name, of in calls.needs.items()}
        if calls.parts is None:
            return [self.call(role, score, rollout, **needed)]
        parts = range(calls.parts)
        return [
            self.call(role, score, rollout, part=part, parts=calls.parts, **needed)
            for part in parts
        ]
