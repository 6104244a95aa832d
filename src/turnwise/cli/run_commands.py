"""Commands that start, continue, describe and evaluate runs, and give away what they made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from turnwise.cli.flags import (
    CONFIG_HELP,
    DEFAULT_METHOD,
    Parser,
    add_policy_flags,
    add_settings,
    flag,
    read_run_flags,
    served_policy,
    settings_from,
)
from turnwise.cli.output import print_json, progress
from turnwise.config.files import ConfigFile, merge_config, read_config
from turnwise.config.named_object import reading
from turnwise.config.settings import Settings
from turnwise.core.records import Status
from turnwise.core.text import printable


def train(argv: Sequence[str]) -> int:
    """``turnwise train``"""

    def own_flags(parser: Parser) -> None:
        parser.add(
            "--dry-run",
            action="store_true",
            help="a few steps, an estimate of time and memory, nothing kept",
        )

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
    return _status(summary.get("episodes", {}))


def resume(argv: Sequence[str]) -> int:
    """``turnwise resume``"""
    parser = Parser(
        "resume",
        "Continue a stopped run, or extend one: turnwise resume RUN --steps 200. Only the settings below "
        "can change; the learning-rate schedule then spans the new number of steps.",
    )
    parser.add("run", help="the run directory")
    from turnwise.training.resume import CHANGEABLE

    for f in fields(Settings):  # every setting is parsed, so that one that cannot change is refused with the reason
        help_ = f"{f.metadata['help']} [as before]" if f.name in CHANGEABLE else argparse.SUPPRESS
        parser.add(flag(f.name), dest=f.name, metavar="X", default=None, nargs="?", const="true", help=help_)
    about = "go on although ledger.sqlite was lost: which groups were trained on stays unknown"
    parser.add("--new-ledger", action="store_true", help=about)
    namespace = parser.parse(argv)
    changes = {f.name: getattr(namespace, f.name) for f in fields(Settings) if getattr(namespace, f.name) is not None}
    from turnwise.training import api

    with progress(namespace.json) as listen:
        summary = api.resume(namespace.run, listen, new_ledger=namespace.new_ledger, **changes)
    from turnwise.cli import display

    print_json(summary) if namespace.json else display.show_summary(summary)
    return _status(summary.get("episodes", {}))


def _status(episodes: Mapping[str, int]) -> int:
    """The exit status after episodes, counted by how they ended: 1 where most failed, for whatever reason. What is left of them
    is a selection, and nobody may take it for a success."""
    failed, played = episodes.get(Status.FAILED, 0), sum(episodes.values())
    if failed * 2 <= played:
        return 0
    print(f"turnwise: {failed} of {played} episodes failed: what the others show is biased", file=sys.stderr)
    return 1


def check_agent(argv: Sequence[str]) -> int:
    """``turnwise check-agent``"""

    def own_flags(parser: Parser) -> None:
        parser.add("--episodes", type=int, default=8, help="tasks to play with each policy [8]")

    about = "Try an agent with scripted policies in place of a model, and report its problems."
    run = read_run_flags("check-agent", about, argv, own_flags)
    from turnwise.training.agents import try_agent

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
    about = "Print the effective settings as a config file: of a run directory, or of a method with flags and --config."
    run = read_run_flags("config", about, argv)
    from turnwise.config.files import render_config
    from turnwise.training.plan import resolve_settings

    settings = resolve_settings(run.values)
    if run.namespace.json:
        print_json(settings.as_dict())
    else:
        # where each value comes from: default, environment, what the method decides where a setting leaves it open,
        # file or flag
        from turnwise.recipes import experience
        from turnwise.recipes.catalogue import changed_slots
        from turnwise.training.plan import make_recipe, suggestions

        recipe = make_recipe(settings)
        decided: dict[str, Any] = {"groups": recipe.budget.groups, "group_size": recipe.budget.size}
        decided |= {"dtype": recipe.precision.learner, "rollout_dtype": recipe.precision.rollouts}
        left_open = (slot for slot in experience.SLOTS if not getattr(settings, slot))
        decided |= {slot: recipe.slots()[slot] for slot in left_open if slot in changed_slots(recipe)}
        origins = {s.name: s.reason for s in suggestions(run.values)}
        print(
            render_config(
                settings,
                {**origins, **{name: f"method: {value}" for name, value in decided.items() if value}, **run.origins},
                "where a value comes from stands in brackets",
            ),
            end="",
        )
    return 0


@reading()
def _config_of_run(argv: Sequence[str]) -> int:
    parser = Parser("config", "Print the settings of a run as a config file.")
    parser.add("run", help="a run directory, or a method followed by flags")
    namespace = parser.parse(argv)
    from turnwise.config.files import render_config
    from turnwise.store.rundir import RunDir

    settings = Settings.of(RunDir.open(namespace.run).metadata()["settings"])
    title = f"settings of {namespace.run}; train with them again: turnwise train --config FILE --name NEW"
    print_json(settings.as_dict()) if namespace.json else print(render_config(settings, None, title), end="")
    return 0


def evaluate(argv: Sequence[str]) -> int:
    parser = Parser("eval", "Evaluate on held-out tasks.")
    parser.add("run", nargs="?", default="", help="a run directory; or use --model, --policy or --player")
    parser.add("--player", default="", help="scripted policy instead of a model: oracle, random or demonstrator")
    add_policy_flags(parser)
    parser.add("--split", default="held_out", help="held_out or train")
    parser.add("--save", default="", metavar="FILE", help="write the result and one episode per task as JSON")
    add_settings(parser, DEFAULT_METHOD)
    parser.add("--config", default="", metavar="FILE", help=CONFIG_HELP)
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
        print_json(both if len(both) > 1 else both[0])
    else:
        display.show_evaluation(both[0]) if len(both) == 1 else display.show_evaluations(both)
    return 0


def export(argv: Sequence[str]) -> int:
    parser = Parser("export", "Write episodes as training rows.", json="")
    parser.add("source", help="a run directory; or an environment, whose scripted policies then act")
    parser.add("file", help="a new .jsonl file")
    parser.add("--as", dest="form", default="pairs", help="pairs (best and worst of a group) or demos (successes)")
    parser.add("--tasks", type=int, default=200, help="number of tasks that scripted policies play [200]")
    parser.add("--seed", type=int, default=0, help="seed of these tasks [0]")
    parser.add_trust()
    n = parser.parse(argv)
    from turnwise.cli import sharing

    count = sharing.export(n.source, n.form, n.file, n.tasks, n.seed, n.trust_run)
    print(f"{count} {n.form} written to {n.file}")
    return 0


def push(argv: Sequence[str]) -> int:
    parser = Parser("push", "Upload the model of a run with its card.", json="")
    parser.add("run", help="a finished run")
    parser.add("name", help="the repository: owner/name")
    parser.add("--part", default="auto", help="model, adapter, or auto: the adapter where one was trained [auto]")
    parser.add("--private", action="store_true", help="make a new repository private")
    parser.add("--dry-run", default="", metavar="FOLDER", help="write what would be uploaded to this new folder")
    parser.add_trust()
    n = parser.parse(argv)
    from turnwise.cli import sharing

    address = sharing.push(n.run, n.name, n.part, n.private, n.dry_run, n.trust_run)
    print(f"nothing was uploaded; this would be: {address}" if n.dry_run else f"uploaded: {address}")
    return 0
