"""The report in a real browser: what a user sees, hovers, types and presses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser as browsers
import made_run
import pytest
from browser import Browser
from cases import and_slow
from made_run import EVERY, PAUSE, STEPS, accuracy, divergence, make_long_run, make_run
from runs import unlisted_files

from jaxrl.config import cli
from jaxrl.report import __main__ as report
from jaxrl.telemetry.metrics import METRICS_FILE

pytestmark = pytest.mark.skipif(browsers.MISSING is not None, reason=browsers.MISSING or "")

EVALUATIONS = STEPS // EVERY + 1
PLOT = {"left": 48, "right": 8}
"""Pixels of a chart beside its curves (`EDGE` in curves.js)."""
AXIS, LANE = 20, 17
"""Pixels of the timeline above its lanes, and of a lane (timeline.js)."""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsers.browser(tmp_path_factory.mktemp("profile")) as window:
        window.resize(1200, 900)
        yield window


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("page") / "made")
    assert cli.run(report.main, [str(run)]) == 0
    assert not unlisted_files(run)
    return run / report.REPORT_FILE


@pytest.fixture
def page(window: Browser, written: Path) -> Iterator[Browser]:
    """The page as it is opened; nothing may have gone wrong when a test is over."""
    window.requests()
    window.open(written)
    yield window
    assert window.errors() == []
    asked = [url for url in window.requests() if not url.startswith(("chrome:", "data:image/gif"))]
    assert set(asked) <= {written.resolve().as_uri()}, "the page asks for nothing but itself"


def chart(name: str) -> str:
    return f'figure[data-metric="{name}"]'


def points(page: Browser, name: str) -> list[int]:
    """Points of each raw line of a chart, as its path has them."""
    script = (
        "return [...document.querySelectorAll(arguments[0] + ' path.raw')]"
        ".map((path) => path.getAttribute('d').match(/[ML]/g).length)"
    )
    found = page.run(script, chart(name))
    assert isinstance(found, list)
    return found


def share_of_step(page: Browser, name: str, step: int, first: int, last: int) -> float:
    """Where in a chart's width a step is."""
    width = page.run("return document.querySelector(arguments[0]).clientWidth", chart(name))
    inside = width - PLOT["left"] - PLOT["right"]
    return float((PLOT["left"] + inside * (step - first) / (last - first)) / width)


def test_every_row_is_a_point_and_every_evaluation_a_mark(page: Browser) -> None:
    assert points(page, "distill/divergence") == [STEPS]
    assert points(page, "actor/grad_norm") == [STEPS - 1]
    assert points(page, "eval/accuracy") == [EVALUATIONS]
    marks = "return document.querySelectorAll(arguments[0]).length"
    assert page.run(marks, f"{chart('eval/accuracy')} circle") == EVALUATIONS
    assert page.run(marks, f"{chart('eval/accuracy')} .interval") == EVALUATIONS
    assert page.run(marks, f"{chart('distill/divergence')} .evaluated") == EVALUATIONS
    assert page.run(marks, f"{chart('actor/grad_norm')} .lost") == 1
    assert "teacher 0.99" in page.texts(f"{chart('eval/accuracy')} .level text")


def test_hovering_tells_step_and_value(page: Browser) -> None:
    for step in (5, 30):
        place = share_of_step(page, "distill/divergence", step, 1, STEPS)
        page.hover(f"{chart('distill/divergence')} svg", place, 0.5)
        told = page.text(f"{chart('distill/divergence')} .readout")
        assert told == f"step {step} · {divergence(step):.4g}"
    place = share_of_step(page, "eval/accuracy", 20, 0, 40)
    page.hover(f"{chart('eval/accuracy')} svg", place, 0.5)
    at = accuracy(20)
    told = page.text(f"{chart('eval/accuracy')} .readout")
    assert told == f"step 20 · {at:.4g} [{at - 0.03:.4g}, {at + 0.05:.4g}]"


def test_the_keyboard_moves_the_cursor(page: Browser) -> None:
    plot = f"{chart('distill/divergence')} svg"
    page.type(plot, "\ue014\ue014")  # two arrows to the right
    told = page.text(f"{chart('distill/divergence')} .readout")
    assert told == "step 2 · 0.5"


def test_a_smoothed_line_leaves_the_points(page: Browser) -> None:
    """With a half-life of a step, each point weighs half as much as the one after it."""
    page.run("const s = document.querySelector('[name=smooth]'); s.value = 1;"
             "s.dispatchEvent(new Event('input'))")  # fmt: skip
    assert page.text("#smooth-text") == "half-life 1 steps"
    assert points(page, "distill/divergence") == [STEPS]
    heights = (
        "return [...document.querySelectorAll(arguments[0])].map("
        "(path) => path.getAttribute('d').split(/[ML]/).slice(1, 4).map((xy) => +xy.split(' ')[1]))"
    )
    figure = chart("distill/divergence")
    raw, smooth = page.run(heights, f"{figure} path.raw, {figure} path.smooth")
    first, second, third = (value - raw[0] for value in raw)  # pixels are linear in the values
    assert smooth[1] - raw[0] == pytest.approx((first / 2 + second) / 1.5, abs=0.2)
    assert smooth[2] - raw[0] == pytest.approx((first / 4 + second / 2 + third) / 1.75, abs=0.2)


def test_metrics_are_found_by_name_and_meaning(page: Browser) -> None:
    shown = "return [...document.querySelectorAll('figure')].filter((f) => f.checkVisibility())" \
            ".map((f) => f.dataset.metric)"  # fmt: skip
    assert len(page.run(shown)) == 5
    page.type("[name=metric]", "clipping")  # in the meaning of actor/grad_norm
    assert page.run(shown) == ["actor/grad_norm"]
    page.type("[name=metric]", "learning_rate")
    assert page.run(shown) == []
    assert page.texts(".constants tbody tr:not([hidden]) th") == ["actor/learning_rate"]


def test_a_range_of_steps_holds_for_every_chart(page: Browser) -> None:
    page.type("[name=from]", "11\ue007")
    page.type("[name=to]", "21\ue007")
    page.hover(f"{chart('tokens/per_second')} svg", 0.99, 0.5)
    told = page.text(f"{chart('tokens/per_second')} .readout")
    assert told == "step 21 · 1,021"


def test_gaps_are_counted_and_shown(page: Browser) -> None:
    """`test_report.py` derives the numbers."""
    rows = page.run(
        "return [...document.querySelectorAll('table.idle tbody tr')].map("
        "(row) => [...row.cells].map((cell) => cell.innerText))"
    )
    counted = {row[0]: (row[1], row[2]) for row in rows}
    assert counted == {
        "actor": ("56.0%", str(STEPS + 1)),
        "rollout": ("71.1%", str(STEPS + 2)),
        "teacher": ("86.3%", str(STEPS + 1)),
    }
    gaps = "return [...document.querySelectorAll('table.gaps tbody tr')].map((r) => r.innerText)"
    longest = next(text for text in page.run(gaps) if text.startswith("rollout"))
    assert "2.000 s" in longest and f"\t{made_run.PAUSED}\t" in longest
    assert longest.endswith("waited for the driver before rollout.generate")


def test_a_click_on_a_gap_shows_it_in_the_timeline(page: Browser) -> None:
    labels = page.texts(".labels div")
    assert labels == [
        "actor", "phases", "calls", "rollout", "phases", "calls", "teacher", "phases", "calls",
    ]  # fmt: skip
    page.click("table.gaps tbody tr:nth-child(6) button")  # the rollout's longest
    height = 2 * AXIS + LANE * len(labels)
    page.hover("canvas", 0.5, (AXIS + LANE * (labels.index("rollout") + 0.5)) / height)
    told = page.text("#timeline-view .readout")
    idle = f"idle, waited for the driver before rollout.generate · {PAUSE:g} s"
    assert told.startswith(f"rollout · {idle} · at ") and told.endswith("step 20")


def test_the_timeline_is_shown_by_step(page: Browser) -> None:
    page.type("[name=step-from]", "3\ue007")
    page.type("[name=step-to]", "3\ue007")
    row = page.texts(".labels div").index("calls")
    # From the end of one update to the end of the next: publish, load, generate, score, update.
    page.hover("canvas", 0.9, (AXIS + LANE * (row + 0.5)) / (2 * AXIS + LANE * 9))
    told = page.text("#timeline-view .readout")
    assert told.startswith("actor calls · update · 150 ms · at ") and told.endswith("step 3")


def test_samples_are_filtered_sorted_and_harmless(page: Browser) -> None:
    rows = "#samples-view tbody tr"
    assert page.text("#samples-view .count") == f"50 of {2 * STEPS} that fit, {2 * STEPS} in all"
    page.click("button[name=more]")
    assert len(page.texts(rows)) == 2 * STEPS
    page.type("[name=sample-step]", "step 7")
    shown = page.texts(f"{rows} td.completion")
    assert shown == ["completion 7", f"{made_run.HARMFUL}\nnot learned"]
    assert page.texts(f"{rows} td.prompt") == [f"prompt 7.{n} <b>&amp;" for n in range(2)]
    assert page.texts(f"{rows} td:nth-child(8)") == ["0.75", "0.57"]
    assert page.texts(f"{rows} td.muted") == ["0.57"]  # that of the step
    assert page.run("return window.harmed") is None
    page.type("[name=sample-step]", "\ue011")  # the key Home: the first option, all
    page.type("[name=sample-text]", "COMPLETION 1")
    page.click('th[data-column="reward"] button')
    assert page.texts(f"{rows} td.completion")[:3] == [f"completion {n}" for n in (19, 18, 17)]
    page.click('th[data-column="reward"] button')
    assert page.texts(f"{rows} td.completion")[0] == "completion 1"
    assert page.text("#samples-view .count").startswith("11 of 11")  # 1, and 10 to 19


def test_samples_show_what_was_learned(page: Browser) -> None:
    """A bar, which needs no colour, beside it; who speaks; each reward, and the advantage."""
    page.type("[name=sample-step]", f"step {made_run.TOLD}")
    row, other = "#samples-view tbody tr:first-child", "#samples-view tbody tr:last-child"
    roles, said = page.texts(f"{row} .turn b"), page.texts(f"{row} .turn .said")
    assert roles == ["assistant", "tool", "assistant"]
    assert said == [turn["content"] for turn in made_run.TURNS]
    assert page.texts(f"{row} .turn small") == ["advantage -0.5", "", "reward 1"]
    bars = (
        "return [...document.querySelectorAll(arguments[0])].map("
        "(e) => parseFloat(getComputedStyle(e).borderLeftWidth))"
    )
    assert page.run(bars, f"{row} .turn") == [3, 0, 3]
    assert page.run(bars, f"{other} td.completion div") == [0]
    step = made_run.TOLD
    each = [f"exact {step}", "a_reward_of_a_long_name 0"]
    assert page.texts(f"{row} td:nth-child(6) small") == each
    assert page.texts("#samples-view td:nth-child(7)") == ["0.5", "-0.5"]
    page.type("[name=sample-text]", "SUNNY")  # turns are searched, too
    assert page.text("#samples-view .count").startswith("1 of 1")
    page.type("[name=sample-text]", "\ue003" * 5 + f"completion {step}")
    assert page.run(bars, f"{row} .turn") == [3, 0, 3]
    page.type("[name=sample-step]", "\ue011")


def test_the_plan_and_the_measured_peak_are_bars_of_one_scale(page: Browser) -> None:
    widths = page.run(
        "const w = (e) => e.getBoundingClientRect().width;"
        "return [...document.querySelectorAll('.bar')].map("
        "(bar) => [...bar.querySelectorAll('i')].reduce((sum, part) => sum + w(part), 0) / w(bar))"
    )
    text = page.text(".memory")
    actor_planned, actor_measured = widths[:2]
    assert actor_planned == pytest.approx(1, abs=0.01) and "50 MB, " in text
    share = int(text.split("50 MB, ")[1].split("%")[0]) / 100
    assert actor_measured / actor_planned == pytest.approx(share, abs=0.011)
    assert text.count("nothing was measured") == 2


def test_facts_and_advice_of_the_run_stand_apart(page: Browser) -> None:
    facts, faster, waits = page.texts("#summary h3")
    assert facts == "Facts" and faster.startswith("What would be faster")
    assert waits == "Where the time of a step went"
    first, last = (
        page.texts(f"#summary ul:{place} li") for place in ("first-of-type", "last-of-type")
    )
    assert "would be" in first[0] and all("busy" not in line for line in first)
    assert last[0].startswith("actor: busy 0.16 s of 0.32 s a step; waited 0.10 s for rollout")


def test_the_headline_is_what_the_run_reached(page: Browser) -> None:
    assert page.texts("header .figures b") == ["10.0% → 90.0%", "4,100", "14.9 s"]
    sizes = page.run(
        "return ['header .figures b', 'td'].map("
        "(s) => parseFloat(getComputedStyle(document.querySelector(s)).fontSize))"
    )
    assert sizes[0] >= 2 * sizes[1]
    assert page.text("header code") == "jaxrl train"
    rule = "return getComputedStyle(document.querySelector('#summary h2')).borderTopWidth"
    assert page.run(rule) == "0px"  # the navigation above has one
    assert "what the program makes" in page.texts(".bar i span")  # parts of the plan are named
    titles = (
        "return [...document.querySelectorAll('.group[open] svg.plot')].map((s) => s.textContent)"
    )
    assert all("step" in text for text in page.run(titles))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_scrolls_only_down(page: Browser, scheme: str) -> None:
    page.emulate(scheme)
    page.resize(520, 900)
    try:
        page.run("for (const d of document.querySelectorAll('details')) d.open = true")
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        ink, paper = page.run(
            "const s = getComputedStyle(document.body);"
            "return [s.color, s.backgroundColor].map((rgb) => +rgb.match(/\\d+/)[0])"
        )
        assert (ink > paper) == (scheme == "dark")
    finally:
        page.resize(1200, 900)
        page.emulate("light")


CLIPPED = """
const holds = (node) => [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
const seen = [...document.body.querySelectorAll("*")].filter((e) => e.checkVisibility())
  .filter((e) => !(e instanceof SVGElement) || ["svg", "text"].includes(e.tagName));
return seen.filter((e) => {
  const box = e.getBoundingClientRect();
  const style = getComputedStyle(e);
  if (box.left < -0.5 || box.right > innerWidth + 0.5) return true;
  const hides = holds(e) && style.overflowX !== "visible" && e.tagName !== "SELECT";
  return hides && (e.scrollWidth > e.clientWidth + 1);
}).map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 60)}`);
"""
"""What is beyond the sides of the screen, or has text that its own box cuts off."""


def reports(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields pages of runs of several kinds: name, file."""
    gkd = make_run(folder / "a-run-of-distillation-with-a-long-name", "data.eval=arithmetic:size=7")
    gspo = "algorithm=gspo", "distill_weight=0.5", "group_size=4", "reward.functions=[exact]"
    rewarded = make_run(folder / "gspo", *gspo)
    failed = make_run(folder / "failed")
    rows = (failed / METRICS_FILE).read_text().splitlines(keepends=True)
    (failed / METRICS_FILE).write_text("".join(rows[:5]) + '{"step": 6, "dist')
    for name in ("plan.json", "samples.jsonl", "timeline.json"):
        (failed / name).unlink()
    for run in (gkd, rewarded, failed):
        assert cli.run(report.main, [str(run)]) == 0
        yield run.name, run / report.REPORT_FILE
    several = folder / "several.html"
    assert cli.run(report.main, [*map(str, (gkd, rewarded, failed)), "-o", str(several)]) == 0
    yield "several", several


def test_on_a_phone_nothing_is_clipped(window: Browser, tmp_path: Path) -> None:
    window.phone(390)
    try:
        for name, file in reports(tmp_path):
            window.open(file)
            window.run("for (const d of document.querySelectorAll('details')) d.open = true")
            wide = "return [document.documentElement.scrollWidth, innerWidth]"
            assert window.run(wide) == [390, 390], name
            assert window.run(CLIPPED) == [], name
            assert window.errors() == []
    finally:
        window.phone(None)


def test_labels_of_levels_are_apart_and_a_short_run_is_seen(
    window: Browser, tmp_path: Path
) -> None:
    runs = [make_run(tmp_path / name) for name in ("long", "short")]
    rows = (runs[1] / METRICS_FILE).read_text().splitlines(keepends=True)[:12]
    rows[0] = rows[0].replace('"teacher/accuracy": 0.99', '"teacher/accuracy": 0.985')
    (runs[1] / METRICS_FILE).write_text("".join(rows))
    assert cli.run(report.main, [*map(str, runs), "-o", str(tmp_path / "both.html")]) == 0
    window.open(tmp_path / "both.html")
    boxes = window.run(
        "return [...document.querySelectorAll(arguments[0])].map((t) => {"
        "const b = t.getBoundingClientRect(); return [b.top, b.bottom]; })",
        f"{chart('eval/accuracy')} .level text",
    )
    (_, upper), (lower, _) = sorted(boxes)
    assert upper <= lower
    ends = "return [...document.querySelectorAll(arguments[0])].map((c) => +c.getAttribute('cx'))"
    circles = f"{chart('distill/divergence')} circle.end"
    first, second = window.run(ends, circles)
    assert second < first / 2  # step 11 of 41
    window.run(
        "const s = document.querySelector('[name=smooth]'); s.value = 3;"
        "s.dispatchEvent(new Event('input'))"
    )
    heights = (
        "return [...document.querySelectorAll(arguments[0])].map((p) =>"
        " p.getAttribute('d').match(/[-\\d.]+/g).filter((_, i) => i % 2))"
    )
    smoothed = window.run(heights, f"{chart('distill/divergence')} path.smooth")
    window.click("[name=align]")
    assert window.run(heights, f"{chart('distill/divergence')} path.smooth") == smoothed
    first, second = window.run(ends, circles)
    assert first == pytest.approx(second, abs=1)
    window.hover(f"{chart('distill/divergence')} svg", 0.98, 0.5)
    told = window.text(f"{chart('distill/divergence')} .readout")
    assert told == f"100% of the run · long {divergence(STEPS):.4g} · short {divergence(11):.4g}"
    assert window.errors() == []


def test_several_runs_are_lines_of_one_chart(
    window: Browser, written: Path, tmp_path: Path
) -> None:
    other = make_run(tmp_path / "other", "optimizer.learning_rate=0.1")
    both = tmp_path / "both.html"
    assert cli.run(report.main, [str(written.parent), str(other), "-o", str(both)]) == 0
    window.open(both)
    assert points(window, "distill/divergence") == [STEPS, STEPS]
    place = share_of_step(window, "distill/divergence", 4, 1, STEPS)
    window.hover(f"{chart('distill/divergence')} svg", place, 0.5)
    told = window.text(f"{chart('distill/divergence')} .readout")
    assert told == "step 4 · made 0.25 · other 0.25"
    assert "optimizer.learning_rate\t0.003\t0.1" in window.text("#summary")
    assert window.texts("#curves .legend") == [
        "made optimizer.learning_rate=0.003",
        "other optimizer.learning_rate=0.1",
    ]
    assert window.errors() == []


@pytest.mark.parametrize("steps", and_slow([3_000], [10_000]))
def test_a_long_run_opens_at_once_and_keeps_its_last_step(
    window: Browser, tmp_path: Path, steps: int
) -> None:
    """How long its page is at most, tests/report/test_report.py has of 10,000 steps."""
    make_long_run(tmp_path / "long", steps)
    assert cli.run(report.main, [str(tmp_path / "long")]) == 0
    window.open(tmp_path / "long" / report.REPORT_FILE)
    took = window.run("return performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert took < 5000, f"{took} ms"
    (shown,) = points(window, "distill/divergence")
    assert 400 <= shown <= 800
    window.hover(f"{chart('distill/divergence')} svg", 0.99, 0.5)
    told = window.text(f"{chart('distill/divergence')} .readout")
    assert told.startswith(f"step {steps} · ")
    assert window.errors() == []
