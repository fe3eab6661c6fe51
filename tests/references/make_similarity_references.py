"""Makes `similarity.npz`: clusters of small random embeddings, by scikit-learn.

pip install scikit-learn
python tests/references/make_similarity_references.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import silhouette_score

CASES = 24


def embeddings(seed: int) -> np.ndarray:
    """3 to 14 rows of length 1 around 1 to 4 directions; some stand twice."""
    rng = np.random.default_rng(seed)
    n, centres = int(rng.integers(3, 15)), rng.normal(0, 1, (int(rng.integers(1, 5)), 6))
    e = centres[rng.integers(0, len(centres), n)] + rng.normal(0, rng.uniform(0.05, 0.9), (n, 6))
    if seed % 3 == 0:
        e[-1] = e[0]
    return (e / np.linalg.norm(e, axis=1, keepdims=True)).astype(np.float32)


def clusters(e: np.ndarray) -> tuple[np.ndarray, float]:
    """Labels and the best silhouette."""
    d = 1 - e.astype(np.float64) @ e.astype(np.float64).T
    d[d < 1e-6] = 0
    np.fill_diagonal(d, 0)
    best, labels = -1.0, np.zeros(len(e), int)
    for k in range(2, min(7, len(e) - 1) + 1):
        model = AgglomerativeClustering(k, metric="precomputed", linkage="average")
        found = model.fit_predict(d)
        score = silhouette_score(d, found, metric="precomputed")
        if score > best + 1e-9:
            best, labels = score, found
    return (labels if best >= 0.1 else np.zeros(len(e), int)), best


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for seed in range(CASES):
        e = embeddings(seed)
        labels, score = clusters(e)
        arrays |= {f"{seed}/embeddings": e, f"{seed}/labels": labels, f"{seed}/score": score}
    np.savez_compressed(Path(__file__).parent / "similarity.npz", **arrays)


if __name__ == "__main__":
    main()
