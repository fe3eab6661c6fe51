"""Means and intervals of evaluations: by hand, by enumeration, by simulation."""

from dataclasses import replace
from itertools import combinations
from math import comb, sqrt

import numpy as np
import pytest
from cases import and_slow

from jaxrl import Config
from jaxrl.data.stream import EvalSet
from jaxrl.rewards.verifiers import verifier
from jaxrl.run.evaluation import (
    Estimate,
    Z,
    estimates,
    evaluation_row,
    judged,
    mean_of,
    pass_at_k,
    pass_ks,
    wilson,
)
from jaxrl.run.job import held_out_notes
from jaxrl.types import Completion, Prompt


def held(n, name="", first=0):
    return EvalSet(tuple(Prompt(first + i, (1,), "p") for i in range(n)), 0, name)


def sampled(text, tokens=1, finish_reason="stop"):
    nothing = np.zeros(tokens, np.float32)
    return Completion((1,) * tokens, nothing, nothing, finish_reason, text)


def judge(text, prompt):
    """The text is the score; `?` cannot be judged."""
    return None if text == "?" else float(text)


def row(*texts, sets=None):
    """Each argument holds the scores of one prompt's samples, as words."""
    groups = [[sampled(word) for word in several.split()] for several in texts]
    sets = sets or [held(len(groups))]
    return evaluation_row(sets, groups, judged(sets, groups, judge))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n):
    for c in range(n + 1):
        samples = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_1_is_the_mean_and_large_counts_are_stable():
    assert [pass_at_k(7, c, 1) for c in range(8)] == pytest.approx([c / 7 for c in range(8)])
    # 1 - C(9999, 1000) / C(10000, 1000) = 1000 / 10000, where the binomials overflow a float.
    assert pass_at_k(10_000, 1, 1000) == pytest.approx(0.1, rel=1e-9)


def test_pass_at_k_is_unbiased():
    """Over the 2^6 outcomes of six samples that pass with probability p: 1 - (1 - p)^k."""
    p, n = 0.3, 6
    for k in (2, 4, 6):
        expected = 0.0
        for c in range(n + 1):
            ways = len(list(combinations(range(n), c)))
            expected += ways * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k)
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_ks_are_powers_of_two_and_all_samples():
    assert [pass_ks(n) for n in (0, 1, 2, 3, 4, 6, 8)] == [
        (),
        (),
        (2,),
        (2, 3),
        (2, 4),
        (2, 4, 6),
        (2, 4, 8),
    ]


def test_wilson_solves_its_equation():
    """The ends are the means m from which the observed one is Z standard errors away."""
    for mean, n in ((0.5, 10), (0.1, 7), (0.93, 200)):
        found = wilson(mean, n)
        for end in (found.low, found.high):
            assert abs(mean - end) == pytest.approx(Z * sqrt(end * (1 - end) / n))


def test_wilson_by_hand_and_at_the_limits():
    # Z^2 = 3.8415: at 0 of 10 the upper end is Z^2 / (10 + Z^2) = 0.27753.
    assert wilson(0.0, 10) == Estimate(0.0, 0.0, pytest.approx(0.27753, abs=1e-5))
    assert wilson(1.0, 10) == Estimate(1.0, pytest.approx(0.72247, abs=1e-5), 1.0)
    for mean in np.linspace(0, 1, 21):
        for n in (1, 2, 3, 100, 10_000):
            found = wilson(float(mean), n)
            assert 0 <= found.low <= found.value <= found.high <= 1 and found.low < found.high


def exact_coverage(p, n):
    """Probability that the interval of c of n passes holds p, c being binomial."""
    return sum(
        comb(n, c) * p**c * (1 - p) ** (n - c)
        for c in range(n + 1)
        if (e := wilson(c / n, n)).low <= p <= e.high
    )


def coverage(draw, truth, runs=1000):
    """Share of simulated evaluations whose interval holds the truth."""
    rng = np.random.default_rng(0)
    found = (draw(rng) for _ in range(runs))
    return np.mean([e.low <= truth <= e.high for e in found])


@pytest.mark.parametrize(("p", "n"), [(0.5, 20), (0.2, 30), (0.7, 64), (0.9, 100), (0.03, 256)])
def test_the_interval_of_single_samples_covers_the_truth(p, n):
    assert 0.93 <= exact_coverage(p, n) <= 0.98


@pytest.mark.parametrize("n", [10, 64, 256])
def test_the_interval_is_of_95_percent_on_average_over_the_truth(n):
    found = np.mean([exact_coverage(p, n) for p in np.linspace(0.01, 0.99, 99)])
    assert found == pytest.approx(0.95, abs=0.008)


@pytest.mark.parametrize("spread", and_slow([1.0], [0.3, 10.0]))
def test_the_interval_covers_the_truth_when_the_samples_of_a_prompt_are_alike(spread):
    """Each prompt has its own difficulty, Beta(spread, spread): pooling all samples as if they were
    independent would cover far less."""

    def draw(rng):
        p = rng.beta(spread, spread, 40)
        return estimates((rng.random((40, 8)) < p[:, None]).astype(float).tolist())["accuracy"]

    assert coverage(draw, 0.5) >= 0.93


def test_the_interval_of_pass_at_k_covers_the_truth():
    def draw(rng):
        return estimates((rng.random((50, 4)) < 0.25).astype(float).tolist())["pass@2"]

    assert coverage(draw, 1 - 0.75**2) >= 0.93


def test_the_interval_of_a_mean_over_sets_covers_the_truth():
    def draw(rng):
        sizes = ((0.9, 40), (0.3, 80), (0.5, 20))
        return mean_of([wilson(rng.binomial(n, p) / n, n) for p, n in sizes])

    assert coverage(draw, (0.9 + 0.3 + 0.5) / 3) >= 0.93


def test_the_mean_of_one_estimate_is_itself_and_of_many_equal_ones_is_narrower():
    one = wilson(0.3, 50)
    same = mean_of([one])
    assert (same.value, same.low, same.high) == pytest.approx((one.value, one.low, one.high))
    four = mean_of([one] * 4)  # half the width: sqrt(4) / 4
    assert four.value - four.low == pytest.approx((one.value - one.low) / 2)
    assert four.high - four.value == pytest.approx((one.high - one.value) / 2)


def test_a_row_by_hand():
    groups = [
        [sampled("1", 3), sampled("0", 5, "length"), sampled("0", 4)],
        [sampled("1", 2), sampled("1", 2), sampled("0.5", 2)],
    ]
    found = evaluation_row([held(2)], groups, judged([held(2)], groups, judge))
    # Prompts: means 1/3 and 5/6; one and two of three pass.
    assert found["eval/accuracy"] == pytest.approx((1 / 3 + 5 / 6) / 2)
    assert found["eval/pass@2"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["eval/pass@3"] == 1.0
    for name in ("accuracy", "pass@2", "pass@3"):
        expected = wilson(found[f"eval/{name}"], 2)
        assert found[f"eval/{name}_low"] == pytest.approx(expected.low)
        assert found[f"eval/{name}_high"] == pytest.approx(expected.high)
    assert found["eval/mean_completion_tokens"] == 3.0
    assert found["eval/truncated_fraction"] == pytest.approx(1 / 6)
    assert found["eval/unjudged"] == 0 and len(found) == 12


def test_one_sample_has_no_pass_at_k():
    found = row("1", "0", "1", "1")
    assert found["eval/accuracy"] == 0.75 and not [name for name in found if "pass" in name]


def test_each_completion_is_judged_with_what_opened_its_own_thoughts():
    """A prompt, a turn and a teacher may open them where others do not."""
    prompts = EvalSet(tuple(Prompt(i, (1,), "p", answer="7") for i in range(2)), 0)
    groups = [[replace(sampled("7"), opening=one)] for one in ("<think>\n", "")]
    assert judged([prompts], groups, verifier("exact")) == [[0.0], [1.0]]


def test_what_cannot_be_judged_is_left_out_and_counted():
    found = row("1 0", "? ?", "1 ?", "0 0")
    # Means 1/2, 1 and 0; the third prompt has one judged sample, too few for pass@2.
    assert found["eval/accuracy"] == pytest.approx(0.5)
    assert found["eval/accuracy_low"] == pytest.approx(wilson(0.5, 3).low)
    assert found["eval/pass@2"] == pytest.approx(0.5)
    assert found["eval/pass@2_high"] == pytest.approx(wilson(0.5, 2).high)
    assert found["eval/unjudged"] == 3


def test_pass_at_k_never_falls_with_k():
    """Whatever is left unjudged: each is of the same prompts, those judged in full."""
    found = row("1 1 1 1", "0 0 0 0", "0 0 0 1", "1 1 ? ?", "1 ? 1 1", "1 1 1 ?")
    assert found["eval/pass@2"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert found["eval/pass@4"] == pytest.approx((1 + 0 + 1) / 3)
    assert found["eval/pass@4_low"] == pytest.approx(wilson(2 / 3, 3).low)
    assert found["eval/unjudged"] == 4


def test_an_answer_that_the_verifier_cannot_read_ends_no_evaluation():
    pytest.importorskip("math_verify")
    answers = ("42", r"\frac{", "???", None, "")
    prompts = tuple(Prompt(i, (1,), "p", answer=answer) for i, answer in enumerate(answers))
    groups = [[sampled(r"\boxed{42}"), sampled("no idea {")] for _ in answers]
    sets = [EvalSet(prompts, 0)]
    for name in ("math", "number"):
        found = evaluation_row(sets, groups, judged(sets, groups, verifier(name)))
        assert found["eval/accuracy"] == 0.5 and found["eval/unjudged"] == 8
    data = {"train": "x", "verifier": "math"}
    config = Config.parse({"algorithm": "sft", "student": {"model": "m"}, "data": data})
    (note,) = held_out_notes(config, sets, verifier("math"))
    assert "4 of 5 prompts cannot be judged with data.verifier=math: 1 have no answer, and" in note


def test_where_nothing_can_be_judged_there_is_no_accuracy():
    found = row("? ?", "? ?")
    assert found == {
        "eval/unjudged": 4.0,
        "eval/mean_completion_tokens": 1.0,
        "eval/truncated_fraction": 0.0,
    }


def test_sets_count_alike_whatever_their_size():
    sets = [held(1, "small"), held(3, "large", first=1)]
    found = row("1", "0", "0", "1", sets=sets)
    assert found["eval/small/accuracy"] == 1.0
    assert found["eval/large/accuracy"] == pytest.approx(1 / 3)
    assert found["eval/accuracy"] == pytest.approx((1 + 1 / 3) / 2)
    both = mean_of([wilson(1.0, 1), wilson(1 / 3, 3)])
    assert found["eval/accuracy_low"] == pytest.approx(both.low)
    assert found["eval/accuracy_high"] == pytest.approx(both.high)
    assert found["eval/large/mean_completion_tokens"] == 1.0
    long = [[sampled("1", 9, "length")], *[[sampled("0")]] * 3]
    found = evaluation_row(sets, long, judged(sets, long, judge))
    assert found["eval/accuracy"] == found["eval/truncated_fraction"] == 0.5
    assert found["eval/mean_completion_tokens"] == 5.0


def test_a_set_that_cannot_be_judged_does_not_count():
    sets = [held(1, "a"), held(1, "b", first=1)]
    found = row("1", "?", sets=sets)
    assert found["eval/accuracy"] == 1.0 and "eval/b/accuracy" not in found
    assert (found["eval/a/unjudged"], found["eval/b/unjudged"], found["eval/unjudged"]) == (0, 1, 1)


def test_a_group_too_few_or_a_score_out_of_range_is_our_mistake():
    with pytest.raises(ValueError, match="zip"):
        row("1", sets=[held(2)])
    with pytest.raises(AssertionError, match="scores lie in"):
        row("1.5")
