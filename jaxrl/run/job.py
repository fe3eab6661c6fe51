"""What a run is about, before any weight is read: models, tokenizers and data that fit together."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType

import cloudpickle

from jaxrl.algorithms.methods import configured_correction, method_of, objective_notes
from jaxrl.checkpoint.fingerprint import digest_file, digest_model
from jaxrl.checkpoint.model_source import ModelSource, resolve_student
from jaxrl.config.schema import Config
from jaxrl.data import hub_sets
from jaxrl.data.chat_template import opening_of
from jaxrl.data.example import Example, Split
from jaxrl.data.source import is_missing, open_source
from jaxrl.data.stream import NEEDS_COMPLETIONS, EvalSet, PromptStream
from jaxrl.data.token_alignment import Aligner
from jaxrl.data.tokenizer import Tokenizer, decode
from jaxrl.environments import environment_process as environments
from jaxrl.environments.episode_batches import Episodes, pool_of
from jaxrl.errors import UserError, about, user_input
from jaxrl.formats.hub import find_folder
from jaxrl.formats.hub_names import data_name
from jaxrl.losses.token_spans import Outcomes
from jaxrl.models.encoder_config import read_encoder
from jaxrl.models.kernels import Target
from jaxrl.plan import model_config, without_weights
from jaxrl.process.plugin import PYTHON
from jaxrl.rewards.batch_rewards import RewardFunctions
from jaxrl.rewards.functions import find as find_reward
from jaxrl.rewards.verifiers import Verifier, verifier
from jaxrl.roles.grouper import tokenizer_of_encoder
from jaxrl.roles.reward import open_reward, tokenizer_of_reward
from jaxrl.run.check_inputs import (
    check_positions,
    encoder,
    end_ids,
    find_teachers,
    held_out_notes,
    held_out_sets,
    keys,
    longest_sequence,
    pad_id,
    token_notes,
    tokenizer_of,
    tools_note,
)
from jaxrl.run.python_objects import NOTHING, PythonObjects
from jaxrl.sharding.axes import Axes
from jaxrl.teacher.cache import MANIFEST, ScoreCache
from jaxrl.teacher.protocol import Info
from jaxrl.teacher.remote import AnyInfo
from jaxrl.types import Completion, Prompt

FIRST_ROWS = 16
"""Rows that are read where the prompts cannot be tokenized."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker makes its roles from. It can be pickled: models are named, not loaded."""

    config: Config
    student: ModelSource
    teachers: Mapping[str, ModelSource]
    """By name, as in `Config.teacher_models`; empty where there is none, or all are served, or it
    has run (`teacher.cache` alone)."""
    served: Mapping[str, AnyInfo] = field(default_factory=dict)
    """By name, as in `Config.served`: what each was at the handshake, and must still be."""
    tokenizer: Tokenizer | bytes
    """Pickled for another process, where only a role that samples opens it: transformers takes a
    second to import."""
    vocab_size: int
    """Tokens that the losses are over: those that student and teachers share or, where the
    teacher's are others, the student's."""
    eos_ids: tuple[int, ...]
    pad_id: int
    teacher_samples: bool
    """The teacher generates, for the student to learn from or for its own accuracy."""
    opening: str
    """What the chat template opens thoughts with at the end of prompts; "" where it does not."""
    outcomes: Outcomes | None = None
    """With a teacher that has its own tokenizer; numpy arrays."""
    aligner: Aligner | bytes | None = None
    """Likewise; pickled for another process."""
    given: Mapping[str, bytes] = field(default_factory=dict)
    """Reward functions and environment from Python, pickled, by their entries in the config."""
    row_multiple: int = 1
    """Rows of a batch are a multiple of this: every mesh divides them."""
    run_dir: Path = Path()
    restore: Path | None = None
    """The checkpoint that the actor resumes from."""

    def open_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, in this process."""
        packed = self.tokenizer
        return cloudpickle.loads(packed) if isinstance(packed, bytes) else packed

    def open_aligner(self) -> Aligner | None:
        """Returns the aligner, in this process."""
        packed = self.aligner
        return cloudpickle.loads(packed) if isinstance(packed, bytes) else packed

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

    aligner: Aligner | None = None
    train: PromptStream
    held_out: tuple[EvalSet, ...]
    judge: Verifier
    long_completions: int = 0
    """Completions of the data that are learned and are longer than `max_new_tokens`."""
    evaluates_teacher: bool = False
    """The teacher's own accuracy is measured before the first step."""
    notes: tuple[str, ...] = ()
    """What could not be checked."""
    cache: ScoreCache | None = None
    """The scores at `teacher.cache`."""

    @property
    def stored_samples(self) -> Callable[[Sequence[Prompt]], list[list[Completion]]] | None:
        """Returns a function that reads the teacher's samples of prompts from disk, or None if the
        run reads none."""
        cache, tokenizer = self.cache, self.tokenizer
        if cache is None or not self.config.distill.seq_kd:
            return None

        def samples(prompts: Sequence[Prompt]) -> list[list[Completion]]:
            groups = cache.samples(prompts, self.config.group_size)
            return [[replace(one, text=decode(tokenizer, one.tokens)) for one in g] for g in groups]

        return samples

    def for_workers(
        self, axes: Mapping[str, Axes], run_dir: Path, restore: Path | None = None
    ) -> Setup:
        """Returns what workers need of the job, once meshes and folder are known."""
        kept = {one.name: getattr(self, one.name) for one in fields(Setup)}
        multiple = math.lcm(*(sizes.rows for sizes in axes.values()))
        return replace(Setup(**kept), row_multiple=multiple, run_dir=run_dir, restore=restore)

    def data_notes(self) -> list[str]:
        """Says what a reader should know of the data: sizes, prompts that were left out or cut, and
        what the chat template does with the rows looked at so far, the first of each kind."""
        limit = self.config.max_prompt_tokens
        first = f"data.train: {self.train.epoch_prompts} prompts"
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
        held_out = held_out_notes(self.config, self.held_out, self.judge)
        return [first, *held_out, *self.train.noted.values(), *self.notes]


def make_job(config: Config, given: PythonObjects = NOTHING) -> Job:
    """Reads configs, tokenizers and data. Raises UserError for what does not fit together."""
    d = config.data
    _check_positions(config)
    verifier(d.verifier)
    for label, sources, split in _data_sources(config):
        for missing in filter(is_missing, sources):  # the others are opened with their tokenizer
            open_source(missing, config.seed, split, keys(config), label)
    source = open_source(d.train, config.seed, "train", keys(config), given=given.rows)
    student, tokenizer, eos_ids, token_note = _student(config)
    teachers = find_teachers(config, student, tokenizer, eos_ids)
    vocabulary = student.config.vocab_size
    encode = encoder(config, tokenizer, eos_ids, vocabulary, True, teachers.prompt_tokenizer)
    train = PromptStream(
        source, encode, config.batch_size, config.seed, d.shuffle, weights=d.weights
    )
    long_completions = 0
    if method_of(config).reads_completions(config):
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
    evaluated = config.eval.teacher and not config.teacher_gets_feedback
    read = encode if evaluated else replace(encode, teacher=None)
    held_out = held_out_sets(config, read, given.rows)
    prompts = [prompt.to_sample for prompt in train.batch(0)]
    prompts += (prompt for one in held_out for prompt in one.prompts)
    notes: list[str | None] = [*token_note, tools_note(config, train, tokenizer)]
    begun = _begins_episodes(config, given)
    if config.learns_from_rewards:
        with user_input("policy"):
            configured_correction(config)
            if config.spec.loss is not None:
                notes += objective_notes(config)
        with contextlib.closing(reward_functions(config, given.code)) as rewards:
            notes += rewards.check(train.batch(0), begun)
        if config.reward.model is not None:
            tokenizer_of_reward(open_reward(config.reward.model))
        if config.grouper.model is not None and config.policy.advantages == "similarity":
            tokenizer_of_encoder(*read_encoder(find_folder(config.grouper.model)))
    notes += teachers.check_data(tokenizer, prompts, train)
    evaluates, why = teachers.evaluates(held_out)
    notes += why
    opening = opening_of(tokenizer, prompts[0].tokens)  # the first speaks for all
    return Job(
        config=config,
        student=student,
        teachers=teachers.models,
        served=teachers.served,
        tokenizer=tokenizer,
        vocab_size=teachers.vocab_size,
        eos_ids=eos_ids,
        pad_id=pad_id(student, eos_ids),
        teacher_samples=bool(teachers.models) and (config.distill.seq_kd or evaluates),
        evaluates_teacher=evaluates,
        outcomes=None if teachers.aligner is None else teachers.aligner.outcomes,
        aligner=teachers.aligner,
        opening=opening,
        given=given.code,
        train=train,
        long_completions=long_completions,
        held_out=held_out,
        judge=verifier(config.data.verifier, opening),
        notes=tuple(filter(None, notes)),
        cache=teachers.cache,
    )


def _begins_episodes(config: Config, given: PythonObjects) -> bool:
    """Returns whether the environment gives its episodes other prompts than the data; False without
    an environment. Raises UserError where it cannot be made, or made so."""
    if config.environment.name is None:
        return False
    with pool_of(config, 1, given.code) as pool:
        environment = pool.facts()
    if config.teacher.prompt is not None and (environment.resets or environment.tools):
        raise UserError(
            f"teacher.prompt changes the rows' prompts, and {config.environment.name} makes"
            " others, by its `reset` or its tools: set teacher.prompt=null, or give an"
            " environment without both"
        )
    return environment.resets


def _student(config: Config) -> tuple[ModelSource, Tokenizer, tuple[int, ...], Sequence[str]]:
    """Returns the student, its tokenizer, the tokens that end its completions, and notes where
    tokenizer and config say other things."""
    student = resolve_student(config).for_length(longest_sequence(config))
    tokenizer = tokenizer_of(student, config.data.chat_date)
    eos_ids, notes = end_ids(student, tokenizer), token_notes(config, student, tokenizer)
    return student.ending_at(eos_ids), tokenizer, eos_ids, notes


def _check_positions(config: Config) -> None:
    """Raises UserError where the longest sequence exceeds the positions of the student, of which
    only `config.json` is read."""
    longest = max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    check_positions(config, longest, model_config(config.student.model), "student.model")


def check_job(config: Config, given: PythonObjects, elsewhere: bool = False) -> list[str]:
    """Returns the notes on the run's data, or raises the UserError that `make_job` would raise.

    Of models that have no weights here, as in a plan for another machine, only `config.json` is
    known, and data on a hub may not have been fetched: then the models, the data that are here and
    the reward functions are checked each alone, and the notes name what was not.

    Args:
        elsewhere: files of data that are not here are no error: another machine may have them.
    """
    described = bool(without_weights(config))
    here = {each[0]: _here(*each, elsewhere) for each in _data_sources(config)}
    if not described and all(len(here[label]) == len(s) for label, s, _ in _data_sources(config)):
        return make_job(config, given).data_notes()
    _check_positions(config)
    verifier(config.data.verifier)
    notes, prompts = [], list[Prompt]()
    for label, sources, split in _data_sources(config):
        if here[label]:
            rows = open_source(here[label], config.seed, split, keys(config), label, given.rows)
            if label == "data.train":
                prompts += map(_untokenized, (rows[i] for i in range(min(len(rows), FIRST_ROWS))))
        missing = [text for text in sources if text not in here[label] and data_name(text) is None]
        if missing:
            notes.append(f"{label}: {', '.join(missing)}: not here, so not checked")
    if described:
        notes.append("data: prompts are not tokenized, as a model has only its config.json here")
    else:
        student, tokenizer, eos_ids, _ = _student(config)
        find_teachers(config, student, tokenizer, eos_ids)
    begun = _begins_episodes(config, given)
    if config.learns_from_rewards:
        with user_input("policy"):
            configured_correction(config)
        with contextlib.closing(reward_functions(config, given.code)) as rewards:
            if prompts:
                notes += rewards.check(prompts, begun)
            else:
                rewards.pool.facts()
    return notes


def _untokenized(example: Example) -> Prompt:
    """Returns a prompt for checks that read no tokens."""
    if isinstance(example.prompt, str):
        text, chat = example.prompt, False
    else:
        text, chat = "\n".join(str(m.get("content") or "") for m in example.prompt), True
    columns = example.columns
    return Prompt(0, (), text, answer=example.answer, columns=columns, conversational=chat)


def reward_functions(
    config: Config, given: Mapping[str, bytes], opening: str = ""
) -> RewardFunctions:
    """Starts the processes of the reward functions."""
    startup_s = config.deadlines.startup
    environment = config.environment if config.environment.name else None
    sizes = config.max_new_tokens, startup_s
    return RewardFunctions(config.rewards, *sizes, given, environment, opening)


def episodes(
    config: Config,
    tokenizer: Tokenizer,
    notify: Callable[[str], None],
    *,
    run_dir: Path | None = None,
    given: Mapping[str, bytes] = MappingProxyType({}),
) -> Episodes | None:
    """Returns the environments of the run, or None if completions are single turns.

    Args:
        run_dir: where their answers are recorded; None: nowhere.
    """
    if config.environment.name is None:
        return None
    return Episodes(config, tokenizer, run_dir=run_dir, notify=notify, given=given)


def _data_sources(config: Config) -> Iterator[tuple[str, Sequence[str], Split]]:
    """Yields the key, the sources and the split of everything that a run reads."""
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
            if (hub_sets.is_here(name, split) if name else not (elsewhere and is_missing(text)))
        ]


def dependencies(job: Job) -> dict[str, str]:
    """Maps what a run depends on beside its config (weights, data, reward functions, environment),
    by key and value, to its digest. A checkpoint notes them, so that a run that resumes notices
    what has changed."""
    config = job.config
    weights = config.needs_reference or config.trains_adapters
    student = job.student.path if weights else job.student.tokenizer_path
    found = {"data.train": job.train.fingerprint}
    if student is not None:
        found[f"student.model={config.student.model}"] = digest_model(student, weights)
    if job.student.adapter is not None:
        base = job.student.adapter
        found[f"base model {base.base}"] = digest_model(base.base_path)
    for name, teacher in {} if config.teacher_follows else job.teachers.items():
        model = config.teacher_models[name]
        found[f"{config.teacher_key(name)}={model}"] = digest_model(teacher.path)
        if teacher.adapter is not None:
            found[f"base model {teacher.adapter.base}"] = digest_model(teacher.adapter.base_path)
    for name, info in job.served.items():
        if isinstance(info, Info):  # completions servers have no fingerprint
            found[config.teacher_key(name, "address")] = info.fingerprint
    if job.cache is not None:
        found[f"teacher.cache={config.teacher.cache}"] = digest_file(job.cache.path / MANIFEST)
    for one in job.held_out:
        prompts = repr([(prompt.text, prompt.answer) for prompt in one.prompts])
        name = f"data.eval.{one.name}" if one.name else "data.eval"
        found[name] = hashlib.sha256(prompts.encode()).hexdigest()
    asked = config.environment.name
    if asked is not None and not asked.startswith(PYTHON):
        environment = environments.find(asked)
        path = Path(environment.place) if environment.digest else _module_file(environment.place)
        if path is not None:
            found[f"environment.name={asked}"] = digest_file(path)
    if not config.learns_from_rewards:
        return found
    for text in config.reward.functions:
        if text.startswith(PYTHON):  # of a Python program: the config has its digest
            continue
        source = find_reward(text)
        path = Path(source.place) if source.digest else _module_file(source.place)
        if source.option == "code" and path is not None:
            found[f"reward.functions={text}"] = digest_file(path)
    if config.reward.model is not None:
        folder = find_folder(config.reward.model)
        found[f"reward.model={config.reward.model}"] = digest_model(folder)
    if config.grouper.model is not None and config.policy.advantages == "similarity":
        folder = find_folder(config.grouper.model)
        found[f"grouper.model={config.grouper.model}"] = digest_model(folder)
    return found


def _module_file(module: str) -> Path | None:
    """Finds the file of a module without importing it or its packages."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin)
    folder = Path(spec.origin).parent.joinpath(*rest)
    files = (folder.with_suffix(".py"), folder / "__init__.py")
    return next((file for file in files if file.is_file()), None)
