"""GGUF files (llama.cpp): weights dequantised box by box, and the config and the tokenizer that
their metadata describe."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import yaml
from gguf.quants import dequantize
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxrl.errors import UserError, about, user_input
from jaxrl.formats.opened import note_read
from jaxrl.formats.weights import Index, first_unread, gguf_parts, tensor_shapes
from jaxrl.models.config import DecoderConfig, check_special_ids, special_ids
from jaxrl.models.delta import Delta
from jaxrl.models.families import FAMILIES
from jaxrl.models.families.qwen import RECURRENT
from jaxrl.models.family import FULL, SLIDING
from jaxrl.models.rope import Llama3Rope, longrope_attention
from jaxrl.process.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_ELEMENTS = 1 << 22
"""Of all arrays in the metadata together; the largest vocabularies and their merges have a third of
it."""
MOST_ENTRIES = 1 << 14
"""Keys of the metadata, and tensors of a file: each takes the library a tenth of a millisecond. The
largest models have 2,000 tensors."""
LLAMA3_ROPE = Llama3Rope(
    factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)
"""Llama 3.1 to 3.3, but for the factor; a GGUF stores only the divisors that result from it."""
TABLES: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent.parent / "assets" / "gguf.yaml").read_text(encoding="utf-8")
)
VALUE_ROWS = {"in_proj_qkv": 2, "conv1d": 2, "in_proj_z": 0, "in_proj_a": 0, "in_proj_b": 0}
"""Tensors of a layer with a state that have rows for the value heads -> behind how many parts as
wide as all key heads."""
VALUE_COLUMNS = ("out_proj.weight", "A_log", "dt_bias")
"""Those that have columns for the value heads."""
FILTER = "conv1d.weight"
"""Of such a layer, the tensor that is stored without its second dim, which is 1."""
UNROTATED = 1e30
"""Divisor of the frequencies of pairs of dims that do not rotate."""
BY_LAYER: dict[str, Callable[[DecoderConfig], int]] = {
    "attention.head_count_kv": lambda layer: layer.n_kv_heads * layer.n_attention,
    "feed_forward_length": lambda layer: layer.mlp_width,
}
"""What the metadata may have a list of, one value for each layer -> what it is of a model with that
layer alone."""


class _Reader(gguf.GGUFReader):
    """The library's, which would read on behind the end and count to any number in a file."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"byte {end} of {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        of, n, at = gguf.GGUFValueType(kind[0]), int(count[0]), orig_offs + 12
        self._elements += n
        if self._elements > MOST_ELEMENTS:
            raise UserError(
                f"arrays of {self._elements} elements; at most {MOST_ELEMENTS} are read"
            )
        if of == gguf.GGUFValueType.ARRAY:
            raise UserError("truncated, or of a kind that is not read: arrays within arrays")
        types = [gguf.GGUFValueType.ARRAY, of]
        if of != gguf.GGUFValueType.STRING:  # all at once, where the library takes them one by one
            values = self._get(at, self.gguf_scalar_to_np[of], n)
            return 12 + values.nbytes, [kind, count, values], [2], types
        order: Any = "big" if self.endianess == gguf.GGUFEndian.BIG else "little"
        data, texts = memoryview(self.data), []
        for _ in range(n):
            end = at + 8 + int.from_bytes(data[at : at + 8], order)
            if end > len(data):
                raise ValueError(f"byte {end} of {len(data)}")
            texts.append(data[at + 8 : end])
            at = end
        return at - orig_offs, [kind, count, *texts], list(range(2, n + 2)), types

    def _build_fields(self, offs: int, count: int) -> int:
        self._elements = 0
        return super()._build_fields(offs, _few(count, "keys of metadata"))

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        return super()._build_tensor_info(offs, _few(count, "tensors"))


def _few(count: int, what: str) -> int:
    if count > MOST_ENTRIES:
        raise UserError(f"truncated, or {count} {what}; at most {MOST_ENTRIES} are read")
    return count


def _read(path: Path) -> _Reader:
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        return _Reader(path)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        if gguf.GGMLQuantizationType.__name__ in str(error):
            raise UserError(
                f"{path}: {error}: a tensor is of a type that the installed gguf"
                f" {version('gguf')} does not know; a newer one may (pip install -U gguf)"
            ) from None
        with open(path, "rb") as file:
            first = file.read(4)
        raise UserError(
            f"{path}: truncated, or no GGUF file: it has {path.stat().st_size} bytes and begins"
            f" with {first!r} (GGUF: {b'GGUF'!r})"
        ) from None


@cache
def is_read(kind: gguf.GGMLQuantizationType) -> bool:
    """Returns whether the library dequantises a type."""
    try:
        dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def architectures() -> dict[str, list[str]]:
    """Returns `general.architecture` -> the families of such files: one, or one that has no windows
    and one that has."""
    found: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        if family.gguf is not None:
            found.setdefault(family.gguf, []).append(name)
    return found


class GgufFile:
    """The tensors of a GGUF file under Hugging Face's names, dequantised box by box. A model in
    several files (`NAME-00001-of-00003.gguf`) is all of them, whichever is named."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        readers = {part: _read(part) for part in _parts(self.path)}
        first, self._reader = next(iter(readers.items()))
        with about(first):
            n, total = self.meta("split.count"), self.meta("split.tensors.count")
        if n not in (None, 0, 1, len(readers)):
            raise UserError(
                f"{first}: it is one of {n} files of a model, by split.count: name them"
                f" NAME-00001-of-{n:>05}.gguf and so on, in one folder"
            )
        self._tensors: dict[str, gguf.ReaderTensor] = {}
        self._file_of: dict[str, Path] = {}
        for part, reader in readers.items():
            for tensor in reader.tensors:
                if tensor.name in self._tensors:
                    other = self._file_of[tensor.name]
                    raise UserError(f"{part}: tensor {tensor.name} is in {other.name} too")
                self._tensors[tensor.name], self._file_of[tensor.name] = tensor, part
        if len(readers) > 1 and total not in (None, len(self._tensors)):
            raise UserError(
                f"{first}: {len(self._tensors)} tensors in {n} files, and split.tensors.count is"
                f" {total}: the files do not belong together"
            )

    def meta(self, key: str) -> Any:
        """Returns a value of the metadata; None where there is none."""
        field = self._reader.fields.get(key)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise UserError(f"{key} is no text in UTF-8: {error}") from None

    def keys_of(self, start: str) -> list[str]:
        """Returns the keys of the metadata that begin so."""
        return [key for key in self._reader.fields if key.startswith(start)]

    @cached_property
    def family(self) -> str:
        """Returns the model's family. Raises UserError for one that is not supported."""
        architecture, families = self.meta("general.architecture"), architectures()
        if architecture not in families:
            raise UserError(
                f"architecture {architecture!r} is not supported; supported: {', '.join(families)}"
            )
        return families[architecture][-1 if self.stated("attention.sliding_window") else 0]

    @cached_property
    def config(self) -> DecoderConfig:
        """Returns the config that the metadata describe.

        Raises:
            UserError: an architecture or a variant that is not supported.
        """
        try:
            return self._read_config()
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = "" if isinstance(error, UserError) else "the metadata cannot be understood: "
            raise UserError(f"{self.path}: {why}{error}") from error

    def _read_config(self) -> DecoderConfig:
        raw, entry = self._describe(), FAMILIES[self.family]
        raw |= entry.from_gguf(raw, self)
        with about("as a config.json, the metadata"):
            config = DecoderConfig.from_hf(raw)
            config = replace(config, **special_ids(raw))  # none are by default
        window, n = raw["sliding_window"], config.n_layers
        windowed = "kinds" in entry.read(entry.prepare(raw))
        if not windowed and window and window < config.max_positions:
            raise UserError(
                f"a sliding window of {window} positions is not supported; full attention only"
            )
        kinds = config.kinds * (n // len(config.kinds))
        for key, of in BY_LAYER.items():
            value, each = self.stated(key), [of(config.layer_of(kind)) for kind in kinds]
            if isinstance(value, list) and value[:n] != each:
                raise UserError(f"{key}={value} is not supported; supported: {each}")
        check_special_ids(config)
        return config

    def _describe(self) -> JsonObject:
        """Makes the `config.json` that the metadata describe, but for what a family has in places
        of its own (`Family.from_gguf`)."""
        entry = FAMILIES[self.family]
        raw: JsonObject = {key: self._need(stored) for key, stored in TABLES["needed"].items()}
        several = {key: self.stated(stored) for key, stored in TABLES["optional"].items()}
        raw |= {key: value for key, value in several.items() if value is not None}
        head_dim = self._of_windows("attention.key_length")
        head_dim = int(head_dim or raw["hidden_size"] // raw["num_attention_heads"])
        rotated = int(self._of_windows("rope.dimension_count") or head_dim)
        if rotated != head_dim and not entry.partial_rotary:
            raise UserError(f"{rotated} of {head_dim} dims of a head are rotated; all or none")
        if entry.partial_rotary:  # such that it gives these dims, however it is rounded
            share = np.nextafter(rotated / head_dim, 1)
            raw["partial_rotary_factor"] = 1 if rotated == head_dim else float(share)
        # the end of text, then the end of a turn where a file names both
        ends = [self.meta(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
        window, pattern = (self.stated(f"attention.sliding_window{k}") for k in ("", "_pattern"))
        n = raw["num_hidden_layers"] = self._need("block_count") - (
            self.stated("nextn_predict_layers") or 0
        )
        raw |= {
            "model_type": self.family,
            "vocab_size": int(self._tensor("token_embd.weight").shape[1]),
            "head_dim": head_dim,
            "num_key_value_heads": self._kv_heads(raw["num_attention_heads"]),
            "intermediate_size": self._of_model("feed_forward_length"),
            "rope_theta": 10000.0 if (theta := self.stated("rope.freq_base")) is None else theta,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "sliding_window": window or None,
            "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
            "bos_token_id": self.meta("tokenizer.ggml.bos_token_id"),
            "pad_token_id": self.meta("tokenizer.ggml.padding_token_id"),
        }
        raw["rope_scaling"] = self._rope_scaling(raw["rope_theta"], head_dim)
        recurrent = self.stated("attention.recurrent_layers") if entry.recurs else None
        for flags, (yes, no) in ((pattern, (SLIDING, FULL)), (recurrent, (RECURRENT, FULL))):
            if isinstance(flags, list):
                raw["layer_types"] = [yes if flag else no for flag in flags[:n]]
        if pattern and not isinstance(pattern, list):
            raw["sliding_window_pattern"] = pattern
        if entry.recurs:  # layers that keep a state
            raw |= {key: self._need(stored) for key, stored in TABLES["states"].items()}
            width, heads = self._need("ssm.inner_size"), raw["linear_num_value_heads"]
            if heads < 1 or width % heads:
                raise UserError(
                    f"ssm.inner_size={width} is not a multiple of ssm.time_step_rank={heads}"
                )
            raw["linear_value_head_dim"] = width // heads
        return raw

    def _kv_heads(self, heads: int) -> int:
        key = "attention.head_count_kv"
        stated = self.stated(key)
        if stated is None:
            return heads
        if not isinstance(stated, list) or not FAMILIES[self.family].recurs:
            return int(self._of_model(key))
        several = {*stated} - {0}  # 0 of layers that do not attend
        if len(several) != 1:
            raise UserError(
                f"{key}={stated} is not supported: it must be the same in all layers that attend"
            )
        return int(several.pop())

    def check_all_read(self) -> None:
        """Raises UserError for a weight or bias of a layer that the config has no place for, but
        for those of layers for further tokens."""
        expected = {gguf_name(self.family, name) for name in tensor_shapes(self.config)}
        further = int(self.stated("nextn_predict_layers") or 0)
        name = first_unread(self._tensors.keys() - expected, self.config, further)
        if name is not None:
            raise UserError(
                f"{self.path}: the metadata have no place for tensor {name}: is"
                f" general.architecture={self.meta('general.architecture')!r} right, and"
                f" block_count={self.config.n_layers + further}?"
            )

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(gguf_name(self.family, name))
        if tensor is None:
            return None
        if not is_read(tensor.tensor_type):
            known = ", ".join(kind.name for kind in gguf.GGMLQuantizationType if is_read(kind))
            raise UserError(
                f"{self.path}: tensor {tensor.name} is stored as {tensor.tensor_type.name}, which"
                f" the installed gguf {version('gguf')} does not dequantise; it does: {known}"
            )
        shape = tuple(int(n) for n in tensor.shape[::-1])
        expert = _expert(name)
        if _of_state(name) == FILTER and len(shape) == 2:
            return shape[0], 1, shape[1]
        if expert is None:
            return shape
        return shape[1:] if expert < shape[0] else None

    def file(self, name: str) -> Path:
        return self._file_of.get(gguf_name(self.family, name), self.path)

    def read(self, name: str, index: Index) -> np.ndarray:
        tensor, expert = self._tensors[gguf_name(self.family, name)], _expert(name)
        shape = tuple(int(n) for n in tensor.shape[::-1])
        part = tensor.data
        rows = slice(None) if expert is None else slice(expert, expert + 1)
        note_read(self.file(name), tensor.name, part, rows)
        if expert is not None:
            part, shape = part[expert], shape[1:]
        if len(shape) == 2:
            part = part[self._row_order(name, shape)[index[0]]]
        elif len(shape) > 2:
            part = part[index[:-1]]
        columns = np.arange(shape[-1])
        if _of_state(name) in VALUE_COLUMNS and self.config.delta is not None:
            columns = _tiled(self.config.delta, columns)
        columns = columns[index[-1]]
        # of columns that follow one another, only the blocks that hold them are read
        runs = np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1)
        pieces = [
            _dequantise_run(part, tensor.tensor_type, int(run[0]), int(run[-1]) + 1) for run in runs
        ]
        values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, -1)
        if _of_state(name) == FILTER:
            return values[:, None]
        if name.endswith("linear_attn.A_log"):  # stored is -exp(A_log)
            if not (values < 0).all():
                raise UserError(
                    f"{self.path}: {tensor.name} holds -exp(A_log), and a value is not below 0"
                )
            return np.log(-values)
        around_one = FAMILIES[self.family].block.norm_around_one
        shifted = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        return values - 1 if around_one and shifted else values

    def _row_order(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the row of the file for each row in Hugging Face's order.

        The files of some families interleave the two halves that rotate together in each head of q
        and k; value heads of a state are `_tiled`.
        """
        order = np.arange(shape[0])
        parts = VALUE_ROWS.get(_of_state(name).removesuffix(".weight"))
        if parts is not None and (delta := self.config.delta) is not None:
            before = parts * delta.k_width
            return np.concatenate([order[:before], _tiled(delta, order[before:])])
        permuted = name.endswith(("q_proj.weight", "k_proj.weight"))
        if not (permuted and FAMILIES[self.family].gguf_interleaved):
            return order
        return order.reshape(-1, self.config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

    def _tensor(self, name: str) -> gguf.ReaderTensor:
        if name not in self._tensors:
            raise UserError(f"tensor {name} is missing")
        return self._tensors[name]

    def stated(self, key: str) -> Any:
        """Returns a value of the metadata by its key without the architecture, or None."""
        value = self.meta(f"{self.meta('general.architecture')}.{key}")
        return _shortest(value) if isinstance(value, float) else value

    def _need(self, key: str) -> Any:
        value = self.stated(key)
        if value is None:
            raise UserError(f"the metadata lack {self.meta('general.architecture')}.{key}")
        return value

    def _of_windows(self, key: str) -> Any:
        """Returns the value of the layers with a window, where they have one of their own."""
        own = self.stated(f"{key}_swa")
        return self.stated(key) if own is None else own

    def _of_model(self, key: str) -> Any:
        """Returns a value; of a list with one for each layer, that of the first with a window."""
        value = self._need(key)
        if not isinstance(value, list):
            return value
        if len(value) != self._need("block_count"):
            raise UserError(f"{key} has values of {len(value)} layers")
        pattern = self.stated("attention.sliding_window_pattern")
        slides = pattern if isinstance(pattern, list) else []
        return next((n for n, slid in zip(value, slides, strict=False) if slid), value[0])

    def _rope_scaling(self, theta: float, head_dim: int) -> JsonObject | None:
        """Makes `rope_scaling`; what the metadata lack follows from the lengths of contexts."""
        kind, length = self.stated("rope.scaling.type"), self._need("context_length")
        if "rope_freqs.weight" in self._tensors:
            # [R / 2] divisors: ones, which those that do not rotate follow, or those of llama3
            divisors = np.asarray(self._tensors["rope_freqs.weight"].data, np.float32)
            rotated, half = int((divisors == 1).sum()), len(divisors)
            expected = np.where(np.arange(half) < rotated, 1, UNROTATED).astype(np.float32)
            dims = self.stated("rope.dimension_count") or head_dim
            if rotated and 2 * half == dims and np.array_equal(divisors, expected):
                return {"rope_type": "proportional", "partial_rotary_factor": rotated / half}
            stored = divisors.astype(np.float64)
            rope = replace(LLAMA3_ROPE, factor=float(stored.max()))
            freq = theta ** -(np.arange(head_dim // 2) / (head_dim // 2))
            would_be = freq / rope.scaled(freq, theta, 0)
            if stored.shape != would_be.shape or not np.allclose(stored, would_be, rtol=1e-4):
                raise UserError(
                    f"rope_freqs.weight is no llama3 scaling, which would be {rope}; other"
                    " scalings are not supported"
                )
            return rope.written()
        raw: JsonObject = {"rope_type": kind}
        if "rope_factors_long.weight" in self._tensors:
            for which in ("short", "long"):
                factors = self._tensor(f"rope_factors_{which}.weight").data
                raw[f"{which}_factor"] = [_shortest(x) for x in factors]
            original = self._need("rope.scaling.original_context_length")
            stated = self.stated("rope.scaling.attn_factor")
            if np.float32(longrope_attention(length / original, original)) != np.float32(
                stated or 0
            ):
                raw["attention_factor"] = stated  # else it has more digits than float32
            return raw | {"rope_type": "longrope", "original_max_position_embeddings": original}
        if kind in (None, "none"):
            return None
        if kind == "linear":
            return raw | {"factor": self._need("rope.scaling.factor")}
        if kind == "yarn":
            raw |= {"factor": None, "original_max_position_embeddings": length}
            for name, key in TABLES["yarn"]:
                if (value := self.stated(f"rope.scaling.{key}")) is not None:
                    raw[name] = value
            return raw
        raise UserError(
            f"rope scaling {kind!r} is not supported; supported: linear, llama3, yarn, longrope"
        )


@cache
def _names(architecture: str) -> gguf.TensorNameMap:
    """Returns Hugging Face name -> GGUF name, as llama.cpp's converter has it."""
    (found,) = (arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(found, n_blocks=1)


def _expert(name: str) -> int | None:
    """Returns the expert that a tensor is of; a file has one tensor of all."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _of_state(name: str) -> str:
    """Returns the end of the name of a tensor of a layer with a state; "" of all others."""
    return name.partition(".linear_attn.")[2]


def _tiled(delta: Delta, places: np.ndarray) -> np.ndarray:
    """Returns those of the `places` in the file, of one or more for each value head, in Hugging
    Face's order: the file has the first value head of each key head, then the second of each."""
    tiles = places.reshape(delta.v_heads // delta.k_heads, delta.k_heads, -1)
    return tiles.swapaxes(0, 1).reshape(-1)


def gguf_name(family: str, name: str) -> str:
    """Returns `model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`; of a tensor of one
    expert, the one of all."""
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    name = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")  # as the converter does
    layer = re.search(r"\.\d+\.", name)
    number = layer.group() if layer else ".0."
    architecture = FAMILIES[family].gguf
    assert architecture is not None, family
    unnamed = TABLES["unnamed"].get(name.partition(number)[2])
    if unnamed is not None:
        return f"blk{number}{unnamed}"
    first, kinds = name.replace(number, ".0.", 1), (".weight", ".bias")
    found = _names(architecture).get_name(
        first if first.endswith((*kinds, "A_log")) else f"{first}.weight", kinds
    )
    assert found is not None, name
    return found.replace(".0.", number, 1)


def _dequantise_run(
    data: np.ndarray, kind: gguf.GGMLQuantizationType, start: int, stop: int
) -> np.ndarray:
    """Returns the columns from `start` up to `stop` of stored rows, as float32."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if block == 1 and data.dtype != np.uint8:
        return np.ascontiguousarray(data[..., start:stop], np.float32)
    first, last = start // block, -(-stop // block)
    blocks = np.ascontiguousarray(data[..., first * size : last * size])
    return dequantize(blocks, kind)[..., start - first * block : stop - first * block]


def _shortest(value: float) -> float:
    """Returns the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


@lru_cache(maxsize=4)
def _opened(path: Path, *states: tuple[int, int]) -> GgufFile:
    return GgufFile(path)


def _parts(path: Path) -> list[Path]:
    """Returns all files of a model of which one is named. Raises UserError where one is missing."""
    parts = [path.with_name(name) for name in gguf_parts(path.name)]
    for part in parts:
        if len(parts) > 1 and not part.is_file():
            raise UserError(f"{part} is missing: the model is in {len(parts)} files")
    return parts


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Returns `GgufFile`, read once while its files stay the same: token lists take seconds."""
    place = Path(path)
    if not place.is_file():
        raise UserError(f"model {str(path)!r}: there is no such file")
    states = [part.stat() for part in _parts(place)]
    return _opened(place, *((state.st_size, state.st_mtime_ns) for state in states))


TOKENIZERS = ("gpt2", "llama", "gemma4")
"""`tokenizer.ggml.model`: a BPE over bytes, one of SentencePiece (Llama 2), one over characters."""
CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
"""Token types of GGUF: special, always one token, none (where the embedding has more rows than
there are tokens), and one raw byte (SentencePiece)."""
SPACE = "\u2581"
"""SentencePiece's stand-in for a space."""


def read_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a GGUF file, with its chat template."""
    file = open_gguf(path)
    with about(path), user_input("the metadata cannot be understood"):
        return build_tokenizer(file)


def build_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """Does what `read_tokenizer` does, for a file that is open.

    Raises:
        UserError: a tokenizer model or a pre-tokenizer that is not supported.
    """
    from transformers import PreTrainedTokenizerFast  # takes seconds

    def meta(key: str) -> Any:
        return file.meta(f"tokenizer.ggml.{key}")

    def supported(key: str, names: Iterable[str]) -> str:
        name = meta(key)
        if name not in names:
            known = ", ".join(names)
            raise UserError(f"tokenizer.ggml.{key}={name!r} is not supported; supported: {known}")
        return str(name)

    kind, tokens = supported("model", TOKENIZERS), meta("tokens")
    types: list[int] = meta("token_type") or [1] * len(tokens)
    used = [i for i, of in enumerate(types) if of != UNUSED]
    vocab, add_bos = {tokens[i]: i for i in used}, True
    if kind == "llama":  # the merges follow from the scores of the pieces
        scores = meta("scores")
        pieces = (i for i in used if types[i] not in (CONTROL, BYTE))
        ranked = sorted(pieces, key=lambda i: (-scores[i], i))
        merges = [
            (tokens[i][:cut], tokens[i][cut:])
            for i in ranked
            for cut in range(1, len(tokens[i]))
            if tokens[i][:cut] in vocab and tokens[i][cut:] in vocab
        ]
    else:
        pairs = (merge.partition(" ") for merge in meta("merges"))
        merges = [(first, second) for first, _, second in pairs]
    if kind == "gpt2":  # over bytes
        pre = TABLES["pre"][supported("pre", TABLES["pre"])]
        whole_words, words = pre.get("whole_words", False), pre.get("words")
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=whole_words))
        if pre.get("nfc"):
            tokenizer.normalizer = normalizers.NFC()
        split = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
        digits = [pre_tokenizers.Digits(individual_digits=True)] * pre.get("single_digits", False)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, *digits, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        add_bos = pre.get("add_bos", False)
    else:  # over characters, with bytes for the rest
        unknown = tokens[meta("unknown_token_id") or 0]
        bpe = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(bpe)
        prefix = kind == "llama" and meta("add_space_prefix") is not False
        replace = normalizers.Replace(" ", SPACE)
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
        )
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    each = [*zip(tokens, types, strict=True)]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t, of in each if of == CONTROL])
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, of in each if of == USER_DEFINED]
    )
    special = {
        key: tokens[i]
        for key, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (i := meta(f"{field}_token_id")) is not None
    }
    stated = meta("add_bos_token")
    if (add_bos if stated is None else stated) and "bos" in special:
        bos = special["bos"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    start = "tokenizer.chat_template"
    named = {key.removeprefix(f"{start}."): file.meta(key) for key in file.keys_of(f"{start}.")}
    templates = file.meta(start)
    if named:
        templates = named if templates is None else {"default": templates, **named}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=templates,
        model_max_length=file.meta(f"{file.meta('general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
        **{f"{key}_token": token for key, token in special.items()},
    )
