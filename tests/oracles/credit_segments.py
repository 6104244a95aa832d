"""Slow oracles of credit by segments, steps and extra signals: one loop, one scalar, one formula at a time.

Every method takes a batch of records and returns the advantage of every token in natural order, or a `Result` where it
yields more. Lines marked "Card" quote the specification; lines marked "House" state the choice made where it is silent.

House: z-score (R-mean)/(std+1e-6), std with n - 1; a group of one gets 0. A trajectory without tokens still counts in
the statistics of its group. "At random" means in ascending order of the lot.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from .objectives import BOUND, constant, mean, rows, spread, std
from .records import Batch, Token, Trajectory, Turn, sampled, tokens, total, trajectories
from .result import Result


def normalised(rewards: list[float], eps: float = 1e-6) -> list[float]:
    """z-scores of one group. House: a group of one gets 0."""
    if len(rewards) == 1:
        return [0.0]
    return [(reward - mean(rewards)) / (std(rewards) + eps) for reward in rewards]


def grpo_advantage(batch: Batch) -> list[float]:
    """One number per trajectory. Card: "GRPO A=(R-mean)/(std+eps)"."""
    out = []
    for group in batch:
        out.extend(normalised([total(trajectory) for trajectory in group]))
    return out


def right(trajectory: Trajectory) -> float:
    return 1.0 if trajectory.success else 0.0


def bound(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def median(numbers: Sequence[float]) -> float:
    """P50: the middle one, or the mean of the two in the middle."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


# ---------------------------------------------------------------------------------------------------------------------
# Segments and their values


def spo_segment(batch: Batch, rho: float = 0.9, m: int = 5) -> Result:
    """SPO (segment), chain. The tokens of a trajectory are one text, across its turns.

    extra["mask"]: 1 for the tokens that enter the loss. Card: "only tokens with p_old<rho enter the loss; denominator
    is the number of such tokens".
    House: without any cut the whole text is the first segment and ends at the final value R.
    """
    advantage: list[float] = []
    mask: list[float] = []
    for trajectory in trajectories(batch):
        text = sampled(trajectory)
        # Card: "uncertain tokens U={t: p_old(y_t)<rho}"
        uncertain = [t for t, token in enumerate(text) if math.exp(token.behaviour) < rho]
        # Card: "Cut before every m-th element of U (cut positions = (U-1)[::m])"
        cuts = uncertain[::m]
        # Card: "V at a cut = mean reward of K fresh completions from that prefix; V(final)=R"
        at_cut = [mean(text[t].facts["completions"]) for t in cuts]
        ends = [*at_cut, total(trajectory)]
        prompt = trajectory.facts.get("prompt_completions")
        for t, token in enumerate(text):
            segment = sum(1 for cut in cuts if cut <= t)  # 0 is the text before the first cut
            if segment > 0:
                # Card: "Segment advantage = V(end of segment) - V(start); every token in the segment gets it"
                advantage.append(ends[segment] - ends[segment - 1])
            elif prompt:
                # Card: "the text before the first cut gets V(first cut)-V(prompt) if the prompt was evaluated, else 0"
                advantage.append(ends[0] - mean(prompt))
            else:
                advantage.append(0.0)
            mask.append(1.0 if math.exp(token.behaviour) < rho else 0.0)
    return Result(advantage, constant(0.0), {"mask": mask})


def ib_tpo(batch: Batch, beta: float = 5.0, weight: float = 0.1) -> list[float]:
    """IB-TPO: whole trajectories of a tree of steps; turn.facts["node"] names a step, the same in all that share it."""
    out: list[float] = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        below: dict[Hashable, list[float]] = {"root": rewards}
        for trajectory, reward in zip(group, rewards):
            for turn in trajectory.turns:
                below.setdefault(turn.facts["node"], []).append(reward)
        for trajectory in group:
            above: Hashable = "root"
            for turn in trajectory.turns:
                node = turn.facts["node"]
                # Card: "p(a*|s) = mean reward of leaves under node s"
                here, parent = mean(below[node]), mean(below[above])
                # Card: "global A_GL = (p(a*|s) - p(a*|q))/std of leaf rewards"; a lone leaf gets 0
                lead = (here - mean(rewards)) / (std(rewards) + 1e-6) if len(rewards) > 1 else 0.0
                # Card: "if p(a*|s_p)=0 set the ratio to 0"; "length-normalised probability"
                quotient = here / parent if abs(parent) > 0 else 0.0
                if turn.tokens:
                    likelihood = math.exp(mean([token.reference for token in turn.tokens]))
                    # Card: "local A_IB = (p(a*|s)/p(a*|s_p) - (1+1/beta)) pi_ref(s); A = A_GL + lambda A_IB"
                    out += [lead + weight * (quotient - (1 + 1 / beta)) * likelihood] * len(turn.tokens)
                above = node
    return out


def spo_tree(batch: Batch, normalise: bool = False) -> Result:
    """SPO (segment), tree: a group is a tree, a turn an edge, turn.facts["node"] the node that the turn ends in.

    The root is the prompt; the last turn of a trajectory ends in its leaf. extra["weight"]: 0 on dropped edges, else
    1 / (number of trajectories that contain the edge), because Card: "Each edge is one training sample".
    House: siblings' std with n - 1; an only child has A = 0 anyway; below 1e-12 counts as 0 (rounding).
    """
    root = object()
    advantage: list[float] = []
    weight: list[float] = []
    for group in batch:
        children: dict[Hashable, list[Hashable]] = {}
        parent: dict[Hashable, Hashable] = {}
        reward: dict[Hashable, float] = {}
        count: dict[Hashable, int] = {}
        for trajectory in group:
            above: Hashable = root
            for turn in trajectory.turns:
                node = turn.facts["node"]
                parent[node] = above
                children.setdefault(above, [])
                if node not in children[above]:
                    children[above].append(node)
                count[node] = count.get(node, 0) + 1
                above = node
            reward[above] = total(trajectory)

        def value(node: Hashable, children=children, reward=reward) -> float:
            # Card: "Leaf value = reward; internal value = mean of children (bottom up)"
            if node in children:
                return mean([value(child) for child in children[node]])
            return reward[node]

        for trajectory in group:
            for turn in trajectory.turns:
                node = turn.facts["node"]
                above = parent[node]
                # Card: "For edge parent->child: A = V(child)-V(parent) ("rloo" naming in code)"
                credit = value(node) - value(above)
                siblings = [value(child) for child in children[above]]
                if normalise:
                    # Card: "or divided by (std of the siblings + 1e-8)"
                    credit = credit / (std(siblings) + 1e-8) if len(siblings) > 1 else 0.0
                for _ in turn.tokens:
                    advantage.append(credit)
                    # Card: "Drop edges with A=0."
                    weight.append(0.0 if abs(credit) < 1e-12 else 1.0 / count[node])
    return Result(advantage, constant(0.0), {"weight": weight})


def spo_start(successes: float, n0: int = 8, rho_min: float = 0.875) -> tuple[float, float]:
    """Card: "N0 = 1/(1-rho_min); a=N0 (s+0.5)/(n0+1), b=N0 (n0-s+0.5)/(n0+1)"."""
    N0 = 1 / (1 - rho_min)
    return N0 * (successes + 0.5) / (n0 + 1), N0 * (n0 - successes + 0.5) / (n0 + 1)


def spo_forget(stored: list[tuple[float, float]], d_half: float, rho_min: float, rho_max: float) -> float:
    """Card: "D = mean over tokens of |log pi_old(y) - log pi_now(y)| on the *stored previous* response of that prompt;
    rho = clip(2^{-D/D_half}, rho_min, rho_max)"; "First visit without stored response: rho_max region (D=0)"."""
    D = mean([abs(old - now) for old, now in stored]) if stored else 0.0
    return bound(2 ** (-D / d_half), rho_min, rho_max)


def spo_priority(a: float, b: float) -> float:
    """Card: "Prioritised sampling weight w = sqrt(v(1-v)) + 0.05"."""
    v = a / (a + b)
    return math.sqrt(v * (1 - v)) + 0.05


def spo_single_stream(batch: Batch, d_half: float = 0.06, rho_min: float = 0.875, rho_max: float = 0.96) -> Result:
    """SPO (single-stream). extra["tracker"]: (a, b) of every group after the update; extra["priority"]: its weight.

    Card: "r must be in {0,1}": r = 1 for a successful trajectory. House: a group of several rollouts forgets once and
    counts every rollout; its tracker and stored response are those of its first trajectory. Whitening is over
    trajectories; a batch of one trajectory gets 0.
    """
    raw = []
    tracker = []
    for group in batch:
        a, b = group[0].facts["tracker"]
        v = a / (a + b)
        for trajectory in group:
            # Card: "Advantage uses the value *before* the update: A = r - v"
            raw.append(right(trajectory) - v)
        rho = spo_forget(group[0].facts["stored"], d_half, rho_min, rho_max)
        # Card: "a <- rho a + r; b <- rho b + (1-r)"
        a = rho * a + math.fsum(right(trajectory) for trajectory in group)
        b = rho * b + math.fsum(1 - right(trajectory) for trajectory in group)
        tracker.append((a, b))
    # Card: "then batch whitening (A-mean)/(std+1e-8)"
    white = normalised(raw, 1e-8)
    extra = {"tracker": tracker, "priority": [spo_priority(a, b) for a, b in tracker], "raw": raw}
    return Result(spread(batch, white), constant(0.0), extra)


# ---------------------------------------------------------------------------------------------------------------------
# Branches, chunks, cut contexts


def arpo_entropy(logps: list[float], vocabulary: int) -> float:
    """Card: "H = entropy over the top-10 log-probs of the first tokens after a tool result, divided by log(vocab)".

    `logps` is one token's list; House: the ten are not renormalised, several tokens are averaged by the caller."""
    top = sorted(logps, reverse=True)[:10]
    return -math.fsum(math.exp(one) * one for one in top) / math.log(vocabulary)


def arpo_branches(now: float, initial: float, draw: float, beta: float = 0.2, tau: float = 0.5) -> bool:
    """Card: "Delta H = H_now - H_initial. Branch if u - beta*DeltaH <= tau with u~U(0,1)"."""
    return draw - beta * (now - initial) <= tau


def arpo_credit(batch: Batch, hard: bool = False) -> list[float]:
    """ARPO (agentic). Tokens of a group with the same token.facts["key"] are one shared token; None is not shared.

    Card: "no std change, soft setting" is the default. House: eps 1e-6.
    """
    advantage = []
    scores = iter(grpo_advantage(batch))
    for group in batch:
        # Card: "A_{i,t} = (R_i-mean)/std over the task group"
        score = [next(scores) for _ in group]
        for i, trajectory in enumerate(group):
            for token in sampled(trajectory):
                key = token.facts.get("key")
                if not hard or key is None:
                    # Card: "Soft attribution (used in practice): plain GRPO advantage for all tokens"
                    advantage.append(score[i])
                else:
                    # Card: "shared-prefix token: average of A over the d rollouts that contain it"
                    holders = []
                    for j, other in enumerate(group):
                        if any(one.facts.get("key") == key for one in sampled(other)):
                            holders.append(score[j])
                    advantage.append(mean(holders))
    return advantage


def ipa(batch: Batch, gamma: float = 0.95, H: float = 5.0) -> Result:
    """IPA. A chunk is a turn (turns without tokens count in K). pi_old is `proximal`, the inference engine `behaviour`.

    extra["mask"], extra["weight"], one per token: m_k, and the factor of the log-probability besides m_k G_k.
    House: the ratio is detached; log-ratios (mean over the chunk) clamped to [-20, 20]; the loss is the sum over
    chunks and the mean over trajectories with tokens; log pi(c_k) is the sum over its tokens.
    """
    advantage: list[float] = []
    mask: list[float] = []
    weight: list[float] = []
    loss = constant(0.0)
    n = rows(batch)
    for trajectory in trajectories(batch):
        R = total(trajectory)
        K = len(trajectory.turns)
        for k, turn in enumerate(trajectory.turns, start=1):
            if not turn.tokens:
                continue
            # Card: "G_k = gamma^{K-k} R, same for all tokens of chunk k"
            G = gamma ** (K - k) * R
            # Card: "rho_k = (prod_{t in c_k} pi_theta/pi_old)^{1/|c_k|}"
            log_rho = mean([token.logp.item() - token.proximal for token in turn.tokens])
            rho = math.exp(bound(log_rho, -BOUND, BOUND))
            # Card: "m_k = 1[ geometric-mean ratio between training engine and inference engine on the chunk <= H ]"
            log_gap = mean([token.proximal - token.behaviour for token in turn.tokens])
            m = 1.0 if math.exp(bound(log_gap, -BOUND, BOUND)) <= H else 0.0
            # Card: "successful trajectories (R>0): - m_k G_k log pi(c_k) with no ratio"
            # Card: "Failed: - m_k clip(rho_k,0,1) G_k log pi(c_k)"
            w = 1.0 if R > 0 else bound(rho, 0.0, 1.0)
            for token in turn.tokens:
                loss = loss + -m * w * G * token.logp / n
                advantage.append(G)
                mask.append(m)
                weight.append(w)
    return Result(advantage, loss, {"mask": mask, "weight": weight})


def dcpo(batch: Batch, keep: int | None = None) -> Result:
    """DCPO (MemAct). turn.facts["memory"]: the turn ends with a memory action.

    extra["segment"]: the segment of every token, counted from 0 in its trajectory; extra["mask"]: 1 if its segment is
    kept. House: segments without tokens are not counted among the S; a segment's lot is that of its first token.
    """
    mask: list[float] = []
    segments: list[int] = []
    for trajectory in trajectories(batch):
        segment = 0
        mine: list[int] = []
        lots: dict[int, float] = {}
        for turn in trajectory.turns:
            for token in turn.tokens:
                mine.append(segment)
                lots.setdefault(segment, token.lot)
            # Card: "cut trajectory i into m+1 segments"; "the memory call itself closes the segment"
            if turn.facts["memory"]:
                segment += 1
        # Card: "Sampling for the update may keep at most S segments per trajectory."
        order = sorted(lots, key=lambda one: lots[one])
        kept = order if keep is None else order[:keep]
        segments.extend(mine)
        mask.extend(1.0 if one in kept else 0.0 for one in mine)
    # Card: "A_i = (R_i-mean)/(std+eps) over the G trajectories of the task (one vote per trajectory). Every policy token
    # of every segment gets A_i"
    return Result(spread(batch, grpo_advantage(batch)), constant(0.0), {"segment": segments, "mask": mask})


# ---------------------------------------------------------------------------------------------------------------------
# Critics of steps


def archer(batch: Batch, gamma: float = 0.9, baseline: bool = False) -> Result:
    """ArCHer. A turn's tokens are the action a' sampled for its state.

    Facts of a turn, each a pair (one per critic): "q" = Q_j(s, a'), "v" = V_j(s), "slow_q" = Qbar_j(s, a'),
    "slow_v" = Vbar_j(s). extra["q_target"], extra["v_target"]: a pair for every turn (with tokens or not) in order;
    extra["critic_loss"]: mean over turns of the squared errors summed over both critics and both heads.
    House: done at the last turn, truncated or not; actor loss is the mean over turns with tokens; with `baseline`, b_t
    is the token's `value`, its MSE the mean over tokens, and the residual uses it detached.
    """
    advantage: list[float] = []
    q_target: list[tuple[float, float]] = []
    v_target: list[tuple[float, float]] = []
    errors: list[float] = []
    actions = sum(1 for trajectory in trajectories(batch) for turn in trajectory.turns if turn.tokens)
    count = len(list(tokens(batch)))
    loss = constant(0.0)
    for trajectory in trajectories(batch):
        for k, turn in enumerate(trajectory.turns):
            done = k + 1 == len(trajectory.turns)
            q, v = [], []
            for j in (0, 1):
                # Card: "Q_j(s,a) -> r + gamma(1-done) Vbar_j(s'); V_j(s) -> Qbar_j(s, a')"
                after = 0.0 if done else trajectory.turns[k + 1].facts["slow_v"][j]
                q.append(turn.reward + gamma * after)
                v.append(turn.facts["slow_q"][j])
            q_target.append((q[0], q[1]))
            v_target.append((v[0], v[1]))
            # Card: "MSE"
            errors.append(sum((turn.facts["q"][j] - q[j]) ** 2 + (turn.facts["v"][j] - v[j]) ** 2 for j in (0, 1)))
            # Card: "A = min_j Q_j(s,a') - min_j V_j(s)"
            A = min(turn.facts["q"]) - min(turn.facts["v"])
            for token in turn.tokens:
                # Card: "Optional token baseline b_t: residual A-b_t, loss + MSE(A,b_t)"
                residual = A - token.value.item() if baseline else A
                advantage.append(residual)
                # Card: "loss -A sum_t log pi(a'_t|...)"
                loss = loss + -residual * token.logp / actions
                if baseline:
                    loss = loss + (A - token.value) ** 2 / count
    extra = {"q_target": q_target, "v_target": v_target, "critic_loss": mean(errors) if errors else 0.0}
    return Result(advantage, loss, extra)


def archer_fresh(batch: Batch, gamma: float = 0.9, value_weight: float = 1.0, baseline: bool = False) -> Result:
    """ArCHer with fresh actions. A trajectory with the fact "fresh" > 0 is one action a' ~ pi(.|s), no environment answered it;
    the others are the buffer: (s, a, r, s', done). Critic facts as in `archer`; extra["slopes"]: for every turn in order the
    derivatives of the whole loss by Q_1, Q_2, V_1, V_2.
    House: each of the three losses is a mean over its own turns with tokens.
    """
    turns = [(one, k) for one in trajectories(batch) for k in range(len(one.turns))]
    drawn = {id(one) for one in trajectories(batch) if one.facts.get("fresh", 0) > 0}
    acted = sum(1 for one, k in turns if id(one) in drawn and one.turns[k].tokens)
    stored = sum(1 for one, k in turns if id(one) not in drawn and one.turns[k].tokens)
    words = sum(len(one.turns[k].tokens) for one, k in turns if id(one) in drawn)
    slopes: list[list[float]] = []
    loss = constant(0.0)
    for one, k in turns:
        turn = one.turns[k]
        slope = [0.0, 0.0, 0.0, 0.0]
        for j in (0, 1):
            if turn.tokens and id(one) in drawn:
                # Card: "V-loss: (V_i(o) − sg[Q̄_i(o, a')])²,  a' ∼ π(·|o) freshly sampled"
                error = turn.facts["v"][j] - turn.facts["slow_q"][j]
                slope[2 + j] = value_weight * 2 * error / acted
                loss = loss + value_weight * error**2 / acted
            elif turn.tokens:
                # Card: "Q-loss: (Q_i(o,a) − sg[r + γ(1−d)·V̄_i(o')])²"
                after = one.turns[k + 1].facts["slow_v"][j] if k + 1 < len(one.turns) else 0.0
                error = turn.facts["q"][j] - turn.reward - gamma * after
                slope[j] = value_weight * 2 * error / stored
                loss = loss + value_weight * error**2 / stored
        slopes.append(slope)
        if id(one) in drawn:
            # Card: "A(o,a) = min_i Q_i(o,a) − min_i V_i(o)"; "actor: − Σ_tokens logπ(a)·A  on freshly sampled a"
            A = min(turn.facts["q"]) - min(turn.facts["v"])
            for token in turn.tokens:
                loss = loss - (A - token.value.item() if baseline else A) * token.logp / acted
                if baseline:  # Card: "b fitted by MSE to A"
                    loss = loss + (A - token.value) ** 2 / words
    return Result([], loss, {"slopes": slopes})


def direct_advantage(batch: Batch, beta: float = 0.1, least: float = 0.0) -> Result:
    """DAPO (direct advantage). turn.facts["value"] = V(s) before the step; turn.facts["state"] names s in its group.

    extra["mask"], one per token: 0 where the step's state is filtered out. House: the terminal reward is R; a turn
    without tokens is no (s, a) pair; the spread of a state is max - min of A over its pairs, and states with less than
    `least` are dropped; beta = 0.1 is a guess (Card: "unverified (beta small ...)").
    """
    advantage: list[float] = []
    mask: list[float] = []
    pairs: list[tuple[float, Turn]] = []
    for group in batch:
        found: list[tuple[float, Turn]] = []
        for trajectory in group:
            for k, turn in enumerate(trajectory.turns):
                last = k + 1 == len(trajectory.turns)
                # Card: "A(s,a)=V(s+a)-V(s) (terminal: reward - V)"
                after = total(trajectory) if last else trajectory.turns[k + 1].facts["value"]
                if turn.tokens:
                    found.append((after - turn.facts["value"], turn))
        for A, turn in found:
            # Card: "Filter states with too little advantage spread (optional)."
            peers = [other for other, one in found if one.facts["state"] == turn.facts["state"]]
            kept = max(peers) - min(peers) >= least
            if kept:
                pairs.append((A, turn))
            for _ in turn.tokens:
                advantage.append(A)
                mask.append(1.0 if kept else 0.0)
    loss = constant(0.0)
    for A, turn in pairs:
        # Card: "log-ratio summed over the step's tokens, equal weight per (s,a)"
        log_ratio = constant(0.0)
        for token in turn.tokens:
            log_ratio = log_ratio + (token.logp - token.reference)
        # Card: "E[ ( (1/beta) A(s,a) - log(pi_theta(a|s)/pi_ref(a|s)) )^2 ]"
        loss = loss + (A / beta - log_ratio) ** 2 / len(pairs)
    return Result(advantage, loss, {"mask": mask})


# ---------------------------------------------------------------------------------------------------------------------
# Retries and replays


def r3l(
    batch: Batch, alpha: float = 3.0, best: float = 1.0, tau: float | None = None, documented: bool = False
) -> Result:
    """R3L. Facts of a trajectory: "retry_of" = position in the group of the base attempt or None; "pivot" = turn.

    Card [code]: "sets A^=1.0 exactly" for perfect reward; `documented`: alpha. A group of one follows the formula:
    Card: "own singleton groups, reward 1 so A^=1"; below R_max it gets R - R = 0. The reduction to Dr.GRPO therefore
    needs no perfect reward as well. extra["mask"]: 0 before the pivot (its advantage is 0 too).
    House: tokens before any of several pivots are masked; the loss is the mean over the unmasked tokens.
    """
    advantage: list[float] = []
    mask: list[float] = []
    terms: list[Tensor] = []
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        # Card: "baseline b = mean R (alternative tau*logmeanexp(R/tau)); A=R-b, no std"
        if tau is None:
            b = mean(rewards)
        else:
            top = max(rewards)
            b = top + tau * math.log(mean([math.exp((reward - top) / tau) for reward in rewards]))
        # Card: "action tokens before the pivot step are 0 in *both* the retry and the base attempt it branched from"
        start = [0 for _ in group]
        for i, trajectory in enumerate(group):
            base = trajectory.facts.get("retry_of")
            if base is not None:
                pivot = trajectory.facts["pivot"]
                start[i] = max(start[i], pivot)
                start[base] = max(start[base], pivot)
        for i, trajectory in enumerate(group):
            A = rewards[i] - b
            if rewards[i] >= best:
                # Card: "for perfect reward R>=R_max the docs give A^=alpha while [code] sets A^=1.0 exactly"
                A = alpha if documented else 1.0
            elif A >= 0:
                # Card: "A^ = alpha A if A>=0"
                A = alpha * A
            for k, turn in enumerate(trajectory.turns):
                for token in turn.tokens:
                    m = 1.0 if k >= start[i] else 0.0
                    advantage.append(A * m)
                    mask.append(m)
                    if m:
                        # Card: "Loss −A·log π/(1+τ), token mean, no ratio (OPMD)"; the constant is left off
                        terms.append(-A * token.logp)
    loss = constant(0.0)
    for term in terms:
        loss = loss + term / len(terms)
    return Result(advantage, loss, {"mask": mask})


def spear_weight(step: float, warm: float = 100, gamma_r: float = 1.0) -> float:
    """Card: "gamma_r * (1-cos(pi t/T_r))/2 for t<=T_r, then gamma_r"."""
    return gamma_r * (1 - math.cos(math.pi * step / warm)) / 2 if step <= warm else gamma_r


def spear_bonus(trajectory: Trajectory, step: float, horizon: float = 200) -> float:
    """Card: "min(1, 0.1 x #tool-call turns) * (cos(pi t/T_i)+1)/2 for t<=T_i, else 0"."""
    calls = sum(1 for turn in trajectory.turns if turn.tool_calls > 0)
    return min(1.0, 0.1 * calls) * (math.cos(math.pi * step / horizon) + 1) / 2 if step <= horizon else 0.0


def spear_fresh(batch: Batch, step: float = 0, horizon: float = 200) -> list[float]:
    """The base recipe on fresh rows. Card: "no std"; "Intrinsic reward: R += ...". A group of one gets R - R = 0."""
    scores = []
    for group in batch:
        rewards = [total(trajectory) + spear_bonus(trajectory, step, horizon) for trajectory in group]
        scores.extend(reward - mean(rewards) for reward in rewards)
    return spread(batch, scores)


def spear_insert(batch: Batch, advantage: list[float]) -> list[bool]:
    """One flag per trajectory. Card: "Buffer insert: rows whose (mean token) advantage is > 0"; no tokens, no row."""
    left = iter(advantage)
    out = []
    for trajectory in trajectories(batch):
        mine = [next(left) for _ in sampled(trajectory)]
        out.append(bool(mine) and mean(mine) > 0)
    return out


def spear_clip(
    batch: Batch, advantage: list[float], low: float = 2.0, high: float = 60.0, fraction: float = 0.02
) -> list[float]:
    """Card: "among tokens with cov=(A-meanA)(logp-mean logp) in (lo,hi), up to (fraction x number of valid tokens)
    tokens drawn at random have their loss zeroed". House: the number is rounded down; all tokens given are valid."""
    every = list(tokens(batch))
    keep = [1.0] * len(every)
    if not every:
        return keep
    A = mean(advantage)
    logp = mean([token.logp.item() for token in every])
    inside = []
    for at, token in enumerate(every):
        if low < (advantage[at] - A) * (token.logp.item() - logp) < high:
            inside.append(at)
    inside.sort(key=lambda at: every[at].lot)
    for at in inside[: math.floor(fraction * len(every))]:
        keep[at] = 0.0
    return keep


def spear(
    batch: Batch,
    history: Sequence[float] | None = None,
    deviations: Sequence[float] | None = None,
    normalise: bool = False,
    tolerate: int = 5,
    size: int = 2048,
    step: float = 0,
    warm: float = 100,
    gamma_r: float = 1.0,
) -> Result:
    """SPEAR, recalibration: the batch is the buffer, trajectory.facts["age"] the steps since a row was stored.

    `history` and `deviations` are the recent group means and stds; None: those of this batch's groups. Dropped rows get
    0. extra["keep"]: a flag per trajectory; extra["weight"]: the weight of the replay loss.
    House: eps 1e-6 on P50 of the stds; a group of one has std 0; rows without tokens are never kept.
    """
    if history is None:
        history = [mean([total(trajectory) for trajectory in group]) for group in batch]
    if deviations is None:
        deviations = [std([total(one) for one in group]) if len(group) > 1 else 0.0 for group in batch]
    every = list(trajectories(batch))
    scores = []
    for trajectory in every:
        # Card: "recalibrate A~ = R - P50(history of group means) (divide by P50 of group stds only if std normalisation
        # is on)"
        score = total(trajectory) - median(history)
        if normalise:
            score = score / (median(deviations) + 1e-6)
        scores.append(score)
    able = []
    for i, trajectory in enumerate(every):
        # Card: "drop entries older than `tolerate_steps`"; "keep rows with A~ >= 0"
        if trajectory.facts["age"] <= tolerate and scores[i] >= 0 and sampled(trajectory):
            able.append(i)
    # Card: "take a random power-of-two subset up to buffer size"
    number = 0
    while (number * 2 or 1) <= min(len(able), size):
        number = number * 2 or 1
    able.sort(key=lambda i: every[i].lot)
    kept = able[:number]
    final = [scores[i] if i in kept else 0.0 for i in range(len(every))]
    extra = {"keep": [i in kept for i in range(len(every))], "weight": spear_weight(step, warm, gamma_r)}
    return Result(spread(batch, final), constant(0.0), extra)


# ---------------------------------------------------------------------------------------------------------------------
# Hidden states


def rank_of(singular: list[float]) -> float:
    """Card: "ER(Z)=exp(-sum p_k ln(p_k+1e-8)), p = singular values ... divided by (sum+1e-8)"."""
    whole = math.fsum(singular) + 1e-8
    return math.exp(-math.fsum(s / whole * math.log(s / whole + 1e-8) for s in singular))


def effective_rank(Z: list[list[float]]) -> float:
    """Card: "singular values of the column-centred Z"."""
    matrix = torch.tensor(Z, dtype=torch.float64)
    for column in range(matrix.shape[1]):
        matrix[:, column] = matrix[:, column] - mean(matrix[:, column].tolist())
    return rank_of(torch.linalg.svdvals(matrix).tolist())


def rank_signals(Z: list[list[float]], stride: int = 40, longest: int = 512) -> dict[str, float]:
    """ER, ERV and ERA of one response. House: a mean over nothing (a short response) is 0."""
    # Card: "max prefix 512 tokens (last ones)"
    Z = Z[-longest:]
    m = []
    j = 1
    while j * stride + 1 <= len(Z):
        # Card: "Prefix values m_j = ER(Z[:j s+1]) at stride s"
        m.append(effective_rank(Z[: j * stride + 1]))
        j += 1
    # Card: "First difference d_j = m_j - mean(m_1..m_{j-1}), j>=2; ERV = mean_j d_j"
    d = [m[j] - mean(m[:j]) for j in range(1, len(m))]
    # Card: "Second difference e_j = d_j - d_{j-1}; ERA = mean_j e_j"
    e = [d[j] - d[j - 1] for j in range(1, len(d))]
    return {"ER": effective_rank(Z), "ERV": mean(d) if d else 0.0, "ERA": mean(e) if e else 0.0}


def rank_shaped(A: float, phi: float, kappa: float = 2.0) -> float:
    """Card: "A_t <- A_t + min( max(Phi,0), |A_t|/kappa )"."""
    return A + min(max(phi, 0.0), abs(A) / kappa)


def verl_rank(
    batch: Batch,
    state: dict[str, float] | None = None,
    stride: int = 40,
    a: float = 0.3,
    g: float = 2.0,
    explore: tuple[float, float, float] = (0.0, 0.0, 1.0),
    exploit: tuple[float, float, float] = (0.0, 1.0, 0.0),
    kappa: float = 2.0,
    everywhere: bool = False,
    longest: int = 512,
) -> Result:
    """VERL (effective rank) on GRPO. trajectory.facts["hidden"]: one vector per sampled token.

    `state` is mu of ER, ERV and ERA; None at the first step. extra["state"]: mu after the step. Card [code]: "Phi sits
    only on the last token of the response"; `everywhere` is the paper's broadcast.
    House: the first mu is the batch mean; the batch mean is over trajectories with tokens; eps of rel is 1e-6; without
    any token mu stays.
    """
    names = ("ERA", "ERV", "ER")
    signals = []
    for trajectory in trajectories(batch):
        signals.append(rank_signals(trajectory.facts["hidden"], stride, longest) if sampled(trajectory) else None)
    advantage: list[float] = []
    potentials: list[float] = []
    for trajectory, A, signal in zip(trajectories(batch), grpo_advantage(batch), signals):
        phi = 0.0
        # Card: "First step: no shaping."
        if signal is not None and state is not None:
            # Card: "rel_X = clip((X-mu_X)/(|mu_X|+eps), -5, 5)"
            rel = {X: bound((signal[X] - state[X]) / (abs(state[X]) + 1e-6), -5.0, 5.0) for X in names}
            # Card: "beta = sigmoid(g * rel_ERA). w = beta w_explore + (1-beta) w_exploit over (ERA,ERV,ER)."
            beta = 1 / (1 + math.exp(-g * rel["ERA"]))
            # Card: "Phi = sum_X w_X tanh(rel_X)"
            for X, up, down in zip(names, explore, exploit):
                phi += (beta * up + (1 - beta) * down) * math.tanh(rel[X])
        potentials.append(phi)
        length = len(sampled(trajectory))
        for t in range(length):
            advantage.append(rank_shaped(A, phi, kappa) if everywhere or t == length - 1 else A)
    present = [signal for signal in signals if signal is not None]
    after = state
    if present:
        after = {}
        for X in names:
            batch_mean = mean([signal[X] for signal in present])
            # Card: "mu <- (1-a) mu + a * batch mean, updated after use"
            after[X] = batch_mean if state is None else (1 - a) * state[X] + a * batch_mean
    return Result(advantage, constant(0.0), {"state": after, "phi": potentials, "signals": signals})


def rlfr(
    batch: Batch,
    threshold: float = 0.6,
    top: int = 15,
    coef: float = 0.01,
    levels: tuple[float, ...] = (0.8,),
) -> list[float]:
    """RLFR. token.facts["deviation"][s*] = dev_t at every layer. House: constant scores normalise to 0; of equal scores
    the earlier token is the higher."""
    advantage = []
    for trajectory, z in zip(trajectories(batch), grpo_advantage(batch)):
        raw = []
        for token in sampled(trajectory):
            # Card: "score_t = s*/(1-s*) * dev_t, averaged over layers (and over several s* if given)"
            raw.append(mean([mean([s / (1 - s) * dev for dev in token.facts["deviation"][s]]) for s in levels]))
        if not raw:
            continue
        # Card: "Per response min-max normalise to [0,1] over unmasked tokens"
        low, high = min(raw), max(raw)
        scaled = [(one - low) / (high - low) if high > low else 0.0 for one in raw]
        # Card: "keep values > threshold, then only the top-k of them"
        over = [t for t, one in enumerate(scaled) if one > threshold]
        over.sort(key=lambda t: (-scaled[t], t))
        kept = over[:top]
        # Card: "token reward r_t = -coef * kept score. Outcome: group z-score placed at EOS"
        reward = [-coef * scaled[t] if t in kept else 0.0 for t in range(len(raw))]
        reward[-1] += z
        for t in range(len(raw)):
            # Card: "advantage_t = reward-to-go with gamma=1"
            advantage.append(math.fsum(reward[t:]))
    return advantage


# ---------------------------------------------------------------------------------------------------------------------
# Shaped rewards


def gcpo(
    batch: Batch, threshold: float = 0.0, length_weight: float = 1.0, longest: int = 1024, format_weight: float = 1.0
) -> Result:
    """GCPO. Facts of a trajectory: "action" (it used the auxiliary action), "format" (its format reward).

    House: R_acc and acc are the total reward; constants are guesses (Card: "threshold e, length scale and weights
    unverified"). extra["sign"]: the mask of every group; extra["reward"]: R_i of every trajectory.
    """
    scores: list[float] = []
    signs: list[float] = []
    shaped: list[float] = []
    for group in batch:
        using = [total(trajectory) for trajectory in group if trajectory.facts["action"]]
        without = [total(trajectory) for trajectory in group if not trajectory.facts["action"]]
        sign = 0.0
        # Card: "mask = +1 if d > e, -1 if d < -e, 0 otherwise (also 0 if either set is empty)"
        if using and without:
            d = mean(using) - mean(without)
            if d > threshold:
                sign = 1.0
            elif d < -threshold:
                sign = -1.0
        rewards = []
        for trajectory in group:
            # Card: "R_i = R_acc + R_format + mask * 1[i in W] + R_len, R_len = min(1, |o_i|/L_max) scaled"
            reward = total(trajectory) + format_weight * trajectory.facts["format"]
            if trajectory.facts["action"]:
                reward += sign
            reward += length_weight * min(1.0, len(sampled(trajectory)) / longest)
            rewards.append(reward)
        signs.append(sign)
        shaped.extend(rewards)
        # Card: "Then GRPO normalisation over all G."
        scores.extend(normalised(rewards))
    return Result(spread(batch, scores), constant(0.0), {"sign": signs, "reward": shaped})


def shapley_values(
    count: int,
    value: Callable[[frozenset[int]], float],
    orders: list[list[int]],
    least: int = 3,
    most: int = 50,
    change: float = 0.01,
    near: float = 0.01,
) -> list[float]:
    """phi_f. Card: "Monte-Carlo permutations: running mean of marginal gains, up to 50 permutations, at least 3, stop
    when mean change <0.01; within a permutation stop when |v-v_full|<0.01". `orders` are the permutations drawn.

    House: the change is the mean over facts of |phi after - phi before| of one permutation; facts behind the stop gain
    0 in that permutation."""
    full = value(frozenset(range(count)))
    phi = [0.0] * count
    for n, order in enumerate(orders[:most], start=1):
        gains = [0.0] * count
        known: frozenset[int] = frozenset()
        current = value(known)
        for fact in order:
            if abs(current - full) < near:
                break
            known = known | {fact}
            gains[fact] = value(known) - current
            current = value(known)
        new = [old + (gain - old) / n for old, gain in zip(phi, gains)]
        moved = mean([abs(a - b) for a, b in zip(new, phi)]) if count else 0.0
        phi = new
        if n >= least and moved < change:
            break
    return phi


def shapley_weights(phi: list[float], temperature: float = 2.0) -> list[float]:
    """Card: "omega=softmax(phi/temp), uniform if all equal"."""
    if not phi:
        return []
    top = max(phi)
    powers = [math.exp((one - top) / temperature) for one in phi]
    return [power / math.fsum(powers) for power in powers]


def shapley_gain(
    batch: Batch,
    alpha: float = 2.0,
    beta: float = 1.0,
    gamma: float = 3.0,
    form: float = 1.0,
    temperature: float = 2.0,
    by_position: bool = True,
    fresh_only: bool = False,
) -> Result:
    """ProMed. trajectory.facts["shapley"] = phi of every fact of the case; facts of a turn: "kind" ("question",
    "answer" or "other"), "format" (0 or 1), "uncovered" (set of fact numbers in the reply).

    By default the released loop ("counts facts present in that turn"); `fresh_only` is the paper's. `by_position`:
    baseline "mean over the G rollouts at the same token position", else "mean over all valid tokens of the group".
    House: a token's position is counted in its trajectory; rollouts too short for a position have no vote there. No
    lone-peer rule is needed by position (r - r = 0); over all tokens a lone trajectory follows the formula.
    extra["reward"]: the token rewards; extra["gain"]: SIG of every turn (0 unless a question).
    """
    advantage: list[float] = []
    paid: list[float] = []
    gains: list[float] = []
    for group in batch:
        rewards: list[list[float]] = []
        for trajectory in group:
            omega = shapley_weights(trajectory.facts["shapley"], temperature)
            seen: set[int] = set()
            mine: list[float] = []
            for turn in trajectory.turns:
                sig = 0.0
                reward = 0.0
                if turn.facts["kind"] == "question":
                    # Card: "SIG_q = sum of omega_f over facts judged present in the patient's reply to q"
                    for fact in sorted(turn.facts["uncovered"]):
                        if not (fresh_only and fact in seen):
                            sig += omega[fact]
                    seen |= turn.facts["uncovered"]
                    # Card: "question tokens: alpha SIG_q + beta SIG_q 1[final answer correct] + format"
                    reward = alpha * sig + beta * sig * right(trajectory) + form * turn.facts["format"]
                elif turn.facts["kind"] == "answer":
                    # Card: "answer tokens: gamma 1[correct] + format; others 0"
                    reward = gamma * right(trajectory) + form * turn.facts["format"]
                gains.append(sig)
                mine.extend(reward for _ in turn.tokens)
            rewards.append(mine)
        everything = [one for mine in rewards for one in mine]
        for mine in rewards:
            for t, reward in enumerate(mine):
                # Card: "Advantage: token reward minus baseline ... No std."
                peers = [other[t] for other in rewards if t < len(other)] if by_position else everything
                advantage.append(reward - mean(peers))
                paid.append(reward)
    return Result(advantage, constant(0.0), {"reward": paid, "gain": gains})


def fapo_judge(steps: int, true: int, predicted: int | None) -> float:
    """Reward of the generative reward model; `predicted` None is an invalid format.

    Card: "invalid format -> -1; t*=-1: +1 if t^=-1 else -1; t*!=-1: -1 if t^=-1, else 1 - |t^-t*|/n"."""
    if predicted is None:
        return -1.0
    if true == -1:
        return 1.0 if predicted == -1 else -1.0
    return -1.0 if predicted == -1 else 1 - abs(predicted - true) / steps


def fapo(batch: Batch, penalty: float = 1.0) -> list[float]:
    """FAPO on the GRPO advantage. trajectory.facts["error"]: the error index found, -1 for none, read only if right."""
    scores = []
    for group in batch:
        rewards = []
        for trajectory in group:
            # Card: "R = +1/-1 for right/wrong; if right and the GenRM returns an error index != -1: R -= lambda"
            reward = 1.0 if trajectory.success else -1.0
            if trajectory.success and trajectory.facts["error"] != -1:
                reward -= penalty
            rewards.append(reward)
        scores.extend(normalised(rewards))
    return spread(batch, scores)


def otc_alone(m: float, c: float) -> float:
    """Card: "OTC-PPO: r_tool = cos(m pi/(2m+c))"; 1 without calls, also for c = 0."""
    return math.cos(m * math.pi / (2 * m + c)) if m else 1.0


def otc_tool(m: float, n: float, c: float) -> float:
    """Card: "r_tool = 1 if m=n=0; cos(m pi/(2m+c)) if n=0<m; else sin(f pi/(2n)) with f = 2nm/(m+n)"."""
    if m == 0 and n == 0:
        return 1.0
    if n == 0:
        return otc_alone(m, c)
    f = 2 * n * m / (m + n)
    return math.sin(f * math.pi / (2 * n))


def otc(batch: Batch, alpha: float = 1.0, c: float = 4.0, alone: bool = False) -> Result:
    """OTC on the GRPO advantage. trajectory.facts["fewest"]: the task's running minimum before this step, or None.

    House: R_correct is 1 for a successful trajectory, else 0; the running minimum is read from a group's first
    trajectory and takes part in n. `alone` is the OTC-PPO factor. extra["fewest"]: the minimum of every group after
    the step; extra["reward"]: the reward of every trajectory.
    """
    scores: list[float] = []
    fewest: list[Any] = []
    paid: list[float] = []
    for group in batch:
        calls = [sum(turn.tool_calls for turn in trajectory.turns) for trajectory in group]
        # Card: "n = min m over correct trajectories of the task (keep the running minimum across epochs)"
        known = [m for m, trajectory in zip(calls, group) if trajectory.success]
        if group[0].facts["fewest"] is not None:
            known.append(group[0].facts["fewest"])
        n = min(known) if known else None
        rewards = []
        for m, trajectory in zip(calls, group):
            # Card: "Reward = alpha * r_tool * R_correct (product, so wrong answers get nothing)"
            reward = 0.0
            if trajectory.success:
                reward = alpha * (otc_alone(m, c) if alone else otc_tool(m, n, c))
            rewards.append(reward)
        fewest.append(n)
        paid.extend(rewards)
        scores.extend(normalised(rewards))
    return Result(spread(batch, scores), constant(0.0), {"fewest": fewest, "reward": paid})


def word_entropy(text: list[Token]) -> float:
    """Card: "H_i = Shannon entropy of the token (or content-word) distribution of y_i", in nats; empty text: 0."""
    counts: dict[Any, int] = {}
    for token in text:
        counts[token.facts["word"]] = counts.get(token.facts["word"], 0) + 1
    return -math.fsum(n / len(text) * math.log(n / len(text)) for n in counts.values())


def information_consistency(batch: Batch, helpful: float = 1.0, stable: float = 1.0) -> list[float]:
    """Information-consistency GRPO: a group is the set of paraphrases, token.facts["word"] a token's identity.

    House: "scaled within group" = divided by the group's largest H (0 if that is 0); stability is not scaled. Rewards of
    the environment are not read.
    """
    scores = []
    for group in batch:
        H = [word_entropy(sampled(trajectory)) for trajectory in group]
        top = max(H)
        rewards = []
        for one in H:
            # Card: "Helpfulness r^h_i = H_i (scaled within group); stability r^s_i = -|H_i - mean_group H|"
            help_reward = one / top if top > 0 else 0.0
            # Card: "R_i = lambda_h r^h_i + lambda_s r^s_i. A=(R-mean)/(std+eps) over the variant group."
            rewards.append(helpful * help_reward + stable * -abs(one - mean(H)))
        scores.extend(normalised(rewards))
    return spread(batch, scores)


# ---------------------------------------------------------------------------------------------------------------------


def enrich(batch: Batch, seed: int) -> Batch:
    """Fills, in place, every fact that the methods here read.

    token.facts       completions  rewards of K fresh completions from the prefix before this token (spo_segment)
                      key          tokens of a group with the same key are one shared token; None: not shared (arpo)
                      deviation    dict s* -> dev_t at every layer, for s* = 0.8 and 0.5 (rlfr); constant in some rows
                      word         identity of the token (information_consistency)
    turn.facts        node         tree node that the turn ends in; the last one is the leaf (spo_tree)
                      memory       the turn ends with a memory action (dcpo)
                      q, v, slow_q, slow_v  pairs of critic outputs (archer)
                      state, value name of the state before the step and its V (direct_advantage)
                      kind, format, uncovered  question / answer / other; 0 or 1; set of fact numbers (shapley_gain)
    trajectory.facts  prompt_completions  rewards of completions from the prompt; absent in every third group; equal to
                                   the completions of the first token (spo_segment)
                      tracker, stored  (a, b); [(log pi_old, log pi_now)] of the stored response, may be empty; the same
                                   for a whole group (spo_single_stream)
                      retry_of, pivot  position of the base attempt or None; turn number, may be 0 (r3l)
                      age          steps since the row was stored (spear)
                      hidden       one vector of four numbers per sampled token (verl_rank)
                      action, format  used the action; format reward; all, none or mixed in a group (gcpo)
                      shapley      phi of every fact of the case, the same for a group; sometimes all equal (shapley_gain)
                      error        index of the error found or -1 (fapo)
                      fewest       running minimum of tool calls or None, the same for a group (otc)
    """
    dice = random.Random(f"segments {seed}")

    def completions() -> list[float]:
        return [float(dice.random() < 0.5) for _ in range(9)]

    def pair() -> tuple[float, float]:
        return dice.gauss(0.0, 1.0), dice.gauss(0.0, 1.0)

    for number, group in enumerate(batch):
        prompt = completions()
        tracker = spo_start(dice.randint(0, 8))
        stored = [(-dice.uniform(0.1, 3.0), -dice.uniform(0.1, 3.0)) for _ in range(dice.choice([0, 1, 4]))]
        if dice.random() < 0.5:
            stored = [(old, old - dice.gauss(0.0, 0.02)) for old, _ in stored]
        count = dice.randint(1, 4)
        phi = [0.3] * count if dice.random() < 0.3 else [dice.gauss(0.0, 1.0) for _ in range(count)]
        fewest = dice.choice([None, 0, 1, 2])
        known: dict[str, float] = {}
        usage = dice.choice(["all", "none", "mixed", "mixed"])
        share = dice.choice([0, 1, 2])  # the first tokens of the even trajectories are shared
        for i, trajectory in enumerate(group):
            facts = trajectory.facts
            text = sampled(trajectory)
            if number % 3 != 2:
                facts["prompt_completions"] = list(prompt)
            facts["tracker"], facts["stored"] = tracker, list(stored)
            facts["retry_of"] = dice.randrange(i) if i > 0 and dice.random() < 0.4 else None
            facts["pivot"] = dice.randint(0, len(trajectory.turns) - 1)
            facts["age"] = dice.randint(0, 7)
            facts["hidden"] = [[dice.gauss(0.0, 1.0) for _ in range(4)] for _ in text]
            facts["action"] = usage == "all" or (usage == "mixed" and dice.random() < 0.5)
            facts["format"] = dice.choice([0.0, 0.5])
            facts["shapley"] = list(phi)
            facts["error"] = dice.choice([-1, -1, 0, 3])
            facts["fewest"] = fewest
            flat = dice.random() < 0.2
            for t, token in enumerate(text):
                token.facts["completions"] = list(prompt) if t == 0 else completions()
                token.facts["key"] = ("shared", t) if i % 2 == 0 and t < share else None
                layers = {s: [dice.uniform(0.0, 2.0) for _ in range(3)] for s in (0.8, 0.5)}
                token.facts["deviation"] = {s: [0.7] * 3 for s in (0.8, 0.5)} if flat else layers
                token.facts["word"] = dice.choice(["a", "b", "c"])
            path: tuple[Any, ...] = ()
            for k, turn in enumerate(trajectory.turns):
                last = k + 1 == len(trajectory.turns)
                path = (*path, f"leaf {i}" if last else dice.randrange(2))
                turn.facts["node"] = path
                turn.facts["memory"] = dice.random() < 0.4
                for name in ("q", "v", "slow_q", "slow_v"):
                    turn.facts[name] = pair()
                turn.facts["state"] = "start" if k == 0 else f"{k} {dice.randrange(2)}"
                turn.facts["value"] = known.setdefault(turn.facts["state"], dice.random())  # one V per state
                turn.facts["kind"] = "answer" if last else dice.choice(["question", "question", "other"])
                turn.facts["format"] = float(dice.random() < 0.7)
                turn.facts["uncovered"] = {fact for fact in range(count) if dice.random() < 0.4}
    return batch
