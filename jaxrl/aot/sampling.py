"""What a run calls of the sampling engine's programs (`sampling.abstract_programs`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxrl.aot.abstract import AbstractRun, Program, local_bytes
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Recurrent
from jaxrl.plan.sampling import EVALUATIONS, asked, evaluated, prefill_rows
from jaxrl.roles.rollout import evaluation_sampling, training_sampling
from jaxrl.sampling.abstract_programs import AbstractProgram, AbstractPrograms
from jaxrl.sampling.engine import ANSWER_ROWS, Engine


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
        self.width = run.setting.prompts(role)
        self.prefilled = prefill_rows(c, role, self.width, run.setting.axes[role])

    def _programs(self, prompts: int, samples: int) -> AbstractPrograms:
        return AbstractPrograms(
            self.engine,
            self.params,
            prompts=prompts,
            samples=samples,
            prefilled=self.prefilled,
            width=self.width,
        )

    def programs(self, share: float) -> Iterator[Program]:
        """All programs.

        Args:
            share: fraction of the training batches that this role samples.
        """
        c, engine = self.run.config, self.engine
        made = self._programs(*asked(c, self.role)[0])
        held, caches = local_bytes(made.prefilled), local_bytes((made.slots, made.rows))
        beside = local_bytes((self.params, made.prefilled, made.rows))
        yield from self._resized(made, beside, share)
        fills = math.ceil(share * c.batch_size / self.prefilled)
        yield self._program(made.prefill(), phase="prefill", beside=caches, calls=fills)
        beside = local_bytes((self.params, made.slots))
        yield self._program(made.insert(), beside=beside, calls=fills)
        if engine.pages is not None:
            read, insert = made.read_again()
            waits: dict[str, Any] = {"calls": 0, "otherwise": "waits"}
            yield self._program(read, phase="read again", beside=held + caches, **waits)
            yield self._program(insert, beside=held + local_bytes(self.params), **waits)
        if engine.episodes:
            calls = math.ceil(share * self.run.setting.sequences / ANSWER_ROWS)
            calls *= c.environment.max_turns - 1
            yield self._program(made.extend(), phase="answers", beside=held, calls=calls)
        yield from self._launches(share, held)

    def _launches(self, share: float, beside: int) -> Iterator[Program]:
        """Launches of decode steps: of training and, where these differ, of evaluations."""
        c, engine, each_asked = self.run.config, self.engine, asked(self.run.config, self.role)
        ways = [(training_sampling(c, self.most), each_asked[0])] if share > 0 else []
        if evaluated(c, self.role):
            ways.append((evaluation_sampling(c, self.most), each_asked[-1]))
        found: dict[Any, AbstractProgram] = {}
        for i, (way, (prompts, samples)) in enumerate(ways):
            records = c.policy.router_replay and not i and self.role != "teacher"
            program = self._programs(prompts, samples).decode(way, record=records)
            found.setdefault(jax.tree.structure(program.arguments[6]), program)
        launches = -(-self.run.setting.sequences // engine.slots)
        launches *= -(-c.max_new_tokens // engine.launch_tokens)
        for i, program in enumerate(found.values()):
            name = "decode" + EVALUATIONS * bool(i)
            calls = 0 if i else math.ceil(share * launches)
            named = program._replace(name=name)
            yield self._program(named, phase=name, beside=beside, calls=calls)

    def _program(self, program: AbstractProgram, phase: str = "", **facts: Any) -> Program:
        name, jitted, arguments, static = program
        phases = (phase,) if phase else ()
        return Program(self.role, name, jitted, arguments, phases, kwargs=static, **facts)

    def _resized(self, made: AbstractPrograms, beside: int, share: float) -> Iterator[Program]:
        """The cache at its start, as it grows, and as slots are given up.

        Args:
            beside: bytes of weights and prompts.
        """
        batches, entries = math.ceil(share), list(filter(None, made.slots))
        grown = sum(not isinstance(entry, Recurrent) for entry in entries) * (
            len(made.lengths()) - 1
        )
        shrunk = len(entries) * len(made.fewer())
        others = beside + local_bytes(made.slots) - local_bytes(made.largest)
        for program in made.resize():
            name = program.name
            if name == "new cache":
                yield self._program(program, beside=beside, calls=batches)
            elif name == "longer cache":
                calls = batches * grown
                yield self._program(program, phase=name, beside=others, calls=calls)
            else:
                yield self._program(program, beside=others, calls=batches * shrunk)
