"""The summary of a run: its numbers, its curves, one task before and after. Computes no result of its own."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.config.settings import Settings
from turnwise.observe.plot import curves
from turnwise.observe.report import transcript
from turnwise.observe.trackers import read_rows
from turnwise.store.rundir import RunDir

SUMMARY_KEYS = ("success", "interval", "tasks", "samples", "turns", "tool_calls", "tool_errors", "by_difficulty")


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
            "measured": "held-out tasks" if s.eval_tasks else "held-out pairs, ranked",
            "success_before": {name: self.before["summary"][name] for name in SUMMARY_KEYS},
            "success_after": {name: self.after["summary"][name] for name in SUMMARY_KEYS},
            "steps": s.steps,
            "tokens": int(sum(row.get("tokens", 0) for row in rows)),
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
            "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            **facts,
        }
        first = {"step": 0, "eval/success": self.before["summary"]["success"]}
        last = {"step": s.steps, "eval/success": self.after["summary"]["success"]}
        curves([first, *rows, last], self.run_dir.curves, title=f"{s.title} on {s.env}, seed {s.seed}")
        self._transcripts()
        self.run_dir.write_summary(summary)
        return summary

    def _transcripts(self) -> None:
        """A failure before and the same task after, preferably solved."""
        both = list(zip(self.before["rows"], self.after["rows"]))
        if not both:  # measured without tasks
            self.run_dir.transcripts.write_text("")
            return
        pairs = [pair for pair in both if not pair[0]["success"]] or both
        solved = [pair for pair in pairs if pair[1]["success"]] or pairs
        b, a = max(solved, key=lambda pair: len(pair[1]["messages"]))  # the longest shows most
        text = "\n".join(
            f"## {title}: {'solved' if row['success'] else 'failed'}\n\n{transcript(row['messages'])}\n"
            for title, row in (("Before RL", b), ("After RL", a))
        )
        self.run_dir.transcripts.write_text(f"# One held-out task, before and after\n\n`{b['task']}`\n\n{text}")
