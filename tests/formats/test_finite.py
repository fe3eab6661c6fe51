"""Where a model's numbers are not finite: said by whoever reads them, with the place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from runs import QUICK, SHORT, save_model, save_reward_model
from safetensors.numpy import load_file, save_file

import jaxrl
from jaxrl.config import cli
from jaxrl.errors import RunError
from jaxrl.evaluate import main as evaluate_main
from jaxrl.formats.finite import broken_rows
from jaxrl.generate import main as generate_main
from jaxrl.roles.grouper import embed
from jaxrl.roles.reward import score as reward_of
from jaxrl.score.__main__ import main as score_main
from jaxrl.serve_teacher import main as serve_main
from jaxrl.train import main as train_main

pytestmark = pytest.mark.usefixtures("shared_programs")
REFERENCES = Path(__file__).parent.parent / "references"
NORM = "model.layers.0.post_attention_layernorm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def changed(folder: Path, to: Path, name: str, change: Callable[[np.ndarray], None]) -> str:
    """Copies a model and changes one of its weights."""
    shutil.copytree(folder, to)
    file = next(to.glob("*.safetensors"))
    tensors = {name: np.array(x) for name, x in load_file(file).items()}
    change(tensors[name])
    save_file(tensors, file, {"format": "pt"})
    return str(to)


def break_one(x: np.ndarray) -> None:
    x.flat[7] = np.nan


def overflow(x: np.ndarray) -> None:
    x[:] = 3e38


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_model(tmp_path_factory.mktemp("models") / "it", 32, 2, seed=0))


RUN = [*QUICK, *SHORT, "steps=1", "eval.every=0", "data.eval=null", "logging.tensorboard=false"]
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], list[str]]] = {
    "generate": (generate_main, ["MODEL", "--prompt", "1+1=", "--max-new-tokens", "4"]),
    "evaluate": (
        evaluate_main,
        [
            *("MODEL", "data.eval=arithmetic", "data.chat=raw", "data.verifier=number"),
            *("eval.prompts=4", "max_new_tokens=4", "max_prompt_tokens=24"),
        ],
    ),
    "serve-teacher": (serve_main, ["--model", "MODEL", "--port", "0", "--dtype", "float32"]),
    "score": (
        score_main,
        [
            *("--teacher", "MODEL", "--out", "scores", "student.model=FINE", "batch_size=4"),
            *("data.train=rows.jsonl", "max_prompt_tokens=24", "max_new_tokens=8"),
        ],
    ),
    "rollout of a run": (train_main, [*RUN, "student.model=MODEL", "teacher.model=FINE"]),
    "teacher of a run": (train_main, [*RUN, "student.model=FINE", "teacher.model=MODEL"]),
}


CASES = [(command, break_one, NORM) for command in COMMANDS]
OVERFLOWS = [(command, overflow, "the output of layer 1 (of 2 layers") for command in COMMANDS]
OVERFLOWS = [case for case in OVERFLOWS if case[0] != "serve-teacher"]  # requests decide there


@pytest.mark.parametrize(
    ("command", "change", "words"),
    and_slow([*CASES[:3], CASES[-1], OVERFLOWS[1]], [*CASES[3:-1], OVERFLOWS[0], *OVERFLOWS[2:]]),
)
def test_each_command_says_where_numbers_stop_being_finite(
    command: str,
    change: Callable[[np.ndarray], None],
    words: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXRL_TEACHER_TOKEN", "t0ken")
    main, given = COMMANDS[command]
    model = changed(folder, tmp_path / "broken", NORM if change is break_one else DOWN, change)
    rows = '{"prompt": "1+1=", "completion": "2"}\n' * 8
    (tmp_path / "rows.jsonl").write_text(rows)
    given = [word.replace("MODEL", model).replace("FINE", str(folder)) for word in given]
    assert cli.run(main, given) == cli.EXIT_FAILED, capsys.readouterr().err
    error = capsys.readouterr().err
    assert "not finite (NaN or infinity)" in error and words in error, error
    assert "Traceback" not in error


def test_other_models_of_a_run_say_so_too(tmp_path: Path) -> None:
    reward = Path(save_reward_model(tmp_path))
    name = next(n for n in load_file(reward / "model.safetensors") if "down_proj" in n)
    with pytest.raises(RunError, match=f"rewards are not finite.*{name}"):
        reward_of(changed(reward, tmp_path / "broken", name, break_one), ["a text", "another"])
    encoder = REFERENCES / "tiny_bge"
    file = load_file(next(encoder.glob("*.safetensors")))
    name = next(n for n in file if n.endswith("LayerNorm.weight"))
    with pytest.raises(RunError, match="embeddings of 2 of 2 texts are not finite.*norm"):
        embed(changed(encoder, tmp_path / "encoder", name, break_one), ["a text", "another"])


def test_the_call_from_python_says_so(folder: Path, tmp_path: Path) -> None:
    model = jaxrl.load_model(changed(folder, tmp_path / "broken", NORM, break_one))
    for temperature in (0.0, 1.0):
        with pytest.raises(jaxrl.UserError, match=f"token 0 behind prompt 0 are.*{NORM}"):
            jaxrl.generate(model, ["1+1="], max_new_tokens=4, temperature=temperature)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_log_probs_of_what_is_impossible_are_no_fault(as_array: Callable[..., object]) -> None:
    logprobs = np.zeros((3, 4), np.float32)
    logprobs[0, 1], logprobs[1, 2] = -np.inf, np.nan
    hidden = np.zeros((3, 4, 2), np.float32)
    hidden[2, 0, 1] = np.inf
    given = {"topk_logprobs": as_array(logprobs), "hidden": as_array(hidden)}
    found = broken_rows(given | {"topk_ids": as_array(np.zeros((3, 4, 2), np.int32))})
    assert np.asarray(found).tolist() == [False, True, True]
