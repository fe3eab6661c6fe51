"""Laws of an engine that stays open: whatever comes when, a completion is that of its request and
of the weights that its tokens were sampled with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_tokenizer import BareTokenizer
from cases import and_slow
from tiny_models import SAMPLED, random_params

from jaxrl.checkpoint.writer import load_rollout, save_rollout
from jaxrl.data.batch import make_rollout, pack_sequences
from jaxrl.models import decoder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta
from jaxrl.models.experts import Experts, Routed
from jaxrl.models.family import LayerKind
from jaxrl.models.packing import pack_streams
from jaxrl.models.parameters import param_shardings
from jaxrl.roles.stream_log import ANSWERS, StreamLog
from jaxrl.sampling import engine as engine_module
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.partial_completion import RandomKey, Reply, SampleRequest, tell_again
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import Completion, Prompt, Sequences, StreamEvent

PLAIN = replace(SAMPLED, n_layers=1, max_positions=512)
CONFIGS = {
    "plain": PLAIN,
    "states": replace(
        SAMPLED,
        family="qwen3_5_text",
        kinds=(LayerKind(recurs=True), LayerKind()),
        delta=Delta(k_heads=2, v_heads=4, k_dim=8, v_dim=8),
        max_positions=512,
    ),
    "mixture": replace(PLAIN, family="qwen3_moe", experts=Experts(8, 2, True, dense_width=64)),
    "windows": replace(PLAIN, n_layers=2, kinds=(LayerKind(window=6), LayerKind())),
}
LONGEST = 40
SAMPLING = SamplingParams(max_new_tokens=LONGEST, eos_ids=(3, 7, 11))
OFTEN = replace(SAMPLING, eos_ids=tuple(range(0, 61, 3)))
"""Turns end soon."""
WIDTH = 64


@cache
def params(config: DecoderConfig, version: int = 0) -> Any:
    tree = random_params(config, seed=version, layout="unstacked")
    tree["embed"]["embedding"] = 20 * tree["embed"]["embedding"]
    return tree


def requests(
    seed: int, batches: int, sampling: SamplingParams = SAMPLING, **options: Any
) -> list[list[SampleRequest]]:
    """Those of some batches: a step each, longer prompts as they come, other numbers of samples."""
    rng = np.random.default_rng(seed)
    found = []
    for step in range(batches):
        prompts = [rng.integers(12, 61, rng.integers(1, 4 + 2 * step)).tolist() for _ in range(3)]
        n = int(rng.integers(1, 4))
        found.append(
            [
                SampleRequest(
                    *(prompt, sampling, RandomKey(seed, step, 0, i, sample)),
                    int(rng.integers(1, LONGEST + 1)),
                    **options,
                )
                for i, prompt in enumerate(prompts)
                for sample in range(n)
            ]
        )
    return found


def made(config: DecoderConfig, **options: Any) -> Engine:
    shapes = {"slots": 4, "max_prompt_tokens": 12, "max_new_tokens": LONGEST, "launch_tokens": 8}
    return Engine(config, options.pop("mesh", None), **shapes | options)


def streamed(
    engine: Engine,
    batches: list[list[SampleRequest]],
    seed: int,
    *weights: Any,
    another: Callable[[], Engine] | None = None,
) -> list[Completion]:
    """Submits requests at random launches, and swaps the weights at others.

    Args:
        another: makes a like engine, which at further launches goes on with what there is.
    """
    rng, asked = np.random.default_rng(seed), [x for batch in batches for x in batch]
    left, futures = [*asked], list[Future[Completion]]()
    versions = list(enumerate(weights))
    version, tree = versions.pop(0)
    engine.swap(tree, version)
    while left or engine.in_flight or versions:
        for _ in range(rng.integers(0, 6) if left else 0):
            if left:
                futures.append(engine.submit(left.pop(0)))
        if versions and rng.random() < 0.4:
            version, tree = versions.pop(0)
            engine.swap(tree, version)
        engine.step()
        if another is not None and rng.random() < 0.2:
            engine.park()
            begun = engine.so_far(futures)
            engine.idle()
            engine = another()
            engine.swap(tree, version)
            futures = list(map(engine.submit, asked, begun))
    return [future.result(timeout=0) for future in futures]


def assert_same(some: list[Completion], others: list[Completion]) -> None:
    for x, y in zip(some, others, strict=True):
        assert (x.tokens, x.finish_reason) == (y.tokens, y.finish_reason)
        np.testing.assert_allclose(x.logprobs, y.logprobs, rtol=0, atol=1e-5)


WHEN = [(seed, pages) for seed in range(6) for pages in (None, 2 * 64)]


@pytest.mark.parametrize(("seed", "pages"), and_slow([WHEN[0], WHEN[3]], WHEN[1:3] + WHEN[4:]))
def test_completions_are_those_of_their_requests_whenever_these_come(
    seed: int, pages: int | None
) -> None:
    """Batches with other seeds, longer prompts and more samples join those in flight, also once
    slots were given up; each is what it is where it is sampled alone."""
    tree, batches = params(PLAIN), requests(seed, 4)
    engine = made(PLAIN, cache_tokens=pages)
    alone = [x for batch in batches for x in engine.generate(tree, batch)]
    found = streamed(engine, batches, seed, tree)
    assert_same(found, alone)
    assert {x.versions for x in found} == {((0, 0),)}
    engine.idle()


@partial(jax.jit, static_argnums=0)
def learned(config: DecoderConfig, tree: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    hidden = decoder.forward(config, tree, tokens[None], mask[None])
    return jax.nn.log_softmax(decoder.token_logits(config, tree, hidden)[0])


def assert_learned(
    config: DecoderConfig, asked: SampleRequest, found: Completion, *weights: Any
) -> None:
    """The log-prob of each sampled token is the learner's of its version; so the token, and all
    keys before it, are of that version."""
    whole = [*asked.prompt, *found.tokens]
    tokens = jnp.array(whole + [0] * (WIDTH - len(whole)))
    expected = np.stack(
        [learned(config, tree, tokens, jnp.arange(WIDTH) < len(whole)) for tree in weights]
    )
    first = len(asked.prompt)
    at, of = zip(*found.versions, strict=True)
    assert at[0] == 0 and list(at) == sorted(set(at)) and list(of) == sorted(set(of))
    versions, sampled = found.token_versions, np.flatnonzero(found.sampled)
    tokens = expected[versions, first + np.arange(len(versions)) - 1, list(found.tokens)]
    np.testing.assert_allclose(found.logprobs[sampled], tokens[sampled], rtol=0, atol=5e-5)
    if asked.record_experts:
        assert found.experts is not None
        packed = pack_sequences(
            *([asked.prompt], [found.tokens]),
            **{"prompt_width": 12, "completion_width": LONGEST, "pad_id": 0},
        )
        own = np.stack([np.sort(routes(config, tree, packed)) for tree in weights])
        versions = np.concatenate([np.full(first - 1, versions[0]), versions])
        expected = own[versions, np.arange(len(versions))]
        expected[first - 1 :][~found.sampled] = -1
        np.testing.assert_array_equal(np.sort(found.experts), expected)


@partial(jax.jit, static_argnums=0)
def routes(config: DecoderConfig, tree: Any, sequences: Sequences) -> jax.Array:
    """[T, L, k]: the experts that the learner's router chooses, from the first token on."""
    packing, routed = pack_streams(sequences), list[Routed]()
    decoder.forward_packed(config, tree, packing, routed=routed)
    return jnp.stack([packing.rows[0].unpack(ids)[0] for ids in routed[0].ids], 1)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixture", {}),
    ("plain", {"cache_tokens": 2 * 64}),
    ("plain", {}),
    ("states", {}),
    ("windows", {}),
    ("mixture", {"cache_tokens": 2 * 64}),
    ("plain", {"mesh": (2, 2, 2), "slots": 8}),
    ("mixture", {"mesh": (2, 2, 2), "slots": 8}),
]


@pytest.mark.parametrize(
    ("case", "seed"),
    and_slow([(0, 0), (1, 1)], [(i, 5) for i in range(len(CASES))]),
)
def test_each_token_and_all_before_it_are_of_one_version(case: int, seed: int) -> None:
    """New weights come at any launch; what is in flight goes on with all its tokens, also in
    another engine. So are the experts that are replayed for a position: those of the launch that
    sampled the token behind it, and of the prompt those of the first token's weights."""
    name, options = CASES[case]
    config = CONFIGS[name]
    weights = [params(config, version) for version in range(4)]
    if shape := options.get("mesh"):
        mesh = role_mesh(jax.devices()[:8], Axes(*shape))
        options = options | {"mesh": mesh}
        weights = jax.device_put(weights, [param_shardings(config, mesh, "unstacked")] * 4)
    engines: list[Engine] = []

    def another() -> Engine:
        engines.append(made(config, swaps=(9, 3), **options))
        return engines[-1]

    batches = requests(seed, 4, record_experts=name == "mixture")
    found = streamed(another(), batches, seed, *weights, another=another)
    asked = [x for batch in batches for x in batch]
    for one, completion in zip(asked, found, strict=True):
        assert len(completion.tokens) <= one.max_tokens
        assert_learned(config, one, completion, *(params(config, v) for v in range(4)))
    assert any(len(x.versions) > 1 for x in found)
    assert len(engines) > 2 and sum(engine.stats.recomputed for engine in engines) > 0
    engines[-1].idle()


def test_the_same_weights_again_change_nothing() -> None:
    engine, batches = made(PLAIN, swaps=(9, 3)), requests(5, 3)
    alone = [x for batch in batches for x in engine.generate(params(PLAIN), batch)]
    assert_same(streamed(engine, batches, 5, *[params(PLAIN)] * 6), alone)


class Letters(BareTokenizer):
    def decode(self, tokens: Any, **kwargs: Any) -> str:
        return "".join(chr(64 + token) for token in tokens)


class Echo:
    """Answers three turns, each some launches later."""

    def __init__(self, late: list[tuple[int, Future[Reply], Reply]] | None, first: int = 12):
        self.late, self.turns, self.ended, self.first = late, 0, 0, first

    def answer(self, text: str, *, eos: int | None, length: int) -> Future[Reply]:
        self.turns += 1
        tokens = tuple(self.first + (length + 5 * i) % 40 for i in range(1 + length % 5))
        said = Reply(tokens if self.turns < 3 else (), "again", 0.0)
        reply: Future[Reply] = Future()
        if self.late is None:
            reply.set_result(said)
        else:
            self.late.append((length % 3, reply, said))
        return reply

    def end(self) -> None:
        self.ended += 1

    def again(self) -> Echo:
        return Echo(self.late)


@pytest.mark.parametrize("cancel", [False, True])
def test_episodes_go_on_with_new_weights(cancel: bool) -> None:
    """Also those that wait for an answer as they come. A request that is cancelled leaves the
    others what they are, and its episode ends, once."""
    late: list[tuple[int, Future[Reply], Reply]] = []
    echoes = [Echo(late) for _ in range(6)]
    asked = [
        SampleRequest(
            *([13, 20 + i], OFTEN, RandomKey(3, 0, 0, i), LONGEST),
            environment=echo,
        )
        for i, echo in enumerate(echoes)
    ]
    engine = made(PLAIN, swaps=(9, 3), episodes=True, tokenizer=Letters())
    engine.swap(params(PLAIN, 0), 0)
    futures = [engine.submit(request) for request in asked]
    launches = 0
    while engine.in_flight:
        launches += 1
        if launches in (3, 4, 8):
            engine.swap(params(PLAIN, engine.version + 1), engine.version + 1)
        if cancel and launches == 2:  # one in a slot, and one that waits for it
            engine.cancel(futures[1])
            engine.cancel(futures[5])
        engine.step()
        waiting, late[:] = late[:], []
        for left, reply, said in waiting:
            if left:
                late.append((left - 1, reply, said))
            else:
                reply.set_result(said)
    gone = {1, 5} if cancel else set()
    assert {i for i, future in enumerate(futures) if future.cancelled()} == gone
    begun = Counter(echo.ended for i, echo in enumerate(echoes) if i not in gone)
    assert begun == {1: len(futures) - len(gone)}
    assert (echoes[1].ended, echoes[5].ended) == ((1, 0) if cancel else (1, 1))
    weights = [params(PLAIN, version) for version in range(4)]
    found = {i: futures[i].result(timeout=0) for i in set(range(6)) - gone}
    for i, completion in found.items():
        assert_learned(PLAIN, asked[i], completion, *weights)
    assert max(len(x.turns) for x in found.values()) == 5
    assert any(len(x.versions) > 2 for x in found.values())


def episodes(first: int = 12) -> list[SampleRequest]:
    """Their environments answer at once, and begin their answers from `first` on."""
    return [
        SampleRequest(
            *([13, 20 + i], OFTEN, RandomKey(3, 0, 0, i), LONGEST),
            **{"environment": Echo(None, first), "record_experts": True},
        )
        for i in range(6)
    ]


def in_a_file(folder: Path, begun: list[Completion]) -> list[Completion]:
    """As a checkpoint keeps them."""
    prompts = [Prompt(i, tuple(one.prompt), "") for i, one in enumerate(episodes())]
    packing = {"pad_id": 0, "max_prompt_tokens": 12, "max_new_tokens": LONGEST}
    rollout = make_rollout(prompts, [[one] for one in begun], policy_version=0, **packing)
    save_rollout(folder / "batch.npz", rollout)
    return list(load_rollout(folder / "batch.npz", prompts, packing).completions)


class Played:
    """Episodes whose answers, and newer weights, come after random launches; or after those of a
    record."""

    def __init__(self, folder: Path, seed: int, expected: list[StreamEvent], resumes: bool):
        """
        Args:
            resumes: another engine goes on after each save; else the same one, as in a replay.
        """
        self.log, self.late, self.resumes = StreamLog(), list[Any](), resumes
        self.folder = folder
        self.log.follow(expected, exact=True)
        self.version, self.engine = -1, self.made()
        calls = [event.call for event in expected if event.call != ANSWERS] or ["load"]
        self.come(calls.pop(0))
        self.submit([None] * 6)
        rng = np.random.default_rng(seed)
        while self.engine.in_flight:
            while calls and self.log.left(None) == 0:
                self.come(calls.pop(0))
            if not expected and rng.random() < 0.3 and self.version < 7:
                calls = ["save", "load"][int(rng.integers(2)) :]
                while calls:
                    self.come(calls.pop(0))
            self.engine.step()
            if not self.engine.waited:
                self.log.launched()
            waiting, self.late[:] = self.late[:], []
            for _, reply, said in waiting:
                if rng.random() < 0.3:
                    reply.set_result(said)
                else:
                    self.late.append((0, reply, said))
        assert not calls
        self.found = [future.result(timeout=0) for future in self.futures]
        self.events = list(self.log.since(0).events)

    def made(self) -> Engine:
        options: dict[str, Any] = {"swaps": (9, 3), "episodes": True, "tokenizer": Letters()}
        return made(CONFIGS["mixture"], answers=self.log.answers, **options)

    def submit(self, begun: list[Any]) -> None:
        requests = episodes()
        left = [i for i, x in enumerate(begun) if x and x.finish_reason == "unfinished"]
        for first in (12, 13):  # those of another environment differ where they answered
            asked = requests if first == 12 else episodes(13)
            same = tell_again([(asked[i], begun[i]) for i in left], Letters())
            assert same == [first == 12 or len(begun[i].turns) < 2 for i in left]
        for request in requests:
            assert isinstance(request.environment, Echo)
            request.environment.late = self.late
        self.futures = list(map(self.engine.submit, requests, begun))

    def come(self, call: str) -> None:
        if call == "load":
            self.version += 1
            self.engine.swap(params(CONFIGS["mixture"], self.version), self.version)
        else:
            self.engine.park()
        self.log.note(call, self.version)
        if call == "save" and self.resumes:
            begun = in_a_file(self.folder, self.engine.so_far(self.futures))
            self.engine.idle()
            self.late.clear()
            self.engine = self.made()
            self.submit(begun)


@pytest.mark.parametrize("seed", and_slow([0], [(seed,) for seed in range(2, 9)]))
def test_episodes_come_to_the_same_by_the_record(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever environments answer then; and where another engine goes on after a save, once the
    environments are told the turns again, it comes to what this one would have."""
    monkeypatch.setattr(engine_module, "LOOK_S", 0.0)
    one = Played(tmp_path, seed, [], resumes=bool(seed % 2))
    for number, resumes in enumerate((False, True)):
        two = Played(tmp_path, 100 + 2 * seed + number, one.events, resumes)
        assert two.events == one.events
        for x, y in zip(one.found, two.found, strict=True):
            assert (x.tokens, x.versions, x.turns) == (y.tokens, y.versions, y.turns)
            assert (x.finish_reason, x.text, x.opening) == (y.finish_reason, y.text, y.opening)
            np.testing.assert_array_equal(x.logprobs, y.logprobs)
            np.testing.assert_array_equal(x.experts, y.experts)
    weights = [params(CONFIGS["mixture"], version) for version in range(8)]
    for request, completion in zip(episodes(), one.found, strict=True):
        assert_learned(CONFIGS["mixture"], request, completion, *weights)
    assert any(len(x.versions) > 2 for x in one.found) and max(len(x.turns) for x in one.found) == 5
    assert {"load", "save", ANSWERS} == {event.call for event in one.events}


def test_requests_of_another_way_wait_for_those_before_them() -> None:
    """An evaluation between the samples of two batches: each has its own sampling."""
    (one, two), greedy = requests(6, 2), replace(SAMPLING, temperature=0.0)
    between = [replace(x, sampling=greedy) for x in one]
    engine, tree = made(PLAIN), params(PLAIN)
    alone = [x for batch in (one, between, two) for x in engine.generate(tree, batch)]
    assert_same(streamed(engine, [one, between, two], 6, tree), alone)


def test_idle_drops_what_is_in_flight() -> None:
    engine, (batch, later) = made(PLAIN), requests(7, 2)
    engine.swap(params(PLAIN))
    futures = [engine.submit(request) for request in batch]
    engine.step()
    futures += [engine.submit(request) for request in later]
    engine.idle()
    assert engine.in_flight == 0 and engine.step() == 0
    assert all(future.cancelled() or future.done() for future in futures)
    assert any(future.cancelled() for future in futures)
    assert_same(engine.generate(params(PLAIN), batch), engine.generate(params(PLAIN), batch))
