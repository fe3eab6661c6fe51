"""The role `teacher` of a run whose teacher is a server: it has no devices, it asks.

`run.launch` meets the server before anything is written (`remote_info`, `check_remote`,
`check_remote_prompts`); for the signal `hidden` the actor fetches the head (`remote_head`); then
`RemoteTeacher` takes the place of `roles.teacher.Teacher`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import jax
import numpy as np

from jaxrl.config.schema import Config, TeacherConfig
from jaxrl.data.tokenizer import Tokenizer, check_eos, check_same_prompts
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.runtime.worker import phase
from jaxrl.teacher.client import TeacherClient, TeacherError, rows_at_once
from jaxrl.teacher.openai import CompletionsClient, CompletionsInfo
from jaxrl.teacher.protocol import Info, Options, find_token, vocab_hash
from jaxrl.types import Prompt, Rollout, TeacherSignal

MEET_S = 30.0
"""Longest wait for a server before the run starts."""
EARLIER = 0.9
"""The share of a call's deadline after which the client gives up: its error says more than the
worker's."""
PROBE_TOKENS = 32
"""Tokens of a prompt with which a completions server is tried."""


class RemoteTeacher:
    """Scores as `roles.teacher.Teacher` does. Thread-safe: parts may be asked for side by side."""

    def __init__(self, config: Config, vocab_size: int):
        self._distill, self._vocab_size = config.distill, vocab_size
        self._address = config.teacher.address
        self._client = _client(config.teacher, EARLIER * config.deadlines.score)

    def score(self, rollout: Rollout, part: int = 0, parts: int = 1) -> TeacherSignal | None:
        """The teacher's signal for each completion position of some rows, as numpy arrays.

        Args:
            part, parts: which of how many slices of rows, as even as possible; None where it is
                empty.
        """
        assert 0 <= part < parts, (part, parts)
        n = rollout.sequences.tokens.shape[0]
        start, stop = n * part // parts, n * (part + 1) // parts
        if start == stop:
            return None
        rows = jax.tree.map(lambda x: np.asarray(x)[start:stop], rollout.sequences)
        ids = rollout.student_topk
        ids = None if ids is None else np.asarray(ids)[start:stop]
        with phase(f"rows {start}-{stop} of {n}, at {self._address}"):
            return self._client.score(rows, ids, self._distill, self._vocab_size)


def remote_info(config: Config) -> Info | CompletionsInfo:
    """The handshake with `teacher.address`. Raises UserError where nobody answers."""
    try:
        return _client(config.teacher, MEET_S).info
    except TeacherError as error:
        raise UserError(f"teacher.address={config.teacher.address}: {error}") from error


def remote_head(config: Config, rows: int) -> np.ndarray:
    """The teacher's LM head [rows, D], cut after `rows`, in the server's dtype."""
    client = _client(config.teacher, EARLIER * config.deadlines.startup)
    assert isinstance(client, TeacherClient)
    return client.head()[:rows]


def check_remote(
    config: Config, info: Info | CompletionsInfo, tokenizer: Tokenizer, student: DecoderConfig
) -> int:
    """Refuses a teacher that the run cannot learn from.

    Returns:
        V, the tokens that student and teacher share: every loss uses the first V rows.

    Raises:
        UserError: naming what differs, or what the teacher does not offer.
    """
    d, where = config.distill, f"the teacher at {config.teacher.address}"
    if d.signal not in info.signals:
        raise UserError(
            f"distill.signal={d.signal}: {where} offers {' and '.join(info.signals)} only"
        )
    if d.seq_kd:
        raise UserError(f"distill.seq_kd=true: {where} scores, it does not sample; set it to false")
    width = config.max_prompt_tokens + config.max_new_tokens
    if info.max_tokens is not None and width > info.max_tokens:
        raise UserError(
            f"max_prompt_tokens={config.max_prompt_tokens} and max_new_tokens="
            f"{config.max_new_tokens} make {width} positions; {where} takes {info.max_tokens}"
        )
    if isinstance(info, CompletionsInfo):
        _check_log_probs_only(config)
        return student.vocab_size
    v = _check_vocabulary(info, tokenizer, student, where)
    options = Options.of(d, v)
    most = options.most_best
    if most > v:
        raise UserError(f"distill asks for the best {most} of the {v} tokens that both models have")
    if rows_at_once(info, options, width, config.max_new_tokens) == 0:
        raise UserError(
            f"one sequence of {width} tokens does not fit the limits of {where}: its"
            " --max-request-mb or --max-answer-mb must be raised"
        )
    return v


def check_remote_prompts(
    config: Config,
    info: Info | CompletionsInfo,
    tokenizer: Tokenizer,
    prompts: Iterable[Prompt],
    vocab_size: int | None = None,
) -> str | None:
    """Refuses a teacher whose chat template, or whose tokens, make other prompts of the run's data.

    Args:
        prompts: some of the run's; a completions server is tried with the first.
        vocab_size: what `check_remote` returned; None: a completions server may name any token.

    Returns:
        What could not be checked; None where everything could.

    Raises:
        UserError: with the place where the two part.
    """
    if isinstance(info, CompletionsInfo):
        first = next(iter(prompts), None)
        if first is None:
            return None
        return _probe(config, tokenizer, first.tokens[:PROBE_TOKENS], vocab_size)
    theirs = copy.copy(tokenizer)
    theirs.chat_template = info.chat_template
    check_same_prompts(tokenizer, theirs, prompts)
    return None


def _check_log_probs_only(config: Config) -> None:
    d = config.distill
    if d.entropy_aware:
        raise UserError(
            "distill.entropy_aware=true needs the entropy of the whole vocabulary, which a"
            " completions server does not tell: set it to false, or serve the teacher with"
            " python -m jaxrl.serve_teacher"
        )
    if d.distill_temperature != 1:
        raise UserError(
            f"distill.distill_temperature={d.distill_temperature:g}: the log-probs of a completions"
            " server are those at temperature 1; set it to 1"
        )


def _check_vocabulary(info: Info, tokenizer: Tokenizer, student: DecoderConfig, where: str) -> int:
    if tokenizer is None:
        raise UserError(
            "student.model has no tokenizer, so that its tokens cannot be compared: put"
            " tokenizer.json and tokenizer_config.json into its folder"
        )
    ours = vocab_hash(tokenizer)
    if ours != info.vocab_hash:
        raise UserError(
            f"student and teacher have different vocabularies: {where} serves {info.model} with"
            f" the vocabulary {info.vocab_hash[:12]}, the student has {ours[:12]};"
            " distillation needs a teacher with the student's tokenizer"
        )
    eos = set(student.eos_ids), set(info.model_eos)
    check_eos(tokenizer.eos_token_id, info.tokenizer_eos, *eos)
    v = min(student.vocab_size, info.vocab_size)
    beyond = [i for i in tokenizer.get_vocab().values() if i >= v]
    if beyond:
        raise UserError(
            f"student and teacher share {v} embedding rows, which {len(beyond)} tokens lie beyond"
            f" (the first is {min(beyond)}); the two models do not belong together"
        )
    return v


def _probe(
    config: Config, tokenizer: Tokenizer, tokens: tuple[int, ...], vocab_size: int | None
) -> str | None:
    """Asks for what the run will ask for, and compares how the server spells the tokens."""
    client = _client(config.teacher, MEET_S)
    assert isinstance(client, CompletionsClient)
    k = config.distill.top_k if config.distill.signal == "topk" else 0
    try:
        positions = client.positions(tokens, k, vocab_size)
    except TeacherError as error:
        raise UserError(f"teacher.address={config.teacher.address}: {error}") from error
    words = [position.decoded for position in positions]
    if not words or None in words or tokenizer is None:
        return (
            f"{config.teacher.address} does not tell how it spells tokens: that its vocabulary is"
            " the student's could not be checked"
        )
    ours = tokenizer.decode(list(tokens[1:]), skip_special_tokens=False)
    spelt = "".join(filter(None, words))
    if _letters(ours) != _letters(spelt):
        raise UserError(
            f"student and teacher have different vocabularies: tokens {list(tokens[1:9])}... are"
            f" {ours[:40]!r} for the student, {spelt[:40]!r} for {config.teacher.address};"
            " distillation needs a teacher with the student's tokenizer"
        )
    return None


def _letters(text: str) -> str:
    """Without what tokens decoded one by one cannot give: blanks, characters cut in two."""
    return "".join(letter for letter in text if not letter.isspace() and letter != "\ufffd")


def _client(teacher: TeacherConfig, timeout: float) -> TeacherClient | CompletionsClient:
    assert teacher.address is not None
    token = find_token()
    if teacher.api == "jaxrl":
        return TeacherClient(teacher.address, token, timeout)
    at_once = teacher.service_threads
    return CompletionsClient(teacher.address, teacher.api_model, token, timeout, at_once)
