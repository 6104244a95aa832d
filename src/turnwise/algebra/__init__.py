"""The algebra: the slots of a method and the pieces that fill them. Knows no task, rollout, engine or method name."""
