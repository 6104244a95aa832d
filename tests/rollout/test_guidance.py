"""Guidance: who gets help, which help, what the record says of it; state survives a restart."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.outcomes import episode, group_of
from support.untrained import Untrained

from turnwise.core.records import Group, Origin, Task
from turnwise.data.replay import ExpertCache, ReplaySources
from turnwise.environments.base import tool_action
from turnwise.errors import SettingError
from turnwise.recipes.experience import SLOTS, piece
from turnwise.rollout.guidance import HintByDifficulty, RecordedPrefixes
from turnwise.rollout.scripted import as_expert
from turnwise.rollout.strategies import GroupRequest, Independent
from turnwise.rollout.support import Support, first_share, plan_of

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
        group, _, _ = grow(
            name, lambda s: s is not None and s.share > 0.3, live=live, task=Task("t", n % 2), group=str(n)
        )
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
    wrong = (
        "ghpo,shares=0.5/0.2",
        "ghpo,shares=x",
        "scaf,tiers=0",
        "pope,tries=0",
        "prefix,low=0.9",
        "adhint,most=2",
        "gpho",
    )
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


# ------------------------------------------------------- plans of an expert's trace


def test_a_plan_in_words():
    assert plan_of(["north", "north", "take", "east"]) == "plan: north 2 times, then take, then east"
    call = tool_action("python", code="t=a*b;t").text
    assert plan_of([call, "answer: t"]) == "plan: python t=a*b;t, then answer: t"
    assert plan_of(["<tool_call>no json</tool_call>"]) == "plan: no json"


def test_the_policy_plays_with_the_plan_until_it_succeeds():
    tries = iter([False, False, True, True])
    group, world, live = grow("bepa,tries=4", lambda support: bool(support) and next(tries))
    assert world.given[4:] == [Support(plan=True, recorded=False)] * 3  # the fourth is not needed
    rolled = group.trajectories[-1]
    assert len(group.trajectories) == 5 and rolled.origin == Origin.EXPERT and rolled.guidance == "plan"
    assert all(turn.logp == () and turn.version == () for turn in rolled.turns) and rolled.sampled
    assert live.metrics()["guidance/plans_given"] == 3 and live.metrics()["guidance/plans_worked"] == 1
    live.observe(group)
    again, world, _ = grow("bepa", lambda support: False, live=live, group="4")
    assert world.given == [None] * 4 and len(again.trajectories) == 4, "a task is played with its plan once"


def test_a_plan_that_never_works_leaves_the_group_as_it_is():
    group, world, live = grow("bepa,tries=2", lambda support: False)
    plain, _, _ = grow("none", lambda support: False)
    assert group == plain and len(world.given) == 6
    live.observe(group)
    assert live.metrics()["guidance/traced_tasks"] == 0


def test_the_planned_success_enters_the_cache_and_the_policys_own_replaces_it():
    failed = Group("3", TASK, tuple(episode(f"3.{i}", TASK, False) for i in range(2)))
    rolled = as_expert(episode("3.200000", TASK, True, guidance="plan"))
    planned = Group("3", TASK, (*failed.trajectories, rolled))
    rows = {t.id: t for t in planned.trajectories}
    live = ExpertCache().open(ReplaySources(rows.get, lambda task: rolled, 0))
    assert live.missing_demonstrations([planned]) == [] and live.mix([planned], 0) == [planned], (
        "it needs no other trace"
    )
    live.observe([planned], {}, 0)
    state = live.state_dict()
    live = ExpertCache().open(ReplaySources(rows.get, lambda task: None, 0))
    live.load_state_dict(state)
    (mixed,) = live.mix([Group("4", TASK, tuple(episode(f"4.{i}", TASK, False) for i in range(2)))], 2)
    borrowed = next(t for t in mixed.trajectories if t.origin == Origin.REPLAY)
    assert borrowed.id == rolled.id and borrowed.facts["age"] == 2
    own = Group("5", TASK, (episode("5.0", TASK, True),))
    rows["5.0"] = own.trajectories[0]
    live.observe([own], {}, 3)
    live.observe([planned], {}, 4)  # an older planned trace does not replace the policy's own success
    assert live.state_dict()["stored"][TASK.key][0][0] == "5.0"
    demonstration = as_expert(episode("oracle:x", TASK, True))
    other = ExpertCache().open(ReplaySources(rows.get, lambda task: None, 0))
    other.observe([Group("6", TASK, (*failed.trajectories, demonstration))], {}, 0)
    assert other.state_dict()["stored"] == {}, "a demonstration is not in the ledger"


def test_the_record_does_not_contain_the_plan():
    untrained = Untrained("keydoor", max_turns=40)  # the scripted solution must fit

    async def play(**support):
        request = untrained.request(size=1)
        return (await request.play_all(request.sessions(), support=Support(plan=True, **support)))[0]

    hidden, shown = asyncio.run(play(recorded=False)), asyncio.run(play())
    assert "plan" in hidden.guidance and hidden.turns and shown.turns
    says = lambda t: any("plan:" in str(m.get("content")) for m in t.messages)  # noqa: E731
    assert not says(hidden) and says(shown) and len(hidden.turns[0].context) < len(shown.turns[0].context)


def test_impossible_tries_are_refused():
    with pytest.raises(SettingError, match="tries is 0; write a number >= 1"):
        piece("guidance", "bepa,tries=0")
