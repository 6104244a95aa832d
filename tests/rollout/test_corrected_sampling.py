"""A behaviour policy that corrects sampling error: its fit against the card, the card's figure, and rollouts sampled by it."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import values as oracle
from support.untrained import Untrained

from turnwise.core.records import Task, Trajectory, Turn
from turnwise.errors import RecipeError
from turnwise.rollout.sampling_correction import PrefixShifts, SamplingCorrection, StateDraws
from turnwise.rollout.strategies import CorrectedSampling, Independent

COUNTS = st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=4).filter(any), min_size=1, max_size=4)


def normalised(weights: list[float]) -> list[float]:
    return [w / math.fsum(weights) for w in weights]


def states_of(count: list[list[int]], chance: list[list[float]]) -> list[StateDraws]:
    known = [[a for a, n in enumerate(row) if n] for row in count]
    return [
        StateDraws({a: row[a] for a in seen}, {a: p[a] for a in seen}) for row, p, seen in zip(count, chance, known)
    ]


@settings(deadline=None, max_examples=60)
@given(
    COUNTS,
    st.randoms(use_true_random=False),
    st.floats(0.05, 0.6),
    st.floats(0.001, 0.5),
    st.integers(0, 12),
    st.floats(0.1, 2.0),
)
def test_shifts_against_the_cards_loss(count, rng, clip, stop, fits, rate):
    """All actions are told, those never drawn with a count of 0: then nothing is lumped together."""
    chance = [normalised([rng.uniform(0.1, 1.0) for _ in row]) for row in count]
    told = [StateDraws(dict(enumerate(row)), dict(enumerate(p))) for row, p in zip(count, chance)]
    found = SamplingCorrection(clip, stop, fits, rate).shifts(told)
    expected = oracle.props_shifts(count, chance, clip, stop, fits, rate)
    near_edge = any(abs(1 - clip - g) < 1e-4 for row, p in zip(found, chance) for g in ratios(row, p))
    if not near_edge:  # the numerical derivative straddles the edge
        for row, wanted in zip(found, expected):
            assert [row[a] for a in range(len(wanted))] == pytest.approx(wanted, abs=1e-4)


def ratios(shift: dict[int, float], chance: list[float]) -> list[float]:
    z = math.fsum(p * math.exp(shift.get(a, 0.0)) for a, p in enumerate(chance))
    return [math.exp(shift.get(a, 0.0)) / z for a in range(len(chance))]


@given(COUNTS, st.randoms(use_true_random=False))
def test_identities_of_the_card(count, rng):
    chance = [normalised([rng.uniform(0.1, 1.0) for _ in row]) for row in count]
    states = states_of(count, chance)
    assert all(not any(row.values()) for row in SamplingCorrection(epochs=0).shifts(states))  # E = 0: on-policy
    for row, state, p in zip(SamplingCorrection(stop=1e9, epochs=50, rate=0.1).shifts(states), states, chance):
        g = ratios(row, p)
        total = sum(state.count.values())
        assert sum(n * max(g[a], 0.7) for a, n in state.count.items()) <= total * (
            1 + 1e-9
        )  # the loss, 1 at φ = θ, falls
    # no gradient where g < 1 − ε: an action drawn alone stops there, up to one step
    alone = SamplingCorrection(clip=0.3, stop=1e9, epochs=500, rate=0.05).shifts([StateDraws({0: 5}, {0: 0.5})])[0]
    assert 0.64 < ratios(alone, [0.5, 0.5])[0] <= 0.7


def sampling_error(seed: int, corrected: bool, steps: int = 400, every: int = 10) -> float:
    """Card: random 10-state, 4-action problem, fixed softmax target, tabular logits, update every 10 steps: KL(π̂‖π_θ)."""
    rng = random.Random(seed)
    states, actions = range(10), range(4)
    target = [normalised([math.exp(rng.gauss(0, 1)) for _ in actions]) for _ in states]
    move = [[normalised([rng.expovariate(1) for _ in states]) for _ in actions] for _ in states]
    count = [[0] * 4 for _ in states]
    shift: list[dict[int, float]] = [{} for _ in states]
    at = 0
    for step in range(1, steps + 1):
        weights = [p * math.exp(shift[at].get(a, 0.0)) for a, p in enumerate(target[at])]
        a = rng.choices(actions, weights)[0]
        count[at][a] += 1
        at = rng.choices(states, move[at][a])[0]
        if corrected and step % every == 0:
            shift = SamplingCorrection().shifts(states_of(count, target))
    kl = [n * math.log(n / sum(row) / target[s][a]) for s, row in enumerate(count) for a, n in enumerate(row) if n]
    return math.fsum(kl) / steps


def test_the_figure_of_the_card():
    """Card: after 400 steps 0.038 on-policy, 0.016 corrected, a ratio of 0.42, over 40 seeds."""
    plain, better = (sum(sampling_error(seed, corrected) for seed in range(40)) / 40 for corrected in (False, True))
    assert plain == pytest.approx(0.038, abs=0.003)
    assert better / plain == pytest.approx(0.42, abs=0.03)


def test_target_probabilities_are_recovered_from_shifted_samples():
    """What is counted of a rollout are π_θ's probabilities, whichever shifts it was sampled by."""
    shifts, rng, target = PrefixShifts(SamplingCorrection(stop=1e9, epochs=8)), random.Random(3), [0.5, 0.3, 0.15, 0.05]
    for wave in range(6):
        shift = shifts((9,))
        z = math.fsum(p * math.exp(shift.get(a, 0.0)) for a, p in enumerate(target))
        behaviour = [p * math.exp(shift.get(a, 0.0)) / z for a, p in enumerate(target)]
        drawn = [rng.choices(range(4), behaviour)[0] for _ in range(3)]
        turns = [Turn((9,), (a,), (math.log(behaviour[a]),)) for a in drawn]
        shifts.observe(Trajectory(f"{wave}.{i}", Task("t", 0), (turn,)) for i, turn in enumerate(turns))
        assert any(shift.values()) == (wave > 0)
        for a, p in shifts.draws[(9,)].chance.items():
            assert p == pytest.approx(target[a], rel=1e-9)


def test_rollouts_of_later_waves_are_sampled_by_the_behaviour_policy():
    """The recorded log-probability is that of the shifted distribution; the first wave is the policy's own."""
    world = Untrained("guess", max_turns=2, max_tokens=3)
    group = world.grow(CorrectedSampling(2, SamplingCorrection(stop=1e9, rate=4.0)), seed=3, size=6)
    plain = world.grow(Independent(), seed=3, size=6)
    tokens = lambda g: [[turn.tokens for turn in t.turns] for t in g.trajectories]  # noqa: E731
    assert tokens(group)[:2] == tokens(plain)[:2]
    assert [bool(t.guidance) for t in group.trajectories] == [False, False] + [True] * 4
    measured, recorded = world.logp(group)
    shifts, at, moved = PrefixShifts(SamplingCorrection(stop=1e9, rate=4.0)), 0, 0
    for first in range(0, 6, 2):
        for t in group.trajectories[first : first + 2]:
            ids: list[int] = []
            for turn in t.turns:
                ids = [*([] if turn.restart else ids), *turn.context]
                for token in turn.tokens:
                    shift = shifts(ids)
                    chance = shifts.draws[tuple(ids)].chance if shift else {}
                    log_z = math.log1p(math.fsum(chance[a] * math.expm1(x) for a, x in shift.items()))
                    wanted = float(measured[at]) + shift.get(token, 0.0) - log_z
                    assert float(recorded[at]) == pytest.approx(wanted, abs=2e-4)
                    moved += bool(shift)
                    ids.append(token)
                    at += 1
        shifts.observe(group.trajectories[first : first + 2])
    assert moved >= 4 and not torch.allclose(measured, recorded, atol=1e-3)


def test_no_epochs_sample_as_independent_rollouts_do():
    world = Untrained("guess", max_turns=2, max_tokens=3)
    one, two = (
        world.grow(s, seed=5, size=4) for s in (CorrectedSampling(2, SamplingCorrection(epochs=0)), Independent())
    )
    tokens = lambda g: [[(turn.tokens, turn.logp) for turn in t.turns] for t in g.trajectories]  # noqa: E731
    assert tokens(one) == tokens(two)


def test_nonsense_and_other_generators_are_refused():
    for wrong in ({"clip": 1.0}, {"stop": 0.0}, {"epochs": -1}, {"rate": 0.0}):
        with pytest.raises(RecipeError, match="need 0 < clip"):
            SamplingCorrection(**wrong)
    with pytest.raises(RecipeError, match="wave is 0; write a number >= 1"):
        CorrectedSampling(0)

    class Remote:
        def park(self) -> None: ...

    world = Untrained("guess")
    request = world.request(size=3)

    async def grow():
        async def play(key, task, session, **more):
            return Trajectory(key, task, ())

        remote = replace(request, open_session=lambda i, draft=False: Remote(), play=play)
        return await CorrectedSampling(2).begin(remote)

    with pytest.raises(RecipeError, match="leave --generator out"):
        asyncio.run(grow())
