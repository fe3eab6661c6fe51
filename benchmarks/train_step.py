"""The update alone: distillation with the exact divergence, from hidden states. One JSON line.

    python benchmarks/train_step.py [--batch 8 --prompt 64 --new 64]
    python benchmarks/train_step.py --teacher FOLDER --student FOLDER --devices 4 --mesh actor=4

`update` is `Actor.update` with everything it does (batch to the devices, forward, divergence,
backward, AdamW, metrics back), on full rows of random tokens. `update_tail` is the same on
completions of log-normal lengths in rows of the same width, of which two thirds are padding.
`blocks`, `divergence` and `forward` are programs of their own, to see where the time goes. All of
them take turns.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import step as whole_step

from jaxrl.algorithms.methods import METHODS
from jaxrl.algorithms.signals import completion_hidden, pack_completions
from jaxrl.data.batch import make_rollout
from jaxrl.losses.distill import divergence_from_hidden
from jaxrl.models.packing import pack_streams
from jaxrl.models.parameters import head
from jaxrl.plan import make_plan
from jaxrl.profile.work import Work, divergence_work, forward_work
from jaxrl.run.job import Job, make_job
from jaxrl.run.launch import make_actor
from jaxrl.sharding.mesh import ensure_devices, role_meshes
from jaxrl.sharding.reshard import reshard
from jaxrl.types import Completion, HiddenSignal, Prompt, Rollout, TeacherSignal

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
        rollout, signal = make_batch(arguments, job, full(arguments))
        tail, _ = make_batch(arguments, job, tailed(arguments))
        scores = {"teacher": [signal]}
        steps = itertools.count(1)
        ways: dict[str, Callable[[], Any]] = {
            "update": lambda: actor.update(rollout, scores, step=next(steps)) and None,
            "update_tail": lambda: actor.update(tail, scores, step=next(steps)) and None,
        }
        ways |= parts(job, actor, rollout, scores)
        seconds = common.alternate(ways, arguments.repeats)
    machine = common.ceilings(arguments.dtype, *whole_step.shapes(arguments, job))
    work = counted(arguments, job)
    figures = {name: common.figure(seconds[name], work[name], machine) for name in ways}
    for name, lengths in (("update", full(arguments)), ("update_tail", tailed(arguments))):
        tokens = sum(lengths) + len(lengths) * arguments.prompt
        figures[name]["tokens_per_second"] = common.rounded(tokens / figures[name]["seconds"])
    print(common.line(arguments, machine, figures, benchmark="train_step"))


def full(arguments: argparse.Namespace) -> list[int]:
    """Completions as long as their row."""
    return [arguments.new] * (arguments.batch * arguments.group)


def tailed(arguments: argparse.Namespace) -> list[int]:
    """Log-normal lengths, of a mean of about 30% of the longest, which fills its row."""
    new, rows = arguments.new, arguments.batch * arguments.group
    drawn = np.random.default_rng(1).lognormal(np.log(0.22 * new), 0.8, rows - 1).astype(int)
    return [new, *np.clip(drawn, 1, new).tolist()]


def make_batch(
    arguments: argparse.Namespace, job: Job, lengths: Sequence[int]
) -> tuple[Rollout, TeacherSignal]:
    """Random tokens, completions of these lengths; hidden states as large as a norm leaves them."""
    rng = np.random.default_rng(0)
    rows, new = arguments.batch * arguments.group, arguments.new

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, job.vocab_size, n).tolist())

    zeros = np.zeros(new, np.float32)
    rollout = make_rollout(
        [Prompt(i, tokens(arguments.prompt), "") for i in range(rows)],
        [[Completion(tokens(n), zeros[:n], zeros[:n], "length")] for n in lengths],
        policy_version=0,
        pad_id=job.pad_id,
        max_prompt_tokens=arguments.prompt,
        max_new_tokens=new,
    )
    width = job.teacher.models["teacher"].config.d_model
    hidden = rng.standard_normal((rows, new, width), np.float32)
    return rollout, HiddenSignal(hidden=jnp.asarray(hidden, arguments.dtype))


def parts(
    job: Job, actor: Any, rollout: Rollout, scores: dict[str, list[TeacherSignal]]
) -> dict[str, Any]:
    """Programs that are parts of the update, on copies of its parameters, which it donates."""
    config, mesh, dtype = job.student.config, actor.mesh, jnp.dtype(job.config.actor.dtype)
    params = jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), actor.state.params)
    rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
    made, _ = METHODS["teacher"].prepare(job.config)(rollout, scores)
    batch = reshard(made, rows)
    packing = jax.jit(partial(pack_streams, mesh=mesh))(batch.sequences)
    flat = jax.jit(pack_completions)(packing, batch)
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
            chunk=job.config.distill.loss_chunk,
            mesh=mesh,
        )[0]

    backward = jax.jit(jax.grad(blocks))
    both = jax.jit(jax.value_and_grad(divergence, argnums=(0, 1)))
    teacher_head = job.teacher.models["teacher"].load_head(mesh, dtype)
    return {
        "forward": lambda: forward(params, packing),
        "blocks": lambda: backward(params),
        "divergence": lambda: both(hidden, head(params), teacher_head),
    }


def counted(arguments: argparse.Namespace, job: Job) -> dict[str, list[Work]]:
    c, itemsize = job.student.config, jnp.dtype(arguments.dtype).itemsize
    width = job.teacher.models["teacher"].config.d_model

    def update(completions: list[int]) -> list[Work]:
        lengths = [arguments.prompt + n for n in completions]
        return common.train_work(c, width, job.vocab_size, lengths, sum(completions), itemsize)

    tokens = sum(full(arguments))
    forward = forward_work(c, [arguments.prompt + n for n in full(arguments)], itemsize)
    return {
        "update": update(full(arguments)),
        "update_tail": update(tailed(arguments)),
        "forward": [forward],
        "blocks": [forward, forward * 2],
        "divergence": [divergence_work(job.vocab_size, c.d_model, width, tokens, itemsize)],
    }


if __name__ == "__main__":
    main()
