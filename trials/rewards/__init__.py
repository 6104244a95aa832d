"""Environments whose rewards have a planted loophole, and sound ones, to measure ``turnwise probe-reward``."""
