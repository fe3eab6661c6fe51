"""What a run has taken so far: tokens and seconds added up over its rows, and over its resumptions,
for each row of `metrics.jsonl`; and these in words."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl.types import Row

TOKENS = {
    "prompt_tokens": "tokens/prompts",
    "sampled_tokens": "tokens/generated",
    "trained_tokens": "actor/tokens",
}
"""Total -> the metric that it adds up; every row has these totals."""
STAGES = {
    "sampling": ("time/rollout_s",),
    "scoring": ("time/score_s", "time/reference_s", "time/reward_s", "time/embed_s"),
    "updating": ("time/update_s",),
    "publishing": ("time/weight_sync_s", "time/teacher_sync_s"),
    "evaluation": ("time/evaluate_s",),
    "checkpoint": ("time/checkpoint_s",),
    "waiting": ("time/waiting_s",),
}
"""Stage -> the metrics that its seconds, `total/STAGE_s`, add up. Stages overlap where a schedule
or `checkpoint` does, and `wall_s` then has less than their sum."""


def add_totals(before: Row, row: Mapping[str, float]) -> dict[str, float]:
    """Computes the totals after a row.

    Args:
        before: the totals so far, by their whole names, among others.
        row: of one step; may have `total/ROLE/device_s`, which is added too.
    """
    added = {f"total/{stage}_s": metrics for stage, metrics in STAGES.items()}
    added |= {f"total/{name}": (metric,) for name, metric in TOKENS.items()}
    added |= {"total/wall_s": ("time/wall_s",)}
    added |= {name: (name,) for name in (*before, *row) if name.endswith("/device_s")}
    totals = {}
    for total, metrics in added.items():
        measured = [row[metric] for metric in metrics if metric in row]
        if measured or total in before or total.endswith("_tokens"):
            totals[total] = (before.get(total) or 0.0) + sum(measured)
    return totals


def describe_totals(row: Row) -> dict[str, str]:
    """Writes the totals of a row, by heading; {} of a row without."""
    if row.get("total/wall_s") is None:
        return {}
    tokens = (f"{row.get(f'total/{name}') or 0:,.0f} {name.split('_')[0]}" for name in TOKENS)
    stages = {stage: row.get(f"total/{stage}_s") for stage in STAGES}
    seconds = ", ".join(f"{stage} {s:,.1f}" for stage, s in stages.items() if s is not None)
    held = row.get("total/device_s") or 0.0
    used = {
        name.split("/")[1]: value
        for name, value in row.items()
        if name.startswith("total/") and name.count("/") == 2 and value
    }
    busy = ", ".join(f"{role} {value:,.1f}" for role, value in used.items())
    return {
        "tokens": ", ".join(tokens),
        "seconds": f"{row['total/wall_s']:,.1f} in all; {seconds}",
        "device-seconds": f"{held:,.1f} held; in calls of {busy}" if busy else f"{held:,.1f} held",
    }
