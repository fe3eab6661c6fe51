"""Small tokenizers that spell the same text in different tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "</s>"


def byte_level(*merges, special=(), added=()):
    """Byte-level BPE, whose merges are pairs of strings such as ("Ġ", "t")."""
    tokens = [END, *special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [a + b for a, b in merges]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges))
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return made(inner, special, added)


def sentencepiece(*words, special=(), added=()):
    """A tokenizer as Llama 2 has it: a space before the text, and bytes for what is unknown."""
    pieces = [END, "<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *sorted(set("".join(words)) - set("▁")), *words]
    pieces = list(dict.fromkeys(pieces))
    merges = [
        (word[:k], word[k:])
        for word in words
        for k in range(1, len(word))
        if word[:k] in pieces and word[k:] in pieces
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True)
    inner = Tokenizer(model)
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return made(inner, special, added)


def made(inner, special=(), added=()):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens([AddedToken(token, special=False) for token in added])
    return tokenizer


BYTES = byte_level()
WORDS = byte_level(
    ("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "9"), ("Ġ", "Ġ"), ("Ċ", "Ċ"), ("Ã", "¯")
)
OTHER = byte_level(("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("9", "8"), ("Ġ", "Ċ"), added=("<think>",))
LLAMA = sentencepiece("th", "the", "▁the", "▁t", "he", "19")
