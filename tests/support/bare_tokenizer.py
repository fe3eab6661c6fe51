"""What a tokenizer has beside its words, for those of tests that only decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class BareTokenizer:
    """It has no added tokens and no template."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    bos_token = eos_token = pad_token = chat_template = None

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [self.added_tokens_decoder[i].content for i in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        return [i for i, one in self.added_tokens_decoder.items() if one.content in tokens]
