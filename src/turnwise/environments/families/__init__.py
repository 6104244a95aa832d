"""Adapters to environments of other packages, one module per package, each an optional extra."""
