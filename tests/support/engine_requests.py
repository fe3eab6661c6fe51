"""Requests to an engine for groups of samples, as tests ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxrl.sampling.engine import Engine
from jaxrl.sampling.partial_completion import PartialCompletion, RandomKey, Reply, SampleRequest
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.types import Completion


@dataclass
class Bound:
    """One episode of environments whose methods take the prompt's index and the sample."""

    environments: Any
    prompt: int
    sample: int

    def answer(self, text: str, *, eos: int | None, length: int) -> Future[Reply]:
        reply: Future[Reply] = self.environments.answer(
            self.prompt, self.sample, text, eos=eos, length=length
        )
        return reply

    def end(self) -> None:
        self.environments.end(self.prompt, self.sample)


def sample_groups(
    engine: Engine,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    n: int = 1,
    sampling: SamplingParams,
    key: RandomKey | None = None,
    prompt_ids: Sequence[int] | None = None,
    limits: Sequence[Sequence[int]] | None = None,
    environments: Any = None,
    turn_tokens: int | None = None,
    record_experts: bool = False,
    **options: Any,
) -> list[list[Completion]]:
    """Samples n completions of each prompt, [len(prompts)][n]."""
    key, ids = key or RandomKey(0), range(len(prompts)) if prompt_ids is None else prompt_ids
    requests = [
        SampleRequest(
            prompt,
            sampling,
            key._replace(prompt=ids[i], sample=sample),
            sampling.max_new_tokens if limits is None else limits[i][sample],
            turn_tokens,
            None if environments is None else Bound(environments, i, sample),
            record_experts,
        )
        for i, prompt in enumerate(prompts)
        for sample in range(n)
    ]
    done = engine.generate(params, requests, **options)
    return [done[i * n : (i + 1) * n] for i in range(len(prompts))]


def waiting_samples(
    limits: Sequence[Sequence[int]], prompt: Sequence[int] = (1, 2, 5), first_id: int = 0
) -> list[PartialCompletion]:
    """Makes samples as the engine queues them: of each row of limits, those of one prompt."""
    samples: list[PartialCompletion] = []
    for i, row in enumerate(limits):
        for k, limit in enumerate(row):
            key = RandomKey(0, prompt=first_id + i, sample=k)
            request = SampleRequest(prompt, SamplingParams(int(limit)), key, int(limit))
            samples.append(PartialCompletion(len(samples), i, request))
    return samples
