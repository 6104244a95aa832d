"""How many CPU threads compute: measured once at the start of a run. Knows no model and no setting.

On a machine whose cores are all free, more threads are faster. Beside another busy process they wait for each other at the end
of every operation, and one thread can be several times faster than two. The number changes the order of sums and so the last
bits of a result: a run records it, and a resumed run uses it again.
"""

from __future__ import annotations

import os
import time

import torch

ROUNDS = 6
PRODUCTS = 20  # per round: a few milliseconds
ROWS, WIDTH = 512, 192  # a micro-batch of the tiny model
MARGIN = 1.15  # fewer threads must be this much faster: a quiet machine always keeps all of its cores


def available_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measured_threads() -> int:
    """The thread count with the shortest time for a series of small matrix products; all cores unless fewer clearly win."""
    cores, previous = available_cores(), torch.get_num_threads()
    candidates = sorted({1, max(1, cores // 2), cores})
    if candidates == [1]:
        return 1
    seconds = dict.fromkeys(candidates, 0.0)
    try:
        for round_number in range(ROUNDS):
            for count in candidates:
                torch.set_num_threads(count)
                elapsed = _time_products()
                seconds[count] += elapsed if round_number else 0.0  # the first round starts the threads
    finally:
        torch.set_num_threads(previous)
    fastest = min(candidates, key=lambda count: seconds[count])
    return fastest if seconds[cores] > MARGIN * seconds[fastest] else cores


def _time_products() -> float:
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, 4 * WIDTH)
    start = time.perf_counter()
    for _ in range(PRODUCTS):
        torch.nn.functional.silu(x @ weight)
    return time.perf_counter() - start
