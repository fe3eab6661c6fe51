"""The grouper: embeds completions, so that similar ones can be put together."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms.similarity import text_to_embed
from jaxrl.models import bert
from jaxrl.roles.encoder import BATCH_TOKENS, Encoder
from jaxrl.runtime.worker import detail, phase
from jaxrl.sharding.ledger import current
from jaxrl.types import Embedded, Rollout


class Grouper:
    """A text encoder."""

    def __init__(
        self,
        path: str,
        mesh: Mesh,
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
        opened: bool = False,
        offload: bool = False,
    ):
        """
        Args:
            path: a Hugging Face or sentence-transformers folder, or `package:NAME`.
            batch_tokens: tokens of a batch on one device, padding included.
            opened: the prompts end inside a thought (`<think>`).
            offload: the weights are on the host except during `score`.
        """
        with phase(f"loads {path}"):
            encoder = Encoder(path, mesh, dtype, batch_tokens)
        self.mesh, self._encoder, self._opened = mesh, encoder, opened
        millions = bert.n_params(encoder.config) / 1e6
        self._notes: tuple[str, ...] = (
            f"grouper: {path} has {millions:.0f}M parameters, here in {dtype}",
        )
        current().resident(
            "grouper.params",
            lambda: encoder.params,
            lambda params: setattr(encoder, "params", params),
            stages=("grouper.score",),
            offload=offload,
        )

    def score(self, rollout: Rollout) -> Embedded:
        """Embeds the answer of each completion: the text after its last `</think>`."""
        texts = tuple(
            text_to_embed(completion.text, opened=self._opened)
            for completion in rollout.completions
        )
        with phase("embeds"):
            found = self._encoder.embed([text for text in texts if text is not None], detail)
        current().nearly_done()
        vectors = np.zeros((len(texts), found.shape[-1]), np.float32)
        vectors[[i for i, text in enumerate(texts) if text is not None]] = found
        notes, self._notes = self._notes, ()
        return Embedded(vectors, texts, notes)
