"""A teacher that `python -m jaxrl.serve_teacher` runs, as its clients see it."""

from __future__ import annotations

import json
from functools import cached_property

import jax
import numpy as np

from jaxrl.config.schema import DistillConfig
from jaxrl.errors import UserError
from jaxrl.teacher.check import check_answer, check_head
from jaxrl.teacher.http import Endpoint
from jaxrl.teacher.protocol import (
    HEAD,
    PROTOCOL,
    SAFETENSORS,
    Info,
    Options,
    decode,
    write_request,
)
from jaxrl.types import Sequences, TeacherSignal

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
        """The handshake; each call asks the server."""
        return self.endpoint.ask("GET", "/v1/info", self._read_info)

    @cached_property
    def agreed(self) -> Info:
        """The first handshake: every request is meant for this teacher."""
        return self.info()

    def head(self) -> np.ndarray:
        """The LM head [V, D] in the server's dtype."""
        info = self.agreed

        def read(body: bytes) -> np.ndarray:
            head = decode(body)[0][HEAD]
            check_head(head, info.dtype, (info.vocab_size, info.d_model))
            return head

        return self.endpoint.ask("GET", "/v1/head", read)

    def score(
        self, sequences: Sequences, ids: np.ndarray | None, distill: DistillConfig, vocab_size: int
    ) -> TeacherSignal:
        """What `distill.signal` asks of each completion position, as numpy arrays.

        Sent in as many requests, one after the other, as the server's limits ask for.

        Args:
            ids: [B, C, K] the student's most probable tokens; only for `student_topk`.
        """
        options = Options.of(distill, vocab_size)
        ids = ids if options.signal == "student_topk" else None
        b, t = sequences.tokens.shape
        size = min(b, rows_at_once(self.agreed, options, t, sequences.loss_mask.shape[1]))
        parts = []
        for start in range(0, b, size):
            rows = slice(start, start + size)
            some, theirs = jax.tree.map(lambda x, rows=rows: x[rows], (sequences, ids))
            parts.append(self._score(options, some, theirs))
        return jax.tree.map(lambda *xs: np.concatenate(xs) if len(xs) > 1 else xs[0], *parts)

    def _score(
        self, options: Options, sequences: Sequences, ids: np.ndarray | None
    ) -> TeacherSignal:
        def read(body: bytes) -> TeacherSignal:
            tensors, mask = decode(body)[0], np.asarray(sequences.loss_mask)
            check_answer(tensors, options.answer(self.agreed), mask, options.vocab_size)
            if ids is not None and not np.array_equal(tensors["topk_ids"], ids):
                raise ValueError("topk_ids are others than the student's, which were asked for")
            return TeacherSignal(**tensors)

        body = write_request(options, self.agreed.fingerprint, sequences, ids)
        return self.endpoint.ask("POST", "/v1/score", read, body, SAFETENSORS)

    def _read_info(self, body: bytes) -> Info:
        protocol = json.loads(body)["protocol"]
        if protocol != PROTOCOL:
            raise UserError(
                f"teacher at {self.endpoint.url} speaks version {protocol} of the protocol,"
                f" this jaxrl version {PROTOCOL}: install the same jaxrl on both sides"
            )
        return Info.model_validate_json(body)


def rows_at_once(info: Info, options: Options, t: int, c: int) -> int:
    """Sequences that one request may hold, of T tokens, C of them in the completion; 0: not one."""
    asked = (info.max_request_bytes - OVERHEAD) // options.request_row_bytes(t, c)
    answered = info.max_answer_bytes // options.answer_row_bytes(c, info)
    return max(min(asked, answered), 0)
