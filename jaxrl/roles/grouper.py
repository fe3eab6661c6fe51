"""Texts to vectors: an encoder with its own tokenizer, and the role that embeds completions with
it, so that similar ones can be put together."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import Tokenizer, check_every_token, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.formats.finite import not_finite
from jaxrl.formats.hf import open_weights
from jaxrl.formats.hub import find_folder
from jaxrl.formats.weights import load_encoder
from jaxrl.models import bert
from jaxrl.models.batching import BATCH_TOKENS, Progress, run_batches
from jaxrl.models.bert import EncoderConfig, read_encoder
from jaxrl.models.parameters import Params
from jaxrl.rewards.verifiers import after_thoughts
from jaxrl.roles.declared import Program, Resident, placed
from jaxrl.roles.run_shapes import RunArrays, text_batches
from jaxrl.runtime.worker import detail, phase
from jaxrl.sharding.ledger import current
from jaxrl.types import Embedded, Rollout


class Encoder:
    """A loaded encoder (bge-m3, MiniLM, ...)."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        mesh: Mesh | None = None,
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
    ):
        """
        Args:
            path: a Hugging Face or sentence-transformers folder, `package:NAME`, or a name on a
                hub.
            mesh: None for one device.
            dtype: of weights and computation.
            batch_tokens: as in `run_batches`.

        Raises:
            UserError: nothing there, or nothing that can be loaded.
        """
        self.config, folder = read_encoder(find_folder(path, fetch=True))
        self.tokenizer = tokenizer_of_encoder(self.config, folder)
        self.params = load_encoder(open_weights(folder), self.config, mesh, jnp.dtype(dtype))
        self.mesh, self._batch_tokens = mesh, batch_tokens

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each text, including the special ones; a text that is too long
        loses its end."""
        limit = self.config.max_tokens
        stripped = [text.strip() for text in texts]  # as sentence-transformers does
        ids = self.tokenizer(stripped, truncation=True, max_length=limit, padding=False)
        return ids["input_ids"] if stripped else []

    def embed(self, texts: Sequence[str], progress: Progress | None = None) -> np.ndarray:
        """Computes the embeddings [N, D] float32 of length 1, in the order of the texts."""
        if not texts:
            return np.zeros((0, self.config.d_model), np.float32)
        vectors = run_batches(
            self.tokens(texts),
            encode_batch,
            self.config,
            self.mesh,
            self.params,
            mesh=self.mesh,
            batch_tokens=self._batch_tokens,
            longest=self.config.max_tokens,
            progress=progress,
        )
        if (wrong := ~np.isfinite(vectors).all(-1)).any():
            what = f"the embeddings of {wrong.sum()} of {len(texts)} texts"
            raise not_finite(what, self.params, mesh=self.mesh)
        return vectors


def tokenizer_of_encoder(config: EncoderConfig, folder: Path) -> Tokenizer:
    """Returns the tokenizer in an encoder's folder.

    Raises:
        UserError: there is none, or one with tokens that the embedding has no row for.
    """
    tokenizer: Tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UserError(f"encoder: no tokenizer.json in {folder}")
    check_every_token(tokenizer, config.vocab_size, f"encoder {folder}")
    return tokenizer


class Grouper:
    """The role that embeds completions."""

    def __init__(self, config: Config, mesh: Mesh):
        """Loads the encoder of `grouper.model`; with `offload.frozen` the weights are on the host
        except during `score`."""
        path, dtype = config.grouper.model, config.grouper.compute_dtype
        assert path is not None
        with phase(f"loads {path}"):
            encoder = Encoder(path, mesh, dtype, config.grouper.batch_tokens)
        self._encoder = encoder
        millions = bert.n_params(encoder.config) / 1e6
        self._notes: tuple[str, ...] = (
            f"grouper: {path} has {millions:.0f}M parameters, here in {dtype}",
        )
        for resident in grouper_residents(config):
            resident.keep(encoder)

    def score(self, rollout: Rollout) -> Embedded:
        """Embeds the answer of each completion: the text after its last `</think>`."""
        texts = tuple(after_thoughts(completion.whole_text) for completion in rollout.completions)
        with phase("embeds"):
            embedded = self._encoder.embed([text for text in texts if text is not None], detail)
        current().prefetch_next()
        vectors = np.zeros((len(texts), embedded.shape[-1]), np.float32)
        vectors[[i for i, text in enumerate(texts) if text is not None]] = embedded
        notes, self._notes = self._notes, ()
        return Embedded(vectors, texts, notes)


def embed(path: str | os.PathLike[str], texts: Sequence[str]) -> np.ndarray:
    """Computes embeddings [N, D] float32 of length 1: their inner products are cosine similarities.

    Loads the weights at each call; keep an `Encoder` to embed often.

    Args:
        path: a Hugging Face or sentence-transformers folder, or `package:NAME`.
    """
    return Encoder(path).embed(texts)


@partial(jax.jit, static_argnums=(0, 1))
def encode_batch(
    config: EncoderConfig, mesh: Mesh | None, params: Params, tokens: jax.Array, mask: jax.Array
) -> jax.Array:
    vectors = bert.encode(config, params, tokens, mask, mesh)
    if mesh is None:
        return vectors
    return jax.lax.with_sharding_constraint(vectors, NamedSharding(mesh, PartitionSpec()))


def grouper_residents(config: Config) -> tuple[Resident, ...]:
    """Returns the arrays that the encoder keeps."""
    stages, offload = ("grouper.score",), config.offload.frozen
    return (
        Resident("grouper.params", "parameters", encoder_arrays, stages, "params", offload=offload),
    )


def encoder_arrays(run: RunArrays) -> Params:
    """Returns the encoder's parameters as abstract arrays; {} where a run has none."""
    model, dtype = run.shapes.inputs.grouper, jnp.dtype(run.config.grouper.compute_dtype)
    if model is None:
        return {}
    shapes = {path: jax.ShapeDtypeStruct(s, dtype) for path, s in bert.shapes(model).items()}
    return placed(bert.tree(shapes), bert.encoder_shardings(model, run.meshes["grouper"]))


def grouper_batches(config: Config, model: EncoderConfig) -> Collection[tuple[int, int]]:
    """Returns the `text_batches` of the encoder, of completions with as many tokens as the
    policy's."""
    longest = min(config.max_new_tokens, model.max_tokens)
    return text_batches(longest, config.grouper.batch_tokens)


def grouper_programs(run: RunArrays) -> Iterator[Program]:
    """Yields the encoder of similarity groups on a full batch of the longest texts."""
    model, role = run.shapes.inputs.grouper, "grouper"
    if model is not None:
        mesh, params = run.meshes[role], encoder_arrays(run)
        batch = run.text_batch(role, grouper_batches(run.config, model))
        given = (model, mesh, params, *batch)
        yield Program(role, "embed", encode_batch, given, "grouper.score")
