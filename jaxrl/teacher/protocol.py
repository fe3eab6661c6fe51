"""The bytes between a run and a teacher in another process: the handshake, a request, an answer,
and what an answer must be before a run learns from it. Tensors travel as safetensors, everything
else as JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

import numpy as np
import safetensors
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.numpy import save

from jaxrl.algorithms.signals import signal_tensors
from jaxrl.config.section import DType, PositiveNumber
from jaxrl.config.settings import DistillConfig
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import Refused, UserError, shown
from jaxrl.formats.hf import STORED, safetensors_header
from jaxrl.types import Sequences, TeacherSignal

PROTOCOL = 2
"""Version of everything in this file; a client and a server of different versions do not talk."""
TOKEN = "JAXRL_TEACHER_TOKEN"
"""Environment variable; its value is never logged or shown."""
Signal = Literal["hidden", "topk", "student_topk", "sampled"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
JSON, SAFETENSORS = "application/json", "application/octet-stream"
REQUEST = "request"
"""Key of the safetensors metadata that holds `Asked` as JSON."""
MOST_PADDING = 128
"""Columns that no sequence uses: widths of prompts and completions are rounded up to a multiple of
64 at most."""
HEAD = "head"
FINGERPRINT = "fingerprint"
"""Name in the query of a request for the head: the teacher that is meant."""
ROUNDING = 1e-3
"""Nats, or probability: what float32 sums over a large vocabulary may be off by."""
_DTYPES = STORED | {
    "I32": np.dtype("<i4"),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(bool),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Name of a tensor -> name of its dtype, and its dims after the first ones: those of the rows or,
where each token has an entry, of the tokens."""
Positive = Annotated[int, Field(strict=True, ge=1)]


def find_token(path: str | None = None) -> str | None:
    """Reads the secret that a teacher and its runs share from a file, or else from the environment;
    None if none is set."""
    try:
        token = os.environ.get(TOKEN) if path is None else Path(path).read_text().strip()
    except (OSError, UnicodeError) as error:
        raise UserError(f"--token-file {path}: {error}") from error
    if path is not None and not token:
        raise UserError(f"--token-file {path}: it is empty")
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        name = TOKEN if path is None else f"--token-file {path}"
        raise UserError(f"{name} may have printable ASCII characters only, and no blank")
    return token or None


class ProtocolMessage(BaseModel):
    """Frozen; a field too many is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Info(ProtocolMessage):
    """The handshake: what a teacher is, and what it can be asked."""

    protocol: int
    model: str
    family: str
    n_params: int
    d_model: Positive
    """Width of the hidden states and of the head."""
    vocab_size: Positive
    """Rows of the head."""
    final_softcap: PositiveNumber | None
    """c of logits c tanh(z / c), z being hidden states @ head.T; None: the logits are z."""
    vocab_hash: str
    """`vocab_hash` of the tokenizer."""
    tokenizer_eos: int | None
    model_eos: tuple[int, ...]
    chat_template: str | dict[str, str] | None
    """By name, where the tokenizer has several."""
    dtype: DType
    """Of hidden states and head."""
    max_tokens: Positive
    """Longest sequence, prompt and completion and padding together."""
    max_request_bytes: Positive
    max_answer_bytes: Positive
    signals: tuple[Signal, ...]
    fingerprint: str
    """Differs between models, dtypes and weights; a request for another one is refused."""


class Options(ProtocolMessage):
    """The part of `distill.*` that a teacher's answer depends on."""

    signal: Signal
    top_k: Annotated[Positive, Field(le=1024)]
    entropy_top_k: Positive | None
    """None: no entropy-aware term."""
    distill_temperature: PositiveNumber
    vocab_size: Positive
    """Probabilities are normalised over the first so many tokens."""
    chunk_tokens: Positive
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
            chunk_tokens=distill.loss_chunk,
        )

    @property
    def distill(self) -> DistillConfig:
        """Returns the config that makes a teacher answer so."""
        keys = self.model_dump(exclude={"vocab_size"}, exclude_none=True)
        if self.signal == "sampled":
            keys["jsd_beta"] = 1.0  # what this signal needs; a teacher does not read it
        return DistillConfig(entropy_aware=self.entropy_top_k is not None, **keys)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        try:
            _ = self.distill
        except ValidationError as error:  # options that do not go together
            raise ValueError(first_mistake(error)) from None
        return self

    @property
    def decisive(self) -> dict[str, object]:
        """Returns the options that the tensors of an answer depend on."""
        keys = ["signal"]
        if self.signal != "hidden":
            keys += ["entropy_top_k", "distill_temperature", "vocab_size"]
            keys += ["top_k"] if "topk" in self.signal else []
        return {key: getattr(self, key) for key in keys}

    def asked(self, t: int, c: int) -> Shapes:
        """Lists the tensors of a request of T tokens a row, C of the completion."""
        shapes: Shapes = {"tokens": ("int32", (t,)), "mask": ("bool", (t,))}
        shapes["loss_mask"] = "bool", (c,)
        if self.signal == "student_topk":
            shapes["ids"] = "int32", (c, self.top_k)
        return shapes

    def tensors(self, dtype: str, width: int) -> Shapes:
        """Lists the tensors of an answer, for hidden states of that dtype and width."""
        return signal_tensors(self.distill, dtype, width)


def row_bytes(shapes: Shapes) -> int:
    """Computes the bytes of one row, or token, of all tensors."""
    return sum(np.dtype(dtype).itemsize * prod(dims) for dtype, dims in shapes.values())


class Asked(ProtocolMessage):
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


def vocab_hash(tokenizer: Tokenizer) -> str:
    """Computes SHA-256 of the tokens by id: equal for tokenizers that name every id alike."""
    digest = hashlib.sha256()
    for i, token in sorted((i, token) for token, i in tokenizer.get_vocab().items()):
        digest.update(json.dumps([i, token]).encode() + b"\n")
    return digest.hexdigest()


def write_request(
    options: Options, fingerprint: str, sequences: Sequences, ids: np.ndarray | None
) -> bytes:
    arrays = vars(sequences) | {"ids": ids}
    tensors = {
        name: np.ascontiguousarray(arrays[name], dtype)
        for name, (dtype, _) in options.asked(0, 0).items()
    }
    words = Asked(options=options, fingerprint=fingerprint).model_dump_json()
    return save(tensors, {REQUEST: words})


def read_request(body: bytes, info: Info) -> Request:
    """Reads a request and checks it against the teacher. Raises `Refused`, naming what does not
    fit."""
    try:
        tensors, metadata = decode(body)
        asked = Asked.model_validate_json(metadata.get(REQUEST, "{}"))
    except ValidationError as error:
        raise Refused(400, f"metadata {REQUEST!r}: {first_mistake(error)}") from error
    except ValueError as error:
        raise Refused(400, f"the body cannot be read: {error}") from error
    check_meant(asked.fingerprint, info)
    options, v = asked.options, asked.options.vocab_size
    best = max(options.top_k if "topk" in options.signal else 0, options.entropy_top_k or 0)
    _require(v <= info.vocab_size, f"vocab_size {v}: this teacher has {info.vocab_size} tokens")
    _require(best <= v, f"the best {best} of {v} tokens: ask for fewer")
    sizes = (tensors[name].shape if name in tensors else () for name in ("tokens", "loss_mask"))
    (b, t), (_, c) = ((*size, 0, 0)[:2] for size in sizes)
    try:
        check_shapes(tensors, options.asked(t, c), (b,))
        if not (b >= 1 and 1 <= c < t):
            raise ValueError(f"tokens are {[b, t]} and loss_mask is {[b, c]}")
    except ValueError as error:
        form = "tokens [B, T] int32, mask [B, T] and loss_mask [B, C] bool, B >= 1, 1 <= C < T, and"
        form += " for student_topk ids [B, C, K] int32"
        raise Refused(400, f"{error}: a request has {form}") from error
    tokens, mask, loss_mask = (tensors[name] for name in ("tokens", "mask", "loss_mask"))
    used = int(mask.any(0).sum())  # the client rounds its widths up to what suits its devices
    _require(
        used <= info.max_tokens and t <= info.max_tokens + MOST_PADDING,
        f"sequences of {used} tokens, {t} with padding: this teacher takes at most"
        f" {info.max_tokens}, and {MOST_PADDING} of padding",
        413,
    )
    answer = b * c * row_bytes(options.tensors(info.dtype, info.d_model))
    _require(
        answer <= info.max_answer_bytes,
        f"the answer would have {answer:,} bytes: at most {info.max_answer_bytes:,}; ask for fewer"
        " sequences at once",
        413,
    )
    for name, n in (("tokens", info.vocab_size), ("ids", v)):
        ids = tensors.get(name, tokens[:0])
        beyond = ids[(ids < 0) | (ids >= n)]
        _require(not beyond.size, f"{name} has the token {beyond[:1]}: there are 0 to {n - 1}")
    prompts, completions = mask[:, : t - c], mask[:, t - c :]
    gaps = prompts[:, :-1] & ~prompts[:, 1:], ~completions[:, :-1] & completions[:, 1:]
    sides = "prompts are padded on the left only, completions on the right"
    _require(not any(gap.any() for gap in gaps), f"mask has a gap: {sides}")
    _require(not (loss_mask & ~completions).any(), "loss_mask is True where mask is False")
    return Request(options, Sequences(tokens, mask, loss_mask), tensors.get("ids"))


def check_meant(fingerprint: str, info: Info) -> None:
    """Raises `Refused` for a request that is meant for another teacher."""
    other = f"this is another teacher than the one asked for: now {info.model!r}"
    _require(fingerprint == info.fingerprint, other, 409)


def _require(condition: bool, message: str, status: int = 400) -> None:
    if not condition:
        raise Refused(status, message)


def first_mistake(error: ValidationError) -> str:
    """Describes the first error by the name of its field and the value there."""
    first = error.errors(include_url=False)[0]
    where, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{where} is missing"
    if first["type"] != "value_error":  # which names the values
        message += f", not {shown(first['input'])}"
    return f"{where}: {message}" if where else message


def present(signal: TeacherSignal) -> dict[str, np.ndarray]:
    """Returns the tensors that a signal has, by name."""
    return {name: tensor for name, tensor in vars(signal).items() if tensor is not None}


def frame(tensors: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    """Writes safetensors in pieces, to be sent one after the other: unlike `safetensors.serialize`,
    it does not copy the tensors."""
    rows = ((name, _NAMES[x.dtype], x.shape, x.nbytes) for name, x in tensors.items())
    bodies = (np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in tensors.values())
    return [safetensors_header(rows), *bodies]


def decode(body: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Reads tensors (read-only) and metadata. Raises ValueError for anything but whole
    safetensors."""
    try:
        entries = safetensors.deserialize(body)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"no safetensors: {error}") from error
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {entry['dtype']}: not one of {[*_DTYPES]}")
        dtype = _DTYPES[entry["dtype"]]
        tensors[name] = np.frombuffer(entry["data"], dtype).reshape(entry["shape"])
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    return tensors, header.get("__metadata__") or {}


def check_shapes(tensors: Mapping[str, np.ndarray], shapes: Shapes, first: tuple[int, ...]) -> None:
    """Raises ValueError for tensors that are not those of `shapes`, with these `first` dims."""
    if tensors.keys() != shapes.keys():
        raise ValueError(f"it has the tensors {sorted(tensors)}, {sorted(shapes)} were asked for")
    for name, (dtype, dims) in shapes.items():
        x, shape = tensors[name], [*first, *dims]
        if x.dtype.name != dtype or [*x.shape] != shape:
            raise ValueError(f"{name} is {x.dtype} {[*x.shape]}, {dtype} {shape} was asked for")


def check_answer(
    tensors: Mapping[str, np.ndarray], shapes: Shapes, mask: np.ndarray, v: int
) -> None:
    """Checks that an answer has the tensors that were asked for, with values that a teacher can
    give.

    Args:
        tensors: fields of a `TeacherSignal`; or the head, with a mask [V] of all its rows.
        mask: [B, C] True where a completion token trains; elsewhere values are not read.
        v: tokens that student and teacher share.

    Raises:
        ValueError: with the tensor's name, where its first wrong value is, the value, and what is
            allowed.
    """
    check_shapes(tensors, shapes, mask.shape)
    for name, (_, dims) in shapes.items():
        x = tensors[name]
        if name.endswith("ids"):
            allowed = f"the tokens that student and teacher share are 0 to {v - 1}"
            _refuse(name, x, (x < 0) | (x >= v), allowed)
            again = np.zeros(x.shape, bool)  # among the best of a position it would count twice
            order = np.argsort(x, -1, kind="stable")
            ranked = np.take_along_axis(x, order, -1)
            np.put_along_axis(again, order[..., 1:], ranked[..., 1:] == ranked[..., :-1], -1)
            wrong, allowed = again, "each of the best tokens is there once"
        elif name in ("hidden", HEAD):
            wrong, allowed = ~np.isfinite(x), "a finite number is expected"
        elif name == "entropy":
            most = float(np.log(v)) + ROUNDING
            wrong = ~((x >= -ROUNDING) & (x <= most))
            allowed = f"it is 0 to log({v}) = {most:.2f} nats"
        else:
            wrong = ~np.isfinite(x) | (x > ROUNDING)
            allowed = "a log-prob is a finite number of at most 0"
        _refuse(name, x, wrong & mask.reshape(mask.shape + (1,) * len(dims)), allowed)
    for best, tail in (("topk_logprobs", "tail_logprob"), ("best_logprobs", "best_tail")):
        if best in tensors:
            top, rest = (np.exp(tensors[name].astype(np.float64)) for name in (best, tail))
            total = top.sum(-1) + rest
            wrong, allowed = np.abs(total - 1) > ROUNDING, "they and their tail add up to 1"
            _refuse(f"the sum of {best}", total, wrong & mask, allowed)


def _refuse(name: str, x: np.ndarray, wrong: np.ndarray, allowed: str) -> None:
    if wrong.any():
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        value = x[at].item()
        shown = value if isinstance(value, int) else f"{float(value):.7g}"
        raise ValueError(f"{name} is {shown} at {[int(i) for i in at]}: {allowed}")
