"""Where else the numbers go: TensorBoard, and on request wandb and mlflow.

Each tracker has a thread and a bounded queue, so that none can hold up a step or another tracker:
one that raises is told once and dropped, one that is too slow loses its oldest rows.
"""

from __future__ import annotations

import importlib.util
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from jaxrl.config.schema import LoggingConfig
from jaxrl.errors import UserError
from jaxrl.telemetry.metrics import Sample

Row = Mapping[str, int | float | None]
Told = Callable[[str], None]

QUEUE = 1000
"""Rows that wait for a tracker; beyond them the oldest are lost."""
CLOSE_S = 30.0
"""Seconds that the end of a run waits for what is still to be sent."""
SAMPLES_EVERY = 10
"""Steps between texts; the first that comes is always written."""
PARAMS_AT_ONCE = 100
PARAM_LENGTH = 500
"""What every mlflow server takes: parameters in a request, characters in a value."""


@dataclass(frozen=True)
class RunFacts:
    """What a tracker knows of its run."""

    name: str
    folder: Path
    settings: Mapping[str, Any]
    """The resolved config, nested."""
    resumed_at: int | None
    """Batches trained before this process; None: a new run."""
    told: Told

    def kept_id(self, tracker: str) -> str | None:
        """The tracker's own name of this run, as an earlier process left it."""
        path = self._id_path(tracker)
        if self.resumed_at is None or not path.exists():
            return None
        return path.read_text(encoding="utf-8").strip()

    def keep_id(self, tracker: str, value: str) -> None:
        self._id_path(tracker).write_text(value + "\n", encoding="utf-8")

    def _id_path(self, tracker: str) -> Path:
        return self.folder / f"{tracker}.id"


class Tracker(Protocol):
    """One place for rows; made, called and closed in its own thread."""

    def write(self, row: Row) -> None:
        """A row of ``metrics.jsonl``."""
        ...

    def samples(self, samples: Sequence[Sample]) -> None: ...

    def flush(self) -> None:
        """Called when nothing more waits."""
        ...

    def close(self) -> None: ...


def check_trackers(config: LoggingConfig) -> None:
    """Refuses trackers whose package is not there. Quick: imports nothing."""
    for name in ("wandb", "mlflow"):
        asked = getattr(config, name) is not None
        if asked and name not in sys.modules and importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.{name}={getattr(config, name)} needs the package {name}:"
                f" pip install 'jaxrl[{name}]', or logging.{name}=null"
            )


def open_trackers(
    config: LoggingConfig,
    run_name: str,
    run_dir: Path,
    settings: Mapping[str, Any],
    resumed_at: int | None,
    told: Told,
) -> Trackers:
    """The trackers that ``config`` asks for, each starting up in its thread.

    Args:
        settings: the resolved config as nested dicts, shown by each tracker.
        resumed_at: batches trained before; rows after it are written anew. None: a new run.
        told: takes what a user should know, from any thread.
    """
    check_trackers(config)
    facts = RunFacts(run_name, run_dir, settings, resumed_at, told)
    makers: dict[str, Callable[[], Tracker]] = {}
    if config.tensorboard:
        import_tensorboard()
        makers["tensorboard"] = partial(TensorBoard, facts)
    if config.wandb is not None:
        makers["wandb"] = partial(Wandb, facts, config.wandb)
    if config.mlflow is not None:
        makers["mlflow"] = partial(MLflow, facts, config.mlflow)
    return Trackers([Courier(name, make, told) for name, make in makers.items()])


class Trackers:
    """All trackers of a run; no call waits for any of them but ``close``."""

    def __init__(self, couriers: Sequence[Courier]) -> None:
        self._couriers = couriers

    def write(self, step: int, row: Row) -> None:
        """A row of ``metrics.jsonl``; a value of None is not passed on."""
        row = {"step": step} | {name: value for name, value in row.items() if value is not None}
        for courier in self._couriers:
            courier.put("write", row)

    def samples(self, samples: Sequence[Sample]) -> None:
        """Completions of one step."""
        for courier in self._couriers if samples else ():
            courier.put("samples", tuple(samples))

    def close(self, timeout: float = CLOSE_S) -> None:
        """Sends what waits, for at most ``timeout`` seconds in all."""
        end = time.monotonic() + timeout
        for courier in self._couriers:
            courier.finish()
        for courier in self._couriers:
            courier.join(end)


class Courier:
    """A tracker's thread and queue."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], told: Told, capacity: int = QUEUE
    ) -> None:
        self._name, self._make, self._told, self._capacity = name, make, told, capacity
        self._waiting: deque[tuple[str, Any]] = deque()
        self._changed = threading.Condition()
        self._lost = 0
        self._ending = False
        self._dropped = False
        # A daemon: a tracker that never returns must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tracker:{name}", daemon=True)
        self._thread.start()

    def put(self, method: str, argument: Any) -> None:
        """Queues a call; at once, whatever the tracker is doing."""
        with self._changed:
            if self._dropped:
                return
            full = len(self._waiting) == self._capacity
            if full:
                self._waiting.popleft()
                self._lost += 1
            first = full and self._lost == 1
            self._waiting.append((method, argument))
            self._changed.notify()
        if first:
            self._told(f"logging.{self._name} is too slow: it loses its oldest rows")

    def finish(self) -> None:
        """No more calls will come."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def join(self, end: float) -> None:
        """Waits for the tracker's end, until ``end`` (`time.monotonic` seconds) at most."""
        self._thread.join(max(end - time.monotonic(), 0.0))
        with self._changed:
            late, waiting, lost = self._thread.is_alive(), len(self._waiting), self._lost
            self._dropped = True
            self._waiting.clear()
        if late:
            self._told(f"logging.{self._name} has not ended: left behind, {waiting} entries unsent")
        if lost:
            self._told(f"logging.{self._name} was too slow: it lost {lost} entries")

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (call := self._next()) is not None:
                method, argument = call
                getattr(tracker, method)(argument)
                if not self._waiting:
                    tracker.flush()
            tracker.close()
        except BaseException as error:  # a package may even raise SystemExit: the run is worth more
            with self._changed:
                told = not self._dropped
                self._dropped = True
                self._waiting.clear()
            if told:
                text = str(error).strip() or "no message"
                self._told(
                    f"logging.{self._name} failed and is dropped, the run goes on:"
                    f" {type(error).__name__}: {text}"
                )

    def _next(self) -> tuple[str, Any] | None:
        """The next call; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ending)
            return self._waiting.popleft() if self._waiting else None


def import_tensorboard() -> None:
    """Imports tensorboardX, and never torch with it.

    tensorboardX imports torch where that is installed: seconds and memory for nothing. Called from
    the main thread, before another one could import torch.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # `import torch`: an ImportError
    try:
        import tensorboardX.event_file_writer  # noqa: F401
    finally:
        if hidden:
            del sys.modules["torch"]


class TensorBoard:
    """Event files in ``RUN/tensorboard``: scalars by their names, samples and config as text.

    The writer classes of tensorboardX are not used: they have queues and threads of their own,
    which swallow errors.
    """

    def __init__(self, run: RunFacts) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder = run.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        # Readers take the files in the order of their names, which start with the second.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._texts = 0
        first = 0 if run.resumed_at is None else run.resumed_at + 1
        # Readers drop what earlier files have from this step on.
        start = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(wall_time=time.time(), step=first, session_log=start))
        lines = [f"| `{key}` | {_cell(value)} |" for key, value in flat(run.settings).items()]
        self._text("config", first, "\n".join(["| key | value |", "|---|---|", *lines]))

    def write(self, row: Row) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=n, simple_value=v) for n, v in row.items() if n != "step"]
        self._add(row["step"], values)

    def samples(self, samples: Sequence[Sample]) -> None:
        if self._texts == 0 or samples[0].step % SAMPLES_EVERY == 0:
            self._text("samples", samples[0].step, "\n\n---\n\n".join(map(_sample_text, samples)))
            self._texts += 1

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _text(self, tag: str, step: int, markdown: str) -> None:
        from tensorboardX.summary import text

        self._add(step, text(tag, markdown).value)

    def _add(self, step: Any, values: Sequence[Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._file.write_event(event)


class Wandb:
    """A run of the wandb project ``project``; its server and login are wandb's own settings."""

    def __init__(self, run: RunFacts, project: str) -> None:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("not logged in: run `wandb login` first, or set WANDB_MODE=offline")
        kept = run.kept_id("wandb")
        identity = kept or secrets.token_hex(4)
        run.keep_id("wandb", identity)
        # The terminal is the console's: wandb neither prints nor captures there.
        quiet = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project=project,
            name=run.name,
            id=identity,
            resume="allow" if kept else "never",
            dir=str(run.folder),
            config=dict(run.settings),
            settings=quiet,
        )
        # Our own axis: wandb's counter would refuse the steps that a resumed run takes again.
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            run.told(f"wandb: {self._run.url}")

    def write(self, row: Row) -> None:
        self._run.log(dict(row))

    def samples(self, samples: Sequence[Sample]) -> None:
        """``samples.jsonl`` and TensorBoard have them."""

    def flush(self) -> None:
        """wandb sends by itself."""

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the mlflow experiment ``experiment``, on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, run: RunFacts, experiment: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient()
        kept = run.kept_id("mlflow")
        if kept is not None:
            self._id = kept
            self._client.update_run(kept, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        run.keep_id("mlflow", self._id)
        params = [Param(k, str(v)[:PARAM_LENGTH]) for k, v in flat(run.settings).items()]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE])

    def write(self, row: Row) -> None:
        now, step = int(time.time() * 1000), row["step"]
        # mlflow's names have no "@".
        values = [
            self._metric(name.replace("@", "_at_"), value, now, step)
            for name, value in row.items()
            if name != "step"
        ]
        self._client.log_batch(self._id, metrics=values)

    def samples(self, samples: Sequence[Sample]) -> None:
        """``samples.jsonl`` and TensorBoard have them."""

    def flush(self) -> None:
        """Each row is a request of its own."""

    def close(self) -> None:
        self._client.set_terminated(self._id)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _cell(value: Any) -> str:
    """A value in a cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def _sample_text(sample: Sample) -> str:
    """A completion in Markdown; texts are indented, which shows them as they are."""
    judged = f", {sample.judged}" if sample.judged else ""
    answer = "" if sample.answer is None else f", answer {sample.answer}"
    head = f"**{sample.split}**: {sample.tokens} tokens, {sample.finish_reason}{judged}{answer}"
    return "\n\n".join([head, _quoted(sample.prompt), "gave", _quoted(sample.completion)])


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
