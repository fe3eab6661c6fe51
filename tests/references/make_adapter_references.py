"""Makes the committed adapters with peft, transformers and torch. Tests read them without.

    pip install torch transformers peft
    python tests/references/make_adapter_references.py

Writes `adapters/`: a folder of adapters as peft writes it, of a random Llama of which only the
seed is kept (`tiny.random_tensors`), and `logits.npy` that peft computes with both.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tiny import ADAPTED, BASE, batch, random_tensors
from transformers import LlamaConfig, LlamaForCausalLM

OUT = Path(__file__).parent / "adapters"
TARGETS = ["q_proj", "v_proj", "down_proj"]


def main() -> None:
    config = LlamaConfig(**BASE, **ADAPTED)
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").float()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tensors = random_tensors(shapes, seed=50)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    lora = LoraConfig(r=2, lora_alpha=6, target_modules=TARGETS, use_rslora=True)
    adapted = get_peft_model(model, lora).eval()
    torch.manual_seed(0)
    for name, value in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(value, std=0.2)
    tokens, mask = batch(config.vocab_size)
    valid = torch.from_numpy(mask)
    positions = (valid.long().cumsum(-1) - 1).clamp(min=0)
    ids = torch.from_numpy(tokens).long()
    with torch.no_grad():
        found = adapted(input_ids=ids, attention_mask=valid.long(), position_ids=positions).logits
    adapted.peft_config["default"].base_model_name_or_path = "BASE"
    adapted.save_pretrained(OUT)
    (OUT / "README.md").unlink(missing_ok=True)
    np.save(OUT / "logits.npy", found.numpy())


if __name__ == "__main__":
    main()
