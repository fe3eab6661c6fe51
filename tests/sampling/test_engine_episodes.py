"""Laws of episodes in the engine: what a slot has read is what the learner will read, whenever and
with whichever others its environment answers."""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from bare_tokenizer import BareTokenizer
from cases import and_slow
from engine_requests import sample_groups
from tiny_models import SAMPLED, random_params
from tokenizers import AddedToken

from jaxrl.errors import RunError
from jaxrl.models import decoder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import Experts
from jaxrl.models.family import LayerKind
from jaxrl.models.parameters import param_shardings
from jaxrl.sampling import engine as engine_module
from jaxrl.sampling.engine import Aborted, Engine
from jaxrl.sampling.partial_completion import Reply
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import Completion

CONFIG = replace(SAMPLED, n_layers=1)
"""Programs of decode unroll their layers; the episodes of `test_engine_states.py` have several."""
PROMPTS = [[5, 9, 2], [1], [8, 8, 20, 31, 4]]
SAMPLING = SamplingParams(max_new_tokens=40, eos_ids=(3, 7, 11))
N, MOST_TURNS = 2, 4


class Letters(BareTokenizer):
    """A tokenizer with a character for each token."""

    def decode(self, tokens: Sequence[int], **kwargs: Any) -> str:
        return "".join(chr(64 + token) for token in tokens)


@cache
def params() -> Any:
    tree = random_params(CONFIG, seed=6, layout="unstacked")  # which ends some turns soon
    tree["embed"]["embedding"] = 20 * tree["embed"]["embedding"]
    return tree


def answer_to(prompt: int, sample: int, turn: int, text: str) -> tuple[int, ...]:
    """1 to 7 tokens that depend on everything an environment knows."""
    digest = zlib.crc32(f"{prompt} {sample} {turn} {text}".encode()) % 1000
    return tuple(12 + (digest + 7 * i) % 40 for i in range(1 + digest % 7))


class Words:
    """Environments that answer `after` seconds later, or at once."""

    def __init__(self, after: float = 0.0, answer: Any = answer_to, most: int = MOST_TURNS):
        self.after, self.answers, self.most = after, answer, most
        self.turns: Counter[tuple[int, int]] = Counter()
        self.ended: Counter[tuple[int, int]] = Counter()
        self.asked: list[tuple[str, int | None, int]] = []

    def answer(
        self, prompt: int, sample: int, text: str, *, eos: int | None, length: int
    ) -> Future[Reply]:
        self.asked.append((text, eos, length))
        turn = self.turns[prompt, sample]
        self.turns[prompt, sample] += 1
        reply: Future[Reply] = Future()
        over = turn + 1 == self.most
        tokens = () if over else self.answers(prompt, sample, turn, text)
        said = Reply(tokens, f"answer {turn}", float(turn), cut=over)
        if self.after:
            delay = self.after * (1 + (prompt + sample + turn) % 3)
            threading.Timer(delay, reply.set_result, (said,)).start()
        else:
            reply.set_result(said)
        return reply

    def end(self, prompt: int, sample: int) -> None:
        self.ended[prompt, sample] += 1


def play(
    words: Any,
    slots: int = 4,
    mesh: Any = None,
    config: DecoderConfig = CONFIG,
    sampling: SamplingParams = SAMPLING,
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> list[Completion]:
    shapes = {"max_prompt_tokens": 8, "max_new_tokens": 40, "launch_tokens": 8}
    made = Engine(
        config, mesh, slots=slots, episodes=True, tokenizer=Letters(), **shapes, **(engine or {})
    )
    tree = params()
    if mesh is not None:
        tree = jax.device_put(tree, param_shardings(config, mesh, "unstacked"))
    out = sample_groups(made, tree, PROMPTS, n=N, sampling=sampling, environments=words, **options)
    return [completion for samples in out for completion in samples]


@cache
def reference() -> list[Completion]:
    return play(Words())


def assert_same(some: list[Completion], others: list[Completion], tolerance: float = 1e-5) -> None:
    for x, y in zip(some, others, strict=True):
        assert (x.tokens, x.finish_reason, x.turns) == (y.tokens, y.finish_reason, y.turns)
        np.testing.assert_allclose(x.logprobs, y.logprobs, rtol=0, atol=tolerance)


@partial(jax.jit, static_argnums=0)
def logprobs_of(config: DecoderConfig, tokens: Any, mask: Any) -> jax.Array:
    hidden = decoder.forward(config, params(), tokens[None], mask[None])
    return jax.nn.log_softmax(decoder.token_logits(config, params(), hidden)[0])


def learned(config: DecoderConfig, number: int, completion: Completion) -> np.ndarray:
    """[len(tokens)] the log-probs of one pass over the whole episode."""
    prompt = PROMPTS[number // N]
    tokens = np.zeros(48, np.int32)
    tokens[: len(prompt) + len(completion.tokens)] = [*prompt, *completion.tokens]
    mask = np.arange(48) < len(prompt) + len(completion.tokens)
    logprobs = np.asarray(logprobs_of(config, tokens, mask))
    at = np.arange(len(prompt) - 1, len(prompt) + len(completion.tokens) - 1)
    return logprobs[at, list(completion.tokens)]


def assert_exact(config: DecoderConfig, completions: list[Completion]) -> None:
    for number, completion in enumerate(completions):
        sampled = completion.sampled
        expected = learned(config, number, completion)
        np.testing.assert_allclose(completion.logprobs[sampled], expected[sampled], atol=2e-5)
        assert not completion.logprobs[~sampled].any()


def test_the_learner_reads_what_the_slots_have_read() -> None:
    """Log-probs of every sampled turn are those of one forward pass over the whole episode."""
    completions = reference()
    assert max(len(completion.turns) for completion in completions) >= 5
    assert_exact(CONFIG, completions)


def test_an_episode_is_its_turns_and_answers() -> None:
    words = Words()
    for number, completion in enumerate(play(words)):
        roles = [turn.role for turn in completion.turns]
        assert roles == ["assistant", "environment"] * (len(roles) // 2) + ["assistant"]
        assert sum(turn.tokens for turn in completion.turns) == len(completion.tokens)
        at = 0
        for k, turn in enumerate(completion.turns):
            tokens = completion.tokens[at : at + turn.tokens]
            at += turn.tokens
            if turn.role == "assistant":
                text = Letters().decode([t for t in tokens if t not in SAMPLING.eos_ids])
                assert turn.text == text
                assert not set(tokens[:-1]) & set(SAMPLING.eos_ids)
            else:
                said = completion.turns[k - 1].text
                assert tokens == answer_to(number // N, number % N, k // 2, said)
                assert completion.turns[k - 1].reward == k // 2
        assert completion.text == completion.turns[-1].text
        assert len(completion.tokens) <= 40
    assert set(words.ended.values()) == {1} and len(words.ended) == N * len(PROMPTS)


@pytest.mark.parametrize(
    "options",
    and_slow([{"slots": 1}], [{"slots": 8}]),
    ids=str,
)
def test_slots_do_not_change_an_episode(options: dict[str, Any]) -> None:
    assert_same(play(Words(), **options), reference())


@pytest.mark.parametrize("after", [0.01, 0.004])
def test_no_bit_depends_on_when_answers_come(after: float) -> None:
    assert_same(play(Words(after)), reference(), tolerance=0)


@pytest.mark.parametrize("shape", [(2, 1, 2)], ids=str)
def test_neither_do_devices(shape: tuple[int, int, int]) -> None:
    mesh = role_mesh(jax.devices()[: int(np.prod(shape))], Axes(*shape))
    assert_same(play(Words(after=0.01), mesh=mesh), reference())


def test_long_answers_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ANSWER_TOKENS", (2, 4))
    monkeypatch.setattr(engine_module, "ANSWER_ROWS", 1)
    assert_same(play(Words(after=0.004)), reference())


def test_a_greedy_turn_is_what_follows_everything_before_it() -> None:
    """The turns of an episode are completions of prompts that hold all turns before them."""
    greedy = replace(SAMPLING, temperature=0.0)
    for number, completion in enumerate(play(Words(), sampling=greedy)[::N]):
        end = len(completion.tokens) - completion.turns[-1].tokens
        before = [*PROMPTS[number], *completion.tokens[:end]]
        alone = Engine(CONFIG, None, slots=1, max_prompt_tokens=48, max_new_tokens=40)
        limits = [[40 - end]]
        found = sample_groups(alone, params(), [before], sampling=greedy, limits=limits)
        assert found[0][0].tokens == completion.tokens[end:]


def test_windows_hold_across_turns() -> None:
    windowed = replace(CONFIG, kinds=(LayerKind(window=6),))
    completions = play(Words(), config=windowed)
    assert completions[0].tokens != reference()[0].tokens
    assert_exact(windowed, completions)


def test_experts_of_answers_are_not_recorded() -> None:
    """Those of sampled tokens are, one for each token that was read, also where a stop string cut a
    turn; for an answer the router chooses again."""
    mixture = replace(CONFIG, experts=Experts(4, 2, True, 64))
    tree = random_params(mixture, layout="unstacked")
    tree["embed"]["embedding"] = 20 * tree["embed"]["embedding"]
    stop = replace(SAMPLING, stop=("A", "M", "k", "c"))
    words = Words()
    shapes = {"max_prompt_tokens": 8, "max_new_tokens": 40, "launch_tokens": 8}
    made = Engine(mixture, None, slots=4, episodes=True, tokenizer=Letters(), **shapes)
    asked = {"n": N, "sampling": stop, "environments": words, "record_experts": True}
    for prompt, group in zip(PROMPTS, sample_groups(made, tree, PROMPTS, **asked), strict=True):
        for completion in group:
            assert completion.experts is not None
            own = completion.experts[len(prompt) - 1 :]
            assert len(own) == len(completion.tokens)
            assert (own[~completion.sampled] == -1).all() and (own[completion.sampled] >= 0).all()
            assert (completion.experts[: len(prompt) - 1] >= 0).all()
    assert any(eos is None for _, eos, _ in words.asked)


def test_stop_strings_end_turns() -> None:
    """What was decoded beyond the stop string is forgotten, in the cache too."""
    stop = replace(SAMPLING, stop=("A", "B", "C", "M", "Z", "k", "h", "a", "c", "v"))
    words = Words()
    completions = play(words, sampling=stop)
    assert any(eos is None for _, eos, _ in words.asked)
    assert_exact(CONFIG, completions)


@pytest.mark.parametrize("stop", [(), ("M", "k", "c", "a", "<", "h")])
def test_an_environment_reads_special_tokens(
    stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other readers get the text without those of the turns, here two of them."""

    def decode(self: Letters, token_ids: Any, **kwargs: Any) -> str:
        return "".join(f"<t{i}>" if i % 4 == 1 else plain(self, [i]) for i in token_ids)

    plain = Letters.decode
    special = {i: AddedToken(f"<t{i}>", special=True) for i in range(1, 61, 4)}
    monkeypatch.setattr(Letters, "decode", decode)
    monkeypatch.setattr(Letters, "added_tokens_decoder", special)
    monkeypatch.setattr(Letters, "bos_token", "<t1>")
    monkeypatch.setattr(Letters, "end_ids", frozenset([9]), raising=False)
    words = Words()
    completions = play(words, sampling=replace(SAMPLING, stop=stop))
    assert any("<" in text for text, _, _ in words.asked) != ("<" in stop)
    assert not any(word in text for text, _, _ in words.asked for word in stop)
    seen = "".join(turn.text for c in completions for turn in c.turns)
    heard = "".join(text for text, _, _ in words.asked)
    assert not any(own in seen for own in ("<t1>", "<t9>"))
    assert stop or ("<t1>" in heard and "<t13>" in seen)


def test_a_turn_begins_in_the_thoughts_that_are_opened_just_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the prompt or by the answer before it, here the first prompt and every other answer; the
    environment reads that with the turn."""
    decode = Letters.decode
    monkeypatch.setattr(
        Letters, "decode", lambda self, ids, **_: "<think>".join(decode(self, ids).split("B"))
    )

    def answer(prompt: int, sample: int, turn: int, text: str) -> tuple[int, ...]:
        assert text.startswith("<think>") == (turn % 2 == 1 if turn else prompt == 0)
        return *answer_to(prompt, sample, turn, text), 13 if turn % 2 else 2

    opened = set()
    for number, completion in enumerate(play(Words(answer=answer))):
        turn = len(completion.turns) // 2
        assert completion.opening == "<think>" * (turn % 2 == 1 if turn else number < N)
        assert completion.whole_text == completion.opening + completion.turns[-1].text
        opened.add((turn > 0, completion.opening))
    assert {(True, ""), (True, "<think>")} <= opened


def test_a_turn_that_calls_tools_is_no_answer() -> None:
    """The text of an episode that is cut there is empty; of one that went on, its last turn."""

    class Tools(Words):
        def answer(self, *place: Any, **about: Any) -> Future[Reply]:
            reply: Future[Reply] = Future()
            reply.set_result(replace(super().answer(*place, **about).result(), roles=("tool",)))
            return reply

    texts = {True: set[str](), False: set[str]()}
    for completion in play(Tools()):
        called = completion.turns[-1].reward is not None
        texts[called].add(completion.text)
        assert completion.text == ("" if called else completion.turns[-1].text)
    assert texts[True] == {""} and any(texts[False])


def test_turns_that_are_cut_end_their_episodes() -> None:
    words = Words()
    completions = play(words, turn_tokens=2)
    for completion in completions:
        lengths = [turn.tokens for turn in completion.turns if turn.role == "assistant"]
        assert max(lengths) <= 2
        if completion.tokens[-1] not in SAMPLING.eos_ids:
            assert completion.finish_reason == "length" and completion.turns[-1].reward is None
    assert len(words.asked) < sum(len(completion.turns) for completion in completions)
    assert set(words.ended.values()) == {1}


def test_an_answer_without_room_behind_it_ends_the_episode() -> None:
    completions = play(Words(answer=lambda *_: (12,) * 30), sampling=SAMPLING)
    assert all(completion.finish_reason == "length" for completion in completions)
    assert all(len(completion.tokens) <= 40 for completion in completions)
    assert {turn.role for c in completions for turn in c.turns} == {"assistant", "environment"}


def test_an_answer_may_end_in_an_eos() -> None:
    """It is the environment's, and ends no turn of the model: nothing would wake the episode."""
    end = time.monotonic() + 60
    words = Words(answer=lambda *_: (12, SAMPLING.eos_ids[0]))
    completions = play(words, abort=lambda: time.monotonic() > end)
    assert max(len(completion.turns) for completion in completions) > 2
    assert_exact(CONFIG, completions)


def test_a_failure_ends_one_episode() -> None:
    asked = next(i for i, completion in enumerate(reference()) if len(completion.turns) > 1)

    class Failing(Words):
        def answer(self, prompt: int, sample: int, text: str, **more: Any) -> Future[Reply]:
            reply = super().answer(prompt, sample, text, **more)
            if (prompt, sample) == divmod(asked, N):
                reply = Future()
                reply.set_result(Reply(failure="it broke"))
            return reply

    for number, (found, expected) in enumerate(zip(play(Failing()), reference(), strict=True)):
        if number == asked:
            assert found.failure == "it broke" and len(found.turns) == 1
        else:
            assert_same([found], [expected])


def test_what_ends_the_run_ends_every_episode() -> None:
    class Broken(Words):
        def answer(self, *given: Any, **more: Any) -> Future[Reply]:
            reply: Future[Reply] = Future()
            reply.set_exception(RunError("too many environments failed"))
            return reply

    words = Broken()
    with pytest.raises(RunError, match="too many"):
        play(words)
    assert set(words.ended.values()) == {1}

    class Silent(Words):
        def answer(self, *given: Any, **more: Any) -> Future[Reply]:
            return Future()

    asked = iter([False] * 6 + [True])
    with pytest.raises(Aborted):
        play(Silent(), abort=lambda: next(asked))
