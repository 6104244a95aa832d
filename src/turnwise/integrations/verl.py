"""Our objectives and advantage estimators in verl's registries, each as ``turnwise/<name>``.

    from turnwise.integrations import verl
    verl.register(options={"sapo": {"pos": 2.0}})

Every verl process must do so (see docs/verl.md). verl calls a loss once per micro-batch; ours then weighs its tokens by what
verl's ``global_batch_info`` says of the whole step, so that micro-batches and ranks sum to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from turnwise import recipes
from turnwise.algebra import diagnostics
from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, TOKEN, Field
from turnwise.core.signals import Signal
from turnwise.errors import SettingError
from turnwise.integrations import verl_advantages as credit
from turnwise.integrations import verl_support as fit
from turnwise.integrations.verl_support import PREFIX, Hyper, left_out
from turnwise.recipes.recipe import Recipe

Loss = Callable[..., tuple[Tensor, dict[str, Any]]]
SHOWN = ("ratio", "ratio/ess/token", "ratio/ess/trajectory", "entropy/covariance")  # the same keys on every rank


class Registered(NamedTuple):
    losses: list[str]
    estimators: list[str]


def register(
    options: Mapping[str, Hyper] | None = None,
    *,
    methods: Mapping[str, Recipe] | None = None,
    aggregate: str = "method",
) -> Registered:
    """Puts every method that verl can run into its registries; a second call replaces the first.

    ``options``: hyper-parameters by method. ``methods``: recipes of your own, by name. ``aggregate="verl"``: verl's
    ``loss_agg_mode`` decides what is averaged over what, instead of the method."""
    if aggregate not in ("method", "verl"):
        raise SettingError(f"aggregate is {aggregate!r}; write 'method', or 'verl' for its loss_agg_mode")
    options, own = dict(options or {}), dict(methods or {})
    for name in options:
        recipes.method(name)  # a wrong name is told in words
    done = Registered([], [])
    for name in dict.fromkeys([*fit.METHODS, *own]):
        recipe = own.get(name) or recipes.build(name, **options.get(name, {}))
        if (name in own or name in options) and fit.credit_lacks(recipe):
            fit.refuse(name, fit.loss_lacks(recipe))
        for registry in (core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY):
            registry.pop(PREFIX + name, None)  # verl refuses to register a second time
        if not fit.loss_lacks(recipe):
            core_algos.register_policy_loss(PREFIX + name)(_loss(name, recipe, aggregate))
            done.losses.append(PREFIX + name)
        if not fit.credit_lacks(recipe):
            made = credit.fixed(recipe) if name in own else credit.by_config(name, options.get(name, {}))
            core_algos.register_adv_est(PREFIX + name)(credit.estimator(name, made))
            done.estimators.append(PREFIX + name)
    return done


def overrides(name: str, **hyper: Any) -> list[str]:
    """The command-line settings with which verl trains by a method: loss, advantages, and what verl adds itself."""
    recipe = recipes.build(name, **hyper)
    fit.refuse(name, fit.loss_lacks(recipe))
    estimator = "gae" if fit.is_gae(recipe) else PREFIX + name
    fit.refuse(name, fit.credit_lacks(recipe, values=fit.is_gae(recipe)))
    known = recipes.parameters(name)
    discounts = {key: hyper.get(key, known[key].default) for key in ("gamma", "lam") if key in known}
    return [
        f"actor_rollout_ref.actor.policy_loss.loss_mode={PREFIX}{name}",
        f"algorithm.adv_estimator={estimator}",
        *(f"algorithm.{key}={value:g}" for key, value in discounts.items()),
        *fit.settings(recipe),
    ]


def loss(name: str, *, aggregate: str = "method", **hyper: Any) -> Loss:
    """A method's policy loss with verl's signature."""
    recipe = recipes.build(name, **hyper)
    fit.refuse(name, fit.loss_lacks(recipe))
    return _loss(name, recipe, aggregate)


def estimator(name: str, **hyper: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """A method's advantages with verl's signature. A critic's ``values`` may be given besides, which verl itself does not."""
    fit.refuse(name, fit.credit_lacks(recipes.build(name, **hyper), values=True))
    return credit.estimator(name, credit.by_config(name, hyper))


# ----------------------------------------------------------------------- loss


def _loss(name: str, recipe: Recipe, aggregate: str) -> Loss:
    objective, ours = fit.bare(recipe).objective, fit.mode(recipe)

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
        batch = objective.plan(_step(mask, old_log_prob, log_prob, advantages))
        if aggregate == "verl":
            weight = _verl_weight(mask, loss_agg_mode, info) * (batch["weight"].x > 0)
        else:
            _tell(name, ours, loss_agg_mode)
            weight = batch["weight"].x * _share(mask, ours, info)
        if rollout_is_weights is not None:
            weight = weight * rollout_is_weights[mask]
        batch = batch.put(weight=Field(batch.tree, TOKEN, weight))
        found = objective(batch, {Signal.LOGP: Field(batch.tree, TOKEN, log_prob[mask])})
        return found.loss, _metrics(found.stats)

    policy_loss.__doc__ = f"{name} as a verl policy loss: {recipe.gate!r}, {recipe.aggregate!r}."
    return policy_loss


def _step(mask: Tensor, old: Tensor, logp: Tensor, adv: Tensor) -> Batch:
    """One micro-batch, every row a group of its own."""
    batch = credit.rows(mask, torch.zeros_like(old[:, 0]), torch.arange(len(mask), device=mask.device), old.detach())
    column = lambda x: Field(batch.tree, TOKEN, x[mask].detach())  # noqa: E731
    lots = torch.where(mask, old.detach(), 0.0).sum(1).double().view(torch.int64) % 2**32  # drawn anew for each text
    batch = replace(batch, seed=Field(batch.tree, batch.seed.level, lots))
    clock = batch.tree.full(BATCH, 0.0, torch.float64)
    return batch.put({Signal.LOGP: column(logp)}).put(advantage=column(adv), clock=clock)


def _share(mask: Tensor, ours: str, info: dict[str, Any]) -> Tensor:
    """How much of the whole step this micro-batch is, by verl's own count of tokens or of rows; 1 where it tells none."""
    what = "token-mean" if ours.startswith("token") else "seq-mean-token-mean"
    if not bool(mask.any()):
        return mask.new_zeros((), dtype=torch.float64)
    ones = torch.ones(mask.shape, dtype=torch.float64, device=mask.device)
    return core_algos.agg_loss(loss_mat=ones, loss_mask=mask.double(), loss_agg_mode=what, **info)


def _verl_weight(mask: Tensor, how: str, info: dict[str, Any]) -> Tensor:
    """verl's weight of each token: its average is linear, so it is the slope."""
    with torch.enable_grad():
        x = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device, requires_grad=True)
        total = core_algos.agg_loss(loss_mat=x, loss_mask=mask.double(), loss_agg_mode=how, **info)
        return torch.autograd.grad(total, x)[0][mask]


def _tell(name: str, ours: str, theirs: str) -> None:
    if theirs != ours:
        warnings.warn(
            f"{PREFIX}{name} averages by {ours}, as the method does; actor.loss_agg_mode is {theirs}, which here governs "
            f"verl's own entropy and KL terms alone. Write loss_agg_mode={ours}, or register(aggregate='verl')",
            stacklevel=3,
        )


def _metrics(stats: Mapping[str, Tensor]) -> dict[str, float]:
    """The names verl plots, and a few of ours. One transfer for all of them."""
    numbers = torch.stack([x.detach().double() for x in stats.values()]).tolist()
    found = diagnostics.finish(dict(zip(stats, numbers)))
    return {
        "actor/pg_clipfrac": found["clip_share"],
        "actor/pg_clipfrac_lower": found["clip_share/down"],
        "actor/ppo_kl": -found["kl/behaviour/k1"],
        **{PREFIX + key: found[key] for key in SHOWN},
    }


__all__ = ["Registered", "estimator", "left_out", "loss", "overrides", "register"]
