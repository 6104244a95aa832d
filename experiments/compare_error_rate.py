"""Does a comparison keep its error rate? 1,000 simulated comparisons of two identical methods, and the power against real gaps.

    python experiments/compare_error_rate.py [--out experiments/results/compare_error_rate.json]

A simulated run: held-out success of one seed is a mean over tasks of answers that are right with that seed's probability. The
seeds of a method vary (standard deviation 0.05 in probability), and a part of it is common to both methods of a pair.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.inspector.compare.comparison import CANNOT_TELL, paired_difference

TASKS, SEEDS, SPREAD, ALPHA = 200, 8, 0.05, 0.05


def simulate(count: int, gap: float, seeds: int = SEEDS, rng_seed: int = 0) -> dict[str, Any]:
    """``count`` sequential comparisons whose true difference is ``gap``."""
    rng = np.random.default_rng(rng_seed)
    called, used = 0, 0
    for _ in range(count):
        shared = rng.normal(0.5, SPREAD, seeds)
        own = rng.normal(0, SPREAD, (2, seeds))
        rates = np.clip([shared + own[0] + gap, shared + own[1]], 0, 1)
        outcomes = rng.binomial(TASKS, rates) / TASKS
        for n in range(2, seeds + 1):
            verdict = paired_difference(*(side[:n].tolist() for side in outcomes), ALPHA, sequential=True).verdict
            if verdict != CANNOT_TELL:
                break
        called += verdict != CANNOT_TELL
        used += n
    return {
        "gap": gap,
        "seeds": seeds,
        "comparisons": count,
        "called_different": called / count,
        "mean_seeds": used / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="")
    rows = [simulate(1000, gap, seeds) for seeds in (5, 10) for gap in (0.0, 0.1, 0.2, 0.3, 0.4)]
    for row in rows:
        print(row)
    if out := parser.parse_args().out:
        Path(out).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
