"""What a rollout compiles before it has weights is what it calls once it has them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import QUICK, SHORT
from tiny_models import SAMPLED, random_adapters, random_params

from jaxrl.algorithms.methods import needed_roles
from jaxrl.config.schema import Config
from jaxrl.models import parameters
from jaxrl.models.lora import Lora, frozen_and_trained, join_adapters
from jaxrl.models.parameters import param_shardings
from jaxrl.plan import make_plan
from jaxrl.process.compilations import compilations
from jaxrl.roles import rollout
from jaxrl.roles.rollout import Sampler
from jaxrl.run import launch
from jaxrl.run.attempt import first_prompts
from jaxrl.run.job import make_job
from jaxrl.run.launch import devices_for, make_rollout_role
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh, role_meshes
from jaxrl.types import Prompt, Weights

PROMPTS = [Prompt(i, tuple(range(3, 5 + i)), "") for i in range(3)]


def sampler(shape: tuple[int, ...], *keys: str) -> tuple[Sampler, Weights]:
    """One, of a model that no other test has, and the weights that it is sent."""
    mesh = role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))
    model = replace(SAMPLED, d_ff=56, lora=Lora(2, 4.0) if keys else None)
    params = random_params(model.plain)
    whole = params if model.lora is None else join_adapters(params, random_adapters(model, seed=3))
    placed = jax.device_put(whole, param_shardings(model, mesh))
    base, sent = frozen_and_trained(placed)
    merges = "rollout.merge=true" in keys
    given = ["max_prompt_tokens=6", "max_new_tokens=4", "rollout.launch_tokens=4", "group_size=2"]
    made = Sampler(
        Config.load(None, [*given, "rollout.dtype=float32", *keys]),
        model,
        mesh,
        slots=4,
        tokenizer=None,
        eos_ids=(2,),
        vocab_size=SAMPLED.vocab_size,
        packing={"pad_id": 0, "max_prompt_tokens": 6, "max_new_tokens": 4, "row_multiple": 8},
        base=base if merges or model.lora is None else parameters.unstack(base),
    )
    return made, Weights(0, parameters.unstack(sent), 0)


@pytest.mark.parametrize(
    ("shape", "keys"),
    [
        ((2, 1, 2), []),
        ((1, 1, 1), ["student.lora.rank=2"]),
        ((1, 1, 1), ["student.lora.rank=2", "rollout.merge=true"]),
    ],
    ids=["data and tensor", "adapters", "merged adapters"],
)
def test_the_first_launch_compiles_nothing_after_a_rehearsal(
    shape: tuple[int, ...], keys: list[str]
) -> None:
    """And samples the same bits as without."""
    (one, weights), programs = sampler(shape, *keys), compilations().programs
    one.rehearse({"train": PROMPTS[:2]})
    assert compilations().programs >= programs + 4
    assert one.params is None and one.version == -1
    with pytest.raises(RuntimeError, match="no weights"):
        one.generate(PROMPTS[:2], 0)
    one.load(weights)
    programs = compilations().programs
    drawn = one.generate(PROMPTS[:2], 0)
    assert compilations().programs == programs and drawn.decode_steps > 0

    (other, weights) = sampler(shape, *keys)
    other.load(weights)
    same = other.generate(PROMPTS[:2], 0)
    np.testing.assert_array_equal(same.sequences.tokens, drawn.sequences.tokens)
    np.testing.assert_array_equal(same.logprobs, drawn.logprobs)


def test_weights_that_lie_on_other_devices_than_the_role_has_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, weights = sampler((1, 1, 1))
    there = jax.device_put(weights.params, jax.devices()[1])
    monkeypatch.setattr(rollout, "receive_weights", lambda *_, **__: (there, {}))
    with pytest.raises(RuntimeError, match="rollout was given devices 0, but its arrays lie on"):
        made.load(weights)


@pytest.mark.parametrize(
    ("keys", "step", "expected"),
    [
        (["mesh=actor=1,rollout=1,teacher=1"], 0, {"eval": 4, "train": 6}),
        (["mesh=actor=1,rollout=1,teacher=1"], 1, {"train": 6}),
        (["mesh=actor=1,rollout=1,teacher=1"], 2, {}),
        (["mesh=actor+rollout=1,teacher=1"], 0, None),
        (["mesh=actor=1,rollout+teacher=1"], 0, None),
        (["mesh=actor=1,rollout=1", "algorithm=sft", "teacher.model=null"], 0, {"eval": 4}),
    ],
)
def test_what_is_sampled_first_is_rehearsed_where_the_devices_are_idle(
    keys: list[str],
    step: int,
    expected: dict[str, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Sampler, "rehearse", lambda self, prompts: seen.append(prompts))
    assert launch.NOT_REHEARSED == ("cpu",)
    monkeypatch.setattr(launch, "NOT_REHEARSED", ())
    made = Config.load(QUICK[1], [*SHORT, *keys, f"run_dir={tmp_path}"])
    plan = make_plan(made, needed_roles(made), devices_for(made))
    job = make_job(plan.config)
    setup = job.for_workers(plan.axes, tmp_path, None, first_prompts(job, step))
    make_rollout_role(setup, role_meshes(plan.devices, plan.placement, plan.axes))
    found = [{split: len(prompts) for split, prompts in each.items()} for each in seen]
    assert found == ([] if expected is None else [expected])
    if expected and "train" in expected:
        assert seen[0]["train"] == job.train.batch(step)
