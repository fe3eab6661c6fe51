"""Group advantages by hand and by their laws; whole groups, several rewards, penalties."""

import numpy as np
import pytest

from jaxrl.algorithms.advantages import (
    decoupled_rewards,
    group_advantages,
    normalise_batch,
    opd_advantages,
    remove_rounding,
    select_groups,
)
from jaxrl.rewards.batch_rewards import combine_rewards, soft_overlong

RNG = np.random.default_rng(0)
IDS = np.array([7, 3, 7, 7, -1, 3, 100000, 3, 7, -1])
"""Groups of four (7), three (3) and one (100000), in no order; two rows of padding."""
REWARDS = RNG.normal(0, 1, len(IDS))


def reference(rewards, ids, scale=True):
    """By its definition, a group at a time; rewards of None left out."""
    out = np.zeros(len(ids))
    for group in set(ids) - {-1}:
        rows = [i for i in range(len(ids)) if ids[i] == group and rewards[i] is not None]
        given = np.array([rewards[i] for i in rows])
        if len(rows) < 2 or given.std(ddof=1) < 1e-6:
            continue
        divisor = given.std(ddof=1) if scale else 1
        out[rows] = (given - given.mean()) / divisor
    return out


def test_two_groups_by_hand():
    """(1, 0, 0, 1): mean 1/2, std sqrt(1/3). (3, 1): mean 2, std sqrt(2)."""
    got = group_advantages([1, 3, 0, 0, 1, 1], np.array([0, 5, 0, 0, 5, 0]))
    a, b = 0.5 / np.sqrt(1 / 3), 1 / np.sqrt(2)
    np.testing.assert_allclose(got, [a, b, -a, -a, -b, a], rtol=1e-12)
    assert got.dtype == np.float64
    got = group_advantages([1, 3, 0, 0, 1, 1], np.array([0, 5, 0, 0, 5, 0]), scale_by_std=False)
    np.testing.assert_allclose(got, [0.5, 1, -0.5, -0.5, -1, 0.5], rtol=1e-12)


@pytest.mark.parametrize("scale", [True, False])
def test_arbitrary_ids_are_their_definition(scale):
    rewards = [None if i in (1, 8) else float(r) for i, r in enumerate(REWARDS)]
    expected = reference(rewards, IDS, scale)
    assert np.count_nonzero(expected) == 5
    np.testing.assert_allclose(group_advantages(rewards, IDS, scale_by_std=scale), expected)
    as_nan = np.array([np.nan if r is None else r for r in rewards])
    np.testing.assert_allclose(group_advantages(as_nan, IDS, scale_by_std=scale), expected)


def test_each_group_sums_to_zero_and_the_order_of_rows_does_not_matter():
    got = group_advantages(REWARDS, IDS)
    for group in (3, 7):
        np.testing.assert_allclose(got[group == IDS].sum(), 0, atol=1e-12)
        np.testing.assert_allclose(got[group == IDS].std(ddof=1), 1, rtol=1e-5)
    assert got[IDS == 100000] == 0 and not got[IDS == -1].any()
    order = RNG.permutation(len(IDS))
    np.testing.assert_array_equal(group_advantages(REWARDS[order], IDS[order]), got[order])


def test_a_group_is_alone_with_its_rows():
    """Cutting the batch anywhere between groups, or scaling another group, changes nothing."""
    got = group_advantages(REWARDS, IDS)
    for group in (3, 7, 100000):
        rows = group == IDS
        np.testing.assert_array_equal(group_advantages(REWARDS[rows], IDS[rows]), got[rows])


def test_rounding_is_no_signal():
    """Equal rewards whose sums round: std 1e-17, not 1e-17 / 1e-6 of an advantage."""
    rewards = np.array([0.1 + 0.2, 0.3, 0.3, 1e6 + 0.1, 1e6 + 0.1, 1e6 + 0.1])
    assert rewards[0] != rewards[1]
    ids = np.array([0, 0, 0, 1, 1, 1])
    for scale in (True, False):
        assert not group_advantages(rewards, ids, scale_by_std=scale).any()
    assert group_advantages([0, 1e-5], np.zeros(2, int)).any()


def test_infinite_rewards_are_refused():
    with pytest.raises(ValueError, match="reward of sample 1 is inf"):
        group_advantages([0.0, np.inf, 1.0], np.zeros(3, int))


def test_whole_groups_are_dropped_with_the_reason_counted():
    ids = np.array([0, 1, 2, 0, 1, 2, 3, 3, -1, 4, 4])
    rewards = [1, 1, None, 0, 1, None, None, 2, 5, None, 0.5]
    rewards += [1]  # group 4 has two equal rewards and one that is missing
    ids = np.append(ids, 4)
    rewards[10] = 1
    selection = select_groups(rewards, group_advantages(rewards, ids), ids)
    np.testing.assert_array_equal(selection.keep, ids == 0)
    assert selection.dropped == {"unscored_groups": 1, "degenerate_groups": 3}
    found = select_groups(REWARDS, group_advantages(REWARDS, IDS), IDS)
    assert found.dropped == {"unscored_groups": 0, "degenerate_groups": 1}


def test_kept_groups_are_those_with_an_advantage():
    """Of whole completions, or of any of their tokens."""
    rewards = RNG.integers(0, 2, 60).astype(float)
    rewards[RNG.random(60) < 0.2] = np.nan
    ids = RNG.integers(0, 20, 60)
    advantages = group_advantages(rewards, ids)
    keep = select_groups(rewards, advantages, ids).keep
    np.testing.assert_array_equal(keep, np.isin(ids, ids[advantages != 0]))
    assert 0 < keep.sum() < 60
    by_token = np.where(np.arange(3) == RNG.integers(0, 3, (60, 1)), advantages[:, None], 0)
    np.testing.assert_array_equal(select_groups(rewards, by_token, ids).keep, keep)


def test_what_differs_by_less_than_rounding_is_the_same():
    values = np.array([1.0, 1.0 + 1e-7, 1.0, 1.5, 7.0])
    got = remove_rounding(values, np.array([0, 0, 1, 1, -1]), 1e-6)
    np.testing.assert_allclose(got[:2], 1 + 5e-8, rtol=1e-15)
    np.testing.assert_array_equal(got[2:], values[2:])


def test_rewards_add_up_by_weight():
    """Group 0 has both; group 1 lacks `style` for good; in group 2 one sample lacks `right`."""
    ids = np.array([0, 0, 1, 1, 2, 2, 3, -1])
    rewards = {
        "right": [1.0, 0.0, 1.0, 0.0, 1.0, None, None, 1.0],
        "style": [0.5, 0.25, None, None, 0.5, 0.5, None, 1.0],
    }
    total = combine_rewards(rewards, {"right": 1.0, "style": 2.0}, ids, {})
    np.testing.assert_allclose(total, [2, 0.5, 1, 0, 2, 1, np.nan, np.nan])
    dropped = combine_rewards(rewards, {"right": 1.0, "style": 2.0}, ids, {}, drop=True)
    np.testing.assert_allclose(dropped, [2, 0.5, 1, 0, 2, np.nan, np.nan, np.nan])


@pytest.mark.parametrize("scale", [True, False])
def test_a_missing_reward_has_weight_0(scale):
    """Of rows that lack it, in sums and in rewards that are each normalised by themselves: there,
    the statistics of the others, and no term of its own."""
    ids = np.repeat(np.arange(12), 5)
    weights = {"f": 1.5, "g": -0.5}
    f, g = RNG.normal(size=(2, len(ids)))
    lacks = RNG.random(len(ids)) < 0.4
    missing = np.where(lacks, np.nan, g)
    total = combine_rewards({"f": f, "g": missing}, weights, ids, {})
    np.testing.assert_allclose(total, 1.5 * f - 0.5 * np.where(lacks, 0, g))
    summed = decoupled_rewards({"f": f, "g": missing}, weights, total, ids, scale_by_std=scale)
    term = group_advantages(missing, ids, scale_by_std=scale)
    assert (term[lacks] == 0).all()
    expected = 1.5 * group_advantages(f, ids, scale_by_std=scale) - 0.5 * term
    np.testing.assert_allclose(summed, expected, atol=1e-12)


def test_a_failure_is_missing_and_never_a_reward_that_does_not_apply():
    """In both groups `style` gave nothing: to group 0 it does not apply, in group 1 it failed on
    every sample, in group 2 on one where it does not apply to the other."""
    ids = np.array([0, 0, 1, 1, 2, 2, -1])
    rewards = {"right": [1.0, 0.0] * 3 + [1.0], "style": [None] * 7}
    failed = {"style": np.array([False, False, True, True, True, False, False])}
    total = combine_rewards(rewards, {"right": 1.0, "style": 2.0}, ids, failed)
    dropped = combine_rewards(rewards, {"right": 1.0, "style": 2.0}, ids, failed, drop=True)
    np.testing.assert_array_equal(dropped, total)
    np.testing.assert_array_equal(total, [1, 0, np.nan, np.nan, np.nan, 0, np.nan])
    found = select_groups(total, group_advantages(total, ids), ids)
    assert found.dropped == {"unscored_groups": 1, "degenerate_groups": 1}


def test_soft_overlong_by_hand():
    """L 100, cache 20: 0 up to 80, -1/2 at 90, -1 from 100 on."""
    got = soft_overlong(np.array([1, 80, 85, 90, 100, 130]), max_tokens=100, cache_tokens=20)
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.5, -1, -1])


def test_distillation_as_advantage_by_hand():
    """A - coef (log Q - log P): a token that the teacher likes better than the student gains."""
    student, teacher = np.log([[0.5, 0.2, 0.1]]), np.log([[0.25, 0.8, 0.1]])
    mask = np.array([[True, True, False]])
    holes = np.where(mask, student, -np.inf), np.where(mask, teacher, np.nan)
    got = opd_advantages(np.array([1.0]), *holes, mask, coef=0.5)
    np.testing.assert_allclose(got, [[1 - np.log(2) / 2, 1 + np.log(2), 0]], rtol=1e-5)
    far = np.where(mask, [[-1e30, -np.inf, 0]], teacher)
    clamped = opd_advantages(np.array([1.0]), holes[0], far, mask, coef=0.5)
    np.testing.assert_array_equal(clamped, [[1 - 10, 1 - 10, 0]])
    per_token = opd_advantages(np.array([[1.0, 2.0, np.nan]]), *holes, mask)
    np.testing.assert_allclose(per_token, [[1 - np.log(2), 2 + 2 * np.log(2), 0]], rtol=1e-5)


# Several rewards, each normalised by itself (GDPO).


def gdpo(rewards, weights, ids, scale=True, totals=None):
    if totals is None:
        totals = sum(weights[name] * np.asarray(given, float) for name, given in rewards.items())
    summed = decoupled_rewards(rewards, weights, totals, ids, scale_by_std=scale)
    return normalise_batch(summed, scale_by_std=scale)


def test_gdpo_by_hand():
    """Group 0: (1, 0) and (0, 4) have std sqrt(1/2) and 4 sqrt(1/2), so both normalise to
    +-sqrt(1/2): S = +-(2 - 1) sqrt(1/2). Group 1 differs in one reward: S = +-2 sqrt(1/2)."""
    rewards = {"a": [1, 0, 1, 0], "b": [0, 4, 7, 7]}
    got = gdpo(rewards, {"a": 2.0, "b": 1.0}, np.array([0, 0, 1, 1]))
    summed = np.array([1, -1, 2, -2]) * np.sqrt(0.5)
    np.testing.assert_allclose(got, summed / summed.std(ddof=1), rtol=1e-5)


def test_gdpo_keeps_apart_what_has_the_same_sum():
    """The paper's example: two rewards in {0, 1}. (0, 1) and (0, 2) are the same advantages for
    GRPO, (0, 2) is twice as far for GDPO before the batch is normalised."""
    ids = np.array([0, 0, 1, 1])
    rewards = {"a": [0, 1, 0, 1], "b": [0, 0, 0, 1]}
    one = {"a": 1.0, "b": 1.0}
    together = group_advantages([0, 1, 0, 2], ids)
    np.testing.assert_allclose(together[:2], together[2:], rtol=1e-5)
    got = gdpo(rewards, one, ids)
    np.testing.assert_allclose(got[2:], 2 * got[:2], rtol=1e-5)


@pytest.mark.parametrize("scale", [True, False])
def test_gdpo_of_one_reward_is_grpo_over_the_std_of_the_batch(scale):
    alone = group_advantages(REWARDS, IDS, scale_by_std=scale)
    got = gdpo({"a": REWARDS}, {"a": 3.0}, IDS, scale)
    live = IDS >= 0
    expected = 3 * alone[live]
    if scale:
        expected /= expected.std(ddof=1)
    np.testing.assert_allclose(got[live], expected, rtol=1e-5)
    assert not got[~live].any() and got[IDS == 100000] == 0


def test_gdpo_does_not_depend_on_the_size_of_a_reward_nor_on_the_order_of_rows():
    other = RNG.normal(0, 1, len(IDS))
    weights = {"a": 1.0, "b": 0.5}
    got = gdpo({"a": REWARDS, "b": other}, weights, IDS)
    large = gdpo({"a": REWARDS, "b": 1000 * other}, weights, IDS)
    np.testing.assert_allclose(large, got, rtol=1e-4, atol=1e-6)
    order = RNG.permutation(len(IDS))
    moved = gdpo({"a": REWARDS[order], "b": other[order]}, weights, IDS[order])
    np.testing.assert_allclose(moved, got[order], rtol=1e-12, atol=1e-12)
    live = got[IDS >= 0]
    np.testing.assert_allclose((live.mean(), live.std(ddof=1)), (0, 1), atol=1e-5)


def test_gdpo_leaves_out_samples_without_a_reward_and_groups_without_differences():
    ids = np.array([0, 0, 0, 1, 1, -1])
    rewards = {"a": [1, None, 0, 2, 2, 9], "b": [1, 5, 0, 3, 3, 9]}
    totals = [2, np.nan, 0, 5, 5, np.nan]
    got = gdpo(rewards, {"a": 1.0, "b": 1.0}, ids, totals=totals)
    assert got[1] == 0 and not got[3:].any() and got[0] == -got[2] > 0
    assert not gdpo({"a": [1, 1]}, {"a": 1.0}, np.array([0, 0])).any()


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e6])
def test_gdpo_of_rewards_that_cancel_in_every_group_is_exactly_0(size):
    """However far apart the rewards of a group are: normalised, one is the other's opposite."""
    ids = np.repeat(np.arange(30), 2)
    a, gap = np.tile([0.0, 1.0], 30), np.repeat(RNG.uniform(0.01, 3, 30), 2)
    assert not gdpo({"a": size * a, "b": gap * (1 - a)}, {"a": 0.3, "b": 0.3}, ids).any()
    live = gdpo({"a": size * a, "b": gap * (1 - a)}, {"a": 0.3, "b": 0.2}, ids)
    np.testing.assert_allclose(np.abs(live), np.sqrt(59 / 60), rtol=1e-6)
