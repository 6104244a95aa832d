"""What a method must be told, and whether this environment and these settings can tell it: asked at the door of a run.

Each thing a piece ``wants`` is known to the environment's class, or comes with a flag. What cannot be met is refused with the
remedy: which environments have it, or which flag to write. A flag that the method would not read is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from turnwise import environments
from turnwise.config.settings import Settings
from turnwise.core.signals import Signal
from turnwise.data.replay import Nothing
from turnwise.environments.base import Environment
from turnwise.errors import SettingError
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import Independent
from turnwise.training.env_spec import World

FLAGS = {
    "demonstrations": ("demos", "--demos FILE (dialogues as JSON Lines), --demos oracle, or --data FILE (it alone)"),
    "pairs": ("data", "--data FILE (prompt, chosen and rejected as JSON Lines)"),
    "teacher": ("teacher", "--teacher PATH (a model with the same vocabulary)"),
}
OF_A_BUFFER = ("age", "advantage")
OF_A_PAIR = ("chosen", "gap", "family")


def asked(recipe: Recipe) -> frozenset[str]:
    """What the recipe must be told, signals that somebody outside must make possible included."""
    needs = recipe.objective.needs
    extra = {Signal.ANSWER: "answer", Signal.TEACHER: "teacher", Signal.BLIND: "feedback"}
    return recipe.asks | {word for signal, word in extra.items() if signal in needs}


def examine(recipe: Recipe, settings: Settings, world: World) -> None:
    """Refuses a recipe whose asks are not met, and a flag that nothing asks for."""
    wanted = asked(recipe)
    for word in sorted(wanted):
        _meet(word, recipe, settings, world)
    suits = getattr(recipe.strategy, "suits", None)  # a strategy may refuse groups it cannot grow
    if suits is not None:
        suits(recipe.budget.size)
    if settings.data and settings.demos:
        raise SettingError("--data learns from a file alone, --demos beside rollouts; write one of them")
    for word, (name, _) in FLAGS.items():
        used = word in wanted or (name in ("data", "demos") and wanted & {"demonstrations", "pairs"})
        if getattr(settings, name) and not used:
            raise SettingError(
                f"{settings.title} does not learn from {word}; leave --{name} out, or take another method"
            )


def _meet(word: str, recipe: Recipe, settings: Settings, world: World) -> None:
    if word in FLAGS:
        remedy = FLAGS[word][1]
        given = (settings.data or settings.demos) if word != "teacher" else settings.teacher
        if not given:
            raise SettingError(f"{settings.title} learns from {'a ' * (word == 'teacher')}{word}; write {remedy}")
        return
    if word == "feedback":
        if world.limits.turns < 2:
            raise SettingError(
                f"{settings.title} reads what the environment answers, and an episode of {settings.env} has one turn; "
                "write --max-turns 2 or more, or take another environment"
            )
        return
    if settings.data and not settings.demos:
        return  # the file tells, or does not; no environment is asked
    offers, what = _offer(word, recipe)
    if offers is not None and not offers(world.kind):
        raise SettingError(
            f"{settings.title} must be told {what}, and {settings.env} tells none; {_who(offers, settings.env)}"
        )


def _offer(word: str, recipe: Recipe) -> tuple[Callable[[type], bool] | None, str]:
    """How a class shows that it can tell a thing, and the thing in words. None: nothing to ask of an environment."""
    kind, _, name = word.rpartition(" ")
    if kind == "fact":
        others = recipe.replay != Nothing() or recipe.strategy != Independent()
        told = name in (*OF_A_BUFFER, *OF_A_PAIR) or others
        return None if told else (lambda cls: name in getattr(cls, "facts", ())), f"the fact {name!r}"
    if kind == "turn fact":
        return lambda cls: name in getattr(cls, "facts", ()), f"the fact {name!r} of each turn"
    if kind == "reward":
        return lambda cls: name in getattr(cls, "rewards", ()), f"the reward {name!r}"
    known: dict[str, tuple[Callable[[type], bool], str]] = {
        "state": (lambda cls: own(cls, "state_key"), "in which state a turn was taken (a state_key)"),
        "answer": (lambda cls: own(cls, "answer"), "the gold answer (an answer())"),
        "verdict": (lambda cls: bool(getattr(cls, "verdict", True)), "whether an episode succeeded (info['success'])"),
        "hints": (lambda cls: own(cls, "hint"), "a hint for each task (a hint())"),
        "agents": (lambda cls: len(getattr(cls, "agents", ())) > 1, "which of several agents acts (agents)"),
        "forks": (
            lambda cls: own(cls, "snapshot") and own(cls, "restore"),
            "a snapshot() to fork from, and a restore()",
        ),
    }
    return known.get(word, (None, word))


def own(cls: Any, name: str) -> bool:
    """Whether a class has a power of its own, not only the base's "cannot"."""
    found = getattr(cls, name, None)
    return callable(found) and found is not getattr(Environment, name, None)


def _who(offers: Callable[[type], bool], env: str) -> str:
    able = [name for name in environments.BUILT_IN if name != env and offers(environments.load(name))]
    instead = f"write --env {able[0]}" + (f" (or {', '.join(able[1:])})" if able[1:] else "") if able else ""
    return f"{instead}, or give its class one" if instead else "give its class one, or take another method"
