"""What a text encoder is made of, as a Hugging Face or sentence-transformers folder says it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl.errors import UserError
from jaxrl.models.family import Raw, size

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
    with of_file(file):
        return EncoderConfig.from_hf(raw, pooling, min(known, default=None)), inner


@contextmanager
def of_file(file: Path) -> Iterator[None]:
    """Puts the file before the messages of what is wrong inside."""
    try:
        yield
    except KeyError as missing:
        raise UserError(f"{file}: the field {missing} is missing") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def read_json(file: Path, kind: type = dict) -> Any:
    """Reads the contents of a JSON file, an object or what `kind` says."""
    if file.exists() and not file.is_file():  # a pipe never ends
        raise UserError(f"{file}: cannot be read: it is not a file")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        raise UserError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise UserError(f"{file}: {wanted} is needed, this is {json.dumps(value)[:80]}")
    return value


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
