"""What is checked before any weight is read, for training and `jaxrl evaluate`: the tokenizer of
a model and its end tokens, held-out prompts, and whether teachers fit the student and the data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxrl.algorithms.methods import on_policy
from jaxrl.algorithms.signals import prompt_weights, row_weights
from jaxrl.checkpoint.fingerprint import digest_model
from jaxrl.checkpoint.model_source import ModelSource, resolve_model
from jaxrl.config.schema import Config
from jaxrl.config.section import POLICY
from jaxrl.data import tokenizer as tokenizers
from jaxrl.data.chat_template import dated, has_template
from jaxrl.data.example import Example
from jaxrl.data.prompt_encoder import PLACES, PromptEncoder, TeacherPrompt, few_shot
from jaxrl.data.rows import Keys
from jaxrl.data.source import Rows, Source, open_source
from jaxrl.data.stream import EvalSet, PromptStream, eval_sets
from jaxrl.data.token_alignment import Aligner, ModelTokenizer
from jaxrl.data.tokenizer import (
    Tokenizer,
    check_every_token,
    check_same_prompts,
    check_same_vocabulary,
    same_prompts,
)
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.rewards.verifiers import Verifier, why_unjudged
from jaxrl.teacher.cache import ScoreCache, check_cache
from jaxrl.teacher.remote import (
    AnyInfo,
    check_remote,
    check_remote_prompts,
    check_together,
    remote_info,
    remote_place,
)
from jaxrl.types import Prompt

TWICE = " (by default they are twice the student's)"


def tokenizer_of(source: ModelSource | ScoreCache, chat_date: str | None = None) -> Tokenizer:
    """Returns the transformers tokenizer, or None if the checkpoint has none."""
    path = source.tokenizer_path
    return None if path is None else dated(tokenizers.load_tokenizer(path), chat_date)


def end_ids(source: ModelSource, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a completion: those of the model's config and generation config,
    and its tokenizer's own.

    Raises:
        UserError: there are none, or the tokenizer's own has no row in the embedding.
    """
    ids, rows = tokenizers.end_ids(source.config.eos_ids, tokenizer), source.config.vocab_size
    if not ids:
        raise UserError(
            f"model {source.name!r} names no end-of-sequence token: set eos_token_id in its"
            " config.json or generation_config.json"
        )
    if max(ids) >= rows:
        tokenizers.check_rows(tokenizer, rows, ids, f"model {source.name!r}: its end of sequence")
    return ids


def token_notes(config: Config, source: ModelSource, tokenizer: Tokenizer) -> list[str]:
    """Returns what a reader should know of a tokenizer that says other things than the model's
    config: tokens without a row in the embedding, and another end token.

    Raises:
        UserError: there are tokens without a row, and an environment, whose texts are only known
            while a run works, may say one. (`encoder` refuses rows of data; with a teacher,
            `check_same_vocabulary` refuses any.)
    """
    if tokenizer is None:
        return []
    notes, rows, stated = [], source.config.vocab_size, source.config.eos_ids
    without = tokenizers.tokens_without_row(tokenizer, rows)
    if without:
        if config.environment.name is not None:
            tokenizers.check_every_token(tokenizer, rows, f"model {source.name!r}")
        notes.append(
            f"model {source.name!r} has {rows} embedding rows (vocab_size), which {len(without)}"
            f" tokens of its tokenizer lie beyond (the first is {min(without)}"
            f" {without[min(without)]!r}): no row of the data uses one"
        )
    own = tokenizer.eos_token_id
    if stated and own is not None and own not in stated:
        words = ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in stated)
        notes.append(
            f"model {source.name!r} ends completions at {words} by its config, and at {own}"
            f" {tokenizer.eos_token!r} by its tokenizer: each of them ends one"
        )
    return notes


def pad_id(source: ModelSource, ends: tuple[int, ...]) -> int:
    """Returns the token that fills the padding: the model's own pad token, else an end token."""
    return ends[0] if source.config.pad_id is None else source.config.pad_id


def longest_sequence(config: Config, teacher: bool = False) -> int:
    """Computes the number of tokens of the longest sequence of a run and its evaluations; with
    `teacher`, of those that the teacher reads. A policy that teaches itself reads both."""
    own = config.max_prompt_tokens + max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    new = max(config.teacher_new_tokens, config.eval.max_new_tokens or 0)
    read = config.teacher_prompt_tokens + new
    if config.teacher.model == POLICY:
        return max(own, read)
    return read if teacher else own


def check_positions(
    config: Config, new_tokens: int, decoder: DecoderConfig, model: str, teacher: bool = False
) -> None:
    """Raises UserError where the longest sequence exceeds the positions of a model.

    Args:
        teacher: the model reads the teacher's prompts.
    """
    others = teacher and config.teacher.tokenizer == "own"
    own = others or (teacher and config.teacher.max_prompt_tokens is not None)
    key = "teacher.max_prompt_tokens" if own else "max_prompt_tokens"
    new = "teacher.max_new_tokens" if others else "max_new_tokens"
    prompt = config.teacher_prompt_tokens if teacher else config.max_prompt_tokens
    width = prompt + new_tokens
    if width > decoder.max_positions:
        raise UserError(
            f"{key}={prompt} and {new}={new_tokens} make"
            f" {width} positions; {model} has {decoder.max_positions}: lower one of them"
            f"{TWICE if others else ''}"
        )


def keys(config: Config) -> Keys:
    """Returns the names of the fields of a data row."""
    d = config.data
    names = d.prompt_key, d.messages_key, d.completion_key, d.answer_key, d.tools_key
    return Keys(*names, d.completion_turns)


def encoder(
    config: Config,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    rows: int,
    teacher: bool = False,
    teacher_tokenizer: Tokenizer | None = None,
) -> PromptEncoder:
    """Returns the encoder that turns the rows of `data.train` and `data.eval` into tokens.

    Args:
        rows: of the model's embedding.
        teacher: with the prompts that the teacher reads of them (`teacher.prompt`).
        teacher_tokenizer: by which it reads these; None: the student's.
    """
    d = config.data
    shots: tuple[Example, ...] = ()
    if d.few_shot is not None:
        source = open_source(d.few_shot, config.seed, "train", keys(config), "data.few_shot")
        shots = few_shot(source, d.few_shot_rows)
    theirs = None
    if teacher and (config.teacher.prompt is not None or teacher_tokenizer is not None):
        late = PLACES if config.learns_from_rewards else {}
        limit = config.teacher_prompt_tokens
        theirs = TeacherPrompt(config.teacher.prompt, limit, late, teacher_tokenizer)
    return PromptEncoder(
        tokenizer,
        config.max_prompt_tokens,
        config.max_new_tokens,
        ends,
        d.system_prompt,
        d.chat,
        shots,
        d.long_prompts,
        theirs,
        rows,
    )


def tools_note(config: Config, train: PromptStream, tokenizer: Tokenizer) -> str | None:
    """Returns words about the first row whose tools no chat template shows, for its prompt stays
    text; None without such a row."""
    raw = config.data.chat == "raw"
    if config.data.tools_key is None or not (raw or not has_template(tokenizer)):
        return None
    for where, example in train.examples():
        if example.tools and isinstance(example.prompt, str):
            why = "with data.chat=raw" if raw else "for the tokenizer has no chat template"
            return (
                f"data.train: {where}: its prompt is text, which shows no"
                f" `{config.data.tools_key}`, {why}: such prompts are without tools."
                " Write them into the prompts, "
                + ("set data.chat=auto," if raw else "give the model a template that shows tools,")
                + " or unset data.tools_key"
            )
    return None


def held_out_sets(
    config: Config, encode: PromptEncoder, given: Mapping[str, Rows]
) -> tuple[EvalSet, ...]:
    """Opens the sets of `data.eval`; returns none if it is null."""
    if config.data.eval is None:
        return ()

    def open_one(sources: Sequence[str], label: str) -> Source:
        return open_source(sources, config.seed, "eval", keys(config), label, given)

    return eval_sets(config.data.eval, open_one, encode, config.eval.prompts)


def held_out_notes(config: Config, sets: Sequence[EvalSet], judge: Verifier) -> list[str]:
    """Returns what a reader should know of each set before anything is sampled: its size, what was
    left out or cut, and prompts without an answer that the verifier can judge by."""
    longer = f"longer than max_prompt_tokens={config.max_prompt_tokens}"
    if config.teacher.prompt is not None and config.eval.teacher:
        longer += f", or for the teacher {config.teacher_prompt_tokens},"
    notes = []
    for held_out in sets:
        name = f"data.eval.{held_out.name}" if held_out.name else "data.eval"
        note = f"{name}: {len(held_out.prompts)} prompts"
        if held_out.cut:
            note += f"; {held_out.cut} {longer}: cut"
        if held_out.dropped:
            note += f"; {held_out.dropped} {longer} or repeated: left out"
        # The empty completion tells, before hours of sampling, whether answers and verifier fit.
        unjudged = [prompt for prompt in held_out.prompts if judge("", prompt) is None]
        if unjudged:
            note += (
                f"; {len(unjudged)} of {len(held_out.prompts)} prompts cannot be judged with"
                f" data.verifier={config.data.verifier}: {why_unjudged(unjudged)}"
            )
        notes.append(note)
    return notes


@dataclass(frozen=True, kw_only=True)
class RunTeachers:
    """The teachers of a run, whose vocabularies fit the student's."""

    config: Config
    models: Mapping[str, ModelSource]
    """By name, as in `Config.teacher_models`."""
    served: Mapping[str, AnyInfo]
    """By name, as in `Config.served`: what each was at the handshake."""
    cache: ScoreCache | None
    """The scores at `teacher.cache`."""
    tokenizers: Mapping[str, Tokenizer]
    """Of the models, and of stored scores without one."""
    vocab_size: int
    """As of `Setup`."""
    aligner: Aligner | None
    """With a teacher whose tokens are others."""
    prompt_tokenizer: Tokenizer | None
    """The teacher's, where it makes other prompts than the student's."""

    def check_data(
        self, tokenizer: Tokenizer, prompts: Sequence[Prompt], train: PromptStream
    ) -> list[str | None]:
        """Refuses teachers that would read other prompts than the student, or have no scores of the
        data. Returns notes for the user."""
        config, notes = self.config, list[str | None]()
        if self.aligner is not None:
            common = int((self.aligner.to_teacher >= 0).sum())
            notes.append(
                f"teacher.tokenizer=own: {common:,} of the student's {self.vocab_size:,} tokens are"
                " also the teacher's; completions are aligned by bytes"
            )
        elif config.teacher.tokenizer == "own":
            notes.append("teacher.tokenizer=own: the teacher has the student's tokens, one by one")
        if self.prompt_tokenizer is None:
            for name, theirs in self.tokenizers.items():
                with _about(name, self.models):
                    check_same_prompts(tokenizer, theirs, prompts)
        if self.cache is not None:
            digest = digest_model(self.models["teacher"].path) if self.models else None
            scored = train.rows(i for i in range(config.steps) if not on_policy(config, i))
            notes.append(check_cache(config, self.cache, digest, self.vocab_size, scored))
        for name, info in self.served.items():
            given = tokenizer, prompts, self.vocab_size, name
            notes.append(check_remote_prompts(config, info, *given))
        if config.data.teacher_key is not None:
            for where, example in train.examples():
                row_weights(config, example.columns, where)
        return notes

    def evaluates(self, held_out: Sequence[EvalSet]) -> tuple[bool, list[str]]:
        """Returns whether the teacher's own accuracy is measured, and notes where it was asked for
        and is unknown."""
        config = self.config
        if not (config.eval.teacher and held_out):
            return False, []
        if not self.models:
            unknown = "only scores: its own accuracy is not evaluated"
            notes = [f"{remote_place(config, name)} {unknown}" for name in self.served]
            if self.cache is not None:
                notes.append(
                    "scores on disk answer nothing: the teacher's accuracy is not evaluated"
                )
            return False, notes
        if config.mixture is not None:
            what = f"the teachers' {config.mixture} mixture"
            return False, [f"{what} only scores: its accuracy is unknown"]
        try:
            for prompt in (prompt for one in held_out for prompt in one.prompts):
                prompt_weights(config, prompt)
        except UserError as error:
            return False, [f"data.eval: {error}; the teachers' own accuracy is not evaluated"]
        return True, []


def find_teachers(
    config: Config, student: ModelSource, tokenizer: Tokenizer, eos_ids: tuple[int, ...]
) -> RunTeachers:
    """Finds the teachers, and compares their vocabularies with the student's.

    Raises:
        UserError: a teacher is not there, or does not fit the student.
    """
    read, day = longest_sequence(config, teacher=True), config.data.chat_date
    models = {
        name: resolve_model(model).for_length(read) for name, model in config.teacher_models.items()
    }
    cache = None if config.teacher.cache is None else ScoreCache(config.teacher.cache)
    described: dict[str, ModelSource | ScoreCache] = dict(models)
    if not models and cache is not None:
        described["teacher"] = cache
    tokenizers = {name: tokenizer_of(teacher, day) for name, teacher in described.items()}
    own = tokenizers["teacher"] if config.teacher.tokenizer == "own" else None
    vocab_size, aligner = student.config.vocab_size, None
    for name, teacher in described.items():
        try:
            with _about(name, models):
                shared = check_same_vocabulary(
                    tokenizer,
                    tokenizers[name],
                    student.config.vocab_size,
                    teacher.config.vocab_size,
                    student.config.eos_ids,
                    teacher.config.eos_ids,
                )
        except UserError as error:
            if own is None:
                plain = config.teacher_model and config.teacher.tokenizer == "student"
                more = "; or set teacher.tokenizer=own" if plain else ""
                raise UserError(f"{error}{more}") from error
            check_every_token(own, teacher.config.vocab_size, "teacher.model")
            ends = end_ids(models[name], own)
            aligner = Aligner(
                ModelTokenizer(tokenizer, student.config.vocab_size, eos_ids),
                ModelTokenizer(own, teacher.config.vocab_size, ends),
            )
        else:
            vocab_size = min(vocab_size, shared)
    served = {name: remote_info(config, name) for name in config.served}
    check_together(config, served)
    for name, info in served.items():
        shared = check_remote(config, info, tokenizer, student.config, name)
        vocab_size = min(vocab_size, shared)
    common = vocab_size if aligner is None else int((aligner.to_teacher >= 0).sum())
    longest = max(config.teacher_new_tokens, config.eval.max_new_tokens or 0)
    for name, source in models.items():
        check_positions(config, longest, source.config, config.teacher_key(name), teacher=True)
    d = config.distill
    asked = {"distill.top_k": d.top_k} if d.signal in ("topk", "student_topk") else {}
    if d.entropy_aware:
        asked["distill.entropy_top_k"] = d.entropy_top_k
    for key, k in asked.items():
        if (models or config.served) and k > common:
            raise UserError(f"{key}={k} exceeds the common vocabulary: it has {common} tokens")
    if own is not None and aligner is None and same_prompts(tokenizer, own):
        own = None
    return RunTeachers(
        config=config,
        models=models,
        served=served,
        cache=cache,
        tokenizers=tokenizers,
        vocab_size=vocab_size,
        aligner=aligner,
        prompt_tokenizer=own,
    )


@contextlib.contextmanager
def _about(name: str, models: Mapping[str, ModelSource]) -> Iterator[None]:
    """Puts the key of one of several teachers before the error about it."""
    try:
        yield
    except UserError as error:
        if len(models) == 1:
            raise
        raise UserError(f"teachers.{name}: {error}") from error
