"""What several tests need: ragged records by hypothesis, and oracle records as a packed batch."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from oracles import records

from turnwise.batch import Batch, Sequences
from turnwise.data import Group, Status, Task, Trajectory, Turn
from turnwise.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Tree
from turnwise.signals import FROZEN, LIVE, Signal

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
        task = Task("test", seed=i, difficulty=1 + i % 2)
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
                        tool_calls=number(0, 3),
                        restart=k > 0 and number(0, 4) == 0,
                    )
                )
            answer = tuple(number(0, vocabulary) for _ in range(number(1, 3)))
            cut = Status.TRUNCATED if number(0, 4) == 0 else Status.FINISHED
            members.append(
                Trajectory(f"{i}.{j}", task, tuple(made), status=cut, success=number(0, 2) == 1, answer=answer)
            )
        groups.append(Group(str(i), task, tuple(members)))
    return groups


def from_oracle(batch: records.Batch) -> tuple[Batch, dict[Signal, Field]]:
    """The oracle's records as a packed float64 batch, and the policy fields as leaves. The records' lots become ours."""
    counts = [[[len(turn.tokens) for turn in t.turns] for t in group] for group in batch]
    tree = Tree.ragged(counts)
    rows, flat = list(records.trajectories(batch)), list(records.tokens(batch))
    turns = [turn for t in rows for turn in t.turns]
    before = [x for t in rows for x in [t.before, *(turn.answer for turn in t.turns)][:-1]]
    column = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    token = lambda name: Field(tree, TOKEN, column([getattr(t, name) for t in flat]))  # noqa: E731
    zeros = lambda level, dtype=torch.int64: Field(tree, level, torch.zeros(tree.count(level), dtype=dtype))  # noqa: E731
    lengths = torch.tensor([1 + sum(turns) for group in counts for turns in group])
    start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    at = start[:-1][tree.ancestor(TOKEN, TRAJECTORY)] + 1 + tree.index(TOKEN, TRAJECTORY).x
    ids = torch.zeros(int(start[-1]), dtype=torch.int64)
    frozen = {s: token(str(s)) for s in FROZEN if s not in (Signal.GRADIENT_NORM, Signal.ANSWER)}
    pushes = zip((Signal.PUSH, Signal.PUSH_SQUARE, Signal.PUSH_MEAN), zip(*(t.curvature for t in flat)))
    made = Batch(
        tree=tree,
        sequences=Sequences(ids, start, torch.arange(tree.count(TRAJECTORY)), at),
        token=zeros(TOKEN),
        behaviour=token("behaviour"),
        mass=zeros(TOKEN, torch.float64),
        version=zeros(TOKEN),
        temperature=tree.full(TURN, 1.0),
        reward=Field(tree, TURN, column([turn.reward for turn in turns])),
        state=zeros(TURN),
        agent=zeros(TURN),
        tool_calls=Field(tree, TURN, torch.tensor([turn.tool_calls for turn in turns])),
        truncated=Field(tree, TRAJECTORY, torch.tensor([t.truncated for t in rows])),
        expert=zeros(TRAJECTORY, torch.bool),
        guided=Field(tree, TRAJECTORY, torch.tensor([t.lot < 0.25 for t in rows])),
        success=Field(tree, TRAJECTORY, column([float(t.success) for t in rows])),
        seed=Field(tree, TRAJECTORY, torch.tensor([int(t.lot * 2**31) for t in rows])),
        group=Field(tree, GROUP, torch.arange(tree.count(GROUP))),
        domain=Field(tree, GROUP, torch.tensor([group[0].domain for group in batch])),
        columns={
            **frozen,
            **{s: Field(tree, TOKEN, column(x)) for s, x in pushes},
            Signal.HELLINGER: token("hellinger"),
            Signal.GRADIENT_NORM: Field(tree, TRAJECTORY, column([t.norm for t in rows])),
            Signal.ANSWER: Field(tree, TURN, column(before)),
            "vocabulary": tree.full(BATCH, 32.0),
        },
    )
    for t, lot in zip(flat, made.lots().x.tolist()):
        t.lot = lot
    leaves = {s: column([getattr(t, str(s)).item() for t in flat]).requires_grad_() for s in LIVE}
    policy = {name: Field(tree, TOKEN, x) for name, x in leaves.items()}
    return made.put({s: f.detach() for s, f in policy.items()}), policy
