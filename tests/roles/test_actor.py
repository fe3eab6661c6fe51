"""Laws of the update: what it computes does not depend on how the batch is cut or over how many
devices.
"""

import math
import re
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from dense_losses import jsd
from tiny_models import random_adapters, random_params

from jaxrl.algorithms.methods import method_of
from jaxrl.config.schema import Config
from jaxrl.data.batch import pack
from jaxrl.errors import RunError
from jaxrl.formats.weights import leaves_by_path
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import forward, logits
from jaxrl.models.lora import TARGETS, Lora, frozen_and_trained, join, merged
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
    return pack(prompts, completions, **widths, pad_id=0, row_multiple=8)


def batch(rows=12, poison=False):
    packed = sequences(rows)
    n = len(packed.tokens)
    zeros = np.zeros(packed.loss_mask.shape, np.float32)
    rollout = Rollout(packed, (), (), np.arange(n), zeros, zeros, policy_version=0)
    hidden = np.random.default_rng(1).standard_normal((n, 8, 24)).astype(np.float32)
    if poison:
        hidden[3, 0] = np.nan
    return rollout, {"teacher": [HiddenSignal(hidden=jnp.asarray(hidden))]}


def actor(cfg, m, tmp_path, teacher=None, restore=None):
    start = random_params(MODEL)
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
    both = jax.device_get(join(random_params(MODEL), _with_b(first, b)))
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


def test_the_step_is_the_gradient_of_the_dense_loss_over_the_global_count(reference):
    rollout, scores = batch()
    s, start = rollout.sequences, random_params(MODEL)
    teacher_logits = CAP * np.tanh(np.asarray(scores["teacher"][0].hidden) @ (2 * HEAD).T / CAP)

    def loss(params):
        hidden = forward(MODEL, params, s.tokens, s.mask)[:, 5:-1]
        total, count = jsd(logits(MODEL, params, hidden), teacher_logits, s.loss_mask, beta=0.5)
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
    m = mesh(2, 1, 1)
    one = actor(cfg, m, tmp_path, Receiver("unstacked", "bfloat16", None, "sent"))
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


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_the_teachers_head_is_that_of_the_version_before_the_update(ema, tmp_path):
    """In the teacher's dtype, and kept while the minibatches of a batch change the policy."""
    own = ["teacher.model=policy", f"teacher.ema={ema}", "teacher.dtype=bfloat16"]
    one = actor(config(*own, "actor.minibatches=2"), mesh(1, 1, 1), tmp_path)
    for step in range(2):
        before = jax.device_get(one.state.params if ema == 0 else one.state.ema)
        rollout, scores = batch()
        hidden = scores["teacher"][0].hidden[..., : MODEL.d_model]
        one.update(rollout, {"teacher": [HiddenSignal(hidden=hidden)]}, step)
        kept = np.asarray(one._frozen["teacher_head"])
        assert kept.dtype == jnp.bfloat16
        np.testing.assert_array_equal(kept, np.asarray(head(before)).astype(kept.dtype))
        after = np.asarray(head(one.state.params)).astype(kept.dtype)
        assert (after != kept).any()


@pytest.mark.parametrize("budget", and_slow([14 * 5], [14]))
def test_micro_batches_change_nothing(reference, budget, tmp_path):
    params, report = trained(config(f"actor.micro_batch_tokens={budget}"), mesh(1, 1, 1), tmp_path)
    assert_close(params, reference[0], 2e-6)
    assert report["distill/divergence"] == pytest.approx(
        reference[1]["distill/divergence"], rel=1e-5
    )


@pytest.mark.parametrize(
    ("shape", "budget"),
    and_slow(
        [((2, 1, 2, 2), 14)],
        [((2, 2, 2), 14), *((shape, "null") for shape in ((2, 1, 2, 2), (1, 2, 4), (1, 1, 1, 4)))],
    ),
)
def test_devices_change_nothing(reference, shape, budget, tmp_path):
    cfg = config(f"actor.micro_batch_tokens={budget}")
    params, report = trained(cfg, mesh(*shape), tmp_path)
    assert_close(params, reference[0], 5e-6)
    assert report["distill/top1_agreement"] == pytest.approx(reference[1]["distill/top1_agreement"])


@pytest.mark.parametrize(
    ("shape", "overrides"),
    and_slow(
        [((1, 2, 1), ("actor.micro_batch_tokens=14",))],
        [((2, 2, 2), ("actor.minibatches=3", "optimizer.learning_rate=0.0"))],
    ),
)
def test_agreement_of_each_row_is_that_of_the_dense_logits(shape, overrides, tmp_path):
    """However the batch is cut; padded rows have none."""
    rollout, scores = batch()
    s, start = rollout.sequences, random_params(MODEL)
    theirs = np.asarray(scores["teacher"][0].hidden) @ HEAD.T
    hidden = jax.jit(partial(forward, MODEL))(start, s.tokens, s.mask)[:, 5:-1]
    mine = np.asarray(jax.jit(partial(logits, MODEL))(start, hidden))
    agreed = (mine.argmax(-1) == theirs.argmax(-1)) & s.loss_mask
    tokens = s.loss_mask.sum(-1)
    expected = np.where(tokens > 0, agreed.sum(-1) / np.maximum(tokens, 1), np.nan)
    assert 0 < agreed.sum() < tokens.sum() and (tokens == 0).any()
    one = actor(config("distill.jsd_beta=0.5", *overrides), mesh(*shape), tmp_path)
    trained = one.update(rollout, scores, step=0)
    np.testing.assert_allclose(trained.by_row["distill/top1_agreement"], expected, rtol=1e-6)
    mean = agreed.sum() / tokens.sum()
    assert trained.metrics["distill/top1_agreement"] == pytest.approx(float(mean))


@pytest.mark.parametrize("remat", and_slow(["full"], ["dots"]))
def test_rematerialisation_and_lean_change_nothing(reference, remat, tmp_path):
    cfg = config(f"actor.remat={remat}", "distill.lean=true", "distill.chunk_tokens=16")
    assert_close(trained(cfg, mesh(1, 1, 1), tmp_path)[0], reference[0], 2e-6)


def test_gradients_reduced_in_float32_are_those_of_a_float32_run(reference, tmp_path):
    cfg = config("actor.reduce_dtype=float32", "actor.remat=dots")
    assert_close(trained(cfg, mesh(1, 2, 2), tmp_path)[0], reference[0], 2e-6)


def test_minibatches_and_epochs_count_updates(tmp_path):
    cfg = config("actor.minibatches=3", "actor.epochs_per_batch=2")
    params, report = trained(cfg, mesh(1, 1, 1), tmp_path, steps=2)
    assert report["optimizer_step"] == 2 * 3 * 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    again, _ = trained(cfg, mesh(1, 1, 1), tmp_path, steps=2)
    assert_close(again, params, 0)  # the order of the rows is seeded


@pytest.mark.parametrize(
    ("schedule", "kept"),
    and_slow([("linear", 12), ("linear", 1), ("linear", 0)], [("linear", 3), ("cosine", 2)]),
)
def test_schedules_end_with_the_run_however_many_updates_its_batches_make(schedule, kept, tmp_path):
    """Of two passes over four minibatches, in which `kept` rows train: the same rate at the end of
    each batch, and the changes have that rate (SGD, of a gradient that clipping makes 1)."""
    keys = ["actor.minibatches=4", "actor.epochs_per_batch=2", f"optimizer.lr_schedule={schedule}"]
    cfg = config(*keys, "optimizer.clip_norm=1e-3", "optimizer.min_lr_ratio=0.1", "steps=3")
    one, (rollout, scores) = actor(cfg, mesh(1, 1, 1), tmp_path), batch()
    mask = np.array(rollout.sequences.loss_mask)
    mask[np.flatnonzero(mask.any(-1))[kept:]] = False
    rollout = replace(rollout, sequences=replace(rollout.sequences, loss_mask=mask))
    rate, made = learning_rate(cfg.optimizer, 3 * 8), 2 * min(kept, 4)
    for step in range(3):
        before = jax.device_get(one.state.params)
        told = one.update(rollout, scores, step=step).metrics
        assert told["actor/learning_rate"] == pytest.approx(float(rate(8 * step + 7)), rel=1e-5)
        assert told["optimizer_step"] == made * (step + 1)
        moves = [a - b for a, b in zip(jax.tree.leaves(one.state.params), jax.tree.leaves(before),
                                       strict=True)]  # fmt: skip
        moved = np.sqrt(sum(np.square(x).sum() for x in moves))
        if made == 8:
            assert moved <= 1.001e-3 * sum(float(rate(8 * step + i)) for i in range(8))
        if made == 2:  # both at the end of a pass
            rates = [float(rate(8 * step + i)) for i in (3, 7)]
            assert abs(rates[0] - rates[1]) <= moved / 1e-3 * 1.001 <= 1.002 * sum(rates)
            assert moved / 1e-3 >= 0.9 * sum(rates)  # gradients of nearly the same weights


def test_a_run_resumed_between_short_batches_has_the_same_schedule(tmp_path):
    keys = ["actor.minibatches=4", "optimizer.lr_schedule=linear", "optimizer.name=adamw"]
    cfg, (rollout, scores) = config(*keys), batch()
    mask = np.array(rollout.sequences.loss_mask)
    mask[np.flatnonzero(mask.any(-1))[2:]] = False
    rollout = replace(rollout, sequences=replace(rollout.sequences, loss_mask=mask))
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
    one = actor(config("actor.max_nonfinite=2"), mesh(1, 2, 1), tmp_path)
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
    decayed = ["optimizer.name=adamw", "optimizer.weight_decay=0.1", "actor.minibatches=2"]
    one = actor(config(*decayed, "optimizer.lr_schedule=linear"), mesh(1, 1, 1), tmp_path)
    told = one.update(*batch(), step=0).metrics
    assert told["actor/empty_updates"] == 0 and told["optimizer_step"] == 2
    before, (rollout, scores) = jax.device_get(one.state), batch()
    nothing = np.zeros_like(rollout.sequences.loss_mask)
    empty = replace(rollout, sequences=replace(rollout.sequences, loss_mask=nothing))
    told = one.update(empty, scores, step=1).metrics
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(one.state), strict=True):
        np.testing.assert_array_equal(x, y)
    # Rows that train nothing are not computed: one empty update stands for all minibatches.
    assert told["actor/empty_updates"] == 1 and told["actor/skipped_updates"] == 0
    assert told["optimizer_step"] == 2


def test_state_is_donated_keeps_its_dtypes_and_one_shape_compiles_once(tmp_path):
    cfg = config("optimizer.name=adamw", "actor.dtype=bfloat16", "actor.param_dtype=bfloat16")
    one = actor(cfg, mesh(1, 2, 1), tmp_path)
    old = one.state
    for step in range(3):
        one.update(*batch(), step=step)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert one.programs.update._cache_size() == 1
    assert {leaf.dtype for leaf in jax.tree.leaves(one.state.params)} == {jnp.dtype("bfloat16")}
    moments = {x.dtype for x in jax.tree.leaves(one.state.opt_state) if x.ndim}
    assert moments == {jnp.dtype("float32")}


def test_published_weights_are_the_policy_cast_and_unstacked(tmp_path):
    one = actor(config(), mesh(1, 2, 1), tmp_path)
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


def gradient_of_a_repeated_token(tied, shape, group, held, dtype):
    model, m = replace(MODEL, tie_embeddings=tied), mesh(*shape)
    params = random_params(model)
    for part, kernel in (("attn", "o"), ("mlp", "down")):
        part = params["layers"][part][kernel]
        part["kernel"] = np.zeros_like(part["kernel"])
    params = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16).astype(held), params)
    params = jax.device_put(params, param_shardings(model, m))
    tokens, mask = np.full((64, 64), 5, np.int32), np.ones((64, 64), bool)
    sequences = Sequences(tokens, mask, mask[:, 1:], group=group)
    count = float(sequences.loss_mask.sum())
    cfg = config("algorithm=sft", "teacher.model=null", f"actor.dtype={dtype}")
    loss = method_of(cfg).make_loss(cfg, model, m, 48)

    def total(params):
        return loss(params, {}, TrainBatch(sequences), Totals(count, count, 64.0))[0][0]

    found = jax.jit(jax.grad(total))(params)["embed"]["embedding"]
    assert found.dtype == held
    return np.asarray(found[5], np.float64)


@cache
def in_float32(tied):
    """On one device, of sequences that share nothing."""
    return gradient_of_a_repeated_token(tied, (1, 1, 1), 1, "float32", "float32")


@pytest.mark.parametrize("case", and_slow(list(REPEATED)[:1], list(REPEATED)[1:]))
def test_the_gradient_of_a_frequent_token_is_summed_in_float32(case):
    """64 rows of 64 times the same token: 4096 equal terms, of which a sum in bfloat16 keeps 256.

    The blocks add nothing to the residual stream, so that bfloat16 rounds each term by little.
    """
    tied, *setting = REPEATED[case]
    found, expected = gradient_of_a_repeated_token(tied, *setting, "bfloat16"), in_float32(tied)
    assert np.linalg.norm(expected) > 1
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)


def test_the_update_makes_no_array_of_the_global_batch(tmp_path):
    """Twice as many micro-batches take no more memory, and no device gathers the signal."""
    one = actor(config("actor.micro_batch_tokens=28"), mesh(2, 2, 1), tmp_path)

    def compiled(rows):
        def array(*dims, dtype="float32"):
            return jax.ShapeDtypeStruct((rows, *dims), dtype, sharding=one.programs.row_sharding)

        sequences = Sequences(
            array(14, dtype="int32"), array(14, dtype="bool"), array(8, dtype="bool")
        )
        hidden = array(8, 24)
        given = TrainBatch(sequences, HiddenSignal(hidden=hidden), array(8))
        index = one.programs.micro_batches(np.arange(rows), np.full(rows, 14), sequences, 1, rows)
        assert len(index) > 4
        return one.programs.update.lower(one.state, one._frozen, given, index, 1).compile()

    few, many = compiled(64), compiled(128)
    temporary = [x.memory_analysis().temp_size_in_bytes for x in (few, many)]
    assert temporary[1] == pytest.approx(temporary[0], rel=0.03)
    widths = {int(n) for n in re.findall(r"f32\[(\d+),8,24\]", many.as_text())}
    assert widths - {1, 2} == {128 // 4}  # of a micro-batch's share 2 rows; the parameter


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
    one.update(*batch(), step=0)
    ours = jax.device_get(jax.jit(merged)(join(base, one.state.params), 1.0))["layers"]
    theirs, start = reference[0]["layers"], jax.device_get(random_params(MODEL))["layers"]
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
    ("shape", "micro"), and_slow([((2, 2, 2), 20)], [((1, 2, 2), None), ((2, 2, 1), 20)])
)
def test_the_step_of_adapters_depends_on_no_mesh(shape, micro, tmp_path, adapters_alone):
    """Whole or cut into micro-batches; with clipping by the norm of all adapters; what is frozen
    stays the same arrays."""
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
