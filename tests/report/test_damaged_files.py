"""Damaged and foreign files in a run's folder: the report and a resumed run say what they are, and
go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from cases import and_slow
from made_run import make_run
from runs import CONSTANT, QUICK, SHORT, save_model

from jaxrl.config import cli
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.process import atomic_files
from jaxrl.profile.traces import StageTable
from jaxrl.report import __main__ as report
from jaxrl.run.run_dir import Lock, RunDir, meshes, sessions
from jaxrl.telemetry import plot
from jaxrl.telemetry.lines import LOG_FILE, RunLog
from jaxrl.telemetry.metrics import (
    METRICS_FILE,
    SAMPLES_FILE,
    JsonLines,
    MetricsWriter,
    write_samples,
)
from jaxrl.telemetry.timeline import TIMELINE_FILE, Timeline
from jaxrl.train import main as train

pytestmark = pytest.mark.usefixtures("shared_programs")

LINES = (METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE, "sessions.jsonl", LOG_FILE)
DOCUMENTS = (
    *("plan.json", "config.yaml", "profile/stages.json", "tokens.json", "plan.txt"),
    "report.html",
)
DEEP = "[" * 100_000
HUGE = "9" * 400


def content(data: bytes | str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data if isinstance(data, bytes) else data.encode())


def _added(*lines: str) -> Callable[[Path], object]:
    """Lines after those that are there."""
    text = "".join(f"{line}\n" for line in lines)
    return lambda path: path.write_text((path.read_text() if path.is_file() else "") + text)


def _changed(path: Path) -> None:
    """Every number another kind of value."""
    text = path.read_text() if path.is_file() else ""
    path.write_text(text.replace(": 1", ': "1').replace(': "1', ': "x", "y": 1', 5))


def _linked(target: str) -> Callable[[Path], object]:
    def link(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return link


def _folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


ROWS = [
    '{"step": 99, "distill/divergence": NaN}',
    '{"step": 99, "distill/divergence": Infinity, "x": -Infinity}',
    '{"step": 99, "distill/divergence": 1e400}',
    '{"step": 99, "distill/divergence": 1e308, "time/step_s": 1e308, "tokens/per_second": 1e308}',
    f'{{"step": 99, "distill/divergence": {HUGE}, "time/step_s": {HUGE}}}',
    f'{{"step": {HUGE}, "distill/divergence": 1}}',
    '{"step": true, "distill/divergence": 1}',
    '{"step": 99.5}',
    '{"step": "x"}',
    '{"step": 99, "prompt": 5, "completion": [1], "score": "x", "agreement": "y", "tokens": {}}',
    '{"step": 99, "prompt": null, "completion": null, "agreement": 1e308, "reward": 1e308}',
    '{"step": 99, "mesh": 5}',
    '{"step": 99}',
    '{"step": -99, "mesh": "a"}',
    '{"ph": "X", "cat": "actor", "name": "update", "ts": 1e400, "dur": 1}',
    '{"ph": "X", "cat": "actor", "name": "update", "ts": "x", "dur": null}',
    f'{{"ph": "X", "cat": "actor", "name": "update", "ts": {HUGE}, "dur": {HUGE}}}',
    '{"ph": "X", "cat": "actor", "name": "update", "ts": 1, "dur": 1, "args": [1]}',
    '{"ph": "X", "cat": [], "name": {}, "ts": 1, "dur": 1, "args": {"step": "x"}}',
    '{"ph": "X", "cat": "worker ", "name": "", "ts": -5, "dur": -5, "args": {"step": 1}}',
    '{"ph": "i", "name": "start", "ts": "x"}',
    '{"ph": "i", "name": [], "ts": {}}',
    '{"ph": "i", "name": "start"}',
    "[1]",
    "{}",
    "7",
    "null",
    '"x"',
    '{"step": 99, "\\ud800": "\\ud800"}',
    DEEP,
    '{"step":' * 100_000,
]
DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": content(""),
    "a list": content("[1]"),
    "a list in a line": content("[1]\n"),
    "an object": content("{}"),
    "an object in a line": content("{}\n"),
    "binary": content(bytes(range(256)) * 40),
    "zeros": content(bytes(5000)),
    "utf-16": content('{"step": 1}\n'.encode("utf-16")),
    "nested": content(DEEP),
    "nested in a line": content(DEEP + "\n"),
    "a huge number": content(HUGE * 20 + "\n"),
    "half": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2] if path.is_file() else b"x"
    ),
    "other types": _changed,
    "plan": content('{"roles": [], "pools": [], "notes": [], "mesh": "", "launcher": ""}\n'),
    "other plan": content('{"roles": [{}], "pools": [{}], "notes": 1}\n'),
    "columns": content('{"title": "a", "columns": {"token": ["a"], "entropy": []}}\n'),
    "stages": content('{"stages": [1], "pools": 3, "steps": [1]}\n'),
    "yaml": content("steps: !!bool x\n"),
    "yaml of other types": content("steps: [1]\nmesh: {a: b}\nbatch_size: x\nteachers: 5\n"),
    "many rows": _added(*ROWS),
    "a folder": _folder,
    "a pipe": _pipe,
    "a link to itself": lambda path: _linked(path.name)(path),
    "a link to nowhere": _linked("nowhere/at/all"),
    "a link to a missing file": lambda path: _linked(f"missing {path.name}")(path),
    "a link to a device": _linked("/dev/null"),
}


def every(names: Iterable[str], others: Iterable[object], most: int) -> list[ParameterSet]:
    """All pairs; one of `most` is in the default suite."""
    pairs = [(i + j, name, other) for i, name in enumerate(names) for j, other in enumerate(others)]
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(name, other, marks=marks[n % most == 0]) for n, name, other in pairs]


NESTED = [name for name in DAMAGES if name.startswith("nested")]
"""What takes a second of YAML's reader."""


@pytest.mark.parametrize(
    "damage", and_slow([d for d in DAMAGES if d not in NESTED[1:]], NESTED[1:])
)
def test_a_report_of_a_run_that_is_damaged_all_over(
    made: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(made, tmp_path)
    for name in (*LINES, *DOCUMENTS[:-1], "lock"):
        DAMAGES[damage](run / name)
    with within(30):
        code = cli.run(report.main, [str(run)])
    said = capsys.readouterr().err
    assert (code == 0 and (run / "report.html").is_file()) or (code == 2 and said.count("\n") < 4)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Ends what waits for ever."""

    def late(*_: object) -> None:
        raise AssertionError(f"it takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With every file that a run writes."""
    path = make_run(tmp_path_factory.mktemp("damaged") / "made")
    (path / "sessions.jsonl").write_text('{"step": 0, "mesh": "actor=2"}\n')
    (path / "profile").mkdir()
    (path / "profile/stages.json").write_text(StageTable((1, 2), 1.0, {}, (), ()).to_json())
    (path / "tokens.json").write_text('{"title": "step 1, row 0", "columns": {"token": ["a"]}}')
    for name in ("plan.txt", LOG_FILE):
        (path / name).write_text("words\n")
    return path


def copied(run: Path, tmp_path: Path) -> Path:
    place = tmp_path / "run"
    if place.exists():
        shutil.rmtree(place)
    shutil.copytree(run, place)
    return place


@pytest.mark.parametrize(("name", "damage"), every([*LINES, *DOCUMENTS, "lock"], DAMAGES, 10))
def test_a_report_of_damaged_files_is_a_page_or_a_line(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    damage: str,
) -> None:
    run = copied(made, tmp_path)
    DAMAGES[damage](run / name)
    with within(30):
        code = cli.run(report.main, [str(run)])
    said = capsys.readouterr().err
    assert code in (0, 2), said
    assert (said.startswith("error: ") and said.count("\n") < 4) == (code == 2), said
    if code == 0:
        assert (run / "report.html").read_text().rstrip().endswith("</html>")
    else:
        assert name == "report.html" or damage.startswith(("a ", "empty")), said


ONE_BY_ONE = [[number] for number in range(len(ROWS))]
HALVES = [list(range(len(ROWS)))[start::2] for start in range(2)]


@pytest.mark.parametrize("name", LINES[:4])
@pytest.mark.parametrize("numbers", and_slow(HALVES, [(one,) for one in ONE_BY_ONE]), ids=repr)
def test_a_foreign_line_costs_no_other_line(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, numbers: list[int]
) -> None:
    """The default suite adds half of the lines at once."""
    run = copied(made, tmp_path)
    begins = "," if name == TIMELINE_FILE else ""
    _added(*(begins + ROWS[number] for number in numbers))(run / name)
    assert cli.run(report.main, [str(run)]) == 0
    assert meshes(sessions(run)).startswith("actor=2")
    page = (run / "report.html").read_text()
    assert "NaN" not in page.partition("<script")[2].partition("</script>")[0]
    capsys.readouterr()


@pytest.mark.parametrize("damage", DAMAGES)
def test_curves_of_damaged_files(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    run = copied(made, tmp_path)
    DAMAGES[damage](run / METRICS_FILE)
    with within(30):
        code = cli.run(plot.main, [str(run), "-o", str(tmp_path / "x.png")])
    said = capsys.readouterr().err
    assert code in (0, 2) and said.count("\n") < 4, said


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resumed_run_goes_on_after_damage(made: Path, tmp_path: Path, damage: str) -> None:
    """What each file is opened with: it is moved aside, or cut where it is damaged."""
    run = copied(made, tmp_path)
    for name in (*LINES, "plan.json"):
        DAMAGES[damage](run / name)
    said: list[str] = []
    with within(30):
        with MetricsWriter(run / METRICS_FILE, 20, said.append) as metrics:
            metrics.write(21, {"distill/divergence": 1.0})
            metrics.amend(21, {"time/step_s": 1.0})
        with JsonLines(run / SAMPLES_FILE, 20, said.append) as samples:
            write_samples(samples, [])
        with Timeline(run / TIMELINE_FILE, True, said.append) as timeline:
            timeline.span("actor", "update", 0.0, 1.0)
        with RunLog(run / LOG_FILE, said.append) as log:
            log.write("goes on")
        folder = RunDir(run, None, ())
        folder.write("sessions.jsonl.new", folder.sessions_with("actor=1"))
    assert all(isinstance(json.loads(line), dict) for line in (run / METRICS_FILE).open())
    assert (run / LOG_FILE).read_text(errors="replace").rstrip().endswith("goes on")
    if damage == "a pipe" or damage == "a folder":
        assert len([line for line in said if "is not a file of a run" in line]) == 4
        assert (run / f"{LOG_FILE}.damaged").exists()


def test_what_links_lead_to_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "lock").symlink_to(precious)
    (run / ".plan.json.partial").symlink_to(precious)
    (run / ".report.html.partial").symlink_to(precious)
    with pytest.raises(UserError, match="cannot be written to"):
        Lock(run)
    RunDir(run, None, ()).write("plan.json", "{}")
    atomic_files.put_file(run / "report.html", lambda file: file.write_bytes(b"page"))
    assert precious.read_text() == "mine"
    assert sorted(os.listdir(run)) == ["lock", "plan.json", "report.html"]


def test_a_page_is_whole_or_not_there(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(made, tmp_path)
    assert cli.run(report.main, [str(run)]) == 0
    before = (run / "report.html").read_bytes()

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert cli.run(report.main, [str(run)]) == 2
    assert (run / "report.html").read_bytes() == before
    assert not list(run.glob(".*"))


# Whole runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("trained")
    models = save_model(folder / "student", 32, 1, seed=0)
    keys = [
        *QUICK,
        *(f"student.model={models}", "algorithm=sft", "teacher.model=null"),
        *("data.train=arithmetic", "data.chat=raw", "checkpoint.every=1", "checkpoint.keep_last=2"),
        *("mesh=actor=1,rollout=1", "data.eval=null"),
        *SHORT,
        *CONSTANT,
    ]
    run = folder / "run"
    assert cli.run(train, [*keys, f"run_dir={run}"]) == 0
    return keys, run


WHOLE = ["many rows", "a pipe", "a folder", "binary", "a link to itself", "a list in a line"]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=[] if name in WHOLE[:3] else [pytest.mark.slow])
        for name in (*WHOLE, *(name for name in DAMAGES if name not in WHOLE))
    ],
)
def test_a_run_resumes_over_damaged_files(
    trained: tuple[list[str], Path],
    tmp_path: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys, there = trained
    run = copied(there, tmp_path)
    for name in (*LINES, "plan.txt"):
        DAMAGES[damage](run / name)
    code = cli.run(train, [*keys, f"run_dir={run}", "steps=3"])
    said = capsys.readouterr()
    refused = damage.startswith(("a pipe", "a folder", "a link"))  # what cannot be replaced
    assert code == 0 or (code == 2 and refused), said.err
    if code == 0:
        rows = [json.loads(line) for line in (run / METRICS_FILE).open()]
        assert rows[-1]["step"] == 3
        assert cli.run(report.main, [str(run)]) == 0


def test_a_damaged_config_of_the_newest_checkpoint_is_that_checkpoints_damage(
    trained: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, there = trained
    run = copied(there, tmp_path)
    newest = run / "checkpoints" / "2"
    (newest / "config.yaml").write_text("steps: [")
    assert cli.run(train, [*keys, f"run_dir={run}", "steps=3"]) == 0
    said = capsys.readouterr()
    assert "checkpoint 2 cannot be used" in said.err + said.out
    assert Config.load(run / "config.yaml").steps == 3
