"""Writes the quickstart's character tokenizer into the teacher's and the student's folder.

python scripts/make_quickstart_tokenizer.py [FOLDER ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ASSETS = Path(__file__).resolve().parent.parent / "jaxrl" / "assets"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
CHARACTERS = "0123456789+-*/=() ?\n"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 24 in all; adds no BOS."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def main(folders: list[str]) -> None:
    tokenizer = character_tokenizer()
    for folder in folders or [str(ASSETS / "teacher"), str(ASSETS / "student")]:
        tokenizer.save_pretrained(folder)
        path = Path(folder) / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        # transformers 5 writes a class name that transformers 4 does not know; both know this one.
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(settings, indent=2) + "\n")
        print(f"{folder}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main(sys.argv[1:])
