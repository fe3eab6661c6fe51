"""What a run is about, before any weight is read: models, tokenizers and data that fit together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from jaxrl.algorithms.methods import method_of, on_policy
from jaxrl.algorithms.objective import configured_correction, objective_notes
from jaxrl.algorithms.teachers import check_teachers, row_weights
from jaxrl.checkpoint.digest import digest_model
from jaxrl.checkpoint.source import ModelSource, resolve_model
from jaxrl.config.schema import Config
from jaxrl.data import hub_sets
from jaxrl.data.source import Split, open_source
from jaxrl.data.stream import EvalSet, PromptStream
from jaxrl.data.tokenizer import Tokenizer, check_same_prompts, check_same_vocabulary, decode
from jaxrl.errors import UserError, user_input
from jaxrl.formats.hub_names import data_name
from jaxrl.formats.places import find_folder
from jaxrl.models.encoder_config import read_encoder
from jaxrl.models.kernels import Target
from jaxrl.plan import without_weights
from jaxrl.rewards.scoring import RewardFunctions
from jaxrl.rewards.verifiers import Verifier, verifier
from jaxrl.roles.reward_model import open_reward
from jaxrl.run.inputs import (
    check_positions,
    encoder,
    end_ids,
    held_out_notes,
    held_out_sets,
    keys,
    pad_id,
    tokenizer_of,
)
from jaxrl.sharding.axes import Axes
from jaxrl.teacher.cache import ScoreCache
from jaxrl.teacher.cached import check_cache
from jaxrl.teacher.openai import CompletionsInfo
from jaxrl.teacher.protocol import Info
from jaxrl.teacher.remote import check_remote, check_remote_prompts, remote_info
from jaxrl.types import Completion, Prompt


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker makes its roles from. It can be pickled: models are named, not loaded."""

    config: Config
    student: ModelSource
    teachers: Mapping[str, ModelSource]
    """By name, as in `Config.teacher_models`; empty where there is none, or it runs elsewhere
    (`teacher.address`), or has run (`teacher.cache` alone)."""
    tokenizer: Tokenizer | bytes
    """Pickled for another process, where only a role that samples opens it: transformers takes a
    second to import."""
    vocab_size: int
    """Tokens that student and teachers share."""
    eos_ids: tuple[int, ...]
    pad_id: int
    teacher_samples: bool
    """The teacher generates, for the student to learn from or for its own accuracy."""
    opens_thought: bool
    """The prompts end inside a thought: the chat template opens `<think>`."""
    given: Mapping[str, bytes] = field(default_factory=dict)
    """Reward functions from Python, pickled, by their entries in `reward.functions`."""
    row_multiple: int = 1
    """Rows of a batch are a multiple of this: every mesh divides them."""
    run_dir: Path = Path()
    restore: Path | None = None
    """The checkpoint that the actor resumes from."""

    def packing(self, target: Target) -> dict[str, int]:
        """How prompts and completions become arrays for the devices of a run: arguments of
        `make_rollout`.
        """
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
    held_out: tuple[EvalSet, ...]
    judge: Verifier
    evaluates_teacher: bool = False
    """The teacher's own accuracy is measured before the first step."""
    notes: tuple[str, ...] = ()
    """What could not be checked."""
    cache: ScoreCache | None = None
    """The scores at `teacher.cache`."""

    @property
    def stored_samples(self) -> Callable[[Sequence[Prompt]], list[list[Completion]]] | None:
        """The teacher's samples of prompts on disk; None where the run reads none."""
        cache, tokenizer = self.cache, self.tokenizer
        if cache is None or not self.config.distill.seq_kd:
            return None

        def samples(prompts: Sequence[Prompt]) -> list[list[Completion]]:
            groups = cache.samples(prompts, self.config.group_size)
            return [[replace(one, text=decode(tokenizer, one.tokens)) for one in g] for g in groups]

        return samples

    @property
    def held_out_prompts(self) -> tuple[Prompt, ...]:
        """Those of all sets, one after the other."""
        return tuple(prompt for one in self.held_out for prompt in one.prompts)

    def for_workers(
        self, axes: Mapping[str, Axes], run_dir: Path, restore: Path | None = None
    ) -> Setup:
        """What workers need of it, once meshes and folder are known."""
        kept = {one.name: getattr(self, one.name) for one in fields(Setup)}
        multiple = math.lcm(*(sizes.rows for sizes in axes.values()))
        return replace(Setup(**kept), row_multiple=multiple, run_dir=run_dir, restore=restore)

    def data_notes(self) -> list[str]:
        """What a reader should know of the data: sizes, and prompts that were left out or cut."""
        limit = self.config.max_prompt_tokens
        first = f"data.train: {self.train.epoch_prompts} prompts"
        if self.train.dropped:
            first += (
                f"; {self.train.dropped} are longer than max_prompt_tokens={limit}"
                f"{self.train.teacher_limit}: left out"
            )
        if self.train.cut:
            first += f"; {self.train.cut} are longer than max_prompt_tokens={limit}: cut"
        return [first, *held_out_notes(self.config, self.held_out, self.judge), *self.notes]


def make_job(config: Config, given: Mapping[str, bytes] | None = None) -> Job:
    """Reads configs, tokenizers and data. Raises UserError for what does not fit together.

    Args:
        given: reward functions from Python (`rewards.callables.bind`).
    """
    found = _models(config)
    student, teachers, tokenizer = found.student, found.teachers, found.tokenizer
    vocab_size, cache, remote = found.vocab_size, found.cache, found.remote
    eos_ids = end_ids(student, tokenizer)
    d, encode = config.data, encoder(config, tokenizer, eos_ids, teacher=True)
    source = open_source(d.train, config.seed, "train", keys(config))
    train = PromptStream(
        source, encode, config.batch_size, config.seed, d.shuffle, weights=d.weights
    )
    if method_of(config).reads_completions(config):
        train.check_completions()
    # Without evaluations of the teacher, its prompts decide nothing about the held-out sets; and
    # where they are about attempts, it is evaluated with the student's.
    own = config.eval.teacher and not config.teacher_gets_feedback
    read = encode if own else replace(encode, teacher=None)
    held_out = held_out_sets(config, read)
    prompts = [*train.batch(0), *(prompt for one in held_out for prompt in one.prompts)]
    notes: list[str | None] = []
    if config.learns_from_rewards:
        notes += _check_rewards(config, train, given or {})
    for name, their_tokenizer in found.theirs.items():
        with _about(name, teachers):
            check_same_prompts(tokenizer, their_tokenizer, prompts)
    if cache is not None:
        digest = digest_model(teachers["teacher"].path) if teachers else None
        rows = train.rows(i for i in range(config.steps) if not on_policy(config, i))
        notes += check_cache(config, cache, digest, vocab_size, rows)
        if not teachers and config.eval.teacher and held_out:
            notes.append("scores on disk answer nothing: the teacher's accuracy is not evaluated")
    if remote is not None:
        notes.append(check_remote_prompts(config, remote, tokenizer, prompts, vocab_size))
        if config.eval.teacher and held_out:
            where = config.teacher.address
            notes.append(f"the teacher at {where} only scores: its own accuracy is not evaluated")
    if config.data.teacher_key is not None:
        for where, example in train.examples():
            row_weights(config, example.columns, where)
    evaluates, why = _evaluates_teacher(config, teachers, held_out)
    notes.append(why)
    return Job(
        config=config,
        student=student,
        teachers=teachers,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        pad_id=pad_id(student, eos_ids),
        teacher_samples=bool(teachers) and (config.distill.seq_kd or evaluates),
        evaluates_teacher=evaluates,
        opens_thought=decode(tokenizer, prompts[0].tokens).rstrip().endswith("<think>"),
        given=given or {},
        train=train,
        held_out=held_out,
        judge=verifier(config.data.verifier),
        notes=tuple(filter(None, notes)),
        cache=cache,
    )


@dataclass(frozen=True)
class _Models:
    """The models of a run, whose vocabularies agree, and their tokenizers."""

    student: ModelSource
    teachers: Mapping[str, ModelSource]
    tokenizer: Tokenizer
    theirs: Mapping[str, Tokenizer]
    """Of the teachers, and of stored scores without one."""
    vocab_size: int
    """Tokens that all share."""
    cache: ScoreCache | None
    remote: Info | CompletionsInfo | None


def _models(config: Config) -> _Models:
    student = resolve_model(config.student.model)
    teachers = {name: resolve_model(model) for name, model in config.teacher_models.items()}
    tokenizer = tokenizer_of(student)
    vocab_size = student.config.vocab_size
    cache = None if config.teacher.cache is None else ScoreCache(config.teacher.cache)
    described: dict[str, ModelSource | ScoreCache] = dict(teachers)
    if not teachers and cache is not None:
        described["teacher"] = cache
    theirs = {name: tokenizer_of(teacher) for name, teacher in described.items()}
    for name, teacher in described.items():
        with _about(name, teachers):
            shared = check_same_vocabulary(
                tokenizer,
                theirs[name],
                student.config.vocab_size,
                teacher.config.vocab_size,
                student.config.eos_ids,
                teacher.config.eos_ids,
            )
        vocab_size = min(vocab_size, shared)
    remote = None if config.teacher.address is None else remote_info(config)
    if remote is not None:
        vocab_size = check_remote(config, remote, tokenizer, student.config)
    _check_sizes(config, student, teachers, vocab_size)
    return _Models(student, teachers, tokenizer, theirs, vocab_size, cache, remote)


def check_job(config: Config, given: Mapping[str, bytes]) -> None:
    """Raises the UserError that `make_job` would. Of models that have no weights here, as in a plan
    for another machine, only `config.json` is known, and data on a hub may not have been fetched:
    then the models, the data that are here and the reward functions are checked each alone.
    """
    described = bool(without_weights(config))
    here = {each[0]: _here(*each) for each in _data_sources(config)}
    if not described and all(len(here[label]) == len(s) for label, s, _ in _data_sources(config)):
        make_job(config, given)
        return
    if not described:
        _models(config)
    for label, _, split in _data_sources(config):
        if here[label]:
            open_source(here[label], config.seed, split, keys(config), label)
    if config.learns_from_rewards:
        with user_input("policy"):
            configured_correction(config)
        with reward_functions(config, given) as rewards:
            rewards.pool.signatures()


def reward_functions(config: Config, given: Mapping[str, bytes]) -> RewardFunctions:
    startup_s = config.deadlines.startup
    return RewardFunctions(config.rewards, config.max_new_tokens, startup_s, given)


def _data_sources(config: Config) -> Iterator[tuple[str, Sequence[str], Split]]:
    """Key, sources and split of all that a run reads."""
    d = config.data
    yield "data.train", d.train, "train"
    if d.few_shot is not None:
        yield "data.few_shot", d.few_shot, "train"
    if isinstance(d.eval, dict):
        for name, sources in d.eval.items():
            yield f"data.eval.{name}", sources, "eval"
    elif d.eval is not None:
        yield "data.eval", d.eval, "eval"


def _here(label: str, sources: Sequence[str], split: Split) -> list[str]:
    """Those of the sources that are not to be fetched first."""
    names = [(text, data_name(text)) for text in sources]
    try:
        return [text for text, name in names if name is None or hub_sets.is_here(name, split)]
    except UserError as error:
        raise UserError(f"{label}: {error}") from error


def _check_rewards(config: Config, train: PromptStream, given: Mapping[str, bytes]) -> list[str]:
    """Everything about the rewards that would otherwise fail after the first sampling."""
    notes: list[str] = []
    with user_input("policy"):
        configured_correction(config)
        if config.spec.loss is not None:
            notes = objective_notes(config)
    with reward_functions(config, given) as rewards:
        rewards.check(train.batch(0))
    if config.reward.model is not None:
        open_reward(config.reward.model)
    if config.grouper.model is not None and config.policy.advantages == "similarity":
        read_encoder(find_folder(config.grouper.model))
    return notes


@contextlib.contextmanager
def _about(name: str, teachers: Mapping[str, ModelSource]) -> Iterator[None]:
    """Puts the key of one of several teachers before the error about it."""
    try:
        yield
    except UserError as error:
        if len(teachers) == 1:
            raise
        raise UserError(f"teachers.{name}: {error}") from error


def _evaluates_teacher(
    config: Config, teachers: Mapping[str, ModelSource], held_out: Sequence[EvalSet]
) -> tuple[bool, str | None]:
    """Whether the teacher's own accuracy is measured, and a note if several teachers are asked for
    it and cannot say."""
    if not (config.eval.teacher and held_out and teachers):
        return False, None
    if config.mixture is not None:
        return False, f"the teachers' {config.mixture} mixture only scores: its accuracy is unknown"
    try:
        check_teachers(config, [prompt for one in held_out for prompt in one.prompts])
    except UserError as error:
        return False, f"data.eval: {error}; the teachers' own accuracy is not evaluated"
    return True, None


def _check_sizes(
    config: Config, student: ModelSource, teachers: Mapping[str, ModelSource], vocab_size: int
) -> None:
    """Widths against the models' positions, and top-k against their vocabulary."""
    longest = max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    sources = {"student.model": student} | {
        "teacher.model" if name == "teacher" else f"teachers.{name}.model": source
        for name, source in teachers.items()
    }
    for key, source in sources.items():
        check_positions(config, longest, source, key, teacher=key != "student.model")
    d = config.distill
    asked = {"distill.top_k": d.top_k} if d.signal in ("topk", "student_topk") else {}
    if d.entropy_aware:
        asked["distill.entropy_top_k"] = d.entropy_top_k
    for key, k in asked.items():
        if teachers and k > vocab_size:
            raise UserError(f"{key}={k} exceeds the vocabulary: it has {vocab_size} tokens")
