"""A teacher's scores on disk, written by `python -m jaxrl.score` and read by runs.

    DIR/manifest.json              whose scores these are, and of what kind: `ScoreManifest`
    DIR/teacher/                   config.json and tokenizer of the teacher
    DIR/head.safetensors           its LM head, for the signal `hidden`
    DIR/shard-00000.safetensors    rows: a key, a length, and the signal of each of its tokens

A row is a completion of a prompt, and is found by a digest of their tokens. The tokens of a shard's
rows lie one after the other, without padding. A shard is renamed to its name once it is on the disk
as a whole, so that a folder is usable at any moment, and every row in it is whole.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxrl.checkpoint.store import put_file
from jaxrl.errors import UserError, user_path
from jaxrl.formats import hf
from jaxrl.models.config import DecoderConfig
from jaxrl.teacher.protocol import DType, Options, ProtocolMessage, Shapes, first_mistake
from jaxrl.types import Completion, Prompt, Sequences, TeacherSignal, signal_of

FORMAT = 1
MANIFEST, TEACHER, HEAD = "manifest.json", "teacher", "head.safetensors"
SHARDS = "shard-*.safetensors"
SHARD_BYTES = 1 << 28
SHARD_S = 120.0
"""Seconds after which a shard is written although it is small: what a kill can lose."""
KEY_BYTES = 16
OPEN_SHARDS = 64
INT8_MOST = 127.0
OF_ROWS = ("keys", "prompts", "lengths", "stopped")
"""Tensors of a shard that have an entry for each row."""
SAMPLED = {
    "tokens": ("int32", ()),
    "logprobs": ("float32", ()),
    "sampler_logprobs": ("float32", ()),
}
"""Tensors of the teacher's own samples, beside their scores."""
Stored = Literal["float32", "bfloat16", "int8"]
"""How hidden states lie on disk. int8: each token's with a scale of its own, float32."""


class StorageError(ProtocolMessage):
    """KL(P || P') of the teacher's distribution P and the one that the stored hidden states give,
    in nats per token, at `distill.distill_temperature`."""

    mean: float
    most: float
    tokens: int
    """Tokens of the sample that it was measured on."""

    def __str__(self) -> str:
        return (
            f"KL(teacher || stored) is {self.mean:.2g} nats a token on average, {self.most:.2g} at"
            f" most, of {self.tokens} tokens"
        )


class ScoreManifest(ProtocolMessage):
    """Whose scores a folder holds, and of what kind."""

    format: int
    model: str
    """The teacher, as the user named it."""
    digest: str
    """Of its files (`checkpoint.digest.digest_model`)."""
    dtype: DType
    """In which it computed."""
    stored: Stored
    """Of its hidden states; float32 for other signals."""
    options: Options
    """The part of `distill.*` that scores depend on."""
    samples: int
    """The teacher's samples of each prompt; 0: the completions are the data's."""
    error: StorageError | None = None
    """Measured where `stored` cannot hold what the teacher computed."""

    def key(self, prompt: Sequence[int], completion: Sequence[int] | None) -> bytes:
        """Returns the key of what is scored as a whole: a row of the data, or a prompt with its
        samples."""
        return key_of(prompt, () if self.samples or completion is None else completion)


def key_of(prompt: Sequence[int], completion: Sequence[int] = ()) -> bytes:
    """Digests the tokens of a row; of a prompt alone without a completion."""
    digest = hashlib.blake2b(len(prompt).to_bytes(8, "little"), digest_size=KEY_BYTES)
    for tokens in (prompt, completion):
        digest.update(np.asarray(tokens, "<i4").tobytes())
    return digest.digest()


def quantised(hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantises hidden states [..., D] to int8 [..., D] and scales [...] float32: value = int8 *
    scale."""
    hidden = np.asarray(hidden, np.float32)
    most = np.abs(hidden).max(-1)
    scale = np.where(most > 0, most / INT8_MOST, 1).astype(np.float32)
    return np.rint(hidden / scale[..., None]).astype(np.int8), scale


def dequantised(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns the float32 [..., D] that `quantised` made codes of."""
    return values.astype(np.float32) * scale[..., None]


def in_storage(signal: TeacherSignal, stored: Stored) -> dict[str, np.ndarray]:
    """Returns the arrays of a signal as a shard has them; the first dims stay."""
    arrays = {name: np.asarray(x) for name, x in vars(signal).items() if x is not None}
    if "hidden" not in arrays:
        return arrays
    if stored == "int8":
        values, scale = quantised(arrays["hidden"])
        return {"hidden": values, "scale": scale}
    return {"hidden": arrays["hidden"].astype(jnp.dtype(stored))}


def shapes_of(manifest: ScoreManifest, width: int) -> Shapes:
    """Returns the tensors of a shard that have an entry for each token.

    Args:
        width: of the teacher's hidden states.
    """
    found = manifest.options.tensors(manifest.stored, width)
    if manifest.stored == "int8":
        found["scale"] = "float32", ()
    return found | (SAMPLED if manifest.samples else {})


def token_bytes(shapes: Shapes) -> int:
    """Returns the bytes of a token on disk."""
    return sum(jnp.dtype(dtype).itemsize * math.prod(dims) for dtype, dims in shapes.values())


@dataclass(frozen=True)
class ScoredRow:
    """A completion with its scores, on the way to the disk."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    tensors: Mapping[str, np.ndarray]
    """Those of `shapes_of`, of the completion's tokens [n, ...]."""
    stopped: bool = True
    """The completion's finish reason is `stop`."""

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())


def write_manifest(
    folder: Path,
    manifest: ScoreManifest,
    config: DecoderConfig,
    tokenizer: Path,
    head: np.ndarray | None,
) -> None:
    """Writes everything but the rows; the manifest comes last."""
    hf.write_description(folder / TEACHER, config, manifest.dtype, tokenizer)
    if head is not None:
        put_file(folder / HEAD, partial(_save, {"head": head}))
    text = manifest.model_dump_json(indent=1)
    put_file(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def _save(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    # Not `save_file`, whose error does not say what the disk refused.
    path.write_bytes(save({name: np.ascontiguousarray(x) for name, x in tensors.items()}))


class ScoreWriter:
    """Collects rows, and writes them as shards in a thread of its own, one at a time. Removes what
    a killed process left of a shard."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES):
        for name in ("shard-*.safetensors", HEAD, MANIFEST):
            for left in folder.glob(f".{name}.partial"):
                with suppress(IsADirectoryError):
                    left.unlink(missing_ok=True)
        there = shard_files(folder)
        self._folder, self._shard_bytes = folder, shard_bytes
        self._next = _number(there[-1]) + 1 if there else 0
        self._rows: list[ScoredRow] = []
        self._held, self._since = 0, time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._writing: Future[None] | None = None

    def add(self, rows: Sequence[ScoredRow]) -> None:
        """Takes rows that belong into one shard, as a prompt's samples do.

        Raises:
            OSError: the disk refused the shard before; its rows are lost.
        """
        self._rows += rows
        self._held += sum(row.nbytes for row in rows)
        if self._held >= self._shard_bytes or time.monotonic() - self._since > SHARD_S:
            self._start()

    def flush(self) -> None:
        """Returns once all rows are on the disk. Raises OSError as `add` does."""
        self._wait()
        self._start()
        self._wait()

    def _start(self) -> None:
        self._wait()
        if self._rows:
            self._writing = self._thread.submit(self._write, self._rows)
            self._rows, self._held = [], 0
        self._since = time.monotonic()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, rows: Sequence[ScoredRow]) -> None:
        path = self._folder / f"shard-{self._next:05}.safetensors"
        put_file(path, partial(_save, _shard(rows)))
        self._next += 1


def shard_files(folder: Path) -> list[Path]:
    """Lists the shards in the order in which they were written."""
    return sorted(folder.glob(SHARDS), key=_number)


def _number(shard: Path) -> int:
    return int(shard.stem.partition("-")[2])


def _shard(rows: Sequence[ScoredRow]) -> dict[str, np.ndarray]:
    keys = b"".join(key_of(row.prompt, row.completion) for row in rows)
    prompts = b"".join(key_of(row.prompt) for row in rows)
    tensors: dict[str, np.ndarray] = {
        "keys": np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES),
        "prompts": np.frombuffer(prompts, np.uint8).reshape(-1, KEY_BYTES),
        "lengths": np.array([len(row.completion) for row in rows], np.int32),
        "stopped": np.array([row.stopped for row in rows], np.uint8),
    }
    for name in rows[0].tensors if rows else ():
        tensors[name] = np.concatenate([row.tensors[name] for row in rows])
    return tensors


@dataclass(frozen=True)
class _Index:
    """Where every row is; the arrays have an entry for each row, in the order of the shards."""

    keys: _Keys
    prompts: _Keys
    shard: np.ndarray
    start: np.ndarray
    """Tokens of the shard before the row."""
    length: np.ndarray
    stopped: np.ndarray


class _Keys:
    """Digests, and at which row each comes first."""

    def __init__(self, keys: np.ndarray):
        """
        Args:
            keys: [n, KEY_BYTES] uint8.
        """
        flat = np.ascontiguousarray(keys).view(f"S{KEY_BYTES}").reshape(-1)
        self._sorted, self._first = np.unique(flat, return_index=True)

    def find(self, keys: Sequence[bytes]) -> np.ndarray:
        """Finds the row [n] of each key, -1 where there is none."""
        wanted = np.array(keys, f"S{KEY_BYTES}")
        if not len(self._sorted):
            return np.full(len(wanted), -1)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        return np.where(self._sorted[at] == wanted, self._first[at], -1)


class ScoreCache:
    """A folder of scores; rows are read where they are asked for."""

    def __init__(self, path: str | Path):
        """
        Raises:
            UserError: nothing there, or nothing that can be used.
        """
        self.path = user_path(path)
        self.name = str(path)
        self.manifest = read_manifest(self.path, f"teacher.cache={path}")
        self.tokenizer_path = self.path / TEACHER
        self.config = hf.read_config(self.tokenizer_path)
        self._files = shard_files(self.path)
        self._open = lru_cache(OPEN_SHARDS)(lambda shard: _opened(self._files[shard]))

    def __len__(self) -> int:
        return len(self._index.length)

    @property
    def shapes(self) -> Shapes:
        return shapes_of(self.manifest, self.config.d_model)

    def has(self, keys: Sequence[bytes]) -> np.ndarray:
        """Returns [n] bool: whether there are scores of what has these keys
        (`ScoreManifest.key`)."""
        index = self._index.prompts if self.manifest.samples else self._index.keys
        return index.find(keys) >= 0

    def head(self, rows: int) -> np.ndarray:
        """Returns the teacher's LM head [V, D], cut after `rows`."""
        with _opened(self.path / HEAD) as file:
            head: np.ndarray = file.get_tensor("head")
        return head[:rows]

    def signal(self, sequences: Sequences, fields: Iterable[str], dtype: DType) -> TeacherSignal:
        """Returns the scores of the completions, [B, C, ...] as numpy arrays, with zeros at their
        padding.

        Args:
            sequences: numpy arrays.
            fields: names of those of `TeacherSignal` to read.
            dtype: of hidden states.

        Raises:
            UserError: a row has no scores.
        """
        tokens, mask = np.asarray(sequences.tokens), np.asarray(sequences.mask)
        b, c = np.asarray(sequences.loss_mask).shape
        split = tokens.shape[1] - c
        rows = [
            (row[:split][real[:split]], row[split:][real[split:]])
            for row, real in zip(tokens, mask, strict=True)
        ]
        real_rows = [i for i in range(b) if mask[i].any()]
        found = self._index.keys.find([key_of(*rows[i]) for i in real_rows])
        if (found < 0).any():
            raise UserError(
                f"teacher.cache={self.name} has no scores of {int((found < 0).sum())} of the"
                f" {len(found)} completions of a batch"
            )
        out = {}
        for name in fields:
            kind, dims = self.shapes[name]
            out[name] = np.zeros((b, c, *dims), jnp.dtype(dtype if name == "hidden" else kind))
            for i, at in zip(real_rows, found, strict=True):
                value = self._tokens(name, at)
                if name == "hidden" and self.manifest.stored == "int8":
                    value = dequantised(value, self._tokens("scale", at))
                out[name][i, : len(value)] = value
        return signal_of(out)

    def samples(self, prompts: Sequence[Prompt], n: int) -> list[list[Completion]]:
        """Returns the first n of the teacher's samples of each prompt, without their texts.

        Raises:
            UserError: a prompt has none.
        """
        first = self._index.prompts.find([key_of(prompt.tokens) for prompt in prompts])
        if (first < 0).any():
            raise UserError(
                f"teacher.cache={self.name} has no samples of {int((first < 0).sum())} of the"
                f" {len(first)} prompts of a batch"
            )
        return [[self._sample(at + i) for i in range(n)] for at in first]

    def _sample(self, at: int) -> Completion:
        tokens = tuple(self._tokens("tokens", at).tolist())
        logprobs = self._tokens("logprobs", at), self._tokens("sampler_logprobs", at)
        return Completion(tokens, *logprobs, "stop" if self._index.stopped[at] else "length")

    def _tokens(self, name: str, at: int) -> np.ndarray:
        """Returns the entries of a tensor that are of row `at`."""
        index = self._index
        start, shard = int(index.start[at]), int(index.shard[at])
        stop = start + int(index.length[at])
        return self._open(shard).get_slice(name)[start:stop]

    @cached_property
    def _index(self) -> _Index:
        parts = [_shard([])]  # has no row, so that a folder without shards has an index too
        for path in self._files:
            with _opened(path) as file:
                parts.append({name: file.get_tensor(name) for name in OF_ROWS})
        rows = [len(part["lengths"]) for part in parts]
        shard = np.repeat(np.arange(-1, len(self._files)), rows)
        start = [np.cumsum(part["lengths"], dtype=np.int64) - part["lengths"] for part in parts]
        keys, prompts, length, stopped = (
            np.concatenate([part[name] for part in parts]) for name in OF_ROWS
        )
        return _Index(_Keys(keys), _Keys(prompts), shard, np.concatenate(start), length, stopped)


def read_manifest(folder: Path, name: str) -> ScoreManifest:
    """Reads the manifest of a folder of scores, which the user gave as `name`. Raises UserError."""
    path = folder / MANIFEST
    try:
        manifest = ScoreManifest.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = f"there is no {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{name}: {what}; python -m jaxrl.score writes folders of scores") from None
    except OSError as error:
        raise UserError(f"{name}: {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise UserError(f"{name}: {path} cannot be understood: {first_mistake(error)}") from None
    if manifest.format != FORMAT:
        raise UserError(
            f"{name}: written by another jaxrl (format {manifest.format}, this one reads {FORMAT});"
            " score again into another folder"
        )
    return manifest


def _opened(path: Path) -> safe_open:
    """Returns the tensors of a safetensors file, which are read when they are asked for."""
    try:
        return safe_open(path, "numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: truncated or damaged: {error}; remove it, and score again what it held"
        ) from error
