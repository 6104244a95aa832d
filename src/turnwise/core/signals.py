"""The signals a learner can measure. Pieces declare which they need; the learner computes exactly those, once.

A signal is a name with a level; how it is computed is the learner's business.
"""

from __future__ import annotations

from enum import StrEnum

from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Level


class Signal(StrEnum):
    """What can be known of the sampled tokens besides what was recorded when they were sampled. At TOKEN unless said."""

    # live: they come with every forward pass of an update and carry the gradient
    LOGP = "logp"  # log-probability under the weights being trained
    ENTROPY = "entropy"  # of the whole next-token distribution
    VALUE = "value"  # the critic's estimate before this token
    TWIN = "twin"  # the estimate of a second value head
    RIVALS = "rivals"  # Σ log π of the candidates drawn at this token that are not the token itself
    Q = "q"  # TURN: what an utterance-level critic makes of the state and what was said
    Q_TWIN = "q_twin"  # TURN: its twin
    V = "v"  # TURN: what it makes of the state alone
    V_TWIN = "v_twin"  # TURN
    # frozen: measured once per batch, before the first update on it
    PROXIMAL = "proximal"  # LOGP
    OLD_VALUE = "old_value"  # VALUE
    OLD_TWIN = "old_twin"  # TWIN
    OLD_ENTROPY = "old_entropy"  # ENTROPY
    REFERENCE = "reference"  # log-probability under the frozen initial policy
    PREVIOUS = "previous"  # log-probability under the weights before the last training step
    GRADIENT_NORM = "gradient_norm"  # TRAJECTORY: ‖∇ Σₜ log π(yₜ)‖ over all weights; one backward pass each
    ANSWER = "answer"  # TURN: mean log-probability of the gold answer, were it said at this turn
    BLIND = "blind"  # log-probability had the environment's words just before this turn been masked
    TEACHER = "teacher"  # log-probability under a teacher
    HITS = "hits"  # how many of the candidates drawn at this token are the token itself
    RANK = "rank"  # TRAJECTORY: effective rank of its hidden states
    RANK_SPEED = "rank_speed"  # TRAJECTORY: mean change of the rank while it was written
    RANK_PUSH = "rank_push"  # TRAJECTORY: mean change of that change
    DEVIATION = "deviation"  # how far its hidden states lie from the flow of good ones
    PROBE = "probe"  # TRAJECTORY: the reward a probe of the hidden states predicts, learned from the batches before
    SLOW_Q = "slow_q"  # TURN: Q of the slowly following copy of the critic
    SLOW_Q_TWIN = "slow_q_twin"  # TURN
    SLOW_V = "slow_v"  # TURN
    SLOW_V_TWIN = "slow_v_twin"  # TURN
    # foreseen: measured before each optimiser step, of the present weights
    HELLINGER = "hellinger"  # 1 − Σₐ √(π(a) π_ref(a)) over the whole vocabulary
    PUSH = "push"  # Σ v²q, with v = onehot − π, q = lr · P h² and P the optimiser's preconditioner of the head
    PUSH_SQUARE = "push_square"  # Σ π v² q²
    PUSH_MEAN = "push_mean"  # Σ π v q


UTTERANCE = (Signal.Q, Signal.Q_TWIN, Signal.V, Signal.V_TWIN)
SLOW = (Signal.SLOW_Q, Signal.SLOW_Q_TWIN, Signal.SLOW_V, Signal.SLOW_V_TWIN)
LIVE = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.VALUE, Signal.TWIN, Signal.RIVALS, *UTTERANCE})
FORESEEN = frozenset({Signal.HELLINGER, Signal.PUSH, Signal.PUSH_SQUARE, Signal.PUSH_MEAN})
FROZEN = frozenset(Signal) - LIVE - FORESEEN
CRITIC = frozenset({Signal.VALUE, Signal.OLD_VALUE, Signal.TWIN, Signal.OLD_TWIN})
LEVELS: dict[Signal, Level] = {
    **dict.fromkeys((Signal.ANSWER, *UTTERANCE, *SLOW), TURN),
    **dict.fromkeys((Signal.GRADIENT_NORM, Signal.RANK, Signal.RANK_SPEED, Signal.RANK_PUSH, Signal.PROBE), TRAJECTORY),
}
"""Signals that are not one number a token."""


def level_of(signal: Signal) -> Level:
    return LEVELS.get(signal, TOKEN)
