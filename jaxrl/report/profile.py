"""The section of a page that tells what a profiled run measured of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.report.tables import bytes_text, table, text

HEADS = (
    "stage",
    "pool",
    "seconds a step",
    "share",
    "tokens/s",
    "GFLOP",
    "to and from memory",
    "of the peak FLOP/s",
    "of the peak bandwidth",
    "bound by",
    "moved to other pools",
)


def profile_section(told: Mapping[str, Any]) -> str:
    """
    Args:
        told: `stages.json`, as `jaxrl.profile.stages.StageTable.to_json` makes it.
    """
    first, last = told["steps"]
    idle = ", ".join(f"{pool['pool']} {pool['idle']:.0%}" for pool in told["pools"])
    rows = [_row(stage, told["step_seconds"]) for stage in told["stages"]]
    return (
        f'<p class="muted">Steps {first} to {last}, {told["step_seconds"]:.3g} s each.'
        f" Idle: {text(idle)}.{text(_peaks(told['ceilings']))}</p>{table(HEADS, rows)}"
    )


def _peaks(ceilings: Mapping[str, Mapping[str, Any]]) -> str:
    """What the peaks are, each once."""
    pools: dict[str, list[str]] = {}
    for pool, peak in ceilings.items():
        whose = "all devices together" if peak["shared"] else "each device"
        source = "published" if peak["published"] else "measured there"
        figures = f"{_number(peak['flops'], 1e-9)} GFLOP/s and {bytes_text(peak['bandwidth'])}/s"
        pools.setdefault(f"{figures}, {whose} ({peak['device']}, {source})", []).append(pool)
    return "".join(f" Peaks of {', '.join(names)}: {peak}." for peak, names in pools.items())


def _row(stage: Mapping[str, Any], step_seconds: float) -> list[str]:
    return [
        text(stage["stage"]),
        text(stage["pool"]),
        f"{stage['seconds']:.3g}",
        f"{stage['seconds'] / step_seconds:.0%}",
        _number(stage["tokens_per_second"]),
        _number(stage["flops"], 1e-9),
        _bytes(stage["bytes"]),
        _share(stage["compute"]),
        _share(stage["memory"]),
        text(stage["bound"] or "–"),
        _bytes(stage["moved"]),
    ]


def _number(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return "–"
    number = value * scale
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _bytes(value: float | None) -> str:
    return "–" if value is None else bytes_text(value)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
