"""Live progress: a panel on a terminal, an aligned log elsewhere. A listener of the loop's events.

    "stage"   {name, total, of what}            "step"  {stage, step, total, and figures, flat or under "metrics"}
    "message" {text, level}                     "end"   {}

``step`` is the number of steps completed. Never raises on an odd value; knows no figure's meaning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnwise.core.protocols import Listener
from turnwise.observe.metric_names import MISSING, duration, number, text, value

SHOWN: tuple[tuple[str, str, str], ...] = (  # figure, label, format
    ("success", "success", ".1%"),
    ("reward", "reward", ".3f"),
    ("turns", "turns", ".2f"),
    ("tool_errors", "tool err", ".2f"),
    ("entropy", "entropy", ".3f"),
    ("clip", "clipped", ".1%"),
    ("tokens_per_second", "tok/s", ",.0f"),
)
SHOWN_OF_IMITATION: tuple[tuple[str, str, str], ...] = (  # nobody acts, so there is nothing to succeed in
    ("loss", "loss", ".3f"),
    ("entropy", "entropy", ".3f"),
    ("tokens_per_second", "tok/s", ",.0f"),
)
BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {"warning": "yellow", "error": "bold red"}


def show_progress(console: Console | None = None, every_steps: int = 1, every_seconds: float = 2.0) -> Listener:
    """The panel when ``console`` is a terminal, else the log: a line each ``every_steps`` steps or so many seconds."""
    console = console or Console()
    return LivePanel(console) if console.is_terminal else PlainLog(console, every_steps, every_seconds)


def sparkline(values: list[float | None], width: int = 30) -> str:
    """
    >>> sparkline([0.0, 0.5, None, 1.0])
    '▁▅ █'
    """
    recent = values[-width:]
    known = [seen for seen in recent if seen is not None]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(" " if seen is None else BLOCKS[round((seen - low) / span * 7)] for seen in recent)


@dataclass
class _State:
    """What has been heard so far; both displays draw from it."""

    stage: str = "starting"
    step: int = 0
    total: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    successes: list[float | None] = field(default_factory=list)
    began: float = 0.0
    first: int = 0

    def begin(self, facts: Mapping[str, Any]) -> None:
        self.stage, self.total = str(facts.get("name", MISSING)), int(number(facts.get("total")) or 0)
        self.step, self.metrics, self.successes = 0, {}, []
        self.began, self.first = time.monotonic(), -1

    def advance(self, facts: Mapping[str, Any]) -> None:
        self.stage = str(facts.get("stage", self.stage))
        self.step = int(number(facts.get("step")) or 0)
        self.total = int(number(facts.get("total")) or self.total)
        inner = facts.get("metrics")
        self.metrics = inner if isinstance(inner, Mapping) else facts
        self.successes = [*self.successes[-199:], value(self.metrics, "success")]
        if self.first < 0:  # a resumed run starts in the middle: time left is judged by what was done since
            self.first = self.step - 1

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began if self.began else 0.0

    @property
    def left(self) -> float | None:
        done = self.step - max(self.first, 0)
        return None if done <= 0 or not self.total else self.elapsed / done * max(self.total - self.step, 0)

    def cells(self) -> list[tuple[str, str]]:
        acted = any(value(self.metrics, figure) is not None for figure in ("success", "reward"))
        imitated = not acted and value(self.metrics, "loss") is not None
        shown = SHOWN_OF_IMITATION if imitated else SHOWN
        return [(label, text(value(self.metrics, figure), form)) for figure, label, form in shown]


class PlainLog:
    """One aligned line per step, for files and pipes; the header comes with each stage."""

    def __init__(self, console: Console, every_steps: int = 1, every_seconds: float = 2.0) -> None:
        self._console, self._every_steps, self._every_seconds = console, max(every_steps, 1), every_seconds
        self._state, self._last, self._headed = _State(), float("-inf"), False

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "stage":
            self._state.begin(facts)
            self._headed, self._last = False, float("-inf")
            total = f", {self._state.total} {facts.get('of', 'steps')}" if self._state.total else ""
            self._write(f"== {self._state.stage}{total}")
        elif event == "step":
            self._state.advance(facts)
            if self._due():
                self._line()
        elif event == "message":
            level = str(facts.get("level", "info"))
            self._write(("" if level == "info" else f"{level}: ") + str(facts.get("text", "")))

    def _due(self) -> bool:
        """The first and the last step always; between them neither too often nor in lumps."""
        state, now = self._state, time.monotonic()
        soon = now - self._last < self._every_seconds or state.step % self._every_steps
        if soon and not (state.step == state.first + 1 or state.step == state.total):
            return False
        self._last = now
        return True

    def _line(self) -> None:
        cells = [*self._state.cells(), ("elapsed", duration(self._state.elapsed)), ("left", duration(self._state.left))]
        if not self._headed:
            self._headed = True
            self._write(f"{'step':>11}" + "".join(f"{label:>10}" for label, _ in cells))
        of = f"/{self._state.total}" if self._state.total else ""
        self._write(f"{f'{self._state.step}{of}':>11}" + "".join(f"{cell:>10}" for _, cell in cells))

    def _write(self, line: str) -> None:
        # plain text: no markup of a message is interpreted, no line is folded at a guessed width
        self._console.print(Text(line), soft_wrap=True, highlight=False)


class LivePanel:
    """One panel, redrawn in place; messages scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._console, self._state = console, _State()
        self._live: Live | None = None

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "stage":
            self._state.begin(facts)
            self._draw()
        elif event == "step":
            self._state.advance(facts)
            self._draw()
        elif event == "message":
            style = STYLES.get(str(facts.get("level", "info")), "")
            self._console.print(Text(str(facts.get("text", "")), style=style))
        elif event == "end" and self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self.render)
            self._live.start()
        self._live.refresh()

    def render(self) -> RenderableType:
        state = self._state
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column()
        head.add_column(ratio=1)
        head.add_column(justify="right")
        of = f"{state.step}/{state.total}" if state.total else str(state.step)
        bar = ProgressBar(total=max(state.total, 1), completed=min(state.step, state.total), width=None)
        head.add_row(Text(of, "bold"), bar, Text(f"{duration(state.elapsed)} gone, {duration(state.left)} left"))
        grid = Table.grid(expand=True, padding=(0, 1))
        cells = state.cells()
        for _ in cells:
            grid.add_column(justify="center", ratio=1)
        grid.add_row(*(Text(label, "dim") for label, _ in cells))
        grid.add_row(*(Text(cell, "bold") for _, cell in cells))
        parts: list[RenderableType] = [head, Text(), grid]
        if line := sparkline(state.successes, 60):
            parts += [Text(), Text.assemble(("success ", "dim"), (line, "green"))]
        return Panel(Group(*parts), title=Text(state.stage), title_align="left", border_style="blue", padding=(0, 1))
