"""Signals a learner measures beyond a plain forward pass. Does not know which piece needs them."""
