"""A run that goes on: what it needs from its directory, what has changed since, how it ended, and what may be changed now.

Knows the files of a run directory; no engine. Imports no torch: a change is refused before one is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from turnwise.config.convert import convert
from turnwise.config.settings import Settings, setting_type
from turnwise.errors import SettingError, StoreError
from turnwise.observe.trackers import read_rows
from turnwise.store.atomic import read_sealed, write_json, write_sealed
from turnwise.store.resume import ResumePlan
from turnwise.store.rundir import RunDir, installed_versions

STARTED = "started.json"
LAST_BITS = "results may differ in the last bits"
SERVERS = ("generator", "generator_key_env", "generator_seconds", "generator_weights")  # where a run samples, not what
CHANGEABLE = ("steps", "eval_every", "checkpoint_every", "keep_checkpoints", *SERVERS, "ranks", "cluster")
OF_THE_END = ("summary.json", "evaluation_after.json", "ranking_after.json")  # written when a run ends


# ------------------------------------------------------------------- what it needs


def check_files(run_dir: RunDir, digests: dict[str, str]) -> None:
    """Refuse to continue without the ledger, or on files whose content has changed. ``digests``: those of the data files that
    the run reads; recorded at its start."""
    unknown = "which groups were trained on is unknown"
    require_file(
        run_dir, run_dir.ledger, unknown, f"go on without knowing: turnwise resume {run_dir.path} --new-ledger"
    )
    for result in (*run_dir.path.glob("evaluation_*.json"), *run_dir.path.glob("ranking_*.json")):
        read_sealed(result)  # refuses a damaged one now, not after hours of training
    path = run_dir.path / "sources.json"
    recorded = read_sealed(path) if path.is_file() else digests
    changed = [name for name in recorded if recorded[name] != digests.get(name)]
    if changed:
        raise SettingError(f"{changed[0]} has changed since this run began; restore the old file, or start a new run")
    if digests and not path.is_file():
        write_sealed(path, digests)


def require_file(run_dir: RunDir, path: Path, consequence: str, otherwise: str = "start a new run") -> None:
    """Refuse a trained run without a file that cannot be made again. ``otherwise``: what to do where it cannot be restored."""
    if run_dir.step and not path.is_file():
        raise StoreError(
            f"{path} is missing, and the run has a checkpoint of step {run_dir.step}: {consequence}; restore the file, or "
            f"{otherwise}"
        )


def is_evaluated(run_dir: RunDir, step: int) -> bool:
    """Whether the metrics hold an evaluation after ``step``."""
    rows = [row for row in read_rows(run_dir.metrics) if row["step"] == step]
    return any(name.startswith(("eval/", "ranking/")) for row in rows for name in row)


# ---------------------------------------------------------------- what has changed


def changes_since_start(run_dir: RunDir, machine: Mapping[str, Any]) -> list[str]:
    """What is not as it was when the run last started, in sentences; then records how it starts now. None of it is refused: a
    user may want it. But a run that continues otherwise than it began must say so.

    ``machine``: what results may depend on besides settings and packages, such as ``{"device": "cpu", "threads": 2}``."""
    metadata, path = run_dir.metadata(), run_dir.path / STARTED
    now = {"settings": metadata["settings"], "machine": dict(machine), "versions": installed_versions()}
    now = json.loads(json.dumps(now))  # as the file will hold it: tuples are lists
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        before = before if before.keys() >= now.keys() else now
    except (OSError, ValueError, AttributeError):  # a first start, or a record that cannot be read
        before = now
    announced = {name for change in metadata.get("changes", ()) for name in change}  # by ``turnwise resume --steps``
    sentences = []
    for part, sentence in (
        ("settings", "{name} was edited in run.json: it was {old!r}, and the run continues with {new!r}"),
        ("machine", "{name} was {old} when the run was last started and is {new} now; " + LAST_BITS),
        ("versions", "{name} was {old} when the run was last started and is {new} now; " + LAST_BITS),
    ):
        skipped = announced | now["machine"].keys() if part == "settings" else set()
        for name in sorted({*before[part], *now[part]} - skipped):
            old, new = before[part].get(name), now[part].get(name)
            if old != new:
                sentences.append(sentence.format(name=name, old=old, new=new))
    write_json(path, now)
    return sentences


# -------------------------------------------------------------------- how it ended


def resume_messages(run_dir: RunDir, died: str, start: int, owed: ResumePlan) -> Iterator[str]:
    """That the process of the run died without a word (SIGKILL, out of memory, power), and what is rolled back. A process that
    ends by itself, also by an error or a signal that it handles, empties the lock file of the run.

    ``died``: the id of the process, if it died. ``start``: the step of the checkpoint, 0 without one. Call it before the
    metrics of later steps are removed."""
    rows = [row for row in read_rows(run_dir.metrics) if isinstance(row["step"], int)]
    last = rows[-1] if rows else None
    if died:
        ended = "it had not finished a step"
        if last is not None:
            moment = last.get("time")
            when = f", at {datetime.fromtimestamp(moment).astimezone():%Y-%m-%d %H:%M:%S %Z}" if moment else ""
            ended = f"its last step was {last['step']}{when}"
        yield f"the run did not end by itself: its process {died} was killed, ran out of memory, or the machine stopped; {ended}"
    lost = max(last["step"] - start, 0) if last else 0
    if not died and not lost:
        return
    begin = f"it continues from the checkpoint of step {start}" if start else "it begins again: it has no checkpoint"
    steps = "no step is lost"
    if lost:
        steps = f"step {start + 1} is" if lost == 1 else f"steps {start + 1} to {start + lost} are"
        steps += " taken again"
    count = len(owed.to_reissue) + len(owed.rolled_back)
    groups = {0: "no group of rollouts is", 1: "1 group of rollouts is"}.get(count, f"{count} groups of rollouts are")
    yield f"{begin}; {steps}, and {groups} rolled back"


# ------------------------------------------------------------- what may be changed


def changed_settings(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with ``changes``: more steps, or other intervals. Refuses what would change what is trained."""
    types = {name: setting_type(name, CHANGEABLE) for name in changes}
    for name in changes:
        if name not in CHANGEABLE:
            raise SettingError(
                f"resume cannot change {name}: the run would no longer train what it began with; it can change "
                f"{', '.join(CHANGEABLE)}. To train on with other settings: turnwise train --model RUN/model ..."
            )
    typed = {name: convert(name, value, types[name]) for name, value in changes.items()}
    return Settings.of({**settings.as_dict(), **typed})


def extend(run_dir: RunDir, settings: Settings, changes: Mapping[str, Any]) -> tuple[Settings, str]:
    """Record the changed settings in the run directory; the settings, and what to tell the user.

    The learning-rate schedule then spans the new number of steps: a run extended from 100 to 200 continues at step 101 with the
    learning rate that a run of 200 steps has there. The steps taken stay as they are, so an extended run is not the same as one
    that was started with more steps, unless the schedule is constant. What an earlier end wrote is kept under the number of its
    last step. The new settings are written last: a kill before that leaves a run that ends again where it ended."""
    new, done = changed_settings(settings, changes), run_dir.step
    if new == settings:
        return settings, ""
    if new.steps < done:
        raise SettingError(
            f"steps is {new.steps}, and the run has already taken {done}; write more, or leave --steps out"
        )
    if new.steps != settings.steps:
        for name in OF_THE_END:
            path = run_dir.path / name
            if path.is_file():
                path.rename(path.with_stem(f"{path.stem}_{settings.steps}"))
    # only what changes is written anew; all else stays as it was recorded
    metadata = run_dir.metadata()
    values = {name: new.as_dict()[name] for name in changes}
    change = {name: [metadata["settings"].get(name), value] for name, value in values.items()}
    metadata["settings"] = {**metadata["settings"], **values}
    metadata["changes"] = [*metadata.get("changes", []), {"after_step": done, **change}]
    write_json(run_dir.settings, metadata)
    if new.steps == settings.steps:
        return new, ""
    schedule = f"the {new.schedule} learning-rate schedule now spans {new.steps} steps"
    return new, f"steps: {settings.steps} → {new.steps}; {schedule}"
