"""The benchmark table: generation, learning, whole step, memory. A part that fails reports why, and the others go on."""

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
from turnwise.bench.hardware_limits import HardwareLimits
from turnwise.bench.models import BenchSetup, parameters, setup_for
from turnwise.bench.report import PARTS, BenchRow
from turnwise.errors import SettingError


def measure(
    device: str = "auto",
    quick: bool = False,
    threads: int = 0,
    parts: tuple[str, ...] = PARTS,
    report_progress: Callable[[str], None] = print,
    keep: Callable[[dict[str, Any], list[BenchRow]], object] = lambda facts, rows: None,
) -> tuple[dict[str, Any], list[BenchRow]]:
    """(facts about the machine, the rows). Calls ``keep`` with them after each part, so that an interrupted run keeps its
    results."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingError("device is cuda, but this machine has no usable GPU; write --device cpu")
    if threads:
        torch.set_num_threads(threads)
    setup = setup_for(device, quick)
    report_progress(f"limits of {machine(setup)}: copies and matrix products")
    limits = HardwareLimits.measured(setup.device, setup.dtype)
    gpu, workers = setup.device == "cuda", torch.get_num_threads()
    steps, size = ((2 if quick else 4), setup.step) if gpu else ((3 if quick else 9), None)
    rounds = min(setup.repeats, 2) if gpu else setup.repeats
    jobs: list[tuple[str, Callable[[], list[BenchRow]]]] = [
        ("generation", lambda: generation.rows(setup, limits, rounds)),
        ("learning", lambda: learning.rows(setup, limits, setup.repeats)),
        ("step", lambda: training_step.rows("single", setup.device, size, steps, workers)),
    ]
    if not gpu and not quick:
        jobs.append(("step", lambda: training_step.rows("tools", setup.device, None, steps, workers)))
    if not gpu:
        jobs.append(("memory", memory.rows))
    rows: list[BenchRow] = []
    for part, job in jobs:
        if part not in parts:
            continue
        report_progress(f"measuring {part}")
        began = time.perf_counter()
        try:
            rows += job()
        except Exception as fault:  # an incomplete table is better than none
            why = (str(fault).strip().splitlines() or [""])[-1][:160]
            rows.append(BenchRow(part, "", "turnwise", None, "", note=f"failed: {type(fault).__name__}: {why}"))
        gc.collect()  # memory of one part must not count towards the next
        report_progress(f"  {time.perf_counter() - began:.0f} s")
        keep(facts(setup, limits), rows)
    return facts(setup, limits), rows


def machine(setup: BenchSetup) -> str:
    if setup.device == "cuda":
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} cores ({platform.machine()}), {torch.get_num_threads()} threads"


def facts(setup: BenchSetup, limits: HardwareLimits) -> dict[str, Any]:
    return {
        "machine": machine(setup),
        "device": setup.device,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "parameters": parameters(setup.model()),
        "copy_bytes_per_second": limits.bandwidth,
        "matrix_flops_per_second": limits.peak,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def title(facts: dict[str, Any]) -> str:
    return (
        f"{facts['machine']}, {facts['parameters'] / 1e6:.2f} M parameters, {facts['dtype']}: copies "
        f"{facts['copy_bytes_per_second'] / 1e9:,.0f} GB/s, products {facts['matrix_flops_per_second'] / 1e12:,.2f} TFLOP/s"
    )
