"""Turn indices that not every episode reaches: what a late turn is compared with, and what that does to the gradient."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import records
from support.turn_helpers import converted, credit, enrich_plain, made, near, path

from turnwise.algebra.advantage import LeaveOneOut, Standardise
from turnwise.algebra.peers import Peers, Same
from turnwise.algebra.term import Term
from turnwise.algebra.value import ReturnToGo
from turnwise.core.levels import GROUP, TRAJECTORY, TURN, Field, Partition
from turnwise.recipes.families.turn_credit import LeaveOneOutAtTurn

SEEDS = st.integers(0, 10**6)


def late(absent: str, rewards: list[list[float]]) -> list[list[float]]:
    """Credit of one group by trajectory, one token a turn."""
    found = iter(credit("trloo", [[path(one) for one in rewards]], absent=absent))
    return [[next(found) for _ in one] for one in rewards]


def test_late_turns_are_compared_with_the_long_episodes_only():
    """Two solve the task at once, two drag on and fail. By turn index the long ones meet only each other: what they do after
    the first turn is neutral. With outcomes standing in, each turn of a failure is one."""
    rewards = [[1.0], [1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    good, bad = 2 / 3, -2 / 3
    assert late("out", rewards)[2] == near([bad, 0, 0])
    assert late("outcome", rewards) == near_rows([[good], [good], [bad, bad, bad], [bad, bad, bad]])
    # all earn the same, and still the last one running is praised for being the last
    rewards = [[1.0], [1.0], [1.0], [0.0, 0.0, 1.0]]
    assert late("out", rewards)[3] == near([0, 1, 1])
    assert late("outcome", rewards) == near_rows([[0], [0], [0], [0, 0, 0]])
    assert late("nothing", [[1.0], [0.5, 0.5]])[1] == near([0, 0.5])


def near_rows(rows):
    return [near(row) for row in rows]


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_with_outcomes_standing_in_a_late_reward_is_leave_one_out(seed):
    """Rewards at the end alone: every turn of an episode has the same return, and now the same credit, RLOO's."""
    reference = made(seed)
    for trajectory in records.trajectories(reference):
        earned = records.total(trajectory)
        for turn in trajectory.turns:
            turn.reward, turn.facts["valid"] = 0.0, True
        trajectory.turns[-1].reward = earned
    assert credit("trloo", reference, absent="outcome") == near(credit("rloo", reference))
    assert credit("trloo", reference) != near(credit("rloo", reference))


@dataclass(frozen=True)
class FromTheEnd(Peers):
    """Turns with as many turns to come."""

    def __call__(self, batch):
        tree = batch.tree
        return Partition.by(tree, TURN, batch.group, tree.size(TURN, TRAJECTORY) - tree.index(TURN, TRAJECTORY))


class Fork:
    """Stop at once and get ``stop``, or go on (probability p) and get 1 (probability q) or 0; every group of ``size``
    episodes with its probability, so that means over groups are exact."""

    def __init__(self, stop: float, p: float, q: float, size: int = 3):
        self.p, self.q = p, q
        kinds = [([stop], 1 - p), ([0.0, 1.0], p * q), ([0.0, 0.0], p * (1 - q))]
        combinations = list(itertools.product(kinds, repeat=size))
        self.batch = converted(enrich_plain([[path(r) for r, _ in group] for group in combinations]))[0]
        self.chance = torch.tensor([math.prod(c for _, c in g) for g in combinations], dtype=torch.float64)
        self.truth = [p * (1 - p) * (q - stop), p * q * (1 - q)]

    def gradients(self, term: Term) -> torch.Tensor:
        """∂/∂ logit of p and of q, by each group, [groups, 2]."""
        a, tree = term(self.batch).at(TURN), self.batch.tree
        index = tree.index(TURN, TRAJECTORY).x
        goes_on = (tree.size(TURN, TRAJECTORY).at(TURN).x > 1).double()
        score = torch.where(index == 0, goes_on - self.p, self.batch.reward.x - self.q)
        parts = [Field(tree, TURN, torch.where(index == k, score * a.x, 0.0)).sum(GROUP) for k in (0, 1)]
        return torch.stack([part.x for part in parts], 1) / tree.size(TRAJECTORY, GROUP).x[:, None]

    def mean(self, term: Term) -> list[float]:
        return (self.chance @ self.gradients(term)).tolist()

    def size(self, term: Term) -> float:
        """Mean A² of the second turns: what noise the baseline leaves."""
        late = self.batch.tree.index(TURN, TRAJECTORY).to(torch.float64)
        return (self.chance @ (late * term(self.batch).at(TURN) ** 2).sum(GROUP).x).item()


def test_which_turn_baselines_bend_the_gradient():
    """Exact, over all groups of three: others at the same index may serve as a baseline, whoever stands in for the absent.
    A mean with oneself in it shrinks late turns more than early ones; peers by the turns to come look into the future."""
    fork = Fork(stop=0.6, p=0.4, q=0.7)
    for absent in ("out", "outcome", "nothing"):
        assert fork.mean(LeaveOneOutAtTurn(ReturnToGo(), absent)) == near(fork.truth, 1e-12)
    with_oneself = [a / b for a, b in zip(fork.mean(Standardise(ReturnToGo(), Same("index"), False)), fork.truth)]
    assert with_oneself[0] == near(2 / 3) and with_oneself[1] < 0.45
    assert abs(fork.mean(LeaveOneOut(ReturnToGo(), FromTheEnd()))[0] - fork.truth[0]) > 0.01


def test_standing_in_helps_where_the_absent_earned_alike():
    """What is gained or lost is noise: outcomes are a good guess of what a lone survivor earns, or a bad one."""
    alike, unlike = Fork(stop=1.0, p=0.3, q=0.9), Fork(stop=1.0, p=0.3, q=0.1)
    out, outcome = LeaveOneOutAtTurn(ReturnToGo(), "out"), LeaveOneOutAtTurn(ReturnToGo(), "outcome")
    assert alike.size(outcome) < 0.5 * alike.size(out)
    assert unlike.size(outcome) > unlike.size(out)
