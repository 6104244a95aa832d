"""A slow oracle of Polychromic PPO: vines in sets, GAE elsewhere; one loop, one scalar, one formula at a time.

Lines marked "Card" quote the specification; lines marked "House" state the choice made where it is silent.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from .objectives import BOUND, bounded, constant, gae, larger, mean, token_rewards
from .records import Batch, sampled, tokens, trajectories
from .result import Result

Sets = list[dict[Hashable, list[list[int]]]]  # by group and state: the members of each set, as positions in the group


def unit(x: float, bottom: float, top: float) -> float:
    return min(1.0, max(0.0, (x - bottom) / (top - bottom)))


def value_of_set(returns: list[float], keys: list[Hashable]) -> float:
    """Card: "f(set) = (mean of returns in [0,1])·d(set), d = fraction of distinct trajectories (task-specific signature; 0 if all
    equal)". House: a set of one has d = 1."""
    distinct = len(set(keys))
    d = 0.0 if len(keys) > 1 and distinct == 1 else distinct / len(keys)
    return mean(returns) * d


def polychromic_ppo(
    batch: Batch,
    sets: Sets,
    window: int = 5,
    bottom: float = 0.0,
    top: float = 1.0,
    beta: float = 0.005,
    clip: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.5,
    value_weight: float = 1.0,
) -> Result:
    """trajectory.facts["path"]: its return from the prompt on; ["key"]: its signature. `sets` are the random draws."""
    advantage, targets = [], []
    for group, drawn in zip(batch, sets):
        credit: dict[int, list[float]] = {}
        for members_of in drawn.values():
            # Card: "Draw M random size-n subsets"
            f = [
                value_of_set(
                    [unit(group[i].facts["path"], bottom, top) for i in members],
                    [group[i].facts["key"] for i in members],
                )
                for members in members_of
            ]
            # Card: "Baseline = mean f over the M sets; set advantage = f − baseline"
            baseline = mean(f)
            for value, members in zip(f, members_of):
                for i in members:
                    # Card: "assign it to the actions at the rollout state of every trajectory in the set"
                    credit.setdefault(i, []).append(value - baseline)
        for i, trajectory in enumerate(group):
            values = [token.old_value for token in sampled(trajectory)]
            plain = gae(token_rewards(trajectory), values, gamma, lam)
            targets.extend(a + v for a, v in zip(plain, values))
            at = 0
            for number, turn in enumerate(trajectory.turns):
                for _ in turn.tokens:
                    # Card: "and to the next W steps (an action in several sets takes the mean)"; "All other states use GAE."
                    advantage.append(mean(credit[i]) if i in credit and number <= window else plain[at])
                    at += 1
    loss = constant(0.0)
    for token, a, target in zip(tokens(batch), advantage, targets):
        log = bounded(token.logp - token.behaviour, -BOUND, BOUND)
        ratio = torch.exp(log)
        # Card: "PPO clip + KL(π_behaviour‖π_θ) penalty". House: the estimator ρ − 1 − log ρ.
        gain = larger(-a * ratio, -a * bounded(ratio, 1 - clip, 1 + clip)) + beta * (ratio - 1 - log)
        near = bounded(token.value, token.old_value - value_clip, token.old_value + value_clip)
        error = larger((token.value - target) ** 2, (near - target) ** 2)
        loss = loss + (gain + value_weight * 0.5 * error) / len(advantage)
    return Result(advantage, loss, {"returns": targets, "rows": list(trajectories(batch))})
