"""Kuhn poker by self-play against older policies: exact exploitability of the policy and of the average of its checkpoints.

    python experiments/kuhn_poker.py --seeds 0 --steps 100

Dr.GRPO (no division by a deviation, which would change the stakes) with ``--opponents past``: fictitious play, in which the
last policy need not converge, but the average over the run does. The average plays one checkpoint for a whole game. A row for
each run goes to ``experiments/results/kuhn_poker.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from turnwise.environments.families.game_tree import average_policy, exploitability
from turnwise.environments.families.open_spiel import environment
from turnwise.training import api

RESULTS = Path(__file__).parent / "results" / "kuhn_poker.jsonl"
SETTINGS: dict[str, Any] = {
    "method": "dr_grpo", "groups": 24, "group_size": 16, "lr": 3e-4, "schedule": "constant", "eval_tasks": 1, "trackers": (),
    "method_options": {"length": 4.0}, "threads": 1, "hidden": 64, "keep_tokens": 0,
}  # fmt: skip


class Kuhn(environment("kuhn_poker")):  # type: ignore[misc]
    """Kuhn poker that also measures the average of the policies it was asked about."""

    policies: ClassVar[list[Mapping[str, Mapping[str, float]]]] = []

    @classmethod
    def policy_metrics(cls, chances):
        cls.policies.append({text: dict(row) for text, row in chances.items()})
        seen = [lambda text, _, policy=policy: policy[text] for policy in cls.policies[1:] or cls.policies]
        return {**super().policy_metrics(chances), "average": exploitability(cls.game, average_policy(cls.game, seen))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=4, help="steps between two evaluations")
    parser.add_argument("--opponents", default="past,keep=16,every=2")
    parser.add_argument("--lr", type=float, default=SETTINGS["lr"])
    parser.add_argument("--out", default="runs")
    chosen = parser.parse_args()
    for seed in chosen.seeds:
        Kuhn.policies.clear()
        own = {"seed": seed, "steps": chosen.steps, "eval_every": chosen.every, "opponents": chosen.opponents, "lr": chosen.lr}
        name = f"kuhn-{chosen.opponents.split(',')[0]}-{chosen.steps}-s{seed}"
        run = Path(api.train(**{**SETTINGS, **own}, env=Kuhn, out=chosen.out, name=name, quiet=True)["run"])
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        curve = [(r["step"], r["eval/exploitability"], r["eval/average"]) for r in rows if "eval/exploitability" in r]
        row = {"seed": seed, **{k: own[k] for k in ("steps", "opponents", "lr")}, "curve": curve}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(seed, curve[-1])


if __name__ == "__main__":
    main()
