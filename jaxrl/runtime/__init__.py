"""Workers and their calls: threads of this process, or Ray processes."""
