"""Extend a run: more steps, or other intervals, on resume. Refuses every change of what is trained.

The learning-rate schedule then spans the new number of steps: a run extended from 100 to 200 continues at step 101 with the
learning rate that a run of 200 steps has there. The steps taken stay as they are, so an extended run is not the same as one
that was started with more steps, unless the schedule is constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from turnwise.config.convert import convert
from turnwise.config.settings import Settings, known_setting, type_of
from turnwise.errors import SettingError
from turnwise.store.atomic import write_json
from turnwise.store.rundir import RunDir

SERVERS = ("generator", "generator_key_env", "generator_seconds", "generator_weights")  # where a run samples, not what
CHANGEABLE = ("steps", "eval_every", "checkpoint_every", "keep_checkpoints", *SERVERS, "ranks", "cluster")
OF_THE_END = ("summary.json", "evaluation_after.json", "ranking_after.json")  # written when a run ends


def changed_settings(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """The settings with ``changes``; refuses what would change what is trained."""
    types = {f.name: type_of(f) for f in fields(Settings)}
    for name in changes:
        if name not in types:
            raise SettingError(f"no setting {name!r}; {known_setting(name, CHANGEABLE)}")
        if name not in CHANGEABLE:
            raise SettingError(
                f"resume cannot change {name}: the run would no longer train what it began with; it can change "
                f"{', '.join(CHANGEABLE)}. To train on with other settings: turnwise train --model RUN/model ..."
            )
    typed = {name: convert(name, value, types[name]) for name, value in changes.items()}
    return Settings.of({**settings.as_dict(), **typed})


def extend(run_dir: RunDir, settings: Settings, changes: Mapping[str, Any], done: int) -> tuple[Settings, str]:
    """Record the changed settings in the run directory; the settings, and what to tell the user.

    ``done`` is the step of the last checkpoint. What an earlier end wrote is kept under the number of its last step. The new
    settings are written last: a kill before that leaves a run that ends again where it ended."""
    new = changed_settings(settings, changes)
    if new == settings:
        return settings, ""
    if new.steps < done:
        raise SettingError(
            f"steps is {new.steps}, and the run has already taken {done}; write more, or leave --steps out"
        )
    if new.steps != settings.steps:
        for name in OF_THE_END:
            path = run_dir.path / name
            if path.is_file():
                path.rename(path.with_stem(f"{path.stem}_{settings.steps}"))
    metadata = run_dir.metadata()
    told = {name: [metadata["settings"].get(name), getattr(new, name)] for name in changes}
    metadata["settings"] = {**metadata["settings"], **{name: getattr(new, name) for name in changes}}
    metadata["changes"] = [*metadata.get("changes", []), {"after_step": done, **told}]
    write_json(run_dir.settings, metadata)
    if new.steps == settings.steps:
        return new, ""
    return (
        new,
        f"steps: {settings.steps} → {new.steps}; the {new.schedule} learning-rate schedule now spans {new.steps} steps",
    )
