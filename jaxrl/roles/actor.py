"""The actor trains the policy: one jitted update with donated state per minibatch."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxrl.algorithms.methods import inspect_tokens, method_of
from jaxrl.algorithms.signals import add_teacher_weights
from jaxrl.checkpoint.store import ACTOR
from jaxrl.checkpoint.writer import Saving, load_arrays, save_arrays
from jaxrl.config.schema import Config
from jaxrl.config.section import DType
from jaxrl.errors import RunError, StopTraining
from jaxrl.formats import peft
from jaxrl.formats.hf import TokenizerFiles, save_hf
from jaxrl.formats.weights import leaves_by_path
from jaxrl.losses.token_spans import span_baseline
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import GPU
from jaxrl.models.lora import frozen_and_trained, join_adapters
from jaxrl.models.packing import capacity_of, count_tokens, row_devices
from jaxrl.models.parameters import Layout, Params, head_sharding
from jaxrl.rewards.batch_rewards import join_reports
from jaxrl.roles.declared import Program, Remedy, Resident, local_bytes
from jaxrl.roles.microbatch import (
    cut_minibatches,
    padded_count,
    rows_of_groups,
    shared_group,
    tokens_of,
    unit_rows,
)
from jaxrl.roles.optimizer import average_dtype, learning_rate
from jaxrl.roles.run_shapes import RECOMPUTED, RunArrays, RunShapes, common_remedies, fractions
from jaxrl.roles.update import (
    BASE,
    PLANNED,
    ActorPrograms,
    TrainState,
    abstract_moments,
    first_rows_program,
)
from jaxrl.runtime.worker import ask_to_stop, phase
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.ledger import buffer, current
from jaxrl.sharding.mesh import abstract_mesh, is_primary
from jaxrl.sharding.reshard import (
    Rows,
    checksums,
    join_parts,
    piece_programs,
    put,
    reshard,
    to_host,
)
from jaxrl.types import (
    AlignedSignal,
    Array,
    Frozen,
    RoleScores,
    Rollout,
    Sequences,
    TokenValues,
    TrainBatch,
    Trained,
    Tree,
    Weights,
)

SENT = "weights on their way"
"""Name of published weights in the ledger, from `publish` to the receiver's `load`."""
SENT_TO_TEACHER = "weights on their way to the teacher"
"""The same for `publish_to_teacher`."""
PUBLISHED = ("actor.publish", "actor.publish_to_teacher")
"""Stages in which the actor makes the weights of other roles."""


@dataclass(frozen=True)
class Receiver:
    """How a role takes the weights that the actor publishes."""

    layout: Layout
    dtype: str
    shardings: Tree
    """None where the role is in another process."""
    sent: str
    """Name of the weights in the ledger until they are loaded."""


@dataclass
class _Learned:
    """What the updates of a batch have reported so far."""

    totals: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    """Of the gradients."""
    skipped: int = 0
    empty: int = 0
    """Updates in which no token trains."""
    real: int = 0
    computed: int = 0
    """Tokens, with their padding."""
    scores: list[RoleScores] = field(default_factory=list)
    """Of the parts of the batch, where it has several; without the teacher's, which are large."""
    rows: list[dict[str, np.ndarray]] = field(default_factory=list)
    """The metrics of their completions."""


def join_scores(parts: Sequence[RoleScores], n: int, whole: Rollout) -> RoleScores:
    """Returns the scores of a whole batch from those of its parts, each of n completions: what the
    functions reward and the reference say."""
    reports = [scores["reward"][0] for scores in parts]
    joined = join_reports(reports, [n] * len(parts), len(whole.group_ids))
    found: dict[str, Any] = {"reward": [joined]}
    if "reference" in parts[0]:
        logprobs = [join_parts(scores["reference"]) for scores in parts]
        found["reference"] = [_join_tokens(logprobs, n, whole)]
    return found


def join_values(parts: Sequence[TokenValues], n: int, whole: Rollout) -> TokenValues:
    """Returns the values of the tokens of a whole batch from those of its parts, each of n
    completions."""
    divergence = [x.divergence for x in parts if x.divergence is not None]
    return TokenValues(
        _join_tokens([x.logprobs for x in parts], n, whole),
        _join_tokens([x.entropy for x in parts], n, whole),
        _join_tokens(divergence, n, whole) if divergence else None,
    )


def _join_tokens(parts: Sequence[Array], n: int, whole: Rollout) -> np.ndarray:
    """Joins the first n rows of each array, whose widths differ, to the [B, C] of a batch."""
    rows, width = whole.sequences.loss_mask.shape
    cut = [np.asarray(values)[:n] for values in parts]
    joined = np.concatenate([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in cut])
    return np.pad(joined, ((0, rows - len(joined)), (0, 0)))


class Actor:
    """Holds the policy that is trained, and its optimizer state, on one mesh."""

    def __init__(
        self,
        config: Config,
        model: DecoderConfig,
        mesh: Mesh,
        load: Callable[[DTypeLike], Params],
        vocab_size: int,
        frozen: Frozen,
        rollout_shardings: Tree,
        run_dir: Path,
        restore: Path | None = None,
        teacher: Receiver | None = None,
        base: Params | None = None,
        base_name: str = "",
        base_digest: str | None = None,
    ):
        """
        Args:
            load: dtype -> the parameters to train, in the stacked layout on `mesh`.
            vocab_size: tokens that the policy shares with the teachers.
            frozen: arrays on `mesh` that the loss reads and nobody trains (the teacher's head).
            rollout_shardings: of the rollout's weights, unstacked; None where that is in another
                worker.
            run_dir: where the batch of a non-finite gradient is dumped.
            restore: a checkpoint to restore in place of `load`.
            teacher: how a teacher that follows the policy takes its weights.
            base: frozen base weights of adapters, stacked on `mesh`; None where all are trained.
            base_name: name of the model that these are of.
            base_digest: of the weights of that model.
        """
        self.config, self.model, self.mesh = config, model, mesh
        self._devices = row_devices(mesh)
        self.version = 0
        method = method_of(config)
        self._prepare, self._finish = method.prepare(config), method.finish
        self._frozen, self._run_dir = frozen, run_dir
        self._base, self._base_name, self._base_digest = base or {}, base_name, base_digest
        self._rollout_shardings, self._teacher = rollout_shardings, teacher
        self._skipped_in_a_row = 0
        self._learned = _Learned()
        self._savings: dict[int, Saving] = {}
        """Step -> its save, until `saved` has waited for it."""
        c = config.actor
        o = config.optimizer
        updates = config.updates_per_batch
        self._several_updates = updates > config.parts
        rate = learning_rate(o, config.steps * updates)
        constant = o.lr_schedule == "constant" and not o.warmup_steps
        self._rate = rate if constant else jax.jit(rate)  # one program, not one an operation
        self.programs = programs = make_programs(config, model, mesh, vocab_size)
        if restore is None:
            with phase("load"):
                params = load(jnp.dtype(c.param_dtype))
            # Waits, because arrays that a program still reads must not be offloaded.
            opt_state = jax.block_until_ready(programs.start(params))
            ema = jax.block_until_ready(programs.initial_ema(params)) if config.keeps_ema else None
            updates = put(np.int32(0), programs.replicated)
            self.state = TrainState(params, opt_state, updates, ema)
        else:
            # Into the shapes, dtypes and shardings of this run, which may differ from those saved.
            with phase("restore"):
                state = programs.abstract_state()
                wanted = {"params": state.params, "opt_state": state.opt_state, "counters": None}
                if state.ema is not None:
                    wanted["ema"] = state.ema
                loaded = load_arrays(restore / ACTOR, wanted)
                counters = loaded["counters"]
                self.version = counters["version"]
                self._skipped_in_a_row = counters["skipped_in_a_row"]
                trained = loaded["params"], loaded["opt_state"]
                updates = put(np.int32(counters["updates"]), programs.replicated)
                self.state = TrainState(*trained, updates, loaded.get("ema"))
        for resident in actor_residents(config):
            resident.keep(self)

    def update(
        self,
        rollout: Rollout,
        scores: RoleScores,
        step: int,
        part: int = 0,
        whole: Rollout | None = None,
    ) -> Trained | None:
        """Trains on one rollout batch: `epochs_per_batch` passes of `minibatches` updates each. A
        batch that comes in parts, in their order, is trained with one update of each.

        A non-finite gradient changes nothing, dumps the batch, and after `actor.max_nonfinite` such
        updates in a row ends the run. An update in which no token trains changes nothing either.

        Args:
            scores: role -> the parts of its scores. Their arrays are `jax.Array`s on any mesh of
                this worker, `Shards` or numpy arrays.
            step: number of the batch, from 0.
            part: number of the part that `rollout` is, of `config.parts`.
            whole: the whole batch, with its last part.

        Returns:
            Metrics of the batch, and those of each row in the first pass over it. None where
            further parts of the batch follow.
        """
        c, several = self.config.actor, self.config.parts
        learned = self._learned = _Learned() if part == 0 else self._learned
        batch, prepared = self._make_batch(rollout, scores)
        placed = self._place(batch)
        tokens = np.asarray(batch.sequences.mask).sum(-1)
        lengths = np.where(np.asarray(batch.sequences.loss_mask).any(-1), tokens, 0)
        sequences = jax.tree.map(np.asarray, batch.sequences)
        minibatches = self.config.minibatches // several
        unit = unit_rows(rollout.group_ids, minibatches)
        group = shared_group(sequences, unit, self.programs.budget)
        sequences = replace(sequences, group=group)
        in_policy = np.asarray(np.any(batch.policy_mask, axis=-1))
        units = tokens_of(lengths, group)
        live = int((tokens_of(tokens, group) > 0).sum())
        if batch.advantages is not None and self._several_updates:
            wanted = np.where(tokens_of(in_policy, group) > 0, units, 0)
            placed = self._with_old_logprobs(placed, sequences, wanted, live)
        by_row: dict[str, np.ndarray] = {}
        planned, devices = 0, self._devices
        frozen = self._frozen_arrays()
        for epoch in range(c.epochs_per_batch):
            seed = (self.config.seed, step, epoch)
            parts = cut_minibatches(lengths, in_policy, unit, group, minibatches, seed)
            padded = padded_count(max(map(len, parts)), -(-live // minibatches))
            cuts = [
                self.programs.micro_batches(chosen, units, sequences, group, padded)
                for chosen in parts
            ]
            together = np.concatenate(cuts)
            size = capacity_of(sequences, devices, together)  # one program for all
            all_updates = c.epochs_per_batch * len(parts) * several
            learned.real += int(count_tokens(sequences, devices, together)[0].sum())
            learned.computed += len(together) * devices.count * size[0]
            for number, (chosen, index) in enumerate(zip(parts, cuts, strict=True), 1):
                # Fewer minibatches than planned are spread over the places of all, the last
                # one at the last, so that the schedule ends with the last batch.
                planned = ((step * c.epochs_per_batch + epoch) * several + part) * minibatches
                planned += -(-number * minibatches // len(parts)) - 1
                read = {**frozen, PLANNED: put(np.int32(planned), self.programs.replicated)}
                arguments = (self.state, read, placed, index, group, size)
                with (
                    phase(f"update {(epoch + part) * len(parts) + number}/{all_updates}"),
                    current().running(self.programs.update, *arguments),
                ):
                    self.state, out = self.programs.update(*arguments)
                    del arguments
                    sums, maxima, per_row, last = jax.device_get(out)
                if last["finite"]:
                    learned.norms.append(float(last["grad_norm"]))
                    self._skipped_in_a_row = 0
                for name, pair in sums.items():
                    learned.totals.setdefault(name, []).append(pair)
                for name, value in maxima.items():
                    learned.largest[name] = max(learned.largest.get(name, 0.0), float(value))
                for name, (total, count) in per_row.items() if epoch == 0 else ():
                    values = by_row.setdefault(name, np.full(len(lengths), np.nan))
                    real_rows = (index >= 0) & (count > 0)
                    values[index[real_rows]] = total[real_rows] / count[real_rows].astype(float)
                learned.empty += not last["trains"]
                if not last["finite"]:
                    learned.skipped += 1
                    self._skipped(placed, rows_of_groups(chosen, group), step)
        current().drop("actor.batch")
        if several > 1:
            n = len(rollout.completions)
            learned.scores.append({**scores, "teacher": None})
            learned.rows.append({name: values[:n] for name, values in by_row.items()})
            if whole is None:
                return None
            batch, prepared = TrainBatch(whole.sequences), {}
            if self.config.learns_from_rewards:
                batch, prepared = self._prepare(whole, join_scores(learned.scores, n, whole))
            by_row = {name: np.concatenate([x[name] for x in learned.rows]) for name in by_row}
        self.version += 1
        added = {
            name: (float(sum(p[0] for p in pairs)), float(sum(p[1] for p in pairs)))
            for name, pairs in learned.totals.items()
        }
        try:
            metrics = prepared | self._finish(added, learned.largest)
        except StopTraining as stop:  # the batch is trained: its row lacks these alone
            ask_to_stop(stop.from_code(f"algorithm: {self.config.algorithm}"))
            metrics = dict(prepared)
        updates = int(jax.device_get(self.state.updates))
        metrics |= {
            "actor/grad_norm": float(np.mean(learned.norms or np.nan)),
            "actor/learning_rate": float(self._rate(planned)),
            "actor/skipped_updates": float(learned.skipped),
            "actor/empty_updates": float(learned.empty),
            "actor/tokens": float(np.asarray(batch.sequences.loss_mask).sum()),
            "actor/padding": 1 - learned.real / learned.computed,
            "optimizer_step": float(updates),
        }
        self._learned = _Learned()
        tokens = np.asarray(batch.sequences.loss_mask).sum(-1)
        advantages = None if batch.advantages is None else np.asarray(batch.advantages)
        return Trained(metrics, by_row, tokens, advantages)

    def inspect(self, rollout: Rollout, scores: RoleScores | None) -> TokenValues:
        """Computes what the policy, as it is now, makes of the tokens of a batch; changes nothing.

        Args:
            scores: as in `update`; None: without the divergence from a teacher.
        """
        sequences = replace(rollout.sequences, experts=rollout.experts)
        batch = TrainBatch(sequences)
        if scores is not None:
            made, _ = self._make_batch(rollout, scores)
            taught = made.teacher, made.sampler_logprobs
            batch = TrainBatch(sequences, *taught, teacher_weights=made.teacher_weights)
        placed = self._place(batch)
        on_host = jax.tree.map(np.asarray, sequences)
        lengths = on_host.mask.sum(-1)
        rows = np.flatnonzero(on_host.loss_mask.any(-1))
        index = self.programs.micro_batches(rows, lengths, on_host, 1, len(rows))
        size = capacity_of(on_host, self._devices, index)
        arguments = (self.state.params, self._frozen_arrays(), placed, index, 1, size)
        inspect = self.programs.inspect
        with phase("values of the tokens"), current().running(inspect, *arguments):
            found = {name: to_host(x) for name, x in inspect(*arguments).items()}
        current().drop("actor.batch")
        return TokenValues(found["logprobs"], found["entropy"], found.get("divergence"))

    def _make_batch(
        self, rollout: Rollout, scores: RoleScores
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Makes the batch to train on, not yet on the actor's mesh, and its metrics."""
        if self.config.teacher_follows and self.config.distill.signal == "hidden":
            # The teacher scored with the weights of this version, and keeps them meanwhile.
            head = self.programs.copy_head(self._taught())
            self._frozen = {**self._frozen, "teacher_head": head}
            current().refresh()
        batch, prepared = self._prepare(rollout, scores)
        if self.config.teachers and batch.teacher is not None:
            batch, of_teachers = add_teacher_weights(self.config, rollout, batch)
            prepared |= of_teachers
        return batch, prepared

    def _place(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch on the actor's mesh."""
        with phase("place the batch"):
            placed = reshard(batch, self.programs.row_sharding)
            if isinstance(sent := placed.teacher, AlignedSignal):
                mask = placed.sequences.loss_mask
                baseline = span_baseline(
                    sent.kinds, sent.span_logprobs, placed.sampler_logprobs, mask
                )
                baseline = jax.device_put(baseline, sent.kinds.sharding)
                placed = replace(placed, teacher=replace(sent, baseline=baseline))
            current().put("actor.batch", placed)
        return placed

    def _frozen_arrays(self) -> Frozen:
        return {**self._frozen, BASE: self._base} if self._base else self._frozen

    def publish(self, version: int, dtype: str | None = None) -> Weights:
        """Converts the policy to `dtype` (None: that of the rollout) and one array per layer, and
        sends it to the receiver's mesh. `version` must be the actor's version.

        An array that already has the receiver's dtype, layout and sharding is shared without a
        copy. The next update donates it: the receiver is then on the same worker, and never samples
        between an update and the next `publish`. For a receiver in another worker the weights stay
        on the actor's mesh, and the caller must send them before the next update.
        """
        dtype = dtype or self.config.rollout.compute_dtype
        to = Receiver("unstacked", dtype, self._rollout_shardings, SENT)
        return self._send(version, self.state.params, to)

    def publish_to_teacher(self, version: int) -> Weights:
        """Sends the policy, or its moving average (`teacher.ema`), to a teacher that follows it,
        which scores with them until the next update at the latest; as `publish`."""
        assert self._teacher is not None, "the plan gives the actor a teacher that follows"
        return self._send(version, self._taught(), self._teacher)

    def _taught(self) -> Params:
        """Returns the weights that teach: the policy's, or their moving average."""
        return self.state.params if self.state.ema is None else self.state.ema

    def _send(self, version: int, params: Params, to: Receiver) -> Weights:
        if version != self.version:
            raise RuntimeError(f"asked for version {version}, the actor holds {self.version}")
        held = set(map(buffer, jax.tree.leaves(params)))
        with phase(f"send version {version}"):
            form = jnp.dtype(to.dtype), to.layout
            old = self.programs.differing(params, *form)
            params = params | (self.programs.convert(old, *form) if old else {})
            current().put(to.sent, params)
            kept = leaves_by_path(params)
            if to.shardings is not None:
                params = reshard(params, to.shardings)
                current().put(to.sent, params)
                arrived = leaves_by_path(params)
                kept = {path: x for path, x in kept.items() if arrived[path] is not x}
            sums = dict(zip(kept, checksums(list(kept.values())), strict=True))
            del kept
            jax.block_until_ready(params)
        there = set() if to.shardings is None else jax.tree.leaves(to.shardings)[0].device_set
        if there.isdisjoint(self.mesh.devices.flat):
            current().drop(to.sent)
        moved = [
            leaf
            for leaf in jax.tree.leaves(params)
            if to.shardings is None or buffer(leaf) not in held
        ]
        return Weights(version, params, sum(x.nbytes for x in moved), sums)

    def save(self, folder: Path, step: int) -> int:
        """Starts to write a checkpoint; `step` must be the actor's version.

        Returns once the state is on the host, so that training may continue while it is written.
        First waits for an earlier save that is still being written.
        """
        if step != self.version:
            raise RuntimeError(f"asked to save step {step}, the actor holds {self.version}")
        for saving in list(self._savings.values()):
            with phase("write the checkpoint before"), contextlib.suppress(Exception):
                saving.wait()  # `saved` reports an error
        counters = {
            "version": self.version,
            "updates": int(self.state.updates),
            "skipped_in_a_row": self._skipped_in_a_row,
        }
        state = {"params": self.state.params, "opt_state": self.state.opt_state}
        if self.state.ema is not None:
            state["ema"] = self.state.ema
        with phase(f"save step {step}"):
            saving = save_arrays(folder / ACTOR, state | {"counters": counters})
        self._savings[step] = saving
        return step

    def saved(self, step: int) -> str | None:
        """Waits until the save of `step` is on disk. Returns None or an error message.

        This is the only method that another thread may call while the role works.
        """
        saving = self._savings.get(step)
        if saving is None:
            return f"no save of step {step} was begun here"
        try:
            saving.wait()
        except Exception as error:
            return str(error).strip() or type(error).__name__
        finally:
            self._savings.pop(step, None)
        return None

    def export(self, folder: Path, tokenizer_from: TokenizerFiles | None) -> str | None:
        """Writes the policy as a Hugging Face folder, or its adapters as a PEFT folder. Returns
        None or the error of the disk."""
        dtype, params = self.config.actor.param_dtype, self.state.params
        with phase("export the policy"):
            try:
                if self.model.lora is not None:
                    about = self._base_name, params, tokenizer_from, self._base_digest
                    peft.save(folder, self.model, *about)
                else:
                    save_hf(folder, self.model, params, dtype=dtype, tokenizer_from=tokenizer_from)
            except OSError as error:
                return error.strerror or str(error)
        return None

    def _with_old_logprobs(
        self, placed: TrainBatch, sequences: Sequences, units: np.ndarray, live: int
    ) -> TrainBatch:
        """Returns the batch with the log-probs under the policy as it was before the batch's first
        update.

        Args:
            placed: the batch on the actor's mesh.
            sequences: its own on the host, with their group.
            units: [B] or [B / group]: tokens of the rows or groups of the policy loss, 0 for
                others.
            live: number of rows or groups that hold tokens, whether or not they train.
        """
        chosen = np.flatnonzero(units > 0)
        padded = padded_count(len(chosen), live)
        group = sequences.group
        index = self.programs.micro_batches(chosen, units, sequences, group, padded)
        size = capacity_of(sequences, self._devices, index)
        with phase("log-probs before the batch"):
            policy = join_adapters(self._base, self.state.params)
            arguments = (policy, TrainBatch(placed.sequences), index, group, size)
            with current().running(self.programs.old, *arguments):
                logprobs = jax.block_until_ready(self.programs.old(*arguments))
            return replace(placed, old_logprobs=logprobs)

    def _skipped(self, batch: TrainBatch, rows: np.ndarray, step: int) -> None:
        """Dumps the batch of a non-finite gradient, and ends the run after too many in a row."""
        self._skipped_in_a_row += 1
        path = self._run_dir / "nonfinite" / f"step_{step + 1}.npz"
        tries = 1
        while path.exists():  # another minibatch of this step
            tries += 1
            path = path.with_name(f"step_{step + 1}_{tries}.npz")
        arrays: dict[str, Array] = {"rows": rows}
        for key, leaf in jax.tree_util.tree_leaves_with_path(batch):
            # numpy's file format has no bfloat16.
            dtype = np.float32 if leaf.dtype == jnp.bfloat16 else leaf.dtype
            name = jax.tree_util.keystr(key, simple=True, separator=".")
            arrays[name] = to_host(leaf).astype(dtype)
        if is_primary(self.mesh.devices.flat):
            with contextlib.suppress(OSError):  # a full disk ends no run
                path.parent.mkdir(parents=True, exist_ok=True)
                np.savez(path, **arrays)
        if self._skipped_in_a_row >= self.config.actor.max_nonfinite:
            raise RunError(
                f"the gradient was not finite {self._skipped_in_a_row} updates in a row"
                f" (actor.max_nonfinite); the last batch is in {path}."
                " A lower optimizer.learning_rate or actor.dtype=float32 may help."
            )


def actor_residents(config: Config) -> tuple[Resident, ...]:
    """Returns the arrays that the actor keeps."""
    update, inspect, offload = "actor.update", "actor.inspect", config.offload

    def moments(run: RunArrays) -> Tree:
        sizes = config.actor.param_dtype, config.actor.moment_dtype
        return abstract_moments(run.student, run.meshes["actor"], config.optimizer, *sizes)

    def trained(dtype: str, run: RunArrays) -> Params:
        return frozen_and_trained(run.params("actor", run.student, dtype, "stacked"))[1]

    def base(run: RunArrays) -> Params:
        return frozen_and_trained(run.params("actor", run.student, config.base_dtype, "stacked"))[0]

    found = [
        Resident(
            "actor.params",
            "parameters",
            partial(trained, config.actor.param_dtype),
            (update, inspect, "actor.save", *PUBLISHED, "actor.export"),
            "state.params",
            offload=offload.params,
        ),
        Resident(
            *("actor.base", "frozen base weights", base, (update, inspect), "_base"),
            offload=offload.params,
        ),
        Resident(
            "actor.optimizer",
            "optimizer state",
            moments,
            (update, "actor.save"),
            "state.opt_state",
            column="optimizer",
            offload=offload.optimizer,
        ),
        Resident(
            "actor.teacher_head",
            "teacher's LM head",
            teacher_heads,
            (update, inspect),
            "_frozen",
            offload=offload.frozen,
        ),
    ]
    if config.keeps_ema:
        found.append(
            Resident(
                "actor.ema",
                "moving average",
                partial(trained, "float32"),
                (update, "actor.save", PUBLISHED[1]),
                "state.ema",
                column="optimizer",
                offload=offload.optimizer,
            )
        )
    return tuple(found)


def receivers(config: Config) -> dict[str, str]:
    """Maps each role that gets the policy's weights to the stage in which the actor makes them."""
    follows = {"teacher": PUBLISHED[1]} if config.teacher_follows else {}
    return {"rollout": PUBLISHED[0]} | follows


def shared_base(config: Config, dtype: DType) -> str:
    """Returns the name of the base weights that a role shares which reads them stacked, in a dtype
    of its own: those of the actor, or none where it loads others."""
    return "actor.base" if dtype == config.base_dtype and not config.offload.params else ""


def teacher_heads(run: RunArrays) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the LM heads of the teachers whose hidden states the loss reads."""
    m, mesh, dtype = run.shapes, run.meshes["actor"], run.config.teacher.compute_dtype
    widths = m.teacher_widths if m.signal == "hidden" else ()
    return tuple(_head(m.teacher_rows, width, dtype, mesh) for width in widths)


def make_programs(
    config: Config, model: DecoderConfig, mesh: Mesh, vocab_size: int
) -> ActorPrograms:
    """Returns the programs of an actor, whose loss is that of the config's algorithm.

    Args:
        vocab_size: tokens that the policy shares with the teachers.
    """
    about = config, model, mesh, vocab_size
    return ActorPrograms(*about[:3], method_of(config).make_loss(*about), inspect_tokens(*about))


@dataclass(frozen=True)
class _Learning:
    """What the actor's programs follow from, beside the shapes of their arguments: runs of other
    sizes declare the very same ones, which are traced once for each shape."""

    keys: str
    config: Config = field(compare=False)

    @classmethod
    def of(cls, config: Config) -> _Learning:
        return cls(config.model_dump_json(exclude=SIZES, warnings=False), config)


SIZES = {"batch_size", "group_size", "max_prompt_tokens", "max_new_tokens", "mesh", "rollout"}
"""Keys that decide the shapes of a batch, or nothing of the actor."""


@lru_cache(maxsize=64)
def _declared_programs(
    learning: _Learning, model: DecoderConfig, mesh: Mesh, vocab_size: int
) -> ActorPrograms:
    return make_programs(learning.config, model, mesh, vocab_size)


def actor_programs(run: RunArrays) -> Iterator[Program]:
    """Yields the update, the log-probs before it, and the weights for the rollout."""
    c, m, mesh, role = run.config, run.shapes, run.meshes["actor"], "actor"
    programs = _declared_programs(_Learning.of(c), run.student, mesh, m.vocab)
    n = m.trained_rows
    sequences = run.sequences(role, n)
    if m.recorded is not None:
        each = *sequences.tokens.shape, *m.recorded.shape
        sequences = replace(sequences, experts=run.array(role, m.recorded.dtype, *each))
    number, per_row = run.array(role, jnp.float32, n, m.new_tokens), (role, jnp.float32, n)
    signal, dtype = None, c.teacher.compute_dtype
    frozen: dict[str, Any] = {}
    if m.signal is not None:
        signal = run.signal(role, n)
        if m.signal == "hidden":
            heads = teacher_heads(run)
            frozen["teacher_head"] = heads if c.teachers else heads[0]
            cap = run.array(role, jnp.float32, whole=True)
            caps = tuple(model.final_softcap and cap for model in m.inputs.teachers)
            if any(cap is not None for cap in caps):
                frozen["teacher_softcap"] = caps if c.teachers else caps[0]
        if m.aligned:
            frozen["outcomes"] = run.outcomes(role)
    rewarded, taught = c.learns_from_rewards, signal is not None and bool(c.teachers)
    batch = TrainBatch(
        sequences,
        signal,
        number,
        advantages=(number if c.token_advantages else run.array(*per_row)) if rewarded else None,
        ref_logprobs=number if c.loss_reads_reference else None,
        old_logprobs=number if rewarded and c.updates_per_batch > c.parts else None,
        in_policy=run.array(role, bool, n) if rewarded else None,
        teacher_weights=run.array(*per_row, m.new_tokens, len(c.teachers)) if taught else None,
    )
    group = m.shared_group
    units = n // group
    shape = programs.micro_batch_shape(sequences, group, units * c.parts // c.minibatches)
    place = run.array(role, jnp.int32, *shape, whole=True)
    state, base = programs.abstract_state(), programs.abstract_base()
    if base:
        frozen[BASE] = base
    made_at_start = ("actor.optimizer", "actor.ema", "actor.teacher_head")

    def one(name: str, jitted: Any, *given: Any, stage: str = "actor.update") -> Program:
        return Program(role, name, jitted, given, stage)

    def at_start(name: str, jitted: Any, argument: Any) -> Program:
        how: Any = {"without": made_at_start, "calls": 0, "otherwise": "start"}
        return Program(role, name, jitted, (argument,), "actor.update", **how)

    yield at_start("optimizer state", programs.start, state.params)
    if state.ema is not None:
        yield at_start("moving average", programs.initial_ema, state.params)
    if m.signal == "hidden" and c.teacher_follows:
        # Before the first update of a batch.
        yield one("copy of the head", programs.copy_head, state.ema or state.params)
    elif m.signal == "hidden" and not m.aligned:
        for model in {model.vocab_size: model for _, model in run.teachers}.values():
            if model.vocab_size != m.vocab:
                jitted = first_rows_program(m.vocab, model.d_model, mesh)
                whole = _head(model.vocab_size, model.d_model, dtype, mesh)
                yield at_start("rows of the head", jitted, whole)
    if signal is not None and "teacher" in run.meshes:  # a batch's signal comes from there
        parts, sent = c.slices("teacher"), []
        size = run.scored("teacher", parts)[0]
        part = replace(signal, baseline=None) if isinstance(signal, AlignedSignal) else signal
        for leaf in jax.tree.leaves(part):
            counts = [min(size, len(leaf) - start) for start in range(0, len(leaf), size)]
            pieces = [run.array("teacher", leaf.dtype, k, *leaf.shape[1:]) for k in counts]
            sent.append(Rows(tuple(pieces)) if len(pieces) > 1 else pieces[0])
        rows = [number.sharding] * len(sent)
        stages = ("teacher.score", "actor.update")
        yield from _moves(run, "signal", ("teacher", role), stages, sent, rows)
    if isinstance(signal, AlignedSignal):
        sampled, mask = (
            run.array(role, dtype, *signal.kinds.shape) for dtype in (jnp.float32, bool)
        )
        yield one("baseline", span_baseline, signal.kinds, signal.span_logprobs, sampled, mask)
    planned = run.array(role, jnp.int32, whole=True)
    given: Any = state, frozen | {PLANNED: planned}, batch, place, group
    calls = c.actor.epochs_per_batch * c.minibatches
    yield Program(role, "update", programs.update, given, "actor.update", calls=calls)
    if batch.old_logprobs is not None:
        given = join_adapters(base, state.params), TrainBatch(sequences), place, group
        beside = local_bytes(batch) - local_bytes(sequences)
        yield Program(
            *(role, "log-probs before", programs.old, given, "actor.update"), beside=beside
        )

    # The weights for other roles: conversion and transfer.
    for receiver, stage in receivers(c).items():
        name, params = "convert", state.params
        if receiver == "teacher":
            name, params = "convert for the teacher", state.ema or state.params
        to, layout = jnp.dtype(c.roles[receiver].compute_dtype), m.layout(receiver)
        if differs := programs.differing(params, to, layout):
            yield one(name, programs.convert, differs, to, layout, stage=stage)
        here, there = (
            jax.tree.leaves(frozen_and_trained(run.params(at, run.student, to, layout))[1])
            for at in (role, receiver)
        )
        shardings = [leaf.sharding for leaf in there]
        stages = (stage, f"{receiver}.load")
        yield from _moves(run, "weights", (role, receiver), stages, here, shardings)


_pieces = lru_cache(maxsize=64)(piece_programs)


def _head(rows: int, width: int, dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    shape = (rows, width)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=head_sharding(shape, mesh))


def _moves(
    run: RunArrays,
    name: str,
    roles: tuple[str, str],
    stages: tuple[str, str],
    xs: Sequence[Any],
    targets: Sequence[NamedSharding],
) -> Iterator[Program]:
    """Yields the programs by which arrays go from a role to another of the same process; of several
    that cut, or join, the one with the largest pieces."""
    if not run.shapes.inputs.together(*roles):
        devices = [d for role in roles for d in run.meshes[role].devices.flat]
        if run.config.launcher == "ray" or len({d.process_index for d in devices}) > 1:
            return  # what one sends goes through the host
    calls = _pieces(tuple(xs), tuple(targets))
    for verb, role, stage in zip(("cut", "join"), roles, stages, strict=True):
        mine = [call for call in calls if call[0].__name__ == verb]
        if mine:
            jitted, pieces = max(mine, key=lambda call: local_bytes(call[1]))
            yield Program(role, f"{name}: {verb}", jitted, (pieces,), stage, calls=len(mine))


def moment_bytes(config: Config, student: DecoderConfig, axes: Axes) -> int:
    """Returns the bytes of the optimizer's state on one device of the actor."""
    how = config.optimizer, config.actor.param_dtype, config.actor.moment_dtype
    return local_bytes(abstract_moments(student, abstract_mesh(axes), *how))


def checkpoint_bytes(config: Config, student: DecoderConfig) -> int:
    """Returns the bytes of one checkpoint: parameters, optimizer state and moving average, each
    number once."""
    itemsize = jnp.dtype(config.actor.param_dtype).itemsize + (4 if config.keeps_ema else 0)
    return student.n_trained * itemsize + moment_bytes(config, student, Axes())


def checkpoint_notes(config: Config, student: DecoderConfig, here: bool) -> Iterator[str]:
    """Yields the room that the checkpoints of a run take on disk, and, for a run `here`, whether
    the disk has as much."""
    c, size = config.checkpoint, checkpoint_bytes(config, student)
    whole = size * (c.keep_last + c.keep_best + 1)
    yield (
        f"checkpoints: {size / 1e9:.2f} GB each; checkpoint.keep_last={c.keep_last},"
        f" keep_best={c.keep_best} and the one being written: up to {whole / 1e9:.2f} GB in"
        f" {config.run_path}"
    )
    if not here:
        return
    place = config.run_path.absolute()
    folder = next(p for p in (place, *place.parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if free < whole:
        yield (
            f"checkpoints: the disk of {folder} has {free / 1e9:.2f} GB free, less than"
            f" {whole / 1e9:.2f} GB: lower checkpoint.keep_last or checkpoint.keep_best, or set"
            " run_dir to another disk"
        )


SMALL_CHUNK = 128
"""Tokens; with fewer, the loss's matrix products get slow."""
GPU_CHUNKS = (2048, 1024)
"""Tokens: for each chunk the LM head is read again, which takes a GPU as long as the products of a
few hundred tokens."""


def actor_remedies(run: RunShapes) -> Iterator[Remedy]:
    """Yields the keys that make the actor smaller or faster."""
    c, (count, rows) = run.config, run.micro_batches()
    context, group, remats = run.axes["actor"].context, run.shared_group, list(RECOMPUTED)
    tokens = run.prompt_tokens + group * run.new_tokens  # of a group, its prompt once
    budgets: list[int | None] = [
        -(-(-(-run.update_rows // (n * group)) * tokens) // context)
        for n in reversed(fractions(count))
        if n > 1
    ]
    fewer = sorted({max(1, rows // n) for n in (2, 4, 8, 16, 32)} - {rows}, reverse=True)
    yield Remedy(
        "actor.micro_batch_tokens",
        [None, *budgets] if count > 1 else (),
        [-(-run.width // context) * n for n in fewer],
        timed=True,
    )
    yield Remedy("actor.remat", remats[: remats.index(c.actor.remat)], ["full"], timed=True)
    chunks: tuple[int | None, ...] = (*GPU_CHUNKS, None)
    yield Remedy(
        "distill.chunk_tokens",
        smaller=[SMALL_CHUNK] if c.distill.loss_chunk > SMALL_CHUNK else (),
        choices=chunks if run.inputs.target.platform in GPU else (),
        null=c.distill.loss_chunk,
        note="the losses read the LM head once for so many tokens",
    )
    yield Remedy("distill.lean", smaller=[True])
    kept = average_dtype(c.optimizer, "bfloat16")
    if kept != "float32" and c.optimizer.name != "adafactor":  # else nothing is smaller
        yield Remedy("actor.moment_dtype", smaller=["bfloat16"])
    yield Remedy("actor.param_dtype", smaller=["bfloat16"])
    yield from common_remedies(run, "actor")
