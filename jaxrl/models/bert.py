"""BERT-like text encoders (BERT, XLM-RoBERTa): their config, as a Hugging Face or
sentence-transformers folder says it, and the encoder as a function of a parameter pytree.

Devlin et al. 2019 (arXiv 1810.04805), Conneau et al. 2020 (arXiv 1911.02116): learned absolute
positions, post-norm blocks. Parameters are a nested dict; those of the blocks have a leading [L]
dim and run under `lax.scan`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.errors import UserError
from jaxrl.models.attention import attender, roll_rows
from jaxrl.models.family import Raw, size
from jaxrl.models.kernels import kernel_of, target_on
from jaxrl.models.layers import by_rows
from jaxrl.models.parameters import AXES, Params
from jaxrl.process.json_types import name_file_in_errors, read_json
from jaxrl.sharding.axes import SplitOver, dim_spec
from jaxrl.types import Tree

MOST_LAYERS = 1000
"""Far beyond the deepest encoder."""
Pooling = Literal["cls", "mean"]
MODULES = ("Transformer", "Pooling", "Normalize")
"""Steps of a sentence-transformers model that are run; embeddings are always normalised."""


@dataclass(frozen=True)
class EncoderFamily:
    """What distinguishes the families that share the encoder."""

    after_padding: bool
    """Positions start after the padding token's id, not at 0."""
    pooling: Pooling
    """Where the folder does not say it."""
    prefix: str
    """Before the names of the tensors, in checkpoints that have a head too."""


FAMILIES: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(after_padding=False, pooling="mean", prefix="bert."),
    "xlm-roberta": EncoderFamily(after_padding=True, pooling="cls", prefix="roberta."),
}


@dataclass(frozen=True)
class EncoderConfig:
    """Shapes and constants of one encoder, and how it makes one vector of a text."""

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    positions: int
    """Rows of the table of positions."""
    first_position: int
    """Row of a text's first token."""
    types: int
    """Token types; a text is of type 0."""
    eps: float
    pooling: Pooling
    max_tokens: int
    """Longest text; longer ones lose their end."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def head_dims(self) -> tuple[int, ...]:
        return (self.head_dim,)

    @classmethod
    def from_hf(
        cls, raw: Raw, pooling: Pooling | None = None, max_tokens: int | None = None
    ) -> EncoderConfig:
        """Reads the fields of a `config.json`.

        Args:
            pooling: None for the family's own.
            max_tokens: None for as many as there are positions.

        Raises:
            UserError: a family or a variant that is not supported.
        """
        family = raw.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise UserError(
                f"model_type={family!r} is no supported text encoder; supported:"
                f" {', '.join(FAMILIES)}"
            )
        for key, wanted in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if raw.get(key, wanted) != wanted:
                raise UserError(f"{key}={raw[key]!r} is not supported; supported: {wanted}")
        if raw.get("is_decoder"):
            raise UserError("is_decoder=true is not supported: a text encoder attends both ways")
        d_model, heads = size(raw, "hidden_size"), size(raw, "num_attention_heads")
        if d_model % heads:
            raise UserError(f"hidden_size={d_model} is no multiple of num_attention_heads={heads}")
        positions = size(raw, "max_position_embeddings")
        first = size(raw, "pad_token_id", least=0) + 1 if FAMILIES[family].after_padding else 0
        if first >= positions:
            raise UserError(f"max_position_embeddings={positions} leaves none after the padding's")
        usable = positions - first
        return cls(
            family=family,
            vocab_size=size(raw, "vocab_size"),
            d_model=d_model,
            n_layers=size(raw, "num_hidden_layers", most=MOST_LAYERS),
            n_heads=heads,
            d_ff=size(raw, "intermediate_size"),
            positions=positions,
            first_position=first,
            types=size(raw, "type_vocab_size"),
            eps=float(raw["layer_norm_eps"]),
            pooling=FAMILIES[family].pooling if pooling is None else pooling,
            max_tokens=usable if max_tokens is None else min(usable, max_tokens),
        )


def read_encoder(folder: Path) -> tuple[EncoderConfig, Path]:
    """Reads an encoder's folder: returns its config, and the folder inside it that holds weights
    and tokenizer.

    `modules.json` of sentence-transformers tells which step is in which folder; without it the
    folder is one of transformers.

    Raises:
        UserError: naming the file, where it lacks something or asks for what is not supported.
    """
    inner, pooling = folder, None
    if (folder / "modules.json").is_file():
        inner, pooling = _modules(folder)
    file = inner / "config.json"
    limits = []
    for name, key in (
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        if (inner / name).is_file():
            limits.append(read_json(inner / name).get(key))
    known = [int(n) for n in limits if isinstance(n, int | float) and n > 0]
    raw = read_json(file)
    with name_file_in_errors(file):
        return EncoderConfig.from_hf(raw, pooling, min(known, default=None)), inner


def _modules(folder: Path) -> tuple[Path, Pooling]:
    """Returns the folder of the transformer, and the pooling."""
    file = folder / "modules.json"
    places: dict[str, Path] = {}
    for module in read_json(file, list):
        kind = str(module.get("type")).rsplit(".", 1)[-1] if isinstance(module, dict) else module
        if kind not in MODULES:
            raise UserError(
                f"{file}: a step of type {kind!r} is not supported; supported: {', '.join(MODULES)}"
            )
        places[kind] = folder / str(module.get("path", ""))
    for kind in ("Transformer", "Pooling"):
        if kind not in places:
            raise UserError(f"{file}: no step of type {kind}")
    file = places["Pooling"] / "config.json"
    raw = read_json(file)
    modes = [key for key in raw if key.startswith("pooling_mode_") and raw[key]]
    if modes == ["pooling_mode_cls_token"]:
        return places["Transformer"], "cls"
    if modes == ["pooling_mode_mean_tokens"]:
        return places["Transformer"], "mean"
    raise UserError(
        f"{file}: pooling {' and '.join(modes) or 'of no kind'} is not supported; supported: either"
        " pooling_mode_cls_token or pooling_mode_mean_tokens"
    )


Leaf = tuple[str, tuple[str, ...]]
"""Tensor name in the checkpoint, and the logical axes of our parameter: their sizes are its shape,
and `AXES` says which mesh axis splits each ("width", "positions" and "types" stay whole)."""
TOP: dict[str, Leaf] = {
    "embed/word": ("embeddings.word_embeddings.weight", ("vocab", "embed")),
    "embed/position": ("embeddings.position_embeddings.weight", ("positions", "width")),
    "embed/type": ("embeddings.token_type_embeddings.weight", ("types", "width")),
    "embed/norm/scale": ("embeddings.LayerNorm.weight", ("width",)),
    "embed/norm/bias": ("embeddings.LayerNorm.bias", ("width",)),
}
LAYER: dict[str, Leaf] = {
    "attn/q/kernel": ("attention.self.query.weight", ("embed", "heads")),
    "attn/q/bias": ("attention.self.query.bias", ("heads",)),
    "attn/k/kernel": ("attention.self.key.weight", ("embed", "heads")),
    "attn/k/bias": ("attention.self.key.bias", ("heads",)),
    "attn/v/kernel": ("attention.self.value.weight", ("embed", "heads")),
    "attn/v/bias": ("attention.self.value.bias", ("heads",)),
    "attn/o/kernel": ("attention.output.dense.weight", ("heads", "embed")),
    "attn/o/bias": ("attention.output.dense.bias", ("width",)),
    "attn_norm/scale": ("attention.output.LayerNorm.weight", ("width",)),
    "attn_norm/bias": ("attention.output.LayerNorm.bias", ("width",)),
    "mlp/up/kernel": ("intermediate.dense.weight", ("embed", "mlp")),
    "mlp/up/bias": ("intermediate.dense.bias", ("mlp",)),
    "mlp/down/kernel": ("output.dense.weight", ("mlp", "embed")),
    "mlp/down/bias": ("output.dense.bias", ("width",)),
    "mlp_norm/scale": ("output.LayerNorm.weight", ("width",)),
    "mlp_norm/bias": ("output.LayerNorm.bias", ("width",)),
}
"""Within `encoder.layer.N.`; kernels are stored transposed."""
PATHS = {path: axes for path, (_, axes) in TOP.items()} | {
    f"layers/{path}": ("layers", *axes) for path, (_, axes) in LAYER.items()
}
"""Path of a parameter -> its logical axes."""


def shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Maps the path of every parameter to its shape."""
    sizes = {
        "vocab": config.vocab_size,
        "positions": config.positions,
        "types": config.types,
        "width": config.d_model,
        "embed": config.d_model,
        "heads": config.d_model,
        "mlp": config.d_ff,
        "layers": config.n_layers,
    }
    return {path: tuple(sizes[axis] for axis in axes) for path, axes in PATHS.items()}


def specs(config: EncoderConfig, axis_sizes: Mapping[str, int]) -> dict[str, PartitionSpec]:
    """Maps paths to `PartitionSpec`s; a dim that its mesh axes do not divide stays whole, and heads
    are split between heads only."""
    units = {
        "vocab": config.vocab_size,
        "embed": config.d_model,
        "heads": config.n_heads,
        "mlp": config.d_ff,
    }

    def split(axes: tuple[str, ...]) -> list[SplitOver]:
        return [dim_spec(units[a], AXES[a], axis_sizes) if a in units else None for a in axes]

    return {path: PartitionSpec(*split(axes)) for path, axes in PATHS.items()}


def encoder_shardings(config: EncoderConfig, mesh: Mesh) -> Params:
    """Returns a `NamedSharding` for each parameter."""
    return tree({path: NamedSharding(mesh, s) for path, s in specs(config, mesh.shape).items()})


def tree(flat: Mapping[str, Tree]) -> Params:
    """Nests values by path in a dict."""
    return unflatten_dict(dict(flat), sep="/")


def encode(
    config: EncoderConfig,
    params: Params,
    tokens: jax.Array,
    mask: jax.Array,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Computes one vector of length 1 for each row.

    Args:
        tokens: [N, T] int32, padding on either side.
        mask: [N, T] bool, True at real tokens; padding is never attended to nor pooled.
        mesh: where given, the rows stay sharded over (data, fsdp).

    Returns:
        [N, D] float32; zeros for a row without tokens that is pooled by its mean.
    """
    embed = params["embed"]
    kernel = kernel_of(target_on(mesh), config.head_dim, embed["word"].dtype.name)
    if kernel == "cudnn":
        tokens, mask = (roll_rows(x, jnp.argmax(mask, -1)) for x in (tokens, mask))
    attend = attender(kernel, mask, mesh, causal=False)
    positions = jnp.maximum(jnp.cumsum(mask, -1) - 1, 0) + config.first_position
    words = embed["word"]
    if mesh is not None:  # D is gathered: a lookup split both ways is replicated
        spec = PartitionSpec(specs(config, mesh.shape)["embed/word"][0], None)
        words = jax.lax.with_sharding_constraint(words, NamedSharding(mesh, spec))
    x = words[tokens] + embed["position"][positions]
    x = by_rows(_norm(x + embed["type"][0][None, None], embed["norm"], config.eps), mesh)
    heads = (*tokens.shape, config.n_heads, -1)

    def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        q, k, v = (_dense(x, p["attn"][name]).reshape(heads) for name in "qkv")
        attended = attend(q, k, v).reshape(x.shape)
        x = _norm(x + _dense(attended, p["attn"]["o"]), p["attn_norm"], config.eps)
        wide = jax.nn.gelu(_dense(x, p["mlp"]["up"]), approximate=False)
        x = _norm(x + _dense(wide, p["mlp"]["down"]), p["mlp_norm"], config.eps)
        return by_rows(x, mesh), None

    x, _ = jax.lax.scan(block, x, params["layers"])
    if config.pooling == "cls":
        first = jnp.argmax(mask, -1)
        pooled = jnp.take_along_axis(x, first[:, None, None], 1)[:, 0].astype(jnp.float32)
    else:
        kept = jnp.where(mask[..., None], x.astype(jnp.float32), 0.0)
        pooled = kept.sum(1) / jnp.maximum(mask.sum(-1, keepdims=True), 1)
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


def _dense(x: jax.Array, p: Params) -> jax.Array:
    return x @ p["kernel"] + p["bias"][None, None]


def _norm(x: jax.Array, p: Params, eps: float) -> jax.Array:
    """Applies LayerNorm in float32 (Ba et al. 2016, arXiv 1607.06450)."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, -1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    scale, bias = (p[name].astype(jnp.float32)[None, None] for name in ("scale", "bias"))
    return (x32 * scale + bias).astype(x.dtype)


def n_params(config: EncoderConfig) -> int:
    """Counts the parameters that are loaded; a pooler head is not."""
    return sum(math.prod(shape) for shape in shapes(config).values())
