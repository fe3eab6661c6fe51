"""A schedule in time: the calls that the loop would make, in its order, each pool a queue of them,
with the seconds of each stage; and, from the lengths of completions, what sampling does meanwhile.

Sampling follows the rules of the engine: completions get slots in the order of their batches; a
launch ends after so many decode steps, or once enough slots are free for those that wait; what has
ended is noticed during the next one; calls come between two launches. Every decode step takes the
same time, however many slots are in use. Evaluations, checkpoints and the prefill of new prompts
take none.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl.algorithms.schedule import Schedule

Stage = tuple[str, str]
"""Role and method."""
REPLAYED = 12
"""Steps of `predict`; the last half of them are measured: whole periods of up to three batches."""


@dataclass(frozen=True)
class Sampling:
    """What the rollout samples, and how."""

    lengths: np.ndarray
    """[batches, samples] int: tokens of each completion, the samples of a prompt side by side."""
    seats: int
    """Completions that are decoded side by side."""
    launch: int
    """Most decode steps of a launch."""
    step: float
    """Seconds of a decode step."""
    streams: bool = False
    """Whether batches begin before those ahead have ended, and weights come between launches."""
    read: float = 0.0
    """Seconds of a token that new weights read again."""
    group: int = 1
    """Samples of a prompt, which is read once for all of them."""
    prompt: float = 0.0
    """Tokens of a prompt."""
    parts: int = 1
    """Parts of a batch, each of some prompts, that train in their order, each once its completions
    have ended."""
    check: int = 8
    """Decode steps between two looks at how many slots are free."""


@dataclass(eq=False)
class _Call:
    seconds: float = 0.0
    needs: Sequence[_Call] = ()
    batch: int | None = None
    """The batch that it begins."""
    version: int | None = None
    """The version of the weights that it brings."""
    end: float | None = None
    """None: not known yet."""

    @property
    def ready(self) -> float | None:
        """Returns when its arguments are there; None where that is not known yet."""
        ends = [call.end for call in self.needs]
        known = [end for end in ends if end is not None]
        return max(known, default=0.0) if len(known) == len(ends) else None


class _Rollout:
    """The rollout's worker: takes calls between launches."""

    def __init__(self, sampling: Sampling):
        self.how, self.now, self.version = sampling, 0.0, 0
        self.ends: list[_Call] = []
        """For each part of each batch, what ends with its last completion."""
        self.lengths = sampling.lengths.reshape(-1)
        self.done = np.zeros_like(self.lengths)
        self.per_batch = sampling.lengths.shape[1]
        batch, sample = np.divmod(np.arange(self.lengths.size), self.per_batch)
        groups, parts = self.per_batch // sampling.group, sampling.parts
        self.part = batch * parts + sample // sampling.group * parts // groups
        """Of each completion, counted over all batches."""
        self.left = np.bincount(self.part)
        """Of each part, the completions that have not ended."""
        self.seated = self.over = np.zeros(0, int)
        """Those in slots, and those that have ended unnoticed, by number: the batches follow one
        another."""
        self.first = self.begun = 0
        """The first that has had no slot, and the end of those that may have one."""
        self.swapped = False
        """Whether the next launch reads again what is in flight."""
        self.launches: list[tuple[float, float, float]] = []
        self.ages = np.zeros(len(sampling.lengths), int)

    @property
    def in_flight(self) -> bool:
        return self.first < self.begun or self.seated.size > 0

    def take(self, call: _Call, ready: float) -> None:
        self.now = max(self.now, ready) + call.seconds
        if call.batch is not None:
            self.begun += self.per_batch
        else:
            call.end = self.now
        if call.version is not None:
            self.version, self.swapped = call.version, True
            self._find_ends()

    def launch(self) -> None:
        how, again = self.how, 0.0
        if self.swapped:
            read = self.seated[self.done[self.seated] > 0]
            prompts = len(np.unique(read // how.group))
            again, self.swapped = int(self.done[read].sum()) + prompts * how.prompt, False
        free = min(how.seats - self.seated.size, self.begun - self.first)
        self.seated = np.append(self.seated, np.arange(self.first, self.first + free))
        self.first += free
        left = self.lengths[self.seated] - self.done[self.seated]
        last = left.max()
        if waiting := self.begun - self.first:
            enough = min(max(1, how.seats // 8), waiting)
            last = np.partition(left, enough - 1)[enough - 1]
        steps = min(how.launch, -(-int(last) // how.check) * how.check)
        new = np.minimum(left, steps)
        self.done[self.seated] += new
        self.now += steps * how.step + again * how.read
        batches = self.seated // self.per_batch
        np.add.at(self.ages, batches, (batches - self.version) * new)
        self.launches.append((self.now, steps * how.step, again))
        self._find_ends()  # of the launch before, while this one ran
        self.over, self.seated = self.seated[new == left], self.seated[new < left]
        if not self.in_flight:
            self._find_ends()

    def _find_ends(self) -> None:
        for part in self.part[self.over]:
            self.left[part] -= 1
            if not self.left[part]:
                self.ends[part].end = self.now
        self.over = self.over[:0]


@dataclass(frozen=True)
class Prediction:
    """What a schedule comes to."""

    ideal: float
    """Of the longer of two times, to sample with all slots full and to train, over its own."""
    age: float
    """Mean over the sampled tokens: batches between the weights that sample and that learn."""
    again: float
    """Tokens read again for each sampled one."""
    idle: float
    """Share of the time in which the rollout does not decode."""


@dataclass(frozen=True)
class ScheduleTimes:
    """The times of a schedule, in seconds."""

    updates: Sequence[float]
    """[batches]: when each was learned."""
    sampled: Sequence[float] = ()
    """[batches]: when the last completion of each ended."""
    launches: np.ndarray | None = None
    """[launches, 3]: end, seconds of decoding, tokens read again."""
    ages: np.ndarray | None = None
    """[batches]: sum over the tokens of each of batches between the weights that sample and that
    learn it."""

    def between(self, first: int, last: int, sampling: Sampling, update: float) -> Prediction:
        """Computes what the batches behind the `first` up to the `last` come to.

        Args:
            update: seconds of one.
        """
        assert self.launches is not None and self.ages is not None, "`simulate` had a `Sampling`"
        ends, seconds, again = self.launches.T
        start, end = self.updates[first], self.updates[last]
        decoding = seconds[(start < ends) & (ends <= end)].sum()
        read = again[(self.sampled[first] < ends) & (ends <= self.sampled[last])].sum()
        tokens = sampling.lengths[first + 1 : last + 1].sum()
        full = tokens * sampling.step / sampling.seats
        return Prediction(
            float(max(full, update * (last - first)) / (end - start)),
            float(self.ages[first + 1 : last + 1].sum() / tokens),
            float(read / tokens),
            float(1 - decoding / (end - start)),
        )


def simulate(
    stages: Mapping[Stage, float],
    pool_of: Mapping[str, str],
    schedule: Schedule,
    sampling: Sampling | None = None,
) -> ScheduleTimes:
    """Returns when what happens.

    Args:
        stages: seconds a step of each stage.
        pool_of: role -> its pool.
        sampling: in place of the seconds of the rollout's `generate`.
    """
    queues: dict[str, deque[_Call]] = defaultdict(deque)
    rollout = None if sampling is None else _Rollout(sampling)
    parts = 1 if sampling is None else sampling.parts
    generated: list[list[Sequence[_Call]]] = []
    scored: list[list[Sequence[_Call]]] = []
    updates: list[_Call] = []
    scorers = [role for role, method in stages if method == "score"]

    def queue(
        role: str, method: str, needs: Sequence[_Call] = (), share: int = 1, **what: int
    ) -> Sequence[_Call]:
        """Queues a call, and returns its end; that of its arguments where it takes no time."""
        if (role, method) not in stages:
            return needs
        call = _Call(stages[role, method] / share, needs, **what)
        queues[pool_of[role]].append(call)
        return (call,)

    for action in schedule:
        i = action.index
        if action.kind == "generate":
            ends: list[Sequence[_Call]]
            if rollout is None:
                ends = [queue("rollout", "generate")]
            else:
                queues[pool_of["rollout"]].append(_Call(batch=i))
                ends = [(_Call(),) for _ in range(parts)]
                rollout.ends += [call for (call,) in ends]
            generated.append([queue("teacher", "generate", made, parts) for made in ends])
        elif action.kind == "score":
            scored.append(
                [
                    [call for role in scorers for call in queue(role, "score", made, parts)]
                    for made in generated[i]
                ]
            )
        elif action.kind == "train":
            for made, scores in zip(generated[i], scored[i], strict=True):
                last = queue("actor", "update", (*made, *scores), parts)
            updates.append(_Call(needs=last))
        else:
            queue("rollout", "load", queue("actor", "publish"), version=i)
            queue("teacher", "load", queue("actor", "publish_to_teacher"))
    own = deque[_Call]() if rollout is None else queues.pop(pool_of["rollout"])
    free: dict[str, float] = defaultdict(float)
    _settle(queues, free)
    while rollout is not None and (own or rollout.in_flight):
        takes = own and (rollout.how.streams or not rollout.in_flight)
        ready = own[0].ready if takes else None
        if ready is not None and (ready <= rollout.now or not rollout.in_flight):
            rollout.take(own.popleft(), ready)
        else:
            rollout.launch()
        _settle(queues, free)
    learned = [call.ready or 0.0 for call in updates]
    if rollout is None:
        return ScheduleTimes(learned)
    sampled = [call.end or 0.0 for call in rollout.ends[parts - 1 :: parts]]
    return ScheduleTimes(learned, sampled, np.array(rollout.launches), rollout.ages)


def _settle(queues: Mapping[str, deque[_Call]], free: dict[str, float]) -> None:
    """Ends every call whose arguments have known times; `free` has when each pool is."""
    again = True
    while again:
        again = False
        for pool, calls in queues.items():
            while calls and (ready := calls[0].ready) is not None:
                call = calls.popleft()
                free[pool] = call.end = max(free[pool], ready) + call.seconds
                again = True


def scores_ahead(stages: Collection[Stage], pool_of: Mapping[str, str]) -> bool:
    """Returns `Schedule.scores_ahead` of a run with these stages."""
    scorers = {role for role, method in stages if method == "score"}
    beside = {role for role in scorers if pool_of[role] == pool_of["actor"]}
    return not beside and ("actor", "publish_to_teacher") not in stages


def predict(stages: Mapping[Stage, float], pool_of: Mapping[str, str], staleness: int) -> float:
    """Predicts the seconds of a step once the pipeline is full.

    Args:
        stages: seconds a step of each stage.
        pool_of: role -> its pool.
        staleness: batches that the schedule generates ahead.
    """
    schedule = Schedule(REPLAYED, staleness, scores_ahead=scores_ahead(stages, pool_of))
    updates, half = simulate(stages, pool_of, schedule).updates, REPLAYED // 2
    return (updates[-1] - updates[-1 - half]) / half
