"""A tokenizer of words."""

from __future__ import annotations

from jaxrl.data.example import Example


class Words:
    """A procedural part of given prompts."""

    name, procedural, columns = "words", True, ()

    def __init__(self, *prompts: str):
        self._prompts = prompts

    def digest(self) -> str:
        return " ".join(self._prompts)

    def where(self, index: int) -> str:
        return f"words, row {index}"

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int):
        return Example(self._prompts[index])
