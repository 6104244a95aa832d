"""A behaviour policy that corrects sampling error: it leans away from actions that were drawn too often, so that all draws
together look as the target policy's would.

    φ ← θ;  minimise mean over the draws of max(g, clip(g, 1 ± ε)),  g = π_φ(a|s) / π_θ(a|s),  until mean(g − 1 − log g) > δ

φ is a table of logit shifts, one for each action that was drawn in a state; actions never drawn there share one logit. Once
g < 1 − ε a draw has no gradient any more. Knows counts and probabilities; no engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.core.records import Trajectory
from turnwise.errors import RecipeError

REST = -1  # all actions that were never drawn in a state


@dataclass
class StateDraws:
    """What was drawn in one state: ``count`` and the target's probability ``chance`` of each action drawn."""

    count: dict[int, int] = field(default_factory=dict)
    chance: dict[int, float] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """The probability of all other actions."""
        return max(0.0, 1.0 - math.fsum(self.chance.values()))


@dataclass(frozen=True)
class SamplingCorrection:
    """``clip``: ε; ``stop``: δ; ``epochs`` steps of size ``rate`` on the mean of each state's draws."""

    clip: float = 0.3
    stop: float = 0.01
    epochs: int = 16
    rate: float = 3.0

    def __post_init__(self) -> None:
        if not (0 < self.clip < 1 and self.stop > 0 and self.epochs >= 0 and self.rate > 0):
            raise RecipeError(f"need 0 < clip < 1, stop > 0, epochs >= 0 and rate > 0, got {self}")

    def shifts(self, states: Sequence[StateDraws]) -> list[dict[int, float]]:
        """For each state what is added to the log-probabilities of the actions drawn there; other actions get 0."""
        tables = [_Table(state) for state in states]
        total = sum(table.total for table in tables)
        for _ in range(self.epochs):
            if math.fsum(table.divergence() for table in tables) > self.stop * total:
                break
            for table in tables:
                table.descend(self.clip, self.rate)
        return [table.shifts() for table in tables]


class _Table:
    """The logits of one state."""

    def __init__(self, state: StateDraws) -> None:
        rest = {REST: state.rest} if state.rest > 1e-9 else {}
        self.chance, self.count = {**state.chance, **rest}, state.count
        self.total = sum(state.count.values())
        self.shift = dict.fromkeys(self.chance, 0.0)

    def ratios(self) -> dict[int, float]:
        """g of each action."""
        partition = math.fsum(p * math.exp(self.shift[a]) for a, p in self.chance.items())
        return {a: math.exp(self.shift[a]) / partition for a in self.chance}

    def divergence(self) -> float:
        """Σ over the draws of g − 1 − log g."""
        g = self.ratios()
        return math.fsum(n * (g[a] - 1 - math.log(g[a])) for a, n in self.count.items())

    def descend(self, clip: float, rate: float) -> None:
        """One gradient step: ∂g(a)/∂φ(c) = g(a) (1[a = c] − π_φ(c))."""
        g = self.ratios()
        pull = {a: n / self.total * g[a] for a, n in self.count.items() if g[a] > 1 - clip}
        sum_of_pulls = math.fsum(pull.values())
        for a, p in self.chance.items():
            self.shift[a] -= rate * (pull.get(a, 0.0) - sum_of_pulls * p * g[a])

    def shifts(self) -> dict[int, float]:
        common = self.shift.get(REST, 0.0)
        return {a: x - common for a, x in self.shift.items() if a != REST}


class PrefixShifts:
    """The draws of a task's rollouts by state, and the shifts that correct them. A state is all ids before an action."""

    def __init__(self, correction: SamplingCorrection) -> None:
        self.correction = correction
        self.draws: dict[tuple[int, ...], StateDraws] = {}
        self.table: dict[tuple[int, ...], dict[int, float]] = {}

    def __call__(self, ids: Sequence[int]) -> Mapping[int, float]:
        """What is added to the log-probabilities of the next token."""
        return self.table.get(tuple(ids), {}) if self.table else {}

    def observe(self, trajectories: Iterable[Trajectory]) -> None:
        """Count what was drawn, and correct from the target policy on."""
        for trajectory in trajectories:
            ids: list[int] = []
            for turn in trajectory.turns:
                ids = [*([] if turn.restart else ids), *turn.context]
                masses = turn.mass or (0.0,) * len(turn.tokens)
                for token, logp, mass in zip(turn.tokens, turn.logp, masses):
                    state, shift = self.draws.setdefault(tuple(ids), StateDraws()), self(ids)
                    state.count[token] = state.count.get(token, 0) + 1
                    if token not in state.chance:  # log π_θ = log π_φ − shift + log Z, Z = Σ π_θ exp(shift)
                        added = math.fsum(state.chance[a] * math.expm1(x) for a, x in shift.items())
                        state.chance[token] = min(1.0, math.exp(logp + mass - shift.get(token, 0.0)) * (1.0 + added))
                    ids.append(token)
        self.table = dict(zip(self.draws, self.correction.shifts(list(self.draws.values()))))


__all__ = ["PrefixShifts", "SamplingCorrection", "StateDraws"]
