"""The oracles of `credit_turns` against the golden numbers and the reductions that the specification cards state."""

from __future__ import annotations

import math
import random

import pytest
from support.turn_helpers import critic, enrich_plain, one_turn, path

from . import objectives
from .credit_turns import (
    a2tgpo_credit,
    accumulate,
    aggregate,
    bilevel_gae,
    broadcast,
    clip_scale,
    discounted,
    enrich,
    flow_grpo,
    gae_tokens,
    gains,
    gate,
    gigpo,
    hgpo,
    igpo,
    infopo,
    information,
    mars,
    matched_returns,
    salt,
    srgpo,
    steps,
    trloo,
    ui_s1,
    zscore,
)
from .objectives import dr_grpo, grpo, mean, rloo, spread, std
from .records import Batch, random_batch, sampled, token, tokens, trajectories
from .result import Result

SEEDS = range(10)
METHODS = [
    *(gae_tokens, bilevel_gae, gigpo, hgpo, salt, igpo, infopo, a2tgpo_credit, mars, trloo, flow_grpo, srgpo, ui_s1),
]
OPTIONS = [
    (gae_tokens, {"beta": 0.1, "whiten": False}),
    (bilevel_gae, {"whiten": False}),
    (gigpo, {"scale": True, "rows": "trajectory"}),
    (hgpo, {"base": True, "scale": False}),
    (salt, {"base": "rloo", "window": 1}),
    (igpo, {"form": "code"}),
    (infopo, {"per_token": False}),
    (a2tgpo_credit, {"probability": False}),
    (mars, {"game": "domain"}),
    (flow_grpo, {"rows": "trajectory"}),
    (srgpo, {"size": 3, "within": "task"}),
    (srgpo, {"size": -1, "within": "trajectory"}),
    (ui_s1, {"scale": False}),
]


def near(numbers, tolerance: float = 1e-9):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)


def numbers(found) -> list[float]:
    return found.advantage if isinstance(found, Result) else found


def made(seed: int, **options) -> Batch:
    return enrich(random_batch(seed, **options), seed)


def per_trajectory(batch: Batch, scored: list[float]) -> list[float]:
    return spread(batch, scored)


def zscored(batch: Batch) -> list[float]:
    return per_trajectory(batch, [one for group in batch for one in zscore(group)])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("method", "options"), [*((m, {}) for m in METHODS), *OPTIONS])
def test_one_finite_number_for_each_token(method, options, seed):
    batch = made(seed)
    found = numbers(method(batch, **options))
    assert len(found) == len(list(tokens(batch)))
    assert all(math.isfinite(one) for one in found)
    assert numbers(method(batch, **options)) == found


def test_shared_golden():
    batch = [[path([r]) for r in (1, 0, 0, 0)]]
    assert zscore(batch[0]) == near([1.5, -0.5, -0.5, -0.5], 1e-5)
    enrich_plain(batch)
    assert trloo(batch) == near([1, -1 / 3, -1 / 3, -1 / 3])


# ---------------------------------------------------------------------------------------------------------------------
# GAE


def test_gae_golden():
    found = gae_tokens(critic([0, 0, 1], [0.2, 0.5, 0.8]), whiten=False)
    assert found.advantage == near([0.7655, 0.49, 0.2])
    assert found.extra["returns"] == near([0.9655, 0.99, 1.0])


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_reductions(seed):
    batch = made(seed)
    for trajectory in trajectories(batch):  # terminal reward only
        for turn in trajectory.turns:
            turn.reward = 0.0
        trajectory.turns[-1].reward = 1.5
    # "gamma=lambda=1 with terminal reward only -> R - V_t for every token"
    expected = [1.5 - one.old_value for one in tokens(batch)]
    assert gae_tokens(batch, lam=1.0, whiten=False).advantage == near(expected)
    batch = made(seed)
    rewards = [objectives.token_rewards(trajectory) for trajectory in trajectories(batch)]
    # "lambda=0 -> TD error"
    expected = []
    for trajectory, line in zip(trajectories(batch), rewards):
        values = [one.old_value for one in sampled(trajectory)] + [0.0]
        expected += [r + 0.9 * values[t + 1] - values[t] for t, r in enumerate(line)]
    assert gae_tokens(batch, gamma=0.9, lam=0.0, whiten=False).advantage == near(expected)
    # whitened: mean 0, variance 1
    white = gae_tokens(batch).advantage
    assert mean(white) == near(0.0)
    assert std(white) == near(1.0, 1e-6)
    # "lambda=1,V=0,gamma=1 -> reward-to-go (REINFORCE)"
    for one in tokens(batch):
        one.old_value = 0.0
    expected = [one for line in rewards for one in discounted(line, 1.0)]
    assert gae_tokens(batch, lam=1.0, whiten=False).advantage == near(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_in_reward(seed):
    batch = made(seed)
    for trajectory in trajectories(batch):
        for turn in trajectory.turns:
            turn.reward = 0.0
    for one in tokens(batch):
        one.old_value = 0.0
    found = gae_tokens(batch, beta=0.3, gamma=0.0, whiten=False).advantage
    assert found == near([-0.3 * (one.behaviour - one.reference) for one in tokens(batch)])


@pytest.mark.parametrize("seed", SEEDS)
def test_bilevel_gae(seed):
    batch = made(seed)
    assert bilevel_gae(batch, whiten=False).advantage == near(objectives.bilevel_gae(batch))
    # one turn of tokens: the outer level makes the reward its own return, so plain GAE remains
    batch = one_turn(seed)
    for at, one in enumerate(tokens(batch)):
        one.old_value = math.sin(at)
    assert bilevel_gae(batch, gamma=0.9).advantage == near(gae_tokens(batch, gamma=0.9).advantage)
    # one token a turn: the inner level adds nothing, so GAE with the turn discount remains
    batch = critic([0.3, -1.0, 2.0], [0.2, 0.5, 0.8])
    found = bilevel_gae(batch, turn_gamma=0.7, whiten=False)
    expected = gae_tokens(batch, gamma=0.7, whiten=False)
    assert found.advantage == near(expected.advantage)
    assert found.extra["returns"] == near(expected.extra["returns"])


# ---------------------------------------------------------------------------------------------------------------------
# States and edges


@pytest.mark.parametrize("seed", SEEDS)
def test_gigpo_reductions(seed):
    batch = made(seed)
    # "omega=0 -> multi-turn GRPO/Dr.GRPO"
    assert gigpo(batch, omega=0.0, rows="trajectory") == near(dr_grpo(batch)[0])
    assert gigpo(batch, omega=0.0, scale=True, rows="trajectory") == near(grpo(batch)[0])
    # "K=1 and same start state -> A = (1+omega) x group advantage"
    single = one_turn(seed)
    for rows in ("turn", "trajectory"):
        assert gigpo(single, omega=0.7, rows=rows) == near([1.7 * one for one in dr_grpo(single)[0]])
        assert gigpo(single, omega=0.7, scale=True, rows=rows) == near([1.7 * one for one in grpo(single)[0]])
    # "All states unique -> A^S=0 everywhere"
    for at, (_, _, _, _, turn) in enumerate(steps(batch)):
        turn.facts["state"] = str(at)
    for scale in (False, True):
        assert gigpo(batch, omega=3.0, scale=scale) == near(gigpo(batch, omega=0.0, scale=scale))


def test_gigpo_by_hand():
    batch = [[path([0, 1], state=["a", "b"]), path([0], state=["a"])]]
    # rows 1, 1, 0: mean 2/3; with votes per trajectory 1/2. State a: returns .5 and 0; state b is alone
    assert gigpo(batch, gamma=0.5) == near([1 / 3 + 0.25, 1 / 3, -2 / 3 - 0.25])
    assert gigpo(batch, gamma=0.5, rows="trajectory") == near([0.5 + 0.25, 0.5, -0.5 - 0.25])
    # the same state in another task is no peer
    other = [path([5], state=["a"])]
    assert gigpo([*batch, other], gamma=0.5)[:3] == near(gigpo(batch, gamma=0.5))
    assert gigpo([*batch, other], gamma=0.5)[3] == 0.0


def test_hgpo_golden():
    assert aggregate([(1, 1.0), (2, -0.5)], 1.0) == near(0.10, 1e-6)
    # "the finest two levels of K=1 get weights 2/5 and 3/5"
    assert aggregate([(1, 1.0), (2, 1e-30)], 1.0) == near(0.4, 1e-6)
    # zero-valued levels are dropped and the rest weigh more
    assert aggregate([(1, 1.0), (2, 0.0)], 1.0) == near(1.0, 1e-6)
    assert aggregate([(1, 0.0)], 1.0) == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_hgpo_reductions(seed):
    batch = made(seed)
    # "K=0 -> GiGPO step term alone (with singleton -> 0)"
    both = gigpo(batch, omega=1.0, gamma=0.9)
    outcome = gigpo(batch, omega=0.0, gamma=0.9)
    step = [one - other for one, other in zip(both, outcome)]
    assert hgpo(batch, history=0, gamma=0.9, scale=False) == near(step, 1e-5)
    # and with K=0 the population std is all that differs: sqrt(n/(n-1)) times the scaled step term
    both = gigpo(batch, omega=1.0, gamma=0.9, scale=True)
    outcome = gigpo(batch, omega=0.0, gamma=0.9, scale=True)
    sizes = []
    keys = [(g, turn.facts["state"]) for g, _, _, _, turn in steps(batch)]
    for key in keys:
        sizes.append(float(keys.count(key)))
    expected = []
    for one, other, n in zip(both, outcome, broadcast(batch, sizes)):
        expected.append((one - other) * math.sqrt(n / (n - 1)) if n > 1 else 0.0)
    assert hgpo(batch, history=0, gamma=0.9) == near(expected, 1e-4)
    # "alpha->inf -> finest non-empty level": with huge alpha the value is one of the levels, unlike alpha = 0
    assert hgpo(batch, history=0, alpha=0.0) == near(hgpo(batch, history=0, alpha=60.0), 1e-5)


def test_hgpo_levels():
    batch = [
        [path([0, 1.0], state=["a", "b"]), path([0, 0.5], state=["a", "b"]), path([0, -1.5], state=["c", "b"])],
    ]
    level_1, level_2 = [1.0, 0.5, -1.5], [0.25, -0.25, 0.0]  # at t = 1: state b alone; after a only the first two
    first = [0.25, -0.25]  # at t = 0 with gamma = 1: state a, returns 1 and .5; c is alone
    found = hgpo(batch, gamma=1.0, scale=False)
    expected = [first[0], 0.4 * level_1[0] + 0.6 * level_2[0], first[1], 0.4 * level_1[1] + 0.6 * level_2[1]]
    assert found == near([*expected, 0.0, -1.5], 1e-5)
    plain = hgpo(batch, gamma=1.0, scale=False, alpha=0.0)  # "alpha=0 -> plain mean of levels"
    assert plain[1] == near((level_1[0] + level_2[0]) / 2, 1e-5)
    finest = hgpo(batch, gamma=1.0, scale=False, alpha=200.0)  # "alpha->inf -> finest non-empty level"
    assert (finest[1], finest[3], finest[5]) == near((0.25, -0.25, -1.5), 1e-5)
    based = hgpo(batch, gamma=1.0, scale=False, base=True)  # k = 0 weighs 1, k = 1 weighs 2, k = 2 weighs 3
    assert based[1] == near((1 * 1.0 + 2 * 1.0 + 3 * 0.25) / 6, 1e-5)
    scaled = hgpo(batch, gamma=1.0)  # population std: .25 in the pair
    assert scaled[0] == near(1.0, 1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_salt_reductions(seed):
    batch = made(seed)
    # "Sum over members of a merged edge is preserved."
    for base in ("grpo", "rloo"):
        for group in batch:
            for trajectory in group:
                for turn in trajectory.turns:
                    turn.tokens = turn.tokens or [token(-1.0)]
        found = salt(batch, window=0, base=base)
        plain = (
            zscored(batch) if base == "grpo" else [o if n > 1 else 0.0 for o, n in zip(rloo(batch)[0], peers(batch))]
        )
        # an edge taken at most once by each trajectory keeps its sum; take those edges
        sums: dict = {}
        places = []
        for g, i, t, trajectory, turn in steps(batch):
            after = trajectory.turns[t + 1].facts["state"] if t + 1 < len(trajectory.turns) else None
            after = trajectory.facts["final_state"] if after is None else after
            for _ in turn.tokens[:1]:
                places.append((g, turn.facts["state"], turn.facts["action"], after, i))
        first = firsts(batch)
        for key, at in zip(places, first):
            sums.setdefault(key[:4], []).append((key[4], plain[at], found[at]))
        for members in sums.values():
            if len({i for i, _, _ in members}) == len(members):
                assert sum(a for _, a, _ in members) == near(sum(b for _, _, b in members))
    # "An edge shared by all G members -> mean of A = 0 for GRPO/RLOO (neutral)."
    single = one_turn(seed)
    for trajectory in trajectories(single):
        trajectory.facts["final_state"] = "end"
    assert salt(single) == near([0.0] * len(salt(single)))
    assert salt(single, base="rloo") == near([0.0] * len(salt(single)))
    # "no shared edges -> base algorithm"
    for at, (_, _, _, _, turn) in enumerate(steps(batch)):
        turn.facts["state"] = str(at)
    assert salt(batch) == near(grpo(batch)[0])
    assert salt(batch, base="rloo") == near([o if n > 1 else 0.0 for o, n in zip(rloo(batch)[0], peers(batch))])


def peers(batch: Batch) -> list[int]:
    """Group size of every token."""
    return [len(group) for group in batch for trajectory in group for _ in sampled(trajectory)]


def firsts(batch: Batch) -> list[int]:
    """Position of the first token of every turn that has tokens."""
    out, position = [], 0
    for _, _, _, _, turn in steps(batch):
        if turn.tokens:
            out.append(position)
        position += len(turn.tokens)
    return out


def test_salt_by_hand():
    batch = [
        [
            path([0, 1], state=["a", "b"], action=["x", "y"]),
            path([0, 0], state=["a", "b"], action=["x", "z"]),
            path([0, 0, 2], state=["c", "a", "b"], action=["x", "x", "y"]),
        ]
    ]
    # rewards 1, 0, 2: RLOO 0, -1.5, 1.5; with history the first edge a-x-b is shared by the first two only
    assert salt(batch, base="rloo") == near([-0.75, 0, -0.75, -1.5, 1.5, 1.5, 1.5])
    # without: by all three, and b-y-end by the first and the last
    assert salt(batch, base="rloo", window=0) == near([0, 0.75, 0, -1.5, 1.5, 0, 0.75])


# ---------------------------------------------------------------------------------------------------------------------
# Information


@pytest.mark.parametrize("seed", SEEDS)
def test_igpo_reductions(seed):
    batch = made(seed)
    # "Telescoping: sum_{t<T} r_t = p_{T-1} - p_0"
    for trajectory in trajectories(batch):
        scores = [trajectory.before, *(turn.answer for turn in trajectory.turns)]
        assert sum(gains(trajectory)) == near(math.exp(scores[-2]) - math.exp(scores[0]))
    # "all r_t=0 for t<T and gamma=1 -> A identical for all turns": in the code form where all lengths agree ...
    dice = random.Random(seed)
    batch = [[path([0, 0, dice.gauss(0, 1)], [2, 1, 2]) for _ in range(4)] for _ in range(2)]
    assert igpo(batch, form="code") == near(dr_grpo(batch)[0])
    # ... in the paper form only where the pooled mean is 0
    batch = [[path([0, 0, r], [2, 1, 2]) for r in (1.0, -1.0, 0.5, -0.5)]]
    pool = [0.0] * 8 + [1.0, -1.0, 0.5, -0.5]
    assert igpo(batch) == near(per_trajectory(batch, [r / (std(pool) + 1e-6) for r in (1.0, -1.0, 0.5, -0.5)]))
    # one turn each: GRPO
    single = one_turn(seed)
    assert igpo(single) == near(grpo(single)[0])


def test_igpo_by_hand():
    batch = [[path([0, 1]), path([0])]]
    batch[0][0].before, batch[0][0].turns[0].answer = math.log(0.25), math.log(0.75)
    pool = [0.5, 1.0, 0.0]
    z = [(one - 0.5) / (std(pool) + 1e-6) for one in pool]
    assert igpo(batch, gamma=0.5) == near([z[0] + 0.5 * z[1], z[1], z[2]])
    assert igpo(batch, form="code") == near([0.75, 0.5, -0.75])


def test_infopo_golden():
    found = [gate(one, 0.05) for one in (0, 0.05, 0.2, 0.5)]
    assert found[:3] == near([0.5, 0.2689, 0.0180], 5e-5)
    assert found[3] == near(4.5e-5, 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_infopo_reductions(seed):
    batch = made(seed)
    # "beta=0 -> GRPO"
    assert infopo(batch, beta=0.0).advantage == near(grpo(batch)[0])
    # "std_g=0 -> A = 0.5 beta A^info"
    for group in batch:
        for trajectory in group:
            for turn in trajectory.turns:
                turn.reward = 0.0
    found = infopo(batch, beta=0.4)
    assert found.extra["gates"] == [0.5] * len(batch)
    assert found.advantage == near([0.2 * found.extra["scale"] * one for one in found.extra["information"]])
    # "Observation equal to placeholder -> I_t=0"
    for one in tokens(batch):
        one.facts["blind"] = one.behaviour
    assert {one for trajectory in trajectories(batch) for one in information(trajectory)} <= {0.0, None}
    assert infopo(batch).advantage == near(infopo(batch, beta=0.0).advantage)


def test_infopo_by_hand():
    group = [
        path([0, 1], [2, 1], feedback=[True, True]),
        path([0, 0], [1, 2], feedback=[True, True]),
        path([0, 0], [1, 1], feedback=[False, True]),
    ]
    for trajectory, shifts in zip(group, ([0, 0, 0.8], [0, 0.1, 0.3], [0, 9.0])):
        for one, shift in zip(sampled(trajectory), shifts):
            one.facts["blind"] = one.behaviour - shift
    assert [information(one) for one in group] == [[near(0.8), None], [near(0.2), None], [None, None]]
    found = infopo([group])
    values = [0.4, 0.4, 0.2]
    z = [(one - mean(values)) / (std(values) + 1e-6) for one in values]
    assert found.extra["information"] == near([z[0], z[1], 0, z[2], 0, 0, 0, 0])
    rewards = [1.0, 0.0, 0.0]
    outer = [(one - 1 / 3) / (std(rewards) + 1e-6) for one in rewards]
    g = 1 / (1 + math.exp(std(rewards) / 0.05))
    assert found.extra["scale"] == 1.0
    asked = [0.5 * g * z[0], 0.5 * g * z[1], 0, 0.5 * g * z[2], 0, 0, 0]
    plain = [outer[0]] * 3 + [outer[1]] * 3 + [outer[2]] * 2
    assert found.advantage == near([one + other for one, other in zip(plain, [*asked, 0])])


def test_a2tgpo_golden():
    assert accumulate([1, -0.5, 0.5], 1.0) == near([0.57735, 0, 0.5], 1e-5)
    assert [clip_scale(z, 0.3) for z in (1, -0.5, 0.5)] == near([1.13864, 0.92652, 1.07348], 1e-5)
    assert accumulate([0.7], 1.0) == near([0.7])  # "n=1 -> D=z"


@pytest.mark.parametrize("seed", SEEDS)
def test_a2tgpo_reductions(seed):
    batch = made(seed)
    # "alpha=0,beta_c=0 -> turn-ratio GRPO"
    found = a2tgpo_credit(batch, alpha=0.0, beta=0.0)
    assert found.advantage == near(grpo(batch)[0])
    assert found.extra["clip_scale"] == [1.0] * len(found.advantage)
    # "so c in (0.7,1.3)"
    assert all(0.7 < one < 1.3 for one in a2tgpo_credit(batch).extra["clip_scale"])
    # n = 1 everywhere: D = z
    dice = random.Random(seed)
    pair = [[path([0, dice.gauss(0, 1)]) for _ in range(3)]]
    for trajectory in pair[0]:
        trajectory.before, trajectory.turns[0].answer = -dice.uniform(0.1, 3), -dice.uniform(0.1, 3)
    found = a2tgpo_credit(pair)
    outcome = zscored(pair)
    assert found.advantage == near([0.3 * z + one for z, one in zip(found.extra["z"], outcome)])
    gained = [gains(trajectory)[0] for trajectory in pair[0]]
    assert found.extra["z"][0] == near((gained[0] - mean(gained)) / (std(gained) + 1e-6))


# ---------------------------------------------------------------------------------------------------------------------
# Roles, turn indices, planners


@pytest.mark.parametrize("seed", SEEDS)
def test_mars_reductions(seed):
    # "single agent, single turn -> Dr.GRPO over the game's batch"
    single = one_turn(seed)
    assert mars(single) == near(dr_grpo(single)[0])
    merged = [[trajectory for group in single for trajectory in group]]
    assert mars(single, game="domain") == near(dr_grpo(merged)[0])
    # "One role only -> turn-level reward-to-go minus mean"
    batch = made(seed)
    for _, _, _, _, turn in steps(batch):
        turn.facts["agent"] = 0
    expected = []
    for group in batch:
        lines = [discounted([turn.reward for turn in trajectory.turns], 1.0) for trajectory in group]
        centre = mean([one for line in lines for one in line])
        expected += [one - centre for line in lines for one in line]
    assert mars(batch) == near(broadcast(batch, expected))


def test_mars_by_hand():
    batch = [[path([1, 2, 4], agent=[0, 1, 0]), path([0, 8], agent=[0, 1])]]
    # role 0: 5, 4, 0, mean 3; role 1: 2, 8, mean 5
    assert mars(batch) == near([2, -3, 1, -3, 3])


def test_trloo_golden():
    batch = [[path([0, 1]), path([1, 0]), path([0, 0])]]
    assert discounted([0, 1], 0.9) == near([0.9, 1])
    assert trloo(batch, gamma=0.9) == near([0.40, 1.0, 0.55, -0.5, -0.95, -0.5])


def test_trloo_filters():
    batch = [[path([0, 1, 5], valid=[True, False, True]), path([1, 0], valid=[True, True])]]
    # turn 1: a single valid row, A = G; turn 2: alone, A = G; the filtered turn gets 0
    assert trloo(batch) == near([5, 0, 5, -5, 0])
    batch[0][1].turns[1].reward = 3.0
    assert trloo(batch) == near([2, 0, 5, -2, 3])


@pytest.mark.parametrize("seed", SEEDS)
def test_trloo_reductions(seed):
    # "one turn -> RLOO"
    single = one_turn(seed)
    assert trloo(single) == near(rloo(single)[0])
    # "equals (N/(N-1)) x turn-level Dr.GRPO"
    batch = made(seed)
    expected = []
    for group in batch:
        lines = [discounted([turn.reward for turn in trajectory.turns], 0.9) for trajectory in group]
        for trajectory, line in zip(group, lines):
            for t, turn in enumerate(trajectory.turns):
                votes = []
                for other, returns in zip(group, lines):
                    if len(returns) > t and other.turns[t].facts["valid"]:
                        votes.append(returns[t])
                n = len(votes)
                value = n / (n - 1) * (line[t] - mean(votes)) if n > 1 else line[t]
                expected.append(value if turn.facts["valid"] else 0.0)
    assert trloo(batch, gamma=0.9) == near(broadcast(batch, expected))


@pytest.mark.parametrize("seed", SEEDS)
def test_flow_grpo_reductions(seed):
    # "T_i=1 -> GRPO"
    single = one_turn(seed)
    for rows in ("turn", "trajectory"):
        assert flow_grpo(single, rows=rows) == near(grpo(single)[0])
    batch = made(seed)
    planned = broadcast(batch, [float(turn.facts["planner"]) for _, _, _, _, turn in steps(batch)])
    assert flow_grpo(batch, rows="trajectory") == near([one * flag for one, flag in zip(grpo(batch)[0], planned)])


def test_flow_grpo_rows():
    batch = [[path([0, 0, 1], planner=[True, True, False]), path([0], planner=[True])]]
    votes = [1.0, 1.0, 0.0]
    z = [(one - mean(votes)) / (std(votes) + 1e-6) for one in (1.0, 0.0)]
    assert flow_grpo(batch, rows="turn") == near([z[0], z[0], 0, z[1]])
    half = math.sqrt(0.5)
    assert flow_grpo(batch, rows="trajectory") == near([half, half, 0, -half], 1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_srgpo_reductions(seed):
    batch = made(seed)
    # "omega=0 -> GRPO"
    assert srgpo(batch, omega=0.0, rows="trajectory") == near(grpo(batch)[0])
    # "N_S=B -> batch-normalised process reward"
    rewards = [turn.reward for _, _, _, _, turn in steps(batch)]
    scored = broadcast(batch, [(one - mean(rewards)) / (std(rewards) + 1e-6) for one in rewards])
    outcome = srgpo(batch, omega=0.0)
    expected = [one + 0.5 * other for one, other in zip(outcome, scored)]
    for size in (len(rewards), -1, len(rewards) + 5):
        assert srgpo(batch, size=size) == near(expected)
    # size 1: every step group is a singleton
    assert srgpo(batch, size=1) == near(outcome)
    # "Permutation test: with N_S=B result is independent of the shuffle."
    small = srgpo(batch, size=4)
    dice = random.Random(seed + 100)
    for _, _, _, _, turn in steps(batch):
        turn.facts["lot"] = dice.random()
    assert srgpo(batch, size=len(rewards)) == near(expected)
    assert srgpo(batch, size=4) != near(small)


def test_srgpo_cuts():
    batch = [[path([0, 2], lot=[0.1, 0.9]), path([1], lot=[0.2])]]
    rest = srgpo(batch, omega=0.0)
    half = math.sqrt(0.5)
    found = [one - other for one, other in zip(srgpo(batch, size=2, omega=1.0), rest)]
    assert found == near([-half, 0, half], 1e-5)  # {0, 1} in order of the lot, and 2 alone
    found = [one - other for one, other in zip(srgpo(batch, size=2, omega=1.0, within="trajectory"), rest)]
    assert found == near([-half, half, 0], 1e-5)


def test_ui_s1_golden():
    assert matched_returns([1, 1, 0, 1], [True, True, False, True], 0.5) == near([1.5, 1, 0, 1])
    # what a mismatched step earned does not flow back
    assert matched_returns([1, 4, 1], [True, False, True], 0.5) == near([1, 4, 1])


@pytest.mark.parametrize("seed", SEEDS)
def test_ui_s1_reductions(seed):
    batch = made(seed)
    # "gamma=0,w_E=0 -> offline step-wise GRPO"
    expected = []
    for group in batch:
        for trajectory in group:
            for t, turn in enumerate(trajectory.turns):
                votes = [other.turns[t].reward for other in group if len(other.turns) > t]
                n = len(votes)
                expected.append((turn.reward - mean(votes)) / (std(votes) + 1e-6) if n > 1 else 0.0)
    assert ui_s1(batch, episode_weight=0.0, gamma=0.0) == near(broadcast(batch, expected))
    # "all matches, gamma=1 -> reward-to-go"
    rewards = [random.Random(seed).gauss(0, 1) for _ in range(4)]
    assert matched_returns(rewards, [True] * 4, 1.0) == near(discounted(rewards, 1.0))
    # w_S = 0: every step's own reward against those of all steps of its task
    found, expected = ui_s1(batch, step_weight=0.0), []
    for group in batch:
        votes = [turn.reward for trajectory in group for turn in trajectory.turns]
        expected += [(one - mean(votes)) / (std(votes) + 1e-6) if len(votes) > 1 else one for one in votes]
    assert found == near(broadcast(batch, expected))


def test_ui_s1_singletons():
    assert ui_s1([[path([3], match=[True])]]) == near(
        [3]
    )  # "singleton step group -> 0, singleton episode group -> raw"
    half = math.sqrt(0.5)  # two rows of one rollout: (3 - 2)/std, std = sqrt(2)
    assert ui_s1([[path([3, 1], match=[True, True])]]) == near([half, -half], 1e-5)
