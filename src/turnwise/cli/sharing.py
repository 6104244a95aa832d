"""What a run gives to others: its episodes as training rows in a file, and its model, or adapter, uploaded with its card."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise import environments
from turnwise.config.named_object import reading
from turnwise.config.settings import Settings
from turnwise.core.records import Group, Task
from turnwise.data.export import EXPORTED_STATES, FORMS, write_rows
from turnwise.errors import SettingError, StoreError, nearest
from turnwise.models.hub import hub_address
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_scripted
from turnwise.store.atomic import ADVICE
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import RunDir
from turnwise.training.plan import EnvSpec, environment_class, resolve_settings

DEMONSTRATIONS = 4  # imperfect episodes per oracle episode: the worst of them is the rejected side of a pair
CONCURRENT_TASKS = 16
PARTS = ("auto", "model", "adapter")


def export(
    source: str | Path, form: str, target: str | Path, tasks: int = 200, seed: int = 0, trusted: bool = False
) -> int:
    """``source``: a run directory, or an environment, whose scripted policies play ``tasks`` tasks. ``trusted``: import code
    that the run names. The number of rows."""
    if form not in FORMS:
        raise SettingError(f"no row format {form!r}; {nearest(form, FORMS)}")
    if tasks < 1:
        raise SettingError(f"tasks is {tasks}; write at least 1")
    is_run = Path(source, "run.json").is_file()
    if not is_run and (str(source) in environments.BUILT_IN or ":" in str(source)):
        env_spec = EnvSpec.from_settings(resolve_settings({"env": str(source), "seed": seed}))
        return write_rows(_played(env_spec, tasks), form, target, env_spec.tools)
    run = RunDir.open(source)
    with reading(trusted=trusted), SqliteLedger(run.ledger, readonly=True) as ledger:
        metadata = run.metadata()
        tools = metadata.get("tools")
        if tools is None:  # a run of before they were recorded
            tools = list(getattr(environment_class(Settings.of(metadata["settings"])), "tools", ()))
        if not isinstance(tools, list):
            raise StoreError(f"the tools in {run.settings} are {tools!r:.60}, and no list; {ADVICE}")
        groups = (ledger.group(entry.group_id) for entry in ledger.groups() if entry.state in EXPORTED_STATES)
        return write_rows(groups, form, target, tools)


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

    for start in range(0, count, CONCURRENT_TASKS):  # in waves: all at once would hold every environment open
        yield from asyncio.run(play_all(range(start, min(count, start + CONCURRENT_TASKS))))


def push(
    run: str, name: str, part: str = "auto", private: bool = False, dry_run: str = "", trusted: bool = False
) -> str:
    """Upload to the repository ``name``; the address. ``dry_run``: write the folder there instead, and upload nothing."""
    run_dir = RunDir.open(run)
    if not run_dir.summary.is_file():
        raise SettingError(f"{run} is not finished, so there is nothing to push; write: turnwise resume {run}")
    if name.count("/") != 1 or not all(name.split("/")):
        raise SettingError(f"{name!r} is not the name of a repository; write owner/name")
    if part not in PARTS:
        raise SettingError(f"no part {part!r} of a run to push; write {', '.join(PARTS)}")
    adapter = run_dir.adapter
    if part == "adapter" and not adapter.is_dir():
        raise SettingError(f"{run_dir.path} has no adapter: it trained all weights; write --part model")
    folder = adapter if part == "adapter" or (part == "auto" and adapter.is_dir()) else run_dir.model
    from turnwise.store.checkpoint import verify_model  # late: imports torch
    from turnwise.training.summary import write_cards

    verify_model(folder)
    settings = Settings.of(run_dir.metadata()["settings"])
    with reading(trusted=trusted):
        write_cards(run_dir, settings, json.loads(run_dir.summary.read_text(encoding="utf-8")))
    card = folder / "README.md"  # says how to load the model: from where it is pushed to
    card.write_text(card.read_text(encoding="utf-8").replace("FOLDER_OR_ID", name), encoding="utf-8")
    if dry_run:
        target = Path(dry_run)
        if target.exists():
            raise StoreError(f"{target} already exists and will not be overwritten; choose another folder")
        from turnwise.store.checkpoint import MANIFEST

        shutil.copytree(folder, target, ignore=shutil.ignore_patterns(MANIFEST))
        return str(target)
    return _upload(folder, name, private)


def _upload(folder: Path, name: str, private: bool) -> str:
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if not get_token():
        raise SettingError(
            "pushing needs a token of the Hugging Face hub: write `hf auth login`, or set HF_TOKEN; "
            "`--dry-run FOLDER` shows what would be uploaded"
        )
    from turnwise.store.checkpoint import MANIFEST

    api: Any = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        text = "Model trained by Turnwise"
        api.upload_folder(repo_id=name, folder_path=str(folder), ignore_patterns=[MANIFEST], commit_message=text)
    except (HfHubHTTPError, OSError) as fault:
        raise StoreError(f"the hub did not accept {name}: {str(fault).strip().splitlines()[0]}") from fault
    return f"{hub_address()}/{name}"
