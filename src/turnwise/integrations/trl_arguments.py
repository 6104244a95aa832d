"""Checks the arguments beside ``method=`` of TRL's trainer: raises before the run, with what to write instead."""

from __future__ import annotations

import warnings
from dataclasses import MISSING, fields
from typing import Any

from turnwise import recipes
from turnwise.algebra.control import Passes
from turnwise.core.signals import Signal
from turnwise.errors import SettingError
from turnwise.integrations import method_support
from turnwise.recipes.recipe import Recipe

MEASURED = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.PROXIMAL, Signal.REFERENCE, Signal.OLD_ENTROPY})
IN_METHOD_OPTIONS = "the method has its own; set it in method_options"
CREDIT = "the method's credit decides it"
SAMPLER = "ratios are taken against vLLM's own log-probabilities; to correct for it, take a method that does: tis, mis, icepop"
CONFLICTS = {  # arguments of TRL that the method replaces, and what to do instead
    "loss_type": "the method is the loss",
    **dict.fromkeys(("epsilon", "epsilon_high", "delta", "importance_sampling_level"), IN_METHOD_OPTIONS),
    **dict.fromkeys(
        ("beta", "use_bias_correction_kl"), "penalties belong to the method; write its beta in method_options"
    ),
    **dict.fromkeys(("scale_rewards", "multi_objective_aggregation"), CREDIT),
    **dict.fromkeys(("top_entropy_quantile", "off_policy_mask_threshold"), "masks belong to the method"),
    **dict.fromkeys(("entropy_coef", "use_adaptive_entropy"), "an entropy bonus is a penalty of the method"),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), IN_METHOD_OPTIONS),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), IN_METHOD_OPTIONS),
    **dict.fromkeys(("vllm_importance_sampling_mode", "vllm_importance_sampling_cap"), SAMPLER),
    **dict.fromkeys(("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"), SAMPLER),
}


def recipe_of(method: str | Recipe, options: dict[str, Any]) -> Recipe:
    if isinstance(method, str):
        return recipes.build(method, **options)
    if not isinstance(method, Recipe):
        raise SettingError(f"method is a {type(method).__name__}; write a method's name or a turnwise Recipe")
    if options:
        raise SettingError(f"method_options {sorted(options)} beside a finished Recipe; set them in it")
    return method


def check(recipe: Recipe, name: str, args: Any) -> None:
    """``args``: TRL's GRPOConfig."""
    label = f"method={name!r}" if name else "this recipe"
    method_support.require_supported(recipe, name, MEASURED, "TRL's GRPOTrainer")
    conflicts = []
    for f in fields(args):
        default = f.default_factory() if f.default is MISSING and f.default_factory is not MISSING else f.default
        value = getattr(args, f.name)
        if f.name in CONFLICTS and value != default:
            conflicts.append(f"{f.name}={value!r} ({CONFLICTS[f.name]})")
    if conflicts:
        beside = f"{label} and GRPOConfig({', '.join(conflicts)})"
        raise SettingError(f"{beside}: these would do nothing; leave them out of GRPOConfig")
    _check_steps(label, recipe, args)
    if type(recipe.sampler) is not type(method_support.DEFAULT_RECIPE.sampler):
        chooses = f"{label} would choose its tasks ({recipe.sampler!r})"
        warnings.warn(f"{chooses}; inside TRL the order of the dataset decides", stacklevel=3)


def _check_steps(label: str, recipe: Recipe, args: Any) -> None:
    # we plan whole optimiser steps, so all slices of a step must come from one generation
    slices, steps, control = args.steps_per_generation, args.gradient_accumulation_steps, recipe.control
    cure, reason = f"write steps_per_generation={steps}, or leave it out", ""
    if slices % steps:
        reason = (
            f"steps_per_generation {slices} is not a multiple of gradient_accumulation_steps {steps}: an optimiser step would "
            f"contain parts of two generations, but {label} must see all of a step at once; {cure}"
        )
    elif slices > steps and method_support.spans_groups(recipe):
        scatter = f"but TRL would scatter each group over {slices // steps} of them"
        reason = f"{label} averages or compares whole groups inside an optimiser step, {scatter}; {cure}"
    if reason:
        raise SettingError(reason)
    if isinstance(control, Passes) and control not in (Passes(), Passes(args.num_iterations, slices // steps)):
        method = f"num_iterations={control.epochs}, steps_per_generation={control.minibatches * steps}"
        warnings.warn(
            f"{label} takes {control.updates} steps for each batch; inside TRL its arguments decide ({method})",
            stacklevel=3,
        )
