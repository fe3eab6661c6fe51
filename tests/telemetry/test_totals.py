"""What a run says of its tokens, seconds and completions is what its rows and samples hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runs import ALONE, QUICK, SHORT, check_totals, save_pair

from jaxrl.config import cli
from jaxrl.report.html_page import facts, headline
from jaxrl.report.read import read_run
from jaxrl.report.timeline_lanes import understand
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.telemetry.totals import add_totals, describe_totals
from jaxrl.train import main

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_a_run_of_two_sources(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name, letters in (("one", "abcdef"), ("two", "uvwxyz")):
        rows = [{"prompt": letter * (3 + i)} for i, letter in enumerate(letters)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    data = f"data.train=[{tmp_path / 'one.jsonl'},{tmp_path / 'two.jsonl'}]"
    run = tmp_path / "run"
    keys = [data, "data.weights=[2,1]", "data.eval=null", "logging.samples=12", f"run_dir={run}"]
    assert cli.run(main, [*QUICK, *save_pair(tmp_path, layers=1), *SHORT, ALONE, *keys]) == 0
    told = capfd.readouterr().out
    rows = read_metrics(run)
    check_totals(rows)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        own = [sample for sample in samples if sample["step"] == row["step"]]
        assert len(own) == 12
        lengths = [sample["tokens"] for sample in own]
        assert row["rollout/completion_tokens_p90"] == pytest.approx(np.percentile(lengths, 90))
        assert row["tokens/prompts"] == sum({s["prompt"]: len(s["prompt"]) for s in own}.values())
        for name, letters, count in (("one", "abcdef", 8), ("two", "uvwxyz", 4)):
            mine = [sample for sample in own if sample["prompt"][0] in letters]
            lengths = [sample["tokens"] for sample in mine]
            cut = [sample["finish_reason"] == "length" for sample in mine]
            assert len(mine) == count
            found = [
                row[f"rollout/{name}/{metric}"]
                for metric in ("completion_tokens_mean", "completion_tokens_p90")
            ]
            assert found == pytest.approx([np.mean(lengths), np.percentile(lengths, 90)])
            assert row[f"rollout/{name}/truncated_fraction"] == pytest.approx(np.mean(cut))
        # One pool of one device works at one thing at a time.
        stages = ("rollout", "score", "update")
        busy = sum(row[f"time/{stage}_s"] for stage in stages)
        assert busy + row["time/waiting_s"] <= row["time/step_s"] + 0.01
    last = rows[-1]
    assert last["total/device_s"] == pytest.approx(last["total/wall_s"])
    roles = [last[f"total/{role}/device_s"] for role in ("actor", "rollout", "teacher")]
    assert all(roles) and sum(roles) <= last["total/device_s"] * 1.05
    for name in ("one", "two"):
        assert f"data.train: {tmp_path / name}.jsonl: tokens of prompts: mean 5.5, p90 8" in told
    plan = json.loads((run / "plan.json").read_text())
    assert [(one["mean"], one["max"], one["rows"]) for one in plan["lengths"]] == [(5.5, 8, 6)] * 2
    files = read_run(run)
    activity = understand(files.events)
    for heading, text in describe_totals(last).items():
        assert f"{heading}: {text}" in told and facts(files, activity)[heading] == text
    (hours,) = [one for one in headline(files, activity) if one.label == "device-hours"]
    assert float(hours.value) == pytest.approx(last["total/device_s"] / 3600, rel=0.01)


def test_totals_add_what_a_row_has() -> None:
    rows = [
        {"time/weight_sync_s": 1.0, "time/wall_s": 2.0},
        {"time/score_s": 1.0, "time/reward_s": 2.0, "actor/tokens": 7.0, "time/wall_s": 3.0},
        {"time/reward_s": 0.5, "total/actor/device_s": 4.0, "time/wall_s": 1.0},
        {"total/actor/device_s": 0.5, "time/wall_s": 1.0},
    ]
    total: dict[str, float] = {}
    for row in rows:
        total = add_totals(total, row)
    assert total == {
        "total/prompt_tokens": 0.0,
        "total/sampled_tokens": 0.0,
        "total/trained_tokens": 7.0,
        "total/scoring_s": 3.5,
        "total/publishing_s": 1.0,
        "total/wall_s": 7.0,
        "total/actor/device_s": 4.5,
    }
