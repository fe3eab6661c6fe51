"""What a run is about, before any weight is read: models, tokenizers and data that fit together,
for training and `jaxrl evaluate`."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cloudpickle

from jaxrl.algorithms.methods import correction_of, method_of, objective_notes
from jaxrl.algorithms.trial_calls import check_own_parts
from jaxrl.checkpoint.fingerprint import (
    BASE_WEIGHTS,
    allows,
    changes,
    digest_file,
    digest_model,
    digest_weights,
)
from jaxrl.checkpoint.model_source import (
    ModelSource,
    check_positions,
    completion_ends,
    longest_sequence,
    resolve_student,
)
from jaxrl.config.paths import TEMPLATES
from jaxrl.config.roles import template_names
from jaxrl.config.schema import Config
from jaxrl.data import prompt_encoder
from jaxrl.data import tokenizer as tokenizers
from jaxrl.data.columns import unread_notes
from jaxrl.data.example import Example, Split
from jaxrl.data.lengths import Lengths
from jaxrl.data.rows import OPTIONAL, Keys, column_of
from jaxrl.data.shown_rows import ShownRow, show_row
from jaxrl.data.source import Rows, Source, is_missing, is_split_here, open_source
from jaxrl.data.stream import NEEDS_COMPLETIONS, EvalSet, PromptStream, eval_sets
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.environments import environment_process as environments
from jaxrl.environments.episode_batches import Episodes, pool_of
from jaxrl.errors import UserError, about, user_input, user_path
from jaxrl.formats import hf, peft
from jaxrl.formats.hf import TokenizerFiles
from jaxrl.formats.hub import data_name, find_folder
from jaxrl.formats.opened import has_changed
from jaxrl.models.bert import read_encoder
from jaxrl.models.families import source_of
from jaxrl.models.kernels import Target
from jaxrl.plan import model_config, without_weights
from jaxrl.process.plugin import PYTHON, CodeSource, is_plugin, locate
from jaxrl.rewards.batch_rewards import RewardFunctions
from jaxrl.rewards.functions import find as find_reward
from jaxrl.rewards.verifiers import Verifier, verifier, why_unjudged
from jaxrl.roles.grouper import tokenizer_of_encoder
from jaxrl.roles.reward import open_reward, tokenizer_of_reward
from jaxrl.roles.run_shapes import generates
from jaxrl.run.python_objects import NOTHING, PythonObjects
from jaxrl.sharding.axes import Axes
from jaxrl.teacher.kinds import Student, Teacher, kind_of
from jaxrl.types import Prompt

EPISODES = "turn_tokens", "max_turns", "weight", "credit", "discount"
"""Keys of `environment` that say what an episode is and what it teaches."""
SESSION = uuid.uuid4().hex
FIRST_ROWS = 16
"""Rows that are read where the prompts cannot be tokenized."""


def token_notes(config: Config, source: ModelSource, tokenizer: Tokenizer) -> list[str]:
    """Returns notes about a tokenizer that contradicts the model's config: tokens without a row in
    the embedding, and another end token.

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


def row_keys(config: Config) -> Keys:
    """Returns the names of the fields of a data row."""
    d = config.data
    return Keys(
        prompt=d.prompt_key,
        messages=d.messages_key,
        completion=d.completion_key,
        answer=d.answer_key,
        text=d.text_key,
        tools=d.tools_key,
        system=d.system_key,
        arguments=d.chat_template_arguments_key,
        turns=d.completion_turns,
    )


def encoder(
    config: Config,
    tokenizer: Tokenizer,
    ends: tuple[int, ...],
    rows: int,
    teacher: bool = False,
    teacher_tokenizer: Tokenizer | None = None,
) -> prompt_encoder.PromptEncoder:
    """Returns the encoder that turns the rows of `data.train` and `data.eval` into tokens.

    Args:
        rows: of the model's embedding.
        teacher: with the prompts that the teacher reads of them (`teacher.prompt`).
        teacher_tokenizer: by which it reads these; None: the student's.
    """
    d = config.data
    shots: tuple[Example, ...] = ()
    if d.few_shot is not None:
        source = open_source(d.few_shot, config.seed, "train", row_keys(config), "data.few_shot")
        shots = prompt_encoder.few_shot(source, d.few_shot_rows)
    theirs = None
    if teacher and (config.teacher.prompt is not None or teacher_tokenizer is not None):
        late = prompt_encoder.PLACES if config.learns_from_rewards else {}
        limit = config.teacher_prompt_tokens
        given = config.teacher.prompt, limit, late, teacher_tokenizer
        theirs = prompt_encoder.TeacherPrompt(*given, row_keys(config))
    method = method_of(config)
    return prompt_encoder.PromptEncoder(
        tokenizer,
        config.max_prompt_tokens,
        config.max_new_tokens,
        ends,
        d.system_prompt,
        d.chat_template_arguments,
        d.chat,
        shots,
        d.long_prompts,
        theirs,
        method.reads_completions(config),
        method.samples_policy(config) or config.distill.seq_kd,
        rows,
    )


def held_out_sets(
    config: Config, encode: prompt_encoder.PromptEncoder, given: Mapping[str, Rows]
) -> tuple[EvalSet, ...]:
    """Opens the sets of `data.eval`; returns none if it is null."""
    if config.data.eval is None:
        return ()
    seed, keys = config.seed, row_keys(config)
    return eval_sets(
        config.data.eval,
        lambda sources, label: open_source(sources, seed, "eval", keys, label, given),
        replace(encode, samples=True),
        config.eval.prompts,
    )


def held_out_notes(config: Config, sets: Sequence[EvalSet], judge: Verifier) -> list[str]:
    """Returns notes about each set before anything is sampled: its size, rows left out or cut, and
    prompts without an answer that the verifier can judge by."""
    longer = f"longer than max_prompt_tokens={config.max_prompt_tokens}"
    if config.teacher.prompt is not None and config.evaluates_teacher:
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
        notes += [note, *(held_out.lengths.notes() if held_out.lengths else ())]
    return notes


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker makes its roles from. It can be pickled: models are named, not loaded."""

    config: Config
    student: ModelSource
    teacher: Teacher
    """Of any kind."""
    tokenizer: Tokenizer | bytes
    """Pickled for another process, where only a role that samples opens it: transformers takes a
    second to import."""
    eos_ids: tuple[int, ...]
    pad_id: int
    """Fills the padding: the model's own pad token, else an end token."""
    teacher_samples: bool
    """The teacher generates, for the student to learn from or for its own accuracy."""
    given: Mapping[str, bytes] = field(default_factory=dict)
    """Reward functions and environment from Python, pickled, by their entries in the config."""
    answers: Path | None = None
    """As in `PythonObjects`."""
    row_multiple: int = 1
    """Rows of a batch are a multiple of this: every mesh divides them."""
    run_dir: Path = Path()
    restore: Path | None = None
    """The checkpoint that the actor resumes from."""
    opened: Mapping[str, str] = field(default_factory=dict)
    """What the run depends on -> its digest when it began (`dependencies`)."""
    session: str = field(default_factory=lambda: SESSION)
    """The same in all workers of a run from its start to its end, and no other's."""
    first_prompts: Mapping[Split, Sequence[Prompt]] = field(default_factory=dict)
    """Those that the rollout samples first, in their order."""

    def open_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, in this process."""
        packed = self.tokenizer
        return cloudpickle.loads(packed) if isinstance(packed, bytes) else packed

    @property
    def vocab_size(self) -> int:
        """Returns V, the tokens that the losses are over."""
        return self.teacher.vocab_size

    def packed(self) -> bytes:
        """Returns the setup for another process."""
        tokenizer = cloudpickle.dumps(self.tokenizer)
        return cloudpickle.dumps(replace(self, tokenizer=tokenizer, teacher=self.teacher.packed()))

    def packing(self, target: Target) -> dict[str, int]:
        """Returns how prompts and completions become arrays for the devices of a run, as arguments
        of `make_rollout`."""
        return {
            "pad_id": self.pad_id,
            "max_prompt_tokens": self.config.max_prompt_tokens,
            "max_new_tokens": self.config.max_new_tokens,
            "row_multiple": self.row_multiple,
            "width_multiple": target.width_multiple,
        }


@dataclass(frozen=True, kw_only=True)
class Job(Setup):
    """The whole run: with its data, which stay in this process."""

    train: PromptStream
    tokenizer_files: TokenizerFiles | None
    """Of the student as the run began, for its checkpoints and the trained model."""
    held_out: tuple[EvalSet, ...]
    judge: Verifier
    train_lengths: tuple[Lengths, ...] = ()
    """Of the prompts of each source of `train`, and of its completions where they are learned."""
    long_completions: int = 0
    """Completions of the data that are learned and are longer than `max_new_tokens`."""
    evaluates_teacher: bool = False
    """The teacher's own accuracy is measured before the first step."""
    notes: tuple[str, ...] = ()
    """What could not be checked."""

    @property
    def held_out_prompts(self) -> tuple[Prompt, ...]:
        """Returns the prompts of an evaluation, of one set after the other."""
        return tuple(prompt for held_out in self.held_out for prompt in held_out.prompts)

    @property
    def lengths(self) -> tuple[Lengths, ...]:
        """Returns those of the data, held-out sets included."""
        return (*self.train_lengths, *(one.lengths for one in self.held_out if one.lengths))

    def describe_policy(self, folder: Path) -> None:
        """Writes the config and the tokenizer of the policy: what its weights are read with."""
        student, dtype = self.student, self.config.actor.param_dtype
        hf.write_description(folder, student.config, dtype, self.tokenizer_files)
        if student.config.lora is not None:
            peft.write_settings(folder, student.config, student.base_name)

    def for_workers(
        self,
        axes: Mapping[str, Axes],
        run_dir: Path,
        restore: Path | None = None,
        first_prompts: Mapping[Split, Sequence[Prompt]] = MappingProxyType({}),
        opened: Mapping[str, str] = MappingProxyType({}),
    ) -> Setup:
        """Returns the workers' part of the job, once meshes and folder are known."""
        kept = {one.name: getattr(self, one.name) for one in fields(Setup)}
        kept |= {"run_dir": run_dir, "restore": restore, "opened": dict(opened)}
        multiple = math.lcm(*(sizes.rows for sizes in axes.values()))
        return Setup(**kept | {"row_multiple": multiple, "first_prompts": dict(first_prompts)})

    def first_rows(self, count: int) -> list[ShownRow]:
        """Returns the rows that the run reads first, at most all of an epoch."""
        places = map(self.train.place, range(min(count, self.train.epoch_prompts)))
        return [show_row(self.train.encoder, part, row) for part, row in places]

    def data_notes(self) -> list[str]:
        """Says what a reader should know of the data: sizes, prompts that were left out or cut, and
        what the chat template does with the rows looked at so far, the first of each kind."""
        limit = self.config.max_prompt_tokens
        first = f"data.train: {self.train.epoch_prompts} prompts"
        if self.train.endless:
            first = "data.train: rows without a known end, taken in their order as they are needed"
        if self.train.dropped:
            first += (
                f"; {self.train.dropped} are longer than max_prompt_tokens={limit}"
                f"{self.train.teacher_limit}: left out"
            )
        if self.train.cut:
            first += f"; {self.train.cut} are longer than max_prompt_tokens={limit}: cut"
        if self.long_completions:
            first += (
                f"; {self.long_completions} completions are longer than"
                f" max_new_tokens={self.config.max_new_tokens}: cut, and learned without their end"
            )
        lengths = [note for one in self.train_lengths for note in one.notes()]
        held_out = held_out_notes(self.config, self.held_out, self.judge)
        return [first, *lengths, *held_out, *self.train.noted.values(), *self.notes]


@dataclass(frozen=True)
class TrainRows:
    """The rows of `data.train`, and what reads them."""

    source: Source
    encode: prompt_encoder.PromptEncoder
    student: ModelSource
    fitted: Student
    """The student as its teacher has to fit it."""
    teacher: Teacher
    notes: Sequence[str]
    """Where the student's tokenizer and its config say other things."""


def train_rows(config: Config, given: PythonObjects = NOTHING) -> TrainRows:
    """Opens the data, and the tokenizers that read them; raises UserError as `make_job`. No row is
    read yet, but those of files that are read at once."""
    keys, given_rows = row_keys(config), given.rows
    source = open_source(config.data.train, config.seed, "train", keys, given=given_rows)
    student, fitted, teacher, notes = _models_of(config)
    read = fitted.tokenizer, fitted.end_ids, fitted.config.vocab_size
    encode = encoder(config, *read, True, teacher.prompt_tokenizer)
    return TrainRows(source, encode, student, fitted, teacher, notes)


def make_job(config: Config, given: PythonObjects = NOTHING) -> Job:
    """Reads configs, tokenizers and data. Raises UserError for what does not fit together."""
    d = config.data
    _check_keys(config)
    for label, sources, split in _data_sources(config):
        for missing in filter(is_missing, sources):  # the others are opened with their tokenizer
            open_source(missing, config.seed, split, row_keys(config), label)
    rows = train_rows(config, given)
    student, fitted, teacher, encode = rows.student, rows.fitted, rows.teacher, rows.encode
    train = PromptStream(
        rows.source, encode, config.batch_size, config.seed, d.shuffle, weights=d.weights
    )
    if train.endless and config.dynamic_sampling == "refill":
        raise UserError(
            "policy.dynamic_sampling=refill samples prompts of later batches, and data.train has no"
            " known end: set policy.dynamic_sampling=drop"
        )
    long_completions, learned = 0, method_of(config).reads_completions(config)
    if learned:
        remedy = NEEDS_COMPLETIONS
        if config.spec.learns_from == "data":
            remedy = (
                f"algorithm={config.algorithm} learns nothing else: add completions, or end chats"
                " with a message of the assistant"
            )
        train.check_completions(remedy)
        long_completions = train.long_completions()
    # Without evaluations of the teacher, its prompts decide nothing about the held-out sets; and
    # where they are about attempts, it is evaluated with the student's.
    evaluated = config.evaluates_teacher and not config.teacher_gets_feedback
    held_out = held_out_sets(
        config, encode if evaluated else replace(encode, teacher=None), given.rows
    )
    prompts = [prompt.to_sample for prompt in train.batch(0)]
    prompts += (prompt for one in held_out for prompt in one.prompts)
    notes: list[str | None] = [*rows.notes]
    notes += _check_code(config, given, train.batch(0), rows.source.columns)
    if config.learns_from_rewards:
        if config.reward.model is not None:
            tokenizer_of_reward(open_reward(config.reward.model))
        if config.grouper.model is not None and config.policy.advantages == "similarity":
            tokenizer_of_encoder(*read_encoder(find_folder(config.grouper.model)))
    notes += teacher.check_data(fitted, prompts, train)
    evaluates, why = teacher.evaluates(held_out)
    notes += why
    return Job(
        config=config,
        student=student,
        teacher=teacher,
        tokenizer=fitted.tokenizer,
        eos_ids=fitted.end_ids,
        pad_id=fitted.end_ids[0] if student.config.pad_id is None else student.config.pad_id,
        teacher_samples=bool(teacher.models) and generates(config, "teacher"),
        evaluates_teacher=evaluates,
        given=given.code,
        answers=given.answers,
        train=train,
        tokenizer_files=student.tokenizer_files(),
        train_lengths=tuple(train.measure_lengths(config.steps * config.batch_size, learned)),
        long_completions=long_completions,
        held_out=held_out,
        judge=verifier(config.data.verifier),
        notes=tuple(filter(None, notes)),
    )


def _check_code(
    config: Config, given: PythonObjects, prompts: Sequence[Prompt], columns: Sequence[str] = ()
) -> list[str]:
    """Loads the environment and the reward functions, and tries these on the prompts, if there are
    any; returns notes on them and on the objective.

    Args:
        columns: of `data.train`; those that nothing reads are noted.
    """
    check_own_parts(config)
    begun, notes = False, list[str]()
    named, passed_to = {"task", "entry", "options"}, list[str]()
    if config.environment.name is not None and given.answers is None:
        with pool_of(config, 1, given.code) as pool:
            environment = pool.facts()
        begun = environment.resets
        passed_to.append("the environment")
        if config.teacher.prompt is not None and (begun or environment.tools):
            raise UserError(
                f"teacher.prompt changes the rows' prompts, and {config.environment.name} makes"
                " others, by its `reset` or its tools: set teacher.prompt=null, or give an"
                " environment without both"
            )
    if config.learns_from_rewards:
        with user_input("policy"):
            correction_of(config)
            if config.spec.loss is not None:
                notes += objective_notes(config)
        with closing(reward_functions(config, given.code)) as rewards:
            asked, takes_all = rewards.named_columns()
            named |= asked
            passed_to += ["reward functions"] if takes_all else []
            if prompts:
                own = set(columns).difference(row_keys(config).named)
                notes += rewards.check(prompts, begun, prompt_encoder.hidden_columns(prompts, own))
            else:
                rewards.pool.facts()
    return [*notes, *_column_notes(config, columns, named, " and ".join(passed_to))]


def _column_notes(
    config: Config, columns: Sequence[str], named: Collection[str], passed_to: str
) -> list[str]:
    """Returns notes on columns that are read for chat templates, and on those that nothing reads.

    Args:
        named: columns that code names.
        passed_to: who gets all of them.
    """
    known, notes = row_keys(config), list[str]()
    shown = {getattr(known, of): key for of, key in OPTIONAL.items()}
    found = {name: key for name, key in shown.items() if name is not None and name in columns}
    if found:
        names = ", ".join(f"`{name}` ({key})" for name, key in found.items())
        notes.append(f"data.train: read for the chat template: {names}")
    read = {*named, *template_names(config.teacher.prompt or "")}
    for name in (*known.named, known.text, config.data.teacher_key):
        read |= {name or "", column_of(name, columns) or ""}
    return notes + unread_notes("data.train", columns, read, passed_to)


def _models_of(config: Config) -> tuple[ModelSource, Student, Teacher, Sequence[str]]:
    """Returns the student, what its teacher has to fit of it, the teacher, and notes where the
    student's tokenizer and its config say other things."""
    student = resolve_student(config).for_length(longest_sequence(config))
    tokenizer = student.tokenizer(config.data.chat_date)
    ends, notes = completion_ends(student, tokenizer), token_notes(config, student, tokenizer)
    student = student.ending_at(ends)
    fitted = Student(config=student.config, tokenizer=tokenizer, end_ids=ends)
    return student, fitted, kind_of(config).find(config, fitted), notes


def _check_keys(config: Config) -> None:
    """Checks what the keys and the student's `config.json` alone tell."""
    # Only now is it known that no Python program gives an environment.
    environment = config.environment
    for message in environment.messages(environment.without_environment(*EPISODES)):
        raise UserError(f"environment: {message}")
    verifier(config.data.verifier)
    longest = max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    check_positions(config, longest, model_config(config.student.model), "student.model")


def check_job(
    config: Config, given: PythonObjects, elsewhere: bool = False
) -> tuple[list[str], Job | None]:
    """Returns the notes on the run's data, and the job where it can be made; or raises the
    UserError that `make_job` would raise.

    Of models that have no weights here, as in a plan for another machine, only `config.json` is
    known, and data on a hub may not have been fetched: then the models, the data that are here and
    the reward functions are checked each alone, and the notes name what was not.

    Args:
        elsewhere: files of data that are not here are no error: another machine may have them.
    """
    described = bool(without_weights(config))
    here = {each[0]: _here(*each, elsewhere) for each in _data_sources(config)}
    if not described and all(len(here[label]) == len(s) for label, s, _ in _data_sources(config)):
        job = make_job(config, given)
        return job.data_notes(), job
    _check_keys(config)
    notes, prompts, columns = [], list[Prompt](), tuple[str, ...]()
    for label, sources, split in _data_sources(config):
        if here[label]:
            rows = open_source(here[label], config.seed, split, row_keys(config), label, given.rows)
            if label == "data.train":
                columns = rows.columns
                prompts += map(_untokenized, (rows[i] for i in range(min(len(rows), FIRST_ROWS))))
        missing = [text for text in sources if text not in here[label] and data_name(text) is None]
        if missing:
            notes.append(f"{label}: {', '.join(missing)}: not here, so not checked")
    if described:
        notes.append("data: prompts are not tokenized, as a model has only its config.json here")
    else:
        _models_of(config)
    return [*notes, *_check_code(config, given, prompts, columns)], None


def _untokenized(example: Example) -> Prompt:
    said, known = example.prompt, ("answer", "answer_value", "columns")
    text = said if isinstance(said, str) else "\n".join(str(m.get("content") or "") for m in said)
    prompt = Prompt(0, (), text, conversational=not isinstance(said, str))
    return replace(prompt, **{name: getattr(example, name) for name in known})


def reward_functions(config: Config, given: Mapping[str, bytes]) -> RewardFunctions:
    """Starts the processes of the reward functions."""
    environment = config.environment if config.environment.name else None
    limits = config.max_new_tokens, config.deadlines.startup
    return RewardFunctions(config.rewards, *limits, given, environment)


def episodes(
    config: Config, tokenizer: Tokenizer, notify: Callable[[str], None], **how: Any
) -> Episodes | None:
    """Returns the environments of the run, as `Episodes` makes them; None if completions are single
    turns."""
    if config.environment.name is None:
        return None
    return Episodes(config, tokenizer, notify=notify, **how)


def _data_sources(config: Config) -> Iterator[tuple[str, Sequence[str], Split]]:
    d = config.data
    yield "data.train", d.train, "train"
    if d.few_shot is not None:
        yield "data.few_shot", d.few_shot, "train"
    if isinstance(d.eval, dict):
        for name, sources in d.eval.items():
            yield f"data.eval.{name}", sources, "eval"
    elif d.eval is not None:
        yield "data.eval", d.eval, "eval"


def _here(label: str, sources: Sequence[str], split: Split, elsewhere: bool) -> list[str]:
    """Returns those of the sources that need not be fetched first; with `elsewhere`, without the
    paths of files that are not here."""
    names = [(text, data_name(text)) for text in sources]
    with about(label):
        return [
            text
            for text, name in names
            if (is_split_here(name, split) if name else not (elsewhere and is_missing(text)))
        ]


READS: Mapping[str, tuple[str, ...]] = {
    "actor": ("student.", "teacher", "algorithm"),
    "rollout": ("student.", "environment."),
    "teacher": ("teacher", "environment."),
    "reference": ("student.",),
    "reward": ("reward.",),
    "grouper": ("grouper.",),
}
"""Role -> how the keys begin that name what its worker opens."""


def dependencies(job: Job) -> dict[str, str]:
    """Maps what a run depends on beside its config (weights, data, reward functions, environment),
    by key and value, to its digest. A checkpoint notes them, so that a run that resumes notices
    what has changed."""
    found = {"data.train": job.train.fingerprint}
    for one in job.held_out:
        prompts = repr([(prompt.text, prompt.answer) for prompt in one.prompts])
        name = f"data.eval.{one.name}" if one.name else "data.eval"
        found[name] = hashlib.sha256(prompts.encode()).hexdigest()
    return found | _digests(job)


def check_inputs(setup: Setup, role: str) -> None:
    """Raises UserError where something that the worker of a role is about to open, maybe again, is
    not what the run began with."""
    if names := changes(dict(setup.opened), _digests(setup, READS[role])):
        raise has_changed(f"what {' and '.join(names)} names")


def may_have_changed(setup: Setup, role: str, file: str) -> bool:
    """Returns whether a run that resumes may find other weights in a file that a role reads: by
    `resume_changed`, all that names it."""
    if not isinstance(setup.config.resume_changed, tuple):
        return setup.config.resume_changed
    folder = Path(file).parent.resolve()  # the file may be a link, as in the cache of a hub
    names = [
        name
        for key, name, place, _ in _models(setup)
        if key.startswith(READS[role])
        and folder.is_relative_to((place.parent if place.is_file() else place).resolve())
    ]
    return bool(names) and all(allows(setup.config, name) for name in names)


def _models(setup: Setup) -> Iterator[tuple[str, str, Path, Callable[[Path], str]]]:
    """Yields (the key, the name as what a run depends on, the folder or file, its digest) of each
    model that the roles of a run open."""
    config = setup.config
    weights = config.needs_reference or config.trains_adapters
    student = setup.student.path if weights else setup.student.tokenizer_path
    key = "student.model"
    if student is not None:
        name = f"{key}={config.student.model}"
        yield key, name, student, partial(digest_model, weights=weights)
    opened = [(key, setup.student)]
    for teacher_key, named, teacher in setup.teacher.opened():
        yield teacher_key, named, teacher.path, digest_model
        opened.append((teacher_key, teacher))
    for owner, source in opened:
        if (adapter := source.adapter) is not None:
            yield owner, f"{owner}, base model {adapter.base}", adapter.base_path, digest_model
    if config.trains_adapters:
        yield key, BASE_WEIGHTS, setup.student.base_path, digest_weights
    if config.learns_from_rewards:
        embeds = config.policy.advantages == "similarity"
        grouper = config.grouper.model if embeds else None
        for owner, asked in {"reward.model": config.reward.model, "grouper.model": grouper}.items():
            if asked is not None:
                yield owner, f"{owner}={asked}", find_folder(asked), digest_model


def _digests(setup: Setup, read: tuple[str, ...] = ("",)) -> dict[str, str]:
    """Maps what the roles of a run open, by key and value, to its digest now.

    Args:
        read: how the keys begin that count.
    """
    models = [one for one in _models(setup) if one[0].startswith(read)]
    found = {name: digest(place) for _, name, place, digest in models}
    config = setup.config
    templates = (config.student.chat_template, config.teacher.chat_template)
    for key, template in zip(TEMPLATES, templates, strict=True):
        if template is not None and key.startswith(read):
            content = tokenizers.read_chat_template(str(user_path(template)))
            found[f"{key}={template}"] = hashlib.sha256(content.encode()).hexdigest()
    for key, digests in setup.teacher.inputs():
        found |= digests() if key.startswith(read) else {}
    named = [("environment.name", config.environment.name), ("algorithm", str(config.algorithm))]
    family = config.student.family or source_of(setup.student.config.family)
    named.append(("student.family", family))
    if config.learns_from_rewards:
        named += [("reward.functions", text) for text in config.reward.functions]
    for key, text in named:
        if text is not None and key.startswith(read) and not text.startswith(PYTHON):
            found |= _code_digests(key, text)  # of Python's own, the config has the digest
    return found


def _code_digests(key: str, text: str) -> dict[str, str]:
    """Maps the file of the user's code, and each that it imports, to its digest; none for rewards
    and algorithms of ours."""
    if key in ("algorithm", "student.family"):
        source = locate(text, key, "NAME", {}, "") if is_plugin(text) else CodeSource(text, text)
    else:
        source = environments.find(text) if key == "environment.name" else find_reward(text)
    files = [Path(path) for path, _ in source.files]
    names = [path.name for path in files]
    for i, path in enumerate(files):
        with suppress(ValueError):  # elsewhere
            names[i] = str(path.relative_to(files[0].parent))
    keys = [f"{key}={text}, {name}" if i else f"{key}={text}" for i, name in enumerate(names)]
    return {key: digest_file(path) for key, path in zip(keys, files, strict=True)}
