"""Oracles of methods that choose what is trained on, from their cards. Slow: every subset and every token is looked at.

"At random" means: in ascending order of the lot, as everywhere in the oracles.
"""

from __future__ import annotations

import math

import torch

from .objectives import bounded, constant, smaller, spread
from .records import Batch, Token, Trajectory, sampled, trajectories
from .result import Result
from .trust import clipped, log_ratio, mismatch, proximal_log_ratio, zscore


def variance(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((x - mean) ** 2 for x in values) / len(values)


def best_subset(values: list[float], lots: list[float], count: int) -> set[int]:
    """Card: "choose S, |S|=N, maximising Var(A over S). The optimum is some number k of the largest advantages plus N-k of the
    smallest, so sort once and scan k=0..N". Equal values in the order of their lots; of equal variances the largest k."""
    order = sorted(range(len(values)), key=lambda i: (round(values[i], 6), lots[i]))
    found: set[int] = set()
    best = -1.0
    for k in range(count + 1):
        chosen = order[: count - k] + order[len(order) - k :]
        spread_of = round(variance([round(values[i], 6) for i in chosen]), 6)
        if spread_of >= best:
            found, best = set(chosen), spread_of
    return found


def averaged(rows: list[tuple[Trajectory, list[tuple[Token, torch.Tensor]]]]) -> torch.Tensor:
    """Mean over the tokens of each trajectory that has any, then over those trajectories."""
    rows = [row for row in rows if row[1]]
    loss = constant(0.0)
    for _, costs in rows:
        for _, cost in costs:
            loss = loss + cost / len(costs) / len(rows)
    return loss


def d3s(
    batch: Batch,
    rows: float = 0.25,
    tokens: float = 0.2,
    by_group: bool = False,
    clip: float = 0.2,
) -> Result:
    credit = zscore(batch)  # Card: "Group-normalise advantages with all G rollouts (never re-normalise afterwards)"
    members = list(trajectories(batch))
    where = [g for g, group in enumerate(batch) for _ in group]
    candidates = [i for i, one in enumerate(members) if sampled(one)]
    chosen: set[int] = set()
    # Card: "across the whole batch (not per prompt)"; "Intra-group variant does this per prompt"
    for pool in {where[i] if by_group else 0 for i in candidates}:
        peers = [i for i in candidates if not by_group or where[i] == pool]
        count = max(1, round(rows * len(peers)))
        subset = best_subset([credit[i] for i in peers], [int(members[i].lot * 2**31) for i in peers], count)
        chosen |= {peers[j] for j in subset}
    # Card: "over all tokens of S pick the top K % by |A_{i,t}|·H_{i,t}"; "kept tokens <= ceil(K%·tokens)"
    inside = [(i, token) for i in sorted(chosen) for token in sampled(members[i])]
    count = math.ceil(tokens * len(inside) - 1e-9)
    ranked = sorted(inside, key=lambda x: (-round(abs(credit[x[0]]) * x[1].old_entropy, 6), x[1].lot))
    kept = {id(token) for _, token in ranked[:count]}
    table = []
    for i, one in enumerate(members):
        costs = [t for t in sampled(one) if id(t) in kept]
        table.append((one, [(t, clipped(torch.exp(log_ratio(t)), credit[i], clip, clip)) for t in costs]))
    return Result(spread(batch, credit), averaged(table), {"rows": chosen, "tokens": kept})


def dart(
    batch: Batch, share: float = 0.8, cap: float = 1.0, low: float = 0.2, high: float = 0.28, beta: float = 0.1
) -> Result:
    credit = zscore(batch)
    kept: set[int] = set()
    for group in batch:
        # Card: "step entropy = mean token entropy"; "keep the top 80% of steps per task group"
        turns = [turn for one in group for turn in one.turns if turn.tokens]
        turns.sort(key=lambda turn: -math.fsum(t.old_entropy for t in turn.tokens) / len(turn.tokens))
        kept |= {id(t) for turn in turns[: math.ceil(share * len(turns) - 1e-9)] for t in turn.tokens}
    table = []
    for one, advantage in zip(trajectories(batch), credit):
        costs = []
        for token in sampled(one):
            if id(token) not in kept:
                continue
            # Card: "clipped surrogate on selected steps times w = min(pi_old,train/pi_rollout, C) per token, + KL to reference"
            weight = min(math.exp(mismatch(token)), cap)
            policy = weight * clipped(torch.exp(proximal_log_ratio(token)), advantage, low, high)
            x = bounded(token.reference - token.logp, -20.0, 20.0)
            costs.append((token, policy + beta * smaller(torch.exp(x) - x - 1, constant(10.0))))
        table.append((one, costs))
    return Result(spread(batch, credit), averaged(table))


def swarm(batch: Batch, clip: float = 0.2) -> Result:
    """Card: "computes log-probs under its own policy as if it had generated them (ratio starts at 1); GRPO update, no KL"."""
    credit = zscore(batch)
    table = []
    for one, advantage in zip(trajectories(batch), credit):
        ratio = proximal_log_ratio if one.facts.get("origin") == "replay" else log_ratio
        table.append((one, [(t, clipped(torch.exp(ratio(t)), advantage, clip, clip)) for t in sampled(one)]))
    return Result(spread(batch, credit), averaged(table))
