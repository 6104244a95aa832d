"""Oracles of methods that other trainers offer, from the formulas of their papers. Slow, one number at a time."""

from __future__ import annotations

import math

import torch

from .objectives import token_rewards
from .others import averaged, constant, implicit, log_sigmoid, over_pairs, sampled, total
from .records import Batch, Trajectory, tokens, trajectories
from .result import Result
from .trust import clipped, log_ratio, spread, zscore


def logistic(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def token_mean(batch: Batch, advantages: list[float], low: float, high: float) -> torch.Tensor:
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        loss = loss + clipped(torch.exp(log_ratio(token)), advantage, low, high) / len(advantages)
    return loss


def opo(batch: Batch, clip: float = 0.2) -> Result:
    found = []
    for group in batch:
        lengths = [len(sampled(one)) for one in group]
        weighted = sum(n * total(one) for n, one in zip(lengths, group))
        baseline = weighted / sum(lengths) if sum(lengths) and len(group) > 1 else 0.0  # a row alone: no baseline
        found.extend(total(one) - baseline for one in group)
    advantages = spread(batch, found)
    return Result(advantages, token_mean(batch, advantages, clip, clip))


def remax(batch: Batch) -> Result:
    """A = R minus the return of the greedy answer, told as the fact greedy_reward; -A log pi summed over the tokens of a
    trajectory, mean over trajectories with tokens."""
    rows = [(one, total(one) - one.facts["greedy_reward"]) for one in trajectories(batch)]
    n = sum(1 for one, _ in rows if sampled(one))
    loss = constant(0.0)
    for one, advantage in rows:
        for token in sampled(one):
            loss = loss + -advantage * token.logp / n
    return Result(spread(batch, [advantage for _, advantage in rows]), loss)


def grpo_passk(batch: Batch, clip: float = 0.2, scale: bool = True, eps: float = 1e-6) -> Result:
    found = []
    for group in batch:
        rewards = [total(one) for one in group]
        ranked = sorted(rewards, reverse=True)
        lead = ranked[0] - ranked[1] if len(ranked) > 1 else 0.0
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) if len(rewards) > 1 else 0.0
        best = rewards.index(ranked[0])
        found.extend((lead / (std + eps) if scale else lead) if i == best else 0.0 for i in range(len(rewards)))
    advantages = spread(batch, found)
    return Result(advantages, token_mean(batch, advantages, clip, clip))


def gpg(batch: Batch) -> Result:
    rows = sum(len(group) for group in batch)
    useful = sum(len(group) for group in batch if len({total(one) for one in group}) > 1)
    alpha = rows / useful if useful else float(rows)
    found = []
    for group in batch:
        mean = sum(total(one) for one in group) / len(group)
        found.extend(alpha * (total(one) - mean) for one in group)
    advantages = spread(batch, found)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        loss = loss - advantage * token.logp / len(advantages)
    return Result(advantages, loss)


def vespo(
    batch: Batch, rise: float = 2.0, decay: float = 3.0, rise_negative: float = 3.0, decay_negative: float = 2.0
) -> Result:
    credit = zscore(batch)
    count = sum(len(sampled(one)) for one in trajectories(batch))
    loss = constant(0.0)
    for one, advantage in zip(trajectories(batch), credit):
        log_w = min(20.0, max(-20.0, sum(log_ratio(token).item() for token in sampled(one))))
        w = max(math.exp(log_w), 1e-8)
        k, lam = (rise, decay) if advantage >= 0 else (rise_negative, decay_negative)
        phi = math.exp(k * math.log(w) + lam * (1 - math.exp(log_w)))
        for token in sampled(one):
            loss = loss - phi * advantage * token.logp / count
    return Result(spread(batch, credit), loss)


def forking_tokens(batch: Batch, share: float = 0.2, low: float = 0.2, high: float = 0.28) -> Result:
    advantages = spread(batch, zscore(batch))
    entropies = sorted(token.entropy.item() for token in tokens(batch))
    loss = constant(0.0)
    if entropies:
        # the quantile by linear interpolation between neighbours
        at = (1 - share) * (len(entropies) - 1)
        below, above = entropies[math.floor(at)], entropies[min(math.ceil(at), len(entropies) - 1)]
        bound = below + (at - math.floor(at)) * (above - below)
        for token, advantage in zip(tokens(batch), advantages):
            if token.entropy.item() >= bound:
                loss = loss + clipped(torch.exp(log_ratio(token)), advantage, low, high) / len(advantages)
    return Result(advantages, loss)


# ---------------------------------------------------------------------------------------------------------------------
# Pairs


def exo(batch: Batch, beta: float = 0.1, eps: float = 1e-3) -> Result:
    def each(winner: Trajectory, loser: Trajectory) -> torch.Tensor:
        x = beta * (implicit(winner) - implicit(loser))
        q, rest = torch.exp(log_sigmoid(x)), torch.exp(log_sigmoid(-x))
        return q * (log_sigmoid(x) - math.log(1 - eps)) + rest * (log_sigmoid(-x) - math.log(eps))

    return over_pairs(batch, each)


def nca(batch: Batch, beta: float = 0.1) -> Result:
    def each(winner: Trajectory, loser: Trajectory) -> torch.Tensor:
        w, r = beta * implicit(winner), beta * implicit(loser)
        return -log_sigmoid(w) - 0.5 * log_sigmoid(-w) - 0.5 * log_sigmoid(-r)

    return over_pairs(batch, each)


def apo(batch: Batch, anchor: str = "zero", beta: float = 0.1) -> Result:
    def each(winner: Trajectory, loser: Trajectory) -> torch.Tensor:
        w, r = beta * implicit(winner), beta * implicit(loser)
        if anchor == "zero":
            return 1 - logistic(w) + logistic(r)
        return logistic(w) + 1 - logistic(w - r)

    return over_pairs(batch, each)


def discopop(batch: Batch, beta: float = 0.05, tau: float = 0.05) -> Result:
    def each(winner: Trajectory, loser: Trajectory) -> torch.Tensor:
        x = beta * (implicit(winner) - implicit(loser))
        blend = torch.exp(log_sigmoid(x / tau))
        return (1 - blend) * -log_sigmoid(x) + blend * torch.exp(-x)

    return over_pairs(batch, each)


def cpo(batch: Batch, beta: float = 0.1, imitation: float = 1.0) -> Result:
    whole = lambda one: sum((token.logp for token in sampled(one)), constant(0.0))  # noqa: E731
    return with_chosen(batch, lambda w, r: -log_sigmoid(beta * (whole(w) - whole(r))), 1.0, imitation)


def orpo(batch: Batch, weight: float = 0.1) -> Result:
    def odds(one: Trajectory) -> torch.Tensor:
        mean = averaged(sum((token.logp for token in sampled(one)), constant(0.0)), one)
        mean = torch.minimum(mean, constant(-1e-6))
        return mean - torch.log(1 - torch.exp(mean))

    return with_chosen(batch, lambda w, r: -log_sigmoid(odds(w) - odds(r)), weight, 1.0)


def with_chosen(batch: Batch, each, weight: float, imitation: float) -> Result:
    """A loss of pairs, and the token mean of −log π over the chosen."""
    winners: list[Trajectory] = []

    def seen(winner: Trajectory, loser: Trajectory) -> torch.Tensor:
        winners.append(winner)
        return each(winner, loser)

    result = over_pairs(batch, seen)
    chosen = [token for one in winners for token in sampled(one)]
    imitated = sum((-token.logp for token in chosen), constant(0.0)) / max(1, len(chosen))
    return Result(result.advantage, weight * result.loss + imitation * imitated, result.extra)


def aot(batch: Batch, beta: float = 0.1, smoothing: float = 0.0, paired: bool = True) -> Result:
    left: list[torch.Tensor] = []
    right: list[torch.Tensor] = []

    def collect(winner: Trajectory, loser: Trajectory) -> torch.Tensor:
        if paired:
            frozen = lambda one: sum(token.reference for token in sampled(one))  # noqa: E731
            whole = lambda one: sum((token.logp for token in sampled(one)), constant(0.0))  # noqa: E731
            left.append(whole(winner) - whole(loser))
            right.append(constant(frozen(winner) - frozen(loser)))
        else:
            left.append(implicit(winner))
            right.append(implicit(loser))
        return constant(0.0)

    result = over_pairs(batch, collect)
    loss = constant(0.0)
    by_value = lambda x: x.item()  # noqa: E731
    for a, b in zip(sorted(left, key=by_value), sorted(right, key=by_value)):
        x = beta * (a - b)
        loss = loss + (-(1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)) / len(left)
    return Result(result.advantage, loss, result.extra)


def kto(batch: Batch, beta: float = 0.1, desirable: float = 1.0, undesirable: float = 1.0) -> Result:
    """Every labelled answer by itself, whether it has another side or not."""
    result = over_pairs(batch, lambda winner, loser: constant(0.0))
    labelled = [one for one in trajectories(batch) if one.facts.get("chosen") is not None]
    sides = [(one, 1.0 if one.facts["chosen"] else -1.0) for one in labelled]
    scores = [implicit(one) for one, _ in sides]
    centre = max(0.0, sum(s.item() for s in scores) / max(1, len(scores)))
    loss = constant(0.0)
    filled = sum(1 for one, _ in sides if sampled(one))
    for score, (one, side) in zip(scores, sides):
        weight = desirable if side > 0 else undesirable
        if sampled(one):
            loss = loss + weight * (1 - logistic(beta * side * (score - centre))) / filled
    return Result(result.advantage, loss, result.extra)


# ---------------------------------------------------------------------------------------------------------------------
# Baselines by token


def optimal_token(batch: Batch, clip: float = 0.2, eps: float = 1e-8) -> Result:
    """verl: w_t = 1 - 2 pi_t + sum pi^2, W_t its running sum, B_t = sum_i G_t W_t / (sum_i W_t + eps) over the rows of the prompt
    that reach t; G_t the reward to go; no baseline for a single row, nor beyond the second-longest row. token.facts["collision"]
    is sum pi^2; a reward stands on the last token of its turn, of an empty turn on the token before it (or the first turn's)."""
    advantages: list[float] = []
    for group in batch:
        returns, paths = [], []
        for one in group:
            paid = token_rewards(one)
            returns.append([sum(paid[t:]) for t in range(len(paid))])
            w = [1 - 2 * math.exp(token.proximal) + token.facts["collision"] for token in sampled(one)]
            paths.append([sum(w[: t + 1]) for t in range(len(w))])
        for i, one in enumerate(group):
            for t in range(len(sampled(one))):
                rows = [j for j in range(len(group)) if len(returns[j]) > t]
                baseline = sum(returns[j][t] * paths[j][t] for j in rows) / (sum(paths[j][t] for j in rows) + eps)
                advantages.append(returns[i][t] - (baseline if len(rows) > 1 else 0.0))
    return Result(advantages, token_mean(batch, advantages, clip, clip))
