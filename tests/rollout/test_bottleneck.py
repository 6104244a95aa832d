"""Trees by an information-bottleneck score: the score by hand, the tree's values, the size of the group."""

from __future__ import annotations

import math

import pytest
import torch
from support.untrained import Untrained

from turnwise.core.records import Fork, Task, Trajectory, Turn
from turnwise.errors import SettingError
from turnwise.recipes.experience import piece
from turnwise.rollout.strategies import Independent
from turnwise.rollout.strategies.tree import BottleneckTree, GrownEpisode, Node, score, step_tree

TASK = Task("t", 1)


@pytest.fixture(scope="module")
def untrained():
    return Untrained("keydoor")


def episode(i, turns, reward, logp=-0.5, fork=None):
    """A trajectory of so many turns; point k is the text "i.k"."""
    made = [Turn((1,), (2, 3), (logp, logp), version=(0, 0)) for _ in range(turns - 1)]
    made.append(Turn((1,), (2, 3), (logp, logp), version=(0, 0), reward=reward))
    return GrownEpisode(Trajectory(f"g.{i}", TASK, tuple(made), fork=fork), [f"{i}.{k}" for k in range(turns)])


def test_the_score_by_hand():
    """Two children, p = 1 and 0 under a node with p = 1/2, likelihoods 0.2 and 0.6, β = 5."""
    node = Node(children=[Node(likelihood=0.2, rewards=[1.0]), Node(likelihood=0.6, rewards=[0.0])], rewards=[1.0, 0.0])
    assert score(node, 5.0) == pytest.approx(6 / 2 * ((2 - 1.2) * 0.2 + (0 - 1.2) * 0.6))
    hopeless = Node(children=[Node(likelihood=0.5, rewards=[0.0])], rewards=[0.0])
    assert score(hopeless, 5.0) == pytest.approx(6 * -1.2 * 0.5)


def test_the_tree_of_forks_of_forks():
    """0 has three turns; 1 leaves it before its last; 2 leaves 1 before the second of its own two turns."""
    episodes = [
        episode(0, 3, 1.0),
        episode(1, 2, 0.0, -1.0, Fork("g.0", 2)),
        episode(2, 1, 1.0, -2.0, Fork("g.1", 1)),
        episode(3, 1, 0.0),
    ]
    root = step_tree(episodes)
    assert root.value == 0.5 and len(root.children) == 2 and len(root.rewards) == 4
    first = root.children[0]
    (second,) = first.children
    assert first.point == "0.1" and second.point == "0.2" and second.value == pytest.approx(2 / 3)
    assert [child.likelihood for child in second.children] == pytest.approx([math.exp(-0.5), math.exp(-1.0)])
    own = second.children[1]
    assert own.point == "1.1" and [c.value for c in own.children] == [0.0, 1.0]
    for node in root.walk():  # a node's value is the mean of its children's, weighted by their leaves
        if node.children:
            assert node.value == pytest.approx(sum(c.value * len(c.rewards) for c in node.children) / len(node.rewards))


def test_the_group_has_its_size_and_is_what_the_learner_reads(untrained):
    strategy = piece("strategy", "ib_tpo,trunks=2,best=2")
    group = untrained.grow(strategy, size=8)
    assert len({t.id for t in group.trajectories}) == 8
    ids = lambda g: [(t.id, t.fork, [tuple(turn.tokens) for turn in t.turns]) for t in g.trajectories]  # noqa: E731
    assert ids(group) == ids(untrained.grow(strategy, size=8))  # deterministic
    measured, recorded = untrained.logp(group)
    torch.testing.assert_close(measured, recorded, rtol=1e-4, atol=1e-4)


def test_trunks_alone_are_plain_sampling(untrained):
    tokens = lambda g: [[tuple(turn.tokens) for turn in t.turns] for t in g.trajectories]  # noqa: E731
    assert tokens(untrained.grow(BottleneckTree(trunks=6))) == tokens(untrained.grow(Independent()))


def test_wrong_numbers_are_refused():
    with pytest.raises(SettingError, match=r"beta is .*; write a number > 0"):
        piece("strategy", "ib_tpo,beta=0")
