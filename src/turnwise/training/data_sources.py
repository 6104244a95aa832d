"""The data of a run besides its own rollouts: rows of a file, scripted demonstrations, a replay buffer.

Files are read and checked before anything is written; lengths are checked as soon as there is a tokenizer. Knows no loop and
no loss.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator, LedgerProtocol
from turnwise.core.records import Group, Sampling, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.data.augment import with_directions, with_revisions
from turnwise.data.dataset import Dataset, DatasetRow, read_dataset
from turnwise.data.demonstrations import DemonstrationContext, Demonstrations, RowDemonstrator, ScriptedDemonstrator
from turnwise.data.files import LineErrors, digest
from turnwise.data.ledger_reader import trajectory_reader
from turnwise.data.mixing import Mixture
from turnwise.data.offline_source import OfflineSource, ShuffledSampler
from turnwise.data.replay import SharedExperience
from turnwise.data.replay.fresh_actions import FreshActions
from turnwise.data.resampling import TurnResampler
from turnwise.data.tokenize import DialogueTokenizer, build_groups, rows_by_task
from turnwise.environments.base import overrides
from turnwise.errors import SettingError
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.renderer import Renderer
from turnwise.store.shared_pool import SharedPool
from turnwise.tasks.task_source import TaskList, TaskStream
from turnwise.training.env_spec import EnvSpec
from turnwise.training.prompt_data import PromptData, prompt_data, uses_prompts
from turnwise.training.requirements import required_by

SCRIPTED = {"oracle": "oracle", "demonstrator": "demonstrate"}  # scripted policies, and the method each needs


@dataclass(frozen=True)
class DataSources:
    """``rows`` are those of ``--data`` or ``--demos``, whichever is a file."""

    settings: Settings
    env_spec: EnvSpec
    recipe: Recipe
    rows: Dataset | None = None
    prompts: PromptData | None = None  # rows of ``--data`` that are answered and rewarded

    @classmethod
    def from_settings(cls, settings: Settings, env_spec: EnvSpec, recipe: Recipe) -> DataSources:
        """Read the file, and refuse one that this method or this environment cannot use."""
        requires = required_by(recipe)
        prompts = prompt_data(settings.as_dict()) if uses_prompts(settings.as_dict()) else None
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
        if isinstance(piece, SharedExperience):
            digest = tokenizer_digest(renderer)
            replay = piece.open_with(lambda folder, size: SharedPool(Path(folder), size, digest), seed)
        else:
            replay = piece.open(trajectory_reader(stored), find, seed)
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


__all__ = ["SCRIPTED", "DataSources", "tokenizer_digest"]
