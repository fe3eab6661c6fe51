"""What goes into a model and ends its completions, for training and for `python -m jaxrl.evaluate`:
its tokenizer, its end tokens, its held-out prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.config.schema import Config
from jaxrl.config.section import POLICY
from jaxrl.data import tokenizer as tokenizers
from jaxrl.data.chat_template import dated, has_template
from jaxrl.data.prompt_encoder import PLACES, PromptEncoder, TeacherPrompt, few_shot
from jaxrl.data.source import Example, Keys, Rows, Source, open_source
from jaxrl.data.stream import EvalSet, PromptStream, eval_sets
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.rewards.verifiers import Verifier, why_unjudged
from jaxrl.teacher.cache import ScoreCache

TWICE = " (by default they are twice the student's)"


def tokenizer_of(source: ModelSource | ScoreCache, chat_date: str | None = None) -> Tokenizer:
    """Returns the transformers tokenizer, or None if the checkpoint has none.

    Args:
        chat_date: that its chat template shows (`data.chat_date`).
    """
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
    """Opens the sets of `data.eval`; returns none if it is null.

    Args:
        given: as in `open_source`.
    """
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
