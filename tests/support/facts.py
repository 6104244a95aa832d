"""The facts of a recipe, measured on its pieces: at which level its ratio is, what it averages over, what divides an advantage,
where its clip cuts. Probes with numbers, so any piece of any family can be read; knows no method.

``read(recipe)`` gives each fact in the words of a record, or None where the probe cannot tell: then nothing is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turnwise.algebra.aggregate import Mean, Sum
from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import KL, Weight
from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.reward import EnvironmentReward, NegativeReferenceKL
from turnwise.algebra.term import Times
from turnwise.algebra.value import Constant
from turnwise.checks.synthetic import NEAR_POLICY, random_groups, random_policy, with_policy
from turnwise.core.batch import Batch, pack
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.signals import WITH_GRADIENT, Signal, level_of
from turnwise.errors import TurnwiseError
from turnwise.recipes.provenance import ClipBounds, KLTerm
from turnwise.recipes.recipe import Recipe

LEVELS = {"token": TOKEN, "turn": TURN, "trajectory": TRAJECTORY, "group": GROUP}
RAGGED = [[[2, 3], [3, 4, 2], [2, 2]], [[3, 2], [2, 3, 2, 2]]]
STRUCTURE = {
    "forks",
    "pairs",
    "demonstrations",
    "replay",
    "fact revises",
}  # which trajectories there are: probes choose them
UNREADABLE = (TurnwiseError, KeyError, RuntimeError, AssertionError, ValueError, IndexError)


def read(recipe: Recipe) -> dict[str, Any]:
    """Each fact that can be read; None for one that cannot."""
    probes: dict[str, Callable[[Recipe], Any]] = {
        "ratio": ratio, "average": average, "kl": kl, "normaliser": normaliser, "clip": clip, "rows": rows,
        "optimiser": updates,
    }  # fmt: skip
    found = {}
    for fact, probe in probes.items():
        try:
            found[fact] = probe(recipe)
        except UNREADABLE:  # a piece that needs another batch than a probe can make
            found[fact] = None
    return found


# ------------------------------------------------------------------ batches


def probe_batch(recipe: Recipe, counts: list[list[list[int]]]) -> tuple[Batch, dict[Signal, Tensor]]:
    """A batch of this shape with what the recipe requires; policy, reference and sampler are the same, critics say 0."""
    asks = frozenset(recipe.requirements) - STRUCTURE
    batch, leaves = random_policy(pack(random_groups(counts, 1, requirements=asks)), 1)
    sampled = batch.behaviour.x.double()
    zeros = {s: torch.zeros(batch.tree.count(level_of(s)), dtype=torch.float64) for s in Signal if "value" in str(s)}
    leaves |= {Signal.LOGP: sampled} | {s: zeros[s] for s in zeros if s in WITH_GRADIENT}
    near = {s: Field(batch.tree, TOKEN, sampled) for s in NEAR_POLICY}
    batch = batch.put({**near, **{s: Field(batch.tree, level_of(s), x) for s, x in zeros.items()}})
    same = Field(batch.tree, TURN, torch.zeros(batch.tree.count(TURN), dtype=torch.int64))
    never = Field(batch.tree, TRAJECTORY, torch.zeros(batch.tree.count(TRAJECTORY), dtype=torch.bool))
    return replace(with_policy(batch, leaves), state=same, truncated=never), leaves


def gain_alone(recipe: Recipe, sign: float) -> Objective:
    """The gated gain with the same advantage everywhere, every token alike: what is left is ratio and gate."""
    return Objective(Constant(sign), recipe.ratio, recipe.gate, Mean(TOKEN))


def credited(recipe: Recipe, batch: Batch, reward: Tensor) -> Tensor:
    """The advantage of each token where the environment paid these rewards of trajectories at their ends."""
    tree = batch.tree
    last = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY) <= 1
    paid = Field(tree, TRAJECTORY, reward).at(TURN).x * last.x
    named = {name: Field(tree, TRAJECTORY, reward) for name in batch.reward_components}
    batch = replace(batch, reward=Field(tree, TURN, paid), reward_components=named,
                    success=Field(tree, TRAJECTORY, (reward > reward.mean()).double()))  # fmt: skip
    objective = Objective(recipe.advantage, recipe.ratio, recipe.gate, recipe.aggregate, reward=EnvironmentReward())
    return objective.credit(batch)["advantage"].at(TOKEN).x.double()


# ------------------------------------------------------------------- facts


def ratio(recipe: Recipe) -> str | None:
    """Which tokens' weights change with the log-probability of one token, and by how much its own does. A weight that is none for
    good outcomes (A > 0, positive rewards) may be one for bad ones."""
    found = {ratio_level(recipe, sign) for sign in (1.0, -1.0)}
    real = found - {"none"}
    return "none" if not real else real.pop() if len(real) == 1 else None


def ratio_level(recipe: Recipe, sign: float) -> str | None:
    batch, leaves = probe_batch(recipe, RAGGED)
    batch = replace(batch, reward=sign * batch.reward)
    tree, step = batch.tree, 1e-6

    def weight(at: int = 0, move: float = 0.0) -> Tensor:
        objective = gain_alone(recipe, sign)  # a new one each time: a weight may change with the number of batches
        logp = leaves[Signal.LOGP].clone()
        logp[at] += move
        moved = {**leaves, Signal.LOGP: logp}
        planned = objective.plan(objective.credit(with_policy(batch, moved)))
        view = MicroBatchView(planned, {s: Field(tree, level_of(s), x) for s, x in moved.items()})
        adv = planned["advantage"].to(torch.float64)
        return objective.gate(objective.ratio(view), adv, view).at(TOKEN).x.abs()

    base = weight()
    # a token inside a turn that is not the last: what follows it is neither its turn nor its trajectory
    last = tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY) <= 1
    inner = (tree.index(TOKEN, TURN).x >= 1) & ~last.at(TOKEN).x & (base > 0)
    at = int(inner.nonzero()[0])
    up, down = ((weight(at, s) / base).log().nan_to_num(0.0, 0.0, 0.0) / s for s in (step, -step))
    log_slope = torch.where(up.abs() > down.abs(), up, down)  # at ρ = 1 a window may be closed on one side
    changed = set((log_slope.abs() > 1e-7).nonzero().flatten().tolist())
    where = {name: tree.ancestor(TOKEN, level) for name, level in LEVELS.items() if level != TOKEN}
    inside = {name: set((x == x[at]).nonzero().flatten().tolist()) for name, x in where.items()}
    inside["batch"] = set(range(tree.count(TOKEN)))
    if not changed:
        return "none"
    if changed == {at}:
        return "token"
    if changed == {t for t in inside["trajectory"] if t >= at}:
        return "prefix"
    level = next((name for name, tokens in inside.items() if tokens == changed), None)
    return level and (f"{level} product" if log_slope[at] > 0.99 else level)


def average(recipe: Recipe) -> str | None:
    """The weights of tokens beside those of each known average; without a gain, of the loss that stands in its place."""
    losses = recipe.objective.penalties
    absent = isinstance(recipe.advantage, Constant) and not recipe.advantage.value
    if absent and len(losses) != 1:
        return "other"
    aggregate = losses[0].aggregate or recipe.aggregate if absent else recipe.aggregate
    batch, _ = probe_batch(recipe, RAGGED)
    ones = batch.tree.full(TOKEN, 1.0, torch.float64)
    weight = aggregate(ones).at(TOKEN).x
    known = {**{name: Mean(level) for name, level in LEVELS.items()},
             **{f"sum over {name}": Sum(level) for name, level in LEVELS.items() if level != TOKEN}}  # fmt: skip
    for name, aggregate in known.items():
        if torch.allclose(weight, aggregate(ones).x, rtol=1e-9):
            return name
    return "constant" if torch.allclose(weight, weight[0].expand_as(weight), rtol=1e-9) else "other"


def kl(recipe: Recipe) -> KLTerm | str | None:
    """Pieces that read the reference policy."""
    if Signal.REFERENCE not in recipe.objective.signals:
        return "none"
    active = recipe.objective.penalties
    found = [(w, p) for w in active for p in w.penalty.parts if isinstance(p, KL) and p.to == Signal.REFERENCE]
    inside = [t for root in (recipe.reward, recipe.advantage) for t in root.parts if isinstance(t, Times)]
    paid = [t.weight for t in inside if any(isinstance(p, NegativeReferenceKL) for p in t.term.parts)]
    if len(found) + len(paid) != 1:
        return "other"
    if paid:
        return KLTerm(estimator="k1", weight=paid[0], place="reward")
    ((weighted, penalty),) = found
    if isinstance(weighted.weight, Weight):
        return "other"
    return KLTerm(estimator=penalty.estimator, weight=weighted.weight, place="loss")


def slopes(recipe: Recipe, scale: list[float]) -> list[float] | None:
    """∂A/∂R inside each of three groups of one-token episodes; None where A is no line in R."""
    sizes = (4, 5, 7)
    batch, _ = probe_batch(recipe, [[[1]] * n for n in sizes])
    draw = torch.randn(sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    factor = torch.repeat_interleave(torch.tensor(scale, dtype=torch.float64), torch.tensor(sizes))
    reward = draw * factor
    found = []
    offset = credited(recipe, batch, 0 * reward)  # what other facts of the episodes add
    for a, r in zip((credited(recipe, batch, reward) - offset).split(sizes), reward.split(sizes)):
        r, a = r - r.mean(), a - a.mean()
        slope = float((a * r).sum() / (r * r).sum())
        if float((a - slope * r).abs().max()) > 1e-3 * float(a.abs().max()) + 1e-9:
            return None
        found.append(slope)
    return found


def normaliser(recipe: Recipe) -> str | None:
    """How ∂A/∂R answers when the rewards of all groups, or of one, are larger."""
    base, tripled, one = (slopes(recipe, s) for s in ([1.0] * 3, [3.0] * 3, [3.0, 1.0, 1.0]))
    if base is None or tripled is None or one is None:
        return "other"
    if not any(base):
        return None
    near = lambda a, b: abs(a - b) <= 1e-3 * abs(b)  # noqa: E731
    if all(near(t, b) for t, b in zip(tripled, base)):
        return "none"
    if not all(near(3 * t, b) for t, b in zip(tripled, base)):
        return "other"
    if not all(near(o, b) for o, b in zip(one[1:], base[1:])):
        return "batch std"
    draws = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).split((4, 5, 7))
    for name, correction in (("std", 1), ("population std", 0)):
        products = [slope * float(r.std(correction=correction)) for slope, r in zip(base, draws)]
        if all(near(p, products[0]) for p in products):
            return name
    return "other"


def rows(recipe: Recipe) -> str | None:
    """Who votes in the mean of a group: every episode once, or once for each of its turns."""
    counts = [[[2, 1, 2], [7], [1, 2], [1, 1, 2, 1, 3]], [[2, 3], [1, 2, 1, 1], [6]]]
    batch, _ = probe_batch(recipe, counts)
    unknown = -torch.ones(batch.tree.count(TURN), dtype=torch.int64)
    batch = replace(batch, state=Field(batch.tree, TURN, unknown))
    reward = torch.tensor([1.0, 0.3, -0.7, 0.1, 2.0, 1.1, 0.4], dtype=torch.float64)
    adv = Field(batch.tree, TOKEN, credited(recipe, batch, reward))
    if float((adv.max(TRAJECTORY) - adv.min(TRAJECTORY)).x.abs().max()) > 1e-9:
        return None
    zero = []
    for a, r in zip(adv.mean(TRAJECTORY).x.split((4, 3)), reward.split((4, 3))):
        slope = float(((a - a.mean()) * (r - r.mean())).sum() / ((r - r.mean()) ** 2).sum())
        if not slope:
            return None
        zero.append(float(r.mean() - a.mean() / slope))
    turns = torch.tensor([3.0, 1, 2, 5, 2, 4, 1], dtype=torch.float64)
    for name, vote in (("trajectory", torch.ones_like(turns)), ("turn", turns)):
        means = [float((r * v).sum() / v.sum()) for r, v in zip(reward.split((4, 3)), vote.split((4, 3)))]
        if all(math.isclose(z, m, abs_tol=1e-9) for z, m in zip(zero, means)):
            return name
    return None


def clip(recipe: Recipe) -> ClipBounds | str | None:
    """Where the gradient of the gain ends as the ratio of a one-token episode grows or falls, for A = 1 and A = −1."""
    high, low, dual = (edge(recipe, sign, way) for sign, way in ((1.0, 1), (-1.0, -1), (-1.0, 1)))
    if math.nan in (high, low, dual) or any(x is not None and math.isnan(x) for x in (high, low, dual)):
        return "adaptive"
    if math.inf in (high, low, dual) or edge(recipe, 1.0, -1) is not None:
        return "other"
    if high is not None and abs((edge(recipe, 1.0, 1, beside=-1.0) or 3.0) - high) > 1e-4:
        return "adaptive"  # the bound depends on which outcomes the others had
    if high is low is None:
        return "none" if dual is None else "other"
    if high is None or low is None:
        return "other"
    return ClipBounds(low=1 - math.exp(low), high=math.exp(high) - 1, dual=None if dual is None else math.exp(dual))


def updates(recipe: Recipe) -> int:
    """Optimiser steps that a batch is used for."""
    batch, _ = probe_batch(recipe, [[[1]] * 4] * 64)
    batch = gain_alone(recipe, 1.0).credit(batch)

    def measure(part: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        return {signal: part[signal] for signal in signals}

    return len(list(recipe.control.optimizer_steps(batch, 0, measure)))


def edge(recipe: Recipe, sign: float, way: int, beside: float | None = None) -> float | None:
    """The log-ratio at which the gradient ends on one side; None: nowhere; NaN: it depends on the other tokens; inf: it begins
    again farther out. ``beside``: the advantage of as many other episodes."""
    zeros = torch.zeros(401, dtype=torch.float64)
    alive = slope_at(recipe, sign, zeros, beside) != 0  # a mask may close tokens whatever their ratio
    if not alive.any():
        raise ValueError("no gradient at any ratio: a mask is closed")
    begin, end = 0.0, way * 3.0  # a ratio of 20: beyond it a soft gate ends by rounding
    for _ in range(3):
        grid = torch.linspace(begin, end, 401, dtype=torch.float64)
        slope = slope_at(recipe, sign, grid, beside)[alive]
        grid, dead = grid[alive], (slope == 0).nonzero().flatten().tolist()
        if not dead:
            return None if abs(end) == 3.0 else math.nan
        first, last = dead[0], dead[-1]
        if first == 0 or len(dead) != last - first + 1:
            return math.nan
        if last < len(grid) - 1:
            return math.inf
        begin, end = float(grid[first - 1]), float(grid[first])
    return (begin + end) / 2


def slope_at(recipe: Recipe, sign: float, log_ratio: Tensor, beside: float | None = None) -> Tensor:
    """∂ gain / ∂ log π of one-token episodes with these log-ratios, and of none of those with another advantage beside them."""
    count = len(log_ratio)
    log_ratio = log_ratio if beside is None else torch.cat([log_ratio, log_ratio])
    batch, leaves = probe_batch(recipe, [[[1]]] * len(log_ratio))
    logp = (batch.behaviour.x.double() + log_ratio).requires_grad_()
    leaves = {**leaves, Signal.LOGP: logp}
    objective = gain_alone(recipe, sign)
    credited_batch = objective.credit(with_policy(batch, leaves))
    if beside is not None:
        each = torch.tensor([sign] * count + [beside] * count, dtype=torch.float64)
        credited_batch = credited_batch.put(advantage=Field(batch.tree, TRAJECTORY, each))
    planned = objective.plan(credited_batch)
    policy = {s: Field(batch.tree, level_of(s), x) for s, x in leaves.items() if s in objective.signals_with_gradient}
    (slope,) = torch.autograd.grad(objective(planned, policy).loss, [logp])
    return slope[:count]
