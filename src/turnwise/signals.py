"""The signals a learner can measure. Pieces declare which they need; the learner computes exactly those, once.

A signal is a name with a level; how it is computed is the learner's business.
"""

from __future__ import annotations

from enum import StrEnum


class Signal(StrEnum):
    """What can be known of the sampled tokens besides what was recorded when they were sampled. At TOKEN unless said."""

    # live: they come with every forward pass of an update and carry the gradient
    LOGP = "logp"  # log-probability under the weights being trained
    ENTROPY = "entropy"  # of the whole next-token distribution
    VALUE = "value"  # the critic's estimate before this token
    TWIN = "twin"  # the estimate of a second value head
    # frozen: measured once per batch, before the first update on it
    PROXIMAL = "proximal"  # LOGP
    OLD_VALUE = "old_value"  # VALUE
    OLD_TWIN = "old_twin"  # TWIN
    OLD_ENTROPY = "old_entropy"  # ENTROPY
    REFERENCE = "reference"  # log-probability under the frozen initial policy
    PREVIOUS = "previous"  # log-probability under the weights before the last training step
    GRADIENT_NORM = "gradient_norm"  # TRAJECTORY: ‖∇ Σₜ log π(yₜ)‖ over all weights; one backward pass each
    ANSWER = "answer"  # TURN: mean log-probability of the gold answer, were it said at this turn
    # foreseen: measured before each optimiser step, of the present weights
    HELLINGER = "hellinger"  # 1 − Σₐ √(π(a) π_ref(a)) over the whole vocabulary
    PUSH = "push"  # Σ v²q, with v = onehot − π, q = lr · P h² and P the optimiser's preconditioner of the head
    PUSH_SQUARE = "push_square"  # Σ π v² q²
    PUSH_MEAN = "push_mean"  # Σ π v q


LIVE = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.VALUE, Signal.TWIN})
FORESEEN = frozenset({Signal.HELLINGER, Signal.PUSH, Signal.PUSH_SQUARE, Signal.PUSH_MEAN})
FROZEN = frozenset(Signal) - LIVE - FORESEEN
CRITIC = frozenset({Signal.VALUE, Signal.OLD_VALUE, Signal.TWIN, Signal.OLD_TWIN})
