"""Slow oracles of turn, step and episode credit: one loop, one scalar, one formula at a time.

Every method takes a batch of records and returns the advantage of every token in natural order (group, trajectory,
turn, token), or a `Result` where it yields more. Lines marked "Card" quote the specification; lines marked "House"
state the choice made where the card is silent.

House: a task is a group; the turns of a trajectory are its steps, also those without tokens; R = sum of turn rewards.
House: a lone peer gets 0; std with n - 1 and 1e-6 added to the denominator.
"""

from __future__ import annotations

import math
import random

from .objectives import constant, gae, mean, std, token_rewards
from .objectives import whiten as whitened
from .records import Batch, Group, Trajectory, Turn, sampled, total, trajectories
from .result import Result

EPS = 1e-6


def enrich(batch: Batch, seed: int) -> Batch:
    """Fills in place every fact that the methods of this file read.

    turn.facts["state"]        str    key of the environment state the turn starts from (gigpo, hgpo, salt)
    turn.facts["action"]       str    canonical action of the turn (salt)
    turn.facts["agent"]        int    role that acts in the turn (mars)
    turn.facts["feedback"]     bool   the turn elicited feedback, i.e. its observation is not empty (infopo)
    turn.facts["valid"]        bool   the row is not filtered (trloo); missing means True
    turn.facts["planner"]      bool   the turn is a call of the trained planner (flow_grpo); missing means True
    turn.facts["match"]        bool   the action matches the expert's (ui_s1)
    turn.facts["lot"]          float  in [0, 1); "shuffled" means: in ascending order of the lot (srgpo)
    trajectory.facts["final_state"]  str  key of the state after the last turn (salt)
    token.facts["blind"]       float  log-probability of the token with the observation of the turn just before its own
                                      replaced by the placeholder; compared with token.behaviour (infopo)

    Also read, from the records: turn.answer and trajectory.before as mean log-probabilities of the gold answer (igpo,
    a2tgpo_credit), trajectory.domain (mars), token.old_value, behaviour, reference (gae_tokens, bilevel_gae).

    Corner cases: groups in which all states are one, all differ, or come from a small alphabet; trajectories without
    any planner call; one role only; feedback nowhere in a group; observations equal to the placeholder (blind equal to
    behaviour); turn indices with a single valid row; trajectories that match everywhere or nowhere.
    """
    dice = random.Random(f"credit_turns {seed}")
    serial = 0
    for index, group in enumerate(batch):
        kind = dice.choice(["one", "unique", "few", "few", "few"])
        mute = dice.random() < 0.2
        lonely = dice.random() < 0.3
        roles = dice.choice([1, 2, 3])
        for i, trajectory in enumerate(group):
            matching = dice.choice([0.0, 0.5, 0.5, 1.0])
            planning = dice.choice([0.0, 0.6, 1.0, 1.0])
            for turn in trajectory.turns:
                serial += 1
                state = {"one": "s", "unique": f"s{serial}", "few": dice.choice("abc")}[kind]
                turn.facts["state"] = state
                turn.facts["action"] = dice.choice(["go", "go", "look"])
                turn.facts["agent"] = dice.randrange(roles)
                turn.facts["feedback"] = not mute and dice.random() < 0.7
                turn.facts["valid"] = i == 0 if lonely else dice.random() < 0.8
                turn.facts["planner"] = dice.random() < planning
                turn.facts["match"] = dice.random() < matching
                turn.facts["lot"] = dice.random()
                same = dice.random() < 0.2
                for token in turn.tokens:
                    token.facts["blind"] = min(-0.01, token.behaviour - (0.0 if same else dice.gauss(0.3, 0.6)))
                    if same:
                        token.facts["blind"] = token.behaviour
            trajectory.facts["final_state"] = f"end{index}" if kind == "unique" else dice.choice("ab")
    return batch


def broadcast(batch: Batch, per_turn: list[float]) -> list[float]:
    """One number per turn, in natural order of the turns, becomes one per token."""
    out = []
    position = 0
    for trajectory in trajectories(batch):
        for turn in trajectory.turns:
            out.extend(per_turn[position] for _ in turn.tokens)
            position += 1
    return out


def normal(x: float, peers: list[float], scale: bool) -> float:
    """Card (GiGPO): "F(x)=x-mean (mode `mean_norm`) or (x-mean)/(std+eps) (mode `mean_std_norm`)"; `peers` holds x.
    A lone peer gets 0."""
    if len(peers) == 1:
        return 0.0
    if scale:
        return (x - mean(peers)) / (std(peers) + EPS)
    return x - mean(peers)


def zscore(group: Group) -> list[float]:
    """One number per trajectory. Card: "GRPO A=(R-mean)/(std+eps)"; a group of one gets 0."""
    rewards = [total(trajectory) for trajectory in group]
    return [normal(reward, rewards, True) for reward in rewards]


def discounted(rewards: list[float], gamma: float) -> list[float]:
    """Card: "G_{i,t} = sum_{k>=t} gamma^{k-t} r_{i,k} inside each trajectory"."""
    out = []
    for t in range(len(rewards)):
        out.append(math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))))
    return out


def steps(batch: Batch) -> list[tuple[int, int, int, Trajectory, Turn]]:
    """(group index, trajectory index, turn index, trajectory, turn) of every turn in natural order."""
    out = []
    for g, group in enumerate(batch):
        for i, trajectory in enumerate(group):
            for t, turn in enumerate(trajectory.turns):
                out.append((g, i, t, trajectory, turn))
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Critic


def gae_tokens(batch: Batch, gamma: float = 1.0, lam: float = 0.95, beta: float = 0.0, whiten: bool = True) -> Result:
    """GAE over the sampled tokens of a trajectory with the values of collection time; extra["returns"] per token.

    Card: "iterate over unmasked tokens only, so that the "next value" of the last token of a turn is the value at the
    first token of the next policy turn". House: a turn's reward sits on its last token; that of a turn without tokens
    moves as in `token_rewards`. beta is the KL-in-reward weight, pi_old is `behaviour`.
    """
    raw: list[float] = []
    returns: list[float] = []
    for trajectory in trajectories(batch):
        line = sampled(trajectory)
        rewards = token_rewards(trajectory)
        for t, token in enumerate(line):
            # Card: "KL-in-reward variant: r_t <- r_t - beta (log pi_old - log pi_ref)."
            rewards[t] = rewards[t] - beta * (token.behaviour - token.reference)
        values = [token.old_value for token in line]
        # Card: "delta_t = r_t + gamma V_{t+1} - V_t with V_{end+1} = 0; A_t = delta_t + gamma lambda A_{t+1}"
        advantages = gae(rewards, values, gamma, lam)
        raw.extend(advantages)
        # Card: "return target = A_t + V_t (use the un-whitened A)"
        returns.extend(advantage + value for advantage, value in zip(advantages, values))
    # Card: "Then whiten A over all unmasked tokens of the batch: (A-mean)/sqrt(var+1e-8)."
    final = whitened(raw, inside=True) if whiten else raw
    return Result(final, constant(0.0), {"returns": returns})


def bilevel_gae(
    batch: Batch, gamma: float = 1.0, lam: float = 0.95, turn_gamma: float = 0.95, whiten: bool = True
) -> Result:
    """Bi-level GAE; extra["returns"] per token. One lambda serves both levels; turns without tokens are skipped and
    their rewards move as in `token_rewards`."""
    raw: list[float] = []
    returns: list[float] = []
    for trajectory in trajectories(batch):
        paid = token_rewards(trajectory)
        acting = [turn for turn in trajectory.turns if turn.tokens]
        last = -1
        rewards = []
        for turn in acting:
            last += len(turn.tokens)
            rewards.append(paid[last])
        # Card: "first GAE over turn-final tokens with gamma_turn"
        finals = [turn.tokens[-1].old_value for turn in acting]
        outer = gae(rewards, finals, turn_gamma, lam)
        for turn, advantage, value in zip(acting, outer, finals):
            # Card: "write the resulting turn return as the reward of that turn-final token"
            inner = [0.0] * len(turn.tokens)
            inner[-1] = advantage + value
            # Card: "then GAE with token gamma inside each turn, restarting at each turn end."
            values = [token.old_value for token in turn.tokens]
            found = gae(inner, values, gamma, lam)
            raw.extend(found)
            returns.extend(a + v for a, v in zip(found, values))
    final = whitened(raw, inside=True) if whiten else raw
    return Result(final, constant(0.0), {"returns": returns})


# ---------------------------------------------------------------------------------------------------------------------
# Groups of states and edges


def episode(batch: Batch, scale: bool, rows: str) -> list[float]:
    """GiGPO's episode term, one number per turn. Card: "the rows are turns, each carrying the episode return, and the
    mean/std are taken over *all turn rows* of the task ...; a switch restores one-vote-per-trajectory."
    A task with a single row gets 0 (house rule; the card names a singleton rule for the step term only)."""
    if rows not in ("turn", "trajectory"):
        raise ValueError(rows)
    out = []
    for group in batch:
        votes = []
        for trajectory in group:
            count = len(trajectory.turns) if rows == "turn" else 1
            votes.extend([total(trajectory)] * count)
        for trajectory in group:
            for _ in trajectory.turns:
                # Card: "Episode term, group = task: A^E = F(R_i)"
                out.append(normal(total(trajectory), votes, scale))
    return out


def step_returns(batch: Batch, gamma: float) -> list[float]:
    """Discounted reward-to-go of every turn in natural order."""
    out = []
    for trajectory in trajectories(batch):
        out.extend(discounted([turn.reward for turn in trajectory.turns], gamma))
    return out


def gigpo(
    batch: Batch, omega: float = 1.0, gamma: float = 0.95, scale: bool = False, rows: str = "turn"
) -> list[float]:
    """Episode advantage plus the advantage among steps of a task that start from the same state.

    scale: mode `mean_std_norm` instead of `mean_norm`, for both terms. rows: who votes in the episode statistics.
    Singletons: the step term is 0 by the card, the episode term 0 by the house rule.
    """
    outcome = episode(batch, scale, rows)
    returns = step_returns(batch, gamma)
    # Card: "Step group key = (task_id, hash(observation))."
    keys = [(g, turn.facts["state"]) for g, _, _, _, turn in steps(batch)]
    per_turn = []
    for at, key in enumerate(keys):
        peers = [one for one, other in zip(returns, keys) if other == key]
        # Card: "A^S = F(G_{i,t}) inside the step group; singleton step group -> mean = itself -> A^S=0."
        step = normal(returns[at], peers, scale)
        # Card: "A = A^E + omega A^S, one scalar per turn, broadcast to that turn's tokens."
        per_turn.append(outcome[at] + omega * step)
    return broadcast(batch, per_turn)


def aggregate(items: list[tuple[int, float]], alpha: float) -> float:
    """HGPO's average of (k, A^(k)). Card: "Aggregate over the items with non-zero A^(k): w_k ∝ (k+1)^alpha, normalised
    as w/(sum w + eps); A = sum_k w_k A^(k); if none survive A=0." """
    kept = [(k, one) for k, one in items if one != 0.0]
    if not kept:
        return 0.0
    whole = math.fsum((k + 1) ** alpha for k, _ in kept)
    return math.fsum((k + 1) ** alpha / (whole + EPS) * one for k, one in kept)


def hgpo(
    batch: Batch,
    history: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    scale: bool = True,
    base: bool = False,
    rows: str = "turn",
) -> list[float]:
    """Advantages in nested groups keyed by the last k states, averaged with weights that grow with k.

    Population std (the card's exception). Groups with one member are dropped by the card. A deviation of at most 1e-9
    from the mean counts as exactly 0, so that rounding does not decide which levels the card drops. The base item is
    GiGPO's episode term as it stands (std with n - 1), dropped as well where it is 0.
    """
    outcome = episode(batch, scale, rows)
    returns = step_returns(batch, gamma)
    places = steps(batch)

    def key(at: int, k: int):
        """Card: "key_k = (task_id, (s_{t-k+1},...,s_t))"; "a suffix is only formed when enough history exists"."""
        g, _, t, trajectory, _ = places[at]
        if k > t + 1:
            return None
        return g, tuple(trajectory.turns[s].facts["state"] for s in range(t - k + 1, t + 1))

    per_turn = []
    for at, (_, _, t, _, _) in enumerate(places):
        items = []
        if base:
            # Card: "Optional base item k=0: the GiGPO episode advantage."
            items.append((0, outcome[at] if abs(outcome[at]) > 1e-9 else 0.0))
        # Card: "each k=1..min(K+1, t+1) (t from 0)"
        for k in range(1, min(history + 1, t + 1) + 1):
            peers = [returns[other] for other in range(len(places)) if key(other, k) == key(at, k)]
            # Card: "In a group with n>=2 members ... Drop groups with n=1."
            if len(peers) < 2:
                continue
            centre = mean(peers)
            deviation = returns[at] - centre
            if abs(deviation) <= 1e-9:
                deviation = 0.0
            # Card: "A^(k) = (G-mean)/(std_pop+eps) (or G-mean)"
            population = math.sqrt(math.fsum((one - centre) ** 2 for one in peers) / len(peers))
            items.append((k, deviation / (population + EPS) if scale else deviation))
        per_turn.append(aggregate(items, alpha))
    return broadcast(batch, per_turn)


def salt(batch: Batch, window: int = 3, base: str = "grpo") -> list[float]:
    """Steps that several trajectories of a task share get the mean of their advantages, others keep their own.

    base: "grpo" or "rloo". House: a group of one has base advantage 0. The preceding `window` states are compared as
    they are, so near the start the shorter histories must be equal as well. A trajectory that takes an edge twice is
    one member of M(e). The state after the last turn is trajectory.facts["final_state"].
    """
    if base not in ("grpo", "rloo"):
        raise ValueError(base)
    per_turn = []
    for group in batch:
        if base == "grpo":
            own = zscore(group)
        else:
            rewards = [total(trajectory) for trajectory in group]
            n = len(group)
            # Card: "RLOO A=(G/(G-1))(R-mean)"
            own = [0.0 if n == 1 else n / (n - 1) * (reward - mean(rewards)) for reward in rewards]
        edges = []
        for trajectory in group:
            states = [turn.facts["state"] for turn in trajectory.turns] + [trajectory.facts["final_state"]]
            line = []
            for t, turn in enumerate(trajectory.turns):
                # Card: "Edge identity = (task, state s_t, action a_t, next state s_{t+1}) plus equality of the preceding
                # h states"
                past = tuple(states[max(0, t - window) : t])
                line.append((past, states[t], turn.facts["action"], states[t + 1]))
            edges.append(line)
        for i, line in enumerate(edges):
            for edge in line:
                # Card: "For every edge e let M(e) be the set of trajectories that contain it."
                members = [j for j, other in enumerate(edges) if edge in other]
                # Card: "A_{i,t} = (1/|M(e)|) sum_{j in M(e)} A_j if |M(e)|>1 ("merge"), else A_{i,t}=A_i ("diverge")."
                per_turn.append(mean([own[j] for j in members]) if len(members) > 1 else own[i])
    return broadcast(batch, per_turn)


# ---------------------------------------------------------------------------------------------------------------------
# Information


def gains(trajectory: Trajectory, probability: bool = True) -> list[float]:
    """Information gain of every turn but the last. Card (IGPO): "p_t = exp((1/L) sum_j log pi(a_j | h_t, a_<j)). r_t =
    p_t - p_{t-1} for t=1..T-1 (p_0 = prompt only)"; with probability=False the difference of the mean log-probs."""
    scores = [trajectory.before] + [turn.answer for turn in trajectory.turns]
    if probability:
        scores = [math.exp(score) for score in scores]
    return [scores[t] - scores[t - 1] for t in range(1, len(trajectory.turns))]


def igpo(batch: Batch, gamma: float = 1.0, form: str = "paper", answer_weight: float = 1.0) -> list[float]:
    """Information gain of each turn, outcome R on the last; form "paper" or "code".

    paper: one z-score over all turns of all rollouts of the group (std + 1e-6; a lone turn gets 0), then summed to go.
    code: token-wise reward-to-go with gamma, minus the mean over the group at the same position among the sampled
    tokens, where a member without a token there counts as 0 (its padding, in the released code); turns without tokens
    pass their reward on as in `token_rewards`.
    """
    if form not in ("paper", "code"):
        raise ValueError(form)
    out: list[float] = []
    for group in batch:
        rewards = []
        for trajectory in group:
            # Card: "r_T = outcome"; Defaults: "answer-weight 1"
            rewards.append([*gains(trajectory), answer_weight * total(trajectory)])
        if form == "paper":
            # Card: "pool all r_{i,t} of the group (all rollouts, all turns), z-score them once"
            pool = [one for line in rewards for one in line]
            for trajectory, line in zip(group, rewards):
                scored = [normal(one, pool, True) for one in line]
                # Card: "A_{i,t} = sum_{k=t}^{T} gamma^{k-t} A~_{i,k}; every token of turn t gets A_{i,t}."
                for turn, advantage in zip(trajectory.turns, discounted(scored, gamma)):
                    out.extend(advantage for _ in turn.tokens)
        else:
            # Card: "places r_t on the last token of the turn, computes token-wise reward-to-go with gamma=1, and
            # subtracts the *per-token-position* mean over the group without dividing by std."
            lines = []
            for trajectory, line in zip(group, rewards):
                paid = token_rewards(Trajectory([Turn(t.tokens, r) for t, r in zip(trajectory.turns, line)]))
                lines.append(discounted(paid, gamma))
            for line in lines:
                for position, one in enumerate(line):
                    out.append(one - math.fsum(o[position] for o in lines if len(o) > position) / len(lines))
    return out


def information(trajectory: Trajectory) -> list[float | None]:
    """InfoPO's I_t of every turn, None where the card gives no value. Card: "I_t = (1/L) sum_k [ log pi(y_k | h_t, o_t,
    y_<k) - log pi(y_k | h_t, PLACEHOLDER, y_<k) ]" over the tokens of the next action."""
    out: list[float | None] = []
    for t, turn in enumerate(trajectory.turns):
        following = trajectory.turns[t + 1].tokens if t + 1 < len(trajectory.turns) else []
        # Card: "Turns without feedback or without a successor get no value."
        if not turn.facts["feedback"] or not following:
            out.append(None)
        else:
            # Card: "I_t is credited to action t (the one that asked), not t+1."
            out.append(mean([token.behaviour - token.facts["blind"] for token in following]))
    return out


def gate(deviation: float, temperature: float) -> float:
    """Card: "g = sigmoid(-std_g(R^ext)/T_gate)"."""
    small = math.exp(-deviation / temperature)
    return small / (1 + small)


def infopo(
    batch: Batch,
    beta: float = 0.5,
    temperature: float = 0.05,
    per_token: bool = True,
    rate: float = 0.0,
    epoch: int = 0,
) -> Result:
    """Outcome z-score plus a gated, bounded information advantage; per_token=False is the paper's token value I_t.

    House: a group of one has A^ext = 0 and std 0 (gate 1/2); a lone non-zero token value gets 0; without spread in
    A^info over the batch's tokens c = 1. A successor without tokens is no successor. extra: "external" and
    "information" (before scaling) per token, "scale" (the number c), "gates" (one per group).
    """
    external: list[float] = []
    inner: list[float] = []
    gates: list[float] = []
    gate_of_token: list[float] = []
    for group in batch:
        values = []
        rewards = [total(trajectory) for trajectory in group]
        gates.append(gate(std(rewards) if len(rewards) > 1 else 0.0, temperature))
        for trajectory, advantage in zip(group, zscore(group)):
            for turn, found in zip(trajectory.turns, information(trajectory)):
                for _ in turn.tokens:
                    # Card: "token value = I_t / len(action t) on the action's tokens (paper: I_t itself)."
                    value = 0.0 if found is None else found
                    values.append(value / len(turn.tokens) if per_token else value)
                    # Card: "A^ext = group z-score of the trajectory score (sum of turn rewards), broadcast"
                    external.append(advantage)
                    gate_of_token.append(gates[-1])
        # Card: "Standardise over all *non-zero* token values of the group: A^info = (v-mean)/(std+eps) on those tokens;
        # zero stays zero."
        present = [value for value in values if value != 0.0]
        for value in values:
            inner.append(normal(value, present, True) if value != 0.0 else 0.0)
    # Card: "c = min(1, max(std(A^ext over batch tokens),1)/std(A^info over batch tokens)); A^info <- c A^info."
    c = 1.0
    if len(inner) > 1 and std(inner) > 0.0:
        c = min(1.0, max(std(external), 1.0) / std(inner))
    # Card: "optional decay beta exp(-rate*epoch) with rate 0"
    weight = beta * math.exp(-rate * epoch)
    # Card: "A = A^ext + beta g A^info."
    final = [outer + weight * g * c * info for outer, g, info in zip(external, gate_of_token, inner)]
    extra = {"external": external, "information": inner, "scale": c, "gates": gates}
    return Result(final, constant(0.0), extra)


def accumulate(scored: list[float], gamma: float) -> list[float]:
    """Card (A²TGPO): "D_{i,t} = (1/sqrt(n-t)) sum_{j>=t} gamma^{j-t} z_{i,j}" with n IG turns, t from 0."""
    n = len(scored)
    return [one / math.sqrt(n - t) for t, one in enumerate(discounted(scored, gamma))]


def clip_scale(z: float, beta: float) -> float:
    """Card: "c_t = 1 + beta_c (2 sigmoid(z_t) - 1)"."""
    return 1 + beta * (2 / (1 + math.exp(-z)) - 1)


def a2tgpo_credit(
    batch: Batch, alpha: float = 0.3, beta: float = 0.3, gamma: float = 1.0, probability: bool = True
) -> Result:
    """Information gain normalised per depth, summed to go over sqrt(#terms), plus the outcome z-score.

    beta is the card's beta_c. The last turn is the answer turn, even if it has no tokens. House: a lone gain at its
    depth gets z = 0, a group of one A^out = 0. extra: "z" and "clip_scale" per token (0 and 1 on the answer turn).
    """
    per_turn: list[float] = []
    per_turn_z: list[float] = []
    per_turn_c: list[float] = []
    for group in batch:
        found = [gains(trajectory, probability) for trajectory in group]
        # Card: "A^out the ordinary group z-score of the outcome"
        for line, outcome in zip(found, zscore(group)):
            scored = []
            for t, gain in enumerate(line):
                # Card: "group key = (task_id, turn index t). z_{i,t} = (IG_{i,t}-mean)/(std+eps)."
                scored.append(normal(gain, [other[t] for other in found if len(other) > t], True))
            for z, d in zip(scored, accumulate(scored, gamma)):
                # Card: "A_{i,t} = alpha D_{i,t} + A^out_i"
                per_turn.append(alpha * d + outcome)
                per_turn_z.append(z)
                per_turn_c.append(clip_scale(z, beta))
            # Card: "the last (answer) turn gets A^out only"; "answer turn c=1"
            per_turn.append(outcome)
            per_turn_z.append(0.0)
            per_turn_c.append(1.0)
    extra = {"z": broadcast(batch, per_turn_z), "clip_scale": broadcast(batch, per_turn_c)}
    return Result(broadcast(batch, per_turn), constant(0.0), extra)


# ---------------------------------------------------------------------------------------------------------------------
# Roles, turn indices, planners


def mars(batch: Batch, game: str = "group") -> list[float]:
    """Reward-to-go over the turns of one agent, centred per (game, role); the paper's order, not the code pipeline.

    game: "group" takes a group for a game, "domain" takes trajectory.domain, so that a game spans groups.
    """
    if game not in ("group", "domain"):
        raise ValueError(game)
    keys = []
    returns = []
    for g, _, t, trajectory, turn in steps(batch):
        role = turn.facts["agent"]
        # Card: "G_{i,k} = sum_{k'>=k} r_{i,k'} (gamma=1) for the turns of one agent."
        later = [other.reward for other in trajectory.turns[t:] if other.facts["agent"] == role]
        returns.append(math.fsum(later))
        # Card: "Group key = (game, role p)."
        keys.append((g if game == "group" else trajectory.domain, role))
    per_turn = []
    for at, key in enumerate(keys):
        peers = [one for one, other in zip(returns, keys) if other == key]
        # Card: "A_{i,k} = G_{i,k} - mean_{(game,p)} G ; std is deliberately not used."
        per_turn.append(returns[at] - mean(peers))
    return broadcast(batch, per_turn)


def trloo(batch: Batch, gamma: float = 1.0) -> list[float]:
    """Leave-one-out baseline per turn index. Card's own singleton rule: "N=1 -> A=G".

    Returns sum the rewards of all turns, also of filtered ones; only the peers are restricted. A filtered turn gets 0.
    """
    returns = step_returns(batch, gamma)
    places = steps(batch)
    per_turn = []
    for at, (g, i, t, _, turn) in enumerate(places):
        # Card: "Missing turn -> 0."
        if not turn.facts.get("valid", True):
            per_turn.append(0.0)
            continue
        others = []
        for where, (h, j, s, _, peer) in enumerate(places):
            # Card: "Group key = (task_id, turn index), restricted to rows that exist and are not filtered"
            if h == g and s == t and j != i and peer.facts.get("valid", True):
                others.append(returns[where])
        # Card: "A_{i,t} = G_{i,t} - (1/(N-1)) sum_{j!=i} G_{j,t}"; "N=1 -> A=G."
        per_turn.append(returns[at] - mean(others) if others else returns[at])
    return broadcast(batch, per_turn)


def flow_grpo(batch: Batch, rows: str = "turn") -> list[float]:
    """The trajectory's verdict R, z-scored within the task, copied to each planner turn; other turns get 0.

    rows: "trajectory" (paper) or "turn" (code: every planner turn votes). House: a lone row gets 0. In the paper form
    a rollout without planner turns still votes.
    """
    if rows not in ("turn", "trajectory"):
        raise ValueError(rows)
    per_turn = []
    for group in batch:
        votes = []
        for trajectory in group:
            planned = sum(1 for turn in trajectory.turns if turn.facts.get("planner", True))
            # Card: "group = task over *rollouts* in the paper; [code] every turn row of the task is a member"
            votes.extend([total(trajectory)] * (planned if rows == "turn" else 1))
        for trajectory in group:
            for turn in trajectory.turns:
                # Card: "only planner calls are rows"; "A_i = (R_i-mean)/(std+eps)"
                planner = turn.facts.get("planner", True)
                per_turn.append(normal(total(trajectory), votes, True) if planner else 0.0)
    return broadcast(batch, per_turn)


def srgpo(
    batch: Batch,
    size: int = 16,
    omega: float = 0.5,
    scale: bool = True,
    rows: str = "turn",
    within: str = "batch",
) -> list[float]:
    """GiGPO's episode term plus the z-score of raw step rewards in random groups of `size` turns.

    Shuffled means: in ascending order of turn.facts["lot"]. within: "batch", "task" or "trajectory". scale: mode
    `mean_std_norm`, which divides both terms. Singleton step group -> 0 by the card.
    """
    if within not in ("batch", "task", "trajectory"):
        raise ValueError(within)
    outcome = episode(batch, scale, rows)
    places = steps(batch)
    pools: dict[tuple[int, ...], list[int]] = {}
    for at, (g, i, _, _, _) in enumerate(places):
        # Card: "options: shuffle within task, or within trajectory"
        pools.setdefault({"batch": (), "task": (g,), "trajectory": (g, i)}[within], []).append(at)
    step = [0.0] * len(places)
    for pool in pools.values():
        order = sorted(pool, key=lambda at: places[at][4].facts["lot"])
        # Card: "cut into groups of size N_S (last may be smaller; -1 or > B means one group"
        width = len(order) if size == -1 or size > len(order) else size
        for start in range(0, len(order), width):
            members = order[start : start + width]
            # Card: "raw process rewards (no discounting)"; "A^S=(r-mean)/(std+eps), singleton 0."
            peers = [places[at][4].reward for at in members]
            for at in members:
                step[at] = normal(places[at][4].reward, peers, scale)
    # Card: "A = A^E + omega A^S."
    return broadcast(batch, [one + omega * other for one, other in zip(outcome, step)])


def matched_returns(rewards: list[float], matches: list[bool], gamma: float) -> list[float]:
    """UI-S1. Card: "Return, right to left: if e_t: G_t = r_t + gamma G_{t+1} (G after the end = 0); else G_t = r_t and
    the accumulator resets to 0 for earlier steps." """
    out = [0.0] * len(rewards)
    following = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        if matches[t]:
            out[t] = rewards[t] + gamma * following
            following = out[t]
        else:
            out[t] = rewards[t]
            following = 0.0
    return out


def ui_s1(
    batch: Batch, episode_weight: float = 1.0, step_weight: float = 1.0, gamma: float = 0.5, scale: bool = True
) -> list[float]:
    """Episode and step-index advantages with returns that a mismatch cuts.

    The released trainer scores each step by itself: the "episode" term compares the step's own reward with those of all
    steps of the task. Singletons: a step group of one gets 0, a task of a single step its raw reward.
    """
    places = steps(batch)
    returns = []
    for trajectory in trajectories(batch):
        rewards = [turn.reward for turn in trajectory.turns]
        returns.extend(matched_returns(rewards, [turn.facts["match"] for turn in trajectory.turns], gamma))
    per_turn = []
    for at, (g, _, t, _, turn) in enumerate(places):
        # Card: "Step group = (task, step index): A^S = F(G)."
        peers = [returns[where] for where, (h, _, s, _, _) in enumerate(places) if (h, s) == (g, t)]
        step = normal(returns[at], peers, scale)
        votes = [other.reward for h, _, _, _, other in places if h == g]
        outcome = turn.reward if len(votes) == 1 else normal(turn.reward, votes, scale)
        # Card: "A = w_E A^E + w_S A^S."
        per_turn.append(episode_weight * outcome + step_weight * step)
    return broadcast(batch, per_turn)
