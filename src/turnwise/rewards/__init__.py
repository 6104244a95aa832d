"""Reward functions: which function a text names, how it is called, and the process it runs in, which can be killed."""
