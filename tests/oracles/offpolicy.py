"""Slow oracles of the off-policy stabilisers: one loop, one scalar, one formula at a time.

Every method takes a batch of records and returns a `Result`: one advantage per token in natural order (group,
trajectory, turn, token), the float64 scalar to be minimised, and what else the method decides. Lines marked "Card"
quote the specification. The log-ratio of a token is always clamped to [-20, 20] before anything else.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from .objectives import (
    BOUND,
    bounded,
    constant,
    gae,
    larger,
    mean,
    rows,
    smaller,
    spread,
    std,
    token_rewards,
    whiten,
)
from .records import Batch, Group, Token, Trajectory, sampled, tokens, total, trajectories
from .result import Result

SLACK = 1e-9  # a bound this close to its cap has reached it


def log_ratio(token: Token) -> Tensor:
    """Card: "l_t = lp - lp_old, clamped to [-20,20] before exp." Constant, without gradient, outside."""
    return bounded(token.logp - token.behaviour, -BOUND, BOUND)


def z_scores(batch: Batch) -> list[float]:
    """One number per trajectory. Card: "GRPO z-score A=(R-mean)/(std+eps), std with n-1 and eps=1e-6".
    House rule: a group of one gets 0."""
    out = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            out.append(0.0 if len(group) == 1 else (reward - mean(rewards)) / (std(rewards) + 1e-6))
    return out


def critic_targets(batch: Batch, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Per token: GAE of the old values (not whitened), and the return A + V."""
    raw = []
    returns = []
    for trajectory in trajectories(batch):
        values = [token.old_value for token in sampled(trajectory)]
        found = gae(token_rewards(trajectory), values, gamma, lam)
        raw.extend(found)
        # Card: "return target = A_t + V_t (use the un-whitened A)"
        returns.extend(advantage + value for advantage, value in zip(found, values))
    return raw, returns


def critic_loss(batch: Batch, returns: list[float], value_clip: float) -> Tensor:
    """Card: "L_V = 0.5 AGG[max((v-Ret)^2, (clip(v, v_old-eps_v, v_old+eps_v)-Ret)^2)]", token-mean."""
    loss = constant(0.0)
    for token, target in zip(tokens(batch), returns):
        near = bounded(token.value, token.old_value - value_clip, token.old_value + value_clip)
        loss = loss + 0.5 * larger((token.value - target) ** 2, (near - target) ** 2) / len(returns)
    return loss


# ---------------------------------------------------------------------------------------------------------------------
# ST-PPO, S-PPO, SO-GRPO


def beyond(ratio: float, advantage: float, clip: float) -> bool:
    """Card: "B = tokens with (A_t>0, w>1+eps) or (A_t<0, w<1-eps)"."""
    return (advantage > 0 and ratio > 1 + clip) or (advantage < 0 and ratio < 1 - clip)


def divide(norm: float, clipped_any: bool, floor: float = 1.0) -> float:
    """The factor on the gradient. Card: "if B is empty leave g unchanged ("clipping-triggered"); otherwise
    g <- g / max(n_C, floor)"; "floor=1 makes it a pure shrink"."""
    if not clipped_any:
        return 1.0
    return 1.0 / max(norm, floor)


def turn_clip(batch: Batch, advantages: list[float], clip: float) -> tuple[Tensor, Tensor, list[bool]]:
    """The policy loss with the turn ratio, the scalar whose gradient is the clipping bias C, and B."""
    n = rows(batch)
    loss = constant(0.0)
    bias = constant(0.0)
    clipped = []
    at = 0
    for trajectory in trajectories(batch):
        for turn in trajectory.turns:
            # Card: "w^k = exp((1/n_k) sum_{t in turn k} m l_t), n_k tokens; broadcast to tokens of turn k"
            log_ratios = [log_ratio(token).item() for token in turn.tokens]
            for token in turn.tokens:
                advantage = advantages[at]
                at += 1
                # Card: "Use w_t = sg[w^k] exp(lp - sg[lp]) so token t keeps its own A_t"
                ratio = math.exp(mean(log_ratios)) * torch.exp(token.logp - token.logp.detach())
                # Card: "L_t = PPO-clip(w^{k(t)}, A_t), averaged over tokens, 1/|y| per trajectory."
                policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
                loss = loss + policy / len(sampled(trajectory)) / n
                clipped.append(beyond(ratio.item(), advantage, clip))
                if clipped[-1]:
                    # Card: "C(theta) = mean over trajectories of (1/|y|) sum_{t in B} w A_t grad lp_t"
                    bias = bias + ratio.item() * advantage * token.logp / len(sampled(trajectory)) / n
    return loss, bias, clipped


def st_ppo(
    batch: Batch,
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Result:
    """Turn ratio, GAE with a critic. The division of the gradient is `divide` of the norm of the gradient of
    extra["bias"]; extra["clipped"] is B. The loss itself is not divided."""
    raw, returns = critic_targets(batch, gamma, lam)
    # Card: "Token advantages A_t from GAE with a critic (PPO)"; PPO card: "then whiten over all unmasked tokens"
    advantages = whiten(raw, inside=True)
    loss, bias, clipped = turn_clip(batch, advantages, clip)
    loss = loss + value_weight * critic_loss(batch, returns, value_clip)
    return Result(advantages, loss, {"bias": bias, "clipped": clipped})


def s_ppo(
    batch: Batch,
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Result:
    """Card: "S-PPO (token ratio)"; the rest as `st_ppo`."""
    raw, returns = critic_targets(batch, gamma, lam)
    advantages = whiten(raw, inside=True)
    n = rows(batch)
    loss = constant(0.0)
    bias = constant(0.0)
    clipped = []
    at = 0
    for trajectory in trajectories(batch):
        for token in sampled(trajectory):
            advantage = advantages[at]
            at += 1
            # Card: "r_t = exp(l_t)"
            ratio = torch.exp(log_ratio(token))
            policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
            # Card: "averaged over tokens, 1/|y| per trajectory"
            loss = loss + policy / len(sampled(trajectory)) / n
            clipped.append(beyond(ratio.item(), advantage, clip))
            if clipped[-1]:
                # Card: "C(theta) = mean over trajectories of (1/|y|) sum_{t in B} w A_t grad lp_t"
                bias = bias + ratio.item() * advantage * token.logp / len(sampled(trajectory)) / n
    loss = loss + value_weight * critic_loss(batch, returns, value_clip)
    return Result(advantages, loss, {"bias": bias, "clipped": clipped})


def so_grpo(batch: Batch, clip: float = 0.2) -> Result:
    """Turn ratio with the token's own gradient, group z-score, no critic."""
    # Card: "or group z-score (GRPO)"
    advantages = spread(batch, z_scores(batch))
    loss, bias, clipped = turn_clip(batch, advantages, clip)
    return Result(advantages, loss, {"bias": bias, "clipped": clipped})


# ---------------------------------------------------------------------------------------------------------------------
# BAPO


def positive_share(ratios: list[float], advantages: list[float], low: float, high: float, statistic: str) -> float:
    """Card: "share = sum_{A>0} e / sum e". Nothing to balance (sum e = 0) counts as 1."""
    positive = []
    every = []
    for ratio, advantage in zip(ratios, advantages):
        if statistic == "value":
            # Card: "e_t = p_t |min(r_t A_t, clip(r_t, c_low, c_high) A_t)|", p_t = 1
            inside = min(max(ratio, low), high)
            found = abs(min(ratio * advantage, inside * advantage))
        elif (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low):
            # Card: "stat="gradient" (clipped tokens count 0)"
            found = 0.0
        else:
            found = ratio * abs(advantage)
        every.append(found)
        if advantage > 0:
            positive.append(found)
    whole = math.fsum(every)
    return math.fsum(positive) / whole if whole > 0 else 1.0


def bapo(
    batch: Batch,
    statistic: Literal["gradient", "value"] = "gradient",
    rho0: float = 0.4,
    low: float = 0.6,
    high: float = 1.2,
    low_end: float = 0.9,
    high_end: float = 3.0,
    step_high: float = 0.05,
    step_low: float = 0.02,
    dual: float = 3.0,
) -> Result:
    """Clip bounds searched on the whole batch (detached, in the order of the paper), then clip and dual clip."""
    advantages = spread(batch, z_scores(batch))
    ratios = [torch.exp(log_ratio(token)).item() for token in tokens(batch)]
    # Card: "Start (a-, a+); while share < rho0: raise c_high by d1 until b+; when c_high is at its cap raise c_low by
    # d2 until b-; stop when both are at the cap."
    share = positive_share(ratios, advantages, low, high, statistic)
    while share < rho0:
        if high < high_end - SLACK:
            high = min(high + step_high, high_end)
        elif low < low_end - SLACK:
            low = min(low + step_low, low_end)
        else:
            break
        share = positive_share(ratios, advantages, low, high, statistic)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        ratio = torch.exp(log_ratio(token))
        # Card: "bounds c_low, c_high are true ratio bounds"; "ordinary clipped loss with (c_low, c_high)"
        policy = larger(-advantage * ratio, -advantage * bounded(ratio, low, high))
        # Card: "+ dual clip c=3": "for A_t<0 use min(L1_t, -c A_t)"
        if advantage < 0:
            policy = smaller(policy, constant(-dual * advantage))
        loss = loss + policy / len(advantages)
    return Result(advantages, loss, {"bounds": (low, high), "share": share})


# ---------------------------------------------------------------------------------------------------------------------
# TOPR


def product_log(trajectory: Trajectory) -> float:
    """log of pi(y|x)/mu(y|x), the full product: each token clamped to +-20 (house rule), then the sum as well."""
    whole = math.fsum(log_ratio(token).item() for token in sampled(trajectory))
    return min(max(whole, -BOUND), BOUND)


def topr(batch: Batch, baseline: float = 0.0) -> Result:
    """Tapered REINFORCE on the rewards themselves; extra["alpha"] has one weight per trajectory."""
    n = rows(batch)
    loss = constant(0.0)
    per_trajectory = []
    alphas = []
    for trajectory in trajectories(batch):
        reward = total(trajectory)
        # Card: "alpha = 1 if reward >= 0; clip(R_tau,0,1) if reward < 0"
        alpha = 1.0 if reward >= 0 else min(max(math.exp(product_log(trajectory)), 0.0), 1.0)
        per_trajectory.append(reward - baseline)
        alphas.append(alpha)
        for token in sampled(trajectory):
            # Card: "L = -mean_i sg[alpha_i] (R_i - c) sum_t m lp_t"
            loss = loss - alpha * (reward - baseline) * token.logp / n
    return Result(spread(batch, per_trajectory), loss, {"alpha": alphas})


# ---------------------------------------------------------------------------------------------------------------------
# SAPO


def sapo(batch: Batch, pos: float = 1.0, neg: float = 1.05) -> Result:
    """A smooth gate in place of the clip. Card: "GRPO advantage"."""
    per_trajectory = z_scores(batch)
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        for token in sampled(trajectory):
            ratio = torch.exp(log_ratio(token))
            # Card: "tau = tau_pos if A>0 else tau_neg"
            tau = pos if advantage > 0 else neg
            # Card: "f_tau(r) = (4/tau) sigma(tau (r-1))"
            soft = (4 / tau) * torch.sigmoid(tau * (ratio - 1))
            # Card: "L_t = -f_tau(r_t) A_t (differentiate through r); AGG seq-mean-token-mean"
            loss = loss - soft * advantage / len(sampled(trajectory)) / n
    return Result(spread(batch, per_trajectory), loss)


# ---------------------------------------------------------------------------------------------------------------------
# FiberPO


def drift(trajectory: Trajectory) -> tuple[Tensor, Tensor]:
    """Card: "S+ = (1/T) sum m max(l,0), S- = (1/T) sum m max(-l,0)". Since sign(0)=+1 a token with l = 0 belongs to
    S+, also in the gradient."""
    plus = constant(0.0)
    minus = constant(0.0)
    for token in sampled(trajectory):
        found = log_ratio(token)
        if found.item() >= 0:
            plus = plus + found / len(sampled(trajectory))
        else:
            minus = minus - found / len(sampled(trajectory))
    return plus, minus


def gate(x: Tensor, budget: float, length: int) -> Tensor:
    """Card: "g(x,C,T) = x if |x|<=C; sign(x)(T+1)C - T x if C<|x|<(1+1/T)C; 0 beyond"."""
    size = abs(x.item())
    if size <= budget:
        return x
    if size < (1 + 1 / length) * budget:
        return math.copysign(1.0, x.item()) * (length + 1) * budget - length * x
    return constant(0.0)


def residual(token: Token, plus: Tensor, minus: Tensor, eps: float) -> Tensor:
    """log F_i of one token, given the S+ and S- of its trajectory."""
    found = log_ratio(token)
    # Card: "sign s_i = sign(l_i) (constant under differentiation; sign(0)=+1): own = S^{s_i}, other = S^{-s_i}"
    sign = 1.0 if found.item() >= 0 else -1.0
    own = plus if sign > 0 else minus
    other = minus if sign > 0 else plus
    # Card: "F_i = exp(clip(l_i - s_i own, +-eps) - clip(-s_i other, +-eps))"
    return bounded(found - sign * own, -eps, eps) - bounded(-sign * other, -eps, eps)


def fiberpo(batch: Batch, plus: float = 0.12, minus: float = 0.05, eps: float = 0.04) -> Result:
    """Trajectory gate times token residual; extra["gated"] has G of every token."""
    per_trajectory = z_scores(batch)
    n = rows(batch)
    loss = constant(0.0)
    gated = []
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        length = len(sampled(trajectory))
        if length == 0:
            continue
        up, down = drift(trajectory)
        # Card: "Base weight W = exp(g(S+,C+,T) - g(S-,C-,T))"
        base = gate(up, plus, length) - gate(down, minus, length)
        for token in sampled(trajectory):
            # Card: "G_i = W F_i"
            weight = torch.exp(base + residual(token, up, down, eps))
            gated.append(weight.item())
            # Card: "J = (1/N) sum_tau (1/T) sum_i G_i A_i (no min/max; everything differentiated)"
            loss = loss - weight * advantage / length / n
    return Result(spread(batch, per_trajectory), loss, {"gated": gated})


def average_drift(many: list[Trajectory]) -> tuple[Tensor, Tensor, int]:
    """Plain means of S+ and S- over the trajectories that have tokens, and the number of tokens."""
    present = [trajectory for trajectory in many if sampled(trajectory)]
    plus = constant(0.0)
    minus = constant(0.0)
    length = 0
    for trajectory in present:
        up, down = drift(trajectory)
        plus = plus + up / len(present)
        minus = minus + down / len(present)
        length += len(sampled(trajectory))
    return plus, minus, length


def fiberpo_domain(batch: Batch, plus: float = 0.12, minus: float = 0.05, eps: float = 0.04) -> Result:
    """The gate of the trajectory telescoped over domain, group and trajectory; extra["gated"] as `fiberpo`."""
    per_trajectory = iter(z_scores(batch))
    advantages = []
    n = rows(batch)
    loss = constant(0.0)
    gated = []
    for group in batch:
        # Card: "S_g = mean over trajectories of the prompt group"; "T_g, T_D = total tokens of group and domain"
        group_up, group_down, group_length = average_drift(group)
        for trajectory in group:
            advantage = next(per_trajectory)
            length = len(sampled(trajectory))
            if length == 0:
                continue
            # Card: "S_D = mean over trajectories of the domain"
            fellows = [other for other in trajectories(batch) if other.domain == trajectory.domain]
            domain_up, domain_down, domain_length = average_drift(fellows)
            up, down = drift(trajectory)
            # Card: "W = exp sum_{c in +,-} c [ g(S_D,C,T_D) + g(S_g - S_D,C,T_g) + g(S_tau - S_g,C,T_tau) ] with C=C+
            # or C-; F unchanged"
            base = gate(domain_up, plus, domain_length)
            base = base + gate(group_up - domain_up, plus, group_length)
            base = base + gate(up - group_up, plus, length)
            base = base - gate(domain_down, minus, domain_length)
            base = base - gate(group_down - domain_down, minus, group_length)
            base = base - gate(down - group_down, minus, length)
            for token in sampled(trajectory):
                weight = torch.exp(base + residual(token, up, down, eps))
                gated.append(weight.item())
                advantages.append(advantage)
                loss = loss - weight * advantage / length / n
    return Result(advantages, loss, {"gated": gated})


# ---------------------------------------------------------------------------------------------------------------------
# R2VPO


def dual_step(lam: float, violation: float, delta: float = 0.02, rate: float = 0.01) -> float:
    """Card: "lambda <- max(0, lambda + eta_lambda (mean[(r-1)^2] - delta))"."""
    return max(0.0, lam + rate * (violation - delta))


def r2vpo(batch: Batch, lam: float = 0.04) -> Result:
    """A penalty on the variance of the ratio in place of the clip; extra["violation"] is mean[(r-1)^2]."""
    advantages = spread(batch, z_scores(batch))
    loss = constant(0.0)
    violation = 0.0
    for token, advantage in zip(tokens(batch), advantages):
        ratio = torch.exp(log_ratio(token))
        # Card: "L_t = -(r_t A_t) + lambda (r_t - 1)^2", "AGG token-mean"
        loss = loss + (-(ratio * advantage) + lam * (ratio - 1) ** 2) / len(advantages)
        violation += (ratio.item() - 1) ** 2 / len(advantages)
    return Result(advantages, loss, {"violation": violation})


# ---------------------------------------------------------------------------------------------------------------------
# GBPO and BPO


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def bounded_target(logit: float, low: float, high: float) -> float:
    """Card: "target r*_t = 1 - e_low + (e_low+e_high) sigma(a~_t)"."""
    return 1 - low + (low + high) * logistic(logit)


def median(numbers: list[float]) -> float:
    """The middle number; of an even count the mean of the two middle ones."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def gbpo(batch: Batch, low: float = 0.3, high: float = 0.3, temperature: float = 1e-4) -> Result:
    """Regress the ratio onto a bounded target; extra["target"] has r* of every token."""
    per_trajectory = z_scores(batch)
    targets = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            if len(group) == 1:
                targets.append(bounded_target(0.0, low, high))
                continue
            # Card: "a~ = ((R - median)/(std+1e-6))/temp"
            logit = ((reward - median(rewards)) / (std(rewards) + 1e-6)) / temperature
            targets.append(bounded_target(logit, low, high))
    advantages = spread(batch, per_trajectory)
    aims = spread(batch, targets)
    loss = constant(0.0)
    for token, advantage, aim in zip(tokens(batch), advantages, aims):
        ratio = torch.exp(log_ratio(token))
        # Card: "L_t = |r_t - r*_t| |A_t|, r* and A detached"; "AGG token-mean"
        loss = loss + torch.abs(ratio - aim) * abs(advantage) / len(advantages)
    return Result(advantages, loss, {"target": aims})


def bpo(
    batch: Batch,
    eps: float = 0.3,
    temperature: float = 1e-3,
    value_weight: float = 0.5,
    median_weight: float = 0.5,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Result:
    """The same regression with a critic (value: mean head V, twin: median head U); extra["target"] has r*."""
    # Card: "A = Q - V (Q = return, V = mean head)"
    advantages, returns = critic_targets(batch, gamma, lam)
    aims = []
    loss = constant(0.0)
    for token, advantage, q in zip(tokens(batch), advantages, returns):
        # Card: "a~ = (Q - U)/lambda with U a median head"
        aim = bounded_target((q - token.old_twin) / temperature, eps, eps)
        aims.append(aim)
        ratio = torch.exp(log_ratio(token))
        # Card: "L_t = |r_t - r*_t| |A_t|, r* and A detached"
        policy = torch.abs(ratio - aim) * abs(advantage)
        # Card: "V by MSE"
        value = (token.value - q) ** 2
        # Card: "U by softplus(Q-U) - 0.5 (Q-U) (soft median, unscaled argument)"; softplus(x) = log(exp x + exp 0)
        gap = q - token.twin
        soft = torch.logaddexp(gap, constant(0.0)) - 0.5 * gap
        # Card: "total = L_pi + .5 L_V + .5 L_U - ent", here without the entropy
        loss = loss + (policy + value_weight * value + median_weight * soft) / len(advantages)
    return Result(advantages, loss, {"target": aims})


# ---------------------------------------------------------------------------------------------------------------------
# VCPO and OBLR-PO


def weighted_baseline(group: Group, weights: list[float]) -> float:
    """sum of weight x R over sum of weights; the plain mean of R when all weights are 0."""
    rewards = [total(trajectory) for trajectory in group]
    whole = math.fsum(weights)
    if whole == 0:
        return mean(rewards)
    return math.fsum(weight * reward for weight, reward in zip(weights, rewards)) / whole


def vcpo(batch: Batch, cap: float = 8.0) -> Result:
    """extra["pace"]: factor on the learning rate; extra["baseline"]: b* of every group."""
    n = rows(batch)
    per_trajectory = []
    baselines = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        weights = []
        for trajectory in group:
            # The baseline takes its weights before the first update: w0 = exp(sum_t (lp_old - lp_mu)).
            whole = 0.0
            for token in sampled(trajectory):
                whole += min(max(token.proximal - token.behaviour, -BOUND), BOUND)
            w0 = math.exp(min(max(whole, -BOUND), BOUND))
            # Card: "b* = sum_i w_i^2 n_i^2 R_i / sum_i w_i^2 n_i^2, n_i = ||grad sum_t lp_i||_2"
            weights.append(w0**2 * trajectory.norm**2)
        best = weighted_baseline(group, weights)
        baselines.append(best)
        # Card: "std is the population std"
        centre = mean(rewards)
        deviation = math.sqrt(mean([(reward - centre) ** 2 for reward in rewards]))
        for reward in rewards:
            per_trajectory.append(0.0 if len(group) == 1 else (reward - best) / (deviation + 1e-6))
    loss = constant(0.0)
    weights = []
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        if not sampled(trajectory):
            continue
        # Card: "w_i = exp(sum_t m (lp - lp_mu)) (sg)"
        w = math.exp(product_log(trajectory))
        weights.append(w)
        for token in sampled(trajectory):
            # Card: "g = (1/B) sum_i min(w_i, 8) (R_i - b*)/std_g * (1/|y_i|) sum_t grad lp"
            loss = loss - min(w, cap) * advantage * token.logp / len(sampled(trajectory)) / n
    # Card: "ESS = (sum w)^2/(sum w^2 + 1e-8) over the global mini-batch, *unclipped* w; rho = ESS/B"
    ess = math.fsum(weights) ** 2 / (math.fsum(w**2 for w in weights) + 1e-8)
    # Card: "lr_step = lr sqrt(min(1, rho/rho_base))", rho_base 1
    pace = math.sqrt(min(1.0, ess / n)) if n else 1.0
    return Result(spread(batch, per_trajectory), loss, {"pace": pace, "baseline": baselines})


def oblr_po(batch: Batch, clip: float = 0.2) -> Result:
    """extra["baseline"]: b* of every group."""
    n = rows(batch)
    per_trajectory = []
    baselines = []
    for group in batch:
        # Card: "b* = sum_i n_i^2 R_i / sum_i n_i^2, n_i = ||grad log pi(o_i)||; A_i = R_i - b*"
        best = weighted_baseline(group, [trajectory.norm**2 for trajectory in group])
        baselines.append(best)
        for trajectory in group:
            per_trajectory.append(0.0 if len(group) == 1 else total(trajectory) - best)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        for token in sampled(trajectory):
            ratio = torch.exp(log_ratio(token))
            policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
            # Card: "seq-mean-token-sum: (1/N) sum_i sum_t m L."
            loss = loss + policy / n
    return Result(spread(batch, per_trajectory), loss, {"baseline": baselines})


def snr(parts: list[list[float]]) -> float:
    """SNR/(1+SNR) of the gradients of K equal parts; 1 with a single part, and 1 where all of them vanish.

    Card: "||g||^2 / (||g||^2 + Var/N), g mean gradient"; "Var/N ~ mean_k||g_k - g||^2/(K-1)"; "Var=0 -> base lr".
    """
    count = len(parts)
    if count < 2:
        return 1.0
    g = [mean([part[j] for part in parts]) for j in range(len(parts[0]))]
    signal = math.fsum(one**2 for one in g)
    noise = mean([math.fsum((a - b) ** 2 for a, b in zip(part, g)) for part in parts]) / (count - 1)
    return signal / (signal + noise) if noise > 0 else 1.0


# ---------------------------------------------------------------------------------------------------------------------
# ALP


def alp(batch: Batch, low: float = 0.5, high: float = 3.0) -> Result:
    """Token level. Card: "r_t = exp(lp_{theta,sigma} - lp_mu) (single ratio, no separate TIS)"; logp has the noise."""
    advantages = spread(batch, z_scores(batch))
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        ratio = torch.exp(log_ratio(token))
        # Card: "PPO-style clip with wide asymmetric bounds at token level"; "ratio bounds [1-.5, 1+3]"
        policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - low, 1 + high))
        loss = loss + policy / len(advantages)
    return Result(advantages, loss)


def alp_sequence(batch: Batch, low: float = 0.5, high: float = 3.0) -> Result:
    """Card: "or on the sequence geometric mean"; mean over trajectories with tokens."""
    per_trajectory = z_scores(batch)
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        length = len(sampled(trajectory))
        if length == 0:
            continue
        whole = constant(0.0)
        for token in sampled(trajectory):
            whole = whole + log_ratio(token) / length
        ratio = torch.exp(whole)
        policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - low, 1 + high))
        loss = loss + policy / n
    return Result(spread(batch, per_trajectory), loss)
