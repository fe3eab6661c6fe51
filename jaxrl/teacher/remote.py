"""The role `teacher` of a run whose teachers are served: it has no devices, it asks.

`run.job` meets the servers before anything is written (`remote_info`, `check_remote`,
`check_remote_prompts`); for the signal `hidden` the actor fetches the heads (`remote_head`); then
`RemoteTeachers` takes the place of a `LocalTeacher`, or of `RoutedTeachers`.

Functions that take `name` mean one of `Config.served`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

import jax
import numpy as np

from jaxrl.algorithms.signals import merged_signal, teacher_weights
from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import Tokenizer, check_eos, check_same_prompts
from jaxrl.errors import UserError
from jaxrl.losses.head import log_mixture
from jaxrl.models.config import DecoderConfig
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.runtime.worker import phase
from jaxrl.teacher.client import (
    CompletionsClient,
    CompletionsInfo,
    Endpoint,
    TeacherClient,
    TeacherError,
    rows_at_once,
)
from jaxrl.teacher.protocol import Info, Options, find_token, vocab_hash
from jaxrl.types import HiddenSignal, Prompt, Rollout, Sequences, TeacherSignal, TopKSignal

AnyInfo = Info | CompletionsInfo
AnyClient = TeacherClient | CompletionsClient
RowInputs = tuple[Sequences, np.ndarray | None]
"""Rows of a rollout: sequences, and the student's most probable tokens where there are any."""
ONLY = "teacher"
"""Name in `Config.served` of a teacher that is the only one."""
MEET_S = 30.0
"""Longest wait for a server before the run starts."""
EARLIER = 0.9
"""The share of a call's deadline after which the client gives up: its error says more than the
worker's."""
PROBE_TOKENS = 32
"""Tokens of a prompt with which a completions server is tried."""


class RemoteTeachers:
    """One teacher or several. Thread-safe: parts may be asked for side by side."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        infos: Mapping[str, AnyInfo] = MappingProxyType({}),
    ):
        """
        Args:
            infos: of the handshakes before the run, by name; without one, whichever teacher answers
                first is meant.
        """
        self._config, self._vocab_size = config, vocab_size
        timeout = EARLIER * config.deadlines.score
        self._clients = [_client(config, name, timeout, infos.get(name)) for name in config.served]

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """Returns the teacher's signal for each completion position of some rows, as numpy arrays.
        Of several teachers a row gets its own one's or, of a mixture, the mixture's; zeros where it
        has no teacher, as padding.

        Args:
            part, parts: which of how many slices of rows, as even as possible; None where it is
                empty.
        """
        assert 0 <= part < parts, (part, parts)
        n = rollout.sequences.tokens.shape[0]
        rows = slice(n * part // parts, n * (part + 1) // parts)
        if rows.start == rows.stop:
            return None
        weights = teacher_weights(self._config, rollout)
        inputs = rollout.sequences, rollout.student_topk
        inputs = jax.tree.map(lambda x: np.asarray(x)[rows], inputs)
        where = ", ".join(self._config.teachers) or self._config.teacher.address
        with phase(f"rows {rows.start}-{rows.stop} of {n}, at {where}"):
            if weights is None:
                return self._ask(self._clients[0], inputs)
            return self._combined(inputs, weights[rows])

    def _ask(self, client: AnyClient, inputs: RowInputs) -> TeacherSignal:
        return client.score(*inputs, self._config.distill, self._vocab_size)

    def _combined(self, inputs: RowInputs, weights: np.ndarray) -> TeacherSignal:
        """Asks several teachers about rows with these weights [n, K], side by side."""
        asked = weights > 0
        asked[:, 0] |= not asked.any()  # an answer for padding alone has its shapes too

        def spread(x: np.ndarray, mine: np.ndarray) -> np.ndarray:
            full = np.zeros((len(mine), *x.shape[1:]), x.dtype)
            full[mine] = x
            return full

        def ask(client: AnyClient, mine: np.ndarray) -> TeacherSignal | None:
            if not mine.any():
                return None
            signal = self._ask(client, jax.tree.map(lambda x: x[mine], inputs))
            return jax.tree.map(lambda x: spread(x, mine), signal)

        with ThreadPoolExecutor(len(self._clients)) as pool:
            answers = list(pool.map(ask, self._clients, asked.T))
        infos = [client.info for client in self._clients]
        widths = [info.d_model if isinstance(info, Info) else 0 for info in infos]
        signal: TeacherSignal | None = None
        if self._config.mixture is None:
            for answer, mine in zip(answers, asked.T, strict=True):
                if answer is not None:
                    signal = merged_signal(signal, answer, mine, max(widths))
            assert signal is not None, "one teacher is asked at least"
            return signal
        some = next(answer for answer in answers if answer is not None)
        if isinstance(some, HiddenSignal):  # of all teachers, one after the other
            states = [
                answer.hidden
                if isinstance(answer, HiddenSignal)
                else np.zeros((*some.hidden.shape[:2], width), some.hidden.dtype)
                for answer, width in zip(answers, widths, strict=True)
            ]
            return HiddenSignal(np.concatenate(states, -1))
        shares = [weights[:, k] for k, answer in enumerate(answers) if answer is not None]

        def mixed(*logprobs: np.ndarray) -> np.ndarray:
            each = [share.reshape(-1, *[1] * (logprobs[0].ndim - 1)) for share in shares]
            rows = np.any(shares, 0).reshape(each[0].shape)  # 0 in rows without a teacher
            return np.where(rows, log_mixture(logprobs, each), 0).astype(np.float32)

        signal = jax.tree.map(mixed, *filter(None, answers))
        return replace(signal, topk_ids=inputs[1]) if isinstance(signal, TopKSignal) else signal


def remote_info(config: Config, name: str = ONLY) -> AnyInfo:
    """Asks a served teacher for the handshake. Raises UserError where nobody answers."""
    try:
        return _client(config, name, MEET_S).info
    except TeacherError as error:
        raise UserError(f"{_key(config, name)}: {error}") from error


def remote_head(config: Config, rows: int, info: AnyInfo, name: str = ONLY) -> np.ndarray:
    """Fetches the teacher's LM head [rows, D], cut after `rows`, in the server's dtype.

    Args:
        info: of the handshake before the run; another teacher's head is refused.
    """
    client = _client(config, name, EARLIER * config.deadlines.startup, info)
    assert isinstance(client, TeacherClient)
    return client.head()[:rows]


def check_together(config: Config, infos: Mapping[str, AnyInfo]) -> None:
    """Raises UserError for served teachers whose hidden states do not fit into one array."""
    dtypes = {name: info.dtype for name, info in infos.items() if isinstance(info, Info)}
    if config.distill.signal == "hidden" and len(set(dtypes.values())) > 1:
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise UserError(
            f"teachers have hidden states of several dtypes ({given}): serve all with the same"
            " --dtype"
        )


def check_remote(
    config: Config,
    info: AnyInfo,
    tokenizer: Tokenizer,
    student: DecoderConfig,
    name: str = ONLY,
) -> int:
    """Refuses a teacher that the run cannot learn from, by a UserError that names what differs, or
    is not offered. Returns V, the tokens that student and teacher share: every loss uses the first
    V rows."""
    d, where = config.distill, remote_place(config, name)
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
        if d.entropy_aware:
            raise UserError(
                "distill.entropy_aware=true needs the entropy of the whole vocabulary, which a"
                " completions server does not return: set it to false, or serve the teacher with"
                " python -m jaxrl.serve_teacher"
            )
        if d.distill_temperature != 1:
            raise UserError(
                f"distill.distill_temperature={d.distill_temperature:g}: the log-probs of a"
                " completions server are those at temperature 1; set it to 1"
            )
        return student.vocab_size
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
    options = Options.of(d, v)
    if (most := options.most_best) > v:
        raise UserError(f"distill asks for the best {most} of the {v} tokens that both models have")
    if rows_at_once(info, options, width, config.max_new_tokens) == 0:
        raise UserError(
            f"one sequence of {width} tokens does not fit the limits of {where}: its"
            " --max-request-mb or --max-answer-mb must be raised"
        )
    return v


def check_remote_prompts(
    config: Config,
    info: AnyInfo,
    tokenizer: Tokenizer,
    prompts: Iterable[Prompt],
    vocab_size: int,
    name: str = ONLY,
) -> str | None:
    """Refuses, by a UserError with the place where the two part, a teacher whose chat template, or
    whose tokens, make other prompts of the run's data. Returns what could not be checked, if any.

    Args:
        prompts: some of the run's; a completions server is tried with the first.
        vocab_size: what `check_remote` returned.
    """
    if isinstance(info, Info):
        theirs = copy.copy(tokenizer)
        theirs.chat_template = info.chat_template
        check_same_prompts(tokenizer, theirs, prompts)
        return None
    first = next(iter(prompts), None)
    if first is None:
        return None
    # Asks for what the run will ask for, and compares how the server spells the tokens.
    client, address = _client(config, name, MEET_S), config.served[name].address
    assert isinstance(client, CompletionsClient)
    tokens = first.tokens[:PROBE_TOKENS]
    k = config.distill.top_k if config.distill.signal == "topk" else 0
    try:
        positions = client.positions(tokens, k, vocab_size)
    except TeacherError as error:
        raise UserError(f"{_key(config, name)}: {error}") from error
    words = [position.decoded for position in positions]
    if not words or None in words or tokenizer is None:
        return (
            f"{address} does not return the text of tokens: whether its vocabulary is"
            " the student's could not be checked"
        )
    ours = tokenizer.decode(list(tokens[1:]), skip_special_tokens=False)
    spelt = "".join(filter(None, words))
    # Tokens decoded one by one cannot give blanks, nor characters that are cut in two.
    cannot = re.compile(r"[\s\ufffd]")
    if cannot.sub("", ours) != cannot.sub("", spelt):
        raise UserError(
            f"student and teacher have different vocabularies: tokens {list(tokens[1:9])}... are"
            f" {ours[:40]!r} for the student, {spelt[:40]!r} for {address};"
            " distillation needs a teacher with the student's tokenizer"
        )
    return None


def remote_place(config: Config, name: str) -> str:
    """Names a served teacher for messages."""
    return f"the teacher {name + ' ' if config.teachers else ''}at {config.served[name].address}"


def _key(config: Config, name: str) -> str:
    return f"{config.teacher_key(name, 'address')}={config.served[name].address}"


def _client(config: Config, name: str, timeout: float, info: AnyInfo | None = None) -> AnyClient:
    """Makes the client of a teacher, which waits `timeout` seconds for each answer, tries after a
    failure included. `info` is of the handshake, where there was one."""
    served = config.served[name]
    assert served.address is not None
    url = served.address if "://" in served.address else f"http://{served.address}"
    known_as, ca_file = name if config.teachers else "", config.teacher.ca_file
    endpoint = Endpoint(url.rstrip("/"), find_token(), timeout, known_as, ca_file)
    client: AnyClient = TeacherClient(endpoint)
    if served.api == "openai":
        client = CompletionsClient(endpoint, served.api_model, config.teacher.service_threads)
    if info is not None:
        client.info = info
    return client
