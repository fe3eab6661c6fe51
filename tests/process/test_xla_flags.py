"""Flags reach XLA before jax starts, beside those that somebody else gave."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jaxlib
import pytest
from cases import and_slow
from jax._src import cache_key, compiler
from runs import SHORT

from jaxrl import Config, dry_run
from jaxrl.errors import UserError
from jaxrl.models.kernels import Target
from jaxrl.plan.plan_inputs import Setting
from jaxrl.process.xla_flags import (
    COSTLY,
    DETERMINISTIC,
    PATIENT,
    SETTINGS,
    TUNED,
    TUNED_BEFORE,
    TUNED_DIR,
    TUNED_VARIABLE,
    check_jax_settings,
    exclude_nondeterministic,
    keep_autotuning,
    user_flag_notes,
    wait_for_slow_devices,
    worker_environment,
)
from jaxrl.run import attempt
from jaxrl.sharding.mesh import ensure_devices

PROGRAM = """
import os, sys
from jax._src import xla_bridge
from jaxrl import Config, dry_run
from jaxrl.run.attempt import prepare_run
from jaxrl.run.job import make_job
one_device = "mesh=actor+rollout=1"
for name, overrides in (
    ("quickstart", []),
    ("quickstart", ["teacher.tokenizer=own", "eval.teacher=false"]),
    ("quickstart_gspo", []),
    ("quickstart_gspo", ["environment.name=guess_number", "reward.functions=[]", one_device]),
):
    make_job(Config.load(f"builtin:{name}", overrides))
    assert not xla_bridge.backends_are_initialized(), (name, overrides)
prepare_run(Config.load(None, sys.argv[1:]))
assert xla_bridge.backends_are_initialized()
print(os.environ["XLA_FLAGS"])
"""


@pytest.mark.parametrize("asked", and_slow([True], [False]))
def test_a_run_of_threads_sets_the_flag_before_jax_starts(asked, tmp_path):
    """What `deterministic` keeps of XLA's choices must be named before: the checks of a run, of
    whatever kind, do not start jax either."""
    keys = [*SHORT, f"run_dir={tmp_path}", f"deterministic={str(asked).lower()}"]
    command = [sys.executable, "-c", PROGRAM, *keys]
    env = os.environ | {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    flags = [env["XLA_FLAGS"], *([DETERMINISTIC] if asked else []), PATIENT]
    assert done.stdout.splitlines()[-1:] == [" ".join(flags)], done.stderr
    assert not (tmp_path / TUNED_DIR).exists()


def test_after_jax_has_started_it_is_refused(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(UserError, match=f"XLA_FLAGS={DETERMINISTIC}"):
        exclude_nondeterministic()
    monkeypatch.setenv("XLA_FLAGS", DETERMINISTIC)
    exclude_nondeterministic()  # there already
    assert os.environ["XLA_FLAGS"] == DETERMINISTIC


def test_a_limit_that_somebody_set_is_kept(monkeypatch):
    theirs = PATIENT.partition("=")[0] + "=50"
    monkeypatch.setenv("XLA_FLAGS", theirs)
    wait_for_slow_devices()
    assert os.environ["XLA_FLAGS"] == theirs


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", []),
        ("--xla_gpu_enable_triton_gemm=true --xla_gpu_autotune_level=4 --xla_dump_to=/d", []),
        ("--xla_gpu_enable_triton_gemm=false", ["--xla_gpu_enable_triton_gemm=false"]),
        ("--xla_gpu_autotune_level=0 --a=b", ["--xla_gpu_autotune_level=0"]),
        ("--xla_gpu_enable_latency_hiding_scheduler", ["_hiding_scheduler: an update"]),
        ("--xla_gpu_enable_latency_hiding_scheduler=False", []),
        ("--xla_gpu_enable_command_buffer=", ["--xla_gpu_enable_command_buffer: it replaces"]),
    ],
)
def test_flags_that_cost_time_or_memory_are_noted(flags, named, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    notes = user_flag_notes()
    assert len(notes) == len(named)
    assert all(part in note for part, note in zip(named, notes, strict=True))


def test_the_page_on_troubles_names_every_such_flag():
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert [flag for flag in COSTLY if f"`{flag}" not in page] == []


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_plan_of_a_run_on_gpus_has_the_notes(platform, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0")
    make = attempt.make_plan

    def planned(*given, **options):
        plan = make(*given, **options)
        inputs = replace(plan.setting.inputs, target=Target(platform))
        return replace(plan, setting=Setting(plan.setting.config, inputs))

    monkeypatch.setattr(attempt, "make_plan", planned)
    noted = [
        note for note in attempt.plan_run(Config.load(None, SHORT)).notes if "autotune" in note
    ]
    assert len(noted) == (platform == "gpu")


def test_the_flags_of_a_worker_are_beside_those_of_its_host(tmp_path):
    assert worker_environment(True, tmp_path) == {
        "XLA_FLAGS": f"${{XLA_FLAGS}} {PATIENT} {DETERMINISTIC}",
        TUNED_VARIABLE: str(tmp_path / TUNED_DIR),
    }
    plain = worker_environment(Config.load().deterministic, tmp_path)
    assert plain == {"XLA_FLAGS": f"${{XLA_FLAGS}} {PATIENT}"}


CHOSEN = """version: 3
results {
  device: "CUDA: 9.0"
}
"""
"""What XLA writes, in short."""
IN_A_PROCESS = """
import os, sys
from pathlib import Path
if sys.argv[1] == "driver":
    from jaxrl import Config, dry_run
    from jaxrl.run.attempt import prepare_run
    prepare_run(Config.load(None, sys.argv[2:]))
else:
    from jaxrl.runtime.role_server import WorkerServer
    WorkerServer(sys.argv[1], 1, ".", (), None)
print(os.environ.get("XLA_FLAGS", ""))
"""


@pytest.fixture(autouse=True)
def keys_of_jax(monkeypatch):
    """Ends what a test changes in jax's keys of the compile cache."""
    for name in ("xla_flags_to_exclude_from_cache_key", "_hash_serialized_compile_options"):
        now = getattr(cache_key, name)
        monkeypatch.setattr(cache_key, name, list(now) if isinstance(now, list) else now)


@pytest.mark.parametrize(
    ("process", "gpus"), and_slow([("driver", "0"), ("actor.1", "")], [("actor.1", "0")])
)
def test_a_process_that_starts_again_on_gpus_takes_the_kernels_that_it_chose(
    process, gpus, tmp_path
):
    """Of a host without GPUs no file is asked for."""
    folder = tmp_path / TUNED_DIR / f"jaxlib-{jaxlib.__version__}"
    folder.mkdir(parents=True)
    written, before = folder / f"{process}.textproto", folder / f"{process}.before.textproto"
    written.write_text(CHOSEN)
    keys = [*SHORT, f"run_dir={tmp_path}", "deterministic=true", "launcher=local"]
    env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "", "CUDA_VISIBLE_DEVICES": gpus}
    if process != "driver":
        env |= {TUNED_VARIABLE: str(tmp_path / TUNED_DIR)}
    command = [sys.executable, "-c", IN_A_PROCESS, process, *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    flags = done.stdout.splitlines()[-1].split()
    ours = {f"{TUNED}={written}", f"{TUNED_BEFORE}={before}"}
    assert {flag for flag in flags if "autotune" in flag} == (ours if gpus else set())
    assert before.is_file() == bool(gpus) and written.is_file() != bool(gpus)


def test_a_file_that_was_cut_leaves_the_choices_of_before(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl.process.xla_flags.xla_bridge.backends_are_initialized", bool)
    folder = tmp_path / f"jaxlib-{jaxlib.__version__}"
    for text, taken in (("", None), (CHOSEN, CHOSEN), (CHOSEN[:-4], CHOSEN), (2 * CHOSEN,) * 2):
        monkeypatch.setenv("XLA_FLAGS", "")
        if text:
            (folder / "rollout.textproto").write_text(text)
        assert keep_autotuning(tmp_path, "rollout") is None
        values = dict(flag.split("=") for flag in os.environ["XLA_FLAGS"].split())
        assert values[TUNED] == str(folder / "rollout.textproto")
        before = values.get(TUNED_BEFORE)
        assert (before and Path(before).read_text()) == taken


REFUSED = [
    ("jax_enable_x64", True),
    ("jax_numpy_dtype_promotion", "strict"),
    *((name, "disallow") for name in SETTINGS if "guard" in name),
    ("jax_transfer_guard", "disallow_explicit"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_settings_of_jax_with_which_no_run_works_are_refused(name, value):
    """`JAX_ENABLE_X64=1` in the shell ended in a TypeError of `lax.concatenate`."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        for start in (lambda: ensure_devices(1), lambda: dry_run(Config.load())):
            with pytest.raises(UserError, match=f"{name}={value}, .*unset {name.upper()}, or in"):
                start()
    finally:
        jax.config.update(name, getattr(before, "value", before))
    assert {name for name, _ in REFUSED} == SETTINGS.keys()


@pytest.mark.parametrize("value", ["allow", "log", "log_explicit"])
def test_settings_of_jax_that_only_log_are_allowed(value):
    with jax.transfer_guard(value):
        check_jax_settings()


def test_a_worker_keeps_its_choices_though_it_has_the_flags_of_the_driver(tmp_path, monkeypatch):
    """Ray starts it with the driver's environment: each has a file."""
    monkeypatch.setattr("jaxrl.process.xla_flags.xla_bridge.backends_are_initialized", bool)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    folder = tmp_path / "autotune"
    for process, before in (("driver", []), ("actor.0", []), ("actor.0", ["actor.0.before"])):
        assert keep_autotuning(folder, process) is None
        flags = os.environ["XLA_FLAGS"].split()
        (written,) = [flag.partition("=")[2] for flag in flags if flag.startswith(TUNED)]
        assert Path(written).name == f"{process}.textproto"
        assert "--xla_cpu_enable_fast_math=false" in flags
        assert [Path(flag).stem for flag in flags if flag.startswith(TUNED_BEFORE)] == before
        Path(written).write_text(CHOSEN)


def test_choices_that_cannot_be_kept_are_a_note(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    jax.devices()
    assert "jax has started" in str(keep_autotuning(tmp_path, "driver"))
    assert "with a space" in str(keep_autotuning(tmp_path / "my run", "driver"))
    monkeypatch.setenv("XLA_FLAGS", f"{TUNED}=/theirs.pb")
    assert f"XLA_FLAGS has {TUNED}=/theirs.pb" in str(keep_autotuning(tmp_path, "driver"))
    (tmp_path / "file").write_text("")
    assert "Not a directory" in str(keep_autotuning(tmp_path / "file", "driver"))


def test_processes_with_files_of_their_own_share_the_compile_cache(tmp_path, monkeypatch):
    """Else one compiles what the other finds, and waits for it to time its share of kernels."""

    def key(file: str, *more: str) -> str:
        flags = [f"{TUNED}={file}", f"{TUNED_BEFORE}={file}.before", *more]
        monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
        options = compiler.get_compile_options(1, 1)
        debug = options.executable_build_options.debug_options
        debug.xla_gpu_dump_autotune_results_to = file
        debug.xla_gpu_load_autotune_results_from = f"{file}.before"
        hashed = hashlib.sha256()
        cache_key._hash_xla_flags(hashed, [])
        cache_key._hash_serialized_compile_options(hashed, options)
        assert debug.xla_gpu_dump_autotune_results_to == file  # XLA gets it
        return hashed.hexdigest()

    assert key("a") != key("b")
    monkeypatch.setenv("XLA_FLAGS", "")
    keep_autotuning(tmp_path, "driver")
    assert key("a") == key("b")
    assert key("a") != key("a", "--xla_gpu_autotune_level=0")
