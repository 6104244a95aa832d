"""Reads runs and explains them: the page of ``turnwise view``, and the commands that judge, compare and replay runs.

Reads only: nothing here writes into a run directory. ``queries`` is the one way to the data of a run.
"""
