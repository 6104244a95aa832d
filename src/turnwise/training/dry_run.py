"""A dry run: a few real steps in a temporary folder, and what they say about the whole run. Imports no engine.

With staleness k the first k + 1 steps train on the first wave of rollouts and wait for nothing but its first groups; the last
k + 1 find fewer and fewer rollouts beside them. So a dry run takes 3 (k + 1) steps, and the middle ones say what a step takes.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import Listener
from turnwise.engines.sharded.torchrun import torchrun_rank

SETS = ("steps", "eval_tasks", "eval_every", "trackers", "staleness", "checkpoint_every")
STEPS = 3  # of a synchronous run: the first warms up and is not counted
MAX_STEPS = 33  # whatever the staleness
EVAL_TASKS = 128  # tasks are played side by side: fewer would take nearly as long as these
GIB = 1 << 30


def descendants(root: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes below ``root``, at any depth. None where the system has no ``/proc``."""
    children: dict[int, list[int]] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])  # a name may hold blanks
        except (OSError, IndexError, ValueError):
            continue  # it has just ended
        children.setdefault(parent, []).append(int(folder.name))
    below, left = list[int](), [root]
    while left:
        nearest = children.get(left.pop(), [])
        below += nearest
        left += nearest
    return below


def process_bytes(process: int, proc: Path = Path("/proc")) -> int:
    """What one process takes: pages that several share are divided among them."""
    try:
        lines = (proc / str(process) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class ChildMemory:
    """While entered, looks at the processes below this one: its own generator, ranks of the learner, tools. ``peak`` is the most
    that they took together, in bytes."""

    def __init__(self, interval: float = 0.25) -> None:
        self.interval, self.peak = interval, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="child memory")

    def __enter__(self) -> ChildMemory:
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self.interval):
            self.peak = max(self.peak, sum(process_bytes(process) for process in descendants(os.getpid())))


@dataclass
class StepTimes:
    """A listener that keeps the seconds of every step, and passes events on. Between steps it looks how much of a GPU is in
    use, by whomever, if the run has processes of its own."""

    listen: Listener
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by stage
    children: ChildMemory | None = None
    device_bytes: int = 0

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "step" and self.children is not None and self.children.peak and uses_gpu():
            free, total = sys.modules["torch"].cuda.mem_get_info()
            self.device_bytes = max(self.device_bytes, int(total - free))
        if event == "step" and "seconds" in facts:
            self.seconds.setdefault(str(facts["stage"]), []).append(float(facts["seconds"]))
        self.listen(event, facts)


def dry_run(train: Callable[..., dict[str, Any]], listen: Listener, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of ``train`` with a few steps, and under ``estimate`` what to expect of the whole run."""
    wanted = Settings.of({name: settings[name] for name in SETS if name in settings})  # refused as in a real run
    values = dict(settings)
    with tempfile.TemporaryDirectory(dir=_shared_folder(str(settings.get("out", wanted.out)))) as folder:
        tasks = min(EVAL_TASKS, wanted.eval_tasks)
        steps = min(wanted.steps, MAX_STEPS, STEPS * (wanted.staleness.limit + 1))
        values |= {"out": folder, "name": "dry", "steps": steps, "eval_tasks": tasks, "eval_every": 0, "trackers": ()}
        times = StepTimes(listen)
        with ChildMemory() as children:
            times.children = children
            summary = train(times, **values)
    expected = estimate(wanted, summary, times.seconds.get("learn", []), tasks)
    return {**summary, "estimate": expected | memory_figures(children.peak, times.device_bytes)}


def _shared_folder(out: str) -> str | None:
    """Where the ranks of torchrun, perhaps on several machines, see the checkpoints of the trial; None: any folder."""
    if torchrun_rank() is None:
        return None
    os.makedirs(out, exist_ok=True)
    return out


def estimate(wanted: Settings, summary: Mapping[str, Any], steps: Sequence[float], tasks: int) -> dict[str, float]:
    """Seconds of one step, of all evaluations and of the whole run: the steps taken, and as many more as were asked for."""
    # the steps of which the rest of a run consists: without those on the first wave, and without the last
    ahead = wanted.staleness.limit
    middle = steps[ahead + 1 : 2 * (ahead + 1)] if ahead else steps[1:]
    each = statistics.mean(middle or steps[1:] or steps or [0.0])
    stages = summary.get("seconds", {})
    during = len(range(wanted.eval_every, wanted.steps, wanted.eval_every)) if wanted.eval_every else 0
    evaluations = sum(stages.get(f"evaluate {when}", 0.0) for when in ("before", "after")) * (1 + during / 2)
    evaluations *= wanted.eval_tasks / tasks if tasks else 0.0
    saved = summary.get("checkpoints", {}).get("seconds_each", 0.0) * (1 + wanted.steps // wanted.checkpoint_every)
    return {
        "steps": wanted.steps,
        "seconds_per_step": each,
        "seconds_of_evaluations": evaluations,
        "seconds_of_run": sum(steps) + each * max(0, wanted.steps - len(steps)) + evaluations + saved,
    }


def memory_figures(children: int, device_bytes: int = 0) -> dict[str, float]:
    """The peak so far, in GiB, and how much of it the processes took that the run started."""
    on_device = uses_gpu()
    here = peak_memory()
    # on a GPU the children's share is in what the device has in use; on a CPU it is beside this process
    peak = max(here, device_bytes) if on_device else here + children
    return {"peak_memory_gib": peak / GIB, "child_memory_gib": 0.0 if on_device else children / GIB}


def uses_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def peak_memory() -> float:
    """Bytes: reserved on the GPU where there is one, else of this process."""
    if uses_gpu():
        return float(sys.modules["torch"].cuda.max_memory_reserved())
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def describe(expected: Mapping[str, float]) -> str:
    """The estimate in words."""
    each, run, evaluations = (expected[f"seconds_{name}"] for name in ("per_step", "of_run", "of_evaluations"))
    children = expected.get("child_memory_gib", 0.0)
    whose = f" ({children:.1f} of it in processes that the run starts)" if children >= 0.05 else ""
    return (
        f"estimate: {each:.2f} s a step, {_span(run)} for {expected['steps']:.0f} steps with {_span(evaluations)} of "
        f"evaluations, after the cold start; peak memory so far {expected['peak_memory_gib']:.1f} GiB{whose}. "
        "Longer episodes take more of both"
    )


def _span(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.4 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
