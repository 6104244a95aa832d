"""A learner over several ranks: processes that share the weights, the optimizer state and the work (FSDP2)."""
