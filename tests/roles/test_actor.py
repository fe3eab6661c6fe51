"""Laws of the update: what it computes does not depend on how the batch is cut or over how many
devices.
"""

import math
import re
from copy import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from dense_losses import jsd
from tiny_models import random_adapters, random_params

from jaxrl.algorithms.methods import method_of
from jaxrl.config.schema import Config
from jaxrl.data.batch import pack_sequences
from jaxrl.errors import RunError
from jaxrl.formats.weights import leaves_by_path
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import forward, token_logits
from jaxrl.models.lora import TARGETS, Lora, frozen_and_trained, join_adapters, merge_adapters
from jaxrl.models.parameters import head, param_shardings, unstack
from jaxrl.roles.actor import Actor, Receiver
from jaxrl.roles.optimizer import learning_rate
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import HiddenSignal, Rollout, Sequences, TopKSignal, Totals, TrainBatch

SIZES = 48, 16, 2, 4, 2, 4, 24
MODEL = DecoderConfig("llama", *SIZES, tie_embeddings=True, eos_ids=(1,), final_softcap=0.1)
HEAD = np.random.default_rng(9).standard_normal((48, 24)).astype(np.float32)
"""Directions of the teacher's head, which is twice as long."""
CAP = np.float32(4)
"""Of the teacher's logits. As the student's it is so low that it changes the logits."""

pytestmark = pytest.mark.usefixtures("shared_programs")


def mesh(*shape):
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


def config(*overrides):
    plain = [
        "distill.jsd_beta=0.5",
        "optimizer.name=sgd",
        "optimizer.b1=0.0",
        "optimizer.warmup_steps=0",
    ]
    more = ["optimizer.learning_rate=0.5", "optimizer.clip_norm=null", "steps=4"]
    return Config.load(None, [*plain, *more, *overrides])


def sequences(rows=12, seed=0):
    draw = np.random.default_rng(seed)

    def tokens(low, high):
        return draw.integers(2, 48, draw.integers(low, high)).tolist()

    prompts = [tokens(2, 6) for _ in range(rows)]
    completions = [tokens(1, 8) for _ in range(rows)]
    widths = {"prompt_width": 6, "completion_width": 8}
    return pack_sequences(prompts, completions, **widths, pad_id=0, row_multiple=8)


def batch(rows=12, poison=False):
    packed = sequences(rows)
    n = len(packed.tokens)
    zeros = np.zeros(packed.loss_mask.shape, np.float32)
    rollout = Rollout(packed, (), (), np.arange(n), zeros, zeros, policy_version=0)
    hidden = np.random.default_rng(1).standard_normal((n, 8, 24)).astype(np.float32)
    if poison:
        hidden[3, 0] = np.nan
    return rollout, {"teacher": [HiddenSignal(hidden=hidden)]}


@cache
def at_start(model=MODEL):
    """Parameters on the host."""
    return jax.device_get(random_params(model))


def actor(cfg, m, tmp_path, teacher=None, restore=None):
    start = at_start()
    return Actor(
        cfg,
        MODEL,
        m,
        load=lambda dtype: jax.device_put(
            jax.tree.map(lambda x: np.asarray(x).astype(dtype), start), param_shardings(MODEL, m)
        ),
        vocab_size=48,
        frozen=jax.device_put({"teacher_head": 2 * HEAD, "teacher_softcap": CAP}),
        rollout_shardings=param_shardings(MODEL, m, "unstacked"),
        run_dir=tmp_path,
        teacher=teacher,
        restore=restore,
    )


def adapters(lora, m, b=0.0):
    """The model, its base weights and its adapters, whose B are `b`, on a mesh."""
    model = replace(MODEL, lora=lora)
    first = random_adapters(model, seed=3)
    both = jax.device_get(join_adapters(random_params(MODEL), _with_b(first, b)))
    return model, *frozen_and_trained(jax.device_put(both, param_shardings(model, m)))


def _with_b(tree, b):
    return {
        name: _with_b(x, b)
        if isinstance(x, dict)
        else np.full(x.shape, b, x.dtype)
        if "_b" in name
        else x
        for name, x in tree.items()
    }


def adapted_actor(cfg, m, tmp_path, model, base, first):
    return Actor(
        cfg,
        model,
        m,
        load=lambda dtype: jax.tree.map(lambda x: jnp.array(x, dtype), first),
        vocab_size=48,
        frozen=jax.device_put({"teacher_head": 2 * HEAD, "teacher_softcap": CAP}),
        rollout_shardings=frozen_and_trained(param_shardings(model, m, "unstacked"))[1],
        run_dir=tmp_path,
        base=base,
        base_name="base",
    )


def trained(cfg, m, tmp_path, steps=1):
    one = actor(cfg, m, tmp_path)
    report = [one.update(*batch(), step=i).metrics for i in range(steps)][-1]
    return jax.device_get(one.state.params), report


def assert_close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return trained(config(), mesh(1, 1, 1), tmp_path_factory.mktemp("run"))


def dense_logits(params, tokens, mask):
    """Those that the completions are drawn from."""
    return token_logits(MODEL, params, forward(MODEL, params, tokens, mask)[:, 5:-1])


def test_the_step_is_the_gradient_of_the_dense_loss_over_the_global_count(reference):
    rollout, scores = batch()
    s, start = rollout.sequences, at_start()
    teacher_logits = CAP * np.tanh(np.asarray(scores["teacher"][0].hidden) @ (2 * HEAD).T / CAP)

    def loss(params):
        own = dense_logits(params, s.tokens, s.mask)
        total, count = jsd(own, teacher_logits, s.loss_mask, beta=0.5)
        return total / count

    value, grads = jax.jit(jax.value_and_grad(loss))(start)
    expected = jax.tree.map(lambda p, g: np.asarray(p) - 0.5 * np.asarray(g), start, grads)
    params, report = reference
    assert_close(params, expected, 1e-6)
    assert report["distill/divergence"] == pytest.approx(float(value), rel=1e-5)
    norm = np.sqrt(sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(grads)))
    assert report["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert report["optimizer_step"] == 1


def test_the_moving_average_is_that_of_the_versions(tmp_path):
    """w' = 0.75 w' + 0.25 w in float32, after each update that was applied and no other; what the
    teacher gets is a cast of it."""
    own = ["teacher.model=policy", "teacher.ema=0.75", "distill.signal=topk", "distill.top_k=8"]
    cfg = config(*own, "teacher.dtype=bfloat16", "actor.param_dtype=bfloat16")
    one = actor(cfg, mesh(1, 1, 1), tmp_path, Receiver("unstacked", "bfloat16", None, "sent"))
    versions = [jax.device_get(one.state.params)]
    average = jax.tree.map(lambda x: x.astype(np.float32), versions[0])
    assert_close(one.state.ema, average, 0)
    for step in range(3):
        one.update(*topk_batch(poison=step == 1), step=step)
        versions.append(jax.device_get(one.state.params))
        if step == 1:  # the gradient was not finite
            assert_close(versions[-1], versions[-2], 0)
        else:
            new = jax.tree.map(lambda x: x.astype(np.float32), versions[-1])
            average = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, average, new)
        assert_close(one.state.ema, average, 1e-7)
    sent = one.publish_to_teacher(3)
    narrow = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), one.state.ema)
    assert_close(sent.params, jax.jit(unstack)(narrow), 0)
    with pytest.raises(RuntimeError, match="asked for version 2, the actor holds 3"):
        one.publish_to_teacher(2)


def topk_batch(poison):
    rollout, _ = batch()
    n, rng = len(rollout.sequences.tokens), np.random.default_rng(2)
    logprobs = np.log(rng.dirichlet(np.ones(9), (n, 8))).astype(np.float32)
    ids = np.argsort(rng.random((n, 8, 48)), -1)[..., :8].astype(np.int32)
    tail = np.where(poison, np.nan, logprobs[..., 8])
    signal = TopKSignal(topk_ids=ids, topk_logprobs=logprobs[..., :8], tail_logprob=tail)
    return rollout, {"teacher": [jax.tree.map(jnp.asarray, signal)]}


def in_place_of_updates(one, seen):
    """Has an actor call `seen` with what an update is given, and returns the program. In its place,
    which others test, each weight grows by 1, and the state before is gone as one that was
    donated."""
    nothing, real = SimpleNamespace(memory_analysis=lambda: None), one.programs.update

    def update(state, *given):
        seen(state, *given)
        grown = jax.tree.map(lambda x: jax.device_put(np.asarray(x) + 1, x.sharding), state)
        jax.tree.map(lambda x: x.delete(), state)
        last = {"finite": True, "trains": True, "grad_norm": 1.0}
        return grown, ({"loss": (1.0, 1.0)}, {}, {}, last)

    update.lower = lambda *_: SimpleNamespace(compile=lambda: nothing)
    one.programs = copy(one.programs)
    one.programs.update = update
    return real


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_the_teachers_head_is_that_of_the_version_before_the_update(ema, tmp_path):
    """In the teacher's dtype, and kept while the minibatches of a batch change the policy."""
    own = ["teacher.model=policy", f"teacher.ema={ema}", "teacher.dtype=bfloat16"]
    one = actor(config(*own, "actor.minibatches=2"), mesh(1, 1, 1), tmp_path)
    if ema:  # after updates the two differ, and the teacher's is the average
        average = jax.tree.map(lambda x: jax.device_put(np.asarray(x) - 2), one.state.ema)
        one.state = replace(one.state, ema=average)
    heads = []
    in_place_of_updates(
        one, lambda _, given, *rest: heads.append(np.asarray(given["teacher_head"]))
    )
    for step in range(2):
        before = jax.device_get(one.state.params if ema == 0 else one.state.ema)
        rollout, scores = batch()
        hidden = scores["teacher"][0].hidden[..., : MODEL.d_model]
        one.update(rollout, {"teacher": [HiddenSignal(hidden=hidden)]}, step)
        assert len(heads) == 2 * (step + 1)
        for kept in (np.asarray(one._frozen["teacher_head"]), *heads[-2:]):
            assert kept.dtype == jnp.bfloat16
            np.testing.assert_array_equal(kept, np.asarray(head(before)).astype(kept.dtype))
        after = np.asarray(head(one.state.params)).astype(kept.dtype)
        assert (after != kept).any()


CUTS = [f"actor.micro_batch_tokens={14 * 5}", "distill.lean=true", "distill.chunk_tokens=16"]


@pytest.mark.parametrize(
    "overrides",
    and_slow(
        [[*CUTS, "actor.remat=full"]],
        [["actor.micro_batch_tokens=14"], CUTS[:1], *([*CUTS[1:], f"actor.remat={how}"]
                                                       for how in ("full", "dots"))],
    ),
    ids=",".join,
)  # fmt: skip
def test_neither_micro_batches_nor_lean_nor_rematerialisation_change_anything(
    reference, overrides, tmp_path
):
    """All at once, and each."""
    params, report = trained(config(*overrides), mesh(1, 1, 1), tmp_path)
    assert_close(params, reference[0], 2e-6)
    assert report["distill/divergence"] == pytest.approx(
        reference[1]["distill/divergence"], rel=1e-5
    )


REDUCED = ["actor.reduce_dtype=float32", "actor.remat=dots"]


@pytest.mark.parametrize(
    ("shape", "budget", "more"),
    and_slow(
        [((2, 1, 2, 2), 14, REDUCED)],
        [
            *(((2, 2, 2), 14, []), ((2, 1, 2, 2), 14, []), ((1, 2, 2), "null", REDUCED)),
            *((shape, "null", []) for shape in ((2, 1, 2, 2), (1, 2, 4), (1, 1, 1, 4))),
        ],
    ),
)
def test_devices_change_nothing(reference, shape, budget, more, tmp_path):
    """Nor do gradients that are reduced in float32, which those of a float32 run are."""
    cfg = config(f"actor.micro_batch_tokens={budget}", *more)
    params, report = trained(cfg, mesh(*shape), tmp_path)
    assert_close(params, reference[0], 2e-6 if more else 5e-6)
    assert report["distill/top1_agreement"] == pytest.approx(reference[1]["distill/top1_agreement"])


CUT = "actor.micro_batch_tokens=14", "actor.max_nonfinite=2"
"""Of the tests that train on two devices, which are one program."""


@pytest.mark.parametrize(
    ("shape", "overrides"),
    and_slow(
        [((1, 2, 1), CUT)],
        [((2, 2, 2), ("actor.minibatches=3", "optimizer.learning_rate=0.0"))],
    ),
)
def test_agreement_of_each_row_is_that_of_the_dense_logits(shape, overrides, tmp_path):
    """However the batch is cut; padded rows have none."""
    rollout, scores = batch()
    s, start = rollout.sequences, at_start()
    theirs = np.asarray(scores["teacher"][0].hidden) @ HEAD.T
    mine = np.asarray(jax.jit(dense_logits)(start, s.tokens, s.mask))
    agreed = (mine.argmax(-1) == theirs.argmax(-1)) & s.loss_mask
    tokens = s.loss_mask.sum(-1)
    expected = np.where(tokens > 0, agreed.sum(-1) / np.maximum(tokens, 1), np.nan)
    assert 0 < agreed.sum() < tokens.sum() and (tokens == 0).any()
    one = actor(config(*overrides), mesh(*shape), tmp_path)
    trained = one.update(rollout, scores, step=0)
    np.testing.assert_allclose(trained.by_row["distill/top1_agreement"], expected, rtol=1e-6)
    mean = agreed.sum() / tokens.sum()
    assert trained.metrics["distill/top1_agreement"] == pytest.approx(float(mean))


SCHEDULED = [
    *("actor.minibatches=4", "actor.epochs_per_batch=2", "optimizer.lr_schedule=linear"),
    *("optimizer.clip_norm=1e-3", "optimizer.min_lr_ratio=0.1", "steps=3"),
]


def test_minibatches_and_epochs_count_updates(tmp_path):
    cfg = config(*SCHEDULED)
    params, report = trained(cfg, mesh(1, 1, 1), tmp_path, steps=2)
    assert report["optimizer_step"] == 2 * 4 * 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    again, _ = trained(cfg, mesh(1, 1, 1), tmp_path, steps=2)
    assert_close(again, params, 0)  # the order of the rows is seeded


def short_batch(kept):
    """In which so many rows train."""
    rollout, scores = batch()
    mask = np.array(rollout.sequences.loss_mask)
    mask[np.flatnonzero(mask.any(-1))[kept:]] = False
    return replace(rollout, sequences=replace(rollout.sequences, loss_mask=mask)), scores


DECAYED = ["optimizer.name=adamw", "optimizer.weight_decay=0.1", "actor.minibatches=4"]
DECAYED += ["optimizer.lr_schedule=linear"]


@pytest.mark.parametrize(
    ("schedule", "kept"),
    and_slow([("linear", 12)], [*(("linear", kept) for kept in (3, 1, 0)), ("cosine", 2)]),
)
def test_schedules_end_with_the_run_however_many_updates_its_batches_make(schedule, kept, tmp_path):
    """Of two passes over four minibatches, in which `kept` rows train: the same rate at the end of
    each batch, and the changes have that rate (SGD, of a gradient that clipping makes 1). Short
    batches are in the default suite too, in the next test."""
    cfg = config(*SCHEDULED, f"optimizer.lr_schedule={schedule}")
    one, (rollout, scores) = actor(cfg, mesh(1, 1, 1), tmp_path), short_batch(kept)
    rate, made = learning_rate(cfg.optimizer, 3 * 8), 2 * min(kept, 4)
    for step in range(3):
        before = jax.device_get(one.state.params)
        told = one.update(rollout, scores, step=step).metrics
        assert told["actor/learning_rate"] == pytest.approx(float(rate(8 * step + 7)), rel=1e-5)
        assert told["optimizer_step"] == made * (step + 1)
        after = jax.device_get(one.state.params)
        moves = jax.tree.leaves(jax.tree.map(np.subtract, after, before))
        moved = np.sqrt(sum(np.square(x).sum() for x in moves))
        if made == 8:
            assert moved <= 1.001e-3 * sum(float(rate(8 * step + i)) for i in range(8))
        if made == 2:  # both at the end of a pass
            rates = [float(rate(8 * step + i)) for i in (3, 7)]
            assert abs(rates[0] - rates[1]) <= moved / 1e-3 * 1.001 <= 1.002 * sum(rates)
            assert moved / 1e-3 >= 0.9 * sum(rates)  # gradients of nearly the same weights


def test_a_run_resumed_between_short_batches_has_the_same_schedule(tmp_path):
    cfg, (rollout, scores) = config(*DECAYED), short_batch(2)
    one = actor(cfg, mesh(1, 1, 1), tmp_path)
    for step in range(3):
        one.update(rollout, scores, step=step)
        if step == 1:
            one.save(tmp_path / "2", step=2)
            assert one.saved(2) is None
    again = actor(cfg, mesh(1, 1, 1), tmp_path, restore=tmp_path / "2")
    told = again.update(rollout, scores, step=2).metrics
    assert_close(again.state.params, one.state.params, 0)
    assert told["actor/learning_rate"] == pytest.approx(0.5 * (1 - 11 / 16))
    assert told["optimizer_step"] == 6


def test_a_non_finite_gradient_changes_nothing_and_dumps_the_batch(tmp_path):
    one = actor(config(*CUT), mesh(1, 2, 1), tmp_path)
    before = jax.device_get(one.state)
    report = one.update(*batch(poison=True), step=7).metrics
    assert report["actor/skipped_updates"] == 1 and report["optimizer_step"] == 0
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(one.state), strict=True):
        np.testing.assert_array_equal(x, y)
    with np.load(tmp_path / "nonfinite" / "step_8.npz") as dumped:
        np.testing.assert_array_equal(dumped["sequences.tokens"], sequences().tokens)
        assert np.isnan(dumped["teacher.hidden"]).any()
    assert (
        one.update(*batch(), step=8).metrics["actor/skipped_updates"] == 0
    )  # a good one starts the count anew
    one.update(*batch(poison=True), step=9)
    with pytest.raises(RunError, match="not finite 2 updates in a row.*step_11.npz"):
        one.update(*batch(poison=True), step=10)


def test_an_update_in_which_no_token_trains_changes_nothing_and_is_counted(tmp_path):
    """Neither momentum nor weight decay moves the weights."""
    one = actor(config(*DECAYED), mesh(1, 1, 1), tmp_path)
    told = one.update(*short_batch(2), step=0).metrics
    assert told["actor/empty_updates"] == 0 and told["optimizer_step"] == 2
    before = jax.device_get(one.state)
    told = one.update(*short_batch(0), step=1).metrics
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(one.state), strict=True):
        np.testing.assert_array_equal(x, y)
    # Rows that train nothing are not computed: one empty update stands for all minibatches.
    assert told["actor/empty_updates"] == 1 and told["actor/skipped_updates"] == 0
    assert told["optimizer_step"] == 2


def test_state_is_donated_and_one_shape_compiles_once(tmp_path):
    one = actor(config(), mesh(1, 1, 1), tmp_path)
    old = one.state
    for step in range(3):
        one.update(*batch(), step=step)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert one.programs.update._cache_size() == 1


def test_the_state_keeps_its_dtypes(tmp_path):
    """Of what an update returns; nothing is compiled."""
    cfg = config("optimizer.name=adamw", "actor.dtype=bfloat16", "actor.param_dtype=bfloat16")
    one = actor(cfg, mesh(1, 2, 1), tmp_path)
    given, returned = jax.tree.map(lambda x: (x.shape, x.dtype), one.state), []
    real = in_place_of_updates(one, lambda *args: returned.append(real.eval_shape(*args)[0]))
    one.update(*batch(), step=0)
    (state,) = returned
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == given
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    moments = {x.dtype for x in jax.tree.leaves(state.opt_state) if x.ndim}
    assert moments == {jnp.dtype("float32")}


def test_published_weights_are_the_policy_cast_and_unstacked(tmp_path):
    one = actor(config(*CUT), mesh(1, 2, 1), tmp_path)
    with pytest.raises(RuntimeError, match="version 3, the actor holds 0"):
        one.publish(3, "float32")
    weights = one.publish(0, "bfloat16")
    assert weights.version == 0
    moved = {path for path in leaves_by_path(weights.params) if "/k/" in path or "/up/" in path}
    assert moved <= set(weights.checksums)  # whose rows are gathered
    kernel = one.state.params["layers"]["mlp"]["up"]["kernel"]
    for i, layer in enumerate(weights.params["layers"]):
        expected = np.asarray(kernel[i].astype(jnp.bfloat16))
        np.testing.assert_array_equal(np.asarray(layer["mlp"]["up"]["kernel"]), expected)
    one.update(*batch(), step=0)  # donates the state: the published copy lives on
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(weights.params))
    assert np.isfinite(np.asarray(head(weights.params), np.float32)).all()


REPEATED = {
    "tied, all axes, shared prompts, bfloat16 masters": (True, (2, 2, 2), 4, "bfloat16"),
    "tied": (True, (1, 1, 1), 1, "float32"),
    "tied, tensor, bfloat16 masters": (True, (1, 1, 2), 1, "bfloat16"),
    "untied, all axes, shared prompts": (False, (2, 2, 2), 4, "float32"),
}
"""All at once, and each setting of the four: tied or not, the mesh, rows of a prompt, the masters'
dtype."""


def of_a_repeated_token(tied, held):
    """The model, and its parameters on the host, of which the blocks add nothing to the residual
    stream."""
    model = replace(MODEL, tie_embeddings=tied)
    params = jax.tree.map(np.array, at_start(model))
    for part, kernel in (("attn", "o"), ("mlp", "down")):
        params["layers"][part][kernel]["kernel"][:] = 0
    return model, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(held), params)


def gradient_of_a_repeated_token(tied, shape, group, held):
    (model, params), m = of_a_repeated_token(tied, held), mesh(*shape)
    params = jax.device_put(params, param_shardings(model, m))
    tokens, mask = np.full((64, 64), 5, np.int32), np.ones((64, 64), bool)
    sequences = Sequences(tokens, mask, mask[:, 1:], group=group)
    count = float(sequences.loss_mask.sum())
    cfg = config("algorithm=sft", "teacher.model=null", "actor.dtype=bfloat16")
    loss = method_of(cfg).make_loss(cfg, model, m, 48)

    def total(params):
        return loss(params, {}, TrainBatch(sequences), Totals(count, count, 64.0))[0][0]

    found = jax.jit(jax.grad(total))(params)["embed"]["embedding"]
    assert found.dtype == held
    return np.asarray(found[5], np.float64)


def by_differences(tied):
    """The same gradient, of 64 x 63 equal losses in float64."""
    model, params = of_a_repeated_token(tied, np.float64)
    table, own = params["embed"]["embedding"], np.eye(model.d_model)

    def loss(row):
        rows = (table if tied else params["lm_head"]["kernel"]).copy()
        if tied:
            rows[5] = row
        hidden = row / np.sqrt(np.square(row).mean() + model.rms_norm_eps) * params["norm"]["scale"]
        z = model.final_softcap * np.tanh(rows @ hidden / model.final_softcap)
        return 64 * 63 * (np.log(np.exp(z).sum()) - z[5])

    step = 1e-6
    return np.array([loss(table[5] + step * x) - loss(table[5] - step * x) for x in own]) / 2 / step


@pytest.mark.parametrize("case", and_slow(list(REPEATED)[:1], list(REPEATED)[1:]))
def test_the_gradient_of_a_frequent_token_is_summed_in_float32(case):
    """64 rows of 64 times the same token: 4096 equal terms, of which a sum in bfloat16 keeps 256.

    The blocks add nothing, so that bfloat16 rounds each term by little.
    """
    tied, *setting = REPEATED[case]
    found, expected = gradient_of_a_repeated_token(tied, *setting), by_differences(tied)
    assert np.linalg.norm(expected) > 1
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)


def test_the_update_makes_no_array_of_the_global_batch(tmp_path):
    """Of many micro-batches it takes less memory beside its arguments than a quarter of a device's
    part of the signal, which no device gathers."""
    one, rows = actor(config("actor.micro_batch_tokens=28"), mesh(2, 1, 1), tmp_path), 1 << 12

    def array(*dims, dtype="float32"):
        return jax.ShapeDtypeStruct((rows, *dims), dtype, sharding=one.programs.row_sharding)

    sequences = Sequences(array(14, dtype="int32"), array(14, dtype="bool"), array(8, dtype="bool"))
    given = TrainBatch(sequences, HiddenSignal(hidden=array(8, 24)), array(8))
    index = one.programs.micro_batches(np.arange(rows), np.full(rows, 14), sequences, 1, rows)
    assert len(index) > 4
    update = one.programs.update.lower(one.state, one._frozen, given, index, 1).compile()
    assert update.memory_analysis().temp_size_in_bytes < rows // 2 * 8 * 24  # a number has 4
    widths = {int(n) for n in re.findall(r"f32\[(\d+),8,24\]", update.as_text())}
    assert widths - {1, 2} == {rows // 2}  # of a micro-batch's share 2 rows; the parameter


def test_adapters_of_full_rank_take_the_step_of_full_fine_tuning(tmp_path, reference):
    """With A the identity and a scale of 1, B's first step of SGD is that of the kernel."""
    full, m = MODEL.d_model, mesh(1, 1, 1)
    wide = tuple(name for name in TARGETS if name != "down_proj")  # all that read d_model numbers
    model, base, first = adapters(Lora(full, float(full), wide), m)
    first = jax.tree.map(
        lambda x: (
            np.broadcast_to(np.eye(full, dtype=x.dtype), x.shape)
            if x.shape[-1] == full == x.shape[-2]
            else x
        ),
        first,
    )
    for group, name in (path.split("/") for path in TARGETS.values()):
        if "lora_b" in (pair := first["layers"][group].get(name, {})):
            pair["lora_b"] = np.zeros_like(pair["lora_b"])
    one = adapted_actor(config(), m, tmp_path, model, base, first)
    held = jax.tree.leaves(base)
    one.update(*batch(), step=0)
    assert all(a is b for a, b in zip(jax.tree.leaves(one._base), held, strict=True))
    ours = jax.device_get(jax.jit(merge_adapters)(join_adapters(base, one.state.params), 1.0))[
        "layers"
    ]
    theirs, start = reference[0]["layers"], at_start()["layers"]
    for group, name in (TARGETS[target].split("/") for target in wide):
        moved = ours[group][name]["kernel"] - start[group][name]["kernel"]
        wanted = theirs[group][name]["kernel"] - start[group][name]["kernel"]
        np.testing.assert_allclose(moved, wanted, atol=2e-6)
        assert np.abs(wanted).max() > 1e-4
    assert (ours["mlp"]["down"]["kernel"] == start["mlp"]["down"]["kernel"]).all()


def two_steps_of_adapters(shape, folder, *overrides):
    """The adapters after them, and what the second reports."""
    m = mesh(*shape)
    cfg = config("optimizer.b1=0.9", "optimizer.clip_norm=0.5", *overrides)
    model, base, first = adapters(Lora(3, 6.0), m, b=0.02)
    one = adapted_actor(cfg, m, folder, model, base, first)
    held = jax.tree.leaves(base)
    one.update(*batch(), step=0)
    report = one.update(*batch(), step=1).metrics
    assert all(a is b for a, b in zip(jax.tree.leaves(one._base), held, strict=True))
    return jax.device_get(one.state.params), report


@pytest.fixture(scope="module")
def adapters_alone(tmp_path_factory):
    return two_steps_of_adapters((1, 1, 1), tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize(
    ("shape", "micro"), and_slow([], [((2, 2, 2), 20), ((1, 2, 2), None), ((2, 2, 1), 20)])
)
def test_the_step_of_adapters_depends_on_no_mesh(shape, micro, tmp_path, adapters_alone):
    """Whole or cut into micro-batches; with clipping by the norm of all adapters; what is frozen
    stays the same arrays. In the default suite: the gradients of adapters on several devices in
    test_lora.py and test_quantised.py, and such a run in test_mixtures.py."""
    cut = [] if micro is None else [f"actor.micro_batch_tokens={micro}"]
    shared, many = two_steps_of_adapters(shape, tmp_path, *cut)
    alone, one = adapters_alone
    assert_close(alone, shared, 2e-5)
    assert many["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)


def test_adapters_alone_have_moments_and_are_sent(tmp_path):
    m = mesh(2, 1, 1)
    model, base, first = adapters(Lora(2, 4.0, ("q_proj", "up_proj")), m)
    cfg = config("optimizer.name=adamw", "rollout.dtype=bfloat16")
    one = adapted_actor(cfg, m, tmp_path, model, base, first)
    count = sum(x.size for x in jax.tree.leaves(first))
    assert count == model.n_trained
    moments = [x for x in jax.tree.leaves(one.state.opt_state) if x.ndim > 1]
    assert sum(x.size for x in moments) == 2 * count
    sent = one.publish(0, "bfloat16")
    assert sent.nbytes == 2 * count
    names = {str(path[-1].key) for path, _ in jax.tree_util.tree_leaves_with_path(sent.params)}
    assert names == {"lora_a", "lora_b"}
    assert set(sent.checksums) == set(leaves_by_path(sent.params))
