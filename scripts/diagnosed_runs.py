"""Runs by which `jaxrl.run.diagnosis` is judged: good ones, and some that were made to go wrong.

    python -m jaxrl.scripts.diagnosed_runs FOLDER > tests/cases/diagnosis.json

Takes ten minutes on two CPU cores; a run that FOLDER has already is not repeated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl import Config, train
from jaxrl.config import cli

REWARDS = """
def constant(prompts, completions):
    return [1.0] * len(completions)

def long(prompts, completions):
    return [min(len(text), 12) / 12 for text in completions]
"""
STREAMS = "mesh=actor=1,rollout=1", "schedule=streaming"
GSPO = "builtin:quickstart_gspo"
RUNS: dict[str, tuple[str, ...]] = {
    "good": (),
    "good_grpo": ("algorithm=grpo",),
    "good_stream": (*STREAMS, "staleness=2"),
    "good_gkd": (),
    "lr_high": ("optimizer.learning_rate=0.03",),
    "tiny": ("optimizer.learning_rate=1e-9",),
    "constant": ("reward.functions=[FOLDER/rewards.py:constant]",),
    "long": ("reward.functions=[FOLDER/rewards.py:long]",),
    "entropy": ("policy.entropy_coef=0.5",),
    "stale": (*STREAMS, "staleness=8", "policy.correction=none", "optimizer.learning_rate=0.01"),
    "bad_gkd": ("optimizer.learning_rate=0.3",),
}
"""Name -> the keys of a run of a quickstart."""
QUIET = "steps=60", "checkpoint.every=0", "logging.console=quiet", "logging.tensorboard=false"
KEPT = (
    *("step", "optimizer_step", "loss", "actor/grad_norm", "actor/skipped_updates", "reward/mean"),
    *("policy/entropy", "policy/clip_fraction", "policy/mismatch_k3", "stream/age"),
    *("rollout/completion_tokens_mean", "rollout/truncated_fraction", "distill/divergence"),
)
"""Metrics that rules read."""


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.diagnosed_runs", __doc__ or "")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the runs are")
    folder: Path = parser.parse(argv).folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    found = {}
    for name, keys in RUNS.items():
        own = [key.replace("FOLDER", str(folder)) for key in keys]
        start = "builtin:quickstart" if "gkd" in name else GSPO
        made = Config.load(start, [f"run_dir={folder / name}", *QUIET, *own])
        rows = train(made).metrics
        kept = [
            [None if row.get(name) is None else float(f"{row[name]:.4g}") for name in KEPT]
            for row in rows
        ]
        found[name] = {"config": start, "keys": keys, "rows": kept}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(run)}" for name, run in found.items())
    print(f'{{"metrics": {json.dumps(KEPT)}, "runs": {{\n{lines}\n}}}}')


if __name__ == "__main__":
    sys.exit(cli.run(main))
