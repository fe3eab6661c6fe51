"""What is lost where the disk holds hidden states in fewer bits than the teacher computes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.settings import DistillConfig
from jaxrl.teacher.cache import StorageError, Stored, dequantised, in_storage
from jaxrl.types import TeacherSignal


def storage_error(
    hidden: np.ndarray, stored: Stored, head: np.ndarray, distill: DistillConfig
) -> StorageError:
    """KL(P || P') of next-token distributions P of hidden states [n, D] and P' of what the disk
    holds of them, over the head [V, D], in nats."""
    arrays = in_storage(TeacherSignal(hidden=hidden), stored)
    kept = arrays["hidden"]
    back = dequantised(kept, arrays["scale"]) if stored == "int8" else kept
    back = back.astype(hidden.dtype)
    temperature, chunk = distill.distill_temperature, distill.chunk_tokens
    weights = jnp.asarray(head)
    each = [
        np.asarray(_kl(hidden[i : i + chunk], back[i : i + chunk], weights, temperature))
        for i in range(0, len(hidden), chunk)
    ]
    nats = np.concatenate(each).astype(np.float64)
    return StorageError(mean=float(nats.mean()), most=float(nats.max()), tokens=len(nats))


@jax.jit
def _kl(p: jax.Array, q: jax.Array, head: jax.Array, temperature: float) -> jax.Array:
    """[n] nats, float32."""
    logits = partial(jnp.matmul, preferred_element_type=jnp.float32)
    log_p, log_q = (jax.nn.log_softmax(logits(x, head.T) / temperature) for x in (p, q))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
