"""A prompt that a group shares is computed once, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from runs import GSPO, SHORT, save_model
from tiny_models import make_mesh, model_of_its_kinds, tiny_model

from jaxrl import Config
from jaxrl.algorithms.signals import Projection, completion_hidden
from jaxrl.config.settings import DistillConfig
from jaxrl.models.batching import round_up
from jaxrl.models.decoder import forward
from jaxrl.models.packing import count_tokens, pack_streams, row_devices
from jaxrl.roles import actor, microbatch
from jaxrl.roles.microbatch import rows_of_groups, saves_by_sharing, shared_group
from jaxrl.roles.reference import Reference
from jaxrl.teacher.local_teacher import Scorer
from jaxrl.train import train
from jaxrl.types import Rollout, Sequences

N, G, P, C = 4, 3, 7, 5


def sequences(vocab: int, seed: int = 0) -> Sequences:
    """4 prompts of 7, 3, 1 and 5 tokens with 3 completions each of 1 to 5."""
    rng = np.random.default_rng(seed)
    prompts = np.zeros((N, P), bool)
    for row, length in enumerate((7, 3, 1, 5)):
        prompts[row, P - length :] = True
    completions = np.arange(C)[None] < rng.integers(1, C + 1, (N * G, 1))
    tokens = np.repeat(rng.integers(0, vocab, (N, P)), G, 0)
    tokens = np.concatenate([tokens, rng.integers(0, vocab, (N * G, C))], 1).astype(np.int32)
    mask = np.concatenate([np.repeat(prompts, G, 0), completions], 1)
    return Sequences(tokens, mask, completions)


@pytest.mark.parametrize(
    ("name", "axes", "remat", "group"),
    and_slow(
        # Streams with room for padding are held against whole rows in test_attention.py.
        [
            ("qwen2_sliding", (1, 2, 1, 2), "dots", G),  # biases and windows
        ],
        [
            ("gemma4_shared", (2, 2, 2), "full", G),  # their hidden states: below
            ("qwen3", (1, 1, 1), "none", G),
            ("qwen3", (1, 1, 1, 4), "none", G),  # more than KV heads, as in test_context.py
            ("qwen2", (2, 2, 2), "dots", G),
            ("qwen2", (1, 2, 1, 2), "full", 1),
            ("olmo2", (1, 1, 2, 2), "none", G),
            ("phi3", (1, 1, 1), "none", G),
            ("gemma4", (1, 1, 2, 2), "dots", G),  # heads of two widths and numbers
        ],
    ),
    ids=str,
)
def test_hidden_states_and_gradients_are_those_of_whole_sequences(name, axes, remat, group):
    """Without padding, with prompts of their own or shared; whatever room there is."""
    config, params = model_of_its_kinds(name)
    mesh, given = make_mesh(*axes), with_rows_of_padding(config.vocab_size)
    plain, expected = whole_sequences(name)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(params, given):
        packing = pack_streams(given, mesh)
        hidden = completion_hidden(config, params, packing, mesh, remat=remat)
        assert given.capacity is None or hidden.shape[1] == given.capacity[1]
        return value_of(packing.completions.unpack(hidden), given)

    shared = replace(given, group=group)
    tight = without_padding(shared, mesh)
    rooms = [tight]
    if mesh.size == 1:
        assert tight.capacity[0] < len(given.mask) * P  # less than the padded rows have
        rooms.append(shared)  # as much as they have
    for packed in rooms:
        (_, streamed), found = run(params, packed)
        np.testing.assert_allclose(streamed, plain, atol=2e-5)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(b, a, atol=2e-5 * float(np.abs(a).max()))


def test_hidden_states_are_those_of_whole_sequences_where_layers_borrow():
    """Keys and values of other layers, and norms of queries and keys."""
    config, params = model_of_its_kinds("gemma4_shared")
    mesh, given = make_mesh(2, 2, 2), with_rows_of_padding(config.vocab_size)

    @jax.jit
    def whole(params, given):
        hidden = forward(config, params, given.tokens, given.mask)[:, P - 1 : -1]
        return value_of(hidden, given)[1]

    @jax.jit
    def run(params, given):
        packing = pack_streams(given, mesh)
        hidden = completion_hidden(config, params, packing, mesh)
        return value_of(packing.completions.unpack(hidden), given)[1]

    found = run(params, without_padding(replace(given, group=G), mesh))
    np.testing.assert_allclose(found, whole(params, given), atol=2e-5)


def without_padding(given: Sequences, mesh) -> Sequences:
    held, parts = count_tokens(given, row_devices(mesh)), mesh.shape["context"]
    return replace(given, capacity=tuple(round_up(int(tokens.max()), parts) for tokens in held))


def with_rows_of_padding(vocab: int) -> Sequences:
    given = sequences(vocab)
    given.mask[-G:], given.loss_mask[-G:] = False, False
    return given


def value_of(hidden, given):
    """A scalar, and the hidden states of the completions."""
    seen = jnp.where(given.loss_mask[..., None], hidden, 0)
    return jnp.sin(seen).sum(), seen


@cache
def whole_sequences(name):
    """The hidden states of padded rows on one device, and the gradient of the scalar."""
    config, params = model_of_its_kinds(name)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(params, given):
        hidden = forward(config, params, given.tokens, given.mask)[:, P - 1 : -1]
        return value_of(hidden, given)

    (_, seen), gradient = run(params, with_rows_of_padding(config.vocab_size))
    return jax.device_get((seen, gradient))


@pytest.mark.parametrize("group", [1, G])
def test_a_stream_too_short_for_its_tokens_is_never_quietly_wrong(group):
    mesh, given = make_mesh(1, 1, 1), replace(sequences(64), group=group)
    n, m = (int(tokens.max()) for tokens in count_tokens(given, row_devices(mesh)))

    @jax.jit
    def run(given):  # of what stands for hidden states
        packing = pack_streams(given, mesh)
        return packing.select_predictors(packing.positions[..., None].astype("float32"), mesh)

    for capacity, right in (((n, m), True), ((n - 1, m), False), ((n, m - 1), False)):
        found = run(replace(given, capacity=capacity))
        assert np.isfinite(found).all() == right and np.isnan(found).all() != right


def flops(given):
    config, params = tiny_model("llama")
    mesh = make_mesh(1, 1, 1)
    run = jax.jit(lambda p, s: completion_hidden(config, p, pack_streams(s, mesh), mesh))
    return run.lower(params, given).cost_analysis()["flops"]  # nothing is compiled


def test_it_saves_the_prompts_share_of_the_work():
    given = sequences(64)
    ratio = flops(replace(given, group=G)) / flops(given)
    assert ratio == pytest.approx((P + G * C) / (G * (P + C)), rel=0.1)


def test_only_what_is_alike_is_shared():
    given = sequences(64)
    assert shared_group(given, G, None) == G
    assert shared_group(given, G, P + G * C) == G
    assert shared_group(given, G, P + G * C - 1) == 1  # does not fit into a micro-batch
    assert shared_group(given, 5, None) == 1  # 12 rows
    assert shared_group(given, 2, None) == 1  # rows of two prompts
    other = given.tokens.copy()
    other[1, P - 1] += 1
    assert shared_group(replace(given, tokens=other), G, None) == 1
    pad = Sequences(
        *(np.pad(x, ((0, G + 1), (0, 0))) for x in (given.tokens, given.mask)),
        np.pad(given.loss_mask, ((0, G + 1), (0, 0))),
    )
    assert shared_group(pad, G, None) == G  # the padding is no group


def test_short_prompts_are_not_worth_it():
    assert saves_by_sharing(8, 100, 100, None)
    assert not saves_by_sharing(8, 10, 100, None)  # saves 8 of 100
    assert not saves_by_sharing(1, 100, 1, None)


def test_rows_of_groups():
    found = rows_of_groups(np.array([[2, 0], [-1, 1]], np.int32), 3)
    assert found.tolist() == [[6, 7, 8, 0, 1, 2], [-1, -1, -1, 3, 4, 5]]
    assert found.dtype == np.int32
    assert rows_of_groups(np.array([5, 3]), 1).tolist() == [5, 3]


CASES = {
    "gspo": [*GSPO, "mesh=actor=2,rollout=1", "batch_size=4", "policy.kl_coef=0.1"],
    "gkd in micro-batches": [
        "mesh=actor=2,rollout=1,teacher=1",
        "group_size=4",
        "actor.micro_batch_tokens=80",
    ],
}


@pytest.mark.parametrize("case", and_slow([], CASES))
def test_a_run_learns_what_it_would_learn_from_whole_sequences(tmp_path, monkeypatch, case):
    """In the default suite the objective's tests compare updates that share prompts with others
    that do not, as those of the scorers here."""
    models = [f"student.model={save_model(tmp_path / 'student', 32, 1, 0)}"]
    models += [f"teacher.model={save_model(tmp_path / 'teacher', 48, 1, 1)}"]
    asked = [*models, *SHORT, "actor.dtype=float32", "data.eval=null", *CASES[case]]
    asked += ["optimizer.name=sgd", "optimizer.learning_rate=0.1", "actor.minibatches=1"]
    groups = []

    def spied(*arguments):
        groups.append(shared_group(*arguments))
        return groups[-1]

    monkeypatch.setattr(actor, "shared_group", spied)
    shared = train(Config.load("builtin:quickstart", [*asked, f"run_dir={tmp_path / 'shared'}"]))
    assert groups == [4, 4]
    monkeypatch.setattr(actor, "shared_group", lambda *_: 1)
    plain = train(Config.load("builtin:quickstart", [*asked, f"run_dir={tmp_path / 'plain'}"]))
    for a, b in zip(shared.metrics[1:], plain.metrics[1:], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6)
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-3)
        assert a["actor/tokens"] == b["actor/tokens"]


def drawn(vocab: int, pad: int = 0) -> Rollout:
    """What `sequences` has, with rows without tokens behind it."""
    given = jax.tree.map(lambda x: np.pad(x, ((0, pad), (0, 0))), sequences(vocab))
    ids = np.concatenate([np.repeat(np.arange(N), G), np.full(pad, -1)]).astype(np.int32)
    probs = np.zeros(given.loss_mask.shape, np.float32)
    topk = np.random.default_rng(1).integers(0, vocab, (*probs.shape, 2)).astype(np.int32)
    return Rollout(given, (), (), ids, probs, probs, 0, student_topk=topk)


@pytest.mark.parametrize(
    ("axes", "parts", "sizes"),
    and_slow(
        [((2, 1, 1), 2, [12, 12])],  # whole groups on each of two devices, and padding alone
        [
            ((2, 1, 1), 2, [12, 2]),
            ((1, 1, 1, 2), 1, [14]),  # as of the run in test_context.py
            ((2, 1, 1), 4, [4, 4, 4, 2]),  # a part has less: each row by itself
        ],
    ),
    ids=str,
)
def test_scorers_say_what_they_say_of_whole_sequences(monkeypatch, axes, parts, sizes):
    config, params = tiny_model("qwen2", mesh := make_mesh(*axes))
    rollout = drawn(config.vocab_size, pad=sum(sizes) - N * G)
    distill = DistillConfig(signal="student_topk", top_k=2)
    widths = []
    spied = microbatch.part_rows

    def spy(*given):
        widths.append(given[-1] // (axes[0] * axes[1]))
        return spied(*given)

    monkeypatch.setattr(microbatch, "part_rows", spy)

    def scores():
        teacher = Scorer(config, params, Projection(distill, mesh, config.vocab_size))
        reference = Reference(Config.load(None, ["distill.chunk_tokens=16"]), config, params, mesh)
        signals = [teacher.score(rollout, part, parts) for part in range(parts)]
        logprobs = [reference.score(rollout, part, parts) for part in range(parts)]
        assert [len(x) for x in logprobs] == [len(x.tail_logprob) for x in signals]
        fields = [(x.topk_logprobs, x.tail_logprob) for x in signals]
        joined = [np.concatenate(x) for x in zip(*fields, strict=True)]
        seen = rollout.sequences.loss_mask
        values = [x[seen] for x in (*joined, np.concatenate(logprobs))]
        return values, [len(x) for x in logprobs]

    shared, found = scores()
    assert found == sizes
    assert set(widths) == {1 if parts == 4 else G}
    monkeypatch.setattr(microbatch, "shared_group", lambda *_: 1)
    plain, _ = scores()
    for a, b in zip(shared, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
