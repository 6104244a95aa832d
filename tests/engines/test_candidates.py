"""Candidate tokens, against explicit loops; every update on a batch scores the same ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from turnwise import recipes
from turnwise.algebra.gradient import Scales
from turnwise.algebra.objective import Loss
from turnwise.algebra.piece import MicroBatchView
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN
from turnwise.core.signals import Signal
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.learner.signals.hidden import CANDIDATES, stored_candidates

COLUMNS = tuple((Column.CANDIDATE, j) for j in range(CANDIDATES))
ASK = frozenset({Signal.CANDIDATE_MATCHES, Signal.CANDIDATE_LOGP, Signal.LOGP})


def distributions(learner, batch):
    """log π of the whole vocabulary at each sampled token, by the plain head."""
    h = packed_forward.hidden_states(learner.model, batch.sequences)[batch.sequences.sampled_at - 1]
    t = batch.temperature.at(TOKEN).x.to(h.dtype)
    return torch.log_softmax(learner.head(h) / torch.where(t == 0, 1.0, t)[:, None], 1)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
@pytest.mark.parametrize("positions", [1, 50, 10**6])
def test_hits_and_rivals(kit, name, positions):
    learner = LocalLearner(kit.make_model(name), LearnerSettings(dtype="float64", positions=positions))
    batch = kit.make_batch(4)
    found = learner.measure(batch, ASK)
    drawn = torch.stack([found[name].x for name in COLUMNS], 1)
    assert drawn.dtype == torch.int64
    logp = distributions(learner, batch).detach()
    for n, token in enumerate(batch.token.x.tolist()):
        mine = drawn[n].tolist()
        assert float(found[Signal.CANDIDATE_MATCHES].x[n]) == mine.count(token)
        expected = sum(float(logp[n, a]) for a in mine if a != token)
        assert float(found[Signal.CANDIDATE_LOGP].x[n]) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_the_setting_is_the_number_that_is_drawn_and_divided_by(kit, count):
    learner = LocalLearner(kit.make_model(), LearnerSettings(dtype="float64", positions=40))
    objective = recipes.build("otr", candidates=count).objective
    batch = objective.before_measuring(kit.make_batch(4))
    batch = batch.put(learner.measure(batch, objective.signals_before_batch))
    drawn = stored_candidates(batch)
    assert drawn.shape == (len(batch.token.x), count) and (Column.CANDIDATE, count) not in batch.columns
    logp = distributions(learner, batch).detach()
    live = learner.measurer.live(batch, frozenset({Signal.LOGP, Signal.CANDIDATE_LOGP}))[1]
    loss = objective.penalties[0].penalty
    found = loss(MicroBatchView(batch, live)).x.detach()
    for n, token in enumerate(batch.token.x.tolist()):  # each candidate earns 1 or −0.1: a mean over those drawn
        earned = [float(logp[n, a]) * (1.0 if a == token else -0.1) for a in drawn[n].tolist()]
        assert float(found[n]) == pytest.approx(-sum(earned) / len(earned), abs=1e-8)


def test_candidates_follow_the_policys_distribution(kit):
    """Over many tokens and draws, their frequencies match their probabilities."""
    learner = LocalLearner(kit.make_model(), LearnerSettings(dtype="float64"))
    matches, expected, variance = 0.0, 0.0, 0.0
    for seed in range(40):
        batch = kit.make_batch(seed, groups=6)
        p = distributions(learner, batch).exp().gather(1, batch.token.x[:, None]).squeeze(1).detach()
        matches += float(learner.measure(batch, ASK)[Signal.CANDIDATE_MATCHES].x.sum())
        expected += float(p.sum()) * CANDIDATES
        variance += float((p * (1 - p)).sum()) * CANDIDATES
    assert abs(matches - expected) < 4 * variance**0.5 and expected > 100


def test_neither_micro_batches_nor_order_change_the_draw(kit):
    batch = kit.make_batch(4)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    a = LocalLearner(kit.make_model(), LearnerSettings(positions=10**6)).measure(batch, ASK)
    mixed = batch.select(order)
    b = LocalLearner(kit.make_model(), LearnerSettings(positions=30)).measure(mixed, ASK)
    for name in (Signal.CANDIDATE_MATCHES, *COLUMNS):
        assert torch.equal(b[name].x, batch.put(weight=a[name]).select(order)["weight"].x)


def test_a_step_changes_the_random_numbers(kit):
    learner, batch = LocalLearner(kit.make_model(), LearnerSettings(lr=0.0)), kit.weighted(kit.make_batch(4))
    first = learner.measure(batch, ASK)
    learner.update(batch, kit.Linear())
    second = learner.measure(batch, ASK)
    assert any(not torch.equal(first[name].x, second[name].x) for name in COLUMNS)


@dataclass
class Recording:
    """Σ CANDIDATE_LOGP as the loss; records its values."""

    losses: list = field(default_factory=list)
    signals_with_gradient, signals_before_step = frozenset({Signal.LOGP, Signal.CANDIDATE_LOGP}), frozenset()

    def plan(self, batch):
        return batch

    def scales(self, batch, sides):
        return Scales()

    def __call__(self, batch, policy):
        loss = policy[Signal.CANDIDATE_LOGP].x.sum()
        self.losses.append(float(loss.detach()))
        return Loss(loss, dict, {})


def test_every_update_scores_the_candidates_of_the_measurement(kit):
    learner = LocalLearner(kit.make_model(), LearnerSettings(dtype="float64", lr=1e-2))
    batch = kit.make_batch(4)
    batch = batch.put(learner.measure(batch, ASK))
    drawn, recording = stored_candidates(batch), Recording()
    for _ in range(2):
        by_hand = (distributions(learner, batch).gather(1, drawn) * (drawn != batch.token.x[:, None])).sum()
        learner.update(batch, recording)
        assert recording.losses[-1] == pytest.approx(float(by_hand.detach()), rel=1e-8)
    assert recording.losses[0] != recording.losses[1]


def test_the_gradient_of_rivals(kit):
    learner = LocalLearner(kit.make_model("gpt2"), LearnerSettings(dtype="float64"))
    batch = kit.make_batch(4)
    batch = batch.put(learner.measure(batch, ASK))
    found = learner.measurer.live(batch, frozenset({Signal.CANDIDATE_LOGP}))[1][Signal.CANDIDATE_LOGP].x.sum()
    drawn = stored_candidates(batch)
    plain = (distributions(learner, batch).gather(1, drawn) * (drawn != batch.token.x[:, None])).sum()
    parameters = [p for n, p in learner.trained.items() if n.startswith("model/")]
    for a, b in zip(torch.autograd.grad(found, parameters), torch.autograd.grad(plain, parameters)):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_without_a_measurement_the_current_policy_is_sampled(kit):
    learner, batch = LocalLearner(kit.make_model()), kit.make_batch(4)
    measured = learner.measure(batch, ASK)
    bare = learner.measure(batch, frozenset({Signal.CANDIDATE_LOGP}))
    torch.testing.assert_close(bare[Signal.CANDIDATE_LOGP].x, measured[Signal.CANDIDATE_LOGP].x)
