"""What is lost where the disk holds hidden states in fewer bits than the teacher computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config.settings import DistillConfig
from jaxrl.losses.layout import inverse, softcaps_of
from jaxrl.losses.vocabulary import VocabShard
from jaxrl.teacher.cache import StorageError, Stored, dequantised, in_storage
from jaxrl.types import TeacherSignal


def storage_error(
    hidden: np.ndarray,
    stored: Stored,
    head: np.ndarray,
    distill: DistillConfig,
    softcap: float | None = None,
) -> StorageError:
    """KL(P || P') of next-token distributions P of hidden states [n, D] and P' of what the disk
    holds of them, over the head [V, D], in nats.

    Args:
        softcap: `DecoderConfig.final_softcap` of the teacher.
    """
    arrays = in_storage(TeacherSignal(hidden=hidden), stored)
    kept = arrays["hidden"]
    back = dequantised(kept, arrays["scale"]) if stored == "int8" else kept
    back = back.astype(hidden.dtype)
    chunk = distill.chunk_tokens
    model = jnp.asarray(head), inverse(distill.distill_temperature), softcaps_of(softcap)
    each = [
        np.asarray(_kl(hidden[i : i + chunk], back[i : i + chunk], *model))
        for i in range(0, len(hidden), chunk)
    ]
    nats = np.concatenate(each).astype(np.float64)
    return StorageError(mean=float(nats.mean()), most=float(nats.max()), tokens=len(nats))


@jax.jit
def _kl(
    p: jax.Array,
    q: jax.Array,
    head: jax.Array,
    scale: jax.Array,
    softcaps: tuple[jax.Array | None, ...],
) -> jax.Array:
    """[n] nats, float32."""
    whole = VocabShard(0, len(head), len(head), padded=False)
    log_p, log_q = (jax.nn.log_softmax(whole.logits(x, head, scale, *softcaps)) for x in (p, q))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
