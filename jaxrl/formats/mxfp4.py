"""MXFP4, in which the experts of gpt-oss are published: 32 numbers of 4 bits share a scale (OCP
Microscaling Formats v1.0, arXiv 2310.10537).

A number is its e2m1 value times 2^(scale - 127). A checkpoint has two tensors of bytes in place of
one [E, in, out]: `_blocks` [E, out, in / 32, 16], of which each byte has an even number of a block
in its lower half and the odd one after it in its upper half, and `_scales` [E, out, in / 32].
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
"""What the names of both tensors add to that of the one that they stand for."""
BLOCK = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Of the lower three bits; the fourth is the sign."""
_LEVELS = np.concatenate([E2M1, -E2M1])
_PAIRS = _LEVELS[np.stack([np.arange(256) & 15, np.arange(256) >> 4], -1)].view(np.uint64)[:, 0]
"""[256]: both numbers of each byte, as one: four times as fast to look up."""
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def shape_of(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape of the tensor that bytes of these shapes stand for, or None."""
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != BLOCK // 2:
        return None
    experts, n_out, groups, _ = blocks
    return experts, groups * BLOCK, n_out


def read(blocks: np.ndarray, scales: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    """Returns the box `index` of the tensor in bfloat16, which has all its values.

    Beside the result the host holds one expert's part of it, in float32.
    """
    experts, rows, columns = index
    start, stop, _ = rows.indices(blocks.shape[2] * BLOCK)
    first = start // BLOCK
    groups = slice(first, -(-stop // BLOCK))
    blocks, scales = (part[experts, columns, groups] for part in (blocks, scales))
    inside = slice(start - first * BLOCK, stop - first * BLOCK)
    out = np.empty((len(blocks), stop - start, blocks.shape[1]), ml_dtypes.bfloat16)
    for target, codes, powers in zip(out, blocks, scales, strict=True):
        values = _PAIRS[codes].view(np.float32)
        values *= _POWERS[powers][..., None]
        target[...] = values.reshape(len(values), -1)[:, inside].astype(target.dtype).T
    return out
