"""Dtypes of safetensors files."""

from __future__ import annotations

import ml_dtypes
import numpy as np

STORED: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of a safetensors header that can be read, and written."""
WRITTEN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Name of a dtype -> its name in the header."""
