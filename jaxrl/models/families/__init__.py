"""The families of decoders."""

from __future__ import annotations

from pathlib import Path

from jaxrl.errors import UserError
from jaxrl.models.families.gemma import GEMMA3, GEMMA4, GEMMA4_UNIFIED
from jaxrl.models.families.gpt_oss import GPT_OSS
from jaxrl.models.families.llama import LLAMA, MISTRAL
from jaxrl.models.families.olmo import OLMO2, OLMO3
from jaxrl.models.families.phi import PHI3
from jaxrl.models.families.qwen import QWEN2, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE
from jaxrl.models.families.smollm import SMOLLM3
from jaxrl.models.family import Family
from jaxrl.process.plugin import code_files, load_object

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "mistral": MISTRAL,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "phi3": PHI3,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
}
"""`model_type` of a `config.json` -> its family."""

_SOURCES: dict[str, str] = {}
"""`model_type` -> `path/to/file.py:NAME`, of families of the user's own."""
FOLDER = "family"
"""Of a run: the file of its family."""
NAMED = "family.txt"
"""In it: `file.py:NAME`."""


def use_family(text: str, unless_there: bool = False) -> str:
    """Adds the family `path/to/file.py:NAME` to those that are read in this process; returns its
    `model_type`.

    Args:
        unless_there: leave a family of the user's own that has this `model_type`.

    Raises:
        UserError: it is no `Family`, or another one has its `model_type`.
    """
    found = load_object(text, "family ")
    if not isinstance(found, Family):
        raise UserError(
            f"{text} is of type {type(found).__name__}; it must be a jaxrl.models.family.Family"
        )
    name = found.model_type
    if name is None:
        raise UserError(
            f"{text}: say which model_type of config.json is of this family:"
            ' Family(..., model_type="NAME")'
        )
    source = _SOURCES.get(name) if name in FAMILIES else None
    if name in FAMILIES and source is None:
        raise UserError(
            f"{text}: model_type={name} is a family of jaxrl: write another model_type there and in"
            " the config.json of the model"
        )
    if source is None or (source != text and not unless_there):
        if source is not None and _contents(source) != _contents(text):
            raise UserError(f"{text} and {source} are two families of model_type={name}")
        FAMILIES[name], _SOURCES[name] = found, text
    return name


def source_of(model_type: str) -> str | None:
    """Returns `path/to/file.py:NAME` of a family of the user's own; None for ours."""
    return _SOURCES.get(model_type)


def forget_families() -> None:
    """Removes the families of the user's own from those that are read in this process."""
    for model_type in _SOURCES:
        FAMILIES.pop(model_type, None)
    _SOURCES.clear()


def kept_files(model_type: str) -> dict[str, str]:
    """Maps the name in the folder of a run to the text of each file of a family of the user's own:
    its file, those that this imports from its folder, and `NAMED`; none for ours."""
    source = _SOURCES.get(model_type)
    if source is None:
        return {}
    place, _, name = source.rpartition(":")
    first, *others = (Path(path) for path, _ in code_files(place))
    files = [first, *(path for path in others if path.is_relative_to(first.parent))]
    kept = {str(path.relative_to(first.parent)): path.read_text("utf-8") for path in files}
    kept[NAMED] = f"{first.name}:{name}\n"
    return {f"{FOLDER}/{name}": text for name, text in kept.items()}


def use_family_of(run: Path) -> None:
    """Has the family read that the folder of a run keeps, if there is one, unless another one of
    its `model_type` is used already."""
    named = run / FOLDER / NAMED
    if named.is_file():
        use_family(f"{run / FOLDER}/{named.read_text('utf-8').strip()}", unless_there=True)


def _contents(text: str) -> list[str]:
    return [digest for _, digest in code_files(text.rpartition(":")[0])]
