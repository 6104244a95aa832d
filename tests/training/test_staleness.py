"""The staleness policy: bounds on what is issued and on the age of what is trained on, whatever the delays."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.config.values import DROP, KEEP, WAIT
from turnwise.training.collector import StalenessPolicy


@settings(max_examples=120, deadline=None)
@given(
    limit=st.integers(0, 5), count=st.integers(1, 4), seed=st.integers(0, 10**6), slow=st.floats(0, 0.5)
)  # fmt: skip
def test_bounds_hold_whatever_the_delays(limit, count, seed, slow):
    policy, rng = StalenessPolicy(limit), random.Random(seed)
    issued: dict[str, int] = {}
    finish: dict[str, int] = {}
    clock = number = 0
    for step in range(15):
        while True:
            running = sum(finish[k] > clock for k in issued)
            for _ in range(policy.admit(running, len(issued), count)):
                issued[str(number)] = step
                finish[str(number)] = clock + (rng.randint(20, 60) if rng.random() < slow else rng.randint(0, 2))
                number += 1
            assert len(issued) <= (limit + 1) * count
            chosen = policy.select(issued, [k for k in issued if finish[k] <= clock], count, step)
            if chosen is not None:
                break
            assert any(finish[k] > clock for k in issued), "it waits for nothing"
            clock += 1
        assert len(chosen) == len(set(chosen)) == count
        ages = [step - issued.pop(k) for k in chosen]
        assert max(ages) <= limit
        clock += 1


def test_a_slow_group_is_overtaken_until_its_last_step():
    policy = StalenessPolicy(2)
    issued = {"0": 0, "1": 0, "2": 0}
    assert policy.select(issued, ["1", "2"], 1, 0) == ["1"]
    issued = {"0": 0, "2": 0, "3": 1}
    assert policy.select(issued, ["2", "3"], 1, 1) == ["2"]
    issued = {"0": 0, "3": 1, "4": 2}
    assert policy.select(issued, ["3", "4"], 1, 2) is None, "its last step: training waits"
    assert policy.select(issued, ["0", "3", "4"], 1, 2) == ["0"]


def test_overtaking_does_not_gather_more_than_later_steps_can_train():
    policy = StalenessPolicy(2)
    issued = {"0": 0, "1": 0, "2": 1}
    assert policy.select(issued, ["2"], 1, 1) is None, "0 and 1 would both be due in step 2"


def test_it_never_waits_for_nothing():
    """Groups that a short step left over are all ready: waiting could not end."""
    assert StalenessPolicy(1).select({"0": 0, "1": 0, "2": 0}, ["0", "1", "2"], 1, 5) == ["0"]


def test_synchronous_rollouts_come_in_waves_and_in_order():
    policy = StalenessPolicy(0)
    assert policy.admit(1, 1, 4) == 0 and policy.admit(0, 1, 4) == 3
    assert policy.select({"0": 0, "1": 0}, ["1"], 1, 0) is None
    assert policy.select({"0": 0, "1": 0}, ["1", "0"], 1, 0) == ["0"]


def test_who_comes_late_is_waited_for_dropped_or_trained_on_later():
    oldest = {"0": 0, "3": 1, "4": 2}  # 0 still runs, and step 2 is its last
    wait, drop, keep = (StalenessPolicy(2, late) for late in (WAIT, DROP, KEEP))
    assert wait.select(oldest, ["3", "4"], 1, 2) is None
    assert drop.select(oldest, ["3", "4"], 1, 2) == keep.select(oldest, ["3", "4"], 1, 2) == ["3"]
    assert drop.evict(oldest, 2) == [] and drop.evict(oldest, 3) == wait.evict(oldest, 3) == ["0"]
    assert keep.evict(oldest, 99) == []
    assert StalenessPolicy(0).evict({"0": 0}, 9) == [], "a synchronous run never drops for age"


def test_the_oldest_is_trained_on_first_whatever_its_number():
    """A group that was issued again after a resume has an early number and new tokens."""
    oldest = {"1~9": 9, "5": 7, "6": 8}
    assert StalenessPolicy(2, DROP).select(oldest, ["1~9", "5", "6"], 1, 9) == ["5"]


@pytest.mark.parametrize(("limit", "steps", "most"), [(4, 12, 40), (4, 2, 16), (10**6, 1, 8), (0, 5, 8), (3, 0, 32)])
def test_no_more_is_outstanding_than_the_run_can_train_on(limit, steps, most):
    assert StalenessPolicy(limit).capacity(8, steps) == most
    assert StalenessPolicy(limit).admit(0, 0, 8, steps * 8 or None) == most


@dataclass
class Simulated:
    """A run under a policy: groups end after random ticks, a recipe drops some, learning takes ticks too."""

    policy: StalenessPolicy
    count: int
    steps: int
    rng: random.Random
    slow: float
    dropping: float
    clock: int = 0
    issued: int = 0
    evicted: int = 0
    filtered: int = 0
    training: int = 0
    ages: list[int] = field(default_factory=list)
    oldest: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    ready: list[str] = field(default_factory=list)

    def issue(self, step):
        trainable = self.training + (self.steps - step - bool(self.training)) * self.count
        running = len(self.oldest) - len(self.ready)
        for _ in range(self.policy.admit(running, len(self.oldest) + self.training, self.count, trainable)):
            self.oldest[str(self.issued)] = step
            slow = self.rng.random() < self.slow
            self.ends[str(self.issued)] = self.clock + (self.rng.randint(20, 60) if slow else self.rng.randint(0, 3))
            self.issued += 1

    def harvest(self, step):
        for key in [k for k in self.oldest if k not in self.ready and self.ends[k] <= self.clock]:
            if self.rng.random() < self.dropping:
                del self.oldest[key]
                self.filtered += 1
            else:
                self.ready.append(key)
                self.oldest[key] = min(step, self.oldest[key] + self.rng.randint(0, 1))  # it waited for its first token
        self.evict(step)

    def evict(self, step):
        late = self.policy.evict(self.oldest, step)
        assert not late or self.policy.late == DROP, "where training waits, nothing becomes too old"
        for key in late:
            del self.oldest[key]
        self.ready = [k for k in self.ready if k in self.oldest]
        self.evicted += len(late)
        return late

    def run(self):
        for step in range(self.steps):
            while True:
                self.harvest(step)
                self.issue(step)
                assert len(self.oldest) <= self.policy.capacity(self.count, self.steps - step)
                chosen = self.policy.select(self.oldest, self.ready, self.count, step)
                if chosen is not None:
                    break
                assert len(self.ready) < self.count or self.policy.late == WAIT, "it waits although a step is ready"
                assert len(self.ready) < len(self.oldest), "it waits for nothing"
                self.clock += 1
            assert len(chosen) == len(set(chosen)) == self.count
            self.ages += [step - self.oldest.pop(k) for k in chosen]
            self.ready = [k for k in self.ready if k in self.oldest]
            self.training = self.count
            before, late = self.issued, self.evict(step + 1)
            self.issue(step)
            assert step + 1 == self.steps or self.issued - before >= len(late), "a dropped group is replaced"
            self.clock += self.rng.randint(0, 3)
            self.training = 0
        return self


@settings(max_examples=200, deadline=None)
@given(
    limit=st.integers(0, 6), late=st.sampled_from((WAIT, DROP, KEEP)), count=st.integers(1, 4), steps=st.integers(1, 14),
    seed=st.integers(0, 10**6), slow=st.floats(0, 0.6), dropping=st.floats(0, 0.6),
)  # fmt: skip
def test_nothing_is_sampled_that_is_not_trained_on_or_dropped(limit, late, count, steps, seed, slow, dropping):
    """Whatever the speeds, the order in which groups end and the groups that a recipe drops; and no run starves."""
    policy = StalenessPolicy(limit, late if limit else WAIT)
    run = Simulated(policy, count, steps, random.Random(seed), slow, dropping).run()
    assert len(run.ages) == steps * count and run.issued == len(run.ages) + run.filtered + run.evicted
    assert not run.oldest, "nothing is left over"
    assert min(run.ages) >= 0 and (max(run.ages) <= limit or policy.late == KEEP)
    assert not run.evicted or policy.late == DROP


def test_late_groups_are_seen_in_each_of_the_three():
    """Or the properties above would hold for nothing."""
    runs = {
        late: Simulated(StalenessPolicy(2, late), 3, 40, random.Random(4), 0.3, 0.2).run()
        for late in (WAIT, DROP, KEEP)
    }
    assert runs[DROP].evicted > 5 and max(runs[KEEP].ages) > 2 and max(runs[WAIT].ages) == 2
    assert runs[WAIT].clock > 1.5 * runs[DROP].clock, "waiting takes time"
