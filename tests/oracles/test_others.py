"""Goldens and reductions of the mixed-data oracles, and finiteness on random batches."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from . import others
from .objectives import dr_grpo, grpo
from .records import Batch, Trajectory, Turn, gradients, leaf, random_batch, sampled, token, tokens, total, trajectories

SEEDS = range(10)
NAMES = [
    "dpo",
    "rdpo",
    "simpo",
    "inpo",
    "spo_minimax",
    "srpo",
    "mapl",
    "dpa",
    "chord",
    "hpt",
    "luffy",
    "guide",
    "adhint",
    "arpo_gui",
    "spear_replay",
    "r1v2",
    "bepa",
    "opd",
    "scope",
    "otr",
]


def row(logps: list[float], reward: float = 0.0, success: bool = False, **facts: Any) -> Trajectory:
    return Trajectory([Turn([token(x) for x in logps], reward)], success=success, facts=facts)


def plain(seed: int) -> Batch:
    """A random batch of nothing but policy rows, without any fact."""
    return random_batch(seed)


def pair(d: float) -> Batch:
    """One pair of one-token sides with s(w) - s(l) = d."""
    winner, loser = row([-1.0], chosen=True), row([-1.0], chosen=False)
    sampled(winner)[0].reference = -1.0 - d / 2
    sampled(loser)[0].reference = -1.0 + d / 2
    return [[loser, winner]]


def swapped(batch: Batch) -> Batch:
    other = copy.deepcopy(batch)
    for one in trajectories(other):
        if "chosen" in one.facts:
            one.facts["chosen"] = not one.facts["chosen"]
    return other


def close(a: Any, b: Any) -> None:
    assert a == pytest.approx(b, rel=1e-9, abs=1e-12)


def same(batch: Batch, mine: others.Result, theirs: Any) -> None:
    close(mine.advantage, list(theirs[0]))
    close(mine.loss.item(), theirs[1].item())
    close(gradients(batch, mine.loss), gradients(batch, theirs[1]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_finite(name: str, seed: int) -> None:
    batch = others.enrich(random_batch(seed), seed)
    result = getattr(others, name)(batch)
    assert len(result.advantage) == len(list(tokens(batch)))
    assert all(math.isfinite(one) for one in result.advantage)
    assert math.isfinite(result.loss.item()) and result.loss.dtype == torch.float64
    assert all(math.isfinite(one) for one in gradients(batch, result.loss))


@pytest.mark.parametrize("name", NAMES)
def test_seen(name: str) -> None:
    """Some seed gives every method a gradient."""
    grads: list[float] = []
    for seed in SEEDS:
        batch = others.enrich(random_batch(seed), seed)
        kwargs = {"step": 100} if name in ("chord", "spear_replay") else {}
        grads += gradients(batch, getattr(others, name)(batch, **kwargs).loss)
    assert any(one != 0 for one in grads)


@pytest.mark.parametrize("name", NAMES)
def test_empty(name: str) -> None:
    """Rule 5: no rows of a kind, no NaN."""
    for batch in ([], [[row([], origin="expert")]], [[row([])]]):
        for one in trajectories(batch):
            one.facts.update(direction=[1.0], ratings=[0.0])
        assert getattr(others, name)(batch).loss.item() == 0


# Preferences


def test_dpo() -> None:
    assert others.dpo(pair(3.0), beta=1e-9).loss.item() == pytest.approx(math.log(2), abs=1e-8)
    close(others.dpo(pair(2.0), beta=0.5).loss.item(), math.log(1 + math.exp(-1.0)))
    batch = pair(2.0)
    result = others.dpo(batch)
    # "Gradient weight σ(−βd)": the gradient by s(w) is -β σ(-βd)
    weight = 1 / (1 + math.exp(0.2))
    close(result.extra["weight"], [weight])
    close(gradients(batch, result.loss), [0.1 * weight, -0.1 * weight])
    close(others.dpo(pair(4.0), kind="hinge").loss.item(), 0.6)
    close(others.dpo(pair(4.0), kind="ipo").loss.item(), 1.0)
    close(others.dpo(pair(4.0), kind="sppo").loss.item(), 18.0)
    close(others.dpo(pair(4.0), kind="bco").loss.item(), 2 * math.log(1 + math.exp(-0.2)))
    mixed = 0.9 * others.dpo(pair(4.0)).loss.item() + 0.1 * others.dpo(pair(-4.0)).loss.item()
    close(others.dpo(pair(4.0), smoothing=0.1).loss.item(), mixed)


@pytest.mark.parametrize("seed", SEEDS)
def test_rdpo(seed: int) -> None:
    batch = others.enrich(random_batch(seed, size=2), seed)
    same(batch, others.rdpo(batch, flip=0.0), others.dpo(batch))
    # "Expectation over random flips equals the clean DPO loss"
    expected = 0.8 * others.rdpo(batch, flip=0.2).loss.item() + 0.2 * others.rdpo(swapped(batch), flip=0.2).loss.item()
    close(expected, others.dpo(batch).loss.item())


def test_rdpo_unbounded() -> None:
    assert others.rdpo(pair(1e4)).loss.item() < -100
    close(others.rdpo(pair(1e4), bound=5.0).loss.item(), others.rdpo(pair(5.0)).loss.item())


def test_simpo() -> None:
    batch = [[row([-1.0, -2.0], chosen=True), row([-3.0], chosen=False)]]
    close(others.simpo(batch).loss.item(), math.log(1 + math.exp(-2.0)))  # 2 (-1.5) - 2 (-3) - 1 = 2
    for one in tokens(batch):
        one.reference = -9.0
    close(others.simpo(batch).loss.item(), math.log(1 + math.exp(-2.0)))


def test_inpo() -> None:
    batch = pair(1.5)
    sampled(batch[0][0])[0].behaviour = -1.7
    eta = 0.5
    # "τ=η → IPO with π_ref"; "τ=0 → IPO with reference π_t and temperature η" (single tokens: sums are means)
    same(batch, others.inpo(batch, eta, eta), others.dpo(batch, eta, "ipo"))
    moved = copy.deepcopy(batch)
    for one in tokens(moved):
        one.reference = one.behaviour
    close(others.inpo(batch, eta, 0.0).loss.item(), others.dpo(moved, eta, "ipo").loss.item())
    # fixed point h = (P − ½)/η
    wins, target = 0.7, (0.7 - 0.5) / eta
    batch = pair(target)
    turned = swapped(batch)
    first = gradients(batch, others.inpo(batch, eta, eta).loss)
    second = gradients(turned, others.inpo(turned, eta, eta).loss)
    close([wins * a + (1 - wins) * b for a, b in zip(first, second)], [0.0, 0.0])


def test_spo() -> None:
    batch = [[row([-1.0], 3.0), row([-1.0], 1.0), row([-1.0], 2.0)], [row([-1.0], 5.0), row([-1.0], 4.0)]]
    result = others.spo_minimax(batch)
    close(result.extra["reward"], [1.0, 0.0, 0.5, 1.0, 0.0])  # rank-based; two: pairwise win
    # an intransitive cycle: everyone wins half
    cycle = [[row([-1.0], prefer=p) for p in ([0, 1, 0], [0, 0, 1], [1, 0, 0])]]
    close(others.spo_minimax(cycle).extra["reward"], [0.5, 0.5, 0.5])
    close(others.spo_minimax(cycle).advantage, [0.0, 0.0, 0.0])


def test_srpo() -> None:
    beta = 0.25
    # at the optimum with p(w≻l) = 1: r†(w|l) − r†(l|l) = 2, r†(w|w) − r†(l|w) = 2, r(w) − r(l) = r†(w|w) − r†(l|l)
    numbers = {"w_l": 1.3, "l_l": -0.7, "w_w": 0.4, "l_w": -1.6}
    batch = pair(numbers["w_w"] - numbers["l_l"])
    for one in batch[0]:
        side = "w" if one.facts["chosen"] else "l"
        for given, name in (("w", "chosen"), ("l", "rejected")):
            sampled(one)[0].facts[f"revise_{name}"] = leaf(-2.0)
            sampled(one)[0].facts[f"revise_{name}_reference"] = -2.0 - numbers[f"{side}_{given}"]
    for alpha in (0.0, 0.5, 1.0):
        close(others.srpo(batch, beta, alpha).loss.item(), 0.0)
    first = others.srpo(batch, 0.1, 0.0).loss.item()
    second = others.srpo(batch, 0.1, 1.0).loss.item()
    close([first, second], [(0.5 - 0.05 * 4.0) ** 2, 2 * (0.5 - 0.2) ** 2])
    close(others.srpo(batch, 0.1, 0.3).loss.item(), 0.7 * first + 0.3 * second)


@pytest.mark.parametrize("seed", SEEDS)
def test_mapl(seed: int) -> None:
    batch = others.enrich(random_batch(seed, groups=10, size=2), seed)
    same(batch, others.mapl(batch, intra=0.0, inter=0.0), others.dpo(batch))


def test_mapl_terms() -> None:
    batch = pair(4.0) + pair(1.0)
    for gap, group in zip((2.0, 1.0), batch):
        for one in group:
            one.facts.update(family=0, gap=gap)
    close(others.mapl(batch, beta=0.5).extra["inter"], math.log(1 + math.exp(-1.5)))
    one = row([-1.0, -1.0])
    for at in sampled(one):
        at.facts.update(changed=leaf(-2.0), changed_reference=-1.0)
    close(others.mapl([[one]], beta=0.5).loss.item(), math.log(1 + math.exp(-1.0)))


def test_dpa() -> None:
    rows = [row([-1.0, -2.0], ratings=[1.0, 9.0]), row([-3.0], ratings=[2.0, 0.0]), row([-4.0], ratings=[2.0, 1.0])]
    for one in rows:
        one.facts["direction"] = [1.0, 0.0]
    # "fixed v=(1,0) → rejection-sampling fine-tuning": best of the first head, first of a tie
    result = others.dpa([rows])
    assert result.extra["kept"] == [False, True, False]
    close(result.loss.item(), 3.0)
    for one in rows:
        one.facts["direction"] = [math.cos(0.7), math.sin(0.7)]
    close(others.dpa([rows]).loss.item(), 1.5)
    assert others.dpa_prompt(0.0) == "helpfulness*100 + verbosity*0"
    assert others.dpa_prompt(-math.pi / 4) == "helpfulness*71 + verbosity*-71"


# Expert data


def test_chord_schedule() -> None:
    found = [others.chord_mu(s, 200, 400, 0.5, 0.02) for s in (0, 100, 200, 400, 600)]
    close(found, [0, 0.25, 0.5, 0.26, 0.02])


@pytest.mark.parametrize("seed", SEEDS)
def test_chord(seed: int) -> None:
    batch = plain(seed)
    reinforced = others.chord(batch, peak=0.0, valley=0.0)
    close(reinforced.advantage, grpo(batch, beta=0.0)[0])
    count = len(list(tokens(batch)))
    moves = [others.log_ratio(one).item() for one in tokens(batch)]
    for slope, a, move in zip(gradients(batch, reinforced.loss), reinforced.advantage, moves):
        if abs(move) < 0.1:  # inside all bounds: the token mean of ρA
            close(slope, -a * math.exp(move) / count)
    for one in trajectories(batch):
        one.facts["origin"] = "expert"
    result = others.chord(batch, peak=1.0, valley=1.0)
    count = len(list(tokens(batch)))
    close(gradients(batch, result.loss), [-1 / count] * count)
    same(batch, others.chord(batch, peak=0.0, valley=0.0), ([0.0] * count, torch.zeros((), dtype=torch.float64)))


def test_chord_phi() -> None:
    for p, phi in ((0.5, 0.25), (1.0, 0.0), (0.2, 0.16)):
        batch = [[row([math.log(p)], origin="expert")]]
        result = others.chord(batch, peak=1.0, valley=1.0, weight="phi")
        close(gradients(batch, result.loss), [-phi])  # no gradient through phi
        close(result.loss.item(), -phi * math.log(p))
    batch = [[row([math.log(0.6), math.log(0.3)], origin="expert")]]
    close(gradients(batch, others.chord(batch, peak=1.0, valley=1.0, cutoff=0.5).loss), [0.0, -0.5])
    close(gradients(batch, others.chord(batch, peak=1.0, valley=1.0, weight="is").loss), [-0.3, -0.15])


def test_unified() -> None:
    x = leaf(-1.7)
    (sft,) = torch.autograd.grad(others.unified(x, x.item(), 1.0), x)
    close(sft.item(), -1.0)
    (ppo,) = torch.autograd.grad(others.unified(x, -1.7, 0.3), x)
    close(ppo.item(), -0.3)
    close(others.unified(x, -1.7, 0.3, stable=False).item(), 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_hpt(seed: int) -> None:
    batch = plain(seed)
    same(batch, others.hpt(batch, gate=-1.0, clip=0.2), dr_grpo(batch, clip=0.2))
    batch = others.enrich(random_batch(seed), seed)
    result = others.hpt(batch, gate=1.0)
    demos = [next((one for one in group if one.facts.get("origin") == "expert"), None) for group in batch]
    rows = [one for one in demos if one is not None and sampled(one)]
    nll = sum(-sum(at.logp.item() for at in sampled(one)) / len(sampled(one)) for one in rows) / max(len(rows), 1)
    close(result.loss.item(), nll)
    close(result.advantage, [0.0] * len(result.advantage))


def test_hpt_gate() -> None:
    def make(solved: int) -> Batch:
        rows = [row([-1.0], float(i < solved), i < solved) for i in range(4)]
        return [[*rows, row([-2.0, -4.0], 1.0, origin="expert")]]

    close(others.hpt(make(0)).loss.item(), 3.0)
    close(others.hpt(make(0), coef=0.3).loss.item(), 0.9)
    batch = make(1)
    close(others.hpt(batch).advantage, [0.75, -0.25, -0.25, -0.25, 0.0, 0.0])
    close(gradients(batch, others.hpt(batch, length=2).loss), [-0.75 / 8] + [0.25 / 8] * 3 + [0.0, 0.0])
    close(others.hpt(batch, gate=0.25).loss.item(), 3.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_luffy(seed: int) -> None:
    batch = plain(seed)
    same(batch, others.luffy(batch), dr_grpo(batch, clip=1e12))
    batch = others.enrich(random_batch(seed), seed)
    # shaping: γ_s→∞ with scale γ_s → plain p; γ_s→0 → f≡1, zero gradient
    for one in tokens(batch):
        x = one.logp
        close((1e12 * others.shaped(x, 1e12)).item(), torch.exp(x).item())
        (slope,) = torch.autograd.grad(others.shaped(x, 1e-15), x)
        assert abs(slope.item()) < 1e-6
        p = math.exp(x.item())
        (slope,) = torch.autograd.grad(others.shaped(x, 0.1), x)
        close(slope.item(), 0.1 / (p + 0.1) ** 2 * p)


def test_luffy_goldens() -> None:
    def slope(p: float) -> float:
        x = leaf(math.log(p))
        (found,) = torch.autograd.grad(others.shaped(x, 0.1), x)
        return found.item() / p

    assert slope(1e-9) == pytest.approx(10, rel=1e-6)
    assert slope(1.0) == pytest.approx(0.083, abs=5e-4)
    batch = [[row([-1.0], 0.0), row([math.log(0.4)], 1.0, origin="expert")]]
    result = others.luffy(batch, length=1)
    close(result.advantage, [-0.5, 0.5])
    close(result.loss.item(), (0.5 - 0.5 * 0.8) / 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_guide(seed: int) -> None:
    batch = plain(seed)
    same(batch, others.guide(batch), grpo(batch, beta=0.0))  # nothing is guided
    for one in trajectories(batch):
        one.success = False
        one.facts["guided"] = one.lot < 0.5
    same(batch, others.guide(batch), grpo(batch, beta=0.0))  # an empty hint: one group of the same policy


def test_guide_trigger() -> None:
    batch = [[row([-1.0], 0.0), row([-1.0], 0.0), row([-1.0], 1.0, True, guided=True)]]
    assert others.guide(batch).advantage[2] > 1
    batch[0][0].success = True
    result = others.guide(batch)
    assert result.extra["used"] == [True, True, False]
    close(result.advantage, [0.0] * 3)


# Replay


@pytest.mark.parametrize("seed", SEEDS)
def test_arpo_reduces(seed: int) -> None:
    batch = plain(seed)
    same(batch, others.arpo_gui(batch, 0.2, 0.2, None), grpo(batch, beta=0.0))
    # stored successes without a failing group change nothing
    for group in batch:
        for one in group:
            one.turns[0].reward += 9.0
    before = others.arpo_gui(batch)
    stored = [[*group, row([-1.0], 9.0, origin="replay")] for group in batch]
    after = others.arpo_gui(stored)
    close(gradients(batch, after.loss), gradients(batch, before.loss))
    close(after.loss.item(), before.loss.item())


def test_arpo_injects() -> None:
    old = [row([-1.0], 1.0, origin="replay") for _ in range(8)]
    for at, one in enumerate(old):
        one.lot = abs(at - 3) / 10
        sampled(one)[0].behaviour = -5.0
    fresh = [row([-1.0], 0.0), row([-1.0], 0.11, format=-1.0), row([-1.0], 0.0)]
    fresh[1].turns[0].reward = 0.02
    result = others.arpo_gui([fresh + old])
    assert result.extra["used"] == [False, True, True] + [at == 3 for at in range(8)]
    paid = [1.0, 0.02 - 0.5, 0.0]
    middle = sum(paid) / 3
    spread = math.sqrt(sum((x - middle) ** 2 for x in paid) / 2) + 1e-6
    a, b, c = [(x - middle) / spread for x in paid]
    close(result.advantage, [0.0, b, c, 0.0, 0.0, 0.0, a, 0.0, 0.0, 0.0, 0.0])
    batch = [fresh + old]
    found = gradients(batch, result.loss)
    close(found[6], -a / 3)  # ρ=1 whatever was recorded
    assert result.extra["buffer"] == [list(range(3, 11))]
    fresh[1].turns[0].reward = 0.1  # population std 0.0471, sample std 0.0577
    assert others.arpo_gui(batch).extra["used"][0] is False
    fresh[1].turns[0].reward = 0.5
    result = others.arpo_gui(batch)
    assert result.extra["used"] == [True] * 3 + [False] * 8
    assert result.extra["buffer"] == [[*range(4, 11), 1]]


@pytest.mark.parametrize("seed", SEEDS)
def test_spear_reduces(seed: int) -> None:
    batch = plain(seed)
    wide = others.spear_replay(batch, bonus=False, imitate=False, low=0.2, high=0.2)
    same(batch, wide, dr_grpo(batch, clip=0.2))
    one = batch[4:5]
    single = others.spear_replay(one, bonus=False)
    close(single.extra["baseline"], sum(total(x) for x in one[0]) / len(one[0]))


def test_spear() -> None:
    close([others.spear_bonus(s) for s in (0, 50, 100, 101)], [1.0, 0.5, 0.0, 0.0])
    close([others.spear_weight(s) for s in (0, 100, 200, 500)], [0.0, 0.5, 1.0, 1.0])
    fresh = [row([-1.0], 1.0), row([-1.0], 0.0)]
    fresh[0].turns[0].tool_calls = 3
    again = [row([-1.0], 1.0, origin="replay"), row([-1.0], 0.1, origin="replay"), row([-1.0], 1.0, origin="replay")]
    again[2].facts["age"] = 11
    batch = [fresh + again]
    result = others.spear_replay(batch, step=100, history=[0.1, 0.4], length=1)
    close(result.extra["baseline"], 0.4)
    close(result.advantage, [0.5, -0.5, 0.6, 0.0, 0.0])
    close(gradients(batch, result.loss), [-0.25, 0.25, -0.3, 0.0, 0.0])
    assert result.extra["store"] == [True, False, False, False, False]
    # "replay gradients change when only replay data change"
    again[0].turns[0].reward = 2.0
    close(gradients(batch, others.spear_replay(batch, 100, [0.1, 0.4], length=1).loss)[:3], [-0.25, 0.25, -0.8])
    close(others.spear_replay(batch, step=0).advantage[:2], [0.65, -0.65])


@pytest.mark.parametrize("seed", SEEDS)
def test_r1v2(seed: int) -> None:
    batch = plain(seed)
    same(batch, others.r1v2(batch), grpo(batch, beta=0.0))
    batch = others.enrich(random_batch(seed, size=2), seed)
    couples = [group for group in batch if len(group) == 2 and "chosen" in group[0].facts]
    same(couples, others.r1v2(couples, preference=1.0, quality=0.0, generation=0.0), others.dpo(couples))
    bco = others.r1v2(couples, preference=0.0, quality=1.0, generation=0.0)
    same(couples, bco, others.dpo(couples, kind="bco"))


def test_r1v2_buffer() -> None:
    batch = [[row([-1.0], r) for r in (0.0, 0.0, 3.0)] + [row([-1.0], origin="replay", advantage=0.7)], [row([-1.0])]]
    result = others.r1v2(batch)
    close(result.extra["draw"], [0.25, 0.25, 0.5, 0.0, 0.0])
    close(result.advantage[3], 0.7)
    assert result.extra["stored"] == [True, True, True, False, False]


@pytest.mark.parametrize("seed", SEEDS)
def test_bepa(seed: int) -> None:
    batch = plain(seed)
    same(batch, others.bepa(batch), grpo(batch, beta=0.0))
    # a cache of own successes only, ρ=1 → card 9
    groups = [[row([-1.0, -2.0]), row([-0.5]), row([-3.0], 1.0, origin="replay")] for _ in range(2)]
    same(groups, others.bepa(groups, "recompute", low=0.2, high=0.3), others.arpo_gui(groups, dual=None))


def test_bepa_cache() -> None:
    expert = row([math.log(0.4)], 1.0, origin="expert")
    batch = [[row([-1.0]), row([-1.0]), expert], [row([-1.0]), row([-1.0], 1.0), copy.deepcopy(expert)], [row([-1.0])]]
    result = others.bepa(batch)
    assert result.extra["cache"] == [2, 1, None]
    assert result.extra["used"] == [False, True, True, True, True, False, True]
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    close(result.advantage, [0.0, -a, a, -a, a, 0.0, 0.0])
    close(gradients(batch, result.loss)[2], -a * 0.1 / 0.25 * 0.4 / 5)


# Distillation


@pytest.mark.parametrize("seed", SEEDS)
def test_opd(seed: int) -> None:
    batch = others.enrich(random_batch(seed), seed)
    own = [one for row_ in trajectories(batch) for one in sampled(row_) if others.origin(row_) == "policy"]
    first = others.opd(batch, lam=1.0)
    for one in tokens(batch):
        one.reference -= 1.3
    second = others.opd(batch, lam=1.0)
    assert first.advantage == second.advantage and first.loss.item() == second.loss.item()
    zero = [x for x, r in zip(others.opd(batch, lam=0.0).advantage, flags(batch)) if r]
    close(zero, [one.reference - one.behaviour for one in own])
    for one in tokens(batch):
        one.facts["teacher"] = one.reference
    lam = [x for x, r in zip(others.opd(batch).advantage, flags(batch)) if r]
    close(lam, [one.reference - one.behaviour for one in own])  # π*=π_ref → KL to reference


def flags(batch: Batch) -> list[bool]:
    return [others.origin(one) == "policy" for one in trajectories(batch) for _ in sampled(one)]


def test_opd_optimum() -> None:
    teacher, reference, lam = [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], 1.25
    raw = [t**lam * r ** (1 - lam) for t, r in zip(teacher, reference)]
    batch = [[row([math.log(x / sum(raw))]) for x in raw]]
    for one, t, r in zip(tokens(batch), teacher, reference):
        one.facts["teacher"], one.reference = math.log(t), math.log(r)
    result = others.opd(batch)
    close(result.advantage, [math.log(sum(raw))] * 3)  # the same for every token: no expected gradient
    one = next(tokens(batch))
    one.proximal, one.behaviour = -1.0, -9.0
    assert others.opd(batch, cap=5.0).loss.item() != others.opd(batch).loss.item()


def test_scope() -> None:
    def ppl(numbers: list[float], right: bool) -> Batch:
        rows = [row([-math.log(x)] * 2, success=right) for x in numbers]
        for one in rows:
            for at in sampled(one):
                at.facts["teacher"] = at.logp.item()
        return [rows]

    assert others.scope(ppl([1.2, 2.6, 3.8], True)).extra["weight"] == pytest.approx([0.158, 0.342, 0.5], abs=6e-4)
    assert others.scope(ppl([4.5, 2.9, 1.7], False)).extra["weight"] == pytest.approx([0.192, 0.298, 0.509], abs=6e-4)
    # all wrong, uniform weights → OPD (on-policy: the same gradient, one weight per row)
    batch = [[row([-1.0, -2.0]), row([-2.5, -0.5])]]
    for at, one in enumerate(tokens(batch)):
        one.facts["teacher"] = -1.5 + (0.2 if at % 2 else -0.2)
    result = others.scope(batch)
    plain_opd = others.opd(batch, lam=1.0)
    close(result.extra["weight"], [0.5, 0.5])
    close(result.advantage, [x / 2 for x in plain_opd.advantage])
    close(gradients(batch, result.loss), [2 * x for x in gradients(batch, plain_opd.loss)])
    # no teacher path → weighted self-likelihood
    batch = [[row([-1.0, -1.0], success=True), row([-1.0], success=True)]]
    close(gradients(batch, others.scope(batch).loss), [-0.5] * 3)


def test_otr() -> None:
    batch = [[row([-1.0, -2.0], origin="expert")]]
    first, second = sampled(batch[0][0])
    first.facts.update(hits=3, others=[])
    second.facts.update(hits=2, others=[])
    close(others.otr(batch).loss.item(), 1.5)  # all equal to the label → SFT
    second.facts.update(hits=1, others=[leaf(-0.5), leaf(-3.0), leaf(-3.0)])
    close(others.otr(batch).loss.item(), 0.5 * (1.0 + 0.25 * 2.0 - 0.025 * 6.5))
    # β_neg=0: likelihood weighted by n_gt/K, whose expectation is p (DFT)
    close(gradients(batch, others.otr(batch, 0.0).loss), [-0.5, -0.125])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_order_of_groups(name: str, seed: int) -> None:
    """Groups in another order: the same loss (rule 4: no denominator depends on the position)."""
    batch = others.enrich(random_batch(seed), seed)
    kwargs = {"step": 100} if name in ("chord", "spear_replay") else {}
    method = getattr(others, name)
    close(method(batch[::-1], **kwargs).loss.item(), method(batch, **kwargs).loss.item())


def test_spear_covariance() -> None:
    batch = [[row([-0.5, -0.6], 4.0), row([-6.0, -7.0], 0.0)]]
    whole = gradients(batch, others.spear_replay(batch, length=1).loss)
    for at, one in enumerate(tokens(batch)):
        one.lot = [0.9, 0.2, 0.5, 0.7][at]
    half = gradients(batch, others.spear_replay(batch, length=1, covariance=0.5).loss)
    # cov = ±2 · (logp + 3.525) = 6.05, 5.85, 4.95, 6.95: two of four go, by lot
    close(half, [whole[0], 0.0, 0.0, whole[3]])
