"""The configs of objectives that tests are about."""

from __future__ import annotations

from jaxrl.config.schema import Config

PLAIN = [
    *("group_size=3", "batch_size=5", "reward.functions=[exact]", "teacher.model=null"),
    *("mesh=actor+rollout=1", "optimizer.name=sgd", "optimizer.b1=0.0", "steps=4"),
    *("optimizer.warmup_steps=0", "optimizer.learning_rate=0.5", "optimizer.clip_norm=null"),
]


def config(algorithm, *overrides):
    return Config.load(None, [*PLAIN, f"algorithm={algorithm}", *overrides])
