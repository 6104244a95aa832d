"""The interfaces between the training loop and its generator, learner, environment, ledger and trackers: protocols, and the
records that pass between them.

The loop calls these and nothing else; it does not know whether one process, Ray actors or a remote server implements them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from turnwise.core.records import Completion, Group, Message, Sampling, Task, Trajectory
from turnwise.core.text import clean, clean_tree

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.core.batch import Batch
    from turnwise.core.kept_sets import MaskReplay
    from turnwise.core.levels import Field
    from turnwise.core.signals import Signal


# ---------------------------------------------------------------- environment


UNREAD_TOOL_CALLS = "unread_tool_calls"  # fact of a turn whose calls are written in another syntax than the model's own
# facts of an agent's episode, and metrics: refused calls by code, and calls that named a field which the run decides
REFUSED, OVERRULED = "agent/refused/", "agent/overruled/"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One parsed tool call: the name of the tool and its arguments."""

    name: str
    arguments: dict[str, Any]
    id: str = ""

    def __post_init__(self) -> None:
        """Make every text valid Unicode: a JSON escape can write half a character, which no file or tokenizer accepts."""
        object.__setattr__(self, "name", clean(self.name))
        object.__setattr__(self, "arguments", clean_tree(self.arguments))
        object.__setattr__(self, "id", clean(self.id))


@dataclass(frozen=True, slots=True)
class Action:
    """The text an agent sampled in one turn, parsed for the environment.

    ``faults`` describes every tool call that could not be parsed (not JSON, no name ...). Calls inside the model's ``thinking``
    are not calls. ``unread`` names the syntaxes of calls that the model wrote in another syntax than its own."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    faults: tuple[str, ...] = ()
    thinking: str = ""
    unread: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", clean(self.text))
        object.__setattr__(self, "faults", tuple(map(clean, self.faults)))

    @property
    def facts(self) -> dict[str, float]:
        """What is recorded of the turn besides the environment's facts."""
        return {UNREAD_TOOL_CALLS: float(len(self.unread))} if self.unread else {}

    @property
    def message(self) -> Message:
        """The assistant message for the chat template: the text exactly as sampled."""
        return {"role": "assistant", "content": self.text}


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's response to an action."""

    messages: Sequence[Message] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    # keys of info that are read: success (bool), rewards (named floats), tool_calls, tool_errors (ints), facts (of this
    # turn: numbers or labels), paid (rewards of other agents for this step, by name)
    context: Sequence[Message] | None = None
    # replaces all that was read before ``messages``: what a policy's edit of its context left, or what a seat may know; the
    # next turn begins a new sequence. None: everything stays


# ------------------------------------------------------------------ generator


class Session(Protocol):
    """One dialogue with a generator. Token ids in, token ids out; a prefix already in its KV cache is not computed again."""

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Completion: ...

    def fork(self, seed: int) -> Session: ...

    def park(self) -> None:
        """Mark the session idle, so that the scheduler does not wait for it. The next ``generate`` makes it active again."""

    def unpark(self) -> None:
        """Make the scheduler wait for it from now on: what is done until its next ``generate`` may take as long as it likes."""

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class Generator(Protocol):
    """Samples from a policy. ``open`` is synchronous, so that all sessions of a step exist before the first token is decoded."""

    version: int

    def open(self, seed: int, draft: bool = False) -> Session:
        """``draft``: prefer speed to precision when sampling, if the generator offers both."""

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load new weights between two decode steps; requests in flight continue with them."""

    def stats(self) -> dict[str, float]: ...

    def describe(self) -> str:
        """One line for the log: the execution path, its precision, and why no faster path is used."""


class GroupScorer(Protocol):
    """Adds rewards to the trajectories of one finished group; see ``rollout.scoring``."""

    async def score(self, group: Group) -> Group:
        """The group with rewards, total and verdict added. Never raises for an answer that cannot be scored."""

    def close(self) -> None: ...


# -------------------------------------------------------------------- learner


@dataclass(frozen=True)
class Loss:
    """The result of one micro-batch: a scalar to minimise, statistics that sum over micro-batches, and side losses, further
    scalars whose gradients ``scales`` needs."""

    loss: Tensor
    compute_stats: Callable[[], dict[str, Tensor]]
    side_losses: Mapping[str, Tensor]

    @cached_property
    def stats(self) -> dict[str, Tensor]:
        """Computed on first access. Access it after the backward pass was launched, so that a GPU has work meanwhile."""
        return self.compute_stats()


@dataclass(frozen=True)
class Scales:
    """Factors on the gradient (before it is clipped) and on the learning rate of one step."""

    gradient: float = 1.0
    rate: float = 1.0


class ObjectiveProtocol(Protocol):
    """A differentiable loss of a micro-batch. Micro-batches and ranks *sum*: every normaliser is already applied."""

    @property
    def signals_with_gradient(self) -> frozenset[Signal]:
        """Signals that the forward pass of an update must compute, with gradient."""

    @property
    def signals_before_step(self) -> frozenset[Signal]:
        """Signals of the present policy over the whole step that must be on the batch when ``plan`` is called."""

    def plan(self, batch: Batch) -> Batch:
        """Called once for each optimiser step, before it is split into micro-batches."""

    def __call__(self, batch: Batch, policy: Mapping[Signal, Field]) -> Loss: ...

    def scales(self, batch: Batch, side_gradients: Mapping[str, Sequence[Tensor]]) -> Scales:
        """Factors on the finished gradient and on the learning rate."""


class Learner(Protocol):
    """Measures signals and takes optimiser steps. Does not know any method."""

    version: int
    skipped: int  # optimizer steps not taken, because a loss or gradient was not finite
    replay: MaskReplay  # finds what the grammars of turns allowed, when they are packed

    def measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]: ...

    def update(
        self, batch: Batch, objective: ObjectiveProtocol, while_waiting: Callable[[], object] | None = None
    ) -> dict[str, float]:
        """Plan and take one optimiser step over the whole batch. ``while_waiting`` runs on the host once all
        kernels are launched and the device is still computing."""

    def reference(self) -> object:
        """Freeze a copy of the present policy as the reference; called before the first update."""

    def weights(self) -> Mapping[str, Tensor]: ...

    def export(self, path: str | Path) -> None:
        """Write the policy in Hugging Face layout."""

    def export_adapter(self, path: str | Path, base: str) -> bool:
        """Write adapters alone as a PEFT folder that names its base model; False: there are none."""

    def describe(self) -> str:
        """Which implementation computes, in which precision: a line for the log."""

    @property
    def parameter_count(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def checkpoint_state(self) -> dict[str, Any]:
        """The state of a checkpoint: live tensors, to be written before the next update, without what a new learner of the same
        initial model holds anyway."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class PolicyCheckProtocol(Protocol):
    """Checks that generator and learner compute the same policy; raises if they do not."""

    def prepare(self, learner: Learner, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with the columns an update needs to measure the difference, and metrics that are known already."""

    def published(self, generator: Generator, groups: Sequence[Group], version: int) -> None:
        """After the update on ``groups`` the generator has the weights of ``version``, and the run goes on."""

    def check(self, difference: float, version: int) -> None:
        """Raise if the mean difference that the first update measured is too large (NaN: no token was compared)."""


# ------------------------------------------------------------- state, metrics


class Tracker(Protocol):
    """A sink of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class LedgerProtocol(Protocol):
    """Records every group issued: in flight, finished, trained, or dropped and why; and the trajectories mixed in."""

    def issue(self, group_id: str, task: Task, step: int, version: int) -> None: ...

    def finish(self, group: Group, step: int) -> None: ...

    def train(self, group_ids: Sequence[str], step: int) -> None: ...

    def record_mixed(self, trajectories: Sequence[Trajectory], step: int) -> None: ...

    def keep_tokens(self, make: Callable[[], Sequence[Any]], step: int, steps: int) -> None: ...

    def drop(self, group_id: str, reason: str, step: int) -> None: ...

    def seal(self, step: int) -> None: ...

    def flush(self) -> None:
        """Write all pending records."""


Listener = Callable[[str, Mapping[str, Any]], None]
"""Called with an event name and its facts; implemented by the progress display, the plain log and tests."""
