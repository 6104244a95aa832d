"""The plan of a run: recipe, environment, data and tokenizer, built once from the settings, validated, then handed on.

``validate`` refuses every setting that can be refused before anything is written or trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from turnwise.config.settings import Settings
from turnwise.config.values import ModelName
from turnwise.data.offline_source import split_held_out
from turnwise.errors import SettingError
from turnwise.models import loading
from turnwise.models.fetch import resolve
from turnwise.recipes.recipe import Recipe
from turnwise.training import build, engines, requirements
from turnwise.training.data_sources import DataSources
from turnwise.training.env_spec import EnvSpec
from turnwise.training.inputs import GivenObjects
from turnwise.training.memory_check import check_memory
from turnwise.training.rewards import with_rubric_text
from turnwise.training.run_recipe import make_recipe
from turnwise.training.size_checks import check_adapter_rank, check_rank_cores, check_rank_devices


@dataclass(frozen=True)
class RunPlan:
    """What a run is made of. ``data`` and ``tokenizer`` are read when first used: a finished run needs neither."""

    settings: Settings
    recipe: Recipe
    env_spec: EnvSpec
    given: GivenObjects = field(default_factory=GivenObjects)

    @classmethod
    def from_settings(
        cls, settings: Settings, recipe: Recipe | None = None, given: GivenObjects | None = None
    ) -> RunPlan:
        """``recipe`` replaces the named method by one of the user's own, ``given`` names by objects."""
        given = given or GivenObjects()
        recipe = make_recipe(settings, recipe)
        settings = with_rubric_text(engines.with_method_precision(settings, recipe))
        return cls(settings, recipe, EnvSpec.from_settings(settings, given.env_class, given.agent), given)

    @cached_property
    def data(self) -> DataSources:
        return DataSources.from_settings(self.settings, self.env_spec, self.recipe)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer the run begins with. For the tiny model it is trained here, once."""
        if self.given.tokenizer is not None:
            return self.given.tokenizer
        return build.load_tokenizer(self.settings, self.env_spec)


def validate(plan: RunPlan) -> None:
    """Refuse a plan that cannot run, with what to write instead."""
    settings, recipe, env_spec = plan.settings, plan.recipe, plan.env_spec
    device = engines.select_device(settings).type
    check_rank_devices(settings, device)
    check_rank_cores(settings, device)
    requirements.check_ranks(recipe, settings)
    requirements.check_precision(recipe, settings)
    env_spec.tasks("train")
    build.sampling_settings(settings), build.sampling_settings(settings, settings.eval_temperature)
    engines.learner_settings(settings, recipe)
    requirements.check_requirements(recipe, settings, env_spec)
    has_rows = plan.data.rows is not None
    requirements.check_cold_start(settings, env_spec)
    if not settings.model.tiny or has_rows:
        renderer = build.make_renderer(settings, plan.tokenizer)
        renderer.check_tools(env_spec.tools)
        groups = plan.data.groups(renderer)
        if settings.offline:
            split_held_out(groups)  # refuses a file without rows
    if plan.given.model is not None:
        check_adapter_rank(settings, plan.given.model.config)
    elif settings.model.tiny:
        check_adapter_rank(settings)
    else:
        config = loading.load_config(resolve(settings.model.name))
        check_adapter_rank(settings, config)
        check_memory(settings, recipe, config)
    if settings.teacher:
        _check_teacher(plan)


def _check_teacher(plan: RunPlan) -> None:
    """Refuse a teacher that does not exist or has another vocabulary. A tiny model takes its teacher's tokenizer."""
    settings = plan.settings
    teacher_settings = replace(settings, model=settings.teacher, teacher=ModelName())
    theirs = build.load_tokenizer(teacher_settings, plan.env_spec).get_vocab()
    if settings.model.tiny:
        build.make_renderer(settings, plan.tokenizer)
        return
    ours = plan.tokenizer.get_vocab()
    if ours != theirs:
        differing = len({*ours.items()} ^ {*theirs.items()})
        raise SettingError(
            f"the teacher {settings.teacher} has another vocabulary than {settings.model} ({differing} entries differ), so its "
            "probabilities cannot be compared token by token; give a teacher of the same family"
        )
