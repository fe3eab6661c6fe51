"""What the turns of an episode learn from: rewards of environments, advantages by turn, masks."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxrl import Config
from jaxrl.algorithms import sampled_batch
from jaxrl.algorithms.advantages import group_advantages, turn_advantages
from jaxrl.algorithms.methods import objective_of
from jaxrl.algorithms.sampled_batch import prepare_rewarded
from jaxrl.checkpoint.writer import load_rollout, save_rollout
from jaxrl.data.batch import make_rollout
from jaxrl.rewards.batch_rewards import RewardFunctions, episode_rewards
from jaxrl.telemetry.metrics import Sample, Training
from jaxrl.types import Completion, Prompt, Rollout, Turn

PROMPTS = [Prompt(id=i, tokens=(1, 2), text=f"p{i}") for i in range(2)]
PACKING = {"pad_id": 0, "max_prompt_tokens": 32, "max_new_tokens": 32}
RNG = np.random.default_rng(0)


def episode(*rewards: float | None, failure: str | None = None) -> Completion:
    """Turns of 2, 3, ... tokens with these rewards, and an answer of one token after each but the
    last."""
    turns = []
    for k, reward in enumerate(rewards):
        turns += [Turn("assistant", 2 + k, f"a{k}", reward), Turn("environment", 1, f"e{k}")]
    turns.pop()
    n = sum(turn.tokens for turn in turns)
    values = RNG.normal(size=n).astype(np.float32)
    tokens, words = tuple(range(1, n + 1)), ("stop", "last", tuple(turns), failure)
    return Completion(tokens, values, values, *words, opening=f"<think>{n}")


EPISODES = [
    [episode(0.5, None, 1.0), episode(0.0), episode(None, 0.25)],
    [episode(1.0, 2.0), episode(None), episode(3.0, failure="timeout: late")],
]


def rollout() -> Rollout:
    return make_rollout(PROMPTS, EPISODES, policy_version=3, **PACKING)


def test_what_an_environment_said_does_not_train() -> None:
    batch = rollout()
    for row, completion in enumerate(batch.completions):
        expected = []
        for turn in completion.turns:
            expected += [turn.role == "assistant"] * turn.tokens
        width = batch.sequences.loss_mask.shape[1]
        expected += [False] * (width - len(expected))
        assert batch.sequences.loss_mask[row].tolist() == expected
        assert batch.sequences.mask[row].sum() == 2 + len(completion.tokens)


def test_episodes_are_kept_with_a_checkpoint(tmp_path: Path) -> None:
    save_rollout(tmp_path / "batch.npz", rollout())
    loaded = load_rollout(tmp_path / "batch.npz", PROMPTS, PACKING)
    for a, b in zip(loaded.completions, rollout().completions, strict=True):
        assert (a.tokens, a.turns, a.failure) == (b.tokens, b.turns, b.failure)
        assert a.opening == b.opening
    np.testing.assert_array_equal(loaded.sequences.loss_mask, rollout().sequences.loss_mask)


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_an_episode_is_worth_the_discounted_sum_of_its_turns(discount: float) -> None:
    completions = [completion for group in EPISODES for completion in group]
    found = episode_rewards(completions, discount)
    d = discount
    expected = [0.5 + d * d, 0.0, d * 0.25, 1 + d * 2, 0.0, np.nan]
    np.testing.assert_allclose(found, expected)
    for alone in completions:  # an episode is worth the same whatever else is in its batch
        np.testing.assert_array_equal(
            episode_rewards([alone], discount), found[[c is alone for c in completions]]
        )


def test_a_batch_without_success_has_a_figure() -> None:
    """An environment that rewards success alone: failures are 0, degenerate and not unscored."""
    failures = replace(rollout(), completions=[replace_rewards(c) for c in rollout().completions])
    with closing(
        RewardFunctions(config().rewards, 32, 60.0, environment=config().environment)
    ) as rewards:
        report = rewards.report(failures, rewards.submit(failures))
    assert report.metrics["reward/mean"] == report.metrics["reward/environment/mean"] == 0
    assert report.metrics["reward/none"] == 1  # the environment of one failed
    assert "the environment gave no turn of 6 episodes a reward" in " ".join(report.notes)
    _, metrics = prepare_rewarded(config())(failures, {"reward": [report]})
    assert metrics["policy/unscored_groups"] == 0
    assert metrics["policy/degenerate_groups"] == 2


def replace_rewards(completion: Completion) -> Completion:
    turns = tuple(replace(turn, reward=None) for turn in completion.turns)
    return replace(completion, turns=turns)


def by_turn(config: Config) -> tuple[Rollout, np.ndarray]:
    batch = rollout()
    with closing(
        RewardFunctions(config.rewards, 32, 60.0, environment=config.environment)
    ) as rewards:
        report = rewards.report(batch, rewards.submit(batch))
    trained, _ = prepare_rewarded(config)(batch, {"reward": [report]})
    return batch, np.asarray(trained.advantages)


def config(**environment: object) -> Config:
    return Config.parse(
        {
            "algorithm": "grpo",
            "student": {"model": "builtin:student"},
            "data": {"train": "arithmetic"},
            "environment": {"name": "calculator", **environment},
        }
    )


def test_credit_by_episode_compares_whole_episodes() -> None:
    batch, advantages = by_turn(config())
    found = episode_rewards(batch.completions, 1.0)
    np.testing.assert_allclose(advantages, group_advantages(found, batch.group_ids), rtol=1e-6)
    assert advantages[-1] == 0  # failed


def test_credit_by_turn_is_process_supervision() -> None:
    """Each reward is centred and scaled among all turns of its prompt, and a turn gets what comes
    from it on; an episode without any reward has 0 at its end."""
    batch, advantages = by_turn(config(credit="turn", discount=0.5))
    pool = np.array([0.5, 1.0, 0.0, 0.25])
    a, b, c, d = (pool - pool.mean()) / pool.std(ddof=1)
    expected = [[a + 0.25 * b, 0.5 * b, b], [c], [0.5 * d, d]]
    pool = np.array([1.0, 2.0, 0.0])
    a, b, c = (pool - pool.mean()) / pool.std(ddof=1)
    expected += [[a + 0.5 * b, b], [c], [0]]
    for row, values in enumerate(expected):
        mask = batch.sequences.loss_mask[row]
        lengths = [2 + k for k in range(len(values))]
        np.testing.assert_allclose(advantages[row][mask], np.repeat(values, lengths), rtol=1e-5)
        assert not advantages[row][~mask].any()


@pytest.mark.parametrize("scale", [True, False])
def test_with_one_reward_at_the_end_turns_and_episodes_are_credited_alike(scale: bool) -> None:
    ids = np.array([0, 0, 0, 1, 1, -1])
    last, turns = RNG.normal(size=6), [1, 3, 2, 2, 4, 1]
    given = [[None] * (n - 1) + [reward] for n, reward in zip(turns, last, strict=True)]
    for penalties in ((), RNG.normal(size=6)):
        found = turn_advantages(given, ids, penalties=penalties, scale_by_std=scale)
        total = last + penalties if len(penalties) else last
        whole = group_advantages(total, ids, scale_by_std=scale)
        for advantages, n, expected in zip(found, turns, whole, strict=True):
            np.testing.assert_allclose(advantages, [expected] * n, atol=1e-12)


def test_a_penalty_that_all_episodes_have_changes_no_turn() -> None:
    """So that turns without a reward remain without one; what differs is added at the ends."""
    ids, given = np.array([0, 0, 0]), [[1.0, None], [0.5], [0.0, None, None]]
    plain = turn_advantages(given, ids)
    for same in (0.0, -0.3):
        for found, expected in zip(
            turn_advantages(given, ids, penalties=np.full(3, same)), plain, strict=True
        ):
            np.testing.assert_allclose(found, expected, atol=1e-12)
    penalised = turn_advantages(given, ids, penalties=np.array([0, 0, -0.3]), scale_by_std=False)
    for found, expected in zip(penalised, [[0.6, 0.1], [0.1], [-0.7, -0.2, -0.2]], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_other_rewards_belong_to_the_last_turn() -> None:
    made = config(credit="turn")
    made = made.model_copy(
        update={"reward": made.reward.model_copy(update={"functions": ("regex:last",)})}
    )
    _, with_function = by_turn(made)
    _, without = by_turn(config(credit="turn"))
    assert with_function.shape == without.shape
    assert not np.allclose(with_function, without)


def test_a_sample_shows_the_turns() -> None:
    completion = EPISODES[0][0]
    shown = Sample.of(PROMPTS[0], completion, step=1, split="train", policy_version=0, score=None)
    assert shown.turns is not None and [turn["content"] for turn in shown.turns] == [
        "a0", "e0", "a1", "e1", "a2",
    ]  # fmt: skip
    first = {"role": "assistant", "content": "a0", "reward": 0.5, "tokens": 2, "learned": False}
    assert shown.turns[0] == first
    assert shown.completion.splitlines()[1] == "[environment] e0"
    n = len(completion.tokens)
    training = Training(learned=n, rewards={"f": 1.0, "g": None}, advantage=np.arange(n) / 10)
    roles: dict[str, tuple[str, ...]] = {"assistant": (), "environment": ("tool",)}
    answered = [replace(turn, roles=roles[turn.role]) for turn in completion.turns]
    shown = Sample.of(
        PROMPTS[0],
        replace(completion, turns=tuple(answered)),
        step=1,
        split="train",
        policy_version=0,
        training=training,
        decode=lambda tokens: f"{len(tokens)} tokens",
    )
    assert shown.turns is not None and shown.advantage is None
    starts = np.cumsum([0, *(turn.tokens for turn in completion.turns)])
    for turn, start, of in zip(shown.turns, starts, completion.turns, strict=False):
        assert turn["learned"] == (of.role == "assistant")
        assert turn.get("advantage") == (start / 10 if turn["learned"] else None)
    assert shown.completion.splitlines()[:2] == ["[assistant] 2 tokens", "[tool] e0"]
    assert "(f 1, g -)" in replace(shown, reward=1.0).summary
    assert replace(shown, learned=0).summary.endswith("not learned")
    plain = replace(completion, turns=())
    alone = Sample.of(PROMPTS[0], plain, step=1, split="train", policy_version=0, score=None)
    assert alone.turns is None and alone.completion == "last"


def test_turns_are_credited_where_whole_episodes_are_equal() -> None:
    """Dynamic sampling keeps a prompt whose episodes differ in their turns alone."""
    equal = [[episode(1.0, 0.0), episode(0.0, 1.0)], [episode(1.0), episode(1.0)]]
    batch = make_rollout(PROMPTS, equal, policy_version=0, **PACKING)
    made = config(credit="turn")
    policy = made.policy.model_copy(update={"dynamic_sampling": "drop"})
    made = made.model_copy(update={"policy": policy})
    with closing(RewardFunctions(made.rewards, 32, 60.0, environment=made.environment)) as rewards:
        report = rewards.report(batch, rewards.submit(batch))
    trained, _ = prepare_rewarded(made)(batch, {"reward": [report]})
    assert trained.in_policy.tolist() == [True, True, False, False]


PENALTIES = ({"reward": {"overlong_buffer": 20}}, {"policy": {"reward_kl_coef": 1e-3}},
             {"reward": {"overlong_buffer": 30, "overlong_penalty": 5.0},
              "policy": {"reward_kl_coef": 10.0}})  # fmt: skip


def random_episodes(rng: np.random.Generator, most: int) -> list[list[Completion]]:
    """Twelve groups of three episodes, of up to `most` turns. In about half of them all rewards are
    the same, or there are none."""
    groups = []
    for number in range(12):
        values = rng.choice([0.0, 1.0, 0.5, None], size=(3, most))
        if number % 2:
            values[:] = np.where(values == None, None, rng.choice([0.0, 1.0]))  # noqa: E711
        if number == 5:
            values[:] = None
        group = []
        for row in values:
            failure = "timeout: late" if rng.random() < 0.1 else None
            group.append(episode(*row[: rng.integers(1, most + 1)], failure=failure))
        groups.append(group)
    return groups


def selections(
    episodes: list[list[Completion]], credit: str, *, discount: float = 1.0, **penalties: dict
) -> tuple[np.ndarray, set[int], np.ndarray, dict[str, float]]:
    """Returns the rows that drop trains on, the groups that refill keeps, the advantages [B, C] or
    [B], and the metrics."""
    prompts = [Prompt(id=i, tokens=(1, 2), text="p") for i in range(len(episodes))]
    batch = make_rollout(prompts, episodes, policy_version=0, **PACKING)
    made = Config.parse(
        {
            "algorithm": "grpo",
            "student": {"model": "builtin:student"},
            "data": {"train": "arithmetic"},
            "environment": {"name": "calculator", "credit": credit, "discount": discount},
            "reward": {"overlong_buffer": 0} | penalties.get("reward", {}),
            "policy": {"dynamic_sampling": "drop"} | penalties.get("policy", {}),
            "max_new_tokens": 32,
        }
    )
    with closing(RewardFunctions(made.rewards, 32, 60.0, environment=made.environment)) as rewards:
        report = rewards.report(batch, rewards.submit(batch))
    noise = np.random.default_rng(1).normal(0, 0.05, batch.logprobs.shape).astype(np.float32)
    scores = {"reward": [report], "reference": [batch.logprobs + noise]}
    trained, metrics = prepare_rewarded(made)(batch, scores)
    kept, _ = sampled_batch._groups(made, batch, report)
    groups = {int(batch.group_ids[group.rows[0]]) for group in kept}
    return np.asarray(trained.in_policy), groups, np.asarray(trained.advantages), metrics


@pytest.mark.parametrize("credit", ["episode", "turn"])
@pytest.mark.parametrize("seed", range(4))
def test_drop_and_refill_keep_the_groups_that_have_an_advantage_without_penalties(
    credit: str, seed: int
) -> None:
    episodes, d = random_episodes(np.random.default_rng(seed), 4), [1.0, 0.5][seed % 2]
    keep, refilled, advantages, metrics = selections(episodes, credit, discount=d)
    taught = (advantages.reshape(len(keep), -1) != 0).any(-1).reshape(-1, 3).any(-1)
    assert 0 < taught.sum() < len(taught)
    np.testing.assert_array_equal(keep, np.repeat(taught, 3))
    assert refilled == set(np.flatnonzero(taught).tolist())
    useless = metrics["policy/degenerate_groups"] + metrics["policy/unscored_groups"]
    assert useless == len(taught) - taught.sum()
    nobody = {"reward": {"overlong_buffer": 1}}
    assert np.array_equal(selections(episodes, credit, discount=d, **nobody)[2], advantages)
    for penalty in PENALTIES:
        again, as_well, changed, same = selections(episodes, credit, discount=d, **penalty)
        assert not np.allclose(changed, advantages)
        np.testing.assert_array_equal(again, keep)
        assert as_well == refilled
        for name in ("policy/degenerate_groups", "policy/unscored_groups"):
            assert same[name] == metrics[name]


@pytest.mark.parametrize("penalty", [{}, *PENALTIES])
def test_one_turn_is_credited_as_its_episode(penalty: dict) -> None:
    episodes = random_episodes(np.random.default_rng(7), 1)
    keep, refilled, by_episode, _ = selections(episodes, "episode", **penalty)
    kept, again, by_turn, _ = selections(episodes, "turn", **penalty)
    np.testing.assert_array_equal(kept, keep)
    assert again == refilled
    for row, completion in enumerate(one for group in episodes for one in group):
        n = len(completion.tokens)
        np.testing.assert_allclose(by_turn[row, :n], np.full(n, by_episode[row]), atol=1e-6)


def test_a_function_of_weight_0_changes_no_turn() -> None:
    """It is reported only."""
    made = config(credit="turn")
    functions = {"functions": ("regex:last", "regex:never"), "weights": (0.0, 0.0)}
    logged = made.model_copy(update={"reward": made.reward.model_copy(update=functions)})
    np.testing.assert_array_equal(by_turn(logged)[1], by_turn(made)[1])


def test_whole_ratios_have_no_credit_of_turns() -> None:
    refused = config(credit="turn").model_copy(update={"algorithm": "gspo"})
    with pytest.raises(ValueError, match="environment.credit=turn weighs single turns"):
        objective_of(refused)
    assert objective_of(config(credit="turn")).ratio == "token"


def test_batches_of_older_checkpoints_are_read(tmp_path: Path) -> None:
    """They say nothing of turns."""
    plain = [[replace(one, turns=(), failure=None) for one in group] for group in EPISODES]
    saved = make_rollout(PROMPTS, plain, policy_version=0, **PACKING)
    save_rollout(tmp_path / "new.npz", saved)
    with np.load(tmp_path / "new.npz") as file:
        arrays = dict(file)
    words = json.loads(arrays["words"].tobytes())
    for name in ("turns", "failures", "prompts"):
        del words[name]
    arrays["words"] = np.frombuffer(json.dumps(words).encode(), np.uint8)
    np.savez(tmp_path / "old.npz", **arrays)
    loaded = load_rollout(tmp_path / "old.npz", PROMPTS, PACKING)
    assert [c.tokens for c in loaded.completions] == [c.tokens for c in saved.completions]
