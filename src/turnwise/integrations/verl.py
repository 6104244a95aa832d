"""Our objectives and advantage estimators in verl's registries, each as ``turnwise/<name>``.

    from turnwise.integrations import verl
    verl.register(options={"sapo": {"pos": 2.0}})

Every verl process must do so (see docs/verl.md). verl calls a loss once per micro-batch; ours scales its token weights by the
counts of the whole step in verl's ``global_batch_info``, so that micro-batches and ranks sum to the loss of the step. Private
interfaces of verl are used in ``compat`` only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise import recipes
from turnwise.algebra import diagnostics
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, TOKEN, Field
from turnwise.core.signals import Signal
from turnwise.errors import SettingError
from turnwise.integrations import compat
from turnwise.integrations import verl_advantages as credit
from turnwise.integrations import verl_support as support
from turnwise.integrations.verl_support import PREFIX, Hyper, unsupported_methods
from turnwise.recipes.recipe import Recipe

core_algos = compat.verl_algorithms()
PolicyLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
METRICS = ("ratio", "ratio/ess/token", "ratio/ess/trajectory", "entropy/covariance")  # the same keys on every rank


class RegisteredNames(NamedTuple):
    losses: list[str]
    estimators: list[str]


def register(
    options: Mapping[str, Hyper] | None = None,
    *,
    methods: Mapping[str, Recipe] | None = None,
    aggregate: str = "method",
) -> RegisteredNames:
    """Register every method that verl can run; a second call replaces the first.

    ``options``: hyper-parameters by method. ``methods``: recipes of your own, by name. ``aggregate="verl"``: verl's
    ``loss_agg_mode`` decides how the loss is averaged, instead of the method."""
    if aggregate not in ("method", "verl"):
        raise SettingError(f"aggregate is {aggregate!r}; write 'method', or 'verl' for its loss_agg_mode")
    options, custom = dict(options or {}), dict(methods or {})
    for name in options:
        recipes.method(name)  # raises for an unknown name
    registered = RegisteredNames([], [])
    for name in dict.fromkeys([*support.METHODS, *custom]):
        recipe = custom.get(name) or recipes.build(name, **options.get(name, {}))
        if (name in custom or name in options) and support.advantage_unsupported_reasons(recipe):
            support.raise_if_unsupported(name, support.loss_unsupported_reasons(recipe))
        compat.unregister_from_verl(core_algos, PREFIX + name)
        if not support.loss_unsupported_reasons(recipe):
            core_algos.register_policy_loss(PREFIX + name)(_loss(name, recipe, aggregate))
            registered.losses.append(PREFIX + name)
        if not support.advantage_unsupported_reasons(recipe):
            fixed = name in custom
            factory = credit.fixed_credit(recipe) if fixed else credit.credit_from_config(name, options.get(name, {}))
            core_algos.register_adv_est(PREFIX + name)(credit.estimator(name, factory))
            registered.estimators.append(PREFIX + name)
    return registered


def overrides(name: str, **hyper: Any) -> list[str]:
    """verl's command-line settings for a method: the loss, the advantages, and the terms that verl computes itself."""
    recipe = recipes.build(name, **hyper)
    support.raise_if_unsupported(name, support.loss_unsupported_reasons(recipe))
    estimator = "gae" if support.is_gae(recipe) else PREFIX + name
    support.raise_if_unsupported(name, support.advantage_unsupported_reasons(recipe, values=support.is_gae(recipe)))
    parameters = recipes.parameters(name)
    discounts = {key: hyper.get(key, parameters[key].default) for key in ("gamma", "lam") if key in parameters}
    return [
        f"actor_rollout_ref.actor.policy_loss.loss_mode={PREFIX}{name}",
        f"algorithm.adv_estimator={estimator}",
        *(f"algorithm.{key}={value:g}" for key, value in discounts.items()),
        *support.settings(recipe),
    ]


def loss(name: str, *, aggregate: str = "method", **hyper: Any) -> PolicyLoss:
    recipe = recipes.build(name, **hyper)
    support.raise_if_unsupported(name, support.loss_unsupported_reasons(recipe))
    return _loss(name, recipe, aggregate)


def estimator(name: str, **hyper: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """A method's advantages with verl's signature. Takes a critic's ``values`` too, which verl itself does not pass."""
    support.raise_if_unsupported(name, support.advantage_unsupported_reasons(recipes.build(name, **hyper), values=True))
    return credit.estimator(name, credit.credit_from_config(name, hyper))


# ----------------------------------------------------------------------- loss


def _loss(name: str, recipe: Recipe, aggregate: str) -> PolicyLoss:
    objective, method_mode = support.without_verl_terms(recipe).objective, support.mode(recipe)
    differ = (
        f"{PREFIX}{name} averages by {method_mode}, as the method does; actor.loss_agg_mode is {{}}, which here affects "
        f"verl's own entropy and KL terms only. Write loss_agg_mode={method_mode}, or register(aggregate='verl')"
    )

    def policy_loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        mask = response_mask.bool()
        info = dict(getattr(config, "global_batch_info", None) or {})
        batch = objective.plan(_micro_batch(mask, old_log_prob, log_prob, advantages))
        if aggregate == "verl":
            weight = _verl_weight(mask, loss_agg_mode, info) * (batch[Column.WEIGHT].x > 0)
        else:
            if loss_agg_mode != method_mode:
                warnings.warn(differ.format(loss_agg_mode), stacklevel=2)
            weight = batch[Column.WEIGHT].x * _share_of_step(mask, method_mode, info)
        if rollout_is_weights is not None:
            weight = weight * rollout_is_weights[mask]
        batch = batch.put(weight=Field(batch.tree, TOKEN, weight))
        output = objective(batch, {Signal.LOGP: Field(batch.tree, TOKEN, log_prob[mask])})
        # one device-to-host copy for all metrics
        numbers = torch.stack([x.detach().double() for x in output.stats.values()]).tolist()
        metrics = diagnostics.finish(dict(zip(output.stats, numbers)))
        return output.loss, {
            "actor/pg_clipfrac": metrics["clip_share"],
            "actor/pg_clipfrac_lower": metrics["clip_share/down"],
            "actor/ppo_kl": metrics["kl/behaviour/k1"],
            **{PREFIX + key: metrics[key] for key in METRICS},
        }

    policy_loss.__doc__ = f"{name} as a verl policy loss: {recipe.gate!r}, {recipe.aggregate!r}."
    return policy_loss


def _micro_batch(mask: Tensor, old: Tensor, logp: Tensor, adv: Tensor) -> Batch:
    """One micro-batch as a batch; every row is a group of its own."""
    batch = credit.rows(mask, torch.zeros_like(old[:, 0]), torch.arange(len(mask), device=mask.device), old.detach())
    column = lambda x: Field(batch.tree, TOKEN, x[mask].detach())  # noqa: E731
    # from the log-probabilities of the row itself, so that another text draws other random numbers
    seeds = torch.where(mask, old.detach(), 0.0).sum(1).double().view(torch.int64) % 2**32
    batch = replace(batch, seed=Field(batch.tree, batch.seed.level, seeds))
    clock = batch.tree.full(BATCH, 0.0, torch.float64)
    return batch.put({Signal.LOGP: column(logp)}).put(advantage=column(adv), batch_index=clock)


def _share_of_step(mask: Tensor, method_mode: str, info: dict[str, Any]) -> Tensor:
    # the share of this micro-batch in the whole step, by verl's count of tokens or rows; 1 where verl gives no count
    counted = "token-mean" if method_mode.startswith("token") else "seq-mean-token-mean"
    if not bool(mask.any()):
        return mask.new_zeros((), dtype=torch.float64)
    ones = torch.ones(mask.shape, dtype=torch.float64, device=mask.device)
    return core_algos.agg_loss(loss_mat=ones, loss_mask=mask.double(), loss_agg_mode=counted, **info)


def _verl_weight(mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    # verl's weight of each token: its aggregation is linear, so the weight is its gradient
    with torch.enable_grad():
        x = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device, requires_grad=True)
        total = core_algos.agg_loss(loss_mat=x, loss_mask=mask.double(), loss_agg_mode=mode, **info)
        return torch.autograd.grad(total, x)[0][mask]


__all__ = ["RegisteredNames", "estimator", "loss", "overrides", "register", "unsupported_methods"]
