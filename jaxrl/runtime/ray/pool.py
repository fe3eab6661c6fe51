"""The processes of a pool, and what they have reported: the driver's own notes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from jaxrl.runtime.cluster import ProcessSlot
from jaxrl.runtime.server import ProcessInfo, ProcessStatus


@dataclass(eq=False)
class RayPool:
    """The processes that share the devices of one pool."""

    index: int
    name: str
    roles: tuple[str, ...]
    process_slots: tuple[ProcessSlot, ...]
    workers: list[Any] = field(default_factory=list)
    """Ray actors, by rank."""
    info: list[ProcessInfo] = field(default_factory=list)
    """Of the processes that there are; empty while they start."""
    answers: dict[int, ProcessStatus] = field(default_factory=dict)
    """Rank -> what it last said, in `time.monotonic` seconds of the driver."""
    asked: set[int] = field(default_factory=set)
    """Ranks that have been asked, and have not answered."""
    born: float = 0.0
    life: int = 0
    """How many times its processes were restarted."""
    epoch: int = 0
    position: int = 0
    alive: bool = False
    lost_at: float | None = None
    """When a call did not run, nor those after it, for a lost input: they come again, once its
    inputs can be had."""
    doubt: tuple[float, BaseException] | None = None
    """An error that another process's death may have caused, and when it was reported."""
    released: deque[int] = field(default_factory=deque)
    """Results that stay in its processes, and that nobody needs any more."""

    @property
    def trains(self) -> bool:
        return "actor" in self.roles

    def heard(self, rank: int) -> float:
        """When a process last answered; when it was started, if it never has."""
        answer = self.answers.get(rank)
        return self.born if answer is None else answer.at

    def where(self, rank: int) -> str:
        if rank >= len(self.info):
            return f"worker {self.label(rank)} ({self.process_slots[rank].host.name})"
        info = self.info[rank]
        return f"worker {self.label(rank)} ({info.host}, pid {info.pid})"

    def label(self, rank: int) -> str:
        return self.name if len(self.process_slots) == 1 else f"{self.name}.{rank}"
