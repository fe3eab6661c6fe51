"""What an algorithm gets its batches from: prompts, samples, the data's completions, scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.data.batch import data_rollout
from jaxrl.runtime.worker import Future
from jaxrl.types import Prompt

REFILL_OFFSET = 1 << 20
"""Refills draw prompts this many batches past the run, so that no batch of the run has them."""


@dataclass(frozen=True)
class Sources:
    """The roles and the data, as an algorithm sees them. Calls return at once, with a future."""

    config: Config
    prompts: Callable[[int], Sequence[Prompt]]
    """Batch index -> its prompts; a pure function."""
    packing: Mapping[str, Any]
    """Arguments of `make_rollout`: widths, pad id, row multiple."""
    call: Callable[..., Future]
    """(role, method, *args, deadline=seconds, **kwargs) -> the future of the call."""
    value: Callable[[Any], Future]
    """Wraps a value that is known already as a future."""
    wait: Callable[[Future], Any]
    """The value of a call. Raises `Stopped` where the run was asked to end and does not need it."""
    held_out: Sequence[Prompt] = ()
    """Prompts of the evaluations."""
    decode: Callable[[Sequence[int]], str] = str
    """The text of tokens, for the data's own completions."""
    early_scores: dict[int, dict[str, list[Future]]] = field(default_factory=dict)
    """Batch index -> role -> scores that were known before the batch was complete."""

    def student_samples(self, index: int, attempt: int = 0) -> Future:
        """Completions of batch `index` by the policy; a further attempt samples prompts that no
        batch of the run has, with random numbers of its own.
        """
        prompts = self.prompts(index + attempt * REFILL_OFFSET)
        return self._generate("rollout", prompts, step=index, attempt=attempt)

    def teacher_samples(self, index: int) -> Future:
        return self._generate("teacher", self.prompts(index), step=index)

    def data_completions(self, index: int) -> Future:
        return self.value(data_rollout(self.prompts(index), decode=self.decode, **self.packing))

    def held_out_samples(self, role: str) -> Future:
        """Completions of the held-out prompts, by the policy (`rollout`) or the teacher."""
        deadline = self.config.deadlines.evaluate
        return self.call(role, "sample", self.held_out, deadline=deadline)

    def scores(self, role: str, rollout: Future) -> list[Future]:
        """The role's scores of a rollout, one future for each of its `num_microbatches`."""
        config = self.config
        parts = {
            "teacher": config.teacher.num_microbatches,
            "reference": config.reference.num_microbatches,
        }.get(role)
        # A teacher service takes several requests at once.
        options: dict[str, Any] = {
            "deadline": config.deadlines.score,
            "aside": role == "teacher" and config.teacher.address is not None,
        }
        if parts is None:
            return [self.call(role, "score", rollout, **options)]
        return [
            self.call(role, "score", rollout, part=part, parts=parts, **options)
            for part in range(parts)
        ]

    def _generate(self, role: str, prompts: Sequence[Prompt], **options: int) -> Future:
        deadline = self.config.deadlines.generate
        return self.call(role, "generate", prompts, deadline=deadline, **options)
