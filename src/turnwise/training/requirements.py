"""What a method requires of environment and settings, checked before a run begins.

Each requirement of a piece is provided by the environment's class or by a flag. What is missing is refused with the remedy:
which environments provide it, or which flag to write. A flag that the method would not read is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable

from turnwise import environments
from turnwise.algebra.piece import Piece
from turnwise.config.settings import Settings
from turnwise.core.signals import Signal
from turnwise.data.prompts import holds_prompts_only
from turnwise.data.replay import NoReplay
from turnwise.data.replay.fresh_actions import FRESH, FreshActions
from turnwise.engines.sharded.served import LearnerNeeds, unserved_reason
from turnwise.engines.sharded.torchrun import check_torchrun
from turnwise.environments.base import overrides
from turnwise.errors import SettingError
from turnwise.recipes.recipe import Recipe
from turnwise.rewards.spec import COMPARING, parse_rewards
from turnwise.rollout.strategies import GREEDY_REWARD, GreedyBaseline, Independent, Strategy
from turnwise.training.agents import check_agent
from turnwise.training.env_spec import EnvSpec
from turnwise.training.opponents import check_opponents

Provides = Callable[[type], bool]

FLAGS = {
    "demonstrations": ("demos", "--demos FILE (dialogues as JSON Lines), --demos oracle, or --data FILE (it alone)"),
    "pairs": ("data", "--data FILE (prompt, chosen and rejected as JSON Lines)"),
    "teacher": ("teacher", "--teacher PATH (a model with the same vocabulary)"),
}
BUFFER_FACTS = ("age", "advantage")
PAIR_FACTS = ("chosen", "gap", "family")
STRATEGY_FACTS: dict[str, type] = {GREEDY_REWARD: GreedyBaseline}  # facts that one strategy alone records


def required_by(recipe: Recipe) -> frozenset[str]:
    """The requirements of a recipe, including those of signals that only environment or settings can make possible."""
    signals = recipe.objective.signals
    implied = {Signal.ANSWER_LOGP: "answer", Signal.TEACHER: "teacher", Signal.LOGP_WITHOUT_FEEDBACK: "feedback"}
    return recipe.requirements | {word for signal, word in implied.items() if signal in signals}


def check_requirements(recipe: Recipe, settings: Settings, env_spec: EnvSpec) -> None:
    """Refuse a recipe whose requirements are not met, and a flag that nothing requires."""
    requires = required_by(recipe)
    check_adapters(recipe, settings)
    check_action_values(recipe, settings)
    check_agent(requires, settings)
    check_comparing_rewards(recipe, settings)
    check_opponents(settings, requires, env_spec.env_class, bool(recipe.precision.drafts))
    for word in sorted(requires):
        _check_one(word, recipe, settings, env_spec)
    check_group_size = getattr(recipe.strategy, "check_group_size", None)  # a strategy may refuse groups it cannot grow
    if check_group_size is not None:
        check_group_size(recipe.budget.size)
    if settings.offline and settings.demos:
        raise SettingError("--data learns from a file alone, --demos beside rollouts; write one of them")
    for word, (name, _) in FLAGS.items():
        used = word in requires or (name in ("data", "demos") and requires & {"demonstrations", "pairs"})
        if name == "data" and not used and settings.offline:
            _refuse_file(settings)
        if name != "data" and getattr(settings, name) and not used:
            raise SettingError(
                f"{settings.title} does not learn from {word}; leave --{name} out, or take another method"
            )


def check_comparing_rewards(recipe: Recipe, settings: Settings) -> None:
    """Refuse a reward that compares answers where each answer is scored alone, while its group still grows."""
    compared = [spec.label for spec in parse_rewards(settings.reward) if spec.built_in and spec.label in COMPARING]
    if compared and recipe.reads_rewards:
        reader = recipe.guidance if recipe.guidance.reads_rewards else recipe.strategy
        raise SettingError(
            f"the reward {compared[0]} compares the finished answers of a group, and {type(reader).__name__} reads the reward of "
            "each while the group still grows; take another strategy or guidance (independent, none), or another reward"
        )


def check_precision(recipe: Recipe, settings: Settings) -> None:
    """Refuse fp8 rollouts for a learner in another precision: their log-probabilities are off-policy."""
    learner = recipe.precision.learner if settings.dtype == "auto" else settings.dtype
    rollouts = recipe.precision.rollouts if settings.rollout_dtype == "auto" else settings.rollout_dtype
    if rollouts == "fp8" and learner != "fp8" and not recipe.corrects_off_policy:
        raise SettingError(
            f"{settings.title} treats its rollouts as samples of the learner's policy, and in fp8 they are not; write "
            "--dtype fp8 (the learner rounds likewise), or take a method with a ratio (grpo) or one that corrects (tis, mis)"
        )


def check_ranks(recipe: Recipe, settings: Settings) -> None:
    """Refuse several ranks for a recipe that they cannot serve, ranks that would have nothing to do, and another number than
    torchrun has started."""
    check_torchrun(settings.ranks, bool(settings.cluster))
    if settings.ranks == 1:
        return
    dtype = recipe.precision.learner if settings.dtype == "auto" else settings.dtype
    resets = resets_reference(recipe)
    needs = LearnerNeeds(recipe.objective.signals, bool(recipe.smoothing), dtype, settings.offload, resets)
    if reason := unserved_reason(needs):
        raise SettingError(f"{settings.title} cannot learn on {settings.ranks} ranks: {reason}; write --ranks 1")
    trajectories = recipe.budget.groups * recipe.budget.size
    if settings.ranks > trajectories:
        raise SettingError(
            f"ranks is {settings.ranks}, and a step has {trajectories} trajectories ({recipe.budget.groups} groups of "
            f"{recipe.budget.size}), so some ranks would have nothing to do; write --ranks {trajectories} or fewer"
        )


def resets_reference(recipe: Recipe) -> bool:
    """Whether a penalty replaces the reference policy during the run."""
    parts = (part for weighted in recipe.penalties for part in weighted.parts)
    return any(type(part).resets_reference is not Piece.resets_reference for part in parts)


def check_adapters(recipe: Recipe, settings: Settings) -> None:
    """Refuse adapters for a recipe that replaces its reference policy."""
    if settings.lora_rank and resets_reference(recipe):
        raise SettingError(
            f"{settings.title} replaces its reference policy, and the reference of adapters is the base model; "
            "write --lora-rank 0"
        )


def check_action_values(recipe: Recipe, settings: Settings) -> None:
    """Refuse a trunk or adapters of their own for values that the generator reads from the policy's states."""
    if recipe.critics < 0 and (settings.critic == "separate" or settings.lora_rank):
        flag = "--critic separate" if settings.critic == "separate" else f"--lora-rank {settings.lora_rank}"
        raise SettingError(f"{settings.title} reads its values from the frozen policy's own states; leave {flag} out")


def check_cold_start(settings: Settings, env_spec: EnvSpec) -> None:
    """Refuse a model that must first imitate, where nothing can be imitated."""
    if env_spec.can_demonstrate:
        return
    if settings.model.tiny:
        raise SettingError(
            f"the tiny model knows no language, and {settings.env} has no `demonstrate` and `oracle` to start it "
            "from; write both, or give a trained model with --model"
        )
    if settings.cold_steps > 0:
        raise SettingError(f"{settings.env} has no `demonstrate`, so there is nothing to imitate; write --cold-steps 0")


def _refuse_file(settings: Settings) -> None:
    """Refuse a file that the method cannot learn from, after a look into it: prompts alone need a reward."""
    lacking = holds_prompts_only(settings.data)
    if lacking:
        raise SettingError(
            f"{lacking}; write --reward FUNCTION (file.py:function, or a built-in one such as exact) to sample answers and "
            "reward them"
        )
    raise SettingError(
        f"{settings.title} learns from its own samples, and {settings.data} holds answers of others; take a method that learns "
        "from pairs or demonstrations (`turnwise list`), or write --reward FUNCTION to use only its prompts"
    )


def _check_one(word: str, recipe: Recipe, settings: Settings, env_spec: EnvSpec) -> None:
    if word in FLAGS:
        remedy = FLAGS[word][1]
        value = (
            settings.teacher if word == "teacher" else ((settings.data if settings.offline else "") or settings.demos)
        )
        if not value:
            also = "; with --reward the rows of --data are prompts, so leave --reward out" if settings.data else ""
            raise SettingError(f"{settings.title} learns from {'a ' * (word == 'teacher')}{word}; write {remedy}{also}")
        return
    if word == "feedback":
        if env_spec.limits.turns < 2:
            raise SettingError(
                f"{settings.title} reads the environment's observations, and an episode of {settings.env} has one turn; "
                "write --max-turns 2 or more, or take another environment"
            )
        return
    if settings.offline:
        return  # the file provides it or not; no environment is involved
    _check_strategy_fact(word, recipe.strategy, settings)
    if word == f"fact {FRESH}" and not (isinstance(recipe.replay, FreshActions) and recipe.replay.count):
        raise SettingError(
            f"{settings.title} learns from turns sampled again at recorded states, and --replay {settings.replay} samples none; "
            "leave --replay out, or write --fresh 0"
        )
    provides, description = _provider(word, recipe)
    if provides is not None and not provides(env_spec.env_class):
        raise SettingError(
            f"{settings.title} requires {description}, and {settings.env} provides none; "
            f"{_alternatives(provides, settings.env)}"
        )


def _check_strategy_fact(word: str, strategy: Strategy, settings: Settings) -> None:
    """Refuse another of our strategies where a fact of one is required; a user's own strategy may record it, too."""
    kind, _, name = word.rpartition(" ")
    recorder = STRATEGY_FACTS.get(name) if kind == "fact" else None
    ours = type(strategy).__module__.startswith("turnwise.")
    if recorder is not None and ours and not isinstance(strategy, recorder):
        raise SettingError(
            f"{settings.title} requires the fact {name!r}, which the strategy {recorder.__name__} records and "
            f"{type(strategy).__name__} does not; leave --strategy out, or take another method"
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
    "hints": (lambda cls: overrides(cls, "hint") or overrides(cls, "hints"), "a hint for each task (a hint())"),
    "solutions": (lambda cls: overrides(cls, "oracle"), "a scripted solution of each task (an oracle())"),
    "wordings": (lambda cls: getattr(cls, "wordings", 1) > 1, "several wordings of each task (wordings)"),
    "process": (lambda cls: overrides(cls, "turns_to_solve"), "a process verifier (a turns_to_solve())"),
    "agents": (lambda cls: len(getattr(cls, "agents", ())) > 1, "which of several agents acts (agents)"),
    "expert turns": (
        lambda cls: bool(getattr(cls, "expert_turns", False)),
        "an expert's states and its action there (turnwise.environments.expert_turns, demonstrated:FILE)",
    ),
    "forks": (
        lambda cls: (overrides(cls, "snapshot") and overrides(cls, "restore")) or getattr(cls, "deterministic", False),
        "a snapshot() to fork from, and a restore(), or deterministic = True, so that actions can be played again",
    ),
}


def _alternatives(provides: Provides, env: str) -> str:
    able = [name for name in environments.BUILT_IN if name != env and provides(environments.load(name))]
    instead = f"write --env {able[0]}" + (f" (or {', '.join(able[1:])})" if able[1:] else "") if able else ""
    return f"{instead}, or give its class one" if instead else "give its class one, or take another method"
