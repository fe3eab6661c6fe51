"""What a teacher's answer must be before a run learns from it, whichever server gave it.

Each check raises ValueError with the tensor's name, where its first wrong value is, the value, and
what is allowed. Values are checked where a completion token trains: elsewhere they are not read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxrl.teacher.protocol import Shapes

ROUNDING = 1e-3
"""Nats, or probability: what float32 sums over a large vocabulary may be off by."""


def check_answer(
    tensors: Mapping[str, np.ndarray], shapes: Shapes, mask: np.ndarray, v: int
) -> None:
    """Checks that an answer has the tensors that were asked for, with values that a teacher can
    give.

    Args:
        tensors: fields of a `TeacherSignal`.
        mask: [B, C] True where values are read.
        v: tokens that student and teacher share.
    """
    if tensors.keys() != shapes.keys():
        raise ValueError(f"it has the tensors {sorted(tensors)}, {sorted(shapes)} were asked for")
    for name, (dtype, dims) in shapes.items():
        x = tensors[name]
        check_tensor(name, x, dtype, (*mask.shape, *dims))
        if name.endswith("ids"):
            check_ids(name, x, v)
            check_distinct(name, x, mask)
        elif name == "hidden":
            _refuse(name, x, ~np.isfinite(x) & mask[..., None], "a finite number is expected")
        elif name == "entropy":
            most = float(np.log(v)) + ROUNDING
            possible = (x >= -ROUNDING) & (x <= most)
            _refuse(name, x, ~possible & mask, f"it is 0 to log({v}) = {most:.2f} nats")
        else:
            check_logprobs(name, x, mask)
    for best, tail in (("topk_logprobs", "tail_logprob"), ("best_logprobs", "best_tail")):
        if best in tensors:
            check_sum(best, tensors[best], tensors[tail], mask)


def check_tensor(name: str, x: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    if x.dtype.name != dtype or x.shape != shape:
        raise ValueError(
            f"{name} is {x.dtype.name} {list(x.shape)}, {dtype} {list(shape)} was asked for"
        )


def check_ids(name: str, ids: np.ndarray, v: int) -> None:
    allowed = f"the tokens that student and teacher share are 0 to {v - 1}"
    _refuse(name, ids, (ids < 0) | (ids >= v), allowed)


def check_distinct(name: str, ids: np.ndarray, mask: np.ndarray) -> None:
    """Checks that no token is among the K best of a position twice: it would count twice."""
    again = np.zeros(ids.shape, bool)
    order = np.argsort(ids, -1, kind="stable")
    ranked = np.take_along_axis(ids, order, -1)
    np.put_along_axis(again, order[..., 1:], ranked[..., 1:] == ranked[..., :-1], -1)
    _refuse(name, ids, again & mask[..., None], "each of the best tokens is there once")


def check_logprobs(name: str, x: np.ndarray, mask: np.ndarray) -> None:
    """
    Args:
        x: as mask [B, C], or with another dim; nats.
    """
    mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    wrong = ~np.isfinite(x) | (x > ROUNDING)
    _refuse(name, x, wrong & mask, "a log-prob is a finite number of at most 0")


def check_sum(name: str, best: np.ndarray, tail: np.ndarray, mask: np.ndarray) -> None:
    """Checks that K probabilities and what they leave over make one distribution."""
    total = np.exp(best.astype(np.float64)).sum(-1) + np.exp(tail.astype(np.float64))
    wrong = mask & (np.abs(total - 1) > ROUNDING)
    _refuse(f"the sum of {name}", total, wrong, "probabilities and their tail add up to 1")


def check_head(head: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    check_tensor("head", head, dtype, shape)
    _refuse("head", head, ~np.isfinite(head), "a finite number is expected")


def _refuse(name: str, x: np.ndarray, wrong: np.ndarray, allowed: str) -> None:
    if wrong.any():
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        value = x[at].item()
        shown = value if isinstance(value, int) else f"{float(value):.7g}"
        raise ValueError(f"{name} is {shown} at {[int(i) for i in at]}: {allowed}")
