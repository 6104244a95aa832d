"""Slow, scalar, independent oracles of the policy-optimisation methods, written from the specification cards alone."""
