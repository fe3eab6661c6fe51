"""How a role takes weights that the actor has published."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxrl.formats.weights import leaves_by_path
from jaxrl.models.parameters import Params
from jaxrl.runtime.worker import phase
from jaxrl.sharding.ledger import current
from jaxrl.sharding.reshard import reshard
from jaxrl.types import Tree, Weights


def received(weights: Weights, shardings: Tree, sent: str) -> tuple[Params, dict[str, float]]:
    """Returns the weights in the receiver's shardings, and the metric of the transfer. The caller
    has freed the previous version.

    Args:
        sent: their name in the ledger while they were on their way.
    """
    with phase(f"load version {weights.version}"):
        params: Params = jax.block_until_ready(reshard(weights.params, shardings))
        current().drop(sent)
    return params, {"weights/sync_bytes": float(weights.nbytes)}


def check_fit(weights: Weights, expected: Mapping[str, str], role: str) -> None:
    """Checks names, shapes and dtypes against those of the receiver's model (`described`)."""
    found = described(weights.params)
    for name in {**expected, **found}:
        if found.get(name) != expected.get(name):
            raise RuntimeError(
                f"version {weights.version} does not fit the model of {role}:"
                f" {name} is {found.get(name, 'missing')},"
                f" it must be {expected.get(name, 'left out')}"
            )


def described(params: Tree) -> dict[str, str]:
    """Maps the path of each leaf to its dtype and shape."""
    leaves = leaves_by_path(params)
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves.items()}
