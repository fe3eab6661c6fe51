"""Mistakes that cost milliseconds to find are told before a tokenizer or a plan is made: on stderr
alone, and alone."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from cases import and_slow
from large_models import NAMED

from jaxrl.config import cli
from jaxrl.train import main

QUICK = ("--config", "builtin:quickstart")
ROW = '{"prompt": "1+1=", "completion": "2"}\n'
FILES = {
    "empty.jsonl": "",
    "broken.jsonl": ROW + '{"prompt": "1+\n',
    "column.jsonl": '{"question": "1+1="}\n',
    "number.jsonl": '{"prompt": 7}\n',
    "broken.json": '[{"prompt": "1+1="},\n {"prompt": ]\n',
    "empty.json": "[]",
    "value.json": '[{"prompt": "1"}, 3]',
    "column.csv": "question,answer\n1+1=,2\n",
    "short.csv": 'prompt,completion\n1+1=,2\n"1,2"\n',
    "open.csv": 'prompt,completion\n"1+1=,2\n',
    "semicolon.csv": "prompt;completion\n1+1=;2\n",
    "rows.tsv": "prompt\n1+1=\n",
}
MISTAKES = {
    "steps=x": "steps",
    "step=3": "did you mean steps?",
    "distill.signal=logits": "distill.signal",
    "algorithm=grpo": "teacher.model=null|set reward.functions|group_size=1",
    "algorithm=sft": "it has no teacher: set teacher.model=null",
    "actor.minibatches=1000": "actor.minibatches=1000 |sequences",
    "data.train=none.jsonl": "data.train: none.jsonl: No such file",
    "data.train=none/*.jsonl": "no file matches",
    "data.train=none.csv": "data.train: none.csv: No such file",
    "data.eval=none.jsonl": "data.eval: none.jsonl: No such file",
    "data.eval={hard: none.json}": "data.eval.hard: none.json: No such file",
    "data.few_shot=none.jsonl": "data.few_shot: none.jsonl: No such file",
    "data.train=empty.jsonl": "empty.jsonl: no rows",
    "data.train=broken.jsonl": "broken.jsonl:2: not JSON",
    "data.train=column.jsonl": "column.jsonl:1|`prompt`|`question`|data.prompt_key",
    "data.train=number.jsonl": "number.jsonl:1|`prompt`",
    "data.train=broken.json": "broken.json:2: not JSON",
    "data.train=empty.json": "empty.json: no rows",
    "data.train=value.json": "value.json: row 1|a number",
    "data.train=column.csv": "column.csv:2|`prompt`|`question`",
    "data.train=short.csv": "short.csv:3: 1 values for the 2 fields",
    "data.train=open.csv": "open.csv:2: not CSV",
    "data.train=semicolon.csv": "semicolon.csv:1|must be a comma",
    "data.train=rows.tsv": "rows.tsv",
    "data.train=openai/gsm8k": "did you mean hf:openai/gsm8k?",
    "data.train=openai/gsm8k:main": "did you mean hf:openai/gsm8k:main?",
    "data.train=arithmetic2": "did you mean arithmetic?",
    "max_new_tokens=100000": "max_new_tokens=100000 make 100009 positions; student.model has 128",
    "max_prompt_tokens=100000": "max_prompt_tokens=100000|student.model has 128",
    "eval.max_new_tokens=4096": "4096|student.model has 128",
    "data.verifier=maths": "unknown data.verifier 'maths' (did you mean math?)",
    "student.model=runs/nothing": "model 'runs/nothing': there is no such file or folder",
    "student.model=builtin:techer": "builtin:techer",
    "logging.wandb=x": "'jaxrl[wandb]'",
    "run_dir=empty.jsonl": "run_dir=empty.jsonl cannot be made: empty.jsonl is no folder",
    "run_dir=empty.jsonl/run": "cannot be made: empty.jsonl is no folder",
    "resume=must": "holds no run to resume",
}
"""An override of the quickstart -> what is said of it."""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files, and nothing that takes longer than a look at them."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)

    def too_early(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("made before the mistake was found")

    for name in ("make_plan", "target_plan"):
        monkeypatch.setattr(f"jaxrl.run.attempt.{name}", too_early)
    find_spec = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "wandb" else find_spec(name)
    )


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize(("override", "told"), MISTAKES.items())
def test_a_cheap_mistake_is_told_alone_and_before_the_plan(
    override: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(path: object) -> NoReturn:
        raise AssertionError("a tokenizer was read before the mistake was found")

    for options in (["--dry-run"], []):
        if not options:  # a dry run looks for further mistakes
            for room in ("data.tokenizer", "roles.grouper"):
                monkeypatch.setattr(f"jaxrl.{room}.load_tokenizer", too_early)
        assert cli.run(main, [*QUICK, *options, override]) == cli.EXIT_BAD_INPUT
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and "verdict" not in err
        assert len(err.splitlines()) <= 4
        assert all(word in err for word in told.split("|")), err


ELSEWHERE = [o for o in MISTAKES if not re.search("none[./]", o)]
"""What is no file: by default a run on this machine tells each of them, and a plan some."""


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize(
    "override", and_slow(ELSEWHERE[::4], [o for i, o in enumerate(ELSEWHERE) if i % 4])
)
def test_a_plan_for_another_machine_tells_the_same_mistakes(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.run(main, [*QUICK, "--dry-run", "--target", "h100x8", override]) == cli.EXIT_BAD_INPUT
    )
    out, err = capsys.readouterr()
    assert out == "" and all(word in err for word in MISTAKES[override].split("|")), err


def test_files_that_are_not_here_may_be_on_the_machine_that_is_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [*QUICK, "--dry-run", "--target", "t4x8", "data.train=[none.jsonl, arithmetic]"]
    assert cli.run(main, [*asked, "data.eval=none/*.csv"]) == 0
    out, err = capsys.readouterr()
    assert "verdict: fits on t4x8" in out and not err
    assert "data.train: none.jsonl: not here, so not checked" in out
    assert "data.eval: none/*.csv: not here, so not checked" in out


def test_a_model_without_weights_hides_no_mistake_in_the_users_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes, functions and columns are checked without a tokenizer, and the plan says that the
    prompts are not tokenized."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    raw = NAMED["Qwen/Qwen2.5-7B-Instruct"] | {"num_hidden_layers": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    (tmp_path / "mine.py").write_text(
        "from jaxrl.environments import Environment\n"
        "class Game(Environment):\n"
        "    def step(self, text, messages): return None\n"
        "def judge(completions, ansver): return [0.0] * len(completions)\n"
    )
    keys = ["algorithm=gspo", "teacher.model=null", "mesh=actor+rollout=8", "group_size=4"]
    keys += ["student.model=model", "data.train=rows.jsonl", "data.eval=null"]
    asked = [*QUICK, "--dry-run", "--target", "h100x8", *keys]
    for given, expected in (
        (["environment.name=mine.py:Gone", "reward.functions=[exact]"], "no class Gone"),
        (["environment.name=none.py:Game", "reward.functions=[exact]"], "none.py"),
        (["reward.functions=[mine.py:judge]"], "the column `ansver` (did you mean answer?)"),
    ):
        assert cli.run(main, [*asked, *given]) == cli.EXIT_BAD_INPUT
        assert expected in capsys.readouterr().err
    assert cli.run(main, [*asked, "environment.name=mine.py:Game", "reward.functions=[exact]"]) == 0
    assert "data: prompts are not tokenized" in capsys.readouterr().out
