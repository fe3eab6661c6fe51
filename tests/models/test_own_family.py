"""A model family in a user's file: Granite as transformers has it, and Llama under another name,
which has Llama's bits in every command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from references.tiny import OWN_CASES, batch, random_tensors
from runs import CONSTANT, SHORT, numbers, save_model, unlisted_files
from tiny_models import REFERENCES, Memory

import jaxrl
from jaxrl import Config, UserError, load_model
from jaxrl.config import cli
from jaxrl.formats import weights
from jaxrl.models import decoder, families
from jaxrl.models.config import DecoderConfig
from jaxrl.run.job import _code_digests
from jaxrl.serve_teacher import read_options

DOCS = Path(__file__).parents[2] / "docs"
OWN = Path(__file__).parents[1] / "support" / "own_family.py"


def test_granite_of_the_page_has_the_logits_and_gradients_of_transformers(tmp_path):
    page = (DOCS / "add-a-model-family.md").read_text(encoding="utf-8")
    file = tmp_path / "granite.py"
    file.write_text(re.search(r"```python\n(# granite.py\n.*?)```", page, re.DOTALL)[1])
    assert families.use_family(f"{file}:GRANITE") == "granite"
    raw = json.loads((REFERENCES / "decoders" / "granite.json").read_text())
    config, reference = DecoderConfig.from_hf(raw), np.load(REFERENCES / "decoders" / "granite.npz")
    assert DecoderConfig.from_hf(config.to_hf("float32")) == config
    case = OWN_CASES["granite"]
    memory = Memory(random_tensors(weights.tensor_shapes(config), case.seed, case.norm))
    params = weights.load_params(memory, config, None, "float32", "stacked")
    tokens, mask = batch(config.vocab_size)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        logits = decoder.token_logits(config, params, decoder.forward(config, params, tokens, mask))
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        chosen = tokens[:, 1:, None]
        both = mask[:, 1:] & mask[:, :-1]
        return -(jax.numpy.take_along_axis(logprobs, chosen, -1)[..., 0] * both).sum()

    value, slopes = loss(params)
    hidden = jax.jit(lambda p: decoder.forward(config, p, tokens, mask))(params)
    logits = np.asarray(decoder.token_logits(config, params, hidden))
    np.testing.assert_allclose(logits[mask], reference["logits"][mask], rtol=0, atol=1e-4)
    np.testing.assert_allclose(value, reference["loss"], rtol=1e-5)
    read = weights.hf_tensors(config, jax.device_get(slopes))
    stored = [key for key in reference if key.startswith("grad/")]
    assert len(stored) > 6
    for key in stored:
        expected = reference[key]
        scale = np.abs(expected).max()
        found = read(key.removeprefix("grad/"))
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * scale, err_msg=key)


@pytest.mark.usefixtures("shared_programs")
def test_llama_under_another_name_has_its_bits_in_every_command(tmp_path, monkeypatch):
    """After training the file is gone: the run folder has its own."""
    monkeypatch.chdir(tmp_path)
    llama = Path(save_model(tmp_path / "llama", 32, 1, 0))
    mine = tmp_path / "mine"
    shutil.copytree(llama, mine)
    raw = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps(raw | {"model_type": "my_llama"}))
    with pytest.raises(UserError, match=r"my_llama.*families of your own: student.family"):
        load_model(mine)
    shutil.copy(OWN, tmp_path / "own_family.py")
    keys = [*SHORT, *CONSTANT, "algorithm=sft", "teacher.model=null", "mesh=actor+rollout=1"]
    keys += ["eval.every=0", "steps=1"]
    runs = []
    for name, more in (("llama", []), ("mine", ["student.family=own_family.py:MINE"])):
        given = [*keys, f"student.model={tmp_path / name}", *more, f"run_dir=runs/{name}"]
        runs.append(jaxrl.train(Config.load("builtin:quickstart", given)))
    assert numbers(runs[0]) == numbers(runs[1])
    assert not unlisted_files(runs[1].run_dir)
    (tmp_path / "own_family.py").unlink()
    families.forget_families()

    trained = [run.run_dir for run in runs]
    tensors = [(run / "final" / "model.safetensors").read_bytes() for run in trained]
    assert tensors[0] == tensors[1]
    one, other = (jaxrl.generate(run, ["1+2=", "7+5="], max_new_tokens=4) for run in trained)
    assert [group[0].tokens for group in one] == [group[0].tokens for group in other]
    told = []
    for run in trained:
        assert cli.run(_main("evaluate"), [str(run), "--out", f"{run}.json"]) == 0
        told.append(json.loads(Path(f"{run}.json").read_text())["metrics"])
        assert cli.run(_main("export"), [str(run), f"{run}-exported"]) == 0
    assert told[0] == told[1]
    files = [Path(f"{run}-exported", "model.safetensors").read_bytes() for run in trained]
    assert files[0] == files[1]
    there = json.loads(Path(f"{trained[1]}-exported", "config.json").read_text())
    assert there["model_type"] == "my_llama" and there["architectures"] == ["LlamaForCausalLM"]
    scores = []
    for run in trained:
        given = ["--teacher", str(run), "--data", "arithmetic:size=4", "--out", f"{run}-scores"]
        given += ["max_new_tokens=8", "max_prompt_tokens=24", "steps=1"]
        assert cli.run(_main("score.__main__"), [*given, "batch_size=4", "mesh=teacher=1"]) == 0
        shards = sorted(Path(f"{run}-scores").rglob("*.safetensors"))
        scores.append([shard.read_bytes() for shard in shards])
    assert scores[0] == scores[1] != []


def _main(name):
    return __import__(f"jaxrl.{name}", fromlist=["main"]).main


def test_commands_take_a_file_for_a_model_that_no_run_made(tmp_path):
    given = ["--model", "M", "--port", "0", "--family", f"{OWN}:MINE"]
    assert read_options(given).family == f"{OWN}:MINE" and "my_llama" in families.FAMILIES
    families.forget_families()
    for module, words in (("generate", ["M"]), ("evaluate", ["M"])):
        parser = __import__(f"jaxrl.{module}", fromlist=["_parser"])._parser()
        parser.parse([*words, "--family", f"{OWN}:MINE"])
        assert "my_llama" in families.FAMILIES
        families.forget_families()


WRONG = {
    "UNNAMED": "say which model_type of config.json is of this family",
    "TAKEN": "model_type=qwen3 is a family of jaxrl: write another model_type",
    "NO_FAMILY": "is of type dict; it must be a jaxrl.models.family.Family",
    "ABSENT": r"has no family ABSENT",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_family_that_is_none_is_refused(name):
    with pytest.raises(UserError, match=WRONG[name]):
        Config.load("builtin:quickstart", [f"student.family={OWN}:{name}"])


def test_two_files_of_one_name_are_refused_and_a_checkpoint_has_their_digest(tmp_path):
    other = tmp_path / "own_family.py"
    other.write_text(OWN.read_text() + "\n")
    families.use_family(f"{OWN}:MINE")
    with pytest.raises(UserError, match="are two families of model_type=my_llama"):
        families.use_family(f"{other}:MINE")
    assert families.use_family(f"{other}:MINE", unless_there=True) == "my_llama"
    assert families.source_of("my_llama") == f"{OWN}:MINE"
    digests = [_code_digests("student.family", f"{file}:MINE") for file in (OWN, other)]
    assert len(digests[0]) == 1 and {*digests[0].values()} != {*digests[1].values()}
