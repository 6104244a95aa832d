"""The collector: what is out, what is admitted, in which order, and when to give up. No model, no clock but the loop's."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import replace

import pytest

from turnwise import recipes
from turnwise.core.records import Fork, Group, Status, Task, Trajectory, Turn
from turnwise.errors import EnvironmentFault
from turnwise.rollout.scoring import RewardScore, apply_scores, scorable
from turnwise.rollout.strategies import Hinted
from turnwise.tasks.admission import AdmitAll, Spread
from turnwise.tasks.budgets import Fixed
from turnwise.tasks.samplers import Uniform
from turnwise.tasks.task_source import TaskStream
from turnwise.training.collector import FAILED_IN_A_ROW, Collector, usable
from turnwise.training.task_feed import TaskFeed

SIZE = 2


class Seeds:
    """A generator whose sessions are just their seeds."""

    version = 0

    def open(self, seed):
        return seed


class Book:
    """A ledger that writes everything down."""

    def __init__(self):
        self.issued, self.finished, self.dropped = {}, [], {}

    def issue(self, key, task, step, version):
        assert key not in self.issued, f"{key} was issued twice"
        self.issued[key] = step

    def finish(self, group, step):
        self.finished.append(group.id)

    def drop(self, key, reason, step):
        self.dropped[key] = reason


def trajectory(key, task, reward=0.0, **other):
    return Trajectory(key, task, (Turn((1,), (2,), (-0.5,), version=(0,), reward=reward),), **other)


class Player:
    """Plays at once, or after a delay; rewards and failures by group number and sibling."""

    def __init__(self, reward=lambda group, i: float(i), delay=lambda group: 0.0, fails=lambda group: False):
        self.reward, self.delay, self.fails = reward, delay, fails
        self.seeds, self.running, self.most = {}, set(), 0

    async def __call__(self, key, task, session):
        group, i = key.split("~")[0].split(".")[0], int(key.split(".")[-1])
        self.seeds[key] = session
        self.running.add(key)
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(self.delay(int(group)))
        self.running.discard(key)
        made = trajectory(key, task, self.reward(int(group), i))
        return made.failed("no display") if self.fails(int(group)) else made


def collector(play=None, *, groups=3, staleness=0, admission=None, max_draws=8) -> Collector:
    recipe = replace(recipes.build("grpo"), budget=Fixed(groups, SIZE), admission=admission or AdmitAll())
    sampler = TaskFeed(Uniform().open(TaskStream("test")), recipe.budget.open())
    return Collector(
        recipe, Seeds(), sampler, Book(), play or Player(), seed=1, staleness=staleness, max_draws=max_draws
    )


def out(c: Collector) -> int:
    return len(c.running) + len(c.ready) + c.training


def ids(groups) -> list[str]:
    return [g.id for g in groups]


# ------------------------------------------------------------------ staleness


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_never_more_out_than_staleness_allows(staleness):
    rng = random.Random(staleness)
    play = Player(delay=lambda group: rng.random() * 0.01)
    c = collector(play, groups=3, staleness=staleness)

    async def run():
        trained = []
        for step in range(6):
            groups = await c.collect_step(step)
            assert len(groups) == 3 and c.training == 3
            assert ids(groups) == sorted(ids(groups), key=int), "finishing first is no reason to come first"
            c.issue(step)  # while the learner works
            assert out(c) <= (staleness + 1) * 3
            await asyncio.sleep(0.005)
            c.training = 0
            trained += ids(groups)
        await c.stop()
        return trained

    trained = asyncio.run(run())
    assert len(set(trained)) == len(trained) == 18, "a group was trained twice"
    assert play.most <= (staleness + 1) * 3 * SIZE
    assert set(trained) | set(c.running.values()) | set(ids(c.ready)) == set(c.ledger.issued)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_group_is_trained_on_more_than_k_steps_after_it_was_issued(staleness):
    """Not even the slowest: one group takes far longer than the others."""
    c = collector(Player(delay=lambda group: 0.1 if group == 0 else 0.001), groups=1, staleness=staleness)

    async def run():
        ages = []
        for step in range(12):
            groups = await c.collect_step(step)
            ages += [step - c.ledger.issued[g.id] for g in groups]
            c.issue(step)
            await asyncio.sleep(0.012)
            c.training = 0
        await c.stop()
        return ages

    assert max(asyncio.run(run())) <= staleness


def test_synchronous_groups_come_in_waves():
    """With staleness 0 nothing is issued while a wave runs, and nothing while the learner works."""
    c = collector(Player(delay=lambda group: 0.004 * (group + 1)), groups=3)

    async def run():
        c.issue(0)
        assert set(c.running.values()) == {"0", "1", "2"}
        await asyncio.sleep(0.006)  # the first has ended
        c.issue(0)
        assert len(c.ledger.issued) == 3
        await c.collect_step(0)
        c.issue(0)
        assert len(c.ledger.issued) == 3 and not c.running

    asyncio.run(run())


def test_a_dropped_group_is_replaced_in_the_next_wave_not_in_this_one():
    play = Player(lambda group, i: float(i * (group > 2)), delay=lambda group: 0.003 * (group + 1))
    c = collector(play, groups=3, admission=Spread())
    issue = c.ledger.issue

    def alone(*facts):
        assert not play.running, "issued while a wave was running"
        issue(*facts)

    c.ledger.issue = alone
    assert ids(asyncio.run(c.collect_step(0))) == ["3", "4", "5"]


def test_all_sessions_of_a_wave_are_open_before_anything_runs():
    c = collector(groups=4)
    opened = []
    c.generator.open = lambda seed: opened.append(seed) or seed

    async def run():
        c.issue(0)
        assert len(opened) == 4 * SIZE and len(set(opened)) == len(opened)
        await c.stop()

    asyncio.run(run())


# ------------------------------------------------------------ admission, draws


def test_zero_variance_groups_are_dropped_and_others_drawn():
    c = collector(Player(reward=lambda group, i: float(i * (group % 2))), groups=3, admission=Spread())
    groups = asyncio.run(c.collect_step(0))
    assert ids(groups) == ["1", "3", "5"]
    assert c.ledger.dropped == dict.fromkeys(("0", "2", "4"), "no spread of rewards")
    assert c.dropped["no spread of rewards"] == 3


def test_a_batch_that_cannot_be_filled_is_given_up():
    c = collector(Player(reward=lambda group, i: 1.0), groups=2, admission=Spread(), max_draws=3)
    assert asyncio.run(c.collect_step(0)) == []
    assert len(c.ledger.issued) == len(c.ledger.dropped) == 2 * 3


def test_what_was_found_before_giving_up_is_used():
    c = collector(Player(reward=lambda group, i: float(i * (group == 1))), groups=2, admission=Spread(), max_draws=3)
    assert ids(asyncio.run(c.collect_step(0))) == ["1"]


def test_failed_trajectories_are_left_out_and_counted():
    class Half(Player):
        async def __call__(self, key, task, session):
            made = await super().__call__(key, task, session)
            return made.failed("no display") if key.endswith(".0") else made

    c = collector(Half(), groups=2)
    groups = asyncio.run(c.collect_step(0))
    assert [[t.id for t in g.trajectories] for g in groups] == [["0.1"], ["1.1"]]
    assert c.dropped == {"trajectory: no display": 2} and c.ledger.finished == ["0", "1"]


def test_a_run_in_which_everything_fails_stops_and_says_why():
    c = collector(Player(fails=lambda group: True), groups=4)
    with pytest.raises(EnvironmentFault, match=r"16 groups in a row.*no display"):
        asyncio.run(c.collect_step(0))
    assert FAILED_IN_A_ROW == len(c.ledger.dropped) == 16
    assert c.ledger.dropped["3"] == "every trajectory failed: no display"


def test_failures_must_be_in_a_row():
    c = collector(Player(fails=lambda group: group % 16 != 15), groups=2, max_draws=99)
    assert ids(asyncio.run(c.collect_step(0))) == ["15", "31"]


# ----------------------------------------------------------------------- order


@pytest.mark.parametrize("admission", [AdmitAll(), Spread()], ids=repr)
def test_the_order_does_not_depend_on_who_finishes_first(admission):
    """At staleness 0, whatever the delays: the same groups, in draw order, from the same seeds."""

    def run(seed):
        rng = random.Random(seed)
        reward = lambda group, i: float(i * (group % 3 > 0))  # noqa: E731
        play = Player(reward, delay=lambda group: rng.random() * 0.008)
        c = collector(play, groups=4, admission=admission)

        async def steps():
            found = []
            for step in range(3):
                found.append(ids(await c.collect_step(step)))
                c.training = 0
            return found

        return asyncio.run(steps()), {key: play.seeds[key] for key in sorted(play.seeds)}

    first = run(0)
    assert all(batch == sorted(batch, key=int) and len(batch) == 4 for batch in first[0])
    assert all(run(seed) == first for seed in (1, 2, 3))


def test_the_sampler_observes_in_draw_order_too():
    """Or a sampler that learns would learn from timing."""
    seen = []
    c = collector(Player(delay=lambda group: 0.002 * (5 - group)), groups=4)
    c.sampler.observe = lambda group: seen.append(group.id)
    asyncio.run(c.collect_step(0))
    assert seen == ["0", "1", "2", "3"]


# ---------------------------------------------------------------------- resume


def test_what_is_owed_after_a_resume_comes_first_from_the_same_seeds():
    fresh, resumed = Player(), Player()
    asyncio.run(collector(fresh, groups=3).collect_step(0))
    c = collector(resumed, groups=3)
    c.sampler.load_state_dict({"drawn": 3})
    task = c.sampler.sampler.tasks.draw(1)
    c.to_reissue = deque([("1~4", task)])
    groups = asyncio.run(c.collect_step(4))
    assert ids(groups) == ["1~4", "3", "4"] and groups[0].task == task
    assert [resumed.seeds[f"1~4.{i}"] for i in range(SIZE)] == [fresh.seeds[f"1.{i}"] for i in range(SIZE)]


def test_finished_groups_handed_back_are_used_first():
    task = Task("test", 0)
    c = collector(groups=2, staleness=1)
    c.ready = deque([Group("7", task, (trajectory("7.0", task), trajectory("7.1", task, 1.0)))])
    c.sampler.load_state_dict({"drawn": 8})
    groups = asyncio.run(c.collect_step(0))
    assert len(groups) == 2 and groups[0].id == "7"


def test_stopping_cancels_what_is_in_flight():
    play = Player(delay=lambda group: 9.0)
    c = collector(play, groups=2)

    async def run():
        c.issue(0)
        tasks = list(c.running)
        await asyncio.sleep(0)
        await c.stop()
        return [t.cancelled() for t in tasks]

    assert asyncio.run(run()) == [True, True]
    assert not c.ledger.dropped and not c.ledger.finished


# ---------------------------------------------------------------------- usable


def test_a_fork_that_lost_its_prefix_is_lost_too():
    """0.1 forks from 0.0, which failed; 0.2 forks from 0.1; 0.3 stands alone; 0.4 sampled nothing."""
    task = Task("test", 0)
    members = (
        trajectory("0.0", task).failed("broke"),
        trajectory("0.1", task, fork=Fork("0.0", 0)),
        trajectory("0.2", task, fork=Fork("0.1", 0)),
        trajectory("0.3", task),
        Trajectory("0.4", task, (), status=Status.TRUNCATED),
    )
    whole, reasons = usable(Group("0", task, members))
    assert [t.id for t in whole.trajectories] == ["0.3"]
    assert len(reasons) == 4 and reasons[0] == "broke" and all(reasons)


# -------------------------------------------------------------------- scoring


class Halves:
    """Gives each trajectory half of its group's size, and counts the groups it saw."""

    def __init__(self):
        self.sizes = []

    async def score(self, group):
        self.sizes.append(len(group.trajectories))
        return apply_scores(group, {i: RewardScore({"half": 1.0}, 0.5) for i in scorable(group)})

    def close(self):
        pass


def test_a_finished_group_is_scored_once_before_it_is_stored():
    c = collector()
    c.scorer, stored = Halves(), []
    c.ledger.finish = lambda group, step: stored.append(group)
    groups = asyncio.run(c.collect_step(0))
    assert c.scorer.sizes == [SIZE] * 3
    assert [t.rewards for g in [*groups, *stored] for t in g.trajectories] == [{"half": 1.0}] * 12
    assert [t.reward for t in groups[0].trajectories] == [0.5, 1.5]


class ParkableSeed(int):
    """A session that is its seed, for strategies that hold sessions back."""

    def park(self):
        pass

    close = park


def test_a_strategy_that_reads_rewards_gets_each_trajectory_scored(monkeypatch):
    c = collector(Player(reward=lambda group, i: 0.0))
    monkeypatch.setattr(Seeds, "open", lambda self, seed: ParkableSeed(seed))
    c.recipe = replace(c.recipe, strategy=Hinted())
    c.scorer = Halves()
    groups = asyncio.run(c.collect_step(0))
    assert c.scorer.sizes == [1] * 6  # a reward above 0 is a success, so no hinted trajectory was needed
    assert [t.reward for g in groups for t in g.trajectories] == [0.5] * 6
