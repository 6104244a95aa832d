"""Where a command's output goes: progress to the console, and with ``--json`` nothing but JSON to standard output."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from turnwise.core.protocols import Listener
from turnwise.core.text import printable


@contextlib.contextmanager
def stdout_reserved(reserved: bool) -> Iterator[None]:
    """While entered, what anybody writes to standard output goes to standard error: environments, libraries, C code and child
    processes included. So that the JSON a command prints afterwards is all that standard output carries."""
    if not reserved:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr), _descriptor_redirected():
        yield


@contextlib.contextmanager
def _descriptor_redirected() -> Iterator[None]:
    """File descriptor 1 as a copy of 2; nothing where the process has no such descriptors."""
    # `redirect_stdout` moves Python's own prints only; C code and child processes write to the descriptor
    try:
        _flush()
        saved = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        _flush()
        os.dup2(saved, 1)
        os.close(saved)


def _flush() -> None:
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Listener]:
    """The progress display; on standard error when standard output is reserved for JSON."""
    from rich.console import Console

    from turnwise.observe.progress import show_progress

    class RunConsole(Console):
        def on_broken_pipe(self) -> None:
            # rich would leave with status 1. Nobody reads what the run prints, and it keeps its messages: it goes on
            self.quiet = True

    with stdout_reserved(quiet):
        listen = show_progress(RunConsole(stderr=quiet, highlight=False))
        try:
            yield listen
        finally:
            listen("end", {})


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def show(report: Any, as_json: bool) -> None:
    """A report that knows itself as words and as data."""
    print_json(report.as_dict()) if as_json else print(printable(report.text()))
