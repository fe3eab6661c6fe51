"""The role that judges completions: reward functions, and a reward model with its own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jax.sharding import Mesh

from jaxrl.data.chat_template import dated
from jaxrl.data.example import Message
from jaxrl.data.tokenizer import chat_of
from jaxrl.models.batching import BATCH_TOKENS
from jaxrl.rewards.batch_rewards import RewardFunctions, RewardReport
from jaxrl.roles.reward_model import RewardScorer, RewardSource, render
from jaxrl.runtime.worker import detail, phase
from jaxrl.sharding.ledger import attribute, current
from jaxrl.types import Completion, Prompt, Rollout


class Reward:
    """Every reward of a batch; functions and model work side by side."""

    def __init__(self, functions: RewardFunctions, model: RewardModel | None):
        self._functions, self._model = functions, model

    def score(self, rollout: Rollout) -> RewardReport:
        futures = self._functions.submit(rollout)
        scores, metrics = None, {}
        if self._model is not None:
            scores, cut = self._model.score(rollout)
            metrics["reward/model_cut"] = float(cut)
        with phase("reward functions"):
            report = self._functions.report(rollout, futures, scores)
        return replace(report, metrics={**report.metrics, **metrics})

    def close(self) -> None:
        """Ends the processes of the functions."""
        self._functions.close()


class RewardModel:
    """A frozen model that gives each completion one number."""

    def __init__(
        self,
        source: RewardSource,
        mesh: Mesh,
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
        max_tokens: int | None = None,
        offload: bool = False,
        chat_date: str | None = None,
    ):
        """
        Args:
            dtype, batch_tokens, max_tokens: as of `RewardScorer`.
            offload: the weights are on the host except during `score`.
            chat_date: that its chat template shows (`data.chat_date`).
        """
        with phase(f"loads {source.name}"):
            scorer = self._scorer = RewardScorer(source, mesh, dtype, batch_tokens, max_tokens)
            dated(scorer.tokenizer, chat_date)
        current().resident(
            "reward.params",
            *attribute(scorer, "params"),
            stages=("reward.score",),
            offload=offload,
        )

    def score(self, rollout: Rollout) -> tuple[np.ndarray, int]:
        """Rewards [B] float32, in the model's own unit; 0 at padding rows. And how many sequences
        were too long and lost their beginning."""
        sequences = [
            render(self._scorer.tokenizer, before_last_turn(prompt, completion), completion.text)
            for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True)
        ]
        with phase("scores"):
            scores, cut = self._scorer.score(sequences, detail)
        current().nearly_done()
        out = np.zeros((rollout.sequences.tokens.shape[0],), np.float32)
        out[: len(scores)] = scores
        return out, cut


def before_last_turn(prompt: Prompt, completion: Completion) -> str | Sequence[Message]:
    """Returns what the last turn of a completion answers: the prompt and, for an episode, all turns
    before it, as messages if the prompt is a chat."""
    chat, turns = chat_of(prompt), completion.turns[:-1]
    if chat is None:
        return prompt.text + "".join(turn.text for turn in turns)
    roles = {"assistant": "assistant", "environment": "user"}
    return [*chat, *({"role": roles[turn.role], "content": turn.text} for turn in turns)]
