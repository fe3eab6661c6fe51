"""Makes two small students whose tokens are not the built-in teacher's characters.

`bytes` has a token for each of the 256 bytes, `pairs` another for each number of two digits. Both
learn the form of a worked sum (`algorithm: sft`), from random weights.

    python scripts/make_byte_students.py           # into runs/byte_students; minutes on two cores
    python -m jaxrl.train --config configs/other_tokenizer.yaml
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl import Config, train
from jaxrl.formats.hf import save_hf
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import init_params

SPECIAL = ("<pad>", "<s>", "</s>")
MERGES: dict[str, list[tuple[str, str]]] = {
    "bytes": [],
    "pairs": list(itertools.product("0123456789", repeat=2)),
}
RECIPE = """
algorithm=sft teacher.model=null mesh=actor+rollout=1 batch_size=128 group_size=1 steps=480
max_prompt_tokens=9 max_new_tokens=10 data.eval=arithmetic
data.train=['arithmetic:terms=2,size=9000','arithmetic:digits=1,size=9000','arithmetic:size=9000']
optimizer.learning_rate=2e-3 optimizer.lr_schedule=constant optimizer.warmup_steps=30
optimizer.b2=0.95 actor.remat=none actor.micro_batch_tokens=null
eval.every=240 logging.samples=1 logging.every=50
"""


def byte_tokenizer(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with these merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *(a + b for a, b in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def make(name: str, folder: Path) -> None:
    """Trains one of them into the run directory `folder`."""
    tokenizer, start = byte_tokenizer(MERGES[name]), folder / f"{name}_start"
    config = DecoderConfig(
        "llama",
        vocab_size=len(tokenizer),
        n_layers=2,
        d_model=128,
        n_heads=4,
        n_kv_heads=4,
        head_dim=32,
        d_ff=352,
        tie_embeddings=True,
        max_positions=128,
        eos_ids=(tokenizer.eos_token_id,),
        bos_id=tokenizer.bos_token_id,
        pad_id=tokenizer.pad_token_id,
    )
    save_hf(start, config, init_params(config, jax.random.key(0)), dtype="float32")
    tokenizer.save_pretrained(start)
    paths = [f"student.model={start}", f"run_dir={folder / name}"]
    result = train(Config.load("builtin:quickstart", [*RECIPE.split(), *paths]))
    print(f"{folder / name}: accuracy {result.final_eval:.1%}")


if __name__ == "__main__":
    for student in MERGES:
        make(student, Path(sys.argv[1] if len(sys.argv) > 1 else "runs/byte_students"))
