"""Synthetic trajectories of any shape with everything that a method may require, and a policy that is near them.

The signals that a learner would measure are leaves or columns of random numbers in float64. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, TOKEN, TURN, Field
from turnwise.core.records import Fork, Group, Origin, Status, Task, Trajectory, Turn
from turnwise.core.signals import WITH_GRADIENT, Signal, level_of

Counts = Sequence[Sequence[Sequence[int]]]
"""Token counts: groups of trajectories of turns."""
Leaves = dict[Signal, Tensor]
Draw = Callable[[int, int], int]
VOCABULARY = 16
NEAR_POLICY = (Signal.REFERENCE, Signal.PROXIMAL, Signal.PREVIOUS)  # log-probabilities of policies near the sampler


def names_after(requirements: frozenset[str], kind: str) -> list[str]:
    """``names_after({"fact age"}, "fact")`` is ``["age"]``."""
    return sorted(word.removeprefix(f"{kind} ") for word in requirements if word.startswith(f"{kind} "))


def random_groups(
    counts: Counts, seed: int = 0, vocabulary: int = VOCABULARY, requirements: frozenset[str] = frozenset()
) -> list[Group]:
    """Groups with the given token counts, random everything else, and all that a method requires."""
    shape = tuple(tuple(tuple(turns) for turns in group) for group in counts)
    return list(_random_groups(shape, seed, vocabulary, requirements))


@lru_cache(maxsize=64)  # most methods require the same, and numbers are drawn one by one
def _random_groups(counts: Counts, seed: int, vocabulary: int, requirements: frozenset[str]) -> list[Group]:
    g = torch.Generator().manual_seed(seed)
    draw: Draw = lambda low, high: int(torch.randint(low, high, (1,), generator=g))  # noqa: E731
    groups = []
    for i, group in enumerate(counts):
        task = Task("test", seed=i, difficulty=1 + i % 2)
        members: list[Trajectory] = []
        paired = "pairs" in requirements and i % 2 == 0  # every other group is as a method for pairs wants it
        wanted = 6 if paired and "fact revises" in requirements else 2 if paired else len(group)
        for j, lengths in enumerate((list(group) * wanted)[:wanted]):
            turns = tuple(_random_turn(k, n, vocabulary, requirements, draw, g) for k, n in enumerate(lengths))
            answer = tuple(draw(0, vocabulary) for _ in range(draw(1, 3)))
            status = Status.TRUNCATED if draw(0, 4) == 0 else Status.FINISHED
            one = Trajectory(f"{i}.{j}", task, turns, status=status, success=draw(0, 2) == 1, answer=answer)
            if requirements:
                one = _with_requirements(one, requirements, j, draw)
            if members and "forks" in requirements and draw(0, 3):
                parent = members[draw(0, len(members))]
                turn = draw(0, len(parent.turns))
                one = replace(one, fork=Fork(parent.id, turn, draw(0, 1 + len(parent.turns[turn].tokens))))
            members.append(one)
        groups.append(Group(str(i), task, tuple(members)))
    return groups


def _random_turn(
    k: int, length: int, vocabulary: int, requirements: frozenset[str], draw: Draw, g: torch.Generator
) -> Turn:
    context = tuple(draw(0, vocabulary) for _ in range(draw(1, 4)))
    tokens = tuple(draw(0, vocabulary) for _ in range(length))
    logp = tuple(float(x) for x in -torch.rand(length, generator=g) * 3)
    reward = float(draw(0, 3)) / 2
    return Turn(
        context,
        tokens,
        logp,
        version=(0,) * length,
        reward=reward,
        state=str(draw(0, 3)),
        tool_calls=draw(0, 3),
        restart=k > 0 and draw(0, 4) == 0,
        facts={name: draw(0, 3) for name in names_after(requirements, "turn fact")},
        masked_context=tuple(draw(0, vocabulary) for _ in context) if "feedback" in requirements else (),
    )


def _with_requirements(one: Trajectory, requirements: frozenset[str], place: int, draw: Draw) -> Trajectory:
    """A trajectory with the facts, rewards and origins that a method requires."""
    facts: dict[str, float | str] = {name: draw(0, 3) for name in names_after(requirements, "fact")}
    origin = one.origin
    if place and "demonstrations" in requirements and draw(0, 3) == 0:
        origin = Origin.EXPERT
    elif place and "replay" in requirements and draw(0, 3) == 0:
        origin = Origin.REPLAY
    facts |= {"chosen": 1 - place % 2} if "pairs" in requirements else {}
    facts |= {"revises": place // 2} if "fact revises" in requirements else {}
    rewards = {name: draw(0, 3) / 2 for name in names_after(requirements, "reward")}
    return replace(one, facts=facts, rewards=rewards, origin=origin, end=str(draw(0, 3)))


# -------------------------------------------------------------------- policy


def random_policy(batch: Batch, seed: int) -> tuple[Batch, Leaves]:
    """A policy that has moved, as leaves in float64, and every signal that can be measured."""
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float, signal: Signal) -> Tensor:
        count = batch.tree.count(level_of(signal))
        return scale * torch.randn(count, dtype=torch.float64, generator=g)

    columns = {s: Field(batch.tree, TOKEN, batch.behaviour.x.double() + noise(0.2, s)) for s in NEAR_POLICY}
    others = frozenset(Signal) - WITH_GRADIENT - set(NEAR_POLICY)
    columns |= {s: Field(batch.tree, level_of(s), noise(0.5, s).abs()) for s in sorted(others)}
    leaves = {s: noise(0.5, s).abs().requires_grad_() for s in sorted(WITH_GRADIENT - {Signal.LOGP})}
    leaves[Signal.LOGP] = (batch.behaviour.x.double() + noise(0.3, Signal.LOGP)).requires_grad_()
    return with_policy(batch.put(columns), leaves), leaves


def with_policy(batch: Batch, leaves: Mapping[Signal, Tensor]) -> Batch:
    """The batch with the present values of the signals, and the size of the vocabulary."""
    columns = {s: Field(batch.tree, level_of(s), x.detach()) for s, x in leaves.items()}
    return batch.put({**columns, "vocabulary_size": batch.tree.full(BATCH, float(VOCABULARY))})


def numbered(batch: Batch) -> Batch:
    """Each token and turn with its place in the whole batch."""
    places = {level: Field(batch.tree, level, torch.arange(batch.tree.count(level))) for level in (TOKEN, TURN)}
    return batch.put({("row", level): place for level, place in places.items()})


def policy_of(part: Batch, leaves: Mapping[Signal, Tensor]) -> dict[Signal, Field]:
    """The signals with gradient of a part of a numbered batch."""
    return {s: Field(part.tree, level_of(s), x[part["row", level_of(s)].x]) for s, x in leaves.items()}
