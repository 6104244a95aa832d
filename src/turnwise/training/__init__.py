"""A training run: validate, build, collect, step, checkpoint, summarise. Knows neither a formula nor a method's name."""
