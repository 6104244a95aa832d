"""Adversarial trials: runs killed at random moments, attacks on the sandbox, bad inputs, fuzzed episodes.

``python -m trials`` (``make trial``) runs them all and writes a table of what was tried and what came out; ``--short`` runs a
selection in a few minutes, which CI does. Knows the command line and the public Python API; no internals of the loop.
"""
