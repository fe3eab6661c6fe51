"""Launcher `ray`: each pool is one or more processes, on the hosts of a Ray cluster.

The driver sends orders and gets reports; results go from process to process through the object
store, and only what the driver itself asks for comes to it. Ray starts processes and carries bytes;
what a call is, in which order calls run, who is late and what is done about it is decided here.

A process that dies or is late is made anew, with all of its pool, where its roles can be: a frozen
model, or a sampler with the weights last sent to it. What had not run is sent again, in order, and
since every call is a function of its arguments and seeds, it gives the same. A pool that trains
cannot: `RunLost` then takes the run back to its newest checkpoint.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl.config import RayConfig
from jaxrl.errors import RunError, UserError
from jaxrl.runtime.cluster import (
    Cluster,
    Host,
    Seat,
    devices_of,
    hosts_table,
    needs_table,
    seats,
)
from jaxrl.runtime.desk import (
    BOUNCED,
    KINDS,
    Answer,
    Desk,
    Facts,
    Here,
    InputLost,
    Order,
    Report,
    look,
)
from jaxrl.runtime.local import POLL_S, Stopped, done_future
from jaxrl.runtime.parcel import unpack
from jaxrl.runtime.tracing import PROFILE
from jaxrl.runtime.worker import (
    DeadlineExceeded,
    RunLost,
    Times,
    WorkerError,
    WorkerState,
    leaves,
    replaced,
)
from jaxrl.sharding.mesh import MOST_EMULATED, Visible, accelerators_here, host_available
from jaxrl.sharding.placement import Placement, device_list

# Ray reads these when it is imported. Devices are made visible per worker by its bundle, and an
# actor without one must not lose what its host has.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    import ray
    from ray._private import worker as ray_worker
    from ray.exceptions import (
        ActorDiedError,
        GetTimeoutError,
        RayError,
        RayTaskError,
    )
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as missing:
    raise UserError(
        f"launcher=ray needs the package ray ({missing}): pip install 'jaxrl[ray]'"
    ) from missing

Log = Callable[[str], None]
NAMESPACE = "jaxrl"
ASK_S = 1.0
"""Seconds between two questions to a worker about its state."""
LOOK_S = 5.0
"""Longest wait for the stacks of a late worker, before the kernel is asked instead."""
FETCH_S = 60.0
"""Longest wait for one bucket of arrays."""
BUNDLE_S = 60.0
"""Longest wait for what the cluster has free already."""
LEAVE_S = 10.0
"""How long what the cluster has, but is not free, may take to become so."""
DOUBT_S = 3.0
"""How long the error of one process of several waits for the news that another has died: who
computes with a process that dies sees an error of its own, and may be heard first."""
TOGETHER_S = 5.0
"""How much later than the first the last process of a pool may tell that an input was lost."""
CALLS = 256
"""Calls that a process takes at once; all but one wait for their turn."""
STATEFUL = {"rollout": "load"}
"""Role -> the call that makes its state: the last one is sent again to a new process."""
STAYS = {("actor", "publish"): "rollout", ("teacher", "score"): "actor"}
"""Call -> the one role that reads its result: in one pool with it, nothing leaves the process."""


def connect(config: RayConfig, placement: Placement) -> Visible:
    """Joins the cluster that is named; tells the devices that the run would get.

    Where none is, the run has one of its own on this host; `RayCrew` starts it, not the plan.

    Raises:
        UserError: no cluster there, or one that is too small, with both tables.
    """
    address = _address(config)
    if address is not None:
        _join(address, placement.n_devices)
    own = address is None and (not ray.is_initialized() or _started_here())
    here = [_this_host(placement.n_devices)]
    on_gpu, places = _seats(config, placement, (lambda: here) if own else _hosts)
    note = None
    if not on_gpu:
        note = f"no accelerator: emulating {placement.n_devices} CPU devices"
    return Visible(devices_of(placement, places, on_gpu), note, "ray", _why(config, address))


def _seats(
    config: RayConfig, placement: Placement, look_at: Callable[[], list[Host]]
) -> tuple[bool, tuple[Seat, ...]]:
    """Whether the devices are GPUs, and where each process goes. What ended a moment ago gets a
    while to leave the cluster.
    """
    end = time.monotonic() + LEAVE_S
    while True:
        hosts = look_at()
        on_gpu = any(host.gpus for host in hosts)
        try:
            return on_gpu, seats(placement, hosts, on_gpu, config.devices_per_worker)
        except UserError:
            all_free = [replace(h, cpus_free=h.cpus, gpus_free=h.gpus) for h in hosts]
            seats(placement, all_free, on_gpu, config.devices_per_worker)  # raises: never
            if time.monotonic() > end:
                raise
        time.sleep(POLL_S)


def _why(config: RayConfig, address: str | None) -> str:
    if config.address:
        return f"ray.address={config.address}"
    return f"RAY_ADDRESS={address}" if address else "a cluster of its own on this host"


def _address(config: RayConfig) -> str | None:
    return config.address or os.environ.get("RAY_ADDRESS") or None


def _join(address: str | None, devices: int) -> None:
    """Joins a cluster; with no address one of this host, which is started where there is none."""
    if ray.is_initialized():
        enough = ray.cluster_resources().get("CPU", 0) >= devices
        if address is not None or enough or not _started_here():
            return
        ray.shutdown()  # it was for a smaller run of this process
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False}
    if address is None:
        here = _this_host(devices)
        options |= {"num_cpus": here.cpus, "num_gpus": here.gpus, "include_dashboard": False}
    else:
        options |= {"address": address}
        _reach(address)
        _show_token()
    ray_worker.print_to_stdstream = lambda *_, **__: None  # what Ray says of deaths, we say
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    jax.config.update("jax_platforms", "cpu")  # the driver holds no device
    try:
        ray.init(logging_level=logging.CRITICAL, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, RayError) as error:
        told = str(error).strip().splitlines()[0]
        raise UserError(
            f"no Ray cluster at {address or 'this host'}: {told}\n"
            "start one with `ray start --head` on its first node, or leave ray.address out; one"
            " that asks for a token takes that of its head: copy ~/.ray/auth_token from there"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray has one of its own for SIGTERM


def _show_token() -> None:
    """`ray start --head` asks for the token in ~/.ray/auth_token where there is one; who joins
    shows it only when told to.
    """
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    with suppress(ImportError):  # before Ray had tokens
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _started_here() -> bool:
    """Whether this process is in a cluster that it started itself."""
    node = ray_worker._global_node
    return node is not None and bool(node.head)


def _reach(address: str) -> None:
    """Ray waits minutes for a head that is not there; a connection tells at once."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"{address!r} is no address of a Ray cluster: write HOST:PORT of its head, as in"
            " 10.0.0.1:6379, or auto for the cluster of this host (ray.address, or else"
            " RAY_ADDRESS)"
        )
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"the Ray cluster at {address} does not answer: {error.strerror or error}\n"
            "start the head with `ray start --head --port=PORT`, and see that the port is open"
        ) from error


def _this_host(devices: int) -> Host:
    """This machine as the one node of a cluster; it emulates as many CPU devices as are asked."""
    cpus, gpus = max(os.cpu_count() or 1, min(devices, MOST_EMULATED)), accelerators_here()
    memory = host_available() or 0
    each = _gpu_memory() if gpus else ()
    name = socket.gethostname()
    return Host("", name, "127.0.0.1", cpus, cpus, gpus, gpus, memory, memory, each)


def _hosts() -> list[Host]:
    """The nodes that are alive, the head first, with what is free on each."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda n: ("node:__internal_head__" not in n["Resources"], n["NodeID"]))
    free = ray._private.state.available_resources_per_node()
    gpu_memory = {n["NodeID"]: _ask_gpus(n["NodeID"]) for n in nodes if n["Resources"].get("GPU")}
    found = []
    for node in nodes:
        has, left = node["Resources"], free.get(node["NodeID"], {})
        found.append(
            Host(
                node["NodeID"],
                node["NodeName"] if node.get("NodeName") else node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                int(has.get("CPU", 0)),
                int(left.get("CPU", 0)),
                int(has.get("GPU", 0)),
                int(left.get("GPU", 0)),
                int(has.get("memory", 0)),
                int(left.get("memory", 0)),
                gpu_memory.get(node["NodeID"], ()),
            )
        )
    return found


def _on(node: str) -> Any:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _ask_gpus(node: str) -> tuple[int, ...]:
    """Bytes of each GPU of a node, as its driver tells."""
    task = ray.remote(num_cpus=0, max_retries=0)(_gpu_memory).options(scheduling_strategy=_on(node))
    try:
        found: tuple[int, ...] = ray.get(task.remote(), timeout=BUNDLE_S)
    except (RayError, GetTimeoutError):
        return ()
    return found


def _gpu_memory() -> tuple[int, ...]:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(int(line) << 20 for line in told.stdout.split())


@dataclass(eq=False)
class RayFuture:
    """The result of one call to a pool."""

    crew: RayCrew
    pool: _Pool
    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    deadline: float
    aside: bool
    number: int
    times: Times = field(default_factory=Times)
    refs: list[Any] = field(default_factory=list)
    """Of the results, one for each process; empty while unsent."""
    reports: dict[int, Report] = field(default_factory=dict)
    bounced: set[int] = field(default_factory=set)
    """Processes where an input was lost, so that it did not run."""
    settled: bool = False
    """Its inputs were made when it was sent: where one is lost, nobody makes it anew."""
    keeps: bool = False
    nbytes: int = 0
    sent: float = 0.0
    tries: int = 0
    """What is told of an earlier one is not heard."""
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    def done(self) -> bool:
        return self._done.is_set()

    def once(self) -> RayFuture:
        return self  # each reader has a copy of its own

    def check(self) -> None:
        if self.crew.failure is not None:
            raise self.crew.failure

    def result(self) -> Any:
        while not self._done.wait(POLL_S):
            self.check()
        if self._error is not None:
            raise self._error
        if self.keeps:
            return None  # of no use outside its pool
        return self.crew.fetch(self)

    def inputs(self) -> list[RayFuture]:
        values = leaves([list(self.args), dict(self.kwargs)])
        return [value for value in values if isinstance(value, RayFuture)]

    def again(self) -> RayFuture:
        """The same call, not sent yet; this one keeps its result."""
        return RayFuture(
            self.crew,
            self.pool,
            self.role,
            self.method,
            self.args,
            self.kwargs,
            self.deadline,
            self.aside,
            self.number,
        )

    def unsend(self) -> None:
        """Forgets that it was sent: its processes are gone, or could not run it."""
        self.refs, self.reports, self.bounced = [], {}, set()
        self.times.started = None
        self.tries += 1

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        if STATEFUL.get(self.role) != self.method:  # never sent again
            self.args, self.kwargs = (), {}
        self._done.set()


@dataclass(frozen=True)
class RayHandle:
    """A role of a pool, as the loop sees it."""

    crew: RayCrew
    pool: _Pool
    role: str

    def call(
        self, method: str, *args: Any, deadline: float, aside: bool = False, **kwargs: Any
    ) -> RayFuture:
        return self.crew.call(self.pool, self.role, method, args, kwargs, deadline, aside)


@dataclass(frozen=True)
class There:
    """An argument that another pool made."""

    number: int
    role: str
    refs: tuple[Any, ...]

    def arrive(self, stopping: Callable[[], bool]) -> Any:
        """Waits in the process that needs it; the driver bounds the wait."""
        waiting = list(self.refs)
        try:
            while waiting:
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
                if stopping():
                    raise InputLost("the run is over")
            parcels = [ray.get(ref, timeout=FETCH_S) for ref in self.refs]
        except RayError as error:
            raise InputLost(f"what {self.role} made is lost: {type(error).__name__}") from error
        if any(parcel is None for parcel in parcels):
            raise InputLost(f"{self.role} did not make it")
        return unpack(parcels, _get)


def _get(place: Any) -> Any:
    if not isinstance(place, ray.ObjectRef):
        return place  # in the parcel itself
    try:
        return ray.get(place, timeout=FETCH_S)
    except RayError as error:
        raise InputLost(f"arrays on their way are lost: {type(error).__name__}") from error


def cluster(address: str) -> Cluster:
    """The nodes of a cluster and the jaxrl workers on it, for `python -m jaxrl.devices`.

    Raises:
        UserError: no cluster there.
    """
    _join(address, 0)
    try:
        hosts = _hosts()
        asked: list[Any] = []
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["name"].startswith("jaxrl:"):
                with suppress(ValueError):  # it has ended since
                    worker = ray.get_actor(named["name"], namespace=named["namespace"])
                    asked.append(worker.state.remote())
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_S) if asked else ([], [])
        found = []
        for ref in ready:
            with suppress(RayError):
                found.append(ray.get(ref, timeout=LOOK_S))
        return Cluster(address, hosts, sorted(found, key=lambda state: (state.host, state.pid)))
    finally:
        ray.shutdown()


def _worker_class(pool: str) -> Any:
    """A Ray actor class whose name, and so its process title, tells the roles."""
    methods = {"run": "calls"} | dict.fromkeys(
        ("facts", "free_port", "join", "open", "answer", "state", "stacks", "stop"), "control"
    )
    body = {
        name: ray.method(concurrency_group=group)(_forward(name)) for name, group in methods.items()
    }
    body["run"] = ray.method(concurrency_group="calls", num_returns=2)(_forward("run"))
    body["__init__"] = _begin
    cls = type(f"jaxrl:{pool}", (), body)
    options: dict[str, Any] = {"concurrency_groups": {"calls": CALLS, "control": 4}}
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, **options)(cls)


def _begin(self: Any, name: str, rank: int, cwd: str) -> None:
    self.desk = Desk(name, rank, cwd, ray.put)


def _forward(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self.desk, name)(*args)

    method.__name__ = name
    return method


@dataclass(eq=False)
class _Pool:
    """The processes that share the devices of one pool."""

    index: int
    name: str
    roles: tuple[str, ...]
    seats: tuple[Seat, ...]
    workers: list[Any] = field(default_factory=list)
    """Ray actors, by rank."""
    facts: list[Facts] = field(default_factory=list)
    """Of the processes that there are; empty while they start."""
    answers: dict[int, tuple[Answer, float]] = field(default_factory=dict)
    """Rank -> what it last said, and `time.monotonic` seconds of the driver then."""
    asked: set[int] = field(default_factory=set)
    """Ranks that have been asked, and have not answered."""
    born: float = 0.0
    life: int = 0
    """How often its processes were made anew."""
    epoch: int = 0
    position: int = 0
    alive: bool = False
    lost_at: float | None = None
    """When a call did not run, nor those after it, for a lost input: they come again, once its
    inputs can be had."""
    doubt: tuple[float, BaseException] | None = None
    """An error that may come of the death of another process of the pool, and when it was told."""
    released: deque[int] = field(default_factory=deque)
    """Results that stay in its processes, and that nobody needs any more."""
    state: RayFuture | None = None
    """The call that made its state, once it has run; where it can be made anew."""

    @property
    def trains(self) -> bool:
        return "actor" in self.roles

    def where(self, rank: int) -> str:
        if rank >= len(self.facts):
            return f"worker {self.label(rank)} ({self.seats[rank].host.name})"
        facts = self.facts[rank]
        return f"worker {self.label(rank)} ({facts.host}, pid {facts.pid})"

    def label(self, rank: int) -> str:
        return self.name if len(self.seats) == 1 else f"{self.name}.{rank}"


class RayCrew:
    """The workers of a run, all of them processes of a Ray cluster."""

    def __init__(
        self,
        config: RayConfig,
        placement: Placement,
        make_roles: Callable[[Placement, int, Sequence[Any]], Mapping[str, Callable[[], Any]]],
        log: Log,
        *,
        startup_s: float,
        roles: Sequence[str],
        lazy: Collection[str] = (),
        spent: int,
    ):
        """
        Args:
            make_roles: (placement, pool, devices) -> role -> what makes it; runs in the worker.
            roles: those of the run; others may be placed.
            lazy: of these, those that are made at their first call.
            spent: how often workers were made anew before, in this run.
        """
        self.config, self.placement, self.log = config, placement, log
        self.failure: BaseException | None = None
        self.restarts = spent
        self._make_roles, self._startup_s, self._lazy = make_roles, startup_s, lazy
        _join(_address(config), placement.n_devices)
        on_gpu, places = _seats(config, placement, _hosts)
        self._on_gpu = on_gpu
        self._pools = [
            _Pool(
                index,
                pool.name,
                tuple(role for role in pool.roles if role in roles),
                tuple(seat for seat in places if seat.pool == index),
            )
            for index, pool in enumerate(placement.pools)
        ]
        self._pools = [pool for pool in self._pools if pool.roles]
        self._lock = threading.RLock()
        self._numbers = 0
        self._calls: dict[int, RayFuture] = {}
        """What has not ended, by number, so in the order in which it was asked for."""
        self._news: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._group: Any = None
        self._threads = [threading.Thread(target=self._tend, name="crew", daemon=True)]

    # What the run asks.

    def start(self) -> None:
        """Processes, devices, roles: side by side, bounded, verified.

        Raises:
            RunLost: a process died or hung meanwhile; another try may do.
        """
        self._group = self._reserve()
        try:
            self._launch(self._pools)
        except _NotStarted as error:
            raise RunLost(str(error)) from error
        for pool in self._pools:
            pool.alive = True
        self._threads[0].start()

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for pool in self._pools for role in pool.roles)

    def handle(self, role: str) -> RayHandle:
        pool = next(pool for pool in self._pools if role in pool.roles)
        return RayHandle(self, pool, role)

    def value(self, value: Any) -> Any:
        return done_future(value)

    def states(self) -> list[WorkerState]:
        return [self._state(pool, rank) for pool in self._pools for rank in range(len(pool.seats))]

    def _state(self, pool: _Pool, rank: int) -> WorkerState:
        facts = pool.facts[rank] if rank < len(pool.facts) else None
        answer, heard = pool.answers.get(rank, (None, pool.born))
        phase, detail, since = "starting", "", pool.born
        if answer is not None:
            phase, detail = answer.phase, answer.detail
            since = heard - (answer.now - answer.since)
        if facts is not None and not pool.alive and answer is not None:
            phase = "died"
        devices = [] if facts is None else [d for d in facts.devices if d[2]]
        return WorkerState(
            pool.label(rank),
            pool.seats[rank].host.name if facts is None else facts.host,
            0 if facts is None else facts.pid,
            pool.roles,
            tuple(f"{d[0]}:{d[2] if '.' not in d[2] else d[1]}" for d in devices),
            phase,
            detail,
            since,
            heard,
            pool.life,
        )

    def peaks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for pool in self._pools:
            answers = [answer for answer, _ in list(pool.answers.values())]
            told = [answer.peaks for answer in answers if answer.peaks is not None]
            if told:
                found |= dict.fromkeys(pool.roles, max(told))
        return found

    def call(
        self,
        pool: _Pool,
        role: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        deadline: float,
        aside: bool,
    ) -> RayFuture:
        with self._lock:
            self._numbers += 1
            future = RayFuture(
                self, pool, role, method, args, kwargs, deadline, aside, self._numbers
            )
            failed = [needed._error for needed in future.inputs() if needed._error is not None]
            if failed:
                raise failed[0]
            if STAYS.get((role, method)) in pool.roles:
                future.keeps = True
                weakref.finalize(future, pool.released.append, future.number)
            self._calls[future.number] = future
            self._flush(pool)
        return future

    def profile(self, folder: Path | None, dtype: str, deadline: float) -> dict[str, RayFuture]:
        return {
            pool.name: self.call(
                pool, pool.roles[0], PROFILE, (folder, dtype), {}, deadline, aside=False
            )
            for pool in self._pools
        }

    def fetch(self, future: RayFuture) -> Any:
        """The value of a call that has ended, here in the driver."""
        waiting = list(future.refs)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
            future.check()
        try:
            return unpack([ray.get(ref, timeout=FETCH_S) for ref in future.refs], _get)
        except RayError as error:
            raise RunLost(
                f"what {future.role}.{future.method} made is lost: {type(error).__name__}"
            ) from error

    def stop(self) -> None:
        """Ends every process: asked first, then killed. Who still waits for a call is told."""
        self._end(Stopped("the run is over"))
        for thread in self._threads:
            if thread.is_alive():
                thread.join(5.0)
        for pool in self._pools:
            for worker in pool.workers:
                with suppress(RayError):
                    worker.stop.remote()
        self._kill(self._pools)
        if self._group is not None:
            with suppress(Exception):
                remove_placement_group(self._group)

    # Starting.

    def _reserve(self) -> Any:
        """A bundle of the cluster for each process; what is free was compared before."""
        on_gpu = self._on_gpu
        kind = "GPU" if on_gpu else "CPU"
        places = [seat for pool in self._pools for seat in pool.seats]
        group = placement_group(
            [{kind: seat.devices} if seat.devices else {"memory": 1} for seat in places],
            bundle_label_selector=[{"ray.io/node-id": seat.host.id} for seat in places],
        )
        end = time.monotonic() + BUNDLE_S
        while not group.wait(POLL_S):
            if time.monotonic() < end:
                continue
            remove_placement_group(group)
            raise UserError(
                f"the cluster did not give the workers their places within {BUNDLE_S:g} s; someone"
                f" else may have taken them\n{needs_table(self.placement, on_gpu)}\n"
                f"{hosts_table(_hosts())}"
            )
        return group

    def _launch(self, pools: Sequence[_Pool]) -> None:
        """New processes for these pools, with their roles."""
        end = time.monotonic() + self._startup_s
        for pool in pools:
            pool.born, pool.answers, pool.asked, pool.facts = time.monotonic(), {}, set(), []
            pool.epoch, pool.position = pool.epoch + 1, 0
            pool.lost_at = pool.doubt = None
            pool.workers = [self._process(pool, rank) for rank in range(len(pool.seats))]
        joining: list[tuple[_Pool, int, Any]] = []
        for pool in pools:
            n = len(pool.seats)
            if n > 1:
                port = self._get(pool, 0, pool.workers[0].free_port.remote(), end)
                where = f"{pool.seats[0].host.address}:{port}"
                joining += [
                    (pool, rank, worker.join.remote(where, n, self._startup_s))
                    for rank, worker in enumerate(pool.workers)
                ]
        self._get_all(joining, end)
        asking = [
            (pool, rank, worker.facts.remote())
            for pool in pools
            for rank, worker in enumerate(pool.workers)
        ]
        told = self._get_all(asking, end)
        for pool in pools:
            pool.facts = [f for (p, _, _), f in zip(asking, told, strict=True) if p is pool]
        self._verify()
        opening = [
            (pool, rank, worker.open.remote())
            for pool in pools
            for rank, worker in enumerate(pool.workers)
        ]
        self._get_all(opening, end)
        starting: list[tuple[_Pool, str, int, Any]] = []
        for pool in pools:
            for role in pool.roles:
                order = partial(self._order_start, pool, role)
                for rank, worker in enumerate(pool.workers):
                    report, _ = worker.run.remote(order())
                    starting.append((pool, role, rank, report))
                pool.position += 1
        reports = self._get_all([(pool, rank, ref) for pool, _, rank, ref in starting], end)
        for (pool, role, rank, _), report in zip(starting, reports, strict=True):
            if report.error is not None:
                raise _raised(report.error)
            if rank == 0:
                seconds = report.finished - (report.started or report.finished)
                ids = device_list(self.placement.roles[role].devices)
                where = f"on devices {ids}" if ids else "without devices"
                self.log(f"{role}: ready in {seconds:.1f} s, {where}; {pool.where(0)}")

    def _process(self, pool: _Pool, rank: int) -> Any:
        seat = pool.seats[rank]
        before = [s for p in self._pools for s in p.seats]
        bundle = next(i for i, s in enumerate(before) if s is seat)
        on_gpu = self._on_gpu
        env = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        env |= (
            {"JAX_PLATFORMS": "cuda,cpu"}
            if on_gpu
            else {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(max(seat.devices, 1)),
                # XLA cuts its work for this many threads: as many as one process with all of the
                # run's devices would have, so that every launcher computes the same bits.
                "NPROC": str(max(os.cpu_count() or 1, self.placement.n_devices)),
            }
        )
        actor = _worker_class(pool.name).options(
            name=f"jaxrl:{pool.label(rank)}:{uuid.uuid4().hex[:12]}",
            num_gpus=seat.devices if on_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
            runtime_env={"env_vars": env},
        )
        return actor.remote(pool.label(rank), rank, os.getcwd())

    def _order_start(self, pool: _Pool, role: str) -> Order:
        make = partial(_make, self._make_roles, self.placement, pool.index, role)
        number, given = -1, (make, role in self._lazy)
        return Order(number, pool.epoch, pool.position, role, "start", given, {}, False, False)

    def _verify(self) -> None:
        """Each process sees as many devices as it was given, and no device serves two."""
        owners: dict[tuple[str, str], str] = {}
        versions: dict[tuple[tuple[str, str], ...], str] = {}
        for pool in self._pools:
            for rank, (seat, facts) in enumerate(zip(pool.seats, pool.facts, strict=False)):
                where = pool.where(rank)
                if seat.devices and facts.local != seat.devices:
                    raise RunError(
                        f"{where} was given {seat.devices} devices, but sees {facts.local}"
                    )
                for _, _, hardware in facts.devices:
                    if hardware:
                        other = owners.setdefault((facts.host, hardware), where)
                        if other != where:
                            raise RunError(
                                f"device {hardware} of {facts.host} is seen by {other} and {where}"
                            )
                versions.setdefault(facts.versions, where)
        if len(versions) > 1:
            told = "; ".join(
                f"{where}: " + ", ".join(f"{name} {version}" for name, version in found)
                for found, where in versions.items()
            )
            raise UserError(f"the nodes of the cluster have different packages: {told}")

    def _get(self, pool: _Pool, rank: int, ref: Any, end: float) -> Any:
        return self._get_all([(pool, rank, ref)], end)[0]

    def _get_all(self, asked: Sequence[tuple[_Pool, int, Any]], end: float) -> list[Any]:
        """Waits for all; the first that has died or failed ends the wait."""
        owner = {ref: (pool, rank) for pool, rank, ref in asked}
        waiting = list(owner)
        while waiting:
            if self._stopped.is_set():
                raise Stopped("the run is over")
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=POLL_S)
            for ref in ready:
                self._value(ref, *owner[ref])
            if waiting and not ready:
                pool, rank = owner[waiting[0]]
                self._check_nodes(pool)
                if time.monotonic() > end:
                    raise _NotStarted(
                        f"{pool.where(rank)} has not started within"
                        f" deadlines.startup={self._startup_s:g} s\nstack of the worker:\n"
                        f"{self._stacks(pool, rank)}"
                    )
        return [self._value(ref, pool, rank) for pool, rank, ref in asked]

    def _value(self, ref: Any, pool: _Pool, rank: int) -> Any:
        try:
            return ray.get(ref, timeout=FETCH_S)
        except RayTaskError as error:
            raise WorkerError(f"{pool.where(rank)} failed while it started:\n{error}") from error
        except RayError as error:
            told = f"{pool.where(rank)} died while it started: {_last_line(error)}"
            raise _NotStarted(told) from error

    def _check_nodes(self, pool: _Pool) -> None:
        """A pool cannot come back to a node that has left the cluster."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for seat in pool.seats:
            if seat.host.id not in alive:
                told = f"the node {seat.host.name} ({seat.host.address}) of {pool.name} is gone"
                raise RunLost(told)

    # Sending.

    def _flush(self, pool: _Pool) -> None:
        """Sends what is unsent, in order, up to the first call whose inputs cannot be had yet.
        With the lock held.
        """
        if not pool.alive or pool.lost_at is not None:
            return
        for future in self._unfinished(pool):
            if future.refs:
                continue
            if all(self._available(needed) for needed in future.inputs()):
                self._send(future)
            elif not future.aside:
                return

    def _unfinished(self, pool: _Pool | None = None) -> list[RayFuture]:
        """In the order in which they were asked for."""
        with self._lock:
            calls = sorted(self._calls.items())
        return [future for _, future in calls if pool in (future.pool, None)]

    def _available(self, future: RayFuture) -> bool:
        return future.done() or (
            bool(future.refs) and future.pool.alive and future.pool.lost_at is None
        )

    def _send(self, future: RayFuture) -> None:
        """To every process of the pool."""
        pool = future.pool
        position = -1
        if not future.aside:
            position, pool.position = pool.position, pool.position + 1
        order = Order(
            number=future.number,
            epoch=pool.epoch,
            position=position,
            role=future.role,
            method=future.method,
            args=tuple(self._wire(list(future.args), pool)),
            kwargs=self._wire(dict(future.kwargs), pool),
            keeps=future.keeps,
            stores=pool.trains and not future.keeps,
        )
        future.unsend()
        future.sent = time.monotonic()
        future.settled = all(needed.done() for needed in future.inputs())
        for rank, worker in enumerate(pool.workers):
            report, value = worker.run.remote(order)
            future.refs.append(value)
            heard = partial(self._hear, "report", pool, future.tries, rank, future)
            report.future().add_done_callback(heard)

    def _wire(self, values: Any, pool: _Pool) -> Any:
        """Arguments with every future as the place of its value."""

        def wire(value: Any) -> Any:
            if isinstance(value, RayFuture):
                if value.pool is pool and value.keeps:
                    return Here(value.number)
                return There(value.number, value.role, tuple(value.refs))
            if hasattr(value, "times") and hasattr(value, "once"):
                return value.result()  # the driver's own, which is there
            return value

        return replaced(values, wire)

    def _hear(self, kind: str, *news: Any) -> None:
        """On a thread of Ray: only notes it."""
        self._news.put((kind, *news))

    # Tending: one thread decides.

    def _tend(self) -> None:
        asked = 0.0
        while not self._stopped.is_set():
            try:
                with suppress(queue.Empty):
                    self._note(*self._news.get(timeout=0.2))
                    while True:
                        self._note(*self._news.get_nowait())
                for pool in self._pools:
                    self._bring_back(pool)
                    with self._lock:
                        self._flush(pool)
                    self._check_doubt(pool)
                if time.monotonic() - asked > ASK_S:
                    asked = time.monotonic()
                    self._ask()
                    self._find_late()
            except (RunError, UserError) as error:
                self._end(error)
            except Exception as error:
                self._end(RunError(f"the crew failed: {type(error).__name__}: {error}"))

    def _end(self, error: BaseException) -> None:
        """Nothing can go on: whoever waits is told."""
        with self._lock:
            self.failure = self.failure or error
            for future in self._calls.values():
                future.finish(self.failure)
            self._calls.clear()
        self._stopped.set()

    def _note(self, kind: str, *news: Any) -> None:
        if kind == "report":
            self._reported(*news)
        elif kind == "answer":
            self._answered(*news)
        elif kind == "made":
            self._made(*news)

    def _answered(self, pool: _Pool, life: int, rank: int, told: Any) -> None:
        if life != pool.life or not pool.alive:
            return
        pool.asked.discard(rank)
        failed = told.exception()
        if isinstance(failed, ActorDiedError):
            self._lost(pool, self._death(pool, rank, failed))
        if failed is not None:
            return
        now = time.monotonic()
        answer: Answer = told.result()
        pool.answers[rank] = (answer, now)
        for number, started in answer.running:
            future = self._calls.get(number)
            if future is not None and future.times.started is None:
                future.times.started = now - (answer.now - started)

    def _reported(self, pool: _Pool, tries: int, rank: int, future: RayFuture, told: Any) -> None:
        if tries != future.tries or future.done():
            return  # of processes that are gone, or of a call that is sent again
        failed = told.exception()
        if failed is not None:
            call = f"{future.role}.{future.method}"
            if isinstance(failed, RayTaskError):
                raise WorkerError(f"{call} failed in {pool.where(rank)}:\n{failed}")
            self._lost(pool, self._death(pool, rank, failed))
            return
        report: Report = told.result()
        now = time.monotonic()
        if report.error is not None and report.error[0] == BOUNCED:
            future.bounced.add(rank)
            if not future.aside:
                pool.lost_at = pool.lost_at or now
            elif len(future.bounced) == len(pool.seats):  # it blocks no other
                self._check_settled(future)
                future.unsend()
            return
        if report.error is not None:
            error = _raised(report.error)
            if future.aside:
                self._finished(future, error)
            elif len(pool.seats) > 1 and isinstance(error, WorkerError):
                pool.doubt = pool.doubt or (now, error)
            else:
                raise error
            return
        future.reports[rank] = report
        if len(future.reports) == len(pool.seats):
            self._finished(future, None)

    def _finished(self, future: RayFuture, error: BaseException | None) -> None:
        pool = future.pool
        if error is not None and any(future in call.inputs() for call in self._unfinished()):
            raise error
        with self._lock:
            if future.reports:
                first = future.reports[min(future.reports)]
                now = time.monotonic()
                took = first.finished - (first.started or first.finished)
                future.times.finished = now
                future.times.started = now - took
                future.times.made_s = first.made_s
                shift = now - first.finished
                future.times.moves = tuple(move.later(shift) for move in first.moves)
                future.nbytes = sum(report.nbytes for report in future.reports.values())
            if STATEFUL.get(future.role) == future.method and not pool.trains:
                pool.state = future
            self._calls.pop(future.number, None)
            future.finish(error)

    def _ask(self) -> None:
        for pool in self._pools:
            if not pool.alive:
                continue
            released: list[int] = []
            while pool.released and not pool.asked:  # all of its processes hear of all
                released.append(pool.released.popleft())
            for rank, worker in enumerate(pool.workers):
                if rank not in pool.asked:
                    pool.asked.add(rank)
                    heard = partial(self._hear, "answer", pool, pool.life, rank)
                    worker.answer.remote(released).future().add_done_callback(heard)

    def _find_late(self) -> None:
        now = time.monotonic()
        for future in self._unfinished():
            pool = future.pool
            if not pool.alive or not future.refs:
                continue
            begun = future.times.started
            if begun is None:
                silent = [
                    rank
                    for rank in range(len(pool.seats))
                    if now - pool.answers.get(rank, (None, pool.born))[1] > future.deadline
                ]
                if not silent or now - future.sent <= future.deadline:
                    continue
                begun = future.sent
            if now - begun > future.deadline:
                self._late(future, now - begun)

    def _late(self, future: RayFuture, elapsed: float) -> None:
        pool = future.pool
        told = [
            f"{future.role}.{future.method} has run for {elapsed:.1f} s;"
            f" its deadline is {future.deadline:g} s."
        ]
        for rank in range(len(pool.seats)):
            if rank not in future.reports:
                told.append(self._diagnosis(pool, rank))
        text = "\n".join(told)
        if future.aside:  # it blocks no other, and who asked for it decides what it means
            self._finished(future, DeadlineExceeded(text))
            return
        if pool.trains or self.restarts >= self.config.max_restarts:
            self._kill([pool])
            raise RunLost(text) if pool.trains else DeadlineExceeded(text)
        self.log(text)
        self._lost(pool, f"{pool.name} was late")

    def _diagnosis(self, pool: _Pool, rank: int) -> str:
        answer, heard = pool.answers.get(rank, (None, pool.born))
        now = time.monotonic()
        stacks = self._stacks(pool, rank)
        if answer is None:
            return f"{pool.where(rank)} has never answered; {stacks}"
        told = f", {answer.detail}" if answer.detail else ""
        since = heard - (answer.now - answer.since)
        silent = f" (it last answered {now - heard:.1f} s ago)" if now - heard > 3 * ASK_S else ""
        return (
            f"{pool.where(rank)} in phase '{answer.phase}' for {now - since:.1f} s{told}{silent}\n"
            f"device memory: {answer.memory}\nstack of the worker:\n{stacks}"
        )

    def _stacks(self, pool: _Pool, rank: int) -> str:
        """From the process itself or, where it does not answer, from its host."""
        try:
            told: str = ray.get(pool.workers[rank].stacks.remote(), timeout=LOOK_S)
            return told
        except (GetTimeoutError, RayError):
            pass
        if rank >= len(pool.facts):
            return "(it has never answered)"
        facts = pool.facts[rank]
        try:
            found = self._there(pool, rank, look, facts.pid, facts.stacks_file)
            return str(_got(found, 2 * LOOK_S))
        except (GetTimeoutError, RayError) as error:
            return f"its host does not answer ({type(error).__name__})"

    def _there(self, pool: _Pool, rank: int, function: Any, *args: Any) -> Any:
        """Runs a function on the host of a process: its result, or where that will be."""
        if pool.facts[rank].host == socket.gethostname():
            return function(*args)
        node = _on(pool.seats[rank].host.id)
        task = ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=node)
        return task.remote(*args)

    # Losing and making anew.

    def _death(self, pool: _Pool, rank: int, error: BaseException) -> str:
        """Which process ended, in which call, and what Ray knows of it."""
        running = [f for f in self._unfinished(pool) if f.refs and not f.aside]
        call = f" in {running[0].role}.{running[0].method}" if running else ""
        return f"{pool.where(rank)} died{call}: {_last_line(error)}"

    def _lost(self, pool: _Pool, why: str) -> None:
        """A process has ended, or does not answer: its pool cannot go on."""
        self._kill([pool])
        if pool.trains:
            raise RunLost(why)
        self._check_nodes(pool)
        most = self.config.max_restarts
        self.restarts += 1
        if self.restarts > most:
            raise RunError(
                f"{why}\nworkers were made anew {most} times in this run (ray.max_restarts): it"
                " gives up"
            )
        self.log(f"{why}; making {pool.name} anew ({self.restarts} of {most})")
        with self._lock:
            pool.life += 1
            for future in self._unfinished(pool):
                future.unsend()
        thread = threading.Thread(
            target=self._make_anew, args=(pool,), name=f"anew:{pool.name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _make_anew(self, pool: _Pool) -> None:
        """On a thread of its own: the others go on meanwhile."""
        error: BaseException | None = None
        try:
            self._launch([pool])
        except BaseException as failed:
            error = failed
        self._news.put(("made", pool, error))

    def _made(self, pool: _Pool, error: BaseException | None) -> None:
        if isinstance(error, _NotStarted):
            self._lost(pool, str(error))
            return
        if error is not None:
            raise error
        with self._lock:
            if pool.state is not None:
                state = pool.state.again()
                self._calls[state.number], pool.state = state, None
            pool.alive = True
        self.log(f"{pool.name} is back after {time.monotonic() - pool.born:.1f} s")

    def _bring_back(self, pool: _Pool) -> None:
        """After a lost input: every call that did not run is unsent again, once all have ended."""
        if pool.lost_at is None or not pool.alive:
            return
        n = len(pool.seats)
        sent = [future for future in self._unfinished(pool) if future.refs and not future.aside]
        if sent and not sent[0].bounced:  # one before is still at work
            pool.lost_at = time.monotonic()
            return
        apart = any(future.bounced and future.reports for future in sent)
        if not apart and any(len(future.bounced) < n for future in sent):
            apart = n > 1 and time.monotonic() - pool.lost_at > TOGETHER_S
            if not apart:
                return
        if apart:
            self._lost(pool, f"only some processes of {pool.name} got the input of a call")
            return
        for future in sent[:1]:
            self._check_settled(future)
        with self._lock:
            pool.epoch, pool.position, pool.lost_at = pool.epoch + 1, 0, None
            for future in sent:
                future.unsend()

    def _check_doubt(self, pool: _Pool) -> None:
        """Raises an error of one process once no other has been heard to die."""
        if pool.doubt is not None and time.monotonic() - pool.doubt[0] > DOUBT_S:
            raise pool.doubt[1]

    def _check_settled(self, future: RayFuture) -> None:
        """Of a call whose input was lost."""
        if future.settled:
            call = f"{future.role}.{future.method}"
            raise RunLost(f"an input of {call} was made, but is lost: its node may be gone")

    def _kill(self, pools: Sequence[_Pool]) -> None:
        asked: list[Any] = []
        for pool in pools:
            pool.alive = False
            for rank, worker in enumerate(pool.workers):
                with suppress(Exception):
                    ray.kill(worker, no_restart=True)
                if rank < len(pool.facts):  # a stopped process does not hear Ray
                    with suppress(Exception):
                        asked.append(self._there(pool, rank, _end_process, pool.facts[rank].pid))
        refs = [ref for ref in asked if isinstance(ref, ray.ObjectRef)]
        if refs:
            with suppress(RayError):
                ray.wait(refs, num_returns=len(refs), timeout=2 * LOOK_S)


class _NotStarted(RunError):
    """A process ended, or hung, while it started."""


def _got(value: Any, timeout: float) -> Any:
    return ray.get(value, timeout=timeout) if isinstance(value, ray.ObjectRef) else value


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


def _end_process(pid: int) -> None:
    """Of a worker; the number may be another's by now."""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        if title.startswith(b"ray::jaxrl:"):
            os.kill(pid, signal.SIGKILL)


def _make(make_roles: Any, placement: Placement, pool: int, role: str) -> Any:
    """In the worker: a role on this pool's devices."""
    return make_roles(placement, pool, jax.devices())[role]()


def _raised(error: tuple[str, str]) -> BaseException:
    kind, text = error
    return KINDS[kind](text)
