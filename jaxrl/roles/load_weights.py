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
from jaxrl.types import Tree, Weights


class DamagedWeights(RunError):
    """Weights that arrived with other values than the actor sent."""


def received(weights: Weights, shardings: Tree, sent: str) -> tuple[Params, dict[str, float]]:
    """Returns the weights in the receiver's shardings, and the metrics of the transfer. The caller
    has freed the previous version. Arrays that arrive damaged are asked for once more.

    Args:
        sent: their name in the ledger while they were on their way.

    Raises:
        DamagedWeights: an array has another checksum than the actor gave it.
    """
    damaged: list[str] = []
    with phase(f"load version {weights.version}"):
        while True:
            params: Params = jax.block_until_ready(reshard(weights.params, shardings))
            arrays = leaves_by_path(params)
            sums = checksums([arrays[path] for path in weights.checksums])
            pairs = zip(weights.checksums.items(), sums, strict=True)
            before, damaged = damaged, [path for (path, made), found in pairs if made != found]
            if not damaged:
                break
            if before:
                raise DamagedWeights(
                    f"version {weights.version} of the weights arrived damaged, twice:"
                    f" {len(damaged)} of {len(sums)} arrays have other checksums than the actor"
                    f" sent, the first {damaged[0]}. The memory or the network of a host is at"
                    " fault: compare those of the actor and of the receiver. Checkpoints are not"
                    " affected; resume the run on other hosts"
                )
        current().drop(sent)
    metrics = {"weights/damaged_arrays": float(len(before))}
    return params, metrics | {"weights/sync_bytes": float(weights.nbytes)}


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
