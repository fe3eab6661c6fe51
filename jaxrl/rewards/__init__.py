"""Verifiers, reward functions in processes of their own, and their sum."""
