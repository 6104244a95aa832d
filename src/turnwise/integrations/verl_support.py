"""Splits a recipe into what verl computes itself, what our functions compute inside verl, and what neither can.

The pieces of a recipe alone decide. verl passes a loss (log π_old, log π, A, mask) of one micro-batch, and an estimator the
rewards, mask and groups of a whole batch. Imports nothing of verl.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from turnwise import recipes
from turnwise.algebra.advantage import Whiten
from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.mask import AllTokens, InformativeGroups
from turnwise.algebra.peers import Same
from turnwise.algebra.penalty import KL, ClippedValueLoss, Weight, WeightedPenalty
from turnwise.algebra.piece import Piece
from turnwise.algebra.reward import EnvironmentReward, NamedReward, NegativeReferenceKL, OnLastToken, RunningNormalised
from turnwise.algebra.term import Plus, Term, Times
from turnwise.algebra.value import GAE
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.signals import Signal
from turnwise.errors import SettingError
from turnwise.integrations import method_support
from turnwise.integrations.method_support import learner_reasons, that_hold, unavailable_inputs
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
from turnwise.tasks.admission import AdmitAll, NotPerfect, Spread

PREFIX = "turnwise/"
TESTED_FAMILIES = (critic_free, actor_critic, trust_region, sampler_mismatch, off_policy, entropy, tool_agents)
METHODS = {
    name: make for name, make in recipes.METHODS.items() if make.__module__ in {f.__name__ for f in TESTED_FAMILIES}
}
"""Families whose methods have been run inside verl itself. Others are not registered."""
Hyper = Mapping[str, Any]
SIGNAL_MEANING = method_support.SIGNAL_MEANING | {
    Signal.PROXIMAL: "the sampler's log-probabilities beside old_log_prob (verl weighs by them itself: set "
    "algorithm.rollout_correction, and every turnwise loss multiplies its weights in)",
    Signal.REFERENCE: "the reference's log-probabilities inside the loss",
    Signal.ENTROPY: "entropies inside the loss",
    Signal.VALUE: "the critic's values, which verl hands to its own estimator alone",
}
MEASURED_WITH = method_support.MEASURED_WITH | {Signal.OLD_ENTROPY: Signal.ENTROPY}
# groups that these drop have zero advantage anyway: verl's filter_groups does the same
ZERO_CREDIT = AdmitAll | Spread | NotPerfect


# --------------------------------------------- terms that verl computes itself


def provided_by_verl(weighted: WeightedPenalty) -> bool:
    """Whether verl has this penalty: a KL to the reference of fixed weight (use_kl_loss), or the critic's loss."""
    penalty = weighted.penalty
    plain_kl = isinstance(penalty, KL) and penalty.to == Signal.REFERENCE and not penalty.corrected
    return (plain_kl and not isinstance(weighted.weight, Weight)) or isinstance(penalty, ClippedValueLoss)


def without_verl_terms(recipe: Recipe) -> Recipe:
    """The recipe without the terms that verl computes itself: KL in the loss, KL in the reward, the critic's loss."""
    penalties = tuple(w for w in recipe.penalties if not provided_by_verl(w))
    reward, advantage = _without_reward_kl(recipe.reward), _without_reward_kl(recipe.advantage)
    reward, advantage = reward or EnvironmentReward(), advantage or recipe.advantage
    return replace(recipe, penalties=penalties, reward=reward, advantage=advantage)


def _without_reward_kl(term: Term) -> Term | None:
    """The term without the KL in the reward, which verl's rewards already contain; None if nothing else is left."""
    if isinstance(term, NegativeReferenceKL):
        return None
    if isinstance(term, OnLastToken):  # verl's rewards are per token already
        return _without_reward_kl(term.reward)
    if isinstance(term, Plus):
        left, right = _without_reward_kl(term.left), _without_reward_kl(term.right)
        return Plus(left, right) if left and right else left or right
    inner = {name: _without_reward_kl(part) for name, part in _inner(term).items()}
    return replace(term, **inner) if all(inner.values()) else None


def _inner(term: Term) -> dict[str, Term]:
    return {name: part for name, part in vars(term).items() if isinstance(part, Term)}


def reward_kl_weight(term: Term) -> float:
    """The weight of the KL inside a reward or an advantage."""
    if isinstance(term, NegativeReferenceKL):
        return 1.0
    inside = sum(reward_kl_weight(part) for part in _inner(term).values())
    return (term.weight if isinstance(term, Times) else 1.0) * inside


def kl_in_reward(recipe: Recipe) -> float:
    """β of the KL that is part of the reward; 0 for none."""
    return reward_kl_weight(recipe.reward) + reward_kl_weight(recipe.advantage)


# ----------------------------------------------------- unsupported recipes


def loss_unsupported_reasons(recipe: Recipe) -> list[str]:
    """As sentences, why verl's loss hook cannot run this recipe; empty if it can."""
    pieces, how = list(_planning(without_verl_terms(recipe))), recipe.aggregate
    in_parts = how in (Mean(TOKEN), Mean(TRAJECTORY)) or (isinstance(how, Sum) and how.over == TRAJECTORY)
    remembers = any(p.initial_state() or isinstance(p, Weight) for p in pieces)
    reads_rewards = any(isinstance(p, Term | InformativeGroups) for p in pieces)
    wrong = {
        "has a ratio that reaches across groups, which verl cuts into micro-batches": recipe.ratio.couples_trajectories,
        "reads rewards inside the loss, where verl gives advantages only": reads_rewards,
        "remembers something between optimiser steps, and verl calls a loss once per micro-batch and rank": remembers,
        f"averages by {how!r}, where verl tells only how many tokens and rows the step has": not in_parts,
    }
    needs, hold = _needs(pieces, frozenset({Signal.LOGP})), that_hold(wrong)
    return [*needs, *unavailable_inputs(recipe, pieces), *learner_reasons(recipe), *hold, *_dropped(recipe)]


def advantage_unsupported_reasons(recipe: Recipe, values: bool = False) -> list[str]:
    """As sentences, why verl's estimator hook cannot run this recipe's credit. ``values``: the caller passes a critic's."""
    pieces = [*without_verl_terms(recipe).advantage.parts, *without_verl_terms(recipe).reward.parts]
    needs = _needs(pieces, frozenset({Signal.OLD_VALUE}) if values else frozenset())
    if needs and is_gae(recipe):
        needs[-1] += " (it has these very advantages: write algorithm.adv_estimator=gae)"
    scales = any(isinstance(p, RunningNormalised) for p in pieces) and kl_in_reward(recipe)
    peers = [same for p in pieces if isinstance(same := getattr(p, "peers", None), Same)]
    by_state = any("index" not in same.what for same in peers)
    wrong = {
        "scales the reward before the KL is taken off, and verl takes it off first": scales,
        "must know which episodes a limit cut off": any(isinstance(p, GAE) and p.bootstrap for p in pieces),
        "reads a named component of the reward": any(isinstance(p, NamedReward) for p in pieces),
        "compares turns by state or agent, which verl does not record": by_state,
    }
    return [*needs, *that_hold(wrong), *unavailable_inputs(recipe, pieces), *_dropped(recipe)]


def unsupported_methods(options: Mapping[str, Hyper] | None = None) -> dict[str, str]:
    """Method → why its loss or its advantage is not registered with verl, as a sentence."""
    out = {}
    for name in METHODS:
        recipe = recipes.build(name, **(options or {}).get(name, {}))
        reasons = {"loss": loss_unsupported_reasons(recipe), "advantage": advantage_unsupported_reasons(recipe)}
        if any(reasons.values()):
            out[name] = "; ".join(f"{part}: it {', and '.join(texts)}" for part, texts in reasons.items() if texts)
    return out


def is_gae(recipe: Recipe) -> bool:
    whitened = recipe.advantage.term if isinstance(recipe.advantage, Whiten) else None
    plain = isinstance(whitened, GAE) and not whitened.bootstrap
    return plain and isinstance(without_verl_terms(recipe).reward, EnvironmentReward)


def plans_over_step(recipe: Recipe) -> bool:
    """Whether the plan decides over all tokens the loss receives: exact only if those are the whole step."""
    pieces = _planning(without_verl_terms(recipe))
    decides = any(type(p).plan is not Piece.plan or p.reads_before_step for p in pieces)
    return decides or not isinstance(recipe.keep, AllTokens)


def _planning(recipe: Recipe) -> Iterator[Piece]:
    roots = (recipe.ratio, recipe.gate, recipe.keep, recipe.gradient, *(w for w in recipe.penalties if w.weight))
    yield from dict.fromkeys(piece for root in roots for piece in root.parts)


def _needs(pieces: list[Piece], has: frozenset[Signal]) -> list[str]:
    signals = frozenset[Signal]().union(*(p.reads | p.reads_before_step for p in pieces))
    missing = {MEASURED_WITH.get(s, s) for s in signals - has}
    if Signal.SECOND_VALUE in missing:  # the reason says enough of the first
        missing -= {Signal.VALUE}
    return [f"needs {SIGNAL_MEANING.get(s, str(s))}" for s in sorted(missing)]


def _dropped(recipe: Recipe) -> list[str]:
    dropping = not isinstance(recipe.admission, ZERO_CREDIT)
    return that_hold({f"drops trajectories before they are compared ({recipe.admission!r})": dropping})


# ------------------------------------------------------------------- settings


def mode(recipe: Recipe) -> str:
    how = recipe.aggregate
    if isinstance(how, Sum):
        return "seq-mean-token-sum" if how.length == 1 else "seq-mean-token-sum-norm"
    return "token-mean" if how == Mean(TOKEN) else "seq-mean-token-mean"


def settings(recipe: Recipe) -> list[str]:
    """verl's settings for the terms that verl computes itself."""
    actor = "actor_rollout_ref.actor"
    out = [f"{actor}.loss_agg_mode={mode(recipe)}"]
    if isinstance(recipe.aggregate, Sum) and recipe.aggregate.length != 1:
        out += [f"{actor}.loss_scale_factor={recipe.aggregate.length:g}"]
    for penalty, weight in ((w.penalty, w.weight) for w in recipe.penalties if w.weight and provided_by_verl(w)):
        if isinstance(penalty, KL):
            out += [f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_coef={weight:g}"]
            out += [f"{actor}.kl_loss_type={penalty.estimator}"]
        elif isinstance(penalty, ClippedValueLoss) and penalty.clip < float("inf"):
            out += [f"critic.cliprange_value={penalty.clip:g}"]
    if beta := kl_in_reward(recipe):
        out += ["algorithm.use_kl_in_reward=True", f"algorithm.kl_ctrl.kl_coef={beta:g}", "algorithm.kl_penalty=kl"]
    if not isinstance(recipe.admission, AdmitAll):
        out += ["algorithm.filter_groups.enable=True"]
    return out


def raise_if_unsupported(name: str, reasons: list[str]) -> None:
    if reasons:
        instead = f". Use `turnwise train --method {name}`" if name in recipes.METHODS else ""
        raise SettingError(f"{name} cannot run inside verl: it {'; it '.join(reasons)}{instead}")
