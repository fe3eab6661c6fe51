"""The device memory of one call of `Engine.generate`: what the model has read of the prompts that
were prefilled last, of those in rows that slots share, and of the completions in slots or, in their
place, in pages."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    """One preempted sequence of each data shard, and where its keys and values belong."""

    tokens: np.ndarray
    """[X, W] int32: prompt and completion, without the last token."""
    lengths: np.ndarray
    """[X] int32: of these; 1 where a shard has none."""
    rows: np.ndarray
    starts: np.ndarray
    pages: np.ndarray
    """As of `decode.insert_again`."""


class Caches:
    """Three caches, empty at first. Slots and pages are the same array of rows to them: a row is
    all positions of a slot, or one page."""

    def __init__(
        self, config: DecoderConfig, mesh: Mesh | None, params: Params, ledger: Ledger
    ) -> None:
        self._on, self._params, self._ledger = (config, mesh), params, ledger
        self.prefilled: Cache = []
        """Of the prompts that were prefilled last, a row each."""
        self.prompts: Cache = []
        """Of the rows that slots share."""
        self.slots: Cache = []
        """Of a row for each slot, or of pages."""

    @property
    def positions(self) -> int:
        """Returns the positions of each slot, or page."""
        return keys_of(self.slots).shape[decode.POSITIONS] if self.slots else 0

    def _record(self, *more: Cache) -> None:
        self._ledger.put(CACHE, (self.slots, self.prefilled, self.prompts, *more))

    def drop(self) -> None:
        """Frees all."""
        self.slots, self.prefilled, self.prompts = [], [], []
        self._ledger.drop(CACHE)

    def drop_prefilled(self) -> None:
        """Frees what no sample is waiting for any longer."""
        self.prefilled = []
        self._record()

    def prefill(self, tokens: np.ndarray, lengths: np.ndarray, record: bool) -> np.ndarray | None:
        """Prefills prompts [b, P] of these lengths, in place of the last ones. Returns their
        experts, to `record` them."""
        self.prefilled = []
        arguments = (*self._on, self._params, tokens, lengths)
        with self._ledger.running(decode.prefill, *arguments, record=record):
            self.prefilled, experts = decode.prefill(*arguments, record=record)
            jax.block_until_ready(self.prefilled)
        self._record()
        return None if experts is None else np.asarray(experts)

    def insert(self, source: np.ndarray) -> None:
        """Copies prefilled prompts into the rows that slots share (`decode.insert`)."""
        self.prompts = decode.insert(*self._on, self.prompts, self.prefilled, source)

    def read_again(self, unread: Unread) -> None:
        """Prefills preempted sequences, and puts them into pages and rows of prompts."""
        arguments = (*self._on, self._params, unread.tokens, unread.lengths)
        with self._ledger.running(decode.prefill, *arguments, apart=True):
            read, _ = decode.prefill(*arguments, apart=True)
        self._record(read)
        targets = unread.rows, unread.starts, unread.pages
        caches = self.slots, self.prompts, read
        self.slots, self.prompts = decode.insert_again(*self._on, *caches, *targets)
        self._record()

    def extend(self, *arrays: np.ndarray) -> None:
        """Reads further tokens of some slots: `arrays` as of `decode.extend`."""
        arguments = (*self._on, self._params, self.slots, self.prompts, *arrays)
        with self._ledger.running(decode.extend, *arguments):
            self.slots = decode.extend(*arguments)

    def launch(self, *arrays: Any, **static: Any) -> tuple[jax.Array, jax.Array | None]:
        """Starts a launch of decode steps; arguments and results as of `decode.launch`."""
        table, exit_free, knobs, seats, pages = arrays
        prompts = self.prompts, seats
        arguments = *self._on, self._params, self.slots, table, exit_free, knobs, prompts, pages
        with self._ledger.running(decode.launch, *arguments, **static):
            self.slots, drawn, experts = decode.launch(*arguments, **static)
        return drawn, experts

    def fit(self, cache: Cache, rows: int, length: int, kept: np.ndarray | None = None) -> None:
        """Gives one of the caches, in place, so many rows and positions. A decode step reads all
        positions of a row, since a slice of them would be a copy at each step.

        Args:
            kept: the rows that stay, as of `decode.resize`; None: all, and new ones behind them.
        """
        config, mesh = self._on
        if not cache:
            cache += decode.new_cache(*self._on, rows, length, self._params["norm"]["scale"].dtype)
            self._record()
        before = keys_of(cache).shape
        if kept is None and before[decode.BATCH] < rows:
            shards = 1 if mesh is None else row_shards(mesh.shape)
            kept = np.tile(np.arange(rows // shards, dtype=np.int32), shards)  # clipped: any row
        if before[decode.POSITIONS] != length or kept is not None:
            for i, layer in enumerate(cache):  # one at a time, so that only one exists twice
                if not layer or (isinstance(layer, Recurrent) and kept is None):
                    continue  # it has no positions
                arguments = (config, mesh, [layer], length, kept)
                with self._ledger.running(decode.resize, *arguments):
                    cache[i : i + 1] = decode.resize(*arguments)
            self._record()
