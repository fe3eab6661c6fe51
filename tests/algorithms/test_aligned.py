"""What a teacher with another tokenizer sends and how the student learns from it, against its plain
log-probs of its own tokens."""

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest
from byte_tokenizers import BYTES, OTHER, WORDS
from cases import and_slow
from numpy_losses import jsd, log_softmax, value_and_gradients
from tiny_models import make_mesh, random_params

from jaxrl import Config
from jaxrl.algorithms.signals import Projection, distill_loss
from jaxrl.data.batch import make_rollout
from jaxrl.data.token_alignment import Aligner, ModelTokenizer
from jaxrl.models import decoder, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.sharding.reshard import to_host
from jaxrl.teacher.local_teacher import Scorer
from jaxrl.types import Aligned, Completion, Prompt, TrainBatch

TEXTS = ("the year 1987", " the\n\nthe", "naïve 1998 19", "x")
K, BETA = 5, {"hidden": 0.4, "topk": 0.4, "sampled": 1.0}


ROWS = max(map(len, (BYTES, OTHER, WORDS))) + 5
"""Of every head, so that the models of a width are one program."""


def model(tokenizer, d_model, seed):
    rows, end = ROWS, (tokenizer.eos_token_id,)
    config = DecoderConfig(
        "llama", rows, d_model, 1, 4, 2, 8, 2 * d_model, tie_embeddings=True, eos_ids=end
    )
    params = jax.device_get(random_params(config, seed))
    params["embed"]["embedding"] = 20 * params["embed"]["embedding"]
    return config, params, ModelTokenizer(tokenizer, rows, end)


def sampled(aligner):
    """A rollout of TEXTS, two for a prompt, with noise for the sampler's log-probs."""
    student = aligner.student
    answers = [[*aligner.student_tokens(text), student.end_id] for text in TEXTS]
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
    return decoder.token_logits(config, params, decoder.forward(config, params, tokens, mask))


CASES = {
    "hidden": ((WORDS, OTHER), "hidden", (2, 1, 1), 2),
    "topk": ((BYTES, WORDS), "topk", (1, 2, 1), 1),
    "sampled": ((OTHER, BYTES), "sampled", (1, 1, 1), 1),
}
"""Tokenizers of student and teacher, the signal, and the mesh and the parts that it is told in."""


@cache
def told(signal):
    return scored(*CASES[signal])


def scored(pair, signal, axes, parts):
    """Student, teacher, their aligner, a rollout, and what the teacher sends of it."""
    student, teacher = model(pair[0], 32, 0), model(pair[1], 48, 1)
    aligner, mesh = Aligner(student[2], teacher[2]), make_mesh(*axes)
    config, params, _ = teacher
    projection = Projection.from_config(made(signal), mesh, config.vocab_size)
    scorer = Scorer(config, params, projection, 16, aligner, 64)
    rollout = sampled(aligner)
    found = [scorer.score(rollout, part, parts) for part in range(parts)]
    found = jax.tree.map(lambda *x: np.concatenate([to_host(a) for a in x]), *found)
    return student, teacher, aligner, rollout, found


def in_outcomes(logs, outcome_of, number):
    """Log-probs of the outcomes; nearly 0 of one without a token."""
    order = np.argsort(outcome_of, kind="stable")
    found, starts = np.unique(outcome_of[order], return_index=True)
    sums = np.full((*logs.shape[:-1], number), 1e-37, logs.dtype)
    within = found < number
    sums[..., found[within]] = np.add.reduceat(np.exp(logs)[..., order], starts, -1)[..., within]
    return np.log(sums)


@pytest.mark.parametrize(
    ("signal", "case"),
    and_slow(
        [(signal, None) for signal in CASES],
        [("hidden", ((WORDS, BYTES), "hidden", (1, 1, 1, 2), 1))],
    ),
)
def test_what_is_sent_is_what_the_teacher_says_of_its_own_tokens(signal, case):
    given = told(signal) if case is None else scored(*case)
    _, (config, params, _), aligner, rollout, found = given
    rows = aligner.align([c.tokens for c in rollout.completions], 64)
    hidden_head = np.asarray(parameters.head(params), np.float64)
    for at, (row, completion) in enumerate(zip(rows, rollout.completions, strict=True)):
        n = len(completion.tokens)
        logs = alone(config, params, rollout.prompts[at].teacher_tokens, row.tokens)
        values = logs[np.arange(len(row.tokens)), row.tokens]
        borders = [*np.flatnonzero(row.starts), len(row.tokens)]
        sums = {a: np.sum(values[a:b]) for a, b in zip(borders, borders[1:], strict=False)}
        wanted = [sums[first] for first in row.index]
        np.testing.assert_allclose(found.span_logprobs[at, :n], wanted, atol=3e-4)
        # The sums of a whole text are its log-prob.
        begins = row.kinds != Aligned.INSIDE
        total = found.span_logprobs[at, :n][begins].sum()
        np.testing.assert_allclose(total, values.sum(), rtol=1e-5)
        np.testing.assert_array_equal(found.kinds[at, :n], row.kinds)
        np.testing.assert_array_equal(found.sizes[at, :n], row.sizes)
        if signal == "hidden":
            said = np.asarray(found.hidden[at, :n], np.float64) @ hidden_head.T
            said -= np.log(np.exp(said).sum(-1, keepdims=True))
            np.testing.assert_allclose(said[begins], logs[row.index][begins], atol=3e-4)
        if signal == "topk":
            of = aligner.outcomes.teacher
            p = np.exp(logs[row.index]) @ (of[:, None] == np.arange(aligner.outcomes.size))
            best = np.argsort(-p, -1)[:, :K]
            sent = np.take_along_axis(p, found.topk_ids[at, :n], -1)
            best = np.take_along_axis(p, best, -1)
            np.testing.assert_allclose(sent[begins], best[begins], atol=1e-5)
            tail = np.log1p(-best.sum(-1))
            np.testing.assert_allclose(found.tail_logprob[at, :n][begins], tail[begins], atol=3e-4)


@pytest.mark.parametrize("signal", BETA)
def test_the_loss_is_of_the_beginnings_of_spans_and_of_their_samples(signal):
    """Value and gradient with respect to the student's hidden states, against dense formulas."""
    student, teacher, aligner, rollout, sent = told(signal)
    config, mesh = made(signal), make_mesh(1, 1, 1)
    their_head, outcomes = np.asarray(parameters.head(teacher[1])), aligner.outcomes
    frozen = {"teacher_head": their_head, "outcomes": outcomes}
    b, c = rollout.sequences.loss_mask.shape
    tokens = rollout.sequences.tokens[:, -c:]
    flat = replace(rollout.sequences, tokens=tokens)
    batch = jax.device_put(TrainBatch(flat, sent, rollout.sampler_logprobs))
    hidden = np.random.default_rng(1).normal(0, 0.5, (b, c, 32)).astype(np.float32)
    head = np.asarray(parameters.head(student[1]))
    p = Projection.from_config(config, mesh, student[0].vocab_size)

    def found(hidden, head):
        total, count, metrics = distill_loss(p, hidden, head, batch, frozen)
        return total, (count, metrics)

    mask, kinds = flat.loss_mask, sent.kinds
    starts = mask & (kinds != Aligned.NOT) & (kinds != Aligned.INSIDE)
    spans = mask & ((kinds == Aligned.START) | ((kinds == Aligned.EXACT) & (signal == "sampled")))

    own = np.take_along_axis(log_softmax(hidden @ head.T.astype(np.float64)), tokens[..., None], -1)
    weights, first_of = np.zeros((b, c)), np.zeros((b, c))
    for row, first in np.argwhere(spans):
        last = first + 1
        while last < c and mask[row, last] and kinds[row, last] == Aligned.INSIDE:
            last += 1
        q, mu = own[row, first:last].sum(), rollout.sampler_logprobs[row, first:last].sum()
        gap = np.clip(q - sent.span_logprobs[row, first], -20, 20)
        weights[row, first:last] = min(np.exp(q - mu), config.distill.ratio_cap) * gap
        first_of[row, first] = weights[row, first]
    theirs = None
    if signal == "hidden":
        z = log_softmax(sent.hidden @ their_head.T.astype(np.float64))
        theirs = in_outcomes(z, outcomes.teacher, outcomes.size)
    elif signal == "topk":
        theirs = np.concatenate([sent.topk_logprobs, sent.tail_logprob[..., None]], -1)

    def wanted(z):
        """Of which the score's value is not counted: a span's is its weight times its gap."""
        logs = log_softmax(z)
        score = weights * np.take_along_axis(logs, tokens[..., None], -1)[..., 0]
        if signal == "sampled":
            return score - score.real + first_of
        # Given the outcome of the first token.
        members = outcomes.student == outcomes.student[tokens][..., None]
        score = score - first_of * np.log(np.where(members, np.exp(logs), 0).sum(-1))
        student = in_outcomes(logs, outcomes.student, outcomes.size)
        if signal == "topk":
            chosen = np.take_along_axis(student, sent.topk_ids, -1)
            tail = np.log1p(-np.exp(chosen).sum(-1, keepdims=True))
            student = np.concatenate([chosen, tail], -1)
        each = jsd(student, np.where(starts[..., None], theirs, np.log(1 / theirs.shape[-1])), 0.4)
        return score - score.real + first_of + starts * each

    each = jax.value_and_grad(found, argnums=(0, 1), has_aux=True)
    (value, (count, metrics)), slopes = jax.jit(each)(hidden, head)
    same, expected = value_and_gradients(wanted, hidden, head, mask)
    np.testing.assert_allclose(value, same, rtol=1e-4)
    for got, want in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=3e-4)
    assert count == mask.sum() and spans.sum() > 5 and starts.sum() > 10
    read = {name: float(a / n) for name, (a, n) in metrics.items() if name.endswith("_bytes")}
    assert read["aligned_bytes"] == 1 and 0.2 < read["exact_bytes"] < 0.9
