"""What every piece of a recipe has in common: the signals it reads, the columns it plans, the state it keeps.

A batch passes three stages. ``credit`` sees the whole batch once, before the first update. ``plan`` sees all of one optimiser
step, before it is split into micro-batches. The loss then sees one micro-batch at a time, with the gradient.
A quantity of the whole step (a searched bound, a quantile, a running mean) is put on the batch in the first two stages, with
the piece as its key; micro-batches then just sum. This module does not know any particular piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, Field
from turnwise.core.limits import Declared
from turnwise.core.signals import Signal
from turnwise.errors import RecipeError
from turnwise.maths.lazy_torch import torch

NOTHING: frozenset[Signal] = frozenset()
State = dict[str, Any]
"""Numbers by name; a tracker keeps one row per task under the task's key. JSON-able."""


class Piece(Declared):
    """Interface. A piece is a frozen dataclass, by its base; ``parts`` finds the pieces inside its fields.

    What a piece reads, requires and accepts is declared: ``reads = frozenset({Signal.PROXIMAL})`` beside its fields, or a
    property where it depends on them; the limits of a field with ``number`` and ``choice`` of ``core/limits.py``."""

    @property
    def reads(self) -> frozenset[Signal]:
        """Signals this piece itself uses."""
        return NOTHING

    @property
    def reads_before_step(self) -> frozenset[Signal]:
        """Signals of the *present* weights that ``plan`` uses, measured over the whole optimiser step."""
        return NOTHING

    @property
    def requires(self) -> frozenset[str]:
        """What environment or data must provide: ``state``, ``verdict``, ``reward NAME``, ``fact NAME`` ..."""
        return frozenset()

    @property
    def idle_without(self) -> frozenset[str]:
        """In the same words, what it does nothing without: the run begins all the same, and says so."""
        return frozenset()

    def plan(self, view: StepView) -> Mapping[Any, Field]:
        """Columns to put on the batch before a step is split; the keys are the piece, or (piece, name)."""
        return {}

    def initial_state(self) -> State:
        """The state it keeps between steps, at the start of a run; read it in ``plan`` as ``view[self, name]``."""
        return {}

    def next_state(self, state: State, view: StepView) -> State:
        """Its state after this step."""
        return state

    @property
    def draws_candidates(self) -> int:
        """How many candidate tokens the learner draws beside each sampled one."""
        return 0

    def resets_reference(self, batch_index: int) -> bool:
        """Whether the present policy becomes the reference before this batch is measured."""
        return False

    told = False  # whether the rollouts of the next step may read its state
    updates_after_credit = False
    """Whether a batch enters the state only after it was credited: a predictor must not see what it predicts."""

    def memory_columns(self, state: State, batch: Batch) -> Mapping[Any, Field]:
        """Its state as columns that follow every split of the batch: BATCH fields with the key (piece, name)."""
        full = lambda value: batch.tree.full(BATCH, value, torch.float64)  # noqa: E731
        return {(self, name): full(value) for name, value in state.items()}

    @property
    def parts(self) -> Iterator[Piece]:
        """This piece and all pieces inside it."""
        yield self
        for f in fields(self):
            value = getattr(self, f.name)
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, Piece):
                    yield from inner.parts

    @property
    def signals(self) -> frozenset[Signal]:
        """All signals that this piece and its parts read."""
        return NOTHING.union(*(p.reads | p.reads_before_step for p in self.parts))

    @property
    def signals_before_step(self) -> frozenset[Signal]:
        return NOTHING.union(*(p.reads_before_step for p in self.parts))

    @property
    def requirements(self) -> frozenset[str]:
        """Everything that this piece and its parts require of environment or data."""
        return frozenset[str]().union(*(p.requires for p in self.parts))


@dataclass(frozen=True, eq=False)
class MicroBatchView:
    """One micro-batch under the present weights. ``view[key]`` is the forward pass's output, with gradient, or else a column of
    the batch."""

    batch: Batch
    policy: Mapping[Signal, Field]

    def __getitem__(self, key: Any) -> Field:
        return self.policy[key] if key in self.policy else self.batch[key]

    @property
    def logp(self) -> Field:
        return self[Signal.LOGP]


@dataclass(frozen=True, eq=False)
class StepView(MicroBatchView):
    """All of one optimiser step, without gradient. It has a ratio only if some piece reads ``LOGP`` before the step."""

    rho: Field | None = None
    adv: Field | None = None

    @property
    def ratio(self) -> Field:
        assert self.rho is not None, "a piece that plans with the ratio must have LOGP in its reads_before_step"
        return self.rho

    @property
    def advantage(self) -> Field:
        assert self.adv is not None
        return self.adv


@dataclass
class Memory:
    """The states of all stateful pieces, keyed by their repr, and the number of batches credited so far. JSON-able."""

    clock: int = 0
    states: dict[str, State] = field(default_factory=dict)

    def of(self, piece: Piece) -> State:
        return self.states.setdefault(repr(piece), piece.initial_state())

    def columns(self, pieces: Iterator[Piece], batch: Batch) -> dict[Any, Field]:
        """The states of these pieces as columns."""
        stateful = [p for p in pieces if p.initial_state()]
        return {key: f for p in stateful for key, f in p.memory_columns(self.of(p), batch).items()}

    def advance(self, pieces: Iterator[Piece], view: StepView) -> None:
        for p in pieces:
            if p.initial_state():
                self.states[repr(p)] = p.next_state(dict(self.of(p)), view)

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self.clock, "states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock, self.states = int(state["clock"]), {k: dict(v) for k, v in state["states"].items()}


HIDDEN_AT_DEFAULT = {"eps", "cap", "correction", "least"}  # numbers shown only where they differ from the default


def text(value: Any) -> str:
    """A piece as source text: its numbers and every field that differs from its default; the first field without its name."""
    if hasattr(type(value), "as_text"):
        return value.as_text()
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        inner = ", ".join(map(text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not is_dataclass(value) or isinstance(value, type):
        return f"{value:g}" if isinstance(value, float) else repr(value)
    arguments: list[str] = []
    for position, f in enumerate(fields(value)):
        content = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        number = isinstance(content, int | float) and not isinstance(content, bool) and f.name not in HIDDEN_AT_DEFAULT
        if number or default is MISSING or content != default:
            arguments.append(text(content) if position == len(arguments) == 0 else f"{f.name}={text(content)}")
    return f"{type(value).__name__}({', '.join(arguments)})"


def check(ok: bool, message: str) -> None:
    """Raise a RecipeError with this message unless ``ok``: validation of a piece's hyper-parameters."""
    if not ok:
        raise RecipeError(message)
