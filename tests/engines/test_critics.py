"""Turn critics and separate critics: which states they read, where their gradient flows, what a resume restores."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import pytest
import torch
from support.batches import records_of

from turnwise import recipes
from turnwise.algebra.control import CriticsFirst
from turnwise.algebra.gradient import Scales
from turnwise.algebra.objective import Loss
from turnwise.core.levels import TOKEN, TURN
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.engines.learner.layouts import PackedLayout, SharedPrefixes
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import RecipeError, SettingError
from turnwise.models.tiny import tiny_model
from turnwise.training.loop import update_policy

TURNS, TARGETS = frozenset(TURN_CRITIC), frozenset(TURN_CRITIC_TARGET)
VALUES = frozenset({Signal.VALUE, Signal.SECOND_VALUE})


@dataclass(frozen=True)
class Towards:
    """Σ (signal − target)² of each live critic signal, and Σ w log π where log-probabilities are wanted."""

    signals_with_gradient: frozenset[Signal]
    signals_before_step: frozenset[Signal] = frozenset()

    def plan(self, batch):
        return batch

    def scales(self, batch, sides):
        return Scales()

    def __call__(self, batch, policy):
        parts = []
        for signal, f in policy.items():
            if signal == Signal.LOGP:
                parts.append((batch["weight"] * f).x.sum())
            else:
                aim = batch.reward if f.level == TURN else batch.reward.at(TOKEN)
                parts.append((f.x - aim.to(f.x.dtype).x).square().mean())
        return Loss(torch.stack(parts).sum(), dict, {})


def make(kit, **options):
    settings = {"lr": 1e-2, "value_lr": 3e-3, **options.pop("settings", {})}
    return LocalLearner(kit.make_model(), LearnerSettings(**settings), critic=2, turn_critic=True, **options)


def moved(learner, batch, live, steps=3):
    """The learner after a few steps, so that no head is zero any more."""
    for _ in range(steps):
        assert learner.update(batch, Towards(live))["skipped"] == 0
    return learner


def by_hand(heads, model, batch, position_of):
    """Each turn with tokens: its sequence alone through the model, then the head."""
    s, count = batch.sequences, batch.tree.size(TOKEN, TURN).x.tolist()
    out, first = [], 0
    for n in count:
        if not n:
            out.append(0.0)
            continue
        at = position_of(s.sampled_at[first : first + n].tolist())
        begin = int(s.start[torch.searchsorted(s.start, at, right=True) - 1])
        ids = s.ids[begin : at + 1]
        start = torch.tensor([0, len(ids)])
        h = model.get_decoder()(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids))[None],
            use_cache=False,
            layout=PackedLayout(start, SharedPrefixes.of(ids, start)),
        ).last_hidden_state[0, -1]
        out.append(float(heads(h).detach()))
        first += n
    return out


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("positions", [1, 10**6])
def test_turn_values_read_the_right_states(kit, separate, positions):
    learner = make(kit, separate_critic=separate, settings={"dtype": "float64", "positions": positions})
    batch = kit.weighted(kit.make_batch(6), dtype=torch.float64)
    moved(learner, batch, TURNS | {Signal.LOGP})
    found = learner.measure(batch, TURNS | TARGETS)
    c = learner.value_heads
    for heads, trunk, names in (
        (c.turn_heads, c.trunk, TURN_CRITIC),
        (c.target_turn_heads, c.target_trunk, TURN_CRITIC_TARGET),
    ):
        for live, name in zip(TURN_CRITIC, names):
            last = live in (Signal.Q, Signal.SECOND_Q)
            place = (lambda at: at[-1]) if last else (lambda at: at[0] - 1)
            expected = by_hand(heads[live], trunk if separate else learner.model, batch, place)
            assert found[name].level == TURN
            assert found[name].x.tolist() == pytest.approx(expected, abs=1e-6)
    assert found[Signal.Q].x.abs().max() > 0.01
    assert not torch.equal(found[Signal.Q].x, found[Signal.SECOND_Q].x)  # second heads start with other weights


@pytest.mark.parametrize("separate", [False, True])
def test_target_networks_follow_by_polyak_averaging(kit, batch, separate):
    learner = make(kit, separate_critic=separate, settings={"follow": 0.25})
    targets = {n: p.clone() for n, p in learner.value_heads.target_tensors().items()}
    assert any(n.startswith("critic/") for n in targets) == separate
    live = dict(learner.value_heads.named_parameters())
    for _ in range(2):
        learner.update(batch, Towards(TURNS))
        for n in targets:
            targets[n] = 0.75 * targets[n] + 0.25 * live[n].detach()
        for n, p in learner.value_heads.target_tensors().items():
            torch.testing.assert_close(p, targets[n])
    before = learner.value_heads.target_tensors()["turns/q.4.weight"].clone()
    bad = batch.put(weight=batch["weight"] * float("nan"))
    assert learner.update(bad, Towards(TURNS | {Signal.LOGP}))["skipped"] == 1
    assert torch.equal(before, learner.value_heads.target_tensors()["turns/q.4.weight"])


def test_a_separate_critic_never_touches_the_policy(kit, batch):
    """Its loss leaves the policy unchanged; beside a policy loss, the policy steps as without a critic."""
    learner = make(kit, separate_critic=True)
    start = {n: w.clone() for n, w in learner.weights().items()}
    trunk = {n: p.detach().clone() for n, p in learner.value_heads.named_parameters()}
    moved(learner, batch, VALUES | TURNS)
    assert all(torch.equal(w, start[n]) for n, w in learner.weights().items())
    changed = {n for n, p in learner.value_heads.named_parameters() if not torch.equal(p, trunk[n])}
    assert {"value/weight", "turns/v.0.weight", "critic/layers.0.mlp.up_proj.weight"} <= changed
    plain = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2))
    both = make(kit, separate_critic=True)
    for _ in range(3):
        a = plain.update(batch, Towards(frozenset({Signal.LOGP})))
        b = both.update(batch, Towards(VALUES | TURNS | {Signal.LOGP}))
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6) and b["grad_norm/critic"] > 0
    for n, w in plain.weights().items():
        torch.testing.assert_close(both.weights()[n], w, rtol=1e-4, atol=1e-6)


def test_a_shared_turn_critic_sends_no_gradient_to_the_policy(kit, batch):
    """Turn heads read detached states; the gradient of token heads reaches the policy."""
    learner = make(kit)
    start = {n: w.clone() for n, w in learner.weights().items()}
    moved(learner, batch, TURNS)
    assert all(torch.equal(w, start[n]) for n, w in learner.weights().items())
    moved(learner, batch, VALUES)
    assert any(not torch.equal(w, start[n]) for n, w in learner.weights().items())


def test_a_separate_critic_has_its_own_rate_and_clipping(kit, batch):
    learner = make(kit, separate_critic=True, settings={"clip": 1e-3, "warmup": 2})
    assert {g["base_lr"] for g in learner._policy_optimizer.param_groups} == {1e-2}
    assert {g["base_lr"] for g in learner._critic_optimizer.param_groups} == {3e-3}
    learner.update(batch, Towards(VALUES | TURNS | {Signal.LOGP}))
    for each in (learner._policy_optimizer, learner._critic_optimizer):
        size = torch.stack([m["exp_avg"].norm() for m in each.state.values()]).norm().item()
        assert size == pytest.approx(1e-4, rel=1e-2)  # each gradient is clipped by its own norm
    assert {g["lr"] for g in learner._critic_optimizer.param_groups} == {1.5e-3}


def test_a_non_finite_gradient_of_either_skips_both_steps(kit, batch):
    learner = make(kit, separate_critic=True)
    moved(learner, batch, VALUES | {Signal.LOGP}, 1)
    before = learner.state_dict()["tensors"]

    class Broken(Towards):
        def __call__(self, batch, policy):
            x = policy[Signal.VALUE].x
            return Loss(policy[Signal.LOGP].x.sum() + (x - x.detach()).clamp(min=0).sqrt().sum(), dict, {})

    assert learner.update(batch, Broken(VALUES | {Signal.LOGP}))["skipped"] == 1
    after = learner.state_dict()["tensors"]
    assert all(torch.equal(t, after[n]) for n, t in before.items())


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("separate", [False, True])
def test_resume_is_bit_identical(kit, batch, separate, rank):
    options = {"warmup": 3, "schedule": "cosine", "total_steps": 9, "weight_decay": 0.1, "lora_rank": rank}
    fresh = lambda: make(kit, separate_critic=separate, settings=dict(options))  # noqa: E731
    straight, second = fresh(), fresh()
    objective, ask = Towards(VALUES | TURNS | {Signal.LOGP}), TURNS | TARGETS | VALUES | {Signal.REFERENCE}
    straight.measure(batch, ask)
    for _ in range(2):
        straight.update(batch, objective)
    state = straight.state_dict()
    second.load_state_dict({"tensors": state["tensors"], "scalars": json.loads(json.dumps(state["scalars"]))})
    assert [straight.update(batch, objective) for _ in range(3)] == [second.update(batch, objective) for _ in range(3)]
    a, b = (one.measure(batch, ask) for one in (straight, second))
    assert all(torch.equal(a[s].x, b[s].x) for s in ask)
    one, two = straight.state_dict()["tensors"], second.state_dict()["tensors"]
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    if separate and rank:
        assert all("lora_" in n for n in straight.trained if n.startswith("critic/"))


def test_a_state_of_another_critic_is_refused(kit):
    shared, separate = make(kit).state_dict(), make(kit, separate_critic=True)
    with pytest.raises(SettingError, match="critic"):
        separate.load_state_dict(shared)


def test_micro_batches_do_not_matter(kit):
    found = []
    for positions in (1, 10**6):
        learner = make(kit, separate_critic=True, settings={"dtype": "float64", "positions": positions})
        batch = kit.weighted(kit.make_batch(6), dtype=torch.float64)

        @dataclass(frozen=True)
        class Sums(Towards):
            def __call__(self, batch, policy):
                return Loss(sum(f.x.square().sum() + f.x.sum() for f in policy.values()), dict, {})

        for _ in range(3):
            learner.update(batch, Sums(VALUES | TURNS | {Signal.LOGP}))
        found.append(copy.deepcopy(learner.state_dict()["tensors"]))
    for n, t in found[0].items():
        if n.startswith(("model/", "value/", "turns/", "critic/", "slow/")):
            torch.testing.assert_close(t, found[1][n], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name, hyper", [("ppo", {}), ("archer", {"passes": 2, "warm": 1})])
def test_methods_resume_bit_identically(name, hyper, separate):
    """Two batches in one process, and with only the saved state carried over between them."""
    recipe = recipes.build(name, **hyper)
    shapes = ([[[2, 1], [3], [1, 0, 2]], [[2], [1, 1]]], [[[1, 1], [2]], [[3, 1], [2, 2], [1]]])
    groups = [records_of(shape, seed, asks=recipe.requirements) for seed, shape in enumerate(shapes)]

    def fresh():
        model = tiny_model(16, 0, hidden=32, layers=2, context=64)
        turns = bool(recipe.objective.signals & TURNS)
        options = {"critic": recipe.critics, "turn_critic": turns, "separate_critic": separate}
        return LocalLearner(model, LearnerSettings(lr=1e-3, value_lr=1e-2, positions=32), **options), recipe.objective

    straight, objective = fresh()
    update_policy(straight, recipe, groups[0], 0, objective)
    second, restored = fresh()
    second.load_state_dict(straight.state_dict())
    restored.memory.load_state_dict(json.loads(json.dumps(objective.memory.state_dict())))
    update_policy(straight, recipe, groups[1], 1, objective)
    update_policy(second, recipe, groups[1], 1, restored)
    one, two = straight.state_dict()["tensors"], second.state_dict()["tensors"]
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    assert any(n.startswith("critic/") for n in one) == separate


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name, heads", [("archer", "turns"), ("b_coder", "value")])
def test_the_policy_is_frozen_while_its_critics_warm_up(name, heads, separate):
    """On the first batches only the critics train and the optimizer does not move the policy; then both train. The policy is in
    the penalties of b_coder, too."""
    recipe = recipes.build(name, passes=3, warm=2)
    model = tiny_model(16, 0, hidden=32, layers=2, context=64)
    settings = LearnerSettings(lr=1e-3, value_lr=1e-2, weight_decay=0.1, positions=32)
    options = {"critic": recipe.critics, "turn_critic": heads == "turns", "separate_critic": separate}
    learner = LocalLearner(model, settings, **options)
    learner.reference()
    objective, moved = recipe.objective, []
    for seed in range(5):
        before = copy.deepcopy(learner.state_dict()["tensors"])
        update_policy(
            learner, recipe, records_of([[[2, 1], [3], [1, 2]]], seed, asks=recipe.requirements), seed, objective
        )
        after = learner.state_dict()["tensors"]
        names_of = {prefix: [n for n in before if n.startswith(f"{prefix}/")] for prefix in ("model", heads)}
        moved.append(tuple(any(not torch.equal(before[n], after[n]) for n in names) for names in names_of.values()))
    assert moved == [(False, True)] * 2 + [(True, True)] * 3
    assert learner.steps == 5 * 3 + 3


def test_invalid_critic_schedules_are_explained():
    with pytest.raises(RecipeError, match="passes=1 or more"):
        CriticsFirst(passes=0, warm=3)
    with pytest.raises(RecipeError, match="leave --minibatches out"):
        CriticsFirst().with_passes(2, 4)
    assert CriticsFirst(5, 1).with_passes(2, 0) == CriticsFirst(5, 1, 2) and CriticsFirst(5, 1, 2).updates == 7


def test_a_missing_critic_is_explained(kit, batch):
    with pytest.raises(SettingError, match="turn_critic=True"):
        LocalLearner(kit.make_model(), critic=1).measure(batch, frozenset({Signal.Q}))
    with pytest.raises(SettingError, match="turn_critic=True"):
        LocalLearner(kit.make_model(), critic=1).measure(batch, frozenset({Signal.TARGET_V}))
