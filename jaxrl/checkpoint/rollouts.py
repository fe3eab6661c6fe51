"""Batches that were generated but not yet trained on, as files without pickle.

Prompts are not stored: batch I of the data is a pure function of I. Rows are padded for the mesh
of the run that resumes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from jaxrl.data.batch import make_rollout
from jaxrl.types import Completion, Prompt, Rollout, Turn


def save_rollout(path: Path, rollout: Rollout) -> None:
    """Writes the completions of a batch, in order, to an `.npz`."""
    completions = rollout.completions
    words = {
        "texts": [completion.text for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "turns": [[asdict(turn) for turn in completion.turns] for completion in completions],
        "failures": [completion.failure for completion in completions],
        "policy_version": rollout.policy_version,
        "decode_steps": rollout.decode_steps,
    }
    arrays = {
        "lengths": np.array([len(c.tokens) for c in completions], np.int32),
        "tokens": _joined([c.tokens for c in completions], np.int32),
        "logprobs": _joined([c.logprobs for c in completions], np.float32),
        "sampler_logprobs": _joined([c.sampler_logprobs for c in completions], np.float32),
        "words": np.frombuffer(json.dumps(words).encode(), np.uint8),
    }
    if rollout.student_topk is not None:
        arrays["student_topk"] = np.asarray(rollout.student_topk)[: len(completions)]
    np.savez(path, allow_pickle=False, **arrays)


def load_rollout(path: Path, prompts: Sequence[Prompt], packing: Mapping[str, int]) -> Rollout:
    """The batch of `prompts` that `save_rollout` wrote.

    Args:
        packing: `pad_id`, widths and `row_multiple` of `make_rollout`.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    words = json.loads(arrays["words"].tobytes())
    ends = np.cumsum(arrays["lengths"])[:-1]
    pieces = [np.split(arrays[name], ends) for name in ("tokens", "logprobs", "sampler_logprobs")]
    completions = [
        Completion(
            tuple(tokens.tolist()),
            logprobs,
            sampler_logprobs,
            reason,
            text,
            tuple(Turn(**turn) for turn in turns),
            failure,
        )
        for tokens, logprobs, sampler_logprobs, reason, text, turns, failure in zip(
            *pieces,
            *(words[name] for name in ("finish_reasons", "texts", "turns", "failures")),
            strict=True,
        )
    ]
    group = len(completions) // len(prompts)
    groups = [completions[i * group : (i + 1) * group] for i in range(len(prompts))]
    version = words["policy_version"]
    rollout = make_rollout(prompts, groups, policy_version=version, **packing)
    topk = arrays.get("student_topk")
    if topk is not None:
        extra = len(rollout.sequences.tokens) - len(topk)
        topk = np.pad(topk, ((0, extra), (0, 0), (0, 0)))
    return replace(rollout, decode_steps=words["decode_steps"], student_topk=topk)


def _joined(values: Sequence[Sequence[float] | np.ndarray], dtype: DTypeLike) -> np.ndarray:
    return np.concatenate([np.asarray(value, dtype) for value in values])
