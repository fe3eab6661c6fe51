"""Models whose positions depend on the longest sequence: a run's parts compute for the same one."""

from __future__ import annotations

import pickle
from pathlib import Path

from runs import SHORT
from tiny_models import random_params
from tiny_tokenizer import tiny_tokenizer

from jaxrl import Config
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.formats.hf import save_hf
from jaxrl.models.config import DecoderConfig
from jaxrl.models.rope import LongRope
from jaxrl.run.evaluation import prepare_evaluation
from jaxrl.run.job import make_job


def test_a_run_computes_for_its_longest_sequence(tmp_path: Path) -> None:
    """Evaluations included; in each process that finds the model again by its name."""
    rope = LongRope((1.0,) * 4, (4.0,) * 4, original_max_positions=32, attention_factor=1.0)
    config = DecoderConfig(
        "phi3", 264, 16, 1, 2, 1, 8, 16, rope_scaling=rope, tie_embeddings=True, eos_ids=(258,)
    )
    save_hf(tmp_path, config, random_params(config), dtype="float32")
    tiny_tokenizer(template=None).save_pretrained(tmp_path)
    models = [f"student.model={tmp_path}", f"teacher.model={tmp_path}"]
    asked = [*models, *SHORT, "eval.max_new_tokens=20", "mesh=actor=2,rollout=1,teacher=1"]
    theirs = ["teacher.prompt=Think: {prompt}", "teacher.max_prompt_tokens=40"]
    job = make_job(Config.load("builtin:quickstart", [*asked, *theirs]))
    assert job.student.config == config.for_length(24 + 20)
    assert job.teacher.models["teacher"].config == config.for_length(40 + 20)
    itself = ["teacher.model=policy", "mesh=actor=2,rollout=1,teacher=1"]
    job = make_job(Config.load("builtin:quickstart", [*asked, *theirs, *itself]))
    assert job.student.config == config.for_length(40 + 20)
    assert pickle.loads(pickle.dumps(job.student)).config == job.student.config

    found = resolve_model(tmp_path)
    held_out = prepare_evaluation(found, Config.load("builtin:quickstart", asked), [], "rollout=1")
    assert held_out.source.config == config.for_length(24 + 20)
