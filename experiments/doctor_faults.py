"""Does the doctor name what is wrong? 32 runs with a planted fault, 10 healthy ones.

    python experiments/doctor_faults.py [--out experiments/results/doctor_faults.json]

Most runs are synthetic: run directories whose metrics follow a run that learns (with noise, by seed), with one fault planted
into metrics, settings, groups or evaluations. They show that rules and their order fit together. They cannot show that a real
fault looks like this.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.inspector.doctor import diagnose
from turnwise.store.atomic import write_sealed
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir
from turnwise.training.collector import StalenessPolicy

STEPS = 24
DEFAULTS = Settings().as_dict()
Row = dict[str, Any]


@dataclass
class Plan:
    """A run to write: settings, one row of metrics per step, evaluations, how many tasks its groups come from."""

    settings: dict[str, Any] = field(default_factory=lambda: {"env": "calculator", "steps": STEPS, "trackers": ()})
    rows: list[Row] = field(default_factory=list)
    before: dict[str, Any] = field(default_factory=lambda: {"success": 0.3, "interval": [0.22, 0.39]})
    after: dict[str, Any] = field(default_factory=lambda: {"success": 0.68, "interval": [0.6, 0.76]})
    tasks: int = 48
    groups: int = 0  # in the ledger; 0: the run directory has no ledger, which costs most of the time
    dropped: int = 0
    reason: str = "all rewards are equal"  # why they were dropped
    finished: bool = True


def healthy(seed: int) -> Plan:
    """A run that learns: success from 0.3 to about 0.7, entropy slowly down, two seconds per step."""
    rng, plan = random.Random(seed), Plan(groups=48 if seed == 0 else 0, dropped=4)
    noise = lambda x, share=0.08: x * (1 + rng.gauss(0, share))  # noqa: E731
    for n in range(STEPS):
        t = n / (STEPS - 1)
        success = min(0.95, max(0.05, noise(0.3 + 0.4 * t, 0.12)))
        fails = max(0.0, noise((1 - success) ** 3))
        succeed = max(0.0, noise(success**3))
        plan.rows.append(
            {
                "groups": 8.0, "trajectories": 64.0, "tokens": noise(4000), "turns": noise(3.0), "tool_calls": noise(2.0),
                "tool_errors": noise(0.5 - 0.3 * t), "tool_calls/unread": 0.0, "restarts": 0.0, "success": success,
                "reward": success, "reward_max_abs": 1.0, "groups/zero_variance": min(1.0, fails + succeed),
                "groups/all_fail": min(1.0, fails), "groups/all_succeed": min(1.0, succeed), "answers/distinct": noise(0.9, 0.03),
                "tokens_per_turn": noise(20 + 4 * t), "truncated/turns_by_max_tokens": abs(rng.gauss(0.02, 0.02)),
                "truncated/episodes_by_context": 0.0, "truncated/episodes_by_max_turns": abs(rng.gauss(0.05, 0.03)),
                "staleness": 0.0, "staleness/oldest": 0.0, "seconds/turn_sampled": noise(0.04),
                "seconds/turn_answered": noise(0.01), "policy_check": noise(2e-7), "clip_share": abs(rng.gauss(0.01, 0.01)),
                "ratio": 1.0 + rng.gauss(0, 1e-3), "advantage/size": noise(0.6), "kl/behaviour": abs(noise(1e-3)),
                "mismatch/mean_abs": noise(2e-7), "entropy": noise(1.5 - 0.7 * t), "grad_norm": noise(0.8, 0.3),
                "loss": rng.gauss(0, 0.02), "lr": 3e-4 * (1 - 0.9 * t), "skipped": 0.0, "ratio/ess/token": 0.99,
                "gradient_share/positive_advantage": noise(0.5), "seconds": noise(2.0), "seconds/rollout": noise(1.4),
                "seconds/learn": noise(0.55), "seconds/publish": noise(0.03), "tasks_drawn": 8.0 * (n + 1),
            }
        )  # fmt: skip
    return plan


def write_run(path: Path, plan: Plan) -> Path:
    """The plan as a run directory."""
    settings = {**DEFAULTS, **plan.settings}
    run = RunDir.create(path.parent, path.name, settings, "recipe", 0)
    lines = [json.dumps({"step": n + 1, "time": float(n), **row}) for n, row in enumerate(plan.rows)]
    run.metrics.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for when, summary in (("before", plan.before), ("after", plan.after)):
        write_sealed(path / f"evaluation_{when}.json", {"summary": summary, "rows": []})
    if plan.finished:
        run.write_summary({"device": "cpu"})
    if plan.groups:
        _write_ledger(run, plan)
    return path


def _write_ledger(run: RunDir, plan: Plan) -> None:
    with SqliteLedger(run.ledger) as ledger:
        for n in range(plan.groups + plan.dropped):
            task = Task("calculator", n % plan.tasks)
            turn = Turn(context=(1,), tokens=(2,), logp=(-0.5,), version=(0,), reward=float(n % 2))
            ledger.issue(str(n), task, 0, 0)
            ledger.finish(Group(str(n), task, (Trajectory(f"{n}.0", task, (turn,)),)), 0)
            if n < plan.groups:
                ledger.train([str(n)], min(n // 8, STEPS - 1))
            else:
                ledger.drop(str(n), plan.reason, 0)


# --------------------------------------------------------------------- faults

Fault = Callable[[Plan], None]


def every(**values: Any) -> Fault:
    """Set metrics in every step; a function gets the share of the run that has passed."""

    def plant(plan: Plan) -> None:
        for n, row in enumerate(plan.rows):
            t = n / (STEPS - 1)
            planted = {name.replace("__", "/"): value for name, value in values.items()}
            row.update({name: value(t) if callable(value) else value for name, value in planted.items()})

    return plant


def also(*faults: Fault) -> Fault:
    def plant(plan: Plan) -> None:
        for fault in faults:
            fault(plan)

    return plant


def fields(**values: Any) -> Fault:
    def plant(plan: Plan) -> None:
        for name, value in values.items():
            setattr(plan, name, value)

    return plant


def setting(**values: Any) -> Fault:
    return lambda plan: plan.settings.update(values)


def metric(name: str, value: Any) -> Fault:
    return every(**{name.replace("/", "__"): value})


STUCK = fields(after={"success": 0.31, "interval": [0.23, 0.4]})
FLAT = also(metric("success", 0.3), metric("reward", 0.3), STUCK)
ZERO = {"reward": 0.0, "success": 0.0, "groups/zero_variance": 1.0,
        "groups/all_fail": 1.0, "advantage/size": 0.0, "grad_norm": 0.0}  # fmt: skip


def nothing_rewarded(plan: Plan) -> None:
    for row in plan.rows:
        row.update({**ZERO, "reward_max_abs": 0.0})


def same_answers(plan: Plan) -> None:
    for row in plan.rows:
        row.update({**ZERO, "reward": 0.3, "reward_max_abs": 1.0, "answers/distinct": 8 / 64})


FAULTS: dict[str, tuple[str, Fault]] = {  # what was done: (the rule that must come first, how)
    "max_tokens 4": ("turns cut by max_tokens", also(metric("truncated/turns_by_max_tokens", 0.9), FLAT)),
    "context 100": ("episodes cut by context", also(metric("truncated/episodes_by_context", 0.7), FLAT)),
    "max_turns 1": ("episodes cut by max_turns", also(metric("truncated/episodes_by_max_turns", 0.95), FLAT)),
    "temperature 0": ("identical answers", also(same_answers, STUCK)),
    "reward constant 1": ("no spread of rewards", also(every(groups__zero_variance=1.0, advantage__size=0.0, reward=1.0,
        success=0.3, grad_norm=0.0, groups__all_fail=0.0, groups__all_succeed=0.0), STUCK)),
    "reward never paid": ("nothing is ever rewarded", also(nothing_rewarded, STUCK)),
    "clip bound 0": ("zero gradient", also(metric("grad_norm", 0.0), metric("clip_share", 1.0), FLAT)),
    "environment raises": ("failed episodes", also(metric("dropped/trajectory: KeyError: 'x'", 30.0), FLAT)),
    "no usable group": ("no group to train on", lambda plan: [row.update(groups=0.0) for row in plan.rows[::3]] and None),
    "wrong tool syntax": ("unread tool calls", also(metric("tool_calls/unread", 1.5), metric("tool_calls", 0.0), FLAT)),
    "rewards of 1e30": ("skipped optimiser steps", also(metric("skipped", 1.0), metric("reward_max_abs", 1e30), FLAT)),
    "mismatch grows": ("growing mismatch", also(metric("policy_check", lambda t: 1e-5 + 1e-3 * t), STUCK)),
    "environment sleeps": ("slow environment", also(metric("seconds/turn_answered", 2.0), metric("seconds", 9.0))),
    "loss is NaN": ("loss not finite", also(metric("loss", None), FLAT)),
    "lr 0": ("learning rate zero", also(metric("lr", 0.0), FLAT)),
    "group_size 1": ("groups of one", also(setting(group_size=1), every(trajectories=8.0, advantage__size=0.0, grad_norm=0.0,
        groups__zero_variance=1.0), FLAT)),
    "temperature not recorded": ("ratio not 1 at the first step", also(metric("ratio", 1.6), metric("mismatch/mean_abs", 0.4))),
    "fp8 rollouts": ("sampler and learner differ", also(metric("mismatch/mean_abs", 0.08), setting(rollout_dtype="fp8"))),
    "staleness 8": ("stale data", also(setting(staleness=8), every(staleness=7.0, ratio__ess__token=0.4, clip_share=0.3))),
    "slow episodes": ("groups too old", also(setting(staleness="2,drop"), every(staleness=1.4),
        fields(groups=48, dropped=90, reason=StalenessPolicy(2, "drop").reason))),
    "16 epochs": ("most tokens clipped", also(every(clip_share=0.7, kl__behaviour=0.15))),
    "lr 100 times too high": ("large policy steps", also(metric("kl/behaviour", 0.9),
        every(reward=lambda t: 0.7 * (1 - t), success=lambda t: 0.7 * (1 - t)))),
    "lr too high, late": ("reward collapsed", every(reward=lambda t: 0.8 if t < 0.5 else 0.05,
        success=lambda t: 0.8 if t < 0.5 else 0.05)),
    "no entropy term": ("entropy collapse", also(metric("entropy", lambda t: 1.5 * (1 - t) ** 4 + 0.01),
        metric("answers/distinct", 0.3))),
    "entropy term too large": ("entropy grows", also(metric("entropy", lambda t: 1 + 4 * t), FLAT)),
    "reward pays for length": ("reward rises, success does not", also(every(reward=lambda t: 0.3 + t, success=0.3,
        tokens_per_turn=lambda t: 20 + 60 * t), STUCK)),
    "tools give nothing": ("tools given up", metric("tool_calls", lambda t: 2.0 * (1 - t) ** 6)),
    "tool needs a package": ("tool calls fail", also(metric("tool_errors", 1.9), FLAT)),
    "tasks solved already": ("tasks too easy", also(every(success=0.99, reward=0.99, groups__all_succeed=0.93,
        groups__zero_variance=0.93),
        fields(before={"success": 0.98, "interval": [0.95, 1.0]}, after={"success": 0.99, "interval": [0.96, 1.0]}))),
    "eight tasks only": ("few tasks repeated", fields(tasks=8, groups=48, after={"success": 0.35, "interval": [0.27, 0.44]})),
    "template drops reasoning": ("history rewritten", metric("restarts", 2.0)),
    "environment leaks": ("steps become slower", every(seconds=lambda t: 2 + 18 * t, seconds__rollout=lambda t: 1.4 + 18 * t)),
}  # fmt: skip


def measure(folder: Path, seeds: int = 10) -> dict[str, Any]:
    """Which rule came first on each faulty run, and every alarm on healthy ones."""
    named: dict[str, dict[str, Any]] = {}
    for n, (fault, (rule, plant)) in enumerate(FAULTS.items()):
        plan = healthy(100 + n)
        plant(plan)
        alarms = diagnose(write_run(folder / f"fault{n}", plan)).alarms
        named[fault] = {"rule": rule, "first": alarms[0].rule if alarms else "", "others": [f.rule for f in alarms[1:]]}
    runs = {seed: write_run(folder / f"healthy{seed}", healthy(seed)) for seed in range(seeds)}
    false = {seed: [f.rule for f in diagnose(run).alarms] for seed, run in runs.items()}
    right = sum(row["first"] == row["rule"] for row in named.values())
    return {"faults": len(named), "named_first": right, "healthy": seeds, "false_alarms": sum(map(bool, false.values())),
            "rows": named, "alarms_on_healthy": false}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder))
    for fault, row in result["rows"].items():
        print(
            f"{'ok ' if row['first'] == row['rule'] else 'NO '} {fault:<28} {row['first']:<36} {', '.join(row['others'])}"
        )
    print(
        {name: result[name] for name in ("faults", "named_first", "healthy", "false_alarms")},
        result["alarms_on_healthy"],
    )
    if out := parser.parse_args().out:
        Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
