"""Kinds of methods: which question of the algebra a paper answers anew. A family declares one, a method may declare another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

Build = TypeVar("Build", bound=Callable[..., object])


class Kind(StrEnum):
    """The four kinds that ``turnwise list`` groups methods by."""

    OBJECTIVE = "objective"
    CREDIT = "credit"
    DATA = "data"
    PREFERENCE = "preference"

    @property
    def meaning(self) -> str:
        """One line for a person."""
        return _MEANINGS[self]


_MEANINGS = {
    Kind.OBJECTIVE: "how far the policy may move, and what the loss averages over",
    Kind.CREDIT: "who gets the credit; combines with any objective: --credit",
    Kind.DATA: "learns from other data too: demonstrations, replay, a teacher",
    Kind.PREFERENCE: "learns from pairs of a better and a worse answer",
}


def declares(kind: Kind) -> Callable[[Build], Build]:
    """Mark one method of a family as being of another kind than its family's ``KIND``."""

    def mark(build: Build) -> Build:
        build.kind = kind  # type: ignore[attr-defined]
        return build

    return mark


def kind_of(build: Callable[..., object]) -> Kind:
    """The kind of a recipe function: its own, else its family's."""
    own: Kind | None = getattr(build, "kind", None)
    return own if own is not None else sys.modules[build.__module__].KIND
