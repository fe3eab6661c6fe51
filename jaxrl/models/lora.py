"""Adapters of low rank (LoRA, Hu et al. 2021, arXiv 2106.09685): y = x W + (alpha / r) (x A) B.

The kernels W are frozen, and A [in, r] and B [r, out] are trained; each expert of a mixture has its
own pair, [E, in, r] and [E, r, out]. In a parameter tree `lora_a` and `lora_b` stand beside the
`kernel` that they adapt. B is 0 at the start: the outputs are the base
model's, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.models.quantised import SCALE, dequantise
from jaxrl.types import Tree

LoraInit = Literal["default", "gaussian"]
TARGETS = {
    **{f"{name}_proj": f"attn/{name}" for name in "qkvo"},
    **{f"{name}_proj": f"mlp/{name}" for name in ("gate", "up", "down")},
}
"""Name of an adapted projection, as in PEFT -> its path within a block, of Llama."""
NAMES = ("lora_a", "lora_b")
LEADERS = {"k": "q", "v": "q", "up": "gate"}
"""Projection -> the one whose A it reads, in families where both are rows of one tensor: PEFT has
one pair for each tensor."""


@dataclass(frozen=True)
class Lora:
    """Which projections have adapters, and of which rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(TARGETS)
    """Names of `DecoderConfig.targets`; those of `TARGETS` are all of any family."""
    init: LoraInit = "default"
    """Of A: uniform in +-1 / sqrt(in), or normal with the standard deviation 1 / rank."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def first(self, key: jax.Array, n_in: int, *count: int) -> jax.Array:
        """Initialises A [n_in, r] before training, or [count, n_in, r] for the given number of
        experts."""
        shape = (*count, n_in, self.rank)
        if self.init == "gaussian":
            return jax.random.normal(key, shape) / self.rank
        limit = 1 / math.sqrt(n_in)
        return jax.random.uniform(key, shape, minval=-limit, maxval=limit)


def frozen_and_trained(params: Tree) -> tuple[Tree, Tree]:
    """Splits a parameter tree in either layout into (what is frozen, what is trained): the adapters
    are trained where there are any, else everything. Entries that are empty are left out."""
    trained = _only(params, lambda name: name in NAMES)
    if not trained:
        return {}, params
    return _only(params, lambda name: name not in NAMES), trained


def join(base: Tree, trained: Tree) -> Tree:
    """Joins the parts that `frozen_and_trained` made into the whole tree; no array is copied."""
    if not base:
        return trained
    if isinstance(base, list | tuple):
        return type(base)(join(*pair) for pair in zip(base, trained, strict=True))
    both = {name: join(base[name], trained[name]) for name in base if name in trained}
    return base | trained | both


def merged(params: Tree, scale: float) -> Tree:
    """Merges a tree into one without adapters and without quantised kernels that computes the same:
    each W + scale A B, summed in float32 and in the dtype of W or, where it is quantised, of the
    norms."""
    return _merged(params, scale, params["norm"]["scale"].dtype)


def with_a(group: Tree, name: str) -> Tree:
    """Returns a projection of a group (attention, MLP) with the A that it reads from another
    one."""
    own = group[name]
    if not isinstance(own, dict) or "lora_b" not in own or "lora_a" in own:
        return own
    return own | {"lora_a": group[LEADERS[name]]["lora_a"]}


def _merged(params: Tree, scale: float, dtype: jnp.dtype) -> Tree:
    if isinstance(params, list | tuple):
        return type(params)(_merged(one, scale, dtype) for one in params)
    if not isinstance(params, dict):
        return params
    if "lora_b" not in params and SCALE not in params:
        whole = {name: with_a(params, name) for name in params}
        return {name: _merged(value, scale, dtype) for name, value in whole.items()}
    kernel = params["kernel"]
    if SCALE in params:
        whole = dequantise(kernel, params[SCALE], jnp.float32)
    else:
        whole, dtype = kernel.astype(jnp.float32), kernel.dtype
    if "lora_b" in params:
        a, b = (params[name].astype(jnp.float32) for name in NAMES)
        whole = whole + scale * jnp.matmul(a, b, precision="highest")
    rest = {name: value for name, value in params.items() if name not in (*NAMES, SCALE)}
    return rest | {"kernel": whole.astype(dtype)}


def _only(tree: Tree, wanted: Callable[[str], bool]) -> Tree:
    """Keeps the leaves whose own name is wanted; their places stay what they are."""
    if isinstance(tree, list | tuple):
        kept = [_only(one, wanted) for one in tree]
        return type(tree)(kept) if any(kept) else {}
    found = {}
    for name, value in tree.items():
        if isinstance(value, dict | list | tuple):
            inner = _only(value, wanted)
            if inner:
                found[name] = inner
        elif wanted(name):
            found[name] = value
    return found
