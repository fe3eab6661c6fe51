"""Laws of the bounded-staleness schedule: no jax needed."""

import itertools

import pytest

from jaxrl.algorithms.schedule import SCHEDULES, Schedule


def actions(steps, staleness):
    return [(a.kind, a.index) for a in Schedule(steps, staleness)]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("staleness", SCHEDULES.values())
def test_every_batch_once_in_order_and_drained(steps, staleness):
    done = actions(steps, staleness)
    for kind, first in (("generate", 0), ("score", 0), ("train", 0), ("publish", 1)):
        assert [i for k, i in done if k == kind] == list(range(first, first + steps))


@pytest.mark.parametrize("staleness", SCHEDULES.values())
def test_weights_of_each_batch_are_exactly_those_of_the_bound(staleness):
    version = trained = 0
    for kind, index in actions(9, staleness):
        if kind == "publish":
            assert index == trained
            version = index
        elif kind == "train":
            trained = index + 1
        elif kind == "generate":
            assert version == max(0, index - staleness)
            assert index - trained <= staleness


@pytest.mark.parametrize("staleness", SCHEDULES.values())
def test_stages_of_a_batch_follow_each_other(staleness):
    done = {action: n for n, action in enumerate(actions(9, staleness))}
    for i in range(9):
        stages = [done["generate", i], done["score", i], done["train", i], done["publish", i + 1]]
        assert stages == sorted(stages)


def test_what_may_overlap():
    """While batch i - s trains, batch i is already under way, and two_step_off scores i - 1 beside
    it.
    """
    for staleness in (1, 2):
        done = actions(9, staleness)
        for i in range(9 - staleness):
            before = done[: done.index(("train", i))]
            assert ("generate", i + staleness) in before
    two = actions(9, 2)
    assert all(("score", i + 1) in two[: two.index(("train", i))] for i in range(8))


@pytest.mark.parametrize("staleness", SCHEDULES.values())
def test_a_teacher_that_follows_scores_with_all_updates_before_the_batch(staleness):
    """Also once the run resumes: the version that scores batch i is i."""
    schedules = [Schedule(9, staleness, scores_ahead=False)]
    schedules += [Schedule.resume(5, staleness, 9, staleness, scores_ahead=False)]
    for schedule in schedules:
        published, scored = schedule.published, schedule.scored
        for action in schedule:
            if action.kind == "publish":
                published = action.index
            elif action.kind == "score":
                assert action.index == scored == published
                scored += 1
        assert scored == 9


@pytest.mark.parametrize("staleness", SCHEDULES.values())
def test_continues_from_any_point(staleness):
    """The four counts are the whole state: a copy made anywhere goes on alike."""
    whole = actions(6, staleness)
    for n in range(len(whole)):
        first = Schedule(6, staleness)
        list(itertools.islice(first, n))
        again = Schedule(
            6, staleness, first.generated, first.scored, first.trained, first.published
        )
        assert [(a.kind, a.index) for a in again] == whole[n:]
