"""What several tests need: ragged records by hypothesis, and oracle records as a packed batch."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from oracles import records

from turnwise.batch import Batch, Sequences
from turnwise.data import Group, Task, Trajectory, Turn
from turnwise.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Tree
from turnwise.signals import Signal

COUNTS = st.lists(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4), min_size=1, max_size=4
)
"""Token counts of a random ragged tree: groups of trajectories of turns, empty turns included."""


def records_of(counts: list[list[list[int]]], seed: int = 0, vocabulary: int = 16) -> list[Group]:
    """Groups with the given token counts and random everything else."""
    g = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=g))  # noqa: E731
    groups = []
    for i, group in enumerate(counts):
        task = Task("test", seed=i)
        members = []
        for j, turns in enumerate(group):
            made = []
            for k, n in enumerate(turns):
                context = tuple(number(0, vocabulary) for _ in range(number(1, 4)))
                tokens = tuple(number(0, vocabulary) for _ in range(n))
                logp = tuple(float(x) for x in -torch.rand(n, generator=g) * 3)
                reward = float(number(0, 3)) / 2
                made.append(
                    Turn(
                        context,
                        tokens,
                        logp,
                        version=(0,) * n,
                        reward=reward,
                        state=str(number(0, 3)),
                        restart=k > 0 and number(0, 4) == 0,
                    )
                )
            members.append(Trajectory(f"{i}.{j}", task, tuple(made)))
        groups.append(Group(str(i), task, tuple(members)))
    return groups


def from_oracle(batch: records.Batch) -> tuple[Batch, dict[Signal, Field]]:
    """The oracle's records as a packed float64 batch, and the policy fields as leaves."""
    counts = [[[len(turn.tokens) for turn in t.turns] for t in group] for group in batch]
    tree = Tree.ragged(counts)
    flat = list(records.tokens(batch))
    column = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    token = lambda values: Field(tree, TOKEN, column(values))  # noqa: E731
    zeros = lambda level, dtype=torch.int64: Field(tree, level, torch.zeros(tree.count(level), dtype=dtype))  # noqa: E731
    lengths = torch.tensor([1 + sum(turns) for group in counts for turns in group])
    start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    owner = tree.ancestor(TOKEN, TRAJECTORY)
    at = start[:-1][owner] + 1 + tree.index(TOKEN, TRAJECTORY).x
    rewards = [turn.reward for group in batch for t in group for turn in t.turns]
    made = Batch(
        tree=tree,
        sequences=Sequences(
            torch.zeros(int(start[-1]), dtype=torch.int64), start, torch.arange(tree.count(TRAJECTORY)), at
        ),
        token=zeros(TOKEN),
        behaviour=token([t.behaviour for t in flat]),
        mass=zeros(TOKEN, torch.float64),
        version=zeros(TOKEN),
        temperature=tree.full(TURN, 1.0),
        reward=Field(tree, TURN, column(rewards)),
        state=zeros(TURN),
        agent=zeros(TURN),
        truncated=zeros(TRAJECTORY, torch.bool),
        expert=zeros(TRAJECTORY, torch.bool),
        group=Field(tree, GROUP, torch.arange(tree.count(GROUP))),
        columns={
            str(Signal.REFERENCE): token([t.reference for t in flat]),
            str(Signal.OLD_VALUE): token([t.old_value for t in flat]),
        },
    )
    leaves = {
        Signal.LOGP: column([t.logp.item() for t in flat]).requires_grad_(),
        Signal.VALUE: column([t.value.item() for t in flat]).requires_grad_(),
        Signal.ENTROPY: column([t.entropy.item() for t in flat]).requires_grad_(),
    }
    return made, {name: Field(tree, TOKEN, x) for name, x in leaves.items()}
