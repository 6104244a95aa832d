"""The command line. Nothing is computed here: commands read their flags, call one function, and print."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from turnwise import __version__
from turnwise.cli.flags import Parser, add_settings, settings_from, value_of
from turnwise.config.settings import Settings, default_of
from turnwise.core.protocols import Listener
from turnwise.errors import SettingError, TurnwiseError, nearest

COMMANDS = {
    "train": "train an agent (all settings: turnwise train --help)",
    "resume": "go on with a stopped run",
    "eval": "evaluate a run, a model or a scripted player on held-out tasks",
    "list": "all methods",
    "explain": "one method: equation, paper, slots, settings",
    "diff": "the slots in which two methods differ",
    "check-env": "play an environment and say what is wrong with it",
    "export": "episodes of a run, or of an environment's players, as rows to learn from",
    "model": "fetch a real model by name, or list those that can be had",
    "bench": "how fast generation, learning and whole steps are here, beside others and beside the limit",
}


def train(argv: Sequence[str]) -> int:
    from turnwise import recipes

    method = (
        argv[0]
        if argv and not argv[0].startswith("-")
        else default_of(next(f for f in fields(Settings) if f.name == "method"))
    )
    recipes.method(method)
    credit = value_of(argv, "--credit")
    if credit:
        recipes.method(credit)
    parser = Parser(prog=f"turnwise train {method}", description="Train an agent.", allow_abbrev=False)
    parser.add_argument("method", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument(
        "--dry-run", action="store_true", help="validate, build one real batch, take one step, keep nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_settings(parser, method, credit)
    space = parser.parse(argv)
    if space.method not in (None, method):  # found behind a flag: its own flags were not known when they were read
        raise SettingError(f"write the method first: turnwise train {space.method} ...")
    chosen = settings_from(space, method, credit)
    from turnwise.cli import display
    from turnwise.training import api

    with shown(space.json) as listen:
        summary = (api.dry_run if space.dry_run else api.train)(listen, **chosen)
    if space.json:
        print(json.dumps(summary, indent=1))
    elif space.dry_run:
        print("dry run: settings, environment, model, one batch and one update are all right; nothing was kept")
    else:
        display.show_summary(summary)
    return 0


def resume(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise resume", description="Go on with a stopped run.", allow_abbrev=False)
    parser.add_argument("run", help="its directory")
    parser.add_argument("--json", action="store_true")
    space = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.training import api

    with shown(space.json) as listen:
        summary = api.resume(space.run, listen)
    print(json.dumps(summary, indent=1)) if space.json else display.show_summary(summary)
    return 0


def evaluate(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise eval", description="Evaluate on held-out tasks.", allow_abbrev=False)
    parser.add_argument("run", nargs="?", default="", help="a run directory; or give --model, or --player")
    parser.add_argument("--player", default="", help="oracle, random or demonstrator instead of a model")
    parser.add_argument("--split", default="held_out", help="held_out or train")
    parser.add_argument("--json", action="store_true")
    method = default_of(next(f for f in fields(Settings) if f.name == "method"))
    add_settings(parser, method)
    space = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.training.evaluate import evaluate_policy

    found = evaluate_policy(space.run, space.player, space.split, settings_from(space, method))
    print(json.dumps(found, indent=1)) if space.json else display.show_evaluation(found)
    return 0


def list_methods(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise list", description="All methods.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    space = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.recipes import catalogue

    rows = catalogue.method_rows()
    print(json.dumps(rows, indent=1)) if space.json else display.show_methods(rows)
    return 0


def explain(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise explain", description="One method.", allow_abbrev=False)
    parser.add_argument("method")
    parser.add_argument("--credit", default="", help="with the credit of another method")
    parser.add_argument("--json", action="store_true")
    space = parser.parse(argv)
    from turnwise import recipes
    from turnwise.recipes import catalogue

    if space.json:
        print(json.dumps(catalogue.describe_method(space.method, space.credit), indent=1))
        return 0
    recipe = catalogue.parse_method(space.method, space.credit)
    for name in filter(None, (space.method, space.credit)):
        signature = ", ".join(f"{n}={p.default}" for n, p in recipes.parameters(name).items())
        print(f"{name}({signature})\n\n{inspect.getdoc(recipes.method(name))}\n")
    print(f"Slots of {space.method} with the credit of {space.credit}" if space.credit else "Slots")
    width = max(map(len, recipe.slots()))
    for slot, piece in recipe.slots().items():
        print(textwrap.fill(piece, 118, initial_indent=f"  {slot:<{width}}  ", subsequent_indent=" " * (width + 4)))
    print(f"\nNeeds: {', '.join(sorted(recipe.objective.signals))}")
    if recipe.requirements:
        print(f"Must be told: {', '.join(sorted(recipe.requirements))}")
    return 0


def diff(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise diff", description="The slots in which two methods differ.", allow_abbrev=False)
    parser.add_argument("left")
    parser.add_argument("right")
    parser.add_argument("--json", action="store_true")
    space = parser.parse(argv)
    from turnwise.recipes import catalogue

    rows = catalogue.slot_differences(space.left, space.right)
    if space.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print(f"{space.left} and {space.right} do not differ in any slot")
    width = max((len(r["slot"]) for r in rows), default=0)
    for r in rows:
        print(f"{r['slot']:<{width}}  {r[space.left]}  →  {r[space.right]}")
    return 0


def check_env(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="turnwise check-env", description="Play an environment and say what is wrong.", allow_abbrev=False
    )
    parser.add_argument("environment", help="module:Class or a built-in name")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    space = parser.parse(argv)
    from turnwise import environments
    from turnwise.environments.checker.check import check_env as check

    found = check(environments.load(space.environment), space.episodes)
    if space.json:
        print(
            json.dumps({"ok": found.ok, "problems": list(found.problems), "warnings": list(found.warnings)}, indent=1)
        )
    else:
        print(found.text())
    return 0 if found.ok else 1


def export(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise export", description="Episodes as rows to learn from.", allow_abbrev=False)
    parser.add_argument("source", help="a run's directory; or an environment, whose own players then play")
    parser.add_argument("file", help="a new .jsonl file")
    parser.add_argument(
        "--as", dest="form", default="pairs", help="pairs (best and worst of a group) or demos (successes)"
    )
    parser.add_argument("--tasks", type=int, default=200, help="how many tasks an environment's players play [200]")
    parser.add_argument("--seed", type=int, default=0, help="which tasks [0]")
    space = parser.parse(argv)
    from turnwise.cli import export as exports

    count = exports.export(space.source, space.form, space.file, space.tasks, space.seed)
    print(f"{count} {space.form} written to {space.file}")
    return 0


def model(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise model", description="Real models by name.", allow_abbrev=False)
    parser.add_argument("action", help="fetch or list")
    parser.add_argument("name", nargs="?", default="", help="which one to fetch")
    parser.add_argument("--to", default="", help="the folder of models [the environment's TURNWISE_MODELS, or a cache]")
    parser.add_argument("--check", action="store_true", help="list: compare every byte with what was fetched")
    parser.add_argument("--json", action="store_true")
    space = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.models import fetch

    if space.action == "fetch":
        folder = fetch.fetch(space.name, space.to, lambda text: print(text, file=sys.stderr, flush=True))
        usable = space.name if folder.parent == fetch.home() else folder
        print(json.dumps({"folder": str(folder)}) if space.json else f"Next:\n  turnwise train --model {usable}")
        return 0
    if space.action != "list":
        raise SettingError(f"model does not know {space.action!r}; {nearest(space.action, ('fetch', 'list'))}")
    rows = fetch.list_models(space.to, space.check)
    print(json.dumps(rows, indent=1)) if space.json else display.show_table("models that can be fetched by name", rows)
    return 0


def bench(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise bench", description="Measure this machine.", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, fewer rows")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda when present [auto]")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: as many as torch takes [0]")
    parser.add_argument("--parts", default="", help="some of generation,learning,step,memory [all]")
    parser.add_argument("--json", default="", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--out", default="", metavar="FILE", help="write the table as Markdown")
    space = parser.parse(argv)
    from turnwise.bench import report, table
    from turnwise.cli import display

    parts = tuple(space.parts.split(",")) if space.parts else table.PARTS
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731

    def keep(facts: dict[str, object], found: list[report.BenchRow]) -> None:
        for file, text in (
            (space.json, report.as_json(facts, found)),
            (space.out, report.markdown(table.title(facts), found)),
        ):
            if file:
                Path(file).write_text(text, encoding="utf-8")

    facts, found = table.measure(space.device, space.quick, space.threads, parts, say, keep)
    keep(facts, found)
    display.show_table(table.title(facts), [report.cells(row) for row in found])
    return 0


@contextlib.contextmanager
def shown(quiet: bool) -> Iterator[Listener]:
    """The progress display; on standard error when standard output carries JSON."""
    from rich.console import Console

    from turnwise.observe.progress import show_progress

    listen = show_progress(Console(stderr=quiet, highlight=False))
    try:
        yield listen
    finally:
        listen("end", {})


RUN = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "list": list_methods,
    "explain": explain,
    "diff": diff,
    "check-env": check_env,
    "export": export,
    "model": model,
    "bench": bench,
}


def usage() -> str:
    lines = [f"  turnwise {name:<10} {text}" for name, text in COMMANDS.items()]
    return "Turnwise trains language-model agents by reinforcement learning over multi-turn rollouts.\n\n" + "\n".join(
        lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"turnwise {__version__}")
        return 0
    try:
        if words[0] not in RUN:
            raise SettingError(f"no command {words[0]!r}; {nearest(words[0], RUN)}")
        return RUN[words[0]](words[1:])
    except TurnwiseError as fault:
        print(f"turnwise: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print(f"\nturnwise: {stopped or 'stopped'}", file=sys.stderr)
        return getattr(stopped, "exit_code", 130)
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
