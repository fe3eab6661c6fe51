"""The programs of a run compiled for a machine that is not here."""
