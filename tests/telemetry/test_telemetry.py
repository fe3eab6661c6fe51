"""Metrics, samples, console, plots: rows read back, unknown names are refused, lines never mix."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import threading
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
from telemetry_doubles import ROWS, SAMPLE, Clock, FullDisk, Terminal

import jaxrl
from jaxrl.config import cli
from jaxrl.config.settings import LoggingConfig
from jaxrl.sharding.placement import ROLES
from jaxrl.telemetry import metrics, plot
from jaxrl.telemetry.console import Console, Eta, _shown, format_seconds
from jaxrl.telemetry.lines import RunLog
from jaxrl.telemetry.metrics import (
    METRICS,
    JsonLines,
    MetricsWriter,
    Sample,
    find_metric,
    held_out_reward,
    metrics_page,
    read_metrics,
    write_samples,
)
from jaxrl.telemetry.timeline import Timeline
from jaxrl.telemetry.trackers import _sample_text
from jaxrl.train import Result


def write_run(folder: Path) -> Path:
    folder.mkdir()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for row in ROWS:
            writer.write(row["step"], row)
    return folder


def test_rows_read_back_and_are_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(0, {"eval/accuracy": np.float32(0.25), "optimizer_step": jnp.int32(3)})
    row = writer.write(1, {"sft/loss": jnp.float32(1.5), "data/epoch": None, "staleness": 1.0})
    assert row == {"step": 1, "sft/loss": 1.5, "data/epoch": None, "staleness": 1}
    assert '"staleness": 1}' in path.read_text()
    assert read_metrics(path) == read_metrics(tmp_path) == [writer.first, writer.last]
    assert writer.first == {"step": 0, "eval/accuracy": 0.25, "optimizer_step": 3}
    assert writer.last == row
    writer.close()


def test_what_is_not_finite_is_null_for_json_has_no_nan(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(1, {"actor/grad_norm": float("nan"), "sft/loss": np.float32(np.inf)})
    text = (tmp_path / "m.jsonl").read_text()
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert strict == {"step": 1, "actor/grad_norm": None, "sft/loss": None}


def test_undocumented_names_and_bad_rows_are_refused_and_leave_no_trace(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        with pytest.raises(ValueError, match=r"distill/divergnce.*did you mean distill/divergence"):
            writer.write(1, {"distill/divergnce": 1.0})
        with pytest.raises(ValueError, match="row of step 1 carries step=2"):
            writer.write(1, {"step": 2})
        writer.write(1, {})
        with pytest.raises(ValueError, match="step 1 after step 1"):
            writer.write(1, {})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1}]


def test_a_torn_last_line_is_left_out_and_a_torn_other_one_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "sft/lo')
    assert [row["step"] for row in read_metrics(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_the_table_documents_each_name_with_unit_and_meaning() -> None:
    for name, metric in METRICS.items():
        assert metric.unit and metric.meaning, name


def package_texts() -> dict[Path, str]:
    package = Path(jaxrl.__file__).parent
    return {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}


def test_every_name_in_the_source_stands_in_the_table() -> None:
    """Read from string literals: names that are written only now and then are checked too."""
    families = "|".join(sorted({name.split("/")[0] for name in METRICS if "/" in name}))
    literal = re.compile(rf'"((?:{families})/[a-z0-9_@]+)"')
    names = {name for text in package_texts().values() for name in literal.findall(text)}
    assert [name for name in names - {"tokens/s"} if find_metric(name) is None] == []
    assert {"eval/accuracy", "distill/divergence"} <= names


class Strings:
    """The string literals of some modules, and their f-strings as patterns with a group a hole."""

    def __init__(self, texts: dict[Path, str], given: set[str]) -> None:
        """
        Args:
            given: what a hole may hold besides.
        """
        self.given = given
        self.made: dict[tuple[str, Path | None], bool] = {}
        """What was asked before: parts of names are asked for again and again."""
        self.literals: dict[Path | None, set[str]] = {}
        """Of each module; None: of all."""
        self.patterns: dict[Path | None, dict[str, tuple[re.Pattern[str], list[Path | None]]]] = {}
        """Of each module, and of all: a pattern, and where what fills its holes may be."""
        for path, text in texts.items():
            nodes = list(ast.walk(ast.parse(text)))
            constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
            self.literals[path] = {value for value in constants if isinstance(value, str)}
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else None for v in node.values]
                    fixed = "".join(str(part) for part in parts if part is not None)
                    holes = ("(.+)" if part is None else re.escape(str(part)) for part in parts)
                    named = re.search("[a-z]{3}", fixed) is not None
                    self._add("".join(holes), path, named)
        self.literals[None] = set().union(*self.literals.values())

    def _add(self, pattern: str, path: Path, named: bool) -> None:
        for where in (None, path):
            held = self.patterns.setdefault(where, {})
            inside = held.setdefault(pattern, (re.compile(pattern), []))[1]
            filled = where if named else path
            if filled not in inside:
                inside.append(filled)

    def make(self, name: str, where: Path | None = None) -> bool:
        """Whether ``name`` is a literal, or an f-string whose holes these strings can fill.

        An f-string without a word of its own is filled by literals of its own module only.
        """
        if (name, where) not in self.made:
            self.made[name, where] = self._make(name, where)
        return self.made[name, where]

    def _make(self, name: str, where: Path | None) -> bool:
        if name in self.given:
            return True
        if name in self.literals.get(where, ()):
            return True
        for pattern, places in self.patterns.get(where, {}).values():
            match = pattern.fullmatch(name)
            if match is None or any(len(hole) == len(name) for hole in match.groups()):
                continue
            if any(all(self.make(hole, place) for hole in match.groups()) for place in places):
                return True
        return False


def test_every_name_in_the_table_is_made_somewhere_in_the_source() -> None:
    texts = {
        path: text
        for path, text in package_texts().items()
        if path.parent.name != "telemetry" or path.name == "totals.py"
    }
    examples = {"{role}": "teacher", "{k}": "4", "{set}": "SET", "{reward}": "REWARD"}
    examples |= {"{source}": "SOURCE", "{metric}": "METRIC", "{teacher}": "TEACHER"}
    strings = Strings(texts, set(examples.values()))
    missing = []
    for name in METRICS:
        for variable, example in examples.items():
            name = name.replace(variable, example)
        if not strings.make(name):
            missing.append(name)
    assert missing == []
    for absent in ("eval/acuracy", "eval/accuracy_lowest", "distill/divergnce", "checkpoint/bytez"):
        assert not strings.make(absent), absent


@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_report_its_memory(role: str) -> None:
    assert find_metric(f"memory/{role}/peak_bytes") is METRICS["memory/{role}/peak_bytes"]


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("eval/accuracy", "eval/accuracy"),
        ("eval/pass@16_low", "eval/pass@{k}_low"),
        ("eval/gsm8k.test/accuracy", "eval/{set}/accuracy"),
        ("eval/gsm8k/pass@2", "eval/{set}/pass@{k}"),
        ("memory/teacher/planned", "memory/{role}/planned"),
        ("reward/format/mean", "reward/{reward}/mean"),
        ("reward/größe/mean", "reward/{reward}/mean"),
        ("reward/mean", "reward/mean"),
        ("similarity/split_into_3", "similarity/split_into_{k}"),
        ("distill/code.v2/divergence", "distill/{teacher}/divergence"),
        ("eval/pass@0", None),
        ("eval/a/b/accuracy", None),
        ("memory/critic/peak_bytes", None),
        ("eval/{set}/accuracy", None),
        ("xeval/accuracy", None),
    ],
)
def test_names_with_a_variable_part_resolve(name: str, entry: str | None) -> None:
    assert find_metric(name) is (None if entry is None else METRICS[entry])


def test_an_earlier_evaluation_has_its_step() -> None:
    """On the live display it stays between the rows that have one."""
    row = metrics._row(56, {"reward/mean": 0.5, "eval/accuracy": 0.25})
    assert dict(_shown(row, 0)) == {"reward": "0.500", "accuracy of step 0": "25.0%"}
    assert dict(_shown(row, 56)) == dict(_shown(row)) == {"reward": "0.500", "accuracy": "25.0%"}


def test_each_name_of_the_table_has_one_entry() -> None:
    """No pattern covers another entry: what a name means never depends on the order."""
    examples = {"{role}": "actor", "{k}": "8", "{set}": "math", "{reward}": "format"}
    examples |= {"{teacher}": "code", "{source}": "sums", "{metric}": "surprise"}
    for name, metric in METRICS.items():
        for variable, example in examples.items():
            name = name.replace(variable, example)
        assert find_metric(name) is metric, name
        assert sum(p.fullmatch(name) is not None for p, _ in metrics._PATTERNS) <= 1, name


def test_the_page_of_the_table_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "metrics.md"
    again = "python -m jaxrl.telemetry.metrics > docs/metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_page(), f"make it again: {again}"
    assert cli.run(metrics.main, []) == 0
    assert capsys.readouterr().out == metrics_page()


def test_counts_stay_whole_through_patterns(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        row = writer.write(1, {"memory/actor/peak_bytes": 8.0, "eval/SET/unjudged": 2.0})
    assert json.dumps(row) == '{"step": 1, "memory/actor/peak_bytes": 8, "eval/SET/unjudged": 2}'


def test_a_resumed_file_is_that_of_a_run_that_never_stopped(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "m.jsonl"
    with MetricsWriter(whole) as writer:
        for step in range(6):
            writer.write(step, {"sft/loss": 0.1 * step})
    with MetricsWriter(path) as writer:
        for step in range(5):
            writer.write(step, {"sft/loss": 0.1 * step})
    with open(path, "a") as file:
        file.write('{"step": 5, "sft/lo')
    with MetricsWriter(path, after=3) as writer:
        assert [writer.first, writer.last] == read_metrics(whole)[:4:3]
        with pytest.raises(ValueError, match="step 3 after step 3"):
            writer.write(3, {})
        for step in (4, 5):
            writer.write(step, {"sft/loss": 0.1 * step})
        assert [writer.first, writer.last] == read_metrics(path)[::5]
    assert path.read_text() == whole.read_text()


def test_resuming_without_the_file_or_at_its_end_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, after=7) as writer:
        writer.write(8, {})
    with MetricsWriter(path, after=8) as writer:
        assert writer.first == writer.last == {"step": 8}
        writer.write(9, {})
    assert read_metrics(path) == [{"step": 8}, {"step": 9}]


@pytest.mark.parametrize(
    ("damaged", "kept"),
    [
        (b'{"step": 0}\n{"st\n{"step": 2}\n', [0]),
        (b'{"step": 0}\n{"step": 1}\n' + bytes(50), [0, 1]),
        (b'{"step": 0}\n' + bytes(11) + b'\n{"step": 2}\n', [0]),
        (bytes(4096), []),
        (b'{"step": 0}\n' + b"[" * 100_000 + b"\n", [0]),
        (b"\xff\xfe\n", []),
    ],
)
def test_a_damaged_file_is_moved_aside_and_its_first_rows_are_kept(
    tmp_path: Path, damaged: bytes, kept: list[int]
) -> None:
    path, reported = tmp_path / "m.jsonl", list[str]()
    for time in (1, 2):
        path.write_bytes(damaged)
        with MetricsWriter(path, after=2, notify=reported.append) as writer:
            ends = [row["step"] for row in (writer.first, writer.last) if row is not None]
            assert ends == kept[:1] + kept[-1:]
            writer.write(3, {})
        assert [row["step"] for row in read_metrics(path)] == [*kept, 3]
        aside = tmp_path / f"m.jsonl.damaged{'-2' if time == 2 else ''}"
        assert aside.read_bytes() == damaged and len(reported) == time
        assert f"that file is now {aside}" in reported[-1]


def test_rows_that_are_cut_off_or_follow_the_checkpoint_are_no_damage(tmp_path: Path) -> None:
    path, reported = tmp_path / "m.jsonl", list[str]()
    for text in ('{"step": 0}\n{"step"', '{"step": 0}\n{"step": 2}\n\0\0\n{\n', ""):
        path.write_text(text)
        MetricsWriter(path, after=2, notify=reported.append).close()
    assert reported == [] and sorted(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_place_of_a_file_is_moved_aside(tmp_path: Path) -> None:
    reported: list[str] = []
    for name in ("m.jsonl", "s.jsonl", "t.json", "l.txt"):
        (tmp_path / name).mkdir()
    MetricsWriter(tmp_path / "m.jsonl", 3, reported.append).close()
    JsonLines(tmp_path / "s.jsonl", 3, reported.append).close()
    Timeline(tmp_path / "t.json", True, reported.append).close()
    RunLog(tmp_path / "l.txt", reported.append).close()
    assert len(reported) == 4 and all(".damaged" in text for text in reported)
    assert all((tmp_path / name).is_file() for name in ("m.jsonl", "s.jsonl", "t.json", "l.txt"))


def test_the_newest_row_can_be_added_to(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(0, {"sft/loss": 2.0})
        writer.write(1, {"sft/loss": 1.123456789})
    with MetricsWriter(path, after=1) as writer:
        assert writer.amend(1, {"sft/loss": 1.0, "loss": None})["sft/loss"] == 1.0
        writer.write(2, {})
        assert [writer.first, writer.last] == read_metrics(path)[::2]
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


def test_a_full_disk_is_reported_once_and_what_it_refused_follows_when_there_is_room(
    tmp_path: Path,
) -> None:
    messages: list[str] = []
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path, notify=messages.append)
    writer.write(0, {})
    disk = FullDisk(writer, room=5)
    writer.write(1, {})
    writer.write(2, {"sft/loss": 1.0})
    assert len(messages) == 1 and "m.jsonl" in messages[0] and "No space left" in messages[0]
    assert writer.last == {"step": 2, "sft/loss": 1.0}
    assert read_metrics(path) == [{"step": 0}]
    disk.room = 10_000
    writer.write(3, {})
    assert read_metrics(path) == [{"step": 0}, {"step": 1}, {"step": 2, "sft/loss": 1}, {"step": 3}]
    disk.room = 0
    writer.write(4, {})
    writer.close()
    assert len(messages) == 2 and "lacks 1 lines" in messages[1]


def test_samples_resume_and_outlive_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    later = dataclasses.replace(SAMPLE, step=4)
    with JsonLines(path) as writer:
        write_samples(writer, [SAMPLE, SAMPLE])
        write_samples(writer, [later])
    messages: list[str] = []
    with JsonLines(path, after=3, notify=messages.append) as writer:
        disk = FullDisk(writer, room=3)
        write_samples(writer, [later])
        disk.room = 10_000
        write_samples(writer, [later])
    found = [Sample(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    assert found == [SAMPLE, SAMPLE, later, later] and len(messages) == 1


@pytest.mark.parametrize("harm", ["removed", "replaced"])
def test_a_file_that_is_removed_is_not_in_place(tmp_path: Path, harm: str) -> None:
    metrics, timeline = MetricsWriter(tmp_path / "m.jsonl"), Timeline(tmp_path / "t.json")
    files = [metrics, timeline.file]
    with metrics, timeline:
        assert all(file.in_place() for file in files)
        for name in ("m.jsonl", "t.json"):
            (tmp_path / name).unlink()
            if harm == "replaced":
                (tmp_path / name).write_text("of somebody else")
        assert not any(file.in_place() for file in files)
    assert all(file.in_place() for file in files), "closed: nothing is written any more"


def test_samples_are_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with JsonLines(path) as writer:
        write_samples(writer, [SAMPLE, SAMPLE])
        lines = path.read_text(encoding="utf-8").splitlines()
    assert [Sample(**json.loads(line)) for line in lines] == [SAMPLE, SAMPLE]


def test_plain_lines_when_it_is_no_terminal() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(LoggingConfig(), steps=10, out=out, clock=clock) as console:
        console.message("loading teacher")
        for row in ROWS:
            console.step(row)
            clock.now += 2.0
        console.samples([SAMPLE])
    lines = out.getvalue().splitlines()
    assert lines == [
        "loading teacher",
        "step  0/10  accuracy 5.0%  teacher 98.0%",
        "step  1/10  divergence 0.6931  tok/s 1,234  s/step 2.00",
        "step  2/10  divergence 0.5000  accuracy 50.0%  s/step 2.00  eta 0:16",
        "  train '1+1=↵' -> '2 é' (stop, score 1)",
    ]
    assert "\x1b" not in out.getvalue()


def test_a_sample_shows_the_reward_that_it_was_trained_with() -> None:
    """Not the verifier's score, which is another number where a run learns from another reward."""
    rewarded = dataclasses.replace(SAMPLE, reward=0.25)
    plain, live = io.StringIO(), Terminal()
    for out in (plain, live):
        with Console(LoggingConfig(), steps=10, out=out) as console:
            console.step({"step": 3})
            console.samples([rewarded])
    assert plain.getvalue().splitlines()[-1].endswith("(stop, reward 0.25)")
    assert "reward 0.25" in live.getvalue() and "score 1" not in live.getvalue()
    assert _sample_text(rewarded).startswith("**train**: 2 tokens, stop, reward 0.25, answer 2")


CODES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
"""What a terminal does not show."""


def test_completions_of_the_data_are_marked_and_have_no_score() -> None:
    given = dataclasses.replace(SAMPLE, split="data", score=None)
    plain, live = io.StringIO(), Terminal()
    for out in (plain, live):
        with Console(LoggingConfig(), steps=10, out=out) as console:
            console.step({"step": 3})
            console.samples([given])
    assert plain.getvalue().splitlines()[-1] == "  data '1+1=↵' -> '2 é' (stop)"
    assert "from the data" in live.getvalue()
    assert "judged" not in live.getvalue() and "score" not in live.getvalue()


@pytest.mark.parametrize("columns", [40, 60, 80, 140])
def test_a_narrow_screen_leaves_room_for_prompt_and_completion(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    prompt, completion = "p" * 18, "c" * 18
    sample = dataclasses.replace(SAMPLE, prompt=prompt, completion=completion, reward=0.25)
    out = Terminal()
    with Console(LoggingConfig(), steps=10, out=out) as console:
        console.step({"step": 3})
        console.samples([sample])
        console.message("kept")
    text = out.getvalue()
    order = [word for word in ("judged", "tokens", "answer", "ended by") if word in text]
    assert len(order) == {40: 0, 60: 1, 80: 3, 140: 4}[columns]
    assert order == ["judged", "tokens", "answer", "ended by"][: len(order)]
    if columns >= 60:
        assert prompt in text and completion in text
    assert max(map(len, CODES.sub("", text).splitlines())) <= columns


def test_what_is_said_after_the_end_stands_below_the_display() -> None:
    out = Terminal()
    with Console(LoggingConfig(), steps=3, out=out) as console:
        console.step({"step": 3})
        console.samples([SAMPLE])
        console.close()
        console.message("accuracy on held-out prompts: 7.0% before, 98.0% after")
        console.message("model: runs/x/final")
    *_, accuracy, model = CODES.sub("", out.getvalue()).rstrip().splitlines()
    assert accuracy.startswith("accuracy on held-out") and model.startswith("model: runs/x")


def test_every_skips_lines_but_not_evaluations_nor_the_ends() -> None:
    out = io.StringIO()
    console = Console(LoggingConfig(every=3), steps=7, out=out)
    for step in range(8):
        console.step({"step": step} | ({"eval/accuracy": 0.5} if step == 4 else {}))
        console.samples([SAMPLE])
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines[::2]] == [f"{step}/7" for step in (0, 3, 4, 6, 7)]
    assert all(line.startswith("  train") for line in lines[1::2])


def test_staleness_and_skipped_updates_are_shown_only_when_there_are_any() -> None:
    out = io.StringIO()
    console = Console(LoggingConfig(), steps=9, out=out)
    console.step({"step": 1, "staleness": 0.0, "actor/skipped_updates": 0.0})
    console.step({"step": 2, "staleness": 1.0, "actor/skipped_updates": 2.0})
    first, second = out.getvalue().splitlines()
    assert first == "step 1/9"
    assert "staleness 1  skipped updates 2" in second


def test_a_value_that_is_not_finite_is_said() -> None:
    out = io.StringIO()
    Console(LoggingConfig(), steps=1, out=out).step({"step": 1, "distill/divergence": None})
    assert "divergence not finite" in out.getvalue()


def test_the_live_display_shows_step_numbers_and_samples() -> None:
    out = Terminal()
    with Console(LoggingConfig(), steps=2, out=out) as console:
        assert console.mode == "rich"
        console.message("loading [teacher]")
        for row in ROWS:
            console.step(row)
        console.samples([SAMPLE])
    text = out.getvalue()
    for word in ("loading [teacher]", "2/2", "0.5000", "50.0%", "98.0%", "2 é", "of step 3"):
        assert word in text


def test_a_resumed_run_shows_its_first_row_and_the_pace_of_this_process() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(LoggingConfig(every=10), steps=100, start=52, out=out, clock=clock) as console:
        clock.now += 500.0  # loading and compiling
        for step in range(53, 63):
            console.step({"step": step})
            clock.now += 2.0
    assert out.getvalue().splitlines() == ["step  53/100", "step  60/100  eta 1:20"]


def test_the_live_display_of_a_resumed_run_starts_where_it_resumes() -> None:
    out = Terminal()
    with Console(LoggingConfig(), steps=100, start=52, out=out) as console:
        console.samples([SAMPLE])
    assert "52/100" in out.getvalue()


def test_an_accuracy_has_its_interval() -> None:
    out = io.StringIO()
    row = {"eval/accuracy": 0.629, "eval/accuracy_low": 0.6, "eval/accuracy_high": 0.66}
    with Console(LoggingConfig(), steps=3, out=out) as console:
        console.step({"step": 1} | row)
        console.step({"step": 2} | row | {"eval/accuracy": None, "eval/accuracy_low": None})
    first, second = out.getvalue().splitlines()
    assert first == "step 1/3  accuracy 62.9% ±3.0"
    assert "accuracy not finite" in second


def test_quiet_is_silent() -> None:
    out = io.StringIO()
    with Console(LoggingConfig(console="quiet"), steps=2, out=out) as console:
        console.message("x")
        console.step(ROWS[1])
        console.samples([SAMPLE])
    assert out.getvalue() == ""


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_lines_of_many_threads_never_mix(mode: Literal["plain", "rich"]) -> None:
    out = Terminal()
    console = Console(LoggingConfig(console=mode), steps=50, out=out)

    def talk(name: str) -> None:
        for _ in range(20):
            console.message(name * 40)

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    console.close()
    lines = out.getvalue().split()
    assert sorted(lines) == sorted(name * 40 for name in "abcd" for _ in range(20))


def test_eta_is_the_mean_of_the_latest_steps_without_the_compiling_first() -> None:
    clock = Clock()
    eta = Eta(steps=10, clock=clock)
    assert eta.step(0) is None
    clock.now += 100.0  # compilation
    assert eta.step(1) is None
    clock.now += 2.0
    assert eta.step(2) == pytest.approx(2.0 * 8)
    clock.now += 4.0
    assert eta.step(3) == pytest.approx(3.0 * 7)


def test_format_seconds() -> None:
    assert [format_seconds(s) for s in (0, 59.6, 61, 3661)] == ["0:00", "1:00", "1:01", "1:01:01"]


def test_plot_series_leave_out_what_was_not_measured() -> None:
    assert plot.series(ROWS, "eval/accuracy") == ([0, 2], [0.05, 0.5])
    assert plot.series([{"step": 1, "sft/loss": None}], "sft/loss") == ([], [])


def test_plot_draws_each_run_and_the_teachers_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = plot.draw({"a": ROWS, "b": ROWS[:2]})
    divergence, accuracy, speed = figure.axes
    assert [axes.get_title().split()[0] for axes in figure.axes] == [
        "distill/divergence",
        "eval/accuracy",
        "tokens/per_second",
    ]
    assert [line.get_ydata().tolist() for line in divergence.lines] == [[0.6931, 0.5], [0.6931]]
    assert [line.get_label() for line in accuracy.lines] == ["a", "a: teacher", "b", "b: teacher"]
    assert list(accuracy.lines[1].get_ydata()) == [0.98, 0.98]


def test_a_result_draws_its_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = Result(write_run(tmp_path / "a")).curves()
    assert [line.get_label() for line in figure.axes[1].lines] == ["a", "a: teacher"]


def test_plot_of_intervals_sets_and_pass_at_k() -> None:
    pytest.importorskip("matplotlib")
    row = {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.7}
    more = {"eval/gsm8k/accuracy": 0.6, "eval/pass@4": 0.8, "eval/pass@4_low": 0.7}
    rows = [{"step": 3} | row | more, {"step": 5, "eval/accuracy": None}]
    figure = plot.draw({"resumed": rows})
    titles = [axes.get_title() for axes in figure.axes]
    names = ["eval/accuracy", "eval/gsm8k/accuracy", "eval/pass@4"]
    assert titles == [f"{name} (fraction)" for name in names]
    low, high = figure.axes[0].get_ylim()
    assert 0.35 < low < 0.4 and 0.7 < high < 0.75  # all of the interval, and little more
    (band,) = figure.axes[0].collections
    assert sorted({y for _, y in band.get_paths()[0].vertices}) == [0.4, 0.7]


def test_plot_of_a_run_from_rewards_has_panels_two_by_two() -> None:
    """As a page 830 pixels wide shows it, letters are at least 12 pixels high."""
    pytest.importorskip("matplotlib")
    names = ["reward/mean", "policy/entropy", "policy/clip_fraction", "eval/accuracy"]
    names.append("tokens/per_second")
    figure = plot.draw({"run": [{"step": step} | dict.fromkeys(names, -0.5) for step in (1, 2)]})
    assert [axes.get_title().split()[0] for axes in figure.axes] == names
    tops = [round(axes.get_subplotspec().get_position(figure).y1, 3) for axes in figure.axes]
    assert tops[0] == tops[1] > tops[2] == tops[3] > tops[4]
    points = [
        text.get_fontsize()
        for axes in figure.axes
        for text in (axes.title, axes.xaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels())
    ]
    pixels_per_inch = 830 / figure.get_size_inches()[0]
    assert min(points) * pixels_per_inch / 72 >= 12


def test_the_axes_of_a_plot_fit_its_values() -> None:
    """Values over decades have a log scale; one step far away from the others flattens nothing."""
    pytest.importorskip("matplotlib")
    values = {
        "distill/divergence": [10.0 ** (-i / 10) for i in range(40)],
        "reward/mean": [-0.5 + 0.001 * i for i in range(40)],
        "policy/clip_fraction": [0.01 + 0.0001 * i for i in range(40)],
        "eval/accuracy": [0.5 + 0.001 * i for i in range(40)],
        "tokens/per_second": [20.0] + [1000.0 + i for i in range(39)],
    }
    rows = [{"step": i} | {name: given[i] for name, given in values.items()} for i in range(40)]
    figure = plot.draw({"run": rows})
    panels = {axes.get_title().split()[0]: axes for axes in figure.axes}
    assert panels["distill/divergence"].get_yscale() == "log"
    for name in ("reward/mean", "policy/clip_fraction", "eval/accuracy"):
        (low, high), (least, most) = panels[name].get_ylim(), (min(values[name]), max(values[name]))
        assert low < least and most < high and high - low < 1.5 * (most - least)
    low, high = panels["tokens/per_second"].get_ylim()
    assert 900 < low < 1000 and 1038 < high < 1100
    constant = plot.draw({"run": [{"step": s, "reward/mean": 0.0} for s in (1, 2)]})
    assert constant.axes[0].get_ylim()[0] < 0 < constant.axes[0].get_ylim()[1]


def test_plot_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "run")
    target = tmp_path / "curves.png"
    assert cli.run(plot.main, [str(run), "-o", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    for argv in (
        [str(tmp_path / "absent"), "-o", str(target)],
        [str(run), "-o", str(tmp_path / "x.txt")],
        [str(run), "-o", str(tmp_path / "no" / "x.png")],
        [str(run)],
    ):
        assert cli.run(plot.main, argv) == 2
        assert len(capsys.readouterr().err.splitlines()) <= 2


def test_a_held_out_reward_says_something_where_it_is_not_0_or_alone() -> None:
    judged = {"eval/accuracy": 0.5}
    for reward, row, shown in ((0.0, judged, None), (0.0, {}, 0.0), (-1.0, judged, -1.0)):
        assert held_out_reward(row | {"eval/environment_reward": reward}) == shown
    assert held_out_reward({}) is None and held_out_reward(judged) is None


@pytest.mark.parametrize("count", [0, 2**53 + 1])
def test_a_count_is_written_as_it_is(tmp_path: Path, count: int) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(0, {"compile/programs": count})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 0, "compile/programs": count}]
