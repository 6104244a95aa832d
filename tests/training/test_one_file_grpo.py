"""The plain loop and the library are the same method: same weights and rollouts in, same losses and weights out."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from turnwise import recipes
from turnwise.core.batch import pack
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.engines.learner.learner import LocalLearner
from turnwise.engines.learner.optimizer import LearnerSettings

PATH = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"
GROUP, LR = 6, 1e-2


@pytest.fixture(scope="module")
def plain():
    spec = importlib.util.spec_from_file_location("one_file_grpo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records(rollouts: dict[str, torch.Tensor]) -> list[Group]:
    """Padded rollouts as the library's records: the prompt is context, what was sampled are tokens."""
    groups: dict[int, list[Trajectory]] = {}
    for row, (ids, mask, logp, reward) in enumerate(zip(*(rollouts[k] for k in ("ids", "mask", "logp", "reward")))):
        number = row // GROUP
        turn = Turn(ids[:1].tolist(), ids[mask].tolist(), logp[mask].tolist(), reward=float(reward))
        groups.setdefault(number, []).append(Trajectory(f"{number}.{row}", Task("count", number), (turn,)))
    return [Group(str(n), members[0].task, tuple(members)) for n, members in groups.items()]


@pytest.mark.parametrize("positions", [16384, 24], ids=["one micro-batch", "many micro-batches"])
def test_the_library_reproduces_the_plain_loop(plain, positions):
    """Three batches of three updates each, far enough that the clip binds and the reference is left behind."""
    model = plain.make_model(0).double()
    reference = copy.deepcopy(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    learner = LocalLearner(copy.deepcopy(model), LearnerSettings(lr=LR, dtype="float64", positions=positions))
    objective = recipes.build("grpo", clip=0.2, beta=0.04).objective
    dice = torch.Generator().manual_seed(3)
    clipped = 0.0
    for _ in range(3):
        rollouts = plain.sample(model, plain.draw_prompts(4, dice).repeat_interleave(GROUP, 0), dice)
        batch = pack(records(rollouts))
        measured = learner.measure(batch, objective.signals_before_batch)
        batch = objective.credit(batch.put(**{str(name): value for name, value in measured.items()}))
        for _ in range(3):
            expected = plain.grpo_step(model, reference, optimiser, rollouts, GROUP, clip=0.2, beta=0.04)
            metrics = learner.update(objective.plan(batch), objective)
            assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
            clipped += metrics["clip_share"]
        for name, weight in learner.weights().items():
            torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=0, atol=1e-5)
    assert clipped > 0 and metrics["penalty/KL"] > 1e-3
    moved = max((p - q).abs().max().item() for p, q in zip(model.parameters(), reference.parameters()))
    assert moved > LR


def test_the_rewards_of_the_toy_task(plain):
    last = plain.VOCABULARY - 1
    assert plain.reward(2, [3, 4, plain.END]) == 1.0
    assert plain.reward(last, [2, 3, plain.END]) == 1.0  # after the last comes the first
    assert plain.reward(2, [3, 5, plain.END]) == pytest.approx(1 / 3)
    assert plain.reward(2, [plain.END]) == 0.0 == plain.reward(2, [4, 4, plain.END])


def test_the_sampled_log_probabilities_are_those_of_the_model(plain):
    model = plain.make_model(1)
    rollouts = plain.sample(model, torch.full((32, 1), 4), torch.Generator().manual_seed(0))
    mask = rollouts["mask"]
    with torch.no_grad():
        logp = plain.token_logp(model, rollouts["ids"])
    torch.testing.assert_close(rollouts["logp"][mask], logp[mask], rtol=1e-5, atol=1e-5)
    ended = (rollouts["ids"] == plain.END) & mask
    assert len(set(mask.sum(1).tolist())) > 1 and ended.sum(1).max() == 1  # lengths differ; END ends


@pytest.mark.slow
def test_the_plain_loop_learns(plain):
    rewards = plain.train(steps=45)
    assert sum(rewards[:5]) / 5 < 0.15 and sum(rewards[-5:]) / 5 > 0.4
