"""The signals a learner can measure. Pieces declare which they need; the learner computes exactly those, once.

A signal is a name with a level; how it is computed is the learner's business.
"""

from __future__ import annotations

from enum import StrEnum


class Signal(StrEnum):
    """What can be known of each sampled token besides what was recorded when it was sampled."""

    LOGP = "logp"  # log-probability under the weights being trained; carries the gradient
    ENTROPY = (
        "entropy"  # entropy of the whole next-token distribution; carries the gradient when asked for in an objective
    )
    VALUE = "value"  # the critic's estimate before this token; carries the gradient when asked for in an objective
    PROXIMAL = "proximal"  # LOGP before the first update on this batch, frozen
    OLD_VALUE = "old_value"  # VALUE before the first update on this batch, frozen
    OLD_ENTROPY = "old_entropy"  # ENTROPY before the first update on this batch, frozen
    REFERENCE = "reference"  # log-probability under the frozen initial policy


FROZEN = frozenset({Signal.PROXIMAL, Signal.OLD_VALUE, Signal.OLD_ENTROPY, Signal.REFERENCE})
"""Measured once per batch, without gradient. The others come with every forward pass of an update."""
