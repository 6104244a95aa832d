"""Forked rollouts: a fork goes on from its parent's very state and ids, and what it sampled is what the learner reads."""

from __future__ import annotations

import asyncio

import pytest
import torch

from turnwise.config.settings import Settings
from turnwise.core.batch import pack, prefix
from turnwise.core.records import Status, Task, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.errors import RecipeError
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.strategies import Branch, GroupRequest
from turnwise.training import build, engines
from turnwise.training.plan import EnvSpec


@pytest.fixture(scope="module", params=["keydoor", "lookup"])
def grown(request):
    """Two forked groups of an untrained model, the model, and the env_spec they were played in."""
    torch.manual_seed(0)
    chosen = Settings.of({"env": request.param, "hidden": 32, "max_tokens": 6, "max_turns": 6, "context": 600})
    env_spec = EnvSpec.from_settings(chosen)
    tokenizer = build.load_tokenizer(chosen, env_spec)
    model = build.load_model(chosen, len(tokenizer))
    renderer = Renderer(tokenizer)
    generator = engines.make_local_generator(chosen, model, renderer)
    play = build.make_play(env_spec, renderer, build.sampling_settings(chosen))

    async def grow():
        tasks = [Task(request.param, seed) for seed in (1, 2)]
        open_session = lambda g: lambda i: generator.open(100 * g + i)  # noqa: E731
        requests = [GroupRequest(str(g), t, 6, open_session(g), play) for g, t in enumerate(tasks)]
        grows = [Branch(trunks=2).begin(request) for request in requests]
        return await asyncio.gather(*grows)

    return asyncio.run(grow()), model, env_spec


def test_forks_share_their_parents_prefix(grown):
    groups, _, _ = grown
    for group in groups:
        by_id = {t.id: t for t in group.trajectories}
        assert [t.fork is None for t in group.trajectories] == [True] * 2 + [False] * 4
        for child in group.trajectories[2:]:
            parent = by_id[child.fork.parent]
            assert child.status != Status.FAILED, child.reason
            assert child.fork.turn >= 1 and child.turns[0].context == ()
            assert child.turns[0].state == parent.turns[child.fork.turn].state
            shared = prefix(child, by_id)
            assert shared[-len(parent.turns[child.fork.turn].context) :] == list(parent.turns[child.fork.turn].context)


def test_what_was_sampled_is_what_the_learner_reads(grown):
    groups, model, _ = grown
    batch = pack(groups)
    learner = LocalLearner(model, LearnerSettings())
    found = learner.measure(batch, frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL]
    torch.testing.assert_close(found.x.float(), batch.behaviour.x, rtol=1e-4, atol=1e-4)


def test_trunks_that_end_at_once_have_siblings_instead_of_forks():
    class Resting:
        def park(self):
            pass

    async def play(key, task, session, **more):
        assert more.get("fork_from") is None
        return Trajectory(key, task, (Turn((1,), (2,), (-0.1,), version=(0,)),))

    task = Task("x", 0)
    group = asyncio.run(Branch(trunks=1).begin(GroupRequest("g", task, 4, lambda i: Resting(), play)))
    assert len(group.trajectories) == 4 and not any(t.fork for t in group.trajectories)


def test_nonsense_is_refused():
    with pytest.raises(RecipeError, match="surprise or even or every"):
        Branch(where="anywhere")
