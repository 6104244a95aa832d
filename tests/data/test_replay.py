"""Replay buffers: what they keep, when they give it back, and that they survive being written down."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.core.records import Fork, Group, Origin, Task, Trajectory, Turn
from turnwise.data.replay import ExpertCache, NoReplay, RecentBuffer, ReplaySources, SuccessBuffer, WeightedPool
from turnwise.errors import RecipeError


def trajectory(key, task, reward=0.0, **other):
    calls = other.pop("calls", 0)
    turn = Turn((1,), (2,), (-0.5,), version=(0,), reward=reward, tool_calls=calls)
    return Trajectory(key, task, (turn,), **other)


def group(key, seed, *rewards, calls=0):
    task = Task("test", seed)
    return Group(key, task, tuple(trajectory(f"{key}.{i}", task, r, calls=calls) for i, r in enumerate(rewards)))


class Book:
    """Everything that was ever sampled, by its id."""

    def __init__(self):
        self.rows, self.reads = {}, []

    def open(self, rule, shown=lambda task: None):
        return rule.open(ReplaySources(self.read, shown, 7))

    def read(self, key):
        self.reads.append(key)
        return self.rows.get(key)

    def learn(self, live, groups, credited, step):
        self.rows |= {t.id: t for g in groups for t in g.trajectories}
        live.observe(groups, credited, step)


def past(groups):
    return [t for g in groups for t in g.trajectories if t.origin != Origin.POLICY]


def test_nothing_is_mixed_in():
    live = NoReplay().open(ReplaySources(None, None, 0))
    groups = [group("0", 1, 0.0, 1.0)]
    assert live.mix(groups, 3) == groups and live.missing_demonstrations(groups) == [] and live.state_dict() == {}


# -------------------------------------------------------------- by task: success


def test_a_failing_group_gets_a_past_success_of_its_task_instead_of_its_first_rollout():
    book = Book()
    live = book.open(SuccessBuffer())
    book.learn(live, [group("0", 1, 1.0, 0.0), group("1", 2, 0.0, 0.0)], {"0.0": 0.7}, 4)
    mixed = live.mix([group("2", 1, 0.0, 0.0), group("3", 2, 0.0, 0.0), group("4", 1, 0.0, 1.0)], 6)
    assert [[t.id for t in g.trajectories] for g in mixed] == [["0.0", "2.1"], ["3.0", "3.1"], ["4.0", "4.1"]]
    row = mixed[0].trajectories[0]
    assert row.origin == Origin.REPLAY and row.facts == {"age": 2, "advantage": 0.7} and row.reward == 1.0


def test_a_group_fails_by_the_spread_of_all_of_it():
    """The standard deviation with n, as the released apply_replay has it: 0.0475 here, 0.0672 with n − 1."""
    fails = SuccessBuffer(mean=0.5).fails
    assert fails(group("0", 1, 0.0, 0.095)) and not fails(group("0", 1, 0.0, 0.105)) and not fails(group("0", 1, 0.6, 0.6))


def test_beside_the_rollouts_if_asked_for():
    book = Book()
    live = book.open(SuccessBuffer(instead=False))
    book.learn(live, [group("0", 1, 1.0)], {}, 0)
    assert [t.id for t in live.mix([group("1", 1, 0.0, 0.0)], 1)[0].trajectories] == ["0.0", "1.0", "1.1"]


def test_a_rollout_that_others_fork_from_is_not_replaced():
    book = Book()
    live = book.open(SuccessBuffer())
    book.learn(live, [group("0", 1, 1.0)], {}, 0)
    task = Task("test", 1)
    forked = (trajectory("1.0", task), trajectory("1.1", task, fork=Fork("1.0", 0)), trajectory("1.2", task))
    assert [t.id for t in live.mix([Group("1", task, forked)], 1)[0].trajectories] == ["0.0", "1.0", "1.2"]


def test_the_oldest_success_falls_out_first():
    book = Book()
    live = book.open(SuccessBuffer(capacity=2))
    for i in range(4):
        book.learn(live, [group(str(i), 1, 1.0)], {}, i)
    assert [entry[0] for entry in live.stored["test/train/1/1"]] == ["2.0", "3.0"]
    drawn = {live.mix([group("9", 1, 0.0, 0.0)], step)[0].trajectories[0].id for step in range(30)}
    assert drawn == {"2.0", "3.0"}, "each is drawn sooner or later"


def test_a_success_whose_tokens_are_gone_is_passed_over():
    book = Book()
    live = book.open(SuccessBuffer())
    book.learn(live, [group("0", 1, 1.0, 1.0)], {}, 0)
    del book.rows["0.0"]
    for step in range(8):
        assert live.mix([group("1", 1, 0.0, 0.0)], step)[0].trajectories[0].id == "0.1"
    book.rows.clear()
    assert past(live.mix([group("1", 1, 0.0, 0.0)], 1)) == []


def test_tasks_are_forgotten_in_the_order_of_their_last_success():
    book = Book()
    live = book.open(SuccessBuffer(tasks=2))
    for i, seed in enumerate((1, 2, 1, 3)):
        book.learn(live, [group(str(i), seed, 1.0)], {}, i)
    assert list(live.stored) == ["test/train/1/1", "test/train/1/3"]


# ------------------------------------------------------------------------ pools


def test_recent_rows_with_positive_credit_join_as_groups_of_one():
    book = Book()
    live = book.open(RecentBuffer(oldest=2, share=1.0))
    book.learn(live, [group("0", 1, 1.0, 0.0)], {"0.0": 0.5, "0.1": -0.5}, 0)
    mixed = live.mix([group("1", 2, 0.0, 0.0)], 2)
    assert [g.id for g in mixed] == ["1", "replay/0.0"] and past(mixed)[0].facts == {"age": 2, "advantage": 0.5}
    assert past(live.mix([group("2", 2, 0.0)], 3)) == [] and live.stored == [], "too old"


def test_a_buffer_may_ask_for_tool_calls():
    book = Book()
    live = book.open(RecentBuffer(tools=1))
    book.learn(live, [group("0", 1, 1.0), group("1", 1, 1.0, calls=2)], {"0.0": 1.0, "1.0": 1.0}, 0)
    assert [entry[0] for entry in live.stored] == ["1.0"]


def test_no_more_rows_than_the_share_and_none_twice():
    book = Book()
    live = book.open(RecentBuffer(share=0.5, size=6))
    book.learn(live, [group(str(i), i, 1.0) for i in range(9)], {f"{i}.0": 1.0 for i in range(9)}, 0)
    assert len(live.stored) == 6
    mixed = past(live.mix([group("x", 1, *[0.0] * 8)], 1))
    assert len(mixed) == 4 == len({t.id for t in mixed})
    again = past(live.mix([group("x", 1, *[0.0] * 8)], 1))
    assert [t.id for t in again] == [t.id for t in mixed], "the draw depends on seed and step alone"
    assert [t.id for t in past(live.mix([group("x", 1, *[0.0] * 8)], 2))] != [t.id for t in mixed]


def test_a_pool_draws_by_the_size_of_the_credit():
    book = Book()
    live = book.open(WeightedPool(share=1.0))
    credit = {"0.0": 0.0, "0.1": 1.0, "0.2": -3.0, "0.3": math.nan}
    assert live.rule.takes(None, -1.5e-6) and not live.rule.takes(None, 0.5e-6)  # below is rounding
    book.learn(live, [group("0", 1, 0, 0, 0, 0)], credit, 0)
    assert [entry[0] for entry in live.stored] == ["0.1", "0.2"]
    first = [past(live.mix([group("x", 1, 0.0)], step))[0].id for step in range(2000)]
    assert 0.70 < first.count("0.2") / 2000 < 0.80  # 3 / 4
    assert past(live.mix([group("x", 1, 0.0)], 5000)), "never too old"


# ------------------------------------------------------------------ expert first


def test_an_expert_until_the_policy_has_a_success_of_its_own():
    book, task = Book(), Task("test", 1)
    shown = trajectory("expert", task, 1.0, origin=Origin.EXPERT)
    live = book.open(ExpertCache(), lambda t: shown if t == task else None)
    fails = group("0", 1, 0.0, 0.0)
    assert live.missing_demonstrations([fails, group("1", 2, 0.0), group("2", 3, 1.0)]) == [task, Task("test", 2)]
    mixed = live.mix([fails, group("1", 2, 0.0)], 0)
    assert [t.id for t in mixed[0].trajectories] == ["expert", "0.1"] and [t.id for t in mixed[1].trajectories] == [
        "1.0"
    ]
    book.learn(live, [group("3", 1, 0.0, 1.0, 1.0)], {}, 1)
    assert live.missing_demonstrations([fails]) == []
    row = live.mix([fails], 2)[0].trajectories[0]
    assert row.id == "3.1" and row.origin == Origin.REPLAY and row.facts["age"] == 1
    book.learn(live, [group("4", 1, 1.0)], {}, 3)
    assert live.mix([fails], 4)[0].trajectories[0].id == "4.0", "the latest success"


# ---------------------------------------------------------------------- memory


KINDS = (SuccessBuffer(), RecentBuffer(), WeightedPool(), ExpertCache())


@pytest.mark.parametrize("rule", KINDS, ids=lambda r: type(r).__name__)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_written_down_and_read_again_it_goes_on_alike(rule, seed):
    import random

    dice = random.Random(seed)
    history = [
        [group(f"{step}-{i}", dice.randint(1, 3), *[dice.choice([0.0, 0.0, 1.0]) for _ in range(3)]) for i in range(2)]
        for step in range(8)
    ]
    credit = {t.id: dice.uniform(-1, 1) for groups in history for g in groups for t in g.trajectories}
    book = Book()
    straight, first = book.open(rule), book.open(rule)

    def play(live, steps):
        out = []
        for step in steps:
            out.append(live.mix(history[step], step))
            book.learn(live, history[step], credit, step)
        return out

    expected = play(straight, range(8))
    play(first, range(4))
    second = book.open(rule)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert play(second, range(4, 8)) == expected[4:]
    assert second.state_dict() == straight.state_dict() and second.metrics() == straight.metrics()


@pytest.mark.parametrize("rule", KINDS, ids=lambda r: type(r).__name__)
def test_only_fresh_rollouts_are_remembered(rule):
    book = Book()
    live = book.open(rule)
    task = Task("test", 1)
    mixed = Group("0", task, tuple(trajectory(str(o), task, 1.0, origin=o) for o in Origin))
    book.learn(live, [mixed], dict.fromkeys(map(str, Origin), 1.0), 0)
    assert json.dumps(live.state_dict()).count("policy") == 1
    assert not {"replay", "expert"} & set(json.dumps(live.state_dict()).split('"'))


@pytest.mark.parametrize(
    "wrong",
    [lambda: SuccessBuffer(0), lambda: RecentBuffer(oldest=0), lambda: RecentBuffer(share=0), lambda: WeightedPool(0),
     lambda: WeightedPool(power=-1), lambda: ExpertCache(tasks=0), lambda: SuccessBuffer(spread=-1)],
)  # fmt: skip
def test_impossible_buffers_are_refused(wrong):
    with pytest.raises(RecipeError, match="write"):
        wrong()
