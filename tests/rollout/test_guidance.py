"""Guidance: who gets help, which help, what the record says of it; state survives a restart."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.outcomes import episode, group_of

from turnwise.core.records import Task
from turnwise.errors import SettingError
from turnwise.recipes.experience import SLOTS, piece
from turnwise.rollout.guidance.scheduled import HintByDifficulty, RecordedPrefixes
from turnwise.rollout.guidance.support import Support, first_share
from turnwise.rollout.strategies import GroupRequest, Independent

TASK = Task("test", 7)


class Idle:
    """A session that only counts what happens to it."""

    def __init__(self):
        self.closed = self.parked = False

    def park(self):
        self.parked = True

    def close(self):
        self.closed = True


class World:
    """Plays episodes; ``solves(support)`` decides which of them succeed."""

    def __init__(self, solves):
        self.solves, self.sessions, self.given = solves, {}, []

    def open(self, i, draft=False):
        assert i not in self.sessions, f"session {i} was opened twice"
        self.sessions[i] = Idle()
        return self.sessions[i]

    async def play(self, key, task, session, temperature_scale=1.0, support=None, **more):
        await asyncio.sleep(0)
        session.closed = True
        self.given.append(support)
        return episode(key, task, self.solves(support), guidance=support.label if support else "")

    def request(self, size=4, step=100, task=TASK, group="3"):
        return GroupRequest(group, task, size, self.open, self.play, {}, step)


def grow(name, solves, size=4, step=100, live=None, task=TASK, group="3"):
    world = World(solves)
    live = live or piece("guidance", name).open(0)

    async def run():
        return await live.begin(world.request(size, step, task, group), Independent())

    made = asyncio.run(run())
    assert all(s.closed for s in world.sessions.values()), "a session was left open"
    return made, world, live


NAMES = [n for n in SLOTS["guidance"] if n != "none"]
STUCK = ["ghpo", "scaf", "guide"]


@pytest.mark.parametrize("name", ["none", "ghpo", "scaf", "guide", "xrpo", "pope"])
def test_where_the_policy_succeeds_there_is_no_help(name):
    group, world, _ = grow(name, lambda support: True)
    plain, _, _ = grow("none", lambda support: True)
    assert group == plain and world.given == [None] * 4


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_distinct_and_help_is_recorded(name):
    group, world, _ = grow(name, lambda support: support is not None)
    assert len({t.id for t in group.trajectories}) == len(group.trajectories)
    helped = sum(bool(t.guidance) for t in group.trajectories)
    assert helped <= sum(s is not None for s in world.given)


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_a_restart(name):
    live = piece("guidance", name).open(0)
    for n in range(6):
        group, _, _ = grow(name, lambda s: s is not None and s.share > 0.3, live=live, task=Task("t", n % 2), group=str(n))
        live.observe(replace(group, id=str(n)))
    other = piece("guidance", name).open(0)
    other.load_state_dict(json.loads(json.dumps(live.state_dict())))
    for n in range(6, 10):
        one, _, _ = grow(name, lambda s: bool(s), live=live, task=Task("t", n % 2), group=str(n))
        two, _, _ = grow(name, lambda s: bool(s), live=other, task=Task("t", n % 2), group=str(n))
        assert one == two
        live.observe(one)
        other.observe(two)
    assert live.metrics() == other.metrics()


# ------------------------------------------------------------------ one by one


@pytest.mark.parametrize("works, given_shares", [(0.2, [0.25]), (0.5, [0.25, 0.5]), (2.0, [0.25, 0.5, 0.75])])
def test_the_share_grows_until_one_succeeds(works, given_shares):
    group, world, _ = grow("ghpo", lambda s: s is not None and s.share >= works)
    shares = [s.share for s in world.given if s is not None]
    assert shares == [share for share in given_shares for _ in range(4)]  # at most three times the group
    assert len(group.trajectories) == 4 and all(t.guidance for t in group.trajectories)  # one common prompt


def test_no_help_before_its_first_step():
    _, world, _ = grow("ghpo,begin=5", lambda s: False, step=4)
    assert world.given == [None] * 4
    _, world, _ = grow("scaf,warmup=5", lambda s: False, step=4)
    assert world.given == [None] * 4


@pytest.mark.parametrize("tier", [1, 2, 4])
def test_the_weakest_working_tier_replaces_one_rollout(tier):
    group, world, live = grow("scaf,tiers=4", lambda s: s is not None and s.tier >= tier)
    assert [s.tier for s in world.given if s] == list(range(1, tier + 1))
    assert len(group.trajectories) == 4
    assert sum(t.reward for t in group.trajectories) == 1.0  # before: 0; after: exactly the replaced reward
    assert [bool(t.guidance) for t in group.trajectories] == [False] * 3 + [True]
    assert live.metrics()[f"guidance/tier_{tier}_worked"] == 1


def test_where_no_tier_works_the_group_is_unchanged():
    group, _, _ = grow("scaf", lambda s: False)
    plain, _, _ = grow("none", lambda s: False)
    assert group == plain


def test_hinted_rollouts_are_recorded_without_the_hint():
    group, world, _ = grow("guide", lambda s: s is not None)
    assert len(group.trajectories) == 8
    assert all(not s.recorded for s in world.given if s is not None)
    group, _, _ = grow("guide,union=false", lambda s: s is not None)
    assert len(group.trajectories) == 4 and all(t.guidance for t in group.trajectories)


def test_the_shortest_working_prefix_is_found_and_withdrawn():
    """Plain and guided groups alternate; shares rise until one works; the first plain success ends the help."""
    live, able, shares = piece("guidance", "pope,tries=4").open(0), [False], []
    for n in range(12):
        able[0] = n >= 10
        group, world, _ = grow("pope", lambda s: able[0] or (s is not None and s.share >= 0.5), live=live, group=str(n))
        live.observe(replace(group, id=str(n)))
        shares.append(world.given[0].share if world.given[0] else 0.0)
        assert len({t.guidance for t in group.trajectories}) == 1  # never mixed
    assert shares == [0, 0.25, 0, 0.5, 0, 0.5, 0, 0.5, 0, 0.5, 0, 0]
    assert live.metrics()["guidance/withdrawn"] == 1 and live.metrics()["guidance/hard_tasks"] == 0


def test_three_of_four_groups_continue_a_prefix_that_is_fixed_for_the_task():
    cuts, guided = set(), 0
    for n in range(400):
        _, world, _ = grow("prefix", lambda s: True, size=1, group=str(n))
        guided += world.given[0] is not None
        cuts |= {world.given[0].share} if world.given[0] else set()
        assert world.given[0] is None or world.given[0].played
    assert len(cuts) == 3 and all(0.4 <= cut <= 0.8 for cut in cuts)
    assert guided / 400 == pytest.approx(0.75, abs=0.07)
    assert grow("prefix,prefixes=0", lambda s: True)[1].given == [None] * 4


@given(st.floats(0, 1), st.floats(0, 1))
def test_hints_grow_with_difficulty(a, b):
    rule = HintByDifficulty(0.7)
    assert 0 <= rule.share(a) <= 0.7 and (rule.share(a) <= rule.share(b) or a <= b)
    assert rule.share(1.0) == 0


def test_easy_groups_get_no_prefix():
    _, world, _ = grow("adhint", lambda s: True)
    assert world.given == [None] * 4
    _, world, _ = grow("adhint", lambda s: False)
    assert [s.share if s else 0 for s in world.given] == [0, 0, 0.8, 0.8]


def test_examples_come_from_successes_of_similar_tasks():
    live = piece("guidance", "xrpo,examples=1").open(0)
    for n, words in enumerate(("red blue", "red green one")):
        solved = group_of(Task("t", n), [1], n)
        told = tuple(
            replace(t, messages=({"role": "user", "content": words}, {"role": "assistant", "content": f"did {words}"}))
            for t in solved.trajectories
        )
        live.observe(replace(solved, trajectories=told))
    asked = replace(group_of(TASK, [0]).trajectories[0], messages=({"role": "user", "content": "green one"},))
    text = live.example_text(replace(group_of(TASK, [0]), trajectories=(asked,)))
    assert "did red green one" in text and "red blue" not in text


def test_cuts_are_a_function_of_seed_task_and_number():
    rule = RecordedPrefixes()
    assert rule.cut(1, "a", 0) == rule.cut(1, "a", 0) != rule.cut(1, "a", 1) != rule.cut(2, "a", 1)


def test_labels_and_shares_of_text():
    assert Support(tier=2).label == "hints 1-2" and Support(share=0.5).label == "prefix 0.50"
    assert first_share(["ab", "cd"], 0.6) == "ab\n"


def test_nonsense_is_refused():
    wrong = ("ghpo,shares=0.5/0.2", "ghpo,shares=x", "scaf,tiers=0", "pope,tries=0", "prefix,low=0.9", "adhint,most=2", "gpho")
    for spec in wrong:
        with pytest.raises(SettingError):
            piece("guidance", spec)


def test_help_that_leaves_nothing_to_sample_leaves_the_plain_group():
    """A prefix may fill the context window; the plain rollouts are kept then."""

    class Full(World):
        async def play(self, key, task, session, temperature_scale=1.0, support=None, **more):
            made = await super().play(key, task, session, temperature_scale, support, **more)
            return replace(made, turns=()) if support else made

    world, live = Full(lambda s: False), piece("guidance", "ghpo").open(0)

    async def run():
        return await live.begin(world.request(), Independent())

    assert not any(t.guidance for t in asyncio.run(run()).trajectories)
