"""The kinds of teachers of a run. Each class knows what it checks before a weight is read, what the
run opens of it, the heads that the actor needs of it, and the role that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Self

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms.methods import is_on_policy
from jaxrl.algorithms.protocols import SamplingTeacherRole, TeacherRole
from jaxrl.algorithms.signals import Projection, prompt_weights, row_weights
from jaxrl.checkpoint.fingerprint import digest_file, digest_model
from jaxrl.checkpoint.model_source import (
    ModelSource,
    check_positions,
    completion_ends,
    longest_sequence,
    resolve_model,
    tokenizer_of,
)
from jaxrl.config.schema import Config
from jaxrl.data import thoughts, tokenizer
from jaxrl.data.prompt_encoder import with_feedback
from jaxrl.data.stream import EvalSet, PromptStream
from jaxrl.data.token_alignment import Aligner, ModelTokenizer, TeacherSamples
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.errors import UserError, about
from jaxrl.models.config import DecoderConfig
from jaxrl.models.parameters import Layout, Params, head_sharding, param_shardings
from jaxrl.roles.actor import SENT_TO_TEACHER, Receiver
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.update import first_rows_program
from jaxrl.sharding.ledger import current
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.sharding.reshard import put
from jaxrl.teacher import local_teacher, remote
from jaxrl.teacher.cache import MANIFEST, CachedTeacher, ScoreCache, check_cache
from jaxrl.teacher.local_teacher import LocalTeacher, RoutedTeachers, Scorer, teacher_residents
from jaxrl.teacher.protocol import Info
from jaxrl.types import Completion, Prompt, Tree

Head = tuple[jax.Array, float | None]
"""LM head [V, D] of a teacher, and its `DecoderConfig.final_softcap`."""
MakeSampler = Callable[[ModelSource, Mesh, Params | None], Sampler]
OpenTokenizer = Callable[[], Tokenizer]
Digest = Callable[[], dict[str, str]]
ReadSamples = Callable[[Sequence[Prompt]], list[list[Completion]]]


@dataclass(frozen=True, kw_only=True)
class Student:
    """The model that a teacher has to fit."""

    config: DecoderConfig
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    """Tokens that end its completions."""

    def shared_tokens(self, other: Tokenizer, teacher: DecoderConfig) -> int:
        """Returns how many tokens both models have, the first ones of each. Raises UserError where
        they have other tokens."""
        sizes, ends = zip(*((c.vocab_size, c.eos_ids) for c in (self.config, teacher)), strict=True)
        return tokenizer.check_same_vocabulary(self.tokenizer, other, *sizes, *ends)


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """What a run learns from beside data and rewards. This class is the teacher of a run without
    one. It can be pickled: models are named, not loaded."""

    config: Config
    vocab_size: int
    """V, the tokens that the losses are over: those that student and teachers share or, where the
    teacher's are others, the student's."""
    models: Mapping[str, ModelSource] = field(default_factory=dict)
    """Those that run here, by name, as in `Config.teacher_models`."""
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)
    """By name, of models and of stored scores without one; empty in another process."""
    aligner: Aligner | bytes | None = None
    """Of a model with another tokenizer than the student's; pickled for another process."""
    prompt_tokenizer: Tokenizer | None = None
    """The teacher's, where it makes other prompts than the student's."""

    @classmethod
    def find(cls, config: Config, student: Student) -> Teacher:
        """Finds the teacher, and compares its vocabulary with the student's.

        Raises:
            UserError: it is not there, or does not fit the student.
        """
        return cls(config=config, vocab_size=student.config.vocab_size)

    @classmethod
    def without_devices(cls, config: Config) -> str | None:
        """Returns why the role takes no devices; None if it does."""
        return None

    @classmethod
    def planned_models(
        cls, config: Config, read: Callable[[str], DecoderConfig], student: DecoderConfig
    ) -> tuple[DecoderConfig, ...]:
        """Returns the models that a plan counts with, by which what a teacher sends has its size.

        Args:
            read: maps the name of a model to its config.
        """
        return tuple(map(read, config.teacher_models.values()))

    @classmethod
    def unknown_model(cls, config: Config) -> str | None:
        """Returns how to make the teacher's `config.json` known to a plan; None where it is."""
        return None

    def open_aligner(self) -> Aligner | None:
        """Returns the aligner, in this process."""
        return cloudpickle.loads(self.aligner) if isinstance(self.aligner, bytes) else self.aligner

    def with_config(self, config: Config) -> Self:
        """Returns the teacher with the config of the plan, which has the dtypes."""
        return replace(self, config=config)

    def packed(self) -> Self:
        """Returns the teacher for another process, where only its role unpacks its tokenizers:
        transformers takes a second to import."""
        aligner = self.aligner and cloudpickle.dumps(self.aligner)
        return replace(self, aligner=aligner, prompt_tokenizer=None, tokenizers={})

    def check_data(
        self, student: Student, prompts: Sequence[Prompt], train: PromptStream
    ) -> list[str | None]:
        """Refuses a teacher that would read other prompts than the student, or has no scores of the
        data. Returns notes for the user."""
        for name, own in ({} if self.prompt_tokenizer else self.tokenizers).items():
            with _about(name, self.models):
                tokenizer.check_same_prompts(student.tokenizer, own, prompts)
        if self.config.data.teacher_key is not None:
            for where, example in train.examples():
                row_weights(self.config, example.columns, where)
        return []

    def evaluates(self, held_out: Sequence[EvalSet]) -> tuple[bool, list[str]]:
        """Returns whether the teacher's own accuracy is measured, and notes where it was asked for
        and is unknown."""
        if not (self.config.eval.teacher and held_out):
            return False, []
        notes = self._unevaluated(held_out)
        return not notes and bool(self.models), notes

    def _unevaluated(self, held_out: Sequence[EvalSet]) -> list[str]:
        return []

    def opened(self) -> Iterator[tuple[str, str, ModelSource]]:
        """Yields (the key, what the run depends on, the model) of each that runs here with weights
        of its own."""
        for name, source in ({} if self.config.teacher_follows else self.models).items():
            key = self.config.teacher_key(name)
            yield key, f"{key}={self.config.teacher_models[name]}", source

    def inputs(self) -> Iterator[tuple[str, Digest]]:
        """Yields the key of each thing beside models that the role opens, and a function that maps
        it, by key and value, to its digest now."""
        yield from ()

    def stored_samples(self, student: Tokenizer) -> ReadSamples | None:
        """Returns a function that reads the samples of prompts from disk, or None if the run reads
        none. Their texts are by the student's tokenizer."""
        return None

    def frozen(self, mesh: Mesh, student_softcap: float | None) -> dict[str, Tree]:
        """Returns the arrays of the teachers that the actor's loss reads (`signals.distill_loss`),
        on the actor's mesh."""
        config, everywhere = self.config, NamedSharding(mesh, PartitionSpec())
        frozen: dict[str, Tree] = {}
        if config.learns_from_teacher and config.distill.signal == "hidden":
            heads, caps = list[jax.Array](), [student_softcap]
            if not config.teacher_follows:  # else the head is the actor's own
                caps.clear()
                for head, cap in self.heads(mesh):
                    # Heads that are equal are one array; the comparison is False of other shapes.
                    same = (other for other in heads if bool(jnp.array_equal(other, head)))
                    heads.append(next(same, head))
                    caps.append(cap)
                frozen["teacher_head"] = tuple(heads) if config.teachers else heads[0]
            if any(caps):
                arrays = [None if cap is None else np.float32(cap) for cap in caps]
                placed = put(arrays, everywhere)
                frozen["teacher_softcap"] = tuple(placed) if config.teachers else placed[0]
        if (aligner := self.open_aligner()) is not None:
            frozen["outcomes"] = put(aligner.outcomes, everywhere)
        return frozen

    def heads(self, mesh: Mesh) -> Iterator[Head]:
        """Yields the LM head [V, Dt] of each teacher on the actor's mesh."""
        yield from ()

    def receiver(self, mesh: Mesh | None, samples: bool) -> Receiver | None:
        """Returns how the role takes the policy's weights; None where its own are frozen.

        Args:
            mesh: of the role; None where another process has it.
            samples: the teacher samples too.
        """
        return None

    def make(
        self, mesh: Mesh | None, open_tokenizer: OpenTokenizer, sampler: MakeSampler | None
    ) -> TeacherRole:
        """Makes the role.

        Args:
            mesh: None without devices.
            open_tokenizer: of the student.
            sampler: makes one of a model; None where the teacher samples nothing.
        """
        raise NotImplementedError


def layout_of(samples: bool) -> Layout:
    """Returns the layout of the weights of a teacher, which may sample."""
    return "unstacked" if samples else "stacked"


@dataclass(frozen=True, kw_only=True)
class LocalModels(Teacher):
    """Models on devices of the run, the policy itself included."""

    @classmethod
    def find(cls, config: Config, student: Student) -> LocalModels:
        read, day = longest_sequence(config, teacher=True), config.data.chat_date
        models = {n: resolve_model(m).for_length(read) for n, m in config.teacher_models.items()}
        if (template := config.teacher.chat_template) is not None:
            one = models["teacher"].with_chat_template(template, "teacher.chat_template")
            models["teacher"] = one
        tokenizers = {name: source.tokenizer(day) for name, source in models.items()}
        own = tokenizers["teacher"] if config.teacher.tokenizer == "own" else None
        vocab_size, aligner = student.config.vocab_size, None
        for name, source in models.items():
            try:
                with _about(name, models):
                    shared = student.shared_tokens(tokenizers[name], source.config)
                vocab_size = min(vocab_size, shared)
            except UserError as error:
                if own is None:
                    plain = config.teacher_model and config.teacher.tokenizer == "student"
                    more = "; or set teacher.tokenizer=own" if plain else ""
                    raise UserError(f"{error}{more}") from error
                tokenizer.check_every_token(own, source.config.vocab_size, "teacher.model")
                ends = completion_ends(source, own)
                aligner = Aligner(
                    ModelTokenizer(student.tokenizer, vocab_size, student.end_ids),
                    ModelTokenizer(own, source.config.vocab_size, ends),
                )
        longest = max(config.teacher_new_tokens, config.eval.max_new_tokens or 0)
        for name, source in models.items():
            check_positions(config, longest, source.config, config.teacher_key(name), teacher=True)
        _check_top_k(config, vocab_size if aligner is None else _common(aligner))
        if own is not None and aligner is None and tokenizer.same_prompts(student.tokenizer, own):
            own = None
        return cls(
            config=config,
            models=models,
            tokenizers=tokenizers,
            vocab_size=vocab_size,
            aligner=aligner,
            prompt_tokenizer=own,
        )

    def check_data(
        self, student: Student, prompts: Sequence[Prompt], train: PromptStream
    ) -> list[str | None]:
        config, notes = self.config, list[str | None]()
        if isinstance(self.aligner, Aligner):
            notes.append(
                f"teacher.tokenizer=own: {_common(self.aligner):,} of the student's"
                f" {self.vocab_size:,} tokens are also the teacher's; completions are aligned by"
                " bytes"
            )
        elif config.teacher.tokenizer == "own":
            notes.append("teacher.tokenizer=own: the teacher has the student's tokens, one by one")
        generation = prompts[0].teacher_generation_tokens  # the first speaks for all
        if generation is not None:
            ours = thoughts.opening_of(student.tokenizer, prompts[0].tokens)
            theirs = thoughts.opening_of(self.prompt_tokenizer, generation)
            note = (
                f"teacher.tokenizer=own: thoughts are opened by {ours!r} in the student's prompts,"
                f" by {theirs!r} in the teacher's; it reads completions of the student after"
                f" {ours!r}"
            )
            if config.distill.seq_kd and ours:
                note += "; samples of it without thoughts are learned with empty ones"
            notes.append(note)
        return [*notes, *super().check_data(student, prompts, train)]

    def _unevaluated(self, held_out: Sequence[EvalSet]) -> list[str]:
        config = self.config
        if config.mixture is not None:
            what = f"the teachers' {config.mixture} mixture"
            return [f"{what} only scores: its accuracy is unknown"]
        if not config.evaluates_teacher:
            return ["a teacher plays no episodes: its own accuracy is not evaluated"]
        try:
            for prompt in (prompt for one in held_out for prompt in one.prompts):
                prompt_weights(config, prompt)
        except UserError as error:
            return [f"data.eval: {error}; the teachers' own accuracy is not evaluated"]
        return []

    def receiver(self, mesh: Mesh | None, samples: bool) -> Receiver | None:
        if not self.config.teacher_follows:
            return None
        layout, dtype = layout_of(samples), self.config.teacher.compute_dtype
        model = self.models["teacher"].config
        places = None if mesh is None else param_shardings(model, mesh, layout)
        return Receiver(layout, dtype, places, SENT_TO_TEACHER)

    def heads(self, mesh: Mesh) -> Iterator[Head]:
        v, dtype = self.vocab_size, jnp.dtype(self.config.teacher.compute_dtype)
        for source in self.models.values():
            head = source.load_head(mesh, dtype)
            if self.aligner is None and head.shape[0] != v:
                # Drops the rows of tokens that the student lacks: once here, not at every step.
                head = first_rows_program(v, head.shape[1], mesh)(head)
            yield head, source.config.final_softcap

    def make(
        self, mesh: Mesh | None, open_tokenizer: OpenTokenizer, sampler: MakeSampler | None
    ) -> SamplingTeacherRole:
        assert mesh is not None, "the plan gives devices to models"
        config, layout, aligner = self.config, layout_of(sampler is not None), self.open_aligner()
        dtype, limit = config.teacher.compute_dtype, config.teacher_prompt_tokens
        projection = Projection.from_config(config, mesh, self.vocab_size)
        if aligner is not None:
            projection = replace(projection, vocab_size=aligner.teacher.vocab_size)
        add_feedback: local_teacher.AddFeedback | None = None
        if config.teacher_gets_feedback:
            add_feedback = partial(with_feedback, tokenizer=open_tokenizer(), max_tokens=limit)

        def load(source: ModelSource, sends: Projection) -> tuple[Scorer, Sampler | None]:
            params = None
            if not config.teacher_follows:
                params = source.load(mesh, jnp.dtype(dtype), layout)
                verify_arrays("teacher", params, mesh)
            scorer = Scorer(source.config, params, sends, limit, aligner, config.teacher_new_tokens)
            return scorer, sampler and sampler(source, mesh, params)

        if config.teachers:
            sends = projection
            if projection.mixture is not None:  # is computed of the hidden states of all
                hidden = config.distill.model_copy(update={"signal": "hidden"})
                sends = replace(projection, distill=hidden)
            width = max(source.config.d_model for source in self.models.values())
            several = RoutedTeachers(config, projection, width, add_feedback)
            for name, source in self.models.items():
                current().enter("teacher.start")  # offloads the previous teacher first
                several.add(name, *load(source, sends))
            return several
        samples = None
        if config.teacher.tokenizer == "own":
            samples = TeacherSamples(open_tokenizer(), aligner, config.max_new_tokens)
        return LocalTeacher(
            *load(self.models["teacher"], projection),
            *teacher_residents(config),
            follows=(layout, dtype) if config.teacher_follows else None,
            add_feedback=add_feedback,
            samples=samples,
        )


@dataclass(frozen=True, kw_only=True)
class ServedTeachers(Teacher):
    """Teachers that answer at addresses outside of the run."""

    infos: Mapping[str, remote.AnyInfo]
    """By name, as in `Config.served`: what each was at the handshake, and must still be."""

    @classmethod
    def find(cls, config: Config, student: Student) -> ServedTeachers:
        infos = {name: remote.remote_info(config, name) for name in config.served}
        remote.check_together(config, infos)
        fits = partial(remote.check_remote, config)
        shared = (fits(i, student.tokenizer, student.config, n) for n, i in infos.items())
        vocab_size = min(student.config.vocab_size, *shared)
        _check_top_k(config, vocab_size)
        return cls(config=config, vocab_size=vocab_size, infos=infos)

    @classmethod
    def without_devices(cls, config: Config) -> str:
        return f"it answers at {', '.join(str(one.address) for one in config.served.values())}"

    @classmethod
    def planned_models(
        cls, config: Config, read: Callable[[str], DecoderConfig], student: DecoderConfig
    ) -> tuple[DecoderConfig, ...]:
        return super().planned_models(config, read, student) or (student.base,)

    @classmethod
    def unknown_model(cls, config: Config) -> str:
        name, served = next(iter(config.served.items()))
        return (
            f"{config.teacher_key(name, 'address')}={served.address} is not asked for it: set it to"
            f" null and {config.teacher_key(name)} to a folder with that model's config.json"
        )

    def check_data(
        self, student: Student, prompts: Sequence[Prompt], train: PromptStream
    ) -> list[str | None]:
        given = student.tokenizer, prompts, self.vocab_size
        check = partial(remote.check_remote_prompts, self.config)
        notes = [check(info, *given, name) for name, info in self.infos.items()]
        return [*notes, *super().check_data(student, prompts, train)]

    def _unevaluated(self, held_out: Sequence[EvalSet]) -> list[str]:
        places = (remote.remote_place(self.config, name) for name in self.infos)
        return [f"{place} only scores: its own accuracy is not evaluated" for place in places]

    def inputs(self) -> Iterator[tuple[str, Digest]]:
        for name, info in self.infos.items():
            if isinstance(info, Info):  # completions servers have no fingerprint
                key = self.config.teacher_key(name, "address")
                yield key, partial(dict[str, str], {key: info.fingerprint})

    def heads(self, mesh: Mesh) -> Iterator[Head]:
        for name, info in self.infos.items():
            assert isinstance(info, Info), "`check_remote` refuses others"
            head = remote.remote_head(self.config, self.vocab_size, info, name)
            yield put(head, head_sharding(head.shape, mesh)), info.final_softcap

    def make(
        self, mesh: Mesh | None, open_tokenizer: OpenTokenizer, sampler: MakeSampler | None
    ) -> TeacherRole:
        return remote.RemoteTeachers(self.config, self.vocab_size, self.infos)


@dataclass(frozen=True, kw_only=True)
class StoredScores(Teacher):
    """Scores at `teacher.cache`, alone or beside a model that scores what the student samples."""

    beside: LocalModels | None
    """The model."""

    @cached_property
    def cache(self) -> ScoreCache:
        """Returns the open folder; another process opens it again."""
        assert self.config.teacher.cache is not None
        return ScoreCache(self.config.teacher.cache)

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "cache"}

    @classmethod
    def find(cls, config: Config, student: Student) -> StoredScores:
        vocab_size = student.config.vocab_size
        if not config.teacher_models:
            found = cls(config=config, vocab_size=vocab_size, beside=None)
            cache = found.cache
            own = tokenizer_of(cache.tokenizer_path, cache.config, config.data.chat_date)
            vocab_size = min(vocab_size, student.shared_tokens(own, cache.config))
            return replace(found, vocab_size=vocab_size, tokenizers={"teacher": own})
        live = LocalModels.find(config, student)
        given = {"vocab_size": live.vocab_size, "models": live.models}
        return cls(config=config, beside=live, **given)  # type: ignore[arg-type]

    @classmethod
    def without_devices(cls, config: Config) -> str | None:
        alone = not config.teacher_models
        return f"its scores are read from {config.teacher.cache}" if alone else None

    @classmethod
    def planned_models(
        cls, config: Config, read: Callable[[str], DecoderConfig], student: DecoderConfig
    ) -> tuple[DecoderConfig, ...]:
        folder = config.teacher.cache
        assert folder is not None, "`kind_of`"
        live = super().planned_models(config, read, student)
        return live or tuple(filter(None, [ScoreCache(folder).config]))

    def with_config(self, config: Config) -> Self:
        return replace(self, config=config, beside=self.beside and self.beside.with_config(config))

    def packed(self) -> Self:
        return replace(super().packed(), beside=self.beside and self.beside.packed())

    def check_data(
        self, student: Student, prompts: Sequence[Prompt], train: PromptStream
    ) -> list[str | None]:
        config, notes = self.config, super().check_data(student, prompts, train)
        if self.beside is not None:
            notes += self.beside.check_data(student, prompts, train)
        digest = digest_model(self.models["teacher"].path) if self.models else None
        scored = train.rows(i for i in range(config.steps) if not is_on_policy(config, i))
        facts = digest, self.vocab_size, student.end_ids, longest_sequence(config, teacher=True)
        return [*notes, check_cache(config, self.cache, *facts, scored)]

    def _unevaluated(self, held_out: Sequence[EvalSet]) -> list[str]:
        if self.beside is not None:
            return self.beside._unevaluated(held_out)
        return ["scores on disk answer nothing: the teacher's accuracy is not evaluated"]

    def inputs(self) -> Iterator[tuple[str, Digest]]:
        folder = self.config.teacher.cache
        assert folder is not None
        name = f"teacher.cache={folder}"

        def digests() -> dict[str, str]:
            cache = ScoreCache(folder)  # as it is now
            each = {f"{name}/{file}": digest for file, digest in cache.digests.items()}
            return {name: digest_file(cache.path / MANIFEST)} | each

        yield "teacher.cache", digests

    def stored_samples(self, student: Tokenizer) -> ReadSamples | None:
        if not self.config.distill.seq_kd:
            return None

        def with_text(prompt: Prompt, one: Completion) -> Completion:
            text = tokenizer.decode_text(student, one.tokens)
            return replace(one, text=text, opening=thoughts.opening_of(student, prompt.tokens))

        def samples(prompts: Sequence[Prompt]) -> list[list[Completion]]:
            found = self.cache.samples(prompts, self.config.group_size)
            pairs = zip(prompts, found, strict=True)
            return [[with_text(prompt, one) for one in group] for prompt, group in pairs]

        return samples

    def heads(self, mesh: Mesh) -> Iterator[Head]:
        if self.beside is not None:
            yield from self.beside.heads(mesh)
            return
        head = self.cache.head(self.vocab_size).astype(self.config.teacher.compute_dtype)
        yield put(head, head_sharding(head.shape, mesh)), self.cache.config.final_softcap

    def make(
        self, mesh: Mesh | None, open_tokenizer: OpenTokenizer, sampler: MakeSampler | None
    ) -> TeacherRole:
        given = mesh, open_tokenizer, sampler
        live = None if self.beside is None else self.beside.make(*given)
        return CachedTeacher(self.config, self.cache, self.vocab_size, live)


def kind_of(config: Config) -> type[Teacher]:
    """Returns the class of the teacher of a run."""
    asked = {
        StoredScores: config.teacher.cache,
        ServedTeachers: config.served,
        LocalModels: config.teacher_models,
    }
    return next((kind for kind, given in asked.items() if given), Teacher)


def _about(name: str, models: Mapping[str, ModelSource]) -> AbstractContextManager[None]:
    return about(f"teachers.{name}") if len(models) > 1 else nullcontext()


def _common(aligner: Aligner) -> int:
    return int((aligner.to_teacher >= 0).sum())


def _check_top_k(config: Config, tokens: int) -> None:
    d = config.distill
    asked = {"distill.top_k": d.top_k} if d.signal in ("topk", "student_topk") else {}
    if d.entropy_aware:
        asked["distill.entropy_top_k"] = d.entropy_top_k
    for key, k in asked.items():
        if k > tokens:
            raise UserError(f"{key}={k} exceeds the common vocabulary: it has {tokens} tokens")
