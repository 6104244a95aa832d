"""What every piece of a recipe has in common: what it reads, what it must foresee, what it remembers.

A step has three moments. ``credit`` sees the whole batch once, before the first update. ``plan`` sees the whole of each
optimiser step, before it is cut into micro-batches. Then each micro-batch is seen by itself, with the gradient.
What must hold for the whole (a searched bound, a quantile, a running mean) is put on the batch in the first two, under
the piece itself; micro-batches then just sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

import torch

from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, Field
from turnwise.core.signals import Signal
from turnwise.errors import RecipeError

NOTHING: frozenset[Signal] = frozenset()
State = dict[str, Any]
"""Numbers by name; trackers keep a row for each task under the task's key. JSON-able."""


class Piece:
    """Interface. A piece is a frozen dataclass; pieces inside its fields are found by themselves."""

    @property
    def reads(self) -> frozenset[Signal]:
        """Signals this piece itself uses."""
        return NOTHING

    @property
    def wants(self) -> frozenset[str]:
        """What environment or data must tell, in words: ``state``, ``verdict``, ``reward NAME``, ``fact NAME`` ..."""
        return frozenset()

    @property
    def foresight(self) -> frozenset[Signal]:
        """Signals of the *present* policy that ``plan`` must know of the whole step."""
        return NOTHING

    def plan(self, whole: Whole) -> Mapping[Any, Field]:
        """Columns to put on the batch before a step is cut into micro-batches, keyed by the piece (and a word)."""
        return {}

    def start(self) -> State:
        """What it remembers between steps, at the beginning of a run; read it in ``plan`` as ``whole[self, name]``."""
        return {}

    def advance(self, state: State, whole: Whole) -> State:
        """Its memory after this step."""
        return state

    late = False
    """Whether a batch joins the memory only after it was credited: a tracker must not know what it is to predict."""

    def recall(self, state: State, batch: Batch) -> Mapping[Any, Field]:
        """Its memory as columns that travel with every cut of the batch: BATCH fields under (piece, name)."""
        whole = lambda value: batch.tree.full(BATCH, value, torch.float64)  # noqa: E731
        return {(self, name): whole(value) for name, value in state.items()}

    @property
    def parts(self) -> Iterator[Piece]:
        """This piece and all pieces inside it."""
        yield self
        assert is_dataclass(self), f"{type(self).__name__} must be a dataclass"
        for f in fields(self):
            value = getattr(self, f.name)
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, Piece):
                    yield from inner.parts

    @property
    def needs(self) -> frozenset[Signal]:
        return NOTHING.union(*(p.reads | p.foresight for p in self.parts))

    @property
    def foresees(self) -> frozenset[Signal]:
        return NOTHING.union(*(p.foresight for p in self.parts))

    @property
    def asks(self) -> frozenset[str]:
        return frozenset[str]().union(*(p.wants for p in self.parts))


@dataclass(frozen=True, eq=False)
class Now:
    """One micro-batch under the present weights. ``now[key]`` is live where the forward pass gave it, else from the batch."""

    batch: Batch
    policy: Mapping[Signal, Field]

    def __getitem__(self, key: Any) -> Field:
        return self.policy[key] if key in self.policy else self.batch[key]

    @property
    def logp(self) -> Field:
        return self[Signal.LOGP]


@dataclass(frozen=True, eq=False)
class Whole(Now):
    """The whole of an optimiser step, without gradient. Its ratio exists only for pieces that foresee ``LOGP``."""

    rho: Field | None = None
    adv: Field | None = None

    @property
    def ratio(self) -> Field:
        assert self.rho is not None, "a piece that plans with the ratio must have LOGP in its foresight"
        return self.rho

    @property
    def advantage(self) -> Field:
        assert self.adv is not None
        return self.adv


@dataclass
class Memory:
    """What stateful pieces remember, by their text, and how many batches have been credited. JSON-able."""

    clock: int = 0
    states: dict[str, State] = field(default_factory=dict)

    def of(self, piece: Piece) -> State:
        return self.states.setdefault(repr(piece), piece.start())

    def columns(self, pieces: Iterator[Piece], batch: Batch) -> dict[Any, Field]:
        """What every piece recalls."""
        found: dict[Any, Field] = {}
        for p in pieces:
            if p.start():
                found |= p.recall(self.of(p), batch)
        return found

    def advance(self, pieces: Iterator[Piece], whole: Whole) -> None:
        for p in pieces:
            if p.start():
                self.states[repr(p)] = p.advance(dict(self.of(p)), whole)

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self.clock, "states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock, self.states = int(state["clock"]), {k: dict(v) for k, v in state["states"].items()}


QUIET = {"eps", "cap", "correction", "least"}  # numbers that only matter when someone changed them


def text(value: Any) -> str:
    """A piece as a person would write it: numbers and what is away from its defaults, the first field without its name."""
    if hasattr(type(value), "written"):
        return value.written()
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        inner = ", ".join(map(text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not is_dataclass(value) or isinstance(value, type):
        return f"{value:g}" if isinstance(value, float) else repr(value)
    said: list[str] = []
    for place, f in enumerate(fields(value)):
        found = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        number = isinstance(found, int | float) and not isinstance(found, bool) and f.name not in QUIET
        if number or default is MISSING or found != default:
            said.append(text(found) if place == len(said) == 0 else f"{f.name}={text(found)}")
    return f"{type(value).__name__}({', '.join(said)})"


def check(ok: bool, message: str) -> None:
    """One line at the door of each piece."""
    if not ok:
        raise RecipeError(message)


__all__ = ["NOTHING", "Memory", "Now", "Piece", "State", "Whole", "check", "text"]
