"""How far tokens moved in a step, and what pushed them.

A token's push is ∂ objective / ∂ log π. Its push on its own logit is that times 1 − π: a token that is certain already cannot
rise. Tokens that were sampled after the very same ids share one distribution, so the push on a logit is known exactly as a sum
over them: push · (1 − π) from each that is the same token, −push · π from each that is another.

How far a token moved is measured (its log-probability after the step, less that before), and not only the result of these
pushes: other contexts share the weights, and the optimiser still follows earlier steps. Knows no page.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.maths.lazy_torch import torch
from turnwise.store.token_columns import TokenColumns

if TYPE_CHECKING:
    from turnwise.inspector.factors.stored_step import MethodFactors, StoredStep


@dataclass(frozen=True)
class ContextPush:
    """A token that was sampled where the chosen one was: its push, what it adds to the chosen token's logit, how far it moved."""

    trajectory: str
    token: int  # index in its trajectory
    id: int
    push: float
    on_logit: float
    moved: float  # NaN: not measured


@dataclass(frozen=True)
class Agreement:
    """Correlation of the push on a token's own logit with measured movement: of tokens, and of sums over trajectories."""

    tokens: float
    trajectories: float
    measured: int  # tokens
    same_sign: float  # share of the pushed tokens that moved the way they were pushed


def pushes(update: TokenColumns) -> np.ndarray:
    """∂ objective / ∂ log π of each token, as the step applied it; positive: towards more likely."""
    return -update.columns.get("slope", np.zeros(sum(update.sizes)))


def logit_pushes(update: TokenColumns) -> np.ndarray:
    """The push of each token on its own logit."""
    logp = update.columns.get("logp", np.full(sum(update.sizes), -np.inf))
    return pushes(update) * -np.expm1(np.minimum(logp, 0.0))


def movements(update: TokenColumns) -> np.ndarray:
    """Log-probability after the step less that before the update that read the token; NaN where it was not measured."""
    columns = update.columns
    return columns["after"] - columns["logp"] if "after" in columns else np.full(sum(update.sizes), np.nan)


def agreement(update: TokenColumns) -> Agreement:
    """How well pushes foretell the movement of one update's tokens; NaN where there is nothing to correlate."""
    push, moved = logit_pushes(update), movements(update)
    seen = np.isfinite(moved) & np.isfinite(push)
    owner, count = np.repeat(np.arange(len(update.sizes)), update.sizes)[seen], len(update.sizes)
    sums = [np.bincount(owner, x[seen], count)[np.unique(owner)] for x in (push, moved)]
    pushed = seen & (push != 0)
    same = float((np.sign(push[pushed]) == np.sign(moved[pushed])).mean()) if pushed.any() else float("nan")
    return Agreement(correlation(push[seen], moved[seen]), correlation(*sums), int(seen.sum()), same)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's; NaN where a side has no spread."""
    return float(np.corrcoef(one, other)[0, 1]) if len(one) > 1 and one.std() > 0 and other.std() > 0 else float("nan")


def pushes_in_context(stored: StoredStep, under: MethodFactors, trajectory: str, token: int) -> list[ContextPush]:
    """The tokens of the update that were sampled after the same ids as one token, itself first, by what they add to its logit."""
    batch, total = under.batch, under.factors.total
    owner = batch.tree.ancestor(TOKEN, TRAJECTORY)
    places = (owner == batch.trajectory_ids.index(trajectory)).nonzero().squeeze(1)
    at = int(places[token])
    moved = torch.full_like(total, torch.nan)
    if "after" in stored.update.columns:
        moved = (stored.column(batch, "after") - stored.column(batch, "logp")).x
    likely, first = float(batch["logp"].x[at].exp()), torch.searchsorted(owner, owner)
    rows = []
    for k in _same_context(batch, at):
        push = float(total[k])
        same = float(batch.token.x[k] == batch.token.x[at])
        name = batch.trajectory_ids[int(owner[k])]
        index = int(k - first[k])
        rows.append(ContextPush(name, index, int(batch.token.x[k]), push, push * (same - likely), float(moved[k])))
    return sorted(rows, key=lambda row: (row.trajectory != trajectory, -abs(row.on_logit)))


def _same_context(batch: Batch, at: int) -> list[int]:
    """Tokens whose sequence begins with the same ids as that of the token ``at`` and goes on with a sampled one."""
    s = batch.sequences
    start, ids = s.start.tolist(), s.ids
    sampled = {position: k for k, position in enumerate(s.sampled_at.tolist())}
    here = int(s.sampled_at[at])
    begin = start[int(torch.searchsorted(s.start, here, right=True)) - 1]
    length = here - begin
    same = [a for a, b in pairwise(start) if b - a > length and torch.equal(ids[a : a + length], ids[begin:here])]
    return [sampled[a + length] for a in same if a + length in sampled]
