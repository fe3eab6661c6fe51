"""The plan of the grouper and the reward model against the compiler's own account."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config.roles import GrouperConfig, RewardConfig
from jaxrl.models import bert, parameters
from jaxrl.models.batching import batches, width_of
from jaxrl.models.config import DecoderConfig
from jaxrl.models.encoder_config import EncoderConfig
from jaxrl.models.kernels import CPU
from jaxrl.models.rules import param_shardings
from jaxrl.plan.frozen_memory import (
    encoder_bytes,
    encoder_work,
    grouper_account,
    reward_account,
    reward_work,
)
from jaxrl.plan.memory import weight_bytes
from jaxrl.roles.encoder import encode_batch
from jaxrl.roles.reward_model import score_batch
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh

WITHIN = 0.10
REWARD_WITHIN = 0.15
"""Whose forward pass is counted as accelerators compute it."""
QUICK = {"backend_optimization_level": 0, "llvm_disable_expensive_passes": True}
OPTIONS: Any = {f"xla_{name}": value for name, value in QUICK.items()}
ENCODER = EncoderConfig("bert", 2000, 256, 4, 8, 1024, 1024, 0, 2, 1e-5, "mean", 1024)
REWARD = DecoderConfig("qwen2", 2000, 256, 4, 8, 2, 32, 1024)
REWARD = replace(REWARD, tie_embeddings=True)
BATCHES = {"short texts": (16, 32), "long texts": (2, 512), "few tokens": (1, 16)}
AXES = {"one": Axes(), "fsdp": Axes(1, 2, 1), "tensor": Axes(1, 1, 2), "data": Axes(2, 2, 1)}
BY_DEFAULT = {("one", "long texts", 2000), ("fsdp", "long texts", 2000)}
CASES = [
    pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow)
    for case in itertools.product(AXES, BATCHES, (2000, 20000))
]


def shape(sizes: tuple[int, ...], sharding: Any, dtype: Any = "float32") -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=sharding)


def batch(mesh: Mesh, rows: int, width: int) -> tuple[Any, Any]:
    rows *= mesh.shape["data"] * mesh.shape["fsdp"]
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
    return shape((rows, width), sharding, "int32"), shape((rows, width), sharding, "bool")


def measured(program: Any, *args: Any) -> int:
    a = program.lower(*args).compile(compiler_options=OPTIONS).memory_analysis()
    return int(a.argument_size_in_bytes + a.temp_size_in_bytes + a.output_size_in_bytes)


@pytest.mark.parametrize(("axes_name", "batch_name", "vocab"), CASES)
def test_the_grouper_takes_what_the_compiler_says(
    axes_name: str, batch_name: str, vocab: int
) -> None:
    axes, (rows, width) = AXES[axes_name], BATCHES[batch_name]
    config = replace(ENCODER, vocab_size=vocab)
    mesh = role_mesh(jax.devices()[: axes.size], axes)
    params = jax.tree.map(
        shape, bert.tree(bert.shapes(config)), bert.param_shardings(config, mesh), is_leaf=is_shape
    )
    real = measured(encode_batch, config, mesh, params, *batch(mesh, rows, width))
    planned = encoder_bytes(config, axes, "float32")
    planned += encoder_work(config, axes, rows, width, "float32", target=CPU)
    assert planned / real == pytest.approx(1, abs=WITHIN), (planned, real)


@pytest.mark.parametrize(("axes_name", "batch_name", "vocab"), CASES)
def test_the_reward_model_takes_what_the_compiler_says(
    axes_name: str, batch_name: str, vocab: int
) -> None:
    axes, (rows, width) = AXES[axes_name], BATCHES[batch_name]
    config = replace(REWARD, vocab_size=vocab)
    mesh = role_mesh(jax.devices()[: axes.size], axes)
    shapes, layout = parameters.abstract_params(config), param_shardings(config, mesh)
    params = jax.tree.map(lambda x, s: shape(x.shape, s), shapes, layout)
    head = shape((REWARD.d_model,), NamedSharding(mesh, PartitionSpec()))
    real = measured(score_batch, config, mesh, params, head, *batch(mesh, rows, width))
    planned = weight_bytes(config, axes, "float32")
    planned += reward_work(config, axes, rows, width, "float32", target=CPU)
    assert planned / real == pytest.approx(1, abs=REWARD_WITHIN), (planned, real)


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_the_encoders_pieces_add_up(axes: Axes) -> None:
    """A device's bytes are its shards, under the shardings that weights are loaded with."""
    mesh = role_mesh(jax.devices()[: axes.size], axes)
    layout = jax.tree.leaves(bert.param_shardings(ENCODER, mesh))
    sizes = jax.tree.leaves(bert.tree(bert.shapes(ENCODER)), is_leaf=is_shape)
    held = sum(math.prod(s.shard_shape(n)) for s, n in zip(layout, sizes, strict=True))
    assert encoder_bytes(ENCODER, axes, "bfloat16") == 2 * held


@pytest.mark.parametrize("longest", [5, 100, 700, 3000])
def test_no_batch_takes_more_than_the_plan_says(longest: int) -> None:
    """Any mix of lengths, cut into the batches that are really run."""
    limit, tokens = min(longest, ENCODER.max_tokens), 1024
    texts = GrouperConfig(batch_tokens=tokens, dtype="float32")
    judged = RewardConfig(batch_tokens=tokens, dtype="float32")
    encoder = grouper_account(ENCODER, Axes(), texts, longest, CPU).phases()["embed"]
    reward = reward_account(REWARD, Axes(), judged, longest, CPU).phases()["score"]
    lengths = [1 + (i * 37) % limit for i in range(200)] + [limit]
    cut = batches([[0] * n for n in lengths], shards=1, batch_tokens=tokens, longest=limit)
    most = [(0, 0)]
    for one in cut:
        rows, width = one.tokens.shape
        most.append(
            (
                encoder_work(ENCODER, Axes(), rows, width, "float32", CPU),
                reward_work(REWARD, Axes(), rows, width, "float32", CPU),
            )
        )
    worst = width_of(limit, limit)
    assert max(e for e, _ in most) <= encoder
    assert max(r for _, r in most) <= reward
    assert encoder >= encoder_work(ENCODER, Axes(), max(1, tokens // worst), worst, "float32", CPU)
