"""The rewards of a rollout, by hand: sums, what is missing, what is told, what is refused."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from jaxrl.algorithms.advantages import group_advantages, select_groups
from jaxrl.config.roles import RewardConfig
from jaxrl.config.settings import EnvironmentConfig
from jaxrl.errors import RunError, UserError
from jaxrl.rewards.batch_rewards import RewardFunctions, RewardReport, names_of
from jaxrl.rewards.functions import find
from jaxrl.types import Completion, Prompt, Rollout, Sequences

HERE = Path(__file__).parent.parent / "support" / "reward_functions.py"
CONFIGS = Path(__file__).parents[2] / "configs"
FUNCTIONS = ("number", f"{HERE}:length", f"{HERE}:parts", f"{HERE}:trouble")


def rollout(*rows: tuple[int, str, int, dict[str, Any]], padding: int = 1) -> Rollout:
    """Rows of (group, text, tokens, columns); the answer of every prompt is 5."""
    prompts = tuple(Prompt(group, (1,), "p", None, "5", columns) for group, _, _, columns in rows)
    completions = tuple(
        Completion((1,) * n, np.zeros(n), np.zeros(n), "length" if n == 8 else "stop", text)
        for _, text, n, _ in rows
    )
    b = len(rows) + padding
    ids = np.array([row[0] for row in rows] + [-1] * padding, np.int32)
    flags, zeros = np.zeros((b, 8), bool), np.zeros((b, 8), np.float32)
    sequences = Sequences(np.zeros((b, 9), np.int32), np.zeros((b, 9), bool), flags)
    return Rollout(sequences, prompts, completions, ids, zeros, zeros, policy_version=0)


def config(**keys: Any) -> RewardConfig:
    return RewardConfig(**{"functions": FUNCTIONS, "timeout": 5.0, "workers": 1} | keys)


@pytest.fixture(scope="module")
def functions() -> Iterator[RewardFunctions]:
    """Two that count, one that is only told, and one in trouble that is only told."""
    made = config(weights=(1.0, 0.1, 2.0, 0.0))
    with closing(RewardFunctions(made, max_new_tokens=8, startup=60)) as functions:
        yield functions


def test_the_reward_of_the_quickstart_is_more_the_nearer_the_result() -> None:
    module = runpy.run_path(str(CONFIGS / "rewards" / "nearness.py"))
    texts = ["4", "so 2+2=4", "6", "-4", "so 4", ""]
    assert module["nearness"](texts, ["4"] * 6) == [1, 1, 1 / 3, 1 / 9, 0, 0]


def test_verifiers_know_that_prompts_end_in_thoughts() -> None:
    made = config(functions=("number",))
    batch = rollout((0, "so 5", 2, {}), (0, "so</think>5", 2, {}), (1, "so 5", 2, {}))
    thinks = [replace(one, opening="<think>\n") for one in batch.completions[:2]]
    batch = replace(batch, completions=(*thinks, batch.completions[2]))
    with closing(RewardFunctions(made, max_new_tokens=8, startup=60)) as functions:
        report = scored(functions, batch)
    np.testing.assert_array_equal(report.per_reward["number"], [0, 1, 1, NAN])


def scored(functions: RewardFunctions, batch: Rollout, *model_scores: Any) -> RewardReport:
    return functions.report(batch, functions.submit(batch), *model_scores)


NAN = float("nan")


def test_the_sum_and_what_is_told_by_hand(functions: RewardFunctions) -> None:
    batch = rollout(
        (0, "5", 1, {"parts": ["5", "x"]}),
        (0, "4x", 2, {"parts": ["5", "x"]}),
        (1, "raise", 5, {"parts": None}),
        (1, "55555", 5, {"parts": None}),
    )
    report = scored(functions, batch)
    told = report.per_reward
    np.testing.assert_array_equal(told["number"], [1, 0, 0, 0, NAN])
    np.testing.assert_array_equal(told["length"], [1, 2, 5, 5, NAN])
    np.testing.assert_array_equal(told["parts"], [0.5, 0.5, NAN, NAN, NAN])
    np.testing.assert_array_equal(told["trouble"], [1, 2, NAN, 5, NAN])
    # 1 number + 0.1 length + 2 parts; parts does not apply to group 1, trouble has weight 0.
    np.testing.assert_allclose(report.rewards, [2.1, 1.2, 0.5, 0.5, NAN])
    metrics = dict(report.metrics)
    assert 0 < metrics.pop("time/reward_s") < 30
    assert metrics == {
        "reward/mean": pytest.approx(4.3 / 4),
        "reward/std": pytest.approx(np.std([2.1, 1.2, 0.5, 0.5])),
        "reward/none": 0,
        "reward/number/mean": 0.25,
        "reward/length/mean": 3.25,
        "reward/parts/mean": 0.5,
        "reward/trouble/mean": pytest.approx(8 / 3),
        **{f"reward/{name}/timeouts": 0 for name in functions.names},
        **{f"reward/{name}/failures": float(name == "trouble") for name in functions.names},
        **{f"reward/{name}/unjudged": 2.0 * (name == "parts") for name in functions.names},
        **{f"reward/{name}/missing": 0 for name in ("number", "length")},
        **{"reward/parts/missing": 0.5, "reward/trouble/missing": 0.25},
    }
    none, failed = report.notes
    assert "parts returned None for 2 of 4 completions (50%): the sum of their other" in none
    assert "trouble failed on 1 of 4" in failed and "KeyError" in failed
    (again,) = scored(functions, batch).notes  # the console has said it
    assert "trouble failed" in again


def test_none_of_one_function_leaves_the_others_or_drops_the_completion() -> None:
    """`parts` judges one completion of group 0 and none of group 1; of group 2 nothing judges
    the second."""
    judged: list[list[str] | None] = [["5"], None, None, None, ["x"], None]
    batch = rollout(*[(row // 2, "5", 1, {"parts": each}) for row, each in enumerate(judged)])
    blind = replace(batch.prompts[5], answer=None)
    batch = replace(batch, prompts=(*batch.prompts[:5], blind))
    for missing, expected in (("ignore", [2, 1, 1, 1, 1]), ("drop", [2, NAN, 1, 1, 1])):
        made = config(functions=("number", f"{HERE}:parts"), missing=missing)
        with closing(RewardFunctions(made, max_new_tokens=8, startup=60)) as functions:
            report = scored(functions, batch)
        np.testing.assert_array_equal(report.rewards, [*expected, NAN, NAN])
        assert report.metrics["reward/none"] == 1 + (missing == "drop")
        many, _, lost = report.notes
        assert "number returned None for 1 of 6" in many and f"reward.missing={missing}" in many
        assert f"{1 + (missing == 'drop')} of 6 completions have no reward" in lost


def test_what_fails_is_not_zero() -> None:
    batch = rollout((0, "raise", 5, {}), (0, "ccc", 3, {}), (1, "a", 1, {}), (1, "a", 1, {}))
    made = config(functions=("number", f"{HERE}:trouble"))
    with closing(RewardFunctions(made, max_new_tokens=8, startup=60)) as functions:
        report = scored(functions, batch)
        np.testing.assert_array_equal(report.rewards, [NAN, 3, 1, 1, NAN])
        assert report.metrics["reward/none"] == 1
        worse = rollout(*[(0, "raise", 5, {})] * 3, (0, "a", 1, {}))
        with pytest.raises(RunError, match="trouble failed on 3 of 4 completions"):
            scored(functions, worse)
        part = functions.submit(worse, of=8)  # of a batch of which no more than half failed
        assert np.isnan(functions.report(worse, part).rewards[:3]).all()


def test_the_reward_model_and_the_length_by_hand() -> None:
    """max_new_tokens 8, buffer 4, penalty 2: 0 up to 4 tokens, -1 at 6, -2 at 8."""
    batch = rollout((0, "5", 4, {}), (0, "5", 6, {}), (0, "4", 8, {}), padding=2)
    made = config(functions="number", overlong_buffer=4, overlong_penalty=2.0, model_weight=0.5)
    with closing(RewardFunctions(made, max_new_tokens=8, startup=60)) as functions:
        report = scored(functions, batch, np.array([2, 4, 6, 0, 0], np.float32))
        np.testing.assert_allclose(report.rewards, [2, 2, 1, NAN, NAN])
        assert report.metrics["reward/overlong/mean"] == pytest.approx(-0.5)
        assert report.metrics["reward/model/mean"] == 4
        unscored = scored(functions, batch, np.array([2, NAN, 6, 0, 0]))
        np.testing.assert_allclose(unscored.rewards, [2, NAN, 1, NAN, NAN])


def test_a_penalty_counts_only_beside_a_real_reward() -> None:
    """Nothing can judge group 0, which differs in length alone; in group 1 one function does not
    apply, and in group 2 it fails on every completion."""
    batch = rollout(
        *[(0, "x", n, {"parts": None}) for n in (4, 8)],
        *[(1, "5", n, {"parts": None}) for n in (4, 8)],
        *[(2, "raise", n, {"parts": None}) for n in (4, 8)],
    )
    prompts = tuple(
        replace(p, answer=None if row < 2 else "5") for row, p in enumerate(batch.prompts)
    )
    batch = replace(batch, prompts=prompts)
    names = ("number", f"{HERE}:parts", f"{HERE}:sometimes")
    made = config(functions=names, overlong_buffer=4, overlong_penalty=0.5)
    with closing(RewardFunctions(made, max_new_tokens=8, startup=60)) as functions:
        report = scored(functions, batch)
    np.testing.assert_array_equal(report.task, [NAN, NAN, 1, 1, NAN, NAN, NAN])
    np.testing.assert_array_equal(report.rewards, [NAN, NAN, 1, 0.5, NAN, NAN, NAN])
    assert report.metrics["reward/none"] == 4
    assert report.metrics["reward/sometimes/failures"] == 2
    assert report.metrics["reward/overlong/mean"] == -0.5
    advantages = group_advantages(report.task, batch.group_ids)
    selection = select_groups(report.task, advantages, batch.group_ids)
    assert selection.dropped == {"unscored_groups": 2, "degenerate_groups": 1}
    assert not group_advantages(report.rewards, batch.group_ids)[[0, 1, 4, 5, 6]].any()


def test_without_functions_the_model_alone_rewards() -> None:
    with closing(
        RewardFunctions(RewardConfig(model="m"), max_new_tokens=8, startup=1)
    ) as functions:
        functions.check([])
        assert functions.pool.facts() == ()
        report = scored(functions, rollout((0, "a", 1, {})), np.array([3.0, 0.0]))
    np.testing.assert_array_equal(report.rewards, [3, NAN])


def test_a_batch_without_any_reward_is_told() -> None:
    prompts = (Prompt(0, (1,), "p", None, None, {"parts": None}),) * 2
    batch = rollout(*[(0, "x", 1, {"parts": None})] * 2)
    made = config(functions=("number", f"{HERE}:parts"))
    with closing(RewardFunctions(made, max_new_tokens=8, startup=60)) as alone:
        blind = Rollout(**{**vars(batch), "prompts": prompts})
        report = scored(alone, blind)
    assert report.metrics["reward/none"] == 2 and "reward/mean" not in report.metrics
    assert "none of the 2 completions has a reward" in report.notes[0]
    assert "number: 2, parts: 2" in report.notes[0]


def test_what_the_data_lacks_is_told_before_anything_runs(functions: RewardFunctions) -> None:
    def prompt(answer: str | None, **columns: Any) -> Prompt:
        return Prompt(0, (1,), "p", None, answer, columns)

    assert functions.check([prompt("5", parts=None)]) == []
    with pytest.raises(
        UserError, match="a column `parts`, which .* gets from the run: rename the column"
    ):
        functions.check([prompt("5", parts=None)], hidden={"parts"})
    with pytest.raises(UserError, match="parts asks for the column `parts` .did you mean part"):
        functions.check([prompt("5", part=["5"])])
    with pytest.raises(UserError, match="column `n_tokens`.*rename"):
        functions.check([prompt("5", parts=None, n_tokens=3)])
    with pytest.raises(UserError, match="number cannot judge 2 of the 2 prompts.* no answer"):
        functions.check([prompt(None, parts=None)] * 2)
    with pytest.raises(
        UserError, match="judge 1 of the 1 prompts.* it cannot read answers such as 'five'"
    ):
        functions.check([prompt("five", parts=None)])


def test_a_column_that_a_function_gets_from_the_run_too_is_refused() -> None:
    """Only where it does: `turns` are of episodes, and who names no column reads none."""
    prompts = [Prompt(0, (1,), "p", None, "5", {"turns": 3, "n_tokens": 7})]

    def check(name: str, *rest: Any) -> list[str]:
        text = name if name == "number" else f"{HERE}:{name}"
        made = config(functions=(text,))
        with closing(RewardFunctions(made, 8, 60, None, *rest)) as functions:
            return functions.check(prompts)

    assert not check("number")
    with pytest.raises(UserError, match="a column `n_tokens`, which .*:length gets from the run"):
        check("length")
    del prompts[0].columns["n_tokens"]  # type: ignore[attr-defined]
    assert not check("length")[1:]
    with pytest.raises(UserError, match="a column `turns`"):
        check("length", EnvironmentConfig(name="calls"))


def test_functions_that_get_messages_are_named_and_get_them() -> None:
    """Those that ask for texts, and what comes with jaxrl, are not."""
    names = ("number", "regex:5", *(f"{HERE}:{name}" for name in ("as_of_trl", "of_texts")))
    batch = rollout(*[(0, "5", 1, {"messages": [{"role": "user", "content": "p"}]})] * 2)
    chats = tuple(replace(prompt, conversational=True) for prompt in batch.prompts)
    with closing(RewardFunctions(config(functions=names), 8, 60.0)) as functions:
        (note,) = functions.check(chats)
        assert f": {HERE}:as_of_trl: `prompts` and `completions` are lists of messages" in note
        assert functions.check(batch.prompts) == []  # a text that a template makes a message
        (note,) = functions.check(batch.prompts, begun=True)
        assert "where the environment's prompts are messages" in note
        report = scored(functions, replace(batch, prompts=chats))
    values = {name: list(row[:2]) for name, row in report.per_reward.items()}
    assert values == {
        **dict.fromkeys(("number", "regex", "of_texts"), [1, 1]),
        "as_of_trl": [101, 101],
    }


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"weights": (1.0,)}, "weights has 1 numbers for the 4 functions"),
        ({"weights": (0.0,) * 4}, "every weight is 0"),
        ({"functions": (), "model": "m", "model_weight": 0.0}, "every weight is 0"),
        ({"weights": (1.0, float("inf"), 1.0, 1.0)}, "finite"),
        ({"timeout": 0.0}, "greater than 0"),
        ({"max_failures": 1.5}, "less than or equal to 1"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        config(**keys)


def test_names() -> None:
    found = [find(text) for text in ("regex:a", "format", "regex:b:c", f"{HERE}:length")]
    assert names_of(found) == ("regex", "format", "regex_2", "length")
    assert found[2].place == "b:c"
    for name in ("model", "environment", "overlong", "kl"):  # the run's own
        with pytest.raises(UserError, match=f"two rewards would be called '{name}'"):
            names_of([find(f"some.module:{name}")])
