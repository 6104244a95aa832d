"""The command line. A command parses its flags, calls one function, and prints; it computes nothing itself."""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from turnwise import __version__
from turnwise.cli import (
    inspect_commands,
    launch_command,
    run_commands,
    scarcity,
    serve_command,
    status_command,
    view_command,
)
from turnwise.cli.experience_commands import diff_pieces, explain_pieces, show_experience
from turnwise.cli.flags import Parser, add_policy_flags, add_settings, served_policy, settings_from, with_flags
from turnwise.cli.output import print_json, progress
from turnwise.cli.run_flags import CONFIG_HELP, DEFAULT_METHOD
from turnwise.config.files import ConfigFile, merge_config, read_config
from turnwise.config.named_object import import_from_current_folder
from turnwise.config.settings import split_method
from turnwise.core.text import printable
from turnwise.errors import SettingError, TurnwiseError, nearest
from turnwise.models.trust import FLAG, trust_remote_code
from turnwise.recipes import signatures

COMMANDS = {
    "train": "train an agent (all settings: turnwise train --help)",
    "resume": "continue a stopped run, or extend one (--steps)",
    "config": "print the effective settings, or those of a run, as a config file",
    "eval": "evaluate a run, a model, a served model or a scripted policy on held-out tasks",
    "endpoint": "serve the policy of a run to agents, over HTTP, until interrupted",
    "serve": "sample for runs by HTTP (`turnwise train --generator URL`), until interrupted",
    "launch": "print files that start servers and a run on Slurm or Kubernetes (not run there)",
    "environments": "list the environments: built in, installed, and how to install the rest",
    "list": "list all methods",
    "explain": "describe one method: equation, paper, slots, hyper-parameters",
    "diff": "compare two methods slot by slot",
    "check-env": "test an environment by playing it and report its problems",
    "check-agent": "try an agent with scripted policies in place of a model and report its problems",
    "check-method": "test a method's gradient, invariances and finiteness on synthetic trajectories",
    "export": "write episodes of a run, or of an environment's scripted policies, as training rows",
    "push": "upload the model of a finished run, or its adapter, with a model card",
    "model": "download a model by name, or list the available ones",
    "bench": "measure generation, learning and whole steps here, against other libraries and hardware limits",
    "status": "say what a run is doing: who waits for whom, throughput, what holds it up",
    "view": "open a local page about runs: curves, why a token got its gradient, what another method would have done",
    **inspect_commands.COMMANDS,
}


def evaluate(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise eval", description="Evaluate on held-out tasks.", allow_abbrev=False)
    parser.add_argument("run", nargs="?", default="", help="a run directory; or use --model, --policy or --player")
    parser.add_argument(
        "--player", default="", help="scripted policy instead of a model: oracle, random or demonstrator"
    )
    add_policy_flags(parser)
    parser.add_argument("--split", default="held_out", help="held_out or train")
    parser.add_argument("--save", default="", metavar="FILE", help="write the result and one episode per task as JSON")
    parser.add_argument("--json", action="store_true")
    add_settings(parser, DEFAULT_METHOD)
    parser.add_argument("--config", default="", metavar="FILE", help=CONFIG_HELP)
    namespace = parser.parse(argv)
    from turnwise.training.evaluation import compare_policies, evaluate_policy

    run, split, served = namespace.run, namespace.split, served_policy(namespace)
    file = read_config(namespace.config) if namespace.config else ConfigFile("")
    flags = settings_from(namespace, DEFAULT_METHOD)
    settings = merge_config(file, {name: flags[name] for name in flags if name not in ("method", "method_options")})
    with progress(namespace.json) as listen:
        if run and served is not None:
            both = compare_policies(run, split, settings, served, listen)
        else:
            both = [evaluate_policy(run, namespace.player, split, settings, served, listen, namespace.save)]
    from turnwise.cli import display

    if namespace.json:
        print(json.dumps(both if len(both) > 1 else both[0], indent=1))
    else:
        display.show_evaluation(both[0]) if len(both) == 1 else display.show_evaluations(both)
    return 0


def list_environments(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise environments", description="All environments.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise.cli import environment_table
    from turnwise.environments.listing import environment_rows

    rows = environment_rows()
    print_json(rows) if namespace.json else environment_table.show(rows)
    return 0


def list_methods(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise list", description="All methods, or pieces of experience.", allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--experience", action="store_true", help="list samplers, budgets, strategies, guidance and replay instead"
    )
    namespace = parser.parse(argv)
    from turnwise.cli import display
    from turnwise.recipes import catalogue, experience

    if namespace.experience:
        rows = experience.rows()
        print(json.dumps(rows, indent=1)) if namespace.json else show_experience(rows)
        return 0
    rows = catalogue.method_rows()
    print(json.dumps(rows, indent=1)) if namespace.json else display.show_methods(rows)
    return 0


def explain(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise explain", description="Describe one method.", allow_abbrev=False)
    parser.add_argument("method")
    parser.add_argument("--credit", default="", help="use the credit assignment of another method")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    if explain_pieces(namespace.method, namespace.json):
        return 0
    for name in (*split_method(namespace.method), namespace.credit):
        if name:
            signatures.check_method(name)
    from turnwise import recipes
    from turnwise.recipes import catalogue

    method, credit = split_method(namespace.method)
    credit = namespace.credit or credit
    if namespace.json:
        print(json.dumps(catalogue.describe_method(method, credit), indent=1))
        return 0
    recipe = catalogue.parse_method(method, credit)
    for name in filter(None, (method, credit)):
        signature = ", ".join(f"{n}={p.default}" for n, p in recipes.parameters(name).items())
        print(f"{name}({signature})\n\n{inspect.getdoc(recipes.method(name)) or ''}\n")
    print(f"Slots of {method} with the credit of {credit}" if credit else "Slots")
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
    if diff_pieces(namespace.left, namespace.right, namespace.json):
        return 0
    for name in (split_method(namespace.left)[0], split_method(namespace.right)[0]):
        signatures.check_method(name)
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
        print(printable(report.text()))
    return 0 if report.ok else 1


def check_method(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="turnwise check-method",
        description="Test the contract of a method in seconds, without a model.",
        allow_abbrev=False,
    )
    parser.add_argument("method", help="a method of `turnwise list`, METHOD+CREDIT, module:recipe or file.py:recipe")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    for name in filter(None, split_method(namespace.method)):
        signatures.check_method(name)
    from turnwise.checks.method import check_method as check

    report = check(namespace.method)
    print(json.dumps(report.as_dict(), indent=1) if namespace.json else report.text())
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


def push(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise push", description="Upload the model of a run with its card.", allow_abbrev=False)
    parser.add_argument("run", help="a finished run")
    parser.add_argument("name", help="the repository: owner/name")
    parser.add_argument(
        "--part", default="auto", help="model, adapter, or auto: the adapter where one was trained [auto]"
    )
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument(
        "--dry-run", default="", metavar="FOLDER", help="write what would be uploaded to this new folder"
    )
    namespace = parser.parse(argv)
    from turnwise.cli import push as pushing

    n = namespace
    address = pushing.push(n.run, n.name, n.part, n.private, n.dry_run)
    print(f"nothing was uploaded; this would be: {address}" if n.dry_run else f"uploaded: {address}")
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
    from turnwise.bench import report
    from turnwise.training.refusals import check_device

    parts = tuple(namespace.parts.split(",")) if namespace.parts else report.PARTS
    if unknown := [part for part in parts if part not in report.PARTS]:
        raise SettingError(f"no part {unknown[0]!r}; {nearest(unknown[0], report.PARTS)}")
    check_device(namespace.device)
    from turnwise.bench import table
    from turnwise.cli import display

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


FUNCTIONS = {
    "train": run_commands.train,
    "resume": run_commands.resume,
    "config": run_commands.config,
    "eval": evaluate,
    "endpoint": run_commands.endpoint,
    "serve": serve_command.serve,
    "launch": launch_command.launch,
    "environments": list_environments,
    "list": list_methods,
    "explain": explain,
    "diff": diff,
    "check-env": check_env,
    "check-agent": run_commands.check_agent,
    "check-method": check_method,
    "export": export,
    "push": push,
    "model": model,
    "bench": bench,
    "status": status_command.status,
    "view": view_command.view,
    **inspect_commands.FUNCTIONS,
}


def usage() -> str:
    lines = [f"  turnwise {name:<12} {text}" for name, text in COMMANDS.items()]
    lines.append(f"\n{FLAG}, after a command, lets Python code run that comes with a model. No run remembers it.")
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
    import_from_current_folder()
    try:
        if words[0] not in FUNCTIONS:
            raise SettingError(f"no command {words[0]!r}; {nearest(words[0], FUNCTIONS)}")
        with trust_remote_code(FLAG in words):
            status = FUNCTIONS[words[0]]([word for word in words[1:] if word != FLAG])
            sys.stdout.flush()  # an output that is closed or full is told below, not by the interpreter at its end
            return status
    except TurnwiseError as error:
        print(f"turnwise: {printable(with_flags(str(error)))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        from turnwise.training.interrupt import leave

        print(f"\nturnwise: {printable(stopped) or 'stopped'}", file=sys.stderr)
        return leave(getattr(stopped, "exit_code", 130))
    except BrokenPipeError:
        return 0
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if not (reason := scarcity.explain(error)):
            raise
        print(f"turnwise: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
