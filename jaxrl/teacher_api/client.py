"""A teacher that `python -m jaxrl.serve_teacher` runs, as its clients see it."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property, partial
from typing import Any

import numpy as np

from jaxrl.config import DistillConfig
from jaxrl.errors import UserError
from jaxrl.teacher_api.http import Endpoint
from jaxrl.teacher_api.protocol import (
    HEAD,
    PROTOCOL,
    Info,
    Options,
    decode,
    read_signal,
    write_request,
)
from jaxrl.types import Sequences, TeacherSignal

SAFETENSORS = "application/octet-stream"
OVERHEAD = 1 << 14
"""Bytes of a request beside its tensors, at most."""


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
        return self.endpoint.ask("GET", "/v1/head", lambda body: decode(body)[0][HEAD])

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
            read = partial(read_signal, rows=len(some.tokens), width=c)
            parts.append(self.endpoint.ask("POST", "/v1/score", read, body, SAFETENSORS))
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _read_info(self, body: bytes) -> Info:
        told = Info.model_validate_json(body)
        if told.protocol != PROTOCOL:
            raise UserError(
                f"teacher at {self.endpoint.url} speaks version {told.protocol} of the protocol,"
                f" this jaxrl version {PROTOCOL}: install the same jaxrl on both sides"
            )
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
