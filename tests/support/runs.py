"""Short runs of tiny models, and what is compared of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import jax
import numpy as np
import safetensors.numpy
from references.tiny import random_tensors
from tiny_models import random_params
from tiny_tokenizer import tiny_tokenizer

from jaxrl.formats.hf import save_hf
from jaxrl.formats.weights import tensor_shapes
from jaxrl.models.config import DecoderConfig
from jaxrl.models.family import LayerKind
from jaxrl.telemetry.totals import STAGES, TOKENS

QUICK = ["--config", "builtin:quickstart"]
"""On the command line: the keys that a test does not set are the quickstart's."""


SHORT = [
    "steps=2",
    "batch_size=6",
    "group_size=2",
    "max_new_tokens=8",
    "max_prompt_tokens=24",
    "eval.every=1",
    "eval.prompts=4",
    "logging.console=plain",
    "rollout.launch_tokens=4",
    "compile_cache=null",
]


def unlisted_files(run_dir):
    """Returns what a run's folder holds that docs/run-folder.md does not list."""
    page = Path(__file__).parents[2] / "docs" / "run-folder.md"
    first_cells = re.findall(r"^\| (`.+?`) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name.split("/")[0] for cell in first_cells for name in re.findall("`(.+?)`", cell)]
    names = (entry.name for entry in Path(run_dir).iterdir())
    return {name for name in names if not any(fnmatch(name, pattern) for pattern in listed)}


def save_model(path, d_model, n_layers, seed, rows=264, eos=258, softcap=None, experts=None):
    family, sizes = "llama" if softcap is None else "gemma3_text", (4, 2, 8, 2 * d_model)
    config = DecoderConfig(family, rows, d_model, n_layers, *sizes, tie_embeddings=True)
    config = replace(config, eos_ids=(eos,), final_softcap=softcap)
    if softcap is not None:
        config = replace(config, kinds=(LayerKind(64, 1e4),), score_dim=8)
    if experts is not None:
        config = replace(config, family="qwen3_moe", experts=experts)
    params = random_params(config, seed)
    params["embed"]["embedding"] *= 20
    save_hf(path, config, params, dtype="float32")
    tiny_tokenizer(template=None).save_pretrained(path)
    return str(path)


def save_pair(folder, layers=2):
    """A student and a teacher of 8 tokens more, as overrides that name them."""
    student = save_model(folder / "student", 32, layers, seed=0)
    teacher = save_model(folder / "teacher", 48, 1, seed=1, rows=272)
    return [f"student.model={student}", f"teacher.model={teacher}"]


def losses(result):
    return [row["distill/divergence"] for row in result.metrics[1:]]


MESH = "mesh=actor=1,rollout=1,teacher=1"
"""A device for each role. What an actor of several devices compiles is not kept on disk, where the
order of its collectives would be lost: each process that trains so compiles it again."""


ALONE = "mesh=actor+rollout+teacher=1"
"""One device for all roles. A program for another device is another program, also to the compile
cache on disk: files whose runs are on the first device alone share what they compile."""
AS_TRAINED = ["eval.prompts=6", "eval.samples=2", "eval.temperature=1", "eval.teacher=false"]
"""Evaluations that sample with the programs that a batch of `SHORT` is sampled with."""


STEPS = 10


CONSTANT = ["optimizer.lr_schedule=constant", "optimizer.warmup_steps=0"]
"""A learning rate that does not depend on the number of steps to come."""
WARMED = ["optimizer.lr_schedule=constant", "optimizer.warmup_steps=3"]
"""One that does not either, and depends on the number of updates before: of runs of at least four
steps."""


def arguments(models, run_dir, *overrides):
    plain = [f"steps={STEPS}", "checkpoint.every=2", "eval.every=4", f"run_dir={run_dir}"]
    return [*models, *SHORT, ALONE, *AS_TRAINED, *WARMED, *plain, *overrides]


def start(models, run_dir, *overrides):
    """A run in a process of its own, on as many devices as this one has: with others it would
    compile all programs anew."""
    command = [sys.executable, "-m", "jaxrl.train", *QUICK]
    command += arguments(models, run_dir, *overrides)
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment() | {"JAX_NUM_CPU_DEVICES": str(jax.device_count())},
    )


def wait_for(path, process, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.002)


def weights(run_dir):
    """Of the policy, or of its adapters."""
    (file,) = (run_dir / "final").glob("*.safetensors")
    return file.read_bytes()


def numbers(result_or_rows):
    """All of a run that depends neither on the clock nor on how long a process has lived, as a peak
    of memory does.
    """
    rows = getattr(result_or_rows, "metrics", result_or_rows)
    changing = ("time/", "tokens/per", "weights/sync_gbps", "checkpoint/", "memory/", "compile/")
    kept = [{k: v for k, v in row.items() if not k.startswith(changing)} for row in rows]
    return [{k: v for k, v in row.items() if not re.match("total/.*_s$", k)} for row in kept]


def check_totals(rows):
    """The totals of each row are the sums over the rows so far, those before a resumption too."""
    adds = {f"total/{name}": [metric] for name, metric in TOKENS.items()}
    adds |= {f"total/{stage}_s": metrics for stage, metrics in STAGES.items()}
    for total, metrics in (adds | {"total/wall_s": ["time/wall_s"]}).items():
        values = [sum(row.get(metric, 0.0) for metric in metrics) for row in rows]
        found = [row.get(total, 0.0) for row in rows]
        np.testing.assert_allclose(found, np.cumsum(values), rtol=1e-9, atol=1e-9, err_msg=total)
    for row in rows[1:]:
        assert row["time/waiting_s"] >= -1e-9 and row["time/waiting_s"] <= row["time/step_s"]


HERE = Path(__file__).parent.parent


CONFIGS = json.loads((HERE / "references" / "encoder_configs.json").read_text())


FUNCTIONS = HERE / "support" / "reward_functions.py"


LENGTH = f"reward.functions=[{FUNCTIONS}:length]"
"""Completions of several lengths differ in it, whatever a random model writes."""


GSPO = ["algorithm=gspo", "teacher.model=null", LENGTH, "reward.workers=1", "group_size=4"]


EPISODES = [
    *GSPO,
    *("mesh=actor=1,rollout=1", "environment.workers=1", "environment.turn_tokens=10"),
    f"environment.name={Path(__file__).parent / 'episode_environments.py'}:Late",
    f"sampling.stop=[{','.join('ABCDEFGHIJKLMOPQRSTUVWXZabcdefghijklmopqrstuvwxz')}]",
]
"""Episodes of an untrained model, some of whose turns end."""


PENALISED = ["policy.kl_coef=0.1", "policy.entropy_coef=0.01", "policy.correction=tis_token"]
"""Of runs that learn from rewards and share their programs."""


def save_reward_model(folder):
    """A checkpoint with a tokenizer of bytes."""
    place = folder / "reward_model"
    place.mkdir()
    raw = CONFIGS["reward/llama"] | {"vocab_size": 300, "max_position_embeddings": 512}
    (place / "config.json").write_text(json.dumps(raw))
    config = replace(DecoderConfig.from_hf(raw), tie_embeddings=True)
    shapes = tensor_shapes(config) | {"score.weight": (1, config.d_model)}
    safetensors.numpy.save_file(random_tensors(shapes, 3), place / "model.safetensors")
    tiny_tokenizer().save_pretrained(place)
    return str(place)


def environment():

    folder = str(Path(__file__).parent)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
