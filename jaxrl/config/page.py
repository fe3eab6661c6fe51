"""The page of all config keys.

python -m jaxrl.config.page > docs/config.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.config import cli, yaml_text
from jaxrl.config import keys as config_keys
from jaxrl.config.schema import LARGEST, Config

BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
"""What JSON schema calls a bound -> how the page says it."""

HEAD = """# Config keys

Every key of a run, with its type, its default and what it means. Made from
[jaxrl/config/schema.py](../jaxrl/config/schema.py) by
`python -m jaxrl.config.page > docs/config.md`; `python -m jaxrl.train --help` lists the same keys.

A key is set in the file, nested by its dots, or on the command line, which wins:

```yaml
# run.yaml
steps: 500
optimizer: {learning_rate: 1e-5}
```

    python -m jaxrl.train --config run.yaml steps=200 optimizer.learning_rate=2e-5

The defaults are for models of one to several billion parameters on accelerators. Without
`--config` the quickstart runs, which sets many keys otherwise
([jaxrl/assets/quickstart.yaml](../jaxrl/assets/quickstart.yaml)), unless `student.model` or
`data.train` is set on the command line: then all other keys have their defaults.
`--config builtin:quickstart` is the quickstart with a model or data of your own. `null` is a
value: nothing, or what the text says. Required are `student.model`, `data.train` and, for
algorithm `gkd`, `teacher.model`.

A relative path of something to read (`student.model`, `teacher.model`, `reward.model`,
`grouper.model`, `data.train`, `data.eval`, `data.few_shot`, `reward.functions`) in a config file is
looked for in that file's folder first, then in the working directory; on the command line, in the
working directory. So a config runs from any folder with the files beside it. Such a path has a
slash or a suffix: a folder beside the config is `./folder`. What a run writes
(`run_dir`, `compile_cache`) is relative to the working directory. The run's own `config.yaml` names
what was found beside a config file, and every file of `reward.functions`, by its absolute path.

Which keys may change when a run is resumed is in
[checkpoints.md](checkpoints.md)."""

TABLE = ["| key | type | default | meaning |", "|---|---|---|---|"]


def markdown() -> str:
    """The page docs/config.md."""
    lines = [HEAD]
    for group in config_keys.groups(Config):
        title = [f"## {group.path}", "", group.doc] if group.path else ["## A run"]
        lines += ["", *title, "", *TABLE]
        fields = group.model.model_json_schema()["properties"]
        for key in group.keys:
            default = "required" if key.required else f"`{yaml_text.shown(key.default)}`"
            allowed = ", ".join([key.type, *_bounds(fields[key.path.rpartition(".")[2]])])
            cells = (f"`{key.path}`", allowed, default, key.doc)
            lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    """`at least 1`, of a number that may be null; the largest that a device counts goes unsaid."""
    for one in (schema, *schema.get("anyOf", ())):
        for name, word in BOUNDS.items():
            if name in one and one[name] != LARGEST:
                yield f"{word} {one[name]:g}"


def main(argv: Sequence[str]) -> None:
    cli.Parser("jaxrl.config.page", "Prints the page docs/config.md.").parse(argv)
    print(markdown(), end="")


if __name__ == "__main__":
    sys.exit(cli.run(main))
