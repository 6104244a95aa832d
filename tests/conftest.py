"""What every test run shares: one torch thread a process, reproducible properties, markers, and a summary of what was skipped.

Tiers (see the Makefile): ``make test`` runs everything. ``make quick`` leaves out ``slow``, ``integration``, ``gpu`` and
``thorough`` tests. ``thorough`` is set here, on properties over random inputs (hypothesis) and on the files in ``THOROUGH``,
and by hand on sweeps over all methods elsewhere.
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
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

# On a developer's machine hypothesis looks for new counterexamples; a gate must give the same answer twice. No deadlines:
# an example that waits for a busy machine is not wrong.
settings.register_profile("search", deadline=None)
settings.register_profile("gate", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gate" if os.environ.get("CI") else "search")

THOROUGH = (  # whole files, by how their path begins: the oracles' own tests, sweeps over methods, training runs, sandboxes
    "oracles/", "bench/test_bench", "experiments/", "training/test_every_method", "training/test_other_data",
    "training/test_one_file_grpo", "observe/test_profile", "credit/test_others", "credit/test_preferences",
    "engines/test_cuda", "engines/test_gauges", "engines/test_critics", "engines/test_asking", "engines/test_hidden",
    "engines/test_candidates", "environments/test_players", "examples/", "integrations/test_verl_fit",
    "training/test_interrupt", "training/test_killed_run", "tools/test_misbehaviour", "tools/test_python", "tools/test_escape",
    "tools/test_scratch", "tools/test_attacks",
    "test_docs",
)  # fmt: skip
INTEGRATION = ("integrations/test_trl", "integrations/test_verl.py")
NO_GPU = {"no GPU", "needs a GPU"}  # reasons to skip a test that only a GPU can run


def path_in_tests(path: Path) -> str:
    root = Path(__file__).parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which the quick tier runs nothing: that halves the time until its first test."""
    quick = "not thorough" in (config.option.markexpr or "")
    return True if quick and path_in_tests(collection_path).startswith(THOROUGH) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = path_in_tests(item.path)
        if path.startswith(THOROUGH) or getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("thorough")
        if path.startswith(INTEGRATION):
            item.add_marker("integration")
        if any(mark.kwargs.get("reason") in NO_GPU for mark in item.iter_markers("skipif")):
            item.add_marker("gpu")


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
