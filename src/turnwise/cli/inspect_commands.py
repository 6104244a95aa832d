"""Commands that look at runs: what one is doing, a page about it, what is wrong; comparison, replay, audits."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.cli.flags import DEFAULT_METHOD, Parser, RunFlags, add_settings, read_run_flags, settings_from
from turnwise.cli.output import print_json, progress, show
from turnwise.config.named_object import load_object, reading
from turnwise.config.settings import setting_type
from turnwise.core.text import printable
from turnwise.errors import SettingError
from turnwise.recipes import signatures

WATCH_SECONDS = 2.0  # between two looks of `status --watch`
VIEW_NUMBERS = ("step", "token", "update")
VIEW_TEXTS = ("group", "trajectory", "method", "search")


@reading()
def doctor(argv: Sequence[str]) -> int:
    parser = Parser("doctor", "Say what is wrong with a run, the most probable cause first.")
    parser.add("run", help="a run directory; the run may still be going on")
    namespace = parser.parse(argv)
    from turnwise.inspector.doctor import diagnose

    diagnosis = diagnose(namespace.run)
    show(diagnosis, namespace.json)
    return 1 if diagnosis.alarms else 0


def replay(argv: Sequence[str]) -> int:
    parser = Parser(
        "replay", "Take a step again from the nearest checkpoint before it, and compare it with what the run recorded."
    )
    parser.add("run", help="a run directory; it is only read")
    parser.add("--step", type=int, required=True, help="the step, counted from 1 as in metrics.jsonl")
    parser.add("--method", default="", help="take it also with this method, from the same weights and draws")
    parser.add("--until", type=int, default=0, help="with --method: go on up to this step [the step itself]")
    parser.add("--keep", default="", metavar="FOLDER", help="keep the replayed run in this new folder")
    namespace = parser.parse(argv)
    from turnwise.inspector.replay.replay import replay_step

    with progress(namespace.json) as listen:
        n = namespace
        report = replay_step(n.run, n.step, n.method, n.until, n.keep, listen)
    show(report, namespace.json)
    return 0 if report.ok else 1


@reading()
def bisect(argv: Sequence[str]) -> int:
    parser = Parser("bisect", "Find the first difference of two runs. Exact: no tolerance.")
    parser.add("left", help="a run directory")
    parser.add("right", help="another run directory")
    namespace = parser.parse(argv)
    from turnwise.inspector.replay.divergence import bisect_runs

    result = bisect_runs(namespace.left, namespace.right)
    show(result, namespace.json)
    return 0 if result.divergence is None else 1


def compare(argv: Sequence[str]) -> int:
    """``turnwise compare RUN RUN ...`` over finished runs, ``turnwise compare METHOD METHOD ... --env E`` live."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    finished = [word for word in words if (Path(word) / "run.json").is_file()]
    if finished and len(finished) != len(words):
        other = next(word for word in words if word not in finished)
        raise SettingError(
            f"{finished[0]} is a run and {other} is not; compare runs with runs, or methods with methods"
        )
    for word in [] if finished else words:
        signatures.check_method(word)
    about = "Compare methods (they are trained seed by seed) or finished runs."
    run = read_run_flags("compare", about, argv[len(words) :], _comparison_flags, positional=False)
    from turnwise.inspector.compare.comparison import compare_runs
    from turnwise.inspector.compare.live import method_variants

    if finished:
        with reading():
            return _show_comparison(compare_runs(finished, run.namespace.alpha), run.namespace)
    return _live(method_variants(words), run)


def sweep(argv: Sequence[str]) -> int:
    """``turnwise sweep METHOD --grid lr=1e-4,3e-4 --grid group_size=4,8``"""

    def own_flags(parser: Parser) -> None:
        text = "values of one setting; repeat it for more settings"
        parser.add("--grid", action="append", default=[], metavar="NAME=A,B", help=text)
        _comparison_flags(parser)

    run = read_run_flags("sweep", "Compare a grid of settings.", argv, own_flags)
    grid: dict[str, list[str]] = {}
    for text in run.namespace.grid:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        setting_type(name)  # refuses a name that is none
        grid[name] = [value for value in values.split(",") if value]
    from turnwise.inspector.compare.live import grid_variants

    return _live(grid_variants(grid), run)


def search(argv: Sequence[str]) -> int:
    """``turnwise search [BASE METHOD ...] --env E --hours H``"""

    def own_flags(parser: Parser) -> None:
        parser.add("--hours", type=float, default=0.5, help="it ends by then, or says how to go on [0.5]")
        parser.add("--minutes", type=float, default=None, help="the same in minutes")
        parser.add(
            "--alpha", type=float, default=0.05, help="probability of a claim where nothing differs, at most [0.05]"
        )

    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    for word in words:
        signatures.check_method(word)
    about = "Find what beats a method (the first; grpo) here, among those named or some twenty of its kind and knobs."
    run = read_run_flags("search", about, argv[len(words) :], own_flags, positional=False)
    from turnwise.inspector.compare.live import method_variants
    from turnwise.inspector.compare.search import BASE, default_space
    from turnwise.inspector.compare.search import search as search_space

    n, values = run.namespace, dict(run.values)
    out = values.pop("out", "runs") + f"/{values.pop('name', '') or 'search'}"
    space = method_variants(words) if len(words) > 1 else default_space([*words, BASE][0], values)
    with progress(n.json) as listen:
        report = search_space(space, values, out, 60 * n.hours if n.minutes is None else n.minutes, n.alpha, listen)
    show(report, n.json)
    return 0


def _comparison_flags(parser: Parser) -> None:
    parser.add("--minutes", type=float, default=20.0, help="it ends by then; without --steps, runs fit into it [20]")
    parser.add("--seeds", type=int, default=8, help="seeds at most; more may be added later [8]")
    parser.add("--alpha", type=float, default=0.05, help="probability of calling a tie a difference, at most [0.05]")
    parser.add("--anyway", action="store_true", help="train also where no verdict is possible")
    parser.add("--plot", default="", metavar="FILE", help="write a picture of all seeds")


def _live(variants: Sequence[Any], run: RunFlags) -> int:
    from turnwise.inspector.compare.live import compare_live

    n, values = run.namespace, dict(run.values)
    out = values.pop("out", "runs") + f"/{values.pop('name', '') or 'comparison'}"
    with progress(n.json) as listen:
        comparison = compare_live(variants, values, out, n.minutes, n.seeds, n.alpha, listen, n.anyway)
    return _show_comparison(comparison, n)


def _show_comparison(comparison: Any, namespace: argparse.Namespace) -> int:
    if namespace.plot:
        comparison.plot(namespace.plot)
    show(comparison, namespace.json)
    return 0


def evidence(argv: Sequence[str]) -> int:
    """``turnwise evidence run|rerun|check|table``: the program stands with the claims and rows, in a checkout."""
    what = "evidence, which belongs to a checkout of the repository: go to its folder"
    return int(load_object("experiments.evidence.command:main", what, callable, "function")(argv))


def audit(argv: Sequence[str]) -> int:
    parser = Parser(
        "audit",
        "Compare another trainer's loss, or a batch it dumped, with the recipe in float64; print what deviates.",
    )
    parser.add("subject", help="trl, verl, or a .npz, .json or .safetensors file with logp, old_logp, mask, advantages, "
                        "and where they were dumped reference, reward, group, loss, gradient")  # fmt: skip
    parser.add("--method", default="grpo", help="the recipe that a dumped batch is compared with [grpo]")
    namespace = parser.parse(argv)
    signatures.check_method(namespace.method)
    from turnwise.inspector.audit.report import audit_batch
    from turnwise.inspector.audit.trl import audit_trl
    from turnwise.inspector.audit.verl import audit_verl

    trainers = {"trl": audit_trl, "verl": audit_verl}
    report = trainers[n.subject]() if (n := namespace).subject in trainers else audit_batch(n.subject, n.method)
    show(report, namespace.json)
    return 0


def credit_bench(argv: Sequence[str]) -> int:
    parser = Parser("credit-bench", "Score the credit of every method against the true advantage of each turn.")
    parser.add("source", metavar="ENV|RUN", help="an environment, whose cold start is judged; or a run")
    parser.add("--method", default="", metavar="A,B", help="only these methods [all]")
    parser.add("--forks", type=int, default=0, help="of each turn, for the truth; 0 enumerates all states [0]")
    parser.add("--tasks", type=int, default=16, help="tasks, with one group in each batch [16]")
    parser.add("--batches", type=int, default=4, help="scored batches [4]")
    parser.add("--states", type=int, default=4000, help="states of a task that are enumerated at most [4000]")
    add_settings(parser, DEFAULT_METHOD, topic="")
    n = parser.parse(argv)
    given = {k: v for k, v in settings_from(n, DEFAULT_METHOD).items() if k not in ("method", "method_options", "out")}
    from turnwise.inspector import credit_bench as bench

    with progress(n.json) as listen:
        report = bench.credit_bench(n.source, given, n.method, n.forks, n.tasks, n.batches, n.states, listen)
    report.save(n.out)
    show(report, n.json)
    return 0


def probe_reward(argv: Sequence[str]) -> int:
    parser = Parser(
        "probe-reward",
        "Attack an environment's reward with scripted adversaries, a search and the tiny model, and show the "
        "best-paid behaviours that its oracle, its info['success'] or your check calls wrong. Exit status 1 if there are any.",
    )
    parser.add("environment", help="a name of `turnwise environments`, module:Class or file.py:Class")
    parser.add("--minutes", type=float, default=2.0, help="time at most [2]")
    parser.add("--check", default="", metavar="FILE.PY:FUNCTION",
                        help="(env, messages) -> bool: is a finished episode right? Replaces info['success']")  # fmt: skip
    parser.add("--all", action="store_true", help="search and train although something was found before")
    namespace = parser.parse(argv)
    from turnwise.config.named_object import load_object
    from turnwise.inspector.probe.probe import probe_reward as probe

    n = namespace
    check = load_object(n.check, f"check {n.check!r}", callable, "function") if n.check else None
    with progress(n.json) as listen:
        report = probe(n.environment, n.minutes, check, n.all, lambda text: listen("stage", {"name": text, "total": 0}))
    show(report, n.json)
    return 0 if report.ok else 1


@reading()
def status(argv: Sequence[str]) -> int:
    """``turnwise status``"""
    parser = Parser(
        "status",
        "Say which component of a run waits for which, how fast each is, and who holds it up. Works while the run goes on, after "
        "it has ended, and after it was killed. Exit status 1 if it is stuck, failed or was killed.",
        "print everything as JSON; with --watch one line for each look",
    )
    parser.add("run", help="a run directory")
    parser.add("--watch", action="store_true", help="look again every two seconds, until the run has ended")
    namespace = parser.parse(argv)
    from turnwise.training.watch import newest_messages, read_state, status_text

    while True:
        state = read_state(namespace.run)
        if namespace.json:
            print(json.dumps(state.as_dict())) if namespace.watch else print_json(state.as_dict())
        else:
            clear = "\x1b[2J\x1b[H" if namespace.watch and sys.stdout.isatty() else ""
            print(clear + printable(status_text(state, newest_messages(namespace.run))), flush=True)
        if not namespace.watch or state.ended:
            return 0 if state.ok else 1
        sys.stdout.flush()
        time.sleep(WATCH_SECONDS)


def view(argv: Sequence[str]) -> int:
    parser = Parser(
        "view",
        "Open a local page about runs, also while they go on: curves, why a token got its gradient, what another method would "
        "have done, siblings, where prompts and seconds went. Read only; reachable from this machine only.",
        "print one view as JSON instead of serving",
    )
    parser.add("runs", nargs="*", metavar="RUN", help="run directories, or folders of runs [runs]")
    parser.add("--port", type=int, default=0, help="port on 127.0.0.1; 0: any free one [0]")
    parser.add("--no-browser", action="store_true", help="only print the address")
    names = "overview, failures, why, what-if, siblings, gradient, policy, prompts, waits, tasks, reward, step, search"
    parser.add("--view", default="overview", help=f"the view of --json and --export: {names} [overview]")
    parser.add("--export", default="", metavar="FILE", help="write one view as one HTML file instead of serving")
    for name in VIEW_NUMBERS:
        parser.add(f"--{name}", default="", metavar="N", help=f"{name} of the view")
    for name in VIEW_TEXTS:
        parser.add(f"--{name}", default="", metavar=name[0].upper(), help=f"{name} of the view")
    parser.add_trust()
    namespace = parser.parse(argv)
    with reading(namespace.method, namespace.trust_run):
        return _view(namespace)


def _view(namespace: argparse.Namespace) -> int:
    from turnwise.inspector.page import serving
    from turnwise.inspector.page.blocks import ViewQuery

    readers = serving.find_runs(namespace.runs)
    if not readers:
        raise SettingError("there is no run here; write the path of one: turnwise view RUN")
    query = ViewQuery.parse({name: getattr(namespace, name) for name in (*VIEW_NUMBERS, *VIEW_TEXTS)})
    if namespace.json:
        print(serving.view_json(readers[0], namespace.view, query))
    elif namespace.export:
        print(serving.export_view(readers[0], namespace.view, query, namespace.export))
    else:
        serving.serve_page(readers, namespace.port, not namespace.no_browser, lambda text: print(text, flush=True))
    return 0
