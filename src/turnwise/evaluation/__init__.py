"""Evaluation: play held-out tasks, summarise with intervals, rank held-out pairs. Does not know how a policy was trained."""
