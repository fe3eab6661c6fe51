"""What a run writes and shows while it works."""
