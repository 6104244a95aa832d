"""The oracles of `trust` against the golden numbers and the reductions that the specification cards state."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from . import trust
from .objectives import dapo, dr_grpo, gae, grpo, gspo, ppo, rloo, whiten
from .records import Batch, Trajectory, Turn, gradients, random_batch, sampled, token, tokens, total, trajectories
from .trust import (
    binary_kl,
    cispo,
    ctpo,
    decoupled_ppo,
    dppo_kl,
    dppo_tv,
    geo_rs,
    gmpo,
    icepop,
    k3_rs,
    kl_loss,
    minpro,
    mis,
    ppo_dual,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo_kl,
    sequence_mask,
    sequence_mis,
    sequence_tis,
    tis,
    two_sided_grpo,
    veto,
    zscore,
)

MISMATCH = [tis, sequence_tis, mis, sequence_mis, icepop, geo_rs, k3_rs, veto]
MASKING = [*MISMATCH, sequence_mask, decoupled_ppo, dppo_tv, dppo_kl]
METHODS = [
    *(gmpo, cispo, reinforce_pp, reinforce_pp_baseline, rloo_kl, ppo_dual, two_sided_grpo),
    *(*MASKING, ctpo, minpro),
]
SCORED = [method for method in METHODS if method not in (reinforce_pp, reinforce_pp_baseline, rloo_kl, ppo_dual)]
Z = math.sqrt(0.5)  # z-score of two different rewards, up to the 1e-6
SEEDS = range(20)


def near(numbers, tolerance: float = 1e-9):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)


def moved(reward: float, log_ratios: list[float]) -> Trajectory:
    """One turn; the ratios against behaviour and proximal alike."""
    return Trajectory([Turn([token(-2.0 + shift, behaviour=-2.0) for shift in log_ratios], reward)])


def mismatched(reward: float, rhos: list[float], shift: float = 0.0) -> Trajectory:
    """One turn with the given exp(proximal - behaviour) and exp(logp - proximal) = exp(shift)."""
    made = [token(-2.0 + shift, proximal=-2.0, behaviour=-2.0 - math.log(rho)) for rho in rhos]
    return Trajectory([Turn(made, reward)])


def partner(reward: float, count: int = 1) -> Trajectory:
    """An exactly on-policy row that completes a group."""
    return moved(reward, [0.0] * count)


def singles(batch: Batch) -> Batch:
    """Every trajectory cut to its first token; its reward stays."""
    return [[Trajectory([Turn(sampled(row)[:1], total(row))]) for row in group if sampled(row)] for group in batch]


def same(batch: Batch, ours, theirs, tolerance: float = 1e-9) -> None:
    """Equal advantages and equal gradients."""
    assert ours[0] == near(theirs[0], tolerance)
    assert gradients(batch, ours[1]) == near(gradients(batch, theirs[1]), tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# Golden numbers


@pytest.mark.parametrize(("better", "q"), [(True, 0.96722), (False, 1.22140)])
def test_gmpo_golden(side, better, q):
    other = partner(0.0 if better else 1.0)
    batch = [[moved(1.0 if better else 0.0, [0.1, -0.6, 0.9]), other]]
    result = side(gmpo, batch)
    advantage = result.advantage[0]
    assert (-2 * result.loss.item() - result.advantage[3]) / advantage == near(q, 1e-5)
    live = [-advantage * q / 6 if flag else 0.0 for flag in ([True, True, False] if better else [True, False, True])]
    assert gradients(batch, result.loss)[:3] == near(live, 1e-5)


def test_zscore_golden(side):
    batch = [[partner(reward) for reward in (1, 0, 0, 0)]]
    for method in SCORED:
        assert side(method, batch).advantage == near([1.5, -0.5, -0.5, -0.5], 1e-5)


def test_rloo_golden(side):
    batch = [[partner(reward) for reward in (1, 0, 0, 0)]]
    assert side(rloo_kl, batch).advantage == near([1, -1 / 3, -1 / 3, -1 / 3])
    # R - beta KL = 1 - .03 (log .5 - log .8) against 0
    made = token(-1.0, behaviour=-3.0, proximal=math.log(0.5), reference=math.log(0.8))
    batch = [[Trajectory([Turn([made], 1.0)]), partner(0.0)]]
    assert side(rloo_kl, batch).advantage[0] == near(1 + 0.03 * 0.47000, 1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(1.5, 1, -1.2), (0.5, 1, -0.5), (0.5, -1, 0.8), (4, -1, 3.0)]
)
def test_dual_clip_golden(side, ratio, advantage, expected):
    batch = [[moved(advantage, [math.log(ratio)])]]
    result = side(ppo_dual, batch, value_weight=0.0, method="ppo", ours={"value_weight": 0.0, "dual": 3.0})
    assert result.advantage == near([advantage]) and result.loss.item() == near(expected)
    # Card: the two-sided variant has the "same effect as dual clip"
    row, other = moved(float(advantage), [math.log(ratio)]), partner(-float(advantage))
    result = side(two_sided_grpo, [[row, other]], delta=3.0)
    scale = abs(result.advantage[0])
    assert 2 * result.loss.item() + result.advantage[1] == near(expected * scale)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_mismatch_golden(side, reward):
    """rho = [.4, 1, 3], C = 2: TIS [.4, 1, 2]; MIS [.5, 2] -> [0, 1, 0]. Four tokens, the last one has rho = 1."""
    expected = {
        tis: ([0.4, 1, 2, 1], 4),
        sequence_tis: ([1.2, 1.2, 1.2, 1], 4),
        mis: ([0, 1, 0, 1], 2),
        sequence_mis: ([1.2, 1.2, 1.2, 1], 4),
        icepop: ([0, 1, 3, 1], 4),
        geo_rs: ([0, 0, 0, 1], 1),
        k3_rs: ([0, 0, 0, 1], 1),
        veto: ([0.4, 1, 2, 1], 4),
    }
    for method, (weights, count) in expected.items():
        batch = [[mismatched(reward, [0.4, 1, 3]), partner(1 - reward)]]
        result = side(method, batch)
        wanted = [-advantage * weight / count for advantage, weight in zip(result.advantage, weights)]
        assert gradients(batch, result.loss) == near(wanted)
        if not side.recipe:
            assert result.extra["kept"] == [weight > 0 for weight in weights]
    assert math.exp(math.fsum(map(math.log, (0.4, 1, 3))) / 3) == near(1.0627, 1e-4)
    batch = [[mismatched(reward, [0.4, 1, 3]), partner(1 - reward)]]
    if not side.recipe:
        assert all(geo_rs(batch, 1 / 1.0628, 1.1).extra["kept"])  # the bounds are those of mu / pi_old
    assert not all(geo_rs(batch, 1 / 1.0626, 1.1).extra["kept"])
    k3 = ((0.4 - 1 - math.log(0.4)) + (3 - 1 - math.log(3))) / 3
    if not side.recipe:
        assert all(k3_rs(batch, k3 + 1e-9).extra["kept"]) and not all(k3_rs(batch, k3 - 1e-9).extra["kept"])


def test_sequence_bounds():
    # products 4 and 1/4: truncated at 2, or dropped
    batch = [[mismatched(1.0, [2.0, 2.0]), mismatched(0.0, [0.5, 0.5]), partner(0.0)]]
    result = sequence_tis(batch)
    wanted = [-one * weight / 5 for one, weight in zip(result.advantage, [2, 2, 0.25, 0.25, 1])]
    assert gradients(batch, result.loss) == near(wanted)
    assert sequence_mis(batch).extra["kept"] == [False] * 4 + [True]
    assert sequence_mis(batch, 0.2, 5.0).extra["kept"] == [True] * 5
    # "clamp log sum to +-20"
    batch = [[mismatched(1.0, [math.exp(15.0)] * 2), partner(0.0)]]
    for result in (sequence_tis(batch, math.inf), sequence_mis(batch, 0.0, math.inf)):
        assert gradients(batch, result.loss)[0] == near(-result.advantage[0] * math.exp(20) / 3)


def test_veto():
    batch = [[mismatched(1.0, [1.0, 0.9e-4, 3.0]), mismatched(0.0, [1.1e-4, 3.0])]]
    result = veto(batch)
    assert result.extra["kept"] == [False] * 3 + [True] * 2
    advantage = result.advantage[3]
    assert gradients(batch, result.loss) == near([0, 0, 0, -advantage * 1.1e-4 / 2, -advantage * 2 / 2])


def test_sequence_mask():
    # Rows: positive far left behind (kept), negative by .6 (dropped), negative by .4 (kept), negative risen (kept)
    batch = [[moved(1.0, [-3.0]), moved(0.0, [-1.2, 0.0]), moved(0.0, [-0.8, 0.0]), moved(0.0, [3.0])]]
    result = sequence_mask(batch)
    assert result.extra["kept"] == [True, False, False, True, True, True]
    low = result.advantage[1]
    assert low < 0
    # the token at -.8 is clipped (A < 0, r < .8); all 6 tokens count
    wanted = [-result.advantage[0] * math.exp(-3) / 6, 0, 0, 0, -low / 6, -low * math.exp(3) / 6]
    assert gradients(batch, result.loss) == near(wanted)


def test_nothing_kept():
    batch = [[mismatched(1.0, [9.0]), mismatched(0.0, [0.1])]]
    for method in (mis, sequence_mis, icepop, geo_rs, k3_rs):
        assert method(batch).loss.item() == 0.0 and not any(method(batch).extra["kept"])


def test_decoupled_golden(side):
    batch = [[mismatched(1.0, [4.9, 5.1], 0.1), mismatched(0.0, [0.4, 2.0], 0.3)]]
    result = side(decoupled_ppo, batch)
    up, down = result.advantage[0], result.advantage[2]
    wanted = [-up * 4.9 * math.exp(0.1) / 4, 0.0, -down * 0.4 * math.exp(0.3) / 4, -down * 2 * math.exp(0.3) / 4]
    assert gradients(batch, result.loss) == near(wanted)
    if not side.recipe:
        assert result.extra["kept"] == [True, False, True, True]


def test_dppo_golden(side):
    assert binary_kl(0.01, 0.03) == near(0.00922, 1e-5)
    batch = [[Trajectory([Turn([token(math.log(0.03), behaviour=math.log(0.01))], 1.0)]), partner(0.0)]]
    for method, over, under in (
        (dppo_tv, {"high": 0.0201}, {"high": 0.0199}),
        (dppo_kl, {"limit": 0.00923}, {"limit": 0.00921}),
    ):
        result = side(method, batch, **over)
        assert gradients(batch, result.loss)[0] == near(-result.advantage[0] * 3 / 2)  # r = 3
        if not side.recipe:
            assert result.extra["kept"] == [True, True]
        result = side(method, batch, **under)
        assert gradients(batch, result.loss)[0] == 0.0
        assert gradients(batch, result.loss)[1] == near(-result.advantage[1] / 2)  # the denominator stays
        if not side.recipe:
            assert result.extra["kept"] == [False, True]
    # The same move with A < 0 is a way back: both keep it at any threshold.
    batch = [[Trajectory([Turn([token(math.log(0.03), behaviour=math.log(0.01))], 0.0)]), partner(1.0)]]
    if not side.recipe:
        assert dppo_tv(batch, 0.0, 0.0).extra["kept"][0] and dppo_kl(batch, 0.0).extra["kept"][0]
    # A fall with A < 0 is a move away.
    batch = [[Trajectory([Turn([token(math.log(0.3), behaviour=math.log(0.5))], 0.0)]), partner(1.0)]]
    if not side.recipe:
        assert not dppo_tv(batch, low=0.19).extra["kept"][0] and dppo_tv(batch, low=0.21).extra["kept"][0]
        assert not dppo_kl(batch).extra["kept"][0] and dppo_kl(batch, limit=0.1).extra["kept"][0]


def test_ctpo_golden(side):
    def row(reward: float) -> Trajectory:
        made = [token(-0.06, behaviour=-0.1) for _ in range(4)]
        return Trajectory([Turn(made[:1], 0.0), Turn([], 0.0), Turn(made[1:], reward)])

    batch = [[row(1.0), partner(0.0)]]
    result = side(ctpo, batch)
    band = [0.05, 0.0707107, 0.0866025, 0.1]  # of log ratios 0.04, 0.08, 0.12, 0.16: none sits on its bound
    kept = [math.exp(0.04), *(math.exp(one) for one in band[1:])]
    assert result.loss.item() == near((-result.advantage[0] * sum(kept) - result.advantage[4]) / 5, 1e-6)
    assert gradients(batch, result.loss)[:4] == near([-result.advantage[0] * math.exp(0.04) / 5, 0, 0, 0])
    # A < 0: dual clip at the same band
    batch = [[row(0.0), partner(1.0)]]
    result = side(ctpo, batch)
    assert gradients(batch, result.loss)[1:4] == [0, 0, 0]
    wide = gradients(batch, side(ctpo, batch, dual=9.0).loss)
    assert wide[:4] == near([-result.advantage[0] * math.exp(c) / 5 for c in (0.04, 0.08, 0.12, 0.16)])


def test_ctpo_clamps():
    wide = {"low": 99.0, "high": 99.0, "dual": 99.0}
    for reward in (0.0, 1.0):
        batch = [[moved(reward, [6.0, 6.0, -5.0]), moved(reward, [-15.0, -6.0, 3.0]), partner(1 - reward)]]
        result = ctpo(batch, **wide)
        prefixes = [6, None, 7, -15, None, -18]
        wanted = [0 if c is None else -one * math.exp(c) / 7 for one, c in zip(result.advantage, prefixes)]
        found = gradients(batch, result.loss)[:6]
        assert found == near(wanted) and [slope == 0.0 for slope in found] == [c is None for c in prefixes]


def test_minpro_golden(side):
    batch = [[moved(1.0, [math.log(r) for r in (1.2, 0.5, 2.0, 0.9)]), partner(0.0)]]

    def weights(low: float, high: float) -> list[float]:
        result = side(minpro, batch, low, high, ours={"low": 1 - low, "high": 1 + high})
        return [-5 * slope / result.advantage[0] for slope in gradients(batch, result.loss)[:4]]

    assert weights(0.9, 0.9) == near([1.2, 0.6, 1.0, 0.45])
    assert weights(0.2, 0.1) == near([1.1, 0.8, 1.0, 0.8])


def test_kl_golden():
    lp = torch.tensor(math.log(0.5), dtype=torch.float64, requires_grad=True)
    ref = math.log(0.8)
    values = {"k1": -0.47000, "k2": 0.11045, "k3": 0.13000, "k3+": 0.13000}
    for name, value in values.items():
        assert kl_loss(name)(lp, ref, lp.item()).item() == near(value, 1e-5)


def two_actions(name: str, sampler: list[float], behaviour: list[float], in_reward: bool = False) -> float:
    """Expectation over `sampler` of the gradient by logit 0, for pi = (.7, .3) and ref = (.5, .5)."""
    logits = torch.tensor([math.log(0.7), math.log(0.3)], dtype=torch.float64, requires_grad=True)
    logps = torch.log_softmax(logits, 0)
    loss = torch.zeros((), dtype=torch.float64)
    for action in (0, 1):
        found = kl_loss(name)(logps[action], math.log(0.5), math.log(behaviour[action]))
        if in_reward:
            found = found.detach() * logps[action]
        loss = loss + sampler[action] * found
    return torch.autograd.grad(loss, logits)[0][0].item()


def test_kl_gradient_goldens():
    pi, mu = [0.7, 0.3], [0.6, 0.4]
    assert two_actions("k1", pi, pi) == near(0.0)
    assert two_actions("k2", pi, pi) == near(0.17793, 1e-5)
    assert two_actions("k3", pi, pi) == near(0.2, 1e-9)
    assert two_actions("k3", pi, pi, in_reward=True) == near(-0.02207, 1e-5)
    assert two_actions("k2", mu, mu) == near(0.20360, 1e-5)
    assert two_actions("weighted k3", mu, mu) == near(0.17793, 1e-5)
    assert two_actions("k3+", pi, pi) == near(two_actions("k2", pi, pi))
    assert two_actions("weighted k3", pi, pi) == near(two_actions("k2", pi, pi))
    assert two_actions("k1", pi, pi, in_reward=True) == near(two_actions("k2", pi, pi))  # as a reward k1 is correct
    logits = torch.tensor([math.log(0.7), math.log(0.3)], dtype=torch.float64, requires_grad=True)
    logps = torch.log_softmax(logits, 0)
    reverse = (logps.exp() * (logps - math.log(0.5))).sum()
    assert torch.autograd.grad(reverse, logits)[0][0].item() == near(two_actions("k2", pi, pi))
    logps = torch.log_softmax(logits, 0)
    assert torch.autograd.grad((-0.5 * logps).sum(), logits)[0][0].item() == near(two_actions("k3", pi, pi))


def test_kl_bounds():
    for x in (30.0, -30.0):
        lp = torch.tensor(-40.0, dtype=torch.float64, requires_grad=True)
        assert kl_loss("k1")(lp, -40.0 - x, 0.0).item() == math.copysign(20, x)
        assert kl_loss("k2")(lp, -40.0 - x, 0.0).item() == 200.0
        assert kl_loss("k3")(lp, -40.0 - x, 0.0).item() == 10.0  # x = 20 gives 19, x = -20 gives e^20: both capped
    # pi = ref: "all zero with zero gradient except k1's noise"; small x: k2 ~ k3
    for name in ("k1", "k2", "k3", "k3+", "weighted k3"):
        lp = torch.tensor(-1.5, dtype=torch.float64, requires_grad=True)
        found = kl_loss(name)(lp, -1.5, -1.2)
        slope = torch.autograd.grad(found, lp)[0].item()
        assert found.item() == 0.0 and slope == (1.0 if name == "k1" else 0.0)
    lp = torch.tensor(-1.5, dtype=torch.float64, requires_grad=True)
    assert kl_loss("k2")(lp, -1.501, 0.0).item() == near(kl_loss("k3")(lp, -1.501, 0.0).item(), 1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# Reductions


@pytest.mark.parametrize("seed", range(8))
def test_ratio_reductions(seed):
    batch = random_batch(seed, tokenless=seed % 2 == 0)
    single = singles(batch)
    wide = {"low": math.inf, "high": math.inf}
    # GMPO: "e=inf -> unclipped GSPO"; "|y|=1 -> PPO with log-space clip"
    ours, theirs = gmpo(batch, **wide), gspo(batch, **wide)
    same(batch, ours, theirs)
    assert ours.loss.item() == near(theirs[1].item())
    ours, theirs = gmpo(single), dapo(single, low=1 - math.exp(-0.4), high=math.exp(0.4) - 1)
    same(single, ours, theirs)
    assert ours.loss.item() == near(theirs[1].item())
    # CISPO: "no cap hit -> same gradient as unclipped PPO"
    same(batch, cispo(batch, math.inf), dapo(batch, **wide))
    # CISPO: "with the mask M (same eps) and no cap -> PPO-clip gradient"
    masked = []
    found = cispo(batch, math.inf)
    for one, advantage, slope in zip(tokens(batch), found.advantage, gradients(batch, found.loss)):
        ratio = math.exp(one.logp.item() - one.behaviour)
        off = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
        masked.append(0.0 if off else slope)
    assert masked == near(gradients(batch, dapo(batch)[1]))
    # CISPO: "|y|=1, no cap -> importance-weighted REINFORCE"
    found = cispo(single, math.inf)
    wanted = [
        -advantage * math.exp(one.logp.item() - one.behaviour) / len(found.advantage)
        for one, advantage in zip(tokens(single), found.advantage)
    ]
    assert gradients(single, found.loss) == near(wanted)
    # Two-sided: delta = inf -> GRPO without KL; "same effect as dual clip" on single tokens (one aggregation)
    same(batch, two_sided_grpo(batch, delta=math.inf), grpo(batch, beta=0.0))
    same(single, two_sided_grpo(single, delta=4.0), dapo(single, 0.2, 0.2, dual=4.0))
    # Dual: "c=inf -> original PPO"
    same(batch, ppo_dual(batch, dual=math.inf), ppo(batch))
    # Dual: "eps=inf, c=inf -> importance-weighted policy gradient"
    free = ppo_dual(batch, clip=math.inf, dual=math.inf, value_weight=0.0)
    wanted = [
        -advantage * math.exp(one.logp.item() - one.behaviour) / len(free.advantage)
        for one, advantage in zip(tokens(batch), free.advantage)
    ]
    assert gradients(batch, free.loss) == near(wanted)
    # MinPRO: "|y|=1 -> CISPO" with both bounds; without bounds the same gradient as CISPO without a cap
    same(single, minpro(single, math.inf, math.inf), cispo(single, math.inf))
    # CTPO: "p=0 and |y|=1 -> PPO with log-space clip"
    same(
        single,
        ctpo(single, low=0.3, high=0.4, dual=1.5, power=0.0),
        dapo(single, low=1 - math.exp(-0.3), high=math.exp(0.4) - 1, dual=math.exp(1.5)),
    )
    # DPPO: "d=inf -> capped-weight REINFORCE (CISPO with cap 20)"
    same(batch, dppo_tv(batch, math.inf, math.inf), cispo(batch, 20.0))
    same(batch, dppo_kl(batch, math.inf), cispo(batch, 20.0))


def test_minpro_with_earlier_ratios_of_one():
    # "earlier ratios all 1 -> CISPO with both bounds": only the last token moved
    for shift in (-0.1, -0.5, 0.1, 0.5):
        batch = [[moved(1.0, [0.0, 0.0, shift]), partner(0.0)]]
        result = minpro(batch)
        weights = [1, 1, max(0.8, min(1.28, math.exp(shift)))]
        assert gradients(batch, result.loss)[:3] == near([-result.advantage[0] * weight / 4 for weight in weights])


@pytest.mark.parametrize("seed", range(8))
def test_baseline_reductions(seed):
    batch = random_batch(seed, tokenless=seed % 2 == 0)
    sizes = [len(group) for group in batch for row in group for _ in sampled(row)]
    # RLOO: beta=0 is `rloo`; with G/(G-1): Dr.GRPO advantage
    same(batch, rloo_kl(batch, beta=0.0), rloo(batch))
    assert [(n - 1) / n * one for n, one in zip(sizes, rloo_kl(batch, beta=0.0).advantage)] == near(dr_grpo(batch)[0])
    # REINFORCE++: "beta=0 and one response per prompt -> batch-whitened REINFORCE" (single turn, on-policy)
    rows = [moved(total(row), [0.0] * len(sampled(row))) for row in trajectories(batch) if sampled(row)]
    alone = [[row] for row in rows]
    result = reinforce_pp(alone, beta=0.0)
    rewards = whiten([total(row) for row in rows for _ in sampled(row)], True)
    assert result.advantage == near(rewards)
    assert gradients(alone, result.loss) == near([-one / len(rewards) for one in rewards])
    # gamma and the KL in the reward: the return is a GAE with values 0 and lambda 1
    raw = []
    for row in trajectories(batch):
        paid = trust.token_rewards(row)
        paid = [reward - 0.3 * (one.proximal - one.reference) for reward, one in zip(paid, sampled(row))]
        raw.extend(gae(paid, [0.0] * len(paid), 0.9, 1.0))
    assert reinforce_pp(batch, beta=0.3, gamma=0.9).advantage == near(whiten(raw, True))
    # Baseline variant: "with one prompt -> GRPO up to std convention" (equal lengths, so the token mean is 0)
    group = [[moved(total(row), [0.1, -0.3]) for row in trajectories(batch)]]
    result, theirs = reinforce_pp_baseline(group, beta=0.0), grpo(group, beta=0.0)
    scale = result.advantage[0] / theirs[0][0]
    assert 0.9 < scale < 1.1 and result.advantage == near([scale * one for one in theirs[0]])
    assert gradients(group, result.loss) == near([scale * one for one in gradients(group, theirs[1])])
    # Its KL is a plain k2: gradient beta x / count on top, where x = logp - reference is within 20
    with_kl, without = reinforce_pp_baseline(batch), reinforce_pp_baseline(batch, beta=0.0)
    extra = [1e-2 * (one.logp.item() - one.reference) / len(sizes) for one in tokens(batch)]
    assert gradients(batch, with_kl.loss) == near([a + b for a, b in zip(gradients(batch, without.loss), extra)])


@pytest.mark.parametrize("seed", range(8))
def test_mismatch_reductions(seed):
    batch = random_batch(seed, tokenless=seed % 2 == 0)
    # "lp_mu=lp_old -> W=1, nothing dropped"
    level = copy.deepcopy(batch)
    for one in tokens(level):
        one.proximal = one.behaviour
    for method in MISMATCH:
        result = method(level)
        same(level, result, dapo(level))
        assert result.loss.item() == near(dapo(level)[1].item()) and all(result.extra["kept"])
    result = sequence_mask(batch, delta=math.inf)
    same(batch, result, dapo(batch))
    # Decoupled: "lp_prox=lp_mu -> PPO"
    same(level, decoupled_ppo(level), dapo(level, 0.2, 0.2))
    # "C=inf -> exact correction": every slope of the uncorrected loss times rho
    mild = copy.deepcopy(batch)
    for one in tokens(mild):
        one.behaviour = one.proximal
    plain = gradients(mild, dapo(mild)[1])
    rho = [math.exp(one.proximal - one.behaviour) for one in tokens(batch)]
    exact = [a * b for a, b in zip(plain, rho)]
    for result in (tis(batch, math.inf), mis(batch, 0.0, math.inf), icepop(batch, 0.0, math.inf)):
        assert gradients(batch, result.loss) == near(exact)
    products = [math.prod(math.exp(o.proximal - o.behaviour) for o in sampled(r)) for r in trajectories(batch)]
    exact = [a * b for a, b in zip(plain, trust.spread(batch, products))]
    for result in (sequence_tis(batch, math.inf), sequence_mis(batch, 0.0, math.inf)):
        assert gradients(batch, result.loss) == near(exact)
    # Veto without a floor is TIS
    same(batch, veto(batch, 0.0), tis(batch))
    # MIS and IcePop with the same bounds: the same tokens, other denominators
    ours, theirs = mis(batch), icepop(batch, 0.5, 2.0)
    kept = ours.extra["kept"]
    assert kept == theirs.extra["kept"]
    shrunk = [one * len(kept) / sum(kept) for one in gradients(batch, theirs.loss)]
    assert gradients(batch, ours.loss) == near(shrunk)
    # Decoupled: "first mini-step u=1 -> importance-weighted REINFORCE"
    fresh = copy.deepcopy(batch)
    for one in tokens(fresh):
        one.proximal = one.logp.item()
    result = decoupled_ppo(fresh, cap=math.inf)
    wanted = [
        -advantage * math.exp(one.logp.item() - one.behaviour) / len(kept)
        for one, advantage in zip(tokens(fresh), result.advantage)
    ]
    assert gradients(fresh, result.loss) == near(wanted)


@pytest.mark.parametrize("seed", range(8))
def test_on_policy_is_reinforce(seed):
    """Card, universal test (1): r = 1 and mu = pi_old give -A grad lp up to the aggregation."""
    batch = random_batch(seed)
    for one in tokens(batch):
        one.behaviour = one.proximal = one.logp.item()
    count = len(list(tokens(batch)))
    n = sum(1 for row in trajectories(batch) if sampled(row))
    lengths = [len(sampled(row)) for row in trajectories(batch) for _ in sampled(row)]
    for method in METHODS:
        result = method(batch, beta=0.0) if method is reinforce_pp_baseline else method(batch)
        if method in (gmpo, two_sided_grpo):
            wanted = [-one / (n * length) for one, length in zip(result.advantage, lengths)]
        elif method is rloo_kl:
            wanted = [-one / n for one in result.advantage]
        else:
            wanted = [-one / count for one in result.advantage]
        assert gradients(batch, result.loss) == near(wanted), method.__name__


# ---------------------------------------------------------------------------------------------------------------------
# Every method


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_finite(method, overflow):
    dropped = alive = False
    for seed in SEEDS:
        batch = random_batch(seed, overflow=overflow)
        result = method(batch)
        count = len(list(tokens(batch)))
        assert result.loss.dtype == torch.float64 and result.loss.shape == ()
        assert len(result.advantage) == count
        found = [slope for field in ("logp", "value", "entropy") for slope in gradients(batch, result.loss, field)]
        assert all(math.isfinite(one) for one in [*result.advantage, result.loss.item(), *found])
        alive = alive or any(found)
        again = method(random_batch(seed, overflow=overflow))
        assert again.advantage == result.advantage and again.loss.item() == result.loss.item()
        if method in MASKING:
            kept = result.extra["kept"]
            assert len(kept) == count and all(type(one) is bool for one in kept)
            slopes = gradients(batch, result.loss)
            assert all(slope == 0.0 for slope, keep in zip(slopes, kept) if not keep)
            dropped = dropped or not all(kept)
    assert alive
    if method in MASKING and method not in (tis, sequence_tis, veto):
        assert dropped


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens(method):
    empty: list[Batch] = [[], [[]], [[Trajectory([])]], [[Trajectory([Turn([], 1.0)]), Trajectory([Turn([], 0.0)])]]]
    for batch in empty:
        result = method(batch)
        assert result.advantage == [] and result.loss.item() == 0.0


def test_scored_methods_share_their_advantage():
    batch = random_batch(4)
    wanted = trust.spread(batch, zscore(batch))
    for method in SCORED:
        assert method(batch).advantage == wanted
    assert zscore([[partner(1.0), partner(0.0)], [partner(3.0)]]) == near([Z, -Z, 0.0], 1e-5)


@pytest.mark.parametrize(
    "method", [gmpo, reinforce_pp, reinforce_pp_baseline, rloo_kl, ppo_dual, two_sided_grpo, *MISMATCH, decoupled_ppo]
)
def test_gradient_by_differences(method):
    """Methods whose loss has no stop-gradient by logp: the gradient is the slope of the loss."""
    batch = random_batch(5)
    for one, slope in zip(tokens(batch), gradients(batch, method(batch).loss)):
        held, losses = one.logp, []
        for sign in (1, -1):
            one.logp = held.detach() + sign * 1e-6
            losses.append(method(batch).loss.item())
        one.logp = held
        assert slope == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-6)
