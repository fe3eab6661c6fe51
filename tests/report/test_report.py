"""What the report reads and counts: against figures made by hand, and of what a run lacks."""

from __future__ import annotations

import fcntl
import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import made_run
import numpy as np
import pytest
from made_run import (
    GENERATE,
    LOAD,
    PAUSE,
    PUBLISH,
    SCORE,
    STEPS,
    UPDATE,
    event,
    make_long_run,
    make_run,
)

from jaxrl.config import cli
from jaxrl.profile.traces import PoolShare, StageRow, StageTable
from jaxrl.report import __main__ as report
from jaxrl.report import timeline_lanes
from jaxrl.report.html_page import (
    SAMPLES,
    _asset,
    bytes_text,
    changed_keys,
    charts,
    differing_keys,
    evenly,
    facts,
    headline,
    memory_pools,
    page,
    sample_columns,
    samples,
    session_facts,
    templates,
    thin,
)
from jaxrl.report.read import read_run
from jaxrl.report.timeline_lanes import PoolUse, understand, waited
from jaxrl.sharding.targets import Ceilings
from jaxrl.telemetry.metrics import METRICS_FILE, SAMPLES_FILE
from jaxrl.telemetry.timeline import TIMELINE_FILE


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "made")


def pools_of(path: Path) -> dict[str, PoolUse]:
    return {pool.name: pool for pool in understand(read_run(path).events).pools}


def test_idle_shares_and_gaps_are_those_of_the_calls(run: Path) -> None:
    pools = pools_of(run)
    window = PUBLISH + LOAD + STEPS * (GENERATE + SCORE + UPDATE + PUBLISH + LOAD) + PAUSE
    busy = {
        "actor": PUBLISH + STEPS * (UPDATE + PUBLISH),
        "rollout": LOAD + STEPS * (GENERATE + LOAD),
        "teacher": STEPS * SCORE,
    }
    assert list(pools) == ["actor", "rollout", "teacher"]
    for name, seconds in busy.items():
        assert pools[name].window / 1e6 == pytest.approx(window, abs=1e-4)
        assert pools[name].idle_share == pytest.approx(1 - seconds / window, abs=1e-4)
    # The actor waits before each update and at the end, the rollout after each of its generate
    # calls, at the start and in the pause, the teacher before each score and at the end.
    counted = {name: len(pool.counted) for name, pool in pools.items()}
    assert counted == {"actor": STEPS + 1, "rollout": STEPS + 2, "teacher": STEPS + 1}


def test_a_gap_tells_what_it_waited_for(run: Path) -> None:
    pools = pools_of(run)
    total = {
        "actor": {
            "rollout.generate": STEPS * GENERATE,
            "teacher.score": STEPS * SCORE,
            "rollout.load": (STEPS + 1) * LOAD,
            "the driver": PAUSE,
        },
        "rollout": {
            "actor.update": STEPS * UPDATE,
            "teacher.score": STEPS * SCORE,
            "actor.publish": (STEPS + 1) * PUBLISH,
            "the driver": PAUSE,
        },
    }
    for name, expected in total.items():
        waits = {call: us / 1e6 for call, us in waited(pools[name].gaps).items() if us > 1e4}
        assert waits == pytest.approx(expected, abs=1e-3)
    longest = max(pools["rollout"].gaps, key=lambda gap: gap.length)
    assert longest.length / 1e6 == pytest.approx(PAUSE, abs=1e-5)
    assert timeline_lanes.reason(longest) == "waited for the driver before rollout.generate"


def test_time_between_two_lives_of_a_run_is_nobodys() -> None:
    starts = [{"ph": "i", "name": name, "ts": ts} for name, ts in (("start", 0), ("resume", 9000))]
    calls = [event("actor.update", 0, 4000), event("actor.update", 10_000, 14_000)]
    (pool,) = understand([*starts, *calls]).pools
    assert (pool.window, pool.busy, pool.gaps) == (8000, 8000, ())


def test_calls_beside_the_queue_keep_no_pool_busy() -> None:
    calls = [
        event("actor.update", 0, 10_000),
        event("actor.saved", 10_000, 60_000, aside=True),
        event("actor.update", 90_000, 100_000),
    ]
    use = understand(calls)
    (pool,) = use.pools
    assert pool.busy == 20_000 and [gap.length for gap in pool.gaps] == [80_000]
    labels = [lane["label"] for lane in timeline_lanes.lanes(use)["pools"][0]["lanes"]]
    assert labels == ["calls", "in background"]


def test_what_is_moved_for_a_call_is_drawn_with_its_pool() -> None:
    moved = event("offload rollout.to host", 0, 10)
    use = understand([event("rollout.load", 0, 10), moved, event("checkpoints.write 6", 5, 10)])
    assert use.others == ("checkpoints",)
    labels = [lane["label"] for lane in timeline_lanes.lanes(use)["pools"][0]["lanes"]]
    assert labels == ["calls", "host transfers"]


def test_roles_and_processes_of_a_pool_are_one_pool() -> None:
    """Overlapping calls of two processes count once."""
    states = [
        event(f"worker actor+rollout{number}.x", 0, 10) | {"cat": f"worker actor+rollout{number}"}
        for number in ("", ".1")
    ]
    calls = [event("actor.update", 0, 6000), event("rollout.generate", 4000, 10_000)]
    (pool,) = understand([*states, *calls]).pools
    assert (pool.name, pool.roles) == ("actor+rollout", ("actor", "rollout"))
    assert pool.workers == ("worker actor+rollout", "worker actor+rollout.1")
    assert (pool.busy, pool.gaps) == (10_000, ())
    labels = [
        lane["label"]
        for lane in timeline_lanes.lanes(understand([*states, *calls]))["pools"][0]["lanes"]
    ]
    assert labels == ["phases", "phases, process 1", "actor: calls", "rollout: calls"]


def test_many_spans_become_few_and_end_where_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_lanes, "SPANS", 100)
    calls = [event("actor.update", 1000 * i, 1000 * i + 500, step=i) for i in range(1000)]
    drawn = timeline_lanes.lanes(understand(calls))
    lane = drawn["pools"][0]["lanes"][0]
    assert 10 < len(lane["start"]) <= 100 and max(lane["length"]) < drawn["merged_us"]
    assert lane["start"][-1] + lane["length"][-1] == drawn["end"] == 999_500
    assert {drawn["names"][number] for number in lane["name"]} <= {"update"}


def test_thinned_curves_keep_spikes_and_means() -> None:
    values = [random.Random(0).gauss(0, 1) for _ in range(10_000)]
    values[1234], values[8765] = 99.0, -99.0
    curve = thin(range(10_000), values, 200)
    assert len(curve["x"]) <= 200 and (curve["x"][0], curve["x"][-1]) == (0, 9999)
    assert curve["y"] == pytest.approx([values[step] for step in curve["x"]], rel=1e-5)
    assert {1234, 8765} <= set(curve["x"])
    sizes = [102] * 98 + [4]
    mean = sum(m * n for m, n in zip(curve["my"], sizes, strict=True)) / 10_000
    assert mean == pytest.approx(sum(values) / 10_000, abs=1e-6)
    assert thin([3, 5], [1.0, 2.0], 200) == {"x": [3, 5], "y": [1.0, 2.0]}


def test_evenly_keeps_both_ends() -> None:
    assert evenly(range(10), 4) == [0, 3, 6, 9]
    assert evenly([5, 6], 4) == [5, 6]


def test_charts_are_grouped_and_what_does_not_change_is_none(run: Path) -> None:
    groups = {group["title"]: group for group in charts([read_run(run)])}
    main = [chart["name"] for chart in groups["main"]["charts"]]
    assert main == [
        "distill/divergence", "distill/top1_agreement", "eval/accuracy", "actor/grad_norm",
        "tokens/per_second",
    ]  # fmt: skip
    assert [c["name"] for c in groups["actor"]["constants"]] == [
        "actor/learning_rate",
        "actor/tokens",
    ]
    assert groups["actor"]["constants"][0]["values"] == [1e-3]
    (norm,) = next(c for c in groups["main"]["charts"] if c["name"] == "actor/grad_norm")["series"]
    assert norm["lost"] == [made_run.LOST] and len(norm["x"]) == STEPS - 1
    held_out = next(c for c in groups["main"]["charts"] if c["name"] == "eval/accuracy")
    (series,) = held_out["series"]
    assert series["x"] == [0, 10, 20, 30, 40] and held_out["levels"][0]["y"] == 0.99
    assert series["low"] == pytest.approx([y - 0.03 for y in series["y"]])


def test_the_plan_stands_beside_what_was_measured(run: Path) -> None:
    pools = {pool["name"]: pool for pool in memory_pools(read_run(run))}
    for pool in pools.values():
        assert sum(part["bytes"] for part in pool["parts"]) == pool["peak"] > 0
    assert pools["actor"]["measured"] == made_run.PEAK
    assert pools["rollout"]["measured"] is None, "the plan's own figure is no measurement"


def test_a_peak_above_the_plan_is_red(run: Path) -> None:
    files = read_run(run)
    (actor, *_) = memory_pools(files)
    for factor, kind in ((1.0, ""), (1.02, "alarm")):
        row = {
            "step": 1,
            "memory/actor/peak_bytes": factor * actor["peak"],
            "memory/actor/planned": 0,
        }
        text = page([replace(files, rows=(row,))])
        assert re.search(rf'class="{kind}">[^<]*, {factor:.0%} of the plan', text)


def test_the_summary(run: Path) -> None:
    files = read_run(run)
    told = facts(files, understand(files.events))
    assert told["state"] == f"ended: all of its {STEPS} steps"
    assert told["wall time"] == "14.9 s" and told["mesh"] == "actor=2,rollout=2,teacher=4"
    assert told["held-out accuracy"] == (
        "10.0% (7.0% to 15.0%) at step 0 → 90.0% (87.0% to 95.0%) at step 40; the teacher 99.0%"
    )
    assert told["distill/divergence"].startswith("0.4567 → 0.02567")  # (1 + ... + 1/5) / 5
    assert told["speed"].startswith("1,021 tokens/s, 0.315 s a step")
    assert changed_keys(files)["steps"] == (STEPS, 200)
    assert re.match(r"\d+ prompts x \d+, ", told["batch"])
    taught = replace(files, config={**files.config, "algorithm": "sft"})  # by one a prompt
    assert "data's completions" in facts(taught, understand(files.events))["batch"]
    accuracy, tokens, took = headline(files, understand(files.events))
    assert (accuracy.value, tokens.value, took.value) == ("10.0% → 90.0%", "4,100", "14.9 s")
    assert accuracy.note == (
        "the teacher has 99.0%; step 0 and 40; 95% interval 7.0% to 15.0% and 87.0% to 95.0%"
    )
    assert took.note == told["state"] and not took.alarm
    began = ["2026-01-02 03:04", "host", "jaxrl 1.2", "resumed 1 time"]
    assert session_facts(files) == (began, "jaxrl train")
    bare = replace(
        files, sessions=({"step": 0, "mesh": "actor=1"}, {"step": 1, "mesh": "actor=1"}), config={}
    )
    assert session_facts(bare) == (["resumed 1 time"], "")
    text = page([bare])
    assert "<code>resumed" not in text and 'class="alarm"' not in text  # how long is not known
    assert sample_columns(files) == [
        *("step", "prompt", "completion", "answer"),
        *("score", "reward", "advantage", "agreement", "tokens"),
    ]  # fmt: skip


def test_columns_that_no_sample_fills_are_left_out(run: Path) -> None:
    files = read_run(run)
    samples = tuple({"step": 1, "prompt": "p", "completion": "c", "tokens": 1} for _ in range(2))
    assert sample_columns(replace(files, samples=samples, rows=())) == [
        "step", "prompt", "completion", "tokens",
    ]  # fmt: skip
    assert 'data-column="reward"' not in page([replace(files, samples=samples)])


def test_a_run_that_was_cut_or_goes_on_says_so(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cut"
    copy.mkdir()
    lines = (run / METRICS_FILE).read_text().splitlines(keepends=True)
    (copy / METRICS_FILE).write_text("".join(lines[:6]) + lines[6][:30])
    (copy / "config.yaml").write_text((run / "config.yaml").read_text())
    files = read_run(copy)
    assert files.steps == 5 and files.notes == ()
    assert facts(files, understand(files.events))["state"] == f"cut at step 5 of {STEPS}"
    assert headline(files, understand(files.events))[-1].alarm
    assert f'<small class="alarm">cut at step 5 of {STEPS}</small>' in page([files])
    with open(copy / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert facts(read_run(copy), understand([]))["state"].startswith("going on: step 5 of 41")


def test_a_run_that_lacks_files_has_a_page_that_says_which(tmp_path: Path) -> None:
    path = tmp_path / "bare"
    path.mkdir()
    (path / METRICS_FILE).write_text("")
    text = page([read_run(path)])
    for file in (METRICS_FILE, TIMELINE_FILE, SAMPLES_FILE, "plan.json", "config.yaml"):
        assert file in text
    assert text.count('class="missing') == 5


def test_broken_lines_are_left_out_and_told(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    path.mkdir()
    (path / METRICS_FILE).write_text('{"step": 1, "loss": 2}\nnonsense\n[3]\n{"loss": 4}\n')
    (path / "plan.json").write_text("{")
    files = read_run(path)
    assert files.rows == ({"step": 1, "loss": 2},) and files.plan is None
    assert files.notes == (
        "metrics.jsonl: 3 lines are not as a run writes them, and left out",
        "plan.json: not as a run writes it, and left out",
    )


def test_samples_are_chosen_evenly_and_cut_in_the_middle(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "many"
    path.mkdir()
    row = {"prompt": "p", "completion": "a" * 5000 + "z"}
    lines = [json.dumps({"step": step, **row}) for step in range(1, 1001) for _ in range(4)]
    (path / SAMPLES_FILE).write_text("\n".join(lines) + "\n")
    (path / METRICS_FILE).write_text('{"step": 1, "distill/top1_agreement": 0.25}\n')
    files = read_run(path)
    chosen = samples(files)
    assert len(chosen) == SAMPLES and (chosen[0]["step"], chosen[-1]["step"]) == (1, 1000)
    assert len(chosen[0]["completion"]) < 2100 and chosen[0]["completion"].endswith("z")
    assert (chosen[0]["agreement"], chosen[0]["of_step"]) == (0.25, True)
    assert "600 of 4000 samples: those of 150 steps, evenly chosen" in page([files])


def test_a_sample_has_its_own_agreement_or_that_of_its_step(run: Path) -> None:
    own, other = samples(read_run(run))[2:4]
    assert (own["step"], own["agreement"], own["of_step"]) == (2, 0.75, False)
    assert (other["step"], other["agreement"], other["of_step"]) == (2, 0.52, True)


DICHROMATS = {
    "none": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""Machado, Oliveira and Fernandes 2009: linear RGB as a reader sees it."""


@pytest.mark.parametrize("reader", DICHROMATS)
def test_colour_blind_readers_tell_calls_and_runs_apart(reader: str) -> None:
    """Each pair of colours differs by 15 in CIE L*a*b* at least, in both schemes."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )

    def lab(colour: str) -> np.ndarray:
        values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
        seen = np.clip(np.asarray(DICHROMATS[reader]) @ linear, 0, 1)
        x, y, z = np.cbrt(to_xyz @ seen / [0.9505, 1, 1.0888])
        return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    light, dark = _asset("page.css").split("@media (prefers-color-scheme: dark)")
    schemes = [dict(re.findall(r"--((?:call|run)\d): (#\w{6});", part)) for part in (light, dark)]
    for scheme in (schemes[0], schemes[0] | schemes[1]):
        assert len(scheme) == 6 + 8
        for kind in ("call", "run"):
            colours = [lab(scheme[name]) for name in scheme if name.startswith(kind)]
            pairs = itertools.combinations(colours, 2)
            assert min(np.linalg.norm(a - b) for a, b in pairs) >= 15, kind


def test_a_profile_is_a_table_of_its_stages() -> None:
    stage = StageRow(
        stage="actor.update", pool="actor", seconds=0.5, tokens_per_second=12_345.6, flops=2.5e12,
        bytes=3e9, compute=0.4, memory=None, bound="compute", moved=None,
    )  # fmt: skip
    peak = Ceilings("H200", 989e12, 4.8e12, published=True, shared=False)
    share = PoolShare("actor", busy=0.25, idle=0.75)
    table = StageTable((3, 4), 2.0, {"actor": peak, "rollout": peak}, (stage,), (share,))
    sections = templates().get_template("sections.html").module
    told = str(sections.profile(json.loads(table.to_json())))
    assert "Steps 3 to 4, 2 s each. Idle: actor 75%." in told
    assert (
        "Peaks of actor, rollout: 989,000 GFLOP/s and 4.8 TB/s, each device (H200, published)"
    ) in told
    assert re.findall("<t[hd][^>]*>([^<]*)</t[hd]>", told.split("<tbody>")[1]) == [
        "actor.update", "actor", "0.5", "25%", "12,346", "2,500", "3 GB", "40.0%", "–",
        "compute", "–",
    ]  # fmt: skip


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    """10,000 steps with 20 metrics: a few MB, which says what it left out."""
    path = tmp_path / "long"
    make_long_run(path, 10_000)
    text = page([read_run(path)])
    assert len(text.encode()) < 4e6
    assert "Of 10,000 rows each curve shows" in text and "is drawn as one" in text


def test_text_of_a_run_ends_no_element(run: Path) -> None:
    """The data holds no `<` at all, so that nothing in it is a tag."""
    text = page([read_run(run)])
    (data,) = [part.split("</script>")[0] for part in text.split('id="data">')[1:]]
    assert "<" not in data and "window.harmed" in data
    assert made_run.HARMFUL in {s["completion"] for s in json.loads(data)["samples"]}
    assert text.count("<script") == 2 and "http" not in text.replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_half_a_character_in_a_completion_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "half"
    path.mkdir()
    (path / METRICS_FILE).write_text('{"step": 1}\n')
    (path / SAMPLES_FILE).write_text('{"step": 1, "completion": "a\\ud83d"}\n')
    assert cli.run(report.main, [str(path)]) == 0
    text = (path / "report.html").read_text(encoding="utf-8")
    data = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["samples"][0]["completion"] == "a\ud83d"


def test_two_runs_share_a_page(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", "optimizer.learning_rate=0.1")
    runs = [read_run(run), read_run(other)]
    assert differing_keys(runs) == {"optimizer.learning_rate": [0.003, 0.1]}
    moved = ({"step": 0, "mesh": "actor=8"}, {"step": 9, "mesh": "actor=4"})
    resumed = replace(runs[1], sessions=moved)
    assert differing_keys([runs[0], resumed])["mesh"] == [
        "actor=2,rollout=2,teacher=4",
        "actor=8 to step 9, then actor=4",
    ]
    out = tmp_path / "both.html"
    assert cli.run(report.main, [str(run), str(other), "-o", str(out)]) == 0
    text = out.read_text()
    assert "optimizer.learning_rate" in text and 'id="timeline"' not in text


def test_the_command_writes_beside_the_run_and_refuses_the_rest(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(report.main, [str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").stat().st_size > 10_000
    refused = {
        (str(tmp_path),): "holds no run: neither config.yaml nor metrics.jsonl is in it",
        (str(tmp_path / "no"),): "does not exist: give the directory of a run",
        (str(run / METRICS_FILE),): "is a file: give the directory of a run",
        (str(run), str(tmp_path)): "-o FILE.html is needed: 2 runs",
        (str(run), "-o", str(tmp_path / "no" / "x.html")): "there is no folder",
    }
    for arguments, told in refused.items():
        assert cli.run(report.main, list(arguments)) == cli.EXIT_BAD_INPUT
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("n", "told"), [(999, "999 bytes"), (1e3, "1 kB"), (53_826_632, "53.8 MB"), (1.4e11, "140 GB")]
)
def test_bytes_as_a_reader_says_them(n: float, told: str) -> None:
    assert bytes_text(n) == told
