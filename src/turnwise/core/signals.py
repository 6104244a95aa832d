"""The signals a learner can measure. Pieces declare which they read; the learner computes exactly those, once.

A signal is a name with a level. This module does not know how a signal is computed: that is the learner's business.
"""

from __future__ import annotations

from enum import StrEnum

from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Level


class Signal(StrEnum):
    """Quantities of the sampled tokens that were not recorded when they were sampled. At TOKEN unless a level is named."""

    # with gradient: computed in every forward pass of an update
    LOGP = "logp"  # log-probability under the weights being trained
    ENTROPY = "entropy"  # of the whole next-token distribution
    VALUE = "value"  # the critic's estimate before this token
    SECOND_VALUE = "second_value"  # the estimate of a second value head
    ACTION_VALUE = "action_value"  # the estimate of the state and this token, by a head with an output for each token
    MODE_LOGP = "mode_logp"  # log-probability of the most likely token
    CANDIDATE_LOGP = "candidate_logp"  # Σ log π of the candidates drawn at this token that differ from the token
    Q = "q"  # TURN: the turn-level critic's estimate of the state and the action
    SECOND_Q = "second_q"  # TURN: the same by its second head
    V = "v"  # TURN: the turn-level critic's estimate of the state alone
    SECOND_V = "second_v"  # TURN: the same by its second head
    # before the batch: measured once per batch, before the first update on it
    PROXIMAL = "proximal"  # LOGP
    OLD_VALUE = "old_value"  # VALUE
    OLD_SECOND_VALUE = "old_second_value"  # SECOND_VALUE
    OLD_ACTION_VALUE = "old_action_value"  # ACTION_VALUE
    OLD_ENTROPY = "old_entropy"  # ENTROPY
    REFERENCE = "reference"  # log-probability under the frozen initial policy
    PREVIOUS = "previous"  # log-probability under the weights before the last training step
    GRADIENT_NORM = "gradient_norm"  # TRAJECTORY: ‖∇ Σₜ log π(yₜ)‖ over all weights; one backward pass each
    ANSWER_LOGP = "answer_logp"  # TURN: mean log-probability of the gold answer if it were given at this turn
    LOGP_WITHOUT_FEEDBACK = "logp_without_feedback"  # log-probability with the environment's last message masked
    TEACHER = "teacher"  # log-probability under a teacher
    REFERENCE_MODE_GAP = "reference_mode_gap"  # log-probability of the reference's most likely token − MODE_LOGP
    CANDIDATE_MATCHES = "candidate_matches"  # how many of the candidates drawn at this token equal the token
    EFFECTIVE_RANK = "effective_rank"  # TRAJECTORY: effective rank of its hidden states
    EFFECTIVE_RANK_VELOCITY = "effective_rank_velocity"  # TRAJECTORY: mean change of that rank along the tokens
    EFFECTIVE_RANK_ACCELERATION = "effective_rank_acceleration"  # TRAJECTORY: mean change of that velocity
    FLOW_DEVIATION = "flow_deviation"  # distance of its hidden states from the flow fitted to good trajectories
    REWARD_PROBE = "reward_probe"  # TRAJECTORY: reward predicted from hidden states by a probe of earlier batches
    COLLISION = "collision"  # Σₐ π(a)² over the whole vocabulary
    TARGET_Q = "target_q"  # TURN: Q of the target network, a slowly updated copy of the turn-level critic
    TARGET_SECOND_Q = "target_second_q"  # TURN
    TARGET_V = "target_v"  # TURN
    TARGET_SECOND_V = "target_second_v"  # TURN
    # before the step: measured before each optimiser step, under the weights of that moment
    HELLINGER = "hellinger"  # 1 − Σₐ √(π(a) π_ref(a)) over the whole vocabulary
    # To first order in the output head a step of advantage 1 changes logit a by v q, with v = onehot − π, q = lr · P h²
    # and P the optimiser's preconditioner of the head:
    PREDICTED_LOGP_CHANGE = "predicted_logp_change"  # Σ v² q, of the token's own log-probability
    PREDICTED_LOGIT_SQUARE = "predicted_logit_square"  # Σ π v² q², second moment of the logit changes under π
    PREDICTED_LOGIT_MEAN = "predicted_logit_mean"  # Σ π v q, mean of the logit changes under π


TURN_CRITIC = (Signal.Q, Signal.SECOND_Q, Signal.V, Signal.SECOND_V)
TURN_CRITIC_TARGET = (Signal.TARGET_Q, Signal.TARGET_SECOND_Q, Signal.TARGET_V, Signal.TARGET_SECOND_V)
TOKEN_CRITIC = frozenset({Signal.VALUE, Signal.OLD_VALUE, Signal.SECOND_VALUE, Signal.OLD_SECOND_VALUE})
POLICY_SIGNALS = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.CANDIDATE_LOGP, Signal.MODE_LOGP})
WITH_GRADIENT = frozenset({*POLICY_SIGNALS, Signal.VALUE, Signal.SECOND_VALUE, Signal.ACTION_VALUE, *TURN_CRITIC})
"""Signals of every forward pass of an update; they carry the gradient."""

BEFORE_STEP = frozenset(
    {Signal.HELLINGER, Signal.PREDICTED_LOGP_CHANGE, Signal.PREDICTED_LOGIT_SQUARE, Signal.PREDICTED_LOGIT_MEAN}
)
"""Signals measured before each optimiser step."""

BEFORE_BATCH = frozenset(Signal) - WITH_GRADIENT - BEFORE_STEP
"""Signals measured once per batch."""

_RANKS = (Signal.EFFECTIVE_RANK, Signal.EFFECTIVE_RANK_VELOCITY, Signal.EFFECTIVE_RANK_ACCELERATION)
LEVELS: dict[Signal, Level] = {
    **dict.fromkeys((Signal.ANSWER_LOGP, *TURN_CRITIC, *TURN_CRITIC_TARGET), TURN),
    **dict.fromkeys((Signal.GRADIENT_NORM, Signal.REWARD_PROBE, *_RANKS), TRAJECTORY),
}
"""Signals that are not one number per token."""


def level_of(signal: Signal) -> Level:
    """The level at which a signal has its values."""
    return LEVELS.get(signal, TOKEN)
