"""Slow oracles of methods that reweight, drop or regularise tokens: REC / REP / RED and friends, ReMix, CAPO, Clip-Cov,
KL-Cov, STEER and HAPO. One loop, one scalar, one formula at a time; lines marked "Card" quote the specification.

House rules: the log-ratio is clamped to [-20, 20] per token; a group of one has advantage 0 (unless said otherwise);
N counts trajectories with at least one (kept) token; means over "all unmasked tokens" are over the whole batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .objectives import BOUND, bounded, constant, larger, mean, smaller, spread, std
from .records import Batch, Token, sampled, tokens, total, trajectories
from .result import Result


def centred(batch: Batch) -> list[float]:
    """One number per trajectory. Card: "A = R - mean_g (no std)." A group of one gets R - R = 0."""
    out = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            out.append(reward - mean(rewards))
    return out


def zscores(batch: Batch) -> list[float]:
    """One number per trajectory. Card: "GRPO z-score A=(R-mean)/(std+eps), std with n-1 and eps=1e-6 unless noted".
    House rule: a group of one gets 0."""
    out = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            if len(group) == 1:
                out.append(0.0)
            else:
                out.append((reward - mean(rewards)) / (std(rewards) + 1e-6))
    return out


def log_ratio(token: Token) -> Tensor:
    """Card: "l_t = lp - lp_old, clamped to [-20,20] before exp."; no gradient outside the range."""
    return bounded(token.logp - token.behaviour, -BOUND, BOUND)


def detached_ratio(token: Token) -> float:
    """Card: "r_t = exp(l_t)"; "ratio r detached everywhere"."""
    return math.exp(log_ratio(token).item())


# ---------------------------------------------------------------------------------------------------------------------
# REC: group-relative REINFORCE with clipping


def rec_one_side(
    batch: Batch, low: float = 0.2, high: float = 0.2, weighted: bool = True, cap: float = math.inf
) -> Result:
    """Keep what PPO would keep. extra["kept"]: one bool per token."""
    advantages = spread(batch, centred(batch))
    count = len(advantages)
    kept = []
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        ratio = detached_ratio(token)
        # Card: "one-side: (A>=0 and r<=1+e_h) or (A<=0 and r>=1-e_l)"
        keep = (advantage >= 0 and ratio <= 1 + high) or (advantage <= 0 and ratio >= 1 - low)
        # Card: "w: 1 (NoIS), r (IS)"; House: r is truncated at `cap`
        weight = min(ratio, cap) if weighted else 1.0
        # Card: "L_t = -A w lp keep + reg; AGG token-mean (masked mean)". Dropped tokens stay in the denominator.
        if keep:
            loss = loss + -advantage * weight * token.logp / count
        kept.append(keep)
    return Result(advantages, loss, {"kept": kept})


def rec_two_side(
    batch: Batch, low: float = 0.2, high: float = 0.2, weighted: bool = True, cap: float = math.inf
) -> Result:
    """Keep only ratios near one, whatever the advantage. extra["kept"]: one bool per token."""
    advantages = spread(batch, centred(batch))
    count = len(advantages)
    kept = []
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        ratio = detached_ratio(token)
        # Card: "two-side: 1-e_l<=r<=1+e_h"
        keep = 1 - low <= ratio <= 1 + high
        # Card: "w: 1 (NoIS), r (IS)"; House: r is truncated at `cap`
        weight = min(ratio, cap) if weighted else 1.0
        # Card: "L_t = -A w lp keep + reg; AGG token-mean (masked mean)". Dropped tokens stay in the denominator.
        if keep:
            loss = loss + -advantage * weight * token.logp / count
        kept.append(keep)
    return Result(advantages, loss, {"kept": kept})


def rec_ring(
    batch: Batch,
    low: float = 0.2,
    high: float = 0.2,
    low_outer: float = 0.6,
    high_outer: float = 2.0,
    weighted: bool = True,
    cap: float = math.inf,
) -> Result:
    """Two-side, and besides the far tokens that the advantage pulls back. extra["kept"]: one bool per token."""
    advantages = spread(batch, centred(batch))
    count = len(advantages)
    kept = []
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        ratio = detached_ratio(token)
        # Card: "ring: two-side, or (A>=0 and r<=1-e_l'), or (A<=0 and r>=1+e_h')"
        keep = 1 - low <= ratio <= 1 + high
        keep = keep or (advantage >= 0 and ratio <= 1 - low_outer)
        keep = keep or (advantage <= 0 and ratio >= 1 + high_outer)
        # Card: "w: 1 (NoIS), r (IS)"; House: r is truncated at `cap`
        weight = min(ratio, cap) if weighted else 1.0
        # Card: "L_t = -A w lp keep + reg; AGG token-mean (masked mean)". Dropped tokens stay in the denominator.
        if keep:
            loss = loss + -advantage * weight * token.logp / count
        kept.append(keep)
    return Result(advantages, loss, {"kept": kept})


def rec_sequence(batch: Batch, low: float = 3e-4, high: float = 4e-4) -> Result:
    """One-side rule on the sequence's geometric ratio, weight 1. extra["kept"]: one bool per token.

    Card: "except gspo mode seq-mean-token-mean". Dropped trajectories still count in N.
    """
    per_trajectory = centred(batch)
    n = sum(1 for trajectory in trajectories(batch) if sampled(trajectory))
    kept = []
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        if not sampled(trajectory):
            continue
        # Card: "gspo-one-side: one-side on exp(mean l)"
        ratio = math.exp(mean([log_ratio(token).item() for token in sampled(trajectory)]))
        keep = (advantage >= 0 and ratio <= 1 + high) or (advantage <= 0 and ratio >= 1 - low)
        for token in sampled(trajectory):
            if keep:
                loss = loss + -advantage * token.logp / len(sampled(trajectory)) / n
            kept.append(keep)
    return Result(spread(batch, per_trajectory), loss, {"kept": kept})


# ---------------------------------------------------------------------------------------------------------------------
# RED: shaping the data distribution


def red_weight(batch: Batch, temperature: float = 1.0) -> Result:
    """Weight exp(A / temperature), no clip, no ratio."""
    advantages = spread(batch, centred(batch))
    count = len(advantages)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "exp(A/temp) (RED-Weight, multiplies A)"
        weight = math.exp(advantage / temperature)
        loss = loss + -advantage * weight * token.logp / count
    return Result(advantages, loss)


def red_drop(batch: Batch) -> Result:
    """Balance negatives and positives of a group. extra["kept"]: one bool per trajectory.

    The advantage of a dropped trajectory is reported as 0. The token mean is over the tokens of kept trajectories.
    """
    per_trajectory = []
    kept = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        centre = mean(rewards)
        # released code: is_pos = reward >= group mean; the others are negatives (a mean off by a rounding error makes none)
        positives = [i for i in range(len(group)) if rewards[i] >= centre - 1e-9]
        negatives = [i for i in range(len(group)) if i not in positives]
        # Card: "if a group has more negatives than positives, drop random negatives until balanced". House rule:
        # "at random" is in ascending order of the lot.
        surplus = max(0, len(negatives) - len(positives))
        dropped = sorted(negatives, key=lambda i: group[i].lot)[:surplus]
        # Card: "recompute the mean"
        again = mean([rewards[i] for i in range(len(group)) if i not in dropped])
        for i in range(len(group)):
            kept.append(i not in dropped)
            per_trajectory.append(0.0 if i in dropped else rewards[i] - again)
    count = 0
    for trajectory, keep in zip(trajectories(batch), kept):
        if keep:
            count += len(sampled(trajectory))
    loss = constant(0.0)
    for trajectory, advantage, keep in zip(trajectories(batch), per_trajectory, kept):
        for token in sampled(trajectory):
            # Card: "L_t = -A w lp keep + reg" with w = 1
            if keep:
                loss = loss + -advantage * token.logp / count
    return Result(spread(batch, per_trajectory), loss, {"kept": kept})


# ---------------------------------------------------------------------------------------------------------------------
# REP, OPMD and AsymRE: regularisers and baselines


def kimi_opmd(batch: Batch, tau: float = 0.1) -> Result:
    """Card: "Kimi OPMD: w=1, no clip, k2 with tau." """
    advantages = spread(batch, centred(batch))
    count = len(advantages)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "k2: +tau (lp - lp_old)^2 (the 1/2 absorbed)"
        loss = loss + (-advantage * token.logp + tau * log_ratio(token) ** 2) / count
    return Result(advantages, loss)


def asym_re(batch: Batch, tau: float = 0.1) -> Result:
    """A lowered baseline; no separate forward-KL term. A group of one keeps A = tau."""
    per_trajectory = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            # Card: "identical to lowering the baseline by tau: A = R - (mean - tau)"
            per_trajectory.append(reward - (mean(rewards) - tau))
    advantages = spread(batch, per_trajectory)
    count = len(advantages)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "AsymRE: w=1, no clip"
        loss = loss + -advantage * token.logp / count
    return Result(advantages, loss)


def rep_forward(batch: Batch, tau: float = 0.1) -> Result:
    """A = R - mean, w = 1, no clip, and the forward KL as a term of the loss."""
    advantages = spread(batch, centred(batch))
    count = len(advantages)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "reg (REP): forward-KL: -tau lp"
        loss = loss + (-advantage * token.logp - tau * token.logp) / count
    return Result(advantages, loss)


def opmd(batch: Batch, tau: float = 1.0, baseline: str = "mean") -> Result:
    """Baseline mean or soft maximum. The reported advantage is already divided by 1 + tau."""
    per_trajectory = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        # Card: "tau log mean exp(R/tau)", the largest reward taken out of the exponent
        top = max(rewards)
        soft = top + tau * math.log(mean([math.exp((reward - top) / tau) for reward in rewards]))
        centre = {"mean": mean(rewards), "soft": soft}[baseline]
        for reward in rewards:
            # Card: "L = -(A lp)/(1+tau)"
            per_trajectory.append((reward - centre) / (1 + tau))
    advantages = spread(batch, per_trajectory)
    count = len(advantages)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        loss = loss + -advantage * token.logp / count
    return Result(advantages, loss)


# ---------------------------------------------------------------------------------------------------------------------
# ReMix


def base_share(t: int, begin: int = 50) -> float:
    """Card: "lambda_t = max(1 - .1 ceil(max(t-50,0)/10), .5)"; `begin` is the 50."""
    return max(1 - 0.1 * math.ceil(max(t - begin, 0) / 10), 0.5)


def k2(logp: Tensor, other: float) -> Tensor:
    """Card: "x = lp - lp_ref. ... k2 = x^2/2; ... clamp x to +-20"."""
    return bounded(logp - other, -BOUND, BOUND) ** 2 / 2


def remix(batch: Batch, clip: float = 0.2, base_weight: float = 1.0, kl_weight: float = 1e-3) -> Result:
    """Clip window around the ratio of the collecting step's policy; `behaviour` is pi_{k-i}, `proximal` is pi_k,
    `reference` is pi_base, `previous` is pi_{k-1}; `base_weight` is lambda_t."""
    advantages = spread(batch, zscores(batch))
    count = len(advantages)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "r = pi_theta/pi_{k-i}; c = sg[pi_k/pi_{k-i}]"
        ratio = torch.exp(log_ratio(token))
        centre = math.exp(max(-BOUND, min(BOUND, token.proximal - token.behaviour)))
        # Card: "L = -min(r A, clip(r, c-eps, c+eps) A)"
        policy = -smaller(ratio * advantage, bounded(ratio, centre - clip, centre + clip) * advantage)
        # Card: "KL-convex: lambda_t KL(pi_theta||pi_base) + (1-lambda_t) KL(pi_theta||pi_{k-1})"
        base = base_weight * k2(token.logp, token.reference)
        recent = (1 - base_weight) * k2(token.logp, token.previous)
        loss = loss + (policy + kl_weight * (base + recent)) / count
    return Result(advantages, loss)


# ---------------------------------------------------------------------------------------------------------------------
# CAPO


def curvature_sums(
    pi: list[float], action: int, hidden: list[float], eta: float, precondition: list[list[float]]
) -> tuple[float, float, float]:
    """sum_k v_k^2 q_k, sum_k pi_k v_k^2 q_k^2, sum_k pi_k v_k q_k with q_k = eta sum_d precondition[k][d] hidden[d]^2."""
    s1 = 0.0
    s2 = 0.0
    s3 = 0.0
    for k in range(len(pi)):
        # Card: "e_a one-hot of the sampled token, v = e_a - pi"
        v = (1.0 if k == action else 0.0) - pi[k]
        q = 0.0
        for d in range(len(hidden)):
            q += eta * precondition[k][d] * hidden[d] ** 2
        s1 += v * v * q
        s2 += pi[k] * v * v * q * q
        s3 += pi[k] * v * q
    return s1, s2, s3


def predicted(
    pi: list[float],
    action: int,
    hidden: list[float],
    advantage: float,
    eta: float,
    precondition: list[list[float]],
) -> tuple[float, float]:
    """(m_H, m_F) from the card's matrices, with D = precondition * g elementwise."""
    size = len(pi)
    width = len(hidden)
    # Card: "v = e_a - pi, gradient g = A v h^T (k x d)"
    v = [(1.0 if k == action else 0.0) - pi[k] for k in range(size)]
    g = [[advantage * v[k] * hidden[d] for d in range(width)] for k in range(size)]
    direction = [[precondition[k][d] * g[k][d] for d in range(width)] for k in range(size)]
    # Card: "u = D h."
    u = [math.fsum(direction[k][d] * hidden[d] for d in range(width)) for k in range(size)]
    inner = math.fsum(g[k][d] * direction[k][d] for k in range(size) for d in range(width))
    along = math.fsum(v[k] * u[k] for k in range(size))
    # "u^T(diag(pi) - pi pi^T) u"
    quadratic = 0.0
    for i in range(size):
        for j in range(size):
            entry = (pi[i] if i == j else 0.0) - pi[i] * pi[j]
            quadratic += u[i] * entry * u[j]
    # Card: "m_H = eta <g,D> + .5 eta^2 A [ (v.u)^2 - u^T(diag(pi) - pi pi^T) u ]"
    change = eta * inner + 0.5 * eta**2 * advantage * (along**2 - quadratic)
    # Card: "m_F = .5 eta^2 (v.u)^2"
    divergence = 0.5 * eta**2 * along**2
    return change, divergence


def capo(batch: Batch, tau_h: float = 1e-2, tau_f: float = 1e-4, clip: float = 0.2) -> Result:
    """GRPO without KL on the tokens whose predicted change is small. extra["kept"]: one bool per token.

    token.curvature = (s1, s2, s3) as in `curvature_sums`. Rows without a kept token do not count in N.
    """
    per_trajectory = zscores(batch)
    kept_rows = []
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        row = []
        for token in sampled(trajectory):
            s1, s2, s3 = token.curvature
            # u_k = A v_k q_k: eta <g,D> = A^2 s1; eta v.u = A s1; eta^2 u^T(diag(pi) - pi pi^T)u = A^2 (s2 - s3^2)
            along = advantage * s1
            quadratic = advantage**2 * (s2 - s3**2)
            # Card: "m_H = eta <g,D> + .5 eta^2 A [ (v.u)^2 - u^T(diag(pi) - pi pi^T) u ]"
            change = advantage**2 * s1 + 0.5 * advantage * (along**2 - quadratic)
            # Card: "m_F = .5 eta^2 (v.u)^2"
            divergence = 0.5 * along**2
            # Card: "keep_t = 1[|m_H| < tau_H] 1[m_F < tau_F]"
            row.append(abs(change) < tau_h and divergence < tau_f)
        kept_rows.append(row)
    n = sum(1 for row in kept_rows if any(row))
    loss = constant(0.0)
    for trajectory, advantage, row in zip(trajectories(batch), per_trajectory, kept_rows):
        for token, keep in zip(sampled(trajectory), row):
            if not keep:
                continue
            ratio = torch.exp(log_ratio(token))
            # Card: "L1_t = max(-A_t r_t, -A_t clip(r_t, 1-eps_low, 1+eps_high))"
            policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
            # Card: "L = ordinary policy loss with mask m keep, seq-mean over kept tokens (denominator = kept tokens ...)"
            loss = loss + policy / sum(row) / n
    return Result(spread(batch, per_trajectory), loss, {"kept": [keep for row in kept_rows for keep in row]})


# ---------------------------------------------------------------------------------------------------------------------
# Clip-Cov and KL-Cov


def covariances(batch: Batch, advantages: list[float]) -> list[float]:
    """Card: "cov_t = (A_t - mean A)(lp_t - mean lp), means over all unmasked tokens of the (micro-)batch, detached."
    lp itself is not clamped."""
    logps = [token.logp.item() for token in tokens(batch)]
    if not logps:
        return []
    mean_advantage = mean(advantages)
    mean_logp = mean(logps)
    return [(advantage - mean_advantage) * (logp - mean_logp) for advantage, logp in zip(advantages, logps)]


def quota(fraction: float, count: int) -> int:
    """Card: "n = max(1, floor(f N_tok))"; but "Reduces to: f=0 (no token)"."""
    if fraction == 0:
        return 0
    return max(1, math.floor(fraction * count))


def clip_cov(
    batch: Batch,
    fraction: float = 2e-4,
    low_cov: float = 1.0,
    high_cov: float = 5.0,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
) -> Result:
    """PPO-clip, and a few tokens of high covariance have no loss. extra["zeroed"]: one bool per token."""
    advantages = spread(batch, zscores(batch))
    count = len(advantages)
    found = covariances(batch, advantages)
    lots = [token.lot for token in tokens(batch)]
    candidates = []
    for at, (token, advantage) in enumerate(zip(tokens(batch), advantages)):
        ratio = detached_ratio(token)
        # Card: "Gradient is zero exactly when (A>0, r>1+eps_high), (A<0, r<1-eps_low)"
        clipped = (advantage > 0 and ratio > 1 + clip_high) or (advantage < 0 and ratio < 1 - clip_low)
        # Card: "candidates = unmasked, not already PPO-clipped, cov in (w_lo, w_hi)"
        if not clipped and low_cov < found[at] < high_cov:
            candidates.append(at)
    # Card: "pick n = max(1, floor(f N_tok)) of them at random"; all of them if there are fewer
    chosen = sorted(candidates, key=lambda at: lots[at])[: quota(fraction, count)]
    zeroed = [at in chosen for at in range(count)]
    loss = constant(0.0)
    for token, advantage, zero in zip(tokens(batch), advantages, zeroed):
        # Card: "set their loss to 0 (they stay in the denominator). Others: PPO-clip."
        if zero:
            continue
        ratio = torch.exp(log_ratio(token))
        policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip_low, 1 + clip_high))
        loss = loss + policy / count
    return Result(advantages, loss, {"zeroed": zeroed})


def kl_cov(batch: Batch, fraction: float = 2e-3, beta: float = 1.0) -> Result:
    """No clip; the tokens of highest covariance pay for their log-ratio. extra["chosen"]: one bool per token."""
    advantages = spread(batch, zscores(batch))
    count = len(advantages)
    found = covariances(batch, advantages)
    # Card: "for the top max(1, floor(f N_tok)) tokens by cov"; ties in natural order (the sort is stable)
    top = sorted(range(count), key=lambda at: -found[at])[: quota(fraction, count)]
    chosen = [at in top for at in range(count)]
    loss = constant(0.0)
    for token, advantage, pays in zip(tokens(batch), advantages, chosen):
        # Card: "L_t = -A_t r_t for all (no clip)"
        policy = -advantage * torch.exp(log_ratio(token))
        # Card: "add beta |lp - lp_old|"; "sub-gradient sign 0" at r=1, which is what torch.abs has
        if pays:
            policy = policy + beta * torch.abs(log_ratio(token))
        loss = loss + policy / count
    return Result(advantages, loss, {"chosen": chosen})


# ---------------------------------------------------------------------------------------------------------------------
# STEER


def entropy_changes(batch: Batch, advantages: list[float]) -> list[float]:
    """Omega, one float per token. Card: "Probabilities clamped to >= 1e-8", also inside the logarithm."""
    out = []
    for token, advantage in zip(tokens(batch), advantages):
        pi = max(math.exp(token.logp.item()), 1e-8)
        pi_old = max(math.exp(token.behaviour), 1e-8)
        # Card: "Omega_t = (A_t/pi_old(y_t)) pi_t (1-pi_t)(log pi_t + H_t), pi_t = exp(lp)."
        out.append(advantage / pi_old * pi * (1 - pi) * (math.log(pi) + token.entropy.item()))
    return out


def steer(
    batch: Batch,
    form: str = "linear",
    lam_min: float = 0.8,
    lam_max: float = 1.2,
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = 10.0,
) -> Result:
    """PPO dual clip, tokens of a large predicted entropy change weighted down. extra["weight"]: one float per token.

    `form` is "linear" or "exponential"; the exponential form has 1.0 as its largest weight and ignores `lam_max`.
    """
    advantages = spread(batch, zscores(batch))
    count = len(advantages)
    sizes = [abs(omega) for omega in entropy_changes(batch, advantages)]
    weights = []
    for size in sizes:
        if form == "linear":
            if max(sizes) == min(sizes):
                # Card: "(constant midpoint if max=min)"
                weights.append((lam_max + lam_min) / 2)
            else:
                # Card: "linear: W = lam_max - (|Omega|-min)/(max-min) (lam_max-lam_min)"
                weights.append(lam_max - (size - min(sizes)) / (max(sizes) - min(sizes)) * (lam_max - lam_min))
        elif form == "exponential":
            # Card: "exponential: W = clip(exp(-k|Omega|), lam_min, 1), k = -ln(lam_min)/max(|Omega|_max, .02)"
            k = -math.log(lam_min) / max(max(sizes), 0.02)
            weights.append(min(1.0, max(lam_min, math.exp(-k * size))))
        else:
            raise ValueError(form)
    loss = constant(0.0)
    for token, advantage, weight in zip(tokens(batch), advantages, weights):
        ratio = torch.exp(log_ratio(token))
        policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - low, 1 + high))
        # Card: "Dual clip: for A_t<0 use min(L1_t, -c A_t) with c>1; for A_t>=0 use L1_t."
        if dual is not None and advantage < 0:
            policy = smaller(policy, constant(-dual * advantage))
        # Card: "L_t = W_t PPO-dual-clip."
        loss = loss + weight * policy / count
    return Result(advantages, loss, {"weight": weights})


# ---------------------------------------------------------------------------------------------------------------------
# HAPO


def nearest_quantile(numbers: list[float], rho: float) -> float:
    """Sorted ascending, the number at rho (n - 1) rounded half to even."""
    return sorted(numbers)[round(rho * (len(numbers) - 1))]


def normalised_entropies(entropies: list[float], rho: float) -> list[float]:
    """hh in [-1, 1], one per token."""
    if not entropies:
        return []
    # Card: "x = log max(H,1e-8); q = rho-quantile of x over unmasked tokens (nearest)"
    xs = [math.log(max(entropy, 1e-8)) for entropy in entropies]
    q = nearest_quantile(xs, rho)
    # Card: "s = sqrt(mean (x-q)^2); h = (x-q)/s"
    s = math.sqrt(mean([(x - q) ** 2 for x in xs]))
    if s == 0:
        return [0.0 for _ in xs]
    hs = [(x - q) / s for x in xs]
    out = []
    for h in hs:
        # Card: "hh = h/max(h) for h>0, h/|min(h)| for h<=0, so hh in [-1,1]"
        if h > 0:
            out.append(h / max(hs))
        elif h == 0:
            out.append(0.0)  # also where min(h) = 0
        else:
            out.append(h / abs(min(hs)))
    return out


def token_level_zscores(batch: Batch) -> list[float]:
    """One number per trajectory; a trajectory without tokens adds nothing to the statistics of its group (and its own
    number is never used), except in the fallback, where every trajectory counts once."""
    plain = zscores(batch)
    out = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        fallback = plain[len(out) : len(out) + len(group)]
        # Card: "repeat each response's reward over its tokens"
        repeated = []
        for trajectory, reward in zip(group, rewards):
            for _ in sampled(trajectory):
                repeated.append(reward)
        if len(group) == 1 or not repeated:
            out.extend(0.0 for _ in group)  # house rule: a group of one gets 0
            continue
        # Card: "mean and population std over all tokens of the group; A = (R-mean)/(std+1e-6)"
        centre = mean(repeated)
        scale = math.sqrt(mean([(reward - centre) ** 2 for reward in repeated]))
        found = [(reward - centre) / (scale + 1e-6) for reward in rewards]
        # Card: "If any |A| >= 5 in the group use the GRPO z-score for the group."
        large = False
        for trajectory, advantage in zip(group, found):
            if sampled(trajectory) and abs(advantage) >= 5:
                large = True
        out.extend(fallback if large else found)
    return out


def hapo(
    batch: Batch,
    rho: float = 0.8,
    alpha: float = 1.0,
    beta: float = 1.0,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = 10.0,
) -> Result:
    """Parts 2, 3 and 4 of the card (the paper's intent, not [code]) with H = old_entropy; no filter.

    `advantage` is that of part 2. extra, per token: "hh"; "low" and "high", the adapted clip ranges; "scale", the
    factor of part 4 (1 + beta hh or 1).
    """
    advantages = spread(batch, token_level_zscores(batch))
    count = len(advantages)
    hhs = normalised_entropies([token.old_entropy for token in tokens(batch)], rho)
    lows = []
    highs = []
    scales = []
    loss = constant(0.0)
    for token, advantage, hh in zip(tokens(batch), advantages, hhs):
        # Card: "eps_low <- eps_low (1 - alpha hh) where hh <= 0; eps_high <- eps_high (1 + alpha hh) where hh > 0;
        # otherwise base."
        eps_low = low * (1 - alpha * hh) if hh <= 0 else low
        eps_high = high * (1 + alpha * hh) if hh > 0 else high
        # Card: "(uses the adapted ranges): neutral = r in (1-eps_low/2, 1+eps_high/2)"
        ratio = torch.exp(log_ratio(token))
        neutral = 1 - eps_low / 2 < ratio.item() < 1 + eps_high / 2
        if hh > 0:
            # Card: "hh > 0: A <- A(1+beta hh) outside neutral, unchanged inside."
            scale = 1.0 if neutral else 1 + beta * hh
        else:
            # Card: "hh <= 0: A <- A(1+beta hh) inside neutral (i.e. damped), unchanged outside."
            scale = 1 + beta * hh if neutral else 1.0
        shaped = advantage * scale
        # Card: "PPO dual clip, token-mean"
        policy = larger(-shaped * ratio, -shaped * bounded(ratio, 1 - eps_low, 1 + eps_high))
        if dual is not None and shaped < 0:
            policy = smaller(policy, constant(-dual * shaped))
        loss = loss + policy / count
        lows.append(eps_low)
        highs.append(eps_high)
        scales.append(scale)
    return Result(advantages, loss, {"hh": hhs, "low": lows, "high": highs, "scale": scales})


def echo(
    batch: Batch,
    boost: float = 0.1,
    bonus: float = 0.0,
    least: float = 0.05,
    most: float = 0.2,
    steep: float = 4.0,
    tail: int = 16,
    beta: float = 1e-3,
) -> Result:
    """Advantages shaped by entropy and doubt; a clip by the confidence of a trajectory's end; k3 to the reference; token mean."""
    every = list(tokens(batch))
    if not every:
        return Result([], constant(0.0))

    def whitened(numbers: list[float]) -> list[float]:
        # Card: "z = masked whitening over the batch"
        variance = std(numbers) ** 2 if len(numbers) > 1 else 0.0
        return [(number - mean(numbers)) / math.sqrt(variance + 1e-8) for number in numbers]

    # Card: "C' in [0,1] = mean of the top-k probabilities (or probability of the sampled token)"
    sure = [math.exp(token.behaviour) for token in every]
    uncertain = whitened([token.old_entropy for token in every])
    doubtful = whitened([1 - c for c in sure])
    # Card: "S_t = clamp(a'·z(H_t)+b'·z(1−C'_t), ±S_max)", a' = b' = 1, S_max = 2
    shape = [max(-2.0, min(2.0, h + c)) for h, c in zip(uncertain, doubtful)]
    means, at = [], 0
    for group in batch:
        count = sum(len(sampled(one)) for one in group)
        own = shape[at : at + count]
        means += [mean(own) if own else 0.0] * count
        at += count
    # Card: "A_t <- A_t(1+m·S_t) [+ λ(S_t−group mean S)]"
    plain = spread(batch, zscores(batch))
    advantages = [a * (1 + boost * s) + bonus * (s - m) for a, s, m in zip(plain, shape, means)]
    loss, at = constant(0.0), 0
    for one in trajectories(batch):
        own = sampled(one)
        if not own:
            continue
        # Card: "ε = ε_min+(ε_max−ε_min)·σ(κ(1−C'^tail)), C'^tail = mean C' over the last 16 tokens"
        end = mean([math.exp(token.behaviour) for token in own[-tail:]])
        eps = least + (most - least) / (1 + math.exp(-steep * (1 - end)))
        for token, advantage in zip(own, advantages[at:]):
            ratio = torch.exp(log_ratio(token))
            x = bounded(token.reference - token.logp, -20.0, 20.0)
            kl = smaller(torch.exp(x) - x - 1, constant(10.0))
            policy = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - eps, 1 + eps))
            loss = loss + (policy + beta * kl) / len(every)
        at += len(own)
    return Result(advantages, loss)


def trimpi(batch: Batch, clip: float = 0.2) -> Result:
    """GRPO whose ratio has the policy without the document on both sides: `proximal`, measured under the plain prompt."""
    advantages = zscores(batch)
    used = sum(1 for one in trajectories(batch) if sampled(one))
    loss = constant(0.0)
    for one, advantage in zip(trajectories(batch), advantages):
        for token in sampled(one):
            # Card: "For all 2G use r_t = pi_theta(o_t|Q,I,o_<t)/pi_old(o_t|Q,I,o_<t): both without P"
            ratio = torch.exp(bounded(token.logp - token.proximal, -BOUND, BOUND))
            gain = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
            loss = loss + gain / len(sampled(one)) / used
    return Result(spread(batch, advantages), loss)


def a2fm(batch: Batch, alpha: float = 2.0, easy: float = 0.5, clip: float = 0.2) -> Result:
    """GRPO on rewards that pay expensive modes less where the cheapest one, mode 0, suffices."""
    shaped = []
    for group in batch:
        forced = [one for one in group if one.facts.get("forced", 0)]
        instant = [one for one in forced if one.facts.get("mode", 0) == 0]
        solved = lambda rows: mean([float(total(one) > 0) for one in rows]) if rows else 0.0  # noqa: E731
        rewards = []
        for one in group:
            # Card: "r_adapt = 1 − p^α for a non-instant rollout on an easy query, else 1", "p = success rate over all forced"
            penalised = bool(instant) and solved(instant) >= easy and one.facts.get("mode", 0) != 0
            rewards.append(total(one) * (1 - solved(forced) ** alpha if penalised else 1.0))
        deviation = std(rewards) if len(rewards) > 1 else 0.0
        shaped += [(r - mean(rewards)) / (deviation + 1e-6) if len(rewards) > 1 else 0.0 for r in rewards]
    used = sum(1 for one in trajectories(batch) if sampled(one))
    loss = constant(0.0)
    for one, advantage in zip(trajectories(batch), shaped):
        for token in sampled(one):
            ratio = torch.exp(log_ratio(token))
            gain = larger(-advantage * ratio, -advantage * bounded(ratio, 1 - clip, 1 + clip))
            loss = loss + gain / len(sampled(one)) / used
    return Result(spread(batch, shaped), loss)
