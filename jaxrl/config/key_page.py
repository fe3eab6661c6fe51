"""The page of all config keys.

python -m jaxrl.config.key_page > docs/config.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxrl.config import cli
from jaxrl.config import keys as config_keys
from jaxrl.config.schema import Config

HEAD = """# Config keys

Every key of a run, with its type, its default and what it means. Made from
the classes of [jaxrl/config](../jaxrl/config/schema.py) by
`python -m jaxrl.config.key_page > docs/config.md`; `python -m jaxrl.train --help all`
lists the same keys, and `--help SECTION` or `--help KEY` some of them.

A key is set in the file, nested by its dots, or on the command line, which wins:

```yaml
# run.yaml
steps: 500
optimizer: {learning_rate: 1e-5}
```

    python -m jaxrl.train --config run.yaml steps=200 optimizer.learning_rate=2e-5

The defaults are for models of one to several billion parameters on accelerators. Without
`--config`, the built-in quickstart runs, and its file sets many keys otherwise
([configs/quickstart.yaml](../configs/quickstart.yaml)). A command line without
`--config` that sets `student.model` or `data.train` starts from the defaults instead; to start
such a run from the quickstart, add `--config builtin:quickstart`.

Every file of [configs](../configs) comes with the package, as `builtin:NAME` wherever a config file
is accepted (`--config builtin:` lists them). In such a file, `data/...` and `rewards/...` are in
the package and `runs/...` is in the working directory; the comment at its top has the commands that
write what it reads there. `config.yaml` in the run's folder is a copy of all
keys to start your own from.

Every run needs `student.model` and `data.train`. The algorithm `gkd` also needs a teacher: one of
`teacher.model`, `teacher.address`, `teacher.cache` and `teachers`. `null` is a value, and each key
says what it means there. "null: the algorithm's own" is the value in the table of
[reinforcement-learning.md](reinforcement-learning.md). A key for text (str) holds what is written,
also where that is a number (`name: 1.10`); `'true'`, `'false'` and `'null'` are texts in quotes.

Some keys name files or folders to read: `student.model`, `teacher.model`, each model of `teachers`,
`teacher.cache`, `teacher.ca_file`, `reward.model`, `grouper.model`, `data.train`, `data.eval`,
`data.few_shot`, `reward.functions` and the file of an `algorithm`. Their relative paths are looked
for in the working directory; in a config file, first in the folder of that file, so that a folder
with a config and its files works from anywhere. A path is recognised by a slash or a suffix: write
`./folder` for a folder next to the config. Paths to write (`run_dir`, `compile_cache`) are relative
to the working directory. `~` at the beginning of any path is the home folder. The `config.yaml`
that a run writes contains absolute paths of the files that were found in the folder of the config,
and of every file of `reward.functions`.

Which keys may change when a run is resumed is in
[checkpoints.md](checkpoints.md)."""

TABLE = ["| key | type | default | meaning |", "|---|---|---|---|"]


def markdown() -> str:
    """Returns the page docs/config.md."""
    lines = [HEAD]
    for group in config_keys.groups(Config):
        title = [f"## {group.path}", "", group.doc] if group.path else ["## A run"]
        lines += ["", *title, "", *TABLE]
        allowed = config_keys.allowed(group)
        for key in group.keys:
            default = "required" if key.required else f"`{key.default_text}`"
            cells = (f"`{key.path}`", allowed[key.path], default, key.doc)
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    cli.Parser("jaxrl.config.key_page", "Prints the page docs/config.md.").parse(argv)
    print(markdown(), end="")


if __name__ == "__main__":
    sys.exit(cli.run(main))
