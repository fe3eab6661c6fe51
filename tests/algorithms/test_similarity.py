"""Similarity groups: clusters as scikit-learn's and by hand, advantages by hand and by law."""

from pathlib import Path

import numpy as np
import pytest

from jaxrl.algorithms.advantages import group_advantages
from jaxrl.algorithms.similarity import (
    METHODS,
    SHAPES,
    canonical_order,
    cluster,
    silhouette,
    similarities,
    similarity_advantages,
)
from jaxrl.config.roles import GrouperConfig
from jaxrl.config.schema import Config
from jaxrl.errors import RunError, UserError
from jaxrl.rewards.verifiers import after_thoughts

REFERENCES = np.load(Path(__file__).parent.parent / "references" / "similarity.npz")
CASES = sorted({int(name.split("/")[0]) for name in REFERENCES})
USES = ["subgroup", "blend", "size_weight", "distinct", "smi", "mmr"]
A, B, C = np.eye(3)


def angles(*degrees):
    """Unit vectors in a plane."""
    radians = np.radians(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], -1)


def same_partition(a, b):
    return np.array_equal(np.equal.outer(a, a), np.equal.outer(b, b))


def batch(seed=0, prompts=4, samples=6):
    """Rewards in [0, 1], clustered embeddings and ids of whole prompts, rows shuffled."""
    rng = np.random.default_rng(seed)
    n = prompts * samples
    e = rng.normal(0, 1, (3, 8))[rng.integers(0, 3, n)] + rng.normal(0, 0.4, (n, 8))
    e /= np.linalg.norm(e, axis=1, keepdims=True)
    ids = rng.permutation(np.repeat(np.arange(prompts) * 11 + 2, samples))
    return rng.random(n), np.float32(e), ids


@pytest.mark.parametrize("seed", CASES)
def test_clusters_are_scikit_learn_s(seed):
    embeddings = REFERENCES[f"{seed}/embeddings"]
    labels = cluster(embeddings)
    assert same_partition(labels, REFERENCES[f"{seed}/labels"])
    assert labels[0] == 0 and set(labels) == set(range(labels.max() + 1))
    if labels.max() > 0:
        score = silhouette(1 - similarities(embeddings), labels)
        np.testing.assert_allclose(score, REFERENCES[f"{seed}/score"], atol=1e-6)


def test_silhouette_by_hand():
    """Distances 1 within {0, 1}, 4 and 2 to the singleton: (4-1)/4, (2-1)/2, 0."""
    distance = np.array([[0, 1, 4], [1, 0, 2], [4, 2, 0]], float)
    np.testing.assert_allclose(silhouette(distance, np.array([0, 0, 1])), (0.75 + 0.5) / 3)


def test_two_pairs_are_two_clusters_and_few_or_equal_samples_one():
    np.testing.assert_array_equal(cluster(angles(0, 80, 1, 81)), [0, 1, 0, 1])
    np.testing.assert_array_equal(cluster(angles(0, 90)), [0, 0])
    np.testing.assert_array_equal(cluster(angles(0)), [0])
    np.testing.assert_array_equal(cluster(np.zeros((0, 2))), [])
    jitter = np.float32(angles(*np.linspace(0, 0.01, 6)))
    np.testing.assert_array_equal(cluster(jitter), np.zeros(6))


def test_a_weak_split_is_one_cluster():
    """Five mutually orthogonal vectors: every silhouette is 0, below 0.1 but not below 0."""
    np.testing.assert_array_equal(cluster(np.eye(5)), np.zeros(5))
    assert cluster(np.eye(5), min_silhouette=0.0).max() == 1  # ties go to fewer clusters


def test_at_most_so_many_clusters():
    """Nine tight pairs, far apart."""
    e = np.repeat(np.eye(9), 2, 0)
    assert cluster(e).max() + 1 == 7
    assert cluster(e, max_clusters=20).max() + 1 == 9
    assert cluster(e, max_clusters=3).max() + 1 == 3


def test_average_linkage_by_hand():
    """1-2 merge, then 4-5; 3 is nearer to {1, 2} by its mean distance, though 4 is its nearest."""
    e = angles(0, 10, 33, 55, 75)
    np.testing.assert_array_equal(cluster(e, max_clusters=2, min_silhouette=-1), [0, 0, 0, 1, 1])


def test_a_chain_is_one_component_and_several_leaders():
    """cos 10 degrees is 0.985, cos 20 is 0.940: neighbours join, ends do not."""
    e = angles(0, 10, 20, 30)
    np.testing.assert_array_equal(cluster(e, method="connected_components"), [0, 0, 0, 0])
    np.testing.assert_array_equal(cluster(e, method="connected_components", tau=0.99), [0, 1, 2, 3])
    s = similarities(e)
    np.testing.assert_array_equal(METHODS["leader"](s), [0, 0, 2, 2])
    np.testing.assert_array_equal(METHODS["leader"](s[::-1, ::-1]), [0, 0, 2, 2])
    by_text = cluster(e, method="leader", texts=["a", "b", "c", "d"])
    assert by_text.max() == 1  # 10 or 20 leads its neighbours, whatever hash comes first
    shuffled = cluster(e[[3, 1, 0, 2]], method="leader", texts=["d", "b", "a", "c"])
    assert same_partition(shuffled, by_text[[3, 1, 0, 2]])


@pytest.mark.parametrize("method", METHODS)
def test_clusters_do_not_depend_on_the_order_or_the_length_of_embeddings(method):
    rng = np.random.default_rng(1)
    for seed in range(5):
        _, e, _ = batch(seed, prompts=1, samples=9)
        order = rng.permutation(9)
        labels = cluster(e, method=method, texts=list("abcdefghi"))
        moved = cluster(e[order], method=method, texts=[list("abcdefghi")[i] for i in order])
        assert same_partition(moved, labels[order])
        assert same_partition(cluster(e[order], method=method), cluster(e, method=method)[order])
        scaled = e * rng.uniform(0.5, 2, (9, 1)).astype(np.float32)
        assert same_partition(cluster(scaled, method=method, texts=list("abcdefghi")), labels)


def test_what_is_embedded():
    assert after_thoughts(" 42 \n") == "42"
    assert after_thoughts("<think>a</think> b") == "b"
    assert after_thoughts("a</think>b</think>\n c ") == "c"
    assert after_thoughts("<think>\n" + "a</think> b") == "b"
    assert after_thoughts("a</think>") == ""
    assert after_thoughts("<think>never done") is None
    assert after_thoughts("<think>\n" + "never done") is None
    assert after_thoughts("<think>a</think>b <think>again") is None


def test_every_use_by_hand():
    """One prompt: three samples say A, two say B. Rewards 1, 0, 0 and 1, 0."""
    e, rewards, ids = np.stack([A, B, A, B, A]), np.array([1.0, 1, 0, 0, 0]), np.full(5, 4)
    std = {"A": np.sqrt(1 / 3), "B": np.sqrt(1 / 2), "all": np.sqrt(0.3)}
    inside = np.array([2 / 3, 1 / 2, -1 / 3, -1 / 2, -1 / 3])
    cluster_std = np.array([std["A"], std["B"]] * 2 + [std["A"]])
    grpo = np.array([0.6, 0.6, -0.4, -0.4, -0.4]) / std["all"]
    size = np.array([3, 2, 3, 2, 3])

    def of(**options):
        found = similarity_advantages(rewards, e, ids, options=GrouperConfig(**options))
        np.testing.assert_array_equal(np.equal.outer(found.labels, found.labels), e @ e.T)
        return found.advantages

    def regrouped(shaped):
        return group_advantages(shaped, ids)

    np.testing.assert_allclose(of(), inside / cluster_std)
    np.testing.assert_allclose(of(std_scope="prompt"), inside / std["all"])
    np.testing.assert_allclose(of(std_scope="none"), inside)
    np.testing.assert_allclose(
        of(use="blend", alpha=0.25), 0.25 * inside / cluster_std + 0.75 * grpo
    )
    np.testing.assert_allclose(of(use="size_weight", alpha=2.0), grpo / size**2)
    # (G - |c|) / (G - 1): 2/4 for A, 3/4 for B.
    np.testing.assert_allclose(of(use="distinct"), regrouped([0.5, 0.75, 0, 0, 0]))
    np.testing.assert_allclose(of(use="smi"), regrouped([1 / 3, 1 / 2, 0, 0, 0]))
    # Picked: an A and a B at 0.7 (nothing like them before), the others at 0 - 0.3.
    np.testing.assert_allclose(of(use="mmr"), regrouped([0.7, 0.7, -0.3, -0.3, -0.3]))


def test_mmr_by_hand_with_partial_similarity():
    """Rewards 1, 0.9, 0.2 at 0, 20, 90 degrees; lambda 1/2: 0.5, then 0.1 (new), then the near."""
    e = angles(0, 20, 90)
    found = similarity_advantages(
        [1, 0.9, 0.2], e, np.zeros(3, int), options=GrouperConfig(use="mmr", mmr_lambda=0.5)
    )
    scores = [0.5, 0.45 - np.cos(np.radians(20)) / 2, 0.1]
    np.testing.assert_allclose(found.advantages, group_advantages(scores, np.zeros(3, int)))


def test_factors_stop_at_a_tenth():
    """All in one cluster: distinct gives 0.1 R. Opposite pairs: sums of 0 count as 0.1."""
    ids, rewards = np.zeros(4, int), np.array([1.0, 2, 3, 4])
    for use, e in (("distinct", np.stack([A] * 4)), ("smi", np.stack([A, -A, B, -B]))):
        found = similarity_advantages(rewards, e, ids, options=GrouperConfig(use=use))
        factor = 0.1 if use == "distinct" else 10
        np.testing.assert_allclose(found.advantages, group_advantages(rewards * factor, ids))


@pytest.mark.parametrize("use", ["subgroup", "blend", "distinct", "smi", "mmr"])
@pytest.mark.parametrize("std_scope", ["cluster", "prompt", "none"])
def test_one_cluster_is_grpo(use, std_scope):
    """Up to the scale that distinct and smi give to all rewards alike; mmr's at lambda 1."""
    rewards, _, ids = batch()
    same = np.tile(A, (len(ids), 1))
    options = GrouperConfig(use=use, std_scope=std_scope, mmr_lambda=1.0)
    found = similarity_advantages(rewards, same, ids, options=options)
    scale = {"distinct": 0.1, "smi": 1 / 6}.get(use, 1.0)
    expected = group_advantages(rewards * scale, ids, scale_by_std=std_scope != "none")
    np.testing.assert_allclose(found.advantages, expected, atol=1e-12)
    assert found.metrics["groups_per_prompt"] == (4, 4)


@pytest.mark.parametrize(
    ("use", "share"),
    [("subgroup", 0), ("blend", 0.7), ("size_weight", 1), ("distinct", 1), ("smi", 1), ("mmr", 1)],
)
def test_all_singletons(use, share):
    """Subgroup: nothing to compare with. Blend: 1 - alpha of GRPO. The others: GRPO."""
    rewards, _, ids = batch()
    apart = np.zeros((len(ids), 6))
    for prompt in np.unique(ids):
        apart[ids == prompt] = np.eye(6)
    options = GrouperConfig(method="leader", use=use, alpha=0.3)
    found = similarity_advantages(rewards, apart, ids, options=options)
    np.testing.assert_allclose(
        found.advantages, share * group_advantages(rewards, ids), rtol=1e-4, atol=1e-12
    )
    assert found.metrics["singleton_fraction"] == (len(ids), len(ids))


def test_a_cluster_sums_to_zero_and_no_label_crosses_prompts():
    rewards, e, ids = batch()
    for std_scope in ("cluster", "prompt", "none"):
        found = similarity_advantages(rewards, e, ids, options=GrouperConfig(std_scope=std_scope))
        for label in np.unique(found.labels):
            rows = found.labels == label
            assert len(set(ids[rows])) == 1
            np.testing.assert_allclose(found.advantages[rows].sum(), 0, atol=1e-9)
    assert len(np.unique(found.labels)) > 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use", USES)
def test_neither_the_order_nor_the_rest_of_the_batch_matters(use, method):
    rewards, e, ids = batch()
    options = GrouperConfig(use=use, method=method, tau=0.8)
    texts = [f"answer {i}" for i in range(len(ids))]
    found = similarity_advantages(rewards, e, ids, options=options, texts=texts)
    assert found.advantages.any()
    order = np.random.default_rng(3).permutation(len(ids))
    moved = similarity_advantages(
        rewards[order], e[order], ids[order], options=options, texts=[texts[i] for i in order]
    )
    np.testing.assert_allclose(moved.advantages, found.advantages[order], atol=1e-12)
    assert same_partition(moved.labels, found.labels[order])
    for prompt in np.unique(ids):
        rows = np.flatnonzero(ids == prompt)
        alone = similarity_advantages(
            rewards[rows], e[rows], ids[rows], options=options, texts=[texts[i] for i in rows]
        )
        np.testing.assert_allclose(alone.advantages, found.advantages[rows], atol=1e-12)


@pytest.mark.parametrize("use", USES)
def test_padding_and_missing_rewards_are_in_no_cluster(use):
    """As if the rows were not there, whatever their embeddings hold."""
    rewards, e, ids = batch()
    gone = np.zeros(len(ids), bool)
    gone[[0, 5, 11]] = True
    left = similarity_advantages(
        rewards[~gone], e[~gone], ids[~gone], options=GrouperConfig(use=use)
    )
    bad = np.where(gone[:, None], np.nan, e)
    given = [
        None if g and i else float(r) for i, (g, r) in enumerate(zip(gone, rewards, strict=True))
    ]
    ids = ids.copy()
    ids[0] = -1
    found = similarity_advantages(given, bad, ids, options=GrouperConfig(use=use))
    np.testing.assert_allclose(found.advantages[~gone], left.advantages)
    assert not found.advantages[gone].any() and (found.labels[gone] == -1).all()
    assert same_partition(found.labels[~gone], left.labels) and found.metrics == left.metrics


def test_an_unfinished_thought_is_a_cluster_of_its_own():
    """Its embedding is not read, and two of them are not alike."""
    e = np.stack([A, A, A * np.nan, A * np.nan, A])
    rewards, ids = np.array([1.0, 0, 1, 0, 0]), np.zeros(5, int)
    texts = ["a", "a", None, None, "a"]
    found = similarity_advantages(rewards, e, ids, texts=texts)
    assert same_partition(found.labels, np.array([0, 0, 1, 2, 0]))
    np.testing.assert_allclose(
        found.advantages[[0, 1, 4]], group_advantages([1, 0, 0], np.zeros(3, int))
    )
    assert not found.advantages[[2, 3]].any()
    assert found.metrics["unfinished_thoughts"] == (2, 5)
    only = similarity_advantages([1.0, 0.0], e[2:4], np.zeros(2, int), texts=[None, None])
    assert not only.advantages.any() and len(set(only.labels)) == 2


def test_metrics_by_hand():
    """Prompt 0: A, A, B, B (silhouette 1). Prompt 1: one sample. Prompt 2: A, A, A."""
    e = np.stack([A, A, B, B, C, A, A, A])
    found = similarity_advantages(np.arange(8.0), e, np.array([0, 0, 0, 0, 1, 2, 2, 2]))
    assert found.metrics == {
        "groups_per_prompt": (4, 3),
        "singleton_fraction": (1, 8),
        "silhouette": (1, 1),
        "unfinished_thoughts": (0, 8),
        "split_into_1": (2, 3),
        "split_into_2": (1, 3),
    }


def test_bad_input_is_refused():
    rewards, e, ids = batch()
    for use in ("distinct", "smi"):
        with pytest.raises(UserError, match=f"use={use} multiplies rewards"):
            similarity_advantages(rewards - 1, e, ids, options=GrouperConfig(use=use))
    similarity_advantages(rewards - 1, e, ids, options=GrouperConfig(use="mmr"))
    broken = e.copy()
    broken[3] = np.nan
    with pytest.raises(RunError, match="NaN or infinity"):
        similarity_advantages(rewards, broken, ids)
    for settings, message in (
        ({"method": "leaders"}, "grouper.method: .*'leader', got 'leaders'"),
        ({"use": "sub"}, "grouper.use: .* got 'sub'"),
        ({"std_scope": "group"}, "grouper.std_scope: .* got 'group'"),
        ({"use": "blend", "alpha": 1.5}, "grouper: alpha=1.5"),
        ({"mmr_lambda": -0.1}, "grouper.mmr_lambda: .* got -0.1"),
        ({"max_clusters": 1}, "grouper.max_clusters: .* got 1"),
    ):
        with pytest.raises(UserError, match=message):
            Config.load(None, {"grouper": settings})
    with pytest.raises(UserError, match="unknown clustering method 'kmeans'"):
        cluster(e, method="kmeans")


@pytest.mark.parametrize("use", ["distinct", "smi", "mmr"])
def test_penalties_are_added_to_the_changed_reward_as_they_are(use):
    """So that a penalty below 0 neither is an error nor is scaled by how distinct a sample is."""
    draw = np.random.default_rng(5)
    e, ids = draw.normal(size=(8, 6)), np.repeat([0, 1], 4)
    task, penalties = draw.choice([0.0, 1.0], 8), -draw.choice([0.0, 0.5, 2.0], 8)
    options = GrouperConfig(use=use)
    found = similarity_advantages(task + penalties, e, ids, options=options, task=task)
    changed = np.zeros(8)
    for rows in (np.arange(4), np.arange(4, 8)):
        labels = cluster(e[rows])
        order = canonical_order([row.tobytes() for row in e[rows]])
        similar = similarities(e[rows][order])
        changed[rows[order]] = SHAPES[use](task[rows][order], labels[order], similar, options)
    np.testing.assert_allclose(
        found.advantages, group_advantages(changed + penalties, ids), atol=1e-9
    )
    plain = similarity_advantages(task, e, ids, options=options)
    again = similarity_advantages(task, e, ids, options=options, task=task)
    np.testing.assert_array_equal(plain.advantages, again.advantages)
