"""What is released: an sdist, and the wheel made from it, which runs in an empty environment of
each Python that is here; and the recipe of a container."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import BytesParser
from pathlib import Path

import jax
import pytest

import jaxrl
from jaxrl import errors
from jaxrl.__main__ import COMMANDS
from jaxrl.config.builtin_configs import commands

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKED = ("pyproject.toml", "README.md", "LICENSE", "jaxrl", "configs", "scripts")
"""What the build reads."""
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"
"""The build as `pip wheel` and `python -m build` ask for it, but without a package index."""
SITES = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
missing = []
for name in sys.argv[1:]:
    try:
        version(name)
    except PackageNotFoundError:
        missing.append(name)
sites = [path for path in sys.path if path.endswith("-packages")]
print(json.dumps([list(sys.version_info[:2]), missing, sites]))
"""
QUICK = [
    *("steps=2", "batch_size=8", "group_size=2", "eval.prompts=4", "eval.every=2"),
    *("mesh=actor=1,rollout=1", "logging.console=plain"),
]


def built(hook, source, folder):
    command = [sys.executable, "-c", BUILD.format(hook), str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "would be ignored" not in done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The sdist, and the wheel built from it."""
    pytest.importorskip("setuptools", "77", "the build needs setuptools (extra dev)")
    folder = tmp_path_factory.mktemp("released")
    (folder / "tree").mkdir()
    for name in PACKED:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / "tree" / name)
            continue
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "tree" / name, symlinks=True, ignore=ignored)
    sdist = built("build_sdist", folder / "tree", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return sdist, built("build_wheel", source, folder)


def test_sdist_and_wheel_hold_every_file_of_the_package_and_the_license(released):
    sdist, wheel = released
    with tarfile.open(sdist) as archive:
        begun = f"jaxrl-{jaxrl.__version__}/"
        packed = {name.removeprefix(begun) for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("jaxrl/configs/quickstart.yaml")
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "jaxrl").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    made = {name for name in os.listdir(ROOT / "scripts") if name.startswith("make_")}
    configs = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.*")}
    configs = {name for name in configs if not name.endswith(".pyc")}
    package |= {f"jaxrl/scripts/{name}" for name in made} | {f"jaxrl/{name}" for name in configs}
    assert package <= names and package <= packed
    info = f"jaxrl-{jaxrl.__version__}.dist-info"
    others = names - package
    assert others and all(name.startswith(f"{info}/") for name in others)
    assert f"{info}/licenses/LICENSE" in names
    assert {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml"} <= packed


def test_the_metadata_are_those_of_the_project(released):
    metadata = pytest.importorskip("packaging.metadata")
    classifiers = PROJECT["classifiers"]
    with zipfile.ZipFile(released[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name)
    parsed = metadata.Metadata.from_email(text, validate=True)
    assert str(parsed.version) == jaxrl.__version__
    assert (parsed.license_expression, parsed.license_files) == ("Apache-2.0", ["LICENSE"])
    assert parsed.description_content_type == "text/markdown"
    assert parsed.description.startswith("# jaxrl")
    assert parsed.summary == PROJECT["description"] and parsed.keywords
    assert str(parsed.requires_python) == PROJECT["requires-python"] == ">=3.11"
    minors = re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))
    assert minors == ["3.11", "3.12", "3.13"]
    message = BytesParser().parsebytes(text)
    assert set(message.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


def python_of(version, names):
    """The interpreter of a version that has the packages, with its folders of packages."""
    why = "no such interpreter"
    for python in (sys.executable, shutil.which(f"python{version}"), f"/usr/bin/python{version}"):
        if python is None or not os.path.exists(python):
            continue
        asked = [python, "-c", SITES, *names]
        done = subprocess.run(asked, capture_output=True, text=True)
        if done.returncode != 0:
            continue
        found, missing, sites = json.loads(done.stdout)
        if found != [int(part) for part in version.split(".")]:
            continue
        if not missing:
            return python, sites
        why = f"{python} lacks {', '.join(missing[:3])}"
    return pytest.skip(f"Python {version}: {why}")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_runs_from_another_folder(version, released, tmp_path, monkeypatch):
    names = [re.split(r"[>\[]", line)[0] for line in PROJECT["dependencies"]]
    python, sites = python_of(version, names)
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    inside, bin = (tmp_path / "venv" / name for name in (f"lib/python{version}", "bin"))
    (inside / "site-packages" / "dependencies.pth").write_text("\n".join(sites) + "\n")
    install = ["-m", "pip", "--python", str(bin / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, *install, "--quiet", str(released[1])], check=True)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*command, code=0):
        command = [bin / command[0], *command[1:]]
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    where = run("python", "-c", "import jaxrl; print(jaxrl.__file__)")
    assert where.startswith(str(inside))
    assert run("jaxrl", "--version") == f"jaxrl {jaxrl.__version__}\n"
    missing = run("jaxrl", "train", "--config", "builtin:tools_warmup", "--dry-run", code=2)
    assert commands("tools_warmup")[0] in missing
    run(*commands("tools_warmup")[0].split())
    assert (elsewhere / "runs" / "calls.jsonl").is_file()
    printed = run("jaxrl", "train", "--config", "builtin:quickstart_gspo", *QUICK)
    assert "accuracy on held-out prompts" in printed
    rows = (elsewhere / "runs" / "quickstart-gspo" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 2 and "reward/nearness/mean" in rows[-1]


@pytest.mark.parametrize("address", [None, "https://example.org/jaxrl/", "https://example.org"])
def test_files_of_the_source_tree_have_their_address_in_messages(address, monkeypatch):
    text = "see docs/limits.md (or scripts/ray.sbatch), not a/docs/limits.md nor configs/docs"

    class Metadata:
        def get_all(self, name):
            return None if address is None else ["Other, x, y", f"Documentation, {address}"]

    monkeypatch.setattr(errors.metadata, "metadata", lambda name: Metadata())
    start = "" if address is None else f"{address.rstrip('/')}/"
    shown = errors.with_addresses(text)
    assert shown == text.replace(" docs/", f" {start}docs/").replace("(or ", f"(or {start}")


def test_files_that_messages_name_are_in_the_source_tree():
    named = set()
    for path in (ROOT / "jaxrl").rglob("*.py"):
        named |= set(errors.FILES.findall(path.read_text(encoding="utf-8")))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_address_is_left_to_one_line_of_the_project():
    """Filled in or not: `project.urls` has the entry that messages read, and no other file has."""
    text = (ROOT / "pyproject.toml").read_text()
    (address,) = re.findall(rf'(?m)^(?:# )?{errors.DOCUMENTATION} = "(.+)"$', text)
    assert PROJECT.get("urls", {errors.DOCUMENTATION: address})[errors.DOCUMENTATION] == address
    if "urls" in PROJECT:
        pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "jaxrl").rglob("*.py")]
        assert [page for page in pages if address in page.read_text(encoding="utf-8")] == []


def test_the_container_is_built_from_what_is_there():
    """What it copies is what the build needs; its extras and its Python are the project's; nothing
    in it runs as root, and it keeps what a run and the hub write."""
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    orders = [line.partition(" ") for line in lines if line]
    python = orders[0][2].removeprefix("PYTHON=")
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    copied = [word for order, _, value in orders if order == "COPY" for word in value.split()[:-1]]
    assert sorted(copied) == sorted(PACKED)
    named = re.findall(r"EXTRAS=([\w,]+)|as in ([\w,]+)|^# Extras.*?: (\w+)", text, re.MULTILINE)
    extras = {extra for words in named for word in words for extra in word.split(",") if extra}
    assert {"cuda", "ray"} <= extras <= set(PROJECT["optional-dependencies"])
    (install,) = (value for _, _, value in orders if value.startswith("pip install"))
    for chosen, asked in (("", "."), ("cuda,ray", ".[cuda,ray]")):
        shell = ["sh", "-c", install.replace("pip install --no-cache-dir", "printf %s")]
        shown = subprocess.run(shell, env={"EXTRAS": chosen}, capture_output=True, text=True)
        assert shown.stdout == asked
    words = [order for order, _, _ in orders]
    assert {"RUN", "USER"}.isdisjoint(words[words.index("USER") + 1 :])
    (volumes,) = (json.loads(value) for order, _, value in orders if order == "VOLUME")
    (made,) = (value for _, _, value in orders if "install --directory" in value)
    assert set(volumes) <= set(made.split())
    home = os.path.expanduser("~")
    cache = os.path.expanduser(jaxrl.Config.load().compile_cache).replace(home, "/home/jaxrl")
    assert any(cache.startswith(f"{volume}/") for volume in volumes)
    *_, folder = (value for order, _, value in orders if order == "WORKDIR")
    assert f"{folder}/runs" in volumes
    (command,) = (json.loads(value) for order, _, value in orders if order == "ENTRYPOINT")
    assert command == list(PROJECT["scripts"])
    started = re.findall(r"^#.* jaxrl(?:-\w+)? (\w+)$", text, re.MULTILINE)
    assert len(started) == 2 and set(started) <= set(COMMANDS)
