"""The summary of a run: its numbers, its curves, one task before and after. Computes no result of its own."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.text import printable_line
from turnwise.observe.charts import curves
from turnwise.observe.report import transcript
from turnwise.observe.trackers import read_rows
from turnwise.rewards.verdict_cache import VerdictCache
from turnwise.store.rundir import RunDir
from turnwise.training.rewards import CACHE

LEFT_OUT = ("tokens",)  # of an evaluation: the summary's own "tokens" are those of training


@dataclass(frozen=True)
class RunSummary:
    """``before`` and ``after`` are evaluations as the run directory holds them: a summary, and one row per task."""

    run_dir: RunDir
    settings: Settings
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    def write(self, facts: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
        """Write summary, curves and transcripts to the run directory; return the summary. ``facts`` come from the engines."""
        s, rows = self.settings, read_rows(self.run_dir.metrics)
        summary = {
            "run": str(self.run_dir.path),
            "method": s.title,
            "environment": s.env,
            "seed": s.seed,
            "measured": self._measured(),
            "success_before": _without(self.before["summary"], LEFT_OUT),
            "success_after": _without(self.after["summary"], LEFT_OUT),
            "steps": s.steps,
            "tokens": int(sum(row.get("tokens", 0) for row in rows)),
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
            "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            **facts,
        }
        first = {"step": 0, **evaluation_metrics(self.before["summary"])}
        last = {"step": s.steps, **evaluation_metrics(self.after["summary"])}
        curves([first, *rows, last], self.run_dir.curves, title=f"{s.title} on {s.env}, seed {s.seed}")
        self._transcripts()
        self.run_dir.write_summary(summary)
        return summary

    def _measured(self) -> str:
        if self.settings.eval_tasks:
            return "held-out tasks"
        return "held-out pairs, ranked" if self.after["summary"]["tasks"] else "nothing: --eval-tasks 0"

    def _transcripts(self) -> None:
        """A failure before and the same task after, preferably solved; by reward where no success is reported."""
        both = list(zip(self.before["rows"], self.after["rows"]))
        if not both:  # measured without tasks
            self.run_dir.transcripts.write_text("", encoding="utf-8")
            return
        pairs = [pair for pair in both if not pair[0]["success"]] or both
        gains = [_outcome(after) - _outcome(before) for before, after in pairs]
        improved = [pair for pair, gain in zip(pairs, gains) if gain == max(gains)]
        b, a = max(improved, key=lambda pair: len(pair[1]["messages"]))  # the longest shows most
        text = "\n".join(
            f"## {title}: {_verdict(row)}\n\n{transcript(row['messages'])}\n{self._reasons(row)}"
            for title, row in (("Before RL", b), ("After RL", a))
        )
        head = f"# One held-out task, before and after\n\n`{printable_line(b['task'])}`"
        self.run_dir.transcripts.write_text(f"{head}\n\n{text}", encoding="utf-8")

    def _reasons(self, row: Mapping[str, Any]) -> str:
        """The named rewards of an episode, and what the judge said of it."""
        lines = [f"reward {printable_line(name)}: {value:g}" for name, value in row.get("rewards", {}).items()]
        if (path := self.run_dir.path / CACHE).is_file():
            with contextlib.closing(VerdictCache(path)) as cache:
                verdict = cache.on_messages(row["messages"])
            lines += [f"the judge: {printable_line(verdict.reason)}"] if verdict and verdict.reason else []
        return "".join(f"- {line}\n" for line in lines) + "\n" * bool(lines)


def evaluation_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The result of an evaluation as metrics of a step: success where it is reported, reward, and each named reward."""
    named = {name: measured["mean"] for name, measured in summary.get("rewards", {}).items()}
    outcomes = {"success": summary["success"], "reward": summary.get("reward")}
    metrics = {f"eval/{name}": value for name, value in outcomes.items() if value is not None}
    metrics |= {f"eval/{name}": value for name, value in summary.get("exact", {}).items()}
    return metrics | {f"eval/reward/{name}": value for name, value in named.items()}


def _without(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _outcome(row: Mapping[str, Any]) -> float:
    """Success of an episode, or its reward where no success is reported."""
    return float(row["success"]) if row["success"] is not None else float(row.get("reward", 0.0))


def _verdict(row: Mapping[str, Any]) -> str:
    if row["success"] is None:
        return f"reward {row.get('reward', 0.0):g}"
    return "solved" if row["success"] else "failed"
