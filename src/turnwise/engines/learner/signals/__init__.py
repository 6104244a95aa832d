"""Signals a learner measures beyond the plain forward pass. Does not know which piece asks for them."""
