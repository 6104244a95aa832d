"""The greedy rollout that gives a group its baseline: what it records, what it costs, what happens when it fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.episodes import Resting

from turnwise import recipes
from turnwise.core.records import Status, Task, Trajectory, Turn
from turnwise.errors import SettingError
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.strategies import GreedyBaseline, GroupRequest, Independent
from turnwise.training import build, engines
from turnwise.training.plan import EnvSpec, RunPlan, resolve_settings
from turnwise.training.refusals import LOADED, WITH_RECIPE, refuse
from turnwise.training.step_records import describe


def grown(rewards, greedy, failed=()):
    """A group whose trajectories earn ``rewards`` and whose greedy rollout earns ``greedy``; keys in ``failed`` fail."""
    opened, scales = [], {}

    def open_session(i, draft=False):
        opened.append(Resting())
        return opened[-1]

    async def play(key, task, session, temperature_scale=1.0):
        name = key.split(".")[1]
        scales[name] = temperature_scale
        reward = greedy if name == "greedy" else rewards[int(name)]
        status = Status.FAILED if name in failed else Status.FINISHED
        turn = Turn((1,), (2, 3), (-0.1, -0.2), version=(0, 0), reward=reward)
        return Trajectory(key, task, (turn,), status=status, reason="broken" * (name in failed), facts={"own": 1.0})

    grow = GreedyBaseline().begin(GroupRequest("g", Task("x", 0), len(rewards), open_session, play))
    assert len(opened) == len(rewards) + 1, "all sessions are opened before anything is awaited"
    return asyncio.run(grow), scales


def test_each_trajectory_is_told_the_greedy_return():
    group, scales = grown([1.0, 0.0, 0.5, 0.25], 0.75)
    assert [t.id for t in group.trajectories] == ["g.0", "g.1", "g.2", "g.3"]
    assert scales == {"0": 1.0, "1": 1.0, "2": 1.0, "3": 1.0, "greedy": 0.0}
    assert all(t.facts["greedy_reward"] == 0.75 and t.facts["own"] == 1.0 for t in group.trajectories)
    told = describe([group], 0)
    assert told["tokens"] == 8 and told["tokens/drafts"] == 2, "the greedy tokens are counted, once, and apart"


def test_without_a_baseline_the_group_is_not_trained_on():
    group, _ = grown([1.0, 0.0], 0.5, failed={"greedy", "1"})
    assert all(t.status == Status.FAILED for t in group.trajectories)
    assert group.trajectories[0].reason == "the greedy rollout that gives the baseline failed: broken"
    assert group.trajectories[1].reason == "broken"
    group, _ = grown([1.0, 0.0], 0.5, failed={"1"})
    assert [t.status for t in group.trajectories] == [Status.FINISHED, Status.FAILED]


def test_the_sampled_rollouts_are_those_without_a_baseline():
    """Identity, with a real engine: the greedy rollout changes no other one, and equals a run at temperature 0."""
    chosen = replace(
        resolve_settings({"env": "calculator"}), hidden=32, layers=1, slots=16, max_tokens=12, eval_tasks=2
    )
    env_spec = EnvSpec.from_settings(chosen)
    tokenizer = build.load_tokenizer(chosen, env_spec)
    renderer, model = Renderer(tokenizer), build.load_model(chosen, len(tokenizer))

    def played(strategy, size, **sampling):
        generator = engines.make_generator(chosen, recipes.build("remax"), model, renderer, True, 8)
        play = build.make_play(env_spec, renderer, replace(build.sampling_settings(chosen), **sampling))
        opened = lambda i, draft=False: generator.open(i)  # noqa: E731
        request = GroupRequest("0", Task("calculator", 3), size, opened, play)

        async def alone():
            return await strategy.begin(request)

        return asyncio.run(alone())

    said = lambda group: [[turn.tokens for turn in t.turns] for t in group.trajectories]  # noqa: E731
    with_baseline = played(GreedyBaseline(), 4)
    assert said(with_baseline) == said(played(Independent(), 4))
    greedy = played(Independent(), 1, temperature=0.0).trajectories[0]
    facts = with_baseline.trajectories[0].facts
    assert facts["greedy_reward"] == greedy.reward and facts["draft_tokens"] == greedy.sampled / 4


def test_a_group_of_one_is_enough():
    settings = resolve_settings({"method": "remax", "env": "calculator", "group_size": 1})
    refuse(RunPlan.from_settings(settings), (*WITH_RECIPE, *LOADED))


def test_another_strategy_has_no_greedy_rollout():
    with pytest.raises(SettingError, match="greedy_reward"):
        settings = resolve_settings({"method": "remax", "env": "calculator", "strategy": "independent"})
        refuse(RunPlan.from_settings(settings), (*WITH_RECIPE, *LOADED))
