"""Learn from a file of preference pairs, without rollouts: DPO.

Writes a small file of pairs (the same prompt, a better and a worse dialogue), trains on it, and reports how often the policy
finds the better answer of a held-out pair likelier than the worse one, before and after.

    python examples/offline_preferences.py      about 20 seconds on two cores
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from turnwise import train
from turnwise.cli.sharing import export


def main(tasks: int = 120, steps: int = 20) -> dict:
    """Make the pairs, train on them; returns the summary of the run."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder, "pairs.jsonl")
        # Rows come from the environment's scripted players here. Any file with prompt, chosen and rejected will do.
        rows = export("guess", "pairs", pairs, tasks=tasks)
        print(f"{rows} pairs, for instance:")
        example = json.loads(pairs.read_text().splitlines()[0])
        print({key: str(value)[:70] for key, value in example.items()})
        summary = train(
            method="dpo", env="guess", data=str(pairs), steps=steps, groups=8, hidden=64, cold_steps=8, context=320,
            eval_tasks=0, trackers=(), out=folder,
        )  # fmt: skip
    for when in ("before", "after"):
        print(f"{when}: {summary['ranking'][when]}")
    return summary


if __name__ == "__main__":
    main()
