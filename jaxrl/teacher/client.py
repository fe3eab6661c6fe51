"""A teacher that `python -m jaxrl.serve_teacher` runs, as its clients see it."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property, partial
from typing import Any

import numpy as np

from jaxrl.config.schema import DistillConfig
from jaxrl.errors import UserError
from jaxrl.teacher.check import check_head, check_signal
from jaxrl.teacher.http import Endpoint
from jaxrl.teacher.protocol import (
    HEAD,
    PROTOCOL,
    Info,
    Options,
    Request,
    decode,
    read_signal,
    write_request,
)
from jaxrl.types import Sequences, TeacherSignal

SAFETENSORS = "application/octet-stream"
OVERHEAD = 1 << 14
"""Bytes of a request beside its tensors, at most."""
NUMBERS = ("d_model", "vocab_size", "max_tokens", "max_request_bytes", "max_answer_bytes")
"""Of the handshake: what every teacher of this protocol has."""
DTYPES = ("bfloat16", "float32")


class TeacherClient:
    """Asks one server. Thread-safe: every question has a connection of its own."""

    def __init__(self, address: str, token: str | None, timeout: float):
        """
        Args:
            address: `host:port`, or a URL.
            timeout: seconds for each question, tries after a failure included.
        """
        url = address if "://" in address else f"http://{address}"
        self.endpoint = Endpoint(url.rstrip("/"), token, timeout)

    def info(self) -> Info:
        """The handshake, asked for anew."""
        return self.endpoint.ask("GET", "/v1/info", self._read_info)

    @cached_property
    def agreed(self) -> Info:
        """The handshake, as it was when first needed: the teacher that all requests are meant
        for."""
        return self.info()

    def head(self) -> np.ndarray:
        """The LM head [V, D] in the server's dtype."""
        return self.endpoint.ask("GET", "/v1/head", self._read_head)

    def score(
        self, sequences: Sequences, ids: np.ndarray | None, distill: DistillConfig, vocab_size: int
    ) -> TeacherSignal:
        """What `distill.signal` asks of each completion position, as numpy arrays.

        Sent in as many requests, one after the other, as the server's limits ask for.

        Args:
            ids: [B, C, K] the student's most probable tokens; only for `student_topk`.
        """
        options = Options.of(distill, vocab_size)
        b, t = sequences.tokens.shape
        c = sequences.loss_mask.shape[1]
        size = min(b, rows_at_once(self.agreed, options, t, c))
        parts = []
        for start in range(0, b, size):
            rows = slice(start, start + size)
            some = Sequences(
                sequences.tokens[rows], sequences.mask[rows], sequences.loss_mask[rows]
            )
            theirs = None if options.signal != "student_topk" or ids is None else ids[rows]
            body = write_request(options, self.agreed.fingerprint, some, theirs)
            read = partial(self._read, asked=Request(options, some, theirs))
            parts.append(self.endpoint.ask("POST", "/v1/score", read, body, SAFETENSORS))
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _read(self, body: bytes, asked: Request) -> TeacherSignal:
        signal, options = read_signal(body), asked.options
        mask = np.asarray(asked.sequences.loss_mask)
        check_signal(signal, options.answer(self.agreed), mask, options.vocab_size)
        if asked.ids is not None and not np.array_equal(signal.topk_ids, asked.ids):
            raise ValueError("topk_ids are others than the student's, which were asked for")
        return signal

    def _read_head(self, body: bytes) -> np.ndarray:
        info, head = self.agreed, decode(body)[0][HEAD]
        assert info.dtype is not None and info.vocab_size is not None and info.d_model is not None
        check_head(head, info.dtype, (info.vocab_size, info.d_model))
        return head

    def _read_info(self, body: bytes) -> Info:
        told = Info.model_validate_json(body)
        if told.protocol != PROTOCOL:
            raise UserError(
                f"teacher at {self.endpoint.url} speaks version {told.protocol} of the protocol,"
                f" this jaxrl version {PROTOCOL}: install the same jaxrl on both sides"
            )
        for name in NUMBERS:
            if getattr(told, name) is None or getattr(told, name) < 1:
                raise ValueError(f"{name} is {getattr(told, name)}: it must be at least 1")
        if told.dtype not in DTYPES:
            raise ValueError(f"dtype is {told.dtype}: it must be {' or '.join(DTYPES)}")
        return told


def rows_at_once(info: Info, options: Options, t: int, c: int) -> int:
    """Sequences that one request may hold, of T tokens, C of them in the completion; 0: not one."""
    assert info.max_request_bytes is not None and info.max_answer_bytes is not None
    asked = (info.max_request_bytes - OVERHEAD) // options.request_row_bytes(t, c)
    answered = info.max_answer_bytes // options.answer_row_bytes(c, info)
    return max(min(asked, answered), 0)


def _joined(parts: list[TeacherSignal]) -> TeacherSignal:
    joined: dict[str, Any] = {}
    for field in fields(TeacherSignal):
        values = [getattr(part, field.name) for part in parts]
        joined[field.name] = None if values[0] is None else np.concatenate(values)
    return TeacherSignal(**joined)
