"""Ahead-of-time compilation of a run's programs for a machine that is not present."""
