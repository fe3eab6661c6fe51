"""Similarity groups: the samples of one prompt, clustered by what they say, and advantages from it.

Everything happens within one prompt; no cluster crosses prompts, so a batch may be cut by whole
prompts and never by rows. Host numpy, float64. S = E E^T holds cosine similarities.

With `use="subgroup"` a sample is compared with its own cluster only: differences in quality
*between* clusters give no gradient (`blend` has them again).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl.algorithms.advantages import group_advantages, standardise_groups
from jaxrl.config.roles import GrouperConfig
from jaxrl.errors import RunError, UserError, unknown
from jaxrl.rewards.batch_rewards import Rewards, as_rewards

Sums = dict[str, tuple[float, float]]
"""Metric name -> (sum, count)."""
Array = np.ndarray

ZERO_DISTANCE = 1e-6
"""Distances below count as 0: float32 embeddings of the same text differ by this much."""
SMALLEST_FACTOR = 0.1
"""Of `distinct` (DARLING, arXiv 2509.02534), and of the sum of similarities in `smi`."""


def canonical_order(texts: Sequence[str | bytes]) -> Int[np.ndarray, " N"]:
    """Sorts indices by the hash of the text, then by index: no batch layout changes that order."""

    def key(i: int) -> tuple[bytes, int]:
        text = texts[i]
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return hashlib.sha256(data).digest(), i

    return np.array(sorted(range(len(texts)), key=key), int)


def similarities(embeddings: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N N"]:
    """Computes the cosine similarities: symmetric, 1 on the diagonal, and 1 where 1 - s < 1e-6."""
    e = np.asarray(embeddings, np.float64)
    if not np.isfinite(e).all():
        row = int(np.flatnonzero(~np.isfinite(e).all(1))[0])
        raise RunError(
            f"the embedding of sample {row} of a prompt holds NaN or infinity: the encoder"
            " overflows (a wider dtype may help) or its weights are broken"
        )
    norm = np.linalg.norm(e, axis=1, keepdims=True)
    e = e / np.where(norm > 0, norm, 1)
    s = e @ e.T
    s = np.where(1 - s < ZERO_DISTANCE, 1.0, s)
    np.fill_diagonal(s, 1.0)
    return (s + s.T) / 2


def cluster(
    embeddings: Float[np.ndarray, "N D"],
    *,
    method: str = "agglomerative_silhouette",
    texts: Sequence[str] | None = None,
    **options: float,
) -> Int[np.ndarray, " N"]:
    """Returns the cluster numbers of the samples of one prompt: 0, 1, ... in order of first
    appearance.

    Args:
        embeddings: rows of length 1 (they are scaled to it).
        method: a name of `METHODS`.
        texts: what was embedded, for the canonical order; without, the embeddings stand for it.
        options: max_clusters (7) and min_silhouette (0.1) of agglomerative_silhouette; tau (0.95)
            of connected_components and leader.
    """
    if method not in METHODS:
        raise unknown("clustering method", method, METHODS)
    embeddings = np.asarray(embeddings)
    order = canonical_order([row.tobytes() for row in embeddings] if texts is None else texts)
    labels = np.empty(len(order), int)
    if len(order):
        labels[order] = METHODS[method](similarities(embeddings[order]), **options)
    return _renumber(labels)


def agglomerative_silhouette(
    similarity: Float[np.ndarray, "N N"], *, max_clusters: int = 7, min_silhouette: float = 0.1
) -> Int[np.ndarray, " N"]:
    """Clusters by average linkage (UPGMA), cut into the 2 ... min(max_clusters, N - 1) clusters of
    best silhouette.

    Ties go to fewer clusters. One cluster for N <= 2, where nothing differs, and where the best
    silhouette is below `min_silhouette`.
    """
    distance = 1 - similarity
    n = len(distance)
    if n <= 2 or distance.max() == 0:
        return np.zeros(n, int)
    cuts = _average_linkage(distance)
    counts = range(2, min(max_clusters, n - 1) + 1)
    scores = {k: silhouette(distance, cuts[k]) for k in counts}
    # Rounded: what is a tie should not hang on the last bit of a sum.
    best = max(counts, key=lambda k: round(scores[k], 9))
    return cuts[best] if scores[best] >= min_silhouette else np.zeros(n, int)


def _average_linkage(distance: Float[np.ndarray, "N N"]) -> dict[int, np.ndarray]:
    """Returns a mapping from the number of clusters to the labels. Merges the closest two, the
    first pair among equals."""
    n = len(distance)
    d = distance.copy()
    np.fill_diagonal(d, np.inf)
    labels, size = np.arange(n), np.ones(n)
    cuts = {n: labels.copy()}
    for left in range(n - 1, 0, -1):
        i, j = np.unravel_index(np.argmin(d), d.shape)
        merged = (size[i] * d[i] + size[j] * d[j]) / (size[i] + size[j])
        d[i], d[:, i] = merged, merged
        d[j], d[:, j], d[i, i] = np.inf, np.inf, np.inf
        size[i] += size[j]
        labels[labels == j] = i
        cuts[left] = labels.copy()
    return cuts


def silhouette(distance: Float[np.ndarray, "N N"], labels: Int[np.ndarray, " N"]) -> float:
    """Returns the mean of (b - a) / max(a, b): a is the distance to the sample's own cluster, b to
    the nearest other cluster; 0 for a singleton.

    Rousseeuw 1987. Needs 2 to N - 1 clusters.
    """
    n = len(labels)
    _, label, size = np.unique(labels, return_inverse=True, return_counts=True)
    assert 2 <= len(size) < n, f"{len(size)} clusters of {n} samples have no silhouette"
    member = label[:, None] == np.arange(len(size))[None, :]
    sums = distance @ member
    rows = np.arange(n)
    a = sums[rows, label] / np.maximum(size[label] - 1, 1)
    b = np.where(member, np.inf, sums / size[None, :]).min(-1)
    widest = np.maximum(a, b)
    score = np.where(widest > 0, (b - a) / np.where(widest > 0, widest, 1), 0)
    return float(np.where(size[label] > 1, score, 0).mean())


def connected_components(
    similarity: Float[np.ndarray, "N N"], *, tau: float = 0.95
) -> Int[np.ndarray, " N"]:
    """Puts into one cluster all that a chain of similarities >= tau connects (DARLING,
    2509.02534)."""
    linked = similarity >= tau
    labels = np.arange(len(linked))
    while True:
        smallest = np.where(linked, labels[None, :], len(linked)).min(-1)
        if (smallest == labels).all():
            return labels
        labels = smallest


def leader(similarity: Float[np.ndarray, "N N"], *, tau: float = 0.95) -> Int[np.ndarray, " N"]:
    """Assigns each sample to the first leader that it is at least tau similar to, or makes it one
    (GiGPO, arXiv 2505.10978)."""
    labels = np.arange(len(similarity))
    leaders: list[int] = []
    for i in range(len(similarity)):
        near = [j for j in leaders if similarity[i, j] >= tau]
        if near:
            labels[i] = near[0]
        else:
            leaders.append(i)
    return labels


METHODS: Mapping[str, Callable[..., np.ndarray]] = {
    "agglomerative_silhouette": agglomerative_silhouette,
    "connected_components": connected_components,
    "leader": leader,
}


def _renumber(labels: np.ndarray) -> np.ndarray:
    """Renumbers the labels 0, 1, ... in order of first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), int)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


class Grouped(NamedTuple):
    """Advantages by similarity groups."""

    advantages: Float[np.ndarray, " B"]
    labels: Int[np.ndarray, " B"]
    """Clusters, numbered over the whole batch; -1 at padding and where there is no reward."""
    metrics: Sums
    """groups_per_prompt, singleton_fraction (of samples), silhouette (mean over the prompts that
    have one), split_into_K (fraction of prompts, for each K up to the largest), unfinished_thoughts
    (of samples)."""


def similarity_advantages(
    rewards: Rewards,
    embeddings: Float[np.ndarray, "B D"],
    group_ids: Int[np.ndarray, " B"],
    *,
    options: GrouperConfig | None = None,
    texts: Sequence[str | None] | None = None,
    task: Rewards | None = None,
) -> Grouped:
    """Clusters every prompt's samples and makes their advantages as `options` says.

    Samples without a reward are in no cluster and no statistic, and get 0. A sample whose text is
    None (an unfinished thought) has no answer to embed: it is a cluster of its own, similar to
    nothing.

    Args:
        rewards: one for each sample; None or NaN where there is none.
        embeddings: L2-normalised; rows of padding, or without a text, are not read.
        group_ids: the prompt of each sample; -1 at padding.
        texts: from `after_thoughts`, for the canonical order and the unfinished thoughts; without,
            every sample has an answer.
        task: the rewards before penalties for length and KL, which the uses distinct, smi and mmr
            change; the penalties are added as they are. None: `rewards` have none.
    """
    options = options or GrouperConfig()
    values, ids = as_rewards(rewards), np.asarray(group_ids)
    earned = values if task is None else as_rewards(task)
    labels = np.full(len(ids), -1)
    shaped, shape = values.copy(), SHAPES.get(options.use)
    scores, counts = [], []
    settings: dict[str, float] = {"tau": options.tau}
    if options.method == "agglomerative_silhouette":
        settings = {"max_clusters": options.max_clusters, "min_silhouette": options.min_silhouette}
    for prompt in np.unique(ids[(ids >= 0) & ~np.isnan(values)]):
        rows = np.flatnonzero((ids == prompt) & ~np.isnan(values))
        members = rows.tolist()
        answered = np.array([texts is None or texts[i] is not None for i in members])
        keys: list[str | bytes] = [
            np.asarray(embeddings[i]).tobytes() if texts is None else texts[i] or ""
            for i in members
        ]
        order = canonical_order(keys)
        rows, answered = rows[order], answered[order]
        similarity = np.eye(len(rows))
        both = np.ix_(answered, answered)
        similarity[both] = similarities(np.asarray(embeddings)[rows[answered]])
        clusters = np.arange(len(rows))
        if answered.any():
            clusters[answered] = len(rows) + METHODS[options.method](similarity[both], **settings)
        clusters = _renumber(clusters)
        if shape is not None:
            penalties = values[rows] - earned[rows]
            shaped[rows] = shape(earned[rows], clusters, similarity, options) + penalties
        labels[rows] = labels.max() + 1 + clusters
        counts.append(int(clusters.max()) + 1)
        if 2 <= counts[-1] < len(rows):
            scores.append(silhouette(1 - similarity, clusters))
    prompts = np.where(labels < 0, -1, ids)
    advantages = ADVANTAGES.get(options.use, _prompt_advantages)(shaped, labels, prompts, options)
    placed = np.flatnonzero(labels >= 0).tolist()
    unfinished = 0 if texts is None else sum(texts[i] is None for i in placed)
    _, size = np.unique(labels[labels >= 0], return_counts=True)
    samples, n_prompts = float(size.sum()), float(len(counts))
    metrics = {
        "groups_per_prompt": (float(sum(counts)), n_prompts),
        "singleton_fraction": (float((size == 1).sum()), samples),
        "silhouette": (float(sum(scores)), float(len(scores))),
        "unfinished_thoughts": (float(unfinished), samples),
    }
    for k in range(1, max(counts, default=0) + 1):
        metrics[f"split_into_{k}"] = (float(counts.count(k)), n_prompts)
    return Grouped(advantages, labels, metrics)


def _prompt_advantages(values: Array, labels: Array, prompts: Array, how: GrouperConfig) -> Array:
    return group_advantages(values, prompts, scale_by_std=how.std_scope != "none")


def _cluster_advantages(values: Array, labels: Array, prompts: Array, how: GrouperConfig) -> Array:
    scopes = {"cluster": labels, "prompt": prompts, "none": None}
    return standardise_groups(values, labels, scopes[how.std_scope])


def _blend(values: Array, labels: Array, prompts: Array, how: GrouperConfig) -> Array:
    """Returns alpha times the cluster's advantage plus 1 - alpha times the prompt's (Stratified
    GRPO, arXiv 2510.06214)."""
    inside = _cluster_advantages(values, labels, prompts, how)
    return how.alpha * inside + (1 - how.alpha) * _prompt_advantages(values, labels, prompts, how)


def _size_weight(values: Array, labels: Array, prompts: Array, how: GrouperConfig) -> Array:
    """Returns |c|^-alpha times the prompt's advantage (arXiv 2601.08763)."""
    _, inverse, size = np.unique(labels, return_inverse=True, return_counts=True)
    return size[inverse] ** -how.alpha * _prompt_advantages(values, labels, prompts, how)


def _distinct(values: Array, labels: Array, similarity: Array, how: GrouperConfig) -> Array:
    """Returns R max((G - |c|) / (G - 1), 0.1) (DARLING, arXiv 2509.02534)."""
    _not_negative(values, "distinct")
    size = np.bincount(labels)[labels]
    others = np.maximum(len(labels) - 1, 1)
    return values * np.maximum((len(labels) - size) / others, SMALLEST_FACTOR)


def _smi(values: Array, labels: Array, similarity: Array, how: GrouperConfig) -> Array:
    """Returns R / sum_j s_ij with j = i in the sum (DRA-GRPO, arXiv 2505.09655).

    Opposite embeddings may not bring the sum below 0.1.
    """
    _not_negative(values, "smi")
    return values / np.maximum(similarity.sum(-1), SMALLEST_FACTOR)


def _mmr(values: Array, labels: Array, similarity: Array, how: GrouperConfig) -> Array:
    """Returns lambda R_i - (1 - lambda) max(0, max_j s_ij) over the j picked before i, best score
    first (maximal marginal relevance, arXiv 2601.09085).

    Rows are in canonical order: the first among equals is picked.
    """
    nearest = np.zeros(len(values))
    scores, left = np.zeros(len(values)), np.ones(len(values), bool)
    for _ in range(len(values)):
        score = how.mmr_lambda * values - (1 - how.mmr_lambda) * nearest
        pick = int(np.argmax(np.where(left, score, -np.inf)))
        scores[pick], left[pick] = score[pick], False
        nearest = np.maximum(nearest, similarity[pick])
    return scores


def _not_negative(values: Array, use: str) -> None:
    if values.min() < 0:
        raise UserError(
            f"use={use} multiplies rewards and needs them at 0 or above; one is {values.min():g}. "
            "Shift the rewards, or choose subgroup, blend, size_weight or mmr"
        )


SHAPES: Mapping[str, Callable[[Array, Array, Array, GrouperConfig], Array]] = {
    "distinct": _distinct,
    "smi": _smi,
    "mmr": _mmr,
}
"""Uses that change the rewards of one prompt: (rewards, clusters, similarities, options)."""
ADVANTAGES: Mapping[str, Callable[[Array, Array, Array, GrouperConfig], Array]] = {
    "subgroup": _cluster_advantages,
    "blend": _blend,
    "size_weight": _size_weight,
}
"""Uses that make advantages otherwise than GRPO: (rewards, clusters, prompts, options)."""
