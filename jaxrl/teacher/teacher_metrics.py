"""The metrics of a batch that a teacher has scored: padding, and the prompts that it has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.algorithms.teacher_weights import teacher_weights
from jaxrl.config.schema import Config
from jaxrl.data.batch import as_the_teacher_reads
from jaxrl.data.feedback import with_feedback
from jaxrl.data.token_alignment import Aligner
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.models.packing import RowDevices
from jaxrl.roles.microbatch import scored_padding
from jaxrl.types import Rollout


@dataclass(frozen=True)
class TeacherMetrics:
    """Reads a rollout as the teacher on these devices has read it."""

    config: Config
    devices: RowDevices
    tokenizer: Tokenizer
    aligner: Aligner | None

    def __call__(self, rollout: Rollout, parts: int, messages: Sequence[str]) -> dict[str, float]:
        """Returns the metrics of a rollout that was scored in so many parts.

        Args:
            messages: of the reward functions, one for each completion; read by a teacher that gets
                feedback.
        """
        config, devices, row = self.config, self.devices, dict[str, float]()
        if config.teacher.cache is not None and rollout.policy_version < 0:
            return row  # these scores were read from disk
        longest = config.teacher_prompt_tokens
        if config.teacher_gets_feedback:
            rollout, cut = with_feedback(rollout, messages, self.tokenizer, longest)
            row["teacher/feedback_cut"] = float(cut)
        lengths = [len(p.teacher_tokens) for p in rollout.prompts if p.teacher_tokens is not None]
        if lengths:
            row["teacher/prompt_tokens_mean"] = float(np.mean(lengths))
        if self.aligner is None:
            rollout = as_the_teacher_reads(rollout, longest, devices.multiple)
        else:
            limits = longest, config.teacher_new_tokens
            rollout = self.aligner.read(rollout, *limits, devices.multiple)
        weights, mixed = teacher_weights(config, rollout), config.mixture is not None
        row["teacher/padding"] = scored_padding(rollout, parts, devices, weights, mixed)
        return row
