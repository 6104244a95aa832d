"""Which methods another trainer can run: compares what a recipe needs with what that trainer measures and does.

Knows no trainer and no method's name; the pieces of a recipe alone decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def unsupported_reasons(recipe: Recipe, has: frozenset[Signal]) -> list[str]:
    """As sentences, everything a recipe needs that a trainer with these signals does not provide."""
    missing = {MEASURED_WITH.get(s, s) for s in recipe.objective.signals - has}
    if missing & TOKEN_CRITIC:
        missing -= {Signal.SECOND_VALUE}  # a trainer without a critic has no second one either
    roots: list[Piece] = [recipe.advantage, recipe.reward, recipe.ratio, recipe.gate, recipe.keep, recipe.gradient]
    roots += [weighted for weighted in recipe.penalties if weighted.weight]
    reasons = [f"needs {SIGNAL_MEANING.get(s, str(s))}" for s in sorted(missing)]
    return [f"it {reason}" for reason in (*reasons, *learner_reasons(recipe), *unavailable_inputs(recipe, roots))]


def that_hold(reasons: Mapping[str, object]) -> list[str]:
    return [reason for reason, holds in reasons.items() if holds]


def learner_reasons(recipe: Recipe) -> list[str]:
    """As sentences, what a recipe does to the gradient, the optimiser or the layers, which is another trainer's part."""
    gradient, control, smoothing, precision = recipe.gradient, recipe.control, recipe.smoothing, recipe.precision
    own_gradient = not isinstance(gradient, PlainGradient)
    return that_hold({
        f"scales the finished gradient by further gradients or a rate of its own ({gradient!r})": own_gradient,
        f"has optimiser steps of its own ({control!r})": not isinstance(control, Passes),
        f"puts learned noise into every layer ({smoothing!r})": smoothing is not None,
        f"rounds what the learner's layers multiply ({precision!r})": precision.learner,
    })  # fmt: skip


def unavailable_inputs(recipe: Recipe, within: Iterable[Piece]) -> list[str]:
    """As sentences, what a recipe reads that padded tensors of tokens and rewards do not contain, or does while they are
    collected."""
    pieces = {p for root in within for p in root.parts}
    asked = {word for p in pieces for word in p.requires | (p.idle_without & {"tools"})}  # no calls are recorded
    needed = sorted(asked | recipe.requires)
    differs = lambda name: type(getattr(recipe, name)) is not type(getattr(DEFAULT_RECIPE, name))  # noqa: E731
    memory = any(type(p).memory_columns is not Piece.memory_columns for p in pieces)
    coupled = any(isinstance(p, Penalty) and p.couples_trajectories for p in pieces)
    return that_hold({
        f"requires {', '.join(needed)}": needed,
        "remembers something of every task, and tasks have no names there": memory,
        "has a loss that reaches across trajectories": coupled,
        f"mixes in what was collected earlier ({recipe.replay!r})": differs("replay"),
        f"gives rollouts help of its own ({recipe.guidance!r})": differs("guidance"),
        f"samples its groups with its own strategy ({recipe.strategy!r})": differs("strategy"),
    })  # fmt: skip


def require_supported(recipe: Recipe, name: str, has: frozenset[Signal], trainer: str) -> None:
    if reasons := unsupported_reasons(recipe, has):
        command = f"turnwise train {name}" if name else "turnwise.train"
        cannot = f"{name or 'this recipe'} cannot be trained inside {trainer}: {'; '.join(reasons)}"
        raise RecipeError(f"{cannot}. Use `{command}`, which can.")


def spans_groups(recipe: Recipe) -> bool:
    """Whether the plan of a step compares or averages whole groups, so that no group may be split over two optimiser steps."""
    aggregates = [recipe.aggregate, *(w.aggregate for w in recipe.penalties if w.weight)]
    planned = [recipe.ratio, recipe.gate, recipe.keep, *(w for w in recipe.penalties if w.weight)]
    pieces = [part for root in planned for part in root.parts]
    grouped = any(getattr(a, "over", None) == GROUP for a in aggregates)
    compares = lambda p: isinstance(p, Term) and p.compares_peers  # noqa: E731
    grouped |= any(isinstance(p, InformativeGroups | MedianCentred) or compares(p) for p in pieces)
    return grouped or recipe.ratio.couples_trajectories
