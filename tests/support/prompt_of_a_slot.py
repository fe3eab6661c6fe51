"""Slots and the rows of their prompts, for tests without an engine."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import flash_decode, split_k
from jaxrl.models.decoder import Cache, Shared
from jaxrl.models.delta import Recurrent
from jaxrl.models.shared_prompts import Seats, shared_attender


def a_seat_each(lengths: Any, shards: int = 1) -> Seats:
    """Seats slot i at row i, whose prompt has `lengths[i]` keys."""
    slots = np.tile(np.arange(len(lengths) // shards, dtype=np.int32), shards)
    table, lengths, slots = map(jnp.asarray, (slots[:, None], np.int32(lengths), slots))
    return Seats(table, lengths, slots)


def seats_of(prompt_of: np.ndarray, lengths: np.ndarray, shards: int, free: int = 1) -> Seats:
    """Of slots divided among devices, each of which has all prompts and `free` seats besides."""
    each = len(prompt_of) // shards
    most = max(np.bincount(part).max() for part in prompt_of.reshape(shards, each)) + free
    slots = np.full((shards, len(lengths), most), -1, np.int32)
    places = np.zeros(len(prompt_of), np.int32)
    for slot, prompt in enumerate(prompt_of):
        shard, own = divmod(slot, each)
        seat = int((slots[shard, prompt] >= 0).sum())
        slots[shard, prompt, seat], places[slot] = own, prompt * most + seat
    return Seats(slots.reshape(-1, most), np.tile(lengths, shards), places)


def behind(
    prompts: Cache, lengths: Any, positions: int, prompt_of: np.ndarray | None = None
) -> tuple[Cache, Shared]:
    """Makes the cache of slots that begin behind prefilled prompts, of `positions` positions: the
    slots of layers with a state have that of their prompt.

    Args:
        prompt_of: the prompt of each slot; None: a slot for each.
    """
    rows = np.arange(len(lengths)) if prompt_of is None else prompt_of

    def begin(entry: Any) -> Any:
        if isinstance(entry, Recurrent):
            return jax.tree.map(lambda x: np.asarray(x)[rows], entry)
        sizes = ((len(rows), x.shape[1], positions, x.shape[3]) for x in entry)
        return tuple(jnp.asarray(np.zeros(n, x.dtype)) for n, x in zip(sizes, entry, strict=True))

    if prompt_of is None:
        seats = a_seat_each(lengths)
    else:
        seats = Seats(*map(jnp.asarray, seats_of(rows, np.int32(lengths), 1)))
    starts = jnp.asarray(np.int32(lengths)[rows])
    return [begin(entry) for entry in prompts], Shared(prompts, seats, starts)


def interpret_step_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the kernels of a decode step run anywhere."""
    for module, name in ((split_k, "attend_parts"), (flash_decode, "attend_cache")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), interpret=True))


def attend_alone(kernel: Any, at: np.ndarray, window: int | None = None) -> Any:
    """Returns the attention of slots whose prompts have no key: q [B,1,N,H] at positions `at` to
    k, v [B,KV,S,H]."""
    seats = a_seat_each(np.zeros_like(at))
    attend = shared_attender(kernel, jnp.asarray(at), jnp.asarray(at), seats, None, window)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *sinks: jax.Array) -> jax.Array:
        empty = jnp.zeros_like(k[:, :, :64])
        return attend(q, (k, empty), (v, empty), *sinks)

    return run
