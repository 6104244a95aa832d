"""Whether Python code that comes with a model may run: never, unless this process was told so.

The permission is no setting: it is in no configuration and in no run directory, so a run that needs it must be given it again
when it is resumed. Nobody is asked interactively. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

FLAG = "--trust-remote-code"
_trusted = False  # of the process, not of a context: a run may load its model in another thread


def remote_code_is_trusted() -> bool:
    return _trusted


@contextmanager
def trust_remote_code(allowed: bool = True) -> Iterator[None]:
    """Inside, code that comes with a model may run."""
    global _trusted
    previous, _trusted = _trusted, allowed
    try:
        yield
    finally:
        _trusted = previous
