"""A pool of tasks and what is believed about each of them: arrays over the first tasks of a stream.

``LivePool`` implements the live sampler over such a pool. A subclass says in which order a wave is chosen and what a finished
group changes. Every decision is vectorised: a wave costs a fraction of a millisecond at 100,000 tasks. Knows no token.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from turnwise.core.records import Group, Origin, Task
from turnwise.core.seeds import stable_seed
from turnwise.errors import SettingError
from turnwise.tasks.task_source import TaskStream

Array = np.ndarray
BINS = 10  # of the histogram of believed success rates


def outcomes(group: Group) -> Array:
    """1 for each trajectory of the policy that succeeded, else 0."""
    own = [t for t in group.trajectories if t.origin == Origin.POLICY]
    return np.array([bool(t.success if t.success is not None else t.reward > 0) for t in own], dtype=np.float64)


def check_pool(pool: int, **positive: float) -> None:
    """Refuse an empty pool, and every named number that is not positive."""
    if pool < 1:
        raise SettingError(f"a pool of {pool} tasks; write at least 1")
    for name, value in positive.items():
        if not value > 0:
            raise SettingError(f"{name} is {value}; write a positive number")


@dataclass
class LivePool:
    """Issues tasks of a pool in waves. ``visits`` counts finished groups, ``rate`` is the believed success rate by task.

    A pool larger than the list of tasks it is drawn from holds some tasks several times; their beliefs are shared."""

    tasks: TaskStream
    pool: int
    drawn: int = 0
    waves: int = 0
    wave: int = 1  # tasks that are asked for together; the collector sets it
    queue: list[int] = field(default_factory=list)  # the rest of this wave, as indices into the pool

    def __post_init__(self) -> None:
        self.members = [self.tasks.draw(i) for i in range(self.pool)]
        self.index = {task.key: i for i, task in reversed(list(enumerate(self.members)))}
        self.visits = np.zeros(self.pool)
        self.rate = np.full(self.pool, 0.5)

    # ------------------------------------------------------------ live sampler
    def begin_wave(self, count: int) -> None:
        self.wave = count

    def next(self) -> tuple[int, Task]:
        if not self.queue:
            self.queue = [int(i) for i in self.choose(self.wave, self.rng())]
            self.waves += 1
        number, self.drawn = self.drawn, self.drawn + 1
        return number, self.members[self.queue.pop(0)]

    def rng(self) -> np.random.Generator:
        """Random numbers of this wave: they depend on the seed of the run and the number of the wave alone."""
        return np.random.Generator(np.random.PCG64(stable_seed(self.tasks.seed, type(self).__name__, self.waves)))

    def observe(self, group: Group) -> None:
        i, results = self.index.get(group.task.key), outcomes(group)
        if i is None or not len(results):
            return
        self.visits[i] += 1
        self.learn(i, results, group)

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: _pack(getattr(self, name)) for name in ("visits", "rate", *self.arrays)}
        return {"drawn": self.drawn, "waves": self.waves, "wave": self.wave, "queue": self.queue, "arrays": arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.waves, self.wave = int(state["drawn"]), int(state["waves"]), int(state["wave"])
        self.queue = [int(i) for i in state["queue"]]
        for name, packed in state["arrays"].items():
            setattr(self, name, _unpack(packed))

    def metrics(self) -> dict[str, float]:
        """How many tasks were seen, and a histogram of the success rates believed of them."""
        seen = self.visits > 0
        counts = np.histogram(self.rate[seen], bins=BINS, range=(0.0, 1.0))[0]
        histogram = {f"difficulty/{b / BINS:.1f}": float(n) for b, n in enumerate(counts)}
        frontier = float(((self.rate > 0) & (self.rate < 1) & seen).sum())
        numbers = {"tasks_drawn": self.drawn, "tasks_seen": seen.sum(), "tasks_frontier": frontier}
        return {**{name: float(value) for name, value in numbers.items()}, **histogram}

    # ------------------------------------------------------------ for a subclass
    arrays: ClassVar[tuple[str, ...]] = ()  # names of its own arrays, which a checkpoint holds

    def choose(self, count: int, rng: np.random.Generator) -> Array:
        """Indices of the next ``count`` tasks."""
        raise NotImplementedError

    def learn(self, i: int, results: Array, group: Group) -> None:
        """Update the belief about task ``i`` from the results of one group."""
        self.rate[i] = results.mean()


def draw_by_weight(weights: Array, count: int, rng: np.random.Generator, again: bool = False) -> Array:
    """``count`` indices in proportion to the weights; with replacement if ``again`` or if there are too few."""
    total = np.cumsum(weights, dtype=np.float64)
    if again or count > int((weights > 0).sum()):
        return np.searchsorted(total, rng.random(count) * total[-1], side="right").clip(max=len(weights) - 1)
    return _distinct_draws(weights, total, count, rng)


def _distinct_draws(weights: Array, total: Array, count: int, rng: np.random.Generator) -> Array:
    """Draws without replacement: repeated draws are skipped, which leaves exactly successive sampling. Where one task holds
    most of the weight, that takes too long, and keys are sorted instead (Efraimidis and Spirakis)."""
    chosen: dict[int, None] = {}
    for _ in range(8):
        for i in np.searchsorted(total, rng.random(2 * count) * total[-1], side="right").tolist():
            if i < len(weights) and weights[i] > 0:
                chosen[i] = None
            if len(chosen) == count:
                return np.fromiter(chosen, dtype=np.int64)
    rest = np.array(weights, dtype=np.float64)
    rest[list(chosen)] = 0.0
    with np.errstate(divide="ignore"):
        keys = np.where(rest > 0, np.log1p(-rng.random(len(rest))) / rest, -np.inf)
    return np.array([*chosen, *np.argsort(-keys, kind="stable")[: count - len(chosen)]], dtype=np.int64)


def largest(scores: Array, count: int) -> Array:
    """Indices of the ``count`` largest scores, largest first; ties go to the lower index."""
    count = min(count, len(scores))
    part = np.argpartition(-scores, count - 1)[:count]
    return part[np.lexsort((part, -scores[part]))]


def _pack(array: Array) -> dict[str, Any]:
    """An array as JSON that restores it bit for bit."""
    values = np.ascontiguousarray(array)
    return {"dtype": values.dtype.str, "data": base64.b64encode(values.tobytes()).decode()}


def _unpack(packed: dict[str, Any]) -> Array:
    return np.frombuffer(base64.b64decode(packed["data"]), dtype=packed["dtype"]).copy()
