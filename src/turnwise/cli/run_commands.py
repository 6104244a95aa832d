"""Commands that start, continue and describe runs: ``train``, ``resume``, ``config``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from turnwise.cli.flags import Parser, flag
from turnwise.cli.output import print_json, progress
from turnwise.cli.run_flags import RunFlags, read_run_flags
from turnwise.config.settings import Settings
from turnwise.core.text import printable


def train(argv: Sequence[str]) -> int:
    """``turnwise train``"""

    def own_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="validate the settings, take a few training steps (3, with --staleness k 3 (k + 1), at most 33), estimate time "
            "and memory, keep nothing",
        )
        parser.add_argument("--json", action="store_true", help="print the summary as JSON")

    run = read_run_flags("train", "Train an agent.", argv, own_flags)
    from turnwise.training import api

    with progress(run.namespace.json) as listen:
        summary = (api.dry_run if run.namespace.dry_run else api.train)(listen, **run.values)
    from turnwise.cli import display  # late: imports the library of pictures, which a refusal need not wait for

    if run.namespace.json:
        print_json(summary)
    elif run.namespace.dry_run:
        from turnwise.training.dry_run import describe

        print("dry run: settings, environment, model, batches and updates work; nothing was kept")
        print(describe(summary["estimate"]))
    else:
        display.show_summary(summary)
    return 0


def resume(argv: Sequence[str]) -> int:
    """``turnwise resume``"""
    parser = Parser(
        prog="turnwise resume",
        description="Continue a stopped run, or extend one: turnwise resume RUN --steps 200. Only the settings below can "
        "change; the learning-rate schedule then spans the new number of steps.",
    )
    parser.add_argument("run", help="the run directory")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    from turnwise.training.resume import CHANGEABLE

    for f in fields(Settings):  # every setting is parsed, so that one that cannot change is refused with the reason
        help_ = f"{f.metadata['help']} [as before]" if f.name in CHANGEABLE else argparse.SUPPRESS
        parser.add_argument(flag(f.name), dest=f.name, metavar="X", default=None, nargs="?", const="true", help=help_)
    namespace = parser.parse(argv)
    changes = {f.name: getattr(namespace, f.name) for f in fields(Settings) if getattr(namespace, f.name) is not None}
    from turnwise.training import api

    with progress(namespace.json) as listen:
        summary = api.resume(namespace.run, listen, **changes)
    from turnwise.cli import display

    print_json(summary) if namespace.json else display.show_summary(summary)
    return 0


def endpoint(argv: Sequence[str]) -> int:
    """``turnwise endpoint``"""
    parser = Parser(
        prog="turnwise endpoint",
        description="Serve the policy of a run by the chat completions, Responses and Anthropic Messages protocols. Agents on "
        "other machines need a token, read from the variable TURNWISE_ENDPOINT_TOKEN.",
    )
    parser.add_argument("run", help="the run directory")
    parser.add_argument(
        "--address", default="127.0.0.1:8700", metavar="HOST:PORT", help="where to listen [127.0.0.1:8700]"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long a session may stay open [3600]")
    parser.add_argument("--json", action="store_true", help="print what happened as JSON at the end")
    namespace = parser.parse(argv)
    from turnwise.training.agents import TOKEN_VARIABLE
    from turnwise.training.certificate import certificate_lines
    from turnwise.training.endpoint import serve_run

    tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    token = os.environ.get(TOKEN_VARIABLE, "")
    served = serve_run(namespace.run, namespace.address, token, namespace.seconds, tell)
    if namespace.json:
        print_json(served)
        return 0
    print(f"{served['sessions']} sessions were finished; rows: {served['file']}")
    for line in certificate_lines(served["exactness"])[:-1]:  # nothing is trained here
        print(f"  {line}")
    return 0


def check_agent(argv: Sequence[str]) -> int:
    """``turnwise check-agent``"""

    def own_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--episodes", type=int, default=8, help="tasks to play with each policy [8]")
        parser.add_argument("--json", action="store_true", help="print the findings as JSON")

    about = "Try an agent with scripted policies in place of a model, and report its problems."
    run = read_run_flags("check-agent", about, argv, own_flags)
    from turnwise.training.agent_check import try_agent

    report = try_agent(run.values, max(run.namespace.episodes, 1))
    if run.namespace.json:
        print_json({"ok": report.ok, "problems": list(report.problems), "tried": list(report.tried)})
    else:
        print(printable(report.text()))
    return 0 if report.ok else 1


def config(argv: Sequence[str]) -> int:
    """``turnwise config``"""
    if argv and not argv[0].startswith("-") and (Path(argv[0]) / "run.json").is_file():
        return _config_of_run(argv)

    def own_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print the settings as JSON")

    about = "Print the effective settings as a config file: of a run directory, or of a method with flags and --config."
    run = read_run_flags("config", about, argv, own_flags)
    from turnwise.config.files import render_config
    from turnwise.training.env_spec import resolve_settings

    settings = resolve_settings(run.values)
    if run.namespace.json:
        print_json(settings.as_dict())
    else:
        print(render_config(settings, _origins(settings, run), "where a value comes from stands in brackets"), end="")
    return 0


def _origins(settings: Settings, run: RunFlags) -> Mapping[str, str]:
    """Where each value comes from: default, environment, method, file or flag."""
    from turnwise.training.env_spec import suggestions

    origins = {s.name: s.reason for s in suggestions(run.values)}
    origins |= {name: origin for name, origin in _of_method(settings).items() if name not in run.origins}
    return origins | dict(run.origins)


def _of_method(settings: Settings) -> dict[str, str]:
    """What the method decides where a setting leaves it to the method."""
    from turnwise.training.plan import make_recipe

    recipe = make_recipe(settings)
    decided: dict[str, Any] = {"groups": recipe.budget.groups, "group_size": recipe.budget.size}
    decided |= {"dtype": recipe.precision.learner, "rollout_dtype": recipe.precision.rollouts}
    return {name: f"method: {value}" for name, value in decided.items() if value}


def _config_of_run(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise config", description="Print the settings of a run as a config file.")
    parser.add_argument("run", help="a run directory, or a method followed by flags")
    parser.add_argument("--json", action="store_true", help="print the settings as JSON")
    namespace = parser.parse(argv)
    from turnwise.config.files import render_config
    from turnwise.store.rundir import RunDir

    settings = Settings.of(RunDir.open(namespace.run).metadata()["settings"])
    title = f"settings of {namespace.run}; train with them again: turnwise train --config FILE --name NEW"
    print_json(settings.as_dict()) if namespace.json else print(render_config(settings, None, title), end="")
    return 0
