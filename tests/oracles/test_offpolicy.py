"""The off-policy oracles against the golden numbers and the reductions that their cards state."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from . import offpolicy
from .objectives import dapo, dr_grpo, gae, grpo, gspo_token, mean, ppo, reinforce, rows, std, token_rewards, turn_ppo
from .offpolicy import (
    alp,
    alp_sequence,
    bapo,
    bounded_target,
    bpo,
    divide,
    dual_step,
    fiberpo,
    fiberpo_domain,
    gbpo,
    median,
    oblr_po,
    r2vpo,
    s_ppo,
    sapo,
    snr,
    so_grpo,
    st_ppo,
    topr,
    vcpo,
    z_scores,
)
from .records import Batch, Trajectory, Turn, gradients, random_batch, sampled, token, tokens, total, trajectories

METHODS = [
    *(st_ppo, s_ppo, so_grpo, bapo, topr, sapo, fiberpo, fiberpo_domain),
    *(r2vpo, gbpo, bpo, vcpo, oblr_po, alp, alp_sequence),
]
SEEDS = range(20)
WIDE = 1e12  # a clip range that nothing leaves


def near(numbers, tolerance: float = 1e-9):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)


def one_turn(reward: float, log_ratios: list[float], **more) -> Trajectory:
    return Trajectory([Turn([token(-2.0 + one, behaviour=-2.0) for one in log_ratios], reward)], **more)


def trio(log_ratios: list[float], other: list[float] | None = None) -> Batch:
    """Rewards 1, 0, -1: advantages 1, 0, -1 (up to the eps of the z-score)."""
    return [[one_turn(1, log_ratios), one_turn(0, [0.0]), one_turn(-1, other or [0.0])]]


def on_policy(batch: Batch) -> Batch:
    for one in tokens(batch):
        one.behaviour = one.logp.item()
        one.proximal = one.logp.item()
    return batch


def calm(seed: int) -> Batch:
    """A random batch whose log-ratios stay within a few nats (no clamp acts)."""
    batch = random_batch(seed)
    for one in tokens(batch):
        one.behaviour = max(min(one.behaviour, one.logp.item() + 2.0), one.logp.item() - 2.0)
    return batch


def reshape(batch: Batch, single_tokens: bool) -> Batch:
    """One turn per trajectory or one token per turn; the rewards stay on the tokens that were paid."""
    out = []
    for group in batch:
        made = []
        for trajectory in group:
            paid = token_rewards(trajectory)
            found = sampled(trajectory)
            if single_tokens and found:
                turns = [Turn([one], reward) for one, reward in zip(found, paid)]
            else:
                turns = [Turn(found, total(trajectory))]
            made.append(Trajectory(turns, norm=trajectory.norm, domain=trajectory.domain))
        out.append(made)
    return out


def lengths(batch: Batch) -> list[int]:
    return [len(sampled(trajectory)) for trajectory in trajectories(batch) for _ in sampled(trajectory)]


def ratios(batch: Batch) -> list[float]:
    return [math.exp(one.logp.item() - one.behaviour) for one in tokens(batch)]


# ---------------------------------------------------------------------------------------------------------------------
# All methods


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("overflow", [False, True])
def test_finite(method, overflow):
    for seed in SEEDS:
        batch = random_batch(seed, overflow=overflow)
        found = method(batch)
        assert len(found.advantage) == len(list(tokens(batch)))
        assert all(math.isfinite(one) for one in found.advantage)
        assert found.loss.dtype == torch.float64 and math.isfinite(found.loss.item())
        for field in ("logp", "value", "twin", "entropy"):
            assert all(math.isfinite(one) for one in gradients(batch, found.loss, field))
        for extra in found.extra.values():
            if isinstance(extra, torch.Tensor):
                extra = extra.item()
            many = extra if isinstance(extra, (list, tuple)) else [extra]
            assert all(math.isfinite(one) for one in many)


@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_one_has_no_advantage(method):
    batch = [[one_turn(1.0, [0.1, -0.2])]]
    if method in (st_ppo, s_ppo, bpo, topr):
        pytest.skip("not relative to a group")
    assert method(batch).advantage == [0.0, 0.0]


@pytest.mark.parametrize("method", METHODS)
def test_only_tokenless(method):
    found = method([[Trajectory([Turn([], 1.0)])]])
    assert found.advantage == [] and found.loss.item() == 0.0


def test_the_names_are_all_there():
    for name in ("divide", "dual_step", "snr"):
        assert callable(getattr(offpolicy, name))
    assert inspect.signature(bapo).parameters["statistic"].default == "gradient"


# ---------------------------------------------------------------------------------------------------------------------
# ST-PPO, S-PPO, SO-GRPO


def golden_turns() -> Batch:
    # gamma = lambda = 1 without rewards: the raw advantage is -old_value; whitening keeps the signs.
    made = [
        token(-2.0 + one, behaviour=-2.0, old_value=value)
        for one, value in zip([0.2, 0.0, 0.6, 0.2], [-1.0, -1.0, -1.0, 1.0])
    ]
    return [[Trajectory([Turn(made[:2], 0.0), Turn(made[2:], 0.0)])]]


def test_st_ppo_golden(side):
    batch = golden_turns()
    found = side(st_ppo, batch)
    assert found.advantage == near([0.5, 0.5, 0.5, -1.5], 1e-6)
    if not side.recipe:
        assert found.extra["clipped"] == [False, False, True, False]
    wide = gradients(batch, side(st_ppo, batch, clip=WIDE, ours={"clip": 1.0}).loss)
    weights = [-one * 4 / advantage for one, advantage in zip(wide, found.advantage)]
    assert weights == near([1.10517, 1.10517, 1.49182, 1.49182], 1e-5)
    if not side.recipe:
        assert gradients(batch, found.extra["bias"]) == near([0, 0, 1.4918247 * found.advantage[2] / 4, 0], 1e-7)


@pytest.mark.parametrize("method", [st_ppo, s_ppo, so_grpo])
def test_bias_identity(method):
    # grad J_clip = grad J_unclipped - C, with J = -loss
    seen = 0
    for seed in SEEDS:
        batch = random_batch(seed)
        found = method(batch)
        clipped = gradients(batch, found.loss)
        free = gradients(batch, method(batch, clip=WIDE).loss)
        bias = gradients(batch, found.extra["bias"])
        assert [-one for one in clipped] == near([-one - c for one, c in zip(free, bias)])
        assert all((c != 0) <= b for c, b in zip(bias, found.extra["clipped"]))
        seen += any(found.extra["clipped"])
    assert seen > 10


def test_without_the_normaliser_it_is_turn_ppo():
    for seed in SEEDS:
        batch = random_batch(seed, overflow=True)
        advantages, loss = turn_ppo(batch)
        found = st_ppo(batch)
        assert found.advantage == near(advantages)
        assert found.loss.item() == near(loss.item())
        for field in ("logp", "value"):
            assert gradients(batch, found.loss, field) == near(gradients(batch, loss, field))


def test_one_token_per_turn_is_the_token_ratio():
    for seed in SEEDS:
        batch = reshape(random_batch(seed), single_tokens=True)
        turn, single = st_ppo(batch), s_ppo(batch)
        assert turn.loss.item() == near(single.loss.item())
        assert turn.extra["clipped"] == single.extra["clipped"]
        assert gradients(batch, turn.loss) == near(gradients(batch, single.loss))
        assert gradients(batch, turn.extra["bias"]) == near(gradients(batch, single.extra["bias"]))


def test_s_ppo_is_ppo_on_equal_lengths():
    batch = [[one_turn(reward, [0.5, -0.1, -0.4]) for reward in (1.0, 0.0, 0.3)]]
    advantages, loss = ppo(batch, lam=1.0)
    found = s_ppo(batch)
    assert found.advantage == near(advantages)
    assert found.loss.item() == near(loss.item())
    assert gradients(batch, found.loss) == near(gradients(batch, loss))
    assert gradients(batch, found.loss, "value") == near(gradients(batch, loss, "value"))


def test_one_turn_is_the_gspo_ratio():
    for seed in SEEDS:
        batch = reshape(calm(seed), single_tokens=False)
        found = so_grpo(batch, clip=0.2)
        advantages, loss = gspo_token(batch, low=0.2, high=0.2)
        assert found.advantage == near(advantages)
        assert found.loss.item() == near(loss.item())
        assert gradients(batch, found.loss) == near(gradients(batch, loss))


def test_divide():
    assert divide(5.0, False) == 1.0 and divide(0.0, False) == 1.0
    assert divide(0.25, True) == 1.0 and divide(4.0, True) == 0.25
    assert divide(0.25, True, floor=0.1) == 4.0
    batch = [[one_turn(reward, [0.05, -0.05]) for reward in (1.0, 0.0)]]
    for method in (st_ppo, s_ppo, so_grpo):
        found = method(batch)
        assert not any(found.extra["clipped"]) and gradients(batch, found.extra["bias"]) == [0.0] * 4


# ---------------------------------------------------------------------------------------------------------------------
# BAPO


@pytest.mark.parametrize(
    ("statistic", "bounds", "share"), [("gradient", (0.6, 1.6), 1.58 / 3.53), ("value", (0.9, 3), 1.58 / 4.43)]
)
def test_bapo_golden(side, statistic, bounds, share):
    # The share does not depend on the scale of A: a pair has advantages +-0.7071. No ratio sits on a bound that the search
    # reaches (0.6, 0.9, 1.6, 3), where rounding would decide: 1.58 / (1.58 + 0.95 + 1.0), or with 0.9 for the clipped 0.5.
    batch = [[one_turn(1, [math.log(1.58)]), one_turn(0, [math.log(one) for one in (0.95, 0.5, 1.0)])]]
    found = side(bapo, batch, statistic=statistic)
    if not side.recipe:
        assert found.extra["bounds"] == near(bounds)
        assert found.extra["share"] == near(share)
    weights = [-one * 4 / a for one, a in zip(gradients(batch, found.loss), found.advantage)]
    assert weights == near([1.58, 0.95, 0.0, 1.0])


def test_bapo_fixed_bounds_are_clip_higher():
    for seed in SEEDS:
        for statistic in ("gradient", "value"):
            batch = random_batch(seed)
            found = bapo(batch, statistic, low=0.8, high=1.28, low_end=0.8, high_end=1.28)
            loss = dapo(batch, dual=3.0)[1]
            assert found.extra["bounds"] == (0.8, 1.28)
            assert found.loss.item() == near(loss.item())
            assert gradients(batch, found.loss) == near(gradients(batch, loss))


def test_bapo_search():
    moved = 0
    for seed in SEEDS:
        for statistic in ("gradient", "value"):
            batch = random_batch(seed)
            assert bapo(batch, statistic, rho0=0.0).extra["bounds"] == (0.6, 1.2)
            found = bapo(batch, statistic)
            low, high = found.extra["bounds"]
            assert found.extra["share"] >= 0.4 or (low, high) == near((0.9, 3.0))
            assert low == 0.6 or high == near(3.0)  # c_high first
            moved += high > 1.2
    assert moved
    assert bapo([[one_turn(1.0, [0.0])]]).extra == {"bounds": (0.6, 1.2), "share": 1.0}
    last = bapo([[one_turn(1, [9.0]), one_turn(0, [0.0])]], high_end=1.33, low_end=0.61, step_high=0.05).extra
    assert last["bounds"] == near((0.61, 1.33)) and last["share"] == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# TOPR


def test_topr_golden(side):
    batch = [[one_turn(-1, [-0.3, -0.2]), one_turn(-1, [0.1, 0.2]), one_turn(1, [-3.0]), one_turn(0, [-3.0])]]
    found = side(topr, batch)
    if not side.recipe:
        assert found.extra["alpha"] == near([0.60653, 1, 1, 1], 1e-5)
    assert found.advantage == [-1, -1, -1, -1, 1, 0]
    assert gradients(batch, found.loss) == near([0.60653 / 4] * 2 + [0.25] * 2 + [-0.25, 0.0], 1e-5)
    # alpha goes by the reward, the advantage by the baseline
    moved = side(topr, batch, baseline=0.5)
    assert moved.extra == found.extra and moved.advantage == [-1.5] * 4 + [0.5, -0.5]


def test_topr_reductions():
    for seed in SEEDS:
        batch = on_policy(random_batch(seed))
        assert gradients(batch, topr(batch).loss) == near(gradients(batch, reinforce(batch)[1]))
        batch = random_batch(seed)
        for trajectory in trajectories(batch):
            for turn in trajectory.turns:
                turn.reward = abs(turn.reward)
        assert gradients(batch, topr(batch).loss) == near(gradients(batch, reinforce(batch)[1]))


# ---------------------------------------------------------------------------------------------------------------------
# SAPO


def test_sapo_golden(side):
    for log, expected in ((math.log(1.5), (2.48984, 1.41002)), (math.log(0.5), (1.51016, 0.47001))):
        batch = trio([log])
        found = side(sapo, batch)
        base = 2 / 1.05  # f at r = 1 is 2/tau; of the other two only the third has an advantage
        assert -found.loss.item() * 3 + base == near(expected[0], 1e-5)
        assert -gradients(batch, found.loss)[0] * 3 == near(expected[1], 1e-5)
    batch = trio([0.0], [math.log(1.5)])
    found = side(sapo, batch)
    assert -found.loss.item() * 3 - 2 == near(-2.39359, 1e-5)
    assert gradients(batch, found.loss)[2] * 3 == near(1.40121, 1e-5)


def test_sapo_reductions():
    for seed in SEEDS:
        batch = on_policy(random_batch(seed))
        n = rows(batch)
        found = sapo(batch)
        plain = [-a / size / n for a, size in zip(found.advantage, lengths(batch))]
        assert gradients(batch, found.loss) == near(plain)
        batch = calm(seed)
        free = [-a * r / size / n for a, r, size in zip(found.advantage, ratios(batch), lengths(batch))]
        assert gradients(batch, sapo(batch, pos=1e-6, neg=1e-6).loss) == near(free, 1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# FiberPO


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ([0.02, -0.01, 0.03, 0.0], [1.0202, 0.99005, 1.03045, 1.0]),
        ([0.30, -0.02, 0.10, 0.04], [1.16183, 1.05127, 1.10517, 1.07251]),
        ([0.36, -0.02, 0.10, 0.05], [1.13883, 1.03045, 1.06449, 1.05127]),
    ],
)
def test_fiberpo_golden(side, logs, expected):
    batch = trio(logs)
    found = side(fiberpo, batch)
    if not side.recipe:
        assert found.extra["gated"] == near([*expected, 1.0, 1.0], 1e-5)
    assert found.loss.item() == near(-(sum(expected) / 4 - 1) / 3, 1e-5)
    batch = [[one_turn(1, logs)]]
    if not side.recipe:
        assert fiberpo_domain(batch).extra["gated"] == near(expected, 1e-5)


def jacobian(logs: list[float], plus: float, minus: float, eps: float) -> list[list[float]]:
    """Card: "dG_i/dr_j = (G_i/r_j){ 1[|u_i|<=eps]1[i=j] + (1/T)(g'^{(s_j)} - 1[|u_i|<=eps]1[s_i=s_j]
    - 1[|v_i|<=eps]1[s_i!=s_j]) }", here times r_j: by the log-probability."""
    size = len(logs)
    up = sum(max(one, 0.0) for one in logs) / size
    down = sum(max(-one, 0.0) for one in logs) / size

    def slope(x: float, budget: float) -> tuple[float, float]:
        if abs(x) <= budget:
            return x, 1.0
        if abs(x) < (1 + 1 / size) * budget:
            return (size + 1) * budget - size * x, -float(size)
        return 0.0, 0.0

    (g_up, d_up), (g_down, d_down) = slope(up, plus), slope(down, minus)
    out = []
    for i, one in enumerate(logs):
        s = 1 if one >= 0 else -1
        u = one - s * (up if s > 0 else down)
        v = -s * (down if s > 0 else up)
        value = math.exp(g_up - g_down + min(max(u, -eps), eps) - min(max(v, -eps), eps))
        row = []
        for j, other in enumerate(logs):
            s_j = 1 if other >= 0 else -1
            found = (1.0 if abs(u) <= eps else 0.0) * (i == j)
            inner = d_up if s_j > 0 else d_down
            inner -= (abs(u) <= eps) * (s == s_j)
            inner -= (abs(v) <= eps) * (s != s_j)
            row.append(value * (found + inner / size))
        out.append(row)
    return out


def test_fiberpo_jacobian():
    for seed in SEEDS:
        batch = random_batch(seed)
        found = fiberpo(batch)
        n = rows(batch)
        expected = []
        for trajectory, advantage in zip(trajectories(batch), z_scores(batch)):
            if not sampled(trajectory):
                continue
            logs = [one.logp.item() - one.behaviour for one in sampled(trajectory)]
            table = jacobian(logs, 0.12, 0.05, 0.04)
            for j in range(len(logs)):
                expected.append(-sum(row[j] for row in table) * advantage / len(logs) / n)
        assert gradients(batch, found.loss) == near(expected)


@pytest.mark.parametrize(
    "logs", [[0.36, -0.02, 0.10, 0.05], [0.0, -0.16, -0.06, 0.02], [0.36, -0.12, -0.10, 0.17], [0.5, 0.0, 0.01, -0.3]]
)
def test_fiberpo_jacobian_of_the_rollback(logs):
    # S+ rolls back; S- rolls back; both; both beyond
    batch = trio(logs)
    table = jacobian(logs, 0.12, 0.05, 0.04)
    expected = [-sum(row[j] for row in table) / 4 / 3 for j in range(4)]
    assert gradients(batch, fiberpo(batch).loss)[:4] == near(expected, 1e-5)


def test_fiberpo_reductions():
    for seed in SEEDS:
        batch = on_policy(random_batch(seed))
        n = rows(batch)
        for method in (fiberpo, fiberpo_domain):
            found = method(batch)
            assert found.extra["gated"] == near([1.0] * len(found.advantage))
            plain = [-a / size / n for a, size in zip(found.advantage, lengths(batch))]
            assert gradients(batch, found.loss) == near(plain)
        batch = calm(seed)
        for method in (fiberpo, fiberpo_domain):
            # everything inside the budgets: G = r
            found = method(batch, plus=WIDE, minus=WIDE, eps=WIDE)
            assert found.extra["gated"] == near(ratios(batch))
            free = [-a * r / size / n for a, r, size in zip(found.advantage, ratios(batch), lengths(batch))]
            assert gradients(batch, found.loss) == near(free)
            # no budget, no residual: the geometric mean ratio without a clip
            found = method(batch, plus=WIDE, minus=WIDE, eps=0.0)
            loss = gspo_token(batch, low=WIDE, high=WIDE)[1]
            assert found.loss.item() == near(loss.item())
            assert gradients(batch, found.loss) == near(gradients(batch, loss))


def test_fiberpo_domain_levels():
    # Three lone trajectories, two domains. Domain 0: S+ of .04 and .10, mean .07; both groups and trajectories pass.
    batch = [
        [one_turn(1, [0.04, 0.04], domain=0)],
        [one_turn(1, [0.10], domain=0)],
        [one_turn(1, [0.20, 0.0], domain=1)],
    ]
    # The residuals vanish but for the last (u = .10 and -.10, clipped at .04).
    expected = [math.exp(0.04)] * 2 + [math.exp(0.10)] + [math.exp(0.14), math.exp(0.06)]
    assert fiberpo_domain(batch).extra["gated"] == near(expected)
    # C = .05: S_D = .07, T_D = 3 is beyond (1+1/3) C = .0667 -> 0; S_g - S_D = -+.03 passes; S_D = .10 -> 0.
    expected = [math.exp(-0.03)] * 2 + [math.exp(0.03)] + [math.exp(0.04), math.exp(-0.04)]
    assert fiberpo_domain(batch, plus=0.05).extra["gated"] == near(expected)
    # C = .06: S_D = .07 rolls back to 4 * .06 - 3 * .07 = .03.
    expected = [math.exp(0.0)] * 2 + [math.exp(0.06)] + [math.exp(0.04), math.exp(-0.04)]
    assert fiberpo_domain(batch, plus=0.06).extra["gated"] == near(expected)
    # A drift below the mean keeps its sign in the rollback: S_tau = 0, .10; S_g = S_D = .05; C = .045, T = 1, 1, 2.
    batch = [[one_turn(1, [0.0]), one_turn(0, [0.10])]]
    # g(.05, .045, 2) = 3*.045 - 2*.05 = .035; g(-.05, .045, 1) = -(2*.045 - .05) = -.04; g(+.05) = .04
    expected = [math.exp(0.035 - 0.04), math.exp(0.035 + 0.04)]
    assert fiberpo_domain(batch, plus=0.045).extra["gated"] == near(expected)


# ---------------------------------------------------------------------------------------------------------------------
# R2VPO


def test_r2vpo_golden(side):
    batch = trio([math.log(0.5), math.log(1.5)])
    found = side(r2vpo, batch, lam=1.0)
    assert [-one * 4 for one in gradients(batch, found.loss)[:2]] == near([1.0, 0.0], 1e-5)
    if not side.recipe:
        assert found.extra["violation"] == near(0.5 / 4)
    # equilibrium r* = 1 + A/(2 lambda)
    batch = trio([math.log(1 + 1 / 0.8)])
    assert gradients(batch, side(r2vpo, batch, lam=0.4).loss)[0] == near(0.0, 1e-5)
    assert dual_step(0.04, 0.12) == near(0.041)
    assert dual_step(0.0001, 0.0) == 0.0


def test_r2vpo_reductions():
    for seed in SEEDS:
        batch = calm(seed)
        found = r2vpo(batch, lam=0.0)
        count = len(found.advantage)
        assert gradients(batch, found.loss) == near([-a * r / count for a, r in zip(found.advantage, ratios(batch))])
        on_policy(batch)
        for lam in (0.0, 0.04, 3.0):
            found = r2vpo(batch, lam=lam)
            assert gradients(batch, found.loss) == near([-a / count for a in found.advantage])
            assert found.extra["violation"] == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# GBPO and BPO


def test_bounded_target_golden():
    for a, expected in ((1.0, 1.3), (0.0, 1.0), (1e-3, 1.13864), (-1.0, 0.7)):
        assert bounded_target(a / 1e-3, 0.3, 0.3) == near(expected, 1e-5)
        # through the method: one token, reward 1, Q = 1, U = 1 - a
        batch = [[Trajectory([Turn([token(-1.0, old_twin=1.0 - a)], 1.0)])]]
        assert bpo(batch).extra["target"] == near([expected], 1e-5)


def test_gbpo_golden(side):
    batch = [[one_turn(reward, [0.0]) for reward in (1, 0, 0, 0)]]
    found = side(gbpo, batch)
    assert found.advantage == near([1.5, -0.5, -0.5, -0.5], 1e-5)
    if not side.recipe:
        assert found.extra["target"] == near([1.3, 1, 1, 1])
    assert found.loss.item() == near(0.3 * 1.5 / 4, 1e-5)
    assert gradients(batch, found.loss) == near([-1.5 / 4, 0, 0, 0], 1e-5)
    # numerators [2, 0, 0, 0]: with temperature 1 the first target is 1 + .3 (2 sigma(2) - 1)
    if not side.recipe:
        assert side(gbpo, batch, temperature=1.0).extra["target"][0] == near(1 + 0.3 * math.tanh(1.0), 1e-5)
    assert [median([3.0, 1.0, 2.0]), median([4.0, 1.0, 2.0, 3.0])] == [2.0, 2.5]


def test_gbpo_reductions():
    for seed in SEEDS:
        batch = random_batch(seed)
        found = gbpo(batch, temperature=1e-12)
        count = len(found.advantage)
        at = 0
        slopes = gradients(batch, found.loss)
        for group in batch:
            rewards = [total(trajectory) for trajectory in group]
            for trajectory in group:
                side = total(trajectory) - median(rewards)
                for one in sampled(trajectory):
                    a, target, slope = found.advantage[at], found.extra["target"][at], slopes[at]
                    at += 1
                    r = math.exp(one.logp.item() - one.behaviour)
                    if len(group) == 1:
                        assert slope == 0.0
                        continue
                    # lambda -> 0: target 1 + eps sign(a)
                    if abs(side) > 1e-6:
                        assert target == near(1 + 0.3 * math.copysign(1, side))
                    # inside the bounds: unclipped PPO where the signs agree; outside the sign reverses
                    if side * a > 1e-9:
                        outside = (r > 1.3) if a > 0 else (r < 0.7)
                        assert slope == near((a if outside else -a) * r / count)
        # on-policy: -sign(r* - 1) |A|
        on_policy(batch)
        found = gbpo(batch)
        expected = []
        for a, target in zip(found.advantage, found.extra["target"]):
            expected.append(-abs(a) * ((target > 1) - (target < 1)) / count)
        assert gradients(batch, found.loss) == near(expected)


def test_bpo_parts():
    batch = [[Trajectory([Turn([token(-1.0, behaviour=-1.2, value=0.3, old_value=0.4, twin=0.2, old_twin=0.9)], 1.0)])]]
    found = bpo(batch)
    assert found.advantage == near([0.6])
    assert found.extra["target"] == near([1.3])
    policy = abs(math.exp(0.2) - 1.3) * 0.6
    soft = math.log(1 + math.exp(0.8)) - 0.4
    assert found.loss.item() == near(policy + 0.5 * 0.49 + 0.5 * soft)
    assert gradients(batch, found.loss) == near([-0.6 * math.exp(0.2)])
    assert gradients(batch, found.loss, "value") == near([0.5 * 2 * -0.7])
    assert gradients(batch, found.loss, "twin") == near([-0.5 * (1 / (1 + math.exp(-0.8)) - 0.5)])
    assert gradients(batch, found.loss, "entropy") == [0.0]


def test_bpo_reductions():
    for seed in SEEDS:
        batch = on_policy(random_batch(seed))
        for one in tokens(batch):
            one.old_twin = one.old_value  # sign(A) = sign(a~)
        found = bpo(batch)
        raw = []
        for trajectory in trajectories(batch):
            raw.extend(gae(token_rewards(trajectory), [one.old_value for one in sampled(trajectory)], 1.0, 0.95))
        assert found.advantage == near(raw)
        assert gradients(batch, found.loss) == near([-a / len(raw) for a in raw])


# ---------------------------------------------------------------------------------------------------------------------
# VCPO and OBLR-PO


def weighted(weights: list[float], squares: list[float], rewards: list[float]) -> Batch:
    return [
        [
            one_turn(reward, [math.log(weight)], norm=math.sqrt(square))
            for weight, square, reward in zip(weights, squares, rewards)
        ]
    ]


def set_proximal(batch: Batch) -> Batch:
    """Before any update: lp_old = lp."""
    for one in tokens(batch):
        one.proximal = one.logp.item()
    return batch


def test_vcpo_golden(side):
    if not side.recipe:
        found = vcpo(weighted([4, 1, 1, 1], [1] * 4, [1, 0, 0, 0]))
        assert found.extra["pace"] == near(0.80296, 1e-5)
        assert found.extra["pace"] ** 2 * 4 == near(2.57895, 1e-5)
    batch = set_proximal(weighted([2, 1, 1, 1], [1, 4, 1, 1], [1, 0, 1, 0]))
    found = side(vcpo, batch)
    if not side.recipe:
        assert found.extra["baseline"] == near([0.5])
    assert found.advantage == near([1, -1, 1, -1], 1e-5)  # population std .5
    assert gradients(batch, found.loss) == near([-0.5, 0.25, -0.25, 0.25], 1e-5)
    # without an update before, the weights of the baseline are those of lp_old, here w0 = 1
    batch = weighted([2, 1, 1, 1], [1, 4, 1, 1], [1, 0, 1, 0])
    if not side.recipe:
        assert side(vcpo, batch).extra["baseline"] == near([2 / 7])
        assert side(vcpo, weighted([1] * 4, [1, 4, 1, 1], [1, 0, 1, 0])).extra["baseline"] == near([0.28571], 1e-5)
        assert side(vcpo, weighted([1] * 4, [0] * 4, [1, 0, 1, 1])).extra["baseline"] == near([0.75])
    # the weight of the gradient is capped, that of the pace is not
    batch = weighted([100, 1], [1, 1], [1, 0])
    assert gradients(batch, side(vcpo, batch).loss) == near([-4, 0.5], 1e-5)
    if not side.recipe:
        assert side(vcpo, batch).extra["pace"] == near(math.sqrt(101**2 / 10001 / 2))


def test_vcpo_reductions():
    for seed in SEEDS:
        batch = on_policy(random_batch(seed))
        found = vcpo(batch)
        assert found.extra["pace"] == near(1.0)
        assert found.extra["baseline"] == near(oblr_po(batch).extra["baseline"])
        for trajectory in trajectories(batch):
            trajectory.norm = 1.7
        found = vcpo(batch)
        assert found.extra["baseline"] == near([mean([total(one) for one in group]) for group in batch])
        # GRPO but for the population std
        plain = gradients(batch, grpo(batch, beta=0.0)[1])
        scales = []
        for group in batch:
            rewards = [total(one) for one in group]
            size = len(group)
            sample = std(rewards) if size > 1 else 0.0
            scale = (sample + 1e-6) / (sample * math.sqrt((size - 1) / size) + 1e-6)
            scales.extend([scale] * sum(len(sampled(one)) for one in group))
        assert gradients(batch, found.loss) == near([one * scale for one, scale in zip(plain, scales)])
    lone = vcpo(weighted([math.exp(15), 1, 1, 1], [1] * 4, [1, 0, 0, 0]))
    assert lone.extra["pace"] == near(1 / math.sqrt(4), 1e-5)


def test_oblr_golden(side):
    batch = weighted([1] * 4, [1, 4, 1, 1], [1, 0, 1, 0])
    found = side(oblr_po, batch)
    if not side.recipe:
        assert found.extra["baseline"] == near([0.28571], 1e-5)
    assert found.advantage == near([5 / 7, -2 / 7, 5 / 7, -2 / 7])


def test_oblr_equal_norms_are_dr_grpo():
    for seed in SEEDS:
        batch = random_batch(seed, overflow=True)
        for trajectory in trajectories(batch):
            trajectory.norm = 0.6
        advantages, loss = dr_grpo(batch, length=1)
        found = oblr_po(batch)
        assert found.advantage == near(advantages)
        assert found.loss.item() == near(loss.item())
        assert gradients(batch, found.loss) == near(gradients(batch, loss))


def test_snr():
    assert snr([[1.0, 2.0], [1.0, 2.0]]) == 1.0
    assert snr([[1.0]]) == 1.0 and snr([[0.0], [0.0]]) == 1.0
    assert snr([[1.0], [-1.0]]) == 0.0
    # g = 2; deviations 1, 0, 1: 2/3 over K-1 = 2 -> 1/3
    assert snr([[1.0], [2.0], [3.0]]) == near(4 / (4 + 1 / 3))


# ---------------------------------------------------------------------------------------------------------------------
# ALP


def test_alp_bounds():
    batch = trio([math.log(4.5), math.log(3.5)], [math.log(0.4), math.log(0.6)])
    assert gradients(batch, alp(batch).loss) == near([0, -3.5 / 5, 0, 0, 0.6 / 5], 1e-5)
    for seed in SEEDS:
        batch = random_batch(seed, overflow=True)
        loss = dapo(batch, low=0.5, high=3.0)[1]
        assert gradients(batch, alp(batch).loss) == near(gradients(batch, loss))
        assert alp(batch).loss.item() == near(loss.item())


def test_alp_sequence_is_gspo_with_other_bounds():
    for seed in SEEDS:
        batch = calm(seed)
        found = alp_sequence(batch)
        loss = gspo_token(batch, low=0.5, high=3.0)[1]
        assert found.loss.item() == near(loss.item())
        assert gradients(batch, found.loss) == near(gradients(batch, loss))
