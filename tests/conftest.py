"""Test set-up: eight emulated CPU devices, a shared compile cache, strict rank promotion.

The suite's models are tiny and most of its time is XLA's, so programs are compiled with few of
LLVM's optimizations, each as one module (cut into 32, side by side, they cost half as much again),
and loops by the older of the CPU's two emitters, which takes half the time, by the tests' own
processes and by those that they start. The flag that a run adds is there from the start, because
a program's key in the compile cache holds all flags.
"""

import ctypes
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # no test asks a program's lines
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # processes that no run takes
os.environ.setdefault("RAY_worker_niceness", "0")  # 15 has them wait for the other tests
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the public hub for a name that it has misspelt
# A hundred processes import jaxrl: its bytecode is kept, also where images of Python forbid that.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_collective_call_terminate_timeout_seconds=86400",  # as a run asks
    ]
).strip()
if version("jaxlib").startswith("0.10."):  # 0.12 has one emitter, and refuses to start by the flag
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import jax
import psutil
import pytest
import shape_checks
from hub_server import Hub

shape_checks.install()

from jaxrl.process import compile_cache  # noqa: E402
from jaxrl.sharding import ledger  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("JAXRL_COMPILE_CACHE", str(Path(tempfile.gettempdir()) / "jaxrl-test-cache")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Tracing allocates so much that Python's own threshold of 700 costs a tenth of a test's time.
gc.set_threshold(50_000, 10, 10)

LONGEST_FIRST = (
    *("test_two_hosts.py", "test_teachers.py", "test_mixtures.py", "test_ray_train.py"),
    *("test_objective.py", "test_resume.py", "test_python_objects.py", "test_episode_runs.py"),
    *("test_lora_runs.py", "test_rl.py", "test_self_distillation.py", "test_context.py"),
    *("test_ray.py", "test_plan_true.py", "test_spmd.py", "test_actor.py", "test_ray_starts.py"),
    *("test_other_tokenizers.py", "test_engine.py", "test_decoder.py"),
    *("test_shared_prompts.py", "test_profiling.py", "test_train.py", "test_compiled.py"),
    *("test_delta.py", "test_programs.py", "test_doc_commands.py"),
    *("test_compiled_tpu.py", "test_kernels_aot.py", "test_gpu.py", "test_attention.py"),
    *("test_served_teachers.py", "test_head.py", "test_bad_input.py", "test_configs_dry_run.py"),
    *("test_flat_memory.py", "test_evaluate.py", "test_docs.py", "test_cache.py"),
    *("test_serve_teacher.py", "test_hybrid.py", "test_face.py"),
    *("test_rewards_pool.py", "test_environment_pool.py", "test_aligned.py"),
    *("test_checkpoint.py", "test_generate.py", "test_config_page.py"),
)
"""Files that take long: begun last, they would leave all processes but one with nothing to do.
Those of several processes, which wait more than they compute, stand among those that compute.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # modules and tests stay: no later collection looks at them


def pytest_sessionfinish() -> None:
    gc.collect()
    gc.freeze()  # pytest collects ten times more, in each process, before it ends


@pytest.fixture(autouse=True, scope="module")
def every_program_is_kept() -> None:
    """A run that has a compile cache raises the threshold for its process, which is the tests'."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


MOST_BYTES = 1 << 30
"""Of a test process: beyond it the programs of the files before are released. What they leave is
freed memory that glibc keeps; given back, a process of 1,033 MB had 401. Within a file, whose tests
share programs, it may have half as much again."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    within = nextitem is not None and nextitem.path == item.path
    if psutil.Process().memory_info().rss > MOST_BYTES * (1.5 if within else 1):
        compile_cache._KEPT.clear()
        jax.clear_caches()
        gc.collect()
        with suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def shared_programs() -> Iterator[None]:
    """Runs of a file that trains in this process share equal programs. For files whose tests patch
    nothing that is traced."""
    from kept_programs import kept_programs

    with kept_programs():
        yield


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """What a test leaves in the process's environment, or registers, no later one finds."""
    before = dict(os.environ)
    yield
    for name in {*before, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]
    if (families := sys.modules.get("jaxrl.models.families")) is not None:
        families.forget_families()


@pytest.fixture(autouse=True)
def own_ledger():
    """Roles that a test makes outside of a worker are not held by this thread's ledger for ever."""
    ledger.use(ledger.Ledger())


@pytest.fixture(scope="session")
def hub_server() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.close()


@pytest.fixture
def hub(hub_server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """An empty hub behind HF_ENDPOINT, and an empty cache, for this process and those it starts."""
    from huggingface_hub import constants

    hub_server.reset()
    home = tmp_path / "hub_home"
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub_server.url)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
    template = hub_server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return hub_server
