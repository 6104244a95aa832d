"""Rollouts forced into modes, and the reward that prefers the cheapest mode that suffices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import records, reweight
from support.episodes import RENDERER, FixedSession, Patient, play
from support.untrained import Untrained

from turnwise.core.batch import pack
from turnwise.core.levels import TRAJECTORY
from turnwise.core.records import Group, Status, Task, Trajectory, Turn
from turnwise.errors import RecipeError, SettingError
from turnwise.recipes.experience import piece
from turnwise.recipes.families.reward_shaping import CheapestModePays
from turnwise.rollout.episode import EpisodeSupport
from turnwise.rollout.strategies import ForcedModes, Independent


@pytest.fixture(scope="module")
def untrained():
    return Untrained("lookup")


def test_exactly_so_many_rollouts_carry_each_opening(untrained):
    group = untrained.grow(piece("strategy", "a2fm,forced=2"), size=6)
    assert [t.facts["forced"] for t in group.trajectories] == [1, 1, 1, 1, 0, 0]
    assert [t.facts["mode"] for t in group.trajectories[:4]] == [0, 0, 1, 1]
    assert all(t.status != Status.FAILED for t in group.trajectories)
    for t, opening in zip(group.trajectories, ["answer:"] * 2 + ["<tool_call>"] * 2):
        ids = untrained.renderer.encode(opening)
        assert list(t.turns[0].context)[-len(ids) :] == ids  # context, and not among the sampled tokens
    measured, recorded = untrained.logp(group)
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


class Counting(Patient):
    """An environment that counts the calls it sees."""

    def __init__(self):
        self.seen = []

    def step(self, action):
        self.seen.append((len(action.calls), len(action.faults)))
        return super().step(action)


@pytest.mark.parametrize(
    "start, said, calls",
    [
        ("answer:", CALL, (0, 0)),  # forced: what looks like a call stays text
        ("", f"answer: {CALL}", (0, 0)),  # chosen
        ("<tool_call>", CALL.removeprefix("<tool_call>"), (1, 0)),  # the last mode has tools
        ("", CALL, (1, 0)),
        ("", f"so: {CALL}", (1, 0)),  # no mode
    ],
)
def test_the_mode_that_answers_at_once_cannot_call(start, said, calls):
    env, closed = Counting(), ForcedModes().texts[:-1]
    support = EpisodeSupport("", start=tuple(RENDERER.encode(start)), without_tools=closed)
    play(env, FixedSession(said), support=support)
    assert env.seen[0] == calls


def test_a_closed_episode_stays_closed():
    class Second(FixedSession):
        async def generate(self, ids, sampling):
            self.tokens = RENDERER.encode_turn(CALL if self.read else "answer: 3")
            return await super().generate(ids, sampling)

    for closed, later in ((("answer:",), (0, 0)), ((), (1, 0))):
        env = Counting()
        play(env, Second(), support=EpisodeSupport("", without_tools=closed))
        assert env.seen == [(0, 0), later, later]


def test_without_forced_rollouts_it_is_plain_sampling(untrained):
    tokens = lambda g: [[tuple(turn.tokens) for turn in t.turns] for t in g.trajectories]  # noqa: E731
    assert tokens(untrained.grow(ForcedModes(forced=0))) == tokens(untrained.grow(Independent()))


def test_wrong_openings_and_small_groups_are_refused():
    with pytest.raises(SettingError, match="two or more different openings"):
        piece("strategy", "a2fm,openings=answer:")
    with pytest.raises(RecipeError, match="--group-size 6 or more"):
        ForcedModes(forced=3).check_group_size(4)


Rows = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([-1, 0, 1]), st.booleans()), min_size=2, max_size=8
)


@given(st.lists(Rows, min_size=1, max_size=3), st.floats(0.3, 4.0), st.floats(0.1, 0.9))
def test_the_reward_is_the_cards(groups, alpha, easy):
    """Against the oracle's advantages, and the card's bounds: within [0, R], and hard tasks are never charged."""
    made, listed = [], []
    for g, rows in enumerate(groups):
        task = Task("t", g)
        facts = [{"mode": float(m), "forced": float(f)} for _, m, f in rows]
        turn = lambda r: Turn((1,), (2, 3), (-0.5, -0.5), version=(0, 0), reward=r)  # noqa: E731
        made.append(Group(str(g), task, tuple(
            Trajectory(f"{g}.{i}", task, (turn(r),), facts=facts[i]) for i, (r, _, _) in enumerate(rows)
        )))  # fmt: skip
        listed.append([
            records.Trajectory([records.Turn([records.token(-0.5), records.token(-0.5)], r)], facts=facts[i])
            for i, (r, _, _) in enumerate(rows)
        ])  # fmt: skip
    batch = pack(made)
    paid = CheapestModePays(alpha, easy)(batch)
    assert paid.level == TRAJECTORY
    outcome = batch.reward.sum(TRAJECTORY).x
    assert bool((paid.x >= -1e-6).all()) and bool((paid.x <= outcome + 1e-6).all())
    from turnwise import recipes

    found = recipes.build("a2fm", alpha=alpha, easy=easy).advantage(batch).x.tolist()
    theirs = reweight.a2fm(listed, alpha=alpha, easy=easy).advantage[::2]
    assert found == pytest.approx(theirs, abs=2e-3, rel=2e-3)
    at = 0
    for rows in groups:
        cheap = [r > 0 for r, m, f in rows if f and m == 0]
        if not cheap or sum(cheap) / len(cheap) < easy:
            assert paid.x[at : at + len(rows)].tolist() == pytest.approx([r for r, _, _ in rows], abs=1e-6)
        at += len(rows)


def test_an_expensive_mode_on_an_easy_task_by_hand():
    """Forced: cheap 1, 1; expensive 1, 0. p = 3/4, so the expensive successes get 1 − 0.75² of their reward."""
    task, turn = Task("t", 0), lambda r: Turn((1,), (2,), (-0.5,), version=(0,), reward=r)
    rows = [(1.0, 0, 1), (1.0, 0, 1), (1.0, 1, 1), (0.0, 1, 1), (1.0, 0, 0), (1.0, 1, 0)]
    group = Group("0", task, tuple(
        Trajectory(f"0.{i}", task, (turn(r),), facts={"mode": float(m), "forced": float(f)}) for i, (r, m, f) in enumerate(rows)
    ))  # fmt: skip
    assert CheapestModePays(2.0, 0.5)(pack([group])).x.tolist() == pytest.approx([1, 1, 0.4375, 0, 1, 0.4375])
