"""How a role takes weights that the actor has published."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxrl.errors import RunError
from jaxrl.formats.weights import leaves_by_path
from jaxrl.models.parameters import Params
from jaxrl.runtime.worker import phase
from jaxrl.sharding.ledger import current
from jaxrl.sharding.reshard import checksums, reshard
from jaxrl.sharding.shards import Shards
from jaxrl.types import Tree, Weights


class DamagedWeights(RunError):
    """Weights that arrived with other values than the actor sent."""


def received(weights: Weights, shardings: Tree, sent: str) -> tuple[Params, dict[str, float]]:
    """Returns the weights in the receiver's shardings, and the metrics of the transfer. The caller
    has freed the previous version.

    Where arrays arrive damaged from another process, all are read once more: from the object store
    of the receiver's host, which mends what happened on the way from there to the devices.

    Args:
        sent: their name in the ledger while they were on their way.

    Raises:
        DamagedWeights: an array has another checksum than the actor gave it.
    """
    again = any(isinstance(leaf, Shards) for leaf in jax.tree.leaves(weights.params))
    first = 0
    with phase(f"load version {weights.version}"):
        while True:
            params: Params = jax.block_until_ready(reshard(weights.params, shardings))
            damaged = _damaged(weights, params)
            if not damaged:
                break
            if not again:
                raise DamagedWeights(
                    f"version {weights.version} of the weights arrived damaged"
                    f"{', twice' if first else ''}: {len(damaged)} of {len(weights.checksums)}"
                    f" arrays have other checksums than the actor sent, the first {damaged[0]}. The"
                    " memory or the network of a host is at fault: compare those of the actor and"
                    " of the receiver. Checkpoints are not affected; resume the run on other hosts"
                )
            again, first = False, len(damaged)
            del params  # there is no room for two
        current().drop(sent)
    metrics = {"weights/damaged_arrays": float(first)}
    return params, metrics | {"weights/sync_bytes": float(weights.nbytes)}


def _damaged(weights: Weights, params: Params) -> list[str]:
    """Returns the paths of the arrays that have other checksums than the actor sent."""
    arrays = leaves_by_path(params)
    sums = checksums([arrays[path] for path in weights.checksums])
    pairs = zip(weights.checksums.items(), sums, strict=True)
    return [path for (path, made), found in pairs if made != found]


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
