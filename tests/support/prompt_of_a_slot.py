"""Slots that each have a row of their own for their prompt, for tests without an engine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.decoder import Cache, Shared
from jaxrl.models.delta import Recurrent
from jaxrl.models.shared_prompts import Seats, shared_attender


def a_seat_each(lengths: Any, shards: int = 1) -> Seats:
    """Seats slot i at row i, whose prompt has `lengths[i]` keys."""
    slots = np.tile(np.arange(len(lengths) // shards, dtype=np.int32), shards)
    table, lengths, slots = map(jnp.asarray, (slots[:, None], np.int32(lengths), slots))
    return Seats(table, lengths, slots)


def behind(prompts: Cache, lengths: Any, positions: int) -> tuple[Cache, Shared]:
    """Makes the cache of slots that begin behind prefilled prompts, of `positions` positions: the
    slots of layers with a state have that of their prompt."""

    def begin(entry: Any) -> Any:
        if isinstance(entry, Recurrent):
            return entry
        return jax.tree.map(
            lambda x: jnp.asarray(np.zeros((*x.shape[:2], positions, x.shape[3]), x.dtype)), entry
        )

    seats = a_seat_each(lengths)
    return [begin(entry) for entry in prompts], Shared(prompts, seats, seats.lengths)


def attend_alone(kernel: Any, at: np.ndarray, window: int | None = None) -> Any:
    """Returns the attention of slots whose prompts have no key: q [B,1,N,H] at positions `at` to
    k, v [B,KV,S,H]."""
    seats = a_seat_each(np.zeros_like(at))
    attend = shared_attender(kernel, jnp.asarray(at), jnp.asarray(at), seats, None, window)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *sinks: jax.Array) -> jax.Array:
        empty = jnp.zeros_like(k[:, :, :64])
        return attend(q, (k, empty), (v, empty), *sinks)

    return run
