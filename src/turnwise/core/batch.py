"""Groups packed into one batch: what the model reads, and the tree of what it sampled.

Legend: L packed positions (context and sampled), S sequences, N sampled tokens, U turns, K trajectories, G groups.

A sequence is what the model reads in one go. A trajectory is usually one sequence; a restart opens another, and a forked
trajectory repeats its parent's prefix as context. The tree has no place for context, so nothing can leak from it.

Everything that depends on the whole step (advantages, averaging weights) is a Field put on the batch *before* it is cut
into micro-batches; the cuts then just sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Level, Partition, Tree, send_all
from turnwise.core.records import Facts, Group, Origin, Status, Trajectory, Turn
from turnwise.core.signals import Signal
from turnwise.errors import RecordError, SignalError
from turnwise.maths.chunks import even_runs, shared_beginnings
from turnwise.maths.numbers import tensor_of


@dataclass(frozen=True, eq=False)
class Sequences:
    """What the model reads, packed end to end."""

    ids: Tensor  # [L]
    start: Tensor  # [S + 1] where each sequence begins; the last entry is L
    trajectory: Tensor  # [S] whose it is
    at: Tensor  # [N] packed position of each sampled token (its log-probability is read one position earlier)
    blind: Tensor | None = None  # [L] ids had the environment said nothing; None where nobody asked
    host: Sequences | None = None  # the same on the host, where looking at them keeps no GPU waiting

    @property
    def lengths(self) -> Tensor:
        return self.start[1:] - self.start[:-1]

    def positions(self) -> Tensor:
        """Position of each id inside its own sequence, [L]."""
        here = torch.arange(self.ids.numel(), device=self.ids.device)
        return here - torch.repeat_interleave(self.start[:-1], self.lengths)

    def cut(self, run: slice, tokens: slice) -> Sequences | None:
        """The sequences of neighbouring trajectories, whose sampled tokens are neighbours too; None: they lie in disorder."""
        if not bool((self.trajectory[1:] >= self.trajectory[:-1]).all()):
            return None
        ends = torch.searchsorted(self.trajectory, torch.tensor([run.start, run.stop]))
        a, b = ends.tolist()
        lo, hi = self.start[ends].tolist()
        blind = None if self.blind is None else self.blind[lo:hi]
        start, owner = self.start[a : b + 1] - lo, self.trajectory[a:b] - run.start
        return Sequences(self.ids[lo:hi], start, owner, self.at[tokens] - lo, blind)

    def select(self, position_of: Tensor, tokens: slice | Tensor) -> Sequences:
        """The sequences of kept trajectories. ``position_of`` [K] is the new index or −1; ``tokens`` the kept tokens."""
        new = position_of[self.trajectory]
        order = torch.argsort(new, stable=True)
        kept = order[new[order] >= 0]
        lengths = self.lengths[kept]
        start = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
        moved = torch.full_like(self.start[:-1], -1).index_copy(0, kept, start[:-1])
        inside = torch.arange(int(start[-1]), device=start.device) - torch.repeat_interleave(start[:-1], lengths)
        source = torch.repeat_interleave(self.start[:-1][kept], lengths) + inside
        at = self.at[tokens]
        owner = torch.searchsorted(self.start, at, right=True) - 1
        blind = None if self.blind is None else self.blind[source]
        return Sequences(self.ids[source], start, new[kept], at - self.start[owner] + moved[owner], blind)


@dataclass(frozen=True, eq=False)
class Batch:
    """A packed batch. ``columns`` holds what the step computed: advantage, weight and the measured signals."""

    tree: Tree
    sequences: Sequences
    token: Field  # TOKEN: the sampled id
    behaviour: Field  # TOKEN: log-probability under the distribution really sampled from
    mass: Field  # TOKEN: log of the probability that top-p/k and min-p kept (0 = everything)
    version: Field  # TOKEN: of the policy that sampled it
    temperature: Field  # TURN
    reward: Field  # TURN: what the environment paid for this turn
    state: Field  # TURN: number of the state it was taken in, −1 where unknown
    action: Field  # TURN: number of what was said, token by token
    agent: Field  # TURN: number of the acting agent
    tool_calls: Field  # TURN: how many tools it called
    truncated: Field  # TRAJECTORY: a limit ended it
    expert: Field  # TRAJECTORY: not sampled by our policy
    replayed: Field  # TRAJECTORY: sampled by our policy in an earlier step
    guided: Field  # TRAJECTORY: sampled with help, or otherwise than the policy would
    success: Field  # TRAJECTORY: the environment's verdict, NaN where it has none
    seed: Field  # TRAJECTORY: a number of its own, the same in any batch it is part of
    parent: Field  # TRAJECTORY: the ``seed`` of the one it forked from, −1 where it did not
    fork: Field  # TRAJECTORY: at which turn of the parent
    end: Field  # TRAJECTORY: number of the state after its last turn, −1 where unknown
    group: Field  # GROUP: its number in the whole step (stays when the batch is cut)
    domain: Field  # GROUP: number of its kind of task
    named: Mapping[str, Field] = field(default_factory=dict)  # TRAJECTORY: reward components by name
    facts: Mapping[str, Field] = field(default_factory=dict)  # TURN or TRAJECTORY: NaN where nobody said
    columns: Mapping[Any, Field] = field(default_factory=dict)  # by name, or by the piece that planned it
    answers: tuple[tuple[int, ...], ...] = ()  # TRAJECTORY: the gold answer's ids, empty where there is none
    keys: tuple[str, ...] = ()  # trajectory ids, in order
    tasks: tuple[str, ...] = ()  # GROUP: the task's key
    fork_token: Field | None = None  # TRAJECTORY: after how many sampled tokens of that turn; None: before all of them

    def __len__(self) -> int:
        return self.tree.count(TRAJECTORY)

    def __getitem__(self, name: Any) -> Field:
        if name not in self.columns:
            raise SignalError(
                f"{name!r} is not on this batch; a piece that uses it must declare it (has: {sorted(map(str, self.columns))})"
            )
        return self.columns[name]

    def put(self, columns: Mapping[Any, Field] | None = None, /, **named: Field) -> Batch:
        """The same batch with more columns."""
        return replace(self, columns={**self.columns, **(columns or {}), **named})

    def lots(self, of: Level = TOKEN) -> Field:
        """A number in [0, 1) for each token (or turn), drawn by its trajectory and place: no cut or order changes it."""
        at = self.tree.index(of, TRAJECTORY)
        return Field(self.tree, of, _uniform(self.seed.at(of).x + 0x9E3779B9 * (at.x + 1)))

    def same(self, *names: str) -> Partition:
        """Turns of one group that agree in the named things: ``state``, ``agent``, ``index`` (of the turn)."""
        keys = {"state": self.state, "agent": self.agent, "index": self.tree.index(TURN, TRAJECTORY)}
        return Partition.by(self.tree, TURN, self.group, *(keys[name] for name in names))

    # ------------------------------------------------------------ cutting
    def select(self, trajectories: Sequence[int] | Tensor) -> Batch:
        """Some whole trajectories, in the given order."""
        chosen = torch.as_tensor(trajectories, dtype=torch.int64, device=self.tree.device)
        numbers = chosen.tolist()
        run = self.tree.run(numbers)
        tree, kept = self.tree.select(chosen) if run is None else self.tree.cut(run)
        sequences = self.sequences.cut(run, kept[TOKEN]) if run is not None else None
        if sequences is None:
            position = torch.full((len(self),), -1, dtype=torch.int64, device=self.tree.device)
            position[chosen] = torch.arange(chosen.numel(), device=self.tree.device)
            sequences = self.sequences.select(position, kept[TOKEN])

        def cut(f: Field) -> Field:
            return Field(tree, f.level, f.x[kept[f.level]])

        fields = {name: cut(value) for name, value in vars(self).items() if isinstance(value, Field)}
        return Batch(
            tree=tree,
            sequences=sequences,
            named={name: cut(f) for name, f in self.named.items()},
            facts={name: cut(f) for name, f in self.facts.items()},
            columns={name: cut(f) for name, f in self.columns.items()},
            keys=tuple(self.keys[i] for i in numbers) if self.keys else (),
            answers=tuple(self.answers[i] for i in numbers) if self.answers else (),
            tasks=tuple(self.tasks[i] for i in kept[GROUP].tolist()) if self.tasks else (),
            **fields,
        )

    def reading(self) -> Tensor:
        """How many positions each trajectory costs the model, [K]."""
        cost = torch.zeros(len(self), dtype=torch.int64, device=self.tree.device)
        return cost.index_add(0, self.sequences.trajectory, self.sequences.lengths)

    def split(self, positions: int, padded: bool = True) -> Iterator[Batch]:
        """Micro-batches of whole trajectories, each of at most ``positions`` packed ids (or one trajectory), as few and as even
        as can be: a small last one costs as many launches as a full one.

        ``padded``: alike lengths together, so that attention pads less. Otherwise neighbours stay neighbours, and what one begins
        with as the one before it does is read once and counts once."""
        cost = self.reading().cpu()
        order = sorted(range(len(cost)), key=lambda k: int(cost[k]) if padded else 0)
        alone, beside = (cost, cost) if padded else self._once(cost)
        for part in even_runs(order, alone.tolist(), beside.tolist(), positions):
            yield self.select(part)

    def _once(self, cost: Tensor) -> tuple[Tensor, Tensor]:
        """What each trajectory costs alone, and beside the one before it."""
        s = self.sequences.host or self.sequences
        owner = s.trajectory.cpu()
        if not len(owner) or bool((owner.diff() < 0).any()):
            return cost, cost
        step = owner.diff(prepend=owner[:1] - 2)  # 0: another sequence of the same trajectory; 1: of the next
        again = shared_beginnings(s.ids.cpu(), s.start)
        alone = cost.index_add(0, owner, -again.where(step == 0, 0))
        return alone, alone.index_add(0, owner, -again.where(step == 1, 0))

    def to(self, device: torch.device | str) -> Batch:
        if torch.device(device) == self.tree.device:
            return self
        s = self.sequences
        own = {name: f for name, f in vars(self).items() if isinstance(f, Field)}
        books = {name: getattr(self, name) for name in ("named", "facts", "columns")}
        loose = [*self.tree.parents, s.ids, s.start, s.trajectory, s.at, *([] if s.blind is None else [s.blind])]
        fields = [f for book in (own, *books.values()) for f in book.values()]
        sent = iter(send_all([*loose, *(f.x for f in fields)], device))
        tree = self.tree.moved([next(sent) for _ in self.tree.parents])
        ids, start, trajectory, at = (next(sent) for _ in range(4))
        blind = None if s.blind is None else next(sent)
        move = lambda book: {name: Field(tree, f.level, next(sent)) for name, f in book.items()}  # noqa: E731
        changes: dict[str, Any] = {**move(own), **{name: move(book) for name, book in books.items()}}
        host = s if s.ids.device.type == "cpu" else None
        changes["sequences"] = Sequences(ids, start, trajectory, at, blind, host)
        return replace(self, tree=tree, **changes)


def _uniform(x: Tensor) -> Tensor:
    """Integers to well-mixed floats in [0, 1): two rounds of multiply and shift."""
    x = x & 0x7FFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    return (x ^ (x >> 16)).double() / 2**31


# -------------------------------------------------------------------- packing


def prefix(trajectory: Trajectory, by_id: Mapping[str, Trajectory]) -> list[int]:
    """The ids a forked trajectory shares with its parent."""
    if trajectory.fork is None:
        return []
    fork, parent = trajectory.fork, by_id[trajectory.fork.parent]
    if not 0 <= fork.turn < len(parent.turns) or not 0 <= fork.token <= len(parent.turns[fork.turn].tokens):
        raise RecordError(
            f"trajectory {trajectory.id} forks at turn {fork.turn}, token {fork.token} of {parent.id}, which has no such place"
        )
    ids = prefix(parent, by_id)
    for turn in parent.turns[: fork.turn + 1]:
        ids = [] if turn.restart else ids
        last = turn is parent.turns[fork.turn]
        ids = [*ids, *turn.context, *(turn.tokens[: fork.token] if last else turn.tokens)]
    return ids


def pack(groups: Sequence[Group]) -> Batch:
    """Pack groups as they are; trajectories that failed must have been dropped before."""
    packer = _Packer()
    for group in groups:
        by_id = {t.id: t for t in group.trajectories}
        for trajectory in group.trajectories:
            packer.add(trajectory, prefix(trajectory, by_id))
        packer.close(group)
    return packer.batch()


class _Packer:
    """Flat lists that become one batch."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.start: list[int] = [0]
        self.owner: list[int] = []
        self.begins: list[int] = []  # of each turn, where its sampled tokens lie
        self.masked: list[tuple[int, Sequence[int]]] = []  # where a context lies, and what it is to the blind
        self.acted: list[Turn] = []
        self.turns: list[int] = []
        self.trajectories: list[int] = []
        self.members: list[Trajectory] = []
        self.states: dict[str, int] = {}
        self.kinds: list[str] = []
        self.tasks: list[str] = []

    def add(self, trajectory: Trajectory, shared: list[int]) -> None:
        if trajectory.status == Status.FAILED:
            raise RecordError(f"trajectory {trajectory.id} failed ({trajectory.reason}) and cannot be trained on")
        me = len(self.members)
        self.ids += shared
        for turn in trajectory.turns:
            if turn.restart and len(self.ids) > self.start[-1]:
                self._close(me)
            if turn.blind:
                self.masked.append((len(self.ids), turn.blind))
            self.ids += turn.context
            if turn.tokens and len(self.ids) == self.start[-1]:
                raise RecordError(
                    f"trajectory {trajectory.id} samples its first token from nothing; its first turn needs a context"
                )
            if turn.tokens and not turn.logp and trajectory.origin == Origin.POLICY:
                raise RecordError(f"trajectory {trajectory.id} has sampled tokens without log-probabilities")
            self.begins.append(len(self.ids))
            self.ids += turn.tokens
        if len(self.ids) > self.start[-1]:
            self._close(me)
        self.acted += trajectory.turns
        self.turns.append(len(trajectory.turns))
        self.members.append(trajectory)

    def close(self, group: Group) -> None:
        self.kinds.append(f"{group.task.environment}/{group.task.difficulty}")
        self.trajectories.append(len(group.trajectories))
        self.tasks.append(group.task.key)

    def _close(self, owner: int) -> None:
        self.start.append(len(self.ids))
        self.owner.append(owner)

    def _spoken(self, name: str, dtype: torch.dtype) -> Tensor:
        """What the turns know of each sampled token; 0 where one of them knows nothing."""
        known = [getattr(turn, name) for turn in self.acted]
        if not any(known):
            return torch.zeros(sum(len(turn.tokens) for turn in self.acted), dtype=dtype)
        flat: list[float] = []
        for turn, values in zip(self.acted, known):
            flat += values or [0] * len(turn.tokens)
        return tensor_of(flat, dtype)

    def batch(self) -> Batch:
        i64, f32 = torch.int64, torch.float32
        acted, sizes = self.acted, tensor_of([len(turn.tokens) for turn in self.acted], i64)
        ids, start, owner, begins = (
            tensor_of(values, i64) for values in (self.ids, self.start, self.owner, self.begins)
        )
        of_token, of_turn, of_trajectory = (
            torch.repeat_interleave(n) for n in (sizes, tensor_of(self.turns, i64), tensor_of(self.trajectories, i64))
        )
        tree = Tree(of_token, of_turn, of_trajectory, len(self.trajectories))
        at = torch.arange(of_token.numel()) + (begins - (sizes.cumsum(0) - sizes))[of_token]
        names = sorted({name for t in self.members for name in t.rewards})
        verdicts = [float("nan") if t.success is None else float(t.success) for t in self.members]
        return Batch(
            tree=tree,
            sequences=Sequences(ids, start, owner, at, self._blind(ids)),
            token=tree.field(TOKEN, ids[at]),
            behaviour=tree.field(TOKEN, self._spoken("logp", f32)),
            mass=tree.field(TOKEN, self._spoken("mass", f32)),
            version=tree.field(TOKEN, self._spoken("version", i64)),
            temperature=tree.field(TURN, [t.temperature for t in acted], f32),
            reward=tree.field(TURN, [t.reward for t in acted], f32),
            state=tree.field(TURN, [self._state(t.state) for t in acted], i64),
            action=tree.field(TURN, _numbered(tuple(t.tokens) for t in acted), i64),
            agent=tree.field(TURN, _numbered(t.agent for t in acted), i64),
            tool_calls=tree.field(TURN, [t.tool_calls for t in acted], i64),
            truncated=tree.field(TRAJECTORY, [t.status == Status.TRUNCATED for t in self.members], torch.bool),
            expert=tree.field(TRAJECTORY, [t.origin == Origin.EXPERT for t in self.members], torch.bool),
            replayed=tree.field(TRAJECTORY, [t.origin == Origin.REPLAY for t in self.members], torch.bool),
            guided=tree.field(TRAJECTORY, [bool(t.guidance) for t in self.members], torch.bool),
            success=tree.field(TRAJECTORY, verdicts, f32),
            seed=tree.field(TRAJECTORY, [number(t.id) for t in self.members], i64),
            parent=tree.field(TRAJECTORY, [number(t.fork.parent) if t.fork else -1 for t in self.members], i64),
            fork=tree.field(TRAJECTORY, [t.fork.turn if t.fork else 0 for t in self.members], i64),
            fork_token=tree.field(TRAJECTORY, [t.fork.token if t.fork else 0 for t in self.members], i64),
            end=tree.field(TRAJECTORY, [self._state(t.end) for t in self.members], i64),
            group=tree.field(GROUP, range(len(self.trajectories)), i64),
            domain=tree.field(GROUP, _numbered(self.kinds), i64),
            answers=tuple(tuple(t.answer) for t in self.members) if any(t.answer for t in self.members) else (),
            named={
                n: tree.field(TRAJECTORY, [t.rewards.get(n, float("nan")) for t in self.members], f32) for n in names
            },
            facts=_facts(tree, TRAJECTORY, self.members) | _facts(tree, TURN, acted),
            keys=tuple(t.id for t in self.members),
            tasks=tuple(self.tasks),
        )

    def _state(self, key: str | None) -> int:
        return -1 if key is None else self.states.setdefault(key, len(self.states))

    def _blind(self, ids: Tensor) -> Tensor | None:
        blind = ids.clone()
        for at, words in self.masked:
            blind[at : at + len(words)] = tensor_of(words, torch.int64)
        return blind if self.masked else None


def number(key: str) -> int:
    """Of a trajectory, the same wherever it turns up."""
    return zlib.crc32(key.encode())


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """Equal keys get equal numbers, from 0 on in the order they turn up."""
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


def _facts(tree: Tree, level: Level, items: Sequence[Trajectory] | Sequence[Turn]) -> dict[str, Field]:
    """Facts by name as numbers; labels are numbered in the order they turn up; NaN where nobody said."""
    said: list[Facts] = [item.facts for item in items]
    labels: dict[str, int] = {}
    value = lambda x: float(labels.setdefault(x, len(labels)) if isinstance(x, str) else x)  # noqa: E731
    names = sorted({name for facts in said for name in facts})
    column = lambda name: [value(facts[name]) if name in facts else float("nan") for facts in said]  # noqa: E731
    return {name: tree.field(level, column(name), torch.float64) for name in names}


__all__ = ["Batch", "Level", "Sequences", "Signal", "number", "pack", "prefix"]
