"""Uploads the model of a finished run, or its adapter, with its model card. Trains and measures nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.errors import SettingError, StoreError
from turnwise.models.hub import hub_address
from turnwise.store.rundir import RunDir

PARTS = ("auto", "model", "adapter")


def push(run: str, name: str, part: str = "auto", private: bool = False, dry_run: str = "") -> str:
    """Upload to the repository ``name``; the address. ``dry_run``: write the folder there instead, and upload nothing."""
    run_dir = RunDir.open(run)
    if not run_dir.summary.is_file():
        raise SettingError(f"{run} is not finished, so there is nothing to push; write: turnwise resume {run}")
    if name.count("/") != 1 or not all(name.split("/")):
        raise SettingError(f"{name!r} is not the name of a repository; write owner/name")
    folder = _folder(run_dir, part)
    from turnwise.store.checkpoint import verify_model  # late: imports torch
    from turnwise.training.model_card import write_cards

    verify_model(folder)
    settings = Settings.of(run_dir.metadata()["settings"])
    write_cards(run_dir, settings, json.loads(run_dir.summary.read_text(encoding="utf-8")))
    _name_the_repository(folder, name)
    if dry_run:
        return _copy(folder, Path(dry_run))
    return _upload(folder, name, private)


def _folder(run_dir: RunDir, part: str) -> Path:
    if part not in PARTS:
        raise SettingError(f"no part {part!r} of a run to push; write {', '.join(PARTS)}")
    adapter = run_dir.adapter
    if part == "adapter" and not adapter.is_dir():
        raise SettingError(f"{run_dir.path} has no adapter: it trained all weights; write --part model")
    return adapter if part == "adapter" or (part == "auto" and adapter.is_dir()) else run_dir.model


def _name_the_repository(folder: Path, name: str) -> None:
    """The card says how to load the model: from where it is pushed to."""
    card = folder / "README.md"
    card.write_text(card.read_text(encoding="utf-8").replace("FOLDER_OR_ID", name), encoding="utf-8")


def _copy(folder: Path, target: Path) -> str:
    if target.exists():
        raise StoreError(f"{target} already exists and will not be overwritten; choose another folder")
    from turnwise.store.checkpoint import MANIFEST

    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(MANIFEST))
    return str(target)


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
        api.upload_folder(
            repo_id=name,
            folder_path=str(folder),
            ignore_patterns=[MANIFEST],
            commit_message="Model trained by Turnwise",
        )
    except (HfHubHTTPError, OSError) as fault:
        raise StoreError(f"the hub did not accept {name}: {str(fault).strip().splitlines()[0]}") from fault
    return f"{hub_address()}/{name}"
