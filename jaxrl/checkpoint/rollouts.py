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

import numpy as np

from jaxrl.data.batch import make_rollout
from jaxrl.types import Completion, Prompt, Rollout, Turn


def save_rollout(path: Path, rollout: Rollout) -> None:
    """Writes the completions of a batch, in order, to an `.npz`."""
    completions = rollout.completions
    begun = None  # the prompts of episodes, as their environments began them
    if any(completion.turns for completion in completions):
        begun = [
            {
                "tokens": list(p.tokens),
                "text": p.text,
                "messages": p.columns.get("messages"),
                "conversational": p.conversational,
            }
            for p in {prompt.id: prompt for prompt in rollout.prompts}.values()
        ]
    words = {
        "texts": [completion.text for completion in completions],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "turns": [[asdict(turn) for turn in completion.turns] for completion in completions],
        "failures": [completion.failure for completion in completions],
        "prompts": begun,
        "policy_version": rollout.policy_version,
        "decode_steps": rollout.decode_steps,
        "sent_back": rollout.sent_back,
    }
    arrays = {
        "lengths": np.array([len(c.tokens) for c in completions], np.int32),
        "tokens": np.concatenate([np.asarray(c.tokens, np.int32) for c in completions]),
        **{
            name: np.concatenate([np.asarray(getattr(c, name), np.float32) for c in completions])
            for name in ("logprobs", "sampler_logprobs")
        },
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
        prompts = [
            replace(
                prompt,
                tokens=tuple(begun["tokens"]),
                text=begun["text"],
                columns={n: v for n, v in prompt.columns.items() if n != "messages"}
                | ({} if begun["messages"] is None else {"messages": begun["messages"]}),
                conversational=begun.get("conversational", prompt.conversational),
            )
            for prompt, begun in pairs
        ]
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
