"""Makes `policy.npz`: values and gradients of the policy losses. Tests read it without torch.

    pip install torch
    python tests/references/make_policy_references.py

Every loss is written out here once more, in float64 torch, as loops over sequences and tokens that
follow the papers; autograd gives the gradients. Nothing of jaxrl is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

B, T = 7, 6
LENGTHS = (6, 1, 4, 0, 3, 6, 2)
"""Of each sequence; tokens beyond are masked. One trains nothing."""
CASES = {"far": 0.4, "near": 1.5e-3}
"""Spread of the log-ratios, nats: clips of token ratios act in the one, of sequence ratios in the
other."""
CONSTANT = 6.0


def inputs(spread: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    old = -rng.exponential(1.5, (B, T))
    mask = np.arange(T)[None, :] < np.array(LENGTHS)[:, None]
    return {
        "logprobs": old + rng.normal(0, spread, (B, T)),
        "old_logprobs": old,
        "advantages": rng.normal(0, 1, B),
        "token_advantages": rng.normal(0, 1, (B, T)),
        "mask": mask,
        "weights": rng.uniform(0, 2, (B, T)),
    }


def ppo(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def token_terms(term: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """Terms of one sequence from a function of (log-prob, its old one, advantage)."""

    def terms(lp: torch.Tensor, old: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
        return [term(lp[t], old[t], a[t]) for t in range(len(lp))]

    return terms


def grpo(low: float, high: float) -> Callable[..., list[torch.Tensor]]:
    return token_terms(lambda lp, old, a: ppo(torch.exp(lp - old), a, low, high))


def cispo(lp: torch.Tensor, old: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return torch.clamp(torch.exp(lp - old), max=1.2).detach() * a * lp


def sapo(lp: torch.Tensor, old: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    tau = 1.0 if a > 0 else 1.05
    return torch.sigmoid(tau * (torch.exp(lp - old) - 1)) * 4 / tau * a


def gspo(low: float, high: float) -> Callable[..., list[torch.Tensor]]:
    def terms(lp: torch.Tensor, old: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
        s = torch.exp((lp.sum() - old.sum()) / len(lp))
        return [ppo(s, a[0], low, high)] * len(lp)

    return terms


def gspo_token(lp: torch.Tensor, old: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
    s = torch.exp((lp.sum() - old.sum()) / len(lp)).detach()
    ratios = [s * torch.exp(lp[t]) / torch.exp(lp[t]).detach() for t in range(len(lp))]
    return [ppo(ratios[t], a[t], 3e-4, 4e-4) for t in range(len(lp))]


def gmpo(lp: torch.Tensor, old: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
    """Eq. 4: the |y|-th root of the product of the clipped ratios, times A."""
    bound = np.exp(0.4)
    sign = 1.0 if a[0] > 0 else -1.0
    product = torch.ones((), dtype=torch.float64)
    for t in range(len(lp)):
        ratio = torch.exp(lp[t] - old[t])
        clipped = torch.clamp(ratio, 1 / bound, bound)
        product = product * (sign * torch.minimum(sign * ratio, sign * clipped))
    return [product ** (1 / len(lp)) * a[0]] * len(lp)


LOSSES: dict[str, tuple[Callable[..., list[torch.Tensor]], str, str]] = {
    "grpo": (grpo(0.2, 0.2), "sequences", "advantages"),
    "dr_grpo": (grpo(0.2, 0.2), "constant", "advantages"),
    "dapo": (grpo(0.2, 0.28), "tokens", "advantages"),
    "gspo": (gspo(3e-4, 4e-4), "sequences", "advantages"),
    "gspo_token": (gspo_token, "sequences", "token_advantages"),
    "cispo": (token_terms(cispo), "tokens", "advantages"),
    "sapo": (token_terms(sapo), "sequences", "advantages"),
    "gmpo": (gmpo, "sequences", "advantages"),
    "luspo": (gspo(2e-3, 2.5e-3), "length", "advantages"),
}
"""name -> (terms of a sequence, how they are averaged, whose advantages)."""


def reference(
    name: str, x: dict[str, np.ndarray], weighted: bool
) -> tuple[float, float, np.ndarray]:
    terms, average, which = LOSSES[name]
    lp = torch.from_numpy(x["logprobs"]).requires_grad_()
    old = torch.from_numpy(x["old_logprobs"])
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i, length in enumerate(LENGTHS):
        if length == 0:
            continue
        a = torch.from_numpy(np.broadcast_to(x[which][i], T)[:length].copy())
        values = terms(lp[i, :length], old[i, :length], a)
        if weighted:
            values = [v * w for v, w in zip(values, x["weights"][i], strict=False)]
        scale = {"sequences": 1 / length, "constant": 1 / CONSTANT}.get(average, 1.0)
        total = total - scale * sum(values)
        count += length if average == "tokens" else 1
    total.backward()
    return float(total.detach()), float(count), lp.grad.numpy()


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for case, spread in CASES.items():
        x = inputs(spread)
        arrays |= {f"{case}/{name}": value for name, value in x.items()}
        for name in LOSSES:
            for weighted in (False, True):
                total, count, gradient = reference(name, x, weighted)
                key = f"{case}/{name}/{'weighted' if weighted else 'plain'}"
                arrays[f"{key}/value"] = np.array([total, count])
                arrays[f"{key}/gradient"] = gradient
    np.savez_compressed(Path(__file__).parent / "policy.npz", **arrays)


if __name__ == "__main__":
    main()
