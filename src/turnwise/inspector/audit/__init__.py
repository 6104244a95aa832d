"""Audit: losses of other trainers, or a batch they dumped, against the recipe in float64."""
