"""What columns of data mean in the field's libraries, and which of a run's data nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jaxrl.data.rows import listed
from jaxrl.errors import closest


@dataclass(frozen=True)
class Column:
    """A column of the field, under each of its names."""

    names: tuple[str, ...]
    libraries: str
    meaning: str
    key: str | None
    """The key of `data` that reads such a column; None: there is none."""


_ROWS = """
prompt | TRL, verl, OpenRLHF | the prompt, text or messages | prompt_key
messages conversations conversation | TRL, axolotl, LLaMA-Factory, ms-swift, Unsloth | a chat \
| messages_key
text | TRL, axolotl, Unsloth | a text that is learned as a whole | text_key
completion response | TRL, verl | what is learned | completion_key
answer solution ground_truth | TRL, NeMo-RL, ms-swift | the reference answer | answer_key
reward_model | verl | has the reference answer: `data.answer_key=reward_model.ground_truth` |
tools | TRL, axolotl, LLaMA-Factory, ms-swift | JSON schemas of tools | tools_key
system system_prompt | axolotl, LLaMA-Factory, ms-swift, NeMo | the text of a system message \
| system_key
chat_template_kwargs | TRL | arguments for the chat template | chat_template_arguments_key
instruction input output history | axolotl, LLaMA-Factory, Unsloth (Alpaca) \
| parts of a prompt, and its completion: make `prompt` and `completion` of them |
chosen rejected rejected_messages rejected_response | TRL, axolotl, LLaMA-Factory, ms-swift \
| two completions of which one is preferred: no algorithm here learns from pairs |
label kto_tag | TRL, LLaMA-Factory | whether a completion is good (KTO) |
image images video videos audio audios multi_modal_data | TRL, LLaMA-Factory, ms-swift, verl \
| what is no text: models here read text |
input_ids labels attention_mask completion_mask assistant_masks loss_mask loss_scale \
| TRL, axolotl, ms-swift | tokens, or marks on tokens: rows are texts here |
agent_name tools_kwargs interaction_kwargs | verl \
| who runs an episode: `environment.name` does |
weight train training trainable loss | OpenAI, axolotl, verl, ms-swift \
| whether a message is learned: read in each message, not in the row |
"""
"""Names, libraries, meaning, key."""


def _column(row: str) -> Column:
    names, libraries, meaning, key = (cell.strip() for cell in row.split("|"))
    return Column(tuple(names.split()), libraries, meaning, key or None)


COLUMNS = tuple(map(_column, _ROWS.strip().splitlines()))
_LISTED = 8
"""Columns that the note on the others names."""
WORDS = {name: column for column in COLUMNS for name in column.names}


def unread_notes(
    label: str, columns: Iterable[str], read: Collection[str], passed_to: str
) -> list[str]:
    """Makes a note for each column that nothing reads and that has, or nearly has, the name of
    one of the field; and one that counts the others.

    Args:
        columns: of the data.
        read: those that a key reads, or that code or a template names.
        passed_to: who gets every column; "": nobody.
    """
    left = [name for name in columns if name not in read and "." not in name]
    notes, others = list[str](), list[str]()
    for name in left:
        column, hint = WORDS.get(name), closest(name, WORDS, cutoff=0.8)
        if column is not None:
            way = "nothing reads it" if column.key is None else f"set data.{column.key}={name}"
            notes.append(f"{label}: column `{name}`: {column.meaning} ({column.libraries}); {way}")
        elif hint:
            notes.append(f"{label}: column `{name}`: nothing reads it (did you mean {hint}?)")
        else:
            others.append(name)
    if others:
        who = f"passed to {passed_to} alone" if passed_to else "read by nothing"
        count = "1 other column is" if len(others) == 1 else f"{len(others)} other columns are"
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        notes.append(f"{label}: {count} {who}: {listed(others[:_LISTED])}{more}")
    return notes


def columns_table() -> str:
    """Returns COLUMNS as the table of docs/data.md."""
    lines = ["| column | in | means | key |", "|---|---|---|---|"]
    for column in COLUMNS:
        names = ", ".join(f"`{name}`" for name in column.names)
        key = "none" if column.key is None else f"`data.{column.key}`"
        lines.append(f"| {names} | {column.libraries} | {column.meaning} | {key} |")
    return "\n".join(lines)
