"""Roles of one pool take turns: what of a role is not on the device while another one works.

The plan's side of what `sharding.ledger` does in a worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from jaxrl.config.schema import OffloadConfig
from jaxrl.plan.memory import BACKWARD, LOSS, SHARED, STEP, Account, Part

UPDATE = frozenset(f"actor: {phase}" for phase in (BACKWARD, LOSS, STEP))
PUBLISH = frozenset({"actor: publish"})


def take_turns(
    accounts: Mapping[str, Account], roles: Collection[str], offload: OffloadConfig
) -> dict[str, Account]:
    """The accounts of a pool's roles, each part with the moments at which it is away.

    Args:
        roles: of the pool.
    """
    return {
        role: replace(
            accounts[role],
            parts=tuple(
                replace(part, away=_away(role, part, frozenset(roles) - {role}, offload))
                for part in accounts[role].parts
            ),
        )
        for role in roles
        if role in accounts
    }


def _away(role: str, part: Part, others: frozenset[str], offload: OffloadConfig) -> frozenset[str]:
    """Moments, as `plan.memory.peak` has them, or whole roles."""
    if part.phase is not None or part.column not in ("weights", "optimizer"):
        return frozenset()
    if role == "actor":
        if part.column == "optimizer":
            return others | PUBLISH if offload.optimizer else frozenset()
        if part.name.startswith("parameters"):
            kept = {"rollout"} if part.name == SHARED else set()
            return others - kept if offload.params else frozenset()
        return others | PUBLISH if offload.frozen else frozenset()
    if role == "rollout":
        stale = UPDATE if "actor" in others else frozenset()
        return stale | (others - {"actor"} if offload.params else frozenset())
    return others if offload.frozen else frozenset()
