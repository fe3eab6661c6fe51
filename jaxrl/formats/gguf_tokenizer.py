"""The tokenizer that a GGUF file's metadata describe, as a transformers tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from jaxrl.errors import UserError
from jaxrl.formats.gguf import GgufFile, open_gguf

KINDS = ("gpt2", "llama", "gemma4")
"""`tokenizer.ggml.model`: a BPE over bytes, one of SentencePiece (Llama 2), one over characters."""
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
"""Token types of GGUF: special, always one token, and one raw byte (SentencePiece)."""
SPACE = "\u2581"
"""SentencePiece's stand-in for a space."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKED_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Marks, of which Unicode has no composed form with their letter, stay in its word."""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""A capital letter after a small one begins a word; an ending such as 's belongs to its word."""


@dataclass(frozen=True)
class Pre:
    """How a byte-level BPE splits a text into words, by `tokenizer.ggml.pre`."""

    split: pre_tokenizers.PreTokenizer
    use_regex: bool = False
    """Whether GPT-2's own regular expression splits further."""
    nfc: bool = False
    """Unicode normal form C first."""
    whole_words: bool = False
    """A word that is in the vocabulary is that token, whatever the merges say."""
    add_bos: bool = False
    """Whether a text starts with BOS where the file does not say."""


def _split(words: str, digits: str = "") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(words.replace("DIGITS", digits)), "isolated")


PRE: dict[str, Pre] = {
    "smollm": Pre(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "gpt-2": Pre(pre_tokenizers.Sequence([]), use_regex=True),
    "qwen2": Pre(_split(_WORDS), nfc=True),
    "qwen35": Pre(_split(_MARKED_WORDS), nfc=True),
    "dbrx": Pre(_split(_WORDS, "{1,3}")),
    "smaug-bpe": Pre(_split(_WORDS, "{1,3}")),
    "gpt-4o": Pre(_split(_CASED_WORDS)),
    "llama-bpe": Pre(_split(_WORDS, "{1,3}"), whole_words=True, add_bos=True),
}


def load(path: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a GGUF file, with its chat template."""
    return build(open_gguf(path))


def save(path: str | os.PathLike[str], folder: Path) -> None:
    """Writes it into a Hugging Face folder; transformers 4 and 5 read it."""
    load(path).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    for key in ("backend", "is_local", "local_files_only"):
        raw.pop(key, None)
    raw["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def build(file: GgufFile) -> PreTrainedTokenizerFast:
    """Does what `load` does, for a file that is open.

    Raises:
        UserError: a tokenizer model or a pre-tokenizer that is not supported.
    """
    kind = _supported(file, "model", KINDS)
    tokens: list[str] = file.meta("tokenizer.ggml.tokens")
    types: list[int] = file.meta("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab, add_bos = {token: i for i, token in enumerate(tokens)}, True
    if kind == "llama":  # the merges follow from the scores of the pieces
        scores: list[float] = file.meta("tokenizer.ggml.scores")
        ranked = sorted(
            (i for i, of in enumerate(types) if of not in (CONTROL, BYTE)),
            key=lambda i: (-scores[i], i),
        )
        merges = [
            (tokens[i][:cut], tokens[i][cut:])
            for i in ranked
            for cut in range(1, len(tokens[i]))
            if tokens[i][:cut] in vocab and tokens[i][cut:] in vocab
        ]
    else:
        pairs = (merge.partition(" ") for merge in file.meta("tokenizer.ggml.merges"))
        merges = [(first, second) for first, _, second in pairs]
    if kind == "gpt2":  # over bytes
        pre = PRE[_supported(file, "pre", PRE)]
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.whole_words))
        if pre.nfc:
            tokenizer.normalizer = normalizers.NFC()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.use_regex)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre.split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        add_bos = pre.add_bos
    else:  # over characters, with bytes for the rest
        unknown = tokens[file.meta("tokenizer.ggml.unknown_token_id") or 0]
        bpe = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(bpe)
        prefix = kind == "llama" and file.meta("tokenizer.ggml.add_space_prefix") is not False
        replace = normalizers.Replace(" ", SPACE)
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
        )
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t, k in zip(tokens, types, strict=True) if k == CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == USER_DEFINED
        ]
    )
    special = {
        key: tokens[i]
        for key, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (i := file.meta(f"tokenizer.ggml.{field}_token_id")) is not None
    }
    stated = file.meta("tokenizer.ggml.add_bos_token")
    if (add_bos if stated is None else stated) and "bos" in special:
        bos = special["bos"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokens.index(bos))],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_templates(file),
        model_max_length=file.meta(f"{file.meta('general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
        **{f"{key}_token": token for key, token in special.items()},
    )


def _templates(file: GgufFile) -> str | dict[str, str] | None:
    """Returns the chat template or, where there are others than the default one, all by name."""
    start = "tokenizer.chat_template"
    named = {key.removeprefix(f"{start}."): file.meta(key) for key in file.keys_of(f"{start}.")}
    default = file.meta(start)
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _supported(file: GgufFile, key: str, supported: Iterable[str]) -> str:
    """Returns the name that the metadata have for a key. Raises UserError for any other."""
    name = file.meta(f"tokenizer.ggml.{key}")
    if name not in supported:
        raise UserError(
            f"{file.path}: tokenizer.ggml.{key}={name!r} is not supported;"
            f" supported: {', '.join(supported)}"
        )
    return str(name)
