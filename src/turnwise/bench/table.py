"""One table of everything: generation, learning, whole step, memory; a part that fails says why and the others go on."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from turnwise.bench import generation, learning, memory, training_step
from turnwise.bench.hardware_limits import Limits
from turnwise.bench.models import Scene, parameters, scene
from turnwise.bench.report import Row
from turnwise.errors import SettingError, nearest

Say = Callable[[str], None]
PARTS = ("generation", "learning", "step", "memory")


def measure(
    device: str = "auto",
    quick: bool = False,
    threads: int = 0,
    parts: tuple[str, ...] = PARTS,
    say: Say = print,
    keep: Callable[[dict[str, Any], list[Row]], object] = lambda facts, rows: None,
) -> tuple[dict[str, Any], list[Row]]:
    """(what was measured on what, the rows). ``keep`` is given them after each part: a run that is stopped has what it had."""
    for part in parts:
        if part not in PARTS:
            raise SettingError(f"no part {part!r}; {nearest(part, PARTS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingError("device is cuda, but this machine has no usable GPU; write --device cpu")
    if threads:
        torch.set_num_threads(threads)
    chosen = scene(device, quick)
    say(f"limits of {machine(chosen)}: copies and matrix products")
    limits = Limits.measured(chosen.device, chosen.dtype)
    jobs = _jobs(chosen, limits, quick)
    rows: list[Row] = []
    for part, job in jobs:
        if part in parts:
            rows += _tried(part, job, say)
            keep(facts(chosen, limits), rows)
    return facts(chosen, limits), rows


def _jobs(chosen: Scene, limits: Limits, quick: bool) -> list[tuple[str, Callable[[], list[Row]]]]:
    gpu = chosen.device == "cuda"
    threads, count = torch.get_num_threads(), (2 if quick else 4) if gpu else 3 if quick else 9
    size = chosen.step if gpu else None
    jobs: list[tuple[str, Callable[[], list[Row]]]] = [
        ("generation", lambda: generation.rows(chosen, limits, min(chosen.repeats, 2) if gpu else chosen.repeats)),
        ("learning", lambda: learning.rows(chosen, limits, chosen.repeats)),
        ("step", lambda: training_step.rows("single", chosen.device, size, count, threads)),
    ]
    if not gpu and not quick:
        jobs.append(("step", lambda: training_step.rows("tools", chosen.device, None, count, threads)))
    if not gpu:
        jobs.append(("memory", memory.rows))
    return jobs


def _tried(part: str, job: Callable[[], list[Row]], say: Say) -> list[Row]:
    say(f"measuring {part}")
    began = time.perf_counter()
    try:
        rows = job()
    except Exception as fault:  # a table with a hole is worth more than none
        why = (str(fault).strip().splitlines() or [""])[-1][:160]
        rows = [Row(part, "", "turnwise", None, "", note=f"failed: {type(fault).__name__}: {why}")]
    gc.collect()  # what one part held must not count as another's memory
    say(f"  {time.perf_counter() - began:.0f} s")
    return rows


def machine(chosen: Scene) -> str:
    if chosen.device == "cuda":
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} cores ({platform.machine()}), {torch.get_num_threads()} threads"


def facts(chosen: Scene, limits: Limits) -> dict[str, Any]:
    return {
        "machine": machine(chosen),
        "device": chosen.device,
        "dtype": str(chosen.dtype).removeprefix("torch."),
        "parameters": parameters(chosen.model()),
        "copy_bytes_per_second": limits.bandwidth,
        "matrix_flops_per_second": limits.peak,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def title(said: dict[str, Any]) -> str:
    return (
        f"{said['machine']}, {said['parameters'] / 1e6:.2f} M parameters, {said['dtype']}: copies "
        f"{said['copy_bytes_per_second'] / 1e9:,.0f} GB/s, products {said['matrix_flops_per_second'] / 1e12:,.2f} TFLOP/s"
    )
