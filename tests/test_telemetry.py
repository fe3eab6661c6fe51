"""Metrics, samples, console, plots: rows read back, unknown names are refused, lines never mix."""

from __future__ import annotations

import io
import json
import re
import threading
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import cli
from jaxrl.config import LoggingConfig
from jaxrl.telemetry import plot
from jaxrl.telemetry.console import Console, Eta, format_seconds
from jaxrl.telemetry.metrics import (
    METRICS,
    MetricsWriter,
    Sample,
    SamplesWriter,
    read_metrics,
)

SAMPLE = Sample(
    step=3,
    split="train",
    prompt="1+1=\n",
    completion="2 é",
    finish_reason="stop",
    tokens=2,
    policy_version=2,
    answer="2",
    score=1.0,
)
ROWS = [
    {"step": 0, "eval/accuracy": 0.05, "teacher/accuracy": 0.98},
    {"step": 1, "distill/divergence": 0.6931, "tokens/per_second": 1234.5, "time/step_s": 2.0},
    {"step": 2, "distill/divergence": 0.5, "eval/accuracy": 0.5, "time/step_s": 2.0},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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
    assert read_metrics(path) == read_metrics(tmp_path) == writer.rows
    assert writer.rows[0] == {"step": 0, "eval/accuracy": 0.25, "optimizer_step": 3}
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
        with pytest.raises(ValueError, match="step=2"):
            writer.write(1, {"step": 2})
        with pytest.raises(TypeError, match="sft/loss must be one number"):
            writer.write(1, {"sft/loss": [1.0]})  # type: ignore[dict-item]
        writer.write(1, {})
        with pytest.raises(ValueError, match="step 1 after step 1"):
            writer.write(1, {})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1}]


def test_a_torn_last_line_is_left_out_and_a_torn_other_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "sft/lo')
    assert [row["step"] for row in read_metrics(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


def test_the_table_documents_each_name_with_unit_and_meaning() -> None:
    for name, metric in METRICS.items():
        assert metric.unit and metric.meaning, name


def test_every_name_in_the_source_stands_in_the_table() -> None:
    """Read from string literals: names that are written only now and then are checked too."""
    families = "|".join(sorted({name.split("/")[0] for name in METRICS if "/" in name}))
    literal = re.compile(rf'"((?:{families})/[a-z0-9_]+)"')
    package = Path(cli.__file__).parent
    texts = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    names = {name for text in texts.values() for name in literal.findall(text)} - {"tokens/s"}
    assert names - set(METRICS) == set()
    assert {"eval/accuracy", "distill/divergence"} <= names


def test_samples_are_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SamplesWriter(path) as writer:
        writer.write([SAMPLE, SAMPLE])
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
        r"  train '1+1=\\n' -> '2 é' (stop, score 1)",
    ]
    assert "\x1b" not in out.getvalue()


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
