"""Tokenizers of one token per byte, made in memory: what they give can be worked out by hand."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer(
    template: str | None = CHATML,
    merges: tuple[tuple[str, str], ...] = (),
    eos: str = "<|im_end|>",
    bos: bool = False,
    extra: tuple[str, ...] = (),
) -> Any:
    """Bytes are 0-255, then the merges, then SPECIAL, then `extra`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(a + b for a, b in merges)]
    bpe = models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges))
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *extra)])
    if bos:
        first = SPECIAL[0]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A {eos}",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {first, eos}],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, chat_template=template
    )
