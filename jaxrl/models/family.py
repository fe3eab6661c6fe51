"""What one family of decoders is, an entry of the table in `families/`, and how the fields of a
`config.json` are read, which say nothing, null, or a value that may be no number.

A family says which blocks it has, how its tensors are called in Hugging Face's files and in GGUF
files, and what its `config.json` has beyond the fields that all families share.

Layers may differ in how far a token attends, in how positions rotate, and in the shapes of their
parameters. Those of other shapes are stacks of their own. The layers of a stack share one program,
in which the number of a layer chooses where they differ: by a `lax.switch` around attention, whose
masks and kernels are compiled for their window, and by a selection of the angles. Parameters stay
as they are stacked. (A scan over periods of layers, with a period's blocks one after the other in
its body, took 2 to 5 times the time to compile and up to 5 times the memory: it copies the stacked
parameters where the layers end within a period.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxrl.errors import UserError, short
from jaxrl.process.json_types import JsonObject

MOST = 2**31 - 1
"""The largest size that is read: what an int32 holds."""
Raw = Mapping[str, Any]
"""A model's `config.json`, as it is parsed."""
DecoderLike = Any
"""A `DecoderConfig`, for modules that its own imports."""
GgufFacts = Any
"""What a GGUF file says of its model (`formats.gguf`): `stated(key)`, a value of its metadata by
the key without the architecture, and `shape(name)`, that of a tensor by its name in Hugging Face's
files; None where there is none."""
SLIDING, FULL = "sliding_attention", "full_attention"
Norms = Literal["before", "after", "around"]
Activation = Literal["silu", "gelu_pytorch_tanh"]
"""The activation of the MLP, by its name in a `config.json`."""
OMITTED = object()
"""Value in `Family.write` for a field that other families write, and this one does not."""


@dataclass(frozen=True)
class BlockKind:
    """What the blocks of a family are made of, whatever their sizes."""

    attention_bias: bool = False
    """Whether q, k and v have a bias."""
    output_bias: bool = False
    """Whether o has one."""
    sinks: bool = False
    """Whether each head has a score that takes part in its softmax and has no value."""
    expert_bias: bool = False
    """Whether the router of a mixture and its experts have biases."""
    qk_norm: Literal["head", "width"] | None = None
    """Whether q and k pass an RMSNorm: over each head, or over all heads at once."""
    norms: Norms = "before"
    """Whether attention and MLP get their input normed, or their output is before it is added, or
    both."""
    norm_in_float32: bool = False
    """Whether a norm multiplies by its scale before it rounds to the compute dtype, or after."""
    norm_around_one: bool = False
    """Whether a norm multiplies by 1 + its scale."""
    activation: Activation = "silu"
    output_gate: bool = False
    """Whether what a head of attention reads is multiplied by the sigmoid of a gate, whose rows
    follow those of its query."""
    value_norm: bool = False
    """Whether each head of v is divided by its root mean square."""
    scalar: bool = False
    """Whether what leaves a block is multiplied by a number of its own, which is not trained."""


@dataclass(frozen=True)
class LayerKind:
    """How a layer attends, and what it has that the model's other layers have otherwise."""

    window: int | None = None
    """A token attends to itself and the window - 1 before it; None: to all before it."""
    rope_theta: float | None = None
    """Base frequency of its rotary positions, which are not scaled; None: those of the model."""
    rotates: bool = True
    """Whether queries and keys are rotated by their positions at all."""
    recurs: bool = False
    """Whether it has a state (`models.delta`) in place of keys and values."""
    head_dim: int | None = None
    """Width of its heads; None: the model's."""
    n_kv_heads: int | None = None
    """None: the model's."""
    d_ff: int | None = None
    """None: the model's."""
    keys_as_values: bool = False
    """Whether it has no projection of values: they are its keys before their norm and rotation."""
    borrows: bool = False
    """Whether it has no keys and values of its own, but reads those of the last layer before it
    that attends as it does and has its own."""

    @property
    def keeps(self) -> bool:
        """Returns whether the layer has keys and values of its own."""
        return not self.recurs and not self.borrows

    @property
    def shape(self) -> LayerKind:
        """Returns one kind for all kinds whose layers have parameters of the same names and
        shapes."""
        return replace(self, window=None, rope_theta=None, rotates=True)

    @property
    def lender(self) -> LayerKind:
        """Returns the kind of the layers whose keys and values this one reads where it borrows."""
        return replace(self, borrows=False, d_ff=None)


@dataclass(frozen=True)
class Family:
    """What distinguishes a family from the others that share the decoder."""

    architecture: str
    """Class name in `config.json` and in the exported folder."""
    block: BlockKind = BlockKind()
    model_type: str | None = None
    """In `config.json`, of a family in a file of the user's (`families.use_family`); the others are
    in the table by it."""
    head_dim: int | None = None
    """Where `config.json` does not say it; None is hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    """Where `config.json` does not say it."""
    rope_theta: float = 10000.0
    """Likewise."""
    tie_embeddings: bool = False
    """Likewise."""
    max_positions: int = 2048
    """Likewise."""
    partial_rotary: bool = False
    """Whether `partial_rotary_factor` is heeded: only the first dims of each head are rotated."""
    embed: Callable[[DecoderLike, Any], Any] | None = None
    """(config, x) -> x, of embedded tokens [..., D] in the compute dtype; None: as they are."""
    add: Callable[[DecoderLike, Any], Any] | None = None
    """Likewise of what attention, and then the MLP, add to the residual stream."""
    final: Callable[[DecoderLike, Any], Any] | None = None
    """Likewise of the hidden states after the last norm, which the LM head reads."""
    recurs: bool = False
    """Whether there are layers that keep a state in place of keys and values."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Path of a parameter within a block -> its tensor, where that is called otherwise than in the
    table of its part (`layers.Parameter`). A name with `{expert}` is that of one expert's tensor,
    of a parameter of all of them."""
    alternating: bool = False
    """Whether parameters of experts that have one tensor in common are every other column of it,
    in this order."""
    gguf: str | None = None
    """`general.architecture` of its GGUF files; None where there are none that are read."""
    from_gguf: Callable[[Raw, GgufFacts], JsonObject] = lambda *_: {}
    """Fields of a `config.json` that its GGUF files leave out or have in places of their own, of
    the other fields and the file. Raises UserError for what is not supported."""
    gguf_interleaved: bool = False
    """Whether these files interleave the two halves of each head of q and k that rotate
    together."""
    whole: str | None = None
    """`model_type` of models of images and text too, whose `text_config` is one of this family."""
    within: str = "model."
    """How names of tensors begin in what `AutoModelForCausalLM` of transformers, and so PEFT, makes
    of such a model: the text alone, or all of it."""
    prepare: Callable[[Raw], Raw] = lambda raw: raw
    """A `config.json` with the fields that all families share as all others have them."""
    read: Callable[[Raw], JsonObject] = lambda _: {}
    """Fields of `DecoderConfig` beyond those that all share, of a `config.json` whose
    `max_position_embeddings` are all positions that the model has. Raises UserError for settings
    that would give silently wrong numbers."""
    write: Callable[[DecoderLike], JsonObject] = lambda _: {}
    """What `read` and transformers need beyond the fields that all share."""


def value_or(value: Any, default: Any) -> Any:
    """Returns the value, or the default where it is null."""
    return default if value is None else value


def fill_defaults(raw: Raw, defaults: Raw) -> JsonObject:
    """Returns `raw`, with the defaults where it has nothing or null."""
    return {**raw, **defaults, **{key: value for key, value in raw.items() if value is not None}}


def size(raw: Raw, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
    """Reads a whole number from `least` to `most`; where it is absent or null, the default if there
    is one."""
    value = raw[key] if default is None else value_or(raw.get(key), default)
    if type(value) is not int or not least <= value <= most:
        high = type(value) is int and value > most
        limit = f"at most {most}" if high else f"at least {least}"
        raise UserError(f"{key}={short(repr(value))} must be a whole number of {limit}")
    return value


def positive_number(raw: Raw, key: str, default: float | None = None) -> float:
    """Reads a number above 0 that float32 holds; where it is absent or null, the default if there
    is one."""
    value = raw[key] if default is None else value_or(raw.get(key), default)
    if type(value) not in (int, float) or not 0 < value < 3e38:
        raise UserError(f"{key}={short(repr(value))} must be a number above 0")
    return float(value)


def flag(raw: Raw, key: str, default: bool) -> bool:
    """Reads true or false; where it is absent or null, the default."""
    value = value_or(raw.get(key), default)
    if type(value) is not bool:
        raise UserError(f"{key}={short(repr(value))} must be true or false")
    return value


def stated_once(raw: Raw, *keys: str) -> Any:
    """Reads a value that may stand at several keys; null where none has it.

    Raises:
        UserError: two of them say different things.
    """
    values = {key: raw[key] for key in keys if raw.get(key) is not None}
    first = next(iter(values.values()), None)
    if any(value != first for value in values.values()):
        both = " and ".join(f"{key}={short(repr(value))}" for key, value in values.items())
        raise UserError(f"{both} disagree: keep one of them, or write the same")
    return first


def read_windows(
    raw: Raw,
    window: int | None,
    slides: Callable[[int], bool] = bool,
    rope_theta: float | None = None,
    full: LayerKind | None = None,
) -> tuple[LayerKind, ...]:
    """Reads the kinds of the layers of a `config.json` in which some attend to a window.

    Args:
        window: of those layers; None: there are none.
        slides: whether layer i is one of them, where there are no `layer_types`.
        rope_theta: of those layers, where they have their own.
        full: the others.
    """
    n = size(raw, "num_hidden_layers")
    types = raw.get("layer_types")
    if types is None:
        types = [SLIDING if window is not None and slides(i) else FULL for i in range(n)]
    known = (FULL,) if window is None else (FULL, SLIDING)
    if not isinstance(types, list) or len(types) != n or any(kind not in known for kind in types):
        raise UserError(
            f"layer_types={short(repr(types))} is not supported with sliding_window={window}: a"
            f" list of num_hidden_layers={n} is needed, each of {', '.join(known)}"
        )
    sliding = LayerKind(window, rope_theta)
    return tuple(sliding if kind == SLIDING else value_or(full, LayerKind()) for kind in types)


def window_of(raw: Raw) -> int | None:
    """Reads `sliding_window`; null says that none of the `layer_types` slides."""
    if raw["sliding_window"] is None and raw.get("layer_types") is not None:
        return None
    return size(raw, "sliding_window")


def read_window(raw: Raw, default: int | None = None) -> tuple[LayerKind, ...]:
    """Reads the kind of layers that all have the `sliding_window` of a `config.json`; null means
    none, and so does one that no sequence is longer than."""
    if raw.get("sliding_window", default) is None:
        return (LayerKind(),)
    window = size(raw, "sliding_window", default)
    return (LayerKind(None if window >= raw["max_position_embeddings"] else window),)


def write_windows(config: DecoderLike) -> JsonObject:
    """Returns `sliding_window` and `layer_types` of a `config.json`."""
    windows = [kind.window for kind in config.kinds] * (config.n_layers // len(config.kinds))
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def read_ropes(raw: Raw, local: str) -> JsonObject:
    """Reads a `config.json` whose `rope_parameters` may be those of each kind of layers: those of
    layers without a window are put where all families have theirs, and the base frequency of the
    others at the key `local`."""
    params = raw.get("rope_parameters")
    if not isinstance(params, dict) or not {FULL, SLIDING} & params.keys():
        return dict(raw)
    full, sliding = (value_or(params.get(kind), {}) for kind in (FULL, SLIDING))
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise UserError(f"rope_parameters={params!r} must have an object of each kind of layers")
    if value_or(sliding.get("rope_type"), "default") != "default":
        raise UserError(
            f"rope_type={sliding['rope_type']!r} of {SLIDING} is not supported; supported: default"
        )
    thetas = {"rope_theta": full.get("rope_theta"), local: sliding.get("rope_theta")}
    known = {key: theta for key, theta in thetas.items() if theta is not None}
    return {**raw, "rope_parameters": full, **known}


def write_ropes(config: DecoderLike) -> JsonObject:
    """Returns `rope_parameters` of each kind of layers of a `DecoderConfig`."""
    scaling = {} if config.rope_scaling is None else config.rope_scaling.written()
    local = next((x.rope_theta for x in config.kinds if x.rope_theta), config.rope_theta)
    default = {"rope_type": "default"}
    full = default | scaling | {"rope_theta": config.rope_theta}
    return {"rope_parameters": {FULL: full, SLIDING: default | {"rope_theta": local}}}
