"""Random forked groups, told twice: as trajectories that own what they sampled, and as whole copies for the oracles."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from oracles import records
from oracles.records import Token, Trajectory, Turn

from support.batches import from_oracle
from turnwise.core.batch import Batch
from turnwise.core.levels import TRAJECTORY, Field
from turnwise.core.signals import Signal

Place = tuple[int, int]  # (turn, token): before that token of that turn


@dataclass
class Branch:
    """One trajectory: its own turns, and where it left which other of its group."""

    own: Trajectory
    parent: int | None = None
    at: Place = (0, 0)


def forest(seed: int, inside: bool = True, deep: bool = True, groups: int = 3) -> list[list[Branch]]:
    """Random groups; rewards are quarters, so that sums are exact. ``inside``: forks also in the middle of a turn."""
    dice = random.Random(f"forest {seed}")
    found = []
    for _ in range(groups):
        group: list[Branch] = []
        for _ in range(dice.randint(1, 7)):
            turns = [
                Turn([_token(dice) for _ in range(dice.choice([0, 1, 2, 3]))], dice.randint(-2, 4) / 4)
                for _ in range(dice.randint(1, 4))
            ]
            one = Branch(Trajectory(turns, success=dice.random() < 0.5, lot=dice.random()))
            able = [i for i, other in enumerate(group) if deep or other.parent is None]
            if able and dice.random() < 0.75:
                one.parent = dice.choice(able)
                turn = dice.randrange(len(group[one.parent].own.turns))
                tokens = group[one.parent].own.turns[turn].tokens
                one.at = (turn, dice.randint(0, len(tokens)) if inside else 0)
            group.append(one)
        found.append(group)
    return found


def _token(dice: random.Random) -> Token:
    logp = -dice.uniform(0.05, 3.0)
    behaviour = min(-0.01, logp - 0.2 * dice.gauss(0, 1))
    return records.token(logp=logp, behaviour=behaviour, reference=logp - 0.1, lot=dice.random())


def owned(groups: list[list[Branch]]) -> tuple[records.Batch, Batch, dict[Signal, Field]]:
    """The first description: everybody owns what it sampled."""
    reference = [[branch.own for branch in group] for group in groups]
    batch, policy = from_oracle(reference)
    tree, number, start = batch.tree, [], 0
    parents, turns, tokens = [], [], []
    for group in groups:
        for i, branch in enumerate(group):
            number.append(7919 * (start + i) % 104729)  # any numbers, all different
            parents.append(-1 if branch.parent is None else 7919 * (start + branch.parent) % 104729)
            turns.append(branch.at[0])
            tokens.append(branch.at[1])
        start += len(group)
    column = lambda x: Field(tree, TRAJECTORY, torch.tensor(x, dtype=torch.int64))  # noqa: E731
    forked = {"parent": column(parents), "fork": column(turns), "fork_token": column(tokens)}
    return reference, replace(batch, seed=column(number), **forked), policy


def beginning(group: list[Branch], i: int) -> tuple[int, Place] | None:
    """Whom i left and where; who left before another's first token began where that one did."""
    parent, at = group[i].parent, group[i].at
    while parent is not None and at == (0, 0):
        parent, at = group[parent].parent, group[parent].at
    return None if parent is None else (parent, at)


def outcome(group: list[Branch], i: int) -> float:
    """All that was earned from the prompt on."""
    total, stop = 0.0, len(group[i].own.turns)
    here: int | None = i
    while here is not None:
        total += sum(turn.reward for turn in group[here].own.turns[:stop])
        stop, here = group[here].at[0], group[here].parent
    return total


def segments(group: list[Branch], i: int) -> list[tuple[object, list[tuple[int, int, int]]]]:
    """The segments from the prompt to the end of i: where each ends, and its tokens as (owner, turn, token)."""
    cuts: dict[int, set[Place]] = {}
    for j in range(len(group)):
        place = beginning(group, j)
        if place:
            cuts.setdefault(place[0], set()).add(place[1])

    def until(owner: int, stop: Place | None) -> list[tuple[object, list[tuple[int, int, int]]]]:
        place = beginning(group, owner)
        found = until(*place) if place else []
        turns = group[owner].own.turns
        low: Place = (0, 0)
        ends = sorted(cut for cut in cuts.get(owner, ()) if stop is None or cut <= stop)
        for high in [*ends, *([None] if stop is None else [])]:
            inside = [(owner, t, j) for t, turn in enumerate(turns) for j in range(len(turn.tokens))]
            mine = [x for x in inside if low <= x[1:] and (high is None or x[1:] < high)]
            found.append((("leaf", owner) if high is None else ("cut", owner, high), mine))
            low = high or low
        return found

    return until(i, None)


def copied(groups: list[list[Branch]]) -> records.Batch:
    """The second description: every trajectory whole, an oracle's turn for each segment. What was earned is paid at the end."""
    batch = []
    for group in groups:
        rows = []
        for i, branch in enumerate(group):
            turns = []
            for node, tokens in segments(group, i):
                turns.append(Turn([_copy(group[o].own.turns[t].tokens[j], (o, t, j)) for o, t, j in tokens], 0.0))
                turns[-1].facts["node"] = node
            turns[-1].reward = outcome(group, i)
            rows.append(Trajectory(turns, success=branch.own.success, lot=branch.own.lot))
        batch.append(rows)
    return batch


def whole(groups: list[list[Branch]]) -> records.Batch:
    """The second description by turns, for forks at turns: prefix turns of the parent, then its own; retries say of whom."""
    batch = []
    for group in groups:
        paths: list[list[Turn]] = []
        rows = []
        for i, branch in enumerate(group):
            before = [] if branch.parent is None else paths[branch.parent][: _depth(group, i)]
            mine = [Turn([_copy(x, (i, t, j)) for j, x in enumerate(turn.tokens)], turn.reward)
                    for t, turn in enumerate(branch.own.turns)]  # fmt: skip
            shared = [Turn([_copy(x, x.facts["key"]) for x in turn.tokens], turn.reward) for turn in before]
            paths.append([*shared, *mine])
            rows.append(Trajectory(paths[-1], success=branch.own.success, lot=branch.own.lot))
            rows[-1].facts.update(retry_of=branch.parent, pivot=len(before))
        batch.append(rows)
    return batch


def _depth(group: list[Branch], i: int) -> int:
    """How many turns lie before i's own."""
    parent = group[i].parent
    return 0 if parent is None else _depth(group, parent) + group[i].at[0]


def _copy(one: Token, key: tuple[int, int, int]) -> Token:
    made = records.token(
        logp=one.logp.item(), behaviour=one.behaviour, reference=one.reference, lot=one.lot, proximal=one.proximal
    )
    made.facts["key"] = key
    return made


def by_token(batch: records.Batch, values: list[float]) -> list[dict[tuple[int, int, int], list[float]]]:
    """Of each group, the values of all copies of a token."""
    left = iter(values)
    found = []
    for group in batch:
        seen: dict[tuple[int, int, int], list[float]] = {}
        for trajectory in group:
            for one in records.sampled(trajectory):
                seen.setdefault(one.facts["key"], []).append(next(left))
        found.append(seen)
    return found


def natural(groups: list[list[Branch]]) -> list[tuple[int, tuple[int, int, int]]]:
    """Group and (owner, turn, token) of each owned token, in natural order."""
    return [
        (g, (i, t, j))
        for g, group in enumerate(groups)
        for i, branch in enumerate(group)
        for t, turn in enumerate(branch.own.turns)
        for j in range(len(turn.tokens))
    ]
