"""The runs of experiments/learning_plan.py as jobs: cold starts, teachers and files first, each once, then the runs.

Part of ``experiments/learning_sweep.py --plan``; knows nothing of tables."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import learning_plan
from processes import Job, Row, call, read, schedule, subprocess_environment


class Sweep:
    """A plan as jobs: a cold start and a teacher per (environment, seed), files, and then the runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows = options, read([options.rows])

    def jobs(self) -> list[Job]:
        finished = {key(row) for row in self.rows if "error" not in row}
        runs = [(run, seed) for seed in self.options.seeds for run in map(learning_plan.plan_run, self.options.methods)]
        runs = [(run, seed) for run, seed in runs if key(self.row(run, seed)) not in finished]
        made: dict[Hashable, Job] = {}
        for run, seed in runs:
            for job in (self.cold(run, seed), *(one for word in run.needs for one in self.before(word, run, seed))):
                made[job.key] = job
        return [*made.values(), *(self.run(run, seed) for run, seed in runs)]

    def row(self, run: learning_plan.Run, seed: int) -> Row:
        settings = {name: value for name, value in run.settings.items() if name != "steps"}
        steps = self.options.steps or int(run.settings["steps"])
        return {
            "method": run.method,
            "seed": seed,
            "env": run.env,
            "steps": steps,
            "set": settings | run.flags | run.options,
            "why": run.why,
        }

    def train(self, method: str, env: str, seed: int, name: str, values: dict[str, Any]) -> Row:
        settings = {
            "env": env,
            "seed": seed,
            "out": self.options.out,
            "name": name,
            "device": "cpu",
            "trackers": "",
            **values,
        }
        flags = [f"--{word.replace('_', '-')}={value}" for word, value in settings.items()]
        line = [
            sys.executable,
            "-m",
            "turnwise.cli.main",
            "train",
            method,
            *flags,
            f"--checkpoint-every={values['steps']}",
            "--json",
        ]
        return call(line, min(86400.0, self.options.until - time.monotonic()))

    def cold(self, run: learning_plan.Run, seed: int) -> Job:
        """The cold start that all methods of an environment and a seed share."""
        env = learning_plan.ENVIRONMENTS[run.env].cold_start_of or run.env
        shared = {
            word: value for word, value in learning_plan.ENVIRONMENTS[env].settings.items() if word == "difficulty"
        }
        values = {**shared, "steps": 1, "eval_tasks": 1}
        return Job(
            ("cold", env, seed), lambda _: self.trained("reinforce", env, seed, "cold", "initial", values), cost=1
        )

    def before(self, word: str, run: learning_plan.Run, seed: int) -> list[Job]:
        """The jobs that make an input of a run, dependencies first."""
        if word == "cold":
            return []
        if word == "pool":
            return [self.pool(run, seed)]
        return [self.teacher(run, seed)] if word == "teacher" else self.files(word, run.env)

    def teacher(self, run: learning_plan.Run, seed: int) -> Job:
        """A model trained with plain policy gradients from the same cold start."""
        start, steps = self.cold(run, seed).key, self.options.steps or run.settings["steps"]
        values = {"cold_steps": 0, "steps": steps, "eval_tasks": 1}
        work = lambda done: self.trained("dr_grpo", run.env, seed, "teacher", "model", {**values, "model": done[start]})  # noqa: E731
        return Job(("teacher", run.env, seed), work, (start,), 2)

    def pool(self, run: learning_plan.Run, seed: int) -> Job:
        """A folder with the groups of another run of the method, which starts from the same model with another seed."""
        start, steps = self.cold(run, seed).key, self.options.steps or run.settings["steps"]
        folder = self.options.out / f"pool-{run.method}-{seed}"

        def work(done: dict[Hashable, Any]) -> str | None:
            values = {"cold_steps": 0, "steps": steps, "eval_tasks": 1, "model": done[start], "folder": folder}
            made = self.trained(run.method, run.env, seed + 1000, "other", "model", values)
            return made and str(folder)

        return Job(("pool", run.method, run.env, seed), work, (start,), 2)

    def trained(self, method: str, env: str, seed: int, role: str, part: str, values: Row) -> str | None:
        """A model that other runs start from or use as a teacher; None if it could not be made."""
        name = f"{role}-{env.replace(':', '.')}-{seed}" + (f"-{values['steps']}" if role == "teacher" else "")
        if not (self.options.out / name / "summary.json").is_file():
            summary = self.train(method, env, seed, name, values)
            if "error" in summary or not summary:
                print(f"no {role} of {env}: {summary.get('error', 'out of time')}", file=sys.stderr, flush=True)
                return None
        return str(self.options.out / name / part)

    def files(self, word: str, env: str) -> list[Job]:
        """Rows of the environment's scripted policies, some of them transformed."""
        form, change = learning_plan.DERIVED_FILES[word]
        target = self.options.out / f"{word}-{env.replace(':', '.')}.jsonl"
        if change is None:
            return [Job((word, env), lambda _: self.exported(env, form, target))]

        def changed(done: dict[Hashable, Any]) -> str | None:
            if done[form, env] is None:
                return None
            rows = change(read([Path(done[form, env])]))
            target.write_text("\n".join(map(json.dumps, rows)) + "\n")
            return str(target)

        return [*self.files(form, env), Job((word, env), changed, ((form, env),))]

    def exported(self, env: str, form: str, target: Path) -> str | None:
        if target.is_file():
            return str(target)
        raw = target.with_suffix(f".{os.getpid()}.jsonl")
        line = [
            sys.executable,
            "-m",
            "turnwise.cli.main",
            "export",
            env,
            str(raw),
            "--as",
            form,
            f"--tasks={self.options.tasks}",
        ]
        done = subprocess.run(line, capture_output=True, text=True, env=subprocess_environment())
        if done.returncode:
            print(f"no {form} of {env}: {done.stderr[-400:]}", file=sys.stderr, flush=True)
            return None
        raw.rename(target)
        return str(target)

    def run(self, run: learning_plan.Run, seed: int) -> Job:
        start = self.cold(run, seed).key
        made = {word: self.before(word, run, seed)[-1].key for word in run.needs if word != "cold"}

        def work(done: dict[Hashable, Any]) -> None:
            row, began = self.row(run, seed), time.perf_counter()
            if missing := [name for name in (start, *made.values()) if done[name] is None]:
                print(f"{run.method} not run: it needs {missing}", file=sys.stderr, flush=True)
                return
            flags = {flag: done[made[word]] if word in made else word for flag, word in run.flags.items()}
            flags |= {name: done[made[word]] if word in made else word for name, word in run.options.items()}
            values = {**run.settings, "steps": row["steps"], **flags, "model": done[start], "cold_steps": 0}
            name = f"{run.method}-{seed}-{os.getpid()}"
            summary = self.train(run.method, run.env, seed, name, {**values, "eval_tasks": self.options.eval_tasks})
            if summary:  # empty if it was stopped
                self.keep({**row, "seconds": round(time.perf_counter() - began, 1), **result(summary)})

        return Job((run.method, seed), work, (start, *made.values()), run.seconds)

    def keep(self, row: Row) -> None:
        self.rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        with self.options.rows.open("a") as file:
            file.write(line + "\n")


def result(summary: Row) -> Row:
    if "error" in summary:
        return {"error": summary["error"]}
    before, after = summary["success_before"], summary["success_after"]
    row = {"before": before["success"], "before_interval": before["interval"]}
    row |= {"after": after["success"], "interval": after["interval"]}
    ranked = [summary.get("ranking", {}).get(when, {}).get("accuracy") for when in ("before", "after")]
    return row if None in ranked else row | {"ranking": ranked}


def key(row: Row) -> tuple[Hashable, ...]:
    """The identity of a run of a plan: equal keys are the same run."""
    return (*(row[name] for name in ("method", "seed", "env", "steps")), *sorted(row["set"].items()))


def run_plan(options: argparse.Namespace) -> list[Row]:
    options.out.mkdir(parents=True, exist_ok=True)
    options.rows = options.rows or options.out / "rows.jsonl"
    sweep = Sweep(options)
    schedule(sweep.jobs(), options.jobs, options.until)
    return sweep.rows
