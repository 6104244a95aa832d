"""What every run logs of an update: sums over micro-batches, turned into numbers for people when the step is over."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from turnwise.algebra.piece import Now
from turnwise.algebra.ratio import behaviour
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.signals import Signal
from turnwise.maths.divergences import k1, k2, k3

LEVELS = {"token": TOKEN, "turn": TURN, "trajectory": TRAJECTORY}
TURNS = 4  # turn indices shown one by one; the last stands for all later ones
PRIVATE = "_"  # sums that only serve others
SOURCES = ("policy", "guided", "replay", "expert", "pairs")
DOUBLE = 0.69315  # log 2


@torch.no_grad()
def sums(now: Now, rho: Field, gated: Field, adv: Field, pull: Field) -> dict[str, Tensor]:
    """Additive statistics of one micro-batch. ``pull``: what multiplies each token's ∇ log π in the gradient."""
    share = now.batch["share"].to(now.logp.x.dtype)
    total = lambda x: (share * x.to(share.x.dtype)).at(TOKEN).x.sum()  # noqa: E731
    moved = (now.logp.detach() - behaviour(now.batch)).clamp(-20.0, 20.0)
    clipped = (gated.detach().at(TOKEN) - rho.detach().at(TOKEN)).abs() > 0
    out = {
        "clip_share": total(clipped),
        "clip_share/up": total(clipped & (adv > 0)),
        "clip_share/down": total(clipped & (adv < 0)),
        "ratio": total(rho.detach()),
        "advantage/size": total(adv.abs()),
        "kl/behaviour": total((-moved).map(k3)),
        "kl/behaviour/k1": total((-moved).map(k1)),
        "kl/behaviour/k2": total((-moved).map(k2)),
        "mismatch/size": total(moved.abs()),
        "_adv": total(adv),
        "_logp": total(now.logp.detach()),
        "_adv_logp": total(adv * now.logp.detach()),
    }
    if Signal.ENTROPY in now.policy:
        out["entropy"] = total(now[Signal.ENTROPY].detach())
    if "fresh" in now.batch.columns:
        out |= _probed(now)
    return out | _tails(moved) | _by_turn(now, clipped, pull) | _by_outcome(now, pull)


def _probed(now: Now) -> dict[str, Tensor]:
    """How far the sampler's log-probabilities of ``fresh`` tokens are from the learner's."""
    fresh = now.batch["fresh"].x
    gap = (now.logp.detach() - behaviour(now.batch).to(now.logp.x.dtype)).x.abs()
    return {"_probe/gap": torch.where(fresh, gap, 0.0).double().sum(), "_probe/tokens": fresh.double().sum()}


def _tails(moved: Field) -> dict[str, Tensor]:
    """How far the ratio's tails reach, and the sums behind the effective sample size, at each level."""
    out: dict[str, Tensor] = {}
    for name, level in LEVELS.items():
        some = moved.tree.size(TOKEN, level).x > 0  # no rows are picked out: a GPU would have to say how many
        log = moved.sum(level).x.double()
        weight = log.clamp(-20.0, 20.0).exp() * some
        out |= {
            f"_w/{name}": weight.sum(),
            f"_w2/{name}": (weight**2).sum(),
            f"_n/{name}": some.double().sum(),
        }
        out[f"_over/{name}"] = (log > DOUBLE).double().sum()
        out[f"_under/{name}"] = (log < -DOUBLE).double().sum()
    return out


def _by_turn(now: Now, clipped: Field, pull: Field) -> dict[str, Tensor]:
    index = now.batch.tree.index(TURN, TRAJECTORY).at(TOKEN).x.clamp(max=TURNS - 1)
    out: dict[str, Tensor] = {}
    size = pull.x.abs()
    for k in range(TURNS):
        here = index == k
        out |= {f"_tokens/turn{k}": here.sum(), f"_clipped/turn{k}": (clipped.x & here).sum()}
        out[f"_pull/turn{k}"] = (size * here).sum()
    return out


def _by_outcome(now: Now, pull: Field) -> dict[str, Tensor]:
    good = (now.batch.reward.sum(TRAJECTORY) > 0).at(TOKEN).x
    size = pull.x.abs()
    return {"_pull/good": (size * good).sum(), "_pull/bad": (size * ~good).sum()}


def source(batch: Batch) -> Field:
    """Whose rows these are, as places in ``SOURCES``: sampled for this step, sampled with help, stored, shown, or shown as one
    side of a pair. At TRAJECTORY."""
    places = batch.guided.to(torch.int64)
    chosen = batch.facts.get("chosen")
    paired = torch.zeros_like(batch.expert.x) if chosen is None else ~chosen.x.isnan()
    shown = 3 + paired.long()
    x = torch.where(batch.expert.x, shown, torch.where(batch.replayed.x, 2, places.x))
    return Field(batch.tree, TRAJECTORY, x)


@torch.no_grad()
def by_source(now: Now, rho: Field, gated: Field, pull: Field) -> dict[str, Tensor]:
    """Sums over the tokens of each source. ``pull``: ∂ objective / ∂ log π, penalties included."""
    where, ratio = source(now.batch).at(TOKEN).x, rho.detach().at(TOKEN).x
    columns = {
        "tokens": torch.ones_like(ratio),
        "ratio": ratio,
        "over_2": (ratio > 2).to(ratio.dtype),
        "clipped": ((gated.detach().at(TOKEN).x - ratio).abs() > 0).to(ratio.dtype),
        "gradient_share": pull.x.abs(),
        "logp": now.logp.x.detach(),
    }
    if Signal.ENTROPY in now.policy:
        columns["entropy"] = now[Signal.ENTROPY].x.detach()
    if Signal.TEACHER in now.batch.columns:
        columns["teacher"] = now[Signal.TEACHER].x
    total = lambda x: x.new_zeros(len(SOURCES), dtype=torch.float64).index_add(0, where, x.double())  # noqa: E731
    summed = {name: total(x) for name, x in columns.items()}
    return {f"_source/{source}/{name}": n for name, x in summed.items() for source, n in zip(SOURCES, x.unbind())}


def _finish_sources(found: Mapping[str, float]) -> dict[str, float]:
    """Means over the tokens of each source, and its share of the gradient; nothing where there is only the policy."""
    mine = [name for name in SOURCES if found.get(f"_source/{name}/tokens")]
    if mine in ([], ["policy"]):
        return {}
    whole = max(1e-30, sum(found[f"_source/{name}/gradient_share"] for name in mine))
    out: dict[str, float] = {}
    for name in mine:
        head = f"_source/{name}/"
        told = {key.removeprefix(head): value for key, value in found.items() if key.startswith(head)}
        tokens = told.pop("tokens")
        out |= {
            f"source/{name}/{key}": value / (whole if key == "gradient_share" else tokens)
            for key, value in told.items()
        }
    return out


def finish(found: Mapping[str, float]) -> dict[str, float]:
    """The numbers for people. ESS and tails are shares of the items of a level; turn indices without tokens are left out."""
    if "_adv" not in found:
        return dict(found)
    out = {name: value for name, value in found.items() if not name.startswith(PRIVATE)}
    out["entropy/covariance"] = found["_adv_logp"] - found["_adv"] * found["_logp"]
    for name in LEVELS:
        n = max(1.0, found[f"_n/{name}"])
        out[f"ratio/ess/{name}"] = found[f"_w/{name}"] ** 2 / max(1e-30, found[f"_w2/{name}"]) / n
        out[f"ratio/over_2/{name}"] = found[f"_over/{name}"] / n
        out[f"ratio/under_half/{name}"] = found[f"_under/{name}"] / n
    whole = max(1e-30, found["_pull/good"] + found["_pull/bad"])
    out["gradient_share/good"] = found["_pull/good"] / whole
    for k in range(TURNS):
        tokens = found[f"_tokens/turn{k}"]
        if tokens:
            label = f"turn{k}" + ("+" if k == TURNS - 1 else "")
            out[f"clip_share/{label}"] = found[f"_clipped/turn{k}"] / tokens
            out[f"gradient_share/{label}"] = found[f"_pull/turn{k}"] / whole
    if "_probe/tokens" in found:
        out["probe"] = found["_probe/gap"] / found["_probe/tokens"] if found["_probe/tokens"] else math.nan
    return out | _finish_sources(found)


__all__ = ["SOURCES", "by_source", "finish", "source", "sums"]
