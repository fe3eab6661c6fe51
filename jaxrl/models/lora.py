"""Adapters of low rank (LoRA, Hu et al. 2021, arXiv 2106.09685): y = x W + (alpha / r) (x A) B.

The kernels W are frozen, and A [in, r] and B [r, out] are trained; each expert of a mixture has its
own pair, [E, in, r] and [E, r, out]. In a parameter tree `lora_a` and `lora_b` stand beside the
`kernel` that they adapt. B is 0 at the start: the outputs are the base model's, bit for bit.

Frozen kernels may be in 8 or 4 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314, section 3). A
kernel [in, out] is cut into blocks of `BLOCK` numbers along `in`. A number is the level of its code
times the scale of its block:

- int8: the levels are -127 to 127, and the scale is the largest magnitude of the block / 127;
- nf4: the levels are the 16 of `NF4`, and the scale is the largest magnitude of the block.

Scales are bfloat16, 1/4 bit for each number; a number is rounded to the level that is nearest with
the rounded scale. In a parameter tree `kernel_scale` [in / block, out] stands beside the codes
`kernel`: int8 [in, out], or of nf4 uint8 [in / 2, out], of which byte i of a block has number i in
its lower half and number i + block / 2 in its upper half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Num

from jaxrl.types import Array, Tree

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
Quantisation = Literal["int8", "nf4"]
BLOCK = 64
SCALE = "kernel_scale"
"""Name of the scales in a parameter tree."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, with an exact 0, scaled to [-1, 1] (appendix E)."""


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
    trained = _select_leaves(params, lambda name: name in NAMES)
    if not trained:
        return {}, params
    return _select_leaves(params, lambda name: name not in NAMES), trained


def join_adapters(base: Tree, trained: Tree) -> Tree:
    """Joins the parts that `frozen_and_trained` made into the whole tree; no array is copied."""
    if not base:
        return trained
    if isinstance(base, list | tuple):
        return type(base)(join_adapters(*pair) for pair in zip(base, trained, strict=True))
    both = {name: join_adapters(base[name], trained[name]) for name in base if name in trained}
    return base | trained | both


def merge_adapters(params: Tree, scale: float) -> Tree:
    """Merges a tree into one without adapters and without quantised kernels that computes the same:
    each W + scale A B, summed in float32 and in the dtype of W or, where it is quantised, of the
    norms."""
    return _merge(params, scale, params["norm"]["scale"].dtype)


def add_shared_a(group: Tree, name: str) -> Tree:
    """Returns a projection of a group (attention, MLP) with the A that it reads from another
    one."""
    projection = group[name]
    if not isinstance(projection, dict) or "lora_b" not in projection or "lora_a" in projection:
        return projection
    return projection | {"lora_a": group[LEADERS[name]]["lora_a"]}


def _merge(params: Tree, scale: float, dtype: jnp.dtype) -> Tree:
    if isinstance(params, list | tuple):
        return type(params)(_merge(part, scale, dtype) for part in params)
    if not isinstance(params, dict):
        return params
    if "lora_b" not in params and SCALE not in params:
        whole = {name: add_shared_a(params, name) for name in params}
        return {name: _merge(value, scale, dtype) for name, value in whole.items()}
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


def _select_leaves(tree: Tree, wanted: Callable[[str], bool]) -> Tree:
    """Keeps the leaves whose own name is wanted; their places stay what they are."""
    if isinstance(tree, list | tuple):
        kept = [_select_leaves(part, wanted) for part in tree]
        return type(tree)(kept) if any(kept) else {}
    leaves = {}
    for name, value in tree.items():
        if isinstance(value, dict | list | tuple):
            inner = _select_leaves(value, wanted)
            if inner:
                leaves[name] = inner
        elif wanted(name):
            leaves[name] = value
    return leaves


def quantisation_block(n_in: int) -> int:
    """Counts the numbers of a kernel with `n_in` inputs that share a scale: `BLOCK`, or what
    divides both where that does not divide them."""
    return math.gcd(n_in, BLOCK)


def numbers_per_code(kind: Quantisation) -> int:
    """Counts the numbers in one entry of `kernel`."""
    return 2 if kind == "nf4" else 1


def quantise(
    kind: Quantisation, kernel: Float[Array, "*L I O"], block: int
) -> tuple[Int[Array, "*L P O"], Float[Array, "*L S O"]]:
    """Quantises kernels, or parts of them that hold whole blocks, to (codes, scales)."""
    *layers, n_in, n_out = kernel.shape
    x = kernel.astype(jnp.float32).reshape(*layers, n_in // block, block, n_out)
    largest = jnp.max(jnp.abs(x), -2, keepdims=True)
    scale = (largest / 127 if kind == "int8" else largest).astype(jnp.bfloat16)
    x = x / jnp.where(scale == 0, 1, scale).astype(jnp.float32)
    if kind == "int8":
        codes = jnp.round(x).astype(jnp.int8)
    else:
        codes = sum((x > (a + b) / 2).astype(jnp.uint8) for a, b in zip(NF4, NF4[1:], strict=False))
        low, high = jnp.split(codes, 2, -2)
        codes = low | (high << 4)
    return codes.reshape(*layers, -1, n_out), jnp.squeeze(scale, -2)


def dequantise(
    codes: Int[Array, "*L P O"], scale: Num[Array, "*L S O"], dtype: DTypeLike
) -> Float[Array, "*L I O"]:
    """Computes the kernels that codes and scales stand for: in float32, returned in `dtype`."""
    *layers, n_blocks, n_out = scale.shape
    codes = codes.reshape(*layers, n_blocks, -1, n_out)
    if codes.dtype == jnp.int8:
        levels = codes.astype(jnp.float32)
    else:  # by choices between two: a table look-up is slow on TPUs
        codes = jnp.concatenate([codes & 15, codes >> 4], -2)
        # In terms of the codes: the gradient of a scan would keep arrays of constants from outside.
        zeros = (codes & 0).astype(jnp.float32)
        choices = [zeros + level for level in NF4]
        for bit in range(4):
            upper = (codes & (1 << bit)) != 0
            pairs = zip(choices[::2], choices[1::2], strict=True)
            choices = [jnp.where(upper, high, low) for low, high in pairs]
        levels = choices[0]
    whole = levels * scale.astype(jnp.float32)[..., None, :]
    return whole.astype(dtype).reshape(*layers, -1, n_out)


@jax.custom_vjp
def quantised_product(
    x: Float[Array, "n I"], codes: Int[Array, "P O"], scale: Num[Array, "S O"]
) -> Array:
    """Computes x @ the dequantised kernel, in the dtype of x. Its backward pass dequantises again,
    and so keeps nothing but the codes; they have no gradient."""
    # That depends on x: else XLA dequantises all kernels before a loop that reads them each time.
    x, codes, scale = jax.lax.optimization_barrier((x, codes, scale))
    return x @ dequantise(codes, scale, x.dtype)


def _product_backward(kept: tuple[Array, Array], d_y: Array) -> tuple[Array, None, None]:
    d_y, codes, scale = jax.lax.optimization_barrier((d_y, *kept))
    return d_y @ dequantise(codes, scale, d_y.dtype).T, None, None


quantised_product.defvjp(lambda x, *held: (quantised_product(x, *held), held), _product_backward)
