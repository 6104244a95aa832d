"""Progress and results inside a notebook, and the choice of a display for a call from Python.

IPython is imported only where it is running. Does not know what a metric means.
"""

from __future__ import annotations

import html
import io
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise.core.protocols import Listener
from turnwise.core.text import printable
from turnwise.errors import SettingError
from turnwise.observe.progress import LivePanel, show_progress

WIDTH = 100  # columns of the panel


def default_display() -> Listener | None:
    """A display for somebody who watches: in a notebook or on a terminal. None where nobody does."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if hasattr(shell, "kernel"):  # IPython on a terminal has none
        warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm: our own panel shows progress
        return NotebookPanel()
    console = Console()
    return show_progress(console) if console.is_terminal else None


class NotebookPanel(LivePanel):
    """The panel of the terminal as one output of the cell, replaced in place; messages stay below it."""

    def __init__(self) -> None:
        from IPython.display import display

        plain = {"color_system": None, "force_jupyter": False, "force_terminal": False}
        super().__init__(Console(file=io.StringIO(), width=WIDTH, highlight=False, **plain))  # type: ignore[arg-type]
        self._messages: list[str] = []
        self._finished = ""  # the last panel of a stage that took steps
        self._handle = display(_html(""), display_id=True)

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "stage" and self._state.step:
            self._finished = self._rendered()
        if event == "end":
            shown = self._finished or self._rendered()
            return self._handle.update(_html(shown + "\n".join(self._messages)))
        if event != "message":
            return super().__call__(event, facts)
        level = str(facts.get("level", "info"))
        self._messages.append(printable(("" if level == "info" else f"{level}: ") + str(facts.get("text", ""))))
        return self._draw()

    def _draw(self) -> None:
        current = self._rendered() if self._state.step or not self._finished else f"{self._state.stage} ...\n"
        self._handle.update(_html(self._finished + current + "\n".join(self._messages)))

    def _rendered(self) -> str:
        with self._console.capture() as panel:
            self._console.print(self.render())
        return panel.get()


def _html(text: str) -> Any:
    from IPython.display import HTML

    return HTML(f"<pre style='line-height: 1.2'>{html.escape(text)}</pre>")


def show_run(run: str | Path | Mapping[str, Any]) -> None:
    """Show a finished run in a notebook: its result, its curves, one task before and after. ``run`` is its folder or the
    summary that ``train`` returned."""
    try:
        from IPython.display import Image, Markdown, display
    except ImportError as missing:
        raise SettingError("show_run needs IPython: pip install ipython; or read RUN/transcripts.md") from missing
    folder = Path(run["run"] if isinstance(run, Mapping) else run)
    if not (folder / "summary.json").is_file():
        raise SettingError(f"{folder} is not a finished run: it has no summary.json")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    before, after = summary["success_before"], summary["success_after"]
    rows = [
        f"| {name} | {before[name]:.3f} | {after[name]:.3f} |"
        for name in ("success", "reward")
        if before.get(name) is not None and after.get(name) is not None
    ]
    title = f"**{summary['method']} on {summary['environment']}**, {summary['steps']} steps"
    head = [title, "", "| measure | before | after |", "|---|---|---|"] if rows else [title]
    display(Markdown("\n".join([*head, *rows])))
    if (folder / "curves.png").is_file():
        display(Image(filename=str(folder / "curves.png")))
    display(Markdown((folder / "transcripts.md").read_text(encoding="utf-8")))
