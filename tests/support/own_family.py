"""Llama, as a family of a user's own."""

from dataclasses import replace

from jaxrl.models.families.llama import LLAMA

MINE = replace(LLAMA, model_type="my_llama")
UNNAMED = LLAMA
TAKEN = replace(LLAMA, model_type="qwen3")
NO_FAMILY = {"model_type": "my_llama"}
