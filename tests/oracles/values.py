"""Oracles of value-based methods and of a corrected behaviour policy, from their cards. Slow: one token, one action at a time."""

from __future__ import annotations

import math

import torch

from .objectives import bounded, constant, ppo, smaller
from .records import Batch, Token, Trajectory, sampled, total, trajectories
from .result import Result
from .trust import clipped, log_ratio


def paid(one: Trajectory) -> list[float]:
    """The reward of each sampled token: a turn's on its last one. House: a turn without tokens pays the token before it, or the
    last token of the first turn that has any."""
    rewards = [0.0] * len(sampled(one))
    place, early = -1, 0.0
    for turn in one.turns:
        place += len(turn.tokens)
        if place < 0:
            early += turn.reward
        else:
            rewards[place] += turn.reward + early
            early = 0.0
    return rewards


def b_coder(
    batch: Batch,
    mode: dict[int, torch.Tensor],
    gap: dict[int, float],
    alpha: float = 1.0,
    gamma: float = 1.0,
    imitation: float = 0.1,
) -> Result:
    """mode[id(token)] = max over a of log pi(a|s), with gradient; gap[id(token)] = log pi(a*|s) - max log pi, a* = argmax q(.|s),
    under the policy before the batch. Card: "Q = α(ℓ(s,a) − max ℓ(s,a')) + V(s)", a difference of log-probabilities, too.
    extra["rank"]: for each trajectory Σ r̃. House: token mean; nothing follows the last token."""
    count = sum(len(sampled(one)) for one in trajectories(batch))
    loss = constant(0.0)
    rank: list[float] = []
    for one in trajectories(batch):
        tokens, rewards, score = sampled(one), paid(one), 0.0
        for t, token in enumerate(tokens):
            after = tokens[t + 1] if t + 1 < len(tokens) else None
            q = alpha * (token.logp - mode[id(token)]) + token.value
            # Card: "(B_q Q)(s,a) = r + γ·Q(s', argmax_{a'} q(a'|s'))"
            target = rewards[t] + (0.0 if after is None else gamma * (alpha * gap[id(after)] + after.old_value))
            # Card: "loss: (Q_θ − sg[B_q Q̄])²  + cross-entropy term keeping ℓ near the LM"
            x = bounded(token.reference - token.logp, -20.0, 20.0)
            near = smaller(torch.exp(x) - x - 1, constant(10.0))
            loss = loss + ((q - target) ** 2 + imitation * near) / count
            # Card: "inverse reward r̃(s,a) = Q(s,a) − γ V(s')"; "score a program by Σ r̃"
            score += q.item() - (0.0 if after is None else gamma * after.value.item())
        rank.append(score)
    return Result([0.0] * count, loss, {"rank": rank})


def vas(
    batch: Batch, value: dict[int, torch.Tensor], old: dict[int, float], gamma: float = 1.0, lam: float = 0.95
) -> Result:
    """value[id(token)] = V(x, y_<=t) with gradient, old[...] the same before the batch. Card: "V regressed to TD(λ) returns,
    MSE; reward only at the end". The released loss has a half, and micro-batches of one row: the mean over rows of the mean
    over their tokens. House: a reward on the way belongs to the token it is paid for."""
    rows = sum(1 for one in trajectories(batch) if sampled(one))
    count = sum(len(sampled(one)) for one in trajectories(batch))
    loss = constant(0.0)
    for one in trajectories(batch):
        tokens, rewards = sampled(one), paid(one)
        target = [0.0] * len(tokens)
        for t in reversed(range(len(tokens))):
            target[t] = rewards[t]
            if t + 1 < len(tokens):
                target[t] += gamma * ((1 - lam) * old[id(tokens[t + 1])] + lam * target[t + 1])
        for token, goal in zip(tokens, target):
            loss = loss + 0.5 * (value[id(token)] - goal) ** 2 / len(tokens) / rows
    return Result([0.0] * count, loss)


def steered(logits: list[float], values: list[float], beta: float, k: int) -> list[float]:
    """Card: "logits'(a) = logits(a) + β·( V(s∘a) − mean_{b∈top-k} V(s∘b) ) for the k most likely tokens, others unchanged"."""
    top = sorted(range(len(logits)), key=lambda a: -logits[a])[:k]
    mean = math.fsum(values[a] for a in top) / len(top)
    return [x + beta * (values[a] - mean) if a in top else x for a, x in enumerate(logits)]


def props_shifts(
    count: list[list[int]], chance: list[list[float]], clip: float, stop: float, epochs: int, rate: float
) -> list[list[float]]:
    """The behaviour policy's logits minus the target's, [state][action], by numerical derivatives of the card's loss. House: the
    loss of a state is the mean over its draws, and plain gradient steps."""
    shift = [[0.0] * len(row) for row in chance]

    def ratios(s: int, x: list[float]) -> list[float]:
        z = math.fsum(p * math.exp(v) for p, v in zip(chance[s], x))
        return [math.exp(v) / z for v in x]

    def loss(s: int, x: list[float]) -> float:
        # Card: "minimise mean max(g, clip(g,1−ε,1+ε)), g = π_φ(a|s)/π_θ(a|s)"
        g = ratios(s, x)
        return math.fsum(n * max(r, min(max(r, 1 - clip), 1 + clip)) for n, r in zip(count[s], g)) / sum(count[s])

    for _ in range(epochs):
        # Card: "stop when KL estimate mean(g−1−log g) > δ"
        drawn = [(n, g) for s, row in enumerate(count) for n, g in zip(row, ratios(s, shift[s])) if n]
        if math.fsum(n * (g - 1 - math.log(g)) for n, g in drawn) / sum(n for n, _ in drawn) > stop:
            break
        slopes = []
        for s, row in enumerate(shift):
            slope = []
            for a in range(len(row)):
                up, down = list(row), list(row)
                up[a] += 1e-6
                down[a] -= 1e-6
                slope.append((loss(s, up) - loss(s, down)) / 2e-6)
            slopes.append(slope)
        shift = [[x - rate * d for x, d in zip(row, slope)] for row, slope in zip(shift, slopes)]
    return shift


def pivotrl(batch: Batch, clip: float = 0.2) -> Result:
    """Card: "leave-one-out baseline, clip 0.2, no KL". House: token mean."""
    credit = []
    for group in batch:
        rewards = [total(one) for one in group]
        credit += [r - (math.fsum(rewards) - r) / (len(rewards) - 1) if len(rewards) > 1 else r for r in rewards]
    return clipped_mean(batch, credit, clip, log_ratio)


def clipped_mean(batch: Batch, credit: list[float], clip: float, moved) -> Result:
    """The clipped surrogate with one advantage for each trajectory, as a mean over all tokens."""
    count = sum(len(sampled(one)) for one in trajectories(batch))
    loss, advantage = constant(0.0), list[float]()
    for one, a in zip(trajectories(batch), credit):
        for token in sampled(one):
            loss = loss + clipped(torch.exp(moved(token)), a, clip, clip) / count
            advantage.append(a)
    return Result(advantage, loss)


def props(
    batch: Batch,
    clip: float = 0.2,
    gamma: float = 0.99,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Result:
    """Card: "ordinary PPO on the buffer as if on-policy (log-probs under θ, no importance weights)". The formula of PPO is that
    of `objectives.ppo`; every token's behaviour log-probability is replaced by π_θ's before the update."""
    kept: list[tuple[Token, float]] = []
    for one in trajectories(batch):
        for token in sampled(one):
            kept.append((token, token.behaviour))
            token.behaviour = token.proximal
    found = ppo(batch, clip=clip, gamma=gamma, lam=lam, value_clip=value_clip, value_weight=value_weight)
    for token, value in kept:
        token.behaviour = value
    return Result(found[0], found[1])
