"""A teacher's scores of data, written to disk for runs without it."""
