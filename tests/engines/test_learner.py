"""The local learner: exact sums over micro-batches, guarded steps, schedules, signals in order."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnwise.algebra.gradient import Scales
from turnwise.algebra.objective import Loss
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN, TRAJECTORY
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal, level_of
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.learner.logprobs import token_logprobs
from turnwise.engines.learner.packed_forward import ForwardPass
from turnwise.errors import SettingError
from turnwise.recipes.families.critic_free import dr_grpo, grpo

ALL = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.VALUE})
EVERY = frozenset(Signal) - {Signal.ACTION_VALUE, Signal.OLD_ACTION_VALUE}  # these need a head of their own kind


def gradients(learner, batch, objective):
    loss, sums, _ = learner._backward(batch, objective)
    grads = {n: p.grad.clone() for n, p in learner.trained.items()}
    learner._policy_optimizer.zero_grad()
    return float(loss), {n: float(x) for n, x in sums.items()}, grads


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def exact(kit, request):
    learner = LocalLearner(kit.make_model(request.param), LearnerSettings(dtype="float64"), critic=True)
    torch.nn.init.normal_(learner.token_value_head.weight, generator=torch.Generator().manual_seed(0))
    return learner


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), positions=st.sampled_from([1, 30, 100]), shuffle=st.randoms(use_true_random=False))
def test_micro_batches_and_packing_order_do_not_matter(kit, exact, seed, positions, shuffle):
    batch = kit.weighted(kit.make_batch(seed), dtype=torch.float64)
    order = list(range(batch.tree.count(TRAJECTORY)))
    shuffle.shuffle(order)
    whole = gradients(exact, batch, kit.Linear(ALL))
    other = copy.copy(exact)
    other.settings = LearnerSettings(dtype="float64", positions=positions)
    cut = gradients(other, batch.select(order), kit.Linear(ALL))
    assert cut[0] == pytest.approx(whole[0], abs=1e-10)
    assert cut[1] == pytest.approx(whole[1], abs=1e-10)
    # Qwen's norms work in float32 whatever the model's precision, and a prefix that is shared inside a cut is summed before
    # it is rounded there
    tolerance = 1e-10 if exact.model.config.model_type == "gpt2" else 1e-6
    for name, grad in whole[2].items():
        torch.testing.assert_close(cut[2][name], grad, rtol=0, atol=tolerance)


@pytest.mark.parametrize("positions", [1, 60, 10**6])
def test_measure_keeps_the_batch_order(kit, positions):
    model = kit.make_model()
    stock, batch = copy.deepcopy(model), kit.make_batch(3)
    learner = LocalLearner(
        model, LearnerSettings(positions=positions), critic=2, turn_critic=True, teacher=copy.deepcopy(model)
    )
    found = learner.measure(batch, EVERY)
    s = batch.sequences
    with torch.no_grad():
        logits = torch.cat([stock(input_ids=part[None]).logits[0] for part in s.ids.split(s.lengths.tolist())])
    t = batch.temperature.at(TOKEN).x
    logp = torch.log_softmax(logits[s.sampled_at - 1] / torch.where(t == 0, 1.0, t)[:, None], -1)
    expected = logp.gather(1, batch.token.x[:, None]).squeeze(1)
    for signal in (
        Signal.LOGP,
        Signal.PROXIMAL,
        Signal.REFERENCE,
        Signal.PREVIOUS,
        Signal.TEACHER,
        Signal.LOGP_WITHOUT_FEEDBACK,
    ):
        torch.testing.assert_close(found[signal].x, expected, rtol=1e-4, atol=1e-5)
    for signal in (Signal.ENTROPY, Signal.OLD_ENTROPY):
        torch.testing.assert_close(found[signal].x, -(logp.exp() * logp).sum(1), rtol=1e-4, atol=1e-5)
    assert not found[Signal.VALUE].x.any() and set(found) >= EVERY
    assert all(found[s].level == level_of(s) for s in EVERY)
    assert all(f.tree is batch.tree for f in found.values())


def test_the_reference_stays_fixed_while_the_policy_trains(kit, batch):
    learner = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2))
    both = frozenset({Signal.LOGP, Signal.REFERENCE})
    before = learner.measure(batch, both)
    learner.update(batch, kit.Linear())
    after = learner.measure(batch, both)
    assert torch.equal(before[Signal.REFERENCE].x, after[Signal.REFERENCE].x)
    assert not torch.allclose(before[Signal.LOGP].x, after[Signal.LOGP].x, atol=1e-3)


def test_a_late_reference_is_refused(kit, batch):
    learner = LocalLearner(kit.make_model())
    learner.update(batch, kit.Linear())
    with pytest.raises(SettingError, match="before the first update"):
        learner.measure(batch, frozenset({Signal.REFERENCE}))


def test_update_descends_and_sums_statistics(kit, batch):
    learner = LocalLearner(kit.make_model(), LearnerSettings(lr=3e-3, positions=40), critic=True)
    metrics = [learner.update(batch, kit.Linear(ALL)) for _ in range(5)]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[0]["tokens"] == batch.tree.count(TOKEN)
    assert metrics[0]["mean_w"] == pytest.approx(batch["weight"].x.sum().item(), abs=1e-5)
    assert metrics[0]["grad_norm"] > 0 and metrics[0]["skipped"] == 0 and learner.steps == 5
    assert learner.token_value_head.weight.abs().sum() > 0


@dataclass(frozen=True)
class Broken:
    """A loss or, behind a finite loss, a gradient that is not a number."""

    where: str
    signals_with_gradient, signals_before_step = frozenset({Signal.LOGP}), frozenset()

    def plan(self, batch):
        return batch

    def scales(self, batch, sides):
        return Scales()

    def __call__(self, batch, policy):
        x = policy[Signal.LOGP].x
        bad = x.sum() * torch.nan if self.where == "loss" else (x - x.detach()).clamp(min=0).sqrt().sum()
        return Loss(bad, lambda: {"seen": torch.tensor(1.0)}, {})


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_step_is_skipped(kit, batch, where):
    learner = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2))
    learner.update(batch, kit.Linear())
    before = learner.state_dict()
    out = learner.update(batch, Broken(where))
    after = learner.state_dict()
    assert out["skipped"] == 1 and learner.skipped == 1 and learner.steps == 1
    assert all(torch.equal(t, after["tensors"][n]) for n, t in before["tensors"].items())
    assert learner.update(batch, kit.Linear())["skipped"] == 0


def test_an_objective_that_raises_leaves_no_gradients(kit, batch):
    class Raises:
        signals_with_gradient, signals_before_step, calls = frozenset({Signal.LOGP}), frozenset(), 0

        def plan(self, batch):
            return batch

        def __call__(self, micro, policy):
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("no")
            return Loss(policy[Signal.LOGP].x.sum(), dict, {})

    learner = LocalLearner(kit.make_model(), LearnerSettings(positions=1))
    with pytest.raises(RuntimeError):
        learner.update(batch, Raises())
    assert all(p.grad is None for p in learner.trained.values())


def test_gradients_are_clipped(kit, batch):
    plain, clipped = (LocalLearner(kit.make_model(), LearnerSettings(clip=c, dtype="float64")) for c in (1e9, 1e-3))
    for learner in (plain, clipped):
        learner.update(kit.weighted(batch, dtype=torch.float64), kit.Linear())
    norm = lambda x: torch.stack([m["exp_avg"].norm() for m in x._policy_optimizer.state.values()]).norm().item()  # noqa: E731
    assert norm(clipped) == pytest.approx(1e-4, rel=1e-2)  # Adam's first moment is a tenth of the gradient
    assert norm(plain) > 1e-3


def test_only_what_is_needed_is_computed(kit, batch, monkeypatch):
    from turnwise.engines.learner import packed_forward as module

    asked = []
    spy = lambda *a, want_entropy, **k: asked.append(want_entropy) or token_logprobs(*a, want_entropy=want_entropy, **k)  # noqa: E731
    monkeypatch.setattr(module, "token_logprobs", spy)
    learner = LocalLearner(kit.make_model(), critic=True)
    learner.update(batch, kit.Linear(frozenset({Signal.VALUE})))
    assert asked == []
    learner.update(batch, kit.Linear())
    assert asked == [False]


def test_signals_of_the_same_states_share_one_pass(kit, monkeypatch):
    from turnwise.engines.learner import packed_forward

    passes, plain = [], packed_forward.packed_states
    learner = LocalLearner(kit.make_model(), critic=2, turn_critic=True, teacher=kit.make_model(seed=1))
    apart = LocalLearner(kit.make_model(), critic=2, turn_critic=True, separate_critic=True)
    monkeypatch.setattr(
        packed_forward, "packed_states", lambda model, *rest: passes.append(id(model)) or plain(model, *rest)
    )
    learner.measure(kit.make_batch(1), EVERY - {Signal.GRADIENT_NORM, Signal.ANSWER_LOGP, Signal.PREVIOUS})
    assert len(passes) == len(set(passes)) == 3  # policy, reference, teacher
    passes.clear()
    apart.measure(kit.make_batch(1), frozenset({Signal.LOGP, Signal.VALUE, *TURN_CRITIC, *TURN_CRITIC_TARGET}))
    assert len(passes) == len(set(passes)) == 3  # policy, critic, its target network


def test_hidden_states_are_freed_with_their_micro_batch(kit, batch):
    """Without the cyclic collector: it runs late, and until then a GPU would hold the states of many micro-batches."""
    learner = LocalLearner(kit.make_model(), LearnerSettings(positions=40), critic=True, teacher=kit.make_model(seed=1))
    gc.collect()
    gc.disable()
    try:
        learner.measure(batch, frozenset({Signal.REFERENCE, Signal.TEACHER}))
        learner.update(batch, kit.Linear(ALL))
        assert not [thing for thing in gc.get_objects() if type(thing) is ForwardPass]
    finally:
        gc.enable()


@pytest.mark.parametrize("recompute", [False, True])
def test_the_graph_of_a_micro_batch_is_freed_before_the_next_forward_pass(kit, batch, recompute):
    """Whatever its nodes hold: saved tensors are freed by the backward pass, fused weights and other attributes are not."""
    learner = LocalLearner(kit.make_model(), LearnerSettings(positions=40, recompute=recompute))
    live, nodes, alive = learner.measurer.live, [], []

    def watched(*given):
        alive.append(sum(node() is not None for node in nodes))
        micro, policy = live(*given)
        nodes.extend(weakref.ref(field.x) for field in policy.values())
        return micro, policy

    learner.measurer.live = watched
    gc.disable()  # by their reference counts alone
    try:
        learner.update(batch, kit.Linear(frozenset({Signal.LOGP, Signal.ENTROPY})))
    finally:
        gc.enable()
    assert len(alive) > 2 and not any(alive)


def test_batches_without_sampled_tokens_are_valid(kit):
    task = Task("x", seed=0)
    silent = Trajectory("a", task, (Turn(context=(1, 2), tokens=()),))
    blank = Trajectory("b", task, ())
    model = kit.make_model()
    learner = LocalLearner(
        model, LearnerSettings(positions=1), critic=2, turn_critic=True, teacher=copy.deepcopy(model)
    )
    before = learner.state_dict()["tensors"]
    for members in ((silent, blank), ()):
        batch = kit.weighted(pack([Group("g", task, members)] if members else []))
        found = learner.measure(batch, EVERY - {Signal.ANSWER_LOGP})
        assert all(f.x.shape == (batch.tree.count(f.level),) and not f.x.any() for f in found.values())
        assert learner.update(batch, kit.Linear(ALL))["loss"] == 0
    after = learner.state_dict()["tensors"]
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_value_needs_a_critic(kit, batch):
    with pytest.raises(SettingError, match="critic=1"):
        LocalLearner(kit.make_model()).measure(batch, frozenset({Signal.OLD_VALUE}))


def test_groups_of_parameters(kit):
    settings_ = LearnerSettings(lr=1e-3, value_lr=1e-2, weight_decay=0.1)
    learner = LocalLearner(kit.make_model("gpt2"), settings_, critic=True)
    groups = {(g["base_lr"], g["weight_decay"]): g["params"] for g in learner._policy_optimizer.param_groups}
    assert set(groups) == {(1e-3, 0.1), (1e-3, 0.0), (1e-2, 0.1), (1e-2, 0.0)}
    assert all(p.dim() == 1 for p in groups[1e-3, 0.0]) and all(p.dim() > 1 for p in groups[1e-3, 0.1])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_bfloat16_is_close_and_master_weights_stay_float32(kit, batch):
    full = LocalLearner(kit.make_model()).measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP].x
    learner = LocalLearner(kit.make_model(), LearnerSettings(dtype="bfloat16", lr=1e-3), critic=True)
    half = learner.measure(batch, frozenset({Signal.LOGP}))[Signal.LOGP].x
    assert 0 < (full - half).abs().mean() < 0.1 and half.dtype == torch.float32
    assert learner.update(batch, kit.Linear(ALL))["skipped"] == 0
    assert all(p.dtype == torch.float32 for p in learner.trained.values())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
    ],
)
def test_schedules(schedule, expected):
    s = LearnerSettings(lr=1.0, warmup=2, schedule=schedule, total_steps=6)
    assert [s.lr_factor(k) for k in range(8)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (0.9, 1.0)},
        {"clip": 0.0},
        {"positions": 0},
        {"schedule": "cosin"},
        {"schedule": "linear"},
        {"dtype": "float16"},
        {"warmup": 5, "total_steps": 3},
        {"lora_alpha": -1.0},
    ],
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(SettingError, match=next(iter(wrong))):
        LearnerSettings(**wrong)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("saving", [{"recompute": True}, {"offload": True}, {"recompute": True, "lora_rank": 2}])
def test_memory_saving_settings_do_not_change_results(kit, name, saving):
    if saving.get("lora_rank") and name == "gpt2":
        pytest.skip("its projections are not linear layers")
    batch, moved = kit.weighted(kit.make_batch()), []
    plain = {key: value for key, value in saving.items() if key == "lora_rank"}
    for options in (plain, saving):
        learner = LocalLearner(kit.make_model(name), LearnerSettings(lr=1e-2, **options))
        metrics = [learner.update(batch, kit.Linear())["loss"] for _ in range(3)]
        moved.append((metrics, {n: p.detach().clone() for n, p in learner.model.named_parameters()}))
    assert moved[0][0] == pytest.approx(moved[1][0], rel=1e-5)
    for n, p in moved[0][1].items():
        torch.testing.assert_close(moved[1][1][n], p, rtol=1e-4, atol=1e-5)


class CountingObjective:
    """Counts what it differentiates. ``mark=False``: without marking trajectories that have no gradient."""

    def __init__(self, objective, mark=True):
        self.objective, self.mark, self.asked = objective, mark, []

    def __getattr__(self, name):
        return getattr(self.objective, name)

    def plan(self, batch):
        planned = self.objective.plan(batch)
        kept = {name: f for name, f in planned.columns.items() if self.mark or name != "no_gradient"}
        return replace(planned, columns=kept)

    def __call__(self, batch, policy):
        found = self.objective(batch, policy)
        self.asked.append((len(batch), found.loss.requires_grad))
        return found


@pytest.mark.parametrize("rewards", [(1.0, 0.0, 1.0, 1.0, 0.5, 0.5), (1.0,) * 6], ids=["some", "none"])
def test_zero_variance_groups_are_not_differentiated(kit, rewards):
    """Same weights and statistics, although trajectories without advantage run forward for their statistics only."""
    task = Task("none", 0)
    turn = lambda k: Turn((3, 4), tuple(range(5 + k, 9 + 2 * k)), (-1.0,) * (4 + k), reward=rewards[k])  # noqa: E731
    one = lambda k: Trajectory(str(k), task, (turn(k),))  # noqa: E731
    batch = pack([Group(str(g), task, (one(2 * g), one(2 * g + 1))) for g in range(3)])
    told, weights, asked = [], [], []
    for mark in (True, False):
        learner = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2))
        for _ in range(3):  # momentum must go on as well
            objective = CountingObjective(dr_grpo().objective, mark)
            told.append(learner.update(objective.credit(batch), objective))
        weights.append(learner.weights())
        asked.append(objective.asked)
    assert asked[1] == [(6, True)]
    assert asked[0] == ([(2, True), (4, False)] if len(set(rewards)) > 1 else [(1, True), (5, False)])
    for mine, theirs in zip(told[:3], told[3:]):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-4, atol=1e-5)


def test_penalties_leave_nothing_silent(kit):
    batch = grpo().objective.credit(kit.make_batch(0))
    batch = batch.put({Signal.REFERENCE: batch.behaviour})
    assert "no_gradient" not in grpo().objective.plan(batch).columns
