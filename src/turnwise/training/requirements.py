"""What a method requires of environment and settings, checked before a run begins.

Each requirement of a piece is provided by the environment's class or by a flag. What is missing is refused with the remedy:
which environments provide it, or which flag to write. A flag that the method would not read is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable

from turnwise import environments
from turnwise.config.settings import Settings
from turnwise.core.signals import Signal
from turnwise.data.replay import NoReplay
from turnwise.environments.base import overrides
from turnwise.errors import SettingError
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.strategies import Independent
from turnwise.training.env_spec import EnvSpec

Provides = Callable[[type], bool]

FLAGS = {
    "demonstrations": ("demos", "--demos FILE (dialogues as JSON Lines), --demos oracle, or --data FILE (it alone)"),
    "pairs": ("data", "--data FILE (prompt, chosen and rejected as JSON Lines)"),
    "teacher": ("teacher", "--teacher PATH (a model with the same vocabulary)"),
}
BUFFER_FACTS = ("age", "advantage")
PAIR_FACTS = ("chosen", "gap", "family")


def required_by(recipe: Recipe) -> frozenset[str]:
    """The requirements of a recipe, including those of signals that only environment or settings can make possible."""
    signals = recipe.objective.signals
    implied = {Signal.ANSWER_LOGP: "answer", Signal.TEACHER: "teacher", Signal.LOGP_WITHOUT_FEEDBACK: "feedback"}
    return recipe.requirements | {word for signal, word in implied.items() if signal in signals}


def check_requirements(recipe: Recipe, settings: Settings, env_spec: EnvSpec) -> None:
    """Refuse a recipe whose requirements are not met, and a flag that nothing requires."""
    requires = required_by(recipe)
    for word in sorted(requires):
        _check_one(word, recipe, settings, env_spec)
    check_group_size = getattr(recipe.strategy, "check_group_size", None)  # a strategy may refuse groups it cannot grow
    if check_group_size is not None:
        check_group_size(recipe.budget.size)
    if settings.data and settings.demos:
        raise SettingError("--data learns from a file alone, --demos beside rollouts; write one of them")
    for word, (name, _) in FLAGS.items():
        used = word in requires or (name in ("data", "demos") and requires & {"demonstrations", "pairs"})
        if getattr(settings, name) and not used:
            raise SettingError(
                f"{settings.title} does not learn from {word}; leave --{name} out, or take another method"
            )


def _check_one(word: str, recipe: Recipe, settings: Settings, env_spec: EnvSpec) -> None:
    if word in FLAGS:
        remedy = FLAGS[word][1]
        value = settings.teacher if word == "teacher" else (settings.data or settings.demos)
        if not value:
            raise SettingError(f"{settings.title} learns from {'a ' * (word == 'teacher')}{word}; write {remedy}")
        return
    if word == "feedback":
        if env_spec.limits.turns < 2:
            raise SettingError(
                f"{settings.title} reads the environment's observations, and an episode of {settings.env} has one turn; "
                "write --max-turns 2 or more, or take another environment"
            )
        return
    if settings.data and not settings.demos:
        return  # the file provides it or not; no environment is involved
    provides, description = _provider(word, recipe)
    if provides is not None and not provides(env_spec.env_class):
        raise SettingError(
            f"{settings.title} requires {description}, and {settings.env} provides none; "
            f"{_alternatives(provides, settings.env)}"
        )


def _provider(word: str, recipe: Recipe) -> tuple[Provides | None, str]:
    """How a class shows that it provides a requirement, and the requirement in words. None: nothing to ask of a class."""
    kind, _, name = word.rpartition(" ")
    if kind == "fact":
        elsewhere = recipe.replay != NoReplay() or recipe.strategy != Independent()
        if name in (*BUFFER_FACTS, *PAIR_FACTS) or elsewhere:
            return None, f"the fact {name!r}"
        return lambda cls: name in getattr(cls, "facts", ()), f"the fact {name!r}"
    if kind == "turn fact":
        return lambda cls: name in getattr(cls, "facts", ()), f"the fact {name!r} of each turn"
    if kind == "reward":
        return lambda cls: name in getattr(cls, "rewards", ()), f"the reward {name!r}"
    return PROVIDERS.get(word, (None, word))


PROVIDERS: dict[str, tuple[Provides, str]] = {
    "state": (lambda cls: overrides(cls, "state_key"), "the state in which a turn was taken (a state_key)"),
    "answer": (lambda cls: overrides(cls, "answer"), "the gold answer (an answer())"),
    "verdict": (lambda cls: bool(getattr(cls, "verdict", True)), "whether an episode succeeded (info['success'])"),
    "hints": (lambda cls: overrides(cls, "hint"), "a hint for each task (a hint())"),
    "agents": (lambda cls: len(getattr(cls, "agents", ())) > 1, "which of several agents acts (agents)"),
    "forks": (
        lambda cls: overrides(cls, "snapshot") and overrides(cls, "restore"),
        "a snapshot() to fork from, and a restore()",
    ),
}


def _alternatives(provides: Provides, env: str) -> str:
    able = [name for name in environments.BUILT_IN if name != env and provides(environments.load(name))]
    instead = f"write --env {able[0]}" + (f" (or {', '.join(able[1:])})" if able[1:] else "") if able else ""
    return f"{instead}, or give its class one" if instead else "give its class one, or take another method"
