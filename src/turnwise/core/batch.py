"""Groups packed into one batch: the token sequences the model reads, and the tree of the sampled tokens.

Legend: L packed positions (context and sampled), S sequences, N sampled tokens, U turns, K trajectories, G groups.

A sequence is one forward pass's input. A trajectory is usually one sequence; a restart opens another, and a forked trajectory
repeats its parent's prefix as context. The tree holds sampled tokens only, so context can never enter a loss.

Everything that depends on the whole step (advantages, averaging weights) is a column put on the batch *before* it is split into
micro-batches; micro-batches then just sum. A batch does not know how its columns are computed.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from turnwise.core.columns import checked_key
from turnwise.core.kept_sets import KeptSets, MaskReplay
from turnwise.core.levels import GROUP, TOKEN, TRAJECTORY, TURN, Field, Level, Partition, Tree
from turnwise.core.records import Facts, Group, Origin, Status, Trajectory, Turn
from turnwise.core.transfer import to_device_packed
from turnwise.errors import RecordError, SignalError
from turnwise.maths.lazy_torch import torch
from turnwise.maths.numbers import tensor_of, uniform_hash

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sequences:
    """The token sequences of a batch, packed end to end."""

    ids: Tensor  # [L]
    start: Tensor  # [S + 1] where each sequence begins; the last entry is L
    trajectory: Tensor  # [S] the trajectory it belongs to
    sampled_at: Tensor  # [N] packed position of each sampled token (its log-probability is read one position earlier)
    masked_ids: Tensor | None = None  # [L] ids with the environment's messages masked; None where no method needs them
    routes: Tensor | None = None  # [L, layers · k] experts that the sampler's routers chose, −1: not recorded
    host: Sequences | None = None  # the same on the host, where reading values does not synchronise a GPU
    kept: KeptSets | None = None  # of the sampled tokens

    @property
    def lengths(self) -> Tensor:
        return self.start[1:] - self.start[:-1]

    def positions(self) -> Tensor:
        """Position of each id inside its own sequence, [L]."""
        index = torch.arange(self.ids.numel(), device=self.ids.device)
        return index - torch.repeat_interleave(self.start[:-1], self.lengths)

    def select_slice(self, trajectories: slice, tokens: slice) -> Sequences | None:
        """The sequences of consecutive trajectories and their sampled tokens; None if sequences are not sorted by trajectory."""
        if not bool((self.trajectory[1:] >= self.trajectory[:-1]).all()):
            return None
        ends = torch.searchsorted(self.trajectory, torch.tensor([trajectories.start, trajectories.stop]))
        a, b = ends.tolist()
        lo, hi = self.start[ends].tolist()
        masked, routes = (None if x is None else x[lo:hi] for x in (self.masked_ids, self.routes))
        start, owner = self.start[a : b + 1] - lo, self.trajectory[a:b] - trajectories.start
        kept, at = self.kept and self.kept.select(tokens), self.sampled_at[tokens] - lo
        return Sequences(self.ids[lo:hi], start, owner, at, masked, routes, kept=kept)

    def select(self, position_of: Tensor, tokens: slice | Tensor) -> Sequences:
        """The sequences of kept trajectories. ``position_of`` [K] is the new index or −1; ``tokens`` the kept tokens."""
        new = position_of[self.trajectory]
        order = torch.argsort(new, stable=True)
        rows = order[new[order] >= 0]
        lengths = self.lengths[rows]
        start = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
        new_start = torch.full_like(self.start[:-1], -1).index_copy(0, rows, start[:-1])
        inside = torch.arange(int(start[-1]), device=start.device) - torch.repeat_interleave(start[:-1], lengths)
        source = torch.repeat_interleave(self.start[:-1][rows], lengths) + inside
        at = self.sampled_at[tokens]
        owner = torch.searchsorted(self.start, at, right=True) - 1
        masked, routes = (None if x is None else x[source] for x in (self.masked_ids, self.routes))
        at, sets = at - self.start[owner] + new_start[owner], self.kept and self.kept.select(tokens)
        return Sequences(self.ids[source], start, new[rows], at, masked, routes, kept=sets)


@dataclass(frozen=True, eq=False)
class Batch:
    """A packed batch. ``columns`` holds what the step computed (``core/columns.py``): advantage, weight, measured signals."""

    tree: Tree
    sequences: Sequences
    token: Field  # TOKEN: the sampled id
    behaviour: Field  # TOKEN: log-probability under the distribution that was sampled from
    # TOKEN: log of the probability mass that top-p/k and min-p kept of what a grammar allows; 0: all of it, or ``sequences.kept``
    # lists the set
    mass: Field
    version: Field  # TOKEN: of the policy that sampled it
    temperature: Field  # TURN
    reward: Field  # TURN: the environment's reward
    state: Field  # TURN: id of the state it was taken in, −1 where unknown
    action: Field  # TURN: id of the sampled token sequence
    agent: Field  # TURN: id of the acting agent
    tool_calls: Field  # TURN: number of tool calls
    truncated: Field  # TRAJECTORY: a limit ended it, of its turns, its context or the tokens of its last turn
    expert: Field  # TRAJECTORY: not sampled by our policy
    replayed: Field  # TRAJECTORY: sampled by our policy in an earlier step
    guided: Field  # TRAJECTORY: sampled with hints, or not from the plain policy
    success: Field  # TRAJECTORY: the environment's verdict, NaN where it has none
    seed: Field  # TRAJECTORY: hash of its id, the same in every batch
    parent: Field  # TRAJECTORY: the ``seed`` of the one it forked from, −1 where it did not
    fork: Field  # TRAJECTORY: at which turn of the parent
    end: Field  # TRAJECTORY: id of the state after its last turn, −1 where unknown
    group: Field  # GROUP: its index in the whole step (kept when the batch is split)
    domain: Field  # GROUP: id of its environment and difficulty
    reward_components: Mapping[str, Field] = field(default_factory=dict)  # TRAJECTORY: reward components by name
    facts: Mapping[str, Field] = field(default_factory=dict)  # TURN or TRAJECTORY: NaN where absent
    columns: Mapping[Any, Field] = field(default_factory=dict)  # see core/columns.py
    answers: tuple[tuple[int, ...], ...] = ()  # TRAJECTORY: the gold answer's ids, empty where there is none
    trajectory_ids: tuple[str, ...] = ()  # TRAJECTORY
    task_keys: tuple[str, ...] = ()  # GROUP
    state_keys: tuple[str, ...] = ()  # what the numbers in ``state`` stand for
    fork_token: Field | None = None  # TRAJECTORY: after how many sampled tokens of that turn; None: before all of them

    def __len__(self) -> int:
        return self.tree.count(TRAJECTORY)

    def __getitem__(self, name: Any) -> Field:
        if name not in self.columns:
            names = sorted(map(str, self.columns))
            raise SignalError(f"{name!r} is not on this batch; a piece that uses it must declare it (has: {names})")
        return self.columns[name]

    def put(self, columns: Mapping[Any, Field] | None = None, /, **named: Field) -> Batch:
        """The same batch with more columns. Keys are declared in ``core/columns.py``; any other name raises."""
        added = {checked_key(key): value for key, value in {**(columns or {}), **named}.items()}
        return replace(self, columns={**self.columns, **added})

    def uniform_draws(self, of: Level = TOKEN) -> Field:
        """A uniform number in [0, 1) for each token (or turn), from a hash of its trajectory and index: it does not depend on how
        the batch is split or ordered."""
        index = self.tree.index(of, TRAJECTORY)
        return Field(self.tree, of, uniform_hash(self.seed.at(of).x + 0x9E3779B9 * (index.x + 1)))

    def same(self, *names: str) -> Partition:
        """Turns of one group with equal ``state``, ``agent`` or ``index`` (of the turn), as named."""
        keys = {"state": self.state, "agent": self.agent, "index": self.tree.index(TURN, TRAJECTORY)}
        return Partition.by(self.tree, TURN, self.group, *(keys[name] for name in names))

    # ---------------------------------------------------------- splitting
    def select(self, trajectories: Sequence[int] | Tensor) -> Batch:
        """Some whole trajectories, in the given order."""
        index = torch.as_tensor(trajectories, dtype=torch.int64, device=self.tree.device)
        numbers = index.tolist()
        run = self.tree.as_slice(numbers)
        tree, rows = self.tree.select(index) if run is None else self.tree.select_slice(run)
        sequences = self.sequences.select_slice(run, rows[TOKEN]) if run is not None else None
        if sequences is None:
            position = torch.full((len(self),), -1, dtype=torch.int64, device=self.tree.device)
            position[index] = torch.arange(index.numel(), device=self.tree.device)
            sequences = self.sequences.select(position, rows[TOKEN])
        cut = lambda f: Field(tree, f.level, f.x[rows[f.level]])  # noqa: E731
        fields = {name: cut(value) for name, value in vars(self).items() if isinstance(value, Field)}
        return Batch(
            tree=tree,
            sequences=sequences,
            reward_components={name: cut(f) for name, f in self.reward_components.items()},
            facts={name: cut(f) for name, f in self.facts.items()},
            columns={name: cut(f) for name, f in self.columns.items()},
            trajectory_ids=tuple(self.trajectory_ids[i] for i in numbers) if self.trajectory_ids else (),
            state_keys=self.state_keys,
            answers=tuple(self.answers[i] for i in numbers) if self.answers else (),
            task_keys=tuple(self.task_keys[i] for i in rows[GROUP].tolist()) if self.task_keys else (),
            **fields,
        )

    def positions_per_trajectory(self) -> Tensor:
        """How many packed positions the model reads for each trajectory, [K]."""
        cost = torch.zeros(len(self), dtype=torch.int64, device=self.tree.device)
        return cost.index_add(0, self.sequences.trajectory, self.sequences.lengths)

    def split(self, positions: int, padded: bool = True) -> Iterator[Batch]:
        """Micro-batches of whole trajectories, each of at most ``positions`` packed ids (or one trajectory). As few and as evenly
        filled as possible: a small last one costs as many kernel launches as a full one.

        ``padded``: sort by length, so that attention pads less. Otherwise keep the order, and count a prefix that a sequence
        shares with the one before it only once."""
        cost = self.positions_per_trajectory().cpu()
        order = sorted(range(len(cost)), key=lambda k: int(cost[k]) if padded else 0)
        alone, after = (cost, cost) if padded else self._shared_prefix_costs(cost)
        for part in even_runs(order, alone.tolist(), after.tolist(), positions):
            yield self.select(part)

    def _shared_prefix_costs(self, cost: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of each trajectory by itself, and after the one before it, whose prefix it may share."""
        s = self.sequences.host or self.sequences
        owner = s.trajectory.cpu()
        if not len(owner) or bool((owner.diff() < 0).any()):
            return cost, cost
        step = owner.diff(prepend=owner[:1] - 2)  # 0: another sequence of the same trajectory; 1: of the next
        shared = shared_prefix_lengths(s.ids.cpu(), s.start)
        alone = cost.index_add(0, owner, -shared.where(step == 0, 0))
        return alone, alone.index_add(0, owner, -shared.where(step == 1, 0))

    def to(self, device: torch.device | str) -> Batch:
        if torch.device(device) == self.tree.device:
            return self
        s = self.sequences
        single = {name: f for name, f in vars(self).items() if isinstance(f, Field)}
        mappings = {name: getattr(self, name) for name in ("reward_components", "facts", "columns")}
        some = (s.masked_ids, s.routes)
        tensors = [*self.tree.parents, s.ids, s.start, s.trajectory, s.sampled_at, *(x for x in some if x is not None)]
        fields = [f for mapping in (single, *mappings.values()) for f in mapping.values()]
        copies = iter(to_device_packed([*tensors, *(f.x for f in fields)], device))
        tree = Tree(next(copies), next(copies), next(copies), self.tree.count(GROUP), check=False)
        ids, start, trajectory, at = (next(copies) for _ in range(4))
        masked, routes = (None if x is None else next(copies) for x in some)
        move = lambda fields: {name: Field(tree, f.level, next(copies)) for name, f in fields.items()}  # noqa: E731
        changes: dict[str, Any] = {**move(single), **{name: move(fields) for name, fields in mappings.items()}}
        host = s if s.ids.device.type == "cpu" else None
        changes["sequences"] = Sequences(ids, start, trajectory, at, masked, routes, host, s.kept and s.kept.to(device))
        return replace(self, tree=tree, **changes)


# -------------------------------------------------------------------- packing


def prefix(trajectory: Trajectory, by_id: Mapping[str, Trajectory]) -> list[int]:
    """The ids a forked trajectory shares with its parent."""
    if trajectory.fork is None:
        return []
    fork, parent = trajectory.fork, by_id[trajectory.fork.parent]
    if not 0 <= fork.turn < len(parent.turns) or not 0 <= fork.token <= len(parent.turns[fork.turn].tokens):
        raise RecordError(
            f"trajectory {trajectory.id} forks at turn {fork.turn}, token {fork.token} of {parent.id}, which has no such position"
        )
    ids = prefix(parent, by_id)
    for turn in parent.turns[: fork.turn + 1]:
        ids = [] if turn.restart else ids
        last = turn is parent.turns[fork.turn]
        ids = [*ids, *turn.context, *(turn.tokens[: fork.token] if last else turn.tokens)]
    return ids


def pack(groups: Sequence[Group], replay: MaskReplay | None = None) -> Batch:
    """Pack groups; failed trajectories must have been dropped before. ``replay`` finds what grammars allowed, for a learner: a
    reader of records needs none."""
    packer = _Packer(replay)
    for group in groups:
        by_id = {t.id: t for t in group.trajectories}
        for trajectory in group.trajectories:
            packer.add(trajectory, prefix(trajectory, by_id))
        packer.close(group)
    return packer.batch()


class _Packer:
    """Collects flat lists and turns them into one batch."""

    def __init__(self, replay: MaskReplay | None) -> None:
        self.replay = replay
        self.ids: list[int] = []
        self.start: list[int] = [0]
        self.owner: list[int] = []
        self.begins: list[int] = []  # packed position of each turn's first sampled token
        self.masked: list[tuple[int, Sequence[int]]] = []  # packed position of a context, and its masked ids
        self.routes: list[tuple[int, Sequence[bytes]]] = []  # the packed position where a turn's routes end
        self.turn_records: list[Turn] = []
        self.turns: list[int] = []
        self.trajectories: list[int] = []
        self.members: list[Trajectory] = []
        self.states: dict[str, int] = {}
        self.kinds: list[str] = []
        self.tasks: list[str] = []

    def add(self, trajectory: Trajectory, shared: list[int]) -> None:
        if trajectory.status == Status.FAILED:
            raise RecordError(f"trajectory {trajectory.id} failed ({trajectory.reason}) and cannot be trained on")
        owner = len(self.members)
        self.ids += shared
        for turn in trajectory.turns:
            if turn.restart and len(self.ids) > self.start[-1]:
                self._close(owner)
            if turn.masked_context:
                self.masked.append((len(self.ids), turn.masked_context))
            self.ids += turn.context
            if turn.tokens and len(self.ids) == self.start[-1]:
                raise RecordError(f"trajectory {trajectory.id} samples without a prompt; give it a context")
            if turn.tokens and not turn.logp and trajectory.origin == Origin.POLICY:
                raise RecordError(f"trajectory {trajectory.id} has sampled tokens without log-probabilities")
            self.begins.append(len(self.ids))
            self.ids += turn.tokens
            if turn.routes:
                self.routes.append((len(self.ids) - 1, turn.routes))
        if len(self.ids) > self.start[-1]:
            self._close(owner)
        self.turn_records += trajectory.turns
        self.turns.append(len(trajectory.turns))
        self.members.append(trajectory)

    def close(self, group: Group) -> None:
        self.kinds.append(f"{group.task.environment}/{group.task.difficulty}")
        self.trajectories.append(len(group.trajectories))
        self.tasks.append(group.task.key)

    def _close(self, owner: int) -> None:
        self.start.append(len(self.ids))
        self.owner.append(owner)

    def _per_token(self, name: str, dtype: torch.dtype) -> Tensor:
        """A field of the turns with one value per sampled token; 0 for turns without it."""
        columns = [getattr(turn, name) for turn in self.turn_records]
        if not any(columns):
            return torch.zeros(sum(len(turn.tokens) for turn in self.turn_records), dtype=dtype)
        flat: list[float] = []
        for turn, values in zip(self.turn_records, columns):
            flat += values or [0] * len(turn.tokens)
        return tensor_of(flat, dtype)

    def batch(self) -> Batch:
        i64, f32 = torch.int64, torch.float32
        turns, sizes = self.turn_records, tensor_of([len(turn.tokens) for turn in self.turn_records], i64)
        ids, start, owner, begins = (tensor_of(x, i64) for x in (self.ids, self.start, self.owner, self.begins))
        counts = sizes, tensor_of(self.turns, i64), tensor_of(self.trajectories, i64)
        of_token, of_turn, of_trajectory = map(torch.repeat_interleave, counts)
        tree = Tree(of_token, of_turn, of_trajectory, len(self.trajectories))
        at = torch.arange(of_token.numel()) + (begins - (sizes.cumsum(0) - sizes))[of_token]
        names = sorted({name for t in self.members for name in t.rewards})
        begun = [self.ids[begin - turn.begun : begin] for turn, begin in zip(turns, self.begins)]
        kept, mass = KeptSets.of(turns, begun, self.replay), self._per_token("mass", f32)
        verdicts = [float("nan") if t.success is None else float(t.success) for t in self.members]
        return Batch(
            tree=tree,
            sequences=Sequences(ids, start, owner, at, self._masked_ids(ids), self._routes(), kept=kept),
            token=tree.field(TOKEN, ids[at]),
            behaviour=tree.field(TOKEN, self._per_token("logp", f32)),
            mass=tree.field(TOKEN, mass if kept is None else mass.masked_fill(kept.size > 0, 0.0)),
            version=tree.field(TOKEN, self._per_token("version", i64)),
            temperature=tree.field(TURN, [t.temperature for t in turns], f32),
            reward=tree.field(TURN, [t.reward for t in turns], f32),
            state=tree.field(TURN, [self._state(t.state) for t in turns], i64),
            action=tree.field(TURN, _numbered(tuple(t.tokens) for t in turns), i64),
            agent=tree.field(TURN, _numbered(t.agent for t in turns), i64),
            tool_calls=tree.field(TURN, [t.tool_calls for t in turns], i64),
            truncated=tree.field(TRAJECTORY, [t.unfinished for t in self.members], torch.bool),
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
            reward_components={
                n: tree.field(TRAJECTORY, [t.rewards.get(n, float("nan")) for t in self.members], f32) for n in names
            },
            facts=_facts(tree, TRAJECTORY, self.members) | _facts(tree, TURN, turns),
            trajectory_ids=tuple(t.id for t in self.members),
            task_keys=tuple(self.tasks),
            state_keys=tuple(self.states),
        )

    def _state(self, key: str | None) -> int:
        return -1 if key is None else self.states.setdefault(key, len(self.states))

    def _masked_ids(self, ids: Tensor) -> Tensor | None:
        masked = ids.clone()
        for at, context in self.masked:
            masked[at : at + len(context)] = tensor_of(context, torch.int64)
        return masked if self.masked else None

    def _routes(self) -> Tensor | None:
        width = len(self.routes[0][1][0]) // 2 if self.routes else 0
        out = torch.full((len(self.ids), width), -1, dtype=torch.int16)
        for end, rows in reversed(self.routes):  # a position that two turns read keeps the routes of the first
            out[end - len(rows) : end] = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int16).view(-1, width)
        return out if self.routes else None


def number(key: str) -> int:
    """A trajectory id as an integer, the same in every process."""
    return zlib.crc32(key.encode())


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """Number the keys from 0 in order of first appearance; equal keys get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _facts(tree: Tree, level: Level, items: Sequence[Trajectory] | Sequence[Turn]) -> dict[str, Field]:
    """Facts by name as numbers; labels are numbered in order of first appearance; NaN where an item has none."""
    all_facts: list[Facts] = [item.facts for item in items]
    labels: dict[str, int] = {}
    value = lambda x: float(labels.setdefault(x, len(labels)) if isinstance(x, str) else x)  # noqa: E731
    names = sorted({name for facts in all_facts for name in facts})
    column = lambda name: [value(facts[name]) if name in facts else float("nan") for facts in all_facts]  # noqa: E731
    return {name: tree.field(level, column(name), torch.float64) for name in names}


# ------------------------------------------------------------------ splitting


def even_runs(order: Sequence[int], alone: Sequence[int], after: Sequence[int], limit: int) -> list[list[int]]:
    """Split ``order`` into chunks of cost at most ``limit`` (or one item): as few as greedy filling gives, then as even as that
    allows. The first item of a chunk costs ``alone[k]``, the others ``after[k]``, which is never more."""
    full = _split(order, alone, after, limit, 1)
    even = _split(order, alone, after, limit, len(full))
    return even if len(even) <= len(full) else full


def _split(order: Sequence[int], alone: Sequence[int], after: Sequence[int], limit: int, count: int) -> list[list[int]]:
    """A chunk ends when it is full, or holds its share of the cost that remains for the rest of ``count`` chunks."""
    parts: list[list[int]] = []
    filled, remaining = 0, sum(after[k] for k in order)
    for k in order:
        share = (filled + remaining) / max(1, count - len(parts) + 1)
        if not parts or filled + after[k] > limit or filled + after[k] / 2 > share:
            parts.append([])
            filled = 0
        filled += after[k] if parts[-1] else alone[k]
        remaining -= after[k]
        parts[-1].append(k)
    return parts


def shared_prefix_lengths(ids: Tensor, start: Tensor) -> Tensor:
    """How many leading ids each packed sequence shares with the one before it, [S]. The last entry of ``start`` is the total."""
    numbers, ends, lengths = ids.numpy(), start.tolist(), [0]
    for a, b, c in zip(ends, ends[1:], ends[2:]):
        differs = numbers[a : a + min(b - a, c - b)] != numbers[b : b + min(b - a, c - b)]
        lengths.append(int(differs.argmax()) if differs.any() else len(differs))
    return torch.tensor(lengths[: len(ends) - 1])
