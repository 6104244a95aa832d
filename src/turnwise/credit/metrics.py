"""What the credit of a batch looks like: numbers every run logs, so that a method can be seen at work or failing.

credit/size/turnK        mean |A| of the tokens of the k-th turn (the last index stands for all later turns)
credit/mean/turnK        mean A there: a slope over k is credit that leans to early or late turns
credit/mean/tools        mean A of turns that call tools;  credit/mean/no_tools  of those that do not
credit/within            share of the variance of A that lies inside trajectories: 0 for trajectory-level credit
credit/sign_flips        share of trajectories whose mean A points away from R − the mean R of their kind of task
groups/all_right         share of groups in which all got the same positive reward;  groups/all_wrong  nobody got any
groups/distinct          distinct rewards in a group, on average
index_bias               how much the mean outcome of episodes long enough to have a k-th turn differs from their
                         group's: what a baseline by turn index adds to the credit where the number of turns varies
calibration/auc          chance that a right trajectory was likelier (per token) than a wrong one of its group
value/explained          1 − Var(R − v)/Var(R) of a critic's values, over tokens
source/NAME/rows         where a step has rows of several sources (policy, guided, replay, expert, pairs): how many, and
                         their tokens, mean reward and mean advantage (and |advantage|) over tokens
"""

from __future__ import annotations

import torch

from turnwise.algebra.diagnostics import SOURCES, source
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition
from turnwise.core.signals import Signal

TURNS = 4  # turn indices shown one by one; the last stands for all later ones


@torch.no_grad()
def diagnose(batch: Batch) -> dict[str, float]:
    """Of a batch that was credited."""
    if not batch.tree.count(TOKEN):
        return {}
    adv = batch["advantage"].at(TOKEN).to(torch.float64)
    outcome = batch.reward.sum(TRAJECTORY).to(torch.float64)
    found = _by_turn(batch, adv) | _by_tools(batch, adv) | _groups(outcome) | _by_source(batch, adv, outcome)
    found["credit/within"] = _within(adv)
    found["credit/sign_flips"] = _sign_flips(batch, adv, outcome)
    found["index_bias"] = index_bias(batch, outcome)
    for name, signal in (("rank", Signal.RANK), ("rank/speed", Signal.RANK_SPEED)):
        if signal in batch.columns:
            found[f"hidden/{name}"] = float(batch[signal].mean(BATCH).item)
    if Signal.OLD_VALUE in batch.columns:
        found["value/explained"] = _explained(batch[Signal.OLD_VALUE].to(torch.float64), outcome)
    auc = calibration(batch)
    return found if auc is None else found | {"calibration/auc": auc}


def _by_turn(batch: Batch, adv: Field) -> dict[str, float]:
    index = batch.tree.index(TURN, TRAJECTORY).at(TOKEN).x.clamp(max=TURNS - 1)
    count = torch.bincount(index, minlength=TURNS)
    size = torch.zeros(TURNS, dtype=torch.float64, device=index.device).index_add(0, index, adv.x.abs())
    mean = torch.zeros(TURNS, dtype=torch.float64, device=index.device).index_add(0, index, adv.x)
    out: dict[str, float] = {}
    for k, (n, a, b) in enumerate(zip(count.tolist(), size.tolist(), mean.tolist())):
        if n:
            label = f"turn{k}" + ("+" if k == TURNS - 1 else "")
            out |= {f"credit/size/{label}": a / n, f"credit/mean/{label}": b / n}
    return out


def _by_tools(batch: Batch, adv: Field) -> dict[str, float]:
    called = (batch.tool_calls > 0).at(TOKEN).x
    parts = {"tools": adv.x[called], "no_tools": adv.x[~called]}
    return {f"credit/mean/{name}": float(x.mean()) for name, x in parts.items() if x.numel()}


def _by_source(batch: Batch, adv: Field, outcome: Field) -> dict[str, float]:
    """Nothing where there is only the policy: the other numbers say it all."""
    whose = source(batch)
    mine = [(i, name) for i, name in enumerate(SOURCES) if bool((whose.x == i).any())]
    if mine == [(0, "policy")]:
        return {}
    out: dict[str, float] = {}
    for i, name in mine:
        rows, tokens = whose.x == i, whose.at(TOKEN).x == i
        own = adv.x[tokens] if bool(tokens.any()) else adv.x.new_zeros(1)
        told = {"rows": rows.sum(), "tokens": tokens.sum(), "reward": outcome.x[rows].mean()}
        told |= {"advantage": own.mean(), "advantage/size": own.abs().mean()}
        out |= {f"source/{name}/{key}": float(value) for key, value in told.items()}
    return out


def _groups(outcome: Field) -> dict[str, float]:
    low, high = outcome.min(GROUP).x, outcome.max(GROUP).x
    flat = high - low <= 1e-9
    same = Partition.by(outcome.tree, TRAJECTORY, outcome.tree.parents[2], _rank(outcome))
    return {
        "groups/all_right": float((flat & (low > 0)).double().mean()),
        "groups/all_wrong": float((flat & (low <= 0)).double().mean()),
        "groups/distinct": same.count / max(1, outcome.tree.count(GROUP)),
    }


def _rank(x: Field) -> Field:
    """Equal values get equal numbers."""
    return Field(x.tree, x.level, torch.unique(x.x, return_inverse=True)[1])


def _within(adv: Field) -> float:
    whole = float(((adv - adv.mean(BATCH)) ** 2).mean(BATCH).item)
    inside = float(((adv - adv.mean(TRAJECTORY)) ** 2).mean(BATCH).item)
    return inside / whole if whole > 1e-18 else 0.0


def _sign_flips(batch: Batch, adv: Field, outcome: Field) -> float:
    """The baseline of a large sample is the mean outcome of all trajectories of one kind of task in the batch."""
    kind = Partition.by(batch.tree, TRAJECTORY, batch.domain)
    wanted, given = (outcome - outcome.mean(kind)).x, adv.mean(TRAJECTORY).x
    judged = (wanted.abs() > 1e-9) & (given.abs() > 1e-9)
    return float((wanted.sign() != given.sign())[judged].double().mean()) if bool(judged.any()) else 0.0


def index_bias(batch: Batch, outcome: Field) -> float:
    """Mean |mean outcome of the group's episodes that have a k-th turn − mean outcome of the group| over all turns."""
    peers = batch.same("index")
    spread = outcome.at(TURN)
    return float((spread.mean(peers) - outcome.mean(GROUP).at(TURN)).abs().mean(BATCH).item)


def _explained(value: Field, outcome: Field) -> float:
    target = outcome.at(TOKEN)
    error, whole = (target - value), target - target.mean(BATCH)
    spread = float((whole**2).mean(BATCH).item)
    return 1 - float(((error - error.mean(BATCH)) ** 2).mean(BATCH).item) / spread if spread > 1e-12 else 0.0


def calibration(batch: Batch) -> float | None:
    """P(a right trajectory has a larger mean log-probability than a wrong one of its group); ties count half.

    By ranks inside the group (Mann-Whitney), so no pair is formed. None where no group has both kinds."""
    tree, right = batch.tree, batch.success > 0.5
    score = batch.behaviour.to(torch.float64).mean(TRAJECTORY)
    judged = ~torch.isnan(batch.success.x) & (tree.size(TOKEN, TRAJECTORY).x > 0) & ~batch.expert.x
    ids = judged.nonzero().squeeze(1)
    if not ids.numel():
        return None
    group, value, good = tree.parents[2][ids], score.x[ids], right.x[ids]
    rank = _mean_ranks(group, value)
    n = lambda mask: value.new_zeros(tree.count(GROUP)).index_add(0, group, mask.double())  # noqa: E731
    ones, zeros = n(good), n(~good)
    total = value.new_zeros(tree.count(GROUP)).index_add(0, group, torch.where(good, rank, 0.0))
    pairs = ones * zeros
    wins = total - ones * (ones + 1) / 2
    return float(wins[pairs > 0].sum() / pairs.sum()) if float(pairs.sum()) else None


def _mean_ranks(group: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """1-based rank of each value inside its group; equal values share their mean rank."""
    order = torch.argsort(value, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    g, v = group[order], value[order]
    place = torch.arange(len(order), dtype=torch.float64, device=value.device)
    begin = torch.searchsorted(g, g)  # first place of each group
    fresh = torch.ones(len(order), dtype=torch.bool, device=value.device)
    fresh[1:] = (g[1:] != g[:-1]) | (v[1:] != v[:-1])
    tie = fresh.long().cumsum(0) - 1
    size = torch.bincount(tie).double()
    mean = torch.zeros_like(size).index_add(0, tie, place) / size
    rank = torch.empty_like(place)
    rank[order] = mean[tie] - begin.double() + 1
    return rank


__all__ = ["calibration", "diagnose", "index_bias"]
