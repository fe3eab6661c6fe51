"""What a decoder is made of, and how a Hugging Face `config.json` says it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax

from jaxrl.errors import UserError, short
from jaxrl.models import layers
from jaxrl.models.delta import Delta, delta_parameters
from jaxrl.models.experts import Experts, expert_parameters
from jaxrl.models.families import FAMILIES
from jaxrl.models.family import (
    FULL,
    MOST,
    OMITTED,
    SLIDING,
    BlockKind,
    LayerKind,
    Norms,
    Raw,
    flag,
    positive_number,
    read_windows,
    size,
    stated_once,
    value_or,
)
from jaxrl.models.lora import TARGETS, Lora, Quantisation, numbers_per_code, quantisation_block
from jaxrl.models.rope import (
    DynamicRope,
    LongRope,
    RopeScaling,
    check_ropes,
    positions_of,
    read_rope,
    write_rope,
)
from jaxrl.process.json_types import JsonObject

MOST_LAYERS, MOST_EXPERTS, MOST_PARAMS = 10_000, 1_000_000, 10**14
"""The most layers, experts of all layers together, and parameters of a model, far beyond those of
any model. Without a bound one digit too many in a `config.json` takes minutes and all memory before
anything is said."""
ROPES = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
"""Fields of rotary positions."""
NORMS: dict[Norms, dict[str, str]] = {
    "before": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "around": {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
"""Path of each norm of a block -> its tensor."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Their tensors."""
KERNEL = re.compile(r"(?!.*/experts/).*/kernel")
"""Paths of kernels that each token passes."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of one decoder-only language model."""

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    """Width of the MLP; of each expert where there are experts."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dims: int | None = None
    """How many dims of each head are rotated, the first ones; None: all."""
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    max_positions: int = 2048
    sequence_length: int | None = None
    """Tokens of the longest sequence that is computed, where the rotary positions depend on it
    (`for_length`); None: of the longest one in each call."""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """What the model's authors recommend in `generation_config.json`, without its token ids."""
    numbers: tuple[tuple[str, float], ...] = ()
    """What the functions of a family read, by name (`number`); `Family.read` may give a mapping."""
    score_dim: float | None = None
    """Scores of attention are divided by its square root; None: by that of `head_dim`."""
    layer_inputs: int = 0
    """Dims of what each layer reads of a token beside the residual; 0: no layer does."""
    kinds: tuple[LayerKind, ...] = (LayerKind(),)
    """The kind of each layer; one kind where all layers are alike."""
    experts: Experts | None = None
    """In place of the MLP; None: there are none."""
    delta: Delta | None = None
    """Sizes of the layers whose kind `recurs`; None: there are none."""
    final_softcap: float | None = None
    """c of logits c tanh(z / c), z being `hidden @ head.T`; None: the logits are z."""
    lora: Lora | None = None
    """The adapters that are trained in place of the weights. Not in `config.json`."""
    quantised: Quantisation | None = None
    """How the kernels of `quantisable` are held; None: as all other weights. Not in
    `config.json`."""
    reduce_in_float32: bool = False
    """Whether devices add their parts of a projection's gradient in float32 (`layers.product_of`).
    Not in `config.json`."""
    block: BlockKind = field(init=False, repr=False, compare=False)
    """What the family's blocks are made of."""
    n_recurrent: int = field(init=False, repr=False, compare=False)
    """How many layers have a state."""
    lenders: tuple[LayerKind, ...] = field(init=False, repr=False, compare=False)
    """The kinds of the layers whose keys and values others read."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UserError(_unknown(self.family))
        if isinstance(self.numbers, Mapping):
            object.__setattr__(self, "numbers", tuple(sorted(self.numbers.items())))
        if len(set(self.kinds)) == 1:
            object.__setattr__(self, "kinds", self.kinds[:1])
        elif len(self.kinds) != self.n_layers:
            raise UserError(f"{len(self.kinds)} kinds of layers for n_layers={self.n_layers}")
        recurrent = sum(kind.recurs for kind in self.kinds) * (self.n_layers // len(self.kinds))
        lenders = tuple(dict.fromkeys(kind.lender for kind in self.kinds if kind.borrows))
        object.__setattr__(self, "block", FAMILIES[self.family].block)
        object.__setattr__(self, "n_recurrent", recurrent)
        object.__setattr__(self, "lenders", lenders)
        for kind in set(self.kinds):
            heads = self.n_kv_heads if kind.n_kv_heads is None else kind.n_kv_heads
            if self.n_heads % heads:
                raise UserError(
                    f"n_heads={self.n_heads} is not a multiple of n_kv_heads={heads}"
                    " (num_attention_heads, num_key_value_heads)"
                )
            dims = {"head_dim": kind.head_dim or self.head_dim, "rotary_dims": self.rotary_dims}
            for name, n in dims.items():
                if n is not None and n % 2:
                    raise UserError(f"{name}={n} is odd: dims are rotated in pairs")
        if self.n_recurrent and self.delta is None:
            raise UserError("layers with a state need its sizes (delta)")
        if self.lora is not None:
            names = tuple(self.targets)  # of this family
            if set(self.lora.targets) != set(TARGETS):
                names = self.lora.targets
            unknown = [name for name in names if name not in self.targets]
            if unknown:
                raise UserError(
                    f"{self.family} has no {', '.join(unknown)} that adapters could be for, but"
                    f" {', '.join(self.targets)} (student.lora.targets)"
                )
            object.__setattr__(self, "lora", replace(self.lora, targets=names))
        if self.quantised is not None and self.experts is not None and not self._apart:
            raise UserError(
                f"student.base_dtype={self.quantised}: the experts of {self.family}, which are all"
                " in one tensor, are not quantised; choose float32 or bfloat16"
            )
        if self.quantised is not None:
            for path, (n_in, _) in self.quantisable.items():
                if quantisation_block(n_in) % numbers_per_code(self.quantised):
                    raise UserError(f"nf4 has two numbers in a byte, and {path} has {n_in} inputs")
        if isinstance(self.rope_scaling, LongRope):
            pairs = value_or(self.rotary_dims, self.head_dim) // 2
            for factors in (self.rope_scaling.short_factors, self.rope_scaling.long_factors):
                if len(factors) != pairs:
                    raise UserError(
                        f"{len(factors)} factors of longrope for {pairs} pairs of rotated dims"
                        " (short_factor, long_factor)"
                    )

    def number(self, name: str) -> float:
        """Returns one of `numbers`."""
        return dict(self.numbers)[name]

    @property
    def depends_on_length(self) -> bool:
        """Returns whether the rotary positions of a token depend on how long the longest sequence
        is."""
        return isinstance(self.rope_scaling, DynamicRope | LongRope)

    def for_length(self, tokens: int) -> DecoderConfig:
        """Returns the model for sequences of at most the given number of tokens.

        Sampling writes a token's keys before it is known how long the sequence becomes, and a batch
        that trains has other sequences than the one that was sampled: all that is to be one policy
        is computed for one length.
        """
        return replace(self, sequence_length=tokens) if self.depends_on_length else self

    def same_for_length(self, tokens: int, others: int) -> bool:
        """Returns whether the models for these two lengths (`for_length`) compute the same."""
        scaling = self.rope_scaling
        return scaling is None or scaling.regime(tokens) == scaling.regime(others)

    @property
    def windows(self) -> dict[int | None, int]:
        """Counts the layers with attention by their window (`LayerKind.window`)."""
        counts: dict[int | None, int] = {}
        for layer, n in self.alike.items():
            if layer.n_attention:
                window = layer.kinds[0].window
                counts[window] = counts.get(window, 0) + n
        return counts

    @property
    def n_attention(self) -> int:
        """Returns how many layers have keys and values."""
        return self.n_layers - self.n_recurrent

    @property
    @lru_cache(maxsize=4096)  # noqa: B019  (configs are values, and few)
    def cycle(self) -> int:
        """Returns the number of layers after which their parameters have the same names and shapes
        again."""
        shapes = [kind.shape for kind in self.kinds]
        n = len(shapes)
        divisors = (c for c in range(1, n + 1) if n % c == 0)
        return next(c for c in divisors if shapes == shapes[:c] * (n // c))

    @lru_cache(maxsize=4096)  # noqa: B019
    def layer_of(self, kind: LayerKind) -> DecoderConfig:
        """Returns the model with one layer, of this kind; its adapters are those for the
        projections that it has."""
        layer = replace(
            self,
            n_layers=1,
            kinds=(kind,),
            head_dim=value_or(kind.head_dim, self.head_dim),
            n_kv_heads=value_or(kind.n_kv_heads, self.n_kv_heads),
            d_ff=value_or(kind.d_ff, self.d_ff),
            lora=None,
        )
        if self.lora is None:
            return layer
        targets = tuple(name for name in self.lora.targets if name in layer.targets)
        return replace(layer, lora=replace(self.lora, targets=targets))

    @property
    @lru_cache(maxsize=4096)  # noqa: B019
    def shapes(self) -> Mapping[DecoderConfig, int]:
        """Maps a model with one layer, for each shape of layers, to how many layers of this model
        have it."""
        return self._counted(kind.shape for kind in self.kinds)

    @property
    @lru_cache(maxsize=4096)  # noqa: B019
    def alike(self) -> Mapping[DecoderConfig, int]:
        """Returns the same as `shapes`, for each kind of layers."""
        return self._counted(self.kinds)

    def _counted(self, kinds: Iterable[LayerKind]) -> Mapping[DecoderConfig, int]:
        counts: dict[DecoderConfig, int] = {}
        for layer in map(self.layer_of, kinds):
            counts[layer] = counts.get(layer, 0) + self.n_layers // len(self.kinds)
        return counts

    @property
    def kept_by_token(self) -> int:
        """Counts the numbers in the keys and values of a token, of all layers that have their
        own."""
        return sum(
            2 * n * layer.n_kv_heads * layer.head_dim
            for layer, n in self.shapes.items()
            if layer.kinds[0].keeps
        )

    @property
    def embedded(self) -> int:
        """Counts the numbers that are looked up for a token."""
        return self.d_model + self.n_layers * self.layer_inputs

    @property
    @lru_cache(maxsize=4096)  # noqa: B019
    def head_dims(self) -> tuple[int, ...]:
        """Returns the head dims of layers with attention, each once."""
        return tuple(dict.fromkeys(layer.head_dim for layer in self.shapes if layer.n_attention))

    def with_layers(self, keep: Sequence[int]) -> DecoderConfig:
        """Returns the config of a model that has only these of its layers."""
        if self.layer_inputs or self.lenders:
            raise UserError(
                f"layers of {self.family} cannot be left out of a model whose layers have separate"
                " inputs, or share keys and values (hidden_size_per_layer_input,"
                " num_kv_shared_layers)"
            )
        kinds = tuple(self.kinds[i % len(self.kinds)] for i in keep)
        return replace(self, n_layers=len(keep), kinds=kinds)

    @property
    def base(self) -> DecoderConfig:
        """Returns the model without adapters."""
        return self if self.lora is None else replace(self, lora=None)

    @property
    def plain(self) -> DecoderConfig:
        """Returns the model without adapters whose weights are all floats, as `config.json` has
        it."""
        if self.lora is None and self.quantised is None:
            return self
        return replace(self, lora=None, quantised=None)

    def adapter(self, path: str) -> Lora | None:
        """Returns the adapter of the projection at this path within a block; None where it has
        none."""
        if self.lora is None:
            return None
        adapted = any(path in self.targets[name] for name in self.lora.targets)
        return self.lora if adapted else None

    @property
    def targets(self) -> dict[str, tuple[str, ...]]:
        """Maps the name of a projection that may have an adapter, as in PEFT, to its path within a
        block; for a tensor with the rows of several projections, to their paths, of which the first
        has the A of all. Experts have none where all of them are in one tensor."""
        paths: dict[str, tuple[str, ...]] = {}
        for path in self.quantisable:
            if "/experts/" not in path or self._apart:
                target = self.parameters[f"{path}/kernel"].tensor.split(".")[-2]
                paths[target] = (*paths.get(target, ()), path)
        return paths

    def has_a(self, path: str) -> bool:
        """Returns whether an adapter of the projection at this path has an A of its own."""
        return any(path == paths[0] for paths in self.targets.values())

    @property
    @lru_cache(maxsize=4096)  # noqa: B019
    def parameters(self) -> layers.Parameters:
        """Returns the path within a block -> parameter of its layers, without adapters and as if
        none were quantised; of layers that have others, of the first that has it."""
        if self != self.plain:
            return self.plain.parameters
        table: layers.Parameters = {}
        for layer in self.shapes:
            table = (block_parameters(layer) if layer == self else layer.parameters) | table
        return table

    @property
    @lru_cache(maxsize=4096)  # noqa: B019
    def top(self) -> layers.Parameters:
        """Maps the paths of parameters that are in no layer to them, with the whole names of their
        tensors."""
        shape, axes = (self.vocab_size, self.d_model), ("vocab", "embed")

        def small(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return 0.02 * jax.random.normal(key, shape)

        def of_rows(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jax.random.normal(key, shape) / shape[-1] ** 0.5

        table = {"embed/embedding": layers.Parameter(shape, axes, EMBEDDING, small)}
        if self.layer_inputs:
            width, name = self.n_layers * self.layer_inputs, "model.embed_tokens_per_layer.weight"
            both = ("vocab", "layer_inputs")
            table["layer_inputs/embedding"] = layers.Parameter(
                (self.vocab_size, width), both, name, small
            )
            name = "model.per_layer_model_projection.weight"
            projection = layers.Parameter((width, self.d_model), (None, "embed"), name, of_rows)
            table["layer_inputs/projection"] = projection
            name = "model.per_layer_projection_norm.weight"
            table["layer_inputs/norm/scale"] = layers.norm_scale(self, self.layer_inputs, name)
        table["norm/scale"] = layers.norm_scale(self, self.d_model, "model.norm.weight")
        if not self.tie_embeddings:
            table["lm_head/kernel"] = layers.Parameter(shape, axes, HEAD, small)
        return table

    def _count(self, number: Callable[[str, layers.Parameter], int]) -> int:
        """Sums a number of each parameter over the parameters of all layers."""
        return sum(
            n * sum(number(path, parameter) for path, parameter in layer.parameters.items())
            for layer, n in self.shapes.items()
        )

    @property
    def n_params(self) -> int:
        """Counts the parameters without adapters; tied embeddings count once."""
        return self._count(lambda _, p: p.size) + sum(p.size for p in self.top.values())

    @property
    def n_active(self) -> int:
        """Counts the parameters that compute a token: of the experts, those that it passes."""
        if self.experts is None:
            return self.n_params
        count, chosen = self.experts.count, self.experts.chosen
        passed = self._count(lambda path, p: p.size // count if "/experts/" in path else 0)
        return self.n_params - (count - chosen) * passed

    @property
    def dense_weights(self) -> int:
        """Counts the weights in the kernels of all layers' `projections`."""
        return self._count(lambda path, p: p.size if KERNEL.fullmatch(path) else 0)

    @property
    def n_trained(self) -> int:
        """Counts the parameters that are trained: those of the adapters, where there are any."""
        if self.lora is None:
            return self.n_params
        rank = self.lora.rank

        def adapted(path: str, p: layers.Parameter) -> int:
            path = path.removesuffix("/kernel")
            if self.adapter(path) is None:
                return 0
            *experts, n_in, n_out = p.shape
            numbers = n_in + n_out if self.has_a(path) else n_out
            return math.prod(experts) * rank * numbers

        return self._count(adapted)

    @property
    def quantisable(self) -> dict[str, tuple[int, int]]:
        """Maps path within a block to (in, out) of each kernel that may be quantised or have an
        adapter: all but that of a router."""
        return {
            path.removesuffix("/kernel"): (p.shape[-2], p.shape[-1])
            for path, p in self.parameters.items()
            if path.endswith("/kernel") and not p.fixed
        }

    @property
    def _apart(self) -> bool:
        """Returns whether each expert has tensors of its own in a checkpoint."""
        return any("{expert}" in p.tensor for p in self.parameters.values())

    @property
    def mlp_width(self) -> int:
        """Returns the width of the MLP that each token passes; 0 if there are experts in its
        place."""
        gate = self.parameters.get("mlp/gate/kernel")
        return 0 if gate is None else gate.shape[1]

    @classmethod
    def from_hf(cls, raw: Raw) -> DecoderConfig:
        """Reads the fields of a `config.json`.

        Raises:
            UserError: a family or a variant (sliding window, rope type, ...) that is not supported.
        """
        raw = _text_config(raw)
        family = raw.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise UserError(_unknown(family))
        entry = FAMILIES[family]
        stated, raw = raw, entry.prepare(raw)
        block = entry.block
        for key in ("hidden_act", "hidden_activation"):
            if raw.get(key, block.activation) != block.activation:
                raise UserError(
                    f"{key}={raw[key]!r} is not supported; supported: {block.activation}"
                )
        if raw.get("mlp_bias") or (raw.get("attention_bias") and not block.attention_bias):
            raise UserError("attention_bias / mlp_bias = true is not supported for this family")
        heads = size(raw, "num_attention_heads")
        d_model = size(raw, "hidden_size")
        head_dim = size(raw, "head_dim", value_or(entry.head_dim, d_model // heads))
        theta, scaling = read_rope(raw, entry.rope_theta)
        check_ropes(stated, FULL, SLIDING, "rope_local_base_freq")
        positions = size(raw, "max_position_embeddings", entry.max_positions)
        positions = positions_of(scaling, positions)
        config = cls(
            family=family,
            vocab_size=size(raw, "vocab_size"),
            d_model=d_model,
            n_layers=size(raw, "num_hidden_layers", most=MOST_LAYERS),
            n_heads=heads,
            n_kv_heads=size(raw, "num_key_value_heads", heads),
            head_dim=head_dim,
            d_ff=size(raw, "intermediate_size"),
            rope_theta=theta,
            rope_scaling=scaling,
            rotary_dims=_rotary_dims(raw, head_dim),
            rms_norm_eps=positive_number(raw, "rms_norm_eps", entry.rms_norm_eps),
            tie_embeddings=flag(raw, "tie_word_embeddings", entry.tie_embeddings),
            max_positions=positions,
            **special_ids(raw),
        )
        more = entry.read({**raw, "max_position_embeddings": positions})
        if "kinds" not in more:
            read_windows(raw, None)  # which refuses any
        config = replace(config, **more)
        if config.n_attention == 0:
            raise UserError("of the layers at least one needs attention; all of them have a state")
        check_bounds(config)
        return config

    def to_hf(self, dtype: str) -> JsonObject:
        """Returns `config.json` of this model; read by transformers 4 and 5."""
        rope = write_rope(self.rope_theta, self.rope_scaling, self.max_positions)
        if FAMILIES[self.family].partial_rotary:  # said always: 1 is not the default of all
            dims = value_or(self.rotary_dims, self.head_dim)
            factor = {"partial_rotary_factor": dims / self.head_dim}
            rope |= factor | {"rope_parameters": rope["rope_parameters"] | factor}
        eos: int | list[int] | None = list(self.eos_ids)
        if len(self.eos_ids) < 2:
            eos = self.eos_ids[0] if self.eos_ids else None
        fields = {
            "architectures": [FAMILIES[self.family].architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            "hidden_act": self.block.activation,
            **rope,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "eos_token_id": eos,
            "bos_token_id": self.bos_id,
            "pad_token_id": self.pad_id,
            "torch_dtype": dtype,
            **FAMILIES[self.family].write(self),
        }
        return {key: value for key, value in fields.items() if value is not OMITTED}


def block_parameters(c: DecoderConfig) -> layers.Parameters:
    """Returns the parameters of the layer of a model with one (`DecoderConfig.layer_of`)."""
    norms = NORMS[c.block.norms]
    if c.layer_inputs:
        norms = norms | {"input_norm": "post_per_layer_input_norm"}
    table = {
        f"{name}/scale": layers.norm_scale(c, c.d_model, f"{tensor}.weight")
        for name, tensor in norms.items()
    }
    table |= (delta_parameters if c.kinds[0].recurs else layers.attention_parameters)(c)
    table |= layers.mlp_parameters(c, c.d_ff) if c.experts is None else expert_parameters(c)
    if c.layer_inputs:
        d, p = c.d_model, c.layer_inputs
        into, out_of = ("embed", None), (None, "embed")
        table["input/gate/kernel"] = layers.kernel(d, p, into, "per_layer_input_gate.weight")
        table["input/out/kernel"] = layers.kernel(p, d, out_of, "per_layer_projection.weight")
    if c.block.scalar:
        table["block_scale"] = layers.Parameter((1,), (None,), "layer_scalar")
    named = FAMILIES[c.family].tensors
    return {path: replace(p, tensor=named.get(path, p.tensor)) for path, p in table.items()}


def special_ids(raw: Raw) -> dict[str, Any]:
    """Returns `eos_ids`, `bos_id` and `pad_id` of a `config.json` or `generation_config.json`."""
    eos = raw.get("eos_token_id")
    several = _several(eos)
    for key, ids in (
        ("eos_token_id", several),
        ("bos_token_id", [value_or(raw.get("bos_token_id"), 0)]),
        ("pad_token_id", [value_or(raw.get("pad_token_id"), 0)]),
    ):
        if not all(type(i) is int for i in ids):
            raise UserError(f"{key}={raw[key]!r} is not a token id: an integer or null is required")
    return {
        "eos_ids": tuple(several),
        "bos_id": raw.get("bos_token_id"),
        "pad_id": raw.get("pad_token_id"),
    }


def check_special_ids(config: DecoderConfig) -> None:
    """Refuses an end or padding token that has no row in the embedding."""
    for key, ids in (("eos_token_id", config.eos_ids), ("pad_token_id", (config.pad_id,))):
        for i in ids:
            if i is not None and not 0 <= i < config.vocab_size:
                raise UserError(
                    f"{key}={i} is no token of a vocabulary of {config.vocab_size} (vocab_size):"
                    " set it to one that is, or to null"
                )


def check_bounds(config: DecoderConfig) -> None:
    """Refuses sizes that no model has, before anything is made of them."""
    for key in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
        if getattr(config, key) < 1:
            raise UserError(f"{key}={getattr(config, key)} must be at least 1")
    experts = 0 if config.experts is None else config.n_layers * config.experts.count
    for what, count, most in (
        ("layers", config.n_layers, MOST_LAYERS),
        ("experts", experts, MOST_EXPERTS),
        ("positions", config.max_positions, MOST),
        ("parameters", config.n_params, MOST_PARAMS),
    ):
        if count > most:
            raise UserError(f"its sizes make {count:,} {what}; at most {most:,} are read")


def _unknown(family: object) -> str:
    return (
        f"model_type={short(repr(family))} is not supported; supported: {', '.join(FAMILIES)}, and"
        " families of your own: student.family, or --family (docs/add-a-model-family.md)"
    )


def _text_config(raw: Raw) -> Raw:
    """Returns the `config.json` of the text of a model, which may be one of images too."""
    within = raw.get("text_config")
    for name, family in FAMILIES.items():
        if family.whole is not None and family.whole == raw.get("model_type"):
            if not isinstance(within, dict):
                raise UserError(f"text_config={within!r} must be an object")
            for key in ROPES:
                if raw.get(key) is not None and raw[key] != within.get(key):
                    raise UserError(
                        f"{key}={short(repr(raw[key]))}, and text_config has"
                        f" {short(repr(within.get(key)))}: what is in text_config counts; leave out"
                        " the other, or write the same"
                    )
            shared = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings")
            fields = {key: raw[key] for key in shared if raw.get(key) is not None}
            stated = {key: x for key, x in within.items() if x is not None or key not in fields}
            fields |= stated
            ends = [*_several(within.get("eos_token_id")), *_several(raw.get("eos_token_id"))]
            if ends and all(type(i) is int for i in ends):  # each of them ends a completion
                fields["eos_token_id"] = list(dict.fromkeys(ends))
            return fields | {"model_type": name}
    return raw


def _several(ids: Any) -> list[Any]:
    """Returns the token ids of a field that has one, a list, or null."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _rotary_dims(raw: Raw, head_dim: int) -> int | None:
    """Returns `DecoderConfig.rotary_dims`, as `partial_rotary_factor` sets them for every head."""
    key, ropes = "partial_rotary_factor", ("rope_parameters", "rope_scaling")
    params: JsonObject = {}
    for name in ropes:
        params |= value_or(raw.get(name), {})
    if params.get("rope_type") == "proportional":  # of all dims, some by nothing
        return None
    stated = {key: raw.get(key)} | {f"{n}.{key}": value_or(raw.get(n), {}).get(key) for n in ropes}
    for factor in stated.values():
        if factor in (1, None):
            continue
        if not FAMILIES[raw["model_type"]].partial_rotary:
            raise UserError("partial_rotary_factor below 1 is not supported; all dims are rotated")
        if type(factor) is not float or not 0 < factor < 1:
            raise UserError(f"partial_rotary_factor={factor!r} must be a number above 0, at most 1")
    factor = stated_once(stated, *stated)
    if factor in (1, None):
        return None
    if head_dim * factor < 2:
        raise UserError(f"partial_rotary_factor={factor!r}: none of {head_dim} dims are rotated")
    return int(head_dim * factor)
