"""The directory of a run: where each thing lies. Does not know what is in the files, except ``run.json``."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError, StoreError, nearest
from turnwise.store.atomic import aside, write_json

PACKAGES = ("turnwise", "torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class RunDir:
    """``RunDir.create("runs", "first-try", settings={...})``, later ``RunDir.open("runs/first-try")``"""

    path: Path

    @classmethod
    def create(
        cls, root: str | Path, name: str, settings: Mapping[str, Any] | None = None, recipe: str = "", seed: int = 0
    ) -> RunDir:
        """A new run with its ``run.json``; both appear in one step, so a kill never leaves a run without settings."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name):
            raise SettingError(f"{name!r} cannot name a run; use letters, digits, '-', '_' and '.'")
        target = Path(root) / name
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise StoreError(
                f"{target} already exists and will not be overwritten; resume that run, or choose another name"
            )
        record = {"settings": dict(settings or {}), "recipe": recipe, "seed": seed, "versions": versions()}
        with aside(target, replace=False) as path:  # another process may be creating it at this moment
            path.mkdir()
            write_json(path / "run.json", record)
        return cls(target)

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        path = Path(path)
        if not (path / "run.json").is_file():
            known = [run.path.name for run in runs(path.parent)]
            hint = nearest(path.name, known) if known else f"{path.parent} holds no runs at all"
            raise StoreError(f"there is no run at {path}: {hint}")
        return cls(path)

    def facts(self) -> dict[str, Any]:
        """What ``run.json`` says: settings, recipe, seed, versions."""
        try:
            return dict(json.loads((self.path / "run.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path / 'run.json'} cannot be read: {error}") from error

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary, summary)

    @property
    def settings(self) -> Path:
        return self.path / "run.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def transcripts(self) -> Path:
        return self.path / "transcripts.md"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"


def runs(root: str | Path) -> list[RunDir]:
    """Every run under ``root``, by name."""
    root = Path(root)
    if not root.is_dir():
        return []
    return [RunDir(path) for path in sorted(root.iterdir()) if (path / "run.json").is_file()]


def versions() -> dict[str, str]:
    """Of what was installed when the run began."""
    out = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            out[package] = "not installed"
    return out
