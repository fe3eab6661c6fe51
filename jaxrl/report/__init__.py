"""One HTML page of a run, or of several."""
