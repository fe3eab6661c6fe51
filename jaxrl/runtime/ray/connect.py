"""The devices that a run would get under the launcher `ray`, and the way into its cluster.

Nothing here imports ray before `join`: a plan takes none, and what decides about tokens must be in
the environment when Ray is imported.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

import jax

from jaxrl.config.settings import RayConfig
from jaxrl.errors import RunError, UserError, counted
from jaxrl.process.gpu_memory import given_share
from jaxrl.process.json_types import Keywords
from jaxrl.runtime.cluster import (
    Cluster,
    Host,
    Kind,
    ProcessSlot,
    Resource,
    ask_driver,
    devices_of,
    process_slots,
)
from jaxrl.runtime.ray import local_cluster
from jaxrl.runtime.ray.local_cluster import in_cluster, leave, leave_at_exit, started_here, usable
from jaxrl.runtime.worker import POLL_S
from jaxrl.sharding.mesh import (
    MOST_EMULATED,
    Visible,
    accelerators_here,
    host_available,
    tpu_chips_here,
)
from jaxrl.sharding.placement import Placement

NAMESPACE = "jaxrl"
FREE_S = 10.0
"""How long what the cluster has, but is not free, may take to become so."""
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Whether a process shows and asks for a token, and where it takes that from. Ray reads each once
in the life of a process: the mode when it is imported, the token when it first connects."""

_imported_for: Literal["own", "joined"] | None = None
"""The kind of cluster that ray was imported for; None where it was not imported here, or the user
has set RAY_AUTH_MODE."""
_own_token: str | None = None
"""What the clusters that this process starts ask for."""


def connect(config: RayConfig, placement: Placement) -> Visible:
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
    kind, slots = find_seats(config, placement, (lambda: here) if own else _find_hosts)
    note = None
    if kind == "CPU":
        note = f"no accelerator: emulating {counted(placement.n_devices, 'CPU device')}"
    why = "a new cluster on this host"
    if address is not None:
        why = f"ray.address={address}" if config.address else f"RAY_ADDRESS={address}"
    return Visible(devices_of(placement, slots, kind), note, "ray", why)


def find_seats(
    config: RayConfig, placement: Placement, look_at: Callable[[], list[Host]]
) -> tuple[Kind, tuple[ProcessSlot, ...]]:
    """Returns what the devices are, and where each process goes. What ended a moment ago gets a
    while to leave the cluster."""
    end = time.monotonic() + FREE_S
    while True:
        hosts = look_at()
        kinds: tuple[Kind, ...] = ("GPU", "TPU")
        kind: Kind = next((k for k in kinds if any(host.has[k] for host in hosts)), "CPU")
        try:
            return kind, process_slots(placement, hosts, kind, config.devices_per_worker)
        except UserError:
            all_free = [replace(h, free={**h.has, "memory": h.free["memory"]}) for h in hosts]
            process_slots(placement, all_free, kind, config.devices_per_worker)  # raises: never
            if time.monotonic() > end:
                raise
        time.sleep(POLL_S)


def _find_hosts() -> list[Host]:
    from jaxrl.runtime.ray.hosts import find_hosts  # imports ray

    return find_hosts()


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
        if _serves(address, devices):
            return
        leave()
    if address is not None:
        _reach(address)
    ray = import_ray(address)
    environment = _environment(address)
    jax.config.update("jax_platforms", "cpu")  # the driver holds no device
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    there = address
    try:
        if address is None:
            here = _this_host(devices).has
            options: Keywords = {"num_cpus": here["CPU"], "num_gpus": here["GPU"]}
            options |= {"include_dashboard": False, "log_to_driver": False}
            options |= {"resources": {"TPU": here["TPU"]}} if here["TPU"] else {}
            there = local_cluster.start(options, environment)
        with _set(environment):
            ray.init(
                there, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.CRITICAL
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


def import_ray(address: str | None) -> ModuleType:
    """Imports ray for the cluster at an address, or for one of this process (None).

    Ray reads RAY_AUTH_MODE when it is imported, and keeps that as long as the process lives: it
    shows a token to a cluster of this process, and to another where the user has one. An explicit
    RAY_AUTH_MODE is kept as it is.
    """
    global _imported_for
    if "ray" in sys.modules or MODE in os.environ:
        return import_module("ray")
    _imported_for = "own" if address is None else "joined"
    with _set({MODE: "token"} if address is None or _user_has_token() else {}):
        return import_module("ray")


def _user_has_token() -> bool:
    written = Path.home() / ".ray" / "auth_token"  # by `ray get-auth-token --generate`
    return TOKEN in os.environ or TOKEN_PATH in os.environ or written.is_file()


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables in this block."""
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def _environment(address: str | None) -> dict[str, str]:
    """Returns the variables with which this process connects, and with which a cluster of its own
    starts. The token of that is in no file, and processes that this one starts later do not get it.

    Raises:
        UserError: ray was imported for another kind of cluster.
    """
    global _own_token
    if MODE in os.environ:
        return {}
    if address is not None:
        if _imported_for == "own":
            raise UserError(
                "this process has started its own Ray cluster, and Ray reads its authentication"
                " mode only once: join {address} from another process"
            )
        return {MODE: "token"} if _imported_for == "joined" and _user_has_token() else {}
    if _imported_for != "own":
        raise UserError(
            "ray was imported in this process before the run's cluster was started, and reads its"
            " authentication mode only once: import it later, start another process, or set"
            " RAY_AUTH_MODE=token (or =disabled: then any user of this host can use the cluster)"
        )
    _own_token = _own_token or secrets.token_hex(32)
    return {MODE: "token", TOKEN: _own_token}


def _serves(address: str | None, devices: int) -> bool:
    """Returns whether the cluster that this process is in already will do."""
    if address is not None or not started_here():
        return True
    if not usable():
        return False
    return bool(sys.modules["ray"].cluster_resources().get("CPU", 0) >= devices)


def _reach(address: str) -> None:
    """Connects to a head: Ray waits minutes for one that is not there, a connection tells at once.

    Raises:
        UserError: no address, or nobody answers.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"{address!r} is not the address of a Ray cluster: write HOST:PORT of its head, as in"
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
    """Returns this machine as the one node of a cluster; it emulates as many CPU devices as are
    asked."""
    gpus = accelerators_here()
    has: dict[Resource, int] = {
        "CPU": max(os.cpu_count() or 1, min(devices, MOST_EMULATED)),
        "GPU": gpus,
        "TPU": 0 if gpus else tpu_chips_here(),
        "memory": host_available(),
    }
    reported = ask_driver(given_share()) if gpus else {}
    return Host("", socket.gethostname(), "127.0.0.1", has, free=has, **reported)


def cluster(address: str) -> Cluster:
    """Returns the nodes of a cluster and the jaxrl workers on it, for `python -m jaxrl.devices`.

    Raises:
        UserError: no cluster there.
    """
    join(address, 0)
    from jaxrl.runtime.ray.hosts import find_workers

    try:
        return Cluster(address, _find_hosts(), find_workers())
    finally:
        leave()
