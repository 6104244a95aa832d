"""What the command line prints at the end: tables, transcripts, suggested commands. Computes nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise.core.text import printable, printable_line
from turnwise.observe.report import comparison, format_measure, table

SUGGESTED_METHODS = ("gspo", "grpo")  # suggest the first that was not just run
COUNTS = ("turns", "tool_calls", "tool_errors", "tokens_per_turn")
INDENT = " " * 20  # of the facts of an environment
OWN = "Your own: --env module:Class or --env file.py:Class,key=value; `turnwise check-env` tests it"
UNLESS_ZERO = {"truncated_turns": "truncated turns", "truncated": "truncated episodes", "failed": "failed episodes"}


def console() -> Console:
    """As wide as the terminal; without one, wide enough for a table."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=120)


def measures(evaluation: Mapping[str, Any], other: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An evaluation as the rows of a table, which stands beside ``other``.

    Success has a row for each difficulty; reward has them only where neither evaluation reports success. Shares of what
    went wrong are rows only if they are not zero in one of the two."""
    both = (evaluation, other or {})
    has_success = any(e.get("success") is not None for e in both)
    out = _outcomes(evaluation, "success", "interval")
    out |= _outcomes(evaluation, "reward", "reward_interval", by_difficulty=not has_success)
    out |= {f"reward: {name}": _bounded(e, "mean", "interval") for name, e in evaluation.get("rewards", {}).items()}
    out |= evaluation.get("exact", {})
    out |= {name.replace("_", " "): evaluation[name] for name in COUNTS if name in evaluation}
    notable = [name for name in UNLESS_ZERO if any(e.get(name) for e in both)]
    return out | {UNLESS_ZERO[name]: evaluation.get(name, 0.0) for name in notable}


def _outcomes(evaluation: Mapping[str, Any], name: str, interval: str, by_difficulty: bool = True) -> dict[str, Any]:
    """One measure over all tasks and by difficulty; nothing if the evaluation does not have it."""
    if evaluation.get(name) is None:
        return {}
    out = {name: _bounded(evaluation, name, interval)}
    levels = evaluation["by_difficulty"] if by_difficulty else {}
    return out | {f"{name}, difficulty {d}": _bounded(e, name, interval) for d, e in levels.items() if len(levels) > 1}


def _bounded(measured: Mapping[str, Any], name: str, interval: str) -> dict[str, Any]:
    low, high = measured.get(interval) or (None, None)
    return {"estimate": measured[name], "low": low, "high": high}


def show_summary(summary: Mapping[str, Any]) -> None:
    out = console()
    before, after = summary["success_before"], summary["success_after"]
    evaluated_on = f"{after['tasks']} {summary.get('measured', 'held-out tasks')}"
    title = f"{summary['method']} on {summary['environment']}, {evaluated_on} (95 % intervals)"
    out.print()
    if after["tasks"]:
        out.print(table(comparison(measures(before, after), measures(after, before)), title))
    else:
        out.print(f"{summary['method']} on {summary['environment']}, not evaluated (--eval-tasks 0)", markup=False)
    for when, note in {"before": before.get("note"), "after": after.get("note")}.items():
        if note:
            out.print(printable(f"{when}: {note}"), markup=False)
    if ranking := summary.get("ranking"):
        # how likely the model finds the answers of a file that it was not trained on
        logp = f"{ranking['before']['logp']:.3f} → {ranking['after']['logp']:.3f} log-probability a token"
        groups = f"{ranking['after']['groups']:.0f} held-out groups of the file"
        out.print(f"{groups}: {logp} of the answers to learn", markup=False)
    run = Path(summary["run"])
    out.print(printable((run / "transcripts.md").read_text(encoding="utf-8")), markup=False)
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds"].items())
    out.print(
        f"{summary['steps']} steps, {summary['tokens']:,} sampled tokens; {times}; peak {summary['peak_memory_mb']:.0f} MB"
    )
    for who, counts in summary.get("asked", {}).items():
        failed = f", {counts['failed']} without an answer" * bool(counts["failed"])
        out.print(f"{who}: {counts['questions']} questions, {counts['calls']} requests{failed}", markup=False)
    if told := summary.get("mechanism"):
        out.print(f"mechanism: {told}", markup=False, soft_wrap=True)
    if saved := summary.get("checkpoints"):
        out.print(f"{saved['written']} checkpoints of {saved['seconds_each']:.2f} s each", markup=False)
    if (cost := summary.get("measured_after")) and cost["seconds"]:
        what = "log-probabilities measured again after each step"
        out.print(f"{what}: {cost['seconds']:.1f} s, {cost['share']:.1%} of the steps (--remeasure-tokens 0: off)")
    if "exactness" in summary:
        from turnwise.rollout.certificate import certificate_lines  # late: only runs of agents need the ledger

        out.print("exactness of the agent's calls:")
        for line in certificate_lines(summary["exactness"]):
            out.print(f"  {line}", markup=False, soft_wrap=True)
    for message in summary.get("messages", ()):
        when = f" at step {message['step']}, before the run was resumed" if message.get("earlier") else ""
        out.print(printable(f"warning{when}: {message['text']}"), markup=False, soft_wrap=True)
    out.print(
        f"curves: {run / 'curves.png'}   model: {run / 'model'}   run directory: {run}", soft_wrap=True, markup=False
    )
    out.print("\nNext:")
    method, env = summary["method"], summary["environment"]
    other = next(name for name in SUGGESTED_METHODS if name != method)
    harder = "--difficulty 3" if env == "calculator" else "--split train"
    again = f"turnwise train {other} --env {env} --seed {summary['seed'] + 1}"
    if env == "prompts":  # rows and rewards are in the run's own settings
        again = f"turnwise config {summary['run']} > run.yaml; turnwise train --config run.yaml --name NEW"
    measure = f"turnwise eval {summary['run']} --eval-samples 4 {harder}"
    for command in (measure, f"turnwise diff {method} {other}", again):
        out.print(f"  {command}", soft_wrap=True, markup=False)


def show_evaluation(evaluation: Mapping[str, Any]) -> None:
    out = Table(
        title=f"{evaluation['who']} on {evaluation['environment']} ({evaluation['split']})", title_justify="left"
    )
    out.add_column("measure")
    out.add_column("value", justify="right")
    for name, value in measures(evaluation).items():
        out.add_row(Text(printable_line(name)), format_measure(value))
    for kind in ("pass@k", "majority@k"):
        for k, value in evaluation.get(kind, {}).items():
            out.add_row(kind.replace("k", k), f"{value:.3f}")
    console().print(out)
    if evaluation.get("note"):
        console().print(printable(evaluation["note"]), markup=False)


def show_evaluations(evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Two evaluations on the same tasks, side by side."""
    first, second = evaluations
    title = f"{first['environment']} ({first['split']}), {first['tasks']} tasks (95 % intervals)"
    out = Table(title=title, title_justify="left")
    out.add_column("measure")
    for evaluation in evaluations:
        out.add_column(Text(printable_line(evaluation["who"])), justify="right", overflow="fold")
    ours, theirs = measures(first, second), measures(second, first)
    for name in dict.fromkeys([*ours, *theirs]):
        cells = [format_measure(column[name]) if name in column else "" for column in (ours, theirs)]
        out.add_row(Text(printable_line(name)), *cells)
    console().print(out)
    for evaluation in evaluations:
        if evaluation.get("note"):
            console().print(printable(f"{evaluation['who']}: {evaluation['note']}"), markup=False)


def show_methods(rows: Sequence[Mapping[str, Any]], long: bool = False) -> None:
    """The methods by family: one line each, as wide as the terminal; all facts if ``long``."""
    out = console()
    family = ""
    for row in rows:
        if row["family"] != family:
            family = row["family"]
            out.print(f"\n{family}: {row['about']}", style="bold", highlight=False)
        if not long:
            line = f"  {row['method']:<20}  {row['idea']}"
            out.print(line if len(line) <= out.width else f"{line[: out.width - 2]} …", markup=False)
            continue
        indent = " " * 24
        name = f"  {row['method']:<22}"
        out.print(textwrap.fill(row["idea"], out.width, initial_indent=name, subsequent_indent=indent), highlight=False)
        facts = f"{row['kind']} · {row['arxiv']} · changes {row['changes vs grpo']} · needs {row['needs']}"
        facts += f" · confident of {row['sure of']}"
        lines = textwrap.fill(facts, out.width, initial_indent=indent, subsequent_indent=indent)
        out.print(lines, style="dim", highlight=False, markup=False)
    out.print(
        f"\n{len(rows)} methods, all facts with --long; `turnwise explain NAME` describes one, `turnwise diff A B` compares two"
    )


def show_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with the same keys as a table."""
    out = Table(title=title, title_justify="left", header_style="bold")
    for name in rows[0] if rows else ():
        out.add_column(name, overflow="fold")
    for row in rows:
        out.add_row(*(Text(printable(value)) for value in row.values()))
    console().print(out)


def show_environments(rows: Sequence[Mapping[str, Any]]) -> None:
    """Two lines for each environment: what it is, what it offers."""
    out = console()

    def line(text: str, first: str = INDENT, style: str = "") -> None:
        wrapped = textwrap.fill(text, out.width, initial_indent=first, subsequent_indent=INDENT)
        out.print(wrapped, style=style, highlight=False, markup=False)

    for row in rows:
        line(row["about"], f"{'  ' + row['environment'] + ' ':<{len(INDENT)}}")
        if row["kind"] == "family":
            line(
                f"installed; {row['example']}" if row["installed"] else f"not installed: {row['install']}", style="dim"
            )
            continue
        turns = "–".join(map(str, dict.fromkeys((min(row["turns"]), max(row["turns"])))))
        facts = [
            f"difficulties {', '.join(map(str, row['difficulties']))}",
            f"at most {turns} turns",
            f"tools: {', '.join(row['tools'])}" if row["tools"] else "no tools",
            f"offers {', '.join(row['offers'])}" if row["offers"] else "",
        ]
        line(" · ".join(filter(None, facts)), style="dim")
    out.print(f"\n{OWN}", markup=False)


def show_experience(rows: Sequence[Mapping[str, str]]) -> None:
    """Names and ideas, by slot."""
    width = max(len(row["name"]) for row in rows)
    for slot in dict.fromkeys(row["slot"] for row in rows):
        print(f"--{slot} NAME")
        for row in (r for r in rows if r["slot"] == slot):
            head = f"  {row['name']:<{width}}  "
            print(textwrap.fill(row["idea"], 118, initial_indent=head, subsequent_indent=" " * len(head)))
        print()
    print("`turnwise explain NAME` shows formula, paper, deviations and arguments; NAME,key=value sets them.")
