"""Oracles of methods that choose what is trained on, from their cards. Slow: every subset and every token is looked at.

"At random" means: in ascending order of the lot, as everywhere in the oracles.
"""

from __future__ import annotations

import math

import torch

from .objectives import bounded, constant, smaller, spread
from .records import Batch, Token, Trajectory, sampled, total, trajectories
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
    batch: Batch, share: float = 0.8, cap: float = 1.0, low: float = 0.1, high: float = 0.28, beta: float = 0.1
) -> Result:
    """The released script: a row is a turn, carries the episode's return and votes; one ratio for each turn, whose value is the
    geometric mean and whose gradient is each token's own; mean over rows of the mean over their tokens."""
    kept: set[int] = set()
    for group in batch:
        # Card: "step entropy = mean token entropy"; "keep the top 80% of steps per task group"
        turns = [turn for one in group for turn in one.turns if turn.tokens]
        turns.sort(key=lambda turn: -math.fsum(t.old_entropy for t in turn.tokens) / len(turn.tokens))
        kept |= {id(t) for turn in turns[: math.ceil(share * len(turns) - 1e-9)] for t in turn.tokens}
    advantages: list[float] = []
    loss = constant(0.0)
    used = sum(1 for one in trajectories(batch) for turn in one.turns if turn.tokens and id(turn.tokens[0]) in kept)
    for group in batch:
        votes = [total(one) for one in group for _ in one.turns]
        n = len(votes)
        mean = math.fsum(votes) / n if n else 0.0
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in votes) / (n - 1)) if n > 1 else 0.0
        for one in group:
            advantage = (total(one) - mean) / (std + 1e-6) if n > 1 else 0.0
            advantages.extend(advantage for _ in sampled(one))
            for turn in one.turns:
                if not turn.tokens or id(turn.tokens[0]) not in kept:
                    continue
                level = math.fsum(proximal_log_ratio(token).item() for token in turn.tokens) / len(turn.tokens)
                for token in turn.tokens:
                    # log s = sg[level] + log pi - sg[log pi], at most 10
                    ratio = torch.exp(token.logp - token.logp.item() + level) if level <= 10 else constant(math.exp(10))
                    weight = min(math.exp(mismatch(token)), cap)
                    policy = weight * clipped(ratio, advantage, low, high)
                    x = bounded(token.reference - token.logp, -20.0, 20.0)
                    cost = policy + beta * smaller(torch.exp(x) - x - 1, constant(10.0))
                    loss = loss + cost / len(turn.tokens) / used
    return Result(advantages, loss)


def swarm(batch: Batch, clip: float = 0.2, high: float = 0.28) -> Result:
    """Card: "computes log-probs under its own policy as if it had generated them (ratio starts at 1); GRPO update, no KL"."""
    credit = zscore(batch)
    table = []
    for one, advantage in zip(trajectories(batch), credit):
        ratio = proximal_log_ratio if one.facts.get("origin") == "replay" else log_ratio
        table.append((one, [(t, clipped(torch.exp(ratio(t)), advantage, clip, high)) for t in sampled(one)]))
    # released code: (loss · mask).sum() / mask.sum()
    costs = [cost for _, row in table for _, cost in row]
    return Result(spread(batch, credit), sum(costs, constant(0.0)) / len(costs))


def oapl(batch: Batch, value: float = 1.0, beta: float = 1e-3) -> Result:
    credit = []
    for group in batch:
        # Card: "V(x)=beta1·ln(mean_i exp(r_i/beta1)); A_i=r_i-V"
        rewards = [total(one) for one in group]
        top = max(rewards)
        soft = top + value * math.log(math.fsum(math.exp((r - top) / value) for r in rewards) / len(rewards))
        credit.extend(r - soft for r in rewards)
    rows = [(one, a) for one, a in zip(trajectories(batch), credit) if sampled(one)]
    loss = constant(0.0)
    for one, advantage in rows:
        # Card: "loss mean_i (beta2·(log pi_theta(y_i|x) - log pi_k(y_i|x)) - A_i)^2, sequence log-probs summed"
        moved = constant(0.0)
        for token in sampled(one):
            moved = moved + log_ratio(token)
        loss = loss + (beta * moved - advantage) ** 2 / len(rows)
    return Result(spread(batch, credit), loss)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def digirl(
    batch: Batch, gamma: float = 0.5, cost: float = 0.05, share: float = 0.1, value_weight: float = 1.0
) -> Result:
    """House: a step is a turn with tokens, its value the sigmoid of the estimate before its first token; after the last one the
    label that the released critic learns there, whether the last reward is positive."""
    members = [one for one in trajectories(batch) if sampled(one)]
    # Card: "score trajectories by R - V_ins(task), keep the top 10 %"
    ranked = sorted(
        members, key=lambda one: (-round(total(one) - sigmoid(sampled(one)[0].old_value), 6), int(one.lot * 2**31))
    )
    kept = {id(one) for one in ranked[: math.ceil(share * len(members) - 1e-9)]}
    steps = [turn for one in trajectories(batch) for turn in one.turns if turn.tokens]
    chosen = sum(1 for one in trajectories(batch) for turn in one.turns if turn.tokens and id(one) in kept)
    advantages: list[float] = []
    loss = constant(0.0)
    for one in trajectories(batch):
        for k, turn in enumerate(one.turns):
            if not turn.tokens:
                continue
            later = [other for other in one.turns[k + 1 :] if other.tokens]
            after = sigmoid(later[0].tokens[0].old_value) if later else float(one.turns[-1].reward > 0)
            returned = math.fsum(gamma**j * other.reward for j, other in enumerate(one.turns[k:]))
            # Card: "Released form: A = V(o') - V(o) - 0.05 + r + R_MC ... then binarise (A>0 -> 1)"
            good = after - sigmoid(turn.tokens[0].old_value) - cost + turn.reward + returned > 0
            advantages.extend(float(good) for _ in turn.tokens)
            for token in turn.tokens:
                # Card: "L = -1[A>0]·sum_tokens log pi(a|o)"
                if id(one) in kept and good:
                    loss = loss - token.logp / chosen
            # Card: "cross-entropy to 1[MC return>0]"
            v = turn.tokens[0].value
            label = float(returned > 0)
            loss = loss + value_weight * (torch.nn.functional.softplus(v) - label * v) / len(steps)
    return Result(advantages, loss)


def digi_q(batch: Batch, least: float = 0.1) -> list[bool]:
    """Which turns are imitated. Card: "A = max_i Q - max_i V, take argmax"; "L = -1[A>delta]·log pi(a_best)"."""
    kept: list[bool] = []
    for group in batch:
        table = [(turn, max(turn.facts["q"]) - max(turn.facts["v"])) for one in group for turn in one.turns]
        for turn, advantage in table:
            peers = [a for other, a in table if other.tokens and other.facts["state"] == turn.facts["state"]]
            kept.append(bool(turn.tokens) and advantage > least and advantage == max(peers))
    return kept


def evocua(batch: Batch, beta: float = 0.1, imitation: float = 1.0) -> Result:
    """House: the pair of a group is its best and its worst return (of equal ones the smallest lot), where they differ."""
    terms = []
    for group in batch:
        lot = {id(one): int(one.lot * 2**31) for one in group}
        best = min(group, key=lambda one: (-total(one), lot[id(one)]))
        worst = min(group, key=lambda one: (total(one), lot[id(one)]))
        if total(best) <= total(worst):
            continue
        # Card: "the critical forking point t* is the first step where actions diverge from equivalent states"
        for good, bad in zip(best.turns, worst.turns):
            if good.facts["state"] is None or good.facts["state"] != bad.facts["state"]:
                break
            if good.facts["action"] != bad.facts["action"]:
                if good.tokens and bad.tokens:
                    terms.append((good, bad))
                break
    loss = constant(0.0)
    for good, bad in terms:
        # Card: "chosen = successful action, rejected = failed action" of the step alone
        d = constant(0.0)
        for side, turn in ((1, good), (-1, bad)):
            for token in turn.tokens:
                d = d + side * (token.logp - token.reference)
        loss = loss + torch.nn.functional.softplus(-beta * d) / len(terms)
    # Card: "Rejection fine-tuning on successful rollouts"
    copied = [token for one in trajectories(batch) if one.success for token in sampled(one)]
    for token in copied:
        loss = loss - imitation * token.logp / len(copied)
    return Result([0.0] * sum(len(sampled(one)) for one in trajectories(batch)), loss, {"pairs": len(terms)})
