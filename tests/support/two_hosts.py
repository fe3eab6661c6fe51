"""Two hosts on one machine: network namespaces with addresses of their own, joined by a switch.

Needs root, `ip` (Debian's iproute2) and a kernel that permits namespaces; `refusal` says what is
missing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST, SECOND = "10.77.0.1", "10.77.0.2"
NAMES = Path("/etc/netns")
TIMEOUT = 120


def refusal() -> str | None:
    """Why there can be no second host here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no command ip: install iproute2"
    name = f"jaxrl-{secrets.token_hex(3)}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces are not permitted here: {done.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=TIMEOUT)


@dataclass
class TwoHosts:
    """A Ray cluster over two hosts; the head is on the first."""

    names: tuple[str, str, str]
    """Namespaces of the first host, the second, and the switch between them."""
    env: dict[str, str]
    cpus: int
    """Of each host: so many devices it emulates."""
    port: int = field(default_factory=lambda: 20_000 + secrets.randbelow(10_000))
    """Of the head. Ray refuses one that a head has on this machine, in whatever namespace."""

    @property
    def address(self) -> str:
        return f"{FIRST}:{self.port}"

    def start(self, *command: str, host: int = 0, **options: Any) -> subprocess.Popen[str]:
        """A process on a host."""
        where = ["ip", "netns", "exec", self.names[host]]
        return subprocess.Popen([*where, *command], env=self.env, text=True, **options)

    def join(self) -> None:
        """Starts Ray on the second host."""
        self._ray(1, f"--address={self.address}", f"--node-ip-address={SECOND}", "second")

    def head(self) -> None:
        head = ("--head", f"--port={self.port}", "--include-dashboard=false", "--no-monitor")
        self._ray(0, *head, f"--node-ip-address={FIRST}", "first")

    def _ray(self, host: int, *options: str) -> None:
        *options, name = options
        ray = str(Path(sys.executable).with_name("ray"))
        # Its daemons keep the pipe: a file instead, so that waiting ends with the command.
        with open(os.devnull, "w") as nowhere:
            command = [ray, "start", *options, f"--num-cpus={self.cpus}", f"--node-name={name}"]
            command.append("--include-log-monitor=false")
            process = self.start(*command, host=host, stdout=nowhere, stderr=nowhere)
            assert process.wait(TIMEOUT) == 0, f"ray start on the {name} host"

    def train(self, *arguments: str) -> subprocess.Popen[str]:
        """A run whose driver is on the first host."""
        command = (sys.executable, "-m", "jaxrl.train", f"ray.address={self.address}", *arguments)
        return self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def cut(self) -> None:
        """Takes the cable of the second host out of the switch."""
        _ip("-n", self.names[2], "link", "set", "port1", "down")

    def mend(self) -> None:
        _ip("-n", self.names[2], "link", "set", "port1", "up")

    def kill(self, host: int) -> None:
        """All processes of a host at once, as where it loses its power."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True
        )
        for pid in map(int, done.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def two_hosts(env: dict[str, str], cpus: int) -> Iterator[TwoHosts]:
    """Two hosts without a cluster yet; all that runs on them is ended at the end."""
    mark = secrets.token_hex(3)
    first, second, switch = (f"jaxrl-{mark}-{name}" for name in ("a", "b", "s"))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    hosts = TwoHosts((first, second, switch), os.environ | env | token, cpus)
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for i, (name, address) in enumerate(((first, FIRST), (second, SECOND))):
            _ip("netns", "add", name)
            _name_host(name, address)
            pair = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "add", f"port{i}", *pair)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "switch")
            _ip("-n", switch, "link", "set", f"port{i}", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        for host, name in enumerate((first, second)):
            if Path("/run/netns", name).exists():
                hosts.kill(host)
        for name in (first, second, switch):
            shutil.rmtree(NAMES / name, ignore_errors=True)
            if Path("/run/netns", name).exists():
                _ip("netns", "del", name)


def _name_host(namespace: str, address: str) -> None:
    """The host's name means its own address there, as gloo needs it: `ip netns exec` puts this file
    in the place of /etc/hosts.
    """
    folder = NAMES / namespace
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
