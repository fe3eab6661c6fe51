"""What a run calls of the sampling engine's programs (`sampling.abstract_programs`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax

from jaxrl.aot.abstract import AbstractRun, Program, local_bytes
from jaxrl.models.config import DecoderConfig
from jaxrl.plan.plan_context import asked, evaluated
from jaxrl.roles.rollout import evaluation_sampling, training_sampling
from jaxrl.sampling.abstract_programs import abstract_programs
from jaxrl.sampling.engine import Engine

PHASES = {
    "prefill": "prefill",
    "decode": "decode",
    "longer cache": "longer cache",
    "answers of environments": "answers",
    "read again": "read again",
}
"""Program -> the phase of the plan that covers it."""


class Sampling:
    """The sampling engine of a role, and its programs: prefill of a batch of prompts, the copy of
    their keys and values into rows, launches of decode steps, and changes of the cache's size."""

    def __init__(self, run: AbstractRun, role: str, model: DecoderConfig):
        c = run.config
        self.run, self.role = run, role
        self.most = c.teacher_new_tokens if role == "teacher" else c.max_new_tokens
        self.engine = Engine(
            model,
            run.meshes[role],
            slots=c.rollout.slots or run.setting.sequences,
            max_prompt_tokens=c.teacher_prompt_tokens if role == "teacher" else c.max_prompt_tokens,
            max_new_tokens=max(self.most, c.eval.max_new_tokens or 0),
            launch_tokens=c.rollout.launch_tokens,
            cache_tokens=c.rollout.cache_tokens if role == "rollout" else None,
            episodes=role == "rollout" and c.environment.name is not None,
        )
        self.params = run.params(role, model)

    def programs(self, share: float) -> Iterator[Program]:
        """Makes all programs: those of training or, of a role that samples for evaluations alone,
        of these; and the decode steps of evaluations, where these are another program.

        Args:
            share: fraction of the training batches that this role samples.
        """
        c, width = self.run.config, self.run.setting.prompts(self.role)
        asks = asked(c, self.role)
        ways = [(training_sampling(c, self.most), asks[0])] if share > 0 else []
        if evaluated(c, self.role):
            ways.append((evaluation_sampling(c, self.most), asks[-1]))
        kinds = set()
        for i, (sampling, (prompts, samples)) in enumerate(ways):
            for name, jitted, arguments, static, beside, calls in abstract_programs(
                *(self.engine, self.params, sampling),
                prompts=prompts,
                samples=samples,
                prefilled=self.run.setting.prefill_rows(self.role),
                width=width,
                record=c.policy.router_replay and not i and self.role != "teacher",
            ):
                if i and name != "decode":
                    continue
                phases = (PHASES[name],) if name in PHASES else ()
                if name == "decode":
                    if (kind := jax.tree.structure(arguments[6])) in kinds:
                        continue
                    kinds.add(kind)
                    name += " for evaluations" * bool(i)
                if name == "answers of environments":
                    calls *= c.environment.max_turns - 1
                yield Program(
                    *(self.role, name, jitted, arguments, phases, static, local_bytes(beside)),
                    calls=0 if i else math.ceil(share * calls),
                    otherwise="waits" if name.endswith("again") else "eval",
                )
