"""What the compiler of TPUs makes of the programs."""

from __future__ import annotations

import jax
import pytest
from compiled_runs import (
    NEEDS_COMPILERS,
    REWARDED,
    SMALL,
    UPDATES,
    config,
    distilled,
    planned_and_reported,
    programs,
)

from jaxrl.aot.check import check
from jaxrl.aot.programs import local_bytes, shaped
from jaxrl.roles.microbatch import micro_batch

pytestmark = NEEDS_COMPILERS
WITHIN = 0.10


def test_an_update_compiles(tmp_path):
    """With the sums of several micro-batches sharded: XLA takes a reduction that is added to a
    carried sum out of the loop, and libtpu fails at it where a scatter (of the embedding) is there.
    """
    run = config(
        tmp_path,
        SMALL | {"tie_word_embeddings": False},
        mesh="actor+rollout+teacher=4",
        batch_size=12,
        group_size=1,
        actor={"micro_batch_tokens": 64 + 64, "parallel": {"fsdp": 4}},
        max_prompt_tokens=64,
        max_new_tokens=64,
    )
    ((_, update),) = programs(run, "tpu-v5e:2x2", "update")
    assert len(update.args[3]) > 2  # micro-batches: fewer make no loop
    update.compile()


def test_a_micro_batch_copies_no_other_rows(tmp_path):
    """A gather from [B, C, D] is made of copies of the teacher's hidden states of all rows."""
    run = config(tmp_path, mesh="actor+rollout+teacher=1")
    ((_, update),) = programs(run, "tpu-v5e", "update")
    _, _, batch, place, group = update.args
    mesh = batch.sequences.tokens.sharding.mesh
    rows = shaped(place.shape[1:], place.dtype, place.sharding)
    taken = jax.jit(lambda batch, rows: micro_batch(batch, rows, mesh, group, None)).lower(
        batch, rows
    )
    copied = taken.compile().memory_analysis().temp_size_in_bytes
    assert copied < 0.1 * local_bytes(batch)


def test_colab_s_chip_compiles_the_notebook_s_programs(tmp_path):
    report = check(config(tmp_path, SMALL, **REWARDED), "tpu-v5e")
    assert not report.failures, report.failures
    assert report.plan.config.actor.compute_dtype == "bfloat16"
    assert all(program.compiled for program in report.programs)


V5P = {1: "tpu-v5p", 2: "tpu-v5p:2x2x1", 4: "tpu-v5p:2x2x1"}
"""Devices of the run -> the smallest machine that has them."""
BY_DEFAULT = [("tpu-v5p", 1, "full"), ("tpu-v6e:2x2", 4, "dots")]
CASES = [BY_DEFAULT[1], *((V5P[n], n, remat) for n, remat in UPDATES if n in V5P)]


@pytest.mark.parametrize(
    ("target", "devices", "remat"),
    [pytest.param(*c, marks=() if c in BY_DEFAULT else pytest.mark.slow) for c in CASES],
)
def test_the_plan_of_an_update_is_what_the_compiler_takes(target, devices, remat, tmp_path):
    run = distilled(tmp_path, devices, remat)
    planned, reported = planned_and_reported(run, target, "actor", "update")
    assert planned == pytest.approx(reported, rel=WITHIN)


OTHERS = [("teacher", "score"), ("rollout", "prefill"), ("rollout", "decode"), ("actor", "convert")]


@pytest.mark.slow
@pytest.mark.parametrize(("role", "name"), OTHERS)
def test_the_plan_of_another_program_is_what_the_compiler_takes(role, name, tmp_path):
    run = config(tmp_path, {"num_hidden_layers": 28}, mesh="actor=1,rollout=2,teacher=1")
    planned, reported = planned_and_reported(run, "tpu-v5p:2x2x1", role, name)
    assert planned == pytest.approx(reported, rel=WITHIN)
