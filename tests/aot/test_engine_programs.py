"""The programs that are made without a device are those that the engine calls."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from engine_requests import sample_groups
from tiny_models import SAMPLED as CONFIG
from tiny_models import random_params

from jaxrl.models import parameters
from jaxrl.models.parameters import param_shardings
from jaxrl.roles.declared import Program
from jaxrl.roles.sampling_programs import engine_programs
from jaxrl.sampling import decode
from jaxrl.sampling.engine import Engine, prefill_batch
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh

PROMPTS = [[5, 9, 2], [1], [8, 8, 20, 31, 4]]


def forms(tree: Any) -> Any:
    """Shapes and dtypes of arrays, and what is no array as it is."""
    return jax.tree.map(
        lambda x: (x.shape, str(x.dtype)) if hasattr(x, "dtype") else x,
        tree,
    )


def largest(engine: Engine, params: Any, sampling: SamplingParams, prompts: int) -> list[Program]:
    """The programs that sample two completions of each of the longest prompts."""
    width, slots = engine.prompt_width(engine.max_prompt_tokens), engine.slots // engine.row_shards
    rows = prefill_batch(slots, prompts, 2, width)
    given = "rollout", engine, params, sampling, prompts, 2
    return list(engine_programs(*given, prefilled=rows, width=width))


@pytest.mark.parametrize("options", [{}, {"cache_tokens": 192}], ids=["slots", "pages"])
def test_what_is_lowered_is_what_runs(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch with a slot for each sample, whose first calls are its largest."""
    options = {"slots": 6, "max_prompt_tokens": 8, "max_new_tokens": 16, **options}
    calls: dict[str, Any] = {}
    for name in ("prefill_prompts", "insert", "new_cache", "launch"):
        program = getattr(decode, name)

        def spied(*args: Any, name: str = name, program: Any = program, **static: Any) -> Any:
            calls.setdefault(name, []).append((forms(args[2:]), static))
            return program(*args, **static)

        spied.lower = program.lower  # type: ignore[attr-defined]
        monkeypatch.setattr(decode, name, spied)
    params = random_params(CONFIG, layout="unstacked")
    sampling = SamplingParams(max_new_tokens=16)
    made = Engine(CONFIG, None, launch_tokens=8, **options)
    sample_groups(made, params, PROMPTS, n=2, sampling=sampling)
    monkeypatch.undo()
    abstract = parameters.abstract_params(CONFIG, layout="unstacked")
    programs = {x.name: x for x in largest(made, abstract, sampling, 3)}
    for name, called in (
        ("prefill", "prefill_prompts"),
        ("insert", "insert"),
        ("decode", "launch"),
    ):
        program = programs[name]
        assert (forms(program.args[2:]), program.kwargs) == calls[called][0]
        program.jitted.lower(*program.args, **program.kwargs)
    sizes = [args[:2] for args, _ in calls["new_cache"]]
    assert programs["new cache"].args[2:4] in sizes
    assert np.dtype(programs["new cache"].args[4]) == np.float32


def test_a_device_prefills_and_holds_the_prompts_of_its_own_slots() -> None:
    """With the same slots in each data shard, the keys and values of a prefill and its temporaries
    take the same bytes of a device whether there are 2, 4 or 8, and none of them is gathered."""
    sampling, found = SamplingParams(max_new_tokens=16), {}
    for data in (2, 4, 8):
        mesh = role_mesh(jax.devices()[:data], Axes(data, 1, 1))
        sizes = {"slots": 8 * data, "max_prompt_tokens": 64, "max_new_tokens": 16}
        abstract = parameters.abstract_params(CONFIG, layout="unstacked")
        params = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            *(abstract, param_shardings(CONFIG, mesh, "unstacked")),
        )
        for program in largest(Engine(CONFIG, mesh, **sizes), params, sampling, 4 * data):
            if program.name not in ("prefill", "insert"):
                continue
            compiled = program.jitted.lower(*program.args, **program.kwargs).compile()
            memory = compiled.memory_analysis()
            new = memory.output_size_in_bytes - memory.alias_size_in_bytes
            found.setdefault(program.name, []).append((new, memory.temp_size_in_bytes))
            assert not re.search(r"all-gather|all-reduce|all-to-all|permute", compiled.as_text())
    row = 2 * CONFIG.n_layers * CONFIG.n_kv_heads * 64 * CONFIG.head_dim * 4
    (results, temporaries), *others = found["prefill"]
    assert 4 * row <= results < 4 * row + 1024
    assert all(new == results and temp <= 1.01 * temporaries for new, temp in others)
    assert all(temp <= 1.01 * found["insert"][0][1] for _, temp in found["insert"])
