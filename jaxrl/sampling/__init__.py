"""Completions: the draw of a token, and continuous batching."""
