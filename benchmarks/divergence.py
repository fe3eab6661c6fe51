"""Distillation loss with gradients, in three ways: memory at V = 151936, and time. One JSON line.

    python benchmarks/divergence.py [--tokens 256 --width 256 --vocab 151936]

naive: all logits, the formula as usually written, jax.grad. fused: the default. lean: recomputes.
Memory is `compiled.memory_analysis()` at 4096 tokens, bfloat16, widths 1024 and 2048: nothing runs.
Time is measured at `--tokens` and `--width`, the three taking turns; medians, and the median over
the rounds of the ratio within a round, which a busy machine disturbs least. The floor is the four
products that no way can do without (two logits, two gradients).
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import common
import jax
import jax.numpy as jnp

from jaxrl.losses.distill import divergence_from_hidden
from jaxrl.profile.work import divergence_work

MEMORY_VOCAB, MEMORY_TOKENS = 151936, 4096


def naive(
    hidden: jax.Array, head: jax.Array, teacher: jax.Array, teacher_head: jax.Array
) -> jax.Array:
    product = partial(jnp.einsum, "bcd,vd->bcv", preferred_element_type=jnp.float32)
    q = jax.nn.log_softmax(product(hidden, head))
    p = jax.nn.log_softmax(product(teacher, teacher_head))
    m = jnp.logaddexp(q, p) - jnp.log(2.0)
    return (jnp.exp(p) * (p - m) + jnp.exp(q) * (q - m)).sum() / 2


def chunked(
    hidden: jax.Array,
    head: jax.Array,
    teacher: jax.Array,
    teacher_head: jax.Array,
    *,
    lean: bool,
    chunk: int,
) -> jax.Array:
    mask = jnp.ones(hidden.shape[:2], bool)
    return divergence_from_hidden(
        hidden, head, teacher, teacher_head, mask, beta=0.5, lean=lean, chunk=chunk
    )[0]


def losses(chunk: int) -> dict[str, Any]:
    ways: dict[str, Any] = {
        "naive": naive,
        "fused": partial(chunked, lean=False, chunk=chunk),
        "lean": partial(chunked, lean=True, chunk=chunk),
    }
    return {name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1))) for name, loss in ways.items()}


def memory(chunk: int) -> dict[str, float]:
    """Temporaries in MB."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    rows = 8, MEMORY_TOKENS // 8
    student = array(*rows, 1024), array(MEMORY_VOCAB, 1024)
    args = *student, array(*rows, 2048), array(MEMORY_VOCAB, 2048)
    found = {}
    for name, step in losses(chunk).items():
        analysis = step.lower(*args).compile().memory_analysis()
        found[name] = round(analysis.temp_size_in_bytes / 2**20)
    return found


def arrays(tokens: int, widths: tuple[int, int], vocab: int, dtype: str) -> list[jax.Array]:
    """Hidden states and head of the student and of the teacher, whose widths these are."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [shape for width in widths for shape in ((1, tokens, width), (vocab, width))]
    return [
        (jax.random.normal(k, s) * (1 if len(s) == 3 else s[-1] ** -0.5)).astype(dtype)
        for k, s in zip(keys, shapes, strict=True)
    ]


def times(
    tokens: int, width: int, vocab: int, dtype: str, repeats: int, chunk: int, ways: list[str]
) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    args = arrays(tokens, (width, width), vocab, dtype)
    steps = {name: step for name, step in losses(chunk).items() if name in ways}
    runs = {name: partial(step, *args) for name, step in steps.items()}
    return common.alternate(runs, repeats)


def main() -> None:
    told = common.parser(__doc__, repeats=7)
    told.add_argument("--tokens", type=int, default=256)
    told.add_argument("--width", type=int, default=256, help="of both models")
    told.add_argument("--vocab", type=int, default=MEMORY_VOCAB)
    told.add_argument(
        "--chunk", type=int, help="tokens at once; a quarter of --tokens where absent"
    )
    told.add_argument("--ways", nargs="+", default=["naive", "fused", "lean"])
    told.add_argument("--no-memory", action="store_true", help="time only")
    arguments = told.parse_args()
    common.start(arguments)
    # As many chunks as there would be with more tokens, or the loop would not be measured.
    chunk = arguments.chunk or arguments.tokens // 4
    shape = arguments.tokens, arguments.width, arguments.vocab
    seconds = times(*shape, arguments.dtype, arguments.repeats, chunk, arguments.ways)
    machine = common.ceilings(arguments.dtype, shape)
    itemsize = jnp.dtype(arguments.dtype).itemsize
    width = arguments.width
    work = divergence_work(arguments.vocab, width, width, arguments.tokens, itemsize)
    figures = {name: common.figure(each, [work], machine) for name, each in seconds.items()}
    for name in seconds if "naive" in seconds else ():
        pairs = zip(seconds[name], seconds["naive"], strict=True)
        figures[name]["over_naive"] = common.rounded(statistics.median(a / b for a, b in pairs))
    more: dict[str, Any] = {}
    if not arguments.no_memory:
        found = memory(256)
        more["memory"] = {
            "tokens": MEMORY_TOKENS,
            "vocab": MEMORY_VOCAB,
            "temporaries_mb": found,
            "naive_over": {k: round(found["naive"] / v, 1) for k, v in found.items()},
        }
    print(common.line(arguments, machine, figures, benchmark="divergence", chunk=chunk, **more))


if __name__ == "__main__":
    main()
