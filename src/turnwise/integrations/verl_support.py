"""What of a recipe verl runs itself, what our functions run inside verl, and what neither can: judged by pieces alone.

verl's loss sees (log π_old, log π, A, mask) of one micro-batch; its estimators see rewards, mask and group of a whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from turnwise import recipes
from turnwise.algebra.advantage import Whiten
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.control import Passes
from turnwise.algebra.gradient import Plain
from turnwise.algebra.mask import All, Informative
from turnwise.algebra.peers import Same
from turnwise.algebra.penalty import KL, CriticError, Weighted
from turnwise.algebra.piece import Piece
from turnwise.algebra.reward import Drift, Environment, Named, OnTokens, RunningScale
from turnwise.algebra.term import Plus, Term, Times
from turnwise.algebra.value import GAE, Outcome
from turnwise.algebra.weight import Weight
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.signals import Signal
from turnwise.errors import SettingError
from turnwise.integrations.method_support import untold
from turnwise.recipes.families import (
    actor_critic,
    critic_free,
    entropy,
    off_policy,
    sampler_mismatch,
    tool_agents,
    trust_region,
)
from turnwise.recipes.recipe import Recipe
from turnwise.tasks.admission import Everything, NotPerfect, Spread

PREFIX = "turnwise/"
TESTED = (critic_free, actor_critic, trust_region, sampler_mismatch, off_policy, entropy, tool_agents)
METHODS = {name: make for name, make in recipes.METHODS.items() if make.__module__ in {f.__name__ for f in TESTED}}
"""Families whose methods have been run inside verl itself. Others are not registered."""
Hyper = Mapping[str, Any]
WHY = {
    Signal.PROXIMAL: "the sampler's log-probabilities beside old_log_prob (verl weighs by them itself: set "
    "algorithm.rollout_correction, and every turnwise loss multiplies its weights in)",
    Signal.PREVIOUS: "log-probabilities under the weights before the last training step",
    Signal.REFERENCE: "the reference's log-probabilities inside the loss",
    Signal.ENTROPY: "entropies inside the loss",
    Signal.VALUE: "the critic's values, which verl hands to its own estimator alone",
    Signal.TWIN: "a second value head",
    Signal.GRADIENT_NORM: "the gradient norm of each trajectory",
    Signal.ANSWER: "the likelihood of the gold answer at every turn",
    Signal.HELLINGER: "the Hellinger distance to the reference over the whole vocabulary",
    Signal.PUSH: "the curvature of the coming step (the optimiser's state)",
}
KIN = {
    Signal.OLD_VALUE: Signal.VALUE,
    Signal.OLD_TWIN: Signal.TWIN,
    Signal.OLD_ENTROPY: Signal.ENTROPY,
    Signal.PUSH_SQUARE: Signal.PUSH,
    Signal.PUSH_MEAN: Signal.PUSH,
}
DEFAULT = Recipe(advantage=Outcome())
ZERO_CREDIT = Everything | Spread | NotPerfect  # what these drop has no advantage anyway: verl's filter_groups does it


# ------------------------------------------------------- what verl adds itself


def by_verl(weighted: Weighted) -> bool:
    """Whether verl has this penalty: a KL to the reference of fixed weight (use_kl_loss), or the critic's own error."""
    cost = weighted.penalty
    plain = isinstance(cost, KL) and cost.to == Signal.REFERENCE and not cost.corrected
    return (plain and not isinstance(weighted.weight, Weight)) or isinstance(cost, CriticError)


def bare(recipe: Recipe) -> Recipe:
    """The recipe without what verl adds itself: the KL in the loss, the KL in the reward, the critic's error."""
    rest = tuple(w for w in recipe.penalties if not by_verl(w))
    reward, advantage = _without_drift(recipe.reward), _without_drift(recipe.advantage)
    return replace(recipe, penalties=rest, reward=reward or Environment(), advantage=advantage or recipe.advantage)


def _without_drift(term: Term) -> Term | None:
    """The term less the KL in the reward, which verl's rewards hold already; None where it was nothing else."""
    if isinstance(term, Drift):
        return None
    if isinstance(term, OnTokens):  # verl's rewards lie on tokens already
        return _without_drift(term.reward)
    if isinstance(term, Plus):
        left, right = _without_drift(term.left), _without_drift(term.right)
        return Plus(left, right) if left and right else left or right
    inner = {name: _without_drift(part) for name, part in _inner(term).items()}
    return replace(term, **inner) if all(inner.values()) else None  # type: ignore[type-var]


def _inner(term: Term) -> dict[str, Term]:
    return {name: part for name, part in vars(term).items() if isinstance(part, Term)}


def drift(term: Term) -> float:
    """The weight of the KL inside a reward or an advantage."""
    if isinstance(term, Drift):
        return 1.0
    return (term.weight if isinstance(term, Times) else 1.0) * sum(drift(part) for part in _inner(term).values())


def in_reward(recipe: Recipe) -> float:
    """β of the KL that is part of the reward; 0 for none."""
    return drift(recipe.reward) + drift(recipe.advantage)


# ------------------------------------------------------------ what is left out


def loss_lacks(recipe: Recipe) -> list[str]:
    """In words, why verl's loss hook cannot run this recipe; empty where it can."""
    pieces = list(_planning(bare(recipe)))
    found = [f"needs {WHY.get(s, str(s))}" for s in _missing(pieces, frozenset({Signal.LOGP}))]
    found += untold(recipe, pieces)
    if recipe.smoothing is not None:
        found.append("adds learned noise inside every layer")
    if recipe.precision.learner:
        found.append(f"rounds what the learner's layers multiply ({recipe.precision!r})")
    if not isinstance(recipe.control, Passes):
        found.append("updates turn by turn, the last first, in optimiser steps of its own")
    if not isinstance(recipe.gradient, Plain):
        found.append("rescales the finished gradient or the learning rate")
    if recipe.ratio.couples:
        found.append("has a ratio that reaches across groups, which verl cuts into micro-batches")
    if any(isinstance(p, Term | Informative) for p in pieces):
        found.append("reads rewards inside the loss, where verl gives advantages only")
    if any(p.start() or isinstance(p, Weight) for p in pieces):
        found.append("remembers something between optimiser steps, and verl calls a loss once per micro-batch and rank")
    how = recipe.aggregate
    if how not in (Mean(TOKEN), Mean(TRAJECTORY)) and not (isinstance(how, Sum) and how.over == TRAJECTORY):
        found.append(f"averages by {how!r}, where verl tells only how many tokens and rows the step has")
    return found + _refused(recipe)


def credit_lacks(recipe: Recipe, values: bool = False) -> list[str]:
    """In words, why verl's estimator hook cannot run this recipe's credit. ``values``: the caller gives a critic's."""
    pieces = [*bare(recipe).advantage.parts, *bare(recipe).reward.parts]
    has = frozenset({Signal.OLD_VALUE}) if values else frozenset()
    found = [f"needs {WHY.get(s, str(s))}" for s in _missing(pieces, has)]
    if found and is_gae(recipe):
        found[-1] += " (it has these very advantages: write algorithm.adv_estimator=gae)"
    if any(isinstance(p, RunningScale) for p in pieces) and in_reward(recipe):
        found.append("scales the reward before the KL is taken off, and verl takes it off first")
    found += untold(recipe, pieces)
    if any(isinstance(p, GAE) and p.bootstrap for p in pieces):
        found.append("must know which episodes a limit cut off")
    if any(isinstance(p, Named) for p in pieces):
        found.append("reads a named component of the reward")
    if any(isinstance(peers := getattr(p, "peers", None), Same) and "index" not in peers.what for p in pieces):
        found.append("compares turns by state or agent, which verl does not record")
    return found + _refused(recipe)


def left_out(options: Mapping[str, Hyper] | None = None) -> dict[str, str]:
    """Why a method's loss or advantage is not in verl's registry, in words."""
    out = {}
    for name in METHODS:
        recipe = recipes.build(name, **(options or {}).get(name, {}))
        why = {"loss": loss_lacks(recipe), "advantage": credit_lacks(recipe)}
        if any(why.values()):
            out[name] = "; ".join(f"{part}: it {', and '.join(found)}" for part, found in why.items() if found)
    return out


def is_gae(recipe: Recipe) -> bool:
    """Whether verl's own ``gae`` gives exactly this credit."""
    whitened = recipe.advantage.term if isinstance(recipe.advantage, Whiten) else None
    plain = isinstance(whitened, GAE) and not whitened.bootstrap
    return plain and isinstance(bare(recipe).reward, Environment)


def plans(recipe: Recipe) -> bool:
    """Whether something is decided over all tokens the loss is shown: exact only where that is the whole step."""
    kept = not isinstance(recipe.keep, All)
    return kept or any(type(p).plan is not Piece.plan or p.foresight for p in _planning(bare(recipe)))


def _planning(recipe: Recipe) -> Iterator[Piece]:
    roots = (recipe.ratio, recipe.gate, recipe.keep, recipe.gradient, *(w for w in recipe.penalties if w.weight))
    yield from dict.fromkeys(piece for root in roots for piece in root.parts)


def _missing(pieces: list[Piece], has: frozenset[Signal]) -> list[Signal]:
    asked = frozenset[Signal]().union(*(p.reads | p.foresight for p in pieces))
    missing = {KIN.get(s, s) for s in asked - has}
    return sorted(missing - {Signal.VALUE} if Signal.TWIN in missing else missing)


def _refused(recipe: Recipe) -> list[str]:
    """What is decided while the data is collected, and so can be no part of a loss or of an advantage."""
    found = []
    if not isinstance(recipe.admission, ZERO_CREDIT):
        found.append(f"drops trajectories before they are compared ({recipe.admission!r})")
    if type(recipe.strategy) is not type(DEFAULT.strategy):
        found.append(f"samples its groups in its own way ({recipe.strategy!r})")
    return found


# ------------------------------------------------------------------- settings


def mode(recipe: Recipe) -> str:
    """verl's name for how the recipe averages."""
    how = recipe.aggregate
    if isinstance(how, Sum):
        return "seq-mean-token-sum" if how.length == 1 else "seq-mean-token-sum-norm"
    return "token-mean" if how == Mean(TOKEN) else "seq-mean-token-mean"


def settings(recipe: Recipe) -> list[str]:
    """verl's settings for what verl adds itself."""
    actor = "actor_rollout_ref.actor"
    out = [f"{actor}.loss_agg_mode={mode(recipe)}"]
    if isinstance(recipe.aggregate, Sum) and recipe.aggregate.length != 1:
        out += [f"{actor}.loss_scale_factor={recipe.aggregate.length:g}"]
    for cost, weight in ((w.penalty, w.weight) for w in recipe.penalties if w.weight and by_verl(w)):
        if isinstance(cost, KL):
            out += [f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_coef={weight:g}"]
            out += [f"{actor}.kl_loss_type={cost.estimator}"]
        elif isinstance(cost, CriticError) and cost.clip < float("inf"):
            out += [f"critic.cliprange_value={cost.clip:g}"]
    if beta := in_reward(recipe):
        out += ["algorithm.use_kl_in_reward=True", f"algorithm.kl_ctrl.kl_coef={beta:g}", "algorithm.kl_penalty=kl"]
    if not isinstance(recipe.admission, Everything):
        out += ["algorithm.filter_groups.enable=True"]
    return out


def refuse(name: str, reasons: list[str]) -> None:
    if reasons:
        instead = f". Use `turnwise train --method {name}`" if name in recipes.METHODS else ""
        raise SettingError(f"{name} cannot run inside verl: it {'; it '.join(reasons)}{instead}")


__all__ = [
    "PREFIX", "WHY", "Hyper", "bare", "by_verl", "credit_lacks", "in_reward", "is_gae", "left_out", "loss_lacks", "mode",
    "plans", "refuse", "settings",
]  # fmt: skip
