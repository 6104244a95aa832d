"""Metrics of a credited batch, logged by every run. Computes numbers only; does not know who logs them.

credit/size/turnK        mean |A| of the tokens of turn k (the last index stands for all later turns)
credit/mean/turnK        mean A of these tokens: a slope over k means that credit leans to early or late turns
credit/mean/tools        mean A of turns that call tools;  credit/mean/no_tools  of turns that do not
credit/variance_within            share of the variance of A inside trajectories: 0 for trajectory-level credit
credit/sign_flips        share of trajectories whose mean A has another sign than R − mean R of their kind of task
groups/all_succeed         share of groups in which all have the same positive return;  groups/all_fail  no positive return
groups/distinct          distinct returns per group, on average
index_bias               mean difference between the group's return and that of its episodes with a k-th turn: the bias of a
                         baseline by turn index where the number of turns varies
calibration/auc          probability that a right trajectory was likelier (per token) than a wrong one of its group
value/explained          1 − Var(R − v)/Var(R) of a critic's values, over tokens
source/NAME/rows         where a step has trajectories of several sources (policy, guided, replay, expert, pairs): how many,
                         and their tokens, mean return and mean advantage (and |advantage|) over tokens
"""

from __future__ import annotations

from turnwise.algebra.diagnostics import SOURCES, source
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Partition
from turnwise.core.signals import Signal
from turnwise.maths.lazy_torch import torch, without_gradient

TURNS = 4  # turn indices reported separately; the last stands for all later ones


@without_gradient
def measure_credit(batch: Batch) -> dict[str, float]:
    """All metrics of a credited batch."""
    if not batch.tree.count(TOKEN):
        return {}
    adv = batch[Column.ADVANTAGE].at(TOKEN).to(torch.float64)
    outcome = batch.reward.sum(TRAJECTORY).to(torch.float64)
    metrics = _by_turn(batch, adv) | _groups(outcome) | _by_source(batch, adv, outcome)
    called = (batch.tool_calls > 0).at(TOKEN).x
    parts = {"tools": adv.x[called], "no_tools": adv.x[~called]}
    metrics |= {f"credit/mean/{name}": float(x.mean()) for name, x in parts.items() if x.numel()}
    whole = float(((adv - adv.mean(BATCH)) ** 2).mean(BATCH).item)
    inside = float(((adv - adv.mean(TRAJECTORY)) ** 2).mean(BATCH).item)
    metrics["credit/variance_within"] = inside / whole if whole > 1e-18 else 0.0
    # the baseline is the mean return of all trajectories of one kind of task in the batch
    kind = Partition.by(batch.tree, TRAJECTORY, batch.domain)
    centred, credited = (outcome - outcome.mean(kind)).x, adv.mean(TRAJECTORY).x
    decided = (centred.abs() > 1e-9) & (credited.abs() > 1e-9)
    flips = (centred.sign() != credited.sign())[decided].double()
    metrics["credit/sign_flips"] = float(flips.mean()) if bool(decided.any()) else 0.0
    metrics["index_bias"] = index_bias(batch, outcome)
    for name, signal in (("rank", Signal.EFFECTIVE_RANK), ("rank/speed", Signal.EFFECTIVE_RANK_VELOCITY)):
        if signal in batch.columns:
            metrics[f"hidden/{name}"] = float(batch[signal].mean(BATCH).item)
    if Signal.OLD_VALUE in batch.columns:
        metrics["value/explained"] = _explained(batch[Signal.OLD_VALUE].to(torch.float64), outcome)
    auc = calibration_auc(batch)
    return metrics if auc is None else metrics | {"calibration/auc": auc}


def _by_turn(batch: Batch, adv: Field) -> dict[str, float]:
    index = batch.tree.index(TURN, TRAJECTORY).at(TOKEN).x.clamp(max=TURNS - 1)
    count = torch.bincount(index, minlength=TURNS)
    size = torch.zeros(TURNS, dtype=torch.float64, device=index.device).index_add(0, index, adv.x.abs())
    mean = torch.zeros(TURNS, dtype=torch.float64, device=index.device).index_add(0, index, adv.x)
    metrics: dict[str, float] = {}
    for k, (n, a, b) in enumerate(zip(count.tolist(), size.tolist(), mean.tolist())):
        if n:
            label = f"turn{k}" + ("+" if k == TURNS - 1 else "")
            metrics |= {f"credit/size/{label}": a / n, f"credit/mean/{label}": b / n}
    return metrics


def _by_source(batch: Batch, adv: Field, outcome: Field) -> dict[str, float]:
    """Per source; nothing where all trajectories are the policy's, because the other metrics already cover them."""
    sources = source(batch)
    present = [(i, name) for i, name in enumerate(SOURCES) if bool((sources.x == i).any())]
    if present == [(0, "policy")]:
        return {}
    metrics: dict[str, float] = {}
    for i, name in present:
        rows, tokens = sources.x == i, sources.at(TOKEN).x == i
        own_adv = adv.x[tokens] if bool(tokens.any()) else adv.x.new_zeros(1)
        values = {"rows": rows.sum(), "tokens": tokens.sum(), "reward": outcome.x[rows].mean()}
        values |= {"advantage": own_adv.mean(), "advantage/size": own_adv.abs().mean()}
        metrics |= {f"source/{name}/{key}": float(value) for key, value in values.items()}
    return metrics


def _groups(outcome: Field) -> dict[str, float]:
    low, high = outcome.min(GROUP).x, outcome.max(GROUP).x
    flat = high - low <= 1e-9
    codes = torch.unique(outcome.x, return_inverse=True)[1]
    distinct = Partition.by(outcome.tree, TRAJECTORY, outcome.tree.parents[2], codes)
    return {
        "groups/all_succeed": float((flat & (low > 0)).double().mean()),
        "groups/all_fail": float((flat & (low <= 0)).double().mean()),
        "groups/distinct": distinct.count / max(1, outcome.tree.count(GROUP)),
    }


def index_bias(batch: Batch, outcome: Field) -> float:
    """Mean |mean return of the group's episodes that have a k-th turn − mean return of the group| over all turns."""
    peers = batch.same("index")
    spread = outcome.at(TURN)
    return float((spread.mean(peers) - outcome.mean(GROUP).at(TURN)).abs().mean(BATCH).item)


def _explained(value: Field, outcome: Field) -> float:
    target = outcome.at(TOKEN)
    error, whole = (target - value), target - target.mean(BATCH)
    spread = float((whole**2).mean(BATCH).item)
    return 1 - float(((error - error.mean(BATCH)) ** 2).mean(BATCH).item) / spread if spread > 1e-12 else 0.0


def calibration_auc(batch: Batch) -> float | None:
    """P(a right trajectory has a larger mean log-probability than a wrong one of its group); ties count half.

    By ranks inside the group (Mann-Whitney), so no pair is formed. None where no group has both kinds."""
    tree, right = batch.tree, batch.success > 0.5
    score = batch.behaviour.to(torch.float64).mean(TRAJECTORY)
    eligible = ~torch.isnan(batch.success.x) & (tree.size(TOKEN, TRAJECTORY).x > 0) & ~batch.expert.x
    ids = eligible.nonzero().squeeze(1)
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
    new_value = torch.ones(len(order), dtype=torch.bool, device=value.device)
    new_value[1:] = (g[1:] != g[:-1]) | (v[1:] != v[:-1])
    tie = new_value.long().cumsum(0) - 1
    size = torch.bincount(tie).double()
    mean = torch.zeros_like(size).index_add(0, tie, place) / size
    rank = torch.empty_like(place)
    rank[order] = mean[tie] - begin.double() + 1
    return rank
