"""The learner: packed forward and backward passes, optimizer steps, value heads, LoRA. Knows objectives only as callables."""
