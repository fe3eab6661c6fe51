"""Batches that were generated but not yet trained on, as files without pickle.

Prompts are not stored, for batch I of the data is a pure function of I; but those that environments
began are. Rows are padded for the mesh
of the run that resumes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxrl.data.batch import make_rollout
from jaxrl.process.json_types import JsonObject
from jaxrl.types import Completion, Prompt, Rollout, Turn


def save_rollout(path: Path, rollout: Rollout) -> None:
    """Writes the completions of a batch, in order, to an `.npz`."""
    completions = rollout.completions
    words = {
        "texts": [completion.text for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "turns": [[asdict(turn) for turn in completion.turns] for completion in completions],
        "failures": [completion.failure for completion in completions],
        "prompts": _begun(rollout),
        "policy_version": rollout.policy_version,
        "decode_steps": rollout.decode_steps,
        "sent_back": rollout.sent_back,
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
    if rollout.experts is not None:
        recorded = [c.experts for c in completions if c.experts is not None]
        arrays["experts"] = np.concatenate(recorded)
    np.savez(path, allow_pickle=False, **arrays)


def load_rollout(path: Path, prompts: Sequence[Prompt], packing: Mapping[str, int]) -> Rollout:
    """Loads the batch of `prompts` that `save_rollout` wrote.

    Args:
        packing: `pad_id`, widths and `row_multiple` of `make_rollout`.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    words = json.loads(arrays["words"].tobytes())
    if words.get("prompts") is not None:
        pairs = zip(prompts, words["prompts"], strict=True)
        prompts = [_as_begun(prompt, **begun) for prompt, begun in pairs]
    ends = np.cumsum(arrays["lengths"])[:-1]
    pieces = [np.split(arrays[name], ends) for name in ("tokens", "logprobs", "sampler_logprobs")]
    group = len(arrays["lengths"]) // len(prompts)
    recorded: list[np.ndarray | None] = [None] * len(arrays["lengths"])
    if "experts" in arrays:
        read = np.repeat([len(prompt.tokens) - 1 for prompt in prompts], group)
        recorded = list(np.split(arrays["experts"], np.cumsum(read + arrays["lengths"])[:-1]))
    completions = [
        Completion(
            tuple(tokens.tolist()),
            logprobs,
            sampler_logprobs,
            reason,
            text,
            tuple(Turn(**turn) for turn in turns),
            failure,
            experts,
        )
        for tokens, logprobs, sampler_logprobs, reason, text, turns, failure, experts in zip(
            *pieces,
            *(words[name] for name in ("finish_reasons", "texts")),
            words.get("turns", [[]] * len(recorded)),
            words.get("failures", [None] * len(recorded)),
            recorded,
            strict=True,
        )
    ]
    groups = [completions[i * group : (i + 1) * group] for i in range(len(prompts))]
    version = words["policy_version"]
    rollout = make_rollout(prompts, groups, policy_version=version, **packing)
    topk = arrays.get("student_topk")
    if topk is not None:
        extra = len(rollout.sequences.tokens) - len(topk)
        topk = np.pad(topk, ((0, extra), (0, 0), (0, 0)))
    counts = {name: words.get(name, 0) for name in ("decode_steps", "sent_back")}
    return replace(rollout, **counts, student_topk=topk)


def _begun(rollout: Rollout) -> list[JsonObject] | None:
    """Returns the prompts of episodes, as their environments began them; None for other
    completions."""
    if not any(completion.turns for completion in rollout.completions):
        return None
    one_each = {prompt.id: prompt for prompt in rollout.prompts}.values()
    return [
        {"tokens": prompt.tokens, "text": prompt.text, "messages": prompt.columns.get("messages")}
        for prompt in one_each
    ]


def _as_begun(prompt: Prompt, tokens: list[int], text: str, messages: Any) -> Prompt:
    columns = {**prompt.columns, "messages": messages}
    if messages is None:
        del columns["messages"]
    return replace(prompt, tokens=tuple(tokens), text=text, columns=columns)


def _joined(values: Sequence[Sequence[float] | np.ndarray], dtype: DTypeLike) -> np.ndarray:
    return np.concatenate([np.asarray(value, dtype) for value in values])
