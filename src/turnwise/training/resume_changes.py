"""Tells on resume what is not as it was when the run last started: edited settings, threads, device, processor, packages.

None of it is refused: a user may want it. But a run that continues otherwise than it began must say so. Knows no engine.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from turnwise.store.atomic import write_json
from turnwise.store.rundir import RunDir, installed_versions

STARTED = "started.json"
LAST_BITS = "results may differ in the last bits"


def describe_machine(device: torch.device, threads: int) -> dict[str, Any]:
    """What results depend on in the last bits: the GPU, or the instruction set of the CPU, and the number of threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"device": device.type, "processor": f"{platform.machine()} {name}", "threads": threads}


def changes_since_start(run_dir: RunDir, machine: Mapping[str, Any]) -> list[str]:
    """What changed since the run was last started, in sentences; then records how it starts now.

    ``machine``: what results may depend on besides settings and packages, such as ``{"device": "cpu", "threads": 2}``."""
    metadata = run_dir.metadata()
    now = {"settings": metadata["settings"], "machine": dict(machine), "versions": installed_versions()}
    now = json.loads(json.dumps(now))  # as the file will hold it: tuples are lists
    before = _read(run_dir) or now
    announced = {name for change in metadata.get("changes", ()) for name in change}  # by ``turnwise resume --steps``
    announced |= now["machine"].keys()
    told = [*_edited(before["settings"], now["settings"], announced), *_moved(before, now)]
    write_json(run_dir.path / STARTED, now)
    return told


def _edited(before: Mapping[str, Any], now: Mapping[str, Any], announced: set[str]) -> Iterator[str]:
    for name in sorted({*before, *now} - announced):
        old, new = before.get(name), now.get(name)
        if old != new:
            yield f"{name} was edited in run.json: it was {old!r}, and the run continues with {new!r}"


def _moved(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for part in ("machine", "versions"):
        for name in sorted({*before[part], *now[part]}):
            old, new = before[part].get(name), now[part].get(name)
            if old != new:
                yield f"{name} was {old} when the run was last started and is {new} now; {LAST_BITS}"


def _read(run_dir: RunDir) -> dict[str, Any] | None:
    """The record of the last start; None for a first start, and where the record cannot be read."""
    try:
        value = json.loads((run_dir.path / STARTED).read_text(encoding="utf-8"))
        return dict(value) if {"settings", "machine", "versions"} <= value.keys() else None
    except (OSError, ValueError, AttributeError):
        return None
