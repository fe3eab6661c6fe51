"""The order in which batches are generated, scored and trained on: bounded staleness as a pure
state machine.

Batch i is generated with exactly the weights after `max(0, i - staleness)` batches. The order of
the actions below is the order in which the loop hands calls to the workers; each worker takes its
calls in order, so what is computed never depends on timing. Actions on different pools overlap
because calls return futures.

    serial        generate 0, score 0, train 0, publish 1, generate 1, ...
    one_step_off  generate 0, generate 1, score 0, train 0, publish 1, generate 2, score 1, ...

`streaming` has the order of a lag of `staleness` batches, but the rollout begins a batch before
those ahead of it have ended, and takes each version of the weights as it comes: batch i begins with
a version of at least i - staleness, and its tokens are of that one and later ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxrl.config.schema import Config

SCHEDULES: dict[str, int] = {"serial": 0, "one_step_off": 1, "two_step_off": 2}
"""Of those that generate a batch with one version of the weights: name -> staleness, the batches
between the weights that generate and those that train."""


def staleness_of(config: Config) -> int:
    """Returns the most batches between weights that generate and those that train."""
    return SCHEDULES.get(config.schedule, config.staleness)


@dataclass(frozen=True)
class Action:
    """One thing to do next."""

    kind: Literal["generate", "score", "train", "publish"]
    index: int
    """The batch; for `publish`, the version: how many batches the published weights were trained
    on."""


@dataclass
class Schedule:
    """Iterates over the actions of a run; its four counts are all of its state that changes."""

    steps: int
    staleness: int
    generated: int = 0
    scored: int = 0
    trained: int = 0
    published: int = 0
    scores_ahead: bool = True
    """False: a batch is scored after the update on the batch before, because that update changes
    the teacher, or a scorer shares the actor's devices: their worker takes calls in order, and the
    update would wait for a batch that is still sampled."""

    def __iter__(self) -> Iterator[Action]:
        while (action := self.next()) is not None:
            yield action

    @classmethod
    def resume(
        cls, trained: int, in_flight: int, steps: int, staleness: int, scores_ahead: bool = True
    ) -> Schedule:
        """Returns the schedule once `trained` batches have been trained and published, and the
        `in_flight` batches after them generated."""
        generated = trained + in_flight
        return cls(steps, staleness, generated, trained, trained, trained, scores_ahead)

    def next(self) -> Action | None:
        """Returns the next action, counting it as done; None once every batch is trained and
        published."""
        # `published` exceeds the right side only in a run that resumes beyond its former last step.
        ready_to_generate = self.published >= max(0, self.generated - self.staleness)
        if self.generated < self.steps and ready_to_generate:
            self.generated += 1
            return Action("generate", self.generated - 1)
        if self.published < self.trained:
            self.published = self.trained
            return Action("publish", self.published)
        # two_step_off scores the next batch during a train
        ahead = max(0, self.staleness - 1) if self.scores_ahead else 0
        if self.scored < min(self.generated, self.trained + 1 + ahead):
            self.scored += 1
            return Action("score", self.scored - 1)
        if self.trained < self.scored:
            self.trained += 1
            return Action("train", self.trained - 1)
        return None
