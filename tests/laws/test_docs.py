"""What the pages say is there: links resolve, commands exist, examples run, messages are real."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax
import pytest
from one_layer import cut_models, take_cut_models
from pages import COMMAND_PAGES, DOCS, PAGES, ROOT, blocks, name_of, script

import jaxrl
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.config.cli import COMMANDS
from jaxrl.config.keys import keys
from jaxrl.config.roles import GrouperConfig
from jaxrl.config.schema import Config
from jaxrl.data.tasks import TASKS
from jaxrl.errors import UserError
from jaxrl.formats import gguf
from jaxrl.losses.algorithm_table import ALGORITHMS
from jaxrl.losses.correction import CORRECTIONS
from jaxrl.models import decoder, parameters
from jaxrl.models.families import FAMILIES
from jaxrl.models.rope import KINDS
from jaxrl.rewards.verifiers import VERIFIERS
from jaxrl.sharding.placement import ROLES, parse
from jaxrl.telemetry.metrics import METRICS, find_metric

EXAMPLES = [
    *sorted(DOCS.glob("add-*.md")),
    DOCS / "environments-of-packages.md",
    DOCS / "environments.md",
]
EXTRAS = {"environments-of-packages.md": ("gymnasium", "mcp")}
"""Optional packages that the examples of a page need."""
SMALLER: dict[str, dict[str, Any]] = {
    "add-an-algorithm.md": {"data.eval": None},
    "add-a-data-source.md": {"algorithm": "sft", "teacher.model": None},
}
"""Keys of the runs of a page that the page does not set: what it adds is trained with all the
same, and takes fewer programs. These runs take models of one layer too."""
TABLES: tuple[dict[str, Any], ...] = (FAMILIES, TASKS, VERIFIERS)
"""What the examples add to, but for algorithms: these stand in files of their own."""


def test_the_page_of_models_names_what_is_read() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert named == {"model_type", "rope_type", *FAMILIES, *KINDS} - {"su"}
    assert {f"`{pre}`" for pre in gguf.TABLES["pre"]} <= set(re.findall(r"`[\w-]+`", text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve_and_no_placeholder_is_left(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links and not [link for link in links if not (page.parent / link).exists()]
    assert "@@" not in text and "TODO" not in text


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and most viewers make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_headings_resolve(page: Path) -> None:
    for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        target = page.parent / file if file else page
        assert anchor in anchors(target), f"{file}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_name_modules_that_exist(page: Path) -> None:
    for module in set(re.findall(r"python -m (jaxrl[\w.]*)", page.read_text(encoding="utf-8"))):
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_of_jaxrl_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^    |`|: )jaxrl ([a-z][a-z-]*)", text, re.MULTILINE))
    assert named <= {name.split()[0] for name in COMMANDS}


ROOMS = "|".join(sorted(path.parent.name for path in (ROOT / "jaxrl").glob("*/__init__.py")))


def test_files_that_pages_and_docstrings_name_exist() -> None:
    """As `plan/table.py`, with or without the package's name; a file that moved leaves no name."""
    texts = [*COMMAND_PAGES, *(ROOT / "jaxrl").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    gone = set()
    for path in texts:
        named = re.findall(
            rf"(?<![\w/.-])(?:jaxrl/)?((?:{ROOMS})/[\w/]+\.py)\b", path.read_text("utf-8")
        )
        gone |= {(path.name, name) for name in named if not (ROOT / "jaxrl" / name).is_file()}
    assert {name for name in gone if not (ROOT / "tests" / name[1]).is_file()} == set()


def test_every_page_is_reached_from_how_it_works() -> None:
    """One click from the page that the README ends with."""
    text = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", text)}
    assert {page for page in DOCS.glob("*.md") if page.name != "how-it-works.md"} <= linked


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    drawn = (DOCS / "rooms.svg").read_text(encoding="utf-8")
    assert drawn == script("draw_rooms").picture(), "python -m jaxrl.scripts.draw_rooms"


def test_the_scripts_that_pages_name_write_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums, models = script("make_sums"), script("make_small_models")
    monkeypatch.setattr(sums, "NUMBERS", sums.NUMBERS[:3])
    monkeypatch.setattr(sums, "KNOWN", 2)
    monkeypatch.setattr(models, "ROWS", {"train": 3, "eval": 2})
    trained: list[Config] = []

    def train(config: Config) -> SimpleNamespace:
        trained.append(config)
        return SimpleNamespace(final_eval=1.0)

    monkeypatch.setattr(models, "train", train)
    for kind in sums.KINDS:
        sums.main([str(tmp_path / f"{kind}.jsonl"), kind])
    with pytest.raises(UserError, match=r"calls.jsonl/x: cannot be written: "):
        sums.main([str(tmp_path / "calls.jsonl" / "x"), "calls"])
    for kind in models.KINDS:
        models.main([str(tmp_path), kind])
    names = ["plus", "minus", "bytes", "pairs"]
    assert [Path(config.run_dir or "").name for config in trained] == names
    sizes = [resolve_model(config.student.model).config.vocab_size for config in trained[2:]]
    assert sizes == [3 + 256, 3 + 256 + 100]
    lines = {file.stem: len(file.read_text().splitlines()) for file in tmp_path.glob("*.jsonl")}
    assert lines == {
        **{"calls": 9, "hints": 3, "feedback": 5},
        **{"train_plus": 3, "eval_plus": 2, "train_minus": 3, "eval_minus": 2},
    }


@pytest.mark.parametrize("page", EXAMPLES, ids=name_of)
def test_the_example_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in EXTRAS.get(page.name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run_smaller(page, tmp_path, monkeypatch)
    before = [dict(table) for table in TABLES]
    place: dict[str, Any] = {"__name__": "example"}
    assert len(blocks(page)) >= 2
    written: list[Path] = []
    try:
        for block in blocks(page):
            name = re.match(r"\s*# (\w+\.py)\n", block)
            if name is None:
                exec(compile(block, str(page), "exec"), place)
            else:
                written.append(Path(name[1]))
                written[-1].write_text(block)
        added = [dict(table) for table in TABLES] != before
        assert added or written, "the example adds an entry, or a file that the next block names"
    finally:
        for table, old in zip(TABLES, before, strict=True):
            table.clear()
            table.update(old)


def run_smaller(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains with the keys of SMALLER, and computes what a page computes operation by operation as
    one program."""
    train = jaxrl.train

    def smaller(config: Config) -> Any:
        return train(Config.of(config, SMALLER.get(page.name, {})))

    def one_program(function: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(function, static_argnums=0)
        return lambda *given, **more: (function if more else jitted)(*given, **more)

    monkeypatch.setattr(jaxrl, "train", smaller)
    if page.name in SMALLER:
        take_cut_models(cut_models(tmp_path / "cut"), monkeypatch)
    if page.name == "add-a-model-family.md":
        for module, name in (
            (decoder, "forward"),
            (decoder, "token_logits"),
            (parameters, "init_params"),
        ):
            monkeypatch.setattr(module, name, one_program(getattr(module, name)))


def test_the_rows_of_the_page_on_data_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    take_cut_models(cut_models(tmp_path / "cut"), monkeypatch)
    (block,) = blocks(ROOT / "docs" / "data.md")
    exec(compile(block, "data.md", "exec"), {"__name__": "example"})
    assert (tmp_path / "runs" / "run" / "final" / "config.json").is_file()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_and_metrics_that_a_page_names_exist(page: Path) -> None:
    known = {key.path for key in keys(Config)}
    sections = "|".join(sorted({path.partition(".")[0] for path in known if "." in path}))
    prefixes = (
        "actor|distill|environment|eval|memory|policy|reward|rollout|similarity|time|tokens"
        "|total|weights"
    )
    text = page.read_text(encoding="utf-8")
    if page.name.startswith("coming-from-"):
        text = re.sub(r"^\| `[^`]+` \|", "|", text, flags=re.MULTILINE)  # the others' own keys
    for code in re.findall(r"`([^`\n]+)`", text):
        key = code.partition("=")[0]
        if re.fullmatch(rf"({sections})(\.[a-z_]+)+", key):
            assert key in known or any(path.startswith(f"{key}.") for path in known), code
        if re.fullmatch(rf"({prefixes})/[\w@/{{}}]+", code) and code not in METRICS:
            assert find_metric(code) is not None, code


@cache
def messages_in_the_source() -> tuple[str, ...]:
    """Every string of the package but docstrings; a NUL stands for what is filled in."""
    found = []
    for path in (ROOT / "jaxrl").rglob("*.py"):
        found += strings(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(found)


def strings(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
        return ["".join(map(str, parts))]
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    return [text for child in ast.iter_child_nodes(node) for text in strings(child)]


def fixed_parts(message: str) -> list[str]:
    """A quoted message without what is filled in, which pages write as an ellipsis."""
    return [part.strip() for part in message.split("\u2026") if part.strip()]


def quoted(page: Path) -> list[str]:
    """The messages of a page: its lines that begin with `> `."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("> ") for line in lines if line.startswith("> ")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_messages_that_a_page_quotes_are_in_the_source(page: Path) -> None:
    for message in quoted(page):
        parts = fixed_parts(message)
        assert max(map(len, parts)) >= 12, f"{message}: too little to find"
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert any(pattern.search(text) for text in messages_in_the_source()), message


def test_the_reader_of_messages_is_strict() -> None:
    tree = ast.parse('def f(n):\n    """a docstring"""\n    raise E(f"has run for {n} s;" " late")')
    assert strings(tree) == ["has run for \0 s; late"]
    assert fixed_parts("\u2026 has run for \u2026 s; late") == ["has run for", "s; late"]
    assert not any("no such message anywhere" in text for text in messages_in_the_source())


def test_messages_are_written_in_the_words_of_the_field() -> None:
    """As the pages are: DIALECT is below."""
    found = [text for text in messages_in_the_source() if " " in text and DIALECT.search(text)]
    assert not found


def test_troubleshooting_quotes_messages() -> None:
    assert len(quoted(DOCS / "troubleshooting.md")) >= 15


def test_the_page_on_checkpoints_lists_the_keys_that_may_change() -> None:
    text = (DOCS / "checkpoints.md").read_text(encoding="utf-8")
    for heading, how in (
        ("Free", "free"),
        ("Reported", "reported"),
        ("Allowed", "asked"),
        ("Refused", "refused"),
    ):
        (listed,) = re.findall(rf"^\| {heading}[^|]*\| (.*) \|$", text, re.MULTILINE)
        shown = {matches(word) for word in re.findall(r"`([^`]+)`", listed)}
        found = {name for words in shown for name in words}
        assert found == {key.path for key in keys(Config) if key.on_resume.how == how}


def matches(word: str) -> frozenset[str]:
    """The keys that `a.b`, `a.*` or `ROLE.b` stands for."""
    pattern = re.escape(word).replace(r"\*", ".*").replace("ROLE", f"({'|'.join(ROLES)})")
    return frozenset(key.path for key in keys(Config) if re.fullmatch(pattern, key.path))


def test_the_page_on_rewards_has_the_formulas_and_defaults_of_every_algorithm() -> None:
    """Its table's paper numbers, settings and updates are those of `ALGORITHMS`."""
    text = (DOCS / "reinforcement-learning.md").read_text(encoding="utf-8")
    for name, spec in ALGORITHMS.items():
        if spec.loss is None:
            continue
        (row,) = re.findall(rf"^\| `{name}`.*$", text, re.MULTILINE)
        paper = re.search(r"\d{4}\.\d{5}", spec.loss.formula)
        assert paper is not None and paper[0] in row, row
        numbers = {float(number) for number in re.findall(r"(?<![\d.])\d+(?:\.\d+)?(?:e-\d)?", row)}
        assert "as `gspo`" in row or set(spec.loss.settings.values()) <= numbers, row
        assert row.endswith(f"| {spec.minibatches} |"), row
    corrections = {name for name in CORRECTIONS if name != "none"}
    uses = set(get_args(GrouperConfig.model_fields["use"].annotation)) - {"subgroup"}
    for name in corrections | uses:
        assert re.search(rf"^\| `{name}`", text, re.MULTILINE), name


def test_the_command_lines_of_the_page_on_rewards_are_understood() -> None:
    """Each of its indented lines with keys is a config, put on top of the one it begins with."""
    text = (DOCS / "reinforcement-learning.md").read_text(encoding="utf-8")
    lines = [line.split() for line in re.findall(r"^    (\S+=.*|--mesh .*)$", text, re.MULTILINE)]
    tried = 0
    for words in lines:
        if words[0] == "--mesh":
            words[:2] = [f"mesh={words[1]}"]
        asked = [word for word in words if re.match(r"[a-z_]+(\.[a-z_]+)*=", word)]
        if asked:
            config = Config.load(ROOT / "configs" / "quickstart_gspo.yaml", asked)
            assert config.learns_from_rewards and parse(config.mesh).n_devices > 0
            tried += 1
    assert tried >= 5


def test_the_page_on_data_lists_verifiers_and_tasks() -> None:
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    assert not [name for name in VERIFIERS if f"`{name}`" not in text]
    assert not [name for name in TASKS if not re.search(rf"`{name}[:/`]", text)]


def test_the_speeds_of_the_readme_are_those_that_were_measured() -> None:
    """Each figure of its tables is on the page of the benchmark."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Speed\n")[2].partition("\n## ")[0]
    for name in ("GPU", "PEERS", "RESULTS"):
        assert f"benchmarks/{name}.md" in section
    pages = [ROOT / "benchmarks" / name for name in ("PEERS.md", "RESULTS.md")]
    measured = figures("\n".join(page.read_text(encoding="utf-8") for page in pages))
    rows = re.findall(r"^\| .*$", section, re.MULTILINE)
    shown = figures("\n".join(rows))
    assert len(shown) >= 15 and shown <= measured


def figures(text: str) -> set[str]:
    """The numbers with a point or a comma, and the percentages."""
    return set(re.findall(r"\d+(?:[.,]\d+)+|\d+%", text))


def test_papers_name_what_is_there() -> None:
    """Each row: the paper's arXiv number or year is in the file that it names, with the name."""
    rows = re.findall(
        r"^\| (.+?) \| .+? \| .*?\[[^\]]+\]\(([^)]+)\): (.+?) \|$",
        (DOCS / "papers.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) >= 10
    for paper, file, names in rows:
        source = (DOCS / file).read_text(encoding="utf-8")
        number = re.search(r"\d{4}\.\d{5}", paper)
        told = number[0] if number else re.findall(r"(?:19|20)\d\d", paper)[-1]
        assert told in source, f"{file} does not name {paper}"
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b.* = ", source, re.MULTILINE), (
                name
            )


DIALECT = re.compile(
    r"\b(tells?|told|knows|struck|unawares|at hand|beside|somebody|nobody|whoever|learnt|one's own"
    r"|of (?:its|their) own)\b",
    re.IGNORECASE,
)
"""Words for persons, or out of use, which a reader stumbles over in a technical page."""
VAGUE_HEADING = re.compile(r"^#+ (?:who|what|where|when) \b(?!.*\?$)", re.IGNORECASE)
WRITTEN_BY_BENCHMARKS = re.compile(r"-compared\.md$")


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=name_of)
def test_a_page_is_written_in_the_words_of_the_field(page: Path) -> None:
    """No verbs of persons for programs, no dialect, and headings that a search finds."""
    if WRITTEN_BY_BENCHMARKS.search(page.name):
        return
    prose = re.sub(
        r"^(```|~~~).*?^\1$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    lines = [line for line in prose.splitlines() if not line.startswith(("    ", "> "))]
    found = [line for line in lines if DIALECT.search(re.sub(r"`[^`]*`", "", line))]
    found += [line for line in lines if VAGUE_HEADING.match(line)]
    assert not found
