"""What the command line prints at the end: tables, transcripts, suggested commands. Computes nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from turnwise.observe.report import comparison, table

SUGGESTED_METHODS = ("gspo", "grpo")  # suggest the first that was not just run


def console() -> Console:
    """As wide as the terminal; without one, wide enough for a table."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=120)


def measures(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation as the rows of a comparison."""
    bounded = lambda e: {"estimate": e["success"], "low": e["interval"][0], "high": e["interval"][1]}  # noqa: E731
    out: dict[str, Any] = {"success": bounded(evaluation)}
    if len(evaluation["by_difficulty"]) > 1:
        out |= {f"success, difficulty {d}": bounded(e) for d, e in evaluation["by_difficulty"].items()}
    return out | {name.replace("_", " "): evaluation[name] for name in ("turns", "tool_calls", "tool_errors")}


def show_summary(summary: Mapping[str, Any]) -> None:
    out = console()
    before, after = summary["success_before"], summary["success_after"]
    evaluated_on = f"{after['tasks']} {summary.get('measured', 'held-out tasks')}"
    title = f"{summary['method']} on {summary['environment']}, {evaluated_on} (95 % intervals)"
    out.print()
    out.print(table(comparison(measures(before), measures(after)), title))
    run = Path(summary["run"])
    out.print((run / "transcripts.md").read_text(encoding="utf-8"), markup=False)
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds"].items())
    out.print(
        f"{summary['steps']} steps, {summary['tokens']:,} sampled tokens; {times}; peak {summary['peak_memory_mb']:.0f} MB"
    )
    out.print(f"curves: {run / 'curves.png'}   model: {run / 'model'}   run directory: {run}", soft_wrap=True)
    out.print("\nNext:")
    for command in next_commands(summary):
        out.print(f"  {command}", soft_wrap=True)


def next_commands(summary: Mapping[str, Any]) -> list[str]:
    method, env = summary["method"], summary["environment"]
    other = next(name for name in SUGGESTED_METHODS if name != method)
    harder = "--difficulty 3" if env == "calculator" else "--split train"
    return [
        f"turnwise eval {summary['run']} --eval-samples 4 {harder}",
        f"turnwise diff {method} {other}",
        f"turnwise train {other} --env {env} --seed {summary['seed'] + 1}",
    ]


def show_evaluation(evaluation: Mapping[str, Any]) -> None:
    out = Table(
        title=f"{evaluation['who']} on {evaluation['environment']} ({evaluation['split']})", title_justify="left"
    )
    out.add_column("measure")
    out.add_column("value", justify="right")
    for name, value in measures(evaluation).items():
        bounded = isinstance(value, Mapping)
        out.add_row(
            name, f"{value['estimate']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]" if bounded else f"{value:.2f}"
        )
    for kind in ("pass@k", "majority@k"):
        for k, value in evaluation.get(kind, {}).items():
            out.add_row(kind.replace("k", k), f"{value:.3f}")
    console().print(out)


def show_methods(rows: Sequence[Mapping[str, Any]]) -> None:
    """The methods by family: two lines each, as wide as the terminal."""
    out = console()
    family = ""
    for row in rows:
        if row["family"] != family:
            family = row["family"]
            out.print(f"\n{family}: {row['about']}", style="bold", highlight=False)
        indent = " " * 24
        name = f"  {row['method']:<22}"
        out.print(textwrap.fill(row["idea"], out.width, initial_indent=name, subsequent_indent=indent), highlight=False)
        facts = f"{row['kind']} · {row['arxiv']} · changes {row['changes vs grpo']} · needs {row['needs']}"
        facts += f" · confident of {row['sure of']}"
        lines = textwrap.fill(facts, out.width, initial_indent=indent, subsequent_indent=indent)
        out.print(lines, style="dim", highlight=False, markup=False)
    out.print(f"\n{len(rows)} methods; `turnwise explain NAME` describes one, `turnwise diff A B` compares two")


def show_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with the same keys as a table."""
    out = Table(title=title, title_justify="left", header_style="bold")
    for name in rows[0] if rows else ():
        out.add_column(name, overflow="fold")
    for row in rows:
        out.add_row(*map(str, row.values()))
    console().print(out)
