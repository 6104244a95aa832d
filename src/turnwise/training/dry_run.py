"""A dry run: a few real steps in a temporary folder, and what they say about the whole run. Imports no engine."""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import Listener

SETS = ("steps", "eval_tasks", "trackers")
STEPS, EVAL_TASKS = 3, 8  # the first step warms up and is not counted
GIB = 1 << 30


@dataclass
class StepTimes:
    """A listener that keeps the seconds of every step, and passes events on."""

    listen: Listener
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by stage

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "step" and "seconds" in facts:
            self.seconds.setdefault(str(facts["stage"]), []).append(float(facts["seconds"]))
        self.listen(event, facts)


def dry_run(train: Callable[..., dict[str, Any]], listen: Listener, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of ``train`` with at most ``STEPS`` steps, and under ``estimate`` what to expect of the whole run."""
    asked = Settings.of({name: settings[name] for name in SETS if name in settings})  # refused as in a real run
    values = dict(settings)
    with tempfile.TemporaryDirectory() as folder:
        tasks = EVAL_TASKS if asked.eval_tasks else 0
        values |= {"out": folder, "name": "dry", "steps": min(STEPS, asked.steps), "eval_tasks": tasks, "trackers": ()}
        times = StepTimes(listen)
        summary = train(times, **values)
    return {**summary, "estimate": estimate(asked, summary, times.seconds.get("learn", []), tasks)}


def estimate(asked: Settings, summary: Mapping[str, Any], steps: list[float], tasks: int) -> dict[str, float]:
    """Seconds of one step, of both evaluations and of the whole run; the peak of memory so far, in GiB."""
    each = statistics.median(steps[1:] or steps or [0.0])
    stages = summary.get("seconds", {})
    evaluations = sum(stages.get(f"evaluate {when}", 0.0) for when in ("before", "after"))
    evaluations *= asked.eval_tasks / tasks if tasks else 0.0
    return {
        "steps": asked.steps,
        "seconds_per_step": each,
        "seconds_of_evaluations": evaluations,
        "seconds_of_run": each * asked.steps + evaluations,
        "peak_memory_gib": peak_memory() / GIB,
    }


def peak_memory() -> float:
    """Bytes: reserved on the GPU where there is one, else of this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return float(torch.cuda.max_memory_reserved())
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def describe(expected: Mapping[str, float]) -> str:
    """The estimate in words."""
    each, run, evaluations = (expected[f"seconds_{name}"] for name in ("per_step", "of_run", "of_evaluations"))
    return (
        f"estimate: {each:.2f} s a step, {_span(run)} for {expected['steps']:.0f} steps with {_span(evaluations)} of "
        f"evaluations, after the cold start; peak memory so far {expected['peak_memory_gib']:.1f} GiB. "
        "Longer episodes take more of both"
    )


def _span(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.4 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
