"""What is shown of a row is what a run reads of it: tokens, and which of them are learned."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_shapes import ASK, NO_THOUGHTS, OPENS, THINKS, TOOL, tokenizer_of
from runs import save_model

from jaxrl.config import cli
from jaxrl.config.schema import Config
from jaxrl.data.batch import data_completion, data_rollout
from jaxrl.data.shown_rows import show_row
from jaxrl.data.tokenizer import decode_text, token_texts
from jaxrl.run.job import Job, make_job, train_rows
from jaxrl.run.show_data import main
from jaxrl.telemetry.metrics import Sample, Training
from jaxrl.train import main as train_main

CALL = {"function": {"name": "w", "arguments": {"t": 1}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
HEARS = {"role": "tool", "content": "sunny"}
FOUR = {"role": "assistant", "content": "4"}
SKIPPED = {"role": "assistant", "content": "five", "weight": 0}
THOUGHT = {"role": "assistant", "content": "4 é", "reasoning_content": "two and two"}
RULES = {"role": "system", "content": "Be brief."}
ROWS: dict[str, dict[str, Any]] = {
    "text prompt": {"prompt": "1+1=", "completion": "2", "answer": "2", "level": 3},
    "chat": {"messages": [ASK, FOUR]},
    "system": {"messages": [RULES, ASK, FOUR]},
    "system column": {"prompt": "2+2?", "completion": "4", "system": "Be brief."},
    "tools": {"messages": [ASK, CALLS, HEARS, FOUR], "tools": [TOOL]},
    "thoughts": {"messages": [ASK, THOUGHT]},
    "weight 0": {"messages": [ASK, FOUR, ASK, SKIPPED, ASK, FOUR]},
    "long completion": {"prompt": "abc", "completion": "漢字 " + "x" * 200},
    "long prompt": {"messages": [{"role": "user", "content": "y" * 400}, FOUR]},
    "raw text": {"text": "all of this is learned"},
}
KEYS = {
    "max_prompt_tokens": 256,
    "max_new_tokens": 100,
    "batch_size": len(ROWS),
    "data.shuffle": False,
    "data.long_prompts": "cut",
    "data.completion_turns": "all",
}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("student"), THINKS)


def folder_of(folder: Path, template: str) -> str:
    """Writes a model whose tokenizer has this template."""
    tokenizer = tokenizer_of(template)
    save_model(folder, 32, 1, seed=0, eos=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job_of(path: Path, student: str, **keys: Any) -> tuple[Config, Job]:
    of = {"student.model": student, "data.train": str(path), "algorithm": "sft"}
    config = Config.load(None, of | KEYS | keys)
    return config, make_job(config)


def learned_of(rollout: Any, row: int) -> tuple[list[int], list[bool]]:
    """Returns the real tokens of a row of a batch, and which of them the loss counts."""
    s = rollout.sequences
    loss = np.zeros(s.mask.shape, bool)
    loss[:, -s.loss_mask.shape[1] :] = s.loss_mask
    return s.tokens[row][s.mask[row]].tolist(), loss[row][s.mask[row]].tolist()


@pytest.mark.parametrize("turns", ["all", "last"])
def test_tokens_and_mask_are_those_of_the_batch(tmp_path: Path, student: str, turns: str) -> None:
    path = write(tmp_path / "rows.jsonl", *ROWS.values())
    config, job = job_of(path, student, **{"data.completion_turns": turns})
    limits = {"max_prompt_tokens": config.max_prompt_tokens, "max_new_tokens": 100}
    batch = data_rollout(job.train.batch(0), decode=str, pad_id=job.pad_id, **limits)
    shown = job.first_rows(99)
    rows = train_rows(config)  # what `jaxrl data show` opens
    assert [row.where for row in shown] == [f"{path}:{n}" for n in range(1, len(ROWS) + 1)]
    for number, row in enumerate(shown):
        assert row == show_row(rows.encode, *rows.source.locate(number))
        (view,) = row.views
        assert (view.tokens, view.learned) == learned_of(batch, number), row.where
        assert any(view.learned) and not all(view.learned)
        whole = job.tokenizer.decode(view.tokens)
        assert "".join(span.text for span in view.spans) == whole
        read = json.loads(json.dumps(row.json()))
        assert read["views"][0]["learned"] == view.learned


def test_what_is_shown_beside_the_tokens(tmp_path: Path, student: str) -> None:
    path = write(tmp_path / "rows.jsonl", *ROWS.values())
    _, job = job_of(path, student)
    shown = dict(zip(ROWS, job.first_rows(99), strict=True))
    facts = {name: dict(row.facts) for name, row in shown.items()}
    assert facts["system"]["system message"] == "the row's: Be brief."
    assert facts["system column"]["system message"] == "the row's: Be brief."
    assert facts["tools"]["tools"] == "w"
    assert shown["text prompt"].answer == "2"
    assert shown["text prompt"].columns["level"] == 3
    roles = [(span.role, span.learned) for span in shown["tools"].views[0].spans]
    assert roles == [
        ("prompt", False), ("assistant", True), ("tool", False), ("assistant", True),
    ]  # fmt: skip
    assert '<tool_call>w {"t": 1}</tool_call>' in shown["tools"].views[0].spans[1].text
    of = facts["weight 0"]
    assert of["turns learned"].startswith("message 1, 5")
    assert of["turns read only"] == "message 3 (marked)"
    assert "five" not in "".join(s.text for s in shown["weight 0"].views[0].spans if s.learned)
    # 400 of "y", and what the template writes around them.
    cut = facts["long prompt"]["prompt cut"]
    kept = sum(text == "y" for s in shown["long prompt"].views[0].spans for text in s.texts)
    assert cut.startswith(f"{400 - kept} tokens and more than max_prompt_tokens=256")
    cut = facts["long completion"]["completion cut"]
    _, longer = job_of(path, student, max_new_tokens=999)
    whole = longer.train.batch(0)[[*ROWS].index("long completion")].completion or ()
    count = f"{len(whole) - 100} of {len(whole)} tokens"
    assert cut.startswith(f"without the last {count}, by max_new_tokens=100: 'xxx")
    assert cut.endswith("<|im_end|>'")


def test_a_sample_of_the_data_shows_the_learned_call(tmp_path: Path, student: str) -> None:
    """Which stands beside the content of its message; and that a tool answers it."""
    path = write(tmp_path / "rows.jsonl", ROWS["tools"])
    _, job = job_of(path, student, batch_size=1)
    (prompt,) = job.train.batch(0)
    decode = partial(decode_text, job.tokenizer)
    completion = data_completion(prompt, 100, decode)
    of: dict[str, Any] = {"step": 1, "split": "data", "policy_version": -1, "decode": decode}
    training = Training(learned=int(completion.sampled.sum()))
    sample = Sample.of(prompt, completion, training=training, **of)
    told = [(turn["role"], turn["learned"]) for turn in sample.turns or ()]
    assert told == [("assistant", True), ("tool", False), ("assistant", True)]
    assert sample.completion.splitlines()[0] == '[assistant] <tool_call>w {"t": 1}</tool_call>'
    assert "[tool] sunny" in sample.completion


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    section = page.partition("## See what is learned")[2]
    (line,) = re.findall(r"^    jaxrl data show (arithmetic .*)$", section, re.MULTILINE)
    _, printed, _ = run(capsys, *line.split())
    assert printed.strip() in section


def test_prompts_of_runs_that_sample(tmp_path: Path) -> None:
    """They are shown as they are sampled from; with completions that do not continue them, both."""
    student = folder_of(tmp_path / "student", NO_THOUGHTS)
    path = write(tmp_path / "rows.jsonl", {"messages": [ASK, FOUR], "answer": "4"})
    rewarded = {"algorithm": "gspo", "reward.functions": ["exact"], "group_size": 2}
    config, job = job_of(path, student, **rewarded)
    (row,) = job.first_rows(1)
    assert [view.use for view in row.views] == ["sampled"]
    assert row.views[0].tokens == [*job.train.batch(0)[0].to_sample.tokens]
    assert not any(row.views[0].learned)
    assert row.views[0].spans[0].text.endswith("assistant\n<think>\n")
    mixed = {"algorithm": "gkd", "teacher.model": student, "distill.on_policy_fraction": 0.5}
    config, job = job_of(path, student, **mixed)
    (row,) = job.first_rows(1)
    assert [view.use for view in row.views] == ["learned", "sampled"]
    assert row.views[1].tokens == [*job.train.batch(0)[0].to_sample.tokens]
    asked = {"teacher.prompt": "{prompt} The answer is {answer}."}
    config, job = job_of(path, student, **mixed, **asked)
    (row,) = job.first_rows(1)
    teacher = next(view for view in row.views if view.use == "teacher")
    assert "The answer is 4." in teacher.spans[0].text
    assert teacher.tokens == list(job.train.batch(0)[0].teacher_tokens or ())


def test_the_texts_of_tokens_are_the_text() -> None:
    tokenizer = tokenizer_of(OPENS)
    for text in ("", "ab", "é漢\n\n", "<|im_start|>x", "�", "a�b"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        texts = token_texts(tokenizer, ids)
        assert "".join(texts) == tokenizer.decode(ids) and len(texts) == len(ids)
    assert token_texts(tokenizer, tokenizer("é")["input_ids"]) == ("", "é")
    half = tokenizer("é")["input_ids"][:1]
    assert "".join(token_texts(tokenizer, half)) == tokenizer.decode(half)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = cli.run(main, [*map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_command(tmp_path: Path, student: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", *ROWS.values())
    given = [path, "--student", student, "max_prompt_tokens=256", "max_new_tokens=100"]
    code, out, _ = run(capsys, *given, "--row", 4, "data.completion_turns=all")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    marked = [line[2:] for line in out.splitlines() if line.startswith("+ ")]
    text = marked[: next(i for i, line in enumerate(marked) if "'" in line)]
    call, answer = '<tool_call>w {"t": 1}</tool_call>', "<think>↵↵</think>↵↵4"
    assert "".join(text) == f"{call}<|im_end|>{answer}<|im_end|>"
    code, out, _ = run(capsys, *given, "--json", "--row", 0, "--row", 9)
    read = json.loads(out)
    assert [row["where"] for row in read["rows"]] == [f"{path}:1", f"{path}:10"]
    assert read["algorithm"] == "sft" and read["rows"][0]["answer"] == "2"
    code, out, _ = run(capsys, *given, "max_prompt_tokens=8")
    assert code == 0 and "left out" in out and "max_prompt_tokens=8" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["rows.jsonl", "--row", "7"], "--row 7: .*rows.jsonl has 2 rows, numbered from 0"),
        (["rows.jsonl", "--row", "-1"], "--row -1: "),
        (["bad.jsonl"], r"bad.jsonl:2: `prompt`.* must be"),
        (
            ["rows.jsonl", "student.model=there"],
            "an option asks for student.model=.*, and a key for there",
        ),
        (["none.jsonl"], "none.jsonl: No such file"),
        (["rows.jsonl", "data.chatt=raw"], "did you mean data.chat"),
        ([], "name the data"),
    ],
)
def test_bad_input_is_named(
    argv: list[str],
    says: str,
    tmp_path: Path,
    student: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "a", "completion": "b"}
    write(tmp_path / "rows.jsonl", row, row)
    write(tmp_path / "bad.jsonl", row, {"prompt": 7})
    code, _, err = run(capsys, *argv, "--student", student)
    assert code == cli.EXIT_BAD_INPUT
    assert re.search(says, err), err


def test_no_student(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "a", "completion": "b"})
    for argv, says in (
        ([path], "--student MODEL"),
        ([path, "--student", tmp_path / "none"], "there is no such file or folder"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == cli.EXIT_BAD_INPUT and says in err


def test_rows_of_a_table_are_those_of_a_file(
    tmp_path: Path, student: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table has every column in every row, null where a row has none: null is not shown."""
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "1+1=", "completion": "2", "level": 3}, {"prompt": "a", "completion": "b"}]
    file = write(tmp_path / "rows.jsonl", *rows)
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "t.parquet")
    for number in (0, 1):
        said = []
        for path in (file, tmp_path / "t.parquet"):
            _, out, _ = run(capsys, path, "--student", student, "--row", number)
            said.append([line for line in out.splitlines() if str(tmp_path) not in line])
        assert said[0] == said[1] and any("level" in line for line in said[0]) == (number == 0)


def test_a_dry_run_shows_the_first_rows(
    tmp_path: Path, student: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of step 1, in the order of the run; tokens and mask as by themselves."""
    path = write(tmp_path / "rows.jsonl", *ROWS.values())
    of: dict[str, Any] = {"student.model": student, "data.train": str(path), "algorithm": "sft"}
    of |= KEYS | {"data.shuffle": True}
    keys = [f"{key}={json.dumps(value)}" for key, value in of.items()]
    keys += [f"run_dir={tmp_path / 'run'}", "mesh=actor+rollout=1"]
    assert cli.run(train_main, ["--dry-run", "--show", "2", *keys]) == 0
    plan, _, shown = capsys.readouterr().out.partition("algorithm=sft: completions of the data")
    assert "actor" in plan and shown.count("learned: ") == 2 and "\n+ " in shown
    assert cli.run(train_main, ["--dry-run", "--show", "2", "--json", *keys]) == 0
    _, job = job_of(path, student, **{"data.shuffle": True})
    read = json.loads(capsys.readouterr().out)
    assert read["fits"] and [row["views"][0]["tokens"] for row in read["rows"]] == [
        [*prompt.tokens, *(prompt.completion or ())] for prompt in job.train.batch(0)[:2]
    ]
    for argv, says in ((["--show", "2"], "--dry-run"), (["--dry-run", "--show", "0"], "--show 0")):
        assert cli.run(train_main, [*argv, *keys]) == cli.EXIT_BAD_INPUT
        assert says in capsys.readouterr().err
