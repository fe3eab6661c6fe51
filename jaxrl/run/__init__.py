"""One run from start to end: launch, loop, records, resume."""
