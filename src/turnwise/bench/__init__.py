"""Measuring: generation, learning, whole steps and memory, beside the alternatives and beside what the machine could do.

Knows nothing of methods or results; whatever is compared is measured in the same run, taking turns.
"""
