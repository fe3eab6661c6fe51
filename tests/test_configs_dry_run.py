"""The ready-made 8-GPU configs, planned from `config.json` alone: no weights, no GPU."""

import json
from pathlib import Path

import pytest

from jaxrl import cli
from jaxrl.train import main

CONFIGS = Path(__file__).parent.parent / "configs"
QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "eos_token_id": 151645,
}
LARGE = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("split", ["2-2-4", "1-3-4"])
def test_eight_gpu_configs_are_planned_from_config_json_alone(split, tmp_path, capsys):
    models = []
    for role, raw in (("student", QWEN), ("teacher", QWEN | LARGE)):
        folder = tmp_path / role
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        models.append(f"{role}.model={folder}")
    config = str(CONFIGS / f"qwen2.5_7b_to_1.5b_{split}.yaml")
    assert cli.run(main, ["--config", config, "--dry-run", *models]) == 0
    told = capsys.readouterr().out
    actor, rollout, teacher = split.split("-")
    assert f"actor={actor},rollout={rollout},teacher={teacher}" in told
    assert "on GPUs of 80 GB, of which jax takes 75%: fits" in told
