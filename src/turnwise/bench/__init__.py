"""Benchmarks of generation, learning, whole training steps and memory, compared with alternatives and with hardware limits.

Knows no methods and no results of training; everything compared is measured in the same run, alternating.
"""
