"""Kernels in 8 or 4 bits, for weights that are frozen under adapters (QLoRA, Dettmers et al. 2023,
arXiv 2305.14314, section 3).

A kernel [in, out] is cut into blocks of `BLOCK` numbers along `in`. A number is the level of its
code times the scale of its block:

- int8: the levels are -127 to 127, and the scale is the largest magnitude of the block / 127;
- nf4: the levels are the 16 of `NF4`, and the scale is the largest magnitude of the block.

Scales are bfloat16, 1/4 bit for each number; a number is rounded to the level that is nearest with
the rounded scale. In a parameter tree `kernel_scale` [in / block, out] stands beside the codes
`kernel`: int8 [in, out], or of nf4 uint8 [in / 2, out], of which byte i of a block has number i in
its lower half and number i + block / 2 in its upper half.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Num

from jaxrl.types import Array

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


def block_size(n_in: int) -> int:
    """Numbers that share a scale, of a kernel with so many inputs: `BLOCK`, or what divides both
    where that does not divide them."""
    return math.gcd(n_in, BLOCK)


def packed(kind: Quantisation) -> int:
    """Numbers in one entry of `kernel`."""
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
    else:
        levels = _levels(jnp.concatenate([codes & 15, codes >> 4], -2))
    whole = levels * scale.astype(jnp.float32)[..., None, :]
    return whole.astype(dtype).reshape(*layers, -1, n_out)


def _levels(codes: Array) -> Array:
    """Returns `NF4` of each code, by choices between two: a table look-up is slow on TPUs."""
    # In terms of the codes: the gradient of a scan would keep arrays of constants from outside it.
    zeros = (codes & 0).astype(jnp.float32)
    found = [zeros + level for level in NF4]
    for bit in range(4):
        upper = (codes & (1 << bit)) != 0
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [jnp.where(upper, high, low) for low, high in pairs]
    return found[0]


@jax.custom_vjp
def product(x: Float[Array, "n I"], codes: Int[Array, "P O"], scale: Num[Array, "S O"]) -> Array:
    """Computes x @ the dequantised kernel, in the dtype of x. Its backward pass dequantises again,
    and so keeps nothing but the codes; they have no gradient."""
    # That depends on x: else XLA dequantises all kernels before a loop that reads them each time.
    x, codes, scale = jax.lax.optimization_barrier((x, codes, scale))
    return x @ dequantise(codes, scale, x.dtype)


def _forward(x: Array, codes: Array, scale: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(x, codes, scale), (codes, scale)


def _backward(kept: tuple[Array, Array], d_y: Array) -> tuple[Array, None, None]:
    d_y, codes, scale = jax.lax.optimization_barrier((d_y, *kept))
    return d_y @ dequantise(codes, scale, d_y.dtype).T, None, None


product.defvjp(_forward, _backward)
