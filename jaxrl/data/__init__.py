"""Prompts: files, tasks, tokenizers, their order, and batches of arrays."""
