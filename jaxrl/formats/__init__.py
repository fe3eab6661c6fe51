"""Reads and writes files of weights and tokenizers."""

import os

# transformers, wherever it is imported later, advises to install PyTorch, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
