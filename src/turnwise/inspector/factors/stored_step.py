"""Rebuilds the batch of a stored step: what its pieces saw, and what the updates computed with it.

The trajectories come from the ledger, the measured signals and the learner's log-probabilities from the kept columns. A method
may read signals that the run did not measure (a reference policy, a critic): those are named, not invented.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from turnwise.algebra.objective import Objective
from turnwise.config.named_object import reading
from turnwise.config.settings import Settings
from turnwise.core.batch import Batch, pack
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, TOKEN, TURN, Field
from turnwise.core.records import Group, Origin
from turnwise.core.signals import BEFORE_BATCH, Signal, level_of
from turnwise.errors import SettingError, StoreError
from turnwise.inspector.factors.decompose import GradientFactors, decompose
from turnwise.inspector.queries import RunReader, TokenColumns
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
            steps = run.kept_steps()
            which = f"kept are steps {steps[0]} to {steps[-1]}" if steps else "this run kept none (see --keep-tokens)"
            raise StoreError(f"the token columns of step {step} are not stored; {which}")
        if not 0 <= update < len(self.updates):
            raise StoreError(f"step {step} has {len(self.updates)} kept updates; {update} is not one of them")
        self.update: TokenColumns = self.updates[update]

    @cached_property
    def recipe(self) -> Recipe:
        """The method of the run."""
        with reading():
            return make_recipe(Settings.of(self.run.settings))

    @cached_property
    def packed(self) -> Batch:
        """The batch that the step trained on, mixed-in trajectories included, with all token signals that are stored, in float32
        as they were."""
        origins, groups = dict(self.run.mixed(self.step)), []
        stored = self.run.stored_trajectories([one for _, ids in self.updates[0].groups for one in ids])
        columns: dict[str, dict[str, np.ndarray]] = {}
        for update in reversed(self.updates):  # the first update that reads a trajectory counts
            columns |= _by_trajectory(update)
        for group_id, ids in self.updates[0].groups:
            for one in ids:
                if one not in stored:
                    raise StoreError(f"there is no trajectory {one!r} in {self.run.path}")
                if one not in columns:
                    raise StoreError(f"step {self.step} stores nothing for trajectory {one}")
                if one in origins:
                    stored[one] = replace(stored[one], origin=Origin(origins[one]))
            members = tuple(stored[one] for one in ids)
            groups.append(Group(group_id, members[0].task, members))
        batch = pack(groups)
        names = set.intersection(*map(set, columns.values())) if columns else set()
        signals = {}
        for signal in (s for s in sorted(Signal) if s in names):
            field, level = _token_field(batch, columns, signal), level_of(signal)
            signals[signal] = field if level == TOKEN else field.max(level)
        return batch.put(signals)

    def factors(self, method: str = "") -> MethodFactors:
        """Factors under a method of the catalogue, or the run's own. The objective's memory is that before the step."""
        with reading():  # a method may come from the address of a page
            recipe = catalogue.parse_method(method) if method else self.recipe
        objective = recipe.objective
        available = {*self.packed.columns, Signal.LOGP, Signal.ENTROPY, *SAME_BEFORE_UPDATE}
        missing = sorted(str(signal) for signal in objective.signals if signal not in available)
        if missing:
            raise SettingError(
                f"this method reads {', '.join(missing)}, which the run did not measure; choose a method that needs only "
                "log-probabilities and entropies"
            )
        # another method would have had another memory; it begins empty
        if not method and self.updates[0].memory:
            objective.memory.load_state_dict(dict(self.updates[0].memory))
        part = self._planned(objective, own_method=not method)
        policy = {
            signal: part[signal].to(torch.float64).map(lambda x: x.clone().requires_grad_())
            for signal in objective.signals_with_gradient
            if signal in part.columns
        }
        return MethodFactors(recipe, part, decompose(objective, part, policy))

    def _planned(self, objective: Objective, own_method: bool) -> Batch:
        """The planned batch of the chosen update."""
        whole = self.packed
        for before, now in SAME_BEFORE_UPDATE.items():
            if before in objective.signals and before not in whole.columns and now in whole.columns:
                whole = whole.put({before: whole[now]})
        # a piece must not see what the learner would not have measured for it
        hidden = BEFORE_BATCH - objective.signals
        whole = replace(whole, columns={key: f for key, f in whole.columns.items() if key not in hidden})
        credited, members = objective.credit(whole), set(self.update.trajectories)
        part = credited.select([i for i, one in enumerate(credited.trajectory_ids) if one in members])
        config = self.run.path / "initial" / "config.json"  # of the model that the run started with
        vocabulary = json.loads(config.read_text(encoding="utf-8")).get("vocab_size", 1) if config.is_file() else 1
        part = part.put(vocabulary_size=part.tree.full(BATCH, float(int(vocabulary))))
        columns = self.update.columns
        if Signal.LOGP in columns:
            part = part.put({Signal.LOGP: self.column(part, "logp")})
        if own_method and str(Column.UPDATED_TURNS) in columns:
            turns = self.column(part, str(Column.UPDATED_TURNS)).max(TURN)
            part = part.put(updated_turns=turns.map(lambda x: x > 0), advantage=self.column(part, "advantage"))
        if own_method and str(Column.FREEZE_POLICY) in columns:
            part = part.put(freeze_policy=part.tree.full(BATCH, 1.0))
        return objective.plan(part)

    def column(self, part: Batch, name: str) -> Field:
        return _token_field(part, self._columns, name)

    @cached_property
    def _columns(self) -> dict[str, dict[str, np.ndarray]]:
        return _by_trajectory(self.update)


def _token_field(batch: Batch, columns: Mapping[str, Mapping[str, np.ndarray]], name: str) -> Field:
    values = np.concatenate([columns[one][name] for one in batch.trajectory_ids]).astype(np.float32)
    return Field(batch.tree, TOKEN, torch.from_numpy(values.copy()))


def _by_trajectory(update: TokenColumns) -> dict[str, dict[str, np.ndarray]]:
    """The columns of every trajectory. ``TokenColumns.of`` looks for one from the start each time."""
    ends = np.cumsum(update.sizes).tolist()
    spans = zip(update.trajectories, update.sizes, ends, strict=True)
    return {
        one: {name: values[end - size : end] for name, values in update.columns.items()} for one, size, end in spans
    }
