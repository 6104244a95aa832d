"""What several tests need: ragged records by hypothesis, and oracle records as a packed batch."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from oracles import records

from turnwise.checks.synthetic import random_groups
from turnwise.core.batch import Batch, Sequences
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Tree
from turnwise.core.records import Group
from turnwise.core.signals import BEFORE_BATCH, WITH_GRADIENT, Signal

COUNTS = st.lists(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4), min_size=1, max_size=4
)
"""Token counts of a random ragged tree: groups of trajectories of turns, empty turns included."""


def records_of(
    counts: list[list[list[int]]], seed: int = 0, vocabulary: int = 16, asks: frozenset[str] = frozenset()
) -> list[Group]:
    """Groups with the given token counts and random everything else, and all that a method ``asks`` to be told."""
    return random_groups(counts, seed, vocabulary, asks)


def _codes(values: list) -> list[int]:
    """Equal values get equal numbers; None is −1."""
    seen: dict = {}
    return [-1 if v is None else seen.setdefault(v, len(seen)) for v in values]


def facts_of(tree: Tree, level, said: list[dict]) -> dict[str, Field]:
    """Every fact of an oracle's records that is a number or a text, by name; NaN where it is missing."""
    found = {}
    for name in sorted({name for facts in said for name in facts}):
        values = [facts.get(name) for facts in said]
        if all(v is None or isinstance(v, bool | int | float | str) for v in values):
            texts = any(isinstance(v, str) for v in values)
            numbers = [float("nan") if v is None else float(c if texts else v) for v, c in zip(values, _codes(values))]
            found[name] = Field(tree, level, torch.tensor(numbers, dtype=torch.float64))
    return found


PREDICTED = (Signal.PREDICTED_LOGP_CHANGE, Signal.PREDICTED_LOGIT_SQUARE, Signal.PREDICTED_LOGIT_MEAN)
ORACLE_NAMES = {Signal.SECOND_VALUE: "twin", Signal.OLD_SECOND_VALUE: "old_twin"}


def oracle_name(signal: Signal) -> str:
    """What the oracles' tokens call a signal."""
    return ORACLE_NAMES.get(signal, str(signal))


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
    codes = lambda values: torch.tensor(_codes(values))  # noqa: E731
    said = {TURN: turns, TRAJECTORY: rows}
    labels = lambda level, name, none=None: Field(tree, level, codes([x.facts.get(name, none) for x in said[level]]))  # noqa: E731
    origin = lambda name: Field(tree, TRAJECTORY, torch.tensor([t.facts.get("origin") == name for t in rows]))  # noqa: E731
    states = codes([x.facts.get(n) for level, n in ((TURN, "state"), (TRAJECTORY, "final_state")) for x in said[level]])
    frozen = {s: token(oracle_name(s)) for s in BEFORE_BATCH if flat and hasattr(flat[0], oracle_name(s))}
    pushes = zip(PREDICTED, zip(*(t.curvature for t in flat)))
    made = Batch(
        tree=tree,
        sequences=Sequences(ids, start, torch.arange(tree.count(TRAJECTORY)), at),
        token=zeros(TOKEN),
        behaviour=token("behaviour"),
        mass=zeros(TOKEN, torch.float64),
        version=zeros(TOKEN),
        temperature=tree.full(TURN, 1.0),
        reward=Field(tree, TURN, column([turn.reward for turn in turns])),
        state=Field(tree, TURN, states[: tree.count(TURN)]),
        action=labels(TURN, "action"),
        agent=labels(TURN, "agent", 0),
        tool_calls=Field(tree, TURN, torch.tensor([turn.tool_calls for turn in turns])),
        truncated=Field(tree, TRAJECTORY, torch.tensor([t.truncated for t in rows])),
        expert=origin("expert"),
        replayed=origin("replay"),
        guided=Field(tree, TRAJECTORY, torch.tensor([t.lot < 0.25 for t in rows])),
        success=Field(tree, TRAJECTORY, column([float(t.success) for t in rows])),
        seed=Field(tree, TRAJECTORY, torch.tensor([int(t.lot * 2**31) for t in rows])),
        group=Field(tree, GROUP, torch.arange(tree.count(GROUP))),
        parent=tree.full(TRAJECTORY, -1, torch.int64),
        fork=zeros(TRAJECTORY),
        end=Field(tree, TRAJECTORY, states[tree.count(TURN) :]),
        domain=Field(tree, GROUP, torch.tensor([group[0].domain for group in batch])),
        task_keys=tuple(f"task {i}" for i in range(len(batch))),
        facts={
            **facts_of(tree, TOKEN, [t.facts for t in flat]),
            **facts_of(tree, TRAJECTORY, [t.facts for t in rows]),
            **facts_of(tree, TURN, [turn.facts for turn in turns]),
        },
        columns={
            **frozen,
            **{s: Field(tree, TOKEN, column(x)) for s, x in pushes},
            Signal.HELLINGER: token("hellinger"),
            Signal.GRADIENT_NORM: Field(tree, TRAJECTORY, column([t.norm for t in rows])),
            Signal.ANSWER_LOGP: Field(tree, TURN, column(before)),
            Column.VOCABULARY_SIZE: tree.full(BATCH, 32.0),
        },
    )
    for t, lot in zip(flat, made.uniform_draws().x.tolist()):
        t.lot = lot
    known = [s for s in sorted(WITH_GRADIENT) if flat and hasattr(flat[0], oracle_name(s))]
    leaves = {s: column([getattr(t, oracle_name(s)).item() for t in flat]).requires_grad_() for s in known}
    policy = {name: Field(tree, TOKEN, x) for name, x in leaves.items()}
    return made.put({s: f.detach() for s, f in policy.items()}), policy
