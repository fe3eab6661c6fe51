"""A run whose batches are worked by hand: sample, score, look, change, update.

A session is the run of `jaxrl.train`: it makes the same calls, through the loop's own `act`, in the
same folder. Only who decides what comes next differs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future as CallFuture
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from jaxrl.algorithms.protocols import ActorRole, RewardRole, SamplingRole
from jaxrl.algorithms.schedule import Action
from jaxrl.config.schema import CONFIG_FILE, Config
from jaxrl.data.example import Example
from jaxrl.data.source import Rows
from jaxrl.data.tokenizer import decode_text
from jaxrl.errors import RunError, Stopped, StopTraining, UserError, short, shown, user_path
from jaxrl.plan.table import Plan
from jaxrl.run import job
from jaxrl.run.attempt import end_run, interrupt_of, open_run, row_is_whole, start_loop
from jaxrl.run.batch_by_hand import BatchByHand, Prompts
from jaxrl.run.evaluation import evaluation_row, judged
from jaxrl.run.loop import POLL_S
from jaxrl.run.python_objects import (
    GivenAlgorithm,
    GivenConfig,
    GivenEnvironment,
    GivenModel,
    PythonObjects,
    bound,
    replace_rewards,
)
from jaxrl.runtime.worker import Future
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.types import Completion, Prompt, Row, TokenValues

RewardFunction = Callable[..., object]


def session(
    config: GivenConfig = None,
    rewards: Sequence[RewardFunction] = (),
    *,
    model: GivenModel = None,
    data: Rows = None,
    eval_data: Rows = None,
    environment: GivenEnvironment = None,
    algorithm: GivenAlgorithm = None,
) -> RunSession:
    """Starts the roles of a run, or resumes what its run directory holds, to work its batches by
    hand.

        with jaxrl.session("run.yaml", rewards=[f]) as s:
            for prompts in s.prompts(steps=10):
                batch = s.score(s.sample(prompts))
                print(batch, batch.row(0))
                report = s.update(batch)

    Weights and metrics are those of `jaxrl.train(config, ...)`, bit for bit, and the run directory
    is the same: `train` continues what a session saved, and a session what `train` did. In a
    notebook `s = jaxrl.session(...)` in one cell, `s.close()` in the last one.

    Args:
        config, rewards, model, data, eval_data, environment, algorithm: as in `jaxrl.train`. The
            schedule must be `serial`; where the config leaves the console's form open, it prints
            lines.

    Raises:
        UserError: bad input, as in `train`; or another schedule.
        RunError: the roles cannot start.
    """
    with ExitStack() as stack:
        objects: dict[str, Any] = {"data": data, "eval_data": eval_data}
        objects |= {"environment": environment, "algorithm": algorithm}
        made, given = stack.enter_context(bound(config, model, rewards=rewards, **objects))
        if made.schedule != "serial":
            raise UserError(
                f"schedule={made.schedule}: a session works one batch after the other, which is"
                " schedule=serial; jaxrl.train runs the other schedules"
            )
        if made.logging.console == "auto":
            lines = made.logging.model_copy(update={"console": "plain"})
            made = made.model_copy(update={"logging": lines})
        return RunSession(made, given, tuple(rewards), stack)


class RunSession:
    """A run in this process, whose roles work. `jaxrl.session` makes it."""

    def __init__(
        self,
        config: Config,
        given: PythonObjects,
        rewards: tuple[RewardFunction, ...],
        stack: ExitStack,
    ):
        """
        Args:
            given, rewards: the objects that the config names, and those of `rewards=`.
            stack: what ends the session closes, at `close` or at the latest when Python ends.
        """
        self._given, self._rewards = given, rewards
        self._interrupt = interrupt_of(config)
        with self._interrupt.listening():
            run = self._run = stack.enter_context(open_run(config, given, self._interrupt))
            loop, ahead = stack.enter_context(start_loop(run, by_hand=True))
            self._loop, self._ahead = loop, set(ahead)
            loop.start(run.folder.step, ahead, row_is_whole(run))
            loop.report(until=-1)
        self._step = run.folder.step
        self._thread = ThreadPoolExecutor(1, "session")
        self._update: CallFuture[None] | None = None
        """The latest update, until somebody has waited for it."""
        self._heard: StopTraining | None = None
        """What was already noted of `WorkerGroup.stop_asked`."""
        self._lost: BaseException | None = None
        """What ended the run."""
        self._closed = False
        self._stack = stack.pop_all()
        _open.append(self)

    # What it is.

    @property
    def config(self) -> Config:
        """Returns the config with what the run has resolved."""
        return self._run.job.config

    @property
    def plan(self) -> Plan:
        return self._run.plan

    @property
    def run_dir(self) -> Path:
        return self._run.folder.path

    @property
    def step(self) -> int:
        """Returns the number of batches trained on."""
        return self._step

    @property
    def metrics(self) -> list[Row]:
        """Reads the rows of `metrics.jsonl`."""
        return list(read_metrics(self.run_dir))

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"session of {self.config.algorithm} in {self.run_dir}: step {self.step} of"
            f" {self.config.steps}, mesh {self.config.mesh}{state}"
        )

    @property
    def rewards(self) -> tuple[RewardFunction, ...]:
        """Returns the reward functions of Python.

        Assign a list to score with others from the next `score` on, also after a cell has defined
        one of them anew. One that has the name of a former one takes its place and its weight,
        other former ones are left out, other new ones come last. The run's config and its
        checkpoints name them from then on: it resumes with these.
        """
        return self._rewards

    @rewards.setter
    def rewards(self, functions: Sequence[RewardFunction]) -> None:
        self._begin()
        if not self.config.learns_from_rewards:
            raise UserError(f"s.rewards: algorithm={self.config.algorithm} learns from no rewards")
        run, before = self._run, (self._run.job, self._given, self._rewards)
        config, given = replace_rewards(self.config, self._given, functions)
        with closing(job.reward_functions(config, given.code)) as tried:
            begun = config.environment.name is not None
            notes = tried.check(run.job.train.batch(self.step), begun)
        # Interrupted from here on, the role will have the new ones.
        self._given, self._rewards = given, tuple(functions)
        run.job = replace(run.job, config=config, given=given.code)
        try:
            self._ask("score", "reward", RewardRole.use, config, given.code)
        except Exception:
            run.job, self._given, self._rewards = before
            raise
        run.checkpoints.config = config
        run.folder.write(CONFIG_FILE, config.dump())
        names = ", ".join(config.reward.functions)
        for note in (*notes, f"rewards of step {self.step + 1}: reward.functions=[{names}]"):
            run.notify(note)

    # A step.

    def prompts(self, steps: int | None = None) -> Iterator[Prompts]:
        """Returns an iterator over the prompts of the next steps, in the order of the run's seed,
        from where the run stands.

        Args:
            steps: how many at most; None: all that are left of the config's `steps`, where the
                iterator ends in any case, as it does after an update in which code of the user's
                raised `StopTraining`.
        """
        self._begin()
        whole = hasattr(steps, "__index__") and not isinstance(steps, bool)
        if steps is not None and (not whole or steps < 1):
            raise UserError(f"steps={steps!r}: must be at least 1, a whole number, or None")
        last = self.config.steps if steps is None else min(self.step + steps, self.config.steps)
        run = self._run
        run.stopped = None  # whoever asks goes on
        left = takewhile(lambda _: run.stopped is None, range(self.step, last))
        return (Prompts(index + 1, tuple(run.job.train.batch(index))) for index in left)

    def sample(self, prompts: Prompts) -> BatchByHand:
        """Samples the completions of the next step: `group_size` of each prompt, with the random
        numbers of the run's seed. Where the algorithm takes the step's completions from the data or
        the teacher, these.

        Args:
            prompts: as `prompts()` gives them. The same ones give the same completions again.
        """
        self._begin()
        if not isinstance(prompts, Prompts):
            raise UserError(
                f"s.sample({short(shown(prompts), 40)}): give what s.prompts() gives, as in"
                " s.sample(next(s.prompts())); s.generate samples other texts"
            )
        self._check_next(prompts.step, "s.sample")
        index, loop = self.step, self._loop
        with self._hearing():
            if index not in self._ahead:  # else a checkpoint of another schedule has it
                loop.act(Action("generate", index))
            sampled = loop.rows[index + 1].rollout
            assert sampled is not None
            self._join([sampled])
        early = loop.sources.early_scores.pop(index, {})
        return BatchByHand(prompts.step, self, sampled, early, self.config.reward.functions)

    def score(self, batch: BatchByHand) -> BatchByHand:
        """Returns the batch with what the algorithm learns from: rewards and advantages, and the
        teacher's and the reference's scores, by the roles that `train` asks.

        Where it raises, for example because a reward function fails on too many completions, the
        batch is as it was: mend the function, assign `rewards`, and score again.
        """
        self._begin()
        self._check_batch(batch, "s.score")
        index, loop = self.step, self._loop
        loop.rows[index + 1].rollout = batch.sampled
        if batch.early and batch.early_functions == self.config.reward.functions:
            loop.sources.early_scores[index] = dict(batch.early)
        with self._hearing():
            loop.act(Action("score", index))
            scores = loop.rows[index + 1].scores
            self._join([part for parts in scores.values() for part in parts])
        return replace(batch, scored=scores, _report=None, _values={})

    def update(self, batch: BatchByHand) -> dict[str, Any]:
        """Trains on a scored batch, sends the new weights to the roles that work with them, and
        evaluates and saves where `train` would. Returns the row of `metrics.jsonl`.

        Where the wait for it is interrupted, it goes on, and the next call waits for it first.
        """
        self._begin()
        self._check_batch(batch, "s.update")
        index, loop = self.step, self._loop
        row = loop.rows[index + 1]
        row.rollout, row.scores = batch.sampled, dict(batch.scores)

        def train() -> None:  # on a thread, which no Ctrl-C of a cell stops half way
            loop.act(Action("train", index))
            loop.act(Action("publish", index + 1))
            loop.report(until=index)
            self._ahead.discard(index)
            self._step = index + 1

        self._update = self._thread.submit(train)
        self._settle()
        return dict(self._run.metrics.last or {})

    # Beside the steps.

    def evaluate(self) -> dict[str, float]:
        """Evaluates the policy on the held-out prompts, as an evaluation of the run does, and
        returns its metrics. They are not written: `eval.every` says which steps are evaluated."""
        self._begin()
        held_out, judge = self._run.job.held_out, self._run.job.judge
        if not held_out:
            raise UserError("s.evaluate(): data.eval=null: there are no held-out prompts")
        groups = self._sample_now(self._run.job.held_out_prompts)
        return evaluation_row(held_out, groups, judged(held_out, groups, judge))

    def generate(
        self, prompts: Sequence[str | Sequence[Mapping[str, Any]]]
    ) -> list[list[Completion]]:
        """Samples `eval.samples` completions of each prompt with the policy as it is now, as an
        evaluation samples (`eval.temperature`, `eval.max_new_tokens`), and asks as the run does
        (`data.chat`, `data.system_prompt`).

        Args:
            prompts: texts, or chats as lists of messages.
        """
        self._begin()
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise UserError(f"s.generate({short(shown(prompts), 40)}): give a list of prompts")
        made, limit = self._run.job, self.config.max_prompt_tokens
        vocabulary = made.student.config.vocab_size
        encode = job.encoder(self.config, made.tokenizer, made.eos_ids, vocabulary)
        encode = replace(encode, samples=True, completions=False)
        asked: list[Prompt] = []
        for number, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else tuple(prompt)
            found = encode.encode(Example(text), number)
            if found is None:
                raise UserError(
                    f"s.generate: prompt {number} is longer than max_prompt_tokens={limit}"
                )
            asked.append(found)
        return self._sample_now(asked) if asked else []

    def save(self) -> Path:
        """Writes a checkpoint of the present step, unless there is one; returns its folder.

        Raises:
            RunError: it cannot be written.
        """
        self._begin()
        if self.step == 0:
            raise UserError("s.save(): nothing is trained yet; the first step makes a checkpoint")
        checkpoints, loop = self._run.checkpoints, self._loop
        deadline = self.config.deadlines.checkpoint
        for ask in (loop.close, loop.save):
            if checkpoints.newest != self.step:
                ask(self.step)
                checkpoints.finish(deadline)
        if checkpoints.newest != self.step:
            raise RunError(f"checkpoint {self.step} could not be written to {self.run_dir}")
        return checkpoints.folder(self.step)

    def export(self, path: str | Path) -> Path:
        """Writes the policy as it is now as a Hugging Face folder, or its adapters as a PEFT
        folder, in `actor.param_dtype`; returns the folder, which must be new or empty.

        Raises:
            UserError: it cannot be written there.
        """
        self._begin()
        place = user_path(path).absolute()
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise UserError(f"s.export: {place} is not empty: name a new folder")
        files = self._run.job.tokenizer_files
        problem = self._ask("save", "actor", ActorRole.export, place, files)
        if problem is not None:
            raise UserError(f"s.export: {place} cannot be written: {problem}")
        return place

    # For its batches.

    def decode(self, token: int) -> str:
        """Returns the text of one token."""
        return decode_text(self._run.job.tokenizer, [token], special=True)

    def inspect(self, batch: BatchByHand) -> TokenValues:
        """Asks the actor for what the policy makes of a batch now: before its update with the
        divergence from the teacher."""
        self._begin()
        scores = None
        if batch.scored is not None and batch.step > self.step:
            scores = {role: list(parts) for role, parts in batch.scores.items()}
        found: TokenValues = self._ask("score", "actor", ActorRole.inspect, batch.sampled, scores)
        return found

    # The end.

    def __enter__(self) -> Self:
        """Lets SIGTERM and SIGHUP end the block as Ctrl-C does: what was trained is saved."""
        self._begin()
        self._stack.enter_context(self._interrupt.listening())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Closes the session. `StopTraining` ends the block early, as it ends a run."""
        stops = isinstance(error, StopTraining)
        if isinstance(error, StopTraining):
            self._run.stopped = error.from_code("the block of the session")
        try:
            self.close()
        except Exception as failure:
            if error is None or stops:
                raise
            self._run.notify(f"the session could not be ended: {failure}")  # the first error counts
        return stops

    def close(self) -> None:
        """Saves what was trained and ends the roles; after the last step, or where `StopTraining`
        ended the steps, also exports the model, as `train` does at its end. Does nothing the second
        time."""
        if self._closed:
            return
        self._closed = True
        if self in _open:
            _open.remove(self)
        with self._stack:
            self._thread.shutdown(wait=False)
            if self._lost is not None:
                return
            self._settle()
            self._loop.close(self.step)
            self._run.close()
            if self.step == self.config.steps or self._run.stopped is not None:
                end_run(self._run, self.step)
                return
            kept = self._kept() if self.step else "nothing is trained"
            of = f"{self.step} of {self.config.steps}"
            self._run.notify(f"the session ended at step {of}; {kept}")

    # How it works.

    def _begin(self) -> None:
        """Begins a call: after an update whose wait was interrupted."""
        if self._closed:
            raise UserError(
                "the session is closed: jaxrl.session(...) with the same run resumes it"
            )
        if self._lost is not None:
            raise RunError(
                f"the run has ended at step {self.step}, {self._kept()}; close the session and"
                f" start it again. What ended it: {self._lost}"
            ) from self._lost
        self._settle()

    def _kept(self) -> str:
        saved = self._run.checkpoints.newest
        if saved == self.step:
            return f"saved in {self.run_dir}"
        return "nothing is saved" if saved is None else f"the newest checkpoint is of {saved}"

    def _settle(self) -> None:
        """Waits for the latest update, up to its row."""
        update = self._update
        while update is not None and not update.done():
            wait_for([update], POLL_S)
        self._update = None
        if update is not None and (error := update.exception()) is not None:
            self._lost = error
            raise error
        self._hear()

    def _ask(self, kind: str, role: str, method: Callable[..., Any], *args: object) -> Any:
        """Calls a role and waits for the value."""
        calls = self._loop.calls
        calls.kind, calls.row = kind, self.step
        with self._hearing():
            future = calls.call(role, method, *args)
            self._join([future])
            return future.result()

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Raises StopTraining of the user's code where a call was dropped for it."""
        try:
            yield
        except Stopped:
            self._hear()
            if (asked := self._run.worker_group.stop_asked) is None:
                raise
            raise asked.with_traceback(None) from None
        self._hear()

    def _hear(self) -> None:
        """Notes that code of the user's has asked for the end; calls from here on are made."""
        group = self._run.worker_group
        group.settle()
        if group.stop_asked is not self._heard:
            self._heard = self._run.stopped = group.stop_asked

    def _join(self, futures: Sequence[Future[Any]]) -> None:
        """Waits for calls, whose values stay where they are. Raises the error of the first that has
        one."""
        try:
            for future in futures:
                while not future.wait(POLL_S):
                    future.check()
        except Exception as error:  # a worker has failed, or hangs
            self._lost = error
            raise
        for future in futures:
            if (failed := future.error) is not None:
                # Its text has the traceback of the user's code. With the group of exceptions that
                # it was in IPython shows it as text on stderr, not as the cell's error.
                failed.__context__ = None
                raise failed.with_traceback(None)

    def _sample_now(self, prompts: Sequence[Prompt]) -> list[list[Completion]]:
        """Samples with the weights as they are now, as an evaluation does."""
        loop = self._loop
        if loop.sent.get("rollout") != self.step:
            loop.calls.kind = "publish"
            loop.send("rollout", self.step)
            after = loop.rows[self.step].after
            self._join([after.pop(f"{kind}.rollout") for kind in ("publish", "load")])
        done: list[list[Completion]]
        done = self._ask("generate", "rollout", SamplingRole.sample, prompts)
        return done

    def _check_next(self, step: int, call: str) -> None:
        if step <= self.step:
            raise UserError(f"{call}: step {step} is trained already; s.prompts() has the next")
        if step > self.step + 1:
            raise UserError(
                f"{call}: step {step} comes after step {self.step + 1}, which is not trained: the"
                " run learns its batches in order (s.update)"
            )

    def _check_batch(self, batch: BatchByHand, call: str) -> None:
        if not isinstance(batch, BatchByHand):
            raise UserError(f"{call}({short(shown(batch), 40)}): give a batch of s.sample(prompts)")
        if batch.owner is not self:
            raise UserError(f"{call}: the batch is of another session: sample it here")
        self._check_next(batch.step, call)


_open: list[RunSession] = []
"""Those that nobody has closed."""


def _close_open() -> None:
    while _open:
        left = _open[-1]
        try:
            left.close()
        except Exception as error:  # the others are saved all the same
            left._run.notify(f"{left!r} could not be ended: {error}")


# What `atexit` has comes after the end of all pools of threads, which checkpoints need; this comes
# before it, as the function of `concurrent.futures` that ends them.
threading._register_atexit(_close_open)  # type: ignore[attr-defined]
