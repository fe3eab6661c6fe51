"""A teacher's scores on disk, written by `python -m jaxrl.score` and read by runs, in which
`CachedTeacher` is the role `teacher`.

    DIR/manifest.json              whose scores these are, and of what kind: `ScoreManifest`
    DIR/teacher/                   config.json and tokenizer of the teacher
    DIR/head.safetensors           its LM head, for the signal `hidden`
    DIR/shard-00000.safetensors    rows: a key, a length, and the signal of each of its tokens
    DIR/checksums.json             of head and shards: file -> tensor -> CRC-32 (`checksum`)

A row is a completion of a prompt, and is found by a digest of their tokens. The tokens of a shard's
rows lie one after the other, without padding. A shard is renamed to its name once it is on the disk
as a whole, and its checksums before it, so that a folder is usable at any moment, and every row in
it is whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import JsonValue, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxrl.algorithms.protocols import SamplingTeacherRole
from jaxrl.config.schema import Config
from jaxrl.config.section import DType
from jaxrl.errors import UserError, user_path
from jaxrl.formats import hf
from jaxrl.models.config import DecoderConfig
from jaxrl.process import atomic_files
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.roles.microbatch import part_rows
from jaxrl.runtime.worker import phase
from jaxrl.teacher import protocol
from jaxrl.types import Completion, Prompt, Rollout, Sequences, TeacherSignal, signal_of

FORMAT = 1
MANIFEST, TEACHER, HEAD = "manifest.json", "teacher", "head.safetensors"
CHECKSUMS = "checksums.json"
SHARDS = "shard-*.safetensors"
SHARD_BYTES = 1 << 28
SHARD_S = 120.0
"""Seconds after which a shard is written although it is small: what a kill can lose."""
KEY_BYTES = 16
OPEN_SHARDS = 64
BAND_ITEMS = 1 << 20
"""Of a tensor that is compared with its checksum, as many numbers are in memory."""
STORED_AS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
}
"""Name of a dtype -> its name in a safetensors header."""
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


class StorageError(protocol.ProtocolMessage):
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


class ScoreManifest(protocol.ProtocolMessage):
    """Whose scores a folder holds, and of what kind."""

    format: int
    model: str
    """The teacher, as the user named it."""
    digest: str
    """Of its files (`checkpoint.fingerprint.digest_model`)."""
    dtype: DType
    """In which it computed."""
    stored: Stored
    """Of its hidden states; float32 for other signals."""
    options: protocol.Options
    """The part of `distill.*` that scores depend on."""
    samples: int
    """The teacher's samples of each prompt; 0: the completions are the data's."""
    error: StorageError | None = None
    """Measured where `stored` cannot hold what the teacher computed."""
    longest: protocol.Positive | None = None
    """Tokens of the longest sequence that the teacher was made for (`DecoderConfig.for_length`);
    None: an older jaxrl did not note it."""
    sampling: dict[str, JsonValue] = {}
    """What the samples depend on (`sampling_of`); empty without samples, and in folders of an older
    jaxrl."""

    def key(self, prompt: Sequence[int], completion: Sequence[int] | None) -> bytes:
        """Returns the key of what is scored as a whole: a row of the data, or a prompt with its
        samples."""
        return key_of(prompt, () if self.samples or completion is None else completion)


def sampling_of(config: Config, end_ids: Sequence[int]) -> dict[str, JsonValue]:
    """Returns the settings that the teacher's samples depend on beside model and prompts, by key;
    nothing where it samples none."""
    if not config.distill.seq_kd:
        return {}
    keys = config.sampling.model_dump(mode="json")
    found: dict[str, JsonValue] = {f"sampling.{key}": value for key, value in keys.items()}
    found["max_new_tokens"], found["end tokens"] = config.max_new_tokens, [*sorted(end_ids)]
    return found


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
    arrays = {name: np.asarray(x) for name, x in protocol.present(signal).items()}
    if "hidden" not in arrays:
        return arrays
    if stored == "int8":
        values, scale = quantised(arrays["hidden"])
        return {"hidden": values, "scale": scale}
    return {"hidden": arrays["hidden"].astype(jnp.dtype(stored))}


def shapes_of(manifest: ScoreManifest, width: int) -> protocol.Shapes:
    """Returns the tensors of a shard that have an entry for each token.

    Args:
        width: of the teacher's hidden states.
    """
    shapes = manifest.options.tensors(manifest.stored, width)
    if manifest.stored == "int8":
        shapes["scale"] = "float32", ()
    return shapes | (SAMPLED if manifest.samples else {})


@dataclass(frozen=True)
class ScoredRow:
    """A completion with its scores, on the way to the disk."""

    prompt: Sequence[int]
    completion: Sequence[int]
    tensors: Mapping[str, np.ndarray]
    """Those of `shapes_of`, of the completion's tokens [n, ...]."""
    stopped: bool = True
    """The completion's finish reason is `stop`."""


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
        write_tensors(folder / HEAD, {"head": head})
    text = manifest.model_dump_json(indent=1)
    atomic_files.put_file(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def _save(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    # Not `save_file`, whose error does not say what the disk refused.
    path.write_bytes(save({name: np.ascontiguousarray(x) for name, x in tensors.items()}))


def checksum(tensor: Any) -> int:
    """Returns the CRC-32 of a tensor's dtype, shape and contents, of a numpy array or of what
    `safe_open` returns a slice of."""
    if isinstance(tensor, np.ndarray):
        kind, shape = STORED_AS[tensor.dtype.name], tensor.shape
    else:
        kind, shape = tensor.get_dtype(), tuple(tensor.get_shape())
    crc, rows = zlib.crc32(f"{kind}{list(shape)}".encode()), shape[0]
    band = max(1, BAND_ITEMS // max(1, math.prod(shape[1:])))
    for at in range(0, rows, band):
        part = np.ascontiguousarray(tensor[at : min(at + band, rows)])
        crc = zlib.crc32(part.reshape(-1).view(np.uint8), crc)
    return crc


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file of a folder of scores. It gets its name after its checksums are noted: no file
    is without."""

    def write(begun: Path) -> None:
        _save(tensors, begun)
        sums = {name: checksum(x) for name, x in tensors.items()}
        _write_checksums(path.parent, {path.name: sums})

    atomic_files.put_file(path, write)


def _write_checksums(folder: Path, more: dict[str, dict[str, int]]) -> None:
    text = json.dumps(read_checksums(folder) | more, indent=0)
    atomic_files.put_file(folder / CHECKSUMS, lambda file: file.write_text(text, encoding="utf-8"))


def _note_checksums(folder: Path, files: Iterable[Path]) -> None:
    sums = {}
    for path in files:
        with safe_open(path, "numpy") as file:
            sums[path.name] = {name: checksum(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    _write_checksums(folder, sums)


_SUMS = TypeAdapter(dict[str, dict[str, int]])


def read_checksums(folder: Path) -> dict[str, dict[str, int]]:
    """Returns file -> tensor -> checksum, of those that are noted in a folder of scores. Raises
    UserError."""
    path = folder / CHECKSUMS
    try:
        return _SUMS.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:  # an older jaxrl wrote none
        return {}
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else protocol.first_mistake(error)
        raise UserError(
            f"{path} cannot be read: {why}; put it back, or score again into another folder"
        ) from None


class StoredTensors:
    """The tensors of a file of a folder of scores; each is compared with its checksum before the
    first of it is used."""

    def __init__(self, path: Path, sums: Mapping[str, Mapping[str, int]], shapes: protocol.Shapes):
        """
        Args:
            sums: file -> tensor -> checksum; none in a folder of an older jaxrl.
            shapes: of the tensors, without their first dim.

        Raises:
            UserError: another file is there, or one that cannot be read.
        """
        self.path, self._shapes, self._compared = path, shapes, set[str]()
        self._sums = sums.get(path.name)
        if sums and self._sums is None:
            raise self._damaged(f"{CHECKSUMS} does not have it")
        self._open()

    def _open(self) -> None:
        self._compared.clear()
        try:
            self._signature = _signature(self.path)
            self._file = safe_open(self.path, "numpy")
        except (SafetensorError, OSError) as error:
            raise self._damaged(str(error)) from error
        if problem := self._misfit(self._shapes):
            raise self._damaged(problem)

    def _misfit(self, shapes: protocol.Shapes) -> str | None:
        lengths = {}
        for name, (kind, dims) in shapes.items():
            if name not in self._file.keys():  # noqa: SIM118
                return f"it has no tensor {name}"
            tensor = self._file.get_slice(name)
            dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            if dtype != STORED_AS[kind] or shape[1:] != dims or not shape:
                return f"its {name} is {dtype} {list(shape)}, not {STORED_AS[kind]} [n, {dims}]"
            lengths[name] = shape[0]
        if OF_ROWS[0] not in shapes:
            return None
        rows = {lengths.pop(name) for name in OF_ROWS}
        tokens = self._read("lengths")
        n = int(tokens.sum(dtype=np.int64))
        if len(rows) > 1 or {*lengths.values()} - {n} or tokens.min(initial=0) < 0:
            return "its tensors have other lengths than its rows"
        return None

    def _damaged(self, why: str) -> UserError:
        return UserError(
            f"{self.path}: truncated or damaged: {why}; remove it, and score its rows again"
        )

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Returns rows of a tensor. Raises UserError where it is not what was written, or is no
        more what was opened."""
        with suppress(FileNotFoundError):  # what was opened is still there
            if _signature(self.path) != self._signature:
                try:
                    assert self._sums is not None, "an older jaxrl wrote no checksums"
                    self._open()
                    return self._read(name, rows)
                except (UserError, AssertionError) as error:
                    raise UserError(
                        f"{self.path} has changed since the run opened it ({error}): put it back,"
                        " and start again"
                    ) from error
        return self._read(name, rows)

    def _read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        tensor = self._file.get_slice(name)
        if self._sums is not None and name not in self._compared:
            if checksum(tensor) != self._sums.get(name):
                raise self._damaged(f"{name} differs from what was written (another checksum)")
            self._compared.add(name)
        values: np.ndarray = tensor[rows]
        return values


def _signature(path: Path) -> tuple[int, ...]:
    """Returns numbers of a file that change when it is written or replaced."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


class ScoreWriter:
    """Collects rows, and writes them as shards in a thread of its own, one at a time. Removes what
    a killed process left of a shard."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES):
        for name in (SHARDS, HEAD, MANIFEST, CHECKSUMS):
            for left in folder.glob(atomic_files.PARTIAL.format(name)):
                with suppress(IsADirectoryError):
                    left.unlink(missing_ok=True)
        there = shard_files(folder)
        if there and not (folder / CHECKSUMS).exists():  # an older jaxrl wrote these
            _note_checksums(folder, [file for file in (folder / HEAD, *there) if file.exists()])
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
        self._held += sum(x.nbytes for row in rows for x in row.tensors.values())
        if self._held >= self._shard_bytes or time.monotonic() - self._since > SHARD_S:
            self._start()

    def flush(self) -> None:
        """Returns once all rows are on the disk. Raises OSError as `add` does."""
        self._start()
        self._start()

    def _start(self) -> None:
        """Waits for the shard that is being written, and begins the next one."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        if self._rows:
            self._writing = self._thread.submit(self._write, self._rows)
            self._rows, self._held = [], 0
        self._since = time.monotonic()

    def _write(self, rows: Sequence[ScoredRow]) -> None:
        path = self._folder / f"shard-{self._next:05}.safetensors"
        write_tensors(path, _shard(rows))
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

    rows: dict[bytes, int]
    """Digest of prompt and completion -> the first such row."""
    prompts: dict[bytes, int]
    """Digest of a prompt -> the first of its rows."""
    shard: np.ndarray
    start: np.ndarray
    """Tokens of the shard before the row."""
    length: np.ndarray
    stopped: np.ndarray


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
        self._sums = read_checksums(self.path)
        self._open = lru_cache(OPEN_SHARDS)(self._opened)

    def __len__(self) -> int:
        return len(self._index.length)

    @property
    def longest_row(self) -> int:
        """Returns the tokens of the longest completion."""
        return int(self._index.length.max(initial=0))

    def has(self, key: bytes) -> bool:
        """Returns whether there are scores of what has this key (`ScoreManifest.key`)."""
        return key in (self._index.prompts if self.manifest.samples else self._index.rows)

    def head(self, rows: int) -> np.ndarray:
        """Returns the teacher's LM head [V, D], cut after `rows`."""
        dims = self.manifest.dtype, (self.config.d_model,)
        return self._stored(self.path / HEAD, {"head": dims}).read("head")[:rows]

    @property
    def digests(self) -> dict[str, str]:
        """Returns a digest of each file that has checksums."""
        there = (self.path / HEAD, *self._files)
        return {
            file.name: hashlib.sha256(
                repr(sorted(self._sums[file.name].items())).encode()
            ).hexdigest()
            for file in there
            if file.name in self._sums
        }

    def _stored(self, path: Path, shapes: protocol.Shapes) -> StoredTensors:
        return StoredTensors(path, self._sums, shapes)

    def _opened(self, shard: int) -> StoredTensors:
        shapes = shapes_of(self.manifest, self.config.d_model)
        rows: protocol.Shapes = dict.fromkeys(("keys", "prompts"), ("uint8", (KEY_BYTES,)))
        rows |= {"lengths": ("int32", ()), "stopped": ("uint8", ())}
        return self._stored(self._files[shard], rows | shapes)

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
        found = [self._index.rows.get(key_of(*rows[i]), -1) for i in real_rows]
        if -1 in found:
            raise UserError(
                f"teacher.cache={self.name} has no scores of {found.count(-1)} of the {len(found)}"
                " completions of a batch"
            )
        out, shapes = {}, shapes_of(self.manifest, self.config.d_model)
        for name in fields:
            kind, dims = shapes[name]
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
        first = [self._index.prompts.get(key_of(prompt.tokens), -1) for prompt in prompts]
        if -1 in first:
            raise UserError(
                f"teacher.cache={self.name} has no samples of {first.count(-1)} of the {len(first)}"
                " prompts of a batch"
            )

        def sample(at: int) -> Completion:
            tokens, *logprobs = (self._tokens(name, at) for name in SAMPLED)
            reason: Literal["stop", "length"] = "stop" if self._index.stopped[at] else "length"
            return Completion(tuple(tokens.tolist()), logprobs[0], logprobs[1], reason)

        return [[sample(at + i) for i in range(n)] for at in first]

    def _tokens(self, name: str, at: int) -> np.ndarray:
        index = self._index
        start, shard = int(index.start[at]), int(index.shard[at])
        stop = start + int(index.length[at])
        return self._open(shard).read(name, slice(start, stop))

    @cached_property
    def _index(self) -> _Index:
        parts = [_shard([])]  # has no row, so that a folder without shards has an index too
        for i in range(len(self._files)):
            file = self._opened(i)
            parts.append({name: file.read(name) for name in OF_ROWS})
        rows = [len(part["lengths"]) for part in parts]
        shard = np.repeat(np.arange(-1, len(self._files)), rows)
        start = [np.cumsum(part["lengths"], dtype=np.int64) - part["lengths"] for part in parts]
        keys, prompts, length, stopped = (
            np.concatenate([part[name] for part in parts]) for name in OF_ROWS
        )
        index = _Index({}, {}, shard, np.concatenate(start), length, stopped)
        digests = (x.view(f"V{KEY_BYTES}")[:, 0].tolist() for x in (keys, prompts))
        for i, (row, prompt) in enumerate(zip(*digests, strict=True)):
            index.rows.setdefault(row, i)
            index.prompts.setdefault(prompt, i)
        return index


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
        raise UserError(
            f"{name}: {path} cannot be understood: {protocol.first_mistake(error)}"
        ) from None
    if manifest.format != FORMAT:
        raise UserError(
            f"{name}: written by another jaxrl (format {manifest.format}, this one reads {FORMAT});"
            " score again into another folder"
        )
    return manifest


class CachedTeacher:
    """Reads the scores of completions that no policy sampled. A teacher with devices, where there
    is one, scores the others."""

    def __init__(
        self,
        config: Config,
        cache: ScoreCache,
        vocab_size: int,
        teacher: SamplingTeacherRole | None = None,
    ):
        self._cache, self._live = cache, teacher
        self._dtype = config.teacher.compute_dtype
        options = protocol.Options.of(config.distill, vocab_size)
        self._fields = tuple(options.tensors(self._dtype, cache.config.d_model))

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """Returns the teacher's signal for each completion position of a slice of the rows; read
        signals are numpy arrays."""
        if self._live is not None and rollout.policy_version >= 0:
            return self._live.score(rollout, part, parts, rewards)
        rows = part_rows(len(rollout.group_ids), part, parts, 1)
        if rows is None:
            return None
        sequences = jax.tree.map(lambda x: np.asarray(x)[rows], rollout.sequences)
        with phase(f"read rows {rows.start}-{rows.stop} of {len(rollout.group_ids)}"):
            return self._cache.signal(sequences, self._fields, self._dtype)

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        assert self._live is not None, "scores on disk sample nothing"
        return self._live.generate(prompts, step)

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        assert self._live is not None, "scores on disk sample nothing"
        return self._live.sample(prompts)


def check_cache(
    config: Config,
    cache: ScoreCache,
    digest: str | None,
    vocab_size: int,
    end_ids: Sequence[int],
    longest: int,
    rows: Iterable[tuple[int, Prompt]],
) -> str:
    """Refuses scores that the run cannot learn from, by a UserError with what the folder has and
    what the run needs. Returns what the user reads of them.

    Args:
        digest: of the files of `teacher.model`, where there is one.
        vocab_size: tokens that student and teacher share.
        end_ids: tokens that end a completion.
        longest: tokens of the longest sequence that a teacher of the run reads.
        rows: (batch, prompt) of all rows of the data that the run reads scores of.
    """
    manifest, name, d = cache.manifest, f"teacher.cache={cache.name}", config.distill
    for key, ours in protocol.Options.of(d, vocab_size).decisive.items():
        theirs = getattr(manifest.options, key)
        if theirs == ours or (key == "entropy_top_k" and ours is None):
            continue
        what = f"with distill.{key}={theirs}, and this run has distill.{key}={ours}: set it so"
        if key == "vocab_size":
            what = f"with a student.model that shares {theirs} tokens, not {ours}: set it so"
        elif theirs is None:
            what = "without distill.entropy_aware=true: set it to false"
        raise UserError(f"{name} was scored {what}, or score again with this run's keys")
    if digest is not None and digest != manifest.digest:
        raise UserError(
            f"{name} has scores of {manifest.model}, whose files are not those of"
            f" teacher.model={config.teacher.model}: name the same model, or score again"
        )
    if bool(manifest.samples) != d.seq_kd:
        what = "the teacher's samples" if manifest.samples else "the data's completions"
        asked = str(bool(manifest.samples)).lower()
        raise UserError(f"{name} has scores of {what}: set distill.seq_kd={asked}")
    if d.seq_kd and config.group_size > manifest.samples:
        raise UserError(
            f"{name} has {manifest.samples} samples of each prompt, fewer than group_size="
            f"{config.group_size}: lower it, or score again with --samples {config.group_size}"
        )
    sampling, noted = sampling_of(config, end_ids), manifest.sampling
    pairs = {key: (noted[key], ours) for key, ours in sampling.items() if key in noted}
    if "max_new_tokens" not in noted and sampling and cache.longest_row > config.max_new_tokens:
        pairs["max_new_tokens"] = cache.longest_row, config.max_new_tokens
    if manifest.longest and not cache.config.same_for_length(manifest.longest, longest):
        pairs["longest sequence"] = manifest.longest, longest
    for key, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise UserError(
                f"{name} was scored with {key}={theirs}, and this run has {key}={ours}: set it so,"
                " or score again with this run's keys"
            )
    missing = total = 0
    first: Prompt | None = None
    for _, row in rows:
        prompt = row.to_sample if d.seq_kd else row
        total += 1
        if not cache.has(manifest.key(prompt.tokens, prompt.completion)):
            first, missing = first or prompt, missing + 1
    if first is not None:
        kind = "samples" if d.seq_kd else "scores"
        raise UserError(
            f"{name} has no {kind} of {missing} of the {total} rows of data.train that this run"
            f" reads, the first of them {first.text[:60]!r}: python -m jaxrl.score --out"
            f" {cache.name} adds them, given this run's data.*, max_prompt_tokens and"
            " max_new_tokens"
        )
    signal = manifest.options.signal
    kind = f"{signal} in {manifest.stored}" if signal == "hidden" else signal
    note = f"{name}: {kind}, of {manifest.model}; {len(cache)} rows"
    unknown = [key for key in sampling if key not in noted]
    if manifest.longest is None and cache.config.depends_on_length:
        unknown.append("longest sequence")
    if unknown:
        note += f"; an older jaxrl did not note {', '.join(unknown)} there"
    return note if manifest.error is None else f"{note}; {manifest.error}"
