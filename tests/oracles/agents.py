"""Slow oracles of methods for long rollouts, turns and agents, of RLHF-era stabilisers and of two recipes.

As in `objectives.py`: one loop, one scalar, one formula at a time; lines marked "Card" quote the specification.
`Result.advantage` has one float per token in natural order; `Result.loss` is the float64 scalar to be minimised.
"""

from __future__ import annotations

import math

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
from .records import Batch, Token, Trajectory, sampled, tokens, total, trajectories
from .result import Result

Key = tuple[int, int]  # (group index, trajectory index inside the group)


def log_ratio(token: Token) -> Tensor:
    """Card: "l_t = lp - lp_old, clamped to [-20,20] before exp."."""
    return bounded(token.logp - token.behaviour, -BOUND, BOUND)


def z_scores(numbers: list[float]) -> list[float]:
    """Card: "A=(R-mean)/(std+eps), std with n-1 and eps=1e-6 unless noted". House rule: a lone number gets 0."""
    if len(numbers) < 2:
        return [0.0 for _ in numbers]
    return [(number - mean(numbers)) / (std(numbers) + 1e-6) for number in numbers]


def outcome(batch: Batch) -> list[float]:
    """The group z-score of the total reward, one per trajectory."""
    out = []
    for group in batch:
        out.extend(z_scores([total(trajectory) for trajectory in group]))
    return out


def ppo_clip(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """Card: "L1_t = max(-A_t r_t, -A_t clip(r_t, 1-eps_low, 1+eps_high))"."""
    return larger(-advantage * ratio, -advantage * bounded(ratio, 1 - low, 1 + high))


def value_loss(token: Token, target: float, value_clip: float) -> Tensor:
    """Card (PPO): "L_V = 0.5 AGG[max((v-Ret)^2, (clip(v, v_old-eps_v, v_old+eps_v)-Ret)^2)]", one token of it."""
    near = bounded(token.value, token.old_value - value_clip, token.old_value + value_clip)
    return 0.5 * larger((token.value - target) ** 2, (near - target) ** 2)


# ---------------------------------------------------------------------------------------------------------------------
# NGRPO


def ngrpo(batch: Batch, best: float = 1.0, low: float = 0.16, high: float = 0.24) -> Result:
    """A virtual perfect response in the group statistics; tighter clip for negatives; token-mean, no KL."""
    per_trajectory = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        # Card: "S = {R_1..R_G, R_max}"
        enlarged = [*rewards, best]
        for reward in rewards:
            # Card: "A_i = (R_i - mean S)/(std S + 1e-6) for real responses only (std n-1 over G+1)"
            per_trajectory.append((reward - mean(enlarged)) / (std(enlarged) + 1e-6))
    advantages = spread(batch, per_trajectory)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "Clip: [1 - e_neg, 1 + e_pos]"
        policy = ppo_clip(torch.exp(log_ratio(token)), advantage, low, high)
        # Card: "Token mean, no KL."
        loss = loss + policy / len(advantages)
    return Result(advantages, loss)


# ---------------------------------------------------------------------------------------------------------------------
# MiniRL


def minirl(batch: Batch, low: float = 0.2, high: float = 0.27, cap: float = 5.0) -> Result:
    """Truncated importance weight against mu (`behaviour`), mask by the ratio to pi_old (`proximal`), token sum.

    N counts every trajectory with a token, also one whose tokens are all masked. extra: `kept` (bool) and `weight`
    (before the mask), per token.
    """
    per_trajectory = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            # Card: "A_i = R - mean_g (... default to mean only)"; a group of one gets 0
            per_trajectory.append(reward - mean(rewards) if len(group) > 1 else 0.0)
    advantages = spread(batch, per_trajectory)
    n = rows(batch)
    kept = []
    weights = []
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        # Card: "r_t = pi_theta/pi_old used only for the mask"
        stale = math.exp(bounded(token.logp - token.proximal, -BOUND, BOUND).item())
        # Card: "M_t = 0 if (A>0 and r>1+e_h) or (A<0 and r<1-e_l), else 1"
        out = (advantage > 0 and stale > 1 + high) or (advantage < 0 and stale < 1 - low)
        # Card: "sg[min(pi_theta/mu, cap)]"
        weight = min(math.exp(log_ratio(token).item()), cap)
        kept.append(not out)
        weights.append(weight)
        # Card: "J = E[ sum_t M_t sg[min(pi_theta/mu, cap)] A_i lp_t ]", "token *sum* per response, mean over responses"
        if not out:
            loss = loss + -weight * advantage * token.logp / n
    return Result(advantages, loss, {"kept": kept, "weight": weights})


# ---------------------------------------------------------------------------------------------------------------------
# ScaleRL


def scale_rl(batch: Batch, cap: float = 5.0) -> Result:
    """CISPO with an upper cap, batch-scaled advantages, groups of equal rewards removed, prompt-mean.

    extra: `kept` (bool, the token's group stays in the effective batch) and `weight`, per token.
    """
    centred = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            # Card: "A_i = R_i - mean_g"
            centred.append(reward - mean(rewards))
    # Card: "divided by the *batch* std"; over all trajectories, also those of groups that are removed
    scale = std(centred) if len(centred) > 1 else 0.0
    advantages = spread(batch, [one / (scale + 1e-6) for one in centred])
    # Card: "zero-variance prompts removed from the effective batch"
    stays = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        stays.append(len(rewards) > 0 and max(rewards) - min(rewards) > 1e-6)
    prompts = sum(1 for group, stay in zip(batch, stays) if stay and list(tokens([group])))
    kept = []
    weights = []
    loss = constant(0.0)
    at = 0
    for group, stay in zip(batch, stays):
        pooled = list(tokens([group]))
        for token in pooled:
            advantage = advantages[at]
            at += 1
            # Card (CISPO): "L_{i,t} = -sg[clip(r_t, 1-e_low, 1+e_high)] A_i lp_t", "CISPO with upper cap"
            weight = min(math.exp(log_ratio(token).item()), cap)
            kept.append(stay)
            weights.append(weight)
            # Card: "prompt-mean: per prompt, pool the tokens of its G responses into one token mean, then average
            # over prompts"
            if stay:
                loss = loss + -weight * advantage * token.logp / len(pooled) / prompts
    return Result(advantages, loss, {"kept": kept, "weight": weights})


def sigmoid(C: float, A: float, B: float, mid: float, R0: float) -> float:
    """Card: "R(C) = R0 + (A - R0)/(1 + (C_mid/C)^B)"."""
    return R0 + (A - R0) / (1 + (mid / C) ** B)


# ---------------------------------------------------------------------------------------------------------------------
# DGPO


def dgpo(batch: Batch, kappa: float = 1.0, tau: float = 0.5, vocabulary: int = 32, clip: float = 0.2) -> Result:
    """Group z-score spread over the tokens of a trajectory by distance to the reference times entropy.

    `advantage` is A_i without W. extra: `weight` = W_t per token.
    """
    per_trajectory = outcome(batch)
    n = rows(batch)
    weights = []
    loss = constant(0.0)
    for trajectory, advantage in zip(trajectories(batch), per_trajectory):
        scores = []
        for token in sampled(trajectory):
            # Card: "Hn_t = H_t / log|V|"
            uncertainty = token.entropy.item() / math.log(vocabulary)
            # Card: "s_t = d_t Hn_t^kappa"
            scores.append(token.hellinger * uncertainty**kappa)
        # Card: "W_t = |y| softmax_t(s_t/tau) over unmasked tokens of the row (mean 1)"
        normaliser = math.fsum(math.exp(score / tau) for score in scores)
        for token, score in zip(sampled(trajectory), scores):
            weight = len(scores) * math.exp(score / tau) / normaliser
            weights.append(weight)
            # Card: "A_{i,t} = A_i W_t, W detached; PPO-clip eps .2, no KL; AGG as GRPO"
            policy = ppo_clip(torch.exp(log_ratio(token)), advantage * weight, clip, clip)
            loss = loss + policy / len(scores) / n
    return Result(spread(batch, per_trajectory), loss, {"weight": weights})


# ---------------------------------------------------------------------------------------------------------------------
# ASPO


def first_call(trajectory: Trajectory) -> int | None:
    """Card: "p_i = token position of the first code block": sampled tokens before the first turn that calls a tool."""
    position = 0
    for turn in trajectory.turns:
        if turn.tool_calls > 0:
            return position
        position += len(turn.tokens)
    return None


def aspo(
    batch: Batch,
    delta: float = -2.0,
    k: float = 0.7,
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = None,
) -> Result:
    """DAPO without overlong shaping; the advantage of correct responses with a tool call is shaped by its position.

    `advantage` is the shaped one. extra: `base` = A_c per trajectory.
    """
    base = outcome(batch)
    shaped = []
    at = 0
    for group in batch:
        # Card: "for responses that are correct *and* contain code", "means over that subset of the group"
        positions = []
        lengths = []
        for trajectory in group:
            position = first_call(trajectory)
            if trajectory.success and position is not None:
                positions.append(float(position))
                lengths.append(float(len(sampled(trajectory))))
        for trajectory in group:
            advantage = base[at]
            at += 1
            position = first_call(trajectory)
            inside = trajectory.success and position is not None
            # Card: "A_c = the ordinary (positive) advantage. Others unchanged."; a subset without any token has L = 0
            if inside and advantage > 0 and mean(lengths) > 0:
                # Card: "A_i <- A_c + clip(delta (p_i - mean p)/mean L, -k A_c, k A_c)"
                shift = delta * (position - mean(positions)) / mean(lengths)
                advantage = advantage + max(-k * advantage, min(k * advantage, shift))
            shaped.append(advantage)
    advantages = spread(batch, shaped)
    loss = constant(0.0)
    for token, advantage in zip(tokens(batch), advantages):
        policy = ppo_clip(torch.exp(log_ratio(token)), advantage, low, high)
        # Card (PPO): "Dual clip: for A_t<0 use min(L1_t, -c A_t) with c>1; for A_t>=0 use L1_t."
        if dual is not None and advantage < 0:
            policy = smaller(policy, constant(-dual * advantage))
        # Card (DAPO): "AGG token-mean"
        loss = loss + policy / len(advantages)
    return Result(advantages, loss, {"base": base})


# ---------------------------------------------------------------------------------------------------------------------
# A2TGPO


def a2tgpo(
    batch: Batch,
    alpha: float = 0.3,
    beta: float = 0.3,
    gamma: float = 1.0,
    low: float = 0.2,
    high: float = 0.2,
) -> Result:
    """Information gain per turn in the advantage and in the width of the turn's clip.

    extra, per turn in natural order (turns without tokens too; the answer turn has z = D = 0 and c = 1): `scale` = c_k,
    `z`, `credit` = D_k.
    """
    out = outcome(batch)
    count = len(list(tokens(batch)))
    advantages = []
    scales = []
    all_z = []
    all_credit = []
    loss = constant(0.0)
    at = 0
    for group in batch:
        # Card: "IG_k = score(gold | history after turn k) - score(gold | history before)"
        gains = []
        for trajectory in group:
            found = []
            before = trajectory.before
            for turn in trajectory.turns[:-1]:  # the last turn is the answer turn
                found.append(turn.answer - before)
                before = turn.answer
            gains.append(found)
        # Card: "z_k = (IG_k - mean)/(std+eps) within (prompt, turn index)"
        z = []
        for i in range(len(group)):
            z.append([0.0] * len(gains[i]))
        for k in range(max([len(found) for found in gains], default=0)):
            members = [i for i in range(len(group)) if k < len(gains[i])]
            for i, score in zip(members, z_scores([gains[i][k] for i in members])):
                z[i][k] = score
        for i, trajectory in enumerate(group):
            n = len(z[i])
            for k, turn in enumerate(trajectory.turns):
                if k < n:
                    # Card: "D_k = (1/sqrt(n-k)) sum_{j>=k} gamma^{j-k} z_j over the remaining IG turns"
                    credit = math.fsum(gamma ** (j - k) * z[i][j] for j in range(k, n)) / math.sqrt(n - k)
                    # Card: "c_k = 1 + beta (2 sigma(z_k) - 1)"
                    scale = 1 + beta * (2 / (1 + math.exp(-z[i][k])) - 1)
                    all_z.append(z[i][k])
                else:
                    # Card: "the answer turn gets A_out (group z-score)"; "answer turn 1"
                    credit = 0.0
                    scale = 1.0
                    all_z.append(0.0)
                all_credit.append(credit)
                scales.append(scale)
                # Card: "A_k = A_out + alpha D_k"
                advantage = out[at] + alpha * credit
                # Card (Turn-PPO): "w^k = exp((1/n_k) sum_{t in turn k} m l_t), n_k tokens"
                log_ratios = [log_ratio(token).item() for token in turn.tokens]
                for token in turn.tokens:
                    advantages.append(advantage)
                    # Card (Turn-PPO): "w_t = sg[w^k] exp(lp - sg[lp])"
                    ratio = math.exp(mean(log_ratios)) * torch.exp(token.logp - token.logp.detach())
                    # Card: "clip to [1 - eps_low c_k, 1 + eps_high c_k]"
                    loss = loss + ppo_clip(ratio, advantage, low * scale, high * scale) / count
            at += 1
    return Result(advantages, loss, {"scale": scales, "z": all_z, "credit": all_credit})


# ---------------------------------------------------------------------------------------------------------------------
# T-PPO


def egae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Card: "set V(s_l) := V(s_{l-1}); delta_k = r_k + gamma V(s_{k+1}) - V(s_k); A_t = sum_{k=t}^{l-1} (gamma
    lambda)^{k-t} delta_k"."""
    length = len(rewards)
    deltas = []
    for k in range(length):
        following = values[k + 1] if k + 1 < length else values[length - 1]
        deltas.append(rewards[k] + gamma * following - values[k])
    out = []
    for t in range(length):
        out.append(math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)))
    return out


def t_ppo(batch: Batch, clip: float = 0.2, gamma: float = 1.0, lam: float = 0.95, value_weight: float = 1.0) -> Result:
    """Extended GAE for unfinished trajectories, GAE for finished ones, not whitened; Monte-Carlo critic.

    extra, per token: `finished` (bool) and `target` = the Monte-Carlo return (the critic uses it where finished).
    """
    advantages = []
    targets = []
    finished = []
    for trajectory in trajectories(batch):
        paid = token_rewards(trajectory)
        values = [token.old_value for token in sampled(trajectory)]
        # Card: "Extended GAE for a response unfinished after l tokens"
        # Card: "Finished response: standard GAE with V(end)=0."
        advantages.extend((egae if trajectory.truncated else gae)(paid, values, gamma, lam))
        for t in range(len(paid)):
            # Card: "Monte-Carlo targets"
            targets.append(math.fsum(gamma ** (k - t) * paid[k] for k in range(t, len(paid))))
            finished.append(not trajectory.truncated)
    complete = sum(finished)
    loss = constant(0.0)
    for token, advantage, target, done in zip(tokens(batch), advantages, targets, finished):
        # Card: "policy loss uses only tokens generated in the current window": all tokens of the batch
        loss = loss + ppo_clip(torch.exp(log_ratio(token)), advantage, clip, clip) / len(advantages)
        # Card: "critic loss uses only finished responses, with Monte-Carlo targets, over all their tokens"
        if done:
            loss = loss + value_weight * 0.5 * (token.value - target) ** 2 / complete
    return Result(advantages, loss, {"finished": finished, "target": targets})


# ---------------------------------------------------------------------------------------------------------------------
# Mini-o3


def mini_o3(batch: Batch, low: float = 0.2, high: float = 0.3) -> Result:
    """Card: "Compute group advantages normally (released code keeps exceeded rollouts in mean and std) ... Then set the whole
    response mask to 0 where exceed_i=1 and normalise the loss by the remaining completed rollouts/tokens"."""
    advantages = spread(batch, outcome(batch))
    complete = [not one.truncated for one in trajectories(batch) for _ in sampled(one)]
    loss = constant(0.0)
    for token, advantage, done in zip(tokens(batch), advantages, complete):
        if done:
            loss = loss + ppo_clip(torch.exp(log_ratio(token)), advantage, low, high) / sum(complete)
    return Result(advantages, loss, {"complete": complete})


# ---------------------------------------------------------------------------------------------------------------------
# SeeUPO


def see_upo_advantage(batch: Batch) -> dict[Key, float]:
    """Card: "A_i = R_i - mean_g, then batch-level normalisation (divide by batch std). Set M_K = A."."""
    centred = {}
    for g, group in enumerate(batch):
        rewards = [total(trajectory) for trajectory in group]
        for i, reward in enumerate(rewards):
            centred[g, i] = reward - mean(rewards)
    scale = std(list(centred.values())) if len(centred) > 1 else 0.0
    return {key: one / (scale + 1e-6) for key, one in centred.items()}


def see_upo_turn(batch: Batch, k: int, M: dict[Key, float], clip: float = 0.2, beta: float = 0.002) -> Result:
    """One step of the sequential scheme: the loss of turn index k (0-based) alone, with the compound advantage M.

    The length-normalised ratio is used. `advantage` is M on the tokens of turn k and 0 on all others. extra: `ratio`,
    by (group, trajectory): the present ratio of turn k, 1 where the turn is absent or empty.
    """
    n = 0
    for trajectory in trajectories(batch):
        if k < len(trajectory.turns) and trajectory.turns[k].tokens:
            n += 1
    advantages = []
    ratios = {}
    loss = constant(0.0)
    for g, group in enumerate(batch):
        for i, trajectory in enumerate(group):
            # Card: "Shorter trajectories are padded with no-op turns (ratio 1, mask 0)."
            ratios[g, i] = 1.0
            for index, turn in enumerate(trajectory.turns):
                for _ in turn.tokens:
                    advantages.append(M[g, i] if index == k else 0.0)
                if index != k or not turn.tokens:
                    continue
                # Card: "s_k = exp(sum or mean over turn-k tokens of (lp - lp_old)) on turn k only"; here the mean
                summed = constant(0.0)
                divergence = constant(0.0)
                for token in turn.tokens:
                    summed = summed + log_ratio(token)
                    # Card (KL): "k3 = exp(-x) + x - 1 (>=0, clamp x to +-20 and k3 to <= 10)"
                    x = bounded(token.logp - token.reference, -BOUND, BOUND)
                    divergence = divergence + smaller(torch.exp(-x) + x - 1, constant(10.0))
                ratio = torch.exp(summed / len(turn.tokens))
                ratios[g, i] = ratio.item()
                # Card: "L_k = mean_i PPO-clip(s_k, M_k), eps .2"; "KL .002"
                loss = loss + ppo_clip(ratio, M[g, i], clip, clip) / n
                loss = loss + beta * divergence / len(turn.tokens) / n
    return Result(advantages, loss, {"ratio": ratios})


def see_upo_next(M: dict[Key, float], ratio: dict[Key, float]) -> dict[Key, float]:
    """Card: "recompute lp on turn k with the new parameters and set M_{k-1} = sg[M_k * pi_new(turn k)/pi_old(turn
    k)]". A key that `ratio` lacks is a no-op turn (ratio 1)."""
    return {key: one * ratio.get(key, 1.0) for key, one in M.items()}


# ---------------------------------------------------------------------------------------------------------------------
# EPO


def epo(
    batch: Batch,
    lam: float = 1e-3,
    alpha: float = 0.1,
    low: float = 0.0,
    high: float = 2.0,
    clip: float = 0.2,
    beta: float = 0.01,
    history: dict[int, float] | None = None,
    weight: float = 2.0,
) -> Result:
    """GRPO over turn rows with a k3 KL, an entropy bonus, and a hinge on entropy that leaves the band around its history; as the
    released script, a row is a turn that carries the episode's return, and every token has equal weight.

    `history` has the mean past entropy by turn index; a turn index it lacks has no band. extra: `penalty` = P_t per
    token, `entropy` = L_H and `smooth` = L_smooth (floats).
    """
    past = {} if history is None else history
    share = 1.0 / max(1, sum(len(sampled(trajectory)) for trajectory in trajectories(batch)))
    advantages: list[float] = []
    penalties = []
    policy, bonus, smooth, divergence = (constant(0.0) for _ in range(4))
    for group in batch:
        votes = [total(one) for one in group for _ in one.turns]
        for trajectory in group:
            advantage = (total(trajectory) - mean(votes)) / (std(votes) + 1e-6) if len(votes) > 1 else 0.0
            for index, turn in enumerate(trajectory.turns):
                for token in turn.tokens:
                    advantages.append(advantage)
                    policy = policy + share * ppo_clip(torch.exp(log_ratio(token)), advantage, clip, clip)
                    x = bounded(token.logp - token.reference, -BOUND, BOUND)
                    divergence = divergence + share * smaller(torch.exp(-x) + x - 1, constant(10.0))
                    bonus = bonus + share * token.entropy
                    penalty = constant(0.0)
                    if index in past:
                        # Card: "Band [kappa_l Hbar, kappa_r Hbar]"
                        # Card: "P_t = [kappa_l Hbar - H_t]_+ + [H_t - kappa_r Hbar]_+"
                        if low * past[index] - token.entropy.item() > 0:
                            penalty = penalty + (low * past[index] - token.entropy)
                        if token.entropy.item() - high * past[index] > 0:
                            penalty = penalty + (token.entropy - high * past[index])
                    penalties.append(penalty.item())
                    # Card: "L_smooth = alpha mean P_t (has a gradient through H_t)"
                    smooth = smooth + share * alpha * penalty
    # Card: "L = L_policy - lambda [ L_H - beta_k L_smooth ]"
    loss = policy + beta * divergence - lam * (bonus - weight * smooth)
    extra = {"penalty": penalties, "entropy": bonus.item(), "smooth": smooth.item()}
    return Result(advantages, loss, extra)


def epo_weight(k: float, k_mid: float, gamma: float = 1.0) -> float:
    """Card: "beta_k = 1 + exp(-gamma k/k_mid), k_mid = floor(K/2), k = training step"."""
    return 1 + math.exp(-gamma * k / k_mid)


# ---------------------------------------------------------------------------------------------------------------------
# PPO-max


def ppo_max(
    batch: Batch,
    eta: float = 0.05,
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
    mean: float = 0.0,
    std: float = 1.0,
    limit: float = 10.0,
) -> Result:
    """PPO on a normalised and clipped terminal reward with a k1 penalty per token.

    extra, per token: `reward` (what GAE was given) and `target` (the critic's lambda-return).
    """
    raw = []
    paid = []
    targets = []
    for trajectory in trajectories(batch):
        rewards = []
        for token in sampled(trajectory):
            # Card: "token reward -eta (lp - lp_ref) (k1)", at the policy before the first update; not clamped
            rewards.append(-eta * (token.proximal - token.reference))
        if rewards:
            # Card: "terminal reward R' = clip((R - mean_hist)/std_hist, -d, d) with running statistics"
            rewards[-1] += max(-limit, min(limit, (total(trajectory) - mean) / (std + 1e-8)))
        values = [token.old_value for token in sampled(trajectory)]
        # Card: "GAE"
        found = gae(rewards, values, gamma, lam)
        raw.extend(found)
        paid.extend(rewards)
        targets.extend(advantage + value for advantage, value in zip(found, values))
    # Card (PPO): "then whiten over all unmasked tokens"
    advantages = whiten(raw, True)
    loss = constant(0.0)
    for token, advantage, target in zip(tokens(batch), advantages, targets):
        # Card: "PPO-clip; value loss with clip"
        policy = ppo_clip(torch.exp(log_ratio(token)), advantage, clip, clip)
        loss = loss + (policy + value_weight * value_loss(token, target, value_clip)) / len(advantages)
    return Result(advantages, loss, {"reward": paid, "target": targets})


# ---------------------------------------------------------------------------------------------------------------------
# SAFE

PHASES = {"warm-up": 1.5, "climb": 1.2, "plateau": 0.8, "converged": 1.0}


def softmin(v1: float, v2: float, a: float) -> float:
    """Card: "V = -a (logsumexp(-v/a) - log 2), a=.5 (between min and mean)"."""
    top = max(-v1 / a, -v2 / a)
    logsumexp = top + math.log(math.exp(-v1 / a - top) + math.exp(-v2 / a - top))
    return -a * (logsumexp - math.log(2))


def huber_loss(x: Tensor, delta: float) -> Tensor:
    if abs(x.item()) <= delta:
        return 0.5 * x**2
    return delta * (abs(x) - 0.5 * delta)


def safe_threshold(error: float, integral: float, previous: float, phase: str) -> tuple[float, float]:
    """The KL threshold and the new integral. The integral takes in this error before it is used.

    Card: "thr = clip((.3 + Kp e + Ki int e + Kd de) x phase, .1, .6), integral clamped +-1"; "Kp .3, Ki .01, Kd .05";
    "phase in {warm-up 1.5, climb 1.2, plateau .8, converged 1.0}".
    """
    integral = max(-1.0, min(1.0, integral + error))
    threshold = (0.3 + 0.3 * error + 0.01 * integral + 0.05 * (error - previous)) * PHASES[phase]
    return max(0.1, min(0.6, threshold)), integral


def safe(
    batch: Batch,
    clip: float = 0.2,
    temperature: float = 0.5,
    kl_threshold: float = 0.3,
    penalty: float = 0.1,
    kl_smoothed: float = 0.5,
    value_weight: float = 0.5,
    huber: float = 0.5,
    value_clip: float = 0.2,
) -> Result:
    """Pessimistic soft-min of two heads as a baseline per trajectory, Huber critic, KL penalty above a threshold.

    extra: `baseline` = V per trajectory (None without tokens), `coefficient` = the factor of the mean k2.
    """
    per_trajectory = []
    baselines: list[float | None] = []
    for trajectory in trajectories(batch):
        baseline = None
        if sampled(trajectory):
            first = sampled(trajectory)[0]
            baseline = softmin(first.old_value, first.old_twin, temperature)
        baselines.append(baseline)
        # Card: "Sequence advantage R - V, whitened."
        per_trajectory.append(0.0 if baseline is None else total(trajectory) - baseline)
    advantages = whiten(spread(batch, per_trajectory), True)
    targets = spread(batch, [total(trajectory) for trajectory in trajectories(batch)])
    coefficient = 0.0
    # Card: "Penalty if KL_s > thr: .1 (KL_s - thr)^2 max(.5, 2/(H+.1))"; "Multiply it onto a differentiable KL if you
    # want it to act": here one factor (KL_s - thr) is replaced by the differentiable KL of the batch
    if kl_smoothed > kl_threshold and advantages:
        entropy = math.fsum(token.entropy.item() for token in tokens(batch)) / len(advantages)
        coefficient = penalty * (kl_smoothed - kl_threshold) * max(0.5, 2 / (entropy + 0.1))
    loss = constant(0.0)
    for token, advantage, target in zip(tokens(batch), advantages, targets):
        policy = ppo_clip(torch.exp(log_ratio(token)), advantage, clip, clip)
        # Card: "Value loss Huber (delta .5) on v and on clipped v."
        error = constant(0.0)
        for value, old in ((token.value, token.old_value), (token.twin, token.old_twin)):
            near = bounded(value, old - value_clip, old + value_clip)
            error = error + larger(huber_loss(value - target, huber), huber_loss(near - target, huber))
        # Card (KL): "x = lp - lp_ref"; "k2 = x^2/2"
        x = bounded(token.logp - token.reference, -BOUND, BOUND)
        loss = loss + (policy + value_weight * error + coefficient * x**2 / 2) / len(advantages)
    return Result(advantages, loss, {"baseline": baselines, "coefficient": coefficient})


# ---------------------------------------------------------------------------------------------------------------------
# AEPO


def aepo(batch: Batch, clip: float = 0.2, alpha: float = 1.0, margin: float = 0.05) -> Result:
    """GRPO without KL on ordinary rows and positive-only REINFORCE on tempered ones (trajectory.lot < .25).

    extra: `tempered` (bool) per trajectory.
    """
    per_trajectory = []
    tempered = []
    for group in batch:
        # Card: "regenerate the first quarter of the prompts at T"; here a quarter of the rows, by lot
        ordinary = [total(trajectory) for trajectory in group if trajectory.lot >= 0.25]
        own = iter(z_scores(ordinary))
        judged = z_scores([total(trajectory) for trajectory in group])
        for trajectory, score in zip(group, judged):
            if trajectory.lot < 0.25:
                # Card: "keep samples with group advantage > .05, set their advantage to 1"
                per_trajectory.append(alpha if score > margin else 0.0)
                tempered.append(True)
            else:
                per_trajectory.append(next(own))
                tempered.append(False)
    count = sum(len(sampled(trajectory)) for trajectory in trajectories(batch))
    loss = constant(0.0)
    for trajectory, advantage, hot in zip(trajectories(batch), per_trajectory, tempered):
        for token in sampled(trajectory):
            if hot:
                # Card: "alpha E_{o ~ pi^T}[R(o) grad log pi_theta(o)]"
                policy = -advantage * token.logp
            else:
                policy = ppo_clip(torch.exp(log_ratio(token)), advantage, clip, clip)
            # released code: masked_mean over all response tokens
            loss = loss + policy / count
    return Result(spread(batch, per_trajectory), loss, {"tempered": tempered})
