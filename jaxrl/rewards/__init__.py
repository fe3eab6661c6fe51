"""Verifiers, reward functions in separate processes, and their sum."""
