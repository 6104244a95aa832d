"""Signals of the hidden states: effective rank, reward probe, flow; each against a slow reference, and across a resume."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from oracles.credit_segments import rank_signals

from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Tree
from turnwise.core.signals import Signal
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.learner.signals import auxiliary
from turnwise.engines.learner.signals.hidden import effective_rank_signals

RANKS = (Signal.EFFECTIVE_RANK, Signal.EFFECTIVE_RANK_VELOCITY, Signal.EFFECTIVE_RANK_ACCELERATION)


# ---------------------------------------------------------------------- ranks


@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize(("stride", "longest"), [(40, 512), (1, 7), (3, 25), (40, 100)])
def test_ranks(width, stride, longest):
    counts = [[[0], [1], [2, 0, 1], [4]], [[41], [30, 11], [0, 0]], [[81], [121, 3], [60]]]
    tree = Tree.ragged(counts)
    hidden = torch.randn(tree.count(TOKEN), width, generator=torch.Generator().manual_seed(0))
    hidden[5:12] = hidden[5]  # constant states
    found = effective_rank_signals(tree, hidden, stride, longest)
    owner = tree.ancestor(TOKEN, TRAJECTORY)
    for k in range(tree.count(TRAJECTORY)):
        mine = hidden[owner == k].double().tolist()
        expected = rank_signals(mine, stride, longest) if mine else {"ER": 0.0, "ERV": 0.0, "ERA": 0.0}
        assert [float(found[s].x[k]) for s in RANKS] == pytest.approx(list(expected.values()), rel=1e-5, abs=1e-6)


def after_tokens(learner, batch):
    """The states after and before each sampled token: one sequence at a time through the decoder."""
    s, out = batch.sequences, []
    for a, b in zip(s.start[:-1].tolist(), s.start[1:].tolist()):
        alone = replace(
            s, ids=s.ids[a:b], start=torch.tensor([0, b - a]), sampled_at=s.sampled_at[:0], trajectory=s.trajectory[:1]
        )
        out.append(packed_forward.hidden_states(learner.model, alone))
    states = torch.cat(out).detach()
    return states[s.sampled_at], states[s.sampled_at - 1]


@pytest.mark.parametrize("positions", [1, 10**6])
def test_ranks_of_a_batch(kit, positions):
    learner, batch = LocalLearner(kit.make_model(), LearnerSettings(positions=positions)), kit.make_batch(3)
    found = learner.measure(batch, frozenset(RANKS))
    hidden, _ = after_tokens(learner, batch)
    owner = batch.tree.ancestor(TOKEN, TRAJECTORY)
    for k in range(len(batch)):
        expected = rank_signals(hidden[owner == k].double().tolist())
        assert [float(found[s].x[k]) for s in RANKS] == pytest.approx(list(expected.values()), rel=1e-4)


# ---------------------------------------------------------------------- probe


def rows_of(learner, batch):
    """Features and targets of each trajectory, one by one."""
    after, before = after_tokens(learner, batch)
    owner, group = batch.tree.ancestor(TOKEN, TRAJECTORY), batch.tree.parents[2]
    reward = batch.reward.sum(TRAJECTORY).x.double()
    z, y = [], []
    for k in range(len(batch)):
        mine = (owner == k).nonzero().squeeze(1)
        z.append(torch.cat([before[mine[0]], after[mine].mean(0)]).double())
        others = [float(reward[j]) for j in range(len(batch)) if j != k and group[j] == group[k]]
        y.append(sum(others) / len(others) if others else float(reward[k]))
    return torch.stack(z), torch.tensor(y, dtype=torch.float64)


PROBE = frozenset({Signal.REWARD_PROBE})


@pytest.mark.parametrize("positions", [1, 10**6])
def test_the_probe_is_a_ridge_regression_on_earlier_batches(kit, positions):
    learner = LocalLearner(kit.make_model(), LearnerSettings(dtype="float64", lr=0.0, positions=positions))
    earlier = []
    for seed in range(4):
        batch = kit.weighted(kit.make_batch(seed))
        found = learner.measure(batch, PROBE)[Signal.REWARD_PROBE]
        z, y = rows_of(learner, batch)
        if not earlier:
            assert not found.x.any()
        else:
            age = range(len(earlier) - 1, -1, -1)
            weight = torch.cat([torch.full((len(old),), 0.9**n) for n, (_, old) in zip(age, earlier)])
            weight = weight.double() / weight.double().sum()
            Z, Y = torch.cat([a for a, _ in earlier]), torch.cat([b for _, b in earlier])
            centre, offset = (weight[:, None] * Z).sum(0), (weight * Y).sum()
            C = Z - centre
            cov = C.T @ (weight[:, None] * C)
            slope = torch.linalg.solve(cov + torch.diag(cov.diagonal()), C.T @ (weight * (Y - offset)))
            torch.testing.assert_close(found.x, offset + (z - centre) @ slope, rtol=1e-6, atol=1e-8)
        for part in (batch.select([0, 1]), batch, batch):  # trains on each trajectory once, however it is split
            learner.update(part, kit.Linear())
        earlier.append((z, _targets_of_split_batch(batch, y)))


def _targets_of_split_batch(batch, y):
    """The first two trajectories were a batch of their own, so their peers were those of that batch."""
    part = batch.select([0, 1])
    reward = part.reward.sum(TRAJECTORY).x.double().tolist()
    together = int(part.tree.parents[2][0]) == int(part.tree.parents[2][1])
    return torch.cat([torch.tensor(reward[::-1] if together else reward, dtype=torch.float64), y[2:]])


def test_the_probe_recovers_a_linear_reward(kit):
    """Rewards that are a linear function of the features are predicted on an unseen batch."""
    learner = LocalLearner(kit.make_model(), LearnerSettings(dtype="float64", lr=0.0))
    learner.measurer.auxiliary_model(Signal.REWARD_PROBE).penalty = 1e-6
    coefficients = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def rewarded(seed):
        batch = kit.make_batch(seed, groups=25)
        batch = batch.select((batch.tree.size(TRAJECTORY, GROUP).at(TRAJECTORY).x == 1).nonzero().squeeze(1))
        z, _ = rows_of(learner, batch)
        worth = (z @ coefficients)[batch.tree.parents[1]] / batch.tree.size(TURN, TRAJECTORY).at(TURN).x
        return kit.weighted(replace(batch, reward=batch.tree.field(TURN, worth))), z @ coefficients

    for seed in range(14):
        batch, _ = rewarded(seed)
        learner.measure(batch, PROBE)
        learner.update(batch, kit.Linear())
    batch, expected = rewarded(99)
    found = learner.measure(batch, PROBE)[Signal.REWARD_PROBE].x
    assert float((found - expected).abs().mean()) < 0.05 * float(expected.std())


# ----------------------------------------------------------------------- flow

DEVIATION = frozenset({Signal.FLOW_DEVIATION})


def with_success(kit, seed, success=None):
    batch = kit.weighted(kit.make_batch(seed))
    flags = torch.arange(len(batch)) % 2 if success is None else torch.full((len(batch),), success)
    return replace(batch, success=batch.tree.field(TRAJECTORY, flags.float()))


def test_the_deviation_is_the_error_of_the_flow(kit):
    learner = LocalLearner(kit.make_model(), LearnerSettings(dtype="float64", lr=0.0, positions=40))
    assert not learner.measure(with_success(kit, 1), DEVIATION)[Signal.FLOW_DEVIATION].x.any()  # nothing learned yet
    learner.update(with_success(kit, 1), kit.Linear())
    batch = with_success(kit, 2)
    found = learner.measure(batch, DEVIATION)[Signal.FLOW_DEVIATION].x
    model, (after, before) = learner.measurer.auxiliary_model(Signal.FLOW_DEVIATION), after_tokens(learner, batch)
    unit = lambda h: h / (h.square().mean().sqrt() + 1e-6)  # noqa: E731
    for n in range(len(found)):
        x, c, e = unit(after[n]), unit(before[n]), model.noise
        v = model.net((0.8 * x + 0.2 * e)[None], torch.tensor([0.8], dtype=x.dtype), c[None])[0]
        assert float(found[n]) == pytest.approx(float((v - (x - e)).square().mean().detach()), rel=1e-9)


def test_the_flow_learns_from_success_alone(kit):
    learner = LocalLearner(kit.make_model(), LearnerSettings(lr=0.0))
    for success in (0.0, float("nan")):
        learner.measure(with_success(kit, 1, success), DEVIATION)
        learner.update(with_success(kit, 1, success), kit.Linear())
    assert learner.measurer.auxiliary_model(Signal.FLOW_DEVIATION).learned == 0
    errors = []
    for _ in range(25):
        errors.append(float(learner.measure(with_success(kit, 1, 1.0), DEVIATION)[Signal.FLOW_DEVIATION].x.mean()))
        learner.update(with_success(kit, 1, 1.0), kit.Linear())
    assert errors[0] == 0 and errors[-1] < 0.7 * errors[1]
    other_model = LocalLearner(kit.make_model(seed=9), LearnerSettings(lr=0.0))
    other_model.measurer._auxiliary_models = learner.measurer._auxiliary_models
    far = float(other_model.measure(with_success(kit, 1, 0.0), DEVIATION)[Signal.FLOW_DEVIATION].x.mean())
    assert far > 1.5 * errors[-1]  # states of another model deviate from this flow


def test_the_number_of_pairs_per_trajectory_is_bounded(kit, monkeypatch):
    monkeypatch.setattr(auxiliary, "PER_TRAJECTORY", 2)
    learner = LocalLearner(kit.make_model())
    batch = with_success(kit, 1, 1.0)
    learner.measure(batch, DEVIATION)
    rows, _ = learner.measurer.auxiliary_model(Signal.FLOW_DEVIATION).features.take(batch)
    assert 0 < len(rows) < batch.tree.count(TOKEN)


# ---------------------------------------------------------------------- resume


def test_auxiliary_models_resume_bit_identically(kit):
    ask = PROBE | DEVIATION | set(RANKS)
    make = lambda: LocalLearner(kit.make_model(), LearnerSettings(lr=1e-3))  # noqa: E731
    straight, second = make(), make()
    for seed in (1, 2):
        straight.measure(with_success(kit, seed), ask)
        straight.update(with_success(kit, seed), kit.Linear())
    state = straight.state_dict()
    second.load_state_dict({"tensors": state["tensors"], "scalars": json.loads(json.dumps(state["scalars"]))})
    for seed in (3, 4):
        a, b = (one.measure(with_success(kit, seed), ask) for one in (straight, second))
        assert all(torch.equal(a[s].x, b[s].x) for s in ask)
        assert a[Signal.REWARD_PROBE].x.any() and a[Signal.FLOW_DEVIATION].x.any()
        for one in (straight, second):
            one.update(with_success(kit, seed), kit.Linear())
    one, two = straight.state_dict()["tensors"], second.state_dict()["tensors"]
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    fresh = make().state_dict()
    second.load_state_dict(fresh)  # loading an untrained state resets them
    assert not second.measure(with_success(kit, 3), ask)[Signal.REWARD_PROBE].x.any()
