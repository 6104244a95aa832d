"""Batches of older policies: which come back and when, that they stay whole, and that a restart changes nothing."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import records_of

from turnwise import recipes
from turnwise.algebra.penalty import ResetReference
from turnwise.config.settings import Settings
from turnwise.core.batch import pack
from turnwise.core.records import Group, Origin, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.data.replay import PastBatches, ReplaySources
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import RecipeError, SettingError
from turnwise.models.tiny import tiny_model
from turnwise.training.loop import update_policy
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import REQUIREMENTS, ranks, refuse


def step_of(step: int, groups: int, size: int = 2) -> list[Group]:
    made = []
    for g in range(groups):
        task = Task("test", 100 * step + g)
        turn = Turn((1,), (2,), (-0.5,), version=(step,))
        made.append(
            Group(f"{step}-{g}", task, tuple(Trajectory(f"{step}-{g}.{i}", task, (turn,)) for i in range(size)))
        )
    return made


class Ledger:
    def __init__(self):
        self.rows = {}

    def read(self, key):
        return self.rows.get(key)

    def take(self, live, step, groups=4):
        fresh = step_of(step, groups)
        mixed = live.mix(fresh, step)
        self.rows |= {t.id: t for g in fresh for t in g.trajectories}
        live.observe(fresh, {}, step)
        return fresh, mixed


@settings(deadline=None, max_examples=40)
@given(share=st.floats(0.0, 0.8), window=st.integers(1, 4), until=st.integers(0, 8), stop=st.integers(1, 8))
def test_share_window_end_and_restart(share, window, until, stop):
    """Fresh groups always; past ones whole, of the last window − 1 policies, at most the share, none after the end; and a buffer
    restored from JSON goes on as the first one would have."""
    ledger, rule = Ledger(), PastBatches(share, window, until)
    live = rule.open(ReplaySources(ledger.read, None, 5))
    for step in range(10):
        if step == stop:
            restored = rule.open(ReplaySources(ledger.read, None, 5))
            restored.load_state_dict(json.loads(json.dumps(live.state_dict())))
            fresh = step_of(step, 4)
            assert restored.mix(fresh, step) == live.mix(fresh, step)
            live = restored
        fresh, mixed = ledger.take(live, step)
        past = mixed[len(fresh) :]
        assert mixed[: len(fresh)] == fresh
        for g in past:
            assert len(g.trajectories) == 2 and all(t.origin == Origin.REPLAY for t in g.trajectories)
            ages = {int(t.facts["age"]) for t in g.trajectories}
            assert len(ages) == 1 and 1 <= ages.pop() < window
            assert {t.id for t in g.trajectories} <= set(ledger.rows)
        available = 0 if (until and step >= until) else 4 * min(step, window - 1)
        assert len(past) == min(available, round(share / (1 - share) * 4))
        assert len({g.id for g in past}) == len(past)


def test_a_group_with_pruned_tokens_does_not_come_back():
    ledger = Ledger()
    live = PastBatches(0.5, 2).open(ReplaySources(ledger.read, None, 0))
    ledger.take(live, 0, groups=2)
    del ledger.rows["0-0.1"]
    assert [g.id for g in live.mix(step_of(1, 2), 1)[2:]] == ["replay/0-1"]


def test_the_buffer_is_bounded():
    ledger = Ledger()
    live = PastBatches(0.5, 9, size=3).open(ReplaySources(ledger.read, None, 0))
    for step in range(5):
        ledger.take(live, step)
    assert live.metrics()["replay/groups"] == 3 and live.metrics()["replay/oldest_step"] == 4


def test_by_default_two_fifths_of_a_step_are_of_the_step_before():
    ledger = Ledger()
    live = PastBatches().open(ReplaySources(ledger.read, None, 0))
    for step in range(3):
        ledger.take(live, step, groups=6)
    past = live.mix(step_of(3, 6), 3)[6:]
    assert [g.id.split("-")[0] for g in past] == ["replay/2"] * 4
    assert live.rule.size == 4096


@pytest.mark.parametrize("rule, stored", [({"window": 1}, [0, 0, 0]), ({"window": 9, "until": 2}, [4, 4, 0])])
def test_what_will_never_come_back_is_not_stored(rule, stored):
    ledger = Ledger()
    live = PastBatches(**rule).open(ReplaySources(ledger.read, None, 0))
    for step, count in enumerate(stored):
        ledger.take(live, step)
        assert live.metrics()["replay/groups"] == count


def test_what_comes_back_has_the_credit_it_had():
    ledger = Ledger()
    live = PastBatches(0.5, 2).open(ReplaySources(ledger.read, None, 0))
    ledger.take(live, 0, groups=1)
    live.observe(step_of(1, 1), {"1-0.1": -0.5}, 1)
    ledger.rows |= {t.id: t for g in step_of(1, 1) for t in g.trajectories}
    assert [t.facts["advantage"] for t in live.mix(step_of(2, 1), 2)[1].trajectories] == [0.0, -0.5]


@pytest.mark.parametrize("wrong", [{"share": 1.0}, {"window": 0}, {"until": -1}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(RecipeError, match="write"):
        PastBatches(**wrong)


# ---------------------------------------------------------------- the reference


@given(at=st.integers(0, 6), every=st.integers(0, 4))
def test_when_the_reference_is_replaced(at, every):
    piece = recipes.build("remix", reset=at).penalties[0].penalty
    assert [i for i in range(12) if piece.resets_reference(i)] == ([at] if at else [])
    again = ResetReference(piece.penalty, at, every)
    wanted = {at, *(range(at + every, 12, every) if every else ())} - {0}
    assert {i for i in range(12) if again.resets_reference(i)} == wanted


def learner_of(**settings):
    torch.manual_seed(0)
    return LocalLearner(
        tiny_model(16, 1, hidden=32, layers=1, context=64), LearnerSettings(lr=1e-2, positions=64, **settings)
    )


def test_after_the_reset_the_reference_is_the_policy_and_a_restart_keeps_it():
    recipe = recipes.build("remix", reset=2, weight=0.1)
    groups = [records_of([[[2, 1], [3]], [[2], [1, 1]]], seed) for seed in range(4)]
    batch = pack(groups[3])
    learner, objective = learner_of(), recipe.objective
    learner.reference()
    for step in (0, 1):
        update_policy(learner, recipe, groups[step], step, objective)
    frozen, at_reset = (learner.measure(batch, frozenset({s}))[s].x for s in (Signal.REFERENCE, Signal.PROXIMAL))
    assert not torch.equal(frozen, at_reset)
    update_policy(learner, recipe, groups[2], 2, objective)
    assert torch.equal(learner.measure(batch, frozenset({Signal.REFERENCE}))[Signal.REFERENCE].x, at_reset)
    second = learner_of()
    second.reference()
    saved = learner.checkpoint_state()
    second.load_state_dict({**saved, "tensors": {name: t.clone() for name, t in saved["tensors"].items()}})
    assert torch.equal(second.measure(batch, frozenset({Signal.REFERENCE}))[Signal.REFERENCE].x, at_reset)


def test_adapters_and_ranks_are_refused():
    chosen = Settings.of({"env": "calculator", "method": "remix", "lora_rank": 4})
    with pytest.raises(SettingError, match="--lora-rank 0"):
        refuse(RunPlan(chosen), REQUIREMENTS)
    with pytest.raises(SettingError, match="--ranks 1"):
        refuse(RunPlan(Settings(method="remix", ranks=2)), [ranks])
