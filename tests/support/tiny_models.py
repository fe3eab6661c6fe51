"""Tiny random checkpoints for tests: their config as transformers writes it, their tensors in
memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from references.tiny import CASES, random_tensors

from jaxrl.formats import weights
from jaxrl.models import decoder, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import frozen_and_trained
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh

REFERENCES = Path(__file__).parent.parent / "references"
NAMES = tuple(CASES)
RAW_CONFIGS: dict[str, dict[str, Any]] = {
    name: json.loads((REFERENCES / "decoders" / f"{name}.json").read_text()) for name in NAMES
}
SAMPLED = DecoderConfig(
    family="llama",
    vocab_size=61,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    tie_embeddings=True,
    max_positions=256,
)
"""The model that the sampling engine's tests sample from."""


@dataclass
class Memory:
    """Tensors in memory, counting what is read."""

    values: dict[str, np.ndarray]
    reads: list[tuple[str, int]] = field(default_factory=list)
    """(name, elements) of each read."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.values[name].shape if name in self.values else None

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        box = self.values[name][index]
        self.reads.append((name, box.size))
        return box

    def file(self, name: str) -> Path:
        return Path("memory")


def tiny_config(name: str) -> DecoderConfig:
    return DecoderConfig.from_hf(RAW_CONFIGS[name])


def tiny_tensors(
    name: str, seed: int | None = None, config: DecoderConfig | None = None
) -> dict[str, np.ndarray]:
    """Those of a case; of another config than its own, of its shapes."""
    case, shapes = CASES[name], weights.tensor_shapes(config or tiny_config(name))
    return random_tensors(shapes, case.seed if seed is None else seed, case.norm)


def tiny_model(
    name: str, mesh: Mesh | None = None, layout: str = "stacked", seed: int | None = None
) -> tuple[Any, Any]:
    """Config and float32 parameters: those of the reference, or of a seed."""
    config, tensors = tiny_config(name), Memory(tiny_tensors(name, seed))
    return config, weights.load_params(tensors, config, mesh, jnp.float32, layout)


def model_of_its_kinds(name: str, layout: str = "stacked") -> tuple[Any, Any]:
    """As `tiny_model`, with one layer of each kind where they are of several: each is compiled by
    itself."""
    config = tiny_config(name)
    kinds = tuple(dict.fromkeys(config.kinds))
    if len(kinds) > 1:
        config = replace(config, n_layers=len(kinds), kinds=kinds)
    tensors = Memory(tiny_tensors(name, config=config))
    return config, weights.load_params(tensors, config, None, jnp.float32, layout)


def model_of_layers(name: str, keep: tuple[int, ...], layout: str = "stacked") -> tuple[Any, Any]:
    """As `tiny_model`, with layers of the kinds of these alone."""
    config = tiny_config(name).with_layers(keep)
    tensors = Memory(tiny_tensors(name, config=config))
    return config, weights.load_params(tensors, config, None, jnp.float32, layout)


def random_params(config: DecoderConfig, seed: int = 0, layout: str = "stacked") -> Any:
    """Float32 parameters on the scale of `init_params`: numpy draws them, so that nothing is
    compiled."""
    draw, declared = np.random.default_rng(seed), config.top | config.parameters

    def leaf(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        names = [part.key for part in path if hasattr(part, "key")]  # without the layer's number
        first = declared["/".join(names[names[0] == "layers" :])].first
        if not callable(first):
            return jnp.asarray(np.full(like.shape, first, np.float32))
        if names[-1] == "log_decay":
            return jnp.asarray(np.zeros(like.shape, np.float32))
        table = names[0] != "layers" and names[-1] != "projection"
        scale = 0.5 if names[-2] == "conv" else 0.02 if table else like.shape[-2] ** -0.5
        return jnp.asarray(draw.normal(0, scale, like.shape).astype(np.float32))

    return jax.tree_util.tree_map_with_path(leaf, parameters.abstract_params(config, layout=layout))


def random_adapters(config: DecoderConfig, seed: int = 0) -> Any:
    """Both factors of adapters, neither of them 0, stacked: numpy draws them."""
    draw = np.random.default_rng(seed)
    _, like = frozen_and_trained(parameters.abstract_params(config))
    return jax.tree.map(lambda x: jnp.asarray(draw.normal(0, 0.15, x.shape), x.dtype), like)


def make_mesh(data: int, fsdp: int, tensor: int, context: int = 1, expert: int = 1) -> Mesh:
    axes = Axes(data, fsdp, tensor, context, expert)
    return role_mesh(jax.devices()[: axes.size], axes)


def loss_and_logits(
    config: Any, params: Any, tokens: Any, mask: Any, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Sum of -log p(token t+1) where tokens t and t+1 are both valid, nats; and the logits [B, T,
    V]."""
    logits = decoder.token_logits(
        config, params, decoder.forward(config, params, tokens, mask, **options)
    )
    logprobs = jax.nn.log_softmax(logits[:, :-1], -1)
    picked = jnp.take_along_axis(logprobs, tokens[:, 1:, None], -1)[..., 0]
    return -jnp.sum(jnp.where(mask[:, 1:] & mask[:, :-1], picked, 0.0)), logits


on_one_device = jax.jit(jax.value_and_grad(loss_and_logits, 1, has_aux=True), static_argnums=0)
"""((loss, logits), gradient) of a config, parameters, tokens and their mask: tests of one family
share its program."""
