"""Models of another name whose config.json is that of a family here."""

from __future__ import annotations

import json
from pathlib import Path

from large_models import QWEN3_5

from jaxrl.formats import hf

QWEN3_6 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "vision_config": {"model_type": "qwen3_5", "depth": 27, "hidden_size": 1152},
    "text_config": QWEN3_5
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "intermediate_size": 17408,
        "linear_num_value_heads": 48,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
    },
}
"""As that of Qwen3.6-27B, and of Qwen3.8 of that size."""


def test_qwen3_6_is_read_as_qwen3_5(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_6))
    config = hf.read_config(tmp_path)
    assert (config.d_model, config.n_layers, config.n_recurrent) == (5120, 64, 48)
    assert config.delta is not None
