"""Metrics of every update: sums over micro-batches, turned into means and shares when the step is over.

A name that begins with "_" is an intermediate sum and is not logged. This module does not know penalties or trackers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from turnwise.algebra.piece import MicroBatchView
from turnwise.algebra.ratio import behaviour
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.signals import Signal
from turnwise.maths.divergences import k1, k2, k3
from turnwise.maths.lazy_torch import torch, without_gradient

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = {"token": TOKEN, "turn": TURN, "trajectory": TRAJECTORY}
TURNS = 4  # turn indices with their own metrics; the last one includes all later turns
INTERMEDIATE = "_"  # prefix of sums that are not logged themselves
SOURCES = ("policy", "guided", "replay", "expert", "pairs")
LOG_2 = 0.69315


@without_gradient
def cut(rho: Field, gated: Field, adv: Field, slope: Field) -> Field:
    """The tokens whose gradient the gate stops. One that only bends the ratio (a soft gate, a capped weight) still passes it."""
    changed = (gated.detach().at(TOKEN) - rho.detach().at(TOKEN)).abs() > 0
    return changed & (adv.at(TOKEN).abs() > 0) & slope.map(lambda x: x == 0)


@without_gradient
def sums(view: MicroBatchView, rho: Field, clipped: Field, adv: Field, slope: Field) -> dict[str, Tensor]:
    """Additive statistics of one micro-batch. ``clipped``: see ``cut``; ``slope``: ∂ objective / ∂ log π, without penalties."""
    share = view.batch[Column.TOKEN_SHARE].to(view.logp.x.dtype)
    total = lambda x: (share * x.to(share.x.dtype)).at(TOKEN).x.sum()  # noqa: E731
    moved = (view.logp.detach() - behaviour(view.batch)).clamp(-20.0, 20.0)
    out = {
        "clip_share": total(clipped),
        "clip_share/up": total(clipped & (adv > 0)),
        "clip_share/down": total(clipped & (adv < 0)),
        "ratio": total(rho.detach()),
        "advantage/size": total(adv.abs()),
        "kl/behaviour": total(moved.map(k3)),  # tokens are the sampler's: KL(sampler ‖ learner)
        "kl/behaviour/k1": total(moved.map(k1)),
        "kl/behaviour/k2": total(moved.map(k2)),
        "mismatch/mean_abs": total(moved.abs()),
        "_adv": total(adv),
        "_logp": total(view.logp.detach()),
        "_adv_logp": total(adv * view.logp.detach()),
    }
    if Signal.ENTROPY in view.policy:
        out["entropy"] = total(view[Signal.ENTROPY].detach())
    if Column.CURRENT_VERSION in view.batch.columns:
        # tokens that the present weights sampled: here sampler and learner must agree
        current = view.batch[Column.CURRENT_VERSION].x
        gap = (view.logp.detach() - behaviour(view.batch).to(view.logp.x.dtype)).x.abs()
        out["_policy_check/gap"] = torch.where(current, gap, 0.0).double().sum()
        out["_policy_check/tokens"] = current.double().sum()
    good, size = (view.batch.reward.sum(TRAJECTORY) > 0).at(TOKEN).x, slope.x.abs()
    out |= {"_slope/good": (size * good).sum(), "_slope/bad": (size * ~good).sum()}
    return out | _tails(moved) | _by_turn(view, clipped, slope)


def _tails(moved: Field) -> dict[str, Tensor]:
    """Tail counts of the ratio, and the sums for the effective sample size, at each level."""
    out: dict[str, Tensor] = {}
    for name, level in LEVELS.items():
        has_tokens = moved.tree.size(TOKEN, level).x > 0  # multiply instead of indexing: no GPU synchronisation
        log = moved.sum(level).x.double()
        weight = log.clamp(-20.0, 20.0).exp() * has_tokens
        out |= {f"_w/{name}": weight.sum(), f"_w2/{name}": (weight**2).sum(), f"_n/{name}": has_tokens.double().sum()}
        out[f"_over/{name}"] = (log > LOG_2).double().sum()
        out[f"_under/{name}"] = (log < -LOG_2).double().sum()
    return out


def _by_turn(view: MicroBatchView, clipped: Field, slope: Field) -> dict[str, Tensor]:
    index = view.batch.tree.index(TURN, TRAJECTORY).at(TOKEN).x.clamp(max=TURNS - 1)
    out: dict[str, Tensor] = {}
    size = slope.x.abs()
    for k in range(TURNS):
        here = index == k
        out |= {f"_tokens/turn{k}": here.sum(), f"_clipped/turn{k}": (clipped.x & here).sum()}
        out[f"_slope/turn{k}"] = (size * here).sum()
    return out


def source(batch: Batch) -> Field:
    """The origin of each trajectory as an index into ``SOURCES``: sampled for this step, sampled with guidance, replayed,
    demonstrated, or one side of a preference pair. At TRAJECTORY."""
    sampled = batch.guided.to(torch.int64)
    chosen = batch.facts.get("chosen")
    paired = torch.zeros_like(batch.expert.x) if chosen is None else ~chosen.x.isnan()
    demonstrated = 3 + paired.long()
    x = torch.where(batch.expert.x, demonstrated, torch.where(batch.replayed.x, 2, sampled.x))
    return Field(batch.tree, TRAJECTORY, x)


@without_gradient
def by_source(view: MicroBatchView, rho: Field, clipped: Field, slope: Field) -> dict[str, Tensor]:
    """Sums over the tokens of each source. ``slope``: ∂ objective / ∂ log π, penalties included."""
    label, ratio = source(view.batch).at(TOKEN).x, rho.detach().at(TOKEN).x
    columns = {
        "tokens": torch.ones_like(ratio),
        "ratio": ratio,
        "over_2": (ratio > 2).to(ratio.dtype),
        "clipped": clipped.x.to(ratio.dtype),
        "gradient_share": slope.x.abs(),
        "logp": view.logp.x.detach(),
    }
    if Signal.ENTROPY in view.policy:
        columns["entropy"] = view[Signal.ENTROPY].x.detach()
    if Signal.TEACHER in view.batch.columns:
        columns["teacher"] = view[Signal.TEACHER].x
    total = lambda x: x.new_zeros(len(SOURCES), dtype=torch.float64).index_add(0, label, x.double())  # noqa: E731
    summed = {name: total(x) for name, x in columns.items()}
    return {f"_source/{source}/{name}": n for name, x in summed.items() for source, n in zip(SOURCES, x.unbind())}


def _finish_sources(sums: Mapping[str, float]) -> dict[str, float]:
    """Means over the tokens of each source, and its share of the gradient; empty where all rows are the policy's."""
    present = [name for name in SOURCES if sums.get(f"_source/{name}/tokens")]
    if present in ([], ["policy"]):
        return {}
    total = max(1e-30, sum(sums[f"_source/{name}/gradient_share"] for name in present))
    out: dict[str, float] = {}
    for name in present:
        head = f"_source/{name}/"
        of_source = {key.removeprefix(head): value for key, value in sums.items() if key.startswith(head)}
        tokens = of_source.pop("tokens")
        out |= {
            f"source/{name}/{key}": value / (total if key == "gradient_share" else tokens)
            for key, value in of_source.items()
        }
    return out


def finish(sums: Mapping[str, float]) -> dict[str, float]:
    """The logged metrics. ESS and tails are shares of the items of a level; turn indices without tokens are left out."""
    if "_adv" not in sums:
        return dict(sums)
    out = {name: value for name, value in sums.items() if not name.startswith(INTERMEDIATE)}
    out["entropy/covariance"] = sums["_adv_logp"] - sums["_adv"] * sums["_logp"]
    for name in LEVELS:
        n = max(1.0, sums[f"_n/{name}"])
        out[f"ratio/ess/{name}"] = sums[f"_w/{name}"] ** 2 / max(1e-30, sums[f"_w2/{name}"]) / n
        out[f"ratio/over_2/{name}"] = sums[f"_over/{name}"] / n
        out[f"ratio/under_half/{name}"] = sums[f"_under/{name}"] / n
    total = max(1e-30, sums["_slope/good"] + sums["_slope/bad"])
    out["gradient_share/positive_advantage"] = sums["_slope/good"] / total
    for k in range(TURNS):
        tokens = sums[f"_tokens/turn{k}"]
        if tokens:
            label = f"turn{k}" + ("+" if k == TURNS - 1 else "")
            out[f"clip_share/{label}"] = sums[f"_clipped/turn{k}"] / tokens
            out[f"gradient_share/{label}"] = sums[f"_slope/turn{k}"] / total
    if "_policy_check/tokens" in sums:
        tokens = sums["_policy_check/tokens"]
        out["policy_check"] = sums["_policy_check/gap"] / tokens if tokens else math.nan
    return out | _finish_sources(sums)
