"""The factors of a token's gradient: recomputed from a stored step by the pieces of any method."""
