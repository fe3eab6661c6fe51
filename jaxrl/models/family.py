"""What one family of decoders is: an entry of the table in `families/`.

A family says which blocks it has, how its tensors are called in Hugging Face's files and in GGUF
files, and what its `config.json` has beyond the fields that all families share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jaxrl.models.json_fields import DecoderLike, Raw
from jaxrl.process.json_types import JsonObject

Norms = Literal["before", "after", "around"]
Activation = Literal["silu", "gelu_pytorch_tanh"]
"""Of the MLP, by the name that a `config.json` has for it."""
OMITTED = object()
"""Of `Family.write`: a field that other families write, and this one does not."""


class GgufFacts(Protocol):
    """What a GGUF file says of its model."""

    def stated(self, key: str) -> Any:
        """Returns a value of the metadata by its key without the architecture; None where there is
        none."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of the tensor with a name as in Hugging Face; None where there is
        none."""


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
class Family:
    """What distinguishes a family from the others that share the decoder."""

    architecture: str
    """Class name in `config.json` and in the exported folder."""
    block: BlockKind = BlockKind()
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
    scaled_embedding: bool = False
    """Whether rows of the embedding are multiplied by sqrt(D), rounded to the compute dtype."""
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
    from_gguf: Callable[[DecoderLike, GgufFacts], JsonObject] = lambda *_: {}
    """Fields of a `config.json` that its GGUF files leave out or have in places of their own, of a
    `DecoderConfig` and the file. Raises UserError for what is not supported."""
    gguf_interleaved: bool = False
    """Whether these files interleave the two halves of each head of q and k that rotate
    together."""
    whole: str | None = None
    """`model_type` of models of images and text too, whose `text_config` is one of this family."""
    prepare: Callable[[Raw], Raw] = lambda raw: raw
    """A `config.json` with the fields that all families share as all others have them."""
    read: Callable[[Raw], JsonObject] = lambda _: {}
    """Fields of `DecoderConfig` beyond those that all share, of a `config.json`. Raises UserError
    for settings that would give silently wrong numbers."""
    write: Callable[[DecoderLike], JsonObject] = lambda _: {}
    """What `read` and transformers need beyond the fields that all share."""
