"""Laws of the engine for layers with a state, which no later token can mask: a slot has read its
own tokens, each once, whatever else its device computed for it meanwhile. And for layers whose keys
and values differ in shape, some of which have none of their own."""

from __future__ import annotations

import math
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

from jaxrl.models import decoder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta
from jaxrl.models.experts import Experts
from jaxrl.models.families import FAMILIES
from jaxrl.models.family import LayerKind
from jaxrl.models.parameters import param_shardings
from jaxrl.sampling import engine as engine_module
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.partial_completion import Reply
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import Completion

CONFIG = replace(
    SAMPLED,
    family="qwen3_5_text",
    max_positions=512,
    kinds=(LayerKind(recurs=True), LayerKind()),
    delta=Delta(k_heads=2, v_heads=4, k_dim=8, v_dim=8),
)
MIXTURE = replace(
    CONFIG,
    family="qwen3_5_moe_text",
    experts=Experts(count=8, chosen=2, normalised=True, dense_width=64, beside="gate"),
)
WINDOW, WHOLE = LayerKind(window=6, rope_theta=1e3), LayerKind(head_dim=16, n_kv_heads=1)
BORROWS = replace(
    SAMPLED,
    family="gemma4_text",
    n_layers=4,
    max_positions=512,
    layer_inputs=4,
    final_softcap=1.0,
    kinds=(WINDOW, WHOLE, *(replace(kind, borrows=True, d_ff=96) for kind in (WINDOW, WHOLE))),
)
PAIR = replace(BORROWS, n_layers=2, kinds=(WHOLE, replace(WHOLE, borrows=True, d_ff=96)))
PROMPTS = [[5, 9, 2], [1], [8, 8, 20, 31, 4, 17, 2]]
N, WIDTH = 2, 64


class Letters(BareTokenizer):
    """A tokenizer with a character for each token."""

    def decode(self, tokens: Any, **kwargs: Any) -> str:
        return "".join(chr(64 + token) for token in tokens)


class Words:
    """Environments that answer three times, the second time at length."""

    def __init__(self) -> None:
        self.turns: dict[tuple[int, int], int] = {}
        self.eos: list[int | None] = []

    def answer(
        self, prompt: int, sample: int, text: str, *, eos: int | None, length: int
    ) -> Future[Reply]:
        turn = self.turns.get((prompt, sample), 0)
        self.turns[prompt, sample] = turn + 1
        self.eos.append(eos)
        reply: Future[Reply] = Future()
        tokens = tuple(12 + (prompt + 5 * i) % 40 for i in range(9 if turn == 1 else 2))
        reply.set_result(Reply(() if turn == 3 else tokens, f"answer {turn}", 0.0))
        return reply

    def end(self, prompt: int, sample: int) -> None:
        pass


@cache
def params(config: DecoderConfig) -> Any:
    tree = random_params(config, layout="unstacked")
    scale = 1 / config.d_model**0.5 if FAMILIES[config.family].embed else 1.0
    tree["embed"]["embedding"] = 20 * scale * tree["embed"]["embedding"]
    return tree


def generate(
    shape: tuple[int, int, int] | None = None,
    words: Words | None = None,
    stop: tuple[str, ...] = (),
    config: DecoderConfig = CONFIG,
    **options: Any,
) -> list[Completion]:
    mesh = None if shape is None else role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))
    tree = params(config)
    if mesh is not None:
        tree = jax.device_put(tree, param_shardings(config, mesh, "unstacked"))
    sizes = {"slots": 4, "launch_tokens": 8, "max_prompt_tokens": 8, "max_new_tokens": 40}
    check_every = options.pop("check_every", None)
    made = Engine(config, mesh, episodes=words is not None, tokenizer=Letters(), **sizes | options)
    made.check_every = check_every or made.check_every
    sampling = SamplingParams(max_new_tokens=40 if words else 12, eos_ids=(3, 7, 11), stop=stop)
    asked = {"n": N, "sampling": sampling, "environments": words}
    return [one for group in sample_groups(made, tree, PROMPTS, **asked) for one in group]


@cache
def reference(config: DecoderConfig) -> list[Completion]:
    return generate(config=config, slots=2)


@partial(jax.jit, static_argnums=0)
def learned(config: DecoderConfig, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    tree = params(config)
    hidden = decoder.forward(config, tree, tokens[None], mask[None])
    return jax.nn.log_softmax(decoder.token_logits(config, tree, hidden)[0])


def assert_exact(completions: list[Completion], config: DecoderConfig) -> None:
    """Log-probs of what was sampled are those of one forward pass over the whole sequence."""
    for number, completion in enumerate(completions):
        prompt = PROMPTS[number // N]
        whole = [*prompt, *completion.tokens]
        tokens = np.pad(np.array(whole, np.int32), (0, WIDTH - len(whole)))
        logprobs = np.asarray(learned(config, tokens, np.arange(WIDTH) < len(whole)))
        at = np.arange(len(prompt) - 1, len(whole) - 1)
        expected = logprobs[at, list(completion.tokens)]
        sampled = completion.sampled
        np.testing.assert_allclose(completion.logprobs[sampled], expected[sampled], atol=3e-5)


@pytest.mark.parametrize(
    "config", and_slow([CONFIG, PAIR], [BORROWS, MIXTURE]), ids=["states", "pair", "borrows", "moe"]
)
def test_what_is_sampled_is_what_the_learner_reads(config: DecoderConfig) -> None:
    """Slots are filled again, and free ones go on being computed."""
    assert len({len(completion.tokens) for completion in reference(config)}) > 2
    assert_exact(reference(config), config)


@pytest.mark.parametrize(
    ("config", "options"),
    and_slow(
        [
            (CONFIG, {"launch_tokens": 6, "shape": (1, 2, 2)}),
        ],
        [
            (CONFIG, {"slots": 16, "launch_tokens": 6}),
            (CONFIG, {"slots": 1}),
            (BORROWS, {"slots": 16, "launch_tokens": 6, "shape": (1, 2, 2)}),
        ],
    ),
    ids=["states divided", "many slots", "a slot", "borrows"],
)
def test_tokens_depend_on_seeds_and_prompts_alone(
    config: DecoderConfig, options: dict[str, Any]
) -> None:
    """Not on slots and their shrinking, launches or devices."""
    for a, b in zip(generate(config=config, **options), reference(config), strict=True):
        assert (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


@pytest.mark.parametrize("config", [CONFIG, BORROWS], ids=["states", "borrows"])
def test_episodes_read_each_token_once(
    config: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers in parts, the last of which is shorter; turns that end while the steps of a launch go
    on; and turns that a stop string cuts behind tokens that the state had read."""
    monkeypatch.setattr(engine_module, "ANSWER_TOKENS", (2, 4))
    words = Words()
    stop = ("A", "M", "Z", "k", "h", "a", "c", "v")
    completions = generate(words=words, stop=stop, check_every=8, config=config)
    assert max(len(completion.turns) for completion in completions) >= 5
    assert any(eos is None for eos in words.eos) and any(words.eos)
    assert_exact(completions, config)
