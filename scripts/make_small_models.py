"""Trains the small models that two of the configs learn from or train; minutes on two cores.

    python -m jaxrl.scripts.make_small_models runs/two_teachers two_teachers
    python -m jaxrl.train --config builtin:two_teachers

`two_teachers`: one teacher for each operator, and the data for both. Both start from the
quickstart's student and learn worked sums (`algorithm: sft`) of one operator only: `plus` solves
37+48+9=, and guesses at 97-48-9=; `minus` the other way round.

    python -m jaxrl.scripts.make_small_models runs/byte_students byte_students
    python -m jaxrl.train --config builtin:other_tokenizer

`byte_students`: students whose tokens are not the built-in teacher's characters. `bytes` has a
token for each of the 256 bytes, `pairs` another for each number of two digits. Both learn the form
of a worked sum as the quickstart's student did (`make_quickstart.py`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl import Config, train
from jaxrl.config import cli
from jaxrl.data.example import Split
from jaxrl.data.tasks import Arithmetic
from jaxrl.errors import user_path
from jaxrl.scripts.make_quickstart import RECIPE, STAGES, small_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

OPERATORS = {"plus": "+", "minus": "-"}
ROWS: dict[Split, int] = {"train": 20_000, "eval": 256}
"""Of each operator."""
TEACHERS = """
algorithm=sft student.model=builtin:student teacher.model=null mesh=actor+rollout=1 group_size=1
steps=500 optimizer.learning_rate=2e-3 eval.every=500 logging.samples=1 logging.every=50
"""
SPECIAL = ("<pad>", "<s>", "</s>")
MERGES: dict[str, list[tuple[str, str]]] = {
    "bytes": [],
    "pairs": list(itertools.product("0123456789", "0123456789")),
}


def two_teachers(folder: Path) -> None:
    """Trains the teachers into the run directories `plus` and `minus`, and writes the rows of each
    operator, with its name as `domain`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, operator in OPERATORS.items():
        sums = Arithmetic(operators=operator)
        for split, count in ROWS.items():
            rows = (sums.example(index, split) for index in range(count))
            each = ({"prompt": r.prompt, "answer": r.answer, "domain": name} for r in rows)
            lines = "".join(json.dumps(row) + "\n" for row in each)
            (folder / f"{split}_{name}.jsonl").write_text(lines)
        task = f"arithmetic:operators={operator}"
        data = [f"data.train={task},size=1000000", f"data.eval={task}", f"run_dir={folder / name}"]
        result = train(Config.load("builtin:quickstart", [*TEACHERS.split(), *data]))
        print(f"{folder / name}: accuracy {result.final_eval:.1%} of its own operator")


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


def byte_students(folder: Path) -> None:
    """Trains the students into the run directories `bytes` and `pairs`."""
    import jax

    from jaxrl.formats.hf import save_hf
    from jaxrl.models.parameters import init_params

    for name, merges in MERGES.items():
        tokenizer, start = byte_tokenizer(merges), folder / f"{name}_start"
        config = small_model(tokenizer, n_layers=2)
        save_hf(start, config, init_params(config, jax.random.key(0)), dtype="float32")
        tokenizer.save_pretrained(start)
        paths = [f"student.model={start}", f"run_dir={folder / name}"]
        recipe = [*RECIPE.split(), *STAGES["student"].split(), "eval.every=240"]
        result = train(Config.load("builtin:quickstart", [*recipe, *paths]))
        print(f"{folder / name}: accuracy {result.final_eval:.1%}")


KINDS = {"two_teachers": two_teachers, "byte_students": byte_students}


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.make_small_models", __doc__ or "")
    parser.add_argument("folder", metavar="FOLDER", help="written, as in runs/two_teachers")
    parser.add_argument("kind", choices=KINDS, help="which models")
    arguments = parser.parse(argv)
    KINDS[arguments.kind](user_path(arguments.folder))


if __name__ == "__main__":
    cli.exit_process(cli.run(main))
