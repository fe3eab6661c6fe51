"""No process that jaxrl starts runs a file of the working directory in place of a library."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
STARTS = {
    "subprocess": {"Popen", "run", "call", "check_call", "check_output", "getoutput"},
    "os": {"system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "startfile"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "multiprocessing": {"Process", "Pool", "Manager", "get_context"},
    "pty": {"fork", "spawn"},
}
"""Module -> what starts a process; also `os.exec...` and `os.spawn...`."""
KNOWN = {
    "aot/subprocess_compile.py": {"Popen"},
    "process/gpu_memory.py": {"run"},  # nvidia-smi
    "process/user_code.py": {"Popen"},
    "process/user_process.py": {"fork"},
    "run/run_dir.py": {"check_output"},  # git
    "runtime/cluster.py": set[str](),
    "runtime/ray/local_cluster.py": {"Popen"},
}
"""File -> what it starts processes by."""


def started_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            yield from (
                n for n in names if n.startswith(("multiprocessing", "concurrent.futures.p"))
            )
            if isinstance(node, ast.ImportFrom) and node.module in STARTS:
                yield from STARTS[node.module] & {alias.name for alias in node.names}
            yield from {"ProcessPoolExecutor"} & {alias.name for alias in node.names}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in STARTS.get(node.value.id, ()):
                yield node.attr
            if node.value.id == "os" and node.attr.startswith(("exec", "spawn")):
                yield node.attr


def test_every_place_that_starts_a_process_is_known_and_python_starts_by_one_function() -> None:
    found, executables = {}, set()
    for path in (ROOT / "jaxrl").rglob("*.py"):
        text, name = path.read_text(), str(path.relative_to(ROOT / "jaxrl"))
        if name.startswith("scripts/"):
            continue
        if starts := set(started_in(ast.parse(text))):
            found[name] = starts
        if "sys.executable" in text:
            executables.add(name)
    assert found == {name: starts for name, starts in KNOWN.items() if starts}
    assert executables == {
        "process/child_python.py",  # `python_command`
        "runtime/ray/connect.py",  # of Ray's workers, whose paths `_job` and `SAFE` decide
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a file of the name of each module of Python and of each installed package, which says
    that it was run; and a user's module with a helper."""
    made = tmp_path_factory.mktemp("poisoned")
    names = {*sys.stdlib_module_names, *metadata.packages_distributions()} - {"jaxrl"}
    # What `python -m` itself imports, before any code of the module that it names.
    (made / "loaded.py").write_text(loaded := "import sys; print(*sys.modules)")
    by_module, by_text = (
        {*subprocess.check_output([sys.executable, *how], cwd=made, text=True).split()}
        for how in (("-m", "loaded"), ("-c", loaded))
    )
    names -= {name.partition(".")[0] for name in by_module - by_text}
    for name in names:
        if name.isidentifier() and not name.startswith("_"):
            (made / f"{name}.py").write_text(
                f"import sys\nopen('ran', 'a').write(f'{name} {{sys.orig_argv}}\\n')\n"
                "raise ImportError('a file of the working directory')\n"
            )
    (made / "my_helper.py").write_text("HALF = 0.5\n")
    (made / "my_code.py").write_text(
        "from jaxrl.environments import Answer, Environment\n"
        "def half(completions, **_):\n    import my_helper\n"
        "    return [my_helper.HALF for _ in completions]\n"
        "def bare(program):\n    import os, subprocess, sys\n"
        "    return subprocess.check_output([sys.executable, program], text=True).strip()\n"
        "class Talks(Environment):\n"
        "    def step(self, text, messages): return Answer(bare(text) if text else 'said')\n"
    )
    return made


def run_in(folder: Path, *command: str) -> str:
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    ran = folder / "ran"
    assert not ran.exists(), f"{ran.read_text()}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


PROGRAM = """
import sys, threading
from jaxrl.aot.subprocess_compile import apart
from jaxrl.environments.environment_pool import EnvironmentPool
from jaxrl.environments.environment_process import Session, find
from jaxrl.rewards import functions
from jaxrl.rewards.reward_pool import Item, RewardPool
sys.path.insert(0, "")  # as in a notebook
limits = {"workers": 1, "timeout": 20, "startup": 60}
with EnvironmentPool(find("my_code:Talks"), **limits) as pool:
    for text in ("", sys.argv[1]):
        answer = pool.submit(pool.step(Session(text, {"prompt": "p"}), text)).result()
        print(answer.messages[0]["content"])
with RewardPool([functions.find("my_code:half")], **limits) as pool:
    print(pool.judge(0, [Item("p", "c", "5", {})]).result().values)
print(*apart(threading.Event(), map, str, [1, 2]))
"""


def test_processes_of_the_users_code_and_of_compilers_import_libraries(
    folder: Path, tmp_path: Path
) -> None:
    """The user's module is found in the working directory; a program that it starts finds what is
    beside that program, as always."""
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "program.py").write_text("import beside; print(beside.WORD)\n")
    said = run_in(folder, sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "program.py"))
    assert said.split("\n") == ["said", "beside", "[0.5]", "1 2", ""]


QUICK = (
    *("--config", "builtin:quickstart_gspo", "data.eval=null", "eval.every=0", "steps=1"),
    *("logging.tensorboard=false", "batch_size=2", "group_size=2", "mesh=actor+rollout=1"),
    *("max_new_tokens=4", "reward.functions=[my_code:half]"),
)


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "jaxrl.train", "--dry-run", *QUICK),
        pytest.param(("-m", "jaxrl", "devices"), marks=pytest.mark.slow),
        pytest.param(("jaxrl", "train", *QUICK), marks=pytest.mark.slow),
        pytest.param(("-m", "jaxrl", "train", *QUICK), marks=pytest.mark.slow),
        pytest.param(("jaxrl", "train", "--launcher", "ray", *QUICK), marks=pytest.mark.slow),
        pytest.param(("-m", "jaxrl.train", "--launcher", "ray", *QUICK), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_commands_import_libraries(folder: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    program, *rest = words
    script = Path(sys.executable).with_name("jaxrl")
    command = [str(script)] if program == "jaxrl" else [sys.executable, program]
    given = [f"run_dir={tmp_path}/run"] if "train" in " ".join(words) else []
    said = run_in(folder, *command, *rest, *given)
    if "train" in words:
        assert "reward 0.500" in said or (tmp_path / "run" / "final").is_dir()
