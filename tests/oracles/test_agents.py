"""The oracles of `agents.py` against the golden numbers and the reductions that their specification cards state."""

from __future__ import annotations

import math

import pytest
import torch

from .agents import (
    PHASES,
    a2tgpo,
    aepo,
    aspo,
    dgpo,
    egae,
    epo,
    epo_weight,
    minirl,
    ngrpo,
    ppo_max,
    safe,
    safe_threshold,
    scale_rl,
    see_upo_advantage,
    see_upo_next,
    see_upo_turn,
    sigmoid,
    softmin,
    t_ppo,
)
from .objectives import dapo, dr_grpo, gae, grpo, gspo, ppo, reinforce, token_rewards
from .records import Batch, Trajectory, Turn, gradients, random_batch, sampled, token, tokens, total, trajectories
from .result import Result

HISTORY = {0: 0.3, 1: 0.6, 3: 0.1}


def see_upo(batch: Batch) -> Result:
    """The whole reverse sweep, with ratios of the present policy in the place of the updated one."""
    M = see_upo_advantage(batch)
    advantage, loss = [0.0] * len(list(tokens(batch))), torch.tensor(0.0, dtype=torch.float64)
    for k in reversed(range(max([len(row.turns) for row in trajectories(batch)], default=0))):
        found = see_upo_turn(batch, k, M)
        advantage = [a + b for a, b in zip(advantage, found.advantage)]
        loss = loss + found.loss
        M = see_upo_next(M, found.extra["ratio"])
    return Result(advantage, loss)


def epo_banded(batch: Batch) -> Result:
    return epo(batch, low=0.5, high=1.5, history=HISTORY)


METHODS = [ngrpo, minirl, scale_rl, dgpo, aspo, a2tgpo, t_ppo, see_upo, epo, epo_banded, ppo_max, safe, aepo]
FIELDS = ("logp", "value", "twin", "entropy")


def near(numbers, tolerance: float = 1e-9):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)


def one_turn(reward: float, log_ratios: list[float], **more) -> Trajectory:
    return Trajectory([Turn([token(-2.0 + ratio, behaviour=-2.0) for ratio in log_ratios], reward)], **more)


def flat_rewards(rewards: list[float]) -> Batch:
    return [[one_turn(reward, [0.0]) for reward in rewards]]


def same(batch: Batch, ours, theirs, fields=FIELDS, tolerance: float = 1e-9) -> None:
    """Two losses have the same gradients by every leaf."""
    for field in fields:
        assert gradients(batch, ours, field) == near(gradients(batch, theirs, field), tolerance), field


def per_token(batch: Batch, numbers) -> list[float]:
    return [number for row, number in zip(trajectories(batch), numbers) for _ in sampled(row)]


# ---------------------------------------------------------------------------------------------------------------------
# NGRPO


def test_ngrpo_golden(side):
    assert side(ngrpo, flat_rewards([0, 0, 0, 0])).advantage == near([-0.44721] * 4, 1e-5)
    assert side(ngrpo, flat_rewards([1, 1, 0, 0])).advantage == near([0.7303, 0.7303, -1.09545, -1.09545], 1e-5)


def test_ngrpo_all_wrong_and_all_correct():
    for size in (1, 2, 5):
        assert ngrpo(flat_rewards([0] * size)).advantage == near([-1 / math.sqrt(size + 1)] * size, 1e-5)
        assert ngrpo(flat_rewards([1] * size)).advantage == near([0.0] * size)


@pytest.mark.parametrize("seed", range(5))
def test_ngrpo_is_dapo_with_a_silent_perfect_row(seed):
    batch = random_batch(seed)
    found = ngrpo(batch)
    enlarged = [[*group, Trajectory([Turn([], 1.0)])] for group in batch]
    advantages, loss = dapo(enlarged, low=0.16, high=0.24)
    assert found.advantage == near(advantages) and found.loss.item() == near(loss.item())
    same(batch, found.loss, loss)


def test_ngrpo_clip_sides():
    # Card: "only e_pos binds for A>0 and only e_neg for A<0"
    ratios = [math.log(r) for r in (1.25, 1.23, 0.7)]
    batch = [[one_turn(1.0, ratios), one_turn(0.0, ratios), one_turn(0.0, [0.0])]]
    found = gradients(batch, ngrpo(batch).loss)
    assert [one == 0.0 for one in found] == [True, False, False, False, False, True, False]


# ---------------------------------------------------------------------------------------------------------------------
# MiniRL


@pytest.mark.parametrize("seed", range(5))
def test_minirl_reductions(seed):
    # "mu=pi_old, one update -> REINFORCE with group baseline"
    batch = random_batch(seed)
    for one in tokens(batch):
        one.behaviour = one.proximal = one.logp.item()
    found = minirl(batch)
    advantages, _ = dr_grpo(batch)
    assert found.advantage == near(advantages)
    at = iter(advantages)
    rowed = [[Trajectory([Turn(sampled(row), 0.0)]) for row in group] for group in batch]
    for row in trajectories(rowed):
        row.turns[0].reward = next(at) if sampled(row) else 0.0
        for _ in sampled(row)[1:]:
            next(at)
    same(batch, found.loss, reinforce(rowed)[1])
    # "mask off -> TIS-REINFORCE"
    batch = random_batch(seed)
    found = minirl(batch, low=math.inf, high=math.inf)
    n = sum(1 for row in trajectories(batch) if sampled(row))
    weights = [min(math.exp(one.logp.item() - one.behaviour), 5.0) for one in tokens(batch)]
    assert max(weights) == 5.0 and all(found.extra["kept"]) and found.extra["weight"] == near(weights)
    expected = [-weight * advantage / n for weight, advantage in zip(weights, found.advantage)]
    assert gradients(batch, found.loss) == near(expected)
    # mu = pi_old, no cap: the PPO-clip gradient with a token sum
    for one in tokens(batch):
        one.proximal = one.behaviour
    same(batch, minirl(batch, low=0.2, high=0.2, cap=math.inf).loss, dr_grpo(batch, clip=0.2, length=1)[1])


def test_minirl_mask_is_by_proximal():
    batch = [[one_turn(1.0, [0.0, 0.0]), one_turn(0.0, [0.0, 0.0])]]
    for row, shift in zip(batch[0], (0.3, -0.3)):
        sampled(row)[0].proximal = -2.0 - shift
    found = minirl(batch)
    assert found.extra["kept"] == [False, True, False, True] and found.extra["weight"] == near([1.0] * 4)
    assert gradients(batch, found.loss) == near([0.0, -0.25, 0.0, 0.25])


# ---------------------------------------------------------------------------------------------------------------------
# ScaleRL


def test_sigmoid_golden():
    assert sigmoid(1000, 0.61, 1.9, 1000, 0.1) == near(0.355)
    assert sigmoid(10000, 0.61, 1.9, 1000, 0.1) == near(0.60366, 1e-5)
    for slope in (0.5, 3.0):
        assert sigmoid(7.0, 0.8, slope, 7.0, 0.2) == near(0.5)


def test_scale_rl_by_hand():
    # R - mean: [.5, -.5 | 0, 0 | 1, -1]; the flat group counts in the std but not in the prompt-mean.
    batch = [
        [one_turn(1.0, [0.0] * 3), one_turn(0.0, [math.log(9)])],
        [one_turn(1.0, [0.0]), one_turn(1.0, [0.0])],
        [one_turn(2.0, [0.0]), one_turn(0.0, [])],
    ]
    found = scale_rl(batch)
    scale = math.sqrt((0.25 * 2 + 2) / 5)
    assert found.advantage == near([one / scale for one in (0.5, 0.5, 0.5, -0.5, 0, 0, 1)], 1e-5)
    assert found.extra["kept"] == [True] * 4 + [False] * 2 + [True]
    expected = [-0.5 / 4, -0.5 / 4, -0.5 / 4, 5 * 0.5 / 4, 0, 0, -1.0]
    assert gradients(batch, found.loss) == near([one / scale / 2 for one in expected], 1e-5)


def test_scale_rl_is_unclipped_ppo_without_cap():
    # CISPO: "no cap hit -> same gradient as unclipped PPO"; one group, so prompt-mean is token-mean
    batch = random_batch(3)[:1]
    ours = scale_rl(batch, cap=math.inf)
    theirs = dapo(batch, low=math.inf, high=math.inf)
    rewards = [total(row) for row in batch[0]]
    assert ours.advantage == near(theirs[0])  # one group: batch std = group std
    assert len(set(rewards)) > 1
    same(batch, ours.loss, theirs[1])


# ---------------------------------------------------------------------------------------------------------------------
# DGPO


def test_dgpo_golden(side):
    made = [token(-1.0, entropy=h * math.log(32), hellinger=d) for d, h in zip([0.0, 0.1, 0.3], [0.2, 0.5, 0.5])]
    batch = [[Trajectory([Turn(made, 1.0)]), one_turn(0.0, [0.0])]]
    found = side(dgpo, batch)
    if not side.recipe:
        assert found.extra["weight"] == near([0.86830, 0.95962, 1.17208, 1.0], 1e-5)
    a = found.advantage[0]
    expected = [-a * weight / 3 / 2 for weight in (0.86830, 0.95962, 1.17208)]
    assert gradients(batch, found.loss)[:3] == near(expected, 1e-5)
    assert 1 - sum(math.sqrt(p * q) for p, q in zip((0.5, 0.5), (0.9, 0.1))) == near(0.10557, 1e-5)
    # "kappa=0 -> no entropy gate"
    scores = [math.exp(d / 0.5) for d in (0.0, 0.1, 0.3)]
    if not side.recipe:
        assert side(dgpo, batch, kappa=0.0).extra["weight"][:3] == near([3 * score / sum(scores) for score in scores])


@pytest.mark.parametrize("seed", range(5))
def test_dgpo_reductions(seed):
    batch = random_batch(seed)
    advantages, loss = grpo(batch, beta=0.0)
    found = dgpo(batch, tau=1e12)  # "tau->inf -> W=1 -> GRPO"
    assert found.advantage == near(advantages)
    same(batch, found.loss, loss)
    means, at = dgpo(batch).extra["weight"], 0
    for row in trajectories(batch):  # "(mean 1)"
        if sampled(row):
            assert sum(means[at : at + len(sampled(row))]) == near(len(sampled(row)))
        at += len(sampled(row))
    for one in tokens(batch):  # "pi=pi_ref -> W=1 -> GRPO"
        one.hellinger = 0.0
    same(batch, dgpo(batch).loss, loss)


# ---------------------------------------------------------------------------------------------------------------------
# ASPO


def calling(before: int, after: int, reward: float, success: bool = True) -> Trajectory:
    quiet, loud = (Turn([token(-1.0) for _ in range(n)], 0.0) for n in (before, after))
    loud.reward, loud.tool_calls = reward, 1
    return Trajectory([quiet, loud], success=success)


def golden_group(others: list[Trajectory]) -> tuple[Batch, float]:
    """Three rows of reward 1 whose z-score is .8, found by moving the reward of the last row."""
    low, high = -20.0, 1.0
    for _ in range(200):
        others[-1].turns[-1].reward = (low + high) / 2
        group = [calling(p, 10 - p, 1.0) for p in (1, 3, 5)] + others
        found = dapo([group])[0][0]
        low, high = ((low + high) / 2, high) if found < 0.8 else (low, (low + high) / 2)
    return [group], found


def test_aspo_golden(side):
    # The card's p = [100, 300, 500] and L = 1000, divided by 100; two more rows outside the subset.
    outside = [calling(2, 2, 0.0, success=False), one_turn(0.0, [0.0] * 4, success=True), one_turn(0.0, [0.0] * 4)]
    batch, found = golden_group(outside)
    assert found == near(0.8)
    shaped = side(aspo, batch).advantage
    assert [shaped[0], shaped[10], shaped[20]] == near([1.2, 0.8, 0.4])
    assert shaped[30:] == near(dapo(batch)[0][30:])
    # "clip(..., -k A_c, k A_c)"
    bounded = side(aspo, batch, k=0.25).advantage
    assert [bounded[0], bounded[10], bounded[20]] == near([1.0, 0.8, 0.6])


def test_aspo_positions():
    # A turn without tokens that calls a tool counts, at the number of tokens before it.
    made = [token(-1.0) for _ in range(4)]
    row = Trajectory([Turn(made[:2], 0.0), Turn([], 0.0, tool_calls=1), Turn(made[2:], 1.0)], success=True)
    batch = [[row, calling(0, 4, 1.0), one_turn(0.0, [0.0])]]
    base = 1 / math.sqrt(3)  # p = [2, 0], L = 4: the shift is -+.5
    assert aspo(batch, k=1.0).advantage == near([base - 0.5] * 4 + [base + 0.5] * 4 + [-2 * base], 1e-5)
    assert aspo(batch).advantage == near([0.3 * base] * 4 + [1.7 * base] * 4 + [-2 * base], 1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_aspo_reductions(seed):
    batch = random_batch(seed)
    advantages, loss = dapo(batch, dual=3.0)
    for hyper in ({"delta": 0.0}, {"k": 0.0}):  # "delta=0 or k=0 -> DAPO"
        found = aspo(batch, dual=3.0, **hyper)
        assert found.advantage == near(advantages) and found.loss.item() == near(loss.item())
        same(batch, found.loss, loss)
    for group in batch:  # "subset of size 1 -> unchanged"
        for row in group[1:]:
            row.success = False
    assert aspo(batch).advantage == near(advantages)
    # Only positive advantages move, and never change sign.
    batch = random_batch(seed)
    for ours, theirs in zip(aspo(batch).advantage, advantages):
        assert ours == near(theirs) if theirs <= 0 else ours > 0


# ---------------------------------------------------------------------------------------------------------------------
# A2TGPO


def test_a2tgpo_golden(side):
    # Three rows; in each IG column mean 0 and std 1, with the card's z = [1, -.5, .5] in the first row.
    root = math.sqrt(3.25) / 2
    columns = [[1.0, 0.0, -1.0], [-0.5, 0.25 + root, 0.25 - root], [0.5, -0.25 - root, -0.25 + root]]
    group = []
    for i in range(3):
        row, score = [], -1.0
        for column in columns:
            score += column[i]
            row.append(Turn([token(-1.0)], 0.0, answer=score))
        group.append(Trajectory([*row, Turn([token(-1.0)], float(i == 0), answer=9.0)], before=-1.0))
    found = side(a2tgpo, [group])
    if not side.recipe:
        assert found.extra["z"][:4] == near([1, -0.5, 0.5, 0], 1e-5)
        assert found.extra["credit"][:4] == near([0.57735, 0, 0.5, 0], 1e-5)
        assert found.extra["scale"][:4] == near([1.13864, 0.92652, 1.07348, 1.0], 1e-5)
    out = 2 / 3 / math.sqrt(1 / 3)
    assert found.advantage[:4] == near([out + 0.3 * d for d in (0.57735, 0, 0.5, 0)], 1e-5)
    discounted = a2tgpo([group], gamma=0.5).extra["credit"]
    assert discounted[:3] == near([(1 - 0.25 + 0.125) / math.sqrt(3), (-0.5 + 0.25) / math.sqrt(2), 0.5], 1e-5)


def test_a2tgpo_lone_turns():
    batch = random_batch(1)
    found = a2tgpo([batch[1]])  # a group of one: nothing to compare with
    assert set(found.extra["z"]) == {0.0} and set(found.extra["scale"]) == {1.0}
    assert found.advantage == near([0.0] * len(found.advantage))


@pytest.mark.parametrize("seed", range(5))
def test_a2tgpo_reductions(seed):
    batch = random_batch(seed)
    found = a2tgpo(batch, alpha=0.0, beta=0.0)  # "alpha=beta=0 -> turn-ratio GRPO"
    assert found.advantage == near(grpo(batch)[0])
    assert set(found.extra["scale"]) == {1.0}
    assert len(found.extra["scale"]) == sum(len(row.turns) for row in trajectories(batch))
    expected, count = [], len(found.advantage)
    advantage = iter(found.advantage)
    for row in trajectories(batch):
        for turn in row.turns:
            for _ in turn.tokens:
                a = next(advantage)
                ratio = math.exp(sum(t.logp.item() - t.behaviour for t in turn.tokens) / len(turn.tokens))
                flat = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)
                expected.append(0.0 if flat else -a * ratio / count)
    assert gradients(batch, found.loss) == near(expected)
    # One token per turn: the token PPO-clip of DAPO
    single = [
        [Trajectory([Turn([one], 0.0) for one in sampled(row)] + [Turn([], total(row))]) for row in group]
        for group in batch
    ]
    same(single, a2tgpo(single, alpha=0.0, beta=0.0).loss, dapo(single, high=0.2)[1])


# ---------------------------------------------------------------------------------------------------------------------
# T-PPO


def test_t_ppo_golden(side):
    assert egae([0, 0, 0], [0.2, 0.5, 0.8], 1.0, 0.95) == near([0.585, 0.3, 0.0])
    for truncated, reward, expected in ((True, 0.0, [0.585, 0.3, 0.0]), (False, 1.0, [0.7655, 0.49, 0.2])):
        made = [token(-1.0, value=value) for value in (0.2, 0.5, 0.8)]
        batch = [[Trajectory([Turn(made, reward)], truncated=truncated)]]
        found = side(t_ppo, batch)
        assert found.advantage == near(expected)
        slope = [0.0] * 3 if truncated else [(v - 1.0) / 3 for v in (0.2, 0.5, 0.8)]
        assert gradients(batch, found.loss, "value") == near(slope)
    # gamma < 1: the Monte-Carlo target is discounted
    if not side.recipe:
        assert side(t_ppo, batch, gamma=0.5).extra["target"] == near([0.25, 0.5, 1.0])


@pytest.mark.parametrize("seed", range(5))
def test_t_ppo_reductions(seed):
    batch = random_batch(seed)
    for row in trajectories(batch):
        row.truncated = False
    found = t_ppo(batch)  # "finished -> GAE"; "l >= maximum length -> PPO" (here without whitening, MC targets)
    raw = []
    for row in trajectories(batch):
        raw += gae(token_rewards(row), [one.old_value for one in sampled(row)], 1.0, 0.95)
    assert found.advantage == near(raw)
    single = [[one_turn(0.7, [0.4])]]  # one token is never whitened and its lambda-return is the Monte-Carlo return
    sampled(single[0][0])[0].value = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    ours, theirs = t_ppo(single), ppo(single)
    assert ours.advantage == near(theirs[0]) and ours.loss.item() == near(theirs[1].item())
    same(single, ours.loss, theirs[1])
    for row in trajectories(batch):
        row.truncated = True
    assert not any(gradients(batch, t_ppo(batch).loss, "value"))
    # lambda = 1: the extended estimate is the return plus the last value, minus the value
    found = t_ppo(batch, lam=1.0)
    expected = []
    for row in trajectories(batch):
        values, paid = [one.old_value for one in sampled(row)], token_rewards(row)
        expected += [sum(paid[t:]) + values[-1] - values[t] for t in range(len(values))]
    assert found.advantage == near(expected)


# ---------------------------------------------------------------------------------------------------------------------
# SeeUPO


def test_see_upo_golden():
    second = see_upo_next({(0, 0): 0.5, (0, 1): 2.0}, {(0, 0): 1.2})
    assert second == near({(0, 0): 0.6, (0, 1): 2.0})
    assert see_upo_next(second, {(0, 0): 0.9})[0, 0] == near(0.54)


def test_see_upo_advantage():
    found = see_upo_advantage([flat_rewards([1, 0])[0], flat_rewards([2, 0])[0], flat_rewards([7])[0]])
    scale = math.sqrt((0.25 * 2 + 2) / 4)
    assert list(found) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert list(found.values()) == near([one / scale for one in (0.5, -0.5, 1, -1, 0)], 1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_see_upo_reductions(seed):
    batch = random_batch(seed)
    # "one turn -> sequence-level PPO with mean baseline (GSPO-like without std)"; one group: batch std = group std
    group = [Trajectory([Turn(sampled(row), total(row))]) for row in batch[0]]
    M = see_upo_advantage([group])
    found = see_upo_turn([group], 0, M, beta=0.0)
    advantages, loss = gspo([group], low=0.2, high=0.2)
    assert found.advantage == near(advantages) and found.loss.item() == near(loss.item())
    same([group], found.loss, loss)
    # "ratios all 1 -> same M for all turns"
    for one in tokens(batch):
        one.behaviour = one.logp.item()
    M = see_upo_advantage(batch)
    for k in range(3):
        assert see_upo_next(M, see_upo_turn(batch, k, M).extra["ratio"]) == near(M)
    # Only turn k has a gradient, and on-policy it is that of the mean over rows that have the turn.
    found = see_upo_turn(batch, 1, M, beta=0.0)
    having = [row for row in trajectories(batch) if len(row.turns) > 1 and row.turns[1].tokens]
    expected = []
    for g, some in enumerate(batch):
        for i, row in enumerate(some):
            for k, turn in enumerate(row.turns):
                for _ in turn.tokens:
                    expected.append(-M[g, i] / len(turn.tokens) / len(having) if k == 1 else 0.0)
    assert gradients(batch, found.loss) == near(expected)
    # The divergence alone: k3 has the gradient 1 - exp(-x)
    found = see_upo_turn(batch, 0, dict.fromkeys(M, 0.0), beta=1.0)
    having = [row for row in trajectories(batch) if row.turns[0].tokens]
    expected = []
    for row in trajectories(batch):
        for k, turn in enumerate(row.turns):
            for one in turn.tokens:
                slope = 1 - math.exp(one.reference - one.logp.item())
                expected.append(slope / len(turn.tokens) / len(having) if k == 0 else 0.0)
    assert gradients(batch, found.loss) == near(expected)


# ---------------------------------------------------------------------------------------------------------------------
# EPO


def test_epo_golden():
    found = [epo_weight(k, 50) for k in (0, 25, 50, 100)]
    assert found == near([2, 1.60653, 1.36788, 1.13534], 1e-5)


def test_epo_hinge():
    made = [token(-1.0, entropy=h) for h in (0.1, 0.5, 2.0)]
    other = [token(-1.0, entropy=9.0)]
    batch = [[Trajectory([Turn(made, 0.0), Turn(other, 0.0)])]]
    found = epo(batch, lam=1.0, alpha=0.1, low=0.5, high=1.5, history={0: 1.0}, weight=2.0)
    assert found.extra["penalty"] == near([0.4, 0.0, 0.5, 0.0])
    assert found.extra["entropy"] == near(2.9) and found.extra["smooth"] == near(0.1 * 0.9 / 4)
    assert found.loss.item() == near(-(2.9 - 2 * 0.0225))
    expected = [-(1 + 0.2) / 4, -1 / 4, -(1 - 0.2) / 4, -1 / 4]
    assert gradients(batch, found.loss, "entropy") == near(expected)


@pytest.mark.parametrize("seed", range(5))
def test_epo_reductions(seed):
    batch = [[Trajectory([Turn(sampled(row), total(row))]) for row in group] for group in random_batch(seed)]
    advantages, loss = dapo(batch, low=0.2, high=0.2)  # one turn for each trajectory: rows of either kind are the same
    found = epo(batch, lam=0.0, beta=0.0, history=HISTORY)  # "lambda=0 -> base"
    assert found.advantage == near(advantages) and found.loss.item() == near(loss.item())
    same(batch, found.loss, loss)
    share = [-0.5 / len(list(tokens(batch)))] * len(list(tokens(batch)))
    for hyper in ({"alpha": 0.0, "history": HISTORY}, {"history": {}}, {}):  # "alpha=0 -> entropy-bonus"
        found = epo(batch, lam=0.5, beta=0.0, **hyper)
        assert gradients(batch, found.loss, "entropy") == near(share)
        same(batch, found.loss, loss, ["logp"])


# ---------------------------------------------------------------------------------------------------------------------
# PPO-max


@pytest.mark.parametrize("seed", range(5))
def test_ppo_max_reductions(seed):
    batch = random_batch(seed)
    found = ppo_max(batch, eta=0.0, limit=math.inf)  # "no normalisation, eta=0 -> PPO" (on a terminal reward)
    rowed = [[Trajectory([Turn(sampled(row), total(row))]) for row in group] for group in batch]
    advantages, loss = ppo(rowed)
    assert found.advantage == near(advantages, 1e-6) and found.loss.item() == near(loss.item(), 1e-6)
    same(batch, found.loss, loss, tolerance=1e-6)


def test_ppo_max_rewards():
    made = [token(-1.0, proximal=-1.5, reference=-40.0), token(-1.0, reference=-1.2)]
    batch = [[Trajectory([Turn(made[:1], 5.0), Turn(made[1:], 3.0), Turn([], 1.0)])]]
    found = ppo_max(batch, mean=1.0, std=4.0)
    assert found.extra["reward"] == near([-0.05 * 38.5, -0.05 * 0.2 + 2.0], 1e-7)
    assert ppo_max(batch, mean=1.0, std=4.0, limit=1.5).extra["reward"][1] == near(-0.01 + 1.5)
    assert ppo_max(batch, mean=30.0, std=1.0).extra["reward"][1] == near(-0.01 - 10.0)


# ---------------------------------------------------------------------------------------------------------------------
# SAFE


def test_safe_softmin_golden():
    assert softmin(1, 2, 0.5) == near(1.28311, 1e-5)
    assert softmin(1, 2, 0.5) - 0.5 * math.log(2) == near(0.93654, 1e-5)  # "without the log 2 term"
    assert softmin(1, 2, 1e-6) == near(1.0, 1e-5) and softmin(1, 2, 1e6) == near(1.5, 1e-5)
    assert softmin(2, 1, 0.5) == softmin(1, 2, 0.5) and softmin(3, 3, 0.5) == near(3.0)


def test_safe_threshold():
    assert safe_threshold(0.0, 0.0, 0.0, "converged") == near((0.3, 0.0))
    threshold, integral = safe_threshold(0.1, 0.2, 0.3, "plateau")
    assert threshold == near((0.3 + 0.03 + 0.003 - 0.01) * 0.8) and integral == near(0.3)
    assert safe_threshold(0.1, 0.99, 0.1, "climb") == near(((0.3 + 0.03 + 0.01) * 1.2, 1.0))
    assert safe_threshold(5.0, 0.0, 0.0, "warm-up")[0] == 0.6 and safe_threshold(-5.0, 0.0, 0.0, "climb")[0] == 0.1
    assert safe_threshold(-5.0, 0.0, 0.0, "climb")[1] == -1.0
    assert PHASES == {"warm-up": 1.5, "climb": 1.2, "plateau": 0.8, "converged": 1.0}


def test_safe_by_hand():
    # A lone token: advantage R - V, not whitened. V = softmin(1, 2) at the first token.
    made = token(-1.0, reference=-1.5, value=1.1, old_value=1.0, twin=5.0, old_twin=2.0, entropy=0.4)
    batch = [[Trajectory([Turn([made], 3.0)])]]
    found = safe(batch)
    advantage = 3.0 - 1.283110  # ratio 1
    assert found.advantage == near([advantage], 1e-5) and found.extra["baseline"] == near([1.28311], 1e-5)
    coefficient = 0.1 * 0.2 * (2 / 0.5)
    assert found.extra["coefficient"] == near(coefficient)
    first = 0.5 * (1.9 - 0.25)  # v = 1.1 is inside its clip range
    second = 0.5 * (2.0 - 0.25)  # v = 5 against 3; clipped to 2.2 the error is .8, the smaller one
    assert found.loss.item() == near(-advantage + 0.5 * (first + second) + coefficient * 0.125, 1e-5)
    assert gradients(batch, found.loss) == near([-advantage + coefficient * 0.5], 1e-5)
    assert gradients(batch, found.loss, "value") == near([-0.25]) and gradients(batch, found.loss, "twin") == [0.25]
    assert gradients(batch, found.loss, "entropy") == [0.0]
    made.entropy = torch.tensor(9.9, dtype=torch.float64, requires_grad=True)
    assert safe(batch).extra["coefficient"] == near(0.1 * 0.2 * 0.5)
    assert safe(batch, kl_smoothed=0.3).extra["coefficient"] == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_safe_reductions(seed):
    batch = random_batch(seed)
    found = safe(batch, kl_threshold=math.inf)  # "thr=inf -> PPO with soft-min critic"
    raw = []
    for row, baseline in zip(trajectories(batch), found.extra["baseline"]):
        raw += [total(row) - baseline for _ in sampled(row)]
    raw = torch.tensor(raw, dtype=torch.float64)
    white = (raw - raw.mean()) / torch.sqrt(raw.var() + 1e-8)
    assert found.advantage == near(white.tolist())
    expected = []
    for one, a in zip(tokens(batch), found.advantage):
        ratio = math.exp(one.logp.item() - one.behaviour)
        flat = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)
        expected.append(0.0 if flat else -a * ratio / len(raw))
    assert gradients(batch, found.loss) == near(expected)
    # A tiny temperature: the minimum of the two heads
    baselines = safe(batch, temperature=1e-7).extra["baseline"]
    for row, baseline in zip(trajectories(batch), baselines):
        if sampled(row):
            assert baseline == near(min(sampled(row)[0].old_value, sampled(row)[0].old_twin), 1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# AEPO


@pytest.mark.parametrize("seed", range(5))
def test_aepo_reductions(seed):
    batch = random_batch(seed)
    lots = [row.lot for row in trajectories(batch)]
    # "alpha=0" -> the gain of the ordinary rows alone, still over all tokens
    cold = [[row for row in group if row.lot >= 0.25] for group in batch]
    count, fewer = (len(list(tokens(some))) for some in (batch, cold))
    ours, theirs = aepo(batch, alpha=0.0), dapo(cold, high=0.2)
    assert ours.loss.item() * count == near(theirs[1].item() * fewer)
    found = [one * fewer / count for one in gradients(cold, theirs[1])]
    assert gradients(cold, ours.loss) == near(found)
    # "no replaced rows -> GRPO", by tokens
    for row in trajectories(batch):
        row.lot = 0.25
    ours, theirs = aepo(batch), dapo(batch, high=0.2)
    assert not any(ours.extra["tempered"])
    assert ours.advantage == near(theirs[0]) and ours.loss.item() == near(theirs[1].item())
    same(batch, ours.loss, theirs[1])
    # Everything tempered: positive-only REINFORCE
    for row in trajectories(batch):
        row.lot = 0.0
    ours = aepo(batch, alpha=2.0)
    assert ours.advantage == near([2.0 if one > 0.05 else 0.0 for one in theirs[0]])
    assert gradients(batch, ours.loss) == near([-a / count for a in ours.advantage])
    assert any(lot < 0.25 for lot in lots)


def test_aepo_by_hand():
    group = [one_turn(r, [1.0], lot=lot) for r, lot in ((1, 0.1), (0, 0.2), (1, 0.9), (0, 0.25), (0, 0.5))]
    found = aepo([group])
    a, b = 2 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3)
    assert found.advantage == near([1, 0, a, b, b], 1e-5)
    assert found.extra["tempered"] == [True, True, False, False, False]
    # The tempered row has no ratio; the ordinary positive one is clipped, the negatives are not.
    assert gradients([group], found.loss) == near([-1 / 5, 0, 0, -b * math.e / 5, -b * math.e / 5], 1e-5)
    lone = aepo([[group[0], group[3]], [group[1]]])
    assert lone.advantage == near([1.0, 0.0, 0.0])


# ---------------------------------------------------------------------------------------------------------------------
# All methods


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_finite(method, overflow):
    acts = False
    for seed in range(20):
        batch = random_batch(seed, overflow=overflow)
        found = method(batch)
        assert found.loss.dtype == torch.float64 and found.loss.shape == ()
        assert len(found.advantage) == len(list(tokens(batch)))
        slopes = [slope for field in FIELDS for slope in gradients(batch, found.loss, field)]
        assert all(math.isfinite(one) for one in [*found.advantage, found.loss.item(), *slopes])
        acts = acts or any(slopes)
    assert acts
    again = method(random_batch(19, overflow=overflow))
    assert again.advantage == found.advantage and again.loss.item() == found.loss.item()


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens(method):
    empty: list[Batch] = [[], [[]], [[Trajectory([])]], [[Trajectory([Turn([], 1.0)]), Trajectory([Turn([], 0.0)])]]]
    for batch in empty:
        found = method(batch)
        assert found.advantage == [] and found.loss.item() == 0.0


BY_DIFFERENCES = [
    (ngrpo, ["logp"]),
    (dgpo, ["logp"]),
    (aspo, ["logp"]),
    (t_ppo, ["logp", "value"]),
    (epo_banded, ["logp", "entropy"]),
    (ppo_max, ["logp", "value"]),
    (safe, ["logp", "value", "twin"]),
    (aepo, ["logp"]),
]


@pytest.mark.parametrize(("method", "fields"), BY_DIFFERENCES)
def test_gradient_by_differences(method, fields):
    """Methods (or leaves) without a stop-gradient: the gradient is the slope of the loss."""
    batch = random_batch(5)
    for field in fields:
        found = gradients(batch, method(batch).loss, field)
        assert any(found)
        for one, gradient in zip(tokens(batch), found):
            held, step = getattr(one, field), 1e-6
            losses = []
            for sign in (1, -1):
                setattr(one, field, held.detach() + sign * step)
                losses.append(method(batch).loss.item())
            setattr(one, field, held)
            assert gradient == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("k", [0, 1, 4])
def test_see_upo_turn_by_differences(k):
    batch = random_batch(5)
    M = see_upo_advantage(batch)
    found = gradients(batch, see_upo_turn(batch, k, M, beta=0.1).loss)
    assert any(found)
    for one, gradient in zip(tokens(batch), found):
        held, losses = one.logp, []
        for sign in (1, -1):
            one.logp = held.detach() + sign * 1e-6
            losses.append(see_upo_turn(batch, k, M, beta=0.1).loss.item())
        one.logp = held
        assert gradient == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-6)
