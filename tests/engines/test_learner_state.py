"""What leaves a learner: weights, exports, states; adapters; and the probe that compares it with a generator."""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from turnwise import recipes
from turnwise.algebra.control import Passes
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN, Field
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.learner.learner import VALUE_FILE, LearnerSettings, LocalLearner
from turnwise.engines.learner.policy_check import PolicyCheck, fresh_trajectories, same_policy
from turnwise.errors import PolicyMismatch, SettingError
from turnwise.training import loop as run_module

LOGP = frozenset({Signal.LOGP})
ALL = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.VALUE})
MODELS = ["llama_tied", "qwen3", "gpt2", "mistral_window"]


@pytest.mark.parametrize("rank", [0, 3])
def test_resume_is_bit_identical(kit, batch, rank):
    settings = LearnerSettings(lr=1e-2, lora_rank=rank, warmup=3, schedule="cosine", total_steps=9, weight_decay=0.1)
    make = lambda: LocalLearner(kit.make_model(), settings, critic=True)  # noqa: E731
    straight, first, second = make(), make(), make()
    signals = ALL | {Signal.REFERENCE}
    for learner in (straight, first):
        learner.measure(batch, signals)
        for _ in range(2):
            learner.update(batch, kit.Linear(ALL))
    first.version = 7
    state = first.state_dict()
    scalars = json.loads(json.dumps(state["scalars"]))
    first.update(batch, kit.Linear(ALL))  # a state is a snapshot
    second.load_state_dict({"tensors": state["tensors"], "scalars": scalars})
    a = [straight.update(batch, kit.Linear(ALL)) for _ in range(3)]
    b = [second.update(batch, kit.Linear(ALL)) for _ in range(3)]
    assert a == b and second.version == 7
    after = straight.measure(batch, signals), second.measure(batch, signals)
    assert all(torch.equal(after[0][s].x, after[1][s].x) for s in signals)
    one, two = straight.state_dict()["tensors"], second.state_dict()["tensors"]
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def test_a_foreign_state_is_refused(kit, batch):
    state = LocalLearner(kit.make_model()).state_dict()
    for other in (LocalLearner(kit.make_model(), critic=True), LocalLearner(kit.make_model("gpt2"))):
        with pytest.raises(SettingError, match="another model"):
            other.load_state_dict(state)
    settings = LearnerSettings(lora_rank=2)
    adapters = LocalLearner(kit.make_model(seed=0), settings).state_dict()
    with pytest.raises(SettingError, match="another base model"):
        LocalLearner(kit.make_model(seed=1), settings).load_state_dict(adapters)


def check_logits(learner, plain, batch):
    """The plain stock model says what the learner says."""
    s = batch.sequences
    with torch.no_grad():
        logits = torch.cat([plain(input_ids=part[None]).logits[0] for part in s.ids.split(s.lengths.tolist())])
    expected = torch.log_softmax(logits[s.sampled_at - 1], -1).gather(1, batch.token.x[:, None]).squeeze(1)
    torch.testing.assert_close(learner.measure(batch, LOGP)[Signal.LOGP].x, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("name", MODELS)
def test_weights_and_export(kit, tmp_path, name, rank):
    model = kit.make_model(name)
    plain, names = copy.deepcopy(model), {n: p.shape for n, p in model.named_parameters()}
    batch = kit.weighted(kit.make_batch(temperature=1.0))
    learner = LocalLearner(model, LearnerSettings(lr=1e-2, lora_rank=rank), critic=True)
    for _ in range(3):
        learner.update(batch, kit.Linear(ALL))
    weights = learner.weights()
    assert {n: t.shape for n, t in weights.items()} == names
    with torch.no_grad():
        moved = max((p - weights[n]).abs().max().item() for n, p in plain.named_parameters())
        for n, p in plain.named_parameters():
            p.copy_(weights[n])
    assert moved > 1e-3
    check_logits(learner, plain, batch)
    learner.export(tmp_path)
    check_logits(learner, AutoModelForCausalLM.from_pretrained(tmp_path), batch)
    assert torch.equal(load_file(tmp_path / VALUE_FILE)["weight"], learner.token_value_head.weight)


def test_adapters_train_alone_and_switch_off_for_the_reference(kit, batch):
    learner = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2, lora_rank=2))
    assert all("lora_" in n for n in learner.trained)
    frozen = {n: p.clone() for n, p in learner._named_parameters() if n not in learner.trained}
    both = LOGP | {Signal.REFERENCE}
    start = learner.measure(batch, both)
    assert torch.equal(start[Signal.LOGP].x, start[Signal.REFERENCE].x)
    for _ in range(3):
        assert learner.update(batch, kit.Linear())["grad_norm"] > 0
        end = learner.measure(batch, both)
    assert torch.equal(end[Signal.REFERENCE].x, start[Signal.LOGP].x)
    assert not torch.allclose(end[Signal.LOGP].x, start[Signal.LOGP].x, atol=1e-3)
    assert all(torch.equal(p, frozen[n]) for n, p in learner._named_parameters() if n in frozen)


def test_lora_without_peft_names_the_extra(kit, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SettingError, match=r"turnwise-rl\[peft\]"):
        LocalLearner(kit.make_model(), LearnerSettings(lora_rank=2))


# --------------------------------------------------------------- policy check


def recorded(kit, learner):
    """A batch whose recordings are the learner's own, half of it cut by top-p."""
    batch = kit.make_batch(5)
    logp = learner.measure(batch, LOGP)[Signal.LOGP]
    return replace(batch, behaviour=logp - batch.mass)


def test_the_check_accepts_the_same_policy(kit):
    learner = LocalLearner(kit.make_model())
    report = same_policy(learner, recorded(kit, learner))
    assert report.max < 1e-5 and report.tokens > 0


def test_the_check_catches_other_weights(kit):
    learner = LocalLearner(kit.make_model())
    batch = recorded(kit, learner)
    with torch.no_grad():
        learner.head.weight.mul_(1.05)
    with pytest.raises(PolicyMismatch, match="temperature"):
        same_policy(learner, batch)
    assert same_policy(learner, batch, tolerance=10.0).max > 1e-3


def test_the_check_compares_only_the_learners_version(kit):
    learner = LocalLearner(kit.make_model())
    batch = recorded(kit, learner)
    old = torch.arange(batch.tree.count(TOKEN)) % 2
    batch = replace(
        batch,
        version=Field(batch.tree, TOKEN, 1 - old),
        behaviour=batch.behaviour.map(lambda x: x - 3.0 * old),
    )
    learner.version = 1
    assert same_policy(learner, batch).tokens == int((1 - old).sum())
    learner.version = 5
    with pytest.raises(PolicyMismatch, match="nothing to compare"):
        same_policy(learner, batch)


def test_the_check_takes_trajectories(kit):
    learner = LocalLearner(kit.make_model())
    bare = Trajectory("a", Task("x", seed=0), (Turn(context=(1, 2), tokens=(3,), logp=(-99.0,), version=(0,)),))
    with pytest.raises(PolicyMismatch, match="1 tokens"):
        same_policy(learner, [bare])


@pytest.mark.parametrize(("length", "selected"), [(3, 22), (100, 4), (1000, 4)])
def test_enough_fresh_tokens_are_selected(length, selected):
    task = Task("t", 0)
    old = Trajectory("old", task, (Turn((1,), (2,) * length, (-1.0,) * length, version=(0,) * length),))
    new = [
        Trajectory(f"{k}", task, (Turn((1,), (2,) * length, (-1.0,) * length, version=(1,) * length),))
        for k in range(200)
    ]
    owners = fresh_trajectories(pack([Group("g", task, (old, *new))]), 1).tolist()
    assert owners == list(range(1, selected + 1))
    assert not fresh_trajectories(pack([Group("g", task, (old,))]), 1).numel()


# ------------------------------------------------------------------ the policy check inside an update


def metrics_of_step(learner, recipe, batch, policy_check):
    """The metrics of one training step over ``batch``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "pack", lambda groups, *_: batch)
        return run_module.update_policy(learner, recipe, (), 0, policy_check=policy_check)


@pytest.mark.parametrize("positions", [8, 10**6])
def test_the_first_update_reports_the_difference_from_the_generator(kit, positions):
    """Over the fresh tokens of all micro-batches, and of the weights before the update, whatever the update does."""
    learner = LocalLearner(kit.make_model(), LearnerSettings(lr=0.1, positions=positions))
    batch = recorded(kit, learner)
    old = torch.arange(batch.tree.count(TOKEN)) % 2
    shift = 0.25 * (1 - old) + 3.0 * old  # stale tokens do not count, however different
    batch = replace(
        batch, version=Field(batch.tree, TOKEN, 1 - old), behaviour=batch.behaviour.map(lambda x: x - shift)
    )
    learner.version = 1
    recipe = replace(recipes.build("grpo"), control=Passes(epochs=2))
    assert metrics_of_step(learner, recipe, batch, PolicyCheck(1.0))["policy_check"] == pytest.approx(0.25, abs=1e-4)
    with pytest.raises(PolicyMismatch, match=r"differ by 1\.6 on average"):
        metrics_of_step(
            LocalLearner(kit.make_model()),
            recipe,
            replace(batch, version=batch.version.map(torch.zeros_like)),
            PolicyCheck(0.1),
        )


def test_without_fresh_tokens_the_difference_is_nan(kit):
    learner = LocalLearner(kit.make_model())
    learner.version = 7
    assert math.isnan(
        metrics_of_step(learner, recipes.build("grpo"), recorded(kit, learner), PolicyCheck())["policy_check"]
    )


def test_a_separate_check_raises_before_the_update(kit):
    learner = LocalLearner(kit.make_model())
    batch = recorded(kit, learner)
    assert metrics_of_step(learner, recipes.build("grpo"), batch, PolicyCheck(separate=True))["policy_check"] < 1e-5
    steps = learner.steps
    with pytest.raises(PolicyMismatch, match="at most"):
        shifted = replace(batch, behaviour=batch.behaviour.map(lambda x: x - 1))
        metrics_of_step(learner, recipes.build("grpo"), shifted, PolicyCheck(separate=True))
    assert learner.steps == steps


def test_a_checkpoint_holds_no_copy_and_no_reference(kit, batch):
    """Live tensors, and nothing that a learner of the same initial model can make again."""
    learner = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2))
    learner.reference()
    learner.update(batch, kit.Linear())
    state = learner.checkpoint_state()
    live = {p.data_ptr() for p in learner.model.parameters()}
    assert {t.data_ptr() for n, t in state["tensors"].items() if n.startswith("model/")} == live
    assert not [name for name in state["tensors"] if name.startswith("reference/")]
    wanted = frozenset({Signal.REFERENCE, Signal.LOGP})
    expected = learner.measure(batch, wanted)
    resumed = LocalLearner(kit.make_model(), LearnerSettings(lr=1e-2))
    resumed.reference()
    resumed.load_state_dict(learner.checkpoint_state())
    measured = resumed.measure(batch, wanted)
    assert all(torch.equal(measured[s].x, expected[s].x) for s in wanted)
