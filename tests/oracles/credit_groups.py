"""Slow oracles of baselines, scales and group formation at the trajectory: one loop, one scalar, one formula at a time.

Every method takes a batch of records and returns the advantage of every token in natural order, or a `Result` where it
decides more. Lines marked "Card" quote the specification; "House" states the choice made where the card is silent.

House: std with n - 1; a lone peer gets 0; a trajectory without tokens still has its vote in the statistics.
House: "log pi" of a response is `behaviour` (sharp edge 7: "need old log-probs before advantages"); a response without
tokens has mean log-probability 0. Entropies are `old_entropy`. "Correct" without a threshold is `trajectory.success`.
House: where a method wants rewards in [0, 1], R is mapped by (R - bottom)/(top - bottom) and clamped.
House: where a card speaks of an order, ties keep the order of the batch.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import torch

from .objectives import BOUND, bounded, constant, larger, mean, rows, spread, std
from .records import Batch, Group, Trajectory, sampled, total, trajectories
from .result import Result


def enrich(batch: Batch, seed: int) -> Batch:
    """Fill, in place, every fact that the methods of this file read.

    trajectory.facts
      rewards       dict name -> float: "accuracy" (0 or 1), "format" (0 or 1), "length" (real, another scale); one may
                    be missing (counts as 0, card GDPO: "NaN rewards -> 0"); "format" is constant in some groups
      said          str or None: the extracted answer; None where none was found (one cluster like any other)
      key           str: equality key of the trajectory (polychromic diversity)
      prompt        int: identity of the task across batches, the same in a group; two groups may share one
      probe         float: V_psi(z(x, y)), the probe's prediction from this trajectory's own features
      chance        float in [0, 1]: V0(x | C), the same for all trajectories of a group
    turn.facts
      agent         int: who acted in this turn
      function      str: functional group of that agent ("attack" or "task")
    """
    dice = random.Random(seed + 7919)
    for index, group in enumerate(batch):
        prompt = index if dice.random() < 0.8 else max(0, index - 1)
        chance = dice.choice([0.0, 0.5, 1.0, dice.random()])
        constant_format = dice.random() < 0.4
        variety = dice.choice([1, 2, 8])
        for trajectory in group:
            named = {
                "accuracy": float(dice.random() < 0.5),
                "format": 1.0 if constant_format else float(dice.random() < 0.7),
                "length": dice.gauss(3.0, 2.0),
            }
            if dice.random() < 0.15:
                del named[dice.choice(sorted(named))]
            trajectory.facts["rewards"] = named
            trajectory.facts["said"] = None if dice.random() < 0.1 else str(dice.randrange(variety))
            trajectory.facts["key"] = "abc"[dice.randrange(3)] if variety > 1 else "a"
            trajectory.facts["prompt"] = prompt
            trajectory.facts["probe"] = dice.gauss(0.5, 0.5)
            trajectory.facts["chance"] = chance
            for turn in trajectory.turns:
                turn.facts["agent"] = dice.randrange(3)
                turn.facts["function"] = "attack" if turn.facts["agent"] == 0 else "task"
    return batch


# ---------------------------------------------------------------------------------------------------------------------
# Helpers


def zscores(numbers: list[float], eps: float = 1e-6) -> list[float]:
    """Card: "GRPO A=(R-mean)/(std+eps)"; a lone number gets 0."""
    if len(numbers) == 1:
        return [0.0]
    return [(one - mean(numbers)) / (std(numbers) + eps) for one in numbers]


def totals(group: Group) -> list[float]:
    return [total(trajectory) for trajectory in group]


def unit(reward: float, bottom: float, top: float) -> float:
    return max(0.0, min(1.0, (reward - bottom) / (top - bottom)))


def likelihood(trajectory: Trajectory) -> float:
    """Mean token log-probability under the old policy; 0 without tokens."""
    found = [one.behaviour for one in sampled(trajectory)]
    return mean(found) if found else 0.0


def component(trajectory: Trajectory, name: str) -> float:
    """Card: "NaN rewards -> 0"; one that is missing counts as 0 as well."""
    found = trajectory.facts.get("rewards", {}).get(name, math.nan)
    return 0.0 if math.isnan(found) else float(found)


def names(batch: Batch) -> list[str]:
    """Every reward name that occurs anywhere in the batch."""
    return sorted({name for trajectory in trajectories(batch) for name in trajectory.facts.get("rewards", {})})


def none() -> torch.Tensor:
    return constant(0.0)


# ---------------------------------------------------------------------------------------------------------------------
# MC-GRPO


def median_index(numbers: list[float]) -> int:
    """The first index that holds the median; of an even count the lower of the two middle values (torch.median)."""
    middle = sorted(numbers)[(len(numbers) - 1) // 2]
    return numbers.index(middle)


def mc_grpo(batch: Batch, eps: float = 1e-3, rescale: bool = False, fallback: bool = False) -> Result:
    """A group is the G + 1 rollouts. `rescale` is the GSM variant; `fallback` sets MAD := 1 when it is 0.

    extra["kept"]: one bool per trajectory, False for the one that leaves the loss. House: the median of an even set is
    the lower middle one, so that it is an element too. A lone rollout is its own median: A = 0, and it is dropped.
    """
    advantages, kept = [], []
    for group in batch:
        rewards = totals(group)
        # Card: "m = median, MAD = median|R-m|"
        at = median_index(rewards)
        m = rewards[at]
        distances = [abs(one - m) for one in rewards]
        mad = distances[median_index(distances)]
        if fallback and mad == 0.0:
            mad = 1.0
        # Card: "A_i=(R_i-m)/(MAD+eps)"
        found = [(one - m) / (mad + eps) for one in rewards]
        if rescale:
            # Card: "multiplies the non-zero A of a group by (G+1)/(#non-zero)"
            nonzero = sum(1 for one in found if one != 0.0)
            found = [one * len(group) / nonzero if one != 0.0 else 0.0 for one in found]
        advantages += found
        # Card: "Remove exactly one rollout attaining the median (index returned by the median op) from the loss."
        kept += [i != at for i in range(len(group))]
    return Result(spread(batch, advantages), none(), {"kept": kept})


# ---------------------------------------------------------------------------------------------------------------------
# BNPO


def log_beta(p: float, alpha: float, beta: float) -> float:
    """log of BetaPDF(p; alpha, beta); p strictly between 0 and 1."""
    scale = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return scale + (alpha - 1) * math.log(p) + (beta - 1) * math.log(1 - p)


def beta_shape(rates: list[float]) -> tuple[float, float]:
    """House: a variance of (numerically) 0 between prompts is the card's "degenerate p": alpha = beta = 1."""
    # Card: "One prompt only: m:=0,s2:=1."
    m, s2 = (0.0, 1.0) if len(rates) == 1 else (mean(rates), std(rates) ** 2)
    if s2 < 1e-12:
        return 1.0, 1.0
    # Card: "a=(m(1-m)/s2-1)m, b=(m(1-m)/s2-1)(1-m)"
    a = (m * (1 - m) / s2 - 1) * m
    b = (m * (1 - m) / s2 - 1) * (1 - m)
    # Card: "alpha=max(1,1+a/3), beta=max(1,1+b/3)"
    return max(1.0, 1 + a / 3), max(1.0, 1 + b / 3)


def beta_factor(p: float, alpha: float, beta: float) -> float:
    """Card: "the factor 1/pdf clamped to [0,1e6]"."""
    if p <= 0.0:
        return 1.0 / beta if alpha == 1.0 else 1e6  # the density at 0 is beta when alpha = 1, else 0
    if p >= 1.0:
        return 1.0 / alpha if beta == 1.0 else 1e6
    return math.exp(min(math.log(1e6), -log_beta(p, alpha, beta)))


def bnpo(batch: Batch, rewards: tuple[str, ...] | None = None, bottom: float = 0.0, top: float = 1.0) -> list[float]:
    """`rewards` names the components to decompose over; None: the total reward alone."""
    parts = []
    for name in rewards if rewards is not None else (None,):
        scores = []
        for group in batch:
            # Card: "map rewards to [0,1]; p_q = group mean."
            raw = totals(group) if name is None else [component(one, name) for one in group]
            scores.append([unit(one, bottom, top) for one in raw])
        alpha, beta = beta_shape([mean(one) for one in scores])
        found = []
        for one in scores:
            p = mean(one)
            for reward in one:
                # Card: "p in {0,1}: A=0 but the factor is clamped; guard 0*inf."
                # Card: "A_i=(R_i-p_q)/BetaPDF(p_q;alpha,beta)"
                found.append(0.0 if p in (0.0, 1.0) else (reward - p) * beta_factor(p, alpha, beta))
        parts.append(found)
    # Card: "average: A=(1/n)sum_k A^(k)"
    return spread(batch, [mean(list(column)) for column in zip(*parts)])


# ---------------------------------------------------------------------------------------------------------------------
# Several rewards


def gdpo(
    batch: Batch,
    weights: dict[str, float] | None = None,
    eps: float = 1e-4,
    whiten: str = "rows",
) -> list[float]:
    """`whiten`: "rows" (TRL), "tokens" (verl: long answers weigh more) or "none". House: a lone row or token gets 0."""
    summed = []
    for group in batch:
        row = [0.0] * len(group)
        for name in names(batch):
            w = 1.0 if weights is None else weights.get(name, 1.0)
            # Card: "A^k_i=(R^k_i-mean_g)/(std_g+eps)"
            for i, one in enumerate(zscores([component(trajectory, name) for trajectory in group], eps)):
                # Card: "A^sum_i = sum_k w_k A^k_i"
                row[i] += w * one
        summed += row
    # Card: "(A^sum-mean_B)/(std_B+eps)"
    if whiten == "rows":
        return spread(batch, zscores(summed, eps))
    per_token = spread(batch, summed)
    return zscores(per_token, eps) if whiten == "tokens" and per_token else per_token


def dvao(batch: Batch, weights: dict[str, float] | None = None, eps: float = 1e-6) -> list[float]:
    advantages = []
    for group in batch:
        if len(group) == 1:
            advantages.append(0.0)
            continue
        scale = 0.0
        top = [0.0] * len(group)
        for name in names(batch):
            w = 1.0 if weights is None else weights.get(name, 1.0)
            rewards = [component(trajectory, name) for trajectory in group]
            scale += w * std(rewards)
            for i, reward in enumerate(rewards):
                top[i] += w * (reward - mean(rewards))
        # Card: "A_i = sum_k w_k (R^k_i-mu_k) / (sum_l w_l sigma_l + eps)"
        advantages += [one / (scale + eps) for one in top]
    return spread(batch, advantages)


# ---------------------------------------------------------------------------------------------------------------------
# RiskPO

LEVELS = [0.05 * step for step in range(1, 20)]  # Card: "19 levels 0.05..0.95"


def quantile(numbers: list[float], level: float) -> float:
    """Empirical quantile with linear interpolation."""
    ordered = sorted(numbers)
    place = level * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def mixed_risk(score: float, q_a: float, q_b: float, a: float, b: float, omega: float, baseline: bool, eps: float) -> float:
    # Card: "g_RVaR = [(S-q_a)^+ - (S-q_b)^+ + (q_a-q_b if natural baseline else 0)]/(b-a)"
    rvar = (max(score - q_a, 0.0) - max(score - q_b, 0.0) + (q_a - q_b if baseline else 0.0)) / (b - a + eps)
    # Card: "g_CVaR = -(q_a-S)^+/a"
    cvar = -max(q_a - score, 0.0) / (a + eps)  # both denominators have the code's epsilon
    # Card: "(omega g_CVaR + g_RVaR)/(omega+1)"
    return (omega * cvar + rvar) / (omega + 1)


def risk_po(
    batch: Batch,
    tracker: list[float] | None = None,
    bundle: int = 5,
    a: float = 0.2,
    b: float = 0.8,
    omega: float = 1.5,
    eta: float = 0.1,
    mode: str = "track",
    credit: str = "sum-mean",
    baseline: bool = False,
    eps: float = 1e-6,
) -> Result:
    """`mode`: "batch", "track" or "mix"; `credit`: "uniform", "std", "sum-mean" or "score".

    `tracker` holds the 19 quantiles before this batch (None: the first batch); extra["tracker"] those after it.
    House: the last bundle may be smaller; sheet s is made of the questions that have an s-th response, and there are as
    many sheets as the largest group has responses; a bundle of one sheet gets 0 (a lone peer), though its score enters
    the tracker. Quantiles interpolate linearly; the tracker is read at the level nearest to a and b. The first batch
    initialises the tracker, is judged by it and does not move it. Shares of sum-mean add up to 1 (equal: 1/members), and
    the sum is "below 1e-6" by its absolute value.
    """
    sheets: list[list[list[tuple[int, int]]]] = []  # bundle, sheet, members as (group, response)
    for start in range(0, len(batch), bundle):
        questions = range(start, min(start + bundle, len(batch)))
        largest = max(len(batch[q]) for q in questions)
        # Card: "sheet s (s=1..G) takes the s-th response of each question"
        sheets.append([[(q, s) for q in questions if s < len(batch[q])] for s in range(largest)])
    # Card: "S = sum of their rewards"
    scores = [[math.fsum(total(batch[q][s]) for q, s in sheet) for sheet in one] for one in sheets]
    everything = [score for one in scores for score in one]

    first = tracker is None
    # Card: "initialised by the first batch's empirical quantiles"
    held = [quantile(everything, level) for level in LEVELS] if tracker is None else list(tracker)
    tracked = []
    for wanted in (a, b):
        gaps = [abs(level - wanted) for level in LEVELS]
        tracked.append(held[gaps.index(min(gaps))])

    found = {}
    for one, sheet_scores in zip(sheets, scores):
        own = [quantile(sheet_scores, a), quantile(sheet_scores, b)]
        if mode == "batch":
            q_a, q_b = own
        elif mode == "track":
            q_a, q_b = tracked
        else:  # Card: "or their average ("mix")"
            q_a, q_b = (own[0] + tracked[0]) / 2, (own[1] + tracked[1]) / 2
        for sheet, score in zip(one, sheet_scores):
            if len(one) == 1:
                judged = 0.0
            else:
                # Card: "then divided by (std of sheet scores in the bundle + eps)"
                judged = mixed_risk(score, q_a, q_b, a, b, omega, baseline, eps) / (std(sheet_scores) + eps)
            gaps = [total(batch[q][s]) - mean(totals(batch[q])) for q, s in sheet]
            for (q, s), gap in zip(sheet, gaps):
                if credit == "uniform":
                    share = 1.0
                elif credit == "std":
                    # Card: "divide by that question's reward std, floor: std<=1e-3 -> 1"
                    width = std(totals(batch[q])) if len(batch[q]) > 1 else 0.0
                    share = 1.0 if width <= 1e-3 else 1.0 / width
                elif credit == "sum-mean":
                    # Card: "share proportional to R_i - mean_q; equal shares when the sum is below 1e-6"
                    whole = math.fsum(gaps)
                    share = 1.0 / len(sheet) if abs(whole) < 1e-6 else gap / whole
                else:
                    # Card: "x0.5 if correct, x1.5 if wrong"
                    share = 0.5 if batch[q][s].success else 1.5
                found[q, s] = judged * share
    after = held
    if not first:
        # Card: "q_l <- q_l + eta (l - mean 1[S<q_l]) over all sheets"
        after = [
            q + eta * (level - mean([1.0 if score < q else 0.0 for score in everything]))
            for q, level in zip(held, LEVELS)
        ]
    per_trajectory = [found[q, s] for q, group in enumerate(batch) for s in range(len(group))]
    return Result(spread(batch, per_trajectory), none(), {"tracker": after})


# ---------------------------------------------------------------------------------------------------------------------
# CANON, Stratified GRPO


def canon(batch: Batch, mu: float | None = 1.0, alpha: float = 1.0, metric: str = "entropy") -> list[float]:
    """`metric`: "entropy" or "length" (tokens). `mu` None: the batch's mean reward. A group of one gets 0.

    House: the directional alpha changes A_inter only; a response without tokens has entropy 0.
    """
    if mu is None:
        # Card: "mu=batch mean reward in one variant (1-mu multiplies intra)"
        mu = mean([total(trajectory) for trajectory in trajectories(batch)])
    advantages = []
    for group in batch:
        if len(group) == 1:
            advantages.append(0.0)
            continue
        rewards = totals(group)
        measured = []
        for trajectory in group:
            entropies = [one.old_entropy for one in sampled(trajectory)]
            if metric == "length":
                measured.append(float(len(entropies)))
            else:
                measured.append(mean(entropies) if entropies else 0.0)
        # Card: "sort the G responses by metric c ...; low = first floor(G/2), high = rest"
        order = sorted(range(len(group)), key=lambda i: measured[i])
        low = order[: len(group) // 2]
        high = order[len(group) // 2 :]
        mean_low = mean([rewards[i] for i in low])
        mean_high = mean([rewards[i] for i in high])
        for i, reward in enumerate(rewards):
            # Card: "A_inter = R_i - mean_{h'}; A_intra = R_i - mean_h"
            intra = reward - (mean_high if i in high else mean_low)
            if metric == "length":
                # Card: "high half uses alpha R_i - mean_low, low half uses R_i - alpha mean_high"
                inter = alpha * reward - mean_low if i in high else reward - alpha * mean_high
            else:
                # Card: "entropy version: high half R_i - alpha mean_low, low half alpha R_i - mean_high"
                inter = reward - alpha * mean_low if i in high else alpha * reward - mean_high
            # Card: "A = mu A_inter + (1-mu) A_intra"
            advantages.append(mu * inter + (1 - mu) * intra)
    return spread(batch, advantages)


def stratified_grpo(batch: Batch, alpha: float = 0.8, eps: float = 1e-6) -> list[float]:
    """The stratum is the number of tool calls of the trajectory. alpha: unverified, the golden's value."""
    advantages = []
    for group in batch:
        rewards = totals(group)
        # Card: "stratum k = trajectories with the same search-call count"
        calls = [sum(turn.tool_calls for turn in trajectory.turns) for trajectory in group]
        # Card: "A_GN=(R-mean)/(std+eps) over the whole task group"
        everyone = zscores(rewards, eps)
        for i in range(len(group)):
            members = [j for j in range(len(group)) if calls[j] == calls[i]]
            # Card: "A_SAN = (R-mean_k)/(std_k+eps)"; "Singleton or constant stratum -> A_SAN=0."
            own = zscores([rewards[j] for j in members], eps)[members.index(i)]
            # Card: "A = alpha A_SAN + (1-alpha) A_GN"
            advantages.append(alpha * own + (1 - alpha) * everyone[i])
    return spread(batch, advantages)


# ---------------------------------------------------------------------------------------------------------------------
# DGPO


def balanced(rewards: list[float], eps: float = 1e-4, code: bool = False) -> list[float]:
    centre = mean(rewards)
    if code:
        # Card: "[code] G (R_i-mean)/(sum|R-mean|+1e-4)"
        return [len(rewards) * (one - centre) / (math.fsum(abs(x - centre) for x in rewards) + eps) for one in rewards]
    # Card: "A_i=(R_i-mean)/( (1/G) sum_j |R_j-mean| + eps )"
    return [(one - centre) / (mean([abs(x - centre) for x in rewards]) + eps) for one in rewards]


def question_weights(rates: list[float], temperature: float = 2.0) -> list[float]:
    # Card: "if p_s=0 because only auxiliary rewards vary, use 1"
    used = [1.0 if p == 0.0 else p for p in rates]
    # Card: "lambda_s = B_v softmax_s(-p_s/T)"
    below = math.fsum(math.exp(-p / temperature) for p in used)
    return [len(used) * math.exp(-p / temperature) / below for p in used]


def dgpo_difficulty(
    batch: Batch,
    temperature: float = 2.0,
    eps: float = 1e-4,
    code: bool = False,
    accuracy: str | None = None,
    valid_tokens: bool = True,
) -> Result:
    """`accuracy` names the component p_s is the mean of (None: R). `valid_tokens`: the factor all/valid tokens is in A.

    extra["weights"]: lambda per group, 0 for a group without variance. House: valid means max R != min R.
    """
    valid = [max(totals(group)) != min(totals(group)) for group in batch]
    rates = []
    for group, good in zip(batch, valid):
        if good:
            # Card: "p_s = mean accuracy reward"
            rates.append(mean(totals(group) if accuracy is None else [component(one, accuracy) for one in group]))
    found = iter(question_weights(rates, temperature) if rates else [])
    weights = [next(found) if good else 0.0 for good in valid]
    # Card: "multiply A by (all tokens)/(tokens of non-zero-variance questions)"
    every = sum(len(sampled(one)) for one in trajectories(batch))
    counted = sum(len(sampled(one)) for group, good in zip(batch, valid) if good for one in group)
    factor = every / counted if valid_tokens and counted else 1.0
    advantages = []
    for group, weight in zip(batch, weights):
        # Card: "A <- lambda_s A"
        advantages += [weight * one * factor for one in balanced(totals(group), eps, code)]
    return Result(spread(batch, advantages), none(), {"weights": weights})


# ---------------------------------------------------------------------------------------------------------------------
# CAPO, COPO, ADORA


def slope(t: float, tau: float, scaled: bool) -> float:
    # Card: "-phi'(t) = (1/tau) sigmoid(-t/tau)"
    x = t / tau
    found = 1 / (1 + math.exp(x)) if x < 0 else math.exp(-x) / (1 + math.exp(-x))
    return found / tau if scaled else found


def capo_calibration(
    batch: Batch, tau: float = 0.6, high: float = 2.5, low: float = 1.05, scaled: bool = False
) -> list[float]:
    """`scaled` keeps the 1/tau. The mask takes away a response's own advantage, not its part in the others' pairs."""
    advantages = []
    for group in batch:
        # Card: "l_i = (1/|o_i|) log pi(o_i) (mean token log-prob)"
        scores = [likelihood(trajectory) for trajectory in group]
        for i, trajectory in enumerate(group):
            advantage = 0.0
            for j, other in enumerate(group):
                if trajectory.success and not other.success:
                    # Card: "Correct i: A_i = sum_{j wrong} -phi'(l_i-l_j)"
                    advantage += slope(scores[i] - scores[j], tau, scaled)
                if other.success and not trajectory.success:
                    # Card: "wrong i: A_i = - sum_{j correct} -phi'(l_j-l_i)"
                    advantage -= slope(scores[j] - scores[i], tau, scaled)
            found = [one.reference for one in sampled(trajectory)]
            perplexity = math.exp(-mean(found)) if found else 1.0
            # Card: "correct kept iff PPL_ref(o_i) <= high; wrong kept iff PPL_ref(o_i) >= low"
            kept = perplexity <= high if trajectory.success else perplexity >= low
            advantages.append(advantage if kept else 0.0)
    return spread(batch, advantages)


def consistency(answers: list[Any]) -> tuple[float, float]:
    """H and the factor 1 - kappa H; a lone answer has factor 1."""
    n = len(answers)
    # Card: "H = -sum p log2 p"
    entropy = 0.0
    for one in set(answers):
        p = answers.count(one) / n
        entropy -= p * math.log2(p)
    # Card: "kappa=(1-1/G)/log2 G"
    kappa = 0.0 if n == 1 else (1 - 1 / n) / math.log2(n)
    return entropy, 1 - kappa * entropy


def copo(
    batch: Batch, b: float = 0.5, k: float = 1.0, forced: bool = False, clip: float = 0.2, eps: float = 1e-6
) -> Result:
    """The loss is the blend of two clipped losses; the advantage handed back is the blend of the two advantages.

    extra: "local", "global" (one per token), "weight" (w per token). House: a lone rollout has local advantage 0 and
    still the global one; the aggregation is seq-mean-token-mean.
    """
    locals_, weights, values = [], [], []
    for group in batch:
        rewards = totals(group)
        entropy, factor = consistency([trajectory.facts["said"] for trajectory in group])
        # Card: "R_glob = acc (1 - kappa H)"; "acc = mean R"
        values.append(mean(rewards) * factor)
        # Card: "w = sigmoid(k (H - b))"
        w = 1 / (1 + math.exp(-max(-700.0, min(700.0, k * (entropy - b)))))
        for one in zscores(rewards, eps):
            locals_.append(one)
            # Card: "\"Forced\" mode: w=0 when the local advantage is 0."
            weights.append(0.0 if forced and one == 0.0 else w)
    # Card: "A_glob=(R_glob-mean)/(std+eps), same for all G members"; "single task in batch -> A_glob undefined (set 0)"
    globals_ = [one for group, one in zip(batch, zscores(values, eps)) for _ in group]
    n = rows(batch)
    loss = none()
    for trajectory, near, far, w in zip(trajectories(batch), locals_, globals_, weights):
        for token in sampled(trajectory):
            ratio = torch.exp(bounded(token.logp - token.behaviour, -BOUND, BOUND))
            short = bounded(ratio, 1 - clip, 1 + clip)
            # Card: "loss = w L_loc + (1-w) L_glob"
            both = w * larger(-near * ratio, -near * short) + (1 - w) * larger(-far * ratio, -far * short)
            loss = loss + both / len(sampled(trajectory)) / n
    blend = [w * near + (1 - w) * far for near, far, w in zip(locals_, globals_, weights)]
    extra = {"local": spread(batch, locals_), "global": spread(batch, globals_), "weight": spread(batch, weights)}
    return Result(spread(batch, blend), loss, extra)


def adora(
    batch: Batch, damp: float = 0.1, threshold: float | None = None, vision: bool = False, eps: float = 1e-6
) -> list[float]:
    """`vision`: the VLM code's rules. Lengths are sampled tokens; truncated is `trajectory.truncated`."""
    if threshold is None:
        threshold = 0.5 if vision else 1.01  # Card: "correct threshold reward>1.01 (LLM) or >0.5 (VLM)"
    advantages = []
    for group in batch:
        right = [len(sampled(one)) for one in group if total(one) > threshold]
        # Card: "L- = mean length of wrong responses that were not truncated"
        wrong = [len(sampled(one)) for one in group if total(one) <= threshold and not one.truncated]
        # Card: "L+ = max length of correct responses"
        longest = float(max(right)) if right else -math.inf
        # Card: "a missing wrong set counts as -inf"; VLM: "a missing wrong set counts as +inf -> lambda"
        typical = mean([float(one) for one in wrong]) if wrong else (math.inf if vision else -math.inf)
        # Card: "If L+ > L-: weight 1, else lambda."
        weight = 1.0 if longest > typical else damp
        if vision and not right:
            weight = 1.0  # Card: "VLM code differs: weight 1 when there is no correct response"
        advantages += [weight * one for one in zscores(totals(group), eps)]
    return spread(batch, advantages)


# ---------------------------------------------------------------------------------------------------------------------
# Likelihood: Unlikeliness, XRPO


def unlikeliness(batch: Batch, beta: float = 0.25, eps: float = 1e-6) -> list[float]:
    """Every row is kept (the released code drops rows with a tiny advantage)."""
    advantages = []
    for group in batch:
        # Card: "rank_i in {0..G-1} by ascending mean token log-prob under the old policy (0 = least likely)"
        order = sorted(range(len(group)), key=lambda i: likelihood(group[i]))
        # Card: "R~_i = R_i (1 - beta rank_i/G)"
        shaped = [total(one) * (1 - beta * order.index(i) / len(group)) for i, one in enumerate(group)]
        advantages += zscores(shaped, eps)
    return spread(batch, advantages)


def sharpen(scores: list[float], advantages: list[float], novelty: float, kappa: float) -> list[float]:
    out = []
    for score, advantage in zip(scores, advantages):
        # Card: "eta_i=exp(s_i - mean_group s)"
        eta = math.exp(score - mean(scores))
        # Card: "for A_i>0: A_i+ = A_i + min( max(lambda_nov (1-eta_i),0), kappa A_i ). Others unchanged."
        out.append(advantage + min(max(novelty * (1 - eta), 0.0), kappa * advantage) if advantage > 0 else advantage)
    return out


def xrpo(batch: Batch, novelty: float = 2.5, kappa: float = 0.5, eps: float = 1e-6) -> list[float]:
    """The sharpened advantage over GRPO's z-score. The rollout allocator is `xrpo_priority`; seeding is no formula."""
    advantages = []
    for group in batch:
        advantages += sharpen([likelihood(one) for one in group], zscores(totals(group), eps), novelty, kappa)
    return spread(batch, advantages)


def student(level: float, freedom: int) -> float:
    """The quantile of Student's t for a level above one half: the density by Simpson's rule, inverted by bisection."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(t: float) -> float:
        steps = 2000
        width = t / steps
        area = 0.0
        for step in range(steps + 1):
            density = scale * (1 + (step * width) ** 2 / freedom) ** (-(freedom + 1) / 2)
            area += density * (1 if step in (0, steps) else 4 if step % 2 else 2)
        return 0.5 + area * width / 3

    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < level else (low, middle)
    return (low + high) / 2


def xrpo_priority(batch: Batch, a: float = 0.05, bonus: float = 1.0) -> list[float]:
    """Pi_q of every group, to be ranked by the allocator; `a` and `bonus` (lambda) are unverified in the card.

    House: a prompt with one rollout has no std, so its gain is 0 and only the bonus counts. T: all rollouts so far.
    """
    out = []
    for group in batch:
        n = len(group)
        gain = 0.0
        if n > 1:
            s = std(totals(group))
            # Card: "h_q(n)=t_{1-a/2,n-1} s_q/sqrt(n)"; "D_q = h_q(n_q)-h_q(n_q+1) with s_q held fixed"
            now = student(1 - a / 2, n - 1) * s / math.sqrt(n)
            gain = now - student(1 - a / 2, n) * s / math.sqrt(n + 1)
        # Card: "phi_q = lambda sqrt(log(1+T)/n_q)"; "Pi_q = D_q + phi_q"
        out.append(gain + bonus * math.sqrt(math.log(1 + sum(len(one) for one in batch)) / n))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# PIPO


def pipo(
    batch: Batch, state: dict[str, Any] | None = None, window: int = 3, damp: float = 0.5, eps: float = 1e-6
) -> Result:
    """The advantage is that of the exploratory update on this batch (GRPO).

    `state`: {"history": mean rewards of the batches before, "advantages": the stored local advantages of the batch
    before, one per token}. extra: "verdict" (phi), "replay" (r^PI for the batch before), "state" (the next one).
    K (`window`) and lambda (`damp`) are unverified in the card.
    """
    history = [] if state is None else list(state["history"])
    stored = [] if state is None else list(state["advantages"])
    # Card: "mu_t = mean reward of batch t"
    mu = mean([total(trajectory) for trajectory in trajectories(batch)])
    verdict = 0.0
    # Card: "First K steps: no verdict (phi=0)."
    if len(history) >= window:
        recent = history[-window:]
        # Card: "xi_t=(mu_t-mu_h)/(sigma_h+eps)"; sigma_h with n-1, 0 where K = 1
        xi = (mu - mean(recent)) / ((std(recent) if len(recent) > 1 else 0.0) + eps)
        # Card: "phi(x)=x for x>=0, lambda x for x<0"
        verdict = xi if xi >= 0 else damp * xi
    # Card: "r^PI_{t,i} = a_{t-1,i} phi(xi_t)"
    replay = [one * verdict for one in stored]
    local = spread(batch, [one for group in batch for one in zscores(totals(group), eps)])
    after = {"history": [*history, mu][-window:], "advantages": local}
    return Result(local, none(), {"verdict": verdict, "replay": replay, "state": after})


# ---------------------------------------------------------------------------------------------------------------------
# Polychromic


def polychromic(batch: Batch, size: int = 4, bottom: float = 0.0, top: float = 1.0) -> list[float]:
    """The LLM use: the state is the prompt, the vines are the group, the sets are all its subsets of `size`.

    House: a group smaller than `size` forms one set, so it gets 0.
    """
    advantages = []
    for group in batch:
        n = min(size, len(group))
        values = {}
        for members in itertools.combinations(range(len(group)), n):
            reward = mean([unit(total(group[i]), bottom, top) for i in members])
            # Card: "d = fraction of distinct trajectories under a task-specific key"
            diversity = len({group[i].facts["key"] for i in members}) / n
            # Card: "f(s,tau_1..tau_n) = ( (1/n) sum R(tau_i) ) * d(s,tau_1..tau_n)"
            values[members] = reward * diversity
        baseline = mean(list(values.values()))
        for i in range(len(group)):
            # Card: "A_set = f(set) - mean over sets of f"; "if a trajectory is in several sets, average"
            advantages.append(mean([value - baseline for members, value in values.items() if i in members]))
    return spread(batch, advantages)


# ---------------------------------------------------------------------------------------------------------------------
# AdvEvo-MARL


def public_baseline(batch: Batch, scale: bool = False, eps: float = 1e-6) -> list[float]:
    """R_{i,j}: the rewards of agent j's turns in rollout i, summed; only agents that have a turn in i count.

    House: a lone return of its function gets 0, with or without the std.
    """
    out = []
    for group in batch:
        returns: dict[tuple[str, int, int], float] = {}  # function, rollout, agent
        for i, trajectory in enumerate(group):
            for turn in trajectory.turns:
                key = (turn.facts["function"], i, turn.facts["agent"])
                returns[key] = returns.get(key, 0.0) + turn.reward
        for i, trajectory in enumerate(group):
            for turn in trajectory.turns:
                function = turn.facts["function"]
                # Card: "b_c = mean over (i,j in c) of return R_{i,j}"
                peers = [found for (other, _, _), found in returns.items() if other == function]
                # Card: "A_{i,j} = R_{i,j}-b_c (optionally / std_c)"
                advantage = returns[function, i, turn.facts["agent"]] - mean(peers)
                if len(peers) == 1:
                    advantage = 0.0
                elif scale:
                    advantage = advantage / (std(peers) + eps)
                out += [advantage] * len(turn.tokens)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Baselines from elsewhere: MSSR, POISE, V0


def softened(advantage: float, entropy: float, gamma: float, weight: float) -> float:
    # Card: "psi_t = min( |A|/gamma_e , lambda_e stopgrad(H_t) )"
    return min(abs(advantage) / gamma, weight * entropy)


def mssr(
    batch: Batch,
    state: dict[str, Any] | None = None,
    gamma: float = 0.4,
    weight: float = 2.0,
    least: float = 0.875,
    most: float = 0.96,
    window: int = 20,
    target: float = 0.01,
    bottom: float = 0.0,
    top: float = 1.0,
    eps: float = 1e-6,
) -> Result:
    """`state`: {"tracker": prompt -> (a, b), "kl": the mean policy KL of the updates so far}.

    extra["state"]: the next one (the KL of the coming update is not known here, so "kl" is unchanged).
    House: an unseen prompt starts at a = b = 0.5/(1 - least), the n0 = 0 case of the single-stream card; several
    rollouts of a prompt all read the same v, and count as one visit with their mean reward; a batch of one row gets 0.
    """
    tracker = {} if state is None else dict(state["tracker"])
    kls = [] if state is None else list(state["kl"])
    start = 0.5 / (1 - least)
    # Card: "KLbar = mean policy KL over the last N updates, tau=min(KLbar/KL_target,1)"
    recent = kls[-window:]
    tau = min((mean(recent) if recent else 0.0) / target, 1.0)
    # Card: "eta = eta_max - tau (eta_max-eta_min)"
    eta = most - tau * (most - least)
    raw = []
    for group in batch:
        # Card: "v=a/(a+b) from the previous visit; A=r-v, batch-normalised"
        a, b = tracker.get(group[0].facts["prompt"], (start, start))
        raw += [unit(reward, bottom, top) - a / (a + b) for reward in totals(group)]
    out = []
    for trajectory, advantage in zip(trajectories(batch), zscores(raw, eps)):
        for token in sampled(trajectory):
            # Card: "A_t <- A + psi_t"
            out.append(advantage + softened(advantage, token.old_entropy, gamma, weight))
    for group in batch:
        prompt = group[0].facts["prompt"]
        a, b = tracker.get(prompt, (start, start))
        r = mean([unit(reward, bottom, top) for reward in totals(group)])
        # Card: "a<-eta a + r, b<-eta b+1-r"
        tracker[prompt] = (eta * a + r, eta * b + 1 - r)
    return Result(out, none(), {"state": {"tracker": tracker, "kl": kls}, "eta": eta})


def poise(batch: Batch, normalise: bool = True, eps: float = 1e-6) -> Result:
    """The baseline of a rollout is the mean of the probe's predictions from the *other* rollouts (two: the other one).

    The loss is the probe's mean squared error to the others' mean reward. House: a lone rollout has no baseline; it
    gets 0, and is left out of the batch statistics and the probe's loss. extra["baseline"]: per trajectory.
    """
    found: list[float | None] = []
    baselines, errors = [], []
    for group in batch:
        for i, trajectory in enumerate(group):
            others = [other for j, other in enumerate(group) if j != i]
            if not others:
                found.append(None)
                baselines.append(0.0)
                continue
            # Card: "b(y1)=V(z(x,y2)), b(y2)=V(z(x,y1)); A_k=R_k-b_k"
            baselines.append(mean([other.facts["probe"] for other in others]))
            found.append(total(trajectory) - baselines[-1])
            # Card: "fit V(z(x,y_j)) to the *other* rollout's reward R_{-j}"
            errors.append((trajectory.facts["probe"] - mean(totals(others))) ** 2)
    if normalise:
        # Card: "then batch normalisation as in the base recipe"
        known = [one for one in found if one is not None]
        scored = iter(zscores(known, eps) if known else [])
        found = [None if one is None else next(scored) for one in found]
    loss = constant(mean(errors)) if errors else none()
    return Result(spread(batch, [0.0 if one is None else one for one in found]), loss, {"baseline": baselines})


def probe_baseline(batch: Batch) -> list[float]:
    """Card: "P(success) for query prompts: V0(x|C)", used as baseline: A = R - V0. No peers, so no singleton rule."""
    return spread(batch, [total(one) - one.facts["chance"] for one in trajectories(batch)])
