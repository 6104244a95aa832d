"""Hinted rollouts: when they are drawn, what is sampled from, what is recorded, and which probability belongs to which text."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from support.episodes import Resting

from turnwise import recipes
from turnwise.algebra.piece import MicroBatchView
from turnwise.core.batch import pack
from turnwise.core.levels import TOKEN
from turnwise.core.records import Status, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.environments import make
from turnwise.errors import RecipeError, SettingError
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.strategies import GroupRequest, Hinted
from turnwise.training import build, engines
from turnwise.training.plan import EnvSpec, RunPlan, resolve_settings
from turnwise.training.refusals import LOADED, WITH_RECIPE, refuse

OFFERED = ("lookup", "keydoor", "calculator")


def grown(rewards, size=2, more=0, status=Status.FINISHED):
    sessions, asked = [], []

    def open_session(i):
        sessions.append(Resting())
        return sessions[-1]

    async def play(key, task, session, **how):
        asked.append((key, how))
        turn = Turn((1,), (2,), (-0.1,), version=(0,), reward=rewards[len(asked) - 1])
        guidance = "hint: x" if how.get("with_hint") else ""
        return Trajectory(key, task, (turn,), status=status, guidance=guidance)

    grow = Hinted(more).begin(GroupRequest("g", Task("x", 0), size, open_session, play))
    assert len(sessions) == size + (more or size), "the whole wave is known before anything is awaited"
    return asyncio.run(grow), sessions, asked


def test_a_group_that_fails_is_drawn_again_with_a_hint():
    group, sessions, asked = grown([0.0, 0.0, 1.0, 0.0])
    assert [how for _, how in asked] == [{}, {}, {"with_hint": True}, {"with_hint": True}]
    assert [t.id for t in group.trajectories] == ["g.0", "g.1", "g.2", "g.3"]
    assert [s.parked for s in sessions] == [False, False, True, True] and not any(s.closed for s in sessions)
    assert len(grown([0.0] * 5, more=3)[0].trajectories) == 5


def test_a_group_that_succeeds_once_needs_none():
    group, sessions, asked = grown([0.0, 1.0])
    assert len(group.trajectories) == len(asked) == 2
    assert [s.closed for s in sessions] == [False, False, True, True], "nobody waits for sessions that will never ask"


def test_a_broken_environment_is_not_mended_by_hints():
    group, sessions, _ = grown([0.0, 0.0], status=Status.FAILED)
    assert len(group.trajectories) == 2 and all(s.closed for s in sessions[2:])


def test_nonsense_is_refused():
    with pytest.raises(RecipeError, match="more is -1; write a number >= 0"):
        Hinted(-1)


@pytest.mark.parametrize("name", OFFERED)
def test_a_hint_is_guidance_and_not_the_answer(name):
    for seed in range(8):
        env = make(name)
        env.reset(seed)
        text = env.hint()
        assert isinstance(text, str) and text and env.hint() == text
        if name != "keydoor":
            assert str(env.answer()).split()[-1] not in text.split()


@pytest.mark.parametrize("env", ["guess", "nim"])
def test_an_environment_without_hints_is_refused_at_the_door(env):
    with pytest.raises(
        SettingError, match=r"a hint .* write --env calculator \(or countdown, keydoor, lookup, service"
    ):
        refuse(RunPlan.from_settings(resolve_settings({"method": "guide", "env": env})), (*WITH_RECIPE, *LOADED))


# ------------------------------------------------------------------ token by token


@pytest.fixture(scope="module", params=["keydoor", "lookup", "support.lottery:Hinted"])
def played(request):
    """A group of an untrained model, which fails, so that half of it was hinted."""
    torch.manual_seed(0)
    small = {"hidden": 32, "layers": 1, "max_tokens": 6, "max_turns": 3, "context": 600}
    chosen = resolve_settings({"env": request.param, **small})
    env_spec = EnvSpec.from_settings(chosen)
    renderer = Renderer(build.load_tokenizer(chosen, env_spec))
    model = build.load_model(chosen, len(renderer.tokenizer))
    generator = engines.make_local_generator(chosen, model, renderer)
    play = build.make_play(env_spec, renderer, build.sampling_settings(chosen))
    order = GroupRequest("0", Task(request.param, 5), 2, lambda i: generator.open(i), play)
    grow = lambda: Hinted(2).begin(order)  # noqa: E731

    async def alone():
        return await grow()

    return asyncio.run(alone()), model, env_spec, renderer


def with_the_hint(trajectory, env_spec, renderer):
    """The same trajectory as it was read when it was sampled."""
    env = env_spec.make(trajectory.task)
    first = env.reset(trajectory.task.seed)
    first = [{**first[0], "content": first[0]["content"] + "\n" + env.hint()}, *first[1:]]
    dialogue = renderer.open(first, tuple(getattr(env, "tools", ())), env_spec.limits.history)
    turns = []
    for turn in trajectory.turns:
        turns.append(replace(turn, context=tuple(dialogue.new_ids), restart=dialogue.restarted))
        step = env.step(renderer.append_sampled(dialogue, turn.tokens))
        if not (step.terminated or step.truncated):
            renderer.append_observation(dialogue, step.messages)
    return replace(trajectory, turns=tuple(turns))


def test_what_is_recorded_knows_no_hint(played):
    group, _, env_spec, renderer = played
    plain, with_hint = group.trajectories[:2], group.trajectories[2:]
    env = env_spec.make(group.task)
    env.reset(group.task.seed)
    assert [t.guidance for t in group.trajectories] == [""] * 2 + [f"hint: {env.hint()}"] * 2
    assert {t.turns[0].context for t in with_hint} == {plain[0].turns[0].context}
    for one in with_hint:
        assert env.hint() not in renderer.decode(one.ids()) and env.hint() not in str(one.messages)
        assert env.hint() in renderer.decode(with_the_hint(one, env_spec, renderer).turns[0].context)


def test_the_policy_is_judged_without_the_hint_and_divided_by_what_was_sampled_with_it(played):
    """ρ = π(y | task) / π_old(y | task, hint): an unmoved policy has ratio 1 on plain rows, and another on hinted ones."""
    group, model, env_spec, renderer = played
    batch = pack([group])
    read = replace(group, trajectories=tuple(with_the_hint(t, env_spec, renderer) for t in group.trajectories[2:]))
    learner = LocalLearner(model, LearnerSettings())
    measure = lambda b: learner.measure(b, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL]  # noqa: E731
    without, guided = measure(batch), batch.guided.at(TOKEN).x
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(measure(pack([read])).x.float(), batch.behaviour.x[guided], **near)
    torch.testing.assert_close(without.x[~guided].float(), batch.behaviour.x[~guided], **near)
    assert float((without.x[guided].float() - batch.behaviour.x[guided]).abs().max()) > 1e-3
    rho = recipes.build("guide").ratio(MicroBatchView(batch, {Signal.LOGP: without}))
    torch.testing.assert_close(rho.x[guided], (without.x[guided] - batch.behaviour.x[guided]).exp(), **near)
