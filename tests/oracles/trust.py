"""Slow oracles of clipped, weighted and masked policy-optimisation methods: one loop, one scalar, one formula at a time.

Every method takes a batch of records and returns a `Result`. Lines marked "Card" quote the specification; lines marked
"House" state the choice made where the card is silent.

House: l_t = logp - behaviour (or logp - proximal where the card has lp_old beside lp_mu), clamped to [-20, 20].
House: z-score (R-mean)/(std+1e-6), std with n - 1; a group of one gets advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .objectives import BOUND, bounded, constant, larger, mean, ppo, rows, smaller, spread, std, token_rewards, whiten
from .records import Batch, Token, sampled, tokens, total, trajectories
from .result import Result


def zscore(batch: Batch) -> list[float]:
    """One number per trajectory. Card: "A=(R-mean)/(std+eps), std with n-1 and eps=1e-6"; a group of one gets 0."""
    out = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            out.append(0.0 if len(group) == 1 else (reward - mean(rewards)) / (std(rewards) + 1e-6))
    return out


def number(x: float) -> float:
    """A plain log-ratio clamped to [-20, 20]."""
    return max(-BOUND, min(BOUND, x))


def log_ratio(token: Token) -> Tensor:
    """Card: "l_t = lp - lp_old, clamped to [-20,20] before exp", against `behaviour`."""
    return bounded(token.logp - token.behaviour, -BOUND, BOUND)


def proximal_log_ratio(token: Token) -> Tensor:
    """The same where lp_old (`proximal`) and lp_mu (`behaviour`) differ."""
    return bounded(token.logp - token.proximal, -BOUND, BOUND)


def mismatch(token: Token) -> float:
    """log rho_t. Card: "rho_t = exp(lp_old - lp_mu): train/inference mismatch ratio, always detached"."""
    return number(token.proximal - token.behaviour)


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """Card: "L1_t = max(-A_t r_t, -A_t clip(r_t, 1-eps_low, 1+eps_high))"."""
    return larger(-advantage * ratio, -advantage * bounded(ratio, 1 - low, 1 + high))


# ---------------------------------------------------------------------------------------------------------------------
# Other ratios, other baselines


def gmpo(batch: Batch, low: float = 0.4, high: float = 0.4) -> Result:
    """Geometric mean of token ratios, each clipped in log space on the harmful side only; z-score, mean over rows."""
    per_trajectory = zscore(batch)
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        if not sampled(trajectory):
            continue
        exponent = constant(0.0)
        for token in sampled(trajectory):
            move = log_ratio(token)
            near = bounded(move, -low, high)
            # Card: "s = sign(A_i); c_t = s * min(s l_t, s clip(l_t, -e_low, e_high))"
            chosen = smaller(move, near) if advantage > 0 else larger(move, near)
            exponent = exponent + chosen
        # Card: "q_i = exp((1/|y_i|) sum_t m c_t)"
        q = torch.exp(exponent / len(sampled(trajectory)))
        # Card: "L = mean_i(-A_i q_i)"
        loss = loss + -advantage * q / n
    return Result(spread(batch, per_trajectory), loss)


def cispo(batch: Batch, high: float = 5.0) -> Result:
    """The importance weight is capped at `high` (the cap itself), no lower bound; z-score, token-mean, no KL."""
    per_trajectory = zscore(batch)
    count = len(list(tokens(batch)))
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        for token in sampled(trajectory):
            # Card: "TRL use r <= 5 as the cap (i.e. TRL epsilon_high=5 is the cap itself)"
            weight = min(math.exp(log_ratio(token).item()), high)
            # Card: "L_{i,t} = -sg[clip(r_t, 1-e_low, 1+e_high)] A_i lp_t, AGG token-mean"
            loss = loss + -weight * advantage * token.logp / count
    return Result(spread(batch, per_trajectory), loss)


def reinforce_pp(batch: Batch, clip: float = 0.2, beta: float = 1e-2, gamma: float = 1.0) -> Result:
    """KL in the token reward, discounted returns whitened over the batch, PPO-clip against behaviour, token-mean."""
    raw = []
    for trajectory in trajectories(batch):
        paid = token_rewards(trajectory)
        # Card: "token reward u_t = 1[t=last] R - beta (lp_old-lp_ref)_t"; here each turn pays on its own last token
        u = [reward - beta * (one.proximal - one.reference) for reward, one in zip(paid, sampled(trajectory))]
        for t in range(len(u)):
            # Card: "return Ret_t = sum_{s>=t} gamma^{s-t} u_s"
            raw.append(math.fsum(gamma ** (s - t) * u[s] for s in range(t, len(u))))
    # Card: "A = whiten over all unmasked tokens of the batch"
    advantages = whiten(raw, True)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "PPO-clip loss"; table: TM
        loss = loss + clipped(torch.exp(log_ratio(token)), advantage, clip, clip) / len(raw)
    return Result(advantages, loss)


def reinforce_pp_baseline(batch: Batch, clip: float = 0.2, beta: float = 1e-2) -> Result:
    """R - group mean on every token, whitened over the batch; PPO-clip plus beta k2, both token-mean."""
    per_trajectory = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            # Card: "A'_i = R_i - mean_g, broadcast, then whiten over the batch"; House: a group of one gets 0
            per_trajectory.append(0.0 if len(group) == 1 else reward - mean(rewards))
    advantages = whiten(spread(batch, per_trajectory), True)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        policy = clipped(torch.exp(log_ratio(token)), advantage, clip, clip)
        # Card: "KL as k2 loss instead of in the reward"
        loss = loss + (policy + beta * k2(token.logp, token.reference)) / len(advantages)
    return Result(advantages, loss)


def rloo_kl(batch: Batch, beta: float = 0.03) -> Result:
    """Leave-one-out with the KL taken out of the reward; -A sum lp, mean over rows. A group of one has baseline 0."""
    per_trajectory = []
    for group in batch:
        rewards = []
        for trajectory in group:
            # Card: "KL subtracted from R as k1"
            kl = math.fsum(token.proximal - token.reference for token in sampled(trajectory))
            rewards.append(total(trajectory) - beta * kl)
        for i, reward in enumerate(rewards):
            # Card: "A_i = R_i - (1/(G-1)) sum_{j!=i} R_j"
            others = [other for j, other in enumerate(rewards) if j != i]
            per_trajectory.append(reward - (math.fsum(others) / len(others) if others else 0.0))
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        for token in sampled(trajectory):
            # Card: "L = -A_i sum_t m lp_t"; table: SS
            loss = loss + -advantage * token.logp / n
    return Result(spread(batch, per_trajectory), loss)


def ppo_dual(
    batch: Batch,
    clip: float = 0.2,
    dual: float = 3.0,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Result:
    """Card: "Dual clip: for A_t<0 use min(L1_t, -c A_t) with c>1; for A_t>=0 use L1_t." The rest is `ppo`."""
    return Result(*ppo(batch, clip, gamma, lam, value_clip, value_weight, dual))


def two_sided_grpo(batch: Batch, clip: float = 0.2, delta: float = 4.0) -> Result:
    """GRPO without KL whose unclipped branch is bounded as well; z-score, seq-mean-token-mean."""
    per_trajectory = zscore(batch)
    n = rows(batch)
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        for token in sampled(trajectory):
            ratio = torch.exp(log_ratio(token))
            # Card: "replace r by min(r, delta) in the unclipped branch, delta > 1+eps"
            free = smaller(ratio, constant(delta))
            policy = larger(-advantage * free, -advantage * bounded(ratio, 1 - clip, 1 + clip))
            loss = loss + policy / len(sampled(trajectory)) / n
    return Result(spread(batch, per_trajectory), loss)


# ---------------------------------------------------------------------------------------------------------------------
# Train/inference mismatch


def corrected(
    batch: Batch, weights: list[float], kept: list[bool], shrink: bool, low: float = 0.2, high: float = 0.28
) -> Result:
    """z-score, PPO-clip (.2/.28) on exp(logp - proximal), every token's loss times its weight, token-mean.

    Card: "multiply the per-token policy loss (and nothing else) by W, detached". Tokens not kept add nothing; with
    `shrink` they leave the denominator too. Card: "verl multiplies rejection into the response mask (denominator
    shrinks); weights do not touch the mask". Nothing kept: 0.
    """
    advantages = spread(batch, zscore(batch))
    count = sum(1 for keep in kept if keep) if shrink else len(kept)
    loss = constant(0.0)
    for token, advantage, weight, keep in zip(tokens(batch), advantages, weights, kept):
        if keep:
            loss = loss + weight * clipped(torch.exp(proximal_log_ratio(token)), advantage, low, high) / count
    return Result(advantages, loss, {"kept": kept})


def tis(batch: Batch, cap: float = 2.0, low: float = 0.2, high: float = 0.28) -> Result:
    """Token truncated importance sampling."""
    weights = []
    for token in tokens(batch):
        # Card: "token TIS: W_t = min(rho_t, C)"
        weights.append(min(math.exp(mismatch(token)), cap))
    return corrected(batch, weights, [True] * len(weights), shrink=False, low=low, high=high)


def sequence_tis(batch: Batch, cap: float = 2.0, low: float = 0.2, high: float = 0.28) -> Result:
    """Sequence truncated importance sampling."""
    weights = []
    for trajectory in trajectories(batch):
        # Card: "sequence TIS: W_i = min(prod_t rho_t, C), broadcast. Compute in log space, clamp log sum to +-20."
        product = math.exp(number(math.fsum(mismatch(token) for token in sampled(trajectory))))
        weights.extend(min(product, cap) for _ in sampled(trajectory))
    return corrected(batch, weights, [True] * len(weights), shrink=False, low=low, high=high)


def mis(batch: Batch, low: float = 0.5, high: float = 2.0) -> Result:
    """Token masked importance sampling: the weight stays, tokens outside the bounds leave the mask."""
    weights = []
    kept = []
    for token in tokens(batch):
        # Card: "token MIS: W_t = rho_t 1[C_lo <= rho_t <= C_hi]"
        rho = math.exp(mismatch(token))
        weights.append(rho)
        kept.append(low <= rho <= high)
    return corrected(batch, weights, kept, shrink=True)


def sequence_mis(batch: Batch, low: float = 0.5, high: float = 2.0) -> Result:
    """The same on the product: a row outside the bounds leaves the mask."""
    weights = []
    kept = []
    for trajectory in trajectories(batch):
        # Card: "sequence MIS: same on the product", "clamp log sum to +-20"
        product = math.exp(number(math.fsum(mismatch(token) for token in sampled(trajectory))))
        for _ in sampled(trajectory):
            weights.append(product)
            kept.append(low <= product <= high)
    return corrected(batch, weights, kept, shrink=True)


def icepop(batch: Batch, low: float = 0.5, high: float = 5.0) -> Result:
    """Card: "IcePop: token MIS with two-sided bounds; tokens outside get zero gradient"; the denominator stays."""
    weights = []
    kept = []
    for token in tokens(batch):
        rho = math.exp(mismatch(token))
        weights.append(rho)
        kept.append(low <= rho <= high)
    return corrected(batch, weights, kept, shrink=False)


def geo_rs(batch: Batch, low: float = 0.999, high: float = 1.001) -> Result:
    """Geometric rejection of rows, no weight."""
    kept = []
    for trajectory in trajectories(batch):
        if not sampled(trajectory):
            continue
        # seq_mean_k1 of the trainer: the mean of k1 = -log rho is compared with the logs of the bounds
        geometric = math.exp(-mean([mismatch(token) for token in sampled(trajectory)]))
        kept.extend(low <= geometric <= high for _ in sampled(trajectory))
    return corrected(batch, [1.0] * len(kept), kept, shrink=True)


def k3_rs(batch: Batch, limit: float = 1e-2) -> Result:
    """K3 rejection of rows, no weight."""
    kept = []
    for trajectory in trajectories(batch):
        if not sampled(trajectory):
            continue
        # Card: "K2/K3 rejection: keep iff ... mean_t (rho - 1 - log rho) <= threshold"
        distance = mean([math.exp(mismatch(one)) - 1 - mismatch(one) for one in sampled(trajectory)])
        kept.extend(distance <= limit for _ in sampled(trajectory))
    return corrected(batch, [1.0] * len(kept), kept, shrink=True)


def veto(batch: Batch, floor: float = 1e-4, cap: float = 2.0) -> Result:
    """Row veto on top of token TIS."""
    weights = []
    kept = []
    for trajectory in trajectories(batch):
        # Card: "Veto: drop the row if any rho_t < 1e-4"
        refused = any(math.exp(mismatch(token)) < floor for token in sampled(trajectory))
        for token in sampled(trajectory):
            weights.append(min(math.exp(mismatch(token)), cap))
            kept.append(not refused)
    return corrected(batch, weights, kept, shrink=True)


def sequence_mask(batch: Batch, delta: float = 0.5, low: float = 0.2, high: float = 0.28) -> Result:
    """Negative rows that the policy has left get no gradient, but stay in the token mean; the ratio is against behaviour,
    clipped, no weight."""
    per_trajectory = zscore(batch)
    advantages = spread(batch, per_trajectory)
    kept = []
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        if not sampled(trajectory):
            continue
        # Card: "drop row if A_i < 0 and (1/|y|) sum_t m (lp_old_or_mu - lp) > delta. Positives are never dropped."
        left = mean([-log_ratio(token).item() for token in sampled(trajectory)])
        kept.extend(not (advantage < 0 and left > delta) for _ in sampled(trajectory))
    count = len(kept)
    loss = constant(0.0)
    for token, advantage, keep in zip(tokens(batch), advantages, kept):
        if keep:
            # Card: "Bypass: set lp_old := lp_mu so r = pi_theta/mu; then do not also apply W"
            loss = loss + clipped(torch.exp(log_ratio(token)), advantage, low, high) / count
    return Result(advantages, loss, {"kept": kept})


# ---------------------------------------------------------------------------------------------------------------------
# Off-policy trust regions


def decoupled_ppo(batch: Batch, clip: float = 0.2, cap: float = 5.0) -> Result:
    """Clip around the proximal policy, weight from behaviour to proximal; z-score, token-mean."""
    advantages = spread(batch, zscore(batch))
    kept = []
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "u_t = exp(lp - lp_prox), b_t = sg[exp(lp_prox - lp_mu)]"
        u = torch.exp(proximal_log_ratio(token))
        b = math.exp(mismatch(token))
        # Card: "[code] b capped at 5 by masking tokens above it"; the denominator stays
        kept.append(b <= cap)
        if kept[-1]:
            # Card: "L_t = b_t PPO-clip(u_t, A_t)"
            loss = loss + b * clipped(u, advantage, clip, clip) / len(advantages)
    return Result(advantages, loss, {"kept": kept})


def masked_weight(batch: Batch, advantages: list[float], kept: list[bool], cap: float) -> Result:
    """Card: "L_t = -A sg[min(r,20)] lp keep", token-mean over all tokens."""
    loss = constant(0.0)
    for token, advantage, keep in zip(tokens(batch), advantages, kept):
        if keep:
            weight = min(math.exp(log_ratio(token).item()), cap)
            loss = loss + -advantage * weight * token.logp / len(advantages)
    return Result(advantages, loss, {"kept": kept})


def dppo_tv(batch: Batch, low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> Result:
    """Mask by the change of the sampled token's probability against behaviour; z-score."""
    advantages = spread(batch, zscore(batch))
    kept = []
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "p=exp(lp), p_o=exp(lp_old)"; "Anchor on the rollout policy."
        p, p_o = math.exp(token.logp.item()), math.exp(token.behaviour)
        # Card: "Binary-TV: keep if A>0 and p-p_o <= d_high, or A<=0 and p-p_o >= -d_low"
        kept.append(p - p_o <= high if advantage > 0 else p - p_o >= -low)
    return masked_weight(batch, advantages, kept, cap)


def binary_kl(p_o: float, p: float) -> float:
    """Card: "k = p_o log(p_o/p) + (1-p_o) log((1-p_o)/(1-p))". House: both clamped to [1e-8, 1 - 1e-8]."""
    p_o = max(1e-8, min(1 - 1e-8, p_o))
    p = max(1e-8, min(1 - 1e-8, p))
    return p_o * math.log(p_o / p) + (1 - p_o) * math.log((1 - p_o) / (1 - p))


def dppo_kl(batch: Batch, limit: float = 0.05, cap: float = 20.0) -> Result:
    """Mask by the binary KL of the sampled token against behaviour; z-score."""
    advantages = spread(batch, zscore(batch))
    kept = []
    for token, advantage in zip(tokens(batch), advantages):
        p, p_o = math.exp(token.logp.item()), math.exp(token.behaviour)
        # Card: "keep if k <= d or the move is toward p_o"; House: away is (A>0, p>p_o) or (A<=0, p<p_o)
        away = p > p_o if advantage > 0 else p < p_o
        kept.append(binary_kl(p_o, p) <= limit or not away)
    return masked_weight(batch, advantages, kept, cap)


def ctpo(batch: Batch, low: float = 0.025, high: float = 0.05, dual: float = 0.05, power: float = 0.5) -> Result:
    """Prefix product in value, the token's own gradient; a log-space clip that widens with position; token-mean."""
    per_trajectory = zscore(batch)
    count = len(list(tokens(batch)))
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        prefix = 0.0
        for t, token in enumerate(sampled(trajectory), start=1):
            # Card: "c_t = sum_{i<=t} m l_i", over all sampled tokens of the trajectory
            prefix = prefix + log_ratio(token).item()
            # Card: "ratio_t = exp(sg[c_t] + lp - sg[lp]), log clamped at <= 10"; House: and >= -20
            exponent = bounded(prefix + (token.logp - token.logp.detach()), -BOUND, 10.0)
            # Card: "clip in log space to [-a_low t^p, a_high t^p] with t the 1-based index among unmasked tokens"
            near = bounded(exponent, -low * t**power, high * t**power)
            # Card: "PPO max/min structure"
            policy = larger(-advantage * torch.exp(exponent), -advantage * torch.exp(near))
            # Card: "dual clip threshold exp(a_c t^p)", for A < 0
            if advantage < 0:
                policy = smaller(policy, constant(-advantage * math.exp(dual * t**power)))
            loss = loss + policy / count
    return Result(spread(batch, per_trajectory), loss)


def minpro(batch: Batch, low: float = 0.2, high: float = 0.28) -> Result:
    """The token's ratio times the smallest earlier one, clipped and detached; z-score, token-mean."""
    per_trajectory = zscore(batch)
    count = len(list(tokens(batch)))
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        earlier: list[float] = []
        for token in sampled(trajectory):
            move = log_ratio(token).item()
            # Card: "p_t = min_{i<t, m_i=1} r_i with p_first = 1; w_t = p_t r_t"; "The minimum is *not* capped at 1."
            weight = math.exp((min(earlier) if earlier else 0.0) + move)
            earlier.append(move)
            # Card: "L_t = -sg[clip(w_t, 1-eps_low, 1+eps_high)] A_t lp_t; AGG token-mean"
            weight = max(1 - low, min(1 + high, weight))
            loss = loss + -weight * advantage * token.logp / count
    return Result(spread(batch, per_trajectory), loss)


# ---------------------------------------------------------------------------------------------------------------------
# KL estimators of one sampled token. All take (logp, reference, behaviour); only the weighted one uses behaviour.


def k1(logp: Tensor, reference: float, behaviour: float = 0.0) -> Tensor:
    """Card: "x = lp - lp_ref. k1 = x"; "clamp x to +-20"."""
    return bounded(logp - reference, -BOUND, BOUND)


def k2(logp: Tensor, reference: float, behaviour: float = 0.0) -> Tensor:
    """Card: "k2 = x^2/2"."""
    return k1(logp, reference) ** 2 / 2


def k3(logp: Tensor, reference: float, behaviour: float = 0.0) -> Tensor:
    """Card: "k3 = exp(-x) + x - 1 (>=0, clamp x to +-20 and k3 to <= 10)"."""
    x = k1(logp, reference)
    return smaller(torch.exp(-x) + x - 1, constant(10.0))


def k3_plus(logp: Tensor, reference: float, behaviour: float = 0.0) -> Tensor:
    """Card: "Straight-through "k3+" ... value of k3, gradient of k2: k2 - sg[k2] + sg[k3]"."""
    pull = k2(logp, reference)
    return pull - pull.detach() + k3(logp, reference).detach()


def k3_weighted(logp: Tensor, reference: float, behaviour: float) -> Tensor:
    """Card: "multiply by the differentiable ratio pi_theta/pi_old: (pi_theta/pi_old) k3"."""
    return torch.exp(bounded(logp - behaviour, -BOUND, BOUND)) * k3(logp, reference)


def kl_loss(estimator: str) -> Callable[[Tensor, float, float], Tensor]:
    """The estimator called "k1", "k2", "k3", "k3+" or "weighted k3"."""
    return {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus, "weighted k3": k3_weighted}[estimator]
