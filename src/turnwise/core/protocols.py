"""The ports: what the loop asks of a generator, a learner, an environment and a tracker. Protocols only.

The loop drives these and nothing else; one process, Ray actors or a remote server may stand behind them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from turnwise.core.records import Completion, Group, Message, Sampling, Task, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.core.batch import Batch
    from turnwise.core.levels import Field
    from turnwise.core.signals import Signal


# ---------------------------------------------------------------- environment


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Action:
    """What an agent said in one turn, read for the environment.

    ``faults`` holds in words every tool call that could not be read (not JSON, no name ...)."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def message(self) -> Message:
        """The assistant message as the chat template will see it: the text exactly as sampled."""
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment answers to an action."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    # known keys of info: success (bool), rewards (named floats), tool_calls, tool_errors (ints), facts (of this turn:
    # numbers or labels), paid (what other agents earn by this step, by name)


@runtime_checkable
class Environment(Protocol):
    """One single-use episode. ``step`` may also be ``async``.

    Optional powers, with their defaults in ``environments.base``: ``tools``, ``state_key``, ``snapshot`` and ``restore``,
    ``answer``, ``hint``, ``agent`` (who acts next, where there are several), ``close``."""

    def reset(self, seed: int) -> Sequence[Message]: ...

    def step(self, action: Action) -> Step | Awaitable[Step]: ...


# ------------------------------------------------------------------ generator


class Session(Protocol):
    """One dialogue with a generator. Ids in, ids out; whatever prefix it has already read costs nothing again."""

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion: ...

    def fork(self, seed: int) -> Session: ...

    def park(self) -> None:
        """It will rest: nobody need wait for it. Asking again ends the rest."""
        ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class Generator(Protocol):
    """Samples from a policy. ``open`` is synchronous so that a whole wave is known before the first token."""

    version: int

    def open(self, seed: int, draft: bool = False) -> Session:
        """``draft``: what it samples need not be exact, only cheap, where a generator knows the difference."""
        ...

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights between two tokens; requests in flight go on under them."""
        ...

    def stats(self) -> dict[str, float]: ...

    def describe(self) -> str:
        """Which path computes, in which precision, and why not a faster one: a line for the log."""
        ...


# -------------------------------------------------------------------- learner


class Loss(Protocol):
    """What an objective says of one micro-batch."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def stats(self) -> dict[str, Tensor]:
        """Statistics that sum over micro-batches."""
        ...

    @property
    def sides(self) -> Mapping[str, Tensor]:
        """Other scalars whose gradients ``scales`` asks for."""
        ...


class Scales(Protocol):
    @property
    def gradient(self) -> float: ...

    @property
    def rate(self) -> float: ...


class Objective(Protocol):
    """A differentiable number of a micro-batch. Micro-batches and ranks *sum*: every normaliser is already in it."""

    @property
    def live(self) -> frozenset[Signal]:
        """Signals wanted with their gradient."""
        ...

    @property
    def foresees(self) -> frozenset[Signal]:
        """Signals of the present policy over the whole step that ``plan`` wants to find on the batch."""
        ...

    def plan(self, batch: Batch) -> Batch:
        """Called once for each optimiser step, before it is cut."""
        ...

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field]) -> Loss: ...

    def scales(self, batch: Batch, main: Sequence[Tensor], sides: Mapping[str, Sequence[Tensor]]) -> Scales:
        """What multiplies the finished gradient and the learning rate."""
        ...


class Learner(Protocol):
    """Measures signals and takes optimiser steps. Knows no method's name."""

    version: int

    def measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]: ...

    def update(
        self, batch: Batch, objective: Objective, meanwhile: Callable[[], object] | None = None
    ) -> dict[str, float]:
        """Plan and take one optimiser step over the whole batch. ``meanwhile`` is called when all of it is on its way and only
        the device is waited for."""
        ...

    def weights(self) -> Mapping[str, Tensor]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Probe(Protocol):
    """Are generator and learner the same policy? Raises if not."""

    def mark(self, learner: Learner, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with what an update must know to tell the difference, and what is known already."""
        ...

    def judge(self, found: float, version: int) -> None:
        """The mean difference the first update told of (not a number: of none)."""
        ...


# ------------------------------------------------------------- state, metrics


@runtime_checkable
class Stateful(Protocol):
    """Anything that must survive a crash. The state is JSON-able."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Tracker(Protocol):
    """Where numbers go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Ledger(Protocol):
    """Accounts for every group issued: in flight, finished, trained, or dropped and why; and for what is mixed in."""

    def issue(self, group_id: str, task: Task, step: int, version: int) -> None: ...

    def finish(self, group: Group, step: int) -> None: ...

    def train(self, group_ids: Sequence[str], step: int) -> None: ...

    def mix(self, trajectories: Sequence[Trajectory], step: int) -> None: ...

    def drop(self, group_id: str, reason: str, step: int) -> None: ...

    def seal(self, step: int) -> None: ...

    def drain(self) -> None:
        """Write what was put off, if anything was."""
        ...


Listener = Callable[[str, Mapping[str, Any]], None]
"""Called with an event name and its facts: the progress display, the plain log, a test."""
