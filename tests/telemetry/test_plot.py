"""Curves of chosen metrics: means over seeds, bands, axes, and names that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl.config import cli
from jaxrl.config.schema import CONFIG_FILE
from jaxrl.errors import UserError
from jaxrl.telemetry import plot
from jaxrl.telemetry.metrics import METRICS_FILE, MetricsWriter

pytest.importorskip("matplotlib")
STEPS = 9


def made_rows(seed: int, every: int = 1, **more: float) -> list[dict[str, float]]:
    """Rows of a run; its reward is measured each `every` steps."""
    random = np.random.default_rng(seed)
    rows = []
    for step in range(STEPS + 1):
        row = {"step": step, "total/trained_tokens": 10.0 * step, "total/wall_s": step * (2 + seed)}
        rows.append(row | ({"reward/mean": random.random()} if step % every == 0 else {}) | more)
    return rows


def write_run(folder: Path, seed: int, rate: str = "1e-3", **more: float) -> str:
    folder.mkdir()
    text = f"seed: {seed}\nrun_dir: {folder}\noptimizer:\n  learning_rate: {rate}\n"
    (folder / CONFIG_FILE).write_text(text)
    with MetricsWriter(folder / METRICS_FILE) as writer:
        for row in made_rows(seed, **more):
            writer.write(int(row["step"]), row)
    return str(folder)


def values(rows: list[dict[str, float]]) -> list[float]:
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def band_of(axes: Any) -> tuple[list[float], list[float]]:
    """Lowest and highest value at each point."""
    (band,) = axes.collections
    points: dict[float, list[float]] = {}
    for x, y in band.get_paths()[0].vertices:
        points.setdefault(float(x), []).append(float(y))
    inner = sorted(points)
    return [min(points[x]) for x in inner], [max(points[x]) for x in inner]


def test_the_mean_and_the_band_of_seeds() -> None:
    runs = {f"s{seed}": made_rows(seed) for seed in range(3)}
    (axes,) = plot.draw(runs, ["reward/mean"], {"all": list(runs)}).axes
    (line,) = axes.lines
    expected = np.array([values(rows) for rows in runs.values()])
    assert line.get_xdata().tolist() == list(range(STEPS + 1))
    np.testing.assert_allclose(line.get_ydata(), expected.mean(0), rtol=1e-12)
    low, high = band_of(axes)
    np.testing.assert_allclose(low, expected.min(0))
    np.testing.assert_allclose(high, expected.max(0))


def test_one_run_is_its_curve_and_equal_runs_have_no_width() -> None:
    rows = made_rows(1)
    alone, twins = (
        plot.draw(runs, ["reward/mean"], {"g": list(runs)}).axes[0]
        for runs in ({"a": rows}, {"a": rows, "b": rows})
    )
    assert alone.lines[0].get_ydata().tolist() == values(rows) and not alone.collections
    np.testing.assert_allclose(twins.lines[0].get_ydata(), values(rows))
    assert band_of(twins)[0] == band_of(twins)[1]


@pytest.mark.parametrize("x", ["tokens", "seconds"])
def test_over_tokens_and_seconds_curves_are_read_between_their_points(x: str) -> None:
    runs = {f"s{seed}": made_rows(seed, every=1 + seed) for seed in range(2)}
    (axes,) = plot.draw(runs, ["reward/mean"], {"all": list(runs)}, x).axes
    at, mean = (np.array(data) for data in axes.lines[0].get_data())
    curves = [plot.series(rows, "reward/mean", plot.AXES[x]) for rows in runs.values()]
    assert set(at) <= {point for curve in curves for point in curve[0]}
    assert at[-1] == min(curve[0][-1] for curve in curves)  # no further than both go
    np.testing.assert_allclose(mean, np.mean([np.interp(at, *curve) for curve in curves], axis=0))


def test_by_step_only_what_all_runs_measured() -> None:
    runs = {f"s{every}": made_rows(every, every=every) for every in (2, 3)}
    (axes,) = plot.draw(runs, ["reward/mean"], {"all": list(runs)}).axes
    assert axes.lines[0].get_xdata().tolist() == [0, 6]


def test_runs_that_differ_in_their_seed_alone_are_a_group(tmp_path: Path) -> None:
    config: dict[str, Any] = {"steps": 9, "optimizer.learning_rate": 1e-3}
    configs = {
        "a": config | {"seed": 0, "run_dir": "a"},
        "b": config | {"seed": 1, "run_dir": "b"},
        "c": config | {"seed": 0, "optimizer.learning_rate": 1e-4},
        "d": {},
        "e": {},
    }
    alone = {name: [name] for name in configs}
    joined = {"a (mean of 2 runs)": ["a", "b"], "c": ["c"], "d": ["d"], "e": ["e"]}
    assert plot.group_runs(configs) == joined
    assert plot.group_runs(configs, "none") == alone
    by_seed = plot.group_runs({name: configs[name] for name in "abc"}, "seed")
    assert by_seed == {"seed=0": ["a", "c"], "seed=1": ["b"]}
    with pytest.raises(UserError, match=r"'optimizer.learning_rat' \(did you mean"):
        plot.group_runs(configs, "optimizer.learning_rat")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / f"s{seed}", seed) for seed in range(2)]
    runs.append(write_run(tmp_path / "other", 0, "1e-4", **{"policy/entropy": 1.0}))
    target = tmp_path / "curves.svg"
    argv = [*runs, "-o", str(target), "--metrics", "reward/*,policy/entropy", "--x", "tokens"]
    assert cli.run(plot.main, argv) == 0
    told = capsys.readouterr()
    assert told.out == f"{target}\n" and told.err == "without policy/entropy: s0, s1\n"
    drawn = target.read_text()
    assert all(text in drawn for text in ("s0 (mean of 2 runs)", "reward/mean", "tokens trained"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--metrics", "reward/men"],
            "reward/men: no metric of run; the nearest that they have: r",
        ),
        (["--metrics", "zzz/*"], "zzz/*: no metric of run; the nearest that they have: "),
        (["--x", "hours"], "invalid choice: 'hours'"),
        (["--group", "sed"], "'sed' (did you mean seed?)"),
    ],
)
def test_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    run = write_run(tmp_path / "run", 0)
    assert cli.run(plot.main, [run, "-o", str(tmp_path / "x.png"), *words]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "x.png").exists()


def test_an_older_run_has_no_totals_to_draw_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "old"
    run.mkdir()
    with MetricsWriter(run / METRICS_FILE) as writer:
        writer.write(1, {"reward/mean": 0.5})
    argv = [str(run), "-o", str(tmp_path / "x.png"), "--x", "seconds"]
    assert cli.run(plot.main, argv) == 2
    assert "total/wall_s: no metric of old" in capsys.readouterr().err
