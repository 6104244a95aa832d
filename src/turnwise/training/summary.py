"""What a finished run leaves: its summary, its curves, one task before and after, and the card of its model. Measures nothing."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings, default_of
from turnwise.core.text import printable_line
from turnwise.errors import TurnwiseError
from turnwise.models.fetch import KNOWN
from turnwise.observe.charts import curves
from turnwise.observe.mechanism import mechanism
from turnwise.observe.report import transcript
from turnwise.observe.trackers import read_rows
from turnwise.recipes import catalogue
from turnwise.rewards.judge import AnswerCache
from turnwise.rollout.certificate import certificate_lines
from turnwise.store.atomic import atomic_write
from turnwise.store.rundir import RunDir
from turnwise.training.rewards import CACHE

CARD, PICTURE = "README.md", "curves.png"
LOCAL = ("out", "name", "trackers", "device", "threads", "profile")  # settings that say nothing about the model
LOAD_MODEL = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_ID")
tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_ID")
"""
LOAD_ADAPTER = """\
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained("FOLDER_OR_ID")
"""


@dataclass(frozen=True)
class RunSummary:
    """``before`` and ``after`` are evaluations as the run directory holds them: a summary, and one row per task."""

    run_dir: RunDir
    settings: Settings
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    def write(self, facts: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
        """Write summary, curves and transcripts to the run directory; return the summary. ``facts`` come from the engines."""
        s, rows, measured = self.settings, read_rows(self.run_dir.metrics), "held-out tasks"
        if not s.eval_tasks:
            measured = "held-out pairs, ranked" if self.after["summary"]["tasks"] else "nothing: --eval-tasks 0"
        summary = {
            "run": str(self.run_dir.path),
            "method": s.title,
            "environment": s.env,
            "seed": s.seed,
            "measured": measured,
            # the summary's own "tokens" are those of training
            "success_before": {name: value for name, value in self.before["summary"].items() if name != "tokens"},
            "success_after": {name: value for name, value in self.after["summary"].items() if name != "tokens"},
            "steps": s.steps,
            "tokens": int(sum(row.get("tokens", 0) for row in rows)),
            "mechanism": mechanism(rows),
            # what it costs to know how far tokens moved: seconds, and the share of all steps
            "measured_after": _cost(rows, "seconds/measured_after"),
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
        text = ""
        for title, row in (("Before RL", b), ("After RL", a)):
            verdict = "solved" if row["success"] else "failed"
            verdict = f"reward {row.get('reward', 0.0):g}" if row["success"] is None else verdict
            text += f"## {title}: {verdict}\n\n{transcript(row['messages'])}\n{self._reasons(row)}\n"
        head = f"# One held-out task, before and after\n\n`{printable_line(b['task'])}`"
        self.run_dir.transcripts.write_text(f"{head}\n\n{text[:-1]}", encoding="utf-8")

    def _reasons(self, row: Mapping[str, Any]) -> str:
        """The named rewards of an episode, and what the judge said of it."""
        lines = [f"reward {printable_line(name)}: {value:g}" for name, value in row.get("rewards", {}).items()]
        if (path := self.run_dir.path / CACHE).is_file():
            with contextlib.closing(AnswerCache(path)) as cache:
                verdict = cache.verdict(transcript=row["messages"])
            lines += [f"the judge: {printable_line(verdict.reason)}"] if verdict and verdict.reason else []
        return "".join(f"- {line}\n" for line in lines) + "\n" * bool(lines)


def _cost(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Seconds of a part of the steps, and its share of their seconds."""
    part, whole = (sum(row.get(key) or 0.0 for row in rows) for key in (name, "seconds"))
    return {"seconds": round(part, 2), "share": round(part / whole, 4) if whole else 0.0}


def evaluation_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The result of an evaluation as metrics of a step: success where it is reported, reward, and each named reward."""
    named = {name: measured["mean"] for name, measured in summary.get("rewards", {}).items()}
    outcomes = {"success": summary["success"], "reward": summary.get("reward")}
    metrics = {f"eval/{name}": value for name, value in outcomes.items() if value is not None}
    metrics |= {f"eval/{name}": value for name, value in summary.get("exact", {}).items()}
    return metrics | {f"eval/reward/{name}": value for name, value in named.items()}


def _outcome(row: Mapping[str, Any]) -> float:
    """Success of an episode, or its reward where no success is reported."""
    return float(row["success"]) if row["success"] is not None else float(row.get("reward", 0.0))


# ------------------------------------------------------------------- the model card


def write_cards(run_dir: RunDir, settings: Settings, summary: Mapping[str, Any]) -> None:
    """Write the card into every model folder of the run, with the picture of its curves."""
    for folder in (run_dir.model, run_dir.adapter):
        if folder.is_dir():
            if run_dir.curves.is_file():
                shutil.copyfile(run_dir.curves, folder / PICTURE)
            with atomic_write(folder / CARD) as path:
                path.write_text(card(settings, summary, folder), encoding="utf-8")


def card(settings: Settings, summary: Mapping[str, Any], folder: Path) -> str:
    """The text of the card. ``folder``: that of the model, or of its adapter."""
    is_adapter, base = (folder / "adapter_config.json").is_file(), settings.model.name
    licence = base_licence(base)
    front = ["---", "library_name: " + ("peft" if is_adapter else "transformers"), "pipeline_tag: text-generation"]
    front += [f"license: {licence}"] * bool(licence)
    front += [f"base_model: {base}"] * ("/" in base and not Path(base).exists())  # a Hub id, not a folder
    exactness = [f"- {line}\n" for line in certificate_lines(summary["exactness"])] if "exactness" in summary else []
    changed = [
        f"| `{f.name}` | `{printable_line(str(getattr(settings, f.name)))}` |\n"
        for f in fields(settings)
        if f.name not in LOCAL and getattr(settings, f.name) != default_of(f)
    ]
    limits = [
        f"- It was trained and measured on `{printable_line(settings.env)}` only; nothing is known about other tasks.",
        f"- One run, one seed ({summary['seed']}); the intervals do not cover the spread between runs.",
        "- Rewards can be gamed: read transcripts before you rely on the numbers.",
    ]
    if settings.model.tiny:
        limits.append(
            "- A model of about a million parameters with a vocabulary made for this environment. It speaks no language."
        )
    elif not licence:
        limits.append("- The licence of the base model is not known here; look it up before you pass this model on.")
    parts = [
        "\n".join([*front, "tags:", "- turnwise", "- reinforcement-learning", "---\n"]),
        f"# {printable_line(str(settings.model))} trained with {settings.title} on {printable_line(settings.env)}\n",
        f"Trained by Turnwise for {summary['steps']} steps, seed {summary['seed']}, "
        f"{summary['tokens']} sampled tokens.\n",
        "## Method\n\n" + _method(settings),
        "## Result\n\n" + _result(summary),
        "## Exactness of the agent's calls\n\n" + "".join(exactness) if exactness else "",
        f"![Curves of the run]({PICTURE})\n" if (folder / PICTURE).is_file() else "",
        f"## How to load\n\n```python\n{LOAD_ADAPTER if is_adapter else LOAD_MODEL}```\n",
        "## Settings\n\nThose that differ from their defaults:\n\n| setting | value |\n|---|---|\n" + "".join(changed),
        "## Limits\n\n" + "\n".join(limits) + "\n",
    ]
    return "\n".join(part for part in parts if part)


def base_licence(model: str) -> str:
    """The licence of the model that training began with, if its folder or our list of models names one; else empty."""
    if model in KNOWN:
        return KNOWN[model].about.split(",")[-1].strip().lower()
    readme = Path(model) / CARD
    if not readme.is_file():
        return ""
    match = re.search(
        r"^license:\s*['\"]?([\w.-]+)", readme.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )
    return match[1] if match else ""


def _method(settings: Settings) -> str:
    try:
        described = catalogue.describe_method(settings.method, settings.credit)
    except TurnwiseError:  # a recipe of one's own
        return f"`{settings.title}`, a recipe that was given to the run.\n"
    rows = [f"**{settings.title}**: {described['idea']}"]
    if described.get("paper"):
        rows.append(f"Paper: {described['paper']}")
    slots = "\n".join(f"| {slot} | `{piece}` |" for slot, piece in described["slots"].items())
    equation = "$$J = \\operatorname{aggregate}\\left(\\operatorname{gate}(\\rho, A) \\cdot A - \\sum_j \\lambda_j P_j\\right)$$"
    return "\n\n".join(rows) + f"\n\n{equation}\n\nwith\n\n| slot | piece |\n|---|---|\n{slots}\n"


def _result(summary: Mapping[str, Any]) -> str:
    rows = ["| | before | after |", "|---|---|---|"]
    before, after = summary["success_before"], summary["success_after"]
    for name, interval in (("success", "interval"), ("reward", "reward_interval")):
        if before.get(name) is not None and after.get(name) is not None:
            cells = []
            for values in (before, after):
                bounds = values.get(interval)
                shown = f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if isinstance(bounds, list | tuple) else ""
                cells.append(f"{values[name]:.3f}{shown}")
            rows.append(f"| {name} | {cells[0]} | {cells[1]} |")
    measured = f"Measured on {summary['measured']}"
    return f"{measured}, {after.get('tasks', 0)} of them; intervals cover 95 %.\n\n" + "\n".join(rows) + "\n"
