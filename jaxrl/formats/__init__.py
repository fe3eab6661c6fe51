"""Reads and writes files of weights and tokenizers."""
