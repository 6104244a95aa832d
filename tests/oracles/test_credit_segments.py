"""The oracles of `credit_segments.py` against the golden numbers and the reductions that their cards state."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch

from .credit_segments import (
    archer,
    arpo_branches,
    arpo_credit,
    arpo_entropy,
    dcpo,
    direct_advantage,
    effective_rank,
    enrich,
    fapo,
    fapo_judge,
    gcpo,
    grpo_advantage,
    information_consistency,
    ipa,
    median,
    normalised,
    otc,
    otc_alone,
    otc_tool,
    r3l,
    rank_of,
    rank_shaped,
    rank_signals,
    rlfr,
    shapley_gain,
    shapley_values,
    shapley_weights,
    spear,
    spear_bonus,
    spear_clip,
    spear_fresh,
    spear_insert,
    spear_weight,
    spo_forget,
    spo_priority,
    spo_segment,
    spo_single_stream,
    spo_start,
    spo_tree,
    verl_rank,
)
from .objectives import grpo, mean, reinforce, rloo
from .records import Batch, Trajectory, Turn, gradients, random_batch, sampled, token, tokens, total, trajectories
from .result import Result

SEEDS = range(10)
STATE = {"ER": 1.5, "ERV": 0.1, "ERA": 0.0}


def near(numbers, tolerance: float = 1e-9):
    return pytest.approx(numbers, abs=tolerance, rel=tolerance)


def row(reward: float, lengths=(1,), **more) -> Trajectory:
    turns = [Turn([token(-1.0) for _ in range(length)], 0.0) for length in lengths]
    turns[-1].reward = reward
    return Trajectory(turns, **more)


def group(rewards) -> Batch:
    return enrich([[row(reward) for reward in rewards]], 0)


def made(seed: int) -> Batch:
    return enrich(random_batch(seed), seed)


def rank_plain(batch):
    return verl_rank(batch, STATE, stride=1)


def rank_everywhere(batch):
    return verl_rank(batch, STATE, stride=2, everywhere=True)


METHODS = {
    "spo_segment": spo_segment,
    "spo_segment short": lambda batch: spo_segment(batch, rho=0.15, m=2),
    "spo_tree": spo_tree,
    "spo_tree std": lambda batch: spo_tree(batch, normalise=True),
    "spo_single_stream": spo_single_stream,
    "arpo soft": arpo_credit,
    "arpo hard": lambda batch: arpo_credit(batch, hard=True),
    "ipa": ipa,
    "dcpo": dcpo,
    "dcpo kept": lambda batch: dcpo(batch, keep=1),
    "archer": archer,
    "archer baseline": lambda batch: archer(batch, baseline=True),
    "direct_advantage": direct_advantage,
    "direct_advantage filtered": lambda batch: direct_advantage(batch, least=0.2),
    "r3l": r3l,
    "r3l tau": lambda batch: r3l(batch, tau=0.5, documented=True),
    "spear": spear,
    "spear std": lambda batch: spear(batch, normalise=True, step=30),
    "spear_fresh": spear_fresh,
    "verl_rank first": verl_rank,
    "verl_rank": rank_plain,
    "verl_rank everywhere": rank_everywhere,
    "rlfr": rlfr,
    "rlfr levels": lambda batch: rlfr(batch, levels=(0.8, 0.5), top=1),
    "gcpo": gcpo,
    "shapley_gain": shapley_gain,
    "shapley_gain all": lambda batch: shapley_gain(batch, by_position=False, fresh_only=True),
    "fapo": fapo,
    "otc": otc,
    "otc alone": lambda batch: otc(batch, alone=True),
    "information_consistency": information_consistency,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", METHODS)
def test_finite(name: str, seed: int) -> None:
    batch = made(seed)
    found = METHODS[name](batch)
    count = len(list(tokens(batch)))
    if isinstance(found, Result):
        assert math.isfinite(found.loss.item()) and found.loss.dtype == torch.float64
        assert all(math.isfinite(one) for one in gradients(batch, found.loss))
        for key in ("mask", "weight", "segment"):
            if isinstance(found.extra.get(key), list):
                assert len(found.extra[key]) == count
        found = found.advantage
    assert len(found) == count
    assert all(math.isfinite(one) for one in found)


@pytest.mark.parametrize("name", METHODS)
def test_no_token_at_all(name: str) -> None:
    assert METHODS[name](enrich([[row(1.0, (0, 0))]], 0)) is not None


def test_shared_golden() -> None:
    assert grpo_advantage(group([1, 0, 0, 0])) == near([1.5, -0.5, -0.5, -0.5], 1e-5)
    for seed in SEEDS:
        batch = made(seed)
        assert METHODS["arpo soft"](batch) == near(grpo(batch)[0])


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_spo_chain_telescopes(seed: int) -> None:
    """Card: "sum over segments = R - V(prompt)": one representative per segment, here m=1 and rho=1, every token one."""
    batch = made(seed)
    found = iter(spo_segment(batch, rho=1.0, m=1).advantage)
    for one in trajectories(batch):
        mine = [next(found) for _ in sampled(one)]
        if mine and "prompt_completions" in one.facts:
            assert math.fsum(mine) == near(total(one) - mean(one.facts["prompt_completions"]))


def test_spo_segments_by_hand() -> None:
    one = row(1.0, (3, 3))
    for t, (token_, p) in enumerate(zip(sampled(one), [0.95, 0.5, 0.99, 0.5, 0.2, 0.95])):
        token_.behaviour = math.log(p)
        token_.facts["completions"] = [t / 10, t / 10]
    one.facts["prompt_completions"] = [0.0, 0.5]
    found = spo_segment([[one]], m=2)  # U = 1, 3, 4; cuts before 1 and 4
    assert found.advantage == near([0.1 - 0.25, 0.3, 0.3, 0.3, 0.6, 0.6])
    assert found.extra["mask"] == [0, 1, 0, 1, 1, 0]
    del one.facts["prompt_completions"]
    assert spo_segment([[one]], m=2).advantage == near([0.0, 0.3, 0.3, 0.3, 0.6, 0.6])
    # VinePPO: every token V(next) - V(here)
    assert spo_segment([[one]], rho=1.0, m=1).advantage == near([0.1, 0.1, 0.1, 0.1, 0.1, 0.5])


def test_spo_one_segment_is_reinforce_with_baseline() -> None:
    for seed in SEEDS:
        batch = made(seed)
        plain = reinforce(batch)[0]
        prompts = [mean(one.facts.get("prompt_completions", [math.nan])) for one in trajectories(batch) if sampled(one)]
        found = spo_segment(batch, rho=0.0)
        at = 0
        for one, prompt in zip([one for one in trajectories(batch) if sampled(one)], prompts):
            for _ in sampled(one):
                assert found.advantage[at] == near(0.0 if math.isnan(prompt) else plain[at] - prompt)
                at += 1
        assert set(found.extra["mask"]) == {0.0}


def test_spo_tree_by_hand() -> None:
    batch = [[row(reward, (1, 1)) for reward in (1.0, 0.0, 1.0, 1.0)]]
    for i, one in enumerate(batch[0]):
        one.turns[0].facts["node"] = i // 2
        one.turns[1].facts["node"] = (i // 2, i % 2)
    found = spo_tree(batch)
    assert found.advantage == near([-0.25, 0.5, -0.25, -0.5, 0.25, 0.0, 0.25, 0.0])
    assert found.extra["weight"] == [0.5, 1, 0.5, 1, 0.5, 0, 0.5, 0]
    assert spo_tree(batch, normalise=True).advantage == near(
        [-(0.5**0.5), 0.5**0.5] * 1 + [-(0.5**0.5), -(0.5**0.5)] + [0.5**0.5, 0.0, 0.5**0.5, 0.0], 1e-6
    )


def test_spo_single_stream() -> None:
    assert spo_start(6) == near((5.7778, 2.2222), 1e-4)
    assert spo_forget([(-1.0, -1.06)], 0.06, 0.875, 0.96) == near(0.875)
    assert spo_forget([], 0.06, 0.875, 0.96) == near(0.96)
    assert spo_priority(4, 4) == near(0.55)
    batch = enrich([[row(1.0, success=True)], [row(0.0)]], 1)
    for one in trajectories(batch):
        one.facts["tracker"], one.facts["stored"] = (4.0, 4.0), [(-1.0, -1.06), (-2.0, -1.94)]
    found = spo_single_stream(batch)
    assert found.extra["tracker"][0] == near((4.5, 3.5))
    a, b = found.extra["tracker"][0]
    assert a / (a + b) == near(0.5625)
    assert found.extra["raw"] == near([0.5, -0.5])
    assert found.advantage == near([0.5**0.5, -(0.5**0.5)], 1e-6)
    # Card: "rho=1 -> Beta-Bernoulli posterior mean"
    assert spo_single_stream(batch, rho_min=1.0, rho_max=1.0).extra["tracker"] == [near((5, 4)), near((4, 5))]
    # Card: "rho_min=rho_max=c -> EMA-like tracker with effective window 1/(1-c)"
    a, b = 1.0, 1.0
    for _ in range(400):
        batch[0][0].facts["tracker"] = (a, b)
        a, b = spo_single_stream(batch, rho_min=0.9, rho_max=0.9).extra["tracker"][0]
    assert a + b == near(10.0)


def test_arpo() -> None:
    assert arpo_entropy([math.log(0.1)] * 10, 10) == near(1.0)
    assert arpo_branches(1.0, 0.0, 0.69) and not arpo_branches(1.0, 0.0, 0.71)
    for seed in SEEDS:
        batch = made(seed)
        for one in tokens(batch):
            one.facts["key"] = None  # N = M: no branch
        assert arpo_credit(batch, hard=True) == near(arpo_credit(batch))
    for seed in SEEDS:
        # Card: "prefix gradient equals d x mean A": summed over the rows that share a token, hard and soft agree
        batch = made(seed)
        hard, soft = iter(arpo_credit(batch, hard=True)), iter(arpo_credit(batch))
        for rows_ in batch:
            sums: dict = {}
            for i, one in enumerate(rows_):
                for t, token_ in enumerate(sampled(one)):
                    key = token_.facts["key"] or (i, t, "own")
                    a, b = sums.get(key, (0.0, 0.0))
                    sums[key] = a + next(hard), b + next(soft)
            for a, b in sums.values():
                assert a == near(b)


def test_ipa() -> None:
    assert ipa([[row(1.0, (1, 1, 1))]]).advantage == near([0.9025, 0.95, 1.0])
    for seed in SEEDS:
        batch = made(seed)
        assert ipa(batch, gamma=1.0).advantage == near(reinforce(batch)[0])  # equal credit
    # one chunk: sequence-level TOPR with the geometric-mean ratio
    for reward, ratio, weight in (
        (1.0, 0.5, 1.0),
        (1.0, 3.0, 1.0),
        (-1.0, 0.5, 0.5),
        (-1.0, 3.0, 1.0),
        (0.0, 0.5, 0.5),
    ):
        one = Trajectory([Turn([token(-2.0 + math.log(ratio), behaviour=-2.0) for _ in range(3)], reward)])
        found = ipa([[one]])
        assert gradients([[one]], found.loss) == near([-weight * reward] * 3)
    # mismatch: engines differ by a factor of 6 on the chunk
    one = Trajectory([Turn([token(-1.0, behaviour=-1.0 - math.log(6), proximal=-1.0)], 1.0)])
    assert ipa([[one]]).extra["mask"] == [0.0] and ipa([[one]], H=6.1).extra["mask"] == [1.0]


def test_dcpo() -> None:
    for seed in SEEDS:
        batch = made(seed)
        assert dcpo(batch).advantage == near(grpo(batch)[0])
        assert set(dcpo(batch).extra["mask"]) == {1.0}
        for one in trajectories(batch):
            for turn in one.turns:
                turn.facts["memory"] = False
        assert set(dcpo(batch, keep=1).extra["segment"]) == {0} and set(dcpo(batch, keep=1).extra["mask"]) == {1.0}
    one = row(1.0, (2, 1, 1, 1))
    for turn, memory in zip(one.turns, [False, True, False, True]):
        turn.facts["memory"] = memory
    for token_, lot in zip(sampled(one), [0.9, 0.0, 0.0, 0.1, 0.0]):
        token_.lot = lot
    assert dcpo([[one]]).extra["segment"] == [0, 0, 0, 1, 1]
    assert dcpo([[one]], keep=1).extra["mask"] == [0, 0, 0, 1, 1]


def test_archer() -> None:
    one = row(2.0, (2,))
    one.turns[0].facts.update(q=(2.0, 2.0), v=(0.0, 0.0), slow_q=(0.5, 0.7), slow_v=(9.0, 9.0))
    found = archer([[one]], gamma=0.0)
    assert found.extra["q_target"] == [(2.0, 2.0)] and found.extra["v_target"] == [(0.5, 0.7)]
    assert found.extra["critic_loss"] == near(0.25 + 0.49)
    assert found.advantage == [2.0, 2.0]
    assert gradients([[one]], found.loss) == near([-2.0, -2.0])
    for seed in SEEDS:  # Card: "Q=MC return,V=0 -> REINFORCE"; one turn each
        batch = enrich(random_batch(seed, turns=1), seed)
        batch = [[one for one in rows_ if len(one.turns) == 1] for rows_ in batch]
        for one in trajectories(batch):
            one.turns[0].facts.update(q=(total(one), total(one) + 1), v=(0.0, 0.5))
        plain = reinforce(batch)
        found = archer(batch)
        assert found.advantage == near(plain[0])
        assert gradients(batch, found.loss) == near(gradients(batch, plain[1]))
    two = row(1.0, (1, 1))
    two.turns[0].facts.update(q=(1.0, 3.0), v=(0.5, 2.0), slow_q=(0.0, 0.0), slow_v=(0.0, 0.0))
    two.turns[1].facts.update(q=(1.0, 3.0), v=(2.0, 2.5), slow_q=(0.0, 0.0), slow_v=(1.0, 2.0))
    found = archer([[two]])
    assert found.extra["q_target"] == [near((0.9, 1.8)), (1.0, 1.0)]
    assert found.advantage == near([0.5, -1.0])
    sampled(two)[0].value = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    found = archer([[two]], baseline=True)
    assert found.advantage == near([0.25, -1.0])
    assert gradients([[two]], found.loss, "value")[0] == near(-2 * 0.25 / 2)


def test_direct_advantage() -> None:
    for seed in SEEDS:  # Card: "if A=0 the optimum keeps pi=pi_ref"
        batch = made(seed)
        for one in trajectories(batch):
            for turn in one.turns:
                turn.facts["value"] = total(one)
            for token_ in sampled(one):
                token_.reference = token_.logp.item()
        found = direct_advantage(batch)
        assert found.advantage == near([0.0] * len(found.advantage))
        assert found.loss.item() == near(0.0) and gradients(batch, found.loss) == near([0.0] * len(found.advantage))
    one = row(1.0, (2, 1))
    one.turns[0].facts.update(value=0.25, state="a")
    one.turns[1].facts.update(value=0.5, state="b")
    for token_ in sampled(one):
        token_.reference = -1.1
    found = direct_advantage([[one]], beta=0.5)
    assert found.advantage == near([0.25, 0.25, 0.5])
    assert found.loss.item() == near(((0.5 - 0.2) ** 2 + (1.0 - 0.1) ** 2) / 2)
    assert direct_advantage([[one]], least=0.1).extra["mask"] == [0.0] * 3


def test_r3l() -> None:
    plain = [[row(reward) for reward in (1.0, 0.5, 0.0, 0.0)]]
    assert r3l(plain).advantage == near([1.0, 0.375, -0.375, -0.375])
    assert r3l(plain, documented=True).advantage == near([3.0, 0.375, -0.375, -0.375])
    assert r3l([[row(1.0)]]).advantage == [1.0]
    for seed in SEEDS:
        batch = made(seed)
        for one in trajectories(batch):
            one.facts["retry_of"] = None
        found = r3l(batch, alpha=1.0, best=math.inf)
        centred = [total(one) - mean([total(peer) for peer in rows_]) for rows_ in batch for one in rows_]
        assert found.advantage == near([a for a, one in zip(centred, trajectories(batch)) for _ in sampled(one)])
        assert set(found.extra["mask"]) == {1.0}
        assert r3l(batch, alpha=1.0, best=math.inf, tau=1e6).advantage == near(found.advantage, 1e-5)
    batch = [[row(0.0, (1, 1, 1)), row(0.5, (1, 1)), row(0.25)]]
    batch[0][1].facts.update(retry_of=0, pivot=1)
    assert r3l(batch).extra["mask"] == [0, 1, 1, 0, 1, 1]
    assert r3l(batch).advantage == near([0, -0.25, -0.25, 0, 0.75, 0])


def test_spear() -> None:
    assert median([3, 1, 2]) == 2 and median([4, 1, 2, 3]) == 2.5
    assert [spear_weight(t) for t in (0, 50, 100, 500)] == near([0.0, 0.5, 1.0, 1.0])
    assert spear_weight(70, gamma_r=0.0) == 0.0
    one = row(0.0, (1, 1, 1))
    one.turns[0].tool_calls, one.turns[2].tool_calls = 3, 1
    assert [spear_bonus(one, t) for t in (0, 100, 200, 201)] == near([0.2, 0.1, 0.0, 0.0])
    batch = group([1.0, 0.2, 0.5, 0.7, 0.9])
    for at, one in enumerate(batch[0]):
        one.facts["age"], one.lot = 0, at / 10
    found = spear(batch, history=[0.4, 0.5, 0.6])
    # Card: "If today's median exceeds a stored reward, that row is dropped."
    assert found.extra["keep"] == [True, False, True, True, True]
    assert found.advantage == near([0.5, 0.0, 0.0, 0.2, 0.4])
    assert spear(batch, history=[0.5], size=3).extra["keep"] == [True, False, True, False, False]
    assert spear(batch, history=[0.5], deviations=[0.1, 0.5, 0.9], normalise=True).advantage[0] == near(1.0, 1e-5)
    batch[0][0].facts["age"] = 6
    assert spear(batch, history=[0.5]).extra["keep"] == [False, False, True, True, False]
    for seed in SEEDS:  # no bonus: centred rewards
        batch = made(seed)
        centred = [total(one) - mean([total(peer) for peer in rows_]) for rows_ in batch for one in rows_]
        plain = [a for a, one in zip(centred, trajectories(batch)) for _ in sampled(one)]
        assert spear_fresh(batch, step=201) == near(plain)
        assert spear_insert(batch, plain) == [a > 0 and bool(sampled(o)) for a, o in zip(centred, trajectories(batch))]
        keep = spear_clip(batch, plain, low=0.0, fraction=0.2)
        assert keep.count(0.0) <= 0.2 * len(keep)
        assert spear_clip(batch, plain, fraction=0.0) == [1.0] * len(plain)


def test_verl_rank() -> None:
    assert rank_of([1, 1, 1, 1]) == near(4.0, 1e-6)
    assert rank_of([3, 1]) == near(1.75477, 1e-5)
    assert rank_shaped(1.0, 0.8) == near(1.5) and rank_shaped(-1.0, 0.8) == near(-0.5)
    assert rank_shaped(0.0, 0.8) == 0.0 and rank_shaped(1.0, -0.8) == 1.0
    assert effective_rank([[1.0, 2.0]]) == near(1.0)
    Z = [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [1.0, 5.0], [0.3, 2.0]]
    m = [effective_rank(Z[:n]) for n in (2, 3, 4, 5)]
    d = [m[1] - m[0], m[2] - (m[0] + m[1]) / 2, m[3] - (m[0] + m[1] + m[2]) / 3]
    found = rank_signals(Z, stride=1)
    assert found["ER"] == near(m[3]) and found["ERV"] == near(mean(d)) and found["ERA"] == near((d[2] - d[0]) / 2)
    for seed in SEEDS:
        batch = made(seed)
        base = grpo(batch)[0]
        assert verl_rank(batch, STATE, stride=1, kappa=math.inf, everywhere=True).advantage == near(base)
        first = verl_rank(batch, stride=1)
        assert first.advantage == near(base)
        second = verl_rank(batch, STATE, stride=1, everywhere=True)
        assert all(a == 0 if b == 0 else a * b > 0 for a, b in zip(second.advantage, base))
        assert any(a != b for a, b in zip(second.advantage, base))
        for X in STATE:
            assert second.extra["state"][X] == near(0.7 * STATE[X] + 0.3 * first.extra["state"][X])
        last = [t == len(sampled(one)) - 1 for one in trajectories(batch) for t in range(len(sampled(one)))]
        code = verl_rank(batch, STATE, stride=1).advantage
        assert code == near([a if end else b for a, b, end in zip(second.advantage, base, last)])


def test_rlfr() -> None:
    for seed in SEEDS:
        batch = made(seed)
        assert rlfr(batch, coef=0.0) == near(grpo(batch)[0])
        for token_ in tokens(batch):
            token_.facts["deviation"] = {0.8: [0.3, 0.3]}
        assert rlfr(batch) == near(grpo(batch)[0])  # constant scores
    one = row(1.0, (4,))
    for token_, dev in zip(sampled(one), [0.0, 1.0, 0.5, 0.8]):
        token_.facts["deviation"] = {0.8: [dev, dev]}
    assert rlfr([[one]]) == near([-0.018, -0.018, -0.008, -0.008])
    assert rlfr([[one]], top=1) == near([-0.01, -0.01, 0.0, 0.0])


def test_gcpo() -> None:
    batch = group([1.0, 0.0, 0.0, 0.0])
    for one, action in zip(batch[0], [True, True, False, False]):
        one.facts.update(action=action, format=0.0)
    found = gcpo(batch)
    assert found.extra["sign"] == [1.0]
    assert found.extra["reward"] == near([2 + 1 / 1024, 1 + 1 / 1024, 1 / 1024, 1 / 1024])
    assert found.advantage == near(normalised([2.0, 1.0, 0.0, 0.0]))
    assert gcpo(batch, threshold=0.5).extra["sign"] == [0.0]
    assert gcpo(batch, threshold=0.5).advantage == near(normalised([1.0, 0.0, 0.0, 0.0]))  # GRPO + equal lengths
    for one in batch[0]:
        one.facts["action"] = not one.facts["action"]
    assert gcpo(batch).extra["sign"] == [-1.0]
    for one in batch[0]:
        one.facts["action"] = True
    assert gcpo(batch).extra["sign"] == [0.0]
    for seed in SEEDS:
        batch = made(seed)
        assert gcpo(batch, threshold=99.0, length_weight=0.0, format_weight=0.0).advantage == near(grpo(batch)[0])


def test_shapley_gain() -> None:
    assert shapley_weights([0.4, 0.4, 0.4]) == near([1 / 3] * 3)
    worth = [1.0, 2.0, 4.0]
    orders = [list(order) for order in permutations(range(3))]
    assert shapley_values(3, lambda known: math.fsum(worth[f] for f in known), orders) == near(worth)
    both = shapley_values(2, lambda known: float(len(known) == 2), [[0, 1], [1, 0]] * 2, change=0.0)
    assert both == near([0.5, 0.5])
    for seed in SEEDS:
        batch = made(seed)
        gains = iter(shapley_gain(batch, fresh_only=True).extra["gain"])
        for one in trajectories(batch):  # Card: "sum_q SIG_q <= 1 if each fact counts once"
            assert math.fsum(next(gains) for _ in one.turns) <= 1 + 1e-12
            one.facts["shapley"] = [0.0] * len(one.facts["shapley"])
        gains = iter(shapley_gain(batch).extra["gain"])
        for one in trajectories(batch):  # Card: "uniform omega -> fraction of facts uncovered"
            for turn in one.turns:
                share = len(turn.facts["uncovered"]) / len(one.facts["shapley"])
                assert next(gains) == near(share if turn.facts["kind"] == "question" else 0.0)
    batch = [[row(0.0, (1, 1), success=True), row(0.0, (1,))]]
    for one in batch[0]:
        one.facts["shapley"] = [1.0, 1.0]
        for turn in one.turns:
            turn.facts.update(kind="answer", format=1.0, uncovered={0})
    batch[0][0].turns[0].facts["kind"] = "question"
    found = shapley_gain(batch)
    assert found.extra["reward"] == near([2 * 0.5 + 0.5 + 1, 4.0, 1.0])
    assert found.advantage == near([0.75, 0.0, -0.75])
    assert shapley_gain(batch, by_position=False).advantage == near([0.0, 1.5, -1.5])


def test_fapo() -> None:
    batch = enrich([[row(0.0, success=True), row(0.0, success=True), row(0.0), row(0.0)]], 0)
    for one, error in zip(batch[0], [-1, 2, 2, -1]):
        one.facts["error"] = error
    assert fapo(batch) == near(normalised([1, 0, -1, -1]))
    assert fapo(batch)[1] > 0  # mean below 0: rho < 1 with the flawed one at 0
    batch[0][2].success = True
    batch[0][2].facts["error"] = -1
    assert fapo(batch)[1] < 0
    for seed in SEEDS:
        batch = made(seed)
        base, harsh = [], []
        for rows_ in batch:
            base += normalised([1.0 if one.success else -1.0 for one in rows_])
            harsh += normalised([1.0 if one.success and one.facts["error"] == -1 else -1.0 for one in rows_])
        count = [len(sampled(one)) for one in trajectories(batch)]
        assert fapo(batch, 0.0) == near([a for a, n in zip(base, count) for _ in range(n)])
        assert fapo(batch, 2.0) == near([a for a, n in zip(harsh, count) for _ in range(n)])
    cases = [(-1, None), (-1, -1), (-1, 2), (2, -1), (2, 2), (2, 4), (2, None)]
    assert [fapo_judge(4, true, guess) for true, guess in cases] == [-1, 1, -1, -1, 1, 0.5, -1]


def test_otc() -> None:
    assert [otc_alone(m, 4) for m in range(5)] == near([1, 0.8660, 0.7071, 0.5878, 0.5], 5e-5)
    assert [otc_tool(m, 2, 4) for m in range(6)] == near([0, 0.8660, 1, 0.9511, 0.8660, 0.7818], 5e-5)
    assert [otc_tool(m, m, 4) for m in range(6)] == near([1.0] * 6)
    assert otc_tool(1e9, 3, 4) == near(0.0, 1e-6)
    assert otc_alone(5, 1e12) == near(1.0) and otc_tool(5, 0, 1e12) == near(1.0)
    batch = enrich([[row(0.0, success=True) for _ in range(2)] + [row(0.0)]], 0)
    for one, calls in zip(batch[0], [2, 4, 0]):
        one.turns[0].tool_calls = calls
        one.facts["fewest"] = None
    found = otc(batch)
    assert found.extra["fewest"] == [2] and found.extra["reward"] == near([1.0, math.sin(math.pi * 4 / 6), 0.0])
    for one in batch[0]:
        one.facts["fewest"] = 0
    assert otc(batch).extra["reward"] == otc(batch, alone=True).extra["reward"]
    for one in batch[0]:
        one.success, one.facts["fewest"] = False, None
    assert otc(batch).advantage == [0.0] * 3 and otc(batch).extra["fewest"] == [None]


def test_information_consistency() -> None:
    batch = [[row(0.0, (4,)) for _ in range(3)]]
    for one in batch[0]:
        for token_, word in zip(sampled(one), "abca"):
            token_.facts["word"] = word
    assert information_consistency(batch) == near([0.0] * 12)
    for token_, word in zip(sampled(batch[0][0]), "abcd"):
        token_.facts["word"] = word
    richer = information_consistency(batch, stable=0.0)
    assert richer[0] > 0 > richer[4]
    H = [2 * math.log(2), 1.5 * math.log(2), 1.5 * math.log(2)]
    rewards = [one / H[0] - abs(one - mean(H)) for one in H]
    assert information_consistency(batch)[::4] == near(normalised(rewards))


def test_rloo_is_scaled_centring() -> None:
    assert rloo(group([1, 0, 0, 0]))[0] == near([1, -1 / 3, -1 / 3, -1 / 3])
