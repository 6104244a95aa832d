"""What a run learns from besides its own rollouts, put together from its settings: a file, a player, a buffer.

Files are read and judged at the door, before anything is written; what only a tokenizer can tell (lengths) as soon as there
is one. Knows no loop and no loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnwise.config.settings import Settings
from turnwise.core.protocols import Ledger
from turnwise.core.records import Group, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.data.augment import with_directions, with_revisions
from turnwise.data.dataset import Row, Rows, read_rows
from turnwise.data.demonstrations import Demonstrations, Named, Player, Stage
from turnwise.data.files import Faults, digest
from turnwise.data.ledger_reader import reader
from turnwise.data.mixing import Mixture
from turnwise.data.offline_source import Draws, Shelf, held_back
from turnwise.data.tokenize import Speaker, groups_of, tasks_of
from turnwise.errors import SettingError
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.renderer import Renderer
from turnwise.tasks.listed import Listed
from turnwise.tasks.samplers import Tasks
from turnwise.training.env_spec import World
from turnwise.training.requirements import asked, own

PLAYERS = {"oracle": "oracle", "demonstrator": "demonstrate"}  # who can demonstrate, and by which method of the class


@dataclass(frozen=True)
class Supply:
    """``rows``: of ``--data`` or ``--demos``, whichever is a file."""

    settings: Settings
    world: World
    recipe: Recipe
    rows: Rows | None = None

    @classmethod
    def of(cls, settings: Settings, world: World, recipe: Recipe) -> Supply:
        """Reads the file, and refuses one that this method or this environment cannot use."""
        source = settings.data or ("" if settings.demos in PLAYERS else settings.demos)
        if settings.demos in PLAYERS and not own(world.kind, PLAYERS[settings.demos]):
            raise SettingError(f"{settings.env} has no {settings.demos}; give --demos a file of dialogues")
        if not source:
            return cls(settings, world, recipe)
        rows = read_rows(source, settings.env)
        _judge(rows, settings, world, "pairs" in asked(recipe), "demonstrations" in asked(recipe))
        rows = _expanded(rows, recipe, settings)
        if settings.data:
            _tells(rows, asked(recipe), settings)
        elif "demonstrations" in recipe.replay.wants and not tasks_of(rows):
            raise SettingError(
                f"{settings.title} keeps a demonstration of each task; name a task in every row of {rows.path}"
            )
        return cls(settings, world, recipe, rows)

    @property
    def offline(self) -> bool:
        return bool(self.settings.data)

    def digests(self) -> dict[str, str]:
        """Of the files a resumed run must find unchanged."""
        return {} if self.rows is None else {str(self.rows.path): digest(self.rows.path)}

    def tasks(self) -> Tasks:
        """The tasks to train on: those that are demonstrated, where the rows name them; else the environment's."""
        named = {} if self.rows is None or self.offline else tasks_of(self.rows)
        supply = self.world.tasks("train")
        if not named:
            return supply
        listed = tuple(rows[0].task for rows in named.values() if rows[0].task is not None)
        return Listed(supply.environment, "train", supply.difficulties, supply.seed, listed)

    def speaker(self, renderer: Renderer) -> Speaker:
        tools = tuple(getattr(self.world.kind, "tools", ()))
        s = self.settings
        return Speaker(renderer, s.context, s.history, tools, s.temperature or 1.0)

    def groups(self, renderer: Renderer) -> list[Group]:
        """Every row of the file as an expert's; refuses those that do not fit, by line."""
        return [] if self.rows is None else groups_of(self.rows, self.speaker(renderer), self.offline)

    def shelf(self, groups: list[Group], ledger: Ledger) -> Shelf:
        draws = Draws(len(groups), stable_seed(self.settings.seed, "shelf"))
        return Shelf(groups, self.recipe.budget.groups, draws, ledger)

    def mixture(self, renderer: Renderer, stored: Callable[[str], Trajectory]) -> Mixture:
        """Buffer and demonstrations of a run; ``stored`` reads a trajectory of the ledger."""
        shows = self._shows(renderer)
        seed = stable_seed(self.settings.seed, "replay")
        replay = self.recipe.replay.open(reader(stored), shows.of if shows else lambda task: None, seed)
        return Mixture(replay, shows, placed="demonstrations" in self.recipe.replay.wants)

    def _shows(self, renderer: Renderer) -> Demonstrations | None:
        s = self.settings
        if not s.demos:
            return None
        stage = Stage(self.world.attempt, self.speaker(renderer), self.world.limits)
        seed = stable_seed(s.seed, "demos")
        if self.rows is None:
            return Demonstrations(seed, s.demo_share, Player(s.demos, stage))
        named = tasks_of(self.rows)
        if named:
            return Demonstrations(seed, s.demo_share, Named(named, stage))
        return Demonstrations(seed, s.demo_share, None, self.groups(renderer))


def _judge(rows: Rows, settings: Settings, world: World, pairs: bool, shown: bool) -> None:
    """Refuses rows of the wrong kind, and tasks that are not this run's."""
    faults = Faults(rows.path)
    named = sum(row.task is not None for row in rows.rows if not row.pair)
    for row in rows.rows:
        words = _kind(row, pairs, shown) or ("" if settings.data else _place(row, settings, world, named))
        if words:
            faults.add(row.line, words)
    faults.refuse(len(rows))


def _expanded(rows: Rows, recipe: Recipe, settings: Settings) -> Rows:
    """With what a method reads beside the rows as they are written: revisions of a pair, directions to ask in."""
    wanted = sorted(asked(recipe))
    if "fact revises" in wanted:
        return with_revisions(rows)
    ratings = next((word.split()[1:] for word in wanted if word.startswith("ratings ")), [])
    if not ratings:
        return rows
    if not settings.data:
        raise SettingError(
            f"{settings.title} picks among the answers to one prompt; write --data {rows.path}, not --demos"
        )
    return with_directions(rows, ratings, stable_seed(settings.seed, "directions"))


def _tells(rows: Rows, wanted: frozenset[str], settings: Settings) -> None:
    """Refuses a file without a column that the method must be told."""
    told = {name for row in rows.rows for script in row.scripts for name in script.facts}
    for word in sorted(wanted):
        kind, _, name = word.partition(" ")
        if kind == "fact" and name not in told:
            seen = ", ".join(sorted(told)) or "none"
            raise SettingError(
                f"{rows.path} has no column {name!r}, which {settings.title} must be told; other columns: {seen}"
            )


def _kind(row: Row, pairs: bool, shown: bool) -> str:
    if row.pair and not pairs:
        return "a pair, and this method learns from single dialogues; write messages, or prompt and completion"
    if not row.pair and not shown:
        return "a dialogue, and this method learns from pairs; write prompt, chosen and rejected"
    return ""


def _place(row: Row, settings: Settings, world: World, named: int) -> str:
    """What is wrong with the task of a demonstration."""
    task = row.task
    if row.pair:
        return ""  # mixed in as they are
    if task is None:
        return "no task, while other rows name one; name one in every row, or in none" if named else ""
    if task.environment != settings.env:
        return f"a task of {task.environment}, and the run is on {settings.env}"
    if task.split != "train":
        return f"a task of the split {task.split}, which is kept for evaluation; write train"
    offered = tuple(getattr(world.kind, "difficulties", (1,)))
    return "" if task.difficulty in offered else f"difficulty {task.difficulty}; {settings.env} offers {offered}"


def split(groups: list[Group], settings: Settings) -> tuple[list[Group], list[Group]]:
    """What an offline run learns from, and what it is measured on; refuses a run that would measure nothing."""
    learned, kept = held_back(groups)
    if not settings.eval_tasks and not any("chosen" in t.facts for g in kept for t in g.trajectories):
        raise SettingError(
            f"with --eval-tasks 0 a run is measured by ranking held-back pairs, and {Path(settings.data)} leaves none to "
            "hold back; give at least 20 pairs, or evaluate on tasks of --env"
        )
    return learned, kept


__all__ = ["PLAYERS", "Supply", "split"]
