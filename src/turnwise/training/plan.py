"""The plan of a run: what the caller gave, and from it the settings, recipe, environment, data and tokenizer, each built once.

``refusals`` says which plans cannot run. Imports no torch: a plan is built, and mostly refused, before it is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import operator
import os
import re
import sys
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise import environments
from turnwise.config.files import ConfigFile, merge_config, read_config
from turnwise.config.named_object import GIVEN_OBJECT, importable_name
from turnwise.config.settings import Settings, split_method, with_our_names
from turnwise.config.values import ModelName
from turnwise.core.protocols import Generator, LedgerProtocol
from turnwise.core.records import Group, Sampling, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.core.signals import Signal
from turnwise.data.dataset import Dataset, DatasetRow, read_dataset, with_directions, with_revisions
from turnwise.data.demonstrations import DemonstrationContext, Demonstrations, RowDemonstrator, ScriptedDemonstrator
from turnwise.data.export import EXPORTED_STATES, demos
from turnwise.data.files import LineErrors, digest
from turnwise.data.mixing import Mixture, TurnResampler
from turnwise.data.offline_source import OfflineSource, ShuffledSampler
from turnwise.data.prompts import ANSWER, HINTS, SOLUTION, PromptFile, PromptRow, read_prompts, split_rows
from turnwise.data.replay import FreshActions, ReplaySources, trajectory_reader
from turnwise.data.tokenize import DialogueTokenizer, build_groups, rows_by_task
from turnwise.environments import prompts
from turnwise.environments.base import overrides
from turnwise.environments.contract import turn_limit
from turnwise.environments.isolated import PROCESSES, HostPool, IsolatedEnvironment
from turnwise.errors import SettingError, nearest
from turnwise.models.facts import ModelFacts, read_model_facts
from turnwise.recipes.signatures import suggested_settings
from turnwise.rewards.judge import DEFAULT_RUBRIC
from turnwise.rewards.spec import parse_rewards
from turnwise.rollout.episode import AGENT_CALLS, EpisodeLimits, FailedEnvironment
from turnwise.rollout.renderer import CHATML, Renderer
from turnwise.rollout.scripted import SCRIPTED_POLICIES
from turnwise.rollout.support import prompt_text
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir
from turnwise.store.shared_pool import SharedPool
from turnwise.tasks.task_source import TaskList, TaskStream
from turnwise.training.agents import Agent, load_agent, name_agent

if TYPE_CHECKING:
    from turnwise.recipes.recipe import Recipe

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
# NVIDIA's, of embedded boards, of Linux inside Windows, and AMD's
GPU_FILES = ("nvidia[0-9]*", "nvhost-*", "dxg", "kfd")


# ------------------------------------------------------------ settings that fit


@dataclass(frozen=True)
class Suggestion:
    """A value that applies where the user gives none, and why: ``Suggestion("max_turns", 6, "environment Guess")``."""

    name: str
    value: Any
    reason: str


def resolve_settings(values: Mapping[str, Any], env_class: type | None = None) -> Settings:
    """The settings of a run: the user's values, then what belongs to the method, then what suits environment and model, then
    the defaults. ``env_class`` replaces the class that the environment's name refers to."""
    return replace(_draft(values), **{s.name: s.value for s in suggestions(values, env_class)})


def _draft(values: Mapping[str, Any]) -> Settings:
    """The user's values and those of the method over the defaults. Rows that are answered and rewarded are the environment."""
    settings = Settings.of({**{s.name: s.value for s in of_method(values)}, **values})
    return replace(settings, env=prompts.NAME) if settings.uses_prompts and "env" not in values else settings


def of_method(values: Mapping[str, Any]) -> list[Suggestion]:
    """The settings that belong to the method, where ``values`` leaves them open. An environment has tools of its own."""
    name = split_method(str(values.get("method", "")))[0]
    rows = [Suggestion(k, v, f"method {name}") for k, v in suggested_settings(name).items() if k not in values]
    return [row for row in rows if row.name != "tools" or values.get("data")]


def suggestions(values: Mapping[str, Any], env_class: type | None = None) -> list[Suggestion]:
    """What method, environment and model suggest for the settings that ``values`` leaves open."""
    first, settings = of_method(values), _draft(values)
    values = {**{s.name: s.value for s in first}, **values}
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
    return [*first, *rows]


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
            tokens = max(1, min(tokens, settings.context // 2))
            reason = f"at most half of the context of {settings.context}"
        rows.append(Suggestion("max_tokens", tokens, reason))
    if "context" not in decided:
        if settings.agent and settings.uses_prompts:  # how often it calls is not known before
            turns = settings.max_turns or prompts.MAX_TURNS
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


def chosen(values: Mapping[str, Any], env_class: type | None = None) -> list[str]:
    """What differs from the defaults of the help text, in sentences: what belongs to the method, and all that is suggested for
    a model that is not the tiny one."""
    rows = of_method(values) if _draft(values).model.tiny else suggestions(values, env_class)
    return [f"{s.name} is {s.value} ({s.reason})" for s in rows]


def has_gpu() -> bool:
    """Whether a driver shows a GPU: the answer before torch is imported. Torch has the last word (``engines.select_device``)."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False  # hidden from this process
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in GPU_FILES)


# ------------------------------------------------------- rows of a file as tasks


@dataclass(frozen=True)
class RowProblems(Mapping[int, prompts.PromptProblem]):
    """The problems of some rows by number, each made when an episode begins."""

    rows: Sequence[PromptRow]
    numbers: tuple[int, ...]  # ascending

    def __getitem__(self, number: int) -> prompts.PromptProblem:
        at = bisect_left(self.numbers, number)
        if self.numbers[at : at + 1] != (number,):
            raise KeyError(number)
        row = self.rows[number]
        return prompts.PromptProblem(tuple(row.messages), row.answer, row.tools, row.hints, row.solution)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class PromptData:
    """The rows of ``--data`` with ``--reward`` as the tasks of a run: split, numbered, played as an environment, scored by
    columns. A row's number is its position in the training file; rows of ``--eval-data`` follow."""

    file: PromptFile
    eval_file: PromptFile | None
    rows: Sequence[PromptRow]
    env_class: type

    @classmethod
    def of(cls, file: PromptFile, eval_file: PromptFile | None, share: float, verdict: bool) -> PromptData:
        rows = file.rows + eval_file.rows if eval_file else file.rows
        offers = file.offers + eval_file.offers if eval_file else file.offers
        parts = dict(zip(("train", "held_out"), split_rows(file, share, eval_file)))
        problems = {split: RowProblems(rows, numbers) for split, numbers in parts.items()}
        # of every row to train on; an answer also of those held out
        trained = functools.reduce(operator.and_, (offers[n] for n in parts["train"]), HINTS | SOLUTION)
        complete = all(offers[n] & ANSWER for numbers in parts.values() for n in numbers)
        made = prompts.prompt_class(problems, verdict, complete, bool(trained & HINTS), bool(trained & SOLUTION))
        return cls(file, eval_file, rows, made)

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.file.columns | (self.eval_file.columns if self.eval_file else set()))

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
    data = _read(s.data, file_stamp(s.data), s.eval_data, file_stamp(s.eval_data), s.held_out_share, verdict)
    return replace(data, env_class=_with_tools(data.env_class, s.tools)) if s.tools else data


@lru_cache(maxsize=4)
def _with_tools(env_class: type, names: tuple[str, ...]) -> type:
    return prompts.tool_prompts(env_class, names)


@lru_cache(maxsize=4)
def _read(data: str, stamp: object, eval_data: str, eval_stamp: object, share: float, verdict: bool) -> PromptData:
    return PromptData.of(read_prompts(data), read_prompts(eval_data) if eval_data else None, share, verdict)


def file_stamp(path: str) -> object:
    """Changes when the file does."""
    return ((status := os.stat(path)).st_mtime_ns, status.st_size) if os.path.isfile(path) else None


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
        from turnwise.training.cluster.directory import pool_of_learner  # late: imports ray

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
        if wrong and settings.uses_prompts:
            raise SettingError("rows of a file have no levels of difficulty; leave --difficulty out")
        if wrong:
            raise SettingError(f"{settings.env} has no difficulty {wrong[0]}; it offers {', '.join(map(str, offered))}")
        if settings.isolate_env and settings.uses_prompts:
            raise SettingError(
                "--isolate-env runs an environment's code in processes, and the prompts of --data have none; leave it out"
            )
        if settings.isolate_env and settings.env.startswith(GIVEN_OBJECT):
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
        budget = (s.max_turns or AGENT_CALLS, s.agent_tokens, s.agent_seconds)
        return EpisodeLimits(turns, s.context, s.env_seconds, s.history, *budget)

    @property
    def paid_from(self) -> float:
        """Steps in the environment from which on an agent's episode has a reward of its own (``AgentEpisode``)."""
        s = self.settings
        return 0 if s.reward or s.judge else math.inf if s.uses_prompts else 1

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
        if self.settings.model.tiny and self.settings.uses_prompts:
            raise SettingError(
                "the tiny model knows no language, and begins by imitating the answers of the rows, which not all have; give "
                "every row an answer, or write --model with a trained model"
            )
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


OWN = "own"  # the recorded method of a run whose recipe was given as an object
SCRIPTED = {"oracle": "oracle", "demonstrator": "demonstrate"}  # scripted policies, and the method each needs


# --------------------------------------------------------------- what was given


@dataclass(frozen=True)
class GivenObjects:
    """What the caller gave as objects, where the settings hold only a name."""

    env_class: type | None = None
    model: Any = None
    tokenizer: Any = None
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # by the name the settings hold
    agent: Callable[..., Any] | None = None


def _name_method(values: dict[str, Any]) -> Recipe | None:
    """Replace a recipe or recipe function by its name; the recipe itself where it has none."""
    method = values.get("method", "")
    if isinstance(method, str):
        return None
    name = importable_name(method) if isinstance(method, Callable) else ""  # type: ignore[arg-type]
    values["method"] = name or OWN
    if name:
        return None
    from turnwise.recipes.recipe import Recipe

    recipe = method(**values.get("method_options", {})) if callable(method) else method
    if not isinstance(recipe, Recipe):
        raise SettingError(f"method is {method!r}; write a name, a Recipe, or a function that returns one")
    return recipe


def _name_model(values: dict[str, Any], tokenizer: Any) -> Any:
    """Replace a model by a name that says that it was an object. The run keeps it in its folder ``initial``."""
    model = values.get("model", "")
    if isinstance(model, str | Path | ModelName):
        if tokenizer is not None:
            raise SettingError(
                "a tokenizer is given without a model object; write train(model=MODEL, tokenizer=TOKENIZER)"
            )
        return None
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    if not isinstance(model, PreTrainedModel):
        raise SettingError(
            f"model is a {type(model).__name__}; write a name, a folder, or a Transformers model (adapters: merge them first)"
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise SettingError("a model object needs its tokenizer: train(model=MODEL, tokenizer=TOKENIZER)")
    values["model"] = f"{GIVEN_OBJECT}{type(model).__name__}"
    return model


def name_rewards(values: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Replace functions under ``reward`` by names; returns those that have none, by the name recorded for them. A function that
    another process can import runs in one that can be killed; any other stays an object of this process."""
    given = values.get("reward")
    if given is None or isinstance(given, str):
        return {}
    objects: dict[str, Callable[..., Any]] = {}
    names = []
    for item in given if isinstance(given, list | tuple) else [given]:  # each is f, (0.5, f) or a name
        weight, function = item if isinstance(item, tuple) and len(item) == 2 else (1.0, item)
        if not isinstance(function, str) and not callable(function):
            raise SettingError(
                f"reward is {function!r}; write a function, (weight, function), or a name such as 'exact'"
            )
        name = function if isinstance(function, str) else importable_name(function)
        if not name:
            title = re.sub(r"\W", "_", getattr(function, "__name__", type(function).__name__))
            free = (f"{GIVEN_OBJECT}{title}" + (f"_{n}" if n > 1 else "") for n in itertools.count(1))
            name = next(each for each in free if each not in objects)
            objects[name] = function
        names.append((f"{float(weight)!r}*" if weight != 1 else "") + name)
    values["reward"] = tuple(names)
    return objects


def name_rows(values: dict[str, Any]) -> None:
    """Replace rows under ``data`` and ``eval_data`` (a list of dicts, or a data set) by the path of a file that holds
    them: beside the runs, named by their content, so that a run can be resumed."""
    for name in ("data", "eval_data"):
        given = values.get(name)
        if isinstance(given, Path):
            values[name] = str(given)
        if given is None or isinstance(given, str | Path):
            continue
        if isinstance(given, Mapping) or not isinstance(given, Iterable):
            splits = "several splits; give one of them"
            what = splits if isinstance(given, Mapping) else "write a path or a list of dicts"
            raise SettingError(f"{name} is a {type(given).__name__}: {what}")
        lines = []
        for n, row in enumerate(given):
            if not isinstance(row, Mapping):
                raise SettingError(f"row {n} of {name} is {row!r:.60}; write a dict with the columns of the row")
            try:
                lines.append(json.dumps(dict(row)) + "\n")
            except (TypeError, ValueError) as fault:
                instead = "give texts, numbers, lists and dicts"
                raise SettingError(f"row {n} of {name} holds what JSON cannot ({fault}); {instead}") from None
        text = "".join(lines)
        path = Path(values.get("out", Settings().out)) / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        values[name] = str(path)


# -------------------------------------------------------------------- the method


def make_recipe(settings: Settings, recipe: Recipe | None = None) -> Recipe:
    """The method's recipe, or the user's own, with another method's credit where asked for, and the run's budget and passes."""
    from turnwise import recipes  # late: a wrong name is refused before the families are imported
    from turnwise.credit.selectors import Finished
    from turnwise.recipes import catalogue, experience

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
        keep=recipe.keep & Finished() if settings.mask_truncated else recipe.keep,
        budget=spend.of(settings.groups or budget.groups, settings.group_size or budget.size),
        control=recipe.control.with_passes(settings.epochs, settings.minibatches),
    )


def required_by(recipe: Recipe) -> frozenset[str]:
    """The requirements of a recipe, including those of signals that only environment or settings can make possible."""
    signals = recipe.objective.signals
    implied = {Signal.ANSWER_LOGP: "answer", Signal.TEACHER: "teacher", Signal.LOGP_WITHOUT_FEEDBACK: "feedback"}
    return recipe.requirements | {word for signal, word in implied.items() if signal in signals}


def read_rubric(text: str) -> str:
    """The rubric: words, the content of a file, or the default."""
    if not text.strip():
        return DEFAULT_RUBRIC
    if "\n" in text or len(text) > 255 or not (text.endswith((".txt", ".md")) or Path(text).is_file()):
        return text
    try:
        words = Path(text).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise SettingError(
            f"the rubric {text!r} cannot be read: {fault}; write a text file, or the rubric itself"
        ) from None
    if not words:
        raise SettingError(f"the rubric {text!r} is empty; write what the judge should look for")
    return words


def read_template(name: str) -> str:
    """The chat template that ``--template`` names; refuses a file that is none."""
    if name == "chatml":
        return CHATML
    if not Path(name).is_file():
        raise SettingError(f"no chat template {name!r}; write chatml or the path of a .jinja file")
    return Path(name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------- the data


@dataclass(frozen=True)
class DataSources:
    """The data of a run besides its own rollouts: rows of a file, scripted demonstrations, a replay buffer. Files are read and
    checked before anything is written; lengths are checked as soon as there is a tokenizer. ``rows`` are those of ``--data`` or
    ``--demos``, whichever is a file."""

    settings: Settings
    env_spec: EnvSpec
    recipe: Recipe
    rows: Dataset | None = None
    prompts: PromptData | None = None  # rows of ``--data`` that are answered and rewarded

    @classmethod
    def from_settings(cls, settings: Settings, env_spec: EnvSpec, recipe: Recipe) -> DataSources:
        """Read the file, and refuse one that this method or this environment cannot use."""
        requires = required_by(recipe)
        prompts = prompt_data(settings) if settings.uses_prompts else None
        source = settings.data if settings.offline else "" if settings.demos in SCRIPTED else settings.demos
        if settings.demos in SCRIPTED and not overrides(env_spec.env_class, SCRIPTED[settings.demos]):
            raise SettingError(f"{settings.env} has no {settings.demos}; give --demos a file of dialogues")
        if not source:
            return cls(settings, env_spec, recipe, prompts=prompts)
        rows = read_dialogues(source, settings.env)
        # refuse rows of the wrong kind, and tasks that are not this run's
        faults = LineErrors(rows.path)
        named = sum(row.task is not None for row in rows.rows if not row.is_pair)
        for row in rows.rows:
            problem = _wrong_kind(row, requires)
            if not settings.offline:
                problem = problem or _wrong_task(row, settings, env_spec, named)
            if problem:
                faults.add(row.line, problem)
        faults.raise_if_any(len(rows))
        rows = _augment(rows, recipe, settings)
        if settings.offline:
            # refuse a file without a column that the method requires
            columns = {name for row in rows.rows for example in row.examples for name in example.facts}
            for word in sorted(requires):
                kind, _, name = word.partition(" ")
                if kind == "fact" and name not in columns:
                    others = ", ".join(sorted(columns)) or "none"
                    raise SettingError(
                        f"{rows.path} has no column {name!r}, which {settings.title} requires; other columns: {others}"
                    )
        elif "demonstrations" in recipe.replay.requires and not rows_by_task(rows):
            raise SettingError(
                f"{settings.title} keeps a demonstration of each task; name a task in every row of {rows.path}"
            )
        return cls(settings, env_spec, recipe, rows, prompts)

    @property
    def offline(self) -> bool:
        return self.settings.offline

    def digests(self) -> dict[str, str]:
        """Digests of the files that a resumed run must find unchanged."""
        prompts = {} if self.prompts is None else self.prompts.digests()
        files = [str(self.rows.path)] if self.rows is not None else []
        files += [self.settings.solutions] if self.settings.solutions else []
        # a run goes on growing; what it had is not what is recorded here
        return {**prompts, **{path: digest(path) for path in files if not Path(path, "run.json").is_file()}}

    def messages(self) -> list[str]:
        """What was read of a file of prompts, for the log."""
        return [] if self.prompts is None else self.prompts.messages()

    def tasks(self) -> TaskStream:
        """The tasks to train on: those the rows name, where they name any; else the environment's stream."""
        named = {} if self.rows is None or self.offline else rows_by_task(self.rows)
        stream = self.env_spec.tasks("train")
        if not named:
            return stream
        listed = tuple(rows[0].task for rows in named.values() if rows[0].task is not None)
        return TaskList(stream.environment, "train", stream.difficulties, stream.seed, listed)

    def dialogue_tokenizer(self, renderer: Renderer) -> DialogueTokenizer:
        s = self.settings
        return DialogueTokenizer(renderer, s.context, s.history, self.env_spec.tools, s.temperature or 1.0)

    def groups(self, renderer: Renderer) -> list[Group]:
        """Every row of the file as an expert trajectory; refuses those that do not fit the context, by line."""
        return [] if self.rows is None else build_groups(self.rows, self.dialogue_tokenizer(renderer), self.offline)

    def offline_source(self, groups: list[Group], ledger: LedgerProtocol) -> OfflineSource:
        order = ShuffledSampler(len(groups), stable_seed(self.settings.seed, "shelf"))
        return OfflineSource(groups, self.recipe.budget.groups, order, ledger)

    def mixture(
        self,
        renderer: Renderer,
        stored: Callable[[str], Trajectory],
        generator: Generator | None = None,
        sampling: Sampling | None = None,
    ) -> Mixture:
        """Replay buffer and demonstrations of a run; ``stored`` reads a trajectory of the ledger. ``generator`` samples turns
        again, where the recipe has fresh actions."""
        demonstrations = self._demonstrations(renderer)
        seed = stable_seed(self.settings.seed, "replay")
        find = demonstrations.for_task if demonstrations else lambda task: None
        piece = self.recipe.replay
        open_pool = lambda folder, size: SharedPool(Path(folder), size, tokenizer_digest(renderer))  # noqa: E731
        replay = piece.open(ReplaySources(trajectory_reader(stored), find, seed, open_pool))
        placed = "demonstrations" in self.recipe.replay.requires
        resampler = None
        if isinstance(piece, FreshActions) and piece.count and generator is not None:
            resampler = TurnResampler(generator, sampling or Sampling(), piece.count, seed)
        return Mixture(replay, demonstrations, placed, resampler)

    def _demonstrations(self, renderer: Renderer) -> Demonstrations | None:
        s = self.settings
        if not s.demos:
            return None
        context = DemonstrationContext(self.env_spec.try_make, self.dialogue_tokenizer(renderer), self.env_spec.limits)
        first = (stable_seed(s.seed, "demos"), s.demo_share)
        if self.rows is None:
            return Demonstrations(*first, ScriptedDemonstrator(s.demos, context))
        if named := rows_by_task(self.rows):
            return Demonstrations(*first, RowDemonstrator(named, context))
        return Demonstrations(*first, None, self.groups(renderer))


def read_dialogues(path: str, environment: str = "") -> Dataset:
    """Dialogues of a file, or the successes of a run that had no help, from its ledger."""
    if not Path(path, "run.json").is_file():
        return read_dataset(path, environment)
    with SqliteLedger(RunDir.open(path).ledger, readonly=True) as ledger:
        groups = (ledger.group(entry.group_id) for entry in ledger.groups() if entry.state in EXPORTED_STATES)
        plain = (replace(g, trajectories=tuple(t for t in g.trajectories if not t.guidance)) for g in groups)
        table = list(enumerate((row for group in plain for row in demos(group)), start=1))
    if not table:
        raise SettingError(f"the run {path} has no success without help, so there is no solution to take from it")
    return read_dataset(path, environment, table)


@lru_cache(maxsize=4)
def read_solutions(path: str, stamp: object = None) -> Mapping[str, tuple[str, ...]]:
    """The turns of solved tasks by what their episodes begin with. Of several the one with the highest reward, then the
    shortest, then the first."""
    best: dict[str, tuple[tuple[float, int], tuple[str, ...]]] = {}
    for row in read_dialogues(path).rows:
        example = row.examples[0]  # of a pair the better one
        rank = (-(example.reward or 0.0), sum(map(len, example.turns)))
        key = prompt_text(example.prompt)
        if example.success is not False and (key not in best or rank < best[key][0]):
            best[key] = rank, tuple(example.turns)
    return {key: turns for key, (_, turns) in best.items()}


def _augment(rows: Dataset, recipe: Recipe, settings: Settings) -> Dataset:
    """Add rows that the method derives from those of the file: revisions of a pair, several rating directions."""
    requires = sorted(required_by(recipe))
    if "fact revises" in requires:
        return with_revisions(rows)
    ratings = next((word.split()[1:] for word in requires if word.startswith("ratings ")), [])
    if not ratings:
        return rows
    if not settings.offline:
        raise SettingError(
            f"{settings.title} picks among the answers to one prompt; write --data {rows.path}, not --demos"
        )
    return with_directions(rows, ratings, stable_seed(settings.seed, "directions"))


def _wrong_kind(row: DatasetRow, requires: frozenset[str]) -> str:
    label = row.examples[0].facts.get("chosen")
    if row.is_pair and "pairs" not in requires:
        return "a pair, and this method learns from single dialogues; write messages, or prompt and completion"
    if row.is_pair or (label is not None and "labels" in requires):
        return ""
    if "labels" in requires:
        return "no label; write label: true or false, or prompt, chosen and rejected"
    if "demonstrations" not in requires:
        return "a dialogue, and this method learns from pairs; write prompt, chosen and rejected"
    return "" if label != 0 else "label is false, and this method imitates every row; take kto, or drop the bad answers"


def _wrong_task(row: DatasetRow, settings: Settings, env_spec: EnvSpec, named: int) -> str:
    """What is wrong with the task of a demonstration; empty if nothing is."""
    task = row.task
    if row.is_pair:
        return ""  # mixed in as they are
    if task is None:
        return "no task, while other rows name one; name one in every row, or in none" if named else ""
    if task.environment != settings.env:
        return f"a task of {task.environment}, and the run is on {settings.env}"
    if task.split != "train":
        return f"a task of the split {task.split}, which is kept for evaluation; write train"
    offered = tuple(getattr(env_spec.env_class, "difficulties", (1,)))
    return "" if task.difficulty in offered else f"difficulty {task.difficulty}; {settings.env} offers {offered}"


def tokenizer_digest(renderer: Renderer) -> str:
    """Equal for tokenizers that give ids the same meaning and render dialogues alike."""
    vocabulary = sorted(renderer.tokenizer.get_vocab().items())
    return f"{zlib.crc32(repr((vocabulary, renderer.tokenizer.chat_template)).encode()):08x}"


# --------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class RunPlan:
    """What a run is made of; ``own_recipe`` and ``given`` replace what the settings name. Each part is built when it is first
    used: a wrong name is refused before a family of methods is imported, and a finished run needs neither data nor tokenizer."""

    settings: Settings
    own_recipe: Recipe | None = None
    given: GivenObjects = field(default_factory=GivenObjects)
    notes: tuple[str, ...] = ()  # settings that were chosen for the method or the model, to tell at the start

    @classmethod
    def from_caller(
        cls, settings: Mapping[str, Any], config: str | Path = "", recipe: Any = None, tokenizer: Any = None
    ) -> RunPlan:
        """From the arguments of ``train``: settings by name, which win over the file ``config``, and objects where a name could
        stand. A class or function that another process can import is recorded as ``module:name``, so that the run can be
        resumed from the command line; any other object by a name that says that it was one."""
        values = with_our_names(settings)
        if recipe is not None and values.get("method", OWN) != OWN:
            raise SettingError(f"recipe and method={values['method']!r} are both given; leave one of them out")
        if recipe is not None:
            values["method"] = recipe
        own_recipe, env_class = _name_method(values), None
        if not isinstance(values.get("env", ""), str):
            values["env"], env_class = environments.name_of(values["env"])
        model, rewards = _name_model(values, tokenizer), name_rewards(values)
        name_rows(values)
        given = GivenObjects(env_class, model, tokenizer, rewards, name_agent(values))
        values = merge_config(read_config(config) if config else ConfigFile(""), values)
        return cls(resolve_settings(values, env_class), own_recipe, given, tuple(chosen(values, env_class)))

    @classmethod
    def from_settings(
        cls, settings: Settings, recipe: Recipe | None = None, given: GivenObjects | None = None
    ) -> RunPlan:
        return cls(settings, recipe, given or GivenObjects()).resolved()

    def resolved(self) -> RunPlan:
        """With the precision that the method prescribes, where the user left it at ``auto``, and the judge's rubric in words: the
        run records them, so that a file that changes later cannot change the run."""
        precision = self.recipe.precision
        prescribed = {"dtype": precision.learner, "rollout_dtype": precision.rollouts}
        chosen: dict[str, Any] = {k: v for k, v in prescribed.items() if v and getattr(self.settings, k) == "auto"}
        if self.settings.judge:
            chosen["judge_rubric"] = read_rubric(self.settings.judge_rubric)
        return replace(self, settings=replace(self.settings, **chosen))

    @cached_property
    def recipe(self) -> Recipe:
        return make_recipe(self.settings, self.own_recipe)

    @cached_property
    def env_spec(self) -> EnvSpec:
        return EnvSpec.from_settings(self.settings, self.given.env_class, self.given.agent)

    @cached_property
    def data(self) -> DataSources:
        return DataSources.from_settings(self.settings, self.env_spec, self.recipe)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer the run begins with. For the tiny model it is trained here, once."""
        if self.given.tokenizer is not None:
            return self.given.tokenizer
        from turnwise.training import build  # late: imports the model library

        return build.load_tokenizer(self.settings, self.env_spec)
