"""What a teacher with another tokenizer sends and how the student learns from it, against its plain
log-probs of its own tokens."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from byte_tokenizers import BYTES, OTHER, WORDS
from tiny_models import make_mesh, random_params

from jaxrl import Config
from jaxrl.algorithms.aligned import stretch_baseline, with_baseline
from jaxrl.algorithms.signals import Projection, distill_loss
from jaxrl.data.alignment import Aligner, Speaker
from jaxrl.data.batch import make_rollout
from jaxrl.losses.cells import LEFT_OUT, LONGER
from jaxrl.losses.divergence import jsd
from jaxrl.models import decoder, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.sharding.reshard import to_host
from jaxrl.teacher.local_teacher import Scorer
from jaxrl.types import Aligned, Completion, Continues, Prompt, TrainBatch

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
    limits = {"pad_id": 0, "max_prompt_tokens": 8, "max_new_tokens": 16, "row_multiple": 4}
    return make_rollout(prompts, [each[:2], each[2:]], policy_version=1, **limits)


def made(signal, *overrides):
    keys = ["teacher.tokenizer=own", f"distill.signal={signal}", f"distill.jsd_beta={BETA[signal]}"]
    more = [f"distill.top_k={K}", "distill.chunk_tokens=7", "max_new_tokens=16"]
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
    return decoder.logits(config, params, decoder.forward(config, params, tokens, mask))


def bits_of(words):
    return int.from_bytes(np.asarray(words, np.int32).tobytes(), "little")


def left_out(words, bits):
    """[cells] bool."""
    return np.array([bits_of(words) >> int(bit) & 1 for bit in bits], bool)


def increments(logs, tokens, side, bits, given, ends, words):
    """Of each token its part in the increment of log F; and `open` before it."""
    found, opens, after = [], [], 0.0
    for at, token in enumerate(tokens):
        before = after if bits_of(words[at]) else 0.0
        more = (side.rank >= side.rank[token]) & (side.rank <= side.last[token])
        if ends[at] == Continues.OF_A_CELL:
            more &= side.cells == side.cells[token]
        own = logs[at, token]
        after = jax.nn.logsumexp(logs[at, more]) - own if ends[at] else 0.0
        known = before
        if given[at] == LEFT_OUT:
            out = left_out(words[at], bits)[side.cells]
            known = jnp.log(jnp.expm1(before) + jnp.exp(logs[at, out]).sum())
        elif given[at] >= 0:
            known = jax.nn.logsumexp(logs[at, side.cells == given[at]])
        found.append(own + after - known)
        opens.append(before)
    return found, opens


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
        side, bits = aligner.cells.teacher, aligner.cells.bits
        given = np.where(signal == "sampled", -1, row.their_cells)
        parts_of = row.tokens, side, bits, given, row.their_ends, row.their_left_out
        values, opens = increments(logs, *parts_of)
        borders = [*np.flatnonzero(row.starts), len(row.tokens)]
        sums = {a: np.sum(values[a:b]) for a, b in zip(borders, borders[1:], strict=False)}
        wanted = [sums[first] for first in row.index]
        np.testing.assert_allclose(found.stretch_logprobs[at, :n], wanted, atol=3e-4)
        if signal == "sampled" and row.tokens[-1] == aligner.teacher.end:
            # The increments of a whole text are its log-prob.
            begins = row.kinds != Aligned.INSIDE
            total = found.stretch_logprobs[at, :n][begins].sum()
            said = logs[np.arange(len(row.tokens)), row.tokens].sum()
            np.testing.assert_allclose(total, said, rtol=1e-5)
        if signal == "hidden":
            np.testing.assert_allclose(found.open[at, :n], np.array(opens)[row.index], atol=3e-4)
        np.testing.assert_array_equal(found.kinds[at, :n], row.kinds)
        np.testing.assert_array_equal(found.cells[at, :n], row.cells)
        if signal == "topk":
            border = (row.cells != -1) & (row.kinds != Aligned.INSIDE)
            p = np.exp(logs[row.index] - np.array(opens)[row.index][:, None])
            cells = np.stack([p[:, side.cells == n].sum(-1) for n in range(aligner.cells.size)], -1)
            out = np.stack([left_out(w, bits[:-1]) for w in row.left_out])
            cells = np.where(out, 0, cells)
            cells = np.concatenate([cells, 1 - cells.sum(-1, keepdims=True)], -1)
            best = np.argsort(-cells, -1)[:, :K]
            sent = np.take_along_axis(cells, found.at_borders.topk_ids[at, :n], -1)
            np.testing.assert_allclose(
                sent[border], np.take_along_axis(cells, best, -1)[border], atol=1e-5
            )
            tail = np.log1p(-np.take_along_axis(cells, best, -1).sum(-1))
            np.testing.assert_allclose(
                found.at_borders.tail_logprob[at, :n][border], tail[border], atol=3e-4
            )


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
    their_head, numbers = np.asarray(parameters.head(teacher[1])), np.arange(aligner.cells.size)
    mine, theirs, bits = aligner.cells
    frozen = {"teacher_head": their_head, "cells": aligner.cells}
    b, c = rollout.sequences.loss_mask.shape
    tokens = rollout.sequences.tokens[:, -c:]
    flat = replace(rollout.sequences, tokens=tokens)
    batch = with_baseline(jax.device_put(TrainBatch(flat, sent, rollout.sampler_logprobs)), signal)
    baseline = np.asarray(batch.teacher.baseline)
    of_sets = (sent.cells <= LEFT_OUT) & flat.loss_mask & (signal != "sampled")
    assert (abs(baseline[of_sets]) > 0.1).all() and not baseline[~of_sets].any()
    hidden = np.random.default_rng(1).normal(0, 0.5, (b, c, 32)).astype(np.float32)
    head = np.asarray(parameters.head(student[1]))
    p = Projection.of(config, mesh, student[0].vocab_size)

    def found(hidden, head):
        total, count, metrics = distill_loss(p, hidden, head, batch, frozen)
        return total, (count, metrics)

    mask, kinds = flat.loss_mask, sent.kinds
    begins = mask & (kinds != Aligned.INSIDE)
    border = begins & (sent.cells != -1) & (signal != "sampled")
    rest = mask & (kinds != Aligned.NOT) & ((kinds != Aligned.EXACT) | (signal == "sampled"))
    code = np.where(signal == "sampled", -1, sent.cells)
    given = np.where(begins, np.where(code <= LONGER, LONGER - code, code), -1)
    out = np.array([[left_out(words, bits[:-1]) for words in row] for row in sent.left_out])

    def in_cells(logs, cell_of, open):
        p = jnp.exp(logs - open[..., None]) @ (cell_of[:, None] == numbers)
        p = jnp.where(out, 0, p)
        p = jnp.concatenate([p, 1 - p.sum(-1, keepdims=True)], -1)
        return jnp.log(jnp.maximum(p, 1e-37))

    def score(logs, token, code, words):
        """The log-prob of a token given what is known of it."""
        known = np.ones(len(mine.cells), bool)
        if code == LEFT_OUT:
            known = left_out(words, bits)[mine.cells]
        elif code != -1:
            longer = code <= LONGER
            known = mine.cells == (LONGER - code if longer else code)
            known &= ~longer | (mine.common == 0)
        return logs[token] - jax.nn.logsumexp(logs[known])

    def wanted(hidden, head):
        logs = jax.nn.log_softmax(jnp.einsum("bcd,vd->bcv", hidden, head), -1)
        each = [
            increments(logs[r], tokens[r], mine, bits, given[r], sent.ends[r], sent.left_out[r])
            for r in range(b)
        ]
        values, open = (
            jnp.stack([jnp.stack([*map(jnp.float32, e[k])]) for e in each]) for k in range(2)
        )
        total, own = 0.0, in_cells(logs, mine.cells, open)
        if signal == "hidden":
            z = jax.nn.log_softmax(
                jnp.einsum("bcd,vd->bcv", sent.at_borders.hidden, their_head), -1
            )
            their = in_cells(z, theirs.cells, sent.open)
            total, _ = jsd(own, their, border, beta=BETA[signal])
        elif signal == "topk":
            chosen = jnp.take_along_axis(own, sent.at_borders.topk_ids, -1)
            tail = jnp.log1p(-jnp.exp(chosen).sum(-1, keepdims=True))
            teacher = jnp.concatenate(
                [sent.at_borders.topk_logprobs, sent.at_borders.tail_logprob[..., None]], -1
            )
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
            of_tokens = (
                score(logs[row, k], tokens[row, k], code[row, k], sent.left_out[row, k])
                for k in range(first, last)
            )
            gap = values[row, first:last].sum() - sent.stretch_logprobs[row, first]
            gap = jax.lax.stop_gradient(gap)
            total += weight * gap
            for k, chosen in zip(range(first, last), of_tokens, strict=True):
                slope = weight * (gap - baseline[row, k])
                total += slope * (chosen - jax.lax.stop_gradient(chosen))
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


@pytest.mark.parametrize("n", [1, 2, 8, 40])
def test_a_baseline_is_of_the_other_stretches(n):
    """Of rows with a stretch of a few tokens each, some of them without a token of a set, one
    aligned token, one that is not: by hand, and the same whatever the stretch itself sampled."""
    draw = np.random.default_rng(n)
    kinds = np.full((n, 6), Aligned.INSIDE)
    kinds[:, 0], kinds[:, 4], kinds[:, 5] = Aligned.START, Aligned.EXACT, Aligned.NOT
    cells = draw.choice([LEFT_OUT, 3, -1], (n, 6))
    cells[0, 1], cells[:, 4] = LEFT_OUT, LEFT_OUT
    mask = np.ones((n, 6), bool)
    own = draw.normal(size=(n, 6)).astype(np.float32)
    theirs = np.repeat(draw.normal(size=(n, 1)), 6, 1).astype(np.float32)
    theirs[-1] -= 1000 * (n > 2)
    gaps = np.clip(own[:, :4].sum(-1) - theirs[:, 0], -20, 20)
    counted = (cells[:, :4] == LEFT_OUT).any(-1)
    expected = np.zeros((n, 6))
    for row in range(n):
        others = [gaps[i] for i in range(n) if counted[i] and i != row]
        expected[row, :4] = np.mean(others) if others else 0
        expected[row, 4] = np.mean(gaps[counted])
    expected = np.where(cells == LEFT_OUT, expected, 0) * (np.arange(6) < 5)
    found = stretch_baseline(kinds, cells, theirs, own, mask)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    own[0] += 1
    np.testing.assert_allclose(stretch_baseline(kinds, cells, theirs, own, mask)[0, :4],
                               expected[0, :4], atol=1e-5)  # fmt: skip
