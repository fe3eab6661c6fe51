"""Trackers: the same rows in the same order, and none of them can hold up or end a run."""

from __future__ import annotations

import dataclasses
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from flax.traverse_util import flatten_dict
from runs import unlisted_files
from telemetry_doubles import SAMPLE

from jaxrl import Config
from jaxrl.config.settings import LoggingConfig
from jaxrl.errors import UserError
from jaxrl.telemetry import trackers
from jaxrl.telemetry.trackers import (
    RunFacts,
    Trackers,
    TrackerThread,
    check_trackers,
    open_trackers,
)

if TYPE_CHECKING:
    from tensorboardX.proto.event_pb2 import Event

ROWS: list[dict[str, int | float | None]] = [
    {"step": 1, "eval/accuracy": 0.5, "eval/pass@2": 0.75, "actor/grad_norm": None},
    {"step": 2, "distill/divergence": 0.25, "memory/actor/peak_bytes": 3},
    {"step": 3, "distill/divergence": 0.125},
]
PASSED = [{name: v for name, v in row.items() if v is not None} for row in ROWS]
SETTINGS = {"steps": 3, "actor": {"dtype": "bfloat16", "remat": None}, "mesh": "a|b"}


def open_for(
    run_dir: Path, messages: list[str], resumed_at: int | None = None, **keys: Any
) -> Trackers:
    config = LoggingConfig(**({"tensorboard": False} | keys))
    opened = open_trackers(config, RunFacts("name", run_dir, SETTINGS, resumed_at, messages.append))
    assert opened is not None
    return opened


def events(run_dir: Path) -> list[list[Event]]:
    """The events of each file, in a reader's order; every length and record has its checksum."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    files = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        data, found = path.read_bytes(), []
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            body = data[12 : 12 + length]
            for part, check in ((data[:8], data[8:12]), (body, data[12 + length : 16 + length])):
                value = crc32c(part)
                masked = (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF
                assert struct.unpack("<I", check) == (masked,)
            found.append(Event.FromString(body))
            data = data[16 + length :]
        files.append(found)
    return files


def scalars(found: list[Event]) -> list[tuple[int, str, float]]:
    return [
        (event.step, value.tag, value.simple_value)
        for event in found
        for value in event.summary.value
        if value.HasField("simple_value")
    ]


def texts(found: list[Event]) -> list[tuple[int, str, str]]:
    return [
        (event.step, value.tag, value.tensor.string_val[0].decode())
        for event in found
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    ]


def test_tensorboard_has_every_row_the_config_and_samples(tmp_path: Path) -> None:
    messages: list[str] = []
    opened = open_for(tmp_path, messages, tensorboard=True)
    for row in ROWS:
        opened.write(int(row["step"] or 0), row)
    for step in (1, 2, 10):
        opened.samples([dataclasses.replace(SAMPLE, step=step)])
    opened.samples([])
    opened.close(timeout=30)
    (found,) = events(tmp_path)
    assert found[0].file_version == "brain.Event:2"
    expected = [(row["step"], n, v) for row in PASSED for n, v in row.items() if n != "step"]
    assert scalars(found) == expected
    (config, *samples) = texts(found)
    assert config[1] == "config/text_summary" and "| `actor.dtype` | bfloat16 |" in config[2]
    assert r"| `mesh` | a\|b |" in config[2]
    assert [(step, tag) for step, tag, _ in samples] == [
        (1, "samples/text_summary"),
        (10, "samples/text_summary"),
    ]
    assert "    1+1=" in samples[0][2] and "    2 é" in samples[0][2]
    assert messages == [f"tensorboard: {tmp_path / 'tensorboard'}"]


def test_a_resumed_run_purges_what_tensorboard_has_after_it(tmp_path: Path) -> None:
    for resumed_at in (None, 2, 2):
        opened = open_for(tmp_path, [], resumed_at, tensorboard=True)
        opened.write(3, {"sft/loss": 1.0})
        opened.close(timeout=30)
    from tensorboardX.proto.event_pb2 import SessionLog

    files = events(tmp_path)
    assert len(files) == 3
    starts = [
        [event.step for event in found if event.session_log.status == SessionLog.START]
        for found in files
    ]
    assert starts == [[0], [3], [3]]


def test_rows_are_on_the_disk_before_the_end(tmp_path: Path) -> None:
    opened = open_for(tmp_path, [], tensorboard=True)
    opened.write(1, {"sft/loss": 2.0})
    wait(lambda: any(b"sft/loss" in f.read_bytes() for f in tmp_path.glob("tensorboard/*")))
    opened.close(timeout=30)


def test_tensorboard_brings_no_torch() -> None:
    program = (
        "import sys; from jaxrl.telemetry.trackers import import_tensorboard;"
        "import_tensorboard(); import tensorboardX; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


class FakeWandb(ModuleType):
    """Records the calls to wandb."""

    def __init__(self, mode: str = "offline", key: bool = True) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0
        self.axis: list[tuple[str, str]] = []
        self.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode=mode))
        self.login = lambda *, prompt: key and not prompt
        self.Settings = SimpleNamespace
        self._offline = mode == "offline"

    def init(self, **options: Any) -> Any:
        self.started.append(options)

        def finish() -> None:
            self.finished += 1

        return SimpleNamespace(
            define_metric=lambda name, step_metric: self.axis.append((name, step_metric)),
            log=self.logged.append,
            finish=finish,
            offline=self._offline,
            url="there",
        )


class FakeMLflow(ModuleType):
    """Records the calls to mlflow; as its servers do, it refuses names and parameters."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[Any, ...]] = []
        self.MlflowClient = lambda: self
        self.get_tracking_uri = lambda: "http://name:word@server"
        self.entities = ModuleType("mlflow.entities")
        self.entities.Metric = lambda key, value, timestamp, step: (key, value, step)  # type: ignore[attr-defined]
        self.entities.Param = lambda key, value: (key, value)  # type: ignore[attr-defined]

    def get_experiment_by_name(self, name: str) -> Any:
        known = any(call[0] == "experiment" for call in self.calls)
        return SimpleNamespace(experiment_id="7") if known else None

    def create_experiment(self, name: str) -> str:
        self.calls.append(("experiment", name))
        return "7"

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.calls.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def update_run(self, run: str, status: str) -> None:
        self.calls.append(("update", run, status))

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        assert run == "abc" and not any("@" in name for name, *_ in metrics) and len(params) <= 100
        self.calls += [("metric", *metric) for metric in metrics]
        self.calls += [("param", *param) for param in params]

    def set_terminated(self, run: str) -> None:
        self.calls.append(("end", run))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    module = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", module.entities)
    return module


def test_a_wandb_run_without_a_network_says_where_its_files_are(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    messages: list[str] = []
    open_for(tmp_path, messages, wandb="project").close(timeout=20)
    assert messages == [f"wandb: offline, in {tmp_path / 'wandb'}"]


def test_wandb_gets_the_rows_in_order_and_its_run_again(tmp_path: Path, wandb: FakeWandb) -> None:
    for resumed_at in (None, 1):
        opened = open_for(tmp_path, [], resumed_at, wandb="project")
        for row in ROWS:
            opened.write(int(row["step"] or 0), row)
        opened.samples([SAMPLE])
        opened.close(timeout=20)
    assert wandb.logged == PASSED * 2 and wandb.finished == 2
    assert wandb.axis == [("*", "step")] * 2
    first, second = wandb.started
    assert (first["project"], first["name"], first["config"]) == ("project", "name", SETTINGS)
    assert first["id"] == second["id"] and len(first["id"]) == 8
    assert (first["resume"], second["resume"]) == ("never", "allow")
    assert first["settings"].console == "off"
    open_for(tmp_path, [], wandb="project").close(timeout=20)
    assert wandb.started[2]["id"] != first["id"]
    assert not unlisted_files(tmp_path)


def test_wandb_reports_where_the_run_is_and_never_asks_for_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, key, expected in (
        ("online", True, "wandb: there"),
        ("online", False, "wandb login"),
        ("offline", True, f"wandb: offline, in {tmp_path / 'wandb'}"),
    ):
        module = FakeWandb(mode, key)
        monkeypatch.setitem(sys.modules, "wandb", module)
        messages: list[str] = []
        open_for(tmp_path, messages, wandb="project").close(timeout=20)
        assert len(messages) == 1 and expected in messages[0]
        assert len(module.started) == key


def test_mlflow_gets_the_rows_in_order_and_its_run_again(
    tmp_path: Path, mlflow: FakeMLflow
) -> None:
    metrics = [
        ("metric", name.replace("@", "_at_"), value, row["step"])
        for row in PASSED
        for name, value in row.items()
        if name != "step"
    ]
    params = [("param", key, str(value)) for key, value in flatten_dict(SETTINGS, sep=".").items()]
    begins = [("experiment", "tests"), ("run", "7", "name"), *params]
    for resumed_at, head in ((None, begins), (1, [("update", "abc", "RUNNING")])):
        mlflow.calls = []
        messages: list[str] = []
        opened = open_for(tmp_path, messages, resumed_at, mlflow="tests")
        for row in ROWS:
            opened.write(int(row["step"] or 0), row)
        opened.close(timeout=20)
        assert messages == ["mlflow: http://server, experiment tests"]
        assert mlflow.calls == [*head, *metrics, ("end", "abc")]


def test_mlflow_takes_every_key_of_a_config(tmp_path: Path, mlflow: FakeMLflow) -> None:
    settings = Config.load().model_dump(mode="json")
    messages: list[str] = []
    config = LoggingConfig(tensorboard=False, mlflow="tests")
    facts = RunFacts("name", tmp_path, settings, None, messages.append)
    opened = open_trackers(config, facts)
    assert opened is not None
    opened.close(timeout=20)
    params = {call[1]: call[2] for call in mlflow.calls if call[0] == "param"}
    assert len(messages) == 1 and params == {
        key: str(value)[:500] for key, value in flatten_dict(settings, sep=".").items()
    }


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_an_extra_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = LoggingConfig(**{name: "x"})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"pip install 'jaxrl\[{name}\]'"):
        check_trackers(config)
    check_trackers(LoggingConfig())


class Recorder:
    """A tracker that raises or waits where a test wants it."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails, self.closed = fails, False

    def write(self, row: Mapping[str, Any]) -> None:
        self.gate.wait(30)
        if self.fails is not None:
            raise self.fails
        self.rows.append(row)

    def samples(self, samples: Any) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def slow() -> Iterator[Recorder]:
    recorder = Recorder()
    recorder.gate.clear()
    yield recorder
    recorder.gate.set()


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(1)])
def test_a_tracker_that_raises_is_reported_once_and_the_others_continue(
    error: BaseException,
) -> None:
    messages: list[str] = []
    bad, good = Recorder(error), Recorder()
    both = Trackers(
        [
            TrackerThread("bad", lambda: bad, messages.append),
            TrackerThread("good", lambda: good, print),
        ]
    )
    for row in ROWS:
        both.write(int(row["step"] or 0), row)
    both.close(timeout=20)
    assert good.rows == PASSED and good.closed
    assert bad.rows == [] and len(messages) == 1
    assert "logging.bad failed" in messages[0] and type(error).__name__ in messages[0]


def test_a_tracker_that_cannot_start_is_reported_once() -> None:
    messages: list[str] = []

    def make() -> Recorder:
        raise RuntimeError("no server")

    opened = Trackers([TrackerThread("bad", make, messages.append)])
    wait(lambda: bool(messages))
    for row in ROWS:
        opened.write(int(row["step"] or 0), row)
    opened.close(timeout=20)
    assert messages == [
        "logging.bad failed and is dropped, the run continues: RuntimeError: no server"
    ]


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(slow: Recorder) -> None:
    messages: list[str] = []
    good = Recorder()
    both = Trackers(
        [
            TrackerThread("slow", lambda: slow, messages.append),
            TrackerThread("good", lambda: good, print),
        ]
    )
    begin = time.monotonic()
    for step in range(500):
        both.write(step, {"sft/loss": 1.0})
    assert time.monotonic() - begin < 1.0
    begin = time.monotonic()
    both.close(timeout=0.5)
    assert 0.5 <= time.monotonic() - begin < 1.5
    assert len(good.rows) == 500 and good.closed
    assert messages == ["logging.slow has not ended: left behind, 499 entries unsent"]


def test_a_tracker_that_is_too_slow_loses_its_oldest_rows_and_says_how_many(
    slow: Recorder,
) -> None:
    messages: list[str] = []
    thread = TrackerThread("slow", lambda: slow, messages.append, capacity=4)
    opened = Trackers([thread])
    opened.write(0, {})
    wait(thread._waiting.empty)  # row 0 is in the tracker's hands
    for step in range(1, 11):
        opened.write(step, {})
    assert messages == ["logging.slow is too slow: it loses its oldest rows"]
    slow.gate.set()
    opened.close(timeout=20)
    assert [row["step"] for row in slow.rows] == [0, 7, 8, 9, 10]
    assert messages[1:] == ["logging.slow was too slow: it lost 6 entries"]


def test_a_full_disk_drops_tensorboard_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers.import_tensorboard()
    from tensorboardX.event_file_writer import EventsWriter

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventsWriter, "flush", full)
    messages: list[str] = []
    opened = open_for(tmp_path, messages, tensorboard=True)
    for row in ROWS:
        opened.write(int(row["step"] or 0), row)
    opened.close(timeout=20)
    told = [text for text in messages if "No space left" in text]
    assert len(told) == 1 and set(messages) <= {*told, f"tensorboard: {tmp_path / 'tensorboard'}"}


def test_the_end_waits_for_what_was_written_at_the_default() -> None:
    assert trackers.CLOSE_S > 0
    good = Recorder()
    opened = Trackers([TrackerThread("good", lambda: good, print)])
    opened.write(1, {})
    opened.close()
    assert good.rows == [{"step": 1}]
