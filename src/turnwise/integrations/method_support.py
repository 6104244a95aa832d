"""Which methods another trainer can run: compares what a recipe needs with what that trainer measures and does.

Knows no trainer and no method's name; the pieces of a recipe alone decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from turnwise.algebra.control import Passes
from turnwise.algebra.gradient import PlainGradient
from turnwise.algebra.mask import InformativeGroups
from turnwise.algebra.penalty import Penalty
from turnwise.algebra.piece import Piece
from turnwise.algebra.term import Term
from turnwise.algebra.value import MedianCentred, Outcome
from turnwise.core.levels import GROUP
from turnwise.core.signals import TOKEN_CRITIC, TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.errors import RecipeError
from turnwise.recipes.recipe import Recipe

SIGNAL_MEANING = {  # signals that only our own learner measures
    Signal.VALUE: "a critic (a value head beside the policy)",
    Signal.SECOND_VALUE: "a second critic",
    Signal.ANSWER_LOGP: "the gold answer's likelihood at every turn",
    Signal.GRADIENT_NORM: "the gradient norm of every single trajectory",
    Signal.HELLINGER: "the Hellinger distance to the reference over the whole vocabulary",
    Signal.PREDICTED_LOGP_CHANGE: "the optimiser's curvature in the last layer",
    Signal.PREVIOUS: "log-probabilities under the weights before the last training step",
    Signal.LOGP_WITHOUT_FEEDBACK: "log-probabilities with the environment's words masked",
    Signal.TEACHER: "a teacher's log-probabilities",
    Signal.CANDIDATE_MATCHES: "candidates drawn at every token",
    Signal.EFFECTIVE_RANK: "the effective rank of the hidden states",
    Signal.FLOW_DEVIATION: "how far hidden states lie from the flow of good ones",
    Signal.REWARD_PROBE: "a probe of the hidden states",
    Signal.COLLISION: "the sum of the squared probabilities of the whole vocabulary",
    Signal.Q: "a critic of whole turns",
    Signal.ACTION_VALUE: "a value of each token of the vocabulary",
    Signal.MODE_LOGP: "the most likely tokens of policy and reference",
}
MEASURED_WITH = {
    Signal.OLD_VALUE: Signal.VALUE,
    Signal.OLD_SECOND_VALUE: Signal.SECOND_VALUE,
    Signal.OLD_ACTION_VALUE: Signal.ACTION_VALUE,
    Signal.REFERENCE_MODE_GAP: Signal.MODE_LOGP,
    Signal.PREDICTED_LOGIT_SQUARE: Signal.PREDICTED_LOGP_CHANGE,
    Signal.PREDICTED_LOGIT_MEAN: Signal.PREDICTED_LOGP_CHANGE,
    Signal.CANDIDATE_LOGP: Signal.CANDIDATE_MATCHES,
    Signal.EFFECTIVE_RANK_VELOCITY: Signal.EFFECTIVE_RANK,
    Signal.EFFECTIVE_RANK_ACCELERATION: Signal.EFFECTIVE_RANK,
    **dict.fromkeys((*TURN_CRITIC[1:], *TURN_CRITIC_TARGET), Signal.Q),
}
DEFAULT_RECIPE = Recipe(advantage=Outcome())


def roots(recipe: Recipe) -> Iterator[Piece]:
    yield from (recipe.advantage, recipe.reward, recipe.ratio, recipe.gate, recipe.keep, recipe.gradient)
    yield from (weighted for weighted in recipe.penalties if weighted.weight)


def unsupported_reasons(recipe: Recipe, has: frozenset[Signal]) -> list[str]:
    """As sentences, everything a recipe needs that a trainer with these signals does not provide."""
    missing = {MEASURED_WITH.get(s, s) for s in recipe.objective.signals - has}
    if missing & TOKEN_CRITIC:
        missing -= {Signal.SECOND_VALUE}
    reasons = [f"it needs {SIGNAL_MEANING.get(s, str(s))}" for s in sorted(missing)]
    if not isinstance(recipe.gradient, PlainGradient):
        reasons.append(
            f"it scales the finished gradient by further gradients or a rate of its own ({recipe.gradient!r})"
        )
    if not isinstance(recipe.control, Passes):
        reasons.append(f"it has optimiser steps of its own ({recipe.control!r})")
    if recipe.smoothing is not None:
        reasons.append(f"it puts learned noise into every layer ({recipe.smoothing!r})")
    if recipe.precision.learner:
        reasons.append(f"it rounds what the learner's layers multiply ({recipe.precision!r})")
    if type(recipe.strategy) is not type(DEFAULT_RECIPE.strategy):
        reasons.append(f"it samples its groups with its own strategy ({recipe.strategy!r})")
    return reasons + [f"it {reason}" for reason in unavailable_inputs(recipe, roots(recipe))]


def unavailable_inputs(recipe: Recipe, within: Iterable[Piece]) -> list[str]:
    """As sentences, what a recipe reads that padded tensors of tokens and rewards do not contain."""
    pieces = {p for root in within for p in root.parts}
    requirements = sorted({requirement for p in pieces for requirement in p.requires})
    reasons = [f"requires {', '.join(requirements)}"] if requirements else []
    if any(type(p).memory_columns is not Piece.memory_columns for p in pieces):
        reasons.append("remembers something of every task, and tasks have no names there")
    if any(isinstance(p, Penalty) and p.couples_trajectories for p in pieces):
        reasons.append("has a loss that reaches across trajectories")
    if type(recipe.replay) is not type(DEFAULT_RECIPE.replay):
        reasons.append(f"mixes in what was collected earlier ({recipe.replay!r})")
    if type(recipe.guidance) is not type(DEFAULT_RECIPE.guidance):
        reasons.append(f"gives rollouts help of its own ({recipe.guidance!r})")
    return reasons


def require_supported(recipe: Recipe, name: str, has: frozenset[Signal], trainer: str) -> None:
    reasons = unsupported_reasons(recipe, has)
    if reasons:
        command = f"turnwise train {name}" if name else "turnwise.train"
        raise RecipeError(
            f"{name or 'this recipe'} cannot be trained inside {trainer}: {'; '.join(reasons)}. Use `{command}`, which can."
        )


def spans_groups(recipe: Recipe) -> bool:
    """Whether the plan of a step compares or averages whole groups, so that no group may be split over two optimiser steps."""
    aggregates = [recipe.aggregate, *(w.aggregate for w in recipe.penalties if w.weight)]
    planned = [recipe.ratio, recipe.gate, recipe.keep, *(w for w in recipe.penalties if w.weight)]
    pieces = [part for root in planned for part in root.parts]
    return (
        recipe.ratio.couples_trajectories
        or any(getattr(a, "over", None) == GROUP for a in aggregates)
        or any(
            isinstance(p, InformativeGroups | MedianCentred) or (isinstance(p, Term) and p.compares_peers)
            for p in pieces
        )
    )


__all__ = ["require_supported", "spans_groups", "unsupported_reasons"]
