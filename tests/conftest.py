"""What every test run shares: one torch thread a process, reproducible properties, markers, and a summary of what was skipped.

Tiers (see the Makefile): ``make test`` runs everything. ``make quick`` leaves out ``slow``, ``integration``, ``gpu`` and
``thorough`` tests. ``thorough`` is set here: a property over random inputs (hypothesis), and the files in ``THOROUGH``.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

# Before torch is imported. One worker runs on each core, so a second thread in any of them only waits for a core; and sums
# are split by thread, so results must not depend on how many cores a machine has. Child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

# On a developer's machine hypothesis looks for new counterexamples; a gate must give the same answer twice. No deadlines:
# an example that waits for a busy machine is not wrong.
settings.register_profile("search", deadline=None)
settings.register_profile("gate", deadline=None, derandomize=True)
settings.load_profile("gate" if os.environ.get("CI") else "search")

THOROUGH = ("oracles/test_",)  # many seeds of every oracle: they check the oracles, not the package
INTEGRATION = ("integrations/test_trl", "integrations/test_verl.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""
        if path.startswith(THOROUGH) or hasattr(getattr(item, "obj", None), "hypothesis"):
            item.add_marker("thorough")
        if path.startswith(INTEGRATION):
            item.add_marker("integration")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reasons for skipped tests, the most frequent first, with the files they are in."""
    reasons: Counter[str] = Counter()
    files: dict[str, set[str]] = defaultdict(set)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        reasons[reason] += 1
        files[reason].add(report.nodeid.split("::")[0])
    if reasons:
        terminalreporter.section(f"{reasons.total()} skipped")
    for reason, count in reasons.most_common():
        names = sorted(files[reason])
        where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        terminalreporter.line(f"{count:5}  {reason}  ({where})")
