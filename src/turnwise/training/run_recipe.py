"""The recipe of a run from its settings. Imports torch with the recipes, but no engine and no model library."""

from __future__ import annotations

from dataclasses import replace

from turnwise import recipes
from turnwise.config.settings import Settings
from turnwise.errors import SettingError
from turnwise.recipes import catalogue, experience
from turnwise.recipes.recipe import Recipe
from turnwise.training.inputs import OWN


def make_recipe(settings: Settings, recipe: Recipe | None = None) -> Recipe:
    """The method's recipe, or the user's own, with another method's credit where asked for, and the run's budget and passes."""
    if recipe is None and settings.method == OWN:
        raise SettingError(
            "the recipe of this run was given to train() as an object, which no name refers to; give it again in Python: "
            "resume(run, recipe=...). A recipe by name (turnwise train module:recipe) is found again by itself"
        )
    recipe = recipe or recipes.build(settings.method, **settings.method_options)
    if settings.credit:
        recipe = catalogue.with_credit(recipe, settings.credit, settings.credit_options)
    budget = recipe.budget
    named = {slot: getattr(settings, slot) for slot in experience.SLOTS}
    recipe = replace(
        recipe, **{slot: experience.piece(slot, name) for slot, name in named.items() if name and slot != "budget"}
    )
    spend = experience.piece("budget", named["budget"]) if named["budget"] else budget
    return replace(
        recipe,
        budget=spend.of(settings.groups or budget.groups, settings.group_size or budget.size),
        control=recipe.control.with_passes(settings.epochs, settings.minibatches),
    )
