"""A teacher that follows the policy: self-distillation with the current weights, or with their
moving average."""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl.models.parameters import Layout, abstract_params
from jaxrl.models.rules import param_shardings
from jaxrl.roles.actor import SENT_TO_TEACHER
from jaxrl.roles.arrival import check_fit, described, received
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.scorer import Scorer
from jaxrl.roles.teacher import AddFeedback, Teacher
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.types import Weights


class FollowingTeacher(Teacher):
    """A teacher without weights of its own: the actor publishes a version before each batch that it
    scores, so that batch i is scored with the weights after i batches."""

    def __init__(
        self,
        scorer: Scorer,
        sampler: Sampler | None,
        layout: Layout,
        dtype: str,
        offload: bool,
        add_feedback: AddFeedback | None = None,
    ):
        """
        Args:
            layout, dtype: of the weights that arrive.
        """
        super().__init__(scorer, sampler, offload, ("actor.update",), add_feedback)
        self._shardings = param_shardings(scorer.model, scorer.mesh, layout)
        self._expected = described(abstract_params(scorer.model, jnp.dtype(dtype), layout))

    def load(self, weights: Weights) -> dict[str, float]:
        """Takes the next version, once the old one is freed."""
        check_fit(weights, self._expected, "the teacher")
        self._write(None)
        params, taken = received(weights, self._shardings, SENT_TO_TEACHER)
        self._write(params)
        verify_arrays("teacher", params, self._scorer.mesh)
        return taken
