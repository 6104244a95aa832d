"""Commands that judge, compare and replay runs: ``doctor``, ``replay``, ``bisect``, ``compare``, ``sweep``, ``audit``,
``probe-reward``."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from turnwise.cli.flags import Parser
from turnwise.cli.output import print_json, progress
from turnwise.cli.run_flags import RunFlags, read_run_flags
from turnwise.config.settings import Settings, known_setting, split_method
from turnwise.core.text import printable
from turnwise.errors import SettingError
from turnwise.recipes import signatures

COMMANDS = {
    "doctor": "say what is wrong with a run, with evidence and the setting to change",
    "replay": "take one step of a run again, bit for bit or with another method",
    "compare": "compare methods, or finished runs: paired seeds, equal token budgets, a stated error rate",
    "sweep": "the same over a grid of settings",
    "audit": "print where the losses of TRL or verl, or a dumped batch, deviate from the recipe in float64",
    "probe-reward": "attack an environment's reward and show the best-paid behaviour that is wrong",
    "bisect": "name the first step, task, token and field at which two runs part",
}


def doctor(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise doctor", description="Say what is wrong with a run, the most probable cause first.")
    parser.add_argument("run", help="a run directory; the run may still be going on")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise.inspector.doctor import diagnose

    diagnosis = diagnose(namespace.run)
    print_json(diagnosis.as_dict()) if namespace.json else print(printable(diagnosis.text()))
    return 1 if diagnosis.alarms else 0


def replay(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="turnwise replay",
        description="Take a step again from the nearest checkpoint before it, and compare it with what the run recorded.",
    )
    parser.add_argument("run", help="a run directory; it is only read")
    parser.add_argument("--step", type=int, required=True, help="the step, counted from 1 as in metrics.jsonl")
    parser.add_argument("--method", default="", help="take it also with this method, from the same weights and draws")
    parser.add_argument("--until", type=int, default=0, help="with --method: go on up to this step [the step itself]")
    parser.add_argument("--keep", default="", metavar="FOLDER", help="keep the replayed run in this new folder")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise.inspector.replay.replay import replay_step

    with progress(namespace.json) as listen:
        n = namespace
        report = replay_step(n.run, n.step, n.method, n.until, n.keep, listen)
    print_json(report.as_dict()) if namespace.json else print(printable(report.text()))
    return 0 if report.ok else 1


def bisect(argv: Sequence[str]) -> int:
    parser = Parser(prog="turnwise bisect", description="Find the first difference of two runs. Exact: no tolerance.")
    parser.add_argument("left", help="a run directory")
    parser.add_argument("right", help="another run directory")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise.inspector.replay.bisect import bisect_runs

    result = bisect_runs(namespace.left, namespace.right)
    print_json(result.as_dict()) if namespace.json else print(printable(result.text()))
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
        for name in filter(None, split_method(word)):
            signatures.check_method(name)
    about = "Compare methods (they are trained seed by seed) or finished runs."
    run = read_run_flags("compare", about, argv[len(words) :], _comparison_flags, positional=False)
    from turnwise.inspector.compare.comparison import compare_runs
    from turnwise.inspector.compare.live import method_variants

    if finished:
        return _show_comparison(compare_runs(finished, run.namespace.alpha), run.namespace)
    return _live(method_variants(words), run)


def sweep(argv: Sequence[str]) -> int:
    """``turnwise sweep METHOD --grid lr=1e-4,3e-4 --grid group_size=4,8``"""

    def own_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--grid",
            action="append",
            default=[],
            metavar="NAME=A,B",
            help="values of one setting; repeat it for more settings",
        )
        _comparison_flags(parser)

    run = read_run_flags("sweep", "Compare a grid of settings.", argv, own_flags)
    names = [f.name for f in fields(Settings)]
    grid: dict[str, list[str]] = {}
    for text in run.namespace.grid:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        if name not in names:
            raise SettingError(f"no setting {name!r}; {known_setting(name, names)}")
        grid[name] = [value for value in values.split(",") if value]
    from turnwise.inspector.compare.live import grid_variants

    return _live(grid_variants(grid), run)


def _comparison_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=20.0, help="no new seed is begun that would end later [20]")
    parser.add_argument("--seeds", type=int, default=5, help="seeds at most, fixed before the first look [5]")
    parser.add_argument("--alpha", type=float, default=0.05, help="probability of any wrong statement, at most [0.05]")
    parser.add_argument("--plot", default="", metavar="FILE", help="write a picture of all seeds")
    parser.add_argument("--json", action="store_true")


def _live(variants: Sequence[Any], run: RunFlags) -> int:
    from turnwise.inspector.compare.live import compare_live

    n, values = run.namespace, dict(run.values)
    out = values.pop("out", "runs") + f"/{values.pop('name', '') or 'comparison'}"
    with progress(n.json) as listen:
        comparison = compare_live(variants, values, out, n.minutes, n.seeds, n.alpha, listen)
    return _show_comparison(comparison, n)


def _show_comparison(comparison: Any, namespace: argparse.Namespace) -> int:
    if namespace.plot:
        comparison.plot(namespace.plot)
    print_json(comparison.as_dict()) if namespace.json else print(printable(comparison.text()))
    return 0


def audit(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="turnwise audit",
        description="Compare another trainer's loss, or a batch it dumped, with the recipe in float64; print what deviates.",
    )
    parser.add_argument("subject", help="trl, verl, or a .npz, .json or .safetensors file with logp, old_logp, mask, advantages, "
                        "and where they were dumped reference, reward, group, loss, gradient")  # fmt: skip
    parser.add_argument("--method", default="grpo", help="the recipe that a dumped batch is compared with [grpo]")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    for name in filter(None, split_method(namespace.method)):
        signatures.check_method(name)
    from turnwise.inspector.audit.report import audit_batch
    from turnwise.inspector.audit.trl_checks import audit_trl
    from turnwise.inspector.audit.verl_checks import audit_verl

    trainers = {"trl": audit_trl, "verl": audit_verl}
    report = trainers[n.subject]() if (n := namespace).subject in trainers else audit_batch(n.subject, n.method)
    print_json(report.as_dict()) if namespace.json else print(printable(report.text()))
    return 0


def probe_reward(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="turnwise probe-reward",
        description="Attack an environment's reward with scripted adversaries, a search and the tiny model, and show the "
        "best-paid behaviours that its oracle, its info['success'] or your check calls wrong. Exit status 1 if there are any.",
    )
    parser.add_argument("environment", help="a name of `turnwise environments`, module:Class or file.py:Class")
    parser.add_argument("--minutes", type=float, default=2.0, help="time at most [2]")
    parser.add_argument("--check", default="", metavar="FILE.PY:FUNCTION",
                        help="(env, messages) -> bool: is a finished episode right? Replaces info['success']")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="search and train although something was found before")
    parser.add_argument("--json", action="store_true")
    namespace = parser.parse(argv)
    from turnwise.config.named_object import load_object
    from turnwise.inspector.probe.probe import probe_reward as probe

    n = namespace
    check = load_object(n.check, f"check {n.check!r}", callable, "function") if n.check else None
    with progress(n.json) as listen:
        report = probe(n.environment, n.minutes, check, n.all, lambda text: listen("stage", {"name": text, "total": 0}))
    print_json(report.as_dict()) if n.json else print(printable(report.text()))
    return 0 if report.ok else 1


FUNCTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "doctor": doctor,
    "replay": replay,
    "bisect": bisect,
    "compare": compare,
    "sweep": sweep,
    "audit": audit,
    "probe-reward": probe_reward,
}
