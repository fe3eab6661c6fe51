"""What a run and a teacher in another process say to each other: the handshake, a request, an
answer. Tensors travel as safetensors, words as JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Annotated, Any, Literal, Self

import numpy as np
import safetensors
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxrl.config.schema import DistillConfig
from jaxrl.formats.hf import STORED
from jaxrl.types import Sequences, TeacherSignal

PROTOCOL = 1
"""Version of everything in this file; a client and a server of different versions do not talk."""
Signal = Literal["hidden", "topk", "student_topk", "sampled"]
SIGNALS: tuple[Signal, ...] = ("hidden", "topk", "student_topk", "sampled")
REQUEST = "request"
"""Key of the safetensors metadata that holds `Asked` as JSON."""
MOST_PADDING = 128
"""Columns that no sequence uses: widths of prompts and completions are rounded up to a multiple of
64 at most."""
HEAD = "head"
"""Name of the LM head's tensor."""
_DTYPES = STORED | {"I32": np.dtype("<i4"), "BOOL": np.dtype(bool)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FIELDS = tuple(field.name for field in fields(TeacherSignal))

Piece = bytes | memoryview
PositiveInt = Annotated[int, Field(strict=True, ge=1)]


class Refused(ValueError):
    """A request that is not answered, with the HTTP status that says why."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Message(BaseModel):
    """Frozen; a field too many is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Info(Message):
    """The handshake: what a teacher is, and what it can be asked."""

    protocol: int
    model: str
    family: str | None
    """The next three are None where the server does not tell (a completions server)."""
    n_params: int | None
    d_model: int | None
    """Width of the hidden states and of the head."""
    vocab_size: int | None
    """Rows of the head; None where unknown."""
    vocab_hash: str | None
    """`vocab_hash` of the tokenizer; None where unknown."""
    tokenizer_eos: int | None
    model_eos: tuple[int, ...]
    chat_template: str | None
    dtype: str | None
    """Of hidden states and head; None where neither is offered."""
    max_tokens: int | None
    """Longest sequence, prompt and completion and padding together."""
    max_request_bytes: int | None
    max_answer_bytes: int | None
    signals: tuple[Signal, ...]
    fingerprint: str
    """Differs between models, dtypes and weights; a request for another one is refused."""


class Options(Message):
    """The part of `distill.*` that a teacher's answer depends on."""

    signal: Signal
    top_k: Annotated[PositiveInt, Field(le=1024)]
    entropy_top_k: PositiveInt | None
    """None: no entropy-aware term."""
    distill_temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    vocab_size: PositiveInt
    """Probabilities are normalised over the first so many tokens."""
    chunk_tokens: PositiveInt
    """Tokens whose logits exist at once; a server may take fewer."""

    @classmethod
    def of(cls, distill: DistillConfig, vocab_size: int) -> Self:
        entropy = distill.entropy_aware and distill.signal != "hidden"
        return cls(
            signal=distill.signal,
            top_k=distill.top_k,
            entropy_top_k=distill.entropy_top_k if entropy else None,
            distill_temperature=distill.distill_temperature,
            vocab_size=vocab_size,
            chunk_tokens=distill.chunk_tokens,
        )

    def distill(self, most_chunk: int) -> DistillConfig:
        """The config that makes a teacher answer so, `chunk_tokens` being at most `most_chunk`.

        Raises:
            ValueError: options that do not go together.
        """
        entropy = {} if self.entropy_top_k is None else {"entropy_top_k": self.entropy_top_k}
        return DistillConfig(
            signal=self.signal,
            jsd_beta=1.0 if self.signal == "sampled" else 0.5,  # not read by a teacher
            top_k=self.top_k,
            entropy_aware=self.entropy_top_k is not None,
            distill_temperature=self.distill_temperature,
            chunk_tokens=min(self.chunk_tokens, most_chunk),
            **entropy,
        )

    def request_row_bytes(self, t: int, c: int) -> int:
        """Bytes of one sequence of T tokens, C of them in the completion, in a request."""
        return 5 * t + c + (4 * c * self.top_k if self.signal == "student_topk" else 0)

    def answer(self, info: Info) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The tensors of an answer (`teacher.check.Shapes`)."""
        if self.signal == "hidden":
            assert info.d_model is not None and info.dtype is not None
            return {"hidden": (info.dtype, (info.d_model,))}
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {"token_logprobs": ("float32", ())}
        if self.signal != "sampled":
            tensors = _best("topk_ids", "topk_logprobs", "tail_logprob", self.top_k)
        if self.entropy_top_k is not None:
            tensors |= _best("best_ids", "best_logprobs", "best_tail", self.entropy_top_k)
            tensors["entropy"] = ("float32", ())
        return tensors

    def answer_row_bytes(self, c: int, info: Info) -> int:
        """Bytes of one sequence in an answer."""
        each = (np.dtype(dtype).itemsize * prod(dims) for dtype, dims in self.answer(info).values())
        return c * sum(each)


def _best(ids: str, logprobs: str, tail: str, k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {ids: ("int32", (k,)), logprobs: ("float32", (k,)), tail: ("float32", ())}


class Asked(Message):
    """The words of a request."""

    options: Options
    fingerprint: str
    """Of the teacher that is meant."""


@dataclass(frozen=True)
class Request:
    """A request that was read and fits the teacher."""

    options: Options
    sequences: Sequences
    ids: np.ndarray | None
    """[B, C, K] int32: the student's most probable tokens, for `student_topk`."""


def vocab_hash(tokenizer: Any) -> str:
    """SHA-256 of the tokens by id: equal for tokenizers that name every id alike."""
    digest = hashlib.sha256()
    for i, token in sorted((i, token) for token, i in tokenizer.get_vocab().items()):
        digest.update(json.dumps([i, token]).encode() + b"\n")
    return digest.hexdigest()


def write_request(
    options: Options, fingerprint: str, sequences: Sequences, ids: np.ndarray | None
) -> bytes:
    tensors = {
        "tokens": np.asarray(sequences.tokens, np.int32),
        "mask": np.asarray(sequences.mask, bool),
        "loss_mask": np.asarray(sequences.loss_mask, bool),
    }
    if ids is not None:
        tensors["ids"] = np.asarray(ids, np.int32)
    words = Asked(options=options, fingerprint=fingerprint).model_dump_json()
    return encode(tensors, {REQUEST: words})


def read_request(body: bytes, info: Info) -> Request:
    """The request in a body. Raises `Refused`, naming what does not fit."""
    try:
        tensors, metadata = decode(body)
        asked = Asked.model_validate_json(metadata.get(REQUEST, "{}"))
    except ValidationError as error:
        raise Refused(400, f"metadata {REQUEST!r}: {explain(error)}") from error
    except ValueError as error:
        raise Refused(400, f"the body cannot be read: {error}") from error
    if asked.fingerprint != info.fingerprint:
        raise Refused(409, f"this is another teacher than the one asked for: now {info.model!r}")
    options = asked.options
    if options.signal not in info.signals:
        raise Refused(400, f"signal {options.signal!r} is not offered: {', '.join(info.signals)}")
    sequences = _sequences(tensors, options, info)
    return Request(options, sequences, _ids(tensors, options, sequences.loss_mask.shape))


def _sequences(tensors: Mapping[str, np.ndarray], options: Options, info: Info) -> Sequences:
    tokens = _tensor(tensors, "tokens", np.int32, 2)
    mask = _tensor(tensors, "mask", bool, 2)
    loss_mask = _tensor(tensors, "loss_mask", bool, 2)
    b, t = tokens.shape
    c = loss_mask.shape[1]
    if mask.shape != (b, t) or loss_mask.shape[0] != b or b < 1 or not 1 <= c < t:
        raise Refused(
            400,
            f"tokens {[b, t]}, mask {list(mask.shape)} and loss_mask {list(loss_mask.shape)} do not"
            " fit together: [B, T], [B, T] and [B, C] with B >= 1 and 1 <= C < T",
        )
    assert info.max_tokens is not None and info.vocab_size is not None
    assert info.max_answer_bytes is not None
    used = int(mask.any(0).sum())  # the client rounds its widths up to what suits its devices
    if used > info.max_tokens or t > info.max_tokens + MOST_PADDING:
        raise Refused(
            413,
            f"sequences of {used} tokens, {t} with padding: this teacher takes at most"
            f" {info.max_tokens}, and {MOST_PADDING} of padding",
        )
    if options.vocab_size > info.vocab_size:
        raise Refused(
            400, f"vocab_size {options.vocab_size}: this teacher has {info.vocab_size} tokens"
        )
    if tokens.min() < 0 or tokens.max() >= info.vocab_size:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise Refused(400, f"token {wrong}: this teacher has tokens 0 to {info.vocab_size - 1}")
    if (loss_mask & ~mask[:, t - c :]).any():
        raise Refused(400, "loss_mask is True where mask is False")
    answer = b * options.answer_row_bytes(c, info)
    if answer > info.max_answer_bytes:
        raise Refused(
            413,
            f"the answer would have {answer:,} bytes: at most {info.max_answer_bytes:,}; ask for"
            " fewer sequences at once",
        )
    return Sequences(tokens, mask, loss_mask)


def _ids(
    tensors: Mapping[str, np.ndarray], options: Options, shape: tuple[int, ...]
) -> np.ndarray | None:
    wanted = max(options.top_k if "topk" in options.signal else 0, options.entropy_top_k or 0)
    if wanted > options.vocab_size:
        raise Refused(400, f"the best {wanted} of {options.vocab_size} tokens: ask for fewer")
    if options.signal != "student_topk":
        return None
    ids = _tensor(tensors, "ids", np.int32, 3)
    if ids.shape != (*shape, options.top_k):
        raise Refused(
            400, f"ids {list(ids.shape)}: [B, C, K] = {[*shape, options.top_k]} was announced"
        )
    if ids.min() < 0 or ids.max() >= options.vocab_size:
        raise Refused(400, f"ids name tokens beyond 0 to {options.vocab_size - 1}")
    return ids


def _tensor(
    tensors: Mapping[str, np.ndarray], name: str, dtype: type[Any], rank: int
) -> np.ndarray:
    if name not in tensors:
        raise Refused(400, f"tensor {name!r} is missing: there are {sorted(tensors)}")
    tensor = tensors[name]
    if tensor.dtype != np.dtype(dtype) or tensor.ndim != rank:
        raise Refused(
            400,
            f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}: {np.dtype(dtype)} of {rank}"
            " dims is expected",
        )
    return tensor


def write_signal(signal: TeacherSignal) -> list[Piece]:
    tensors = {name: getattr(signal, name) for name in _FIELDS}
    return frame({name: tensor for name, tensor in tensors.items() if tensor is not None}, {})


def read_signal(body: bytes) -> TeacherSignal:
    """The answer in a body. Raises ValueError for none; `check_signal` says whether it is right."""
    tensors, _ = decode(body)
    strange = sorted(tensors.keys() - set(_FIELDS))
    if strange:
        raise ValueError(f"it has the tensors {strange}, which no answer has")
    return TeacherSignal(**tensors)


def frame(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> list[Piece]:
    """Safetensors in pieces, to be sent one after the other: the tensors are not copied."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    pieces: list[Piece] = []
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        shape, dtype = list(tensor.shape), _NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        pieces.append(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def encode(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    return b"".join(frame(tensors, metadata))


def decode(body: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors (read-only) and metadata. Raises ValueError for anything but whole safetensors."""
    try:
        entries = safetensors.deserialize(body)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"no safetensors: {error}") from error
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {entry['dtype']}: not one of {[*_DTYPES]}")
        dtype = _DTYPES[entry["dtype"]]
        tensors[name] = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
    return tensors, header.get("__metadata__") or {}


def explain(error: ValidationError) -> str:
    """The first mistake, by the name of its field; never the whole input."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
