"""`generate` in Python and on the command line: prompts of every kind in, completions out."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_params
from tiny_tokenizer import tiny_tokenizer

import jaxrl
from jaxrl.checkpoint.model_source import Model, load_model
from jaxrl.config import cli
from jaxrl.errors import UserError
from jaxrl.formats import hf
from jaxrl.generate import _took, generate, main
from jaxrl.models.config import DecoderConfig
from jaxrl.process.compilations import compilations
from jaxrl.run.generation import sample_prompts
from jaxrl.sampling import decode
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh

END = 258
"""`<|im_end|>` of the byte tokenizer."""
CONFIG = DecoderConfig(
    family="qwen2",
    vocab_size=259,
    d_model=16,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    d_ff=32,
    tie_embeddings=True,
    max_positions=160,
    eos_ids=(END,),
)


SEVERAL = 5
"""Samples of a prompt: most tests take these, or up to 8, whose programs are the same."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    params = random_params(CONFIG)
    params["embed"]["embedding"] *= 10
    tiny_tokenizer().save_pretrained(root / "tokenizer")
    return hf.save_hf(
        root / "hf", CONFIG, params, dtype="float32", tokenizer_from=root / "tokenizer"
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder)


@pytest.fixture(autouse=True)
def compile_cache_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command keeps a cache that it finds set."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder)


def test_text_ids_and_chats_are_prompts(model: Model) -> None:
    ids = model.tokenizer("ab")["input_ids"]
    chat = [{"role": "user", "content": "ab"}]
    whole = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    out = generate(model, ["ab", ids, chat, whole], n=2, max_new_tokens=8, temperature=0)
    assert [len(completions) for completions in out] == [2] * 4
    tokens = [completions[0].tokens for completions in out]
    assert tokens[0] == tokens[1] and tokens[2] == tokens[3] and tokens[0] != tokens[2]


def test_completions_agree_with_the_model_and_its_tokenizer(model: Model) -> None:
    out = generate(model, ["hello"], n=8, max_new_tokens=24, temperature=0.7, top_k=40, top_p=0.95)
    prompt = model.tokenizer("hello")["input_ids"]
    for c in out[0]:
        assert c.finish_reason == ("stop" if c.tokens[-1] == END else "length")
        assert END not in c.tokens[:-1]
        said = [token for token in c.tokens if token not in (END - 1, END)]  # no turn's token
        assert c.text == model.tokenizer.decode(said)
        row = np.array([[*prompt, *c.tokens]])
        scored = model.logprobs(row, np.ones_like(row, bool), temperature=0.7)
        np.testing.assert_allclose(c.logprobs, scored[0, len(prompt) :], atol=1e-5)


def test_defaults_sample_and_seeds_differ(model: Model) -> None:
    first, again = (generate(model, ["x"], n=SEVERAL, max_new_tokens=8)[0] for _ in range(2))
    other = generate(model, ["x"], n=SEVERAL, max_new_tokens=8, seed=1)[0]
    assert [c.tokens for c in first] == [c.tokens for c in again] != [c.tokens for c in other]
    assert len({c.tokens for c in first}) == SEVERAL


def test_eos_ids_replace_the_models_own(model: Model) -> None:
    free = generate(model, ["q"], n=6, max_new_tokens=30, eos_ids=())[0]
    assert {len(c.tokens) for c in free} == {30}
    last = free[0].tokens[4]
    ended = generate(model, ["q"], n=6, max_new_tokens=30, eos_ids=[last])[0]
    assert ended[0].tokens == free[0].tokens[: free[0].tokens.index(last) + 1]


def test_a_stop_string_is_cut_from_the_text_not_from_the_tokens(model: Model) -> None:
    given = {"n": SEVERAL, "max_new_tokens": 40, "eos_ids": (), "seed": 3}
    free = generate(model, ["s"], **given)[0][0]
    at = next(
        i for i in range(5, 38) if free.text[i : i + 2].isascii() and free.text[i : i + 2].strip()
    )
    stop = free.text[at : at + 2]
    got = generate(model, ["s"], **given, stop=[stop])[0][0]
    assert got.finish_reason == "stop"
    assert got.text == free.text[: free.text.index(stop)]
    assert got.tokens == free.tokens[: len(got.tokens)]
    assert stop in model.tokenizer.decode(got.tokens, skip_special_tokens=True)
    assert stop not in model.tokenizer.decode(got.tokens[:-1], skip_special_tokens=True)
    assert len(got.logprobs) == len(got.tokens)


def test_a_mesh_gives_the_same_completions(folder: Path, model: Model) -> None:
    mesh = role_mesh(jax.devices()[:4], Axes(data=2, tensor=2))
    sharded = load_model(folder, mesh)
    ours, theirs = (generate(m, ["ab", "cde"], n=2, max_new_tokens=8) for m in (model, sharded))
    assert [[c.tokens for c in row] for row in ours] == [[c.tokens for c in row] for row in theirs]


def test_calls_of_like_size_share_their_programs(model: Model) -> None:
    generate(model, ["abc"], n=SEVERAL, max_new_tokens=8, top_p=0.9, top_k=40)
    programs = (decode.launch, decode.insert, decode.prefill_prompts)
    compiled = [f._cache_size() for f in programs]
    other = {"temperature": 0.5, "top_p": 0.5, "top_k": 9, "seed": 9}
    generate(model, ["abcdefgh"], n=8, max_new_tokens=20, **other)
    assert [f._cache_size() for f in programs] == compiled


def test_a_model_without_a_tokenizer_takes_ids_only(model: Model) -> None:
    bare = Model(replace(model.source, tokenizer_path=None), model.params)
    out = generate(bare, [[1, 2]], n=SEVERAL, max_new_tokens=4)
    assert out[0][0].text == "" and len(out[0][0].tokens) == 4
    with pytest.raises(UserError, match="no tokenizer"):
        generate(bare, ["text"])
    with pytest.raises(UserError, match="needs a tokenizer"):
        generate(bare, [[1]], stop=["x"])


def test_bad_calls_are_named(model: Model) -> None:
    with pytest.raises(UserError, match="give a list of prompts"):
        generate(model, "abc")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="150 tokens.*max_new_tokens=11.*160 positions"):
        generate(model, ["x" * 150], max_new_tokens=11)
    assert len(generate(model, ["x" * 150], max_new_tokens=10, eos_ids=())[0][0].tokens) == 10
    with pytest.raises(UserError, match="temperature=-1"):
        generate(model, ["x"], temperature=-1)
    assert generate(model, []) == []


@pytest.mark.parametrize(
    ("prompts", "keys", "told"),
    [
        *(([one], {}, "is neither text, token ids") for one in (None, {"prompt": "x"}, 3, b"ab")),
        *((prompts, {}, "give a list of prompts") for prompts in (None, {"prompt": "x"})),
        ([[{"role": "User", "content": "x"}]], {}, "prompt 0: rename the role 'User' to 'user'"),
        ([[{"role": "user", "content": "x"}, 3]], {}, "prompt 0: 3 .int. is no message"),
        (["x"], {"n": "a"}, "n='a': must be a whole number"),
        (["x"], {"temperature": "a"}, "temperature='a': must be a number"),
        (["x"], {"eos_ids": 3}, "eos_ids=3: must be a list"),
        (["x"], {"stop": [3]}, "must be a tuple of strings"),
    ],
)
def test_arguments_of_another_kind_are_the_users_error(
    model: Model, prompts: Any, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        generate(model, prompts, **keys)


def test_bfloat16_weights_sample_in_bfloat16(folder: Path) -> None:
    model = load_model(folder, dtype="bfloat16")
    (completion,) = generate(model, ["ab"], max_new_tokens=8)[0]
    assert completion.logprobs.dtype == np.float32
    row = np.array([[*model.tokenizer("ab")["input_ids"], *completion.tokens]])
    scored = model.logprobs(row, np.ones_like(row, bool))[0, 2:]
    # Eight bits of mantissa: logits of size 10 are known to about 0.05.
    np.testing.assert_allclose(completion.logprobs, scored, atol=0.15)
    assert jnp.dtype(model.params["norm"]["scale"].dtype) == jnp.bfloat16


def test_command_shows_completions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(folder), "--prompt", "ab", "--prompt", "cd", "--n", "2", "--max-new-tokens", "5"]
    assert cli.run(main, argv) == 0
    out = capsys.readouterr().out
    assert out.count("prompt:     ab") == out.count("prompt:     cd") == 2
    assert out.count("[length, ") + out.count("[stop, ") == 4
    last = out.splitlines()[-1]
    assert " tokens in " in last and "tokens/s" not in last  # too few to tell a speed


def test_the_speed_is_of_launches_that_compile_nothing(model: Model) -> None:
    params = SamplingParams(max_new_tokens=64, eos_ids=())
    for turn in range(2):
        before = compilations()
        _, stats = sample_prompts(model, ["ab"], n=SEVERAL, sampling=params, seed=turn)
        compiled = compilations().since(before)
        said = _took(stats, compiled)
        assert stats.generated_tokens == 64 * SEVERAL
        # Two launches of 32 tokens for each sample; the first compiles, if any does.
        half, whole = 32 * SEVERAL, 64 * SEVERAL
        assert stats.steady_tokens in ((whole,) if turn else (0, half, whole))
        assert ("compilation of" in said) == (compiled.programs > 0)
    assert compiled.programs == 0
    assert f"{whole / stats.steady_seconds:,.0f} tokens/s in {stats.slots} slots" in said
    assert "tokens/s" not in _took(replace(stats, steady_tokens=49), compiled)


def test_command_writes_what_python_gives(folder: Path, model: Model, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hé"}]}
    (tmp_path / "in.jsonl").write_text(f'{{"prompt": "ab"}}\n{json.dumps(chat)}\n')
    argv = [
        str(folder),
        "--prompts",
        str(tmp_path / "in.jsonl"),
        "--out",
        str(tmp_path / "o.jsonl"),
    ]
    argv += ["--n", "2", "--max-new-tokens", "8", "--temperature", "0.5"]
    argv += ["--devices", "4", "--tensor", "2"]  # the mesh, and so the programs, of the test above
    assert cli.run(main, argv) == 0
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    expected = generate(model, ["ab", chat["messages"]], n=2, max_new_tokens=8, temperature=0.5)
    flat = [c for several in expected for c in several]
    assert [row["completion"] for row in rows] == [c.text for c in flat]
    assert [row["tokens"] for row in rows] == [len(c.tokens) for c in flat]
    assert rows[2]["messages"] == chat["messages"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1"),
        (["--prompt", "a", "--top-p", "0"], "top_p=0"),
        ([], "no prompt"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--prompt", "a", "--devices", "3", "--tensor", "2"], "--devices 3"),
        (["--prompt", "a", "--temprature", "1"], "--temperature"),
        (["--prompt", "a", "--n", "0"], "n=0"),
    ],
)
def test_bad_options_end_with_code_2(
    extra: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    assert cli.run(main, [str(folder), *extra]) == cli.EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


def test_module_runs_as_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: tests/laws/test_bad_input.py has one that a shell starts."""
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path / "nothing"), "--prompt", "a"])
    monkeypatch.setattr(cli, "exit_process", sys.exit)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(jaxrl.generate.__file__), run_name="__main__")
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith("error: model") and "Traceback" not in said.err
