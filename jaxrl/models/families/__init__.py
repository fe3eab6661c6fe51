"""The families of decoders."""

from __future__ import annotations

from jaxrl.models.families.gemma import GEMMA3, GEMMA4, GEMMA4_UNIFIED
from jaxrl.models.families.gpt_oss import GPT_OSS
from jaxrl.models.families.llama import LLAMA, MISTRAL
from jaxrl.models.families.olmo import OLMO2, OLMO3
from jaxrl.models.families.phi import PHI3
from jaxrl.models.families.qwen import QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE
from jaxrl.models.families.smollm import SMOLLM3
from jaxrl.models.family import Family

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "mistral": MISTRAL,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "phi3": PHI3,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
}
"""`model_type` of a `config.json` -> its family."""
