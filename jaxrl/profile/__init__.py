"""Measured times: stages, waits, and which split of the devices would be faster."""
