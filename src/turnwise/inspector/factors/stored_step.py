"""Rebuilds the batch of a stored step: what its pieces saw, and what the updates computed with it.

The trajectories come from the ledger, the measured signals and the learner's log-probabilities from the kept columns. A method
may read signals that the run did not measure (a reference policy, a critic): those are named, not invented.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from turnwise.algebra.objective import Objective
from turnwise.config.settings import Settings
from turnwise.core.batch import Batch, pack
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, TOKEN, TURN, Field, Level
from turnwise.core.records import Group, Origin, Trajectory
from turnwise.core.signals import BEFORE_BATCH, Signal, level_of
from turnwise.errors import SettingError, StoreError
from turnwise.inspector.factors.decompose import GradientFactors, decompose
from turnwise.inspector.queries import RunReader, TokenColumns
from turnwise.inspector.stored_trajectories import stored_trajectories
from turnwise.recipes import catalogue
from turnwise.recipes.recipe import Recipe
from turnwise.training.plan import make_recipe

SAME_BEFORE_UPDATE = {Signal.PROXIMAL: Signal.LOGP, Signal.OLD_ENTROPY: Signal.ENTROPY}
"""Before the first update of a step, these are the learner's own numbers."""


@dataclass(frozen=True, eq=False)
class MethodFactors:
    """One update of a stored step under one method."""

    recipe: Recipe
    batch: Batch  # planned: all of the update
    factors: GradientFactors


class StoredStep:
    """One step of a run. ``update`` chooses one of its kept optimiser steps."""

    def __init__(self, run: RunReader, step: int, update: int = 0) -> None:
        self.run, self.step = run, step
        self.updates = run.token_columns(step)
        if not self.updates:
            kept = run.kept_steps()
            which = f"kept are steps {kept[0]} to {kept[-1]}" if kept else "this run kept none (see --keep-tokens)"
            raise StoreError(f"the token columns of step {step} are not stored; {which}")
        if not 0 <= update < len(self.updates):
            raise StoreError(f"step {step} has {len(self.updates)} kept updates; {update} is not one of them")
        self.update: TokenColumns = self.updates[update]

    @cached_property
    def recipe(self) -> Recipe:
        """The method of the run."""
        return make_recipe(Settings(**self._settings()))

    def _settings(self) -> dict[str, Any]:
        known = Settings.__dataclass_fields__
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.run.settings.items()
            if name in known
        }

    def recipe_of(self, method: str) -> Recipe:
        """Another method of the catalogue, with the run's budget."""
        return catalogue.parse_method(method)

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of the step with the trajectories that were trained on, mixed-in ones included."""
        origins = dict(self.run.mixed(self.step))
        groups = []
        stored = stored_trajectories(self.run, [one for _, ids in self.updates[0].groups for one in ids])
        for group_id, ids in self.updates[0].groups:
            members = tuple(_with_origin(stored[one], origins.get(one)) for one in ids)
            groups.append(Group(group_id, members[0].task, members))
        return groups

    @cached_property
    def packed(self) -> Batch:
        """The batch with all token signals that are stored, in float32 as they were."""
        batch = pack(self.groups)
        whole: dict[str, dict[str, np.ndarray]] = {}
        for update in reversed(self.updates):  # the first update that reads a trajectory counts
            whole |= _by_trajectory(update)
        missing = [one for one in batch.trajectory_ids if one not in whole]
        if missing:
            raise StoreError(f"step {self.step} stores nothing for trajectory {missing[0]}")
        names = set.intersection(*(set(columns) for columns in whole.values())) if whole else set()
        return batch.put(
            {
                Signal(name): self._signal(batch, Signal(name), whole)
                for name in sorted(names)
                if name in set(map(str, Signal))
            }
        )

    @staticmethod
    def _signal(batch: Batch, signal: Signal, columns: Mapping[str, Mapping[str, np.ndarray]]) -> Field:
        values = np.concatenate([columns[one][str(signal)] for one in batch.trajectory_ids]).astype(np.float32)
        field = Field(batch.tree, TOKEN, torch.from_numpy(values.copy()))
        level: Level = level_of(signal)
        return field if level == TOKEN else field.max(level)

    def missing_signals(self, objective: Objective) -> list[str]:
        """What a method reads and this step cannot provide."""
        available = set(self.packed.columns) | {Signal.LOGP, Signal.ENTROPY} | set(SAME_BEFORE_UPDATE)
        return sorted(str(signal) for signal in objective.signals if signal not in available)

    def factors(self, recipe: Recipe | None = None, own: bool | None = None) -> MethodFactors:
        """Factors under ``recipe``, or the run's own method. The objective's memory is that before the step."""
        own = recipe is None if own is None else own
        recipe = recipe or self.recipe
        objective = recipe.objective
        missing = self.missing_signals(objective)
        if missing:
            raise SettingError(
                f"this method reads {', '.join(missing)}, which the run did not measure; choose a method that needs only "
                "log-probabilities and entropies"
            )
        if own and self.updates[0].memory:
            objective.memory.load_state_dict(dict(self.updates[0].memory))
        part = self._part(objective, own)
        policy = {
            signal: part[signal].to(torch.float64).map(lambda x: x.clone().requires_grad_())
            for signal in objective.signals_with_gradient
            if signal in part.columns
        }
        return MethodFactors(recipe, part, decompose(objective, part, policy))

    def _part(self, objective: Objective, own: bool) -> Batch:
        """The planned batch of the chosen update."""
        whole = self.packed
        for before, now in SAME_BEFORE_UPDATE.items():
            if before in objective.signals and before not in whole.columns and now in whole.columns:
                whole = whole.put({before: whole[now]})
        hidden = BEFORE_BATCH - objective.signals
        whole = replace(whole, columns={key: f for key, f in whole.columns.items() if key not in hidden})
        credited = objective.credit(whole)
        part = self._select(credited)
        part = part.put(vocabulary_size=part.tree.full(BATCH, float(self._vocabulary())))
        columns = self.update.columns
        if Signal.LOGP in columns:
            part = part.put({Signal.LOGP: self._column(part, "logp")})
        if own and str(Column.UPDATED_TURNS) in columns:
            turns = self._column(part, str(Column.UPDATED_TURNS)).max(TURN)
            part = part.put(updated_turns=turns.map(lambda x: x > 0), advantage=self._column(part, "advantage"))
        if own and str(Column.FREEZE_POLICY) in columns:
            part = part.put(freeze_policy=part.tree.full(BATCH, 1.0))
        return objective.plan(part)

    def _select(self, batch: Batch) -> Batch:
        members = set(self.update.trajectories)
        return batch.select([i for i, one in enumerate(batch.trajectory_ids) if one in members])

    def _column(self, part: Batch, name: str) -> Field:
        columns = self._own_columns
        values = np.concatenate([columns[one][name] for one in part.trajectory_ids]).astype(np.float32)
        return Field(part.tree, TOKEN, torch.from_numpy(values.copy()))

    @cached_property
    def _own_columns(self) -> dict[str, dict[str, np.ndarray]]:
        return _by_trajectory(self.update)

    def _vocabulary(self) -> int:
        """The size of the policy's vocabulary, from the model that the run started with."""
        config = self.run.path / "initial" / "config.json"
        if not config.is_file():
            return 1
        return int(json.loads(config.read_text(encoding="utf-8")).get("vocab_size", 1))


def _by_trajectory(update: TokenColumns) -> dict[str, dict[str, np.ndarray]]:
    """The columns of every trajectory. ``TokenColumns.of`` looks for one from the start each time."""
    ends = np.cumsum(update.sizes).tolist()
    spans = zip(update.trajectories, update.sizes, ends, strict=True)
    return {
        one: {name: values[end - size : end] for name, values in update.columns.items()} for one, size, end in spans
    }


def _with_origin(trajectory: Trajectory, origin: str | None) -> Trajectory:
    return trajectory if origin is None else replace(trajectory, origin=Origin(origin))


__all__ = ["MethodFactors", "StoredStep"]
