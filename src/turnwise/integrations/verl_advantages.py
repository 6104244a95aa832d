"""Advantage estimators with verl's signature: rewards, mask and groups of a whole batch in, advantages and returns out.

Imports nothing of verl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise import recipes
from turnwise.algebra.objective import Objective
from turnwise.algebra.penalty import ClippedValueLoss
from turnwise.algebra.reward import EnvironmentReward, OverlongPenalty
from turnwise.algebra.term import Term
from turnwise.algebra.value import GAE, ReturnToGo
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TURN, Field
from turnwise.core.signals import Signal
from turnwise.errors import SettingError
from turnwise.integrations import padded
from turnwise.integrations import verl_support as support
from turnwise.recipes.recipe import Recipe

CreditFactory = Callable[[Any], tuple[Objective, Term]]
"""verl's algorithm config → the objective that assigns credit, and the term reported as returns."""


def fixed_credit(recipe: Recipe) -> CreditFactory:
    # the regression target of a critic: its own, or the return-to-go over sampled tokens
    targets = [w.penalty.target for w in recipe.penalties if isinstance(w.penalty, ClippedValueLoss)]
    returns = [p for p in recipe.advantage.parts if isinstance(p, ReturnToGo) and p.level == TOKEN]
    # built once: the objective may keep running statistics
    credit = support.without_verl_terms(recipe).objective, [*targets, *returns, ReturnToGo(1.0, TOKEN)][0]
    return lambda config: credit


def credit_from_config(name: str, hyper: Mapping[str, Any]) -> CreditFactory:
    """A method's credit. gamma and lam are verl's ``algorithm.gamma`` and ``.lam`` unless the options set them."""
    keys_from_verl = [key for key in ("gamma", "lam") if key in recipes.parameters(name) and key not in hyper]
    built: dict[tuple, tuple[Objective, Term]] = {}

    def build(config: Any) -> tuple[Objective, Term]:
        discounts = {key: getattr(config, key) for key in keys_from_verl if getattr(config, key, None) is not None}
        if (key := tuple(discounts.items())) not in built:
            built[key] = fixed_credit(recipes.build(name, **hyper, **discounts))(config)
        return built[key]

    return build


def estimator(name: str, factory: CreditFactory) -> Callable[..., tuple[Tensor, Tensor]]:
    """Calls ``factory`` every time, since verl passes its config with each call."""

    @torch.no_grad()
    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: np.ndarray | None = None,
        config: Any = None,
        values: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        objective, returns = factory(config)
        mask, rewards = response_mask.bool(), token_level_rewards
        if index is None and objective.advantage.needs_peers:
            compares = f"{support.PREFIX}{name} compares the responses to one prompt"
            raise SettingError(f"{compares}: pass index, the prompt's uid of each row")
        if values is None and Signal.OLD_VALUE in objective.advantage.signals:
            raise SettingError(f"{support.PREFIX}{name} needs {support.SIGNAL_MEANING[Signal.VALUE]}")
        longest = mask.shape[1]
        for piece in objective.reward.parts if objective.reward else ():
            if isinstance(piece, OverlongPenalty) and piece.limit < longest:
                raise SettingError(
                    f"{support.PREFIX}{name} penalises responses of more than {piece.limit} tokens, but responses here have up "
                    f"to {longest}; write register(options={{{name!r}: {{'limit': {longest}, 'cache': ...}}}})"
                )
        labels = np.arange(len(mask)) if index is None else np.unique(np.asarray(index), return_inverse=True)[1]
        columns = {} if values is None else {Signal.OLD_VALUE: values}
        group = torch.as_tensor(labels.reshape(-1), device=mask.device)
        batch = rows(mask, rewards.sum(1), group, torch.zeros_like(rewards), **columns)
        batch = _with_rewards(batch, rewards, mask, objective)
        if isinstance(objective.reward, EnvironmentReward):  # already in the batch, possibly per token
            objective = replace(objective, reward=None)
        batch = objective.credit(batch)
        out = lambda field: padded.to_padded(field.at(TOKEN), mask).to(rewards.dtype)  # noqa: E731
        return out(batch[Column.ADVANTAGE]), out(returns(batch))

    estimate.__doc__ = f"The advantages of {name} as a verl estimator."
    return estimate


def _with_rewards(batch: Batch, rewards: Tensor, mask: Tensor, objective: Objective) -> Batch:
    """The batch with verl's rewards: per token where returns run over tokens, else per turn.

    A reward on a token that was not sampled (a tool's reply) moves to the sampled token before it, or to the first one."""
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    target = torch.where(mask, columns, -1).cummax(1).values
    target = torch.where(target < 0, mask.int().argmax(1, keepdim=True), target)
    token = Field(batch.tree, TOKEN, torch.zeros_like(rewards).scatter_add(1, target, rewards)[mask])
    parts = list(objective.advantage.parts)
    per_token = any(isinstance(p, GAE) or (isinstance(p, ReturnToGo) and p.level == TOKEN) for p in parts)
    if per_token and isinstance(objective.reward, EnvironmentReward):
        return replace(batch, reward=token)
    # the reward of a row without sampled tokens still counts in the baseline of its group
    without_tokens = batch.tree.size(TOKEN, TURN).x == 0
    turn = torch.where(without_tokens, rewards.sum(1)[batch.tree.parents[1]], token.sum(TURN).x)
    return replace(batch, reward=Field(batch.tree, TURN, turn))


def rows(mask: Tensor, reward: Tensor, group: Tensor, logp: Tensor, **columns: Tensor) -> Batch:
    # rows of verl as a batch, with one column prepended, since a response may begin with a sampled token
    ids, prepend = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device), padded.PREPEND
    front = {str(key): prepend(value) for key, value in columns.items()}
    return padded.from_padded(prepend(ids), prepend(mask), logp=prepend(logp), reward=reward, group=group, **front)
