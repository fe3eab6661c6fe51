"""Where else the numbers go: TensorBoard, and on request wandb and mlflow.

Each tracker has a thread and a bounded queue, so that none can hold up a step or another tracker:
one that raises is reported once and dropped, one that is too slow loses its oldest rows.
"""

from __future__ import annotations

import importlib.util
import re
import secrets
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from textwrap import indent

from jaxrl.config.settings import LoggingConfig
from jaxrl.config.yaml_text import assignments
from jaxrl.errors import UserError
from jaxrl.process.json_types import JsonObject
from jaxrl.process.waiting import waiting
from jaxrl.telemetry.metrics import Sample
from jaxrl.types import Row

Notify = Callable[[str], None]

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
    settings: JsonObject
    """The resolved config, nested."""
    resumed_at: int | None
    """Batches trained before this process, whose later rows are written again; None: a new run."""
    notify: Notify
    """Takes what a user should know, from any thread."""

    def kept_id(self, tracker: str) -> str | None:
        """Returns the tracker's own name of this run, as an earlier process left it."""
        path = self.folder / f"{tracker}.id"
        if self.resumed_at is None or not path.exists():
            return None
        return path.read_text(encoding="utf-8").strip()

    def keep_id(self, tracker: str, value: str) -> None:
        (self.folder / f"{tracker}.id").write_text(value + "\n", encoding="utf-8")


def check_trackers(config: LoggingConfig) -> None:
    """Refuses trackers whose package is not there. Quick: imports nothing."""
    for name in ("wandb", "mlflow"):
        asked = getattr(config, name) is not None
        if asked and name not in sys.modules and importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.{name}={getattr(config, name)} needs the package {name}:"
                f" pip install 'jaxrl[{name}]', or logging.{name}=null"
            )


def open_trackers(config: LoggingConfig, facts: RunFacts) -> Trackers | None:
    """Opens the trackers that ``config`` asks for, each starting up in its thread; None: it asks
    for none."""
    makers: dict[str, Callable[[], Tracker]] = {}
    if config.tensorboard:
        import_tensorboard()
        makers["tensorboard"] = partial(TensorBoard, facts)
    if config.wandb is not None:
        makers["wandb"] = partial(Wandb, facts, config.wandb)
    if config.mlflow is not None:
        makers["mlflow"] = partial(MLflow, facts, config.mlflow)
    threads = [TrackerThread(name, make, facts.notify) for name, make in makers.items()]
    return Trackers(threads) if threads else None


class Trackers:
    """All trackers of a run; no call waits for any of them but ``close``."""

    def __init__(self, threads: Sequence[TrackerThread]) -> None:
        self._threads = threads

    def write(self, step: int, row: Row) -> None:
        """Takes a row of ``metrics.jsonl``; a value of None is not passed on."""
        row = {"step": step} | {name: value for name, value in row.items() if value is not None}
        for thread in self._threads:
            thread.put(lambda tracker: tracker.write(row))

    def samples(self, samples: Sequence[Sample]) -> None:
        """Takes completions of one step."""
        for thread in self._threads if samples else ():
            thread.put(lambda tracker: tracker.samples(samples))

    def close(self, timeout: float = CLOSE_S) -> None:
        """Sends what waits, for at most ``timeout`` seconds in all."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.put(None)
        with waiting("the trackers, which send what is left", most=timeout):
            for thread in self._threads:
                thread.join(end)


class TrackerThread:
    """A tracker's thread and queue. The queue is filled by one thread."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], notify: Notify, capacity: int = QUEUE
    ) -> None:
        self._name, self._make, self._notify, self._capacity = name, make, notify, capacity
        self._waiting: SimpleQueue[Callable[[Tracker], None] | None] = SimpleQueue()
        """Calls of the tracker; None ends them."""
        self._lost = 0
        self._dropped = False
        # A daemon: a tracker that never returns must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tracker:{name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Queues a call, or None after the last one; at once, whatever the tracker is doing."""
        if self._dropped:
            return
        if call is not None and self._waiting.qsize() >= self._capacity:
            with suppress(Empty):
                self._waiting.get_nowait()
                self._lost += 1
                if self._lost == 1:
                    self._notify(f"logging.{self._name} is too slow: it loses its oldest rows")
        self._waiting.put(call)

    def join(self, end: float) -> None:
        """Waits for the tracker's end, until ``end`` (`time.monotonic` seconds) at most."""
        self._thread.join(max(end - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._dropped = True
            unsent = self._drain()
            self._notify(
                f"logging.{self._name} has not ended: left behind, {unsent} entries unsent"
            )
        if self._lost:
            self._notify(f"logging.{self._name} was too slow: it lost {self._lost} entries")

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (call := self._waiting.get()) is not None:
                call(tracker)
                if self._waiting.empty():
                    tracker.flush()
            tracker.close()
        except BaseException as error:  # a package may even raise SystemExit: the run is worth more
            late, self._dropped = self._dropped, True
            self._drain()
            if not late:
                text = str(error).strip() or "no message"
                self._notify(
                    f"logging.{self._name} failed and is dropped, the run continues:"
                    f" {type(error).__name__}: {text}"
                )

    def _drain(self) -> int:
        """Leaves nothing in the queue but its end; returns how many calls waited."""
        calls = 0
        with suppress(Empty):
            while True:
                calls += self._waiting.get_nowait() is not None
        self._waiting.put(None)
        return calls


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


class Tracker(ABC):
    """Made, called and closed in a thread of its own."""

    @abstractmethod
    def write(self, row: Row) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def samples(self, samples: Sequence[Sample]) -> None:  # noqa: B027 (some show no texts)
        pass

    def flush(self) -> None:  # noqa: B027 (others send what was written by themselves)
        pass


class TensorBoard(Tracker):
    """Event files in ``RUN/tensorboard``: scalars by their names, samples and config as text.

    The writer classes of tensorboardX are not used: they have queues and threads of their own,
    which swallow errors.
    """

    def __init__(self, run: RunFacts) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import text

        self._make_event, self._text = Event, text
        folder = run.folder / "tensorboard"
        run.notify(f"tensorboard: {folder}")
        folder.mkdir(exist_ok=True)
        # Readers take the files in the order of their names, which start with the second.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._has_samples = False
        first = 0 if run.resumed_at is None else run.resumed_at + 1
        # Readers drop what earlier files have from this step on.
        self._event(first, session_log=SessionLog(status=SessionLog.START))
        cells = [(key, str(value).replace("|", "\\|")) for key, value in assignments(run.settings)]
        lines = [f"| `{key}` | {value} |".replace("\n", " ") for key, value in cells]
        table = "\n".join(["| key | value |", "|---|---|", *lines])
        self._event(first, summary=self._text("config", table))

    def write(self, row: Row) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=n, simple_value=v) for n, v in row.items() if n != "step"]
        self._event(row["step"], summary=Summary(value=values))

    def samples(self, samples: Sequence[Sample]) -> None:
        if not self._has_samples or samples[0].step % SAMPLES_EVERY == 0:
            texts = "\n\n---\n\n".join(map(_sample_text, samples))
            self._event(samples[0].step, summary=self._text("samples", texts))
            self._has_samples = True

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _event(self, step: object, **content: object) -> None:
        self._file.write_event(self._make_event(wall_time=time.time(), step=step, **content))


class Wandb(Tracker):
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
        offline = f"offline, in {run.folder / 'wandb'}"
        run.notify(f"wandb: {offline if self._run.offline else self._run.url or 'disabled'}")

    def write(self, row: Row) -> None:
        self._run.log(dict(row))

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of the mlflow experiment ``experiment``, on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, run: RunFacts, experiment: str) -> None:
        import mlflow
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient()
        uri = re.sub("://[^/@]*@", "://", mlflow.get_tracking_uri())  # a log has no password
        run.notify(f"mlflow: {uri}, experiment {experiment}")
        kept = run.kept_id("mlflow")
        if kept is not None:
            self._id = kept
            self._client.update_run(kept, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
        run.keep_id("mlflow", self._id)
        params = [Param(k, str(v)[:PARAM_LENGTH]) for k, v in assignments(run.settings)]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE])

    def write(self, row: Row) -> None:
        now, step = int(time.time() * 1000), row["step"]
        named = {name.replace("@", "_at_"): row[name] for name in row if name != "step"}
        values = [self._metric(name, value, now, step) for name, value in named.items()]
        self._client.log_batch(self._id, metrics=values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _sample_text(sample: Sample) -> str:
    """Returns a completion in Markdown; texts are indented, which shows them as they are."""
    answer = "" if sample.answer is None else f", answer {sample.answer}"
    head = f"**{sample.split}**: {sample.tokens} tokens, {sample.summary}{answer}"
    prompt, completion = (
        indent(text, "    ", lambda _: True) for text in (sample.prompt, sample.completion)
    )
    return "\n\n".join([head, prompt, "gave", completion])
