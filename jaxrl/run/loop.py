"""The training loop. It sees roles and futures, but no devices, processes or names of algorithms.

    for each action of the schedule:
        generate   rollouts = rollout.generate(prompts)
        score      scores   = teacher, reference, reward, grouper .score(rollouts)
        train      report   = actor.update(rollouts, scores)
        publish    role.load(actor.publish(version)) of each role that takes the policy's weights,
                   and an evaluation when one is due

Calls return futures at once, and each worker executes its calls in order. The loop waits only for
the results of the previous batch, from which it writes that batch's row of metrics. The exception
is `policy.dynamic_sampling=refill`, where generating a batch waits for its samples and rewards.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxrl.algorithms import protocols
from jaxrl.algorithms.methods import method_of
from jaxrl.algorithms.schedule import Action, Schedule, staleness_of
from jaxrl.checkpoint.writer import CheckpointWriter, PendingResult
from jaxrl.config.schema import Config
from jaxrl.errors import Stopped
from jaxrl.rewards.batch_rewards import cut_report
from jaxrl.roles.stream_log import BEGUN, METHODS
from jaxrl.run.record import following
from jaxrl.run.reporting import Futures, Run
from jaxrl.runtime.worker import Future, Handle, T, Times, done_future
from jaxrl.types import Rollout, StreamEvent, StreamEvents, Trained

POLL_S = 0.5
"""Seconds between two checks, during a wait, whether the run was asked to end."""


def evaluates(config: Config, version: int) -> bool:
    """Returns whether an evaluation of the weights after `version` batches is due. The caller
    checks that there are held-out prompts."""
    every = config.eval.every
    return version in (0, config.steps) or (every > 0 and version % every == 0)


class Calls:
    """Calls roles and waits for them. Once the run is asked to end, calls that it no longer needs
    are cancelled; making or waiting for such a call raises `Stopped`.
    """

    def __init__(
        self,
        config: Config,
        roles: Mapping[str, Handle],
        asked_to_stop: Callable[[], bool] = lambda: False,
        recorders: Sequence[Callable[[str, str, Times, Mapping[str, object]], None]] = (),
        by_hand: bool = False,
    ):
        """
        Args:
            recorders: take role, method, times and arguments of each call.
            by_hand: an error of sampling or scoring is told to the caller, and ends nothing.
        """
        self.roles, self.asked_to_stop, self.recorders = roles, asked_to_stop, [*recorders]
        self.end: int | None = None
        """Number of batches after which the run ends; None until it is asked to end."""
        self.submitted = 0
        """Number of batches that the actor was asked to train on."""
        self._by_hand = by_hand
        self._config, self._ahead, self._lazy = config, staleness_of(config), config.lazy
        self._role_calls = protocols.role_calls(config)
        self._deadlines = protocols.call_deadlines(config)
        self._open: list[tuple[str, int, Future[object]]] = []
        """Kind, row and future of the calls that may not have ended."""
        self.kind, self.row = "publish", 0
        """What the next calls belong to: `generate`, `score`, `train` or `publish`, as the action,
        `go on` for further parts of a batch that is being trained, or `save`; and the row of
        metrics. Row v is of the batch that makes version v, and of what follows on that version
        (publishing, evaluation)."""
        self.call: protocols.CallRole = self._send
        """Calls a role; raises Stopped for a call that the run no longer needs."""

    def _send(
        self, role: str, called: Callable[..., Any], /, *args: object, **kwargs: object
    ) -> Future[Any]:
        """Queues a call. For a lazy role its deadline includes the time to build the role."""
        method = called.__name__
        if self.end is not None and not self._needs(self.kind, self.row, self.end):
            raise Stopped("the run was asked to end")
        deadline = self._deadlines[method]
        if role in self._lazy:
            deadline += self._config.deadlines.startup
        aside = self._role_calls[role].concurrent or method == "saved"
        own = self._by_hand and self.kind in ("generate", "score")
        future = self.roles[role].call(
            method, *args, deadline=deadline, aside=aside, own_error=own, **kwargs
        )
        for record in self.recorders:
            record(role, method, future.times, kwargs | ({"aside": True} if aside else {}))
        self._open = [c for c in self._open if c[2].dropped() or not c[2].done()]
        self._open.append((self.kind, self.row, future))
        if self.kind == "train":
            self.submitted = self.row
        return future

    def wait(self, future: Future[T]) -> T:
        """Waits for the value of a call. If the run is asked to end meanwhile, this cancels calls
        that have not started, and raises Stopped if this call is no longer needed."""
        while not future.wait(POLL_S):
            future.check()
            if self.asked_to_stop():
                end = self.stop()
                if not all(self._needs(k, row, end) for k, row, f in self._open if f is future):
                    raise Stopped("the run was asked to end, and does not need this call")
        return future.result()

    def stop(self) -> int:
        """Cancels every update that has not started, and all calls that only those updates need;
        an update may also have been dropped, with a batch that code of the user's did not make.

        Returns the number of batches that will have been trained on; the last may still be running.
        """
        if self.end is None:
            latest_first = self._open[::-1]  # consumers of a result before its producer
            trains = [(row, call) for kind, row, call in latest_first if kind == "train"]
            left = [row for row, call in trains if call.cancel() or call.dropped()]
            self.end = min(left) - 1 if left else self.submitted
            for kind, row, call in latest_first:
                if not self._needs(kind, row, self.end):
                    call.cancel()
        return self.end

    def _needs(self, kind: str, row: int, end: int) -> bool:
        """Returns whether a run that ends after `end` batches needs a call. It needs the calls of
        its rows, and the batches that its schedule has generated by then. What follows the last
        batch, such as an evaluation, is left to the run that resumes."""
        latest = {"publish": end - 1, "generate": end + self._ahead}.get(kind, end)
        return end > 0 and row <= latest


@dataclass
class BatchCalls:
    """The calls of one row of the metrics: of the batch that makes a version of the weights, and of
    what follows on that version."""

    rollout: Future[Rollout] | None = None
    parts: Sequence[Future[Rollout]] = ()
    """Those that are scored and trained one after the other (`Config.parts`); none where the batch
    is one."""
    scores: dict[str, Sequence[Future[object]]] = field(default_factory=dict)
    """Role -> one future for each part of its scores."""
    updates: list[Future[Trained | None]] = field(default_factory=list)
    """One for each of the `parts`; the last has the metrics of the batch."""
    after: dict[str, Future[Any]] = field(default_factory=dict)
    """`publish.ROLE`, `load.ROLE` and `eval.ROLE` of the version."""

    def in_parts(self) -> list[tuple[Future[Rollout], dict[str, Sequence[Future[object]]]]]:
        """Returns what is trained one after the other, each with its scores."""
        assert self.rollout is not None
        parts = self.parts or [self.rollout]
        return [
            (
                part,
                {
                    role: calls[i * len(calls) // len(parts) : (i + 1) * len(calls) // len(parts)]
                    for role, calls in self.scores.items()
                },
            )
            for i, part in enumerate(parts)
        ]

    def futures(self) -> Futures:
        """Returns all of them by name. The last part of each role's scores is `score.ROLE`, the
        earlier parts are `score.ROLE.0` and so on; `rollout`, the whole batch, and `update`
        likewise."""
        found: dict[str, Future[Any]] = {}
        if self.rollout is not None:
            found |= _by_name("rollout", [*self.parts, self.rollout])
        found |= _by_name("update", self.updates) | self.after
        for role, of_role in self.scores.items():
            found |= _by_name(f"score.{role}", of_role)
        return found


def _by_name(name: str, calls: Sequence[Future[Any]]) -> dict[str, Future[Any]]:
    earlier = {f"{name}.{i}": call for i, call in enumerate(calls[:-1])}
    return earlier | ({name: calls[-1]} if calls else {})


@dataclass(frozen=True)
class SoFar:
    """A batch that is being streamed, as a checkpoint has it: whole, or what there is of it."""

    index: int
    made: PendingResult[Rollout]
    so_far: Future[tuple[dict[int, Rollout], StreamEvents]]
    record: Callable[[StreamEvents], None]

    def result(self) -> Rollout:
        unfinished, happened = self.so_far.result()
        self.record(happened)
        if (rollout := unfinished.get(self.index)) is None:
            rollout = self.made.result()
            if rollout.events is not None:
                self.record(rollout.events)
        return rollout


def _is_unfinished(rollout: Rollout) -> bool:
    return any(one.finish_reason == "unfinished" for one in rollout.completions)


@dataclass
class Loop:
    """One run, once its roles have started."""

    sources: protocols.Sources
    calls: Calls
    reporter: Run
    checkpoints: CheckpointWriter
    around: Callable[[Action], AbstractContextManager[None]] | None = None
    """A context manager around each action, where steps are profiled (`Profile.around`)."""
    until: int | None = None
    """Of a replay: trains so many batches, and saves nothing. None: trains all of them."""
    replayed: Sequence[StreamEvent] = ()
    """Of a replay, where batches are streamed: the record of the run that is repeated."""

    def __post_init__(self) -> None:
        self.config, self._method = self.sources.config, method_of(self.sources.config)
        self.reporter.wait = self.calls.wait  # waits then end when the run is asked to stop
        self._roles = self.sources.role_calls
        # A role that needs the scores of others is called after them: a worker that they share
        # takes calls in order, and would wait for ever.
        scorers = self._method.scorers(self.config)
        self._scorers = sorted(scorers, key=lambda role: len(self._roles[role].needs))
        self._followers = [role for role in scorers if self._roles[role].publish is not None]
        """Roles that score each batch with the weights that train on it."""
        self.rows: defaultdict[int, BatchCalls] = defaultdict(BatchCalls)
        """The calls of the rows that are not written yet; row i + 1 is of batch i."""
        self.sent: dict[str, int] = {}
        """Role -> the version of the policy's weights that it was sent last."""
        self._reported = -1
        """The newest step whose row is written; -1 before the first."""
        self._saved = 0
        """A step that needs no further save: 0, the one resumed from, or the one `close` saved."""

    def run(
        self,
        step: int = 0,
        rollouts: Mapping[int, Rollout] = MappingProxyType({}),
        evaluated: bool = False,
    ) -> int:
        """Trains on `steps` batches, and evaluates the last weights.

        Args:
            step: batches trained on already; each has its row of metrics.
            rollouts: batches generated but not yet trained on.
            evaluated: the row of `step` already contains its evaluation, if one was due.

        Returns the number of batches trained on, fewer than `steps` if the run was asked to stop.
        """
        calls = self.calls
        try:
            self.start(step, rollouts, evaluated)
            while not calls.asked_to_stop() and (action := self._schedule.next()) is not None:
                self.act(action)
                if action.kind == "train":
                    self.report(until=action.index - 1)
                elif self.until is not None and self._schedule.published >= self.until:
                    self.report(until=self._schedule.published - 1)
                    return self._reported
            if not calls.asked_to_stop():
                self.close(self._schedule.trained)
        except Stopped:
            if not calls.asked_to_stop():
                raise
        if calls.asked_to_stop() and self.until is None:
            self.close(calls.stop())
        return max(self._reported, 0)

    def start(self, step: int, rollouts: Mapping[int, Rollout], evaluated: bool) -> None:
        """Sends the weights after `step` batches to whoever works with them. Arguments as in
        `run`."""
        in_flight, late = len(rollouts), {*self._followers, *self.sources.beside_actor}
        ahead = not late.intersection(self._scorers)
        staleness = staleness_of(self.config)
        self._schedule = Schedule.resume(step, in_flight, self.config.steps, staleness, ahead)
        stream, follow = self.reporter.stream, protocols.RolloutRole.follow
        if step == 0:
            if self.replayed:
                self._repeat(expected := following(self.replayed, 0))
                self.calls.call("rollout", follow, expected, exact=True)
            self._publish(0)
            self._evaluate(0)
            for role in self.sources.evaluated:
                asked = self.calls.call(role, protocols.SamplingRole.sample, self.sources.held_out)
                self.rows[0].after[f"eval.{role}"] = asked
            return
        self._saved = self.calls.submitted = step
        begun = [index for index, rollout in rollouts.items() if _is_unfinished(rollout)]
        self.calls.kind, self.calls.row = "publish", step
        if stream is not None:
            same = () if self.reporter.folder.changed else stream.before
            load, *after = following(self.replayed or same, step)
            evaluated &= ("sample", step) not in [event[:2] for event in after]
            expected = [load, *(StreamEvent(BEGUN, index, 0) for index in begun), *after]
            if self.replayed:
                self._repeat(expected)
            self.calls.call("rollout", follow, expected, exact=bool(self.replayed))
        self._publish(step, evaluates=not evaluated)
        for index, rollout in rollouts.items():
            if index not in begun:
                parts = self.sources.parts_of(rollout)
                self.rows[index + 1] = BatchCalls(done_future(rollout), parts)
                continue
            self.calls.kind, self.calls.row = "generate", index + 1
            prompts, generate = self.sources.prompts(index), protocols.RolloutRole.generate
            made = self.calls.call("rollout", generate, prompts, step=index, begun=rollout)
            self._take_batch(index, made)
        self.calls.kind, self.calls.row = "publish", step
        self._evaluate(step, not evaluated)
        self._reported = step
        self.reporter.amend(step, self.rows.pop(step, BatchCalls()).futures())

    def _take_batch(self, index: int, rollout: Future[Rollout]) -> None:
        """Takes a batch that is being sampled, and asks for its parts."""
        batch, count = self.rows[index + 1], self.config.parts
        batch.rollout = rollout
        if count > 1:
            ask = partial(self.calls.call, "rollout", protocols.RolloutRole.part)
            batch.parts = [ask(index, number) for number in range(count)]

    def _repeat(self, expected: Sequence[StreamEvent]) -> None:
        """Has calls of the rollout be followed by those of checkpoints that a record has there: of
        a run that was stopped they may be anywhere."""
        left = deque(event for event in expected if event.call in METHODS)

        def called(role: str, method: str, *_: object) -> None:
            if role != "rollout" or method == METHODS["save"]:
                return
            if left and METHODS.get(left[0].call) == method:
                left.popleft()
            while left and left[0].call == "save":
                self.calls.call(role, protocols.RolloutRole.unfinished, left.popleft().number)

        self.calls.recorders.append(called)

    def act(self, action: Action) -> None:
        """Makes the calls of an action: of `train` also those of a save that is due then, of
        `publish` those of an evaluation."""
        calls, index = self.calls, action.index
        calls.kind, calls.row = action.kind, index + (action.kind != "publish")
        batch = self.rows[calls.row]
        with nullcontext() if self.around is None else self.around(action):
            if action.kind == "generate":
                self._take_batch(index, self._method.completions(self.sources, index))
            elif action.kind == "score":
                early = self.sources.early_scores.pop(index, {})
                assert batch.rollout is not None
                of_parts = [dict(early)] if not batch.parts else self._cut(early, len(batch.parts))
                for part, scores in zip(batch.parts or [batch.rollout], of_parts, strict=True):
                    for role in self._scorers:
                        if role not in scores:
                            scores[role] = self.sources.scores(role, part, scores)
                batch.scores = {
                    role: [call for scores in of_parts for call in scores[role]]
                    for role in self._scorers
                }
            elif action.kind == "train":
                for number, (rollout, known) in enumerate(each := batch.in_parts()):
                    scores = {}
                    for role, parts in known.items():
                        # The teacher's, the largest, are freed once the actor has them.
                        consumed = self._roles[role].consumed
                        scores[role] = [p.consume() for p in parts] if consumed else parts
                    calls.kind = "go on" if number else "train"
                    update = protocols.ActorRole.update
                    how: Any = {"step": index}
                    if batch.parts:
                        last = number == len(each) - 1
                        how |= {"part": number, "whole": batch.rollout if last else None}
                    batch.updates.append(calls.call("actor", update, rollout, scores, **how))
                if self.until is None and self.checkpoints.due(index + 1):
                    self.save(index + 1)
            else:
                self._publish(index)
                self._evaluate(index)

    def _cut(
        self, early: Mapping[str, Sequence[Future[Any]]], count: int
    ) -> list[dict[str, Sequence[Future[Any]]]]:
        """Returns rewards that are known of a whole batch as those of each of its parts."""
        n, multiple = self.config.batch_rows // count, self.sources.packing.get("row_multiple", 1)
        rows = -(-n // multiple) * multiple
        return [
            {
                role: [done_future(cut_report(of_batch[0].result(), i * n, (i + 1) * n, rows))]
                for role, of_batch in early.items()
            }
            for i in range(count)
        ]

    def _due(self, version: int) -> bool:
        return bool(self.sources.held_out) and evaluates(self.config, version)

    def _publish(self, version: int, evaluates: bool = True) -> None:
        """Sends new weights to the rollout, unless it will sample nothing with them, and to the
        scorers that follow the policy, unless no batch is left to score."""
        left = version < self.config.steps
        samples = left and self._method.samples_policy(self.config)
        if samples or (evaluates and self._due(version)):
            self.send("rollout", version)
        for role in self._followers if left else []:
            self.send(role, version)

    def _evaluate(self, version: int, evaluates: bool = True) -> None:
        """Asks for the evaluation of the weights that the rollout was sent, if one is due."""
        if evaluates and self._due(version):
            sample = protocols.SamplingRole.sample
            asked = self.calls.call("rollout", sample, self.sources.held_out)
            self.rows[version].after["eval.rollout"] = asked

    def send(self, role: str, version: int) -> None:
        """Sends a role the policy's weights."""
        publish = self._roles[role].publish
        assert publish is not None
        weights = self.calls.call("actor", publish, version=version)
        loaded = self.calls.call(role, protocols.ReceivingRole.load, weights)
        self.rows[version].after |= {f"publish.{role}": weights, f"load.{role}": loaded}
        self.sent[role] = version

    def save(self, step: int) -> None:
        """Asks the actor, which has trained `step` batches, for a checkpoint of what it is now."""
        self.calls.kind, self.calls.row = "save", step
        folder = self.checkpoints.folder(step)
        asked = self.calls.call("actor", protocols.ActorRole.save, folder, step=step)
        saved = self.calls.call("actor", protocols.ActorRole.saved, asked)
        generated, stream = self._schedule.generated, self.reporter.stream
        if stream is None:
            generated = min(generated, step + self._schedule.staleness)
        ahead = ((i, self.rows[i + 1].rollout) for i in range(step, generated))
        in_flight: dict[int, PendingResult[Rollout]] = {i: x for i, x in ahead if x is not None}
        if in_flight and stream is not None:
            so_far = self.calls.call("rollout", protocols.RolloutRole.unfinished, asked)
            in_flight = {i: SoFar(i, made, so_far, stream.add) for i, made in in_flight.items()}
        schedule = {"name": self.config.schedule, "generated": generated, "trained": step}
        self.checkpoints.begin(step, saved, in_flight, schedule)

    def close(self, end: int) -> None:
        """Saves the state after `end` batches, unless that is done or due, and writes the rows up
        to that of batch `end` - 1. Where code of the user's has ended the run amid the parts of
        that batch, neither: a run that resumes from the checkpoint before trains all of it."""
        updates = self.rows[end].updates if end in self.rows else []
        if len(updates) > 1:
            try:
                self.calls.wait(updates[-1])
            except Stopped:
                self.reporter.amid_batch = True
                self.report(until=end - 2)
                return
        if end != self._saved and not self.checkpoints.due(end):
            self.save(end)
            self._saved = end
        if end:
            self.report(until=end - 1)

    def report(self, until: int) -> None:
        """Waits for all batches up to batch `until` and writes their rows, up to row `until` + 1.
        -1: row 0 only, the evaluation before the first batch."""
        while self._reported <= until:
            step = self._reported + 1
            taken = self.rows.pop(step, BatchCalls())
            try:
                self.reporter.row(step, taken.futures())
            except BaseException:  # a checkpoint may need the rollout, and a session all
                self.rows[step] = taken
                raise
            self._reported = step
