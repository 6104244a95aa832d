"""The dtypes of rollouts, drafts and training, where a method prescribes them. Knows dtype names; no engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """Names as in ``--dtype`` and ``--rollout-dtype``; empty: as the settings say. ``rollouts`` defaults to the learner's dtype;
    ``drafts`` are sampled by a separate engine."""

    learner: str = ""
    rollouts: str = ""
    drafts: str = ""
