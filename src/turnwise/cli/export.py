"""Exports episodes of a run, or of an environment's scripted policies, as training rows in a file."""

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
from turnwise.rollout.scripted import play_scripted
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir
from turnwise.training.env_spec import EnvSpec, resolve_settings

DEMONSTRATIONS = 4  # imperfect episodes per oracle episode: the worst of them is the rejected side of a pair
CONCURRENT_TASKS = 16
EXPORTED_STATES = ("trained", "finished")


def export(source: str | Path, form: str, target: str | Path, tasks: int = 200, seed: int = 0) -> int:
    """``source``: a run directory, or an environment, whose scripted policies play ``tasks`` tasks. The number of rows."""
    if form not in FORMS:
        raise SettingError(f"no row format {form!r}; {nearest(form, FORMS)}")
    if tasks < 1:
        raise SettingError(f"tasks is {tasks}; write at least 1")
    if _is_environment(str(source)):
        env_spec = EnvSpec.from_settings(resolve_settings({"env": str(source), "seed": seed}))
        return write_rows(_played(env_spec, tasks), form, target, _tools(env_spec))
    run = RunDir.open(source)
    env_spec = EnvSpec.from_settings(Settings.of(run.metadata()["settings"]))
    with SqliteLedger(run.ledger, readonly=True) as ledger:
        groups = (ledger.group(entry.group_id) for entry in ledger.groups() if entry.state in EXPORTED_STATES)
        return write_rows(groups, form, target, _tools(env_spec))


def _is_environment(source: str) -> bool:
    return not Path(source, "run.json").is_file() and (source in environments.BUILT_IN or ":" in source)


def _tools(env_spec: EnvSpec) -> tuple[dict, ...]:
    return tuple(getattr(env_spec.env_class, "tools", ()))


def _played(env_spec: EnvSpec, count: int) -> Iterator[Group]:
    """One group per task: one episode of the oracle and a few of the demonstrator."""
    if not env_spec.can_demonstrate:
        raise SettingError(f"{env_spec.settings.env} has no oracle and demonstrator to play its tasks")
    from turnwise.training import build  # late: imports the model library

    renderer, supply = Renderer(build.byte_tokenizer()), env_spec.tasks("train")
    players = ["oracle", *["demonstrator"] * DEMONSTRATIONS]

    async def play(n: int, task: Task) -> Group:
        made = (
            play_scripted(player, env_spec.make(task), f"{n}.{i}", task, renderer, env_spec.scripted_limits)
            for i, player in enumerate(players)
        )
        return Group(str(n), task, tuple(await asyncio.gather(*made)))

    async def play_all(numbers: range) -> list[Group]:
        return list(await asyncio.gather(*(play(n, supply.draw(n)) for n in numbers)))

    for start in range(0, count, CONCURRENT_TASKS):
        yield from asyncio.run(play_all(range(start, min(count, start + CONCURRENT_TASKS))))
