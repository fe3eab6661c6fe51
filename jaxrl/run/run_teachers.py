"""The teachers of a run before any weight is read: which they are, whether they fit the student and
the data, and what a reader should know of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxrl.algorithms.methods import on_policy
from jaxrl.algorithms.signals import prompt_weights, row_weights
from jaxrl.checkpoint.digest import digest_model
from jaxrl.checkpoint.model_source import ModelSource, resolve_model
from jaxrl.config.schema import Config
from jaxrl.data.stream import EvalSet, PromptStream
from jaxrl.data.token_alignment import Aligner, ModelTokenizer
from jaxrl.data.tokenizer import (
    Tokenizer,
    check_every_token,
    check_same_prompts,
    check_same_vocabulary,
    same_prompts,
)
from jaxrl.environments.environment_source import EnvironmentFacts
from jaxrl.errors import UserError
from jaxrl.run.check_inputs import check_positions, end_ids, longest_sequence, tokenizer_of
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

    def check_environment(self, facts: EnvironmentFacts) -> None:
        """Raises UserError where the teacher has prompts of its own, and the environment makes
        prompts."""
        if self.config.teacher.prompt is not None and (facts.resets or facts.tools):
            raise UserError(
                f"teacher.prompt changes the rows' prompts, and {self.config.environment.name}"
                " makes others, by its `reset` or its tools: set teacher.prompt=null, or give an"
                " environment without both"
            )

    def check_data(
        self, tokenizer: Tokenizer, prompts: Sequence[Prompt], train: PromptStream
    ) -> list[str | None]:
        """Refuses teachers that would read other prompts than the student, or have no scores of the
        data. Returns notes for the user.

        Args:
            tokenizer: the student's.
            prompts: those of the first batch and of the evaluations.
        """
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

    Args:
        tokenizer: the student's.
        eos_ids: tokens that end the student's completions.

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
