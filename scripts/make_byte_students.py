"""Makes two small students whose tokens are not the built-in teacher's characters.

`bytes` has a token for each of the 256 bytes, `pairs` another for each number of two digits. Both
learn the form of a worked sum as the quickstart's student did (`make_quickstart.py`).

    python -m jaxrl.scripts.make_byte_students     # into runs/byte_students; minutes on two cores
    python -m jaxrl.train --config builtin:other_tokenizer
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl import Config, train
from jaxrl.config import cli
from jaxrl.errors import user_path
from jaxrl.scripts.make_quickstart import RECIPE, STAGES, small_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>")
MERGES: dict[str, list[tuple[str, str]]] = {
    "bytes": [],
    "pairs": list(itertools.product("0123456789", "0123456789")),
}


def byte_tokenizer(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE with these merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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
    """Trains one of them into the run directory `folder/name`."""
    import jax

    from jaxrl.formats.hf import save_hf
    from jaxrl.models.parameters import init_params

    tokenizer, start = byte_tokenizer(MERGES[name]), folder / f"{name}_start"
    config = small_model(tokenizer, n_layers=2)
    save_hf(start, config, init_params(config, jax.random.key(0)), dtype="float32")
    tokenizer.save_pretrained(start)
    paths = [f"student.model={start}", f"run_dir={folder / name}"]
    recipe = [*RECIPE.split(), *STAGES["student"].split(), "eval.every=240"]
    result = train(Config.load("builtin:quickstart", [*recipe, *paths]))
    print(f"{folder / name}: accuracy {result.final_eval:.1%}")


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.make_byte_students", __doc__ or "")
    parser.add_argument(
        "folder",
        nargs="?",
        default="runs/byte_students",
        metavar="FOLDER",
        help="of the students (default runs/byte_students, where the config reads them)",
    )
    folder = user_path(parser.parse(argv).folder)
    for name in MERGES:
        make(name, folder)


if __name__ == "__main__":
    cli.leave(cli.run(main))
