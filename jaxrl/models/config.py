"""What a decoder is made of, and how a Hugging Face `config.json` says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from jaxrl.errors import UserError
from jaxrl.models.delta import Delta
from jaxrl.models.experts import Experts
from jaxrl.models.families import FAMILIES
from jaxrl.models.family import BlockKind
from jaxrl.models.fields import given, number, size
from jaxrl.models.kinds import LayerKind, read_windows
from jaxrl.models.lora import TARGETS, Lora
from jaxrl.models.quantised import Quantisation, block_size, packed
from jaxrl.models.rope import (
    DynamicRope,
    LongRope,
    RopeScaling,
    YarnRope,
    positions_of,
    read_rope,
    written_rope,
)

ROUTER = "mlp/router"
"""Path of a mixture's router within a block."""


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
    score_dim: int | None = None
    """Scores of attention are divided by its square root; None: by that of `head_dim`."""
    kinds: tuple[LayerKind, ...] = (LayerKind(),)
    """Of each layer; one where all layers are alike."""
    experts: Experts | None = None
    """In place of the MLP; None: there are none."""
    delta: Delta | None = None
    """Of the layers whose kind `recurs`; None: there are none."""
    final_softcap: float | None = None
    """c of logits c tanh(z / c), z being `hidden @ head.T`; None: the logits are z."""
    lora: Lora | None = None
    """The adapters that are trained in place of the weights; `config.json` does not name them."""
    quantised: Quantisation | None = None
    """How the kernels of `projections` are held; None: as all other weights. Nor does it name
    this."""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise UserError(_unknown(self.family))
        if len(set(self.kinds)) == 1:
            object.__setattr__(self, "kinds", self.kinds[:1])
        elif len(self.kinds) != self.n_layers:
            raise UserError(f"{len(self.kinds)} kinds of layers for n_layers={self.n_layers}")
        if self.n_heads % self.n_kv_heads:
            raise UserError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}"
                " (num_attention_heads, num_key_value_heads)"
            )
        for name, dims in (("head_dim", self.head_dim), ("rotary_dims", self.rotary_dims)):
            if dims is not None and dims % 2:
                raise UserError(f"{name}={dims} is odd: dims are rotated in pairs")
        if self.n_attention == 0:
            raise UserError("of the layers at least one needs attention; all of them have a state")
        if self.n_recurrent and (self.delta is None or self.experts is not None):
            raise UserError("layers with a state need its sizes (delta), and an MLP, not experts")
        if self.lora is not None:
            object.__setattr__(self, "lora", replace(self.lora, targets=self._named(self.lora)))
        if self.quantised is not None and self.experts is not None and not self._apart:
            raise UserError(
                f"student.base_dtype={self.quantised}: the experts of {self.family}, which are all"
                " in one tensor, are not quantised; choose float32 or bfloat16"
            )
        for path, (n_in, _) in self.quantisable.items():
            if self.quantised is not None and block_size(n_in) % packed(self.quantised):
                raise UserError(f"nf4 has two numbers in a byte, and {path} has {n_in} inputs")
        if isinstance(self.rope_scaling, LongRope):
            for factors in (self.rope_scaling.short_factors, self.rope_scaling.long_factors):
                if len(factors) != self.n_rotated // 2:
                    raise UserError(
                        f"{len(factors)} factors of longrope for {self.n_rotated // 2} pairs of"
                        " rotated dims (short_factor, long_factor)"
                    )

    @property
    def block(self) -> BlockKind:
        """What the family's blocks are made of."""
        return FAMILIES[self.family].block

    @property
    def n_rotated(self) -> int:
        """R: how many dims of each head are rotated."""
        return given(self.rotary_dims, self.head_dim)

    @property
    def attention_factor(self) -> float:
        """Of the cosines and sines of rotary positions."""
        if isinstance(self.rope_scaling, YarnRope | LongRope):
            return self.rope_scaling.attention_factor
        return 1.0

    @property
    def depends_on_length(self) -> bool:
        """Whether the rotary positions of a token depend on how long the longest sequence is."""
        return isinstance(self.rope_scaling, DynamicRope | LongRope)

    def for_length(self, tokens: int) -> DecoderConfig:
        """The model for sequences of at most so many tokens.

        Sampling writes a token's keys before it is known how long the sequence becomes, and a batch
        that trains has other sequences than the one that was sampled: all that is to be one policy
        is computed for one length.
        """
        return replace(self, sequence_length=tokens) if self.depends_on_length else self

    @property
    def windows(self) -> dict[int | None, int]:
        """How many layers with attention there are of each window (`LayerKind.window`)."""
        each = self.n_layers // len(self.kinds)
        found: dict[int | None, int] = {}
        for kind in self.kinds:
            if not kind.recurs:
                found[kind.window] = found.get(kind.window, 0) + each
        return found

    @property
    def n_recurrent(self) -> int:
        """How many layers have a state."""
        return sum(kind.recurs for kind in self.kinds) * (self.n_layers // len(self.kinds))

    @property
    def n_attention(self) -> int:
        """How many layers have keys and values."""
        return self.n_layers - self.n_recurrent

    @property
    def cycle(self) -> int:
        """After how many layers their parameters are called the same again."""
        recurs = [kind.recurs for kind in self.kinds]
        n = len(recurs)
        divisors = (c for c in range(1, n + 1) if n % c == 0)
        return next(c for c in divisors if recurs == recurs[:c] * (n // c))

    def layers_with(self, path: str) -> int:
        """How many layers have the projection at this path within a block."""
        counts = {"attn": self.n_attention, "delta": self.n_recurrent}
        return counts.get(path.split("/")[0], self.n_layers)

    def with_layers(self, keep: Sequence[int]) -> DecoderConfig:
        """The config of a model that has only these of its layers."""
        kinds = tuple(self.kinds[i % len(self.kinds)] for i in keep)
        return replace(self, n_layers=len(keep), kinds=kinds)

    @property
    def base(self) -> DecoderConfig:
        """The model without adapters."""
        return self if self.lora is None else replace(self, lora=None)

    @property
    def plain(self) -> DecoderConfig:
        """The model without adapters whose weights are all floats, as `config.json` says it."""
        return self.base if self.quantised is None else replace(self.base, quantised=None)

    def adapter(self, path: str) -> Lora | None:
        """Of the projection at this path within a block; None where it has none."""
        if self.lora is None:
            return None
        adapted = any(path in self.targets[name] for name in self.lora.targets)
        return self.lora if adapted else None

    @property
    def targets(self) -> dict[str, tuple[str, ...]]:
        """Name of a projection that may have an adapter, as in PEFT -> its path within a block; of
        a tensor with the rows of several projections, their paths, of which the first has the A of
        all. Experts have none where all of them are in one tensor."""
        found: dict[str, tuple[str, ...]] = {}
        for leaf, name in FAMILIES[self.family].layer.items():
            path = leaf.removesuffix("/kernel")
            if path in self.quantisable and ("/experts/" not in path or self._apart):
                target = name.split(".")[-2]
                found[target] = (*found.get(target, ()), path)
        return found

    def has_a(self, path: str) -> bool:
        """Whether an adapter of the projection at this path has an A of its own."""
        return any(path == paths[0] for paths in self.targets.values())

    def _named(self, lora: Lora) -> tuple[str, ...]:
        """The targets of adapters by the names of this family."""
        if set(lora.targets) == set(TARGETS):
            return tuple(self.targets)
        unknown = [name for name in lora.targets if name not in self.targets]
        if unknown:
            raise UserError(
                f"{self.family} has no {', '.join(unknown)} that adapters could be for, but"
                f" {', '.join(self.targets)} (student.lora.targets)"
            )
        return lora.targets

    @property
    def n_params(self) -> int:
        """Number of parameters without adapters; tied embeddings count once."""
        return self._params_with(0 if self.experts is None else self.experts.count)

    @property
    def n_active(self) -> int:
        """Number of the parameters that compute a token: of the experts, those that it passes."""
        return self._params_with(0 if self.experts is None else self.experts.chosen)

    def _params_with(self, experts: int) -> int:
        block = experts * sum(n_in * n_out for n_in, n_out in self.expert_projections.values())
        block += self.block.output_bias * self.d_model + self.block.sinks * self.n_heads
        if self.experts is not None and self.block.expert_bias:
            outs = (n_out for _, n_out in self.expert_projections.values())
            block += self.experts.count + experts * sum(outs)
        block += (4 if self.block.norms == "around" else 2) * self.d_model
        attention = sum(self.qk_norm_widths)
        if self.block.attention_bias:
            attention += self.head_dim * (self.n_heads + 2 * self.n_kv_heads)
        recurrent = 0
        if self.delta is not None:
            d = self.delta
            recurrent = d.conv * (2 * d.k_width + d.v_width) + 2 * d.v_heads + d.v_dim
        vocab = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        more = self.n_layers * block + self.n_attention * attention + self.n_recurrent * recurrent
        return self.dense_weights + more + vocab + self.d_model

    @property
    def dense_weights(self) -> int:
        """Number of weights in the kernels of all layers' `projections`."""
        each = self.projections.items()
        return sum(self.layers_with(path) * n_in * n_out for path, (n_in, n_out) in each)

    @property
    def n_trained(self) -> int:
        """Number of parameters that are trained: those of the adapters, where there are any."""
        if self.lora is None:
            return self.n_params
        sizes = ((path, *both) for path, both in self.quantisable.items() if self.adapter(path))
        return self.lora.rank * sum(
            self.copies(path) * (self.has_a(path) * n_in + n_out) for path, n_in, n_out in sizes
        )

    def copies(self, path: str) -> int:
        """How many kernels all layers have at this path within a block."""
        each = self.experts.count if self.experts and path in self.expert_projections else 1
        return each * self.layers_with(path)

    @property
    def quantisable(self) -> dict[str, tuple[int, int]]:
        """Path within a block -> (in, out) of each kernel that may be quantised or have an adapter:
        all but that of a router."""
        both = self.projections | self.expert_projections
        return {path: sizes for path, sizes in both.items() if path != ROUTER}

    @property
    def _apart(self) -> bool:
        """Whether each expert has tensors of its own in a checkpoint."""
        return any("{expert}" in name for name in FAMILIES[self.family].tensors.values())

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Path within a block -> (in, out) of each kernel but those of experts; with a state beside
        attention, of the blocks of both kinds."""
        d, q, kv = self.d_model, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        read = 2 * q if self.block.output_gate else q
        attention = {"attn/q": (d, read), "attn/k": (d, kv), "attn/v": (d, kv), "attn/o": (q, d)}
        if self.delta is not None:
            k, v, heads = self.delta.k_width, self.delta.v_width, self.delta.v_heads
            attention |= {"delta/q": (d, k), "delta/k": (d, k), "delta/v": (d, v)}
            attention |= {"delta/z": (d, v), "delta/b": (d, heads), "delta/a": (d, heads)}
            attention |= {"delta/o": (v, d)}
        if self.experts is not None:
            return attention | {ROUTER: (d, self.experts.count)}
        return attention | {
            "mlp/gate": (d, self.d_ff),
            "mlp/up": (d, self.d_ff),
            "mlp/down": (self.d_ff, d),
        }

    @property
    def expert_projections(self) -> dict[str, tuple[int, int]]:
        """Path within a block -> (in, out) of each kernel of an expert; empty without experts."""
        if self.experts is None:
            return {}
        d, f = self.d_model, self.d_ff
        return {
            "mlp/experts/gate": (d, f),
            "mlp/experts/up": (d, f),
            "mlp/experts/down": (f, d),
        }

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """Of the norms of q and of k, 0 where there are none."""
        if self.block.qk_norm is None:
            return 0, 0
        heads = (1, 1) if self.block.qk_norm == "head" else (self.n_heads, self.n_kv_heads)
        return heads[0] * self.head_dim, heads[1] * self.head_dim

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Reads the fields of a `config.json`.

        Raises:
            UserError: a family or a variant (sliding window, rope type, ...) that is not supported.
        """
        raw = _text_config(raw)
        family = raw.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise UserError(_unknown(family))
        entry = FAMILIES[family]
        raw = entry.prepare(raw)
        _refuse_variants(raw)
        heads = size(raw, "num_attention_heads")
        d_model = size(raw, "hidden_size")
        head_dim = size(raw, "head_dim", given(entry.head_dim, d_model // heads))
        theta, scaling = read_rope(raw)
        config = cls(
            family=family,
            vocab_size=size(raw, "vocab_size"),
            d_model=d_model,
            n_layers=size(raw, "num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=size(raw, "num_key_value_heads", heads),
            head_dim=head_dim,
            d_ff=size(raw, "intermediate_size"),
            rope_theta=theta,
            rope_scaling=scaling,
            rotary_dims=_rotary_dims(raw, head_dim),
            rms_norm_eps=number(raw, "rms_norm_eps", entry.rms_norm_eps),
            tie_embeddings=bool(given(raw.get("tie_word_embeddings"), False)),
            max_positions=positions_of(scaling, size(raw, "max_position_embeddings", 2048)),
            **special_ids(raw),
        )
        more = entry.read(raw)
        if "kinds" not in more:
            read_windows(raw, None)  # which refuses any
        return replace(config, **more)

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """The `config.json` of this model; read by transformers 4 and 5."""
        rope = written_rope(self.rope_theta, self.rope_scaling, self.max_positions)
        if FAMILIES[self.family].partial_rotary:  # said always: 1 is not the default of all
            dims = given(self.rotary_dims, self.head_dim)
            factor = {"partial_rotary_factor": dims / self.head_dim}
            rope |= factor | {"rope_parameters": rope["rope_parameters"] | factor}
        eos: int | list[int] | None = list(self.eos_ids)
        if len(self.eos_ids) < 2:
            eos = self.eos_ids[0] if self.eos_ids else None
        return {
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


class SpecialIds(TypedDict):
    """Those fields of `DecoderConfig`."""

    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None


def special_ids(raw: Mapping[str, Any]) -> SpecialIds:
    """The tokens that a `config.json` or a `generation_config.json` names."""
    eos = raw.get("eos_token_id")
    several = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for key, ids in (
        ("eos_token_id", several),
        ("bos_token_id", [given(raw.get("bos_token_id"), 0)]),
        ("pad_token_id", [given(raw.get("pad_token_id"), 0)]),
    ):
        if not all(type(i) is int for i in ids):
            raise UserError(f"{key}={raw[key]!r} is no token id: a whole number is needed, or null")
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


def _unknown(family: object) -> str:
    return f"model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}"


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a `config.json` of a model of images and text too says of the text."""
    within = raw.get("text_config")
    for name, family in FAMILIES.items():
        if family.whole is not None and family.whole == raw.get("model_type"):
            if not isinstance(within, dict):
                raise UserError(f"text_config={within!r} must be an object")
            shared = ("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings")
            return {key: raw[key] for key in shared if key in raw} | within | {"model_type": name}
    return raw


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    """Refuses settings that would give silently wrong numbers."""
    block = FAMILIES[raw["model_type"]].block
    for key in ("hidden_act", "hidden_activation"):
        if raw.get(key, block.activation) != block.activation:
            raise UserError(f"{key}={raw[key]!r} is not supported; supported: {block.activation}")
    if raw.get("mlp_bias") or (raw.get("attention_bias") and not block.attention_bias):
        raise UserError("attention_bias / mlp_bias = true is not supported for this family")


def _rotary_dims(raw: Mapping[str, Any], head_dim: int) -> int | None:
    """`DecoderConfig.rotary_dims`, as `partial_rotary_factor` has them of every head."""
    params = raw.get("rope_parameters")
    params = params if isinstance(params, dict) else {}
    factor = given(raw.get("partial_rotary_factor"), params.get("partial_rotary_factor"))
    if factor in (1, None):
        return None
    if not FAMILIES[raw["model_type"]].partial_rotary:
        raise UserError("partial_rotary_factor below 1 is not supported; all dims are rotated")
    if type(factor) is not float or not 0 < factor < 1:
        raise UserError(f"partial_rotary_factor={factor!r} must be a number above 0, at most 1")
    return int(head_dim * factor)
