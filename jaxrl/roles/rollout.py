"""The role that samples: the rollout's policy, or a teacher whose own samples are learnt from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from jaxrl.algorithms.methods import sampled_share
from jaxrl.algorithms.signals import Projection, policy_topk
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.data.example import Split
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.environments.episode_batches import Episodes
from jaxrl.errors import RunError, UserError
from jaxrl.formats.weights import leaves_by_path
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import frozen_and_trained, join_adapters, merge_adapters
from jaxrl.models.packing import capacity_of, row_devices
from jaxrl.models.parameters import Layout, Params, abstract_params, param_shardings, unstack
from jaxrl.models.shared_prompts import PAGE
from jaxrl.process.waiting import waiting
from jaxrl.roles.actor import PUBLISHED, SENT, shared_base
from jaxrl.roles.declared import Program, Remedy, Resident, local_bytes
from jaxrl.roles.run_shapes import RunArrays, RunShapes, common_remedies, fractions
from jaxrl.roles.sampling_programs import (
    abstract_cache,
    in_flight,
    sampling_params,
    sampling_programs,
)
from jaxrl.roles.stream_log import BEGUN, StreamLog
from jaxrl.runtime.worker import Later, detail, phase, stopping
from jaxrl.sampling.engine import Aborted, Engine, EngineStats
from jaxrl.sampling.partial_completion import RandomKey, SampleRequest, tell_again
from jaxrl.sharding.axes import ROWS
from jaxrl.sharding.ledger import current
from jaxrl.sharding.mesh import abstract_mesh, verify_arrays
from jaxrl.sharding.reshard import Shards, checksums, put, reshard, to_host
from jaxrl.types import (
    Completion,
    Prompt,
    Rollout,
    Sequences,
    StreamEvent,
    StreamEvents,
    Tree,
    Weights,
)

EVAL_SEED = 0x5EED
"""Added to the run's seed for evaluations: they use other random numbers than training does, and
the same ones at every evaluation."""


class DamagedWeights(RunError):
    """Weights that arrived with other values than the actor sent."""


def receive_weights(
    weights: Weights,
    expected: Tree,
    shardings: Tree,
    sent: str,
    role: str,
    free: Callable[[], None],
) -> tuple[Params, dict[str, float]]:
    """Returns the weights in the receiver's shardings, and the metrics of the transfer.

    Where arrays arrive damaged from another process, all are read once more: from the object store
    of the receiver's host, which mends what happened on the way from there to the devices.

    Args:
        expected: arrays or `jax.ShapeDtypeStruct`s of the names, shapes and dtypes of the
            receiver's model.
        sent: their name in the ledger while they were on their way.
        role: of the receiver, for the error.
        free: frees the previous version, once the weights are known to fit.

    Raises:
        RuntimeError: the weights do not fit the model.
        DamagedWeights: an array has another checksum than the actor gave it.
    """
    forms, wanted = (
        {path: f"{x.dtype}{list(x.shape)}" for path, x in leaves_by_path(tree).items()}
        for tree in (weights.params, expected)
    )
    for name in {**wanted, **forms}:
        if forms.get(name) != wanted.get(name):
            raise RuntimeError(
                f"version {weights.version} does not fit the model of {role}: {name} is"
                f" {forms.get(name, 'missing')}, it must be {wanted.get(name, 'left out')}"
            )
    free()
    again = any(isinstance(leaf, Shards) for leaf in jax.tree.leaves(weights.params))
    first = 0
    with phase(f"load version {weights.version}"):
        while True:
            params: Params = jax.block_until_ready(reshard(weights.params, shardings))
            arrays = leaves_by_path(params)
            sums = checksums([arrays[path] for path in weights.checksums])
            pairs = zip(weights.checksums.items(), sums, strict=True)
            damaged = [path for (path, made), arrived in pairs if made != arrived]
            if not damaged:
                break
            if not again:
                raise DamagedWeights(
                    f"version {weights.version} of the weights arrived damaged"
                    f"{', twice' if first else ''}: {len(damaged)} of {len(weights.checksums)}"
                    f" arrays have other checksums than the actor sent, the first {damaged[0]}. The"
                    " memory or the network of a host is at fault: compare those of the actor and"
                    " of the receiver. Checkpoints are not affected; resume the run on other hosts"
                )
            again, first = False, len(damaged)
            del params, arrays  # there is no room for two
        current().drop(sent)
    metrics = {"weights/damaged_arrays": float(first)}
    return params, metrics | {"weights/sync_bytes": float(weights.nbytes)}


def topk_program(projection: Projection, model: DecoderConfig) -> jax.stages.Wrapped:
    """Returns the jitted (parameters, sequences) -> the policy's top-k tokens [B, C, K]."""

    def topk_of_policy(params: Params, sequences: Sequences) -> jax.Array:
        return policy_topk(projection, model, params, sequences)

    return jax.jit(topk_of_policy)


class Sampler:
    """Generates completions of prompts with one set of weights."""

    def __init__(
        self,
        config: Config,
        model: DecoderConfig,
        mesh: Mesh,
        *,
        slots: int,
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        packing: Mapping[str, int] | None = None,
        params: Params | None = None,
        base: Params | None = None,
        teacher: bool = False,
        max_new_tokens: int | None = None,
        episodes: Callable[[Callable[[str], None]], Episodes | None] = lambda notify: None,
    ):
        """
        Args:
            vocab_size: tokens shared with the teacher.
            packing: arguments of `make_rollout`; None where no batch is made.
            params: weights on `mesh`, unstacked; None where they come through `load`.
            base: frozen base weights on `mesh`, for adapters that come through `load`; in stacked
                layout where the adapters are merged into a copy.
            teacher: samples for a teacher: it continues the teacher's prompts, and the teacher role
                owns the weights. It assigns `params` when they change; `load` is not called.
            max_new_tokens: longest completion in its tokens; None: that of the run.
            episodes: makes the environments that answer, given what takes notes for the user; None
                where completions are single turns.
        """
        self.config, self.mesh, self.params = config, mesh, params
        self._base = base or {}
        merges = config.rollout.merge and model.lora is not None
        self.model = model.plain if merges else model
        """Config of the model that samples. Where adapters are merged into the base weights, it has
        neither adapters nor quantised kernels."""
        self.version = -1
        self._packing = packing
        most = max_new_tokens or config.max_new_tokens
        splits: tuple[Split, ...] = "train", "eval"
        self._sampling = {split: sampling_params(config, split, most, eos_ids) for split in splits}
        longest = max(sampling.max_new_tokens for sampling in self._sampling.values())
        self._teacher = teacher
        self.notes: list[str] = []
        """What a user should know of the environments, or of a teacher's samples, since the last
        batch."""
        self._said_so = False
        """Whether they say that an environment does not answer as it did."""
        self._episodes = episodes(self.notes.append)
        if self._episodes is not None and jax.process_count() > 1:
            raise UserError(
                f"environment.name={config.environment.name} needs a rollout in one process, and"
                f" this one is in {jax.process_count()}: give rollout the devices of one host"
            )
        self._streams = config.streams and not teacher
        if self._streams and jax.process_count() > 1:
            raise UserError(
                "schedule=streaming needs a rollout in one process, and this one is in"
                f" {jax.process_count()}: give rollout the devices of one host"
            )
        make_engine = partial(
            Engine,
            self.model,
            mesh,
            slots=slots,
            max_prompt_tokens=config.teacher_prompt_tokens if teacher else config.max_prompt_tokens,
            max_new_tokens=longest,
            launch_tokens=config.rollout.launch_tokens,
            cache_tokens=None if teacher else config.rollout.cache_tokens,
            episodes=self._episodes is not None,
            tokenizer=tokenizer,
            ledger=current(),
        )
        self.engine = make_engine()
        d = config.deadlines
        slowest = d.generate + d.score + d.update + d.weight_sync + d.checkpoint
        self._log, self._next_first = StreamLog(slowest), 0
        self._stream = self.engine
        """Samples the batches, several at once where they are streamed; `engine` samples what is
        asked for at once."""
        if self._streams:
            self._stream = make_engine(swaps=in_flight(config), answers=self._log.answers)
        self._begun: dict[int, tuple[Sequence[Prompt], list[Future[Completion]], int]] = {}
        """Step -> of a batch that is being streamed: its prompts, its completions in order, and the
        first event since the batch before it was begun."""
        self._parts: dict[int, tuple[Sequence[Prompt], list[Future[Completion]]]] = {}
        """Step -> prompts and completions of a batch whose parts have not all been asked for."""
        _, self._shardings = frozen_and_trained(param_shardings(model, mesh, "unstacked"))
        if params is None and not teacher:
            dtype = jnp.dtype(config.rollout.dtype)
            _, self._expected = frozen_and_trained(abstract_params(model, dtype, "unstacked"))
            for resident in rollout_residents(config):
                resident.keep(self)
        projection = Projection.from_config(config, mesh, vocab_size)
        self._topk = topk_program(projection, self.model)
        self._merge = merge_adapters_program(model, mesh) if merges else None

    def close(self) -> None:
        """Drops what is being streamed, and ends the processes of the environments."""
        self._stream.idle()
        if self._episodes is not None:
            self._episodes.close()

    def load(self, weights: Weights) -> dict[str, float]:
        """Replaces the weights by the next version of the policy. The old ones are freed first.

        Returns:
            Metrics of the transfer, as in `receive_weights`.

        Raises:
            RuntimeError: the version is not newer than the present one, or is of another model; or
                the weights lie on other devices than the role was given.
            DamagedWeights: an array arrived with other values than the actor sent.
        """
        if self.version >= 0 and weights.version <= self.version:
            raise RuntimeError(f"got version {weights.version} after version {self.version}")
        arrived, metrics = receive_weights(
            weights,
            self._expected,
            self._shardings,
            sent=SENT,
            role="the role that samples",
            free=self._free,
        )
        with phase(f"take version {weights.version}"):
            self._take(arrived)
        self.version = weights.version
        if self._streams:
            self._stream.swap(self._weights, self.version)
            self._log.note("load", self.version)
        verify_arrays("rollout", self.params, self.mesh)
        return metrics

    def _free(self) -> None:
        """Frees the weights, and the keys and values of what is being streamed: these are computed
        again with the next weights."""
        self.params = None
        if self._streams:
            self._stream.park()
            self._stream.params = None

    def rehearse(self, prompts: Mapping[Split, Sequence[Prompt]]) -> None:
        """Compiles what sampling these prompts calls up to the end of the first launch, by doing so
        with weights of zeros, while another role reads the real ones. An environment is not asked
        for its prompts, so that nothing is rehearsed of episodes."""
        if self._episodes is not None or not prompts:
            return
        zeros = jax.tree.map(
            lambda x, place: jnp.zeros(x.shape, x.dtype, device=place),
            *(self._expected, self._shardings),
        )
        self._take(zeros)
        for split, asked in prompts.items():
            with suppress(Aborted):
                self._sample(
                    asked, split, abort=lambda: stopping() or self.engine.stats.launches > 0
                )
        self.params = None

    def _take(self, params: Params) -> None:
        """Takes the weights that it was sent, merged into the base where they are adapters."""
        self.params = params
        if self._merge is not None:
            arguments = self._base, params
            with current().running(self._merge, *arguments):
                self.params = jax.block_until_ready(self._merge(*arguments))

    @property
    def _weights(self) -> Params:
        assert self.params is not None, "`_sample` refuses it"
        return self.params if self._merge else join_adapters(self._base, self.params)

    def generate(
        self,
        prompts: Sequence[Prompt],
        step: int,
        attempt: int = 0,
        begun: Rollout | None = None,
    ) -> Rollout:
        """Samples `group_size` completions of each prompt and pads them to one batch. The random
        numbers depend on the run's seed, `step`, `attempt` and the prompts' ids.

        Args:
            begun: what there is of the batch, as `unfinished` returned it.
        """
        if not self._streams:
            return self.make_batch(*self._sample(prompts, "train", step, attempt))
        prompts, requests = self._requests(prompts, "train", step, attempt)
        so_far: list[Completion | None] = [None] * len(requests)
        if begun is not None:
            requests, so_far = self._go_on(requests, begun)
        futures = list(map(self._stream.submit, requests, so_far))
        self._begun[step] = prompts, futures, self._next_first
        if self.config.parts > 1:
            self._parts[step] = prompts, futures
        self._next_first = self._log.count
        self._log.note("generate" if begun is None else BEGUN, step)
        value = partial(self._finished, step)
        later: Any = Later(self._work_on, value, self._log.left)  # the worker waits for it
        return later

    def part(self, step: int, number: int) -> Rollout:
        """Returns a part of the batch of a step, of `config.parts` with whole prompts in their
        order, once its completions have ended. Each is asked for once, the last one last."""
        prompts, futures = self._parts[step]
        size = len(prompts) // self.config.parts
        n, begin = self.config.group_size, number * size
        own, mine = prompts[begin : begin + size], futures[begin * n : (begin + size) * n]
        if number == self.config.parts - 1:
            del self._parts[step]

        def value() -> Rollout | None:
            if not all(future.done() for future in mine):
                return None
            return self._pack(own, self._by_prompt([future.result() for future in mine]))

        later: Any = Later(self._work_on, value, self._log.left)  # the worker waits for it
        return later

    def _go_on(
        self, requests: list[SampleRequest], begun: Rollout
    ) -> tuple[list[SampleRequest], list[Completion | None]]:
        """Returns the requests of a batch, and what there is of their completions. An episode whose
        environment does not begin and answer as it did begins again: of it there is nothing."""
        so_far: list[Completion | None] = list(begun.completions)
        if self._episodes is None:
            return requests, so_far
        prompts = [tuple(prompt.tokens) for prompt in begun.prompts]
        for i, request in enumerate(requests):
            if prompts[i] != tuple(request.prompt):
                so_far[i] = None
        left = {i: x for i, x in enumerate(so_far) if x and x.finish_reason == "unfinished"}
        name = self.config.environment.name
        with waiting(f"{name}: the answers to {len(left)} episodes once more"):
            pairs = [(requests[i], completion) for i, completion in left.items()]
            same = tell_again(pairs, self._stream.tokenizer)
        for i in (i for i, as_before in zip(left, same, strict=True) if not as_before):
            so_far[i], client = None, requests[i].environment
            assert client is not None
            requests[i] = replace(requests[i], environment=client.again())
        if None in so_far and not self._said_so:
            self._said_so = True
            self.notes.append(
                f"environment.name: {name} does not answer as it did before the run resumed:"
                " episodes that had begun begin again from their prompts. Let its random numbers"
                " come from a seed in the row"
            )
        return requests, so_far

    def follow(self, expected: Sequence[StreamEvent], exact: bool) -> None:
        """Has launches and the next calls come in the order of a record, as `StreamLog.follow`."""
        self._log.follow(expected, exact)

    def _work_on(self) -> None:
        if self._stream.in_flight:
            self._stream.step()
            if not self._stream.waited:
                self._log.launched()
        detail(f"batches {', '.join(map(str, self._begun))}: {self._stream.in_flight} left")

    def _finished(self, step: int) -> Rollout | None:
        """Returns the batch of a step once all its completions have ended."""
        prompts, futures, first = self._begun[step]
        if not all(future.done() for future in futures):
            return None
        del self._begun[step]
        batch = self.make_batch(prompts, self._by_prompt([x.result() for x in futures]))
        self._stream.stats = EngineStats(slots=self._stream.slots)
        self._log.made(step)
        happened = self._log.since(first)
        self._log.drop(self._first)
        return replace(batch, events=happened)

    def unfinished(self, saved: int) -> tuple[dict[int, Rollout], StreamEvents]:
        """Returns the batches that are being streamed, by step, with what there is of their
        completions, and what has happened to them: what a checkpoint has of them. One whose
        completions have all ended is left out, since it is about to be made.

        What is in flight is read again with the next weights, which the caller sends now: nothing
        is sampled before, as nothing is in the run that resumes.

        Args:
            saved: the number of batches that the actor, which has been saved, was trained on.
        """
        self._stream.park()
        found = {}
        for step, (prompts, futures, _) in self._begun.items():
            completions = self._stream.so_far(futures)
            if any(one.finish_reason == "unfinished" for one in completions):
                found[step] = self._pack(prompts, self._by_prompt(completions))
        self._log.note("save", saved)
        return found, self._log.since(self._first)

    @property
    def _first(self) -> int:
        """Returns the first event that a batch has still to tell."""
        return min((first for _, _, first in self._begun.values()), default=self._next_first)

    def _by_prompt(self, completions: list[Completion]) -> list[list[Completion]]:
        n = self.config.group_size
        return [completions[i : i + n] for i in range(0, len(completions), n)]

    def completions(self, prompts: Sequence[Prompt], step: int) -> list[list[Completion]]:
        """Samples the completions of `generate` [len(prompts)][group_size], not yet made a
        batch."""
        return self._sample(prompts, "train", step)[1]

    def make_batch(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> Rollout:
        """Pads the completions of each prompt to one rectangular batch, on the host."""
        rollout, stats = self._pack(prompts, completions), self._stream.stats
        rollout = replace(
            rollout,
            decode_steps=stats.decode_steps,
            sent_back=stats.preemptions,
            read_again=stats.recomputed,
            read_again_s=stats.recompute_seconds,
            waited_s=stats.waiting_seconds,
            notes=tuple(self.notes),
        )
        self.notes.clear()
        if self.config.distill.signal != "student_topk":
            return rollout
        with phase("top-k of the policy"):
            rows = NamedSharding(self.mesh, PartitionSpec(ROWS))
            capacity = capacity_of(rollout.sequences, row_devices(self.mesh))
            arguments = (self._weights, put(replace(rollout.sequences, capacity=capacity), rows))
            with current().running(self._topk, *arguments):
                ids = jax.block_until_ready(self._topk(*arguments))
        return replace(rollout, student_topk=to_host(ids))

    def _pack(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> Rollout:
        assert self._packing is not None, "a sampler without `packing` makes no batches"
        sampled = [prompt.to_sample for prompt in prompts]
        begun = [one.versions[0][1] for group in completions for one in group if one.versions]
        options = {"policy_version": min(begun, default=self.version), **self._packing}
        return make_rollout(sampled, completions, **options)

    def sample(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """Samples `eval.samples` completions of each prompt, as `eval.*` says."""
        if self._streams and self._log.has("sample", self.version):
            self._stream.park()
            self._log.note("sample", self.version)
        return self._sample(prompts, "eval")[1]

    def _requests(
        self, prompts: Sequence[Prompt], split: Split, step: int = 0, attempt: int = 0
    ) -> tuple[Sequence[Prompt], list[SampleRequest]]:
        """Returns the prompts, as environments begin them, and the requests of each in order."""
        if self.params is None:
            raise RuntimeError("no weights have been loaded yet")
        training = split == "train"
        sampling, episodes = self._sampling[split], None
        n = self.config.group_size if training else self.config.eval.samples
        prompts = [prompt.to_sample for prompt in prompts]
        if self._episodes is not None:
            prompts, episodes = self._episodes.begin(
                prompts,
                n=n,
                step=step if training else self.version,
                attempt=attempt,
                split=split,
                most=sampling.max_new_tokens,
            )
        seed = self.config.seed + (0 if training else EVAL_SEED)
        replayed = training and self.config.policy.router_replay and not self._teacher
        return prompts, [
            SampleRequest(
                (self._teacher and (prompt.teacher_generation_tokens or prompt.teacher_tokens))
                or prompt.tokens,
                sampling,
                RandomKey(seed, step, attempt, prompt.id, sample),
                sampling.max_new_tokens,
                turn_tokens=self.config.environment.turn_tokens,
                environment=None if episodes is None else episodes.episode(index, sample),
                record_experts=replayed,
            )
            for index, prompt in enumerate(prompts)
            for sample in range(n)
        ]

    def _sample(
        self,
        prompts: Sequence[Prompt],
        split: Split,
        step: int = 0,
        attempt: int = 0,
        abort: Callable[[], bool] = stopping,
    ) -> tuple[Sequence[Prompt], list[list[Completion]]]:
        """Returns the prompts, as environments begin them, and the completions of each."""
        n = self.config.group_size if split == "train" else self.config.eval.samples
        with phase(f"{len(prompts)} prompts x {n}, version {self.version}"):
            prompts, requests = self._requests(prompts, split, step, attempt)
            done = self.engine.generate(
                self._weights,
                requests,
                version=self.version,
                abort=abort,
                on_tokens=lambda tokens, done: detail(f"{done} completions, {tokens} tokens done"),
            )
            return prompts, [done[i * n : (i + 1) * n] for i in range(len(prompts))]


def merge_adapters_program(model: DecoderConfig, mesh: Mesh) -> Wrapped:
    """Returns the jitted (stacked base weights, unstacked adapters) -> unstacked weights that
    compute the same."""
    assert model.lora is not None
    scale = model.lora.scale

    def merge(base: Params, adapters: Params) -> Params:
        return merge_adapters(join_adapters(unstack(base), adapters), scale)

    return jax.jit(merge, out_shardings=param_shardings(model.plain, mesh, "unstacked"))


NEXT = "rollout.next"
"""Name of the weights that arrive."""


def rollout_residents(config: Config) -> tuple[Resident, ...]:
    """Returns the arrays that the rollout keeps: where adapters are not merged, these and the base
    below them."""
    merges = config.rollout.merge
    stages = "rollout.generate", "rollout.sample", "rollout.unfinished"
    offload = config.offload.params
    layout: Layout = "stacked" if merges else "unstacked"

    def weights(run: RunArrays) -> Params:
        if merges:
            return run.params("rollout", run.student.plain)
        return frozen_and_trained(run.params("rollout", run.student))[1]

    def base(run: RunArrays) -> Params:
        return frozen_and_trained(run.params("rollout", run.student, layout=layout))[0]

    def arriving(run: RunArrays) -> Params:
        if run.shapes.inputs.together("actor", "rollout"):
            return {}
        return run.params("rollout", run.student.plain) if merges else weights(run)

    return (
        Resident(
            *(NEXT, "next version", arriving, ("rollout.load",)),
            column="activations",
            passing=True,
        ),
        Resident(
            "rollout.params",
            "parameters",
            weights,
            stages,
            "params",
            offload=offload,
            made_at=(*PUBLISHED, "rollout.load"),
            stale_at=("actor.update",),  # new weights follow it before anything is sampled
            shares="" if merges else "actor.params",
        ),
        Resident(
            "rollout.base",
            "frozen base weights",
            base,
            (*stages, "rollout.load"),
            "_base",
            offload=offload,
            shares=shared_base(config, config.rollout.compute_dtype) if merges else "",
        ),
    )


def rollout_programs(run: RunArrays) -> Iterator[Program]:
    """Yields sampling, the merge of adapters before it, and what reads the finished batch."""
    c, m, model, role = run.config, run.shapes, run.shapes.sampled("rollout"), "rollout"
    sampling = list(sampling_programs(run, role, model, sampled_share(c)))
    yield from sampling
    if c.rollout.merge:
        under, _ = frozen_and_trained(run.params(role, run.student, layout="stacked"))
        _, adapters = frozen_and_trained(run.params(role, run.student))
        given: Any = under, adapters
        jitted = merge_adapters_program(run.student, run.meshes[role])
        yield Program(role, "merge", jitted, given, "rollout.load", without=(NEXT,))
    if c.distill.signal == "student_topk" and m.signal is not None:
        jitted = topk_program(Projection.from_config(c, run.meshes[role], m.vocab), model)
        given = run.params(role, model), run.sequences(role, m.padded_rows)
        held: Any = ()  # the next batches are being sampled meanwhile
        if c.streams:
            held = [program.cache for program in sampling if program.name == "decode"]
        how: Any = {"beside": local_bytes(held), "cache": held}
        yield Program(role, "top-k of the policy", jitted, given, "rollout.generate", **how)


def rollout_notes(run: RunShapes) -> Iterator[str]:
    """Yields the savings of a pool of pages, and of prompts whose samples share keys and values."""
    c, role = run.config, "rollout"
    if role not in run.axes:
        return
    if (tokens := c.rollout.cache_tokens) is not None:
        axes, dtype, slots = run.axes[role], c.rollout.compute_dtype, run.sampling_slots(role)
        mesh: Any = abstract_mesh(axes)
        pages, positions = run.paged_cache()
        paged, whole = (
            local_bytes(abstract_cache(run.student, mesh, rows * axes.rows, n, dtype)) / 1e9
            for rows, n in ((pages, PAGE), (slots, positions))
        )
        room = f"All slots have room for {pages // slots * PAGE} tokens"
        if pages < slots:
            room = f"Each page is one slot's, so no more than {pages} slots are used at once"
        yield (
            f"sampling: rollout.cache_tokens={tokens}: a device's {pages} pages of {PAGE} tokens"
            f" take {paged:.2f} GB; its {slots} slots with {positions} tokens each would"
            f" take {whole:.2f} GB. {room}; where pages run out, the youngest sample waits"
        )
    if c.streams and c.minibatches > 1:
        pool = run.inputs.placement.pool_of("actor").roles
        beside = [r for r in ("teacher", "reference", "reward") if r in pool and r in run.axes]
        yield (
            f"schedule=streaming: each of the {c.parts} minibatches, of prompts in their order,"
            " is scored and trained as soon as its completions have ended"
            + (f" (but {' and '.join(beside)}, on the actor's devices, has to score all first)")
            * bool(beside)
            if c.waits_for_batch is None
            else "schedule=streaming: a batch is scored and trained once all its completions have"
            f" ended, since {c.waits_for_batch} needs the whole batch"
        )
    if c.group_size > 1 and not c.only_data:
        yield (
            f"sampling: the {c.group_size} samples of a prompt share its keys and values, which a"
            " decode step reads once for all of them"
        )


def rollout_remedies(run: RunShapes) -> Iterator[Remedy]:
    """Yields the keys that make the rollout smaller or faster."""
    c, slots, whole = run.config, run.config.slots, run.config.batch_size * run.config.group_size
    longest = max(c.max_new_tokens, c.eval.max_new_tokens or 0)
    if c.rollout.cache_tokens is None and run.why_not_paged is None:
        tokens = longest * (slots // run.axes["rollout"].rows)
        pools = [tokens // n for n in (2, 4) if tokens // n >= longest]
        yield Remedy("rollout.cache_tokens", smaller=pools)
    yield Remedy(
        "rollout.slots",
        [n for n in (whole, *fractions(whole)) if n > slots],
        [slots // n for n in (2, 4, 8, 16) if slots >= n],
        timed=True,
        choices=(None, *fractions(slots)),
        null=slots,
        note=f"with all {slots} sequences of a batch at once {{pool}} would take {{size:.1f}} GB;"
        " a slot whose sequence has ended takes the next one",
    )
    if c.trains_adapters and c.quantised is None:
        yield Remedy("rollout.merge", [True], [False], timed=True)
    yield from common_remedies(run, "rollout")
