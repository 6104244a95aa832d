"""Settings of a run and their conversion from text. Does not know what any setting does."""
