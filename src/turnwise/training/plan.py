"""The plan of a run: what the caller gave, and from it the settings, recipe, environment, data and tokenizer, each built once.

``refusals`` says which plans cannot run. Imports no torch: a plan is built, and mostly refused, before it is loaded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise import environments
from turnwise.config.files import ConfigFile, merge_config, read_config
from turnwise.config.named_object import GIVEN_OBJECT, importable_name
from turnwise.config.settings import Settings
from turnwise.config.values import ModelName
from turnwise.core.protocols import Generator, LedgerProtocol
from turnwise.core.records import Group, Sampling, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.core.signals import Signal
from turnwise.data.augment import with_directions, with_revisions
from turnwise.data.dataset import Dataset, DatasetRow, read_dataset
from turnwise.data.demonstrations import DemonstrationContext, Demonstrations, RowDemonstrator, ScriptedDemonstrator
from turnwise.data.files import LineErrors, digest
from turnwise.data.ledger_reader import trajectory_reader
from turnwise.data.mixing import Mixture
from turnwise.data.offline_source import OfflineSource, ShuffledSampler
from turnwise.data.replay import FreshActions, ReplaySources
from turnwise.data.resampling import TurnResampler
from turnwise.data.tokenize import DialogueTokenizer, build_groups, rows_by_task
from turnwise.environments.base import overrides
from turnwise.errors import SettingError
from turnwise.rollout.renderer import Renderer
from turnwise.store.shared_pool import SharedPool
from turnwise.tasks.task_source import TaskList, TaskStream
from turnwise.training.agents import name_agent
from turnwise.training.env_spec import EnvSpec, PromptData, chosen_for_model, prompt_data, resolve_settings
from turnwise.training.rewards import with_rubric_text

if TYPE_CHECKING:
    from turnwise.recipes.recipe import Recipe

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
    listed = list(given) if isinstance(given, list | tuple) else [given]
    objects: dict[str, Callable[..., Any]] = {}
    values["reward"] = tuple(_name_reward(item, objects) for item in listed)
    return objects


def _name_reward(item: Any, objects: dict[str, Callable[..., Any]]) -> str:
    """``f``, ``(0.5, f)`` or a name, as the settings write it."""
    weight, function = item if isinstance(item, tuple) and len(item) == 2 else (1.0, item)
    prefix = f"{float(weight)!r}*" if weight != 1 else ""
    if isinstance(function, str):
        return prefix + function
    if not callable(function):
        raise SettingError(f"reward is {function!r}; write a function, (weight, function), or a name such as 'exact'")
    name = importable_name(function)
    if not name:
        title = re.sub(r"\W", "_", getattr(function, "__name__", type(function).__name__))
        taken = (f"{GIVEN_OBJECT}{title}" + (f"_{n}" if n > 1 else "") for n in itertools.count(1))
        name = next(each for each in taken if each not in objects)
        objects[name] = function
    return prefix + name


def name_rows(values: dict[str, Any]) -> None:
    """Replace rows under ``data`` and ``eval_data`` (a list of dicts, or a data set) by the path of a file that holds
    them: beside the runs, named by their content, so that a run can be resumed."""
    for name in ("data", "eval_data"):
        given = values.get(name)
        if isinstance(given, Path):
            values[name] = str(given)
        elif given is not None and not isinstance(given, str):
            values[name] = str(_write_rows(name, given, Path(values.get("out", Settings().out))))


def _write_rows(name: str, rows: Any, out: Path) -> Path:
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        what = "several splits; give one of them" if isinstance(rows, Mapping) else "write a path or a list of dicts"
        raise SettingError(f"{name} is a {type(rows).__name__}: {what}")
    lines = [_line(name, n, row) for n, row in enumerate(rows)]
    text = "".join(f"{line}\n" for line in lines)
    path = out / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _line(name: str, n: int, row: Any) -> str:
    if not isinstance(row, Mapping):
        raise SettingError(f"row {n} of {name} is {row!r:.60}; write a dict with the columns of the row")
    try:
        return json.dumps(dict(row))
    except (TypeError, ValueError) as fault:
        raise SettingError(
            f"row {n} of {name} holds what JSON cannot ({fault}); give texts, numbers, lists and dicts"
        ) from None


# -------------------------------------------------------------------- the method


def make_recipe(settings: Settings, recipe: Recipe | None = None) -> Recipe:
    """The method's recipe, or the user's own, with another method's credit where asked for, and the run's budget and passes."""
    from turnwise import recipes  # late: a wrong name is refused before the families are imported
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
        budget=spend.of(settings.groups or budget.groups, settings.group_size or budget.size),
        control=recipe.control.with_passes(settings.epochs, settings.minibatches),
    )


def required_by(recipe: Recipe) -> frozenset[str]:
    """The requirements of a recipe, including those of signals that only environment or settings can make possible."""
    signals = recipe.objective.signals
    implied = {Signal.ANSWER_LOGP: "answer", Signal.TEACHER: "teacher", Signal.LOGP_WITHOUT_FEEDBACK: "feedback"}
    return recipe.requirements | {word for signal, word in implied.items() if signal in signals}


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
        rows = read_dataset(source, settings.env)
        _check_rows(rows, settings, env_spec, requires)
        rows = _augment(rows, recipe, settings)
        if settings.offline:
            _check_columns(rows, requires, settings)
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
        return prompts if self.rows is None else {**prompts, str(self.rows.path): digest(self.rows.path)}

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
        seed = stable_seed(s.seed, "demos")
        if self.rows is None:
            return Demonstrations(seed, s.demo_share, ScriptedDemonstrator(s.demos, context))
        named = rows_by_task(self.rows)
        if named:
            return Demonstrations(seed, s.demo_share, RowDemonstrator(named, context))
        return Demonstrations(seed, s.demo_share, None, self.groups(renderer))


def _check_rows(rows: Dataset, settings: Settings, env_spec: EnvSpec, requires: frozenset[str]) -> None:
    """Refuse rows of the wrong kind, and tasks that are not this run's."""
    faults = LineErrors(rows.path)
    named = sum(row.task is not None for row in rows.rows if not row.is_pair)
    for row in rows.rows:
        problem = _wrong_kind(row, requires)
        if not settings.offline:
            problem = problem or _wrong_task(row, settings, env_spec, named)
        if problem:
            faults.add(row.line, problem)
    faults.raise_if_any(len(rows))


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


def _check_columns(rows: Dataset, requires: frozenset[str], settings: Settings) -> None:
    """Refuse a file without a column that the method requires."""
    columns = {name for row in rows.rows for example in row.examples for name in example.facts}
    for word in sorted(requires):
        kind, _, name = word.partition(" ")
        if kind == "fact" and name not in columns:
            others = ", ".join(sorted(columns)) or "none"
            raise SettingError(
                f"{rows.path} has no column {name!r}, which {settings.title} requires; other columns: {others}"
            )


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
    notes: tuple[str, ...] = ()  # settings that were chosen for the model, to tell at the start

    @classmethod
    def from_caller(
        cls, settings: Mapping[str, Any], config: str | Path = "", recipe: Any = None, tokenizer: Any = None
    ) -> RunPlan:
        """From the arguments of ``train``: settings by name, which win over the file ``config``, and objects where a name could
        stand. A class or function that another process can import is recorded as ``module:name``, so that the run can be
        resumed from the command line; any other object by a name that says that it was one."""
        values = dict(settings)
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
        chosen, notes = resolve_settings(values, env_class), chosen_for_model(values, env_class)
        return cls(chosen, own_recipe, given, tuple(notes))

    @classmethod
    def from_settings(
        cls, settings: Settings, recipe: Recipe | None = None, given: GivenObjects | None = None
    ) -> RunPlan:
        return cls(settings, recipe, given or GivenObjects()).resolved()

    def resolved(self) -> RunPlan:
        """With the precision that the method prescribes, where the user left it at ``auto``, and the judge's rubric in words."""
        precision = self.recipe.precision
        prescribed = {"dtype": precision.learner, "rollout_dtype": precision.rollouts}
        open_ones = {k: v for k, v in prescribed.items() if v and getattr(self.settings, k) == "auto"}
        return replace(self, settings=with_rubric_text(replace(self.settings, **open_ones)))  # type: ignore[arg-type]

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
