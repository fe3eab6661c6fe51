"""The role `teacher` of a run that reads a teacher's scores from a folder (`teacher.cache`), and
what is checked of the folder before the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import jax
import numpy as np

from jaxrl.algorithms.protocols import SamplingTeacherRole
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.runtime.worker import phase
from jaxrl.sharding.split_rows import part_rows
from jaxrl.teacher.cache import ScoreCache
from jaxrl.teacher.protocol import Options
from jaxrl.types import Completion, Prompt, Rollout, TeacherSignal

AT_ONCE = 4096
"""Rows that are looked up together."""


class CachedTeacher:
    """Reads the scores of completions that no policy sampled. A teacher with devices, where there
    is one, scores the others."""

    def __init__(
        self,
        config: Config,
        cache: ScoreCache,
        vocab_size: int,
        teacher: SamplingTeacherRole | None = None,
    ):
        self._cache, self._live = cache, teacher
        self._dtype = config.teacher.compute_dtype
        options = Options.of(config.distill, vocab_size)
        self._fields = tuple(options.tensors(self._dtype, cache.config.d_model))

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """Returns the teacher's signal for each completion position of a slice of the rows; read
        signals are numpy arrays."""
        if self._live is not None and rollout.policy_version >= 0:
            return self._live.score(rollout, part, parts, rewards)
        rows = part_rows(len(rollout.group_ids), part, parts, 1)
        if rows is None:
            return None
        sequences = jax.tree.map(lambda x: np.asarray(x)[rows], rollout.sequences)
        with phase(f"read rows {rows.start}-{rows.stop} of {len(rollout.group_ids)}"):
            return self._cache.signal(sequences, self._fields, self._dtype)

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        assert self._live is not None, "scores on disk sample nothing"
        return self._live.generate(prompts, step)

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        assert self._live is not None, "scores on disk sample nothing"
        return self._live.sample(prompts)


def check_cache(
    config: Config,
    cache: ScoreCache,
    digest: str | None,
    vocab_size: int,
    rows: Iterable[tuple[int, Prompt]],
) -> str:
    """Refuses scores that the run cannot learn from.

    Args:
        digest: of the files of `teacher.model`, where there is one.
        vocab_size: tokens that student and teacher share.
        rows: (batch, prompt) of all rows of the data that the run reads scores of.

    Returns:
        What the user reads of them.

    Raises:
        UserError: with what the folder has and what the run needs.
    """
    manifest, name, d = cache.manifest, f"teacher.cache={cache.name}", config.distill
    _check_options(config, manifest.options, Options.of(d, vocab_size), name)
    if digest is not None and digest != manifest.digest:
        raise UserError(
            f"{name} has scores of {manifest.model}, whose files are not those of"
            f" teacher.model={config.teacher.model}: name the same model, or score again"
        )
    if bool(manifest.samples) != d.seq_kd:
        what = "the teacher's samples" if manifest.samples else "the data's completions"
        asked = str(bool(manifest.samples)).lower()
        raise UserError(f"{name} has scores of {what}: set distill.seq_kd={asked}")
    if d.seq_kd and config.group_size > manifest.samples:
        raise UserError(
            f"{name} has {manifest.samples} samples of each prompt, fewer than group_size="
            f"{config.group_size}: lower it, or score again with --samples {config.group_size}"
        )
    _check_rows(config, cache, name, (prompt for _, prompt in rows))
    signal = manifest.options.signal
    kind = f"{signal} in {manifest.stored}" if signal == "hidden" else signal
    note = f"{name}: {kind}, of {manifest.model}; {len(cache)} rows"
    return note if manifest.error is None else f"{note}; {manifest.error}"


def _check_options(config: Config, has: Options, needs: Options, name: str) -> None:
    """Raises UserError where the scores are of other keys than the run's."""
    for key, ours in needs.decisive.items():
        theirs = getattr(has, key)
        if theirs == ours or (key == "entropy_top_k" and ours is None):
            continue
        if key == "vocab_size":
            raise UserError(
                f"{name} has log-probs over {theirs} tokens, and student and teacher share"
                f" {ours}: score again with student.model={config.student.model}"
            )
        if theirs is None:
            raise UserError(
                f"{name} was scored without distill.entropy_aware=true: set it to false, or score"
                " again with it"
            )
        raise UserError(
            f"{name} was scored with distill.{key}={theirs}, and this run has {ours}: set"
            f" distill.{key}={theirs}, or score again with distill.{key}={ours}"
        )


def _check_rows(config: Config, cache: ScoreCache, name: str, prompts: Iterator[Prompt]) -> None:
    """Raises UserError where scores are missing, with their number."""
    missing = total = 0
    first: Prompt | None = None
    prompts = (one.to_sample if config.distill.seq_kd else one for one in prompts)
    while some := list(islice(prompts, AT_ONCE)):
        found = cache.has([cache.manifest.key(p.tokens, p.completion) for p in some])
        without = [prompt for prompt, there in zip(some, found, strict=True) if not there]
        first = first or next(iter(without), None)
        missing, total = missing + len(without), total + len(some)
    if first is not None:
        kind = "samples" if config.distill.seq_kd else "scores"
        raise UserError(
            f"{name} has no {kind} of {missing} of the {total} rows of data.train that this run"
            f" reads, the first of them {first.text[:60]!r}: python -m jaxrl.score --out"
            f" {cache.name} adds them, given this run's data.*, max_prompt_tokens and"
            " max_new_tokens"
        )
