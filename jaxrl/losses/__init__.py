"""Divergences, policy losses and corrections; the table of algorithms."""
