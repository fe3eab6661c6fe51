"""The devices that a run would get under the launcher `ray`, and the way into its cluster.

Nothing here imports ray before `join`: a plan takes none, and what decides about tokens must be in
the environment when Ray is imported.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax

from jaxrl.config.settings import RayConfig
from jaxrl.errors import RunError, UserError, counted
from jaxrl.process.child_python import PACKAGE_HOME
from jaxrl.process.gpu_memory import given_share
from jaxrl.process.json_types import Keywords
from jaxrl.process.waiting import waiting
from jaxrl.runtime import cluster
from jaxrl.runtime.ray import local_cluster
from jaxrl.runtime.ray.local_cluster import in_cluster, leave, leave_at_exit, started_here, usable
from jaxrl.runtime.worker import POLL_S, WorkerState
from jaxrl.sharding import mesh
from jaxrl.sharding.placement import Placement

NAMESPACE = "jaxrl"
LOOK_S = 5.0
"""Longest wait for the states of all workers."""
NODE_S = 60.0
"""Longest wait for a node's description of itself."""
FREE_S = 10.0
"""How long what the cluster has, but is not free, may take to become so."""
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Whether a process shows and asks for a token, and where it takes that from. Ray reads each once
in the life of a process: the mode when it is imported, the token when it first connects."""

_imported_for: Literal["own", "joined"] | None = None
"""The kind of cluster that ray was imported for; None where it was not imported here, or the user
has set RAY_AUTH_MODE."""
_variables: dict[str, str] = {}
"""With which this process connects, and with which a cluster of its own starts."""


def connect(config: RayConfig, placement: Placement) -> mesh.Visible:
    """Joins the cluster that is named; returns the devices that the run would get.

    Where none is, the run has one of its own on this host; `RayWorkerGroup` starts it.

    Raises:
        UserError: no cluster there, or one that is too small, with both tables.
    """
    address = address_of(config)
    if address is not None:
        join(address, placement.n_devices)
    own = address is None and (not in_cluster() or started_here())
    here = [_this_host(placement.n_devices)]
    kind, slots = find_seats(config, placement, (lambda: here) if own else find_hosts)
    note = None
    if kind == "CPU":
        note = f"no accelerator: emulating {counted(placement.n_devices, 'CPU device')}"
    why = "a new cluster on this host"
    if address is not None:
        why = f"ray.address={address}" if config.address else f"RAY_ADDRESS={address}"
    return mesh.Visible(cluster.devices_of(placement, slots, kind), note, "ray", why)


def find_seats(
    config: RayConfig, placement: Placement, look_at: Callable[[], list[cluster.Host]]
) -> tuple[cluster.Kind, tuple[cluster.ProcessSlot, ...]]:
    """Returns the kind of the devices, and the place of each process. A process that ended a moment
    ago gets a while to leave the cluster."""
    end = time.monotonic() + FREE_S
    with waiting("what the Ray cluster has, and that it is free"):
        while True:
            hosts = look_at()
            kinds: tuple[cluster.Kind, ...] = ("GPU", "TPU", "CPU")
            kind = next((k for k in kinds if any(host.has[k] for host in hosts)), kinds[-1])
            most = config.devices_per_worker
            share = partial(cluster.process_slots, placement, kind=kind, most=most)
            try:
                return kind, share(hosts)
            except UserError:
                # This raises what would never fit.
                share([replace(h, free={**h.has, "memory": h.free["memory"]}) for h in hosts])
                if time.monotonic() > end:
                    raise
            time.sleep(POLL_S)


def find_hosts() -> list[cluster.Host]:
    """Returns the nodes that are alive, the head first, with what is free on each."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.exceptions import RayError

    def counts(resources: Mapping[str, float]) -> dict[cluster.Resource, int]:
        return {name: int(resources.get(name, 0)) for name in cluster.RESOURCES}

    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda n: ("node:__internal_head__" not in n["Resources"], n["NodeID"]))
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    free = {n.node_id: n.available_resources() for n in (*status.active_nodes, *status.idle_nodes)}
    asked = {n["NodeID"]: n for n in nodes if n["Resources"].get("GPU")}
    reports: dict[str, Keywords] = {}
    for node, ref in [(n, on_node(n, cluster.ask_driver, given_share())) for n in asked]:
        with suppress(RayError):
            reports[node] = ray.get(ref, timeout=NODE_S)
    return [
        cluster.Host(
            node["NodeID"],
            node.get("NodeName") or node["NodeManagerHostname"],
            node["NodeManagerAddress"],
            counts(node["Resources"]),
            counts(free.get(node["NodeID"], {})),
            **reports.get(node["NodeID"], {}),
        )
        for node in nodes
    ]


def on_node(node: str, function: Callable[..., object], *args: object) -> Any:
    """Runs a function on a node; returns where its result will be."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    options: Keywords = {"scheduling_strategy": there, "runtime_env": python_on(node) or None}
    return task.options(**options).remote(*args)


def python_on(node: str) -> dict[str, str]:
    """Returns the part of a runtime environment without which no worker starts on this host: Ray
    writes the path of its interpreter into a shell's command, which takes one with a space apart.
    """
    quoted = shlex.quote(sys.executable)
    here = node == sys.modules["ray"].get_runtime_context().get_node_id()
    return {"py_executable": quoted} if here and quoted != sys.executable else {}


def address_of(config: RayConfig) -> str | None:
    """Returns the address of the cluster to join; None: the run has one of its own."""
    return config.address or os.environ.get("RAY_ADDRESS") or None


def join(address: str | None, devices: int) -> None:
    """Joins a cluster; with no address one of this host, which is started where there is none.

    Args:
        devices: how many CPU devices a cluster of this host must be able to emulate.

    Raises:
        UserError: no cluster there, or this process cannot show the token that it asks for.
        RunError: Ray did not start on this host.
    """
    if in_cluster():
        now = sys.modules["ray"]
        if not started_here() or address in ("auto", now.get_runtime_context().gcs_address):
            return  # a session that the caller began is used as it is
        # One of its own must have room, and daemons that work.
        if address is None and usable() and now.cluster_resources().get("CPU", 0) >= devices:
            return
    if address is not None:
        _reach(address)
    ray = import_ray(address)
    if in_cluster():
        leave()
    jax.config.update("jax_platforms", "cpu")  # the driver holds no device
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    there = address
    try:
        if address is None:
            here = _this_host(devices).has
            options: Keywords = {"num_cpus": here["CPU"], "num_gpus": here["GPU"]}
            options |= {"resources": {"TPU": here["TPU"]}} if here["TPU"] else {}
            options |= {"include_dashboard": False, "log_to_driver": False}
            what = f"Ray, which starts on this host{local_cluster.resolution()}"
            with waiting(what, most=local_cluster.START_S):
                there = local_cluster.start(options, _variables)
        with _shown_token(), waiting(f"the Ray cluster at {there}{local_cluster.resolution()}"):
            ray.init(
                there,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                job_config=_job(ray),
            )
    except BaseException as error:
        leave(answers=False)
        if isinstance(error, RunError) or not isinstance(error, Exception):
            raise
        reported = str(error).strip().splitlines()[0]
        raise UserError(
            f"no Ray cluster at {address or 'this host'}: {reported}\n"
            "start one with `ray start --head` on its first node, or leave ray.address out; one"
            " that asks for a token takes that of its head: copy ~/.ray/auth_token from there"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray has one of its own for SIGTERM
    leave_at_exit()


class _NoPaths(list[str]):
    def extend(self, paths: Iterable[str]) -> None:
        """Adds nothing."""


def _job(ray: ModuleType) -> Any:
    """Returns the settings of a job whose workers do not look for libraries in the driver's working
    directory first, nor in the folder of its program, as Ray has it. `WorkerServer` looks there
    last. None, which is as Ray has it, where one of the two has this package."""
    if PACKAGE_HOME in (os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))):
        return None
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _NoPaths()
    return job


def import_ray(address: str | None) -> ModuleType:
    """Imports ray for the cluster at an address, or for one of this process (None).

    Ray reads RAY_AUTH_MODE when it is imported, and keeps that as long as the process lives: it
    shows a token to a cluster of this process, and to another where the user has one. An explicit
    RAY_AUTH_MODE is kept as it is. The token of a cluster of this process is in no file, and
    processes that this one starts later do not get it.

    Raises:
        UserError: ray was imported for another kind of cluster.
    """
    global _imported_for, _variables
    joined = address is None and _imported_for != "own" and in_cluster()
    if MODE in os.environ or joined:  # a session of the caller's
        return import_module("ray")
    if "ray" not in sys.modules:
        _imported_for = "own" if address is None else "joined"
        written = Path.home() / ".ray" / "auth_token"  # by `ray get-auth-token --generate`
        if address is None:
            _variables = {MODE: "token", TOKEN: secrets.token_hex(32)}
        elif TOKEN in os.environ or TOKEN_PATH in os.environ or written.is_file():
            _variables = {MODE: "token"}
    elif address is None and _imported_for != "own":
        raise UserError(
            "ray was imported in this process before the run's cluster was started, and reads its"
            " authentication mode only once: import it later, start another process, or set"
            " RAY_AUTH_MODE=token (or =disabled: then any user of this host can use the cluster)"
        )
    elif address is not None and _imported_for == "own":
        raise UserError(
            "this process has started its own Ray cluster, and Ray reads its authentication"
            f" mode only once: join {address} from another process"
        )
    with _shown_token():
        return import_module("ray")


@contextmanager
def _shown_token() -> Iterator[None]:
    before = {name: os.environ.pop(name, None) for name in _variables}
    os.environ.update(_variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def check_address(address: str) -> None:
    """Raises UserError for a text that is no address of a cluster."""
    port = address.rpartition(":")[2]
    if address != "auto" and not (
        re.fullmatch(r"[^\s/]+:\d{1,5}", address) and 0 < int(port) < 65536
    ):
        raise UserError(
            f"{address!r} is not the address of a Ray cluster: write HOST:PORT of its head, as in"
            " 10.0.0.1:6379, or auto for the cluster of this host (ray.address or --address,"
            " or else RAY_ADDRESS)"
        )


def _reach(address: str) -> None:
    """Connects to a head, at once: Ray waits minutes for one that is not there."""
    check_address(address)
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        with waiting(f"the Ray cluster at {address}", most=10):
            socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"the Ray cluster at {address} does not answer: {error.strerror or error}\n"
            "start the head with `ray start --head --port=PORT`, and see that the port is open"
        ) from error


def _this_host(devices: int) -> cluster.Host:
    gpus = mesh.accelerators_here()
    has: dict[cluster.Resource, int] = {
        "CPU": max(os.cpu_count() or 1, min(devices, mesh.MOST_EMULATED)),
        "GPU": gpus,
        "TPU": 0 if gpus else mesh.tpu_chips_here(),
        "memory": mesh.host_available(),
    }
    reported = cluster.ask_driver(given_share()) if gpus else {}
    return cluster.Host("", socket.gethostname(), "127.0.0.1", has, free=has, **reported)


def read_cluster(address: str) -> cluster.Cluster:
    """Returns the nodes of a cluster and the jaxrl workers on it, whosever they are, for `python -m
    jaxrl.devices`.

    Raises:
        UserError: no cluster there.
    """
    join(address, 0)
    import ray
    from ray.exceptions import RayError

    states, asked = list[WorkerState](), list[Any]()
    try:
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["name"].startswith("jaxrl:"):
                with suppress(ValueError):  # it has ended since
                    worker = ray.get_actor(named["name"], namespace=named["namespace"])
                    asked.append(worker.state.remote())
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_S) if asked else ([], [])
        for ref in ready:
            with suppress(RayError):
                states.append(ray.get(ref, timeout=LOOK_S))
        states.sort(key=lambda state: (state.host, state.pid))
        return cluster.Cluster(address, find_hosts(), states)
    finally:
        leave()
