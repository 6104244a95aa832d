"""Replay: take a step of a run again from the nearest checkpoint, and find where two runs part."""
