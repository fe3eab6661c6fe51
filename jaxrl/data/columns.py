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


COLUMNS = (
    Column(("prompt",), "TRL, verl, OpenRLHF", "the prompt, text or messages", "prompt_key"),
    Column(
        ("messages", "conversations", "conversation"),
        "TRL, axolotl, LLaMA-Factory, ms-swift, Unsloth",
        "a chat",
        "messages_key",
    ),
    Column(("text",), "TRL, axolotl, Unsloth", "a text that is learned as a whole", "text_key"),
    Column(("completion", "response"), "TRL, verl", "what is learned", "completion_key"),
    Column(
        ("answer", "solution", "ground_truth"),
        "TRL, NeMo-RL, ms-swift",
        "the reference answer",
        "answer_key",
    ),
    Column(
        ("reward_model",),
        "verl",
        "has the reference answer: `data.answer_key=reward_model.ground_truth`",
        None,
    ),
    Column(
        ("tools",),
        "TRL, axolotl, LLaMA-Factory, ms-swift",
        "JSON schemas of tools",
        "tools_key",
    ),
    Column(
        ("system", "system_prompt"),
        "axolotl, LLaMA-Factory, ms-swift, NeMo",
        "the text of a system message",
        "system_key",
    ),
    Column(
        ("chat_template_kwargs",),
        "TRL",
        "arguments for the chat template",
        "chat_template_arguments_key",
    ),
    Column(
        ("instruction", "input", "output", "history"),
        "axolotl, LLaMA-Factory, Unsloth (Alpaca)",
        "parts of a prompt, and its completion: make `prompt` and `completion` of them",
        None,
    ),
    Column(
        ("chosen", "rejected", "rejected_messages", "rejected_response"),
        "TRL, axolotl, LLaMA-Factory, ms-swift",
        "two completions of which one is preferred: no algorithm here learns from pairs",
        None,
    ),
    Column(("label", "kto_tag"), "TRL, LLaMA-Factory", "whether a completion is good (KTO)", None),
    Column(
        ("image", "images", "video", "videos", "audio", "audios", "multi_modal_data"),
        "TRL, LLaMA-Factory, ms-swift, verl",
        "what is no text: models here read text",
        None,
    ),
    Column(
        (
            *("input_ids", "labels", "attention_mask"),
            *("completion_mask", "assistant_masks", "loss_mask", "loss_scale"),
        ),
        "TRL, axolotl, ms-swift",
        "tokens, or marks on tokens: rows are texts here",
        None,
    ),
    Column(
        ("agent_name", "tools_kwargs", "interaction_kwargs"),
        "verl",
        "who runs an episode: `environment.name` does",
        None,
    ),
    Column(
        ("weight", "train", "training", "trainable", "loss"),
        "OpenAI, axolotl, verl, ms-swift",
        "whether a message is learned: read in each message, not in the row",
        None,
    ),
)
_LISTED = 8
"""Columns that the note on the others names."""
WORDS = {name: column for column in COLUMNS for name in column.names}


def unread_notes(
    label: str, columns: Iterable[str], read: Collection[str], passed_to: str
) -> list[str]:
    """Returns a note for each column that nothing reads and that has, or nearly has, the name of
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
        notes.append(f"{label}: {count} {who}: {listed(others[:_LISTED])}{_more(others)}")
    return notes


def _more(names: list[str]) -> str:
    return f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""


def table() -> str:
    """Returns COLUMNS as the table of docs/data.md."""
    lines = ["| column | in | means | key |", "|---|---|---|---|"]
    for column in COLUMNS:
        names = ", ".join(f"`{name}`" for name in column.names)
        key = "none" if column.key is None else f"`data.{column.key}`"
        lines.append(f"| {names} | {column.libraries} | {column.meaning} | {key} |")
    return "\n".join(lines)
