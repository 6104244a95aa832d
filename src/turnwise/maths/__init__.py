"""Pure functions on tensors and arrays. Knows nothing of language models or reinforcement learning."""
