"""Kinds of methods: which part of the algebra a paper changes. A family declares one, a method may declare another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

Build = TypeVar("Build", bound=Callable[..., object])


class Kind(StrEnum):
    """The four kinds by which ``turnwise list`` groups methods."""

    OBJECTIVE = "objective"
    CREDIT = "credit"
    DATA = "data"
    PREFERENCE = "preference"

    @property
    def meaning(self) -> str:
        """One line for the user."""
        return _MEANINGS[self]


_MEANINGS = {
    Kind.OBJECTIVE: "ratio, clipping or trust region, and what the loss averages over",
    Kind.CREDIT: "credit assignment; combines with any objective: --credit",
    Kind.DATA: "learns from further data: demonstrations, replay, a teacher",
    Kind.PREFERENCE: "learns from pairs of a chosen and a rejected answer",
}


def declares(kind: Kind) -> Callable[[Build], Build]:
    """Decorator: the method is of another kind than its family's ``KIND``."""

    def mark(build: Build) -> Build:
        build.kind = kind  # type: ignore[attr-defined]
        return build

    return mark


def kind_of(build: Callable[..., object]) -> Kind:
    """The kind of a recipe function: its own, else its family's; a user's recipe that declares none is an objective."""
    declared: Kind | None = getattr(build, "kind", None)
    family: Kind = getattr(sys.modules[build.__module__], "KIND", Kind.OBJECTIVE)
    return declared if declared is not None else family
