"""The environment of a run: its class, its task stream, how an episode is created and where it is truncated; the rows of a file
that are its tasks; and the settings that fit it and the model, where the user gives none.

Knows settings and environment classes, and of a model what its files tell; no method. Loads nothing heavy: ``turnwise config``
prints what is decided here at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwise import environments
from turnwise.config.named_object import GIVEN_OBJECT
from turnwise.config.settings import Settings
from turnwise.core.records import Task
from turnwise.data.files import digest
from turnwise.data.prompts import PromptFile, PromptRow, read_prompts, split_rows
from turnwise.environments import prompts
from turnwise.environments.base import overrides
from turnwise.environments.contract import turn_limit
from turnwise.environments.isolated import PROCESSES, HostPool, IsolatedEnvironment
from turnwise.errors import SettingError, nearest
from turnwise.models.facts import ModelFacts, read_model_facts
from turnwise.rewards.spec import parse_rewards
from turnwise.rollout.episode import EpisodeLimits, FailedEnvironment
from turnwise.rollout.scripted import SCRIPTED_POLICIES
from turnwise.tasks.task_source import TaskList, TaskStream
from turnwise.training.agents import Agent, load_agent

SUGGESTED = (
    "difficulty", "max_tokens", "max_turns", "context", "history", "vocabulary", "hidden", "layers", "copying",
    "cold_steps", "cold_batch", "cold_demos", "cold_lr",
)  # fmt: skip
TINY_MODEL_ONLY = ("vocabulary", "hidden", "layers", "copying", "cold_steps", "cold_batch", "cold_demos", "cold_lr")
SMALL_MODELS_ONLY = ("max_tokens", "context")
SMALL_MODEL = 20_000_000  # parameters; below, a model is treated like the tiny one, of which it may be a trained copy
LEARNING_RATES = (  # parameters below this number, and the rate. 1e-5 and 2e-5 trained 135 M parameters on four tasks
    (100e6, 5e-5),
    (1e9, 1e-5),
    (10e9, 2e-6),
    (float("inf"), 1e-6),
)
LORA_FACTOR = 10  # adapters start at zero and are few: they take a ten times higher rate
ONE_ANSWER, ONE_OF_MANY = 512, 128  # tokens of an only turn, which holds all reasoning, and of one turn of several
PROMPT, REPLY = 256, 64  # tokens to expect of a first prompt and of an environment's reply
MAX_CONTEXT = 4096
LARGE = 50_000_000  # parameters from which a micro-batch on a CPU is made smaller
SECOND_STREAM = 1_000_003  # added to the seed: tokenizer corpus and cold start play other tasks than the run
GPU_FILES = (
    "nvidia[0-9]*",
    "nvhost-*",
    "dxg",
    "kfd",
)  # NVIDIA's, of embedded boards, of Linux inside Windows, and AMD's


# ------------------------------------------------------------ settings that fit


@dataclass(frozen=True)
class Suggestion:
    """A value that applies where the user gives none, and why: ``Suggestion("max_turns", 6, "environment Guess")``."""

    name: str
    value: Any
    reason: str


def resolve_settings(values: Mapping[str, Any], env_class: type | None = None) -> Settings:
    """The settings of a run: the user's values, then what is suggested, then the defaults. ``env_class`` replaces the class
    that the name refers to."""
    draft = _draft(values)
    return replace(draft, **{s.name: s.value for s in suggestions(values, env_class)})


def _draft(values: Mapping[str, Any]) -> Settings:
    """The user's values over the defaults. Rows that are answered and rewarded are the environment."""
    settings = Settings.of(values)
    return replace(settings, env=prompts.NAME) if settings.uses_prompts and "env" not in values else settings


def suggestions(values: Mapping[str, Any], env_class: type | None = None) -> list[Suggestion]:
    """What environment and model suggest for the settings that ``values`` leaves open."""
    settings = _draft(values)
    env_class = env_class or environment_class(settings)
    suggested = {"difficulty": tuple(getattr(env_class, "difficulties", (1,))), **getattr(env_class, "suggests", {})}
    for name in suggested:
        if name not in SUGGESTED:
            raise SettingError(
                f"{env_class.__name__} suggests a value for {name!r}, which an environment may not set; "
                f"{nearest(name, SUGGESTED)}"
            )
    turn_limit(env_class)  # refused at once
    facts = None if settings.model.tiny else read_model_facts(settings.model.name)
    unfit: tuple[str, ...] = () if facts is None else TINY_MODEL_ONLY
    large = facts is not None and not 0 < facts.parameters < SMALL_MODEL
    if large:
        unfit += SMALL_MODELS_ONLY
    suggested = {name: value for name, value in suggested.items() if name not in (*unfit, *values)}
    rows = [Suggestion(name, value, f"environment {env_class.__name__}") for name, value in suggested.items()]
    if facts is not None and large:
        rows += suggest(replace(settings, **suggested), {*suggested, *values}, facts, env_class)
    return rows


def suggest(settings: Settings, decided: Collection[str], model: ModelFacts, env_class: Any) -> list[Suggestion]:
    """What fits a model that is not small. ``decided``: the settings that user or environment have decided.

    The defaults of ``Settings`` and what an environment ``suggests`` are made for the tiny model; here is what would keep a
    larger one from learning. What the environment suggests for models (``suggests_for_models``) comes first."""
    named = getattr(env_class, "suggests_for_models", {})
    rows = [Suggestion(n, v, f"suggested by {env_class.__name__}") for n, v in named.items() if n not in decided]
    settings, decided = replace(settings, **{s.name: s.value for s in rows}), {*decided, *(s.name for s in rows)}
    turns = max(1, settings.max_turns or turn_limit(env_class))
    if "lr" not in decided:
        rate = next(rate for limit, rate in LEARNING_RATES if (model.parameters or 2 * LARGE) < limit)
        lora = settings.lora_rank > 0
        reason = f"the model has {model.size} parameters" + ", and LoRA takes a ten times higher rate" * lora
        rows.append(Suggestion("lr", float(f"{rate * (LORA_FACTOR if lora else 1):.3g}"), reason))
    tokens = settings.max_tokens
    if "max_tokens" not in decided:
        tokens = ONE_ANSWER if turns == 1 else ONE_OF_MANY
        reason = "an episode is one answer" if turns == 1 else f"an episode has up to {turns} turns"
        if "context" in decided:
            tokens, reason = (
                max(1, min(tokens, settings.context // 2)),
                f"at most half of the context of {settings.context}",
            )
        rows.append(Suggestion("max_tokens", tokens, reason))
    if "context" not in decided:
        needed = PROMPT + turns * (tokens + REPLY)
        whole = max(-(-needed // 64) * 64, 512)  # a multiple of 64
        context = min(model.max_positions or MAX_CONTEXT, whole, max(MAX_CONTEXT, PROMPT + tokens))
        reason = f"room for a prompt and {turns} turn{'s' * (turns > 1)} of {tokens} tokens"
        reason += f"; the model reads at most {model.max_positions}" if model.max_positions else ""
        rows.append(Suggestion("context", context, reason))
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and not has_gpu())
    if "micro_batch_tokens" not in decided and model.parameters >= LARGE and on_cpu:
        reason = f"on a CPU, activations of {model.size} parameters for more tokens take several GB"
        rows.append(Suggestion("micro_batch_tokens", 2048, reason))
    return rows


def chosen_for_model(values: Mapping[str, Any], env_class: type | None = None) -> list[str]:
    """What is suggested for a model that is not the tiny one, in sentences: it differs from the defaults of the help text."""
    if _draft(values).model.tiny:
        return []
    return [f"{s.name} is {s.value} ({s.reason})" for s in suggestions(values, env_class)]


def has_gpu() -> bool:
    """Whether a driver shows a GPU: the answer before torch is imported. Torch has the last word (``engines.select_device``)."""
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in GPU_FILES)


# ------------------------------------------------------- rows of a file as tasks


@dataclass(frozen=True)
class PromptData:
    """The rows of ``--data`` with ``--reward`` as the tasks of a run: split, numbered, played as an environment, scored by
    columns. A row's number is its position in the training file; rows of ``--eval-data`` follow."""

    file: PromptFile
    eval_file: PromptFile | None
    rows: Mapping[int, PromptRow]  # by number
    env_class: type

    @classmethod
    def of(cls, file: PromptFile, eval_file: PromptFile | None, share: float, verdict: bool) -> PromptData:
        train, held_out = split_rows(file, share, eval_file)
        rows = dict(enumerate([*file.rows, *(eval_file.rows if eval_file else ())]))
        numbers = {id(row): n for n, row in rows.items()}
        parts = {"train": train, "held_out": held_out}
        problems = {
            split: {numbers[id(r)]: prompts.PromptProblem(tuple(r.messages), r.answer, r.tools) for r in some}
            for split, some in parts.items()
        }
        return cls(file, eval_file, rows, prompts.prompt_class(problems, verdict))

    @property
    def columns(self) -> frozenset[str]:
        return self.file.columns | (self.eval_file.columns if self.eval_file else frozenset())

    def row(self, task: Task) -> PromptRow:
        return self.rows[task.seed]

    def digests(self) -> dict[str, str]:
        return {file.path: digest(file.path) for file in (self.file, self.eval_file) if file is not None}

    def messages(self) -> list[str]:
        """What was read, for the log."""
        seeds = self.env_class.seeds  # type: ignore[attr-defined]
        files = [file.describe() for file in (self.file, self.eval_file) if file is not None]
        left_out = len(self.file.rows) - len(seeds["train"]) if self.eval_file else 0
        also = f"; {left_out} rows are also in the held-out file and not trained on" if left_out else ""
        return [*files, f"{len(seeds['train'])} rows to train on, {len(seeds['held_out'])} held out{also}"]


def prompt_data(settings: Settings) -> PromptData:
    """The rows that these settings name. A file is read once, until it changes."""
    s, specs = settings, parse_rewards(settings.reward)
    verdict = any(spec.gives_verdict or not spec.built_in for spec in specs)
    data = _read(s.data, _stamp(s.data), s.eval_data, _stamp(s.eval_data), s.held_out_share, verdict)
    return replace(data, env_class=_with_tools(data.env_class, s.tools)) if s.tools else data


@lru_cache(maxsize=4)
def _with_tools(env_class: type, names: tuple[str, ...]) -> type:
    return prompts.tool_prompts(env_class, names)


@lru_cache(maxsize=4)
def _read(data: str, stamp: object, eval_data: str, eval_stamp: object, share: float, verdict: bool) -> PromptData:
    return PromptData.of(read_prompts(data), read_prompts(eval_data) if eval_data else None, share, verdict)


def _stamp(path: str) -> object:
    """Changes when the file does."""
    if not os.path.isfile(path):
        return None
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


# --------------------------------------------------------------- the environment


def environment_class(settings: Settings) -> type:
    """The class that these settings play: the one of ``--env``, or the prompts of ``--data`` where rewards score answers."""
    s = settings
    if s.tools and not s.uses_prompts:
        raise SettingError("--tools are for the prompts of a file; write --data FILE --reward FUNCTION beside it")
    if s.uses_prompts:
        if s.env != prompts.NAME:
            raise SettingError(
                f"with --reward the prompts of --data {s.data} are the environment; leave --env {s.env} out, or leave "
                "--data out to reward the episodes of that environment"
            )
        return prompt_data(s).env_class
    if s.env == prompts.NAME:
        raise SettingError("the environment prompts is made of a file; write --data FILE and --reward FUNCTION")
    return environments.load(s.env)


def episode_pool(settings: Settings) -> HostPool | None:
    """Where episodes play: in actors of the run's cluster, in processes of this machine, or None: in this process."""
    if settings.cluster.environments and "ray" in sys.modules:
        from turnwise.training.cluster.environment_pool import pool_of_learner  # late: imports ray

        if (pool := pool_of_learner()) is not None:
            return pool
    return PROCESSES if settings.isolate_env else None


@dataclass(frozen=True)
class EnvSpec:
    """An environment class with the settings its episodes are created by."""

    settings: Settings
    env_class: type
    agent: Agent | None = None  # plays the episodes; None: the turn loop does

    @classmethod
    def from_settings(
        cls, settings: Settings, env_class: type | None = None, agent: Callable[..., Any] | None = None
    ) -> EnvSpec:
        """``env_class`` and ``agent`` replace what the names refer to: they were given as objects."""
        env_class = env_class or environment_class(settings)
        offered = tuple(getattr(env_class, "difficulties", (1,)))
        wrong = [d for d in settings.difficulty if d not in offered]
        if wrong:
            raise SettingError(f"{settings.env} has no difficulty {wrong[0]}; it offers {', '.join(map(str, offered))}")
        if settings.isolate_env and settings.env.startswith((GIVEN_OBJECT, prompts.NAME)):
            raise SettingError(
                f"isolate_env: another process cannot import {settings.env}; give a class by its name, module:Class"
            )
        return cls(settings, env_class, load_agent(settings, agent))

    def columns(self, task: Task) -> Mapping[str, Any]:
        """The columns of a task's row, where the tasks are rows of a file."""
        return prompt_data(self.settings).row(task).columns if self.settings.uses_prompts else {}

    def make(self, task: Task) -> Any:
        """A fresh episode. A class without splits gets other seeds for held-out tasks instead."""
        settings, arguments = self.settings, {"difficulty": task.difficulty, "split": task.split}
        accepted = {key: arguments[key] for key in environments.settings(self.env_class)}
        if (pool := episode_pool(settings)) is not None:
            return IsolatedEnvironment(settings.env, accepted, settings.env_seconds, self.tools, pool)
        return self.env_class(**accepted)

    def try_make(self, task: Task) -> Any:
        """``make``; where the constructor raises, an environment whose episode fails with that reason."""
        try:
            return self.make(task)
        except (Exception, SystemExit) as fault:
            return FailedEnvironment(fault)

    def tasks(self, split: str, purpose: str = "run") -> TaskStream:
        seed = self.settings.seed if split == "train" else 0  # held-out tasks are the same for every run
        seed += 0 if purpose == "run" else SECOND_STREAM
        name, difficulties, listed = self.settings.env, self.settings.difficulty, self._listed(split)
        if listed is not None:
            return TaskList(name, split, difficulties, seed, tuple(Task(name, n, split) for n in listed))
        return TaskStream(name, split, difficulties, seed)

    def _listed(self, split: str) -> Sequence[int] | None:
        """The seeds of all tasks of a split, where the class names them (``seeds``); None: they do not end."""
        seeds = getattr(self.env_class, "seeds", None)
        return None if seeds is None else seeds[split]

    def first_tasks(self, split: str, count: int) -> list[Task]:
        """The tasks of an evaluation."""
        listed = self._listed(split)
        count = count if listed is None else min(count, len(listed))
        return [self.tasks(split).draw(n) for n in range(count)]

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(getattr(self.env_class, "tools", ()))

    @property
    def limits(self) -> EpisodeLimits:
        s = self.settings
        turns = s.max_turns or turn_limit(self.env_class)
        return EpisodeLimits(turns, s.context, s.env_seconds, s.history)

    @property
    def scripted_limits(self) -> EpisodeLimits:
        """For scripted policies: only the environment itself limits them."""
        return replace(self.limits, context=2**31)

    def require_policy(self, player: str) -> None:
        """Refuse a scripted policy that the class does not have; and an unknown name."""
        if player not in SCRIPTED_POLICIES:
            raise SettingError(f"no scripted policy {player!r}; known: {', '.join(SCRIPTED_POLICIES)}")
        method = {"oracle": "oracle", "random": "random_action", "demonstrator": "demonstrate"}.get(player, "")
        if not method or overrides(self.env_class, method) or (method == "demonstrate" and self.can_demonstrate):
            return
        remedy = "`oracle` and `random_action`, or its own `demonstrate`" if method == "demonstrate" else f"`{method}`"
        raise SettingError(f"{self.settings.env} has no {player} policy; write {remedy} in its class")

    def require_demonstrations(self) -> None:
        """Refuse a class that nothing can be imitated of. The tiny model begins by imitating."""
        if self.can_demonstrate:
            return
        if self.settings.model.tiny:
            raise SettingError(
                f"the tiny model knows no language, and {self.settings.env} has no `demonstrate` and `oracle` to start it "
                "from; write both, or give a trained model with --model"
            )
        if self.settings.cold_steps > 0:
            raise SettingError(
                f"{self.settings.env} has no `demonstrate`, so there is nothing to imitate; write --cold-steps 0"
            )

    @property
    def can_demonstrate(self) -> bool:
        """Whether the class has scripted policies: an ``oracle`` and an imperfect ``demonstrate``, its own or the base's,
        which mixes ``oracle`` and ``random_action``."""
        cls = self.env_class
        inherited = hasattr(cls, "demonstrate") and overrides(cls, "random_action")
        return overrides(cls, "oracle") and (overrides(cls, "demonstrate") or inherited)
