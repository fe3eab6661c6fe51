"""Dynamic sampling by hand: which prompts a batch ends up with, and what is told of all of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.algorithms.protocols import RewardRole
from jaxrl.algorithms.sampled_batch import refill_batch
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.runtime.worker import done_future
from jaxrl.types import Completion, Prompt, SampleCounts

NONE = np.nan


def completion(token: int, length: int = 1) -> Completion:
    zeros = np.zeros(length, np.float32)
    return Completion((token,) * length, zeros, zeros, "stop")


class Source:
    """Gives the batches of `attempts`, one after the other: for each prompt, its rewards."""

    def __init__(self, attempts, most=4, penalties=None, lengths=None):
        """
        Args:
            penalties: of each attempt, as its rewards; subtracted from them.
            lengths: of the completions of each attempt; the policy's two best tokens are known
                then: the token and the position, plus 1000 at padding.
        """
        asked = ["algorithm=dapo", "teacher.model=null", "reward.functions=[math]"]
        asked += ["batch_size=2", "group_size=2", f"policy.max_refills={most}"]
        self.config = Config.load(None, asked)
        self.penalties, self.lengths = penalties, lengths
        self.packing = {"pad_id": 0, "max_prompt_tokens": 4, "max_new_tokens": 64}
        self.packing["row_multiple"] = 3
        self.attempts, self.attempt = attempts, 0

    def student_samples(self, index, attempt=0):
        assert (index, attempt) == (5, self.attempt)
        self.attempt += 1
        ids = [2 * attempt + p for p in range(2)]
        prompts = [Prompt(i, (1, 2), f"prompt {i}") for i in ids]
        length = self.lengths[attempt] if self.lengths else 1
        made = [[completion(10 * i + g, length) for g in range(2)] for i in ids]
        rollout = make_rollout(prompts, made, policy_version=7, **self.packing)
        if self.lengths:
            width = rollout.sequences.loss_mask.shape[1]
            tokens = np.asarray(rollout.sequences.tokens)[:, -width:]
            best = np.stack(np.broadcast_arrays(tokens, np.arange(width)), -1)
            padding = 1000 * ~np.asarray(rollout.sequences.loss_mask)[..., None]
            rollout = replace(rollout, student_topk=best + padding)
        return done_future(rollout)

    def call(self, role, method, rollout):
        assert (role, method) == ("reward", RewardRole.score)
        given = np.array(self.attempts[self.attempt - 1], float).ravel()
        told = {"reward/f/failures": float(np.isnan(given).sum()), "time/reward_s": 0.5}
        task = np.pad(given, (0, 2), constant_values=NONE)  # six rows: a multiple of three
        total = task
        if self.penalties:
            total = task - np.pad(np.ravel(self.penalties[self.attempt - 1]), (0, 2))
        report = RewardReport(total, task, {"f": task / 2}, told, (f"note {self.attempt}",))
        return done_future(report)

    def wait(self, future):
        return future.result()


def refill(*attempts, **options):
    source = Source(attempts, **options)
    batch, report = (future.result() for future in refill_batch(source, 5))
    assert source.attempt == len(attempts)
    return SimpleNamespace(batch=batch, report=report, metrics=report.metrics)


def test_a_full_batch_is_sampled_once():
    got = refill([[0, 1], [2, 0]])
    assert [prompt.id for prompt in got.batch.prompts] == [0, 0, 1, 1]
    assert got.metrics["policy/refills"] == got.metrics["policy/prompts_replaced"] == 0
    assert got.metrics["reward/mean"] == 0.75


def test_what_teaches_nothing_is_replaced_and_yet_counts_in_the_mean():
    """Prompts 0, 1 and 2 have one reward each, or none; 3, 4 and 5 differ: 3 and 4 make a batch."""
    got = refill([[1, 1], [NONE, 4]], [[2, 2], [0, 6]], [[1, 3], [0, 2]])
    assert [prompt.id for prompt in got.batch.prompts] == [3, 3, 4, 4]
    assert [c.tokens[0] for c in got.batch.completions] == [30, 31, 40, 41]
    np.testing.assert_array_equal(got.report.rewards, [0, 6, 1, 3, NONE, NONE])
    np.testing.assert_array_equal(got.report.per_reward["f"], [0, 3, 0.5, 1.5, NONE, NONE])
    np.testing.assert_array_equal(got.batch.group_ids, [0, 0, 1, 1, -1, -1])
    known = [1, 1, 4, 2, 2, 0, 6, 1, 3, 0, 2]
    assert got.metrics == {
        "reward/none": 1,
        "reward/mean": pytest.approx(np.mean(known)),
        "reward/std": pytest.approx(np.std(known)),
        "reward/f/mean": pytest.approx(np.mean(known) / 2),
        "reward/f/missing": 1 / 12,
        "reward/f/failures": 1,
        "time/reward_s": 1.5,
        "policy/refills": 2,
        "policy/prompts_replaced": 4,
    }
    replaced = SampleCounts(4, 8, 8, 8, degenerate_groups=3, prompt_tokens=4 * 2)
    assert got.batch.replaced == replaced
    assert got.report.notes == ("note 1", "note 2", "note 3")


def test_what_is_missing_after_the_last_time_is_filled_with_the_first_that_teach_nothing():
    got = refill([[1, 1], [5, 5]], [[0, 2], [3, 3]], most=1)
    assert [prompt.id for prompt in got.batch.prompts] == [2, 2, 0, 0]
    np.testing.assert_array_equal(got.report.rewards[:4], [0, 2, 1, 1])
    assert got.metrics["policy/refills"] == 1 and got.metrics["policy/prompts_replaced"] == 2
    assert got.metrics["reward/mean"] == pytest.approx((1 + 1 + 5 + 5 + 0 + 2 + 3 + 3) / 8)


def test_penalties_select_nothing():
    """Prompt 0 differs in its penalties only; those of prompt 1 hide its task's difference."""
    got = refill([[1, 1], [0, 1]], [[3, 3], [2, 4]], penalties=[[0, 1, 0, 1], [0, 0, 1, 1]])
    assert [prompt.id for prompt in got.batch.prompts] == [1, 1, 3, 3]
    np.testing.assert_array_equal(got.report.rewards, [0, 0, 1, 3, NONE, NONE])
    np.testing.assert_array_equal(got.report.task, [0, 1, 2, 4, NONE, NONE])


@pytest.mark.parametrize("lengths", [(2, 40), (40, 2), (40, 33)])
def test_what_the_policy_ranks_highest_comes_with_its_completion(lengths):
    """Whatever the widths of the batches that were put together."""
    got = refill([[1, 1], [0, 1]], [[3, 3], [2, 4]], lengths=lengths)
    assert [prompt.id for prompt in got.batch.prompts] == [1, 1, 3, 3]
    mask, topk = np.asarray(got.batch.sequences.loss_mask), got.batch.student_topk
    assert topk.shape == (*mask.shape, 2) and len(topk) == 6
    for row, token in enumerate((10, 11, 30, 31)):
        length = lengths[row // 2]
        assert mask[row].sum() == length
        expected = np.stack([np.full(length, token), np.arange(length)], -1)
        np.testing.assert_array_equal(topk[row, :length], expected)


def test_without_such_a_signal_nothing_is_ranked():
    assert refill([[0, 1], [2, 0]]).batch.student_topk is None
