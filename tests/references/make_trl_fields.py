"""Makes `trl_fields.json`, the fields of TRL's configs, and the list of docs/coming-from-trl.md of
those that it does not compare. Tests read both without TRL.

    pip install --no-deps trl transformers
    python tests/references/make_trl_fields.py

The classes are read from the source of the installed packages; nothing of theirs is imported.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from jaxrl.config.keys import other_libraries

FIELDS = Path(__file__).with_name("trl_fields.json")
PAGE = Path(__file__).parents[2] / "docs" / "coming-from-trl.md"
HEADING = "## Every other field\n"
CLASSES = {
    "GRPOConfig": "trl/trainer/grpo_config.py",
    "RLOOConfig": "trl/trainer/rloo_config.py",
    "SFTConfig": "trl/trainer/sft_config.py",
    "DistillationConfig": "trl/trainer/distillation_config.py",
    "GKDConfig": "trl/experimental/gkd/gkd_config.py",
    "GOLDConfig": "trl/experimental/gold/gold_config.py",
    "SDFTConfig": "trl/experimental/sdft/sdft_config.py",
    "SDPOConfig": "trl/experimental/sdpo/sdpo_config.py",
    "_BaseConfig": "trl/trainer/base_config.py",
    "ModelConfig": "trl/trainer/model_config.py",
    "ScriptArguments": "trl/scripts/utils.py",
    "TrainingArguments": "transformers/training_args.py",
}
"""Class -> its file. Those of trainers inherit from `_BaseConfig`, which does from
`TrainingArguments`."""


def fields(source: str, name: str) -> list[str]:
    """Returns the fields that a dataclass itself declares, in order."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    (body,) = (node.body for node in found if node.name == name)
    declared = [node for node in body if isinstance(node, ast.AnnAssign)]
    names = [(node.target, ast.unparse(node.annotation)) for node in declared]
    return [
        target.id for target, kind in names if isinstance(target, ast.Name) and "Var" not in kind
    ]


def section(names: Iterable[str], above: str) -> str:
    """Returns the end of the page: the fields among ``names`` with a key that the text above has no
    row for, and each answer with the fields that get it."""
    asked, (here, absent, _) = dict.fromkeys(names), other_libraries()
    known = {name: here[name] for name in asked if name in here and f"\n| `{name}` |" not in above}
    rows = []
    for name, (first, *others) in known.items():
        also = f"or {', '.join(f'`{key}`' for key in others)}" if others else ""
        rows.append(f"| `{name}` | `{first}` | {also} |\n".replace("|  |", "| |"))
    answers: dict[str, list[str]] = {}
    for name in sorted(asked.keys() & absent.keys()):
        answers.setdefault(absent[name], []).append(f"`{name}`")
    listed = (f"| {answer} | {', '.join(found)} |\n" for answer, found in answers.items())
    return (
        f"{HEADING}\nOf all configs of TRL's trainers named here and of `TrainingArguments`.\n\n"
        "| TRL | here | |\n|---|---|---|\n" + "".join(rows) + "\nThese have no key:\n\n"
        "| here | TRL |\n|---|---|\n" + "".join(listed)
    )


def main() -> None:
    folder = Path(find_spec("trl").origin).parents[1]  # type: ignore[union-attr,arg-type]
    found = {name: fields((folder / file).read_text(), name) for name, file in CLASSES.items()}
    versions = {package: version(package) for package in ("trl", "transformers")}
    FIELDS.write_text(json.dumps({"versions": versions, "fields": found}, indent=1) + "\n")
    names = [name for each in found.values() for name in each]
    text = PAGE.read_text(encoding="utf-8").partition(HEADING)[0]
    PAGE.write_text(text + section(names, text), encoding="utf-8")


if __name__ == "__main__":
    main()
