"""The command line. A command parses its flags, calls one function, and prints; it computes nothing itself."""

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
    "resume": "continue a stopped run",
    "eval": "evaluate a run, a model or a scripted policy on held-out tasks",
    "list": "list all methods",
    "explain": "describe one method: equation, paper, slots, hyper-parameters",
    "diff": "compare two methods slot by slot",
    "check-env": "test an environment by playing it and report its problems",
    "export": "write episodes of a run, or of an environment's scripted policies, as training rows",
    "model": "download a model by name, or list the available ones",
    "bench": "measure generation, learning and whole steps here, against other libraries and hardware limits",
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
        "--dry-run", action="store_true", help="validate the settings, take one training step, keep nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_settings(parser, method, credit)
    namespace = parser.parse(argv)
    if namespace.method not in (
        None,
        method,
    ):  # the method came after a flag: its hyper-parameters were not defined yet
        raise SettingError(f"write the method first: turnwise train {namespace.method} ...")
    settings = settings_from(namespace, method, credit)
    from turnwise.cli import display
    from turnwise.training import api

    with progress(namespace.json) as listen:
        summary = (api.dry_run if namespace.dry_run else api.train)(listen, **settings)
    if namespace.json:
        print(json.dumps(summary, indent=1))
    elif namespace.dry_run:
        print("dry run: settings, environment, model, one batch and one update work; nothing was kept")
    else:
        display.show_summary(summary)
    return 0


def resume(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise resume", description="Continue a stopped run.", allow_abbrev=False)
    parser.add_argument("run", help="the run directory")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.training import api

    with progress(namespace.json) as listen:
        summary = api.resume(namespace.run, listen)
    print(json.dumps(summary, indent=1)) if namespace.json else display.show_summary(summary)
    return 0


def evaluate(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise eval", description="Evaluate on held-out tasks.", allow_abbrev=False)
    parser.add_argument("run", nargs="?", default="", help="a run directory; or use --model or --player")
    parser.add_argument(
        "--player", default="", help="scripted policy instead of a model: oracle, random or demonstrator"
    )
    parser.add_argument("--split", default="held_out", help="held_out or train")
    parser.add_argument("--json", action="store_true")
    method = default_of(next(f for f in fields(Settings) if f.name == "method"))
    add_settings(parser, method)
    namespace = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.training.evaluate import evaluate_policy

    evaluation = evaluate_policy(namespace.run, namespace.player, namespace.split, settings_from(namespace, method))
    print(json.dumps(evaluation, indent=1)) if namespace.json else display.show_evaluation(evaluation)
    return 0


def list_methods(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise list", description="All methods.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.recipes import catalogue

    rows = catalogue.method_rows()
    print(json.dumps(rows, indent=1)) if namespace.json else display.show_methods(rows)
    return 0


def explain(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise explain", description="Describe one method.", allow_abbrev=False)
    parser.add_argument("method")
    parser.add_argument("--credit", default="", help="use the credit assignment of another method")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise import recipes
    from turnwise.recipes import catalogue

    if namespace.json:
        print(json.dumps(catalogue.describe_method(namespace.method, namespace.credit), indent=1))
        return 0
    recipe = catalogue.parse_method(namespace.method, namespace.credit)
    for name in filter(None, (namespace.method, namespace.credit)):
        signature = ", ".join(f"{n}={p.default}" for n, p in recipes.parameters(name).items())
        print(f"{name}({signature})\n\n{inspect.getdoc(recipes.method(name))}\n")
    print(f"Slots of {namespace.method} with the credit of {namespace.credit}" if namespace.credit else "Slots")
    width = max(map(len, recipe.slots()))
    for slot, piece in recipe.slots().items():
        print(textwrap.fill(piece, 118, initial_indent=f"  {slot:<{width}}  ", subsequent_indent=" " * (width + 4)))
    print(f"\nSignals: {', '.join(sorted(recipe.objective.signals))}")
    if recipe.requirements:
        print(f"Requires: {', '.join(sorted(recipe.requirements))}")
    return 0


def diff(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise diff", description="The slots in which two methods differ.", allow_abbrev=False)
    parser.add_argument("left")
    parser.add_argument("right")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise.recipes import catalogue

    rows = catalogue.slot_differences(namespace.left, namespace.right)
    if namespace.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print(f"{namespace.left} and {namespace.right} do not differ in any slot")
    width = max((len(r["slot"]) for r in rows), default=0)
    for r in rows:
        print(f"{r['slot']:<{width}}  {r[namespace.left]}  →  {r[namespace.right]}")
    return 0


def check_env(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise check-env", description="Test an environment by playing it.", allow_abbrev=False)
    parser.add_argument("environment", help="module:Class or a built-in name")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise import environments
    from turnwise.environments.checker.check import check_env as check

    report = check(environments.load(namespace.environment), namespace.episodes)
    if namespace.json:
        print(
            json.dumps(
                {"ok": report.ok, "problems": list(report.problems), "warnings": list(report.warnings)}, indent=1
            )
        )
    else:
        print(report.text())
    return 0 if report.ok else 1


def export(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise export", description="Write episodes as training rows.", allow_abbrev=False)
    parser.add_argument("source", help="a run directory; or an environment, whose scripted policies then act")
    parser.add_argument("file", help="a new .jsonl file")
    parser.add_argument(
        "--as", dest="form", default="pairs", help="pairs (best and worst of a group) or demos (successes)"
    )
    parser.add_argument("--tasks", type=int, default=200, help="number of tasks that scripted policies play [200]")
    parser.add_argument("--seed", type=int, default=0, help="seed of these tasks [0]")
    namespace = parser.parse(argv)
    from turnwise.cli import export as exports

    count = exports.export(namespace.source, namespace.form, namespace.file, namespace.tasks, namespace.seed)
    print(f"{count} {namespace.form} written to {namespace.file}")
    return 0


def model(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise model", description="Download and list models.", allow_abbrev=False)
    parser.add_argument("action", help="fetch or list")
    parser.add_argument("name", nargs="?", default="", help="the model to fetch")
    parser.add_argument("--to", default="", help="directory of models [$TURNWISE_MODELS, or a cache directory]")
    parser.add_argument("--check", action="store_true", help="with list: compare every file with its checksum")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.models import fetch

    if namespace.action == "fetch":
        folder = fetch.fetch(namespace.name, namespace.to, lambda text: print(text, file=sys.stderr, flush=True))
        usable = namespace.name if folder.parent == fetch.home() else folder
        print(json.dumps({"folder": str(folder)}) if namespace.json else f"Next:\n  turnwise train --model {usable}")
        return 0
    if namespace.action != "list":
        raise SettingError(f"no action {namespace.action!r} of model; {nearest(namespace.action, ('fetch', 'list'))}")
    rows = fetch.list_models(namespace.to, namespace.check)
    print(json.dumps(rows, indent=1)) if namespace.json else display.show_table("available models", rows)
    return 0


def bench(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise bench", description="Measure speed on this machine.", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, fewer rows")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda when present [auto]")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: the default of torch [0]")
    parser.add_argument("--parts", default="", help="a subset of generation,learning,step,memory [all]")
    parser.add_argument("--json", default="", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--out", default="", metavar="FILE", help="write the table as Markdown")
    namespace = parser.parse(argv)
    from turnwise.bench import report, table
    from turnwise.cli import display

    parts = tuple(namespace.parts.split(",")) if namespace.parts else table.PARTS
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731

    def write(facts: dict[str, object], rows: list[report.BenchRow]) -> None:
        for file, text in (
            (namespace.json, report.as_json(facts, rows)),
            (namespace.out, report.markdown(table.title(facts), rows)),
        ):
            if file:
                Path(file).write_text(text, encoding="utf-8")

    facts, rows = table.measure(namespace.device, namespace.quick, namespace.threads, parts, log, write)
    write(facts, rows)
    display.show_table(table.title(facts), [report.cells(row) for row in rows])
    return 0


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Listener]:
    """The progress display; on standard error when standard output is JSON."""
    from rich.console import Console

    from turnwise.observe.progress import show_progress

    listen = show_progress(Console(stderr=quiet, highlight=False))
    try:
        yield listen
    finally:
        listen("end", {})


FUNCTIONS = {
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
        if words[0] not in FUNCTIONS:
            raise SettingError(f"no command {words[0]!r}; {nearest(words[0], FUNCTIONS)}")
        return FUNCTIONS[words[0]](words[1:])
    except TurnwiseError as error:
        print(f"turnwise: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print(f"\nturnwise: {stopped or 'stopped'}", file=sys.stderr)
        return getattr(stopped, "exit_code", 130)
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
