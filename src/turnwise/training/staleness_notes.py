"""What a run says at its start about its staleness. Knows settings and the pieces of a recipe; no method's name."""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.algebra.piece import text
from turnwise.config.settings import Settings
from turnwise.config.values import KEEP, Staleness
from turnwise.core.signals import Signal
from turnwise.recipes.recipe import Recipe


def staleness_notes(settings: Settings, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(level, text) of each message."""
    policy = settings.staleness
    if settings.offline or policy.deterministic:
        return
    if policy.synchronous:
        yield (
            "info",
            "staleness 0,continuous: on-policy, but batches depend on how fast tools answer; a repeated run may differ",
        )
        return
    if policy.limit > settings.steps:
        groups = policy.capacity(recipe.budget.groups, settings.steps)
        steps = "1 step" if settings.steps == 1 else f"{settings.steps} steps"
        most = "1 group" if groups == 1 else f"{groups} groups"
        yield (
            "info",
            f"staleness is {policy.limit}, and the run has {steps}: it issues at most {most} at once, all that it can "
            "train on, and is never held back by the limit",
        )
    if policy.late == KEEP:
        yield _correction(policy, recipe)


def _correction(policy: Staleness, recipe: Recipe) -> tuple[str, str]:
    begin = f"staleness {policy.limit},{policy.late}: groups older than {policy.limit} versions are trained on, too"
    pieces = list(corrections(recipe))
    if pieces:
        return "info", f"{begin}; the loss corrects for their age by {', '.join(pieces)}"
    return (
        "warning",
        f"{begin}, and nothing in the loss compares the policy with the one that sampled them (ratio {text(recipe.ratio)}); take "
        f"a method with an importance ratio, or write --staleness {policy.limit},drop",
    )


def corrections(recipe: Recipe) -> Iterator[str]:
    """The slots whose pieces compare the policy with the one that sampled the data, as text."""
    if recipe.ratio.corrects_off_policy:
        yield f"ratio {text(recipe.ratio)}"
    for name in ("gate", "keep"):
        if Signal.PROXIMAL in getattr(recipe, name).signals:
            yield f"{name} {text(getattr(recipe, name))}"
    yield from (f"penalty {text(weighted)}" for weighted in recipe.penalties if Signal.PROXIMAL in weighted.signals)
