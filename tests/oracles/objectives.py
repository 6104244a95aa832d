"""Slow oracles of policy-optimisation methods: one loop, one scalar, one formula at a time.

Every method takes a batch of records and returns `(advantages, loss)`: one float per token in natural order (group,
trajectory, turn, token) and the float64 scalar to be minimised. Lines marked "Card" quote the specification.

Card: "A_i (sequence) or A_{i,t} (token): advantage, always detached." Advantages are Python floats here.
Card: "All losses below are minimised: L = AGG(L_{i,t})."
Card: "N = rows with at least one unmasked token". A trajectory without tokens therefore does not count in N, but its
reward still counts in the statistics of its group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .records import Batch, Trajectory, sampled, tokens, total, trajectories

BOUND = 20.0  # Card: "l_t = lp - lp_old, clamped to [-20,20] before exp."


def mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def variance(numbers: list[float]) -> float:
    """With n - 1. Card: "Unless said otherwise std uses Bessel's correction"."""
    centre = mean(numbers)
    return math.fsum((one - centre) ** 2 for one in numbers) / (len(numbers) - 1)


def std(numbers: list[float]) -> float:
    return math.sqrt(variance(numbers))


def constant(number: float) -> Tensor:
    return torch.tensor(float(number), dtype=torch.float64)


def bounded(x: Tensor, low: float, high: float) -> Tensor:
    """clip(x, a, b): a constant, without gradient, outside the range."""
    if x.item() < low:
        return constant(low)
    if x.item() > high:
        return constant(high)
    return x


def larger(a: Tensor, b: Tensor) -> Tensor:
    return a if a.item() >= b.item() else b


def smaller(a: Tensor, b: Tensor) -> Tensor:
    return a if a.item() <= b.item() else b


def spread(batch: Batch, per_trajectory: list[float]) -> list[float]:
    """One number per trajectory becomes one per token."""
    out = []
    for trajectory, number in zip(trajectories(batch), per_trajectory):
        for _ in sampled(trajectory):
            out.append(number)
    return out


def rows(batch: Batch) -> int:
    """N: trajectories with at least one token."""
    return sum(1 for trajectory in trajectories(batch) if sampled(trajectory))


# ---------------------------------------------------------------------------------------------------------------------
# Plain policy gradients


def reinforce(batch: Batch) -> tuple[list[float], Tensor]:
    """A = R, token loss -A lp, summed over the tokens of a trajectory, mean over trajectories; no ratio.

    Card: "seq-mean-token-sum: (1/N) sum_i sum_t m L." and the detached-weight form "L = -sg[w] A lp" with w = 1.
    """
    per_trajectory = [total(trajectory) for trajectory in trajectories(batch)]
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        for token in sampled(trajectory):
            loss = loss + -advantage * token.logp / n
    return spread(batch, per_trajectory), loss


def rloo(batch: Batch) -> tuple[list[float], Tensor]:
    """Leave-one-out baseline; a group of one has baseline 0. No KL in the reward.

    Card: "A_i = R_i - (1/(G-1)) sum_{j!=i} R_j". Card: "L = -A_i sum_t m lp_t". Table: aggregation SS
    (seq-mean-token-sum).
    """
    per_trajectory = []
    for group in batch:
        for i, trajectory in enumerate(group):
            others = [total(other) for j, other in enumerate(group) if j != i]
            baseline = math.fsum(others) / (len(group) - 1) if others else 0.0
            per_trajectory.append(total(trajectory) - baseline)
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        if not sampled(trajectory):
            continue
        log_probability = constant(0.0)
        for token in sampled(trajectory):
            log_probability = log_probability + token.logp
        loss = loss + -advantage * log_probability / n
    return spread(batch, per_trajectory), loss


# ---------------------------------------------------------------------------------------------------------------------
# Group-relative, token ratio


def grpo(
    batch: Batch, clip: float = 0.2, beta: float = 0.04, kl_cap: float | None = 10.0
) -> tuple[list[float], Tensor]:
    """Group z-score, token PPO-clip against `behaviour`, k3 to `reference` with weight beta, seq-mean-token-mean.

    House rule: a group of one gets advantage 0 (the card's singleton rule gives the raw reward).
    """
    per_trajectory = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            if len(group) == 1:
                per_trajectory.append(0.0)
            else:
                # Card: "A_i = (R_i - mean_g)/(std_g + eps)"; "std with n-1 and eps=1e-6 unless noted"
                per_trajectory.append((reward - mean(rewards)) / (std(rewards) + 1e-6))
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        for token in sampled(trajectory):
            # Card: "l_t = lp - lp_old, clamped to [-20,20] before exp. r_t = exp(l_t)."
            ratio = torch.exp(bounded(token.logp - token.behaviour, -BOUND, BOUND))
            # Card: "L1_t = max(-A_t r_t, -A_t clip(r_t, 1-eps_low, 1+eps_high))"
            policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
            # Card: "k3_t = exp(lp_ref-lp) - (lp_ref-lp) - 1"; KL card: "clamp x to +-20 and k3 to <= 10"
            x = bounded(token.logp - token.reference, -BOUND, BOUND)
            k3 = torch.exp(-x) + x - 1
            if kl_cap is not None:
                k3 = smaller(k3, constant(kl_cap))
            # Card: "L_{i,t} = PPO-clip(r_t, A_i) + beta k3_t"
            # Card: "seq-mean-token-mean: (1/N) sum_i (1/|y_i|) sum_t m L."
            loss = loss + (policy + beta * k3) / len(sampled(trajectory)) / n
    return spread(batch, per_trajectory), loss


def fg_expo(batch: Batch, clip: float = 0.2, beta: float = 0.02) -> tuple[list[float], Tensor]:
    """GRPO whose KL weight follows the accuracy of the whole batch."""
    rewards = [total(trajectory) for group in batch for trajectory in group]
    # Card: "acc = mean reward over all rollouts; beta_eff = beta phi(acc), phi(z) = (tanh z + 1)/2"
    effective = beta * (math.tanh(sum(rewards) / len(rewards)) + 1) / 2
    return grpo(batch, clip=clip, beta=effective)


def dr_grpo(batch: Batch, clip: float = 0.2, length: float = 64) -> tuple[list[float], Tensor]:
    """Group mean as the only baseline, no scale, constant length; no KL. A group of one has advantage R - R = 0.

    Card: "A_i = R_i - mean_g. L = (1/(N L_max)) sum_i sum_t m PPO-clip(r_t, A_i), L_max a constant ... No KL."
    """
    per_trajectory = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            per_trajectory.append(reward - mean(rewards))
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        for token in sampled(trajectory):
            ratio = torch.exp(bounded(token.logp - token.behaviour, -BOUND, BOUND))
            # Card: "L1_t = max(-A_t r_t, -A_t clip(r_t, 1-eps_low, 1+eps_high))"
            policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
            loss = loss + policy / (n * length)
    return spread(batch, per_trajectory), loss


def overlong(n: int, limit: float, cache: float) -> float:
    """Card: "with expected length L_e = L_max - L_cache: 0 if n <= L_e; (L_e - n)/L_cache if L_e < n <= L_max;
    -1 if n > L_max"."""
    expected = limit - cache
    if n <= expected:
        return 0.0
    if n <= limit:
        return (expected - n) / cache
    return -1.0


def dapo(
    batch: Batch,
    low: float = 0.2,
    high: float = 0.28,
    limit: float | None = None,
    cache: float | None = None,
    dual: float | None = None,
) -> tuple[list[float], Tensor]:
    """Clip-higher, token-mean, no KL; with `limit` (and `cache`) overlong shaping; with `dual` the dual clip c.

    Card: "Advantage = GRPO z-score; no KL term", so a group of one has advantage 0 by the house rule of GRPO.
    """
    if limit is not None and cache is None:
        raise ValueError("overlong shaping needs both limit and cache")
    per_trajectory = []
    for group in batch:
        rewards = []
        for trajectory in group:
            reward = total(trajectory)
            if limit is not None and cache is not None:
                # Card: "overlong shaping added to the reward before normalisation"
                reward = reward + overlong(len(sampled(trajectory)), limit, cache)
            rewards.append(reward)
        for reward in rewards:
            if len(group) == 1:
                per_trajectory.append(0.0)
            else:
                # Card: "A=(R-mean)/(std+eps), std with n-1 and eps=1e-6 unless noted"
                per_trajectory.append((reward - mean(rewards)) / (std(rewards) + 1e-6))
    count = len(list(tokens(batch)))
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        for token in sampled(trajectory):
            ratio = torch.exp(bounded(token.logp - token.behaviour, -BOUND, BOUND))
            # Card: "L1_t = max(-A_t r_t, -A_t clip(r_t, 1-eps_low, 1+eps_high))", "clip-higher: eps_low < eps_high"
            policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - low, 1 + high))
            # Card: "Dual clip: for A_t<0 use min(L1_t, -c A_t) with c>1; for A_t>=0 use L1_t."
            if dual is not None and advantage < 0:
                policy = smaller(policy, constant(-dual * advantage))
            # Card: "token-mean: sum m L / sum m."
            loss = loss + policy / count
    return spread(batch, per_trajectory), loss


# ---------------------------------------------------------------------------------------------------------------------
# Group-relative, sequence ratio


def gspo(batch: Batch, low: float = 3e-4, high: float = 4e-4) -> tuple[list[float], Tensor]:
    """Length-normalised sequence ratio and a clip per trajectory; mean over trajectories with tokens.

    Table: advantage is the z-score (house rule of GRPO for a group of one), no KL.
    """
    per_trajectory = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            if len(group) == 1:
                per_trajectory.append(0.0)
            else:
                # Card: "A=(R-mean)/(std+eps), std with n-1 and eps=1e-6 unless noted"
                per_trajectory.append((reward - mean(rewards)) / (std(rewards) + 1e-6))
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        if not sampled(trajectory):
            continue
        # Card: "s_i = exp((1/|y_i|) sum_t m l_t)" with l_t clamped to [-20,20]; "Clamp the log ratio at <= 10."
        log_ratio = constant(0.0)
        for token in sampled(trajectory):
            log_ratio = log_ratio + bounded(token.logp - token.behaviour, -BOUND, BOUND)
        log_ratio = log_ratio / len(sampled(trajectory))
        ratio = torch.exp(bounded(log_ratio, -BOUND, 10.0))
        # Card: "J = (1/G) sum_i min(s_i A_i, clip(s_i,1-eps_low,1+eps_high) A_i)"
        gain = smaller(ratio * advantage, bounded(ratio, 1 - low, 1 + high) * advantage)
        loss = loss - gain / n
    return spread(batch, per_trajectory), loss


def gspo_token(batch: Batch, low: float = 3e-4, high: float = 4e-4) -> tuple[list[float], Tensor]:
    """The sequence ratio in value, the token's own gradient; seq-mean-token-mean."""
    per_trajectory = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            if len(group) == 1:
                per_trajectory.append(0.0)
            else:
                # Card: "A=(R-mean)/(std+eps), std with n-1 and eps=1e-6 unless noted"
                per_trajectory.append((reward - mean(rewards)) / (std(rewards) + 1e-6))
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        # Card: "s_i = exp((1/|y_i|) sum_t m l_t)" with l_t clamped to [-20,20]
        log_ratios = [bounded(token.logp - token.behaviour, -BOUND, BOUND).item() for token in sampled(trajectory)]
        for token in sampled(trajectory):
            # Card: "s_{i,t} = sg[s_i] exp(lp - sg[lp])"; "Clamp the log ratio at <= 10." The clamp is on the whole
            # log s_{i,t}, so it also stops the gradient, as in gspo.
            log_ratio = mean(log_ratios) + (token.logp - token.logp.detach())
            ratio = torch.exp(bounded(log_ratio, -BOUND, 10.0))
            # Card: "L_{i,t} = PPO-clip(s_{i,t}, A_{i,t}), AGG seq-mean-token-mean"
            policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - low, 1 + high))
            loss = loss + policy / len(sampled(trajectory)) / n
    return spread(batch, per_trajectory), loss


# ---------------------------------------------------------------------------------------------------------------------
# With a critic


def token_rewards(trajectory: Trajectory) -> list[float]:
    """A turn's reward is paid on the last token of that turn. The reward of a turn without tokens goes to the last
    token of the nearest earlier turn that has tokens or, if there is none, to the last token of the first later one.
    A trajectory without tokens pays nothing."""
    rewards = [0.0] * len(sampled(trajectory))
    last = None  # position of the last token of the most recent turn that has tokens
    waiting = 0.0  # rewards met before any turn with tokens
    position = -1
    for turn in trajectory.turns:
        if turn.tokens:
            position += len(turn.tokens)
            last = position
            rewards[last] += turn.reward + waiting
            waiting = 0.0
        elif last is None:
            waiting += turn.reward
        else:
            rewards[last] += turn.reward
    return rewards


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Card: "delta_t = r_t + gamma V_{t+1} - V_t with V_{end+1} = 0; A_t = delta_t + gamma lambda A_{t+1}, computed
    right to left"."""
    out = [0.0] * len(rewards)
    next_value = 0.0
    next_advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + gamma * next_value - values[t]
        out[t] = delta + gamma * lam * next_advantage
        next_value = values[t]
        next_advantage = out[t]
    return out


def bilevel_gae(batch: Batch, gamma: float = 1.0, lam: float = 0.95, turn_gamma: float = 0.95) -> list[float]:
    """Raw (not whitened) advantages of the bi-level form; no method here uses it yet.

    Card: "first GAE over turn-final tokens with gamma_turn; write the resulting turn return as the reward of that
    turn-final token; then GAE with token gamma inside each turn, restarting at each turn end."
    Turns without tokens are skipped and their rewards move as in `token_rewards`. One lambda serves both levels.
    """
    out = []
    for trajectory in trajectories(batch):
        paid = token_rewards(trajectory)
        spans = []  # (first, last) positions of each turn that has tokens
        start = 0
        for turn in trajectory.turns:
            if turn.tokens:
                spans.append((start, start + len(turn.tokens) - 1))
                start += len(turn.tokens)
        values = [token.old_value for token in sampled(trajectory)]
        finals = [values[last] for _, last in spans]
        outer = gae([paid[last] for _, last in spans], finals, turn_gamma, lam)
        for (first, last), advantage, final in zip(spans, outer, finals):
            inner = [0.0] * (last - first) + [advantage + final]
            out.extend(gae(inner, values[first : last + 1], gamma, lam))
    return out


def whiten(numbers: list[float], inside: bool) -> list[float]:
    """Card (GAE): "whiten A over all unmasked tokens of the batch: (A-mean)/sqrt(var+1e-8)", var with n - 1.
    With inside=False: (A-mean)/(std+1e-8), the general convention "eps is added to the denominator, never inside the
    root". Fewer than two numbers stay as they are."""
    if len(numbers) < 2:
        return list(numbers)
    scale = math.sqrt(variance(numbers) + 1e-8) if inside else std(numbers) + 1e-8
    return [(one - mean(numbers)) / scale for one in numbers]


def ppo(
    batch: Batch,
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
    dual: float | None = None,
    inside: bool = True,
) -> tuple[list[float], Tensor]:
    """Token PPO with a clipped critic. With Ret = A_raw + v_old and A the whitened A_raw,

    L = token-mean of max(-A r, -A clip(r, 1 - clip, 1 + clip))
        + value_weight * 0.5 * token-mean of max((v - Ret)^2, (clip(v, v_old - value_clip, v_old + value_clip) - Ret)^2)

    with value_weight = 1.0 by default. GAE runs over the sampled tokens of the trajectory in order, with v_old as the
    values and the rewards of `token_rewards`. `inside` chooses where the whitening puts its eps (see `whiten`).
    """
    raw = []
    returns = []
    for trajectory in trajectories(batch):
        # Card: "Advantage: GAE over unmasked tokens only (carry next value and running advantage across m=0 positions)"
        values = [token.old_value for token in sampled(trajectory)]
        found = gae(token_rewards(trajectory), values, gamma, lam)
        raw.extend(found)
        # Card: "return target = A_t + V_t (use the un-whitened A)"
        returns.extend(advantage + value for advantage, value in zip(found, values))
    advantages = whiten(raw, inside)
    count = len(raw)
    loss = constant(0.0)
    for token, advantage, target in zip(tokens(batch), advantages, returns):
        # Card: "l_t = lp - lp_old, clamped to [-20,20] before exp. r_t = exp(l_t)."
        ratio = torch.exp(bounded(token.logp - token.behaviour, -BOUND, BOUND))
        # Card: "L1_t = max(-A_t r_t, -A_t clip(r_t, 1-eps_low, 1+eps_high))"
        policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
        # Card: "Dual clip: for A_t<0 use min(L1_t, -c A_t) with c>1; for A_t>=0 use L1_t."
        if dual is not None and advantage < 0:
            policy = smaller(policy, constant(-dual * advantage))
        # Card: "L_V = 0.5 AGG[max((v-Ret)^2, (clip(v, v_old-eps_v, v_old+eps_v)-Ret)^2)]"
        near = bounded(token.value, token.old_value - value_clip, token.old_value + value_clip)
        error = larger((token.value - target) ** 2, (near - target) ** 2)
        # Card: "AGG token-mean."
        loss = loss + (policy + value_weight * 0.5 * error) / count
    return advantages, loss


def turn_ppo(
    batch: Batch,
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
    inside: bool = True,
) -> tuple[list[float], Tensor]:
    """Turn ratio in value, the token's own gradient and advantage. Advantages and critic loss as in `ppo`:

    L = seq-mean-token-mean of max(-A w, -A clip(w, 1 - clip, 1 + clip))
        + value_weight * 0.5 * token-mean of max((v - Ret)^2, (clip(v, v_old - value_clip, v_old + value_clip) - Ret)^2)

    Card: "Defaults: eps .2, gamma=lambda=1-class GAE".
    """
    raw = []
    returns = []
    for trajectory in trajectories(batch):
        # Card: "Token advantages A_t from GAE with a critic (PPO)"
        values = [token.old_value for token in sampled(trajectory)]
        found = gae(token_rewards(trajectory), values, gamma, lam)
        raw.extend(found)
        # Card: "return target = A_t + V_t (use the un-whitened A)"
        returns.extend(advantage + value for advantage, value in zip(found, values))
    advantages = whiten(raw, inside)
    count = len(raw)
    n = rows(batch)
    loss = constant(0.0)
    at = 0
    for trajectory in trajectories(batch):
        for turn in trajectory.turns:
            # Card: "w^k = exp((1/n_k) sum_{t in turn k} m l_t), n_k tokens; broadcast to tokens of turn k"
            log_ratios = [bounded(token.logp - token.behaviour, -BOUND, BOUND).item() for token in turn.tokens]
            for token in turn.tokens:
                advantage = advantages[at]
                target = returns[at]
                at += 1
                # Card: "Use w_t = sg[w^k] exp(lp - sg[lp]) so token t keeps its own A_t"
                ratio = math.exp(mean(log_ratios)) * torch.exp(token.logp - token.logp.detach())
                # Card: "Turn-PPO: L_t = PPO-clip(w^{k(t)}, A_t), averaged over tokens, 1/|y| per trajectory."
                policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
                loss = loss + policy / len(sampled(trajectory)) / n
                # Card: "L_V = 0.5 AGG[max((v-Ret)^2, (clip(v, v_old-eps_v, v_old+eps_v)-Ret)^2)]", token-mean
                near = bounded(token.value, token.old_value - value_clip, token.old_value + value_clip)
                error = larger((token.value - target) ** 2, (near - target) ** 2)
                loss = loss + value_weight * 0.5 * error / count
    return advantages, loss
