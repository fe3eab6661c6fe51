"""Laws of the engine: completions depend on seeds and prompts alone, and nothing waits in vain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_tokenizer import BareTokenizer
from cases import and_slow
from engine_requests import sample_groups
from jax.sharding import Mesh
from numpy_losses import log_softmax as exact_log_softmax
from tiny_models import SAMPLED, random_params

from jaxrl.errors import UserError
from jaxrl.models import decoder
from jaxrl.models.kernels import CPU, Target
from jaxrl.models.parameters import param_shardings
from jaxrl.models.shared_prompts import Seats
from jaxrl.process.compile_cache import collectives_lose_order
from jaxrl.sampling import decode
from jaxrl.sampling import engine as engine_module
from jaxrl.sampling.engine import Aborted, Engine
from jaxrl.sampling.partial_completion import RandomKey
from jaxrl.sampling.sampler import SamplingParams, sampling_arrays
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import Completion

CONFIG = replace(SAMPLED, n_layers=1)
"""Programs of decode unroll their layers; the tests of states and of episodes have several."""
PROMPTS = [np.random.default_rng(i).integers(0, 61, 1 + 2 * i % 8).tolist() for i in range(5)]
EOS = (3, 7, 11)
SAMPLING = SamplingParams(max_new_tokens=12, eos_ids=EOS)
MESHES = {"1": (1, 1, 1), "2x2x2": (2, 2, 2), "4x1x2": (4, 1, 2)}


class Letters(BareTokenizer):
    """A tokenizer whose tokens are one or two letters: a stop string may end inside a token."""

    words = (
        [chr(97 + i) for i in range(26)] + [f"{chr(97 + i)}b" for i in range(26)] + list("#" * 9)
    )

    def decode(self, tokens: Sequence[int], **kwargs: Any) -> str:
        return "".join(self.words[token] for token in tokens)


@cache
def params() -> Any:
    tree = random_params(CONFIG, layout="unstacked")
    # Larger embeddings sharpen the distribution: likely tokens, EOS and margins above rounding.
    tree["embed"]["embedding"] = 20 * tree["embed"]["embedding"]
    return tree


def make_mesh(shape: tuple[int, int, int]) -> Mesh:
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


CHOSEN = ("min_free", "check_every", "search_beside")
"""What an engine chooses by its device; no result may depend on it."""


def engine(mesh: Mesh | None = None, slots: int = 4, **options: Any) -> Engine:
    chosen = {name: options.pop(name) for name in CHOSEN if name in options}
    shapes = {"max_prompt_tokens": 8, "max_new_tokens": 16, "launch_tokens": 8, **options}
    made = Engine(CONFIG, mesh, slots=slots, **shapes)
    for name, value in chosen.items():
        setattr(made, name, value)
    return made


def generate(
    made: Engine,
    order: Sequence[int] = range(5),
    n: int = 3,
    sampling: SamplingParams = SAMPLING,
    **options: Any,
) -> dict[int, list[Completion]]:
    """Prompt id -> its completions, whatever the order they were asked for in."""
    tree = params()
    if made.mesh is not None:
        tree = jax.device_put(tree, param_shardings(CONFIG, made.mesh, "unstacked"))
    prompts = [PROMPTS[i] for i in order]
    ids = {"prompt_ids": list(order), **options}
    out = sample_groups(made, tree, prompts, n=n, sampling=sampling, **ids)
    return dict(zip(order, out, strict=True))


@cache
def reference() -> dict[int, list[Completion]]:
    return generate(engine())


def at_once(n: int, tokens: int, tokenizer: Any = None, **options: Any) -> Any:
    """What `generate` returns of an engine with a slot of its own for each sample, in one launch:
    few programs, whose caches neither grow nor shrink."""
    shapes = {"slots": 5 * n, "max_new_tokens": tokens, "launch_tokens": tokens}
    return generate(engine(tokenizer=tokenizer, **shapes), n=n, **options)


def assert_same(a: dict[int, list[Completion]], b: dict[int, list[Completion]]) -> None:
    assert a.keys() == b.keys()
    for i in a:
        for x, y in zip(a[i], b[i], strict=True):
            assert (x.tokens, x.finish_reason, x.text) == (y.tokens, y.finish_reason, y.text)
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)
            np.testing.assert_allclose(x.sampler_logprobs, y.sampler_logprobs, atol=1e-5)


@jax.jit
def full_logits(tokens: jax.Array, length: jax.Array) -> jax.Array:
    mask = jnp.arange(tokens.shape[0])[None] < length
    hidden = decoder.forward(CONFIG, params(), tokens[None], mask)
    return decoder.token_logits(CONFIG, params(), hidden)[0]


def teacher_forced(prompt: Sequence[int], completion: Completion) -> np.ndarray:
    """Logits [len(completion), V] float32 from one pass over the whole sequence."""
    tokens = [*prompt, *completion.tokens]
    padded = np.array(tokens + [0] * (200 - len(tokens)), np.int32)
    logits = np.asarray(full_logits(padded, np.int32(len(tokens))))
    return logits[len(prompt) - 1 : len(tokens) - 1]


def teacher_forced_logprobs(
    prompt: Sequence[int], completion: Completion, temperature: float = 1.0
) -> np.ndarray:
    logprobs = exact_log_softmax(teacher_forced(prompt, completion), temperature)
    return np.take_along_axis(logprobs, np.array(completion.tokens)[:, None], 1)[:, 0]


@pytest.mark.parametrize(
    "options",
    and_slow(
        [{"slots": 1}, {"min_free": 1}],
        [
            *({"slots": 16}, {"launch_tokens": 1}, {"min_free": 4}),
            {"launch_tokens": 5, "check_every": 5},
        ],
    ),
    ids=str,
)
def test_tokens_do_not_depend_on_slots_or_launches(options: dict[str, int]) -> None:
    """Other launches are compared where slots are given up and where rows follow, below."""
    assert_same(reference(), generate(engine(**options)))


def test_tokens_do_not_depend_on_order_or_company() -> None:
    assert_same(reference(), generate(engine(), order=[4, 2, 0, 1, 3]))
    alone = generate(engine(), order=[2], n=1)
    assert_same({2: reference()[2][:1]}, alone)


@pytest.mark.parametrize(
    ("name", "temperature"), and_slow([("2x2x2", 0.0)], [("2x2x2", 1.0), ("1", 0.0), ("1", 1.0)])
)
def test_tokens_do_not_depend_on_the_mesh(name: str, temperature: float) -> None:
    """Those that are drawn are compared where samples share prompts, below."""
    sampling = replace(SAMPLING, temperature=temperature)
    made = engine(make_mesh(MESHES[name]))
    assert_same(generate(engine(), sampling=sampling), generate(made, sampling=sampling))


def test_decoding_copies_neither_weights_nor_their_cache() -> None:
    """Temporaries of a launch grow with the cache of one layer, but neither with that of all layers
    nor with their weights: no second copy of them is made."""
    config = replace(CONFIG, n_layers=4, d_ff=512)
    tree = random_params(config, layout="unstacked")
    held, rows = (decode.new_cache(config, None, n, 2048, np.dtype(np.float32)) for n in (2, 1))
    seats = Seats(np.zeros((1, 2), np.int32), np.ones(1, np.int32), np.zeros(2, np.int32))
    lowered = decode.launch.lower(
        config,
        None,
        tree,
        held,
        np.zeros((2, decode.COLUMNS), np.int32),
        np.int32(1),
        sampling_arrays(SAMPLING),
        (rows, seats),
        n_tokens=8,
        check_every=8,
    )
    memory = lowered.compile().memory_analysis()
    layers = sum(leaf.nbytes for leaf in jax.tree.leaves(tree["layers"]))
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    assert memory.temp_size_in_bytes - cache / config.n_layers < layers / 4 < cache / 8
    assert memory.alias_size_in_bytes >= cache


def test_seeds_steps_attempts_and_prompt_ids_make_other_samples() -> None:
    other = [
        generate(engine(), key=RandomKey(1)),
        generate(engine(), key=RandomKey(0, 1)),
        generate(engine(), prompt_ids=[9, 8, 7, 6, 5]),
        *(generate(engine(), key=RandomKey(0, 0, attempt)) for attempt in (1, 4)),
    ]
    flat = [tuple(c.tokens for i in range(5) for c in g[i]) for g in (reference(), *other)]
    assert len(set(flat)) == 6
    assert len({c.tokens for c in reference()[4]}) == 3  # and the samples of one prompt differ
    assert_same(reference(), generate(engine(), key=RandomKey(0)))


@pytest.mark.parametrize("temperature", and_slow([0.0, 0.7], [1.0]))
def test_logprobs_are_the_teacher_forced_ones(temperature: float) -> None:
    sampling = replace(SAMPLING, temperature=temperature, top_k=5 if temperature else 0)
    for i, completions in at_once(2, 12, sampling=sampling).items():
        for completion in completions:
            expected = teacher_forced_logprobs(PROMPTS[i], completion, temperature or 1.0)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
            assert completion.logprobs.dtype == completion.sampler_logprobs.dtype == np.float32
            assert (completion.sampler_logprobs >= completion.logprobs - 1e-6).all()


def test_greedy_is_the_argmax_of_the_whole_forward_pass() -> None:
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
    for i, completions in at_once(2, 12, sampling=sampling).items():
        for completion in completions:
            best = teacher_forced(PROMPTS[i], completion).argmax(-1)
            np.testing.assert_array_equal(best, completion.tokens)


def test_each_completion_ends_at_its_own_eos_which_it_keeps() -> None:
    free = generate(engine(), sampling=replace(SAMPLING, eos_ids=()))
    lengths = set()
    for i, completions in reference().items():
        for completion, whole in zip(completions, free[i], strict=True):
            ends = [at for at, token in enumerate(whole.tokens) if token in EOS]
            assert whole.finish_reason == "length" and len(whole.tokens) == 12
            assert completion.tokens == whole.tokens[: ends[0] + 1 if ends else 12]
            assert completion.finish_reason == ("stop" if ends else "length")
            lengths.add(len(completion.tokens))
    assert len(lengths) > 3


def test_a_prompt_is_prefilled_once_for_its_samples() -> None:
    made = engine(slots=4)
    generate(made, n=6)
    assert made.stats.prefill_rows == len(PROMPTS)


def test_one_long_completion_holds_nobody() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(1 / 12, size=(5, 12)), 64)
    lengths[0, 0] = 64  # whose cache is the smallest: one program
    made = engine(slots=4, max_new_tokens=64, launch_tokens=32, min_free=1, check_every=1)
    sampling = SamplingParams(max_new_tokens=64)
    out = generate(made, n=12, sampling=sampling, limits=lengths.tolist())
    assert [[len(c.tokens) for c in out[i]] for i in range(5)] == lengths.tolist()
    # The least possible: all slots busy until the last sample is seated, then the longest of them.
    ideal = max(64, -(-int(lengths.sum()) // 4))
    in_batches = lengths.reshape(-1, 4).max(1).sum()
    assert made.stats.decode_steps <= 1.15 * ideal < 0.8 * in_batches
    assert made.stats.generated_tokens == lengths.sum()


def test_other_settings_compile_nothing_and_a_kind_of_draw_one_program() -> None:
    own = replace(CONFIG, max_positions=255)  # whose programs no other test has
    made = Engine(own, None, slots=1, max_prompt_tokens=8, max_new_tokens=16, launch_tokens=8)
    some = SamplingParams(max_new_tokens=16, top_k=9, top_p=0.5, min_p=0.2)
    programs = (decode.launch, decode.insert, decode.prefill_prompts)

    def compiled(*asked: SamplingParams) -> list[int]:
        before = [f._cache_size() for f in programs]
        for step, sampling in enumerate(asked):
            generate(made, sampling=sampling, key=RandomKey(5, step))
        return [f._cache_size() - n for f, n in zip(programs, before, strict=True)]

    assert compiled(SAMPLING) == [1, 1, 1]
    assert compiled(replace(SAMPLING, temperature=0.7, max_new_tokens=3)) == [0, 0, 0]
    assert compiled(some) == [1, 0, 0]
    other = replace(some, temperature=0.3, top_k=4, top_p=0.8, min_p=0.1, eos_ids=(1, 2))
    assert compiled(other) == [0, 0, 0]
    assert compiled(replace(other, temperature=0.0), replace(SAMPLING, temperature=0.0)) == [
        1,
        0,
        0,
    ]


def spy(monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    """Appends (slots, positions) of the cache of each launch."""
    launch = decode.launch

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[3][0][0].shape[:3:2])
        return launch(*args, **kwargs)

    spied.lower = launch.lower  # type: ignore[attr-defined]
    monkeypatch.setattr(decode, "launch", spied)


@pytest.mark.parametrize("name", and_slow(["1"], ["2x2x2"]))
def test_slots_are_given_up_when_nothing_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions of which each half is twice as long as the next: the same ones as without, at a
    fraction of the rows, and one more program for each halving at the most."""
    seen: list[tuple[int, int]] = []
    lengths = np.random.default_rng(1).permutation(60 // 2 ** (np.arange(40) // 8)).reshape(5, 8)
    sampling = SamplingParams(max_new_tokens=60)
    asked = {"sampling": sampling, "limits": lengths.tolist()}
    expected = at_once(8, 60, **asked)
    before = decode.launch._cache_size()
    spy(monkeypatch, seen)
    made = engine(make_mesh(MESHES[name]), slots=40, max_new_tokens=60, launch_tokens=8)
    assert_same(expected, generate(made, n=8, **asked))
    monkeypatch.undo()
    slots = [slots for slots, _ in seen]
    assert slots[0] == 40 and slots[-1] <= 16 and slots == sorted(slots, reverse=True)
    assert all(b == a or 2 * b <= a for a, b in zip(slots, slots[1:], strict=False))
    assert sum(slots) < 0.75 * 40 * len(slots)
    assert decode.launch._cache_size() - before == len(set(seen)) <= 1 + np.log2(40)
    assert made.stats.slots == 40 and made.stats.generated_tokens == lengths.sum()


SHARDED = (("2x2x2", 8), ("2x2x2", 40), ("4x1x2", 16))


@cache
def alone(n: int, temperature: float) -> dict[int, list[Completion]]:
    """One sample after the other, each the only one that reads the row of its prompt."""
    return generate(engine(slots=1), n=n, sampling=replace(SAMPLING, temperature=temperature))


@pytest.mark.parametrize(
    ("name", "slots", "n", "temperature"),
    and_slow(
        [("2x2x2", 8, 8, 1.0)],  # one device with 3 samples for a slot or four, above
        [
            *((*case, 1.0) for case in (("1", 5, 8), ("1", 3, 8), ("1", 40, 8))),
            *(("2x2x2", 40, 8, 1.0), ("4x1x2", 16, 8, 1.0)),
            *(
                (*case, 2, temperature)
                for case in (("1", 3), ("1", 5), ("1", 40), *SHARDED)
                for temperature in (1.0, 0.0)
            ),
        ],
    ),
)
def test_tokens_do_not_depend_on_who_shares_the_prompts(
    name: str, slots: int, n: int, temperature: float
) -> None:
    """Of several lengths, one of a single token; slots that n does not divide, and refills."""
    shared = engine(make_mesh(MESHES[name]), slots=slots)
    sampling = replace(SAMPLING, temperature=temperature)
    assert_same(alone(n, temperature), generate(shared, n=n, sampling=sampling))
    assert 5 <= shared.stats.prefill_rows <= 5 * shared.row_shards  # each has its own


def test_rows_of_prompts_follow_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of each prompt is long, so that more and more prompts are there while slots are
    refilled, and at the end no more rows and seats than there are slots."""
    limits = [[40, 4, 4, 4]] * 5
    asked = {"sampling": SamplingParams(max_new_tokens=40), "limits": limits}
    options = {"slots": 4, "max_new_tokens": 40, "launch_tokens": 4}
    expected = at_once(4, 150, **asked)  # the program of the tests of pages
    seen: list[tuple[int, ...]] = []
    launch = decode.launch

    def spied(*args: Any, **kwargs: Any) -> Any:
        held, seats = args[7]
        assert held[0][0].shape[0] == len(seats.lengths) == len(seats.slots)
        seen.append((len(args[4]), *seats.slots.shape, int((seats.slots >= 0).sum())))
        return launch(*args, **kwargs)

    spied.lower = launch.lower  # type: ignore[attr-defined]
    monkeypatch.setattr(decode, "launch", spied)
    assert_same(expected, generate(engine(**options), n=4, **asked))
    slots, rows, seats, taken = zip(*seen, strict=True)
    assert (slots[0], rows[0], seats[0]) == (4, 1, 4) and max(rows) == 4
    assert all(b in (a, 2 * a) or 2 * b <= a for a, b in zip(rows, rows[1:], strict=False))
    assert slots[-1] < 4 and rows[-1] <= slots[-1] and seats[-1] == 1
    assert all(0 < n <= of for n, of in zip(taken, slots, strict=True))


PAGED = {"slots": 8, "max_new_tokens": 150, "launch_tokens": 16}
"""Of engines with pages: with the same pool they share their programs."""


def limits_of(n: int) -> list[list[int]]:
    """Completions of up to three pages."""
    return np.random.default_rng(0).integers(20, 150, (5, n)).tolist()


@pytest.mark.parametrize(
    ("name", "cache_tokens", "n", "temperature"),
    and_slow(
        [("2x2x2", 192, 4, 1.0)],  # and one device below, in few programs
        [("1", 256, 4, 1.0), ("1", 192, 1, 0.0), ("1", 2048, 4, 0.0), ("4x1x2", 160, 3, 0.0)],
    ),
)
def test_samples_wait_for_pages_and_go_on_where_they_were(
    name: str, cache_tokens: int, n: int, temperature: float
) -> None:
    """Completions of up to three pages in pools that hold one or a few of them: those that were
    sent back and read again are the same ones; and in the end there are fewer slots and pages."""
    sampling = SamplingParams(max_new_tokens=150, temperature=temperature)
    asked = {"sampling": sampling, "limits": limits_of(n)}
    made = engine(make_mesh(MESHES[name]), cache_tokens=cache_tokens, **PAGED)
    assert_same(at_once(n, 150, **asked), generate(made, n=n, **asked))
    stats = made.stats
    assert (stats.preemptions > 0) == (stats.recomputed > 0) == (cache_tokens < 2048)
    # Prompts of those that were sent back are read with them.
    assert 5 <= stats.prefill_rows <= 5 * made.row_shards


def test_pages_bound_the_programs_and_those_of_the_last_samples_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One program for each number of slots, of pages, and of pages of the longest completion, which
    are few; the next batch needs none."""
    asked = {"n": 4, "sampling": SamplingParams(max_new_tokens=150), "limits": limits_of(4)}
    seen: list[tuple[int, ...]] = []
    launch = decode.launch

    def spied(*args: Any, **kwargs: Any) -> Any:
        pool, (held, seats), pages = args[3], args[7], args[8]
        assert pool[0][0].shape[0] == len(pages.owners) and len(held[0][0]) == len(seats.lengths)
        seen.append((len(pages.table), len(pages.owners), pages.table.shape[1], *seats.slots.shape))
        return launch(*args, **kwargs)

    spied.lower = launch.lower  # type: ignore[attr-defined]
    expected = at_once(tokens=150, **asked)
    launch.clear_cache()  # of that and of the tests around, which have the same programs
    monkeypatch.setattr(decode, "launch", spied)
    made = engine(make_mesh(MESHES["1"]), cache_tokens=256, **PAGED)
    assert_same(expected, generate(made, **asked))
    assert made.stats.preemptions > 0 and made.stats.recomputed > 0
    many = len(set(seen))
    generate(made, **asked)
    assert launch._cache_size() == len(set(seen)) == many <= 5
    slots, pages, widths, *_ = zip(*seen, strict=True)
    assert pages[0] == 4 and set(widths) == {1, 2, 3}  # of 64 tokens
    assert min(slots) == 1 and min(pages) == 3  # those of one completion


@pytest.mark.parametrize("search_beside", and_slow([True], [False]))
def test_a_stop_string_may_end_a_sample_that_has_no_pages_left(search_beside: bool) -> None:
    """While the next launch is prepared, its last tokens may not have been searched yet."""
    letters, n = Letters(), 4
    options = {"tokenizer": letters, "search_beside": search_beside, **PAGED}
    free = at_once(n, 150, sampling=SamplingParams(max_new_tokens=150))
    texts = [letters.decode(completion.tokens) for completion in sum(free.values(), [])]
    words = [x[90 + 3 * i : 100 + 3 * i] for i, x in enumerate(texts[::4])]
    stopped = SamplingParams(max_new_tokens=150, stop=tuple(words[::2]))
    made = engine(make_mesh(MESHES["1"]), cache_tokens=256, **options)
    expected = at_once(n, 150, letters, sampling=stopped)
    assert_same(expected, generate(made, n=n, sampling=stopped))
    reasons = {x.finish_reason for x in sum(expected.values(), [])}
    assert made.stats.preemptions > 0 and reasons == {"stop", "length"}


def test_a_pool_holds_no_episodes() -> None:
    with pytest.raises(UserError, match="needs completions in pages.*answers of environments"):
        generate(engine(cache_tokens=128, episodes=True))


def test_the_cache_follows_the_longest_and_each_size_is_one_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    before = decode.launch._cache_size()
    spy(monkeypatch, seen)
    made = engine(slots=2, max_new_tokens=90, launch_tokens=4)
    for _ in range(2):
        sample_groups(made, params(), [[5]], n=2, sampling=SamplingParams(90))
    monkeypatch.undo()
    assert sorted({width for _, width in seen}) == [64, 80, 90]
    assert decode.launch._cache_size() - before == len(set(seen)) == 3


def test_the_next_launch_starts_before_the_last_tokens_are_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find, order = engine_module.find_stop, []
    spy(monkeypatch, order)
    monkeypatch.setattr(
        engine_module, "find_stop", lambda *a: (order.append("search"), find(*a))[1]
    )
    made = engine(tokenizer=Letters(), search_beside=True)
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0, stop=("zzzzzz",))
    generate(made, order=[0, 1], n=2, sampling=sampling)
    launches = [i for i, kind in enumerate(order) if kind != "search"]
    assert launches == [0, 1] and len(order) == 2 + 2 * 4


@pytest.mark.parametrize(
    ("launch_tokens", "search_beside"),
    and_slow([(8, False), (8, True)], [(3, False), (3, True), (16, False), (1, True)]),
)
def test_a_stop_string_ends_the_completion_wherever_it_falls(
    launch_tokens: int, search_beside: bool
) -> None:
    letters = Letters()
    free = generate(engine(), sampling=SamplingParams(max_new_tokens=16), n=8)
    texts = {i: [letters.decode(c.tokens) for c in free[i]] for i in free}
    stop = (texts[0][0][5:8], texts[1][1][3:5], "zzzzzz")
    options = {"launch_tokens": launch_tokens, "search_beside": search_beside}
    made = engine(tokenizer=letters, **options)
    out = generate(made, n=8, sampling=SamplingParams(max_new_tokens=16, stop=stop))
    stopped = 0
    for i in free:
        for whole, got in zip(free[i], out[i], strict=True):
            prefixes = [letters.decode(whole.tokens[: k + 1]) for k in range(16)]
            ends = [k + 1 for k, text in enumerate(prefixes) if any(s in text for s in stop)]
            length = ends[0] if ends else 16
            assert got.tokens == whole.tokens[:length]
            assert len(got.logprobs) == len(got.sampler_logprobs) == length
            text = letters.decode(got.tokens)
            cut = min([text.find(s) for s in stop if s in text], default=len(text))
            assert got.text == text[:cut]
            assert got.finish_reason == ("stop" if ends else "length")
            stopped += bool(ends)
    assert 2 <= stopped < 40


def test_text_leaves_out_eos_only() -> None:
    letters = Letters()
    for completions in generate(engine(tokenizer=letters)).values():
        for c in completions:
            visible = c.tokens[:-1] if c.finish_reason == "stop" else c.tokens
            assert c.text == letters.decode(visible)


def test_prompts_of_any_length_share_a_batch_with_longer_caches() -> None:
    made = engine(slots=3, max_prompt_tokens=100, max_new_tokens=60, launch_tokens=16)
    prompts = [[5], list(range(1, 61)) + [4] * 40, [9] * 65]
    out = sample_groups(made, params(), prompts, n=2, sampling=SamplingParams(60))
    for prompt, completions in zip(prompts, out, strict=True):
        for c in completions:  # these pass the borders of the buckets 64 and 128
            np.testing.assert_allclose(c.logprobs, teacher_forced_logprobs(prompt, c), atol=2e-5)


def test_no_prompt_no_work() -> None:
    made = engine()
    assert made.generate(params(), []) == []
    assert made.stats.decode_steps == 0


def test_progress_and_abort_come_in_between_launches() -> None:
    seen: list[tuple[int, int]] = []
    made = engine(slots=2)
    generate(made, on_tokens=lambda tokens, done: seen.append((tokens, done)))
    assert seen == sorted(seen) and seen[-1][1] == 15 and len(seen) == made.stats.launches
    assert seen[-1][0] == made.stats.generated_tokens
    asked = iter([False, True])
    with pytest.raises(Aborted, match="of 15 completions"):
        generate(made, abort=lambda: next(asked))
    assert made.stats.launches == 1
    assert_same(reference(), generate(made))  # and the engine goes on


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 has 0 tokens"),
        ([[1] * 9], "prompt 0 has 9 tokens.*max_prompt_tokens=8"),
        ([[1, 61]], "tokens from 1 to 61.*0 to 60"),
        ([[-1]], "tokens from -1"),
    ],
)
def test_bad_prompts_are_named(prompts: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sample_groups(engine(), params(), prompts, sampling=SAMPLING)


def test_sequences_longer_than_the_model_are_named() -> None:
    with pytest.raises(UserError, match="exceeds the model's 256 positions"):
        engine(max_new_tokens=250)


def test_data_parallel_steps_exchange_nothing() -> None:
    mesh = make_mesh((2, 1, 1))
    tree = jax.device_put(params(), param_shardings(CONFIG, mesh, "unstacked"))
    cache_, rows = (decode.new_cache(CONFIG, mesh, n, 24, np.dtype(np.float32)) for n in (4, 2))
    seats = Seats(np.zeros((2, 2), np.int32), np.ones(2, np.int32), np.zeros(4, np.int32))
    lowered = decode.launch.lower(
        CONFIG,
        mesh,
        tree,
        cache_,
        np.zeros((4, decode.COLUMNS), np.int32),
        np.int32(1),
        sampling_arrays(SAMPLING),
        (rows, seats),
        n_tokens=8,
        check_every=4,
    )
    text = lowered.compile().as_text()
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    counts = {kind: text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in kinds}
    # The number of free slots, once in `check_every` steps.
    assert counts == dict.fromkeys(kinds, 0) | {"all-reduce": 1}
    assert not collectives_lose_order(text)  # a run's second start reads it from the compile cache


A_GPU, OLD_GPU = Target("gpu", (9, 0)), Target("gpu", (7, 5))
MERGER, GRAPHS = "xla_gpu_dot_merger_threshold_mb", "xla_gpu_enable_command_buffer"


@pytest.mark.parametrize(
    ("target", "axes", "flags", "options"),
    [
        (CPU, {"tensor": 2}, "", []),
        (Target("tpu"), {"tensor": 2}, "", []),
        (A_GPU, {}, "", []),
        (A_GPU, {"data": 8, "tensor": 1, "expert": 1}, "", []),
        (A_GPU, {"tensor": 2}, "", [GRAPHS]),
        (A_GPU, {"expert": 2}, "", [GRAPHS]),
        (A_GPU, {"tensor": 2}, f"--{GRAPHS}=", []),
        (A_GPU, {}, "--xla_gpu_enable_triton_gemm=False", [MERGER]),
        (OLD_GPU, {"tensor": 2}, "", [MERGER, GRAPHS]),
        (OLD_GPU, {}, f"--{MERGER}=16", []),
    ],
    ids=str,
)
def test_a_launch_is_compiled_for_its_devices_and_the_user_has_the_last_word(
    target: Target,
    axes: dict[str, int],
    flags: str,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    made = decode.launch_options(target, axes)
    assert list(made) == options
    twice = jax.jit(lambda x: 2 * x, compiler_options=made)  # XLA knows all of them
    assert twice(jnp.ones(())) == 2
