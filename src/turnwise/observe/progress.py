"""Live progress: a panel on a terminal, an aligned log elsewhere. Listens to the loop's events.

    "stage"   {name, total, of what}            "step"  {stage, step, total, and metrics, flat or under "metrics"}
    "message" {text, level}                     "end"   {}

``step`` is the number of steps completed. Never raises on an unexpected value; does not know what a metric means.
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
from turnwise.core.text import printable, printable_line
from turnwise.observe.numbers import MISSING, finite_number, format_duration, format_number

COLUMNS: tuple[tuple[str, str, str], ...] = (  # metric, label, format
    ("success", "success", ".1%"),
    ("reward", "reward", ".3f"),
    ("turns", "turns", ".2f"),
    ("tool_errors", "tool err", ".2f"),
    ("entropy", "entropy", ".3f"),
    ("clip_share", "clipped", ".1%"),
    ("tokens_per_second", "tok/s", ",.0f"),
)
# without rollouts there is no success rate
SUPERVISED_COLUMNS = (("loss", "loss", ".3f"), *(c for c in COLUMNS if c[0] in ("entropy", "tokens_per_second")))
BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {"warning": "yellow", "error": "bold red"}


def show_progress(console: Console | None = None, every_steps: int = 1, every_seconds: float = 2.0) -> Listener:
    """The panel when ``console`` is a terminal, else the log: a line every ``every_steps`` steps or so many seconds."""
    console = console or Console()
    return LivePanel(console) if console.is_terminal else PlainLog(console, every_steps, every_seconds)


def sparkline(values: list[float | None], width: int = 30) -> str:
    """
    >>> sparkline([0.0, 0.5, None, 1.0])
    '▁▅ █'
    """
    recent = values[-width:]
    numbers = [value for value in recent if value is not None]
    if not numbers:
        return ""
    low, span = min(numbers), (max(numbers) - min(numbers)) or 1.0
    return "".join(" " if value is None else BLOCKS[round((value - low) / span * 7)] for value in recent)


@dataclass
class _Progress:
    """The state of the run from the events so far; both displays show it."""

    stage: str = "starting"
    step: int = 0
    total: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    successes: list[float | None] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    started: float = 0.0
    first: int = 0

    def start_stage(self, facts: Mapping[str, Any]) -> None:
        self.stage, self.total = str(facts.get("name", MISSING)), int(finite_number(facts.get("total")) or 0)
        self.step, self.metrics, self.successes, self.rewards = 0, {}, [], []
        self.started, self.first = time.monotonic(), -1

    def advance(self, facts: Mapping[str, Any]) -> None:
        self.stage = str(facts.get("stage", self.stage))
        self.step = int(finite_number(facts.get("step")) or 0)
        self.total = int(finite_number(facts.get("total")) or self.total)
        inner = facts.get("metrics")
        self.metrics = inner if isinstance(inner, Mapping) else facts
        self.successes = [*self.successes[-199:], finite_number(self.metrics.get("success"))]
        self.rewards = [*self.rewards[-199:], finite_number(self.metrics.get("reward"))]
        if self.first < 0:  # a resumed run starts in the middle: estimate the remaining time from the steps since
            self.first = self.step - 1

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started if self.started else 0.0

    @property
    def remaining(self) -> float | None:
        done = self.step - max(self.first, 0)
        return None if done <= 0 or not self.total else self.elapsed / done * max(self.total - self.step, 0)

    @property
    def reports_success(self) -> bool:
        """Whether any recent step had a success rate: an environment may report rewards only."""
        return any(value is not None for value in self.successes)

    def cells(self) -> list[tuple[str, str]]:
        success, reward, loss = (finite_number(self.metrics.get(name)) for name in ("success", "reward", "loss"))
        supervised = success is None and reward is None and loss is not None  # there are no rollouts
        reported = [column for column in COLUMNS if column[0] != "success" or self.reports_success]
        columns = SUPERVISED_COLUMNS if supervised else reported
        numbers = [finite_number(self.metrics.get(metric)) for metric, _, _ in columns]
        return [(label, format_number(value, spec)) for value, (_, label, spec) in zip(numbers, columns)]


class PlainLog:
    """One aligned line per step, for files and pipes; each stage starts with a header."""

    def __init__(self, console: Console, every_steps: int = 1, every_seconds: float = 2.0) -> None:
        self._console, self._every_steps, self._every_seconds = console, max(every_steps, 1), every_seconds
        self._state, self._last = _Progress(), float("-inf")
        self._header: list[str] = []  # labels of the columns printed last

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        if event == "stage":
            self._state.start_stage(facts)
            self._header, self._last = [], float("-inf")
            total = f", {self._state.total} {facts.get('of', 'steps')}" if self._state.total else ""
            self._write(f"== {self._state.stage}{total}")
        elif event == "step":
            state, now = self._state, time.monotonic()
            state.advance(facts)
            too_soon = now - self._last < self._every_seconds or state.step % self._every_steps
            # the first and the last step are always printed
            if too_soon and not (state.step == state.first + 1 or state.step == state.total):
                return
            self._last = now
            times = (("elapsed", format_duration(state.elapsed)), ("left", format_duration(state.remaining)))
            cells = [*state.cells(), *times]
            labels = [label for label, _ in cells]
            if self._header != labels:
                self._header = labels
                self._write(f"{'step':>11}" + "".join(f"{label:>10}" for label in labels))
            of = f"/{state.total}" if state.total else ""
            self._write(f"{f'{state.step}{of}':>11}" + "".join(f"{cell:>10}" for _, cell in cells))
        elif event == "message":
            level = str(facts.get("level", "info"))
            self._write(("" if level == "info" else f"{level}: ") + str(facts.get("text", "")))

    def _write(self, line: str) -> None:
        # plain text: do not interpret markup in messages, do not wrap lines at a guessed width
        self._console.print(Text(printable(line)), soft_wrap=True, highlight=False)


class LivePanel:
    """One panel, redrawn in place; messages scroll above it."""

    def __init__(self, console: Console) -> None:
        self._console, self._state = console, _Progress()
        self._live: Live | None = None

    def __call__(self, event: str, facts: Mapping[str, Any]) -> None:
        if event in ("stage", "step"):
            self._state.start_stage(facts) if event == "stage" else self._state.advance(facts)
            self._draw()
        elif event == "message":
            style = STYLES.get(str(facts.get("level", "info")), "")
            self._console.print(Text(printable(facts.get("text", "")), style=style))
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
        times = f"{format_duration(state.elapsed)} elapsed, {format_duration(state.remaining)} left"
        bar = ProgressBar(total=max(state.total, 1), completed=min(state.step, state.total), width=None)
        head.add_row(Text(of, "bold"), bar, Text(times))
        grid = Table.grid(expand=True, padding=(0, 1))
        cells = state.cells()
        for _ in cells:
            grid.add_column(justify="center", ratio=1)
        grid.add_row(*(Text(label, "dim") for label, _ in cells))
        grid.add_row(*(Text(cell, "bold") for _, cell in cells))
        parts: list[RenderableType] = [head, Text(), grid]
        name, values = ("success", state.successes) if state.reports_success else ("reward", state.rewards)
        if line := sparkline(values, 60):
            parts += [Text(), Text.assemble((f"{name} ", "dim"), (line, "green"))]
        title = Text(printable_line(state.stage))
        return Panel(Group(*parts), title=title, title_align="left", border_style="blue", padding=(0, 1))
