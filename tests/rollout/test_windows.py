"""Windows of episodes: where they end, that they go on from there, and that nothing is sampled or trained on twice."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.outcomes import group_of
from support.untrained import Untrained

from turnwise import recipes
from turnwise.core.records import Limit, Status, Stop
from turnwise.errors import RecipeError
from turnwise.recipes.families.actor_critic import Windows
from turnwise.rollout.strategies import Independent
from turnwise.tasks.samplers import Begun
from turnwise.tasks.task_source import TaskStream


@pytest.fixture(scope="module", params=["keydoor", "lookup"])
def untrained(request):
    return Untrained(request.param)


def grown(untrained, live, size=2, seed=3):
    return asyncio.run(live.begin(untrained.request(seed=seed, size=size), Independent()))


def sampled(trajectory):
    return [i for turn in trajectory.turns for i in turn.tokens]


@pytest.mark.parametrize("length", [1, 5, 9])
def test_an_episode_goes_on_where_its_window_ended(untrained, length):
    """The context of a window is the whole of the windows before it, id for id, and each window has its tokens and no more."""
    live, before = Windows(length).open(0), dict[str, list[int]]()
    cut_inside = windows = 0
    for _ in range(6):
        group = grown(untrained, live)
        measured, recorded = untrained.logp(group)
        torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)
        for t in group.trajectories:
            assert t.status != Status.FAILED, t.reason
            whole = before.pop(t.guidance.removeprefix("continues "), [])
            context = list(t.turns[0].context)
            assert context[: len(whole)] == whole and len(sampled(t)) <= length
            if t.limit == Limit.TOKENS:
                assert len(sampled(t)) == length and t.success is None
                before[t.id] = [i for turn in t.turns for i in (*turn.context, *turn.tokens)]
                cut_inside += t.turns[-1].stop == Stop.WINDOW
                windows += bool(whole)
            else:
                assert len(sampled(t)) < length or t.turns[-1].stop != Stop.WINDOW
        # ids of a group are those of its number, which is the same each time here
        renamed = replace(group, trajectories=tuple(replace(t, id=f"{len(before)}.{t.id}") for t in group.trajectories))
        before = {r.id: before.pop(t.id) for t, r in zip(group.trajectories, renamed.trajectories) if t.id in before}
        live.observe(renamed)
        assert {name for name, _ in live.left.get(group.task.key, [])} == set(before)
        again = Windows(length).open(0)
        again.load_state_dict(json.loads(json.dumps(live.state_dict())))
        assert again.left == live.left and again.metrics() == live.metrics()
        live = again
    assert cut_inside and windows


def test_a_window_longer_than_every_episode_is_plain_sampling(untrained):
    tokens = lambda g: [[(turn.tokens, turn.context, turn.stop) for turn in t.turns] for t in g.trajectories]  # noqa: E731
    live = Windows(10_000).open(0)
    group = grown(untrained, live)
    assert tokens(group) == tokens(untrained.grow(Independent(), seed=3, size=2))
    live.observe(group)
    assert not live.left and live.metrics()["guidance/windows_cut"] == 0


def test_an_episode_that_nobody_knows_begins_again():
    """After a restart another group may hold the name: what it continued is not guessed."""
    live = Windows(4).open(0)
    group = group_of(TaskStream("t").draw(0), [0])
    strange = replace(group.trajectories[0], limit=Limit.TOKENS, guidance="continues elsewhere.0")
    live.observe(replace(group, trajectories=(strange,)))
    assert not live.left


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8), st.integers(0, 7))
def test_tasks_with_unfinished_episodes_come_first(cut, stop):
    """Against a queue written by hand; a restart changes nothing."""
    stream = TaskStream("t", seed=4)
    live, queue, fresh = Begun().open(stream), [], 0
    for n, step in enumerate(cut):
        wave = []
        for _ in step:
            wave.append(queue.pop(0) if queue else fresh)
            fresh += wave[-1] == fresh
        tasks = [live.next()[1] for _ in step]
        assert [t.key for t in tasks] == [stream.draw(k).key for k in wave]
        if n == stop:  # with groups in flight
            saved = json.loads(json.dumps(live.state_dict()))
            live = Begun().open(stream)
            live.load_state_dict(saved)
        for task, place, is_cut in zip(tasks, wave, step):
            group = group_of(task, [0])
            ended = replace(group.trajectories[0], limit=Limit.TOKENS if is_cut else None)
            live.observe(replace(group, trajectories=(ended,)))
            queue += [place] * is_cut
        assert live.again == queue


def test_the_recipe_has_both():
    recipe = recipes.build("t_ppo", window=7)
    assert recipe.guidance == Windows(7) and recipe.sampler == Begun()
    with pytest.raises(RecipeError, match="length is 0; write"):
        Windows(0)
