"""Writes the quickstart's character tokenizer into the teacher's and the student's folder.

python -m jaxrl.scripts.make_quickstart_tokenizer [FOLDER ...]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jaxrl
from jaxrl.config import cli
from jaxrl.errors import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ASSETS = Path(jaxrl.__file__).parent / "assets"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
CHARACTERS = "0123456789+-*/=() ?\n"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Returns one token per character, 24 in all; adds no BOS."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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


def write(folder: Path) -> None:
    """Writes the tokenizer into a folder."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    # transformers 5 writes a class name that transformers 4 does not know; both know this one.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{folder}: {len(tokenizer)} tokens")


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.make_quickstart_tokenizer", __doc__ or "")
    parser.add_argument(
        "folders", nargs="*", metavar="FOLDER", help="default: the package's teacher and student"
    )
    folders = parser.parse(argv).folders or [ASSETS / "teacher", ASSETS / "student"]
    for folder in map(user_path, folders):
        write(folder)


if __name__ == "__main__":
    cli.leave(cli.run(main))
