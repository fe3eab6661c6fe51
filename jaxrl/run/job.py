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
from jaxrl.checkpoint.source import ModelSource, resolve_model, resolve_student
from jaxrl.config.schema import Config
from jaxrl.data import hub_sets
from jaxrl.data.source import Split, open_source
from jaxrl.data.stream import NEEDS_COMPLETIONS, EvalSet, PromptStream
from jaxrl.data.thoughts import opening_of
from jaxrl.data.token_alignment import Aligner, ModelTokenizer
from jaxrl.data.tokenizer import (
    Tokenizer,
    check_every_token,
    check_same_prompts,
    check_same_vocabulary,
    decode,
    same_prompts,
)
from jaxrl.environments.episode_batches import Episodes, pool_of
from jaxrl.errors import UserError, about, user_input
from jaxrl.formats.hub_names import data_name
from jaxrl.formats.places import find_folder
from jaxrl.losses.token_spans import Outcomes
from jaxrl.models.encoder_config import read_encoder
from jaxrl.models.kernels import Target
from jaxrl.plan import without_weights
from jaxrl.rewards.batch_rewards import RewardFunctions
from jaxrl.rewards.verifiers import Verifier, verifier
from jaxrl.roles.encoder import tokenizer_of_encoder
from jaxrl.roles.reward_model import open_reward, tokenizer_of_reward
from jaxrl.run.inputs import (
    check_positions,
    encoder,
    end_ids,
    held_out_notes,
    held_out_sets,
    keys,
    longest_sequence,
    pad_id,
    token_notes,
    tokenizer_of,
    tools_note,
)
from jaxrl.sharding.axes import Axes
from jaxrl.teacher.cache import ScoreCache
from jaxrl.teacher.cached import check_cache
from jaxrl.teacher.remote import (
    AnyInfo,
    check_remote,
    check_remote_prompts,
    check_together,
    remote_info,
    remote_place,
)
from jaxrl.types import Completion, Prompt


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
    """With a teacher whose tokens are others; numpy arrays."""
    aligner: Aligner | bytes | None = None
    """Likewise; pickled for another process."""
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
        """The teacher's samples of prompts on disk; None where the run reads none."""
        cache, tokenizer = self.cache, self.tokenizer
        if cache is None or not self.config.distill.seq_kd:
            return None

        def samples(prompts: Sequence[Prompt]) -> list[list[Completion]]:
            groups = cache.samples(prompts, self.config.group_size)
            return [[replace(one, text=decode(tokenizer, one.tokens)) for one in g] for g in groups]

        return samples

    @property
    def models(self) -> tuple[ModelSource, ...]:
        """The student and the teachers that are loaded here."""
        return self.student, *self.teachers.values()

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


def make_job(config: Config, given: Mapping[str, bytes] | None = None) -> Job:
    """Reads configs, tokenizers and data. Raises UserError for what does not fit together.

    Args:
        given: reward functions from Python (`rewards.callables.bind`).
    """
    found = _models(config)
    student, teachers, tokenizer = found.student, found.teachers, found.tokenizer
    vocab_size, cache, served = found.vocab_size, found.cache, found.served
    eos_ids, aligner, own = found.eos_ids, found.aligner, found.own
    d = config.data
    encode = encoder(config, tokenizer, eos_ids, student.config.vocab_size, True, own)
    source = open_source(d.train, config.seed, "train", keys(config))
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
    held_out = held_out_sets(config, read)
    prompts = [prompt.to_sample for prompt in train.batch(0)]
    prompts += (prompt for one in held_out for prompt in one.prompts)
    notes: list[str | None] = [*found.notes, tools_note(config, train, tokenizer)]
    if aligner is not None:
        common = int((aligner.to_teacher >= 0).sum())
        notes.append(
            f"teacher.tokenizer=own: {common:,} of the student's {vocab_size:,} tokens are also the"
            " teacher's; completions are aligned by bytes"
        )
    elif config.teacher.tokenizer == "own":
        notes.append("teacher.tokenizer=own: the teacher has the student's tokens, one by one")
    if config.learns_from_rewards:
        notes += _check_rewards(config, train, given or {})
    if config.environment.name is not None:
        with pool_of(config, workers=1) as environments:
            facts = environments.facts()
        if config.teacher.prompt is not None and (facts.resets or facts.tools):
            raise UserError(
                f"teacher.prompt is about the rows' own prompts, and {config.environment.name}"
                " makes others, by its `reset` or its tools: set teacher.prompt=null, or give an"
                " environment without both"
            )
    for name, their_tokenizer in found.theirs.items() if own is None else ():
        with _about(name, teachers):
            check_same_prompts(tokenizer, their_tokenizer, prompts)
    if cache is not None:
        digest = digest_model(teachers["teacher"].path) if teachers else None
        scored = train.rows(i for i in range(config.steps) if not on_policy(config, i))
        notes.append(check_cache(config, cache, digest, vocab_size, scored))
        if not teachers and config.eval.teacher and held_out:
            notes.append("scores on disk answer nothing: the teacher's accuracy is not evaluated")
    for name, info in served.items():
        notes.append(check_remote_prompts(config, info, tokenizer, prompts, vocab_size, name))
        if config.eval.teacher and held_out:
            where = remote_place(config, name)
            notes.append(f"{where} only scores: its own accuracy is not evaluated")
    if config.data.teacher_key is not None:
        for where, example in train.examples():
            row_weights(config, example.columns, where)
    evaluates, why = _evaluates_teacher(config, teachers, held_out)
    notes.append(why)
    opening = opening_of(tokenizer, prompts[0].tokens)  # the first speaks for all
    return Job(
        config=config,
        student=student,
        teachers=teachers,
        served=served,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        pad_id=pad_id(student, eos_ids),
        teacher_samples=bool(teachers) and (config.distill.seq_kd or evaluates),
        evaluates_teacher=evaluates,
        outcomes=None if aligner is None else aligner.outcomes,
        aligner=aligner,
        opening=opening,
        given=given or {},
        train=train,
        long_completions=long_completions,
        held_out=held_out,
        judge=verifier(config.data.verifier, opening),
        notes=tuple(filter(None, notes)),
        cache=cache,
    )


@dataclass(frozen=True, kw_only=True)
class _Models:
    """The models of a run, whose vocabularies fit together, and their tokenizers."""

    student: ModelSource
    teachers: Mapping[str, ModelSource]
    tokenizer: Tokenizer
    theirs: Mapping[str, Tokenizer]
    """Of the teachers, and of stored scores without one."""
    eos_ids: tuple[int, ...]
    vocab_size: int
    """As of `Setup`."""
    cache: ScoreCache | None
    served: Mapping[str, AnyInfo]
    aligner: Aligner | None
    """With a teacher whose tokens are others."""
    own: Tokenizer | None
    """The teacher's tokenizer, where it makes other prompts than the student's."""
    notes: Sequence[str]
    """Of the student's tokenizer, where it and the config say other things."""


def _models(config: Config) -> _Models:
    student = resolve_student(config).for_length(longest_sequence(config))
    read = longest_sequence(config, teacher=True)
    teachers = {
        name: resolve_model(model).for_length(read) for name, model in config.teacher_models.items()
    }
    tokenizer = tokenizer_of(student, config.data.chat_date)
    eos_ids, notes = end_ids(student, tokenizer), token_notes(config, student, tokenizer)
    student = student.ending_at(eos_ids)
    vocab_size = student.config.vocab_size
    cache = None if config.teacher.cache is None else ScoreCache(config.teacher.cache)
    described: dict[str, ModelSource | ScoreCache] = dict(teachers)
    if not teachers and cache is not None:
        described["teacher"] = cache
    day = config.data.chat_date
    theirs = {name: tokenizer_of(teacher, day) for name, teacher in described.items()}
    own = theirs["teacher"] if config.teacher.tokenizer == "own" else None
    aligner: Aligner | None = None
    for name, teacher in described.items():
        try:
            with _about(name, teachers):
                shared = check_same_vocabulary(
                    tokenizer,
                    theirs[name],
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
            ends = end_ids(teachers[name], own)
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
    _check_sizes(config, student, teachers, common)
    if aligner is None and own is not None and same_prompts(tokenizer, own):
        own = None
    return _Models(
        student=student,
        teachers=teachers,
        tokenizer=tokenizer,
        theirs=theirs,
        eos_ids=eos_ids,
        vocab_size=vocab_size,
        cache=cache,
        served=served,
        aligner=aligner,
        own=own,
        notes=notes,
    )


def check_weights(job: Job) -> None:
    """Raises UserError for models that had no weights here when the job was made, and whose tensors
    do not fit their configs."""
    for source in job.models:
        resolve_model(source.name)
    if job.config.learns_from_rewards and job.config.reward.model is not None:
        open_reward(job.config.reward.model)


def check_job(config: Config, given: Mapping[str, bytes]) -> list[str]:
    """The notes on the run's data, or the UserError that `make_job` would raise.

    Of models that have no weights here, as in a plan for another machine, only `config.json` is
    known, and data on a hub may not have been fetched: then the models, the data that are here and
    the reward functions are checked each alone, and there are no notes.
    """
    described = bool(without_weights(config))
    here = {each[0]: _here(*each) for each in _data_sources(config)}
    if not described and all(len(here[label]) == len(s) for label, s, _ in _data_sources(config)):
        return make_job(config, given).data_notes()
    if not described:
        _models(config)
    for label, _, split in _data_sources(config):
        if here[label]:
            open_source(here[label], config.seed, split, keys(config), label)
    if config.learns_from_rewards:
        with user_input("policy"):
            configured_correction(config)
        with contextlib.closing(reward_functions(config, given)) as rewards:
            rewards.pool.facts()
    return []


def reward_functions(
    config: Config, given: Mapping[str, bytes], opening: str = ""
) -> RewardFunctions:
    """Starts the processes of the reward functions.

    Args:
        opening: as of `Job`.
    """
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
) -> Episodes | None:
    """The environments of the run; None where completions are single turns.

    Args:
        run_dir: where their answers are recorded; None: nowhere.
    """
    if config.environment.name is None:
        return None
    return Episodes(config, tokenizer, run_dir=run_dir, notify=notify)


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
    with about(label):
        return [text for text, name in names if name is None or hub_sets.is_here(name, split)]


def _check_rewards(config: Config, train: PromptStream, given: Mapping[str, bytes]) -> list[str]:
    """Everything about the rewards that would otherwise fail after the first sampling."""
    notes: list[str] = []
    with user_input("policy"):
        configured_correction(config)
        if config.spec.loss is not None:
            notes = objective_notes(config)
    with contextlib.closing(reward_functions(config, given)) as rewards:
        notes += rewards.check(train.batch(0))
    if config.reward.model is not None:
        tokenizer_of_reward(open_reward(config.reward.model))
    if config.grouper.model is not None and config.policy.advantages == "similarity":
        tokenizer_of_encoder(*read_encoder(find_folder(config.grouper.model)))
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
    config: Config, student: ModelSource, teachers: Mapping[str, ModelSource], common: int
) -> None:
    """Widths against the models' positions, and top-k against the number of tokens that they have
    in common."""
    longest = max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    sources = {"student.model": student} | {
        config.teacher_key(name): source for name, source in teachers.items()
    }
    theirs = max(config.teacher_new_tokens, config.eval.max_new_tokens or 0)
    for key, source in sources.items():
        teacher = key != "student.model"
        check_positions(config, theirs if teacher else longest, source, key, teacher=teacher)
    d = config.distill
    asked = {"distill.top_k": d.top_k} if d.signal in ("topk", "student_topk") else {}
    if d.entropy_aware:
        asked["distill.entropy_top_k"] = d.entropy_top_k
    for key, k in asked.items():
        if (teachers or config.served) and k > common:
            raise UserError(f"{key}={k} exceeds the common vocabulary: it has {common} tokens")
