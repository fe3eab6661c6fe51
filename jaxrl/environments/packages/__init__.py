"""Environments of other packages; each module needs the extra of its own name."""
