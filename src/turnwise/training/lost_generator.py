"""Where a run learns that nothing samples for it any more. Knows no engine."""

from __future__ import annotations

from turnwise.core.protocols import Generator


def raise_if_lost(generator: Generator) -> None:
    """Stop where the servers of a generator are gone, before the episodes that this ended are counted as failed."""
    fatal = getattr(generator, "fatal", None)
    if fatal is not None:
        raise fatal
