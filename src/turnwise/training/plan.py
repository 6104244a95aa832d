"""The plan of a run: recipe, environment, data and tokenizer, built once from the settings, validated, then handed on.

``validate`` refuses every setting that can be refused before anything is written or trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import AutoConfig

from turnwise.config.settings import Settings
from turnwise.errors import SettingError
from turnwise.models.fetch import resolve
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.renderer import Renderer
from turnwise.training import build, engines, requirements
from turnwise.training.data_sources import DataSources, split
from turnwise.training.env_spec import EnvSpec


@dataclass(frozen=True)
class RunPlan:
    """What a run is made of. ``data`` and ``tokenizer`` are read when first used: a finished run needs neither."""

    settings: Settings
    recipe: Recipe
    env_spec: EnvSpec

    @classmethod
    def from_settings(cls, settings: Settings, recipe: Recipe | None = None) -> RunPlan:
        """``recipe`` replaces the named method by one of the user's own."""
        recipe = build.make_recipe(settings, recipe)
        settings = engines.with_method_precision(settings, recipe)
        return cls(settings, recipe, EnvSpec.from_settings(settings))

    @cached_property
    def data(self) -> DataSources:
        return DataSources.from_settings(self.settings, self.env_spec, self.recipe)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer the run begins with. For the tiny model it is trained here, once."""
        return build.load_tokenizer(self.settings, self.env_spec)


def validate(plan: RunPlan) -> None:
    """Refuse a plan that cannot run, with what to write instead."""
    settings, recipe, env_spec = plan.settings, plan.recipe, plan.env_spec
    engines.select_device(settings)
    engines.check_precision(settings, recipe)
    env_spec.tasks("train")
    build.sampling_settings(settings), build.sampling_settings(settings, settings.eval_temperature)
    engines.learner_settings(settings, recipe)
    requirements.check_requirements(recipe, settings, env_spec)
    has_rows = plan.data.rows is not None
    _check_evaluation(settings)
    _check_cold_start(plan)
    if settings.model != build.TINY or has_rows:
        groups = plan.data.groups(Renderer(plan.tokenizer))
        if settings.data:
            split(groups, settings)
    if settings.model != build.TINY:
        try:
            AutoConfig.from_pretrained(resolve(settings.model))
        except (OSError, ValueError, KeyError) as fault:
            raise SettingError(build.no_model(settings.model, fault)) from fault
    if settings.teacher:
        _check_teacher(plan)


def _check_evaluation(settings: Settings) -> None:
    if not settings.eval_tasks and not settings.data:
        raise SettingError("eval_tasks is 0; write at least 1 (only a run on --data can be measured without tasks)")


def _check_cold_start(plan: RunPlan) -> None:
    settings, env_spec = plan.settings, plan.env_spec
    if settings.model == build.TINY:
        build.require_demonstrations(env_spec)
    elif settings.cold_steps > 0 and not env_spec.can_demonstrate:
        raise SettingError(f"{settings.env} has no `demonstrate`, so there is nothing to imitate; write --cold-steps 0")


def _check_teacher(plan: RunPlan) -> None:
    """Refuse a teacher that does not exist or has another vocabulary. A tiny model takes its teacher's tokenizer."""
    settings = plan.settings
    teacher_settings = replace(settings, model=settings.teacher, teacher="")
    theirs = build.load_tokenizer(teacher_settings, plan.env_spec).get_vocab()
    if settings.model == build.TINY:
        Renderer(plan.tokenizer)
        return
    ours = plan.tokenizer.get_vocab()
    if ours != theirs:
        differing = len({*ours.items()} ^ {*theirs.items()})
        raise SettingError(
            f"the teacher {settings.teacher} has another vocabulary than {settings.model} ({differing} entries differ), so its "
            "probabilities cannot be compared token by token; give a teacher of the same family"
        )
