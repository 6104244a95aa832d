"""Tests that attack servers, graders, readers of runs and readers of data: one row for each of their functions."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from trials.outcome import Outcome, Results

TESTS = Path(__file__).parent.parent / "tests"
SUITES = {
    "graders": ("rewards/test_cheats.py", "inspector/test_probe.py"),
    "servers": ("serve/test_front.py", "serve/test_hostile.py", "serve/test_hostile_page.py"),
    "reading a run": ("inspector/test_reading.py",),
    "data that expands": ("data/test_expansion.py",),
}
WITHOUT = {"inspector/test_probe.py": "our_own_rewards or with_a_hole"}  # of these files, such tests alone
SECONDS = 1800.0


def trial(results: Results, progress: Callable[[str], None]) -> Iterator[Outcome]:
    for kind, files in SUITES.items():
        for file in files:
            progress(f"tests of {kind}: {file}")
            yield from _rows(kind, file)


def _rows(kind: str, file: str) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        argv = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"--junitxml={report}", str(TESTS / file)]
        argv += ["-k", WITHOUT[file]] if file in WITHOUT else []
        subprocess.run(argv, capture_output=True, timeout=SECONDS, check=False, cwd=TESTS.parent, env=dict(os.environ))
        if not report.is_file():
            yield Outcome("tests", file, "did not run", "pytest wrote no report", kind=kind)
            return
        functions = dict[tuple[str, str], list[ElementTree.Element]]()
        for case in ElementTree.parse(report).iter("testcase"):
            skipped = case.find("skipped")
            why = "" if skipped is None else skipped.get("message", "")
            functions.setdefault((case.get("name", "").partition("[")[0], why), []).append(case)
        for (name, why), tests in functions.items():
            failed = [case for case in tests if any(case.find(kind) is not None for kind in ("failure", "error"))]
            wrong = [case.get("name", "") for case in failed]
            result, seconds = (f"skipped: {why}" if why else "held"), max(float(case.get("time", 0)) for case in tests)
            fault = f"failed: {', '.join(wrong)[:300]}" if wrong else ""
            yield Outcome("tests", f"{file}: {name}{'; skipped' * bool(why)}", result, fault, seconds, len(tests), kind)


def browser() -> str:
    """The browser that attacks our servers, or what is missing."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None or importlib.util.find_spec("playwright") is None:
        return "no browser: the pages of a browser were not tried"
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
