"""What every test run shares: one torch thread a process, reproducible properties, markers, and a summary of what was skipped.

Tiers (see the Makefile). A test belongs to ``make test`` unless something says otherwise:

- ``thorough``: only in ``make thorough``. Set by hand, and here on the files of ``THOROUGH`` and on ``slow`` tests,
  unless they say ``slow(tier="test")``: one whole run of each kind.
- ``property``: draws examples (hypothesis). Set here. ``make test`` runs a few examples of each, the same every time; ``make
  thorough`` runs as many as the test says, new ones every time. What it finds becomes an ``@example``.
- ``make quick`` leaves out both, and ``slow``, ``integration`` and ``gpu``.
"""

from __future__ import annotations

import os
import sys
import tempfile
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
# servers write their tokens there, and child processes find them
_STATE = tempfile.TemporaryDirectory(prefix="turnwise-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

from support.finished_runs import Finished, finished_run  # noqa: E402

# A gate gives the same answer twice; the search for new counterexamples is `make thorough`. No deadlines: an example that
# waits for a busy machine is not wrong.
FEW = 4  # examples of a property in `make test`, whatever it says itself
BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("test", max_examples=FEW, derandomize=True, **BUSY)
settings.register_profile("thorough", max_examples=15, print_blob=True, **BUSY)
settings.load_profile("test")

THOROUGH = (  # whole files, by how their path begins: the oracles' own tests, sweeps over methods, training runs, sandboxes
    "oracles/", "bench/test_bench", "experiments/", "training/test_other_data",
    "training/test_one_file_grpo", "observe/test_profile",
    "engines/test_cuda", "engines/test_gauges", "engines/test_critics", "engines/test_asking", "engines/test_hidden",
    "engines/test_candidates", "environments/test_players", "examples/",
    "training/test_interrupt", "training/test_killed_run", "tools/test_misbehaviour", "tools/test_python", "tools/test_escape",
    "tools/test_scratch", "tools/test_attacks",
)  # fmt: skip
INTEGRATION = ("integrations/test_trl", "integrations/test_verl.py")
NO_GPU = {"no GPU", "needs a GPU"}  # reasons to skip a test that only a GPU can run


def path_in_tests(path: Path) -> str:
    root = Path(__file__).parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which a tier runs nothing."""
    quick = "not thorough" in (config.option.markexpr or "")
    return True if quick and path_in_tests(collection_path).startswith(THOROUGH) else None


def draw_few(test: object) -> None:
    """Lower the number of examples that a property asks for. hypothesis lets no one else change it once it is written."""
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None and own.max_examples > FEW:
        test.__dict__["_hypothesis_internal_use_settings"] = settings(own, max_examples=FEW, derandomize=True)


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    searching = config.getoption("--hypothesis-profile", None) == "thorough"
    for item in items:
        path = path_in_tests(item.path)
        slow = item.get_closest_marker("slow")
        if path.startswith(THOROUGH) or (slow and slow.kwargs.get("tier") != "test"):
            item.add_marker("thorough")
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
            if not searching:
                draw_few(getattr(item.obj, "__func__", item.obj))
        if path.startswith(INTEGRATION):
            item.add_marker("integration")
        if any(mark.kwargs.get("reason") in NO_GPU for mark in item.iter_markers("skipif")):
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Runs that are trained once for all test processes, to be read only: ``finished("grpo")`` (support/finished_runs.py)."""
    base = tmp_path_factory.getbasetemp()
    # with several test processes each has a folder inside one that they share
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    return lambda name: finished_run(shared / "finished_runs", name)


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
