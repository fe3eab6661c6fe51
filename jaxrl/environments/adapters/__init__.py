"""Environments of other packages, each by an adapter that needs the package's own extra."""
