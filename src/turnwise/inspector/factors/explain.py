"""One token's gradient as a chain of steps: reward, peers, advantage, ratio, gate, mask, weight, gradient, each with its piece.

A step names the piece that computed it, the piece's own sentence or formula (its docstring), the numbers that went in and the
number that came out. Terms inside an advantage are evaluated one by one. Knows no page.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from turnwise.algebra.advantage import Standardise
from turnwise.algebra.piece import Piece, text
from turnwise.algebra.term import Term
from turnwise.algebra.value import Outcome
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field
from turnwise.errors import TurnwiseError
from turnwise.inspector.factors.stored_step import MethodFactors, StoredStep

MATCH = 1e-4  # relative difference of recomputed and stored numbers; they were computed in float32, in another order


@dataclass(frozen=True)
class FactorStep:
    """One link of the chain: ``value`` is None where a step has no single number."""

    name: str
    piece: str
    formula: str
    value: float | None
    inputs: str = ""


@dataclass(frozen=True)
class PeerValue:
    """A sibling: its reward, its mean advantage, its share of the update's gradient."""

    trajectory: str
    reward: float
    advantage: float
    share: float


@dataclass(frozen=True)
class TokenExplanation:
    """Why one token got its gradient. ``gradient`` is ∂ objective / ∂ log π: positive makes the token more likely."""

    step: int
    trajectory: str
    token: int
    gradient: float
    share: float  # of Σ |gradient| of the update
    stored: float | None  # the gradient that the step applied
    agrees: bool | None
    chain: tuple[FactorStep, ...]
    summands: tuple[tuple[str, float], ...]
    peers: tuple[PeerValue, ...]
    numbers: str  # the product with numbers filled in


def explain_token(stored: StoredStep, under: MethodFactors, trajectory: str, token: int) -> TokenExplanation:
    """``token``: index among the sampled tokens of the trajectory."""
    batch, factors = under.batch, under.factors
    if trajectory not in batch.trajectory_ids:
        raise TurnwiseError(f"this update did not train on trajectory {trajectory}")
    k = batch.trajectory_ids.index(trajectory)
    places = (batch.tree.ancestor(TOKEN, TRAJECTORY) == k).nonzero().squeeze(1)
    if not 0 <= token < len(places):
        raise TurnwiseError(f"trajectory {trajectory} has {len(places)} sampled tokens; {token} is not one of them")
    at = int(places[token])
    total, gradient, product = factors.total, float(factors.total[at]), float(factors.product[at])
    slope = stored.update.of(trajectory).get("slope")
    # what the step applied can be compared only where the method is the run's own
    applied = None if slope is None or under.recipe != stored.recipe else -float(slope[token])
    bound = None if applied is None else MATCH * max(float(total.abs().max()), abs(applied), 1e-30)
    summands = [
        ("credit · gate slope · ratio slope", product),
        ("through other ratios", float(factors.coupled[at])),
        ("through the gate itself", float(factors.by_gate[at])),
        *((name, float(values[at])) for name, values in factors.penalties.items()),
    ]
    return TokenExplanation(
        step=stored.step,
        trajectory=trajectory,
        token=token,
        gradient=gradient,
        share=float(factors.share[at]),
        stored=applied,
        agrees=None if applied is None or bound is None else abs(gradient - applied) <= bound,
        chain=tuple(_chain(under, at)),
        summands=tuple((name, value) for i, (name, value) in enumerate(summands) if value or not i),
        peers=_peers(under, k),
        numbers=" × ".join(f"{float(x[at]):.4g}" for x in (factors.credit, factors.gate_slope, factors.ratio_slope))
        + f" = {product:.4g}",
    )


def _chain(under: MethodFactors, at: int) -> Iterator[FactorStep]:
    objective, batch, factors = under.recipe.objective, under.batch, under.factors
    one = lambda field: float(field.at(TOKEN).x[at])  # noqa: E731
    turn_reward, whole = one(batch.reward), one(batch.reward.sum(TRAJECTORY))
    yield _step("reward", objective.reward, turn_reward, f"this turn {turn_reward:.4g}, whole trajectory {whole:.4g}")
    yield from _terms(objective.advantage, under, at)
    yield _step(
        "advantage", objective.advantage, float(factors.advantage[at]), _peer_numbers(objective.advantage, batch, at)
    )
    logp, behaviour = one(batch["logp"]), one(batch.behaviour)
    moved = f"learner {logp:.4f}, sampler {behaviour:.4f}, difference {logp - behaviour:+.4g}"
    yield _step("ratio", objective.ratio, float(factors.ratio[at]), moved)
    inside = f"gate({float(factors.ratio[at]):.4g}, {float(factors.advantage[at]):.4g})"
    yield _step("gate", objective.gate, float(factors.gate[at]), inside)
    yield _step("gate slope", objective.gate, float(factors.gate_slope[at]), "1: passes the gradient, 0: stops it")
    yield _step("mask", objective.keep, float(factors.weight[at] != 0), "1: trained on, 0: left out of every average")
    turns = batch.tree.index(TURN, TRAJECTORY)
    tokens = one(batch.tree.size(TOKEN, TRAJECTORY))
    where = f"token of turn {one(turns):.0f}; its trajectory has {tokens:.0f} sampled tokens"
    yield _step("weight", objective.aggregate, float(factors.weight[at]), where)
    for weighted in objective.penalties:
        name = text(weighted.penalty)
        if name in factors.penalties:
            lam = f"weight {text(weighted.weight)}"
            yield _step("penalty", weighted.penalty, float(factors.penalties[name][at]), lam)
    yield FactorStep(
        "gradient",
        "∂ objective / ∂ log π",
        "credit · gate slope · ratio slope, and the summands below",
        float(factors.total[at]),
        "" if not factors.frozen else "this update trains critics only: the gain has no gradient",
    )


def _peer_numbers(advantage: Term, batch: Batch, at: int) -> str:
    """The group's mean and deviation; of a z-score, its formula with the numbers filled in."""
    one = lambda field: float(field.at(TOKEN).x[at])  # noqa: E731
    rewards = batch.reward.sum(TRAJECTORY)
    mean, count = one(rewards.mean(GROUP)), one(rewards.peer_count(GROUP))
    peers = f"group of {count:.0f}: mean reward {mean:.4g}, deviation {one(rewards.std(GROUP)):.4g}"
    if not isinstance(advantage, Standardise) or advantage.peers != GROUP or not isinstance(advantage.value, Outcome):
        return peers
    # as the piece itself divides: with its correction and its epsilon
    divided = f" / ({one(rewards.std(GROUP, advantage.correction)):.4g} + {advantage.eps:g})" if advantage.scale else ""
    return f"({one(rewards):.4g} − {mean:.4g}){divided}; {peers}"


def _terms(root: Term, under: MethodFactors, at: int) -> Iterator[FactorStep]:
    """The terms inside an advantage, innermost last, with their own values at this token; None where a term needs the whole
    step and cannot be evaluated alone."""
    seen: set[str] = {text(root)}
    for part in root.parts:
        if not isinstance(part, Term) or text(part) in seen:
            continue
        seen.add(text(part))
        try:
            value = float(part(under.batch).at(TOKEN).x[at])
        except Exception:  # a piece inside another one may need what only that one prepares
            value = None
        yield _step(f"inside: {type(part).__name__}", part, value, "")


def _step(name: str, piece: Any, value: float | None, inputs: str) -> FactorStep:
    doc = inspect.getdoc(type(piece)) or ""
    is_piece = isinstance(piece, Piece) or bool(getattr(piece, "__dataclass_fields__", None))
    sentence = " ".join(doc.split("\n\n")[0].replace("``", "").split())
    formula = sentence if is_piece and not doc.startswith(type(piece).__name__ + "(") else ""
    return FactorStep(name, text(piece) if piece is not None else "the environment's", formula, value, inputs)


def _peers(under: MethodFactors, k: int) -> tuple[PeerValue, ...]:
    batch, tree = under.batch, under.batch.tree
    group_of = tree.ancestor(TRAJECTORY, GROUP)
    rewards = batch.reward.sum(TRAJECTORY).x
    advantages = batch[Column.ADVANTAGE].at(TOKEN).mean(TRAJECTORY).x
    shares = Field(tree, TOKEN, under.factors.share).sum(TRAJECTORY).x
    siblings = (group_of == group_of[k]).nonzero().squeeze(1).tolist()
    return tuple(
        PeerValue(batch.trajectory_ids[i], float(rewards[i]), float(advantages[i]), float(shares[i])) for i in siblings
    )


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """The cosine of two token gradients; NaN where one of them is 0."""
    norms = float(one.norm() * other.norm())
    return float((one * other).sum()) / norms if norms > 0 else float("nan")
