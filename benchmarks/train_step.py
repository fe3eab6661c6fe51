"""The update alone: distillation with the exact divergence, from hidden states. One JSON line.

    python benchmarks/train_step.py [--batch 8 --prompt 64 --new 64]
    python benchmarks/train_step.py --teacher FOLDER --student FOLDER --devices 4 --mesh actor=4

Rows are full: random tokens, no padding. `update` is `Actor.update` with everything it does (batch
to the devices, forward, divergence, backward, AdamW, metrics back); `blocks`, `divergence` and
`forward` are programs of their own, to see where the time goes. All of them take turns.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import step as whole_step

from jaxrl.algorithms.methods import METHODS
from jaxrl.algorithms.signals import completion_hidden, packed
from jaxrl.data.batch import make_rollout
from jaxrl.losses.distill import divergence_from_hidden
from jaxrl.models.decoder import head
from jaxrl.models.packing import pack
from jaxrl.plan import make_plan
from jaxrl.profile.work import Work, divergence_work, forward_work
from jaxrl.run.job import Job, make_job
from jaxrl.run.launch import make_actor
from jaxrl.sharding.mesh import ensure_devices, role_meshes
from jaxrl.sharding.reshard import reshard
from jaxrl.types import Completion, Prompt, Rollout, TeacherSignal

ROLES = ("actor", "rollout", "teacher")


def main() -> None:
    told = common.parser(__doc__)
    whole_step.model_options(told)
    told.add_argument("--mesh", default="actor+rollout+teacher=1")
    told.add_argument("overrides", nargs="*", metavar="key=value", help="as of jaxrl.train")
    arguments = told.parse_intermixed_args()
    common.start(arguments)
    with tempfile.TemporaryDirectory() as folder:
        config = whole_step.make_config(arguments, Path(folder))
        plan = make_plan(config, ROLES, ensure_devices)
        meshes = role_meshes(plan.devices, plan.placement, plan.axes)
        job = make_job(config)
        actor = make_actor(job.for_workers(plan.axes, Path(folder)), meshes)
        rollout, signal = make_batch(arguments, job)
        scores = {"teacher": [signal]}
        steps = itertools.count(1)
        ways: dict[str, Callable[[], Any]] = {
            "update": lambda: actor.update(rollout, scores, step=next(steps)) and None
        }
        ways |= parts(job, actor, rollout, scores)
        seconds = common.alternate(ways, arguments.repeats)
    machine = common.ceilings(arguments.dtype, *whole_step.shapes(arguments, job))
    work = counted(arguments, job)
    figures = {name: common.figure(seconds[name], work[name], machine) for name in ways}
    rows = arguments.batch * arguments.group
    tokens = rows * (arguments.prompt + arguments.new) / figures["update"]["seconds"]
    figures["update"]["tokens_per_second"] = common.rounded(tokens)
    print(common.line(arguments, machine, figures, benchmark="train_step"))


def make_batch(arguments: argparse.Namespace, job: Job) -> tuple[Rollout, TeacherSignal]:
    """Random tokens; hidden states as large as a norm leaves them."""
    assert job.teacher is not None
    rng = np.random.default_rng(0)
    rows, new = arguments.batch * arguments.group, arguments.new

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, job.vocab_size, n).tolist())

    zeros = np.zeros(new, np.float32)
    rollout = make_rollout(
        [Prompt(i, tokens(arguments.prompt), "") for i in range(rows)],
        [[Completion(tokens(new), zeros, zeros, "length")] for _ in range(rows)],
        policy_version=0,
        pad_id=job.pad_id,
        max_prompt_tokens=arguments.prompt,
        max_new_tokens=new,
    )
    hidden = rng.standard_normal((rows, new, job.teacher.config.d_model), np.float32)
    return rollout, TeacherSignal(hidden=jnp.asarray(hidden, arguments.dtype))


def parts(
    job: Job, actor: Any, rollout: Rollout, scores: dict[str, list[TeacherSignal]]
) -> dict[str, Any]:
    """Programs that are parts of the update, on copies of its parameters, which it donates."""
    config, mesh, dtype = job.student.config, actor.mesh, jnp.dtype(job.config.actor.dtype)
    params = jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), actor.state.params)
    rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
    made, _ = METHODS["teacher"].prepare(job.config)(rollout, scores)
    batch = reshard(made, rows)
    packing = jax.jit(partial(pack, mesh=mesh))(batch.sequences)
    flat = jax.jit(packed)(packing, batch)
    forward = jax.jit(partial(completion_hidden, config, mesh=mesh))
    hidden = forward(params, packing)

    def blocks(params: Any) -> jax.Array:
        remat = job.config.actor.remat
        out = completion_hidden(config, params, packing, mesh, remat=remat)
        return (out.astype(jnp.float32) * hidden).sum()

    def divergence(hidden: jax.Array, kernel: jax.Array, teacher_head: jax.Array) -> jax.Array:
        return divergence_from_hidden(
            hidden,
            kernel,
            flat.teacher.hidden,
            teacher_head,
            flat.sequences.loss_mask,
            beta=job.config.distill.jsd_beta,
            chunk=job.config.distill.chunk_tokens,
            mesh=mesh,
        )[0]

    assert job.teacher is not None
    backward = jax.jit(jax.grad(blocks))
    both = jax.jit(jax.value_and_grad(divergence, argnums=(0, 1)))
    teacher_head = job.teacher.load_head(mesh, dtype)
    return {
        "forward": lambda: forward(params, packing),
        "blocks": lambda: backward(params),
        "divergence": lambda: both(hidden, head(params), teacher_head),
    }


def counted(arguments: argparse.Namespace, job: Job) -> dict[str, list[Work]]:
    c, itemsize = job.student.config, jnp.dtype(arguments.dtype).itemsize
    assert job.teacher is not None
    lengths = [arguments.prompt + arguments.new] * arguments.batch * arguments.group
    tokens = arguments.new * arguments.batch * arguments.group
    width = job.teacher.config.d_model
    forward = forward_work(c, lengths, itemsize)
    return {
        "update": common.train_work(c, width, job.vocab_size, lengths, tokens, itemsize),
        "forward": [forward],
        "blocks": [forward, forward * 2],
        "divergence": [divergence_work(job.vocab_size, c.d_model, width, tokens, itemsize)],
    }


if __name__ == "__main__":
    main()
