"""Several teachers on the devices of one role. They take turns, and answer as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxrl.algorithms.signals import Projection, merged_signal, mixture_signal
from jaxrl.algorithms.teacher_weights import by_teacher, teacher_weights
from jaxrl.config.schema import Config
from jaxrl.data.batch import as_the_teacher_reads
from jaxrl.models.packing import room_of, row_devices
from jaxrl.models.parameters import head
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.roles.microbatch import ScoredPart, own_parts, scored_part
from jaxrl.roles.rollout import Sampler
from jaxrl.runtime.worker import phase
from jaxrl.sharding.axes import ROWS
from jaxrl.sharding.ledger import current
from jaxrl.sharding.reshard import put
from jaxrl.teacher.local_teacher import AddFeedback, Scorer, informed, keep_weights
from jaxrl.types import (
    Array,
    Completion,
    HiddenSignal,
    Prompt,
    Rollout,
    Sequences,
    TeacherSignal,
    Tree,
)

COMBINE = "combine"
"""The turn in which a mixture is made of all teachers' hidden states."""


class RoutedTeachers:
    """The role `teacher` with several models. Where frozen weights are offloaded, those of one
    teacher at a time are on the devices."""

    def __init__(
        self,
        config: Config,
        projection: Projection,
        width: int,
        add_feedback: AddFeedback | None = None,
    ):
        """
        Args:
            projection: of the run.
            width: of the widest teacher's hidden states.
            add_feedback: as of `LocalTeacher`.
        """
        self._config, self._projection, self._add_feedback = config, projection, add_feedback
        self._scorers: dict[str, Scorer] = {}
        self._samplers: dict[str, Sampler] = {}
        self._combines = projection.mixture is not None and projection.distill.signal != "hidden"
        self._rows = NamedSharding(projection.mesh, PartitionSpec(ROWS))
        self._devices = row_devices(projection.mesh)
        self._merge = merge_program(projection, width)

    @cached_property
    def _mix(self) -> Wrapped:
        softcaps = [scorer.model.final_softcap for scorer in self._scorers.values()]
        return mixture_program(self._projection, softcaps)

    def add(self, name: str, scorer: Scorer, sampler: Sampler | None = None) -> None:
        """Adds the next teacher, in the order of `config.teachers`. Where frozen weights are
        offloaded, its weights are on the host while it has no turn.

        Args:
            scorer: of a mixture's teacher, it sends hidden states.
            sampler: None where no teacher samples.
        """
        self._scorers[name] = scorer
        if sampler is not None:
            self._samplers[name] = sampler
        stages = [f"teacher.{turn}.{name}" for turn in ("score", "generate", "sample")]
        if self._combines:
            stages.append(f"teacher.score.{COMBINE}")
        keep_weights(f"teacher.{name}", scorer, sampler, stages, self._config.offload.frozen)

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """Scores as `LocalTeacher` does. A row gets its teacher's signal, or that of the
        mixture."""
        longest = self._config.teacher_prompt_tokens
        rollout = informed(rollout, rewards, self._add_feedback)
        rollout = as_the_teacher_reads(rollout, longest, self._devices.multiple)
        given = scored_part(rollout, part, parts, self._devices)
        if given is None:
            return None
        weights = teacher_weights(self._config, rollout)
        assert weights is not None
        with phase(f"rows {given.rows.start}-{given.rows.stop} of {len(rollout.group_ids)}"):
            if self._projection.mixture is None:
                return self._routed(given, weights[given.rows])
            return self._mixed(given, weights[given.rows])

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        """Samples completions of each prompt by its own teacher, to train on."""

        def ask(sampler: Sampler, mine: Sequence[Prompt]) -> list[list[Completion]]:
            return sampler.completions(mine, step)

        any_sampler = next(iter(self._samplers.values()))
        return any_sampler.make_batch(prompts, self._sampled("generate", prompts, ask))

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """Samples completions of each prompt by its own teacher, to evaluate."""
        return self._sampled("sample", prompts, Sampler.sample)

    def _sampled(
        self,
        method: str,
        prompts: Sequence[Prompt],
        ask: Callable[[Sampler, Sequence[Prompt]], list[list[Completion]]],
    ) -> list[list[Completion]]:
        """Asks each prompt's own teacher."""
        sampled: dict[int, list[Completion]] = {}
        for name, mine in by_teacher(self._config, prompts).items():
            if mine:
                with self._turn(method, name):
                    each = ask(self._samplers[name], [prompts[i] for i in mine])
                sampled |= zip(mine, each, strict=True)
        return [sampled[i] for i in range(len(prompts))]

    def _turn(self, method: str, name: str) -> AbstractContextManager[None]:
        current().enter(f"teacher.{method}.{name}")
        return phase(name)

    def _routed(self, given: ScoredPart, weights: np.ndarray) -> TeacherSignal:
        """Computes each row by its own teacher alone."""
        found: TeacherSignal | None = None
        scorers = list(self._scorers.items())
        for k, own in own_parts(given, weights, self._devices, mixed=False).items():
            name, scorer = scorers[k]
            with self._turn("score", name):
                signal = scorer.run(own)
                rows = put(weights[:, k] > 0, self._rows)
                with current().running(self._merge, found, signal, rows):
                    found = jax.block_until_ready(self._merge(found, signal, rows))
                current().put("teacher.signal", found)
        current().drop("teacher.signal")
        assert found is not None, "one teacher runs at least"
        return found

    def _mixed(self, given: ScoredPart, weights: np.ndarray) -> TeacherSignal:
        """Computes by every teacher the rows in which it has a share, and mixes."""
        hidden: list[jax.Array] = []
        each = own_parts(given, weights, self._devices, mixed=True).values()
        for (name, scorer), own in zip(self._scorers.items(), each, strict=True):
            with self._turn("score", name):
                signal = scorer.run(own)
                assert isinstance(signal, HiddenSignal)
                hidden.append(signal.hidden)
                current().put("teacher.signal", hidden)
        heads = None
        if self._combines:
            current().enter(f"teacher.score.{COMBINE}")
            here = [scorer.params for scorer in self._scorers.values()]
            heads = tuple(head(params) for params in here if params is not None)
        sequences, ids = jax.tree.map(lambda x: x[: given.live], (given.sequences, given.ids))
        alone = replace(sequences, group=1, room=None)
        alone = replace(alone, room=room_of(alone, self._devices))
        placed = put((weights, alone, ids), self._rows)
        arguments = (tuple(hidden), heads, *placed)
        with phase(COMBINE), current().running(self._mix, *arguments):
            found = jax.block_until_ready(self._mix(*arguments))
        current().drop("teacher.signal")
        return found


def mixture_program(projection: Projection, softcaps: Sequence[float | None]) -> Wrapped:
    """Returns the jitted (hidden states of each teacher, their heads, weights [B, K], sequences,
    the student's top-k ids or None) -> the signal of the mixture.

    Args:
        softcaps: `DecoderConfig.final_softcap` of each teacher.
    """

    def combine(
        hidden: tuple[Array, ...], heads: Tree, weights: Array, sequences: Sequences, ids: Array
    ) -> TeacherSignal:
        return mixture_signal(projection, hidden, heads, softcaps, weights, sequences, ids)

    rows = NamedSharding(projection.mesh, PartitionSpec(ROWS))
    return jax.jit(combine, out_shardings=rows)


def merge_program(projection: Projection, width: int) -> Wrapped:
    """Returns the jitted (the signal so far or None, a teacher's signal, its rows [B] bool) -> the
    signal with that teacher's in its rows.

    Args:
        width: of the widest teacher's hidden states; narrower ones get zeros at their end.
    """

    def merge(
        so_far: TeacherSignal | None, signal: TeacherSignal, mine: jax.Array
    ) -> TeacherSignal:
        return merged_signal(so_far, signal, mine, width)

    rows = NamedSharding(projection.mesh, PartitionSpec(ROWS))
    return jax.jit(merge, out_shardings=rows)
