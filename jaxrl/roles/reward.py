"""The role that judges completions: reward functions, and a reward model with its own tokenizer.

A reward model is a decoder whose head gives one number for each sequence: the
`*ForSequenceClassification` checkpoints of transformers: `score.weight` [1, D] without bias, at the
hidden state of the last token. The mask alone decides which token is last, since padding and EOS
may share an id.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxrl.config.schema import Config
from jaxrl.data.chat_template import dated, has_template, with_end_ids
from jaxrl.data.example import Message
from jaxrl.data.tokenizer import (
    Tokenizer,
    as_messages,
    chat_of,
    check_every_token,
    encode_text,
    load_tokenizer,
    render_chat,
)
from jaxrl.errors import UserError, about
from jaxrl.formats import hf, weights
from jaxrl.formats.finite import not_finite
from jaxrl.formats.hf import open_weights
from jaxrl.formats.hub import find_folder, open_tensors
from jaxrl.models import decoder
from jaxrl.models.batching import BATCH_TOKENS, Progress, run_batches
from jaxrl.models.config import DecoderConfig
from jaxrl.models.parameters import Params
from jaxrl.process.json_types import read_json
from jaxrl.rewards.batch_rewards import RewardFunctions, RewardReport
from jaxrl.roles.declared import Program, Resident
from jaxrl.roles.run_shapes import RunArrays, text_batches
from jaxrl.runtime.worker import detail, phase
from jaxrl.sharding.ledger import current
from jaxrl.sharding.reshard import put
from jaxrl.types import NO_INPUTS, Completion, Prompt, Rollout, TemplateInputs

HEAD = "score.weight"
TEMPLATE_TOKENS = 128
"""Tokens reserved for the reward model's chat template, and for its tokenizer needing more
tokens."""


@dataclass(frozen=True)
class RewardSource:
    """A reward model that was found and understood, of which no weight has been read."""

    name: str
    """As the user gave it."""
    path: Path
    config: DecoderConfig
    """Without an LM head: it counts as tied."""
    tensors: weights.Tensors = field(repr=False, compare=False)

    def load(
        self, mesh: Mesh | None = None, dtype: DTypeLike = jnp.float32
    ) -> tuple[Params, jax.Array]:
        """Loads the parameters (stacked), and the head [D] float32, whole on every device."""
        params = weights.load_params(self.tensors, self.config, mesh, dtype)
        row = self.tensors.read(HEAD, (slice(0, 1), slice(0, self.config.d_model)))
        head = np.asarray(row[0]).astype(np.float32)
        if mesh is None:
            return params, jnp.asarray(head)
        return params, put(head, NamedSharding(mesh, PartitionSpec()))


def open_reward(path: str | os.PathLike[str]) -> RewardSource:
    """Finds a reward model and checks the list of its tensors against its config.

    Args:
        path: a Hugging Face folder, `package:NAME` for the one in an installed package, or a name
            on a hub.

    Raises:
        UserError: as `read_reward`; or tensors that are missing or of other shapes.
    """
    folder, config = read_reward(path)
    shapes = weights.tensor_shapes(config) | {HEAD: (1, config.d_model)}

    def read(place: Path) -> weights.Tensors:
        files = open_weights(place)
        tensors = weights.name_experts(files, config)
        weights.check_all_read(files.names, config, tensors)
        return tensors

    tensors = open_tensors(os.fspath(path), folder, read, shapes)
    return RewardSource(os.fspath(path), folder, config, tensors)


def tokenizer_of_reward(source: RewardSource) -> Tokenizer:
    """Returns the reward model's own tokenizer.

    Raises:
        UserError: it has none, or one with tokens that its embedding has no row for.
    """
    tokenizer: Tokenizer = with_end_ids(load_tokenizer(source.path), source.config.eos_ids)
    if tokenizer is None:
        raise UserError(f"reward model {source.name!r}: no tokenizer.json in {source.path}")
    check_every_token(tokenizer, source.config.vocab_size, f"reward model {source.name!r}")
    return tokenizer


def read_reward(path: str | os.PathLike[str]) -> tuple[Path, DecoderConfig]:
    """Finds the folder of a reward model, and reads the config of its decoder.

    Raises:
        UserError: nothing there, not a reward model, or one with several labels.
    """
    folder = find_folder(path)
    raw = read_json(folder / "config.json")
    names = raw.get("architectures") or ()
    if not any(str(name).endswith("ForSequenceClassification") for name in names):
        raise UserError(
            f"reward model {os.fspath(path)!r}: {folder / 'config.json'} names architectures"
            f" {list(names)}; a *ForSequenceClassification is needed"
        )
    labels = raw.get("id2label")
    n = len(labels) if isinstance(labels, dict) else raw.get("num_labels", 1)
    if n != 1:
        raise UserError(
            f"reward model {os.fspath(path)!r}: num_labels={n} (config.json: id2label={labels});"
            " a reward is one number, so only num_labels=1 is supported"
        )
    return folder, replace(hf.read_config(folder), tie_embeddings=True)


def encode_for_reward(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Message],
    completion: str,
    inputs: TemplateInputs = NO_INPUTS,
) -> tuple[int, ...]:
    """Returns the tokens of a prompt with its completion, by the reward model's own tokenizer and
    template.

    Args:
        prompt: chat messages; or a text, which becomes a user message where there is a template and
            is followed by the completion where there is none.
        inputs: what the template reads beside the messages, as the policy's does.

    Raises:
        UserError: messages, and no template or one that refuses them.
    """
    messages = as_messages(prompt)
    if messages is None:
        assert isinstance(prompt, str), "a prompt is a text or messages"
        if not has_template(tokenizer):
            return encode_text(tokenizer, prompt + completion)
        messages = ({"role": "user", "content": prompt},)
    return encode_chat(tokenizer, [*messages, {"role": "assistant", "content": completion}], inputs)


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], inputs: TemplateInputs = NO_INPUTS
) -> tuple[int, ...]:
    """Returns the tokens of a whole conversation, including the assistant's last turn."""
    if not has_template(tokenizer):
        raise UserError(
            "the reward model's tokenizer has no chat template to render chat messages with: put"
            " chat_template.jinja into its folder"
        )
    with about("the reward model"):
        return render_chat(tokenizer, messages, False, inputs)


class RewardScorer:
    """A loaded reward model with its tokenizer."""

    def __init__(
        self,
        source: RewardSource,
        mesh: Mesh | None = None,
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
        max_tokens: int | None = None,
    ):
        """
        Args:
            mesh: None for one device.
            dtype: of weights and computation; the head is applied in float32.
            batch_tokens: as in `run_batches`.
            max_tokens: longest sequence; never more than the model's positions.
        """
        self.tokenizer = tokenizer_of_reward(source)
        positions = source.config.max_positions
        self.max_tokens = positions if max_tokens is None else min(positions, max_tokens)
        self.config, self.mesh = source.config, mesh
        self.params, self.head = source.load(mesh, jnp.dtype(dtype))
        self._batch_tokens = batch_tokens

    def score(
        self, sequences: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> tuple[np.ndarray, int]:
        """Scores [N] float32 of token sequences, and how many of these were too long.

        What is too long loses its beginning, but for a BOS: the end is what is judged.
        """
        if not sequences:
            return np.zeros((0,), np.float32), 0
        kept = [self._cut(sequence) for sequence in sequences]
        scores = run_batches(
            kept,
            score_batch,
            self.config,
            self.mesh,
            self.params,
            self.head,
            mesh=self.mesh,
            batch_tokens=self._batch_tokens,
            longest=self.max_tokens,
            progress=progress,
        )
        if (wrong := ~np.isfinite(scores)).any():
            what, first = f"{wrong.sum()} of {len(scores)} rewards", kept[int(np.argmax(wrong))]
            raise not_finite(what, self.params, self.config, first, self.mesh)
        return scores, sum(len(sequence) > self.max_tokens for sequence in sequences)

    def _cut(self, sequence: Sequence[int]) -> Sequence[int]:
        over = len(sequence) - self.max_tokens
        if over <= 0:
            return sequence
        kept = 1 if sequence[0] == self.tokenizer.bos_token_id and self.max_tokens > 1 else 0
        return (*sequence[:kept], *sequence[over + kept :])


def score(path: str | os.PathLike[str], texts: Sequence[str | Sequence[Message]]) -> np.ndarray:
    """Scores texts (taken as they are) or conversations (by the chat template): [N] float32.

    Loads the weights at each call; keep a `RewardScorer` to score often.

    Args:
        path: a Hugging Face folder, or `package:NAME`.
    """
    scorer = RewardScorer(open_reward(path))
    tokenizer = scorer.tokenizer
    return scorer.score(
        [
            encode_text(tokenizer, text) if isinstance(text, str) else encode_chat(tokenizer, text)
            for text in texts
        ]
    )[0]


@partial(jax.jit, static_argnums=(0, 1))
def score_batch(
    config: DecoderConfig,
    mesh: Mesh | None,
    params: Params,
    head: jax.Array,
    tokens: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """Computes head . hidden state of each row's last token.

    Args:
        head: [D] float32.
        tokens: [B, T] int32, padding on either side.
        mask: [B, T] bool, True at real tokens.

    Returns:
        [B] float32, unbounded, whole on every device; 0 for a row without tokens.
    """
    hidden = decoder.forward(config, params, tokens, mask, mesh=mesh)
    at = jnp.max(jnp.where(mask, jnp.arange(mask.shape[1])[None], 0), -1)
    last = jnp.take_along_axis(hidden, at[:, None, None], 1)[:, 0]
    scores = jnp.einsum("bd,d->b", last.astype(jnp.float32), head)
    scores = jnp.where(mask.any(-1), scores, 0.0)
    if mesh is None:
        return scores
    return jax.lax.with_sharding_constraint(scores, NamedSharding(mesh, PartitionSpec()))


class Reward:
    """Every reward of a batch; functions and model work side by side."""

    def __init__(
        self,
        make: Callable[[Config, Mapping[str, bytes]], RewardFunctions],
        config: Config,
        given: Mapping[str, bytes],
        model: RewardModel | None,
    ):
        """
        Args:
            make: starts the processes of the functions that a config names.
            given: functions of Python, pickled, by their entries in `reward.functions`.
        """
        self._make, self._model, self._rows = make, model, config.batch_rows
        self._functions = make(config, given)

    def use(self, config: Config, given: Mapping[str, bytes]) -> None:
        """Replaces the functions by those of another config."""
        functions = self._make(config, given)
        self._functions.close()
        self._functions = functions

    def score(self, rollout: Rollout) -> RewardReport:
        futures = self._functions.submit(rollout, self._rows)
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

    def __init__(self, config: Config, source: RewardSource, mesh: Mesh):
        """Loads the model; with `offload.frozen` it is on the host except during `score`."""
        r, longest = config.reward, longest_conversation(config)
        with phase(f"loads {source.name}"):
            scorer = RewardScorer(source, mesh, r.compute_dtype, r.batch_tokens, longest)
            self._scorer = scorer
            dated(scorer.tokenizer, config.data.chat_date)
        for resident in reward_residents(config):
            resident.keep(scorer)

    def score(self, rollout: Rollout) -> tuple[np.ndarray, int]:
        """Returns the rewards [B] float32, in the model's own unit, 0 at padding rows; and how many
        sequences were too long and lost their beginning."""
        encode = partial(encode_for_reward, self._scorer.tokenizer)
        sequences = [
            encode(before_last_turn(prompt, completion), completion.whole_text, prompt.inputs)
            for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True)
        ]
        with phase("scores"):
            scores, cut = self._scorer.score(sequences, detail)
        current().prefetch_next()
        out = np.zeros((rollout.sequences.tokens.shape[0],), np.float32)
        out[: len(scores)] = scores
        return out, cut


def before_last_turn(prompt: Prompt, completion: Completion) -> str | Sequence[Message]:
    """Returns the prompt and, for an episode, all turns before the last one, as messages if the
    prompt is a chat."""
    chat, turns = chat_of(prompt), completion.turns[:-1]
    if chat is None:
        return prompt.text + "".join(turn.text for turn in turns)
    roles = {"assistant": "assistant", "environment": "user"}
    return [*chat, *({"role": roles[turn.role], "content": turn.text} for turn in turns)]


def reward_residents(config: Config) -> tuple[Resident, ...]:
    """Returns the arrays that a reward model keeps, without its head of one row."""

    def weights(run: RunArrays) -> Params:
        model = run.shapes.inputs.reward
        return {} if model is None else run.params("reward", model)

    stages, offload = ("reward.score",), config.offload.frozen
    return (Resident("reward.params", "parameters", weights, stages, "params", offload=offload),)


def longest_conversation(config: Config) -> int:
    """Returns the number of tokens beyond which a conversation loses its beginning."""
    whole = config.max_prompt_tokens + config.max_new_tokens + TEMPLATE_TOKENS
    return config.reward.max_tokens or whole


def reward_batches(config: Config, model: DecoderConfig) -> Collection[tuple[int, int]]:
    """Returns the `text_batches` of the reward model."""
    longest = min(longest_conversation(config), model.max_positions)
    return text_batches(longest, config.reward.batch_tokens)


def reward_programs(run: RunArrays) -> Iterator[Program]:
    """Yields the reward model, if there is one, on a full batch of the longest sequences."""
    model, role = run.shapes.inputs.reward, "reward"
    if model is not None:
        weights = run.array(role, jnp.float32, model.d_model, whole=True)
        given = (model, run.meshes[role], run.params(role, model), weights)
        batch = run.text_batch(role, reward_batches(run.config, model))
        yield Program(role, "score", score_batch, (*given, *batch), "reward.score")
