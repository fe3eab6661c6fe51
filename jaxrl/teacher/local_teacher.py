"""Teachers on devices of the run: models that score completions and, for `distill.seq_kd` and for
their own accuracy, sample. The weights of one are frozen, or follow the policy's: self-distillation
with the current ones, or with their moving average. Several take turns, and answer as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxrl.algorithms import signals
from jaxrl.config.schema import Config
from jaxrl.data.batch import as_the_teacher_reads
from jaxrl.data.prompt_encoder import with_feedback
from jaxrl.data.token_alignment import Aligner, TeacherSamples
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.formats.finite import broken_rows, not_finite
from jaxrl.losses.token_spans import Outcomes
from jaxrl.models.config import DecoderConfig
from jaxrl.models.packing import RowDevices, capacity_of, row_devices
from jaxrl.models.parameters import Layout, Params, abstract_params, head, param_shardings
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.roles.actor import PUBLISHED, SENT_TO_TEACHER
from jaxrl.roles.declared import Program, Resident, local_bytes
from jaxrl.roles.microbatch import ScoredPart, parts_by_teacher, scored_padding, scored_part
from jaxrl.roles.rollout import Sampler, receive_weights
from jaxrl.roles.run_shapes import RunArrays, generates
from jaxrl.roles.sampling_programs import sampling_programs
from jaxrl.runtime.worker import phase
from jaxrl.sharding.axes import ROWS
from jaxrl.sharding.ledger import current
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.sharding.reshard import put, to_host
from jaxrl.types import (
    Array,
    Completion,
    HiddenSignal,
    Prompt,
    Rollout,
    Sequences,
    TeacherSignal,
    TokenAlignment,
    Tree,
    Weights,
)

COMBINE = "combine"
"""The turn in which a mixture is made of all teachers' hidden states."""
AddFeedback = Callable[[Rollout, Sequence[str]], tuple[Rollout, int]]
"""`data.prompt_encoder.with_feedback` of a tokenizer and a limit."""


class Scorer:
    """Runs a frozen model over finished sequences and returns the signal `distill.signal`."""

    def __init__(
        self,
        model: DecoderConfig,
        params: Params | None,
        projection: signals.Projection,
        max_prompt_tokens: int = 0,
        aligner: Aligner | None = None,
        max_new_tokens: int = 0,
    ):
        """
        Args:
            params: in the compute dtype, either layout, on the projection's mesh; None where they
                are set later.
            max_prompt_tokens: longest of the prompts that it reads in place of the student's, where
                there are such prompts (`Prompt.teacher_tokens`).
            aligner: of a model with another tokenizer than the student's.
            max_new_tokens: longest completion in its tokens.
        """
        self.model, self.params, self.mesh = model, params, projection.mesh
        self._longest, self._aligner, self._longest_new = max_prompt_tokens, aligner, max_new_tokens
        self._rows = NamedSharding(self.mesh, PartitionSpec(ROWS))
        self._devices = row_devices(self.mesh)
        outcomes = None if aligner is None else aligner.outcomes
        self._outcomes = put(outcomes, NamedSharding(self.mesh, PartitionSpec()))
        self._score = score_program(model, projection)

    def score(self, rollout: Rollout, part: int = 0, parts: int = 1) -> TeacherSignal | None:
        """Returns the teacher's signal for each completion position of a slice of the rows, on its
        own mesh.

        Args:
            part, parts: index and number of slices. All slices but the last have the same size,
                which the mesh divides, into whole groups if these share a prompt. If there are few
                rows, the last slices are empty, and the result is None.
        """
        devices = self._devices
        if self._aligner is None:
            rollout = as_the_teacher_reads(rollout, self._longest, devices.multiple)
        else:
            with phase("aligning tokens"):
                limits = self._longest, self._longest_new, devices.multiple
                rollout = self._aligner.read(rollout, *limits)
        given = scored_part(rollout, part, parts, devices)
        if given is None:
            return None
        with phase(f"rows {given.rows.start}-{given.rows.stop} of {len(rollout.group_ids)}"):
            signal = self.run(given)
            current().prefetch_next()
            return signal

    def run(self, given: ScoredPart) -> TeacherSignal:
        """Returns the signal of the rows of a part, without its padding."""
        placed = put((given.sequences, given.ids, given.alignment), self._rows)
        arguments = (self.params, *placed, self._outcomes)
        with current().running(self._score, *arguments, live=given.live):
            signal, broken = jax.block_until_ready(self._score(*arguments, live=given.live))
        if (wrong := to_host(broken)).any():
            row = int(np.argmax(wrong))
            what = f"the teacher's scores of row {given.rows.start + row}"
            raise not_finite(what, self.params, self.model, given.tokens_of(row), self.mesh)
        return signal


class LocalTeacher:
    """One model with two uses of the same weights: it scores, and samples."""

    def __init__(
        self,
        scorer: Scorer,
        sampler: Sampler | None,
        resident: Resident,
        *,
        follows: tuple[Layout, str] | None = None,
        add_feedback: AddFeedback | None = None,
        samples: TeacherSamples | None = None,
    ):
        """
        Args:
            resident: the declaration of the weights.
            follows: layout and dtype of the weights that the actor sends before each batch that is
                scored, so that batch i is scored with the weights after i batches. The old ones
                are freed at an update, since new ones come before they are read again. None: the
                weights are frozen.
            add_feedback: makes the teacher's prompts where they are about the completion that is
                scored.
            samples: brings what the teacher samples to a student with another tokenizer.
        """
        self._scorer, self._sampler, self._add_feedback = scorer, sampler, add_feedback
        self._samples = samples
        self._write = keep_weights(resident, scorer, sampler)
        if follows is not None:
            layout, dtype = follows
            self._shardings = param_shardings(scorer.model, scorer.mesh, layout)
            self._expected = abstract_params(scorer.model, jnp.dtype(dtype), layout)

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """Scores as `Scorer.score` does; `rewards` are for a teacher that gets feedback."""
        if self._add_feedback is not None:
            assert rewards is not None, "the loop gives them to a teacher that gets feedback"
            rollout, _ = self._add_feedback(rollout, rewards.messages)
        return self._scorer.score(rollout, part, parts)

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        """Samples completions of each prompt, to train on."""
        assert self._sampler is not None, "the plan makes a sampler where the teacher samples"
        groups, notify = self._sampler.completions(prompts, step), self._sampler.notes.append
        if self._samples is not None:
            pairs = zip(prompts, groups, strict=True)
            groups = [self._samples.learned(p.to_sample, group, notify) for p, group in pairs]
        return self._sampler.make_batch(prompts, groups)

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """Samples completions of each prompt, to evaluate."""
        assert self._sampler is not None, "the plan makes a sampler where the teacher samples"
        return self._sampler.sample(prompts)

    def load(self, weights: Weights) -> dict[str, float]:
        """Takes the next version of weights that follow the policy, once the old one is freed.
        Returns and raises as `receive_weights`."""
        how = self._expected, self._shardings, SENT_TO_TEACHER, "the teacher"
        params, taken = receive_weights(weights, *how, free=partial(self._write, None))
        self._write(params)
        verify_arrays("teacher", params, self._scorer.mesh)
        return taken


class RoutedTeachers:
    """The role `teacher` with several models. Where frozen weights are offloaded, those of one
    teacher at a time are on the devices."""

    def __init__(
        self,
        config: Config,
        projection: signals.Projection,
        width: int,
        add_feedback: AddFeedback | None = None,
    ):
        """Takes the `width` of the widest teacher's hidden states; `add` takes the teachers."""
        self._config, self._projection, self._add_feedback = config, projection, add_feedback
        self._scorers: dict[str, Scorer] = {}
        self._samplers: dict[str, Sampler] = {}
        residents = teacher_residents(config)
        self._residents = dict(zip(config.teachers, residents, strict=True))
        self._combines = projection.mixture is not None and projection.distill.signal != "hidden"
        self._rows = NamedSharding(projection.mesh, PartitionSpec(ROWS))
        self._devices = row_devices(projection.mesh)
        self._merge = merge_program(projection, width)

    @cached_property
    def _mix(self) -> Wrapped:
        softcaps = [scorer.model.final_softcap for scorer in self._scorers.values()]
        return mixture_program(self._projection, softcaps)

    def add(self, name: str, scorer: Scorer, sampler: Sampler | None = None) -> None:
        """Adds the next teacher, in the order of `config.teachers`. Where frozen weights are
        offloaded, its weights are on the host while it has no turn.

        Args:
            scorer: of a mixture's teacher, it sends hidden states.
            sampler: None where no teacher samples.
        """
        self._scorers[name] = scorer
        if sampler is not None:
            self._samplers[name] = sampler
        keep_weights(self._residents[name], scorer, sampler)

    def score(
        self, rollout: Rollout, part: int = 0, parts: int = 1, rewards: RewardReport | None = None
    ) -> TeacherSignal | None:
        """Scores as `LocalTeacher` does. A row gets its teacher's signal, or that of the
        mixture."""
        longest = self._config.teacher_prompt_tokens
        if self._add_feedback is not None:
            assert rewards is not None, "the loop gives them to a teacher that gets feedback"
            rollout, _ = self._add_feedback(rollout, rewards.messages)
        rollout = as_the_teacher_reads(rollout, longest, self._devices.multiple)
        given = scored_part(rollout, part, parts, self._devices)
        if given is None:
            return None
        weights = signals.teacher_weights(self._config, rollout)
        assert weights is not None
        weights = weights[given.rows]
        with phase(f"rows {given.rows.start}-{given.rows.stop} of {len(rollout.group_ids)}"):
            if self._projection.mixture is not None:
                return self._mixed(given, weights)
            merged: TeacherSignal | None = None
            scorers = list(self._scorers.items())
            for k, its_rows in parts_by_teacher(given, weights, self._devices, mixed=False).items():
                name, scorer = scorers[k]
                with self._turn("score", name):
                    signal, rows = scorer.run(its_rows), put(weights[:, k] > 0, self._rows)
                    with current().running(self._merge, merged, signal, rows):
                        merged = jax.block_until_ready(self._merge(merged, signal, rows))
                    current().put("teacher.signal", merged)
        current().drop("teacher.signal")
        assert merged is not None, "one teacher runs at least"
        return merged

    def generate(self, prompts: Sequence[Prompt], step: int) -> Rollout:
        """Samples completions of each prompt by its own teacher, to train on."""
        any_sampler = next(iter(self._samplers.values()))
        return any_sampler.make_batch(prompts, self._sampled("generate", prompts, step))

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """Samples completions of each prompt by its own teacher, to evaluate."""
        return self._sampled("sample", prompts)

    def _sampled(
        self, method: str, prompts: Sequence[Prompt], step: int | None = None
    ) -> list[list[Completion]]:
        sampled: dict[int, list[Completion]] = {}
        for name, rows in signals.prompts_by_teacher(self._config, prompts).items():
            if rows:
                sampler, asked = self._samplers[name], [prompts[i] for i in rows]
                with self._turn(method, name):
                    groups = (
                        sampler.sample(asked) if step is None else sampler.completions(asked, step)
                    )
                sampled |= zip(rows, groups, strict=True)
        return [sampled[i] for i in range(len(prompts))]

    def _turn(self, method: str, name: str) -> AbstractContextManager[None]:
        current().enter(f"teacher.{method}.{name}")
        return phase(name)

    def _mixed(self, given: ScoredPart, weights: np.ndarray) -> TeacherSignal:
        """Computes by every teacher the rows in which it has a share, and mixes."""
        hidden: list[jax.Array] = []
        each = parts_by_teacher(given, weights, self._devices, mixed=True).values()
        for (name, scorer), own in zip(self._scorers.items(), each, strict=True):
            with self._turn("score", name):
                signal = scorer.run(own)
                assert isinstance(signal, HiddenSignal)
                hidden.append(signal.hidden)
                current().put("teacher.signal", hidden)
        heads = None
        if self._combines:
            current().enter(f"teacher.score.{COMBINE}")
            here = [scorer.params for scorer in self._scorers.values()]
            heads = tuple(head(params) for params in here if params is not None)
        sequences, ids = jax.tree.map(lambda x: x[: given.live], (given.sequences, given.ids))
        alone = replace(sequences, group=1, capacity=None)
        alone = replace(alone, capacity=capacity_of(alone, self._devices))
        placed = put((weights, alone, ids), self._rows)
        arguments = (tuple(hidden), heads, *placed)
        with phase(COMBINE), current().running(self._mix, *arguments):
            found = jax.block_until_ready(self._mix(*arguments))
        current().drop("teacher.signal")
        return found


def keep_weights(
    resident: Resident, scorer: Scorer, sampler: Sampler | None
) -> Callable[[Params | None], None]:
    """Registers the weights of a teacher, which score and sample, in the ledger. Returns what sets
    both to other ones."""

    def write(params: Params | None) -> None:
        scorer.params = params
        if sampler is not None:
            sampler.params = params

    resident.register(lambda: scorer.params, write)
    return write


def teacher_residents(config: Config) -> tuple[Resident, ...]:
    """Returns the weights of each teacher of the run, in the order of `config.teachers`."""
    calls, follows = ("score", "generate", "sample"), config.teacher_follows
    combines = config.mixture is not None and config.distill.signal != "hidden"
    averaged, found = "actor.ema" if config.keeps_ema else "actor.params", []
    for number, name in enumerate(config.teachers or [""]):
        part = f".{name}" if name else ""
        stages = [f"teacher.{call}{part}" for call in calls]
        if name and combines:
            stages.append(f"teacher.score.{COMBINE}")

        def weights(run: RunArrays, number: int = number) -> Params:
            models = [model for _, model in run.teachers]
            return run.params("teacher", models[number]) if models else {}

        offload = config.offloads_follower if follows else config.offload.frozen
        found.append(
            Resident(
                f"teacher{part}.params",
                f"parameters of {name}" if name else "parameters",
                weights,
                tuple(stages),
                offload=offload,
                made_at=(*PUBLISHED, "teacher.load") if follows else (),
                stale_at=("actor.update",) if follows else (),
                shares=averaged if follows and not offload else "",
            )
        )
    return tuple(found)


def teacher_arrays(config: Config) -> tuple[Resident, ...]:
    """Returns all arrays that the role keeps: the weights, and the next ones of a teacher that
    follows the policy, while they arrive from another worker."""

    def waiting(run: RunArrays) -> Tree:
        m = run.shapes
        return run.signal("teacher", m.padded_rows) if run.teachers and m.signal_waits else ()

    signals = Resident("teacher.signals", "signals in flight", waiting, (), column="activations")
    residents = (*teacher_residents(config), signals)
    if not config.teacher_follows:
        return residents

    def arriving(run: RunArrays) -> Params:
        together = run.shapes.inputs.together("actor", "teacher")
        return {} if together else residents[0].arrays(run)

    named = ("teacher.next", "next version", arriving, ("teacher.load",))
    return (*residents, Resident(*named, column="activations", passing=True))


@lru_cache(maxsize=8)  # one program for all scorers of one shape, and for the runs of a process
def score_program(model: DecoderConfig, projection: signals.Projection) -> Wrapped:
    """Returns the jitted (parameters, sequences, the student's top-k ids or None) -> the teacher's
    signal, and `broken_rows` of it, of the first `live` rows. Of a teacher with another tokenizer
    further: the alignment of its sequences; the outcomes of the student's and of its own tokens
    (`losses.token_spans`). A temperature takes the place of the projection's.
    """

    def score_rows(
        params: Params,
        sequences: Sequences,
        ids: Array,
        alignment: TokenAlignment | None = None,
        outcomes: Outcomes | None = None,
        live: int | None = None,
        temperature: Array | None = None,
    ) -> tuple[TeacherSignal, Array]:
        at = projection if temperature is None else replace(projection, temperature=temperature)
        signal = signals.score_completions(at, model, params, sequences, ids, alignment, outcomes)
        return jax.tree.map(lambda x: x[:live], (signal, broken_rows(signal)))

    rows = NamedSharding(projection.mesh, PartitionSpec(ROWS))
    return jax.jit(score_rows, static_argnames="live", out_shardings=rows)


def mixture_program(projection: signals.Projection, softcaps: Sequence[float | None]) -> Wrapped:
    """Returns the jitted (hidden states of each teacher, their heads, weights [B, K], sequences,
    the student's top-k ids or None) -> the signal of the mixture.

    Args:
        softcaps: `DecoderConfig.final_softcap` of each teacher.
    """

    def combine(
        hidden: tuple[Array, ...], heads: Tree, weights: Array, sequences: Sequences, ids: Array
    ) -> TeacherSignal:
        return signals.mixture_signal(projection, hidden, heads, softcaps, weights, sequences, ids)

    rows = NamedSharding(projection.mesh, PartitionSpec(ROWS))
    return jax.jit(combine, out_shardings=rows)


def merge_program(projection: signals.Projection, width: int) -> Wrapped:
    """Returns the jitted (the signal so far or None, a teacher's signal, its rows [B] bool) -> the
    signal with that teacher's in its rows.

    Args:
        width: of the widest teacher's hidden states; narrower ones get zeros at their end.
    """

    rows = NamedSharding(projection.mesh, PartitionSpec(ROWS))
    return jax.jit(partial(signals.merge_signal, width=width), out_shardings=rows)


def teacher_metrics(
    config: Config,
    devices: RowDevices,
    tokenizer: Tokenizer,
    aligner: Aligner | None,
    rollout: Rollout,
    parts: int,
    messages: Sequence[str],
) -> dict[str, float]:
    """Returns the metrics of a rollout that the teacher on these devices scored in so many parts:
    padding, and the prompts that it read.

    Args:
        messages: of the reward functions, one for each completion; read by a teacher that gets
            feedback.
    """
    row = dict[str, float]()
    if config.teacher.cache is not None and rollout.policy_version < 0:
        return row  # these scores were read from disk
    longest = config.teacher_prompt_tokens
    if config.teacher_gets_feedback:
        rollout, cut = with_feedback(rollout, messages, tokenizer, longest)
        row["teacher/feedback_cut"] = float(cut)
    lengths = [len(p.teacher_tokens) for p in rollout.prompts if p.teacher_tokens is not None]
    if lengths:
        row["teacher/prompt_tokens_mean"] = float(np.mean(lengths))
    if aligner is None:
        rollout = as_the_teacher_reads(rollout, longest, devices.multiple)
    else:
        rollout = aligner.read(rollout, longest, config.teacher_new_tokens, devices.multiple)
    weights, mixed = signals.teacher_weights(config, rollout), config.mixture is not None
    row["teacher/padding"] = scored_padding(rollout, parts, devices, weights, mixed)
    return row


def teacher_programs(run: RunArrays) -> Iterator[Program]:
    """Yields scoring by each teacher, what makes one signal of several, and sampling."""
    c, m, role = run.config, run.shapes, "teacher"
    parts = c.slices("teacher")
    combines = bool(c.teachers) and c.mixture is not None and c.distill.signal != "hidden"

    def stage(name: str, call: str = "score") -> str:
        return ".".join(filter(None, (role, call, name)))

    rows, group = run.scored(role, parts)
    for name, model in run.teachers:
        sends, given = run.score(rows, (name, model), group, sends=combines)
        jitted = score_program(model, sends)
        beside = (parts - 1) * local_bytes(run.signal(role, rows))
        title = f"score by {name}" if name else "score"
        yield Program(role, title, jitted, given, stage(name), beside=beside, calls=parts)
    projection = signals.Projection.from_config(c, run.meshes[role], m.vocab)
    if c.teachers and c.mixture is None:  # a teacher's rows go among those of the ones before it
        jitted, signal = merge_program(projection, max(m.teacher_widths)), run.signal(role, rows)
        given, calls = (signal, signal, run.array(role, bool, rows)), parts * len(run.teachers)
        last = stage(run.teachers[-1][0])
        yield Program(role, "merge", jitted, given, last, calls=calls)
    elif c.teachers:  # one signal of the hidden states of all
        models, dtype = m.inputs.teachers, c.teacher.compute_dtype
        hidden = tuple(run.array(role, dtype, rows, m.new_tokens, one.d_model) for one in models)
        heads = tuple(head(run.params(role, one)) for one in models) if combines else None
        ids = None
        if c.distill.signal == "student_topk":
            ids = run.array(role, jnp.int32, rows, m.new_tokens, c.distill.top_k)
        shares = run.array(role, jnp.float32, rows, len(models))
        given = (hidden, heads, shares, run.sequences(role, rows), ids)
        jitted = mixture_program(projection, [model.final_softcap for model in models])
        yield Program(role, "mixture", jitted, given, stage(COMBINE), calls=parts)
    if generates(c, role):
        share = 1 - c.distill.on_policy_fraction if c.distill.seq_kd else 0.0
        for name, model in run.teachers:
            for program in sampling_programs(run, role, model, share / len(run.teachers)):
                title = f"{program.name} by {name}" if name else program.name
                yield replace(program, name=title, stage=stage(name, "generate"))
