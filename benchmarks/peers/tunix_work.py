"""google-tunix on `work.py`'s work. One JSON line.

    python tunix_work.py WORK --teacher FOLDER --student FOLDER --prompts FILE

WORK: distill, distill-tail, sampler, heavy, gspo or gspo-tail.

distill: its `Sampler` on the student, then a step of its `DistillationTrainer`; the loop around
them is ours, for it has no on-policy one. Its logit loss is the forward KL; it has no JSD, so that
its step does less than the others'. gspo: its GRPO learner with the loss gspo-token, which takes
one clip for both sides. The cache is as short as the work allows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers
import work
from flax import nnx
from tunix.distillation import distillation_trainer, strategies
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.sft import utils

WARM = 2
NEVER = 16
"""A token id that SmolLM2 practically never draws stands for the end: nothing stops early."""

_rope = llama.apply_rope


def _rope_of_config(x: Any, positions: Any, head_dim: int, rope_theta: int = 100_000) -> Any:
    """tunix 0.1.7 runs every Llama with theta 1e6, whatever its config says; SmolLM2's is 1e5."""
    return _rope(x, positions, head_dim, rope_theta)


llama.apply_rope = _rope_of_config


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__)
    told.add_argument("what", choices=tuple(WORK))
    told.add_argument("--teacher", required=True)
    told.add_argument("--student")
    told.add_argument("--prompts", required=True)
    told.add_argument("--repeats", type=int, default=5)
    arguments = told.parse_args()
    rows = work.prompts(arguments.prompts)
    versions = {name: version(name) for name in ("google-tunix", "jax", "flax")}
    found = WORK[arguments.what](arguments, rows)
    print(work.line("tunix", arguments.what, **found, versions=versions))


def load(folder: str, mesh: Any = None) -> Any:
    c = json.loads((Path(folder) / "config.json").read_text())
    config = llama.ModelConfig(
        num_layers=c["num_hidden_layers"],
        vocab_size=c["vocab_size"],
        embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        head_dim=c["hidden_size"] // c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        norm_eps=c["rms_norm_eps"],
        rope_theta=int(c["rope_theta"]),
        weight_tying=True,
    )
    return llama_params.create_model_from_safe_tensors(folder, config, mesh=mesh, dtype=jnp.float32)


def make_sampler(model: Any, folder: str, longest: int) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # Its masks come from `id != pad`: SmolLM2's own pad token also ends every chat turn.
    tokenizer.pad_token = "<|endoftext|>"
    c = model.config
    cache = CacheConfig(work.WIDTH + longest, c.num_layers, c.num_kv_heads, c.head_dim)
    return Sampler(model, tokenizer, cache), tokenizer


def sample(arguments: argparse.Namespace, rows: list[Any]) -> dict[str, Any]:
    longest = work.NEW if arguments.what == "sampler" else work.HEAVY_MAX
    sampler, _ = make_sampler(load(arguments.teacher), arguments.teacher, longest)

    def one(index: int, new: int) -> int:
        out = sampler(
            input_strings=[row["text"] for row in work.batch(rows, index, work.SAMPLER_BATCH)],
            max_generation_steps=new,
            max_prompt_length=work.WIDTH,
            eos_tokens=[NEVER],
            temperature=1.0,
            top_p=1.0,
            seed=index,
        )
        return sum(len(tokens) for tokens in out.tokens)

    def heavy(_: int) -> int:
        for index, new in enumerate(work.heavy_batches()):
            one(index, new)
        return sum(work.heavy_lengths())

    if arguments.what == "heavy":
        return work.timed(heavy, arguments.repeats)
    return work.timed(lambda i: one(i, work.NEW), arguments.repeats)


def distill(arguments: argparse.Namespace, rows: list[Any]) -> dict[str, Any]:
    teacher, student = load(arguments.teacher), load(arguments.student)
    new = work.new_tokens(arguments.what)
    sampler, tokenizer = make_sampler(student, arguments.teacher, new)
    seconds: list[float] = []
    tokens: list[int] = []

    def forward(model: Any, input_tokens: Any, input_mask: Any) -> Any:
        positions = utils.build_positions_from_mask(input_mask)
        attention = utils.make_causal_attn_mask(input_mask)
        logits, _ = model(input_tokens, positions, None, attention)
        return logits[:, work.WIDTH - 1 : -1]

    def labels(input_tokens: Any, input_mask: Any) -> Any:
        return jax.nn.one_hot(input_tokens[:, work.WIDTH :], teacher.config.vocab_size)

    strategy = strategies.LogitStrategy(
        student_forward_fn=forward,
        teacher_forward_fn=forward,
        labels_fn=labels,
        temperature=1.0,
        alpha=1.0,
    )

    class Timed(distillation_trainer.DistillationTrainer):
        def _post_process_train_step(self, aux: Any) -> Any:
            jax.block_until_ready(nnx.state(self.model))
            seconds.append(time.perf_counter() - began[0])
            return super()._post_process_train_step(aux)

    steps = WARM + arguments.repeats
    config = distillation_trainer.TrainingConfig(
        eval_every_n_steps=10**9, max_steps=steps, max_inflight_computations=1
    )
    trainer = Timed(student, teacher, strategy, optax.adamw(1e-5), config)
    began = [0.0]

    def data() -> Iterator[Any]:
        for i in range(steps):
            began[0] = time.perf_counter()
            out = sampler(
                input_strings=[row["text"] for row in work.batch(rows, i, work.BATCH)],
                max_generation_steps=new,
                max_prompt_length=work.WIDTH,
                eos_tokens=[NEVER],
                temperature=1.0,
                top_p=1.0,
                seed=i,
                pad_output=True,
            )
            drawn = np.asarray(out.tokens)[:, :new]
            tokens.append(work.drawn_of(arguments.what, drawn.size))
            prompt_mask = out.padded_prompt_tokens != tokenizer.pad_token_id
            yield distillation_trainer.TrainingInput(
                input_tokens=np.concatenate([out.padded_prompt_tokens, drawn], 1),
                input_mask=np.concatenate([prompt_mask, np.ones(drawn.shape, bool)], 1),
            )

    trainer.train(data())
    return {"seconds": seconds[WARM:], "tokens": tokens[WARM : WARM + len(seconds[WARM:])]}


def gspo(arguments: argparse.Namespace, rows: list[Any]) -> dict[str, Any]:
    prompts, group = work.GSPO
    steps = WARM + arguments.repeats
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    policy = load(arguments.teacher, mesh)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.teacher)
    tokenizer.pad_token = "<|endoftext|>"
    new = work.new_tokens(arguments.what)
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=new,
        max_prompt_length=work.WIDTH,
        kv_cache_size=work.WIDTH + new,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=[NEVER],
    )
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=policy,
        reference=None,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            rollout_config=rollout,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6),
                eval_every_n_steps=10**9,
                max_steps=steps,
                mini_batch_size=prompts,
                train_micro_batch_size=prompts,
            ),
        ),
    )

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return work.digits(completions)

    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=reward,
        algo_config=grpo_learner.GRPOConfig(
            num_generations=group,
            num_iterations=1,
            beta=0.0,
            loss_algo="gspo-token",
            epsilon=work.GSPO_CLIP[0],
        ),
    )
    seconds: list[float] = []
    tokens: list[int] = []
    last = [time.perf_counter()]
    generate, update = cluster.generate, cluster.update_actor

    def generate_counted(*args: Any, **kwargs: Any) -> Any:
        rollout.seed = len(tokens)  # else every step draws the same
        out = generate(*args, **kwargs)
        tokens.append(work.drawn_of(arguments.what, sum(len(row) for row in out.tokens)))
        return out

    def update_timed(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
        now = time.perf_counter()
        seconds.append(now - last[0])
        last[0] = now

    cluster.generate, cluster.update_actor = generate_counted, update_timed
    # A plain list of texts fails inside tunix.
    batches = [
        {"prompts": np.array([row["text"] for row in work.batch(rows, i, prompts)])}
        for i in range(steps)
    ]
    with mesh:
        learner.train(batches)
    return {"seconds": seconds[WARM:], "tokens": tokens[WARM:]}


WORK = {
    "distill": distill,
    "distill-tail": distill,
    "sampler": sample,
    "heavy": sample,
    "gspo": gspo,
    "gspo-tail": gspo,
}

if __name__ == "__main__":
    main()
