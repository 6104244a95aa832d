"""Precision: in which numbers rollouts, drafts and learning are computed, where a method has a say in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """Names as in ``--dtype`` and ``--rollout-dtype``; empty: what the settings say. Rollouts are as the learner unless they are
    told; ``drafts`` are sampled by an engine of their own."""

    learner: str = ""
    rollouts: str = ""
    drafts: str = ""
