"""A run's programs, compiled for a machine that is not present."""
