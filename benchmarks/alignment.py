"""How much of a text a teacher with another tokenizer is aligned with (`teacher.tokenizer=own`).

    python benchmarks/alignment.py STUDENT TEACHER FILE...

A tokenizer is a model's folder, a `.gguf` file, `package:NAME` or a `.tiktoken` file with Qwen's
way of cutting text into words, as in the package dashscope (resources/qwen.tiktoken). Prints, for
each kind of file, the share of its bytes in tokens that both have alike, and in any span.
"""

from __future__ import annotations

import argparse
import base64
import sys
import time
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.data.token_alignment import Aligner, ModelTokenizer
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.types import Aligned

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
PART = 4000
"""Characters of a text that count as one completion."""


def tiktoken(path: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE from a file with a token and its rank in each line."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line.strip())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    alphabet = bytes_to_unicode()

    def shown(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        pairs = ((token[:k], token[k:]) for k in range(1, len(token)))
        known = [(a, b) for a, b in pairs if a in ranks and b in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(rank, shown(a), shown(b)) for a, b in known]
    merges.sort(key=lambda merge: merge[0])
    vocabulary = {shown(token): rank for token, rank in ranks.items()}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[(a, b) for _, a, b in merges]))
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


def model_tokenizer(name: str) -> ModelTokenizer:
    """The tokenizer of this name."""
    if name.endswith(".tiktoken"):
        tokenizer: Any = tiktoken(Path(name))
    else:
        tokenizer = load_tokenizer(resolve_model(name).tokenizer_path or name)
    return ModelTokenizer(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))


def shares(aligner: Aligner, text: str) -> tuple[int, int, int, float]:
    """(bytes, those in exact tokens, those in any span, seconds for each of the student's
    tokens)."""
    parts = [text[k : k + PART] for k in range(0, len(text), PART)]
    tokens = [aligner.student_tokens(part) for part in parts]
    start = time.perf_counter()
    rows = aligner.align(tokens, max_tokens=10 * PART)
    took = time.perf_counter() - start
    sums = [
        (
            row.sizes.sum(),
            row.sizes[row.kinds == Aligned.EXACT].sum(),
            row.sizes[row.kinds != 0].sum(),
        )
        for row in rows
    ]
    total, exact, aligned = (int(sum(column)) for column in zip(*sums, strict=True))
    return total, exact, aligned, took / sum(map(len, tokens))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("student")
    parser.add_argument("teacher")
    parser.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args(argv)
    aligner = Aligner(model_tokenizer(given.student), model_tokenizer(given.teacher))
    common = int((aligner.to_teacher >= 0).sum())
    vocab_size = aligner.student.vocab_size
    print(f"{common:,} of the student's {vocab_size:,} tokens are the teacher's too")
    kinds: dict[str, list[Path]] = {}
    for path in given.files:
        kinds.setdefault(path.suffix or path.name, []).append(path)
    print("| files | bytes | exact | aligned | time for a token |\n|---|---|---|---|---|")
    for kind, paths in kinds.items():
        text = "".join(path.read_text(errors="replace") for path in paths)
        total, exact, aligned, each = shares(aligner, text)
        found = f"{exact / total:.1%} | {aligned / total:.1%} | {1e6 * each:.1f} us"
        print(f"| {kind} | {total:,} | {found} |")


if __name__ == "__main__":
    main(sys.argv[1:])
