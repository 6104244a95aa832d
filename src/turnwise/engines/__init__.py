"""Engines: the only room that runs a model. Knows ids, batches and signals; no reward, no formula, no recipe."""
