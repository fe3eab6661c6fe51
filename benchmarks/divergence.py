"""Distillation loss with gradients, in three ways: memory at V = 151936, and time. One JSON line.

    python benchmarks/divergence.py [--tokens 256 --width 256 --vocab 151936]
    python benchmarks/divergence.py --passes h100  # a table instead, by that GPU's compiler

naive: all logits, the formula as usually written, jax.grad. fused: the default. lean: recomputes.
Memory is `compiled.memory_analysis()` at 4096 tokens, bfloat16, widths 1024 and 2048: nothing runs.
Time is measured at `--tokens` and `--width`, the three taking turns; medians, and the median over
the rounds of the ratio within a round, which a busy machine disturbs least. The floor is the four
products that no way can do without (two logits, two gradients).

Passes are reads and writes of arrays of the logits' size, float32, in a chunk of a loss: nothing
runs, and no GPU is needed, but the extra `aot`.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import common
import jax
import jax.numpy as jnp

from jaxrl.losses.distill import divergence_from_hidden
from jaxrl.losses.head import logprobs_and_entropy_from_hidden, logprobs_from_hidden
from jaxrl.profile.work import divergence_work

MEMORY_VOCAB, MEMORY_TOKENS = 151936, 4096
COMPILED = {
    "divergence, fused": (partial(divergence_from_hidden, beta=0.5), True),
    "log-probs": (logprobs_from_hidden, False),
    "log-probs and entropies": (logprobs_and_entropy_from_hidden, False),
}
"""What `--passes` compiles: a function, and whether its gradients too."""


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


def compiled(target: str, name: str, chunk: int, widths: tuple[int, int], vocab: int) -> str:
    """Compiles one of `COMPILED` for a machine that is not here, in bfloat16 and four chunks.

    Args:
        widths: of the student and of the teacher.
    """
    from jaxrl.aot.machine import machine, prepare

    prepare()
    mesh = jax.sharding.Mesh(machine(target).compiled[:1], ("device",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    loss, differentiated = COMPILED[name]
    student, teacher = ((array(1, 4 * chunk, w), array(vocab, w)) for w in widths)
    options = {"chunk": chunk, "temperature": 0.9}
    if differentiated:
        args = *student, *teacher, array(1, 4 * chunk, dtype=bool)
        call = jax.value_and_grad(lambda *each: loss(*each, **options)[0], argnums=(0, 1))
    else:
        args, call = (*student, array(1, 4 * chunk, dtype=jnp.int32)), partial(loss, **options)
    return str(jax.jit(call).lower(*args).compile().as_text())


def print_passes(gpu: str, chunk: int) -> None:
    """Prints a table of `COMPILED`, at the widths of Qwen2.5-1.5B and its teacher of 7B."""
    from decode_step import passes  # needs what tests need

    print(
        f"| {gpu}, chunks of {chunk:,} x {MEMORY_VOCAB:,} | read | written | passes | GB a chunk |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name in COMPILED:
        text = compiled(f"{gpu}x1", name, chunk, (1536, 3584), MEMORY_VOCAB)
        read, wrote = passes(text, chunk, MEMORY_VOCAB)
        moved = (read + wrote) * chunk * MEMORY_VOCAB * 4 / 1e9
        print(f"| {name} | {read:.1f} | {wrote:.1f} | {read + wrote:.1f} | {moved:.1f} |")


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
    told.add_argument("--passes", metavar="GPU", help="of such a GPU: a100, h100, h200, ...")
    arguments = told.parse_args()
    if arguments.passes:
        print_passes(arguments.passes, arguments.chunk or 2048)
        return
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
