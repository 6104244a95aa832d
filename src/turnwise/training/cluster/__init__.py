"""A run on a Ray cluster: actors that sample, learn and play environments, and the driver that starts and watches them. Here are
the names by which a restarted driver or learner finds them. Imports no ray."""

from __future__ import annotations

import hashlib
from pathlib import Path

NAMESPACE = "turnwise"
LEARNER, GENERATOR, ENVIRONMENT = "learner", "generator", "environment"


def run_key(path: Path) -> str:
    """Names the run of a directory."""
    whole = path.resolve()
    return f"{whole.name}-{hashlib.sha256(str(whole).encode()).hexdigest()[:8]}"


def actor_name(kind: str, key: str, number: int = 0) -> str:
    """``actor_name("generator", "first-1a2b3c4d", 2)`` is ``generator-2@first-1a2b3c4d``."""
    return f"{kind}-{number}@{key}"


def number_of(name: str, kind: str, key: str) -> int | None:
    """The number of an actor of this kind and run; None for the name of another."""
    head, _, rest = name.partition("@")
    mine, _, number = head.rpartition("-")
    return int(number) if (mine, rest) == (kind, key) and number.isdigit() else None
