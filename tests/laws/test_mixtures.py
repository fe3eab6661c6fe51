"""Runs of mixtures of experts: what divides them changes nothing, and replayed routes are the
sampler's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from engine_requests import sample_groups
from runs import CONSTANT, GSPO, SHORT
from safetensors.numpy import load_file
from tiny_models import make_mesh, random_params
from tiny_tokenizer import tiny_tokenizer

from jaxrl import Config, load_model
from jaxrl.algorithms.signals import completion_logprobs
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.checkpoint.writer import load_rollout, save_rollout
from jaxrl.data.batch import make_rollout
from jaxrl.errors import UserError
from jaxrl.formats import peft
from jaxrl.formats.hf import save_hf
from jaxrl.models import decoder, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta
from jaxrl.models.experts import Clamp, Experts
from jaxrl.models.family import LayerKind
from jaxrl.models.packing import pack_streams
from jaxrl.models.parameters import param_shardings
from jaxrl.roles.actor import Actor
from jaxrl.sampling.engine import Engine, SamplingParams
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.train import train
from jaxrl.types import Completion, Prompt

GIVEN = [*SHORT, *GSPO, "max_prompt_tokens=9", "max_new_tokens=10", "actor.minibatches=1"]
GIVEN += ["data.eval=null", "rollout.launch_tokens=10"]  # one launch: one program of it
REPLAY = "policy.router_replay=true"
KEYS = ("actor/grad_norm", "policy/entropy", "policy/experts_load", "policy/experts_entropy")
KEYS += ("policy/experts_balance",)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One layer of four experts, which reads bytes."""
    experts = Experts(count=4, chosen=2, normalised=True, dense_width=16)
    sizes = ("qwen3_moe", 264, 32, 1, 4, 2, 8, 16)
    config = DecoderConfig(*sizes, experts=experts, tie_embeddings=True, eos_ids=(258,))
    params = random_params(config)
    rows = jnp.full(264, 20.0).at[258].set(80)  # completions of several lengths
    params["embed"]["embedding"] *= rows[:, None]
    folder = save_hf(tmp_path_factory.mktemp("student"), config, params, dtype="float32")
    tiny_tokenizer(template=None).save_pretrained(folder)
    return f"student.model={folder}"


def rows(folder: Path, *keys: str) -> list[dict]:
    given = [*GIVEN, "batch_size=8", *keys, f"run_dir={folder}"]
    return train(Config.load("builtin:quickstart", given)).metrics[1:]


@pytest.mark.slow
def test_a_run_learns_the_same_whatever_divides_its_experts(student: str, tmp_path: Path) -> None:
    """In float32, with the sampler's experts replayed, learner and sampler agree after each update,
    which they would not if copies of a weight had parted. The experts are also balanced. In the
    default suite the run of adapters is divided so."""
    balanced = [student, REPLAY, "student.router_aux_loss_coef=0.1"]
    one = rows(tmp_path / "one", "mesh=actor=1,rollout=1", *balanced)
    axes = ["actor.parallel.expert=2", "actor.parallel.fsdp=2", "rollout.parallel.expert=2"]
    four = rows(tmp_path / "four", "mesh=actor=4,rollout=2", *balanced, *axes)
    for a, b in zip(one, four, strict=True):
        np.testing.assert_allclose([b[key] for key in KEYS], [a[key] for key in KEYS], rtol=1e-3)
        assert a["policy/mismatch_k3"] < 1e-10 and b["policy/mismatch_k3"] < 1e-10
    assert all(row["actor/grad_norm"] > 0 for row in one)


ADAPTERS = [REPLAY, "student.lora.rank=2", "student.base_dtype=nf4", *CONSTANT]
ADAPTERS.append("optimizer.learning_rate=0.02")


@pytest.fixture(scope="module")
def divided(student: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A run of adapters over experts in 4 bits, which learner and sampler divide, and which are
    merged into the rollout's copy."""
    folder = tmp_path_factory.mktemp("divided") / "two"
    axes = ["actor.parallel.expert=2", "rollout.parallel.expert=2", "rollout.merge=true"]
    return folder, rows(folder, "mesh=actor=2,rollout=2", student, *ADAPTERS, *axes)


def test_adapters_of_divided_experts_are_sent_and_written(
    divided: tuple[Path, list[dict]],
) -> None:
    """After an update the sampler has what the learner has, which it would not if copies of a
    factor had parted; each expert's own are in the folder that PEFT loads."""
    folder, metrics = divided
    assert len(metrics) == 2 and all(row["actor/grad_norm"] > 0 for row in metrics)
    assert all(row["policy/mismatch_k3"] < 1e-8 for row in metrics)
    pairs = load_file(folder / "final" / peft.WEIGHTS)
    moved = [
        np.abs(value).max()
        for name, value in pairs.items()
        if ".experts." in name and name.endswith("lora_B.weight")
    ]
    assert len(moved) == 4 * 3 and np.mean(np.array(moved) > 0) > 0.5  # few tokens, few experts
    again = resolve_model(folder)
    assert again.adapter is not None and again.adapter.quantised == "nf4"
    assert np.isfinite(load_model(folder).logits([[3, 4]], [[True, True]])).all()


@pytest.mark.slow
def test_adapters_of_experts_learn_the_same_whatever_divides_them(
    student: str, divided: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    """Beside the experts or merged. In the default suite: the divided run above, and the gradients
    of such adapters on several devices and on one in test_quantised.py."""
    one = rows(tmp_path / "one", "mesh=actor+rollout=1", student, *ADAPTERS)
    for a, b in zip(one, divided[1], strict=True):
        np.testing.assert_allclose([b[key] for key in KEYS], [a[key] for key in KEYS], rtol=1e-3)
        assert a["policy/mismatch_k3"] < 1e-10


SMALL = DecoderConfig(
    *("qwen3_moe", 64, 32, 2, 4, 2, 8, 16),
    experts=Experts(count=16, chosen=3, normalised=True, dense_width=16),
    tie_embeddings=True,
)
PROMPTS = [Prompt(i, tuple(range(3 + i, 12 + 2 * i)), "") for i in range(3)]


SINKS = DecoderConfig(
    *("gpt_oss", 64, 32, 2, 4, 2, 8, 16),
    experts=Experts(16, 3, True, 16, Clamp(1.702, 7.0)),
    kinds=(LayerKind(6), LayerKind()),
)
BESIDE = DecoderConfig(
    *("gemma4_text", 64, 32, 2, 4, 2, 8, 16),
    experts=Experts(16, 3, True, dense_width=24, beside="norms"),
    kinds=(LayerKind(6), LayerKind(head_dim=16, n_kv_heads=1)),
    tie_embeddings=True,
)

STATES = DecoderConfig(
    *("qwen3_5_moe_text", 64, 32, 2, 4, 2, 8, 16),
    experts=Experts(16, 3, True, dense_width=24, beside="gate"),
    kinds=(LayerKind(recurs=True), LayerKind()),
    delta=Delta(k_heads=2, v_heads=4, k_dim=8, v_dim=8),
)


def sampled(config=SMALL, dtype=jnp.float32, n=3, new=8, slots=4, cache_tokens=None):
    """n rollouts of each prompt, of a random model; as they stand the slots are filled twice. With
    a pool of pages some have to wait with their tokens."""
    params = parameters.unstack(jax.tree.map(np.asarray, random_params(config)))
    params = jax.tree.map(lambda x: jnp.asarray(x.astype(dtype)), params)
    limits = {"max_prompt_tokens": 16, "max_new_tokens": new}
    options = {"slots": slots, "launch_tokens": 4, "cache_tokens": cache_tokens}
    engine = Engine(config, None, **options, **limits)
    sampling = SamplingParams(new, eos_ids=(5,) if cache_tokens is None else ())
    tokens = [prompt.tokens for prompt in PROMPTS]
    found = sample_groups(engine, params, tokens, n=n, sampling=sampling, record_experts=True)
    assert (engine.stats.preemptions > 0) == (cache_tokens is not None)
    return params, found


@pytest.mark.parametrize(
    ("config", "new", "cache_tokens"),
    and_slow(
        [(replace(SMALL, n_layers=1), 70, 192)],
        [
            *((SMALL, 70, 192), (SMALL, 8, None), (BESIDE, 8, None), (BESIDE, 70, 192)),
            *((SINKS, 8, None), (SINKS, 70, 192), (STATES, 8, None)),
        ],
    ),
    ids=lambda given: given.family if isinstance(given, DecoderConfig) else None,
)
def test_each_token_that_was_read_has_the_experts_that_a_forward_pass_chooses(
    config: DecoderConfig, new: int, cache_tokens: int | None, tmp_path: Path
) -> None:
    """Those of the last token are its own router's; and they are in a rollout that is stored. A
    sample that was read again has those of the steps that sampled it."""
    params, found = sampled(config, new=new, cache_tokens=cache_tokens)
    limits = {"max_prompt_tokens": 16, "max_new_tokens": new}
    packing = {"pad_id": 0, "row_multiple": 2, **limits}
    rollout = make_rollout(PROMPTS, found, policy_version=0, **packing)
    experts, mask = rollout.experts, rollout.sequences.mask
    assert experts.dtype == np.int8 and experts.shape == (*mask.shape, config.n_layers, 3)
    routed: list = []

    def forward(params, sequences):
        routed.clear()
        packed = pack_streams(sequences)
        decoder.forward_packed(config, params, packed, routed=routed)
        return routed[0].ids, packed.rows[0]

    ids, at = jax.jit(forward)(params, jax.tree.map(np.asarray, rollout.sequences))
    own = np.stack([np.asarray(at.unpack(layer)) for layer in ids], 2)  # from the first token on
    for row in range(9):
        given = experts[row][mask[row]]
        np.testing.assert_array_equal(np.sort(given[:-1]), np.sort(own[row, : len(given) - 1]))
        assert (given[-1] == -1).all()
    assert (experts[~mask] == -1).all()

    save_rollout(tmp_path / "rollout.npz", rollout)
    again = load_rollout(tmp_path / "rollout.npz", PROMPTS, packing)
    np.testing.assert_array_equal(again.experts, experts)
    assert again.sequences.experts is None  # a reference has routers of its own


def test_replay_takes_out_what_rounding_sends_elsewhere() -> None:
    """Sampler and learner of one policy, both in bfloat16, are two programs, whose routers choose
    differently where experts are nearly equal. With the sampler's experts replayed the mismatch is
    a tenth at most. (In float32 there is none, as the runs above show.)"""
    mesh = make_mesh(1, 1, 1)

    @jax.jit
    def logprobs(params, sequences):
        return completion_logprobs(SMALL, params, sequences, mesh, temperature=1.0, chunk=64)

    def log_ratios(params, found, replayed):
        packing = {"pad_id": 0, "max_prompt_tokens": 16, "max_new_tokens": 32}
        rollout = make_rollout(PROMPTS, found, policy_version=0, **packing)
        experts = rollout.experts if replayed else np.full_like(rollout.experts, -1)
        sequences = replace(rollout.sequences, experts=experts)
        mask = np.asarray(sequences.loss_mask)
        return np.asarray(logprobs(params, sequences) - rollout.logprobs)[mask]

    rounded = sampled(dtype=jnp.bfloat16, n=20, new=32, slots=60)
    own, same = (log_ratios(*rounded, replayed) for replayed in (False, True))
    k3 = [np.mean(np.expm1(x) - x) for x in (own, same)]
    assert k3[1] < k3[0] / 10, k3


def change_of_one_batch(folder: Path, axes: Axes, *keys: str) -> tuple[dict, dict]:
    """Returns the change of the weights by one update with SGD at rate 1, and the metrics.

    Five prompts of several lengths with four completions each; one completion does not train.
    """
    mesh = role_mesh(jax.devices()[: axes.size], axes)
    given = ["algorithm=sft", "teacher.model=null", "optimizer.name=sgd", "optimizer.b1=0"]
    given += ["optimizer.clip_norm=null", "optimizer.learning_rate=1", "optimizer.warmup_steps=0"]
    config = Config.load(None, [*given, "student.router_aux_loss_coef=0.5", *keys])
    start = jax.tree.map(np.asarray, random_params(SMALL))
    actor = Actor(
        config,
        SMALL,
        mesh,
        load=lambda dtype: jax.device_put(start, param_shardings(SMALL, mesh)),
        vocab_size=64,
        frozen={},
        rollout_shardings=param_shardings(SMALL, mesh, "unstacked"),
        run_dir=folder,
    )
    draw = np.random.default_rng(3)
    prompts = [Prompt(i, tuple(draw.integers(2, 64, 4 + 2 * i).tolist()), "") for i in range(5)]

    def completion() -> Completion:
        tokens = tuple(draw.integers(2, 64, draw.integers(2, 9)).tolist())
        return Completion(tokens, np.zeros(len(tokens)), np.zeros(len(tokens)), "stop")

    groups = [[completion() for _ in range(4)] for _ in prompts]
    limits = {"pad_id": 0, "max_prompt_tokens": 16, "max_new_tokens": 8, "row_multiple": 4}
    rollout = make_rollout(prompts, groups, policy_version=0, **limits)
    mask = np.array(rollout.sequences.loss_mask)
    mask[5] = False
    rollout = replace(rollout, sequences=replace(rollout.sequences, loss_mask=mask))
    metrics = actor.update(rollout, {}, step=0).metrics
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, actor.state.params, start)
    return moved, metrics


@pytest.mark.parametrize(
    "cuts",
    and_slow(
        [((Axes(), 60),)],  # shared prompts in several micro-batches
        [
            (((Axes(2, expert=2), 60), (Axes(2), 60), (Axes(2), 24)),),  # none shared in the last
            (((Axes(), 24), (Axes(2, 2), 24), (Axes(2), 100)),),
        ],
    ),
)
def test_balanced_experts_learn_the_same_however_a_minibatch_is_cut(cuts, tmp_path: Path) -> None:
    """In the default suite on one device: in test_experts.py what balances is the same on several,
    and the run above has its experts on two."""
    whole, expected = change_of_one_batch(tmp_path, Axes(), "actor.micro_batch_tokens=null")
    balance = 0.5 * expected["policy/experts_balance"]
    assert expected["loss"] == pytest.approx(expected["sft/loss"] + balance, rel=1e-5)
    for axes, tokens in cuts:
        moved, metrics = change_of_one_batch(tmp_path, axes, f"actor.micro_batch_tokens={tokens}")
        for name in ("loss", "policy/experts_balance", "actor/grad_norm"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4)
        for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(whole), strict=True):
            assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["student.model=builtin:student", REPLAY],
            "router_replay=true needs a mixture",
        ),
        (
            ["student.model=builtin:student", "student.router_aux_loss_coef=0.1"],
            "router_aux_loss_coef=0.1 needs a mixture",
        ),
        (
            [
                "student.model=builtin:student_moe",
                "actor.parallel.expert=3",
                "mesh=actor=3,rollout=1",
            ],
            "num_experts=8: use a divisor",
        ),
        (
            ["student.model=builtin:student", "actor.parallel.expert=2"],
            "has no experts: use data or fsdp",
        ),
    ],
)
def test_what_needs_experts_says_so(keys: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        rows(tmp_path, "mesh=actor=2,rollout=1", *keys)
