"""The grouper: embeds completions, so that similar ones can be put together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from jax.sharding import Mesh

from jaxrl.models import bert
from jaxrl.models.encoder import BATCH_TOKENS, Encoder
from jaxrl.runtime.worker import detail, phase
from jaxrl.similarity import text_to_embed
from jaxrl.types import Embedded, Rollout


class Grouper:
    """A text encoder that is loaded when it is first used, and kept."""

    def __init__(
        self,
        path: str,
        mesh: Mesh,
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
        opened: bool = False,
    ):
        """
        Args:
            path: a Hugging Face or sentence-transformers folder, or `package:NAME`.
            batch_tokens: tokens of a batch on one device, padding included.
            opened: the prompts end inside a thought (`<think>`).
        """
        self._path, self.mesh, self._dtype = path, mesh, dtype
        self._batch_tokens, self._opened = batch_tokens, opened
        self._notes: list[str] = []

    def score(self, rollout: Rollout) -> Embedded:
        """What each completion answers, embedded: what follows its last `</think>`."""
        texts = tuple(
            text_to_embed(completion.text, opened=self._opened)
            for completion in rollout.completions
        )
        found = self.embed([text for text in texts if text is not None])
        vectors = np.zeros((len(texts), found.shape[-1]), np.float32)
        vectors[[i for i, text in enumerate(texts) if text is not None]] = found
        notes, self._notes = tuple(self._notes), []
        return Embedded(vectors, texts, notes)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """[N, D] float32 of length 1, in the order of the texts."""
        encoder = self._encoder
        with phase("embeds"):
            return encoder.embed(texts, detail)

    @cached_property
    def _encoder(self) -> Encoder:
        start = time.monotonic()
        with phase(f"loads {self._path}"):
            encoder = Encoder(self._path, self.mesh, self._dtype, self._batch_tokens)
        millions = bert.n_params(encoder.config) / 1e6
        self._notes.append(
            f"grouper: loaded {self._path} on first use: {millions:.0f}M parameters,"
            f" {self._dtype}, in {time.monotonic() - start:.1f} s"
        )
        return encoder
