"""The reweighting oracles against the golden numbers and the reductions that their specification cards state."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest

from .objectives import constant, dapo, dr_grpo, grpo, mean
from .records import Batch, Trajectory, Turn, gradients, random_batch, sampled, token, tokens, total, trajectories
from .result import Result
from .reweight import (
    asym_re,
    base_share,
    capo,
    clip_cov,
    covariances,
    curvature_sums,
    entropy_changes,
    hapo,
    k2,
    kimi_opmd,
    kl_cov,
    opmd,
    predicted,
    rec_one_side,
    rec_ring,
    rec_sequence,
    rec_two_side,
    red_drop,
    red_weight,
    remix,
    rep_forward,
    steer,
)

METHODS = {
    "rec_one_side": rec_one_side,
    "rec_one_side_plain": partial(rec_one_side, weighted=False),
    "rec_two_side": rec_two_side,
    "rec_ring": rec_ring,
    "rec_sequence": rec_sequence,
    "red_weight": red_weight,
    "red_drop": red_drop,
    "kimi_opmd": kimi_opmd,
    "asym_re": asym_re,
    "rep_forward": rep_forward,
    "opmd": opmd,
    "remix": partial(remix, base_weight=0.7, kl_weight=0.1),
    "capo": capo,
    "clip_cov": partial(clip_cov, fraction=0.05, low_cov=0.1),
    "kl_cov": partial(kl_cov, fraction=0.1),
    "steer_linear": steer,
    "steer_exponential": partial(steer, form="exponential"),
    "hapo": hapo,
}
SEEDS = range(20)


def near(numbers, tolerance: float = 1e-9):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)


def one_turn(reward: float, log_ratios: list[float], lot: float = 0.0) -> Trajectory:
    return Trajectory([Turn([token(-2.0 + one, behaviour=-2.0) for one in log_ratios], reward)], lot=lot)


def pair(ratio: float) -> Batch:
    """Two trajectories of one token with the same ratio and advantages +.5 and -.5."""
    return [[one_turn(reward, [math.log(ratio)]) for reward in (1.0, 0.0)]]


def on_policy(seed: int) -> Batch:
    batch = random_batch(seed)
    for one in tokens(batch):
        one.behaviour = one.proximal = one.logp.item()
    return batch


# ---------------------------------------------------------------------------------------------------------------------
# Everything


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_finite(name, overflow):
    method = METHODS[name]
    for seed in SEEDS:
        batch = random_batch(seed, overflow=overflow)
        result = method(batch)
        assert isinstance(result, Result)
        assert len(result.advantage) == len(list(tokens(batch)))
        assert all(math.isfinite(one) for one in result.advantage)
        assert result.loss.dim() == 0 and math.isfinite(result.loss.item())
        for field in ("logp", "value", "twin", "entropy"):
            assert all(math.isfinite(one) for one in gradients(batch, result.loss, field))
        assert any(one != 0 for one in gradients(batch, result.loss))
        assert not any(gradients(batch, result.loss, "entropy"))


@pytest.mark.parametrize("name", METHODS)
def test_a_group_of_one_has_no_advantage(name):
    batch = [[one_turn(3.0, [0.1, -0.3])]]
    expected = 0.1 if name == "asym_re" else 0.0
    assert METHODS[name](batch).advantage == near([expected, expected])


@pytest.mark.parametrize("name", METHODS)
def test_without_tokens(name):
    batch = [[Trajectory([Turn([], 1.0)]), Trajectory([Turn([], 0.0)])]]
    result = METHODS[name](batch)
    assert result.advantage == []
    assert result.loss.item() == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_on_policy_is_reinforce(seed):
    # "on-policy r=1 ... equals -A grad lp (up to AGG) for ... REC ... STEER with unit weights"
    methods = [
        rec_one_side,
        rec_two_side,
        rec_ring,
        partial(rec_one_side, weighted=False),
        kimi_opmd,  # the k2 has no gradient at r = 1
        partial(remix, kl_weight=0.0),
        partial(clip_cov, fraction=0.0),
        kl_cov,  # neither has |l|
        partial(steer, lam_min=1.0, lam_max=1.0),
        partial(hapo, alpha=0.0, beta=0.0),
    ]
    for method in methods:
        batch = on_policy(seed)
        result = method(batch)
        count = len(result.advantage)
        assert gradients(batch, result.loss) == near([-one / count for one in result.advantage])


# ---------------------------------------------------------------------------------------------------------------------
# REC, RED, REP, OPMD, AsymRE


def test_opmd_golden(side):
    batch = [[one_turn(reward, [0.0]) for reward in (1, 0, 0, 0)]]
    result = side(opmd, batch, tau=1.0, baseline="soft")
    # The card's A is that before the division by 1 + tau.
    assert [2 * one for one in result.advantage] == near([0.64263, -0.35737, -0.35737, -0.35737], 1e-5)
    assert gradients(batch, result.loss) == near([-one / 4 for one in result.advantage])


def test_opmd_of_a_large_tau_is_the_mean():
    batch = [[one_turn(reward, [0.0]) for reward in (1, 0, 0.5, 0)]]
    assert [(1 + 1e5) * one for one in opmd(batch, tau=1e5, baseline="soft").advantage] == near(
        rec_one_side(batch).advantage, 1e-5
    )
    assert [2 * one for one in opmd(batch).advantage] == near(rec_one_side(batch).advantage)


def test_ring_golden(side):
    # "Ring with r=.3, A>0 keeps; r=.7, A>0 drops."
    expected = {0.3: [True, False], 0.7: [False, False], 1.0: [True, True], 2.0: [False, False], 3.5: [False, True]}
    for ratio, kept in expected.items():
        batch = pair(ratio)
        result = side(rec_ring, batch)
        assert [slope != 0.0 for slope in gradients(batch, result.loss)] == kept
        if not side.recipe:
            assert result.extra["kept"] == kept
    batch = pair(0.3)
    assert gradients(batch, side(rec_ring, batch).loss) == near([-0.5 * 0.3 / 2, 0.0])


def test_keep_rules():
    assert rec_one_side(pair(0.5)).extra["kept"] == [True, False]
    assert rec_one_side(pair(1.5)).extra["kept"] == [False, True]
    assert rec_two_side(pair(0.5)).extra["kept"] == [False, False]
    assert rec_two_side(pair(1.5)).extra["kept"] == [False, False]
    # The bounds themselves are kept: r = 2 and r = .5 exactly.
    for method in (rec_one_side, rec_two_side, partial(rec_ring, low_outer=1.0, high_outer=math.inf)):
        for ratio, low, high in ((2.0, 0.2, 1.0), (0.5, 0.5, 0.2)):
            batch = pair(ratio)
            for one in tokens(batch):
                one.logp.data.fill_(math.log(ratio))
                one.behaviour = 0.0
            assert math.exp(math.log(ratio)) == ratio
            assert method(batch, low=low, high=high).extra["kept"] == [True, True]
    # r = exp(mean l)
    batch = [[one_turn(1.0, [1.0, -1.0, 3e-4]), one_turn(0.0, [2e-3, -1e-3]), one_turn(0.0, [-1e-3])]]
    assert rec_sequence(batch).extra["kept"] == [True] * 3 + [True] * 2 + [False]
    assert gradients(batch, rec_sequence(batch).loss) == near([-2 / 27] * 3 + [1 / 18] * 2 + [0.0])


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_side_is_grpo_without_std(seed, overflow):
    # "REC-OneSide-IS -> gradient of GRPO without std and with token-mean". Dr.GRPO has the advantage and, with one
    # constant more, the mean; beyond +-20 its clamp stops the gradient while the detached form keeps it.
    batch = random_batch(seed, overflow=overflow)
    count = len(list(tokens(batch)))
    n = sum(1 for trajectory in trajectories(batch) if sampled(trajectory))
    advantages, loss = dr_grpo(batch, clip=0.2, length=count / n)
    result = rec_one_side(batch)
    assert result.advantage == near(advantages)
    for one, ours, theirs in zip(tokens(batch), gradients(batch, result.loss), gradients(batch, loss)):
        if abs(one.logp.item() - one.behaviour) <= 20:
            assert ours == near(theirs)
    # "OneSide-NoIS -> same support, weights 1"
    plain = rec_one_side(batch, weighted=False)
    assert plain.extra["kept"] == result.extra["kept"]
    expected = [-one * keep / count for one, keep in zip(result.advantage, result.extra["kept"])]
    assert gradients(batch, plain.loss) == near(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_ring_without_the_outer_part_is_two_side(seed):
    # "ring with e'=1,inf -> two-side"
    batch = random_batch(seed, overflow=True)
    ring = rec_ring(batch, low_outer=1.0, high_outer=math.inf)
    two = rec_two_side(batch)
    assert ring.loss.item() == near(two.loss.item())
    assert ring.extra == two.extra
    # Two-side is one-side less what it drops, and the ring lies between them.
    kept = zip(two.extra["kept"], rec_ring(batch).extra["kept"], rec_one_side(batch).extra["kept"])
    assert all(a <= b <= c for a, b, c in kept)


@pytest.mark.parametrize("seed", SEEDS)
def test_wide_bounds_keep_everything(seed):
    batch = random_batch(seed)
    wide = rec_one_side(batch, low=math.inf, high=math.inf)
    assert all(wide.extra["kept"])
    assert rec_two_side(batch, low=math.inf, high=math.inf).loss.item() == near(wide.loss.item())


@pytest.mark.parametrize("seed", SEEDS)
def test_asym_re_is_forward_kl(seed):
    # "AsymRE: ... forward-KL tau, identical to lowering the baseline by tau"
    batch = random_batch(seed, overflow=True)
    lowered = asym_re(batch, tau=0.3)
    forward = rep_forward(batch, tau=0.3)
    assert lowered.loss.item() == near(forward.loss.item())
    assert gradients(batch, lowered.loss) == near(gradients(batch, forward.loss))
    assert lowered.advantage == near([one + 0.3 for one in forward.advantage])
    # "forward-KL with tau -> adds SFT on all samples"
    count = len(forward.advantage)
    plain = gradients(batch, rep_forward(batch, tau=0.0).loss)
    assert gradients(batch, forward.loss) == near([one - 0.3 / count for one in plain])
    # Without a regulariser every one of them is the same plain method.
    assert gradients(batch, kimi_opmd(batch, tau=0.0).loss) == near(plain)
    assert gradients(batch, red_weight(batch, temperature=1e12).loss) == near(plain)


def test_kimi_opmd_k2():
    batch = [[one_turn(0.0, [0.3, -0.5])]]
    loss = kimi_opmd(batch, tau=0.1).loss
    assert loss.item() == near(0.1 * (0.09 + 0.25) / 2)
    assert gradients(batch, loss) == near([0.1 * 0.3, -0.1 * 0.5])
    batch = [[one_turn(0.0, [25.0])]]
    assert kimi_opmd(batch).loss.item() == near(0.1 * 400)
    assert gradients(batch, kimi_opmd(batch).loss) == [0.0]


def test_red_weight():
    batch = pair(1.5)
    assert gradients(batch, red_weight(batch, 0.5).loss) == near([-0.25 * math.exp(1), 0.25 * math.exp(-1)])


def test_red_drop():
    # Mean 3/5: two positives, three negatives; the negative of the smallest lot goes. New mean 3/4.
    rewards = [2.0, 1.0, 0.0, 0.0, 0.0]
    lots = [0.1, 0.2, 0.9, 0.3, 0.8]
    batch = [[one_turn(reward, [0.5] * (i + 1), lot) for i, (reward, lot) in enumerate(zip(rewards, lots))]]
    result = red_drop(batch)
    assert result.extra["kept"] == [True, True, True, False, True]
    advantage = [1.25] + [0.25] * 2 + [-0.75] * 3 + [0.0] * 4 + [-0.75] * 5
    assert result.advantage == near(advantage)
    assert gradients(batch, result.loss) == near([-one / 11 for one in advantage])
    # Balanced, or more positives, or all equal: nothing is dropped.
    for rewards in ([1.0, 0.0], [1.0, 1.0, 0.0], [0.1, 0.1, 0.1], [0.5]):
        batch = [[one_turn(reward, [0.5]) for reward in rewards]]
        assert all(red_drop(batch).extra["kept"])
        assert red_drop(batch).loss.item() == near(rep_forward(batch, tau=0.0).loss.item())


@pytest.mark.parametrize("seed", SEEDS)
def test_red_drop_balances(seed):
    batch = random_batch(seed)
    kept = iter(red_drop(batch).extra["kept"])
    for group in batch:
        rewards = [total(trajectory) for trajectory in group]
        keep = [next(kept) for _ in group]
        below = sum(1 for reward, yes in zip(rewards, keep) if yes and reward < mean(rewards))
        above = sum(1 for reward, yes in zip(rewards, keep) if yes and reward > mean(rewards))
        assert below <= above
        assert all(keep) or below == above


# ---------------------------------------------------------------------------------------------------------------------
# ReMix


def test_base_share_golden():
    assert [base_share(t) for t in (50, 51, 61, 100, 300)] == near([1, 0.9, 0.8, 0.5, 0.5])


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_remix_on_fresh_data_is_ppo(seed, overflow):
    # "i=0 -> c=1 -> PPO; p=0, m=1, lambda=1, T=inf -> PPO with base KL"
    batch = random_batch(seed, overflow=overflow)
    for one in tokens(batch):
        one.proximal = one.behaviour
    advantages, loss = dapo(batch, low=0.2, high=0.2)
    result = remix(batch, kl_weight=0.0)
    assert result.advantage == near(advantages)
    assert result.loss.item() == near(loss.item())
    assert gradients(batch, result.loss) == near(gradients(batch, loss))
    penalty = constant(0.0)
    for one in tokens(batch):
        penalty = penalty + 0.01 * k2(one.logp, one.reference) / len(advantages)
    result = remix(batch, base_weight=1.0, kl_weight=0.01)
    assert result.loss.item() == near((loss + penalty).item())
    assert gradients(batch, result.loss) == near(gradients(batch, loss + penalty))


def test_remix_window_and_kl():
    # c = 2: the window is (1.8, 2.2) for a ratio of 2.1, 2.5 and 1.5.
    for ratio, expected in ((2.1, [-2.1, 2.1]), (2.5, [0.0, 2.5]), (1.5, [-1.5, 0.0])):
        batch = pair(ratio)
        for one in tokens(batch):
            one.proximal = one.behaviour + math.log(2)
        size = math.sqrt(0.5)  # z-score of (1, 0)
        found = gradients(batch, remix(batch, kl_weight=0.0).loss)
        assert found == near([size * one / 2 for one in expected], 1e-5)
    batch = [[Trajectory([Turn([token(-1.0, reference=-1.5, previous=-0.8)], 1.0)])]]
    loss = remix(batch, base_weight=0.7, kl_weight=0.5).loss
    assert loss.item() == near(0.5 * (0.7 * 0.125 + 0.3 * 0.02))
    assert gradients(batch, loss) == near([0.5 * (0.7 * 0.5 - 0.3 * 0.2)])
    # KL card: "pi(y)=.5, ref(y)=.8: ... k2=.11045"
    assert k2(constant(math.log(0.5)), math.log(0.8)).item() == near(0.11045, 1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# CAPO


def moments(sums, advantage):
    s1, s2, s3 = sums
    change = advantage**2 * s1 + 0.5 * advantage * ((advantage * s1) ** 2 - advantage**2 * (s2 - s3**2))
    return change, 0.5 * (advantage * s1) ** 2


def test_capo_golden():
    # "SGD direction, V=2, d=1": u = v h^2 = [1.2,-1.2], v.u = .72
    ones = [[1.0], [1.0]]
    assert predicted([0.7, 0.3], 0, [2.0], 1.0, 0.01, ones) == near((0.00716544, 2.592e-5), 1e-12)
    sums = curvature_sums([0.7, 0.3], 0, [2.0], 0.01, ones)
    assert sums[0] == near(0.01 * 0.72)
    assert moments(sums, 1.0) == near((0.00716544, 2.592e-5), 1e-12)


def test_capo_sums_are_the_matrices():
    dice = random.Random(0)
    for _ in range(50):
        size, width = dice.randint(2, 6), dice.randint(1, 4)
        raw = [dice.random() for _ in range(size)]
        pi = [one / sum(raw) * dice.choice([1.0, 0.9]) for one in raw]
        hidden = [dice.gauss(0, 1) for _ in range(width)]
        precondition = [[dice.uniform(0.1, 3.0) for _ in range(width)] for _ in range(size)]
        action, advantage, eta = dice.randrange(size), dice.gauss(0, 1), dice.uniform(0.001, 1.0)
        sums = curvature_sums(pi, action, hidden, eta, precondition)
        assert moments(sums, advantage) == near(predicted(pi, action, hidden, advantage, eta, precondition), 1e-10)
        # "D=g (SGD) gives <g,D>=A^2|v|^2|h|^2"
        ones = [[1.0] * width for _ in range(size)]
        v = [(k == action) - pi[k] for k in range(size)]
        squares = sum(one * one for one in v) * sum(one * one for one in hidden)
        assert curvature_sums(pi, action, hidden, eta, ones)[0] == near(eta * squares)


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_capo_without_thresholds_is_grpo(seed, overflow):
    # "tau=inf -> base method"
    batch = random_batch(seed, overflow=overflow)
    advantages, loss = grpo(batch, clip=0.2, beta=0.0)
    result = capo(batch, tau_h=math.inf, tau_f=math.inf)
    assert all(result.extra["kept"])
    assert result.advantage == near(advantages)
    assert result.loss.item() == near(loss.item())
    assert gradients(batch, result.loss) == near(gradients(batch, loss))


def test_capo_mask():
    # A = +-.70711, so m_H ~ .5 s1 and m_F = .25 s1^2; a row without kept tokens leaves N.
    def row(reward, masses):
        return Trajectory([Turn([token(-1.0, curvature=(mass, 0.0, 0.0)) for mass in masses], reward)])

    batch = [[row(1.0, [0.001, 0.1, 0.001]), row(0.0, [0.1, 0.1])]]
    result = capo(batch)
    assert result.extra["kept"] == [True, False, True, False, False]
    size = math.sqrt(0.5)
    assert gradients(batch, result.loss) == near([-size / 2, 0.0, -size / 2, 0.0, 0.0], 1e-5)
    # Either threshold alone drops: s1 = .02 has m_H = .01+ and m_F = 1e-4.
    batch = [[row(1.0, [0.021]), row(0.0, [0.001])]]
    assert capo(batch, tau_f=math.inf).extra["kept"] == [False, True]
    assert capo(batch, tau_h=math.inf).extra["kept"] == [False, True]
    assert capo(batch, tau_h=math.inf, tau_f=math.inf).extra["kept"] == [True, True]
    # Nothing kept at all: no loss.
    assert capo(batch, tau_h=0.0).loss.item() == 0.0
    kept = [one for seed in SEEDS for one in capo(random_batch(seed)).extra["kept"]]
    assert 0 < sum(kept) < len(kept)


# ---------------------------------------------------------------------------------------------------------------------
# Clip-Cov and KL-Cov


def golden_cov(ratios=(1.0, 1.0, 1.0, 1.0), lots=(0.5, 0.5, 0.5, 0.5)) -> Batch:
    """The card's four tokens in two trajectories; the z-score of (1, 0) is +-.70711, not +-1."""
    made = [
        token(logp, behaviour=logp - math.log(ratio), lot=lot)
        for logp, ratio, lot in zip((-0.1, -2, -0.1, -3), ratios, lots)
    ]
    return [[Trajectory([Turn(made[:2], 1.0)]), Trajectory([Turn(made[2:], 0.0)])]]


def test_cov_golden():
    found = covariances(golden_cov(), [1.0, 1.0, -1.0, -1.0])
    assert found == near([1.2, -0.7, -1.2, 1.7])
    assert mean(found) == near(0.25)


def test_clip_cov_choice():
    # cov = .70711 [1.2, -.7, -1.2, 1.7] = [.8485, ., ., 1.2021]
    assert clip_cov(golden_cov()).extra["zeroed"] == [False, False, False, True]
    both = partial(clip_cov, low_cov=0.5)
    assert both(golden_cov(lots=(0.1, 0.5, 0.5, 0.9))).extra["zeroed"] == [True, False, False, False]
    assert both(golden_cov(lots=(0.9, 0.5, 0.5, 0.1))).extra["zeroed"] == [False, False, False, True]
    assert both(golden_cov(), fraction=0.5).extra["zeroed"] == [True, False, False, True]
    assert both(golden_cov(), fraction=1.0).extra["zeroed"] == [True, False, False, True]  # fewer candidates than n
    assert both(golden_cov(), high_cov=1.0).extra["zeroed"] == [True, False, False, False]
    assert clip_cov(golden_cov(), low_cov=3.0).extra["zeroed"] == [False] * 4
    # A token that PPO has clipped is no candidate: A>0 with r = 2.5; A<0 with r = .5 and a lower bound of .8.
    clipped = golden_cov(ratios=(2.5, 1.0, 1.0, 0.5))
    assert both(clipped, fraction=1.0).extra["zeroed"] == [False, False, False, True]
    assert both(clipped, fraction=1.0, clip_low=0.2).extra["zeroed"] == [False] * 4
    # Zeroed tokens stay in the denominator.
    batch = golden_cov()
    size = math.sqrt(0.5)
    assert gradients(batch, clip_cov(batch).loss) == near([-size / 4, -size / 4, size / 4, 0.0], 1e-5)


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_token_chosen(seed, overflow):
    # "f=0 (no token) -> PPO-clip / unclipped gradient. beta=0 -> unclipped."
    batch = random_batch(seed, overflow=overflow)
    for clip in (0.2, 1.0):
        advantages, loss = dapo(batch, low=clip, high=clip)
        result = clip_cov(batch, fraction=0.0, clip_low=clip, clip_high=clip)
        assert result.advantage == near(advantages)
        assert result.loss.item() == near(loss.item())
        assert gradients(batch, result.loss) == near(gradients(batch, loss))
    loss = dapo(batch, low=math.inf, high=math.inf)[1]
    for result in (kl_cov(batch, fraction=0.0), kl_cov(batch, fraction=0.3, beta=0.0)):
        assert result.loss.item() == near(loss.item())
        assert gradients(batch, result.loss) == near(gradients(batch, loss))


def test_kl_cov_choice():
    assert kl_cov(golden_cov()).extra["chosen"] == [False, False, False, True]
    assert kl_cov(golden_cov(), fraction=0.5).extra["chosen"] == [True, False, False, True]
    # "zero gradient value at r=1 on the first step (sub-gradient sign 0)"
    size = math.sqrt(0.5)
    batch = golden_cov()
    assert gradients(batch, kl_cov(batch).loss) == near([-size / 4, -size / 4, size / 4, size / 4], 1e-5)
    batch = golden_cov(ratios=(1.0, 1.0, 1.0, 0.5))
    result = kl_cov(batch)
    assert gradients(batch, result.loss)[3] == near((size * 0.5 - 1) / 4, 1e-5)
    assert result.loss.item() == near((-size - size + size + size / 2 + math.log(2)) / 4, 1e-5)
    # Ties in natural order: all covariances are 0.
    flat = [[one_turn(1.0, [0.1, 0.2]), one_turn(1.0, [0.3])]]
    assert kl_cov(flat, fraction=0.7).extra["chosen"] == [True, True, False]


# ---------------------------------------------------------------------------------------------------------------------
# STEER


def golden_steer() -> Batch:
    """The card's three tokens with A = 1: the rewards of the group are such that its z-score is 1 to 1e-6."""
    made = [token(math.log(pi), entropy=entropy) for pi, entropy in zip((0.9, 0.5, 0.1), (0.4, 1.0, 2.0))]
    quiet = [Trajectory([Turn([], reward)]) for reward in (0.0, -1.0)]  # z-scores of (1, 0, -1) are (1, 0, -1)
    return [[Trajectory([Turn(made, 1.0)]), *quiet]]


def test_steer_golden(side):
    batch = golden_steer()
    assert side(steer, batch).advantage == near([1.0] * 3, 1e-5)
    assert entropy_changes(batch, [1.0] * 3) == near([0.02946, 0.15343, -0.27233], 1e-5)
    for form, weights in (("linear", [1.2, 0.99583, 0.8]), ("exponential", [0.97615, 0.88186, 0.8])):
        result = side(steer, batch, form=form)
        assert gradients(batch, result.loss) == near([-one / 3 for one in weights], 1e-5)
        if not side.recipe:
            assert result.extra["weight"] == near(weights, 1e-5)


def test_steer_edges():
    # max = min: the midpoint; no entropy change: exponential weight 1.
    batch = [[one_turn(1.0, [0.0]), one_turn(0.0, [0.0])]]
    assert steer(batch, lam_min=0.5, lam_max=1.1).extra["weight"] == near([0.8, 0.8])
    flat = [[one_turn(1.0, [0.0]), one_turn(1.0, [0.1])]]
    assert steer(flat, form="exponential").extra["weight"] == near([1.0, 1.0])
    # "max(|Omega|_max, .02)": below .02 the smallest weight is not reached.
    tiny = golden_steer()
    for one in tokens(tiny):
        one.behaviour = 0.0
        one.entropy.data.fill_(-one.logp.item() + 0.01)
    sizes = [abs(one) for one in entropy_changes(tiny, steer(tiny).advantage)]
    assert max(sizes) < 0.02
    expected = [math.exp(math.log(0.8) / 0.02 * one) for one in sizes]
    assert steer(tiny, form="exponential").extra["weight"] == near(expected)
    # The clamp of probabilities.
    rare = [[Trajectory([Turn([token(-30.0, entropy=1.0)], 1.0)])]]
    assert entropy_changes(rare, [1.0]) == near([math.log(1e-8) + 1], 1e-6)


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_steer_with_unit_weights_is_dapo(seed, overflow):
    # "lam_min=lam_max=1 -> GRPO/DAPO"
    batch = random_batch(seed, overflow=overflow)
    advantages, loss = dapo(batch, dual=10.0)
    for form in ("linear", "exponential"):
        result = steer(batch, form=form, lam_min=1.0, lam_max=1.0)
        assert result.advantage == near(advantages)
        assert result.loss.item() == near(loss.item())
        assert gradients(batch, result.loss) == near(gradients(batch, loss))
    for form, top in (("linear", 1.2), ("exponential", 1.0)):
        assert all(0.8 - 1e-12 <= one <= top + 1e-12 for one in steer(batch, form=form).extra["weight"])


# ---------------------------------------------------------------------------------------------------------------------
# HAPO


ENTROPIES = (0.01, 0.1, 0.2, 0.5, 1.0, 2.0)
HH = [-1, -0.5, -0.34949, -0.15051, 0, 1]


def golden_hapo(ratio: float = 1.0) -> Batch:
    made = [token(-1.0, behaviour=-1.0 - math.log(ratio), entropy=7.0, old_entropy=entropy) for entropy in ENTROPIES]
    return [[Trajectory([Turn(made[:3], 1.0)]), Trajectory([Turn(made[3:], 0.0)])]]


def test_hapo_entropy_golden():
    extra = hapo(golden_hapo()).extra
    assert extra["hh"] == near(HH, 1e-5)
    assert extra["low"] == near([0.4, 0.3, 0.2699, 0.2301, 0.2, 0.2], 1e-4)
    assert extra["high"] == near([0.2, 0.2, 0.2, 0.2, 0.2, 0.4], 1e-5)
    # "T = T0 (1 + tau hh)" with tau .05
    temperatures = [1 + 0.05 * hh for hh in extra["hh"]]
    assert temperatures == near([0.95, 0.975, 0.98253, 0.99247, 1, 1.05], 1e-5)


def test_hapo_statistics_golden(side):
    batch = [[one_turn(1.0, [0.0]), one_turn(0.0, [0.0] * 3)]]
    assert side(hapo, batch).advantage == near([1.73205] + [-0.57735] * 3, 1e-5)
    # All entropies equal: hh = 0 and nothing is adapted.
    if not side.recipe:
        extra = hapo(batch).extra
        assert extra["hh"] == [0.0] * 4
        assert extra["scale"] == [1.0] * 4
    # sqrt(24) < 5 <= sqrt(26): from there on the plain z-score.
    rare = [[one_turn(1.0, [0.0]), one_turn(0.0, [0.0] * 24)]]
    assert side(hapo, rare).advantage[0] == near(math.sqrt(24), 1e-5)
    rare = [[one_turn(1.0, [0.0]), one_turn(0.0, [0.0] * 26)]]
    assert side(hapo, rare).advantage == near([math.sqrt(0.5)] + [-math.sqrt(0.5)] * 26, 1e-5)


def test_hapo_redistribution():
    # r = 1 is neutral: hh > 0 unchanged, hh <= 0 damped by 1 + hh.
    batch = golden_hapo()
    result = hapo(batch)
    expected = [1 + hh for hh in HH[:5]] + [1.0]
    assert result.advantage == near([1.0] * 3 + [-1.0] * 3, 1e-5)
    assert result.extra["scale"] == near(expected, 1e-5)
    signs = [1, 1, 1, -1, -1, -1]
    assert gradients(batch, result.loss) == near([-s * one / 6 for s, one in zip(signs, expected)], 1e-5)
    # r = 1.3 is outside every neutral zone: only hh > 0 changes, by 1 + 1 = 2.
    batch = golden_hapo(1.3)
    result = hapo(batch)
    assert result.extra["scale"] == near([1.0] * 5 + [2.0])
    assert gradients(batch, result.loss) == near([0.0] * 3 + [1.3 / 6] * 2 + [2.6 / 6], 1e-5)
    # r = .83: neutral where eps_low/2 > .17, that is for the first token only.
    assert hapo(golden_hapo(0.83)).extra["scale"] == near([0.0] + [1.0] * 4 + [2.0], 1e-5)
    # r = 12 beyond the dual clip.
    batch = golden_hapo(12.0)
    assert hapo(batch).loss.item() == near((-1.2 * 3 + 10 * 2 + 20) / 6, 1e-5)
    assert gradients(batch, hapo(batch).loss) == [0.0] * 6


@pytest.mark.parametrize("seed", SEEDS)
def test_hapo_switched_off_is_dapo(seed):
    # "tau=alpha=beta=0 and response-level statistics -> DAPO (with eps .2/.2); equal lengths -> part 2 equals GRPO
    # with population std". Groups of three: the population std is smaller by sqrt(2/3).
    dice = random.Random(seed)
    batch: Batch = []
    for _ in range(4):
        group = []
        for _ in range(3):
            group.append(one_turn(dice.gauss(0, 1), [dice.gauss(0, 0.3), dice.gauss(0, 2)]))
            for one in sampled(group[-1]):
                one.old_entropy = dice.uniform(0, 2)
        batch.append(group)
    advantages, loss = dapo(batch, low=0.2, high=0.2, dual=10.0)
    result = hapo(batch, alpha=0.0, beta=0.0)
    factor = math.sqrt(3 / 2)
    assert result.advantage == near([factor * one for one in advantages], 1e-4)
    assert result.loss.item() == near(factor * loss.item(), 1e-4)
    assert gradients(batch, result.loss) == near([factor * one for one in gradients(batch, loss)], 1e-4)
    # Where the fallback takes the plain z-score it is DAPO exactly.
    batch = [[one_turn(1.0, [0.3]), one_turn(0.0, [dice.gauss(0, 0.3) for _ in range(30)])]]
    advantages, loss = dapo(batch, low=0.2, high=0.2, dual=10.0)
    result = hapo(batch, alpha=0.0, beta=0.0)
    assert result.advantage == near(advantages)
    assert gradients(batch, result.loss) == near(gradients(batch, loss))


@pytest.mark.parametrize("seed", SEEDS)
def test_hapo_ranges(seed):
    extra = hapo(random_batch(seed)).extra
    assert min(extra["hh"]) == -1.0 and max(extra["hh"]) == 1.0
    assert all(0.2 <= one <= 0.4 for one in extra["low"] + extra["high"])
    assert all(0.0 <= one <= 2.0 for one in extra["scale"])
