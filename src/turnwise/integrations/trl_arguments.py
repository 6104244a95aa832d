"""What may stand beside ``method=`` in TRL's trainer: refused before the run, in words, with what to write instead."""

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

HAS = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.PROXIMAL, Signal.REFERENCE, Signal.OLD_ENTROPY})
OWN = "the method has its own; set it in method_options"
CREDIT = "the method's credit decides it"
SAMPLER = "ratios are taken against vLLM's own log-probabilities; to correct for it, take a method that does: tis, mis, icepop"
CONFLICTS = {  # TRL's arguments that the method replaces, and what to do instead
    "loss_type": "the method is the loss",
    **dict.fromkeys(("epsilon", "epsilon_high", "delta", "importance_sampling_level"), OWN),
    **dict.fromkeys(
        ("beta", "use_bias_correction_kl"), "penalties belong to the method; set its beta in method_options"
    ),
    **dict.fromkeys(("scale_rewards", "multi_objective_aggregation"), CREDIT),
    **dict.fromkeys(("top_entropy_quantile", "off_policy_mask_threshold"), "masks belong to the method"),
    **dict.fromkeys(("entropy_coef", "use_adaptive_entropy"), "an entropy bonus is a penalty of the method"),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), OWN),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), OWN),
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
    who = f"method={name!r}" if name else "this recipe"
    method_support.require(recipe, name, HAS, "TRL's GRPOTrainer")
    _conflicts(who, args)
    _steps(who, recipe, args)
    if type(recipe.sampler) is not type(method_support.DEFAULT.sampler):
        warnings.warn(
            f"{who} would choose its tasks ({recipe.sampler!r}); here TRL's dataset order decides", stacklevel=3
        )


def _conflicts(who: str, args: Any) -> None:
    wrong = []
    for f in fields(args):
        default = f.default_factory() if f.default is MISSING and f.default_factory is not MISSING else f.default
        seen = getattr(args, f.name)
        if f.name in CONFLICTS and seen != default:
            wrong.append(f"{f.name}={seen!r} ({CONFLICTS[f.name]})")
    if wrong:
        raise SettingError(
            f"{who} and GRPOConfig({', '.join(wrong)}): these would do nothing; leave them out of GRPOConfig"
        )


def _steps(who: str, recipe: Recipe, args: Any) -> None:
    """A plan is of one whole optimiser step, so its slices must lie in one generation."""
    slices, steps, control = args.steps_per_generation, args.gradient_accumulation_steps, recipe.control
    if slices % steps:
        raise SettingError(
            f"steps_per_generation {slices} is not a multiple of gradient_accumulation_steps {steps}: an optimiser step "
            f"would hold parts of two generations, but {who} must see all of a step at once; "
            f"write steps_per_generation={steps}, or leave it out"
        )
    if slices > steps and method_support.spans_groups(recipe):
        raise SettingError(
            f"{who} averages or compares whole groups inside an optimiser step, but TRL would scatter each group over "
            f"{slices // steps} of them; write steps_per_generation={steps}, or leave it out"
        )
    if isinstance(control, Passes) and control not in (Passes(), Passes(args.num_iterations, slices // steps)):
        raise SettingError(
            f"{who} asks for {control.epochs} passes of {control.minibatches} steps over each batch; write num_iterations="
            f"{control.epochs}, steps_per_generation={control.minibatches * steps}"
        )


__all__ = ["CONFLICTS", "HAS", "check", "recipe_of"]
