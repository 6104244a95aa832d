"""Advantage estimators with verl's signature: rewards, mask and groups of a whole batch in, advantages and returns out.

Nothing of verl is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from turnwise import recipes
from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import CriticError
from turnwise.algebra.reward import Environment, Overlong
from turnwise.algebra.term import Term
from turnwise.algebra.value import GAE, ReturnToGo
from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TURN, Field
from turnwise.core.signals import Signal
from turnwise.errors import SettingError
from turnwise.integrations import padded
from turnwise.integrations import verl_support as fit
from turnwise.recipes.recipe import Recipe

Made = Callable[[Any], tuple[Objective, Term]]  # verl's algorithm config → the credit, and what is returned as returns


def fixed(recipe: Recipe) -> Made:
    kept = fit.bare(recipe).objective, _returns(recipe)  # the objective is kept: it may remember running statistics
    return lambda config: kept


def by_config(name: str, hyper: Mapping[str, Any]) -> Made:
    """The method; its gamma and lam are verl's ``algorithm.gamma`` and ``.lam`` unless the options name them."""
    open_keys = [key for key in ("gamma", "lam") if key in recipes.parameters(name) and key not in hyper]
    made: dict[tuple, tuple[Objective, Term]] = {}

    def build(config: Any) -> tuple[Objective, Term]:
        told = {key: getattr(config, key) for key in open_keys if getattr(config, key, None) is not None}
        if (key := tuple(told.items())) not in made:
            made[key] = fixed(recipes.build(name, **hyper, **told))(config)
        return made[key]

    return build


def _returns(recipe: Recipe) -> Term:
    """What a critic should have said: its own target, or the return of the sampled tokens to come."""
    targets = [w.penalty.target for w in recipe.penalties if isinstance(w.penalty, CriticError)]
    found = [p for p in recipe.advantage.parts if isinstance(p, ReturnToGo) and p.level == TOKEN]
    return [*targets, *found, ReturnToGo(1.0, TOKEN)][0]


def estimator(name: str, made: Made) -> Callable[..., tuple[Tensor, Tensor]]:
    """``made`` is asked at every call, since verl's config comes with it."""

    @torch.no_grad()
    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: np.ndarray | None = None,
        config: Any = None,
        values: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        objective, returns = made(config)
        mask, rewards = response_mask.bool(), token_level_rewards
        if index is None and objective.advantage.compares:
            raise SettingError(
                f"{fit.PREFIX}{name} compares the answers to one prompt: give index, the prompt's uid of each row"
            )
        if values is None and Signal.OLD_VALUE in objective.advantage.needs:
            raise SettingError(f"{fit.PREFIX}{name} needs {fit.WHY[Signal.VALUE]}")
        _check_length(name, objective, mask)
        labels = np.arange(len(mask)) if index is None else np.unique(np.asarray(index), return_inverse=True)[1]
        columns = {} if values is None else {Signal.OLD_VALUE: values}
        group = torch.as_tensor(labels.reshape(-1), device=mask.device)
        batch = rows(mask, rewards.sum(1), group, torch.zeros_like(rewards), **columns)
        batch = _paid(batch, rewards, mask, objective)
        if isinstance(objective.reward, Environment):  # already there, and perhaps on tokens
            objective = replace(objective, reward=None)
        batch = objective.credit(batch)
        out = lambda field: padded.to_padded(field.at(TOKEN), mask).to(rewards.dtype)  # noqa: E731
        return out(batch["advantage"]), out(returns(batch))

    estimate.__doc__ = f"The advantages of {name} as a verl estimator."
    return estimate


def _paid(batch: Batch, rewards: Tensor, mask: Tensor, objective: Objective) -> Batch:
    """verl's rewards as ours: on tokens where returns run over tokens, else by turn.

    What lies off the sampled tokens (on a tool's answer) goes to the sampled token before it, or to the first."""
    at = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    place = torch.where(mask, at, -1).cummax(1).values
    place = torch.where(place < 0, mask.int().argmax(1, keepdim=True), place)
    token = Field(batch.tree, TOKEN, torch.zeros_like(rewards).scatter_add(1, place, rewards)[mask])
    parts = list(objective.advantage.parts)
    along = any(isinstance(p, GAE) or (isinstance(p, ReturnToGo) and p.level == TOKEN) for p in parts)
    if along and isinstance(objective.reward, Environment):
        return replace(batch, reward=token)
    silent = batch.tree.size(TOKEN, TURN).x == 0  # a row without tokens: its reward still counts among its peers
    turn = torch.where(silent, rewards.sum(1)[batch.tree.parents[1]], token.sum(TURN).x)
    return replace(batch, reward=Field(batch.tree, TURN, turn))


def _check_length(name: str, objective: Objective, mask: Tensor) -> None:
    for piece in objective.reward.parts if objective.reward else ():
        if isinstance(piece, Overlong) and piece.limit < mask.shape[1]:
            raise SettingError(
                f"{fit.PREFIX}{name} punishes answers of more than {piece.limit} tokens, but responses here have room for "
                f"{mask.shape[1]}; write register(options={{{name!r}: {{'limit': {mask.shape[1]}, 'cache': ...}}}})"
            )


def rows(mask: Tensor, reward: Tensor, group: Tensor, logp: Tensor, **columns: Tensor) -> Batch:
    """Rows of verl as a batch: a column in front, since a response may begin with a sampled token."""
    wide = lambda x: pad(x, (1, 0))  # noqa: E731
    ids = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    held = {str(key): wide(value) for key, value in columns.items()}
    return padded.from_padded(wide(ids), wide(mask), logp=wide(logp), reward=reward, group=group, **held)


__all__ = ["by_config", "estimator", "fixed", "rows"]
