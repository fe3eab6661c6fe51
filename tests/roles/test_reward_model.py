"""Reward models: transformers' scores, at the last real token whatever pads, of the right text."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from chat_shapes import THINKS, TOOL, tokenizer_of
from references.tiny import random_tensors
from references.tiny_encoders import REWARD, REWARDS, sequences
from runs import save_reward_model
from tiny_models import Memory, make_mesh
from tiny_tokenizer import tiny_tokenizer

from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.data.example import Example
from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.errors import UserError
from jaxrl.formats import weights
from jaxrl.models.config import DecoderConfig
from jaxrl.roles.reward import (
    RewardModel,
    RewardScorer,
    RewardSource,
    encode_for_reward,
    encode_text,
    open_reward,
    score,
    score_batch,
)
from jaxrl.types import Completion, Prompt, Rollout, Sequences, TemplateInputs

REFERENCES = Path(__file__).parent.parent / "references"
EXPECTED = np.load(REFERENCES / "encoders.npz")
RAW = json.loads((REFERENCES / "encoder_configs.json").read_text())
EOS = 2
IDS = sequences(REWARD["vocab_size"])
CLOSE = 1e-5
CHAT = ({"role": "user", "content": "hi"},)
CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"


def tensors_of(config: DecoderConfig, seed: int) -> dict[str, np.ndarray]:
    shapes = weights.tensor_shapes(config) | {"score.weight": (1, config.d_model)}
    return random_tensors(shapes, seed)


@cache
def source(family: str) -> RewardSource:
    config = replace(DecoderConfig.from_hf(RAW[f"reward/{family}"]), tie_embeddings=True)
    memory = Memory(tensors_of(config, seed=list(REWARDS).index(family)))
    return RewardSource(family, Path(family), config, memory)


def padded(left: bool, width: int = 20) -> tuple[Any, Any]:
    """The sequences, which end with EOS, padded with EOS."""
    tokens, mask = np.full((len(IDS), width), EOS, np.int32), np.zeros((len(IDS), width), bool)
    for i, row in enumerate(IDS):
        where = slice(width - len(row), None) if left else slice(0, len(row))
        tokens[i, where], mask[i, where] = row, True
    return jnp.asarray(tokens), jnp.asarray(mask)


@pytest.mark.parametrize("family", REWARDS)
def test_scores_are_those_of_transformers_where_padding_is_eos(family: str) -> None:
    config = source(family).config
    params, head = source(family).load()
    for left in (False, True):
        found = score_batch(config, None, params, head, *padded(left))
        np.testing.assert_allclose(found, EXPECTED[f"reward/{family}"], atol=CLOSE, rtol=0)


def test_a_mesh_changes_nothing_and_a_row_without_tokens_scores_0() -> None:
    config, mesh = source("qwen2").config, make_mesh(2, 1, 2)
    params, head = source("qwen2").load(mesh)
    tokens, mask = padded(left=False)
    found = score_batch(config, mesh, params, head, tokens, mask.at[1].set(False))
    expected = EXPECTED["reward/qwen2"] * [1, 0, 1, 1]
    np.testing.assert_allclose(found, expected, atol=CLOSE, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer of bytes, whose texts are short enough for its positions."""
    place = tmp_path_factory.mktemp("reward")
    raw = RAW["reward/llama"] | {"vocab_size": 300, "max_position_embeddings": 96}
    (place / "config.json").write_text(json.dumps(raw))
    config = replace(DecoderConfig.from_hf(raw), tie_embeddings=True)
    safetensors.numpy.save_file(tensors_of(config, seed=3), place / "model.safetensors")
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def scorer(folder: Path) -> RewardScorer:
    return RewardScorer(open_reward(folder))


def alone(scorer: RewardScorer, text: str | list[int]) -> float:
    """The score of a text's tokens, or of tokens, in a batch of one row."""
    ids = scorer.tokenizer(text)["input_ids"] if isinstance(text, str) else text
    tokens, mask = np.zeros((1, 96), np.int32), np.arange(96)[None] < len(ids)
    tokens[mask] = ids
    return float(score_batch(scorer.config, None, scorer.params, scorer.head, tokens, mask)[0])


def test_texts_are_scored_as_they_are_and_chats_by_the_template(
    folder: Path, scorer: RewardScorer
) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "yo"}]
    found = score(folder, ["some text", chat, "some"])
    assert found.dtype == np.float32 and found[0] != pytest.approx(found[2], abs=1e-3)
    expected = [alone(scorer, "some text"), alone(scorer, CHATML)]
    np.testing.assert_allclose(found[:2], expected, atol=CLOSE, rtol=0)


def test_a_prompt_is_rendered_with_its_completion() -> None:
    chatty, plain = tiny_tokenizer(), tiny_tokenizer(template=None)
    as_ids = chatty(CHATML)["input_ids"]
    assert list(encode_for_reward(chatty, CHAT, "yo")) == as_ids
    assert list(encode_for_reward(chatty, "hi", "yo")) == as_ids
    assert plain.decode(encode_for_reward(plain, "hi ", "yo")) == "hi yo"
    with pytest.raises(UserError, match="reward model's tokenizer has no chat template"):
        encode_for_reward(plain, CHAT, "yo")
    refuses = tiny_tokenizer(template="{{ raise_exception('no system') }}")
    with pytest.raises(UserError, match="refuses messages of user, assistant: no system"):
        encode_for_reward(refuses, CHAT, "yo")


def test_the_model_reads_the_tools_that_the_policy_reads() -> None:
    tokenizer, read = tokenizer_of(THINKS), list[str]()

    def scored(sequences: Any, detail: object) -> tuple[np.ndarray, int]:
        read.extend(map(tokenizer.decode, sequences))
        return np.zeros(len(sequences), np.float32), 0

    model: Any = SimpleNamespace(_scorer=SimpleNamespace(tokenizer=tokenizer, score=scored))
    prompt = PromptEncoder(tokenizer, 400, 8).encode(
        Example("q", inputs=TemplateInputs((TOOL,))), 0
    )
    assert prompt is not None
    empty = np.zeros(0, np.float32)
    completions = [[Completion((5,), empty, empty, "stop", "yo")]]
    sizes = {"max_prompt_tokens": 400, "max_new_tokens": 8}
    RewardModel.score(
        model, make_rollout([prompt], completions, policy_version=0, pad_id=0, **sizes)
    )
    assert read[0].startswith("TOOL ") and read[0].startswith(tokenizer.decode(prompt.tokens))


def test_a_bos_in_the_text_is_not_doubled() -> None:
    tokenizer = tiny_tokenizer(bos=True)
    tokenizer.bos_token = "<|endoftext|>"
    once = encode_text(tokenizer, "hi")
    assert encode_text(tokenizer, "<|endoftext|>hi") == once
    assert once.count(tokenizer.bos_token_id) == 1


def test_what_is_too_long_loses_the_beginning_of_its_prompt(
    folder: Path, scorer: RewardScorer
) -> None:
    short = RewardScorer(open_reward(folder), max_tokens=40)
    long = [*range(100), *IDS[0]]
    found, cut = short.score([long, IDS[1]])
    assert cut == 1
    kept = [alone(scorer, long[-40:]), alone(scorer, IDS[1])]
    np.testing.assert_allclose(found, kept, atol=CLOSE, rtol=0)
    assert (
        scorer.max_tokens == 96
        and RewardScorer(open_reward(folder), max_tokens=999).max_tokens == 96
    )
    short.tokenizer.bos_token = "<|endoftext|>"
    bos = short.tokenizer.bos_token_id
    assert list(short._cut([bos, *long])) == [bos, *long[-39:]]
    assert short.score([])[1] == 0


def test_the_role_scores_a_rollout_by_its_text(folder: Path, scorer: RewardScorer) -> None:
    """Chats by their messages, texts by the text, padding rows 0; cut ones are counted."""
    config = Config.load(None, ["reward.dtype=float32", "reward.max_tokens=64"])
    model = RewardModel(config, open_reward(folder), make_mesh(2, 1, 1))
    prompts = [
        Prompt(0, (1,), "hi", columns={"messages": CHAT}),
        Prompt(1, (1,), "hi"),
        Prompt(2, (1,), "other", columns={"messages": CHAT}),  # a column of a text prompt
        Prompt(3, (1,), "long " * 20),
    ]
    empty = np.zeros(0, np.float32)
    completions = tuple(Completion((5,), empty, empty, "stop", "yo") for _ in prompts)
    rows = np.zeros((6, 2))
    rollout = Rollout(
        Sequences(rows.astype(np.int32), rows > 0, rows > 0),
        tuple(prompts),
        completions,
        np.arange(6),
        rows,
        rows,
        0,
    )
    found, cut = model.score(rollout)
    assert found.dtype == np.float32 and cut == 1
    expected = [alone(scorer, CHATML)] * 2 + [alone(scorer, CHATML.replace("hi", "other"))]
    np.testing.assert_allclose(found[:3], expected, atol=CLOSE, rtol=0)
    assert found[4:].tolist() == [0, 0] and found[3] != 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, r"num_labels=2 .*'good'.*only num_labels=1"),
        ({"id2label": None, "num_labels": 3}, r"num_labels=3"),
        ({"architectures": ["LlamaForCausalLM"]}, r"'LlamaForCausalLM'.*ForSequenceClassification"),
        ({"model_type": "gemma"}, r"model_type='gemma' is not supported"),
        ({"hidden_size": 64, "head_dim": 8}, r"tensor model\.embed_tokens\.weight has shape"),
    ],
)
def test_what_is_no_reward_model_is_told(
    folder: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(UserError, match=told):
        open_reward(tmp_path)


def test_a_missing_head_or_tokenizer_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    values = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        RewardScorer(open_reward(tmp_path))
    del values["score.weight"]
    safetensors.numpy.save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"tensor score\.weight of shape \[1, 32\] is missing"):
        open_reward(tmp_path)


def test_a_weight_that_the_config_has_no_place_for_is_named(tmp_path: Path) -> None:
    folder = Path(save_reward_model(tmp_path))
    raw = json.loads((folder / "config.json").read_text())
    fewer = raw | {"num_hidden_layers": raw["num_hidden_layers"] - 1}
    (folder / "config.json").write_text(json.dumps(fewer))
    with pytest.raises(UserError, match="no place for tensor model.layers"):
        open_reward(folder)
