"""Trains two small teachers, one for each operator, and the data for both.

Both start from the quickstart's student and learn worked sums (`algorithm: sft`) of one operator
only: `plus` solves 37+48+9=, and guesses at 97-48-9=; `minus` the other way round.

    python -m jaxrl.scripts.make_two_teachers      # into runs/two_teachers; minutes on two cores
    python -m jaxrl.train --config builtin:two_teachers
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxrl import Config, train
from jaxrl.config import cli
from jaxrl.data.example import Split
from jaxrl.data.tasks import Arithmetic
from jaxrl.errors import user_path

OPERATORS = {"plus": "+", "minus": "-"}
ROWS: dict[Split, int] = {"train": 20_000, "eval": 256}
"""Of each operator."""
RECIPE = """
algorithm=sft student.model=builtin:student teacher.model=null mesh=actor+rollout=1 group_size=1
steps=500 optimizer.learning_rate=2e-3 eval.every=500 logging.samples=1 logging.every=50
"""


def make(folder: Path) -> None:
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
        result = train(Config.load("builtin:quickstart", [*RECIPE.split(), *data]))
        print(f"{folder / name}: accuracy {result.final_eval:.1%} of its own operator")


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.make_two_teachers", __doc__ or "")
    parser.add_argument(
        "folder",
        nargs="?",
        default="runs/two_teachers",
        metavar="FOLDER",
        help="of teachers and data (default runs/two_teachers, where the config reads them)",
    )
    make(user_path(parser.parse(argv).folder))


if __name__ == "__main__":
    cli.leave(cli.run(main))
