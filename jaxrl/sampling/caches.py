"""The keys and values that one call of `Engine.generate` has in device memory: of the prompts that
were prefilled last, of those that slots share, and of the slots or, in their place, of pages."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl.models.cached import Cache, keys_of
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Recurrent
from jaxrl.models.parameters import Params
from jaxrl.sampling import decode
from jaxrl.sharding.axes import row_shards
from jaxrl.sharding.ledger import Ledger

CACHE = "KV cache"
"""Name of the caches in the ledger, the account of device memory (`sharding.ledger`)."""


class Unread(NamedTuple):
    """One sequence of each data shard that had to wait, and where its keys and values belong."""

    tokens: np.ndarray
    """[X, W] int32: prompt and completion, without the last token."""
    lengths: np.ndarray
    """[X] int32: of these; 1 where a shard has none."""
    rows: np.ndarray
    starts: np.ndarray
    pages: np.ndarray
    """As of `decode.insert_again`."""


class Caches:
    """All are empty at first, and grow as they are asked to."""

    def __init__(
        self, config: DecoderConfig, mesh: Mesh | None, params: Params, ledger: Ledger
    ) -> None:
        self._on, self._params, self._ledger = (config, mesh), params, ledger
        self.held: Cache = []
        """Of the prompts that were prefilled last, a row each."""
        self.prompts: Cache = []
        """Of the rows that slots share."""
        self.slots: Cache = []
        """Of a row each, or pages."""

    @property
    def positions(self) -> int:
        """Of each slot, or page."""
        return keys_of(self.slots).shape[decode.POSITIONS] if self.slots else 0

    def record(self) -> None:
        """Counts what there is now."""
        self._ledger.put(CACHE, (self.slots, self.held, self.prompts))

    def drop(self) -> None:
        self.slots, self.held, self.prompts = [], [], []
        self._ledger.drop(CACHE)

    def drop_held(self) -> None:
        """Frees `held`."""
        self.held = []
        self.record()

    def hold(self, tokens: np.ndarray, lengths: np.ndarray, record: bool) -> np.ndarray | None:
        """Prefills prompts [b, P] of these lengths, in place of those that are held. Returns their
        experts, to `record` them."""
        self.held = []
        given = (*self._on, self._params, tokens, lengths)
        with self._ledger.running(decode.prefill, *given, record=record):
            self.held, experts = decode.prefill(*given, record=record)
            jax.block_until_ready(self.held)
        self.record()
        return None if experts is None else np.asarray(experts)

    def insert(self, source: np.ndarray) -> None:
        """Copies prompts that are held into slots (`decode.insert`)."""
        self.slots = decode.insert(*self._on, self.slots, self.held, source)

    def insert_prompts(self, source: np.ndarray) -> None:
        """Copies prompts that are held into the rows that slots share."""
        self.prompts = decode.insert(*self._on, self.prompts, self.held, source)

    def read_again(self, of: Unread) -> None:
        """Computes the keys and values of sequences that had to wait, and puts them into pages."""
        given = (*self._on, self._params, of.tokens, of.lengths)
        with self._ledger.running(decode.prefill, *given, apart=True):
            read, _ = decode.prefill(*given, apart=True)
        self._ledger.put(CACHE, (self.slots, self.held, self.prompts, read))
        caches = (*self._on, self.slots, self.prompts, read)
        self.slots, self.prompts = decode.insert_again(*caches, of.rows, of.starts, of.pages)
        self.record()

    def fit(self, rows: int, length: int, kept: np.ndarray | None = None) -> None:
        """Gives slots or pages so many positions, and keeps those of them that are `kept`; there
        are `rows` at first. A decode step reads the whole cache of a slot, since a slice of it
        would be a copy at each step."""
        if not self.slots:
            self.slots = self._new(rows, length)
        if self.positions != length or kept is not None:
            self._resize(self.slots, length, kept)

    def fit_prompts(self, rows: int, length: int, kept: np.ndarray | None = None) -> None:
        """Makes the cache of prompts have so many rows, or those that are `kept`."""
        if not self.prompts:
            self.prompts = self._new(rows, length)
        held = keys_of(self.prompts).shape[decode.BATCH]
        if kept is None and held < rows:
            _, mesh = self._on
            shards = 1 if mesh is None else row_shards(mesh.shape)
            kept = np.tile(np.arange(rows // shards, dtype=np.int32), shards)  # clipped: any row
        if kept is not None:
            self._resize(self.prompts, length, kept)

    def _new(self, rows: int, length: int) -> Cache:
        dtype = self._params["norm"]["scale"].dtype
        cache = decode.new_cache(*self._on, rows, length, dtype)
        self._ledger.put(CACHE, (self.slots, self.held, self.prompts, cache))
        return cache

    def _resize(self, cache: Cache, length: int, kept: np.ndarray | None) -> None:
        """Layers are resized one at a time, so that only one exists twice."""
        for i, layer in enumerate(cache):
            if not layer or (isinstance(layer, Recurrent) and kept is None):
                continue  # it has no positions
            given = (*self._on, [layer], length, kept)
            with self._ledger.running(decode.resize, *given):
                cache[i : i + 1] = decode.resize(*given)
        self.record()
