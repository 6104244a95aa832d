"""How often a method's mechanism acted, in words: what ``acted/SLOT`` counts, and what must usually be there for a slot to act.

The numbers come from ``training/meter.py``. Knows slots, and no method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.observe.numbers import finite_number

ACTED = "acted/"
IDLE_STEPS = 10  # steps after which a slot that never acted is named
SILENT_STEPS = 3  # the same where nothing of the method acted: then it is only the base method
SLOTS = {  # slot: what its share says, in the order in which the shares are told; what it usually takes
    "strategy": ("the strategy changed {} of the rollouts", "episodes of several turns, an environment that can do what the "
        "strategy asks for (forks, hints), and a --group-size above its trunks"),
    "guidance": ("help in {} of the rollouts", "groups without a success after its first steps, and tasks with hints or "
        "solutions"),
    "advantage": ("credit differs on {} of the tokens", "what the credit reads besides the outcome: several turns, states that "
        "repeat, tool calls, several rewards"),
    "reward": ("another reward in {} of the trajectories", "answers that reach the limits of its terms, or the facts that it "
        "reads"),
    "admission": ("{} of the groups not admitted whole", "groups that it rejects: with the default tasks and --group-size "
        "there was none"),
    "replay": ("{} of the trajectories from elsewhere", "a run long enough to fill the buffer, and groups that need it"),
    "keep": ("{} of the tokens left out", "tokens that the mask excludes"),
    "ratio": ("the ratio bends {} of the gradients", "a policy that moves between sampling and training: --minibatches 4, "
        "--epochs 2 or --staleness 1"),
    "gate": ("the gate bends {} of the gradients", "a policy that moves between sampling and training: --minibatches 4, "
        "--epochs 2 or --staleness 1"),
    "aggregate": ("{} of the tokens weighted otherwise", "trajectories of different lengths"),
    "penalties": ("penalties pull on {} of the tokens", "a larger weight, and the rows or tokens that the penalty reads"),
    "sampler": ("{} of the draws by the sampler's rule", "more steps, a smaller pool (--sampler NAME,pool=64), or several "
        "difficulties"),
    "budget": ("{} of the groups of another size or length", "results that differ between tasks, which take a few steps, and "
        "bounds other than the --group-size"),
    "control": ("{} of the optimiser steps are further ones", "more than one turn or pass"),
    "gradient": ("{} of the steps rescaled", "what its factor reads: clipped tokens, or ratios that spread"),
    "smoothing": ("noise that is noticed in {} of the steps", "a larger sigma: below 0.1 % of what it is added to, it is "
        "numerically nothing"),
    "precision": ("{} of the log-probabilities moved by it", "a generator in that precision (a GPU)"),
}  # fmt: skip


def shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean share of each slot over the steps that report it."""
    reported: dict[str, list[float]] = {slot: [] for slot in SLOTS}
    for row in rows:
        for slot, values in reported.items():
            if (value := finite_number(row.get(ACTED + slot))) is not None:
                values.append(value)
    return {slot: sum(values) / len(values) for slot, values in reported.items() if values}


def mechanism(rows: Sequence[Mapping[str, Any]]) -> str:
    """One sentence on how often each slot acted; empty where every slot is the base method's."""
    acted = shares(rows)
    idle = [slot for slot, share in acted.items() if share == 0]
    words = [SLOTS[slot][0].format(percent(share)) for slot, share in acted.items() if share]
    return ", ".join(words + ([f"never: {', '.join(idle)}"] if idle else []))


def percent(share: float) -> str:
    return "under 1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"
