"""A row of evidence: one training run as one line of JSON, sealed by a digest of its content. Starts no run.

What must come out again when the run is repeated stands under ``measured``; everything else says what was run, and where. A row
is *stale* when the code would run something else under its settings: other pieces, other settings of the environment, or pieces
that compute other numbers on a fixed synthetic batch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import turnwise
from turnwise.checks.synthetic import gradient, random_groups, random_policy
from turnwise.config.settings import Settings, default_of
from turnwise.core.batch import pack
from turnwise.core.signals import Signal
from turnwise.errors import SettingError, TurnwiseError
from turnwise.observe.mechanism import shares
from turnwise.observe.trackers import read_rows
from turnwise.recipes.recipe import Recipe
from turnwise.store.atomic import content_digest, read_object
from turnwise.store.rundir import installed_versions
from turnwise.training.plan import make_recipe, required_by, resolve_settings

Row = dict[str, Any]
SEAL = "sha256"
OF_THIS_MACHINE = ("out", "name", "device", "threads", "trackers", "seed", "model", "cold_steps")  # no part of a method
LATE = (
    "entropy", "calibration/auc", "groups/zero_variance", "tool_calls", "turns", "kl/behaviour", "clip_share", "grad_norm",
    "skipped", "staleness",
)  # fmt: skip
SHAPE = [[[2, 3], [4], [1, 2], [3, 1]], [[2], [0, 3], [5, 1], [2, 2]], [[1, 1, 2], [3], [2, 1], [4]]]
NEAR = 1e-6  # relative: what another processor may change in a number in float64
SOURCE = Path(turnwise.__file__).parent


# ------------------------------------------------------------- rows of a file


def read(places: Path) -> list[Row]:
    """The rows of a file, or of all ``.jsonl`` files of a folder, as they are written there."""
    files = sorted(places.glob("*.jsonl")) if places.is_dir() else [places] if places.is_file() else []
    lines = ((file, n, line) for file in files for n, line in enumerate(file.read_text("utf-8").splitlines(), 1))
    rows = []
    for file, number, line in lines:
        try:
            rows.append({**json.loads(line), "place": f"{file.name}:{number}"})
        except (ValueError, TypeError):
            raise SettingError(
                f"{file} line {number} is no row of JSON; remove the line (a kill cuts the last one)"
            ) from None
    return rows


def append(path: Path, row: Row) -> Row:
    """Seal a row and write it; a single write, so that rows of several writers never mix."""
    row = json.loads(json.dumps(row))
    row[SEAL] = seal(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return row


def seal(row: Row) -> str:
    return content_digest({key: value for key, value in row.items() if key not in (SEAL, "place")})


def identity(asked: Mapping[str, Any]) -> str:
    """The name of a run: equal for equal settings, arguments and start."""
    return content_digest(json.loads(json.dumps(asked)))[:12]


# ---------------------------------------------------- what the code would run


def described(settings: Mapping[str, Any]) -> Row:
    """What the code now makes of settings: the slots that are not those of a bare recipe, the settings with what environment and
    method add, and the method's numbers on a fixed batch."""
    resolved = resolve_settings({key: value for key, value in settings.items() if key not in OF_THIS_MACHINE})
    recipe = make_recipe(resolved)
    bare = Recipe(advantage=recipe.advantage).slots()
    slots = {slot: piece for slot, piece in recipe.slots().items() if slot == "advantage" or piece != bare[slot]}
    plain = resolved.as_dict()
    changed = {f.name: plain[f.name] for f in fields(Settings) if plain[f.name] != default_of(f)}
    kept = {key: value for key, value in changed.items() if key not in OF_THIS_MACHINE}
    return json.loads(json.dumps({"slots": slots, "resolved": kept, "numbers": numbers(recipe)}, default=str))


def numbers(recipe: Recipe) -> list[float] | str:
    """The loss of a method on a synthetic batch, and sums of its gradients; or why there are none."""
    try:
        groups = random_groups(SHAPE, 3, requirements=required_by(recipe))
        batch, leaves = random_policy(pack(groups), 3)
        taken = gradient(recipe.objective, batch, leaves)
    except Exception as fault:  # a method that wants what no synthetic batch has: its slots still tell
        return f"{type(fault).__name__}"
    slope = taken.of.get(Signal.LOGP, torch.zeros(1, dtype=torch.float64))
    places = torch.arange(1, slope.numel() + 1, dtype=torch.float64)
    sums = [taken.loss, slope.abs().sum(), (slope.flatten() * places.sin()).sum()]
    return [round(float(x), 12) for x in sums]


@functools.cache
def _now(settings: str) -> Row | str:
    try:
        return described(json.loads(settings))
    except TurnwiseError as fault:
        return str(fault).splitlines()[0]


def stale(row: Row) -> str:
    """What the code would run otherwise now; empty for a row that still stands."""
    if row["measured"]["measure"] == "reward" and row["measured"]["before"].get("success") is not None:
        return "it holds rewards where others hold success"
    asked = {key: value for key, value in row["settings"].items() if key not in OF_THIS_MACHINE}
    now, then = _now(json.dumps(asked, sort_keys=True)), row["method"]
    if isinstance(now, str):
        return now
    for part in ("slots", "resolved"):
        for name in sorted({*now[part], *then[part]}):
            if now[part].get(name) != then[part].get(name):
                return f"{name} was {then[part].get(name, 'the default')}, is {now[part].get(name, 'the default')}"
    return "" if _same(now["numbers"], then["numbers"]) else "the same pieces compute other numbers now"


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(
            math.isclose(a, b, rel_tol=NEAR, abs_tol=1e-9) or (a != a and b != b) for a, b in zip(left, right)
        )
    return bool(left == right)


# ------------------------------------------------------------ what a run left


def measured(run: Path) -> Row:
    """All that a run measured and that a repetition must measure again, to the last bit."""
    summary, metrics = read_object(run / "summary.json"), read_rows(run / "metrics.jsonl")
    outcomes = {when: summary[f"success_{when}"] for when in ("before", "after")}
    # not by the evaluation after: it reports no success where no episode came to an answer, which counts as none
    measure = "success" if outcomes["before"].get("success") is not None else "reward"
    curve, tokens, drawn, sizes = [[0, 0.0, 0.0, outcomes["before"].get(measure)]], 0.0, 0.0, [0.0, 0.0]
    for row in metrics:  # episodes are all that were played, those of dropped groups too
        tokens, drawn = tokens + row.get("tokens", 0.0), row.get("tasks_drawn", drawn)
        sizes = [sizes[0] + row.get("trajectories", 0.0), sizes[1] + row.get("groups", 0.0)]
        episodes = round(drawn * sizes[0] / sizes[1]) if sizes[1] else 0.0
        if f"eval/{measure}" in row:
            curve.append([row["step"], episodes, tokens, row[f"eval/{measure}"]])
    last = [row for row in metrics if "loss" in row or "tokens" in row]
    late = last[-max(1, len(last) // 4) :]
    means = {name: [row[name] for row in late if row.get(name) is not None] for name in LATE}
    curve.append([summary["steps"], episodes if metrics else 0.0, tokens, outcomes["after"].get(measure)])
    weights = run / "model" / "model.safetensors"
    return {
        "measure": measure,
        **{when: {k: v for k, v in value.items() if k != "by_difficulty"} for when, value in outcomes.items()},
        "curve": curve,
        "acted": shares(metrics),
        "late": {name: sum(values) / len(values) for name, values in means.items() if values},
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest()[:16] if weights.is_file() else "",
    }


def difference(left: Any, right: Any, place: str = "") -> str:
    """Where two measurements differ first, and by what; empty if they are equal to the last bit."""
    if isinstance(left, dict) and isinstance(right, dict):
        parts = ((f"{place}.{key}", left.get(key), right.get(key)) for key in sorted({*left, *right}))
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        parts = ((f"{place}[{n}]", a, b) for n, (a, b) in enumerate(zip(left, right)))
    else:
        return "" if left == right else f"{place.lstrip('.')} was {left}, is {right}"
    return next(filter(None, (difference(a, b, inner) for inner, a, b in parts)), "")


# ------------------------------------------------------------------ the place


@functools.cache
def provenance() -> Row:
    """Commit, digest of the package's source, versions, and the kind of processor."""
    git = ["git", "-C", str(SOURCE), "rev-parse", "--short=12", "HEAD"]  # a copy of the files may have no git
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    source = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        source.update(path.relative_to(SOURCE).as_posix().encode() + path.read_bytes())
    versions = {name: text for name, text in installed_versions().items() if text != "not installed"}
    return {
        "commit": commit,
        "source": source.hexdigest()[:12],
        "versions": versions,
        "machine": {"processor": processor(), "cores": os.cpu_count()},
    }


def processor() -> str:
    """``x86_64 Intel(R) Xeon(R) ...``, as far as the system tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return " ".join([platform.machine(), *names[:1]])
