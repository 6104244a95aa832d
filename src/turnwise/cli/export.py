"""Rows for learning from others: the episodes of a run, or of an environment's own players, written to a file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from turnwise import environments
from turnwise.config.settings import Settings
from turnwise.core.records import Group, Task
from turnwise.data.export import FORMS, write_rows
from turnwise.errors import SettingError, nearest
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_script
from turnwise.store.ledger import Ledger
from turnwise.store.rundir import RunDir
from turnwise.training import build
from turnwise.training.env_spec import World, settle

TRIES = 4  # mediocre episodes beside each perfect one: the worst of them is the other side of a pair
TOGETHER = 16  # tasks played at once
SETTLED = ("trained", "finished")


def export(source: str | Path, form: str, target: str | Path, tasks: int = 200, seed: int = 0) -> int:
    """``source``: a run's directory, or an environment, whose players then play ``tasks`` tasks. How many rows were written."""
    if form not in FORMS:
        raise SettingError(f"no form {form!r} of rows; {nearest(form, FORMS)}")
    if tasks < 1:
        raise SettingError(f"tasks is {tasks}; write at least 1")
    if _is_environment(str(source)):
        world = World.of(settle({"env": str(source), "seed": seed}))
        return write_rows(_played(world, tasks), form, target, _tools(world))
    run = RunDir.open(source)
    world = World.of(Settings.of(run.facts()["settings"]))
    with Ledger(run.ledger, readonly=True) as ledger:
        groups = (ledger.group(entry.group_id) for entry in ledger.groups() if entry.state in SETTLED)
        return write_rows(groups, form, target, _tools(world))


def _is_environment(source: str) -> bool:
    return not Path(source, "run.json").is_file() and (source in environments.BUILT_IN or ":" in source)


def _tools(world: World) -> tuple[dict, ...]:
    return tuple(getattr(world.kind, "tools", ()))


def _played(world: World, count: int) -> Iterator[Group]:
    """Each task played once by the oracle and a few times by the demonstrator."""
    if not world.demonstrates:
        raise SettingError(f"{world.settings.env} has no oracle and demonstrator to play its tasks")
    renderer, supply = Renderer(build.tokenizer_for_scripts()), world.tasks("train")
    players = ["oracle", *["demonstrator"] * TRIES]

    async def play(n: int, task: Task) -> Group:
        made = (
            play_script(player, world.open(task), f"{n}.{i}", task, renderer, world.unbounded)
            for i, player in enumerate(players)
        )
        return Group(str(n), task, tuple(await asyncio.gather(*made)))

    async def some(numbers: range) -> list[Group]:
        return list(await asyncio.gather(*(play(n, supply.draw(n)) for n in numbers)))

    for begin in range(0, count, TOGETHER):
        yield from asyncio.run(some(range(begin, min(count, begin + TOGETHER))))
