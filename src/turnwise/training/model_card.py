"""The model card of a run: ``README.md`` beside the trained model, made from the summary. Measures nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings, default_of
from turnwise.core.text import printable_line
from turnwise.errors import TurnwiseError
from turnwise.models.fetch import KNOWN
from turnwise.recipes import catalogue
from turnwise.store.atomic import atomic_write
from turnwise.store.rundir import RunDir
from turnwise.training.certificate import certificate_lines

CARD, PICTURE = "README.md", "curves.png"
LOCAL = ("out", "name", "trackers", "device", "threads", "profile")  # settings that say nothing about the model


def write_cards(run_dir: RunDir, settings: Settings, summary: Mapping[str, Any]) -> None:
    """Write the card into every model folder of the run, with the picture of its curves."""
    for folder in (run_dir.model, adapter_folder(run_dir)):
        if folder.is_dir():
            if run_dir.curves.is_file():
                shutil.copyfile(run_dir.curves, folder / PICTURE)
            with atomic_write(folder / CARD) as path:
                path.write_text(card(settings, summary, folder), encoding="utf-8")


def adapter_folder(run_dir: RunDir) -> Path:
    return run_dir.adapter


def card(settings: Settings, summary: Mapping[str, Any], folder: Path) -> str:
    """The text of the card. ``folder``: that of the model, or of its adapter."""
    is_adapter = (folder / "adapter_config.json").is_file()
    parts = [
        _front_matter(settings, is_adapter),
        f"# {printable_line(str(settings.model))} trained with {settings.title} on {printable_line(settings.env)}\n",
        f"Trained by Turnwise for {summary['steps']} steps, seed {summary['seed']}, "
        f"{summary['tokens']} sampled tokens.\n",
        "## Method\n\n" + _method(settings),
        "## Result\n\n" + _result(summary),
        _exactness(summary),
        f"![Curves of the run]({PICTURE})\n" if (folder / PICTURE).is_file() else "",
        "## How to load\n\n" + _how_to_load(is_adapter),
        "## Settings\n\nThose that differ from their defaults:\n\n" + _settings(settings),
        "## Limits\n\n" + _limits(settings, summary),
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


def _front_matter(settings: Settings, is_adapter: bool) -> str:
    lines = ["---", "library_name: " + ("peft" if is_adapter else "transformers"), "pipeline_tag: text-generation"]
    if licence := base_licence(settings.model.name):
        lines.append(f"license: {licence}")
    base = settings.model.name
    if "/" in base and not Path(base).exists():
        lines.append(f"base_model: {base}")
    return "\n".join([*lines, "tags:", "- turnwise", "- reinforcement-learning", "---\n"])


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
            cells = [_number(each, name, interval) for each in (before, after)]
            rows.append(f"| {name} | {cells[0]} | {cells[1]} |")
    measured = f"Measured on {summary['measured']}"
    return f"{measured}, {after.get('tasks', 0)} of them; intervals cover 95 %.\n\n" + "\n".join(rows) + "\n"


def _exactness(summary: Mapping[str, Any]) -> str:
    """How exactly an agent's calls were followed, where one played."""
    lines = [f"- {line}" for line in certificate_lines(summary["exactness"])] if "exactness" in summary else []
    return "## Exactness of the agent's calls\n\n" + "\n".join(lines) + "\n" if lines else ""


def _number(values: Mapping[str, Any], name: str, interval: str) -> str:
    bounds = values.get(interval)
    text = f"{values[name]:.3f}"
    return f"{text} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if isinstance(bounds, list | tuple) else text


def _how_to_load(is_adapter: bool) -> str:
    if is_adapter:
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            'model = AutoPeftModelForCausalLM.from_pretrained("FOLDER_OR_ID")',
        ]
    else:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            'model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_ID")',
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_ID")',
        ]
    return "```python\n" + "\n".join(lines) + "\n```\n"


def _settings(settings: Settings) -> str:
    rows = []
    for f in fields(settings):
        value = getattr(settings, f.name)
        if f.name not in LOCAL and value != default_of(f):
            rows.append(f"| `{f.name}` | `{printable_line(str(value))}` |")
    return "| setting | value |\n|---|---|\n" + "\n".join(rows) + "\n"


def _limits(settings: Settings, summary: Mapping[str, Any]) -> str:
    lines = [
        f"- It was trained and measured on `{printable_line(settings.env)}` only; nothing is known about other tasks.",
        f"- One run, one seed ({summary['seed']}); the intervals do not cover the spread between runs.",
        "- Rewards can be gamed: read transcripts before you rely on the numbers.",
    ]
    if not settings.model.tiny and not base_licence(settings.model.name):
        lines.append("- The licence of the base model is not known here; look it up before you pass this model on.")
    if settings.model.tiny:
        lines.append(
            "- A model of about a million parameters with a vocabulary made for this environment. It speaks no language."
        )
    return "\n".join(lines) + "\n"
