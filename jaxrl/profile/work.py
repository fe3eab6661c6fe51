"""FLOPs and bytes that the work of a step takes at least, from the models' configs and real tokens.

`Work` is one part that happens in one go; parts that must follow one another add up. Padding,
masks, softmax and everything else that is not a product counts as nothing: what remains is what no
program can go below, and a share of a ceiling is never flattered by padding or recomputation.
`copies` is how many groups of devices read the weights, each for itself: the
product of a mesh's `data` and `fsdp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import jax.numpy as jnp

from jaxrl.models.config import DecoderConfig
from jaxrl.models.family import value_or
from jaxrl.plan.plan_inputs import Setting
from jaxrl.plan.simulate import Stage


@dataclass(frozen=True)
class Work:
    """FLOPs (a multiply and an add are two) and bytes to and from memory, at least."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.bytes * times)


def block_params(c: DecoderConfig, tokens: float | None = None) -> float:
    """Counts the weights of all blocks that enter matrix products: of a mixture, those that compute
    a token.

    Args:
        tokens: those that so many tokens read, each of which may pass other experts.
    """
    if c.experts is None:
        return c.dense_weights
    kernels = (p for path, p in c.parameters.items() if "/experts/" in path)
    one = sum(p.size for p in kernels if len(p.shape) == 3) // c.experts.count
    used = c.experts.chosen * (1.0 if tokens is None else tokens)
    return c.dense_weights + c.n_layers * min(used, c.experts.count) * one


def state_size(c: DecoderConfig) -> int:
    """Numbers in the states of a sequence, all layers. Each token decays them, reads them by its
    key, writes them and reads them by its query."""
    d = c.delta
    return 0 if d is None else c.n_recurrent * d.v_heads * d.k_dim * d.v_dim


def forward_work(
    c: DecoderConfig,
    prompts: Sequence[float],
    itemsize: int,
    copies: int = 1,
    *,
    samples: int = 0,
    mean: float = 0.0,
) -> Work:
    """Blocks alone, over prompts of these lengths, each once, and `samples` completions of `mean`
    tokens after each of them; attention is causal, and no token reads beyond a layer's window.
    """
    tokens = sum(prompts) + len(prompts) * samples * mean
    pairs = {
        window: sum(_pairs(0, p, window) + samples * _pairs(p, p + mean, window) for p in prompts)
        for window in c.windows
    }
    flops = (2 * block_params(c) + 6 * state_size(c)) * tokens
    flops += sum(
        4 * n * one.n_heads * one.head_dim * pairs[one.kinds[0].window]
        for one, n in c.alike.items()
        if one.n_attention
    )
    return Work(flops, copies * block_params(c, tokens / copies) * itemsize)


def _pairs(start: float, stop: float, window: int | None) -> float:
    """Counts the pairs of the tokens [start, stop) of a sequence and those that they attend to,
    themselves included."""
    whole = stop if window is None else min(max(window, start), stop)
    reached = (whole - start) * (start + whole + 1) / 2
    return reached if window is None else reached + (stop - whole) * window


def head_work(vocab: int, width: int, tokens: float, itemsize: int, copies: int = 1) -> Work:
    """Returns the work of the logits of `tokens` tokens."""
    return Work(2 * vocab * width * tokens, copies * vocab * width * itemsize)


def divergence_work(
    vocab: int, width: int, teacher_width: int, tokens: float, itemsize: int, copies: int = 1
) -> Work:
    """Returns the work of both models' logits, and of the gradients with respect to the student's
    hidden states and head."""
    flops = 2 * vocab * tokens * (3 * width + teacher_width)
    return Work(flops, copies * vocab * (2 * width + teacher_width) * itemsize)


def adamw_work(params: int) -> Work:
    """Returns the work of AdamW: gradient read; parameters and both moments read and written; all
    in float32."""
    return Work(12 * params, 7 * 4 * params)


def decode_work(
    c: DecoderConfig,
    context: float,
    tokens: float,
    steps: float,
    itemsize: int,
    copies: int = 1,
    read: float | None = None,
) -> Work:
    """Returns the work of `tokens` tokens, each after `context` others on average. Each of the
    `steps` of the batch reads every weight, but of experts only those that its tokens pass, and
    each token reads the keys and values before it; states, in float32, are read and written.

    Args:
        read: keys that are read for a token, on average, where tokens share those of a prompt.
            None: `context`.
    """
    head = c.vocab_size * c.d_model
    held = block_params(c, tokens / max(steps * copies, 1)) + head
    state = state_size(c)
    flops = (2 * (block_params(c) + head) + 6 * state) * tokens
    keys = 0.0
    for one, n in c.alike.items():
        if one.n_attention:
            window = value_or(one.kinds[0].window, context)
            seen, fetched = (min(x, window) for x in (context, value_or(read, context)))
            dims = n * tokens * one.head_dim
            flops += 4 * one.n_heads * dims * seen
            keys += 2 * one.n_kv_heads * dims * fetched
    return Work(flops, (copies * steps * held + keys) * itemsize + 2 * 4 * state * tokens)


@dataclass(frozen=True)
class StepBatch:
    """The real sizes of the batch of a step."""

    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    samples: int
    """Completions of each."""
    mean: float
    """Tokens of a completion."""
    decode_steps: int
    teacher_prompts: tuple[int, ...] | None = None
    """Tokens of each prompt that the teacher reads; None: the same."""
    in_batch: int | None = None
    """Of the prompts, those that are scored and trained on; None: all that were sampled."""

    @property
    def tokens(self) -> float:
        """Returns the number of tokens of all completions."""
        return len(self.prompts) * self.samples * self.mean

    @property
    def scored(self) -> StepBatch:
        """Returns the part that is scored and trained on."""
        prompts, theirs = (x and x[: self.in_batch] for x in (self.prompts, self.teacher_prompts))
        assert prompts is not None
        return replace(self, prompts=prompts, teacher_prompts=theirs, in_batch=None)


def longest_batch(m: Setting) -> StepBatch:
    """Returns the sizes of a batch whose prompts and completions are as long as allowed."""
    n, count = m.prompt_rows, m.sequences // m.prompt_rows
    own, theirs = ((m.prompts(role),) * n for role in ("actor", "teacher"))
    return StepBatch(own, count, m.new_tokens, m.decode_steps, theirs)


def step_work(m: Setting, batches: Sequence[StepBatch]) -> dict[Stage, list[Work]]:
    """Computes the work of each stage whose model is known here, the mean over some steps."""
    works = [_batch_work(m, batch) for batch in batches]
    return {
        stage: [
            Work(fmean(part.flops for part in same), fmean(part.bytes for part in same))
            for same in zip(*(work[stage] for work in works), strict=True)
        ]
        for stage in works[0]
    }


def _batch_work(m: Setting, batch: StepBatch) -> dict[Stage, list[Work]]:
    config, student, found = m.config, m.student, dict[Stage, list[Work]]()
    # Role -> bytes of a weight, and how often the weights are read.
    reads = {
        role: (jnp.dtype(config.roles[role].dtype).itemsize, sizes.rows)
        for role, sizes in m.axes.items()
    }

    def scoring(role: str, model: DecoderConfig, vocab: int | None, batch: StepBatch) -> list[Work]:
        """Returns a pass over the batch and, with a vocabulary, the logits of its completions."""
        n, mean = batch.samples, batch.mean
        forward = forward_work(model, batch.prompts, *reads[role], samples=n, mean=mean)
        if vocab is None:
            return [forward]
        return [forward, head_work(vocab, model.d_model, batch.tokens, *reads[role])]

    taught = "teacher" in m.axes
    if batch.decode_steps:
        prompt, own = fmean(batch.prompts), batch.mean / 2
        sizes = prompt + own, batch.tokens, batch.decode_steps, *reads["rollout"]
        fetched = prompt / batch.samples + own  # a prompt's keys once for all of its completions
        found["rollout", "generate"] = [
            forward_work(student, batch.prompts, *reads["rollout"]),
            decode_work(student, *sizes, read=fetched),
        ]
        if config.distill.signal == "student_topk" and taught:  # the pass that chooses the tokens
            found["rollout", "generate"] += scoring("rollout", student, m.vocab, batch)
    batch = batch.scored
    teachers = m.inputs.teachers if taught else ()
    hidden = config.distill.signal == "hidden"
    if taught:
        read = replace(batch, prompts=batch.teacher_prompts or batch.prompts)
        parts = (scoring("teacher", x, None if hidden else m.vocab, read) for x in teachers)
        found["teacher", "score"] = [w * m.scored_share("teacher") for part in parts for w in part]
    if "reference" in m.axes:
        found["reference", "score"] = scoring("reference", student, student.vocab_size, batch)
    # Forward and backward of each pass over the batch, and the optimizer at each update.
    width = sum(teacher.d_model for teacher in teachers) if hidden else 0
    epochs = config.actor.epochs_per_batch
    (forward,) = scoring("actor", student, None, batch)
    loss = divergence_work(m.vocab, student.d_model, width, batch.tokens, *reads["actor"])
    backward = forward * (2 if student.lora is None else 1)  # frozen weights have no gradient
    optimizer = adamw_work(student.n_trained) * (config.updates_per_batch * m.axes["actor"].data)
    update = [forward * epochs, loss * epochs, backward * epochs, optimizer]
    if config.learns_from_rewards and config.updates_per_batch > 1:  # log-probs before the batch
        update += scoring("actor", student, student.vocab_size, batch)
    found["actor", "update"] = update
    return found
