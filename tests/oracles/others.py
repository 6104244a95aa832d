"""Slow oracles of methods that mix expert, replayed, teacher or preference data into the loss: one loop, one formula.

Every method takes a batch of records and returns a `Result`. Lines marked "Card" quote the specification; lines marked
"House" state the choice made where the card is silent.

House: `trajectory.facts["origin"]` is "policy" (also when missing), "expert" or "replay"; a loss dispatches on it.
House: the advantage is 0 on tokens that enter the loss through a likelihood or a preference term, or not at all.
House: log-ratios to an old policy are clamped to [-20, 20]; z-score (R-mean)/(std+1e-6), n - 1, a lone peer gets 0.
House: each component is divided by its own count over the whole batch (rule 4), and is 0 without any (rule 5).
House: a pair is a group of two, one with facts["chosen"] True and one False; other groups are no pairs. An empty sum or
mean over the tokens of a side is 0. Preference losses are means over pairs.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from .objectives import constant, larger, mean, smaller, spread, std
from .records import Batch, Group, Token, Trajectory, leaf, sampled, total, trajectories
from .result import Result
from .trust import clipped, log_ratio


def enrich(batch: Batch, seed: int) -> Batch:
    """Fill the facts that the methods read, in place.

    trajectory.facts:
    origin      "policy", "expert" or "replay" (missing for some: policy); in a pair always "policy"
    chosen      True / False in most groups of two; missing elsewhere
    prefer      list of P(this beats peer j) in group order, own entry ignored; missing in some groups
    ratings     the k = 2 heads of a reward model; direction: the unit vector of the group
    gap         quality gap of the pair (the same on both sides); family: which original pair it was made from
    format      format reward: 0 or -1
    guided      True: sampled with the hint in context, `behaviour` is its log-probability with the hint
    age         steps since a replayed trajectory was stored
    advantage   the advantage a replayed trajectory was stored with
    token.facts:
    teacher     log-probability under the teacher
    revise_chosen, revise_rejected                       leaf: log-probability as a revision of the chosen / rejected
    revise_chosen_reference, revise_rejected_reference   the same under the reference
    changed, changed_reference   leaf / float: log-probability under the prompt with one instruction changed; missing
                                 for whole trajectories
    hits        how many of the candidates drawn at this position are the label; others: leaves, one for every other
                candidate (both may be empty)
    """
    dice = random.Random(seed * 7919 + 13)
    for index, group in enumerate(batch):
        pair = len(group) == 2 and dice.random() < 0.85
        first = dice.random() < 0.5
        gap = dice.choice([1.0, 2.0, 3.0])
        angle = dice.uniform(-math.pi / 4, math.pi / 4)
        asked = dice.random() < 0.7
        lost = dice.random() < 0.3
        for i, trajectory in enumerate(group):
            facts = trajectory.facts
            if pair:
                facts["origin"] = "policy"
                facts["chosen"] = first == (i == 0)
                facts["gap"] = gap
                facts["family"] = index // 10
            elif dice.random() < 0.9:
                facts["origin"] = dice.choice(["policy", "policy", "policy", "expert", "replay"])
            if asked:
                facts["prefer"] = [dice.choice([0.0, 0.5, 1.0, dice.random()]) for _ in group]
            if lost and facts.get("origin", "policy") == "policy":
                trajectory.success = False
                for turn in trajectory.turns:
                    turn.reward = 0.0
            facts["ratings"] = [dice.gauss(0.0, 1.0), dice.gauss(0.0, 1.0)]
            facts["direction"] = [math.cos(angle), math.sin(angle)]
            facts["format"] = dice.choice([0.0, 0.0, -1.0])
            facts["guided"] = facts.get("origin", "policy") == "policy" and dice.random() < 0.3
            facts["age"] = dice.randint(0, 14)
            facts["advantage"] = dice.choice([0.0, dice.gauss(0.0, 1.0)])
            changed = dice.random() < 0.7
            for token in sampled(trajectory):
                near = token.logp.item()

                def drawn(near: float = near) -> float:
                    return min(-1e-3, near + dice.gauss(0.0, 0.5))

                token.facts["teacher"] = drawn()
                for name in ("revise_chosen", "revise_rejected"):
                    token.facts[name] = leaf(drawn())
                    token.facts[f"{name}_reference"] = drawn()
                if changed:
                    token.facts["changed"] = leaf(drawn())
                    token.facts["changed_reference"] = drawn()
                token.facts["hits"] = dice.choice([0, 0, 1, 2])
                token.facts["others"] = [leaf(drawn()) for _ in range(dice.choice([0, 1, 3]))]
    return batch


# ---------------------------------------------------------------------------------------------------------------------
# Helpers


def origin(trajectory: Trajectory) -> str:
    return str(trajectory.facts.get("origin", "policy"))


def of(rows: list[Trajectory], name: str) -> list[Trajectory]:
    return [one for one in rows if origin(one) == name]


def worded(rows: list[Trajectory]) -> int:
    """How many have at least one token."""
    return sum(1 for one in rows if sampled(one))


def everywhere(batch: Batch, per_trajectory: dict[int, float]) -> list[float]:
    """One number for each trajectory, by `id`, 0 for those without, becomes one per token."""
    return spread(batch, [per_trajectory.get(id(one), 0.0) for one in trajectories(batch)])


def standard(rewards: list[float]) -> list[float]:
    """House: (R - mean)/(std + 1e-6), n - 1, a lone peer gets 0."""
    if len(rewards) <= 1:
        return [0.0 for _ in rewards]
    return [(reward - mean(rewards)) / (std(rewards) + 1e-6) for reward in rewards]


def log_sigmoid(x: Tensor) -> Tensor:
    """log(1/(1+exp(-x))) without overflow."""
    return -torch.log1p(torch.exp(-x)) if x.item() >= 0 else x - torch.log1p(torch.exp(x))


def pairs(batch: Batch) -> list[tuple[Trajectory, Trajectory]]:
    """(chosen, rejected) of every pair in the batch."""
    out = []
    for group in batch:
        if len(group) == 2 and {one.facts.get("chosen") for one in group} == {True, False}:
            out.append((group[0], group[1]) if group[0].facts["chosen"] else (group[1], group[0]))
    return out


def summed(trajectory: Trajectory, number: Callable[[Token], Tensor | float]) -> Tensor:
    out = constant(0.0)
    for token in sampled(trajectory):
        out = out + number(token)
    return out


def log_policy(trajectory: Trajectory) -> Tensor:
    return summed(trajectory, lambda token: token.logp)


def implicit(trajectory: Trajectory) -> Tensor:
    """Card: "s(y) = log π_θ(y|x) − log π_ref(y|x) (token sum over the completion)"."""
    return summed(trajectory, lambda token: token.logp - token.reference)


def averaged(number: Tensor, trajectory: Trajectory) -> Tensor:
    return number / len(sampled(trajectory)) if sampled(trajectory) else constant(0.0)


def surrogate(token: Token, advantage: float, low: float, high: float, dual: float | None = None) -> Tensor:
    """PPO-clip against `behaviour`; with `dual`, for a negative advantage at most -dual A."""
    value = clipped(torch.exp(log_ratio(token)), advantage, low, high)
    return smaller(value, constant(-dual * advantage)) if dual is not None and advantage < 0 else value


def unified(logp: Tensor, denominator: float, advantage: float, stable: bool = True) -> Tensor:
    """Card 2: "ℓ = − sg[1_stable · Â] · exp(log π_θ − sg[log π_ref])"; `denominator` is log π_ref."""
    return -(advantage if stable else 0.0) * torch.exp(logp - denominator)


# ---------------------------------------------------------------------------------------------------------------------
# Preferences


def over_pairs(batch: Batch, each: Callable[[Trajectory, Trajectory], Tensor]) -> Result:
    """House: the mean over pairs, 0 without any; extra: implicit log-ratio margins d = s(w) - s(l) and accuracies."""
    found = pairs(batch)
    loss = constant(0.0)
    margins = []
    for winner, loser in found:
        loss = loss + each(winner, loser) / len(found)
        # Card: "d = s(y_w) − s(y_l)"
        margins.append((implicit(winner) - implicit(loser)).item())
    return Result(everywhere(batch, {}), loss, {"margin": margins, "accuracy": [float(d > 0) for d in margins]})


def dpo(batch: Batch, beta: float = 0.1, kind: str = "sigmoid", smoothing: float = 0.0) -> Result:
    """Direct preference optimisation and its siblings: kind = sigmoid, hinge, ipo, bco or sppo.

    `smoothing` is the ε of conservative DPO (House: allowed with every kind, both orders of the pair).
    """

    def one(winner: Trajectory, loser: Trajectory) -> Tensor:
        s_w, s_l = implicit(winner), implicit(loser)
        d = s_w - s_l
        if kind == "sigmoid":
            # Card: "L = −log σ(β d)"
            return -log_sigmoid(beta * d)
        if kind == "hinge":
            # Card: "hinge max(0,1−βd)"
            return larger(constant(0.0), 1 - beta * d)
        if kind == "ipo":
            # Card: "IPO (d̄ − 1/(2β))² with per-token means"
            return (averaged(s_w, winner) - averaged(s_l, loser) - 1 / (2 * beta)) ** 2
        if kind == "bco":
            # Card: "BCO pair −logσ(βs_w) − logσ(−βs_l)"
            return -log_sigmoid(beta * s_w) - log_sigmoid(-beta * s_l)
        if kind == "sppo":
            # Card: "SPPO-hard (s_w − ½/β)² + (s_l + ½/β)²"
            return (s_w - 0.5 / beta) ** 2 + (s_l + 0.5 / beta) ** 2
        raise ValueError(kind)

    def each(winner: Trajectory, loser: Trajectory) -> Tensor:
        if smoothing == 0.0:
            return one(winner, loser)
        # Card: "conservative DPO (1−ε)L(w,l)+εL(l,w)"
        return (1 - smoothing) * one(winner, loser) + smoothing * one(loser, winner)

    result = over_pairs(batch, each)
    # Card: "Gradient weight σ(−βd)"
    weights = [math.exp(log_sigmoid(constant(-beta * d)).item()) for d in result.extra["margin"]]
    return Result(result.advantage, result.loss, {**result.extra, "weight": weights})


def rdpo(batch: Batch, flip: float = 0.1, beta: float = 0.1, bound: float | None = None) -> Result:
    """Robust to labels flipped at rate `flip` < 1/2; `bound` clamps d (Card: "so clamp d"), off unless given."""

    def each(winner: Trajectory, loser: Trajectory) -> Tensor:
        d = implicit(winner) - implicit(loser)
        if bound is not None and abs(d.item()) > bound:
            d = constant(math.copysign(bound, d.item()))
        # Card: "L = [ (1−ε)·(−logσ(βd)) − ε·(−logσ(−βd)) ] / (1−2ε)"
        return ((1 - flip) * -log_sigmoid(beta * d) - flip * -log_sigmoid(-beta * d)) / (1 - 2 * flip)

    return over_pairs(batch, each)


def simpo(batch: Batch, beta: float = 2.0, gamma: float = 1.0) -> Result:
    """Length-normalised, without reference. Card: "β 2.0–2.5", "γ/β ≈0.5"."""

    def each(winner: Trajectory, loser: Trajectory) -> Tensor:
        # Card: "L = −logσ( (β/|y_w|) logπ_θ(y_w) − (β/|y_l|) logπ_θ(y_l) − γ )"
        first = beta * averaged(log_policy(winner), winner)
        second = beta * averaged(log_policy(loser), loser)
        return -log_sigmoid(first - second - gamma)

    return over_pairs(batch, each)


def inpo(batch: Batch, eta: float = 0.0075, tau: float = 0.0025) -> Result:
    """Iterative Nash policy optimisation. Card: "π_t = policy at the start of round t (sampler)": `behaviour`."""

    def each(winner: Trajectory, loser: Trajectory) -> Tensor:
        policy = log_policy(winner) - log_policy(loser)
        reference = summed(winner, lambda one: one.reference) - summed(loser, lambda one: one.reference)
        sampler = summed(winner, lambda one: one.behaviour) - summed(loser, lambda one: one.behaviour)
        # Card: "h = [logπ(y)−logπ(y')] − (τ/η)[logπ_ref(y)−logπ_ref(y')] − ((η−τ)/η)[logπ_t(y)−logπ_t(y')]"
        h = policy - (tau / eta) * reference - ((eta - tau) / eta) * sampler
        # Card: "( h(y_w,y_l) − 1/(2η) )²"
        return (h - 1 / (2 * eta)) ** 2

    return over_pairs(batch, each)


def spo_minimax(batch: Batch, clip: float = 0.2) -> Result:
    """Reward = average win rate against the other samples of the group, then one GRPO step without KL.

    House: Q = the other trajectories of the group; without `prefer` the larger reward wins, a tie is 1/2; the RL step
    is z-score, PPO-clip, seq-mean-token-mean over rows with tokens. A lone trajectory: reward 0, advantage 0.
    """
    rewards = {}
    advantages = {}
    for group in batch:
        rates = []
        for i, trajectory in enumerate(group):
            wins = []
            for j, other in enumerate(group):
                if j == i:
                    continue
                if "prefer" in trajectory.facts:
                    wins.append(trajectory.facts["prefer"][j])
                else:
                    mine, theirs = total(trajectory), total(other)
                    wins.append(0.5 if mine == theirs else float(mine > theirs))
            # Card: "r(τ_i) = (1/|Q|) Σ_{τ_j∈Q} P(τ_i ≻ τ_j)"
            rates.append(mean(wins) if wins else 0.0)
        for trajectory, rate, advantage in zip(group, rates, standard(rates)):
            rewards[id(trajectory)] = rate
            advantages[id(trajectory)] = advantage
    rows = list(trajectories(batch))
    loss = constant(0.0)
    for trajectory in rows:
        for token in sampled(trajectory):
            value = surrogate(token, advantages[id(trajectory)], clip, clip)
            loss = loss + value / len(sampled(trajectory)) / worded(rows)
    return Result(everywhere(batch, advantages), loss, {"reward": [rewards[id(one)] for one in rows]})


def srpo(batch: Batch, beta: float = 0.1, alpha: float = 0.5) -> Result:
    """A generator and a reviser in one network. House: β = 0.1 and α = 0.5 (the card gives none)."""

    def revised(trajectory: Trajectory, given: str) -> Tensor:
        # Card: "r†(a|b) = logπ†(a|b,x) − logπ_ref(a|b,x)"
        name = f"revise_{given}"
        return summed(trajectory, lambda token: token.facts[name] - token.facts[f"{name}_reference"])

    def each(winner: Trajectory, loser: Trajectory) -> Tensor:
        w_l, l_l = revised(winner, "rejected"), revised(loser, "rejected")
        w_w, l_w = revised(winner, "chosen"), revised(loser, "chosen")
        # Card: "L† = E[ (½ − β[r†(w|l) − r†(l|l)])² + (½ − β[r†(w|w) − r†(l|w)])² ]"
        reviser = (0.5 - beta * (w_l - l_l)) ** 2 + (0.5 - beta * (w_w - l_w)) ** 2
        # Card: "L = E[ (½ − (β/2)[ r†(w|l) − r†(l|w) + r(w) − r(l) ])² ]"
        generator = (0.5 - beta / 2 * (w_l - l_w + implicit(winner) - implicit(loser))) ** 2
        # Card: "L_α = (1−α)·L + α·L†"
        return (1 - alpha) * generator + alpha * reviser

    return over_pairs(batch, each)


def mapl(batch: Batch, beta: float = 0.1, intra: float = 1.0, inter: float = 1.0) -> Result:
    """DPO, plus one response under two prompts, plus pairs compared with each other. House: λ1 = λ2 = 1.

    House: a response's own prompt is x+; intra is a mean over the trajectories that have tokens, all with `changed`;
    inter is a mean over all couples of pairs of one family with different gaps.
    """
    base = dpo(batch, beta)
    within = constant(0.0)
    have = [one for one in trajectories(batch) if sampled(one) and all("changed" in t.facts for t in sampled(one))]
    for trajectory in have:
        other = summed(trajectory, lambda token: token.facts["changed"] - token.facts["changed_reference"])
        # Card: "L_intra = -log σ( β[ log π(y|x+)/π_ref(y|x+) - log π(y|x-)/π_ref(y|x-) ] )"
        within = within - log_sigmoid(beta * (implicit(trajectory) - other)) / len(have)
    couples = []
    for large in pairs(batch):
        for small in pairs(batch):
            mine, theirs = large[0].facts, small[0].facts
            if "family" in mine and mine["family"] == theirs.get("family") and mine["gap"] > theirs["gap"]:
                couples.append((large, small))
    between = constant(0.0)
    for large, small in couples:
        # Card: "L_inter = -log σ( m(pair_large) - m(pair_small) ) with m = β[log-ratio(y_w) - log-ratio(y_l)]"
        wide = beta * (implicit(large[0]) - implicit(large[1]))
        narrow = beta * (implicit(small[0]) - implicit(small[1]))
        between = between - log_sigmoid(wide - narrow) / len(couples)
    # Card: "Total L_DPO + λ1 L_intra + λ2 L_inter"
    parts = {"dpo": base.loss.item(), "intra": within.item(), "inter": between.item()}
    return Result(base.advantage, base.loss + intra * within + inter * between, parts)


def dpa_prompt(angle: float) -> str:
    """Card: "helpfulness*{100cosφ} + verbosity*{100sinφ}" as integers. House: rounded."""
    return f"helpfulness*{round(100 * math.cos(angle))} + verbosity*{round(100 * math.sin(angle))}"


def dpa(batch: Batch) -> Result:
    """Of the policy's own responses to a prompt keep the best along the prompt's direction, then SFT on it.

    House: candidates are the rows of origin "policy"; a tie goes to the first; NLL is a token-mean over kept rows.
    """
    kept = []
    for group in batch:
        best, score = None, -math.inf
        for trajectory in of(group, "policy"):
            # Card: "keep argmax vᵀr(x,y)"
            facts = trajectory.facts
            along = math.fsum(v * r for v, r in zip(facts["direction"], facts["ratings"]))
            if along > score:
                best, score = trajectory, along
        if best is not None:
            kept.append(best)
    count = sum(len(sampled(one)) for one in kept)
    loss = constant(0.0)
    for trajectory in kept:
        for token in sampled(trajectory):
            # Card: "SFT on (prompt with v, best)"
            loss = loss - token.logp / count
    ids = {id(one) for one in kept}
    return Result(everywhere(batch, {}), loss, {"kept": [id(one) in ids for one in trajectories(batch)]})


# ---------------------------------------------------------------------------------------------------------------------
# Expert data


def chord_mu(step: int, warmup: int = 0, decay: int = 200, peak: float = 0.9, valley: float = 0.05) -> float:
    """The weight of imitation at an optimiser step."""
    if step < warmup:
        # Card: "s < W : μ = P·s/W"
        return peak * step / warmup
    if step < warmup + decay:
        # Card: "μ = V + (P − V)·½(1 + cos(π(s − W)/D))"
        return valley + (peak - valley) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / decay))
    # Card: "s ≥ W+D : μ = V"
    return valley


def chord(
    batch: Batch,
    step: int = 0,
    warmup: int = 0,
    decay: int = 200,
    peak: float = 0.9,
    valley: float = 0.05,
    weight: str = "none",
    clip: float = 0.2,
    dual: float = 3.0,
    cutoff: float = 1.0,
) -> Result:
    """GRPO without KL on the policy's rows, SFT on the expert's; weight = none (CHORD-μ), phi (CHORD-φ) or is.

    House: z-scores over the policy rows of a group only; replayed rows are out. Released code: token mean over the policy
    rows and a dual clip of 3.
    """
    mu = chord_mu(step, warmup, decay, peak, valley)
    advantages = {}
    for group in batch:
        own = of(group, "policy")
        for trajectory, advantage in zip(own, standard([total(one) for one in own])):
            advantages[id(trajectory)] = advantage
    rows = of(list(trajectories(batch)), "policy")
    reinforced = constant(0.0)
    for trajectory in rows:
        for token in sampled(trajectory):
            value = surrogate(token, advantages[id(trajectory)], clip, clip, dual)
            reinforced = reinforced + value / sum(len(sampled(one)) for one in rows)
    experts = of(list(trajectories(batch)), "expert")
    count = sum(len(sampled(one)) for one in experts)
    imitated = constant(0.0)
    for trajectory in experts:
        for token in sampled(trajectory):
            p = math.exp(token.logp.item())
            # Card: "φ_t = p_t(1 − p_t)", detached; "IS weight sg[p_t]"
            factor = {"none": 1.0, "phi": p * (1 - p), "is": p}[weight]
            # Card: "clamp log π from above at log(cutoff_prob) (default 1.0 = off)"
            logp = token.logp if cutoff >= 1.0 else smaller(token.logp, constant(math.log(cutoff)))
            # Card: "L_SFT = agg_t[ − sg[φ_t]·log π_θ(y*_t) ]", "token-mean for the SFT term"
            imitated = imitated - factor * logp / count
    # Card: "L = (1 − μ_s)·L_GRPO(on-policy rows) + μ_s·L_SFT(expert rows)"
    loss = (1 - mu) * reinforced + mu * imitated
    return Result(everywhere(batch, advantages), loss, {"mu": mu, "rl": reinforced.item(), "sft": imitated.item()})


def hpt(batch: Batch, gate: float = 0.0, coef: float = 1.0, length: float = 64, clip: float | None = None) -> Result:
    """Per prompt either RL on the policy's rows or SFT on its first expert row, as released (no std; `clip` off).

    House: v = `success`; P = 0 without policy rows; below the gate without a demonstration the prompt adds nothing.
    RL is summed over tokens / (RL rows of the batch · length), SFT the mean over demonstrations of token means.
    """
    advantages = {}
    taught = []
    reinforced_rows = []
    for group in batch:
        own, shown = of(group, "policy"), of(group, "expert")
        # Card: "P = (1/n) Σ v(τ_i)"
        solved = mean([float(one.success) for one in own]) if own else 0.0
        # Card: "(α, β) = (1, 0) if P > γ else (0, 1)"
        if solved > gate:
            rewards = [total(one) for one in own]
            for trajectory, reward in zip(own, rewards):
                # Card: "Advantage = R − group mean (no std)"
                advantages[id(trajectory)] = reward - mean(rewards)
            reinforced_rows.extend(own)
        elif shown:
            taught.append(shown[0])
    reinforced = constant(0.0)
    for trajectory in reinforced_rows:
        for token in sampled(trajectory):
            advantage = advantages[id(trajectory)]
            # Card: "no PPO clip, token sum divided by a constant length, no KL"
            if clip is None:
                value = -advantage * torch.exp(log_ratio(token))
            else:
                value = surrogate(token, advantage, clip, clip)
            reinforced = reinforced + value / (worded(reinforced_rows) * length)
    imitated = constant(0.0)
    for trajectory in taught:
        for token in sampled(trajectory):
            # Card: "L_SFT = − (1/|τ*|) Σ_t log π_θ(τ*_t)"
            imitated = imitated - token.logp / len(sampled(trajectory)) / worded(taught)
    # Card: "L = α·L_RL + β·c·L_SFT"
    used = {id(one) for one in reinforced_rows + taught}
    extra = {
        "rl": reinforced.item(),
        "sft": imitated.item(),
        "used": [id(one) in used for one in trajectories(batch)],
    }
    return Result(everywhere(batch, advantages), reinforced + coef * imitated, extra)


def shaped(logp: Tensor, shape: float, kind: str = "ratio", power: float = 0.5) -> Tensor:
    """The value f(p) of an expert token; the gradient flows through f."""
    p = torch.exp(logp)
    if kind == "ratio":
        # Card: "f(u) = u/(u+γ_s)"
        return p / (p + shape)
    # Card: "no shaping (f(u)=u), √u, u^k, log u"
    if kind == "none":
        return p
    if kind == "power":
        return torch.exp(power * logp)
    if kind == "log":
        return logp
    raise ValueError(kind)


def luffy(
    batch: Batch,
    shape: float = 0.1,
    length: float = 64,
    normalise: bool = False,
    kind: str = "ratio",
    power: float = 0.5,
) -> Result:
    """Expert rows in the group's baseline, with a shaped ratio; everything else with the plain ratio, no clip.

    House: replayed rows have recorded log-probabilities, so they count as the policy's.
    """
    rows = list(trajectories(batch))
    advantages = {}
    for group in batch:
        rewards = [total(one) for one in group]
        # Card: "A_j = R(τ_j) − mean_{on∪off} R (paper also divides by std; released run does not)"
        scores = standard(rewards) if normalise else [reward - mean(rewards) for reward in rewards]
        for trajectory, score in zip(group, scores):
            advantages[id(trajectory)] = score
    loss = constant(0.0)
    for trajectory in rows:
        advantage = advantages[id(trajectory)]
        for token in sampled(trajectory):
            if origin(trajectory) == "expert":
                # Card: "off tokens: ℓ = − f(p_t)·A"
                value = -advantage * shaped(token.logp, shape, kind, power)
            else:
                # Card: "on tokens : ℓ = − ρ_t·A (released run: no clipping)"
                value = -advantage * torch.exp(log_ratio(token))
            # Card: "token sum / constant maximum length"
            loss = loss + value / (worded(rows) * length)
    return Result(everywhere(batch, advantages), loss)


def guide(batch: Batch, clip: float = 0.2) -> Result:
    """Hinted samples where every unhinted one failed: `logp` is without the hint, `behaviour` as sampled (rule 1).

    House: failed = not `success`; where any unhinted sample succeeded the hinted ones are dropped; rows of origin
    "policy" only; z-score over the rows in use, seq-mean-token-mean over them.
    """
    advantages = {}
    used = []
    for group in batch:
        own = of(group, "policy")
        plain = [one for one in own if not one.facts.get("guided", False)]
        # Card: "Trigger = all k unguided rollouts wrong"
        rows = own if not any(one.success for one in plain) else plain
        # Card: "group over the unguided and guided samples of the prompt"
        for trajectory, advantage in zip(rows, standard([total(one) for one in rows])):
            advantages[id(trajectory)] = advantage
        used.extend(rows)
    loss = constant(0.0)
    for trajectory in used:
        for token in sampled(trajectory):
            # Card: "ρ^guide_t = π_θ(o_t | q, o_<t) / π_old(o_t | q, g, o_<t)"
            value = surrogate(token, advantages[id(trajectory)], clip, clip)
            loss = loss + value / len(sampled(trajectory)) / worded(used)
    ids = {id(one) for one in used}
    return Result(everywhere(batch, advantages), loss, {"used": [id(one) in ids for one in trajectories(batch)]})


def adhint(batch: Batch, clip: float = 0.2) -> Result:
    """Card: "normalise hinted and unhinted rollouts separately, then scale by relative difficulty". House: a lone one gets 0;
    a success is `success`; g is 0 where a group has one kind only."""
    advantages = {}
    loss = constant(0.0)
    for group in batch:
        kinds = {helped: [one for one in group if bool(one.facts.get("guided", False)) is helped] for helped in (False, True)}
        # Card: "g = clip(mean_hinted - mean_unhinted, 0, 1)"
        gap = 0.0
        if kinds[True] and kinds[False]:
            with_help, without = (mean([total(one) for one in kinds[helped]]) for helped in (True, False))
            gap = min(1.0, max(0.0, with_help - without))
        for helped, rows in kinds.items():
            for one, score in zip(rows, standard([total(one) for one in rows])):
                # Card: "unhinted successes x (1+g), hinted successes x (1-g)"
                advantages[id(one)] = score * ((1 - gap if helped else 1 + gap) if one.success else 1.0)
    for one in trajectories(batch):
        for token in sampled(one):
            value = surrogate(token, advantages[id(one)], clip, clip)
            loss = loss + value / len(sampled(one)) / worded(trajectories(batch))
    return Result(everywhere(batch, advantages), loss)


# ---------------------------------------------------------------------------------------------------------------------
# Replay


def patched(own: Group, instead: Trajectory | None) -> Group:
    """Card 9: "replace the first rollout by one"."""
    return own if instead is None or not own else [instead, *own[1:]]


def arpo_gui(batch: Batch, low: float = 0.2, high: float = 0.3, dual: float | None = 3.0, capacity: int = 8) -> Result:
    """A failing group's first rollout gives way to a stored success (the replayed rows of the group, oldest first).

    House: R of the failure test and of insertion is the task reward (sum of turn rewards), std with n as in the released
    code; the draw is the replayed row with the lowest lot; dual clip 3; seq-mean-token-mean over the rows in use.
    extra["buffer"]: for every group the positions of its rows that are the next buffer, oldest first.
    """
    advantages = {}
    used = []
    buffers = []
    replayed = set()
    for group in batch:
        own, stored = of(group, "policy"), of(group, "replay")
        rewards = [total(one) for one in own]
        # Card: "group fails ⇔ std(R) < 0.05 and mean(R) < 0.2"
        fails = bool(own) and statistics.pstdev(rewards) < 0.05 and mean(rewards) < 0.2
        drawn = min(stored, key=lambda one: one.lot) if fails and stored else None
        if drawn is not None:
            replayed.add(id(drawn))
        rows = patched(own, drawn)
        # Card: "reward = task_reward + 0.5·format_reward"
        paid = [total(one) + 0.5 * one.facts.get("format", 0.0) for one in rows]
        for trajectory, advantage in zip(rows, standard(paid)):
            advantages[id(trajectory)] = advantage
        used.extend(rows)
        # Card: "insert when task reward >0.1, capacity 8"; "updated *after* injection ... with the fresh rollouts"
        now = stored + [one for one in own if total(one) > 0.1]
        where = {id(one): at for at, one in enumerate(group)}
        buffers.append([where[id(one)] for one in now][-capacity:])
    loss = constant(0.0)
    for trajectory in used:
        advantage = advantages[id(trajectory)]
        for token in sampled(trajectory):
            if id(trajectory) in replayed:
                # Card: "recomputed with the current policy after injection, so the replayed trajectory has ρ=1"
                value = unified(token.logp, token.logp.item(), advantage)
            else:
                value = surrogate(token, advantage, low, high, dual)
            loss = loss + value / len(sampled(trajectory)) / worded(used)
    ids = {id(one) for one in used}
    extra = {"used": [id(one) in ids for one in trajectories(batch)], "buffer": buffers}
    return Result(everywhere(batch, advantages), loss, extra)


def spear_bonus(step: int, horizon: int = 100) -> float:
    """Card: "κ_s = ½(1+cos(π s/S_tool)) for s≤S_tool else 0"."""
    return 0.5 * (1 + math.cos(math.pi * step / horizon)) if step <= horizon else 0.0


def spear_weight(step: int, horizon: int = 200) -> float:
    """Card: "η_s = ½(1 − cos(π s/S_sil)) up to S_sil, then 1"."""
    return 0.5 * (1 - math.cos(math.pi * step / horizon)) if step <= horizon else 1.0


def covariant(
    rows: list[Trajectory],
    advantages: dict[int, float],
    low: float,
    high: float,
    ratio: float,
    least: float,
    most: float,
) -> set[int]:
    """The tokens, by `id`, that Clip-Cov silences."""
    all_tokens = [(token, advantages[id(one)]) for one in rows for token in sampled(one)]
    if not all_tokens:
        return set()
    credit = mean([advantage for _, advantage in all_tokens])
    level = mean([token.logp.item() for token, _ in all_tokens])
    eligible = []
    for token, advantage in all_tokens:
        # Card: "cov_t = (A_t−Ā)(logπ_t − mean logπ)"
        cov = (advantage - credit) * (token.logp.item() - level)
        rho = math.exp(log_ratio(token).item())
        is_clipped = (advantage > 0 and rho > 1 + high) or (advantage < 0 and rho < 1 - low)
        # Card: "among unclipped tokens with cov in (lb, ub) pick a random `ratio` share and zero their loss"
        if not is_clipped and least < cov < most:
            eligible.append(token)
    eligible.sort(key=lambda token: token.lot)
    # Released code: the share is of all tokens, not of those in the window
    return {id(token) for token in eligible[: int(ratio * len(all_tokens))]}


def spear_replay(
    batch: Batch,
    step: int = 0,
    history: list[float] | None = None,
    tool_horizon: int = 100,
    replay_horizon: int = 200,
    low: float = 0.2,
    high: float = 0.28,
    length: float = 64,
    oldest: int = 10,
    window: int = 10240,
    bonus: bool = True,
    imitate: bool = True,
    covariance: float = 0.0,
    least: float = 1.0,
    most: float = 40.0,
) -> Result:
    """R - group mean on fresh rows; replayed rows against the median of past group means, if better.

    House: the group means of this batch (fresh rows, with the bonus) join the history first; replayed rewards are as
    stored, without a new bonus; b = 0 without any mean. `bonus` / `imitate` False: κ ≡ 0 / η ≡ 0.
    House: Clip-Cov (`covariance` = its ratio, 0.02 in the card) is off unless given; in each component it silences
    int(ratio · all tokens) of the eligible tokens, in ascending order of the lot; they stay in the denominator.
    """
    kappa = spear_bonus(step, tool_horizon) if bonus else 0.0
    eta = spear_weight(step, replay_horizon) if imitate else 0.0
    advantages = {}
    means = list(history or [])
    fresh = []
    for group in batch:
        own = of(group, "policy")
        rewards = []
        for trajectory in own:
            calls = sum(turn.tool_calls for turn in trajectory.turns)
            # Card: "R += κ_s·min(0.1·#tool_calls, 1)"
            rewards.append(total(trajectory) + kappa * min(0.1 * calls, 1.0))
        if own:
            means.append(mean(rewards))
        for trajectory, reward in zip(own, rewards):
            advantages[id(trajectory)] = reward - mean(rewards)
        fresh.extend(own)
    # Card: "Keep group means of rewards from the last 10 240 groups; b = 50th percentile"
    means = means[-window:]
    baseline = statistics.median(means) if means else 0.0
    again = []
    for trajectory in of(list(trajectories(batch)), "replay"):
        # Card: "drop those older than 10 steps"
        if trajectory.facts.get("age", 0) > oldest:
            continue
        # Card: "replayed A = R − b ...; keep only A>0"
        if total(trajectory) - baseline > 0:
            advantages[id(trajectory)] = total(trajectory) - baseline
            again.append(trajectory)
    parts = []
    for rows in (fresh, again):
        silent = covariant(rows, advantages, low, high, covariance, least, most)
        part = constant(0.0)
        for trajectory in rows:
            for token in sampled(trajectory):
                if id(token) in silent:
                    continue
                # Card: "no KL, clip 0.2/0.28, no std, constant-length aggregation"; "stored logp_old": behaviour
                part = part + surrogate(token, advantages[id(trajectory)], low, high) / (worded(rows) * length)
        parts.append(part)
    # Card: "Store trajectories with A>0 that contain at least one tool call"
    store = [
        origin(one) == "policy" and advantages[id(one)] > 0 and any(turn.tool_calls for turn in one.turns)
        for one in trajectories(batch)
    ]
    extra = {
        "fresh": parts[0],
        "replay": parts[1],
        "eta": eta,
        "kappa": kappa,
        "baseline": baseline,
        "history": means,
        "store": store,
    }
    # Card: "L = L_on + η_s·L_replay"
    return Result(everywhere(batch, advantages), parts[0] + eta * parts[1], extra)


def r1v2(
    batch: Batch,
    beta: float = 0.1,
    preference: float = 0.8,
    quality: float = 0.2,
    generation: float = 1.0,
    delta: float = 0.0,
    clip: float = 0.2,
) -> Result:
    """GRPO (fresh rows, and replayed ones with their stored advantage) plus MPO on the pairs.

    House: pairs take no part in GRPO; L = L_GRPO + L_MPO, no KL; a stored advantage of 0 adds nothing and does not
    count. extra["stored"]: fresh rows with A != 0; extra["draw"]: |A| / sum |A| over them, 0 elsewhere.
    """
    advantages = {}
    used = []
    paired = {id(one) for couple in pairs(batch) for one in couple}
    for group in batch:
        own = [one for one in of(group, "policy") if id(one) not in paired]
        for trajectory, advantage in zip(own, standard([total(one) for one in own])):
            advantages[id(trajectory)] = advantage
        used.extend(own)
        for trajectory in of(group, "replay"):
            # Card: "store (prompt, responses, A) with A≠0"
            if id(trajectory) not in paired and trajectory.facts.get("advantage", 0.0) != 0.0:
                advantages[id(trajectory)] = trajectory.facts["advantage"]
                used.append(trajectory)
    reinforced = constant(0.0)
    for trajectory in used:
        for token in sampled(trajectory):
            value = surrogate(token, advantages[id(trajectory)], clip, clip)
            reinforced = reinforced + value / len(sampled(trajectory)) / worded(used)

    def mpo(winner: Trajectory, loser: Trajectory) -> Tensor:
        s_w, s_l = implicit(winner), implicit(loser)
        # Card: "L_BCO = −log σ(β log-ratio_chosen − δ) − log σ(−(β log-ratio_rejected − δ))"
        quality_loss = -log_sigmoid(beta * s_w - delta) - log_sigmoid(-(beta * s_l - delta))
        # Card: "L_SFT = length-normalised NLL of chosen"
        nll = averaged(-log_policy(winner), winner)
        # Card: "L_MPO = w_p·L_DPO + w_q·L_BCO + w_g·L_SFT", weights "0.8 / 0.2 / 1.0"
        return preference * -log_sigmoid(beta * (s_w - s_l)) + quality * quality_loss + generation * nll

    preferred = over_pairs(batch, mpo).loss
    fresh = {id(one) for one in used if origin(one) == "policy"}
    sizes = [abs(advantages[id(one)]) if id(one) in fresh else 0.0 for one in trajectories(batch)]
    mass = math.fsum(sizes)
    extra = {
        "grpo": reinforced.item(),
        "mpo": preferred.item(),
        "stored": [one > 0 for one in sizes],
        "draw": [one / mass if mass else 0.0 for one in sizes],
    }
    return Result(everywhere(batch, advantages), reinforced + preferred, extra)


def bepa(batch: Batch, mode: str = "luffy", shape: float = 0.1, low: float = 0.2, high: float = 0.2) -> Result:
    """A group whose rewards are all 0 gets its cached trace in place of its first rollout; no KL.

    House: the cache is the group's last replayed row (an own success), else its last expert row (level 1); mode
    "luffy" gives its tokens -f(p) A, "recompute" ρ = 1; z-score, seq-mean-token-mean over the rows in use.
    extra["cache"]: for every group the position of its next cache entry, the first success if any, or None.
    """
    advantages = {}
    used = []
    caches = []
    borrowed = set()
    for group in batch:
        own = of(group, "policy")
        known = of(group, "expert") + of(group, "replay")
        cache = known[-1] if known else None
        good = [one for one in own if total(one) > 0]
        # Card: "if **all** rewards are 0, replace one rollout by C[task]"
        fails = bool(own) and all(total(one) == 0 for one in own)
        if fails and cache is not None:
            borrowed.add(id(cache))
        rows = patched(own, cache if fails else None)
        for trajectory, advantage in zip(rows, standard([total(one) for one in rows])):
            advantages[id(trajectory)] = advantage
        used.extend(rows)
        # Card: "if any rollout succeeds, overwrite C[task] with it"
        following = good[0] if good else cache
        caches.append(next((at for at, one in enumerate(group) if one is following), None))
    loss = constant(0.0)
    for trajectory in used:
        advantage = advantages[id(trajectory)]
        for token in sampled(trajectory):
            if id(trajectory) not in borrowed:
                value = surrogate(token, advantage, low, high)
            elif mode == "luffy":
                # Card: "{recompute→ρ=1, LUFFY f}"
                value = -advantage * shaped(token.logp, shape)
            else:
                value = unified(token.logp, token.logp.item(), advantage)
            loss = loss + value / len(sampled(trajectory)) / worded(used)
    ids = {id(one) for one in used}
    extra = {"used": [id(one) in ids for one in trajectories(batch)], "cache": caches}
    return Result(everywhere(batch, advantages), loss, extra)


# ---------------------------------------------------------------------------------------------------------------------
# Distillation


def opd(batch: Batch, lam: float = 1.25, clip: float = 0.2, cap: float | None = None) -> Result:
    """G-OPD; lam > 1 is ExOPD. Every token is credited with its own term, token-mean over the policy's rows.

    House: π_old is `behaviour`. With `cap` (the card's rollout correction has 5) π_old is `proximal` and each token's
    loss is weighted with min(exp(proximal - behaviour), cap).
    """
    count = sum(len(sampled(one)) for one in of(list(trajectories(batch)), "policy"))
    advantages = []
    loss = constant(0.0)
    for trajectory in trajectories(batch):
        for token in sampled(trajectory):
            if origin(trajectory) != "policy":
                advantages.append(0.0)
                continue
            old = token.behaviour if cap is None else token.proximal
            teacher = token.facts["teacher"]
            if lam == 1:
                # Card: "λ=1 → OPD, independent of π_ref (assert equality bit-for-bit in that branch)"
                advantage = teacher - old
            else:
                # Card: "A_t = − [ logπ_old(y_t) − logπ_ref(y_t) − λ( logπ*(y_t) − logπ_ref(y_t) ) ]"
                advantage = -(old - token.reference - lam * (teacher - token.reference))
            advantages.append(advantage)
            move = max(-20.0, min(20.0, token.proximal - token.behaviour))
            weight = 1.0 if cap is None else min(math.exp(move), cap)
            distance = token.logp - old
            inside = abs(distance.item()) <= 20
            ratio = torch.exp(distance if inside else constant(math.copysign(20.0, distance.item())))
            # Card: "clipped policy-gradient with A_t (detached), discount 0"
            loss = loss + weight * clipped(ratio, advantage, clip, clip) / count
    return Result(advantages, loss)


def scope(batch: Batch, tau: float = 1.0) -> Result:
    """Right rollouts are reinforced by student perplexity, wrong ones distilled by inverse teacher perplexity.

    House: right = `success`; rows of origin "policy" with tokens; the student's perplexity is of `logp`, detached; E_x
    is the mean over groups with such rows. The advantage of a token is weight · (1 or -(logπ_θ − logπ_T)).
    """
    groups = [[one for one in of(group, "policy") if sampled(one)] for group in batch]
    count = sum(1 for rows in groups if rows)
    weights = {}
    for rows in groups:
        right = [one for one in rows if one.success]
        wrong = [one for one in rows if not one.success]
        # Card: "PPL(y) = exp(− logπ(y)/|y|)"
        student = [math.exp(-mean([t.logp.item() for t in sampled(one)])) ** (1 / tau) for one in right]
        teacher = [math.exp(-mean([t.facts["teacher"] for t in sampled(one)])) ** (-1 / tau) for one in wrong]
        # Card: "w^stu_i = PPL_S(y_i)^{1/τ} / Σ_{j∈Ω_c} PPL_S(y_j)^{1/τ}"
        for trajectory, number in zip(right, student):
            weights[id(trajectory)] = number / math.fsum(student)
        # Card: "w^tea_i = PPL_T(y_i)^{−1/τ} / Σ_{j∈Ω_w} PPL_T(y_j)^{−1/τ}"
        for trajectory, number in zip(wrong, teacher):
            weights[id(trajectory)] = number / math.fsum(teacher)
    advantages = []
    loss = constant(0.0)
    for trajectory in trajectories(batch):
        weight = weights.get(id(trajectory), 0.0)
        for token in sampled(trajectory):
            # Card: "L_MLE(y) = − Σ_t ρ_t"; "L_OPD(y) = Σ_t ρ_t·sg[ logπ_θ(y_t) − logπ_T(y_t) ]"
            credit = 0.0
            if id(trajectory) in weights:
                credit = 1.0 if trajectory.success else -(token.logp.item() - token.facts["teacher"])
            advantages.append(weight * credit)
            if id(trajectory) in weights:
                # Card: "L = E_x[ Σ_{Ω_c} w^stu L_MLE + Σ_{Ω_w} w^tea L_OPD ]"
                loss = loss - weight * credit * torch.exp(log_ratio(token)) / count
    return Result(advantages, loss, {"weight": [weights.get(id(one), 0.0) for one in trajectories(batch)]})


def otr(batch: Batch, negative: float = -0.1) -> Result:
    """At each position of an expert row, candidates equal to the label earn 1 and the others `negative`.

    House: T = the row's tokens, then the mean over expert rows with tokens; a position without candidates adds 0.
    """
    rows = [one for one in of(list(trajectories(batch)), "expert") if sampled(one)]
    loss = constant(0.0)
    for trajectory in rows:
        for token in sampled(trajectory):
            hits, others = token.facts["hits"], token.facts["others"]
            k = hits + len(others)
            if k == 0:
                continue
            # Card: "(n_gt/K)·logπ(y*_t) + (β_neg/K) Σ_{a_j≠y*_t} logπ(a_j)"
            value = hits / k * token.logp
            for other in others:
                value = value + negative / k * other
            # Card: "L = − (1/T) Σ_t"
            loss = loss - value / len(sampled(trajectory)) / len(rows)
    return Result(everywhere(batch, {}), loss)
