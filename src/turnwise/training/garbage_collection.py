"""Python's cyclic garbage collector while a run trains. Knows nothing of the run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

GC_THRESHOLD = 50_000  # new containers between cycle collections; a step makes tens of thousands, the default is 700


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """Freeze live objects so that the cyclic collector skips them, and collect seldom: libraries hold a million objects, a
    step makes tens of thousands of containers, and few of them form cycles."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
