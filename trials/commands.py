"""Runs one `turnwise` command in a process of its own, with a time limit, and classifies how it ended.

The processes are forked from a server that has imported everything, so an attempt takes a fraction of a second.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trials.outcome import Outcome

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["turnwise.training.trainer", "turnwise.cli.main", "trials.warm"])
LONGEST_MESSAGE = 1500  # characters of an error: a refusal is a sentence or two, not a page


def run_command(argv: Sequence[str], folder: Path, seconds: float) -> tuple[int | None, str, str, float]:
    """Exit status (None: still running at the limit), standard output, standard error, time taken."""
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    process = FORKS.Process(target=command, args=(list(argv), str(folder), str(out), str(err)))
    began = time.monotonic()
    process.start()
    process.join(seconds)
    status = process.exitcode
    if process.is_alive():
        process.kill()
        process.join()
        status = None
    texts = [path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "" for path in (out, err)]
    return status, texts[0], texts[1], time.monotonic() - began


def command(argv: list[str], folder: str, out: str, err: str) -> None:
    """What the process of a command does."""
    os.chdir(folder)
    os.setsid()
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    from turnwise.cli.main import main

    status = main(argv)
    try:
        sys.stdout.flush()
    except OSError:  # the command closed it; multiprocessing would flush it again and print a traceback of its own
        sys.stdout = io.StringIO()
    sys.exit(status)


def classify(part: str, name: str, ended: tuple[int | None, str, str, float], expect: str) -> Outcome:
    """``expect``: "refused", "ran", or "either". A traceback, a crash and a hang are faults in any case."""
    status, out, err, seconds = ended
    result, fault = "refused", ""
    if status is None:
        return Outcome(part, name, "hung", f"still running after {seconds:.0f} s", seconds)
    if "Traceback (most recent call last)" in err + out:
        return Outcome(part, name, "traceback", err.strip().splitlines()[-1][:300], seconds)
    if status == 0:
        result = "ran"
    elif status == 1 and out.strip():  # a check that found problems
        return Outcome(part, name, "reported", "" if expect == "either" else f"expected {expect}", seconds)
    elif status != 2:
        return Outcome(part, name, "died", f"exit status {status}: {err.strip()[-200:]!r}", seconds)
    elif "turnwise: " not in err:
        fault = f"no message: {err.strip()[-200:]!r}"
    elif len(err.rpartition("turnwise: ")[2]) > LONGEST_MESSAGE:
        fault = "the message is longer than a page"
    if expect != "either" and result != expect:
        fault = fault or f"expected {expect}; {(err or out).strip()[-200:]!r}"
    return Outcome(part, name, result, fault, seconds)
