"""What a teacher with another tokenizer sends and how the student learns from it, against its plain
log-probs of its own tokens."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizers import BYTES, OTHER, WORDS
from tiny_models import make_mesh, random_params

from jaxrl import Config
from jaxrl.algorithms.aligned import with_baseline
from jaxrl.algorithms.signals import Projection, distill_loss
from jaxrl.data.alignment import Aligner, Speaker
from jaxrl.data.batch import make_rollout
from jaxrl.losses.divergence import jsd
from jaxrl.models import decoder
from jaxrl.models.config import DecoderConfig
from jaxrl.roles.scorer import Scorer
from jaxrl.sharding.reshard import to_host
from jaxrl.types import Aligned, Completion, Prompt, TrainBatch

TEXTS = ("the year 1987", " the\n\nthe", "naïve 1998 19", "x")
K, BETA = 5, {"hidden": 0.4, "topk": 0.4, "sampled": 1.0}


def model(tokenizer, d_model, seed):
    rows, end = len(tokenizer) + 5, (tokenizer.eos_token_id,)
    config = DecoderConfig(
        "llama", rows, d_model, 1, 4, 2, 8, 2 * d_model, tie_embeddings=True, eos_ids=end
    )
    params = random_params(config, seed)
    params["embed"]["embedding"] *= 20
    return config, params, Speaker(tokenizer, rows, end)


def sampled(aligner):
    """A rollout of TEXTS, two for a prompt, with noise for the sampler's log-probs."""
    student = aligner.student
    answers = [[*aligner.student_tokens(text), student.end] for text in TEXTS]
    answers[1].pop()  # it was cut
    noise = np.random.default_rng(0)
    each = [
        Completion(
            tuple(a), np.zeros(len(a)), noise.normal(-2, 1, len(a)).astype(np.float32), "stop"
        )
        for a in answers
    ]
    prompts = [Prompt(i, (5 + i, 6), "p", teacher_tokens=(9, 8 + i, 7)) for i in range(2)]
    limits = {"pad_id": 0, "max_prompt_tokens": 8, "max_new_tokens": 32, "row_multiple": 4}
    return make_rollout(prompts, [each[:2], each[2:]], policy_version=1, **limits)


def made(signal, *overrides):
    keys = ["teacher.tokenizer=own", f"distill.signal={signal}", f"distill.jsd_beta={BETA[signal]}"]
    more = [f"distill.top_k={K}", "distill.chunk_tokens=7", "max_new_tokens=32"]
    return Config.load("builtin:quickstart", [*keys, *more, *overrides])


def alone(config, params, prompt, tokens):
    """[n, V] float64 log-probs of the tokens that follow a prompt, of one sequence by itself."""
    row = np.zeros((1, 128), np.int32)  # one width for all rows: one program
    n = len(prompt) + len(tokens)
    row[0, :n] = *prompt, *tokens
    logits = np.asarray(forward(config, params, row, np.arange(128)[None] < n), np.float64)
    logits = logits[0, len(prompt) - 1 : n - 1]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@partial(jax.jit, static_argnums=0)
def forward(config, params, tokens, mask):
    """[1, T, V] logits."""
    return decoder.logits(params, decoder.forward(config, params, tokens, mask))


@pytest.mark.parametrize(
    ("pair", "signal", "axes", "parts"),
    [
        ((WORDS, OTHER), "hidden", (2, 1, 1), 2),
        ((BYTES, WORDS), "topk", (1, 2, 1), 1),
        ((OTHER, BYTES), "sampled", (1, 2, 1), 1),
        ((WORDS, BYTES), "hidden", (1, 1, 1, 2), 1),
    ],
)
def test_what_is_sent_is_what_the_teacher_says_of_its_own_tokens(pair, signal, axes, parts):
    student, teacher = model(pair[0], 32, 0), model(pair[1], 48, 1)
    aligner, mesh = Aligner(student[2], teacher[2]), make_mesh(*axes)
    config, params, _ = teacher
    projection = Projection.of(made(signal), mesh, config.vocab_size)
    scorer = Scorer(config, params, projection, 16, aligner, 64)
    rollout = sampled(aligner)
    found = [scorer.score(rollout, part, parts) for part in range(parts)]
    found = jax.tree.map(lambda *x: np.concatenate([to_host(a) for a in x]), *found)
    rows = aligner.rows([c.tokens for c in rollout.completions], 64)
    for at, (row, completion) in enumerate(zip(rows, rollout.completions, strict=True)):
        n = len(completion.tokens)
        logs = alone(config, params, rollout.prompts[at].teacher_tokens, row.tokens)
        said = logs[np.arange(len(row.tokens)), row.tokens]
        borders = [*np.flatnonzero(row.starts), len(row.tokens)]
        if signal != "sampled":  # what follows a cell is given that cell
            common = aligner.to_teacher[aligner.to_teacher >= 0]
            for j in np.flatnonzero(row.within != -1):
                members = aligner.cells.teacher == row.within[j]
                members[common] = False
                said[j] -= np.log(np.exp(logs[j, members]).sum()) if members.any() else said[j]
        sums = {first: said[first:last].sum() for first, last in pairwise(borders)}
        wanted = [sums[first] for first in row.index]
        np.testing.assert_allclose(found.stretch_logprobs[at, :n], wanted, atol=3e-4)
        # The sums over stretches conserve the log-prob of the completion.
        begins = row.kinds != Aligned.INSIDE
        total = found.stretch_logprobs[at, :n][begins].sum()
        np.testing.assert_allclose(total, said.sum(), rtol=1e-5)
        np.testing.assert_array_equal(found.kinds[at, :n], row.kinds)
        np.testing.assert_array_equal(found.cells[at, :n], row.cells)
        if signal == "topk":
            border, p = row.cells >= 0, np.exp(logs[row.index])
            cells = np.stack(
                [p[:, aligner.cells.teacher == n].sum(-1) for n in range(aligner.cells.size)], -1
            )
            best = np.argsort(-cells, -1)[:, :K]
            np.testing.assert_array_equal(found.topk_ids[at, :n][border], best[border])
            tail = np.log1p(-np.take_along_axis(cells, best, -1).sum(-1))
            np.testing.assert_allclose(found.tail_logprob[at, :n][border], tail[border], atol=3e-4)


@pytest.mark.parametrize("signal", BETA)
def test_the_loss_is_of_first_cells_and_of_what_follows_them(signal):
    """Value and gradient with respect to the student's hidden states, against dense formulas."""
    student, teacher = model(WORDS, 32, 0), model(OTHER, 48, 1)
    aligner, mesh = Aligner(student[2], teacher[2]), make_mesh(1, 1, 1)
    config = made(signal)
    rollout = sampled(aligner)
    projection = Projection.of(config, mesh, teacher[0].vocab_size)
    scorer = Scorer(teacher[0], teacher[1], projection, 16, aligner, 64)
    sent = jax.tree.map(to_host, scorer.score(rollout))
    their_head, numbers = np.asarray(decoder.head(teacher[1])), np.arange(aligner.cells.size)
    mine, theirs, _ = aligner.cells
    frozen = {"teacher_head": their_head, "cells": (mine, theirs)}
    b, c = rollout.sequences.loss_mask.shape
    tokens = rollout.sequences.tokens[:, -c:]
    flat = replace(rollout.sequences, tokens=tokens)
    batch = with_baseline(jax.device_put(TrainBatch(flat, sent, rollout.sampler_logprobs)), signal)
    baseline = float(batch.teacher.baseline[0, 0])
    assert (abs(baseline) > 0.1) == (signal != "sampled")
    hidden = np.random.default_rng(1).normal(0, 0.5, (b, c, 32)).astype(np.float32)
    head = np.asarray(decoder.head(student[1]))
    p = Projection.of(config, mesh, student[0].vocab_size)

    def found(hidden, head):
        total, count, metrics = distill_loss(p, hidden, head, batch, frozen)
        return total, (count, metrics)

    def in_cells(logs, cell_of):
        p = jnp.exp(logs) @ (cell_of[:, None] == numbers)
        return jnp.log(jnp.maximum(p, 1e-37))

    mask, kinds = flat.loss_mask, sent.kinds
    border = mask & (sent.cells >= 0) & (signal != "sampled")
    rest = mask & (kinds != Aligned.NOT) & ((kinds != Aligned.EXACT) | (signal == "sampled"))

    def wanted(hidden, head):
        logs = jax.nn.log_softmax(jnp.einsum("bcd,vd->bcv", hidden, head), -1)
        total, own = 0.0, in_cells(logs, mine)
        if signal == "hidden":
            z = jax.nn.log_softmax(jnp.einsum("bcd,vd->bcv", sent.hidden, their_head), -1)
            total, _ = jsd(own, in_cells(z, theirs), border, beta=BETA[signal])
        elif signal == "topk":
            chosen = jnp.take_along_axis(own, sent.topk_ids, -1)
            tail = jnp.log1p(-jnp.exp(chosen).sum(-1, keepdims=True))
            teacher = jnp.concatenate([sent.topk_logprobs, sent.tail_logprob[..., None]], -1)
            outcomes = jnp.concatenate([chosen, tail], -1)
            total, _ = jsd(outcomes, teacher, border, beta=BETA[signal])
        token = jnp.take_along_axis(logs, tokens[..., None], -1)[..., 0]
        for row, first in np.argwhere(rest & (kinds != Aligned.INSIDE)):
            last = first + 1
            while last < c and rest[row, last] and kinds[row, last] == Aligned.INSIDE:
                last += 1
            q, mu = token[row, first:last].sum(), rollout.sampler_logprobs[row, first:last]
            weight = jnp.exp(jax.lax.stop_gradient(q) - mu.sum())
            weight = jnp.minimum(weight, config.distill.ratio_cap)
            cell = sent.cells[row, first]
            if signal != "sampled" and cell >= 0:
                q -= token[row, first]
                if tokens[row, first] != cell:
                    members = (mine == cell) & (np.arange(len(mine)) != cell)
                    q += token[row, first] - jax.nn.logsumexp(logs[row, first, members])
            fixed = jax.lax.stop_gradient(q)
            gap = fixed - sent.stretch_logprobs[row, first]
            total += weight * (gap + (gap - baseline) * (q - fixed))
        return total

    each = jax.value_and_grad(found, argnums=(0, 1), has_aux=True)
    (value, (count, metrics)), slopes = jax.jit(each)(hidden, head)
    same, expected = jax.jit(jax.value_and_grad(wanted, argnums=(0, 1)))(hidden, head)
    np.testing.assert_allclose(value, same, rtol=1e-4)
    for got, want in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-4)
    assert count == mask.sum() and rest.sum() > 5 and (border.sum() > 5 or signal == "sampled")
    read = {name: float(a / n) for name, (a, n) in metrics.items() if name.endswith("_bytes")}
    assert read["aligned_bytes"] == 1 and 0.2 < read["exact_bytes"] < 0.9
