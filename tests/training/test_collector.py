"""The collector: what is out, what is admitted, in which order, and when to give up. No model, no clock but the loop's."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import recipes
from turnwise.core.records import Fork, Group, Status, Task, Trajectory, Turn
from turnwise.errors import EnvironmentFault, HostFault
from turnwise.rollout.scoring import RewardScore, apply_scores, scorable
from turnwise.rollout.strategies import GreedyBaseline, Hinted
from turnwise.tasks.admission import AdmitAll, Balance, Spread
from turnwise.tasks.budgets import Fixed
from turnwise.tasks.samplers import Uniform
from turnwise.tasks.task_source import TaskStream
from turnwise.training.collector import FAILED_IN_A_ROW, Collector, StalenessPolicy, usable
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


def trajectory(key, task, reward=0.0, version=0, **other):
    return Trajectory(key, task, (Turn((1,), (2,), (-0.5,), version=(version,), reward=reward),), **other)


class Player:
    """Plays at once, or after a delay; rewards and failures by group number and sibling. Its token is sampled at the start."""

    generator = Seeds()

    def __init__(self, reward=lambda group, i: float(i), delay=lambda group: 0.0, fails=lambda group: False):
        self.reward, self.delay, self.fails = reward, delay, fails
        self.seeds, self.running, self.most = {}, set(), 0

    async def __call__(self, key, task, session):
        group, i = key.split("~")[0].split(".")[0], int(key.split(".")[-1])
        self.seeds[key], version = session, self.generator.version
        self.running.add(key)
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(self.delay(int(group)))
        self.running.discard(key)
        made = trajectory(key, task, self.reward(int(group), i), version)
        return made.failed("no display") if self.fails(int(group)) else made


def collector(play=None, *, groups=3, staleness=0, admission=None, max_draws=8, steps=0) -> Collector:
    recipe = replace(recipes.build("grpo"), budget=Fixed(groups, SIZE), admission=admission or AdmitAll())
    sampler = TaskFeed(Uniform().open(TaskStream("test")), recipe.budget.open())
    play = play or Player()
    play.generator = Seeds()
    facts = {"seed": 1, "policy": StalenessPolicy.parse(staleness), "max_draws": max_draws, "steps": steps}
    return Collector(recipe, play.generator, sampler, Book(), play, **facts)


def published(c: Collector, step: int) -> None:
    """The learner has trained on the groups of ``step``."""
    c.training, c.generator.version = 0, step + 1


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
            published(c, step)
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
            published(c, step)
        await c.stop()
        return ages

    assert max(asyncio.run(run())) <= staleness


class Closable(int):
    """A session that is its seed and remembers that it was closed."""

    def close(self):
        self.closed = True


class Leaps(Player):
    """Plays for as many rounds of the event loop as ``rounds`` says, and forgets a spare session."""

    def __init__(self, rounds, **more):
        super().__init__(**more)
        self.rounds = rounds

    async def __call__(self, key, task, session):
        version = self.generator.version
        for _ in range(self.rounds(int(key.split("~")[0].split(".")[0]))):
            await asyncio.sleep(0)
        return trajectory(key, task, self.reward(int(key.split("~")[0].split(".")[0]), int(key[-1])), version)


def leap_run(seed, staleness, groups, steps, slow, flat, resume_at=0):
    """A run whose groups end in a random order and of which some have no spread of rewards; stopped and resumed once."""
    rng = random.Random(seed)
    lengths = [rng.randint(40, 90) if rng.random() < slow else rng.randint(0, 3) for _ in range(2000)]
    spread = [rng.random() >= flat for _ in range(2000)]
    make = lambda: Leaps(lambda g: lengths[g], reward=lambda g, i: float(i * spread[g]))  # noqa: E731
    facts = {"groups": groups, "staleness": staleness, "admission": Spread(), "steps": steps, "max_draws": 99}
    c, trained, ages = collector(make(), **facts), [], []

    async def run():
        nonlocal c
        for step in range(steps):
            if step == resume_at > 0:
                await c.stop()
                state, running, old = c.sampler.state_dict(), sorted(c.running.values(), key=int), c
                c = collector(make(), **facts)
                c.sampler.load_state_dict(state)
                c.ledger, c.generator.version = old.ledger, step
                c.restore(old.ready, step)
                c.to_reissue = deque((f"{key}~{step}", c.sampler.sampler.tasks.draw(int(key))) for key in running)
                for key in running:
                    c.ledger.dropped[key] = "interrupted"
            step_groups = await c.collect_step(step)
            ages.extend(step - min(t.turns[0].version[0] for t in g.trajectories) for g in step_groups)
            trained.extend(ids(step_groups))
            assert len(step_groups) == groups
            c.issue(step)
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(0)
            published(c, step)
        left = sorted([*c.running.values(), *ids(c.ready), *(key for key, _ in c.to_reissue)])
        await c.stop()
        return left

    left = asyncio.run(run())
    return c, trained, ages, left


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    staleness=st.sampled_from((0, "0,continuous", 1, 3, "1,drop", "3,drop", "1,keep", "3,keep")),
    groups=st.integers(1, 3), steps=st.integers(1, 9), slow=st.floats(0, 0.5), flat=st.floats(0, 0.5),
    resume_at=st.integers(0, 8),
)  # fmt: skip
def test_all_that_is_issued_is_trained_on_or_dropped(seed, staleness, groups, steps, slow, flat, resume_at):
    """And nothing is left at the end, also when the run was stopped once; each step gets all its groups."""
    c, trained, ages, left = leap_run(seed, staleness, groups, steps, slow, flat, resume_at)
    assert len(trained) == len(set(trained)) == groups * steps
    assert set(c.ledger.issued) == set(trained) | set(c.ledger.dropped) and not set(trained) & set(c.ledger.dropped)
    assert left == [] and not c.issued_in and not c.sessions
    if not str(staleness).endswith("keep"):
        assert max(ages) <= int(str(staleness)[0])
    late = {reason for reason in c.ledger.dropped.values() if reason.startswith("older")}
    assert not late or late == {f"older than staleness {staleness[0]} allows"}


def test_a_group_that_comes_late_is_cancelled_and_replaced(monkeypatch):
    monkeypatch.setattr(Seeds, "open", lambda self, seed: Closable(seed))
    monkeypatch.setattr(Closable, "closed", False, raising=False)
    c = collector(Player(delay=lambda group: 99.0 if group == 1 else 0.0), groups=2, staleness="1,drop", steps=9)

    async def run():
        trained = []
        for step in range(4):
            if step == 0:
                c.issue(0)
                spare = c.sessions["1"]
                slow = next(task for task, key in c.running.items() if key == "1")
            trained += ids(await c.collect_step(step))
            c.issue(step)
            await asyncio.sleep(0.01)
            published(c, step)
        assert slow.cancelled() and all(session.closed for session in spare) and not c.cancelled
        await c.stop()
        return trained

    assert asyncio.run(run()) == ["0", "2", "3", "4", "5", "6", "7", "8"]
    assert c.ledger.dropped == {"1": "older than staleness 1 allows"} == dict.fromkeys("1", *c.dropped)
    assert "1" not in c.sampler.promised


def test_a_huge_staleness_issues_what_one_step_needs():
    c = collector(groups=1, staleness=10**6, steps=1)
    assert len(asyncio.run(c.collect_step(0))) == 1 and list(c.ledger.issued) == ["0"]


def test_a_token_that_is_too_old_is_never_trained_on():
    """A server that lags behind samples with weights of long ago: dropped where the limit holds, trained on where it does not."""
    for staleness, number in ((1, "3"), ("1,drop", "3"), ("1,keep", "0")):
        c = collector(groups=1, staleness=staleness)
        c.generator.version = 0  # of the first group's token, in step 5
        play = c.play

        async def run(c=c, play=play):
            c.issue(5)
            await asyncio.wait(c.running, return_when=asyncio.FIRST_COMPLETED)
            play.generator.version = 5
            return ids(await c.collect_step(5))

        found = asyncio.run(run())
        assert (found == ["0"]) == (number == "0"), staleness


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


@pytest.mark.parametrize("staleness", [0, "0,continuous"])
def test_no_wave_of_a_synchronous_run_outlives_its_step(staleness):
    """Also where the step gives up in the middle of one: what still runs would be trained on a step too late."""
    play = Player(reward=lambda group, i: float(i * (group == 0)), delay=lambda group: 0.03 * (group % 4))
    c = collector(play, groups=4, staleness=staleness, admission=Spread(), max_draws=8)
    assert ids(asyncio.run(c.collect_step(0))) == ["0"]
    assert not c.running and not play.running and not c.ready


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
    c.sampler.sampler.load_state_dict({"drawn": 3})
    task = c.sampler.sampler.tasks.draw(1)
    c.to_reissue = deque([("1~4", task)])
    groups = asyncio.run(c.collect_step(4))
    assert ids(groups) == ["1~4", "3", "4"] and groups[0].task == task
    assert [resumed.seeds[f"1~4.{i}"] for i in range(SIZE)] == [fresh.seeds[f"1.{i}"] for i in range(SIZE)]


def test_finished_groups_handed_back_are_used_first():
    task = Task("test", 0)
    c = collector(groups=2, staleness=1)
    c.restore([Group("7", task, (trajectory("7.0", task), trajectory("7.1", task, 1.0)))], 0)
    c.sampler.sampler.load_state_dict({"drawn": 8})
    groups = asyncio.run(c.collect_step(0))
    assert len(groups) == 2 and groups[0].id == "7"


def test_a_group_handed_back_is_admitted_as_it_was_when_it_ended():
    task = Task("test", 0)
    group = Group("7", task, tuple(trajectory(f"7.{i}", task, float(i == 0)) for i in range(6)))
    once, again = (collector(groups=1, staleness=1, admission=Balance()) for _ in range(2))
    once.issued_in["7"] = 0
    once._finish("7", group, 0)
    again.restore([group], 0)
    assert again.ready == once.ready and len(again.ready[0].trajectories) == 2
    flat = collector(groups=1, staleness=1, admission=Spread())
    flat.restore([Group("8", task, (trajectory("8.0", task), trajectory("8.1", task)))], 0)
    assert not flat.ready and flat.dropped.total() == 1


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


# ------------------------------------------------------- faults of the machine


class Starved(Player):
    """The machine fails every attempt at an episode of ``groups`` up to ``times``, the one whose turn uses a tool."""

    def __init__(self, groups, times):
        super().__init__()
        self.groups, self.times, self.attempts = groups, times, {}

    async def __call__(self, key, task, session):
        made = await super().__call__(key, task, session)
        self.attempts.setdefault(key, []).append(session)
        ill = int(key.split(".")[0]) in self.groups and key.endswith(".0") and len(self.attempts[key]) <= self.times
        return made.failed("too many open files", lost=True) if ill else made


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr("turnwise.core.retries.PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr("turnwise.training.collector.close", lambda sessions: None)  # a session is its seed here


def test_what_the_machine_failed_is_played_again_from_the_same_seeds(no_pauses):
    starved, calm = Starved({0, 1}, times=3), Player()
    groups, undisturbed = (asyncio.run(collector(play, groups=2).collect_step(0)) for play in (starved, calm))
    assert groups == undisturbed, "no other task took its place, and no sibling is missing"
    assert len(starved.attempts["0.0"]) == 4 and len(set(starved.attempts["0.0"])) == 1


def test_what_the_machine_fails_for_good_stops_the_run_and_nothing_of_the_group_is_trained_on(no_pauses):
    c = collector(Starved({1}, times=99), groups=2)
    with pytest.raises(HostFault, match=r"failed 1 of 2 groups, each 4 times.*too many open files"):
        asyncio.run(c.collect_step(0))
    assert list(c.ledger.dropped) == ["1"] and ids(c.ready) == ["0"]


def test_one_group_in_a_hundred_is_dropped_whole(no_pauses):
    c = collector(Starved({7}, times=99), groups=1)
    c.ended = 200
    for step in range(10):
        assert len(asyncio.run(c.collect_step(step))[0].trajectories) == SIZE
        published(c, step)
    assert list(c.ledger.dropped) == ["7"] and c.lost == 1


def test_an_episode_that_is_not_part_of_its_group_counts_too(no_pauses):
    """A baseline, a draft: without it the strategy would have done something else."""

    class Baseline(Starved):
        async def __call__(self, key, task, session, temperature_scale=1.0):
            self.attempts.setdefault(key, []).append(session)
            made = trajectory(key, task)
            ill = key.endswith(".greedy") and len(self.attempts[key]) < 3
            return made.failed("no memory left", lost=True) if ill else made

    play = Baseline((), 0)
    c = collector(play, groups=1)
    c.recipe = replace(c.recipe, strategy=GreedyBaseline())
    (group,) = asyncio.run(c.collect_step(0))
    assert len(play.attempts["0.greedy"]) == 3 and len(group.trajectories) == SIZE


def test_scoring_that_the_machine_failed_is_done_again(no_pauses):
    calls = []

    class Scorer:
        async def score(self, group):
            calls.append(group.id)
            score = RewardScore(failure="no memory left", lost=True) if len(calls) < 3 else RewardScore(total=1.0)
            return apply_scores(group, dict.fromkeys(scorable(group), score))

    c = collector(play := Starved((), 0), groups=1)
    c.scorer = Scorer()
    (group,) = asyncio.run(c.collect_step(0))
    assert calls == ["0"] * 3 and len(play.attempts["0.0"]) == 1 and group.trajectories[0].status == Status.FINISHED
