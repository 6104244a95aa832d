"""A slow oracle of DynaWeb: GSPO over groups in which experts take part. Lines marked "Card" quote the specification."""

from __future__ import annotations

import torch

from .objectives import BOUND, bounded, constant, mean, rows, smaller, spread, std
from .records import Batch, sampled, total, trajectories
from .result import Result


def dynaweb(batch: Batch, low: float = 3e-4, high: float = 4e-4) -> Result:
    """trajectory.facts["origin"]: "expert" for expert items. House: their ratio is 1, with the gradient of each token's log π."""
    credit = []
    for group in batch:
        # Card: "group-relative advantages; expert items take part in the group's statistics"
        rewards = [total(trajectory) for trajectory in group]
        for reward in rewards:
            credit.append(0.0 if len(group) == 1 else (reward - mean(rewards)) / (std(rewards) + 1e-6))
    n, loss = rows(batch), constant(0.0)
    for trajectory, a in zip(trajectories(batch), credit):
        line = sampled(trajectory)
        if not line:
            continue
        if trajectory.facts.get("origin") == "expert":
            for token in line:
                ratio = torch.exp(token.logp - token.logp.detach())
                loss = loss - smaller(ratio * a, bounded(ratio, 1 - low, 1 + high) * a) / len(line) / n
            continue
        # Card: "Sequence-level clipped policy optimisation (GSPO)"
        log_ratio = constant(0.0)
        for token in line:
            log_ratio = log_ratio + bounded(token.logp - token.behaviour, -BOUND, BOUND)
        ratio = torch.exp(bounded(log_ratio / len(line), -BOUND, 10.0))
        loss = loss - smaller(ratio * a, bounded(ratio, 1 - low, 1 + high) * a) / n
    return Result(spread(batch, credit), loss, {})
