"""The same updates by a local learner and by one over several ranks, compared tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from support.batches import records_of
from turnwise import recipes
from turnwise.algebra.control import CriticsFirst
from turnwise.core.batch import pack
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.sharded.rank_pool import RankPool
from turnwise.engines.sharded.sharded_learner import ShardedLearner
from turnwise.models.tiny import tiny_model
from turnwise.training.loop import update_policy

SHAPES = (
    [[[2, 1], [3], [1, 2, 2]], [[2], [1, 1]]],
    [[[1, 1], [2]], [[3, 1], [2, 2], [1]]],
)
FLOAT32 = 1e-4  # AdamW divides by the root of small second moments
FLOAT64 = 1e-12  # relative: ranks only sum in another order


def small(seed: int = 0) -> Any:
    return tiny_model(16, seed, hidden=32, layers=2, context=64)


@dataclass(frozen=True)
class Case:
    """One learner: a recipe, and settings that change how it is sharded."""

    name: str
    gather: str = "block"
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    model: Any = small

    def recipe(self) -> Any:
        recipe = recipes.build(self.name)
        if isinstance(recipe.control, CriticsFirst):  # a whole warm-up takes too long
            return replace(recipe, control=replace(recipe.control, warm=1))
        return recipe

    def arguments(self) -> dict[str, Any]:
        signals = self.recipe().objective.signals
        turns = bool(signals & {*TURN_CRITIC, *TURN_CRITIC_TARGET})
        teacher = small(2) if Signal.TEACHER in signals else None
        return {"critic": self.recipe().critics, "turn_critic": turns, "teacher": teacher, **self.options}

    def learner_settings(self) -> LearnerSettings:
        return LearnerSettings(**{"lr": 1e-3, "positions": 24, "dtype": "float64", **self.settings})

    def local(self) -> LocalLearner:
        learner = LocalLearner(self.model(), self.learner_settings(), **self.arguments())
        learner.reference()
        return learner

    def sharded(self, pool: RankPool) -> ShardedLearner:
        signals = self.recipe().objective.signals
        own = {"ranks": pool.size, "signals": signals, "gather": self.gather, "pool": pool}
        return ShardedLearner(self.model(), self.learner_settings(), **own, **self.arguments())

    def groups(self, learner: LocalLearner) -> list[Any]:
        """Two batches as if this policy had sampled them, give or take a thousandth."""
        asks = self.recipe().requirements
        return [_sampled_by(learner, records_of(shape, seed, asks=asks)) for seed, shape in enumerate(SHAPES)]


def _sampled_by(learner: LocalLearner, groups: list[Any]) -> list[Any]:
    logp = iter(learner.measure(pack(groups), frozenset({Signal.PROXIMAL}))[Signal.PROXIMAL].x.tolist())
    told = lambda turn: replace(turn, logp=tuple(next(logp) + 1e-3 * (-1) ** i for i, _ in enumerate(turn.tokens)))  # noqa: E731
    told_all = lambda t: replace(t, turns=tuple(map(told, t.turns)))  # noqa: E731
    return [replace(g, trajectories=tuple(map(told_all, g.trajectories))) for g in groups]


def update(learner: Any, recipe: Any, batches: list[Any], first: int = 0) -> list[dict[str, float]]:
    return [update_policy(learner, recipe, batch, first + n, recipe.objective) for n, batch in enumerate(batches)]


def differences(case: Case, pool: RankPool, tolerance: float = FLOAT64) -> list[str]:
    """What differs after the same updates: loss, gradient norm and every other metric, weights, optimizer state, the state of
    models beside the policy. Empty if nothing does."""
    local, sharded = case.local(), case.sharded(pool)
    batches = case.groups(local)
    expected, found = update(local, case.recipe(), batches), update(sharded, case.recipe(), batches)
    wrong = [
        f"{case.name}: metrics {sorted(e.keys() ^ f.keys())}" for e, f in zip(expected, found) if e.keys() != f.keys()
    ]
    pairs = [(f"metric {k}", e[k], f.get(k, 0.0)) for e, f in zip(expected, found) for k in e if e[k] == e[k]]
    wrong += [f"{case.name}: {name}: {e} and {f}" for name, e, f in pairs if abs(e - f) > tolerance * (1 + abs(e))]
    return wrong + state_differences(case.name, local, sharded, tolerance)


def state_differences(name: str, local: Any, other: Any, tolerance: float = FLOAT64) -> list[str]:
    expected, found = (learner.checkpoint_state() for learner in (local, other))
    assert expected["tensors"].keys() == found["tensors"].keys()
    assert expected["scalars"] == {**found["scalars"], "frozen": expected["scalars"]["frozen"]}
    gaps = {
        n: float((t.double() - found["tensors"][n].double()).abs().max() / (1 + t.abs().max()))
        for n, t in expected["tensors"].items()
        if t.numel()
    }
    exported = {n: float((w - other.weights()[n]).abs().max()) for n, w in local.weights().items()}
    return [f"{name}: {n} differs by {gap:.1e}" for n, gap in {**gaps, **exported}.items() if not gap <= tolerance]
