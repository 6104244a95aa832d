"""The directory of a run: the path of each file in it, and the run's metadata in ``run.json``.

``run.json`` carries the number of the directory's format. Checkpoints key the memory of a method's pieces by their
``repr``, so a release that renames a piece cannot read the checkpoints of an older one: a directory of another format
is refused when it is opened. Does not know what is in the other files.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError, StoreError, nearest
from turnwise.store.atomic import atomic_write, write_json

FORMAT = 3
# the release that writes and reads each format; format 1 has no number in run.json
RELEASE_OF_FORMAT = {1: "0.1", 2: "0.2", 3: "0.3"}
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")  # step, and the attempt that replaced an earlier one
PACKAGES = {"turnwise": "turnwise-rl"} | {
    name: name for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy")
}


@dataclass(frozen=True)
class RunDir:
    """``RunDir.create("runs", "first-try", settings={...})``, later ``RunDir.open("runs/first-try")``"""

    path: Path

    settings = cached_property(lambda self: self.path / "run.json")
    ledger = cached_property(lambda self: self.path / "ledger.sqlite")
    metrics = cached_property(lambda self: self.path / "metrics.jsonl")
    checkpoints = cached_property(lambda self: self.path / "checkpoints")
    model = cached_property(lambda self: self.path / "model")
    adapter = cached_property(lambda self: self.path / "adapter")
    tensorboard = cached_property(lambda self: self.path / "tensorboard")
    curves = cached_property(lambda self: self.path / "curves.png")
    transcripts = cached_property(lambda self: self.path / "transcripts.md")
    summary = cached_property(lambda self: self.path / "summary.json")
    lock = cached_property(lambda self: self.path / "run.lock")

    @classmethod
    def create(
        cls,
        root: str | Path,
        name: str,
        settings: Mapping[str, Any] | None = None,
        recipe: str = "",
        seed: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
        chosen: Sequence[str] = (),
    ) -> RunDir:
        """Create a run with its ``run.json``. Both appear in one rename, so a kill never leaves a run without settings. What the
        environment offers (``tools``) is recorded, so that who reads the run need not import it; and which settings the user
        left open and why they are as they are (``chosen``)."""
        check_run_name(root, name)
        target = Path(root) / name
        metadata = {
            "format": FORMAT,
            "settings": dict(settings or {}),
            "recipe": recipe,
            "seed": seed,
            "tools": list(tools),
            "chosen": list(chosen),
            "versions": installed_versions(),
        }
        with atomic_write(target, replace=False) as path:  # another process may be creating it now
            path.mkdir()
            write_json(path / "run.json", metadata)
        return cls(target)

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run. Raises :class:`StoreError` when there is none, or when it has another format."""
        path = Path(path)
        if not (path / "run.json").is_file():
            names = [run.path.name for run in runs(path.parent)]
            hint = nearest(path.name, names) if names else f"{path.parent} contains no runs"
            raise StoreError(f"there is no run at {path}: {hint}")
        run = cls(path)
        number = run.metadata().get("format", 1)
        release = RELEASE_OF_FORMAT.get(number) if isinstance(number, int) else None
        if release is not None:
            writer, advice = f"Turnwise {release}", f"Resume or evaluate it with turnwise {release}"
        elif isinstance(number, int) and number > FORMAT:
            writer, advice = "a newer release of Turnwise", "Resume or evaluate it with that release"
        else:
            writer, advice = "an unknown release of Turnwise", "Resume or evaluate it with the release that wrote it"
        if number != FORMAT:
            raise StoreError(
                f"{path} was written by {writer} (run format {number}); this release reads format {FORMAT}. "
                f"{advice}, or start a new run."
            )
        return run

    def metadata(self) -> dict[str, Any]:
        """The content of ``run.json``: format, settings, recipe, seed, versions."""
        try:
            content = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{self.path / 'run.json'} cannot be read: {error}; copy the run again, or start a new one"
            ) from error
        if not isinstance(content, dict) or "settings" not in content:
            raise StoreError(f"{self.path / 'run.json'} holds no settings: {self.path} is no run of Turnwise")
        return content

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.summary, summary)

    @property
    def step(self) -> int:
        """The step of the newest checkpoint, not verified; 0: there is none."""
        names = [path.name for path in self.checkpoints.glob("step-*") if path.is_dir()]
        return max((int(match[1]) for name in names if (match := CHECKPOINT_NAME.fullmatch(name))), default=0)


def check_run_name(root: str | Path, name: str) -> None:
    """Refuse a name that is not one, or that is taken."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name):
        raise SettingError(f"{name!r} is not a valid run name; use letters, digits, '-', '_' and '.'")
    target = Path(root) / name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StoreError(
            f"{target} already exists and will not be overwritten; resume that run, or choose another name"
        )


def runs(root: str | Path) -> list[RunDir]:
    """Every run under ``root`` of any format, sorted by name."""
    root = Path(root)
    if not root.is_dir():
        return []
    return [RunDir(path) for path in sorted(root.iterdir()) if (path / "run.json").is_file()]


def installed_versions() -> dict[str, str]:
    """The versions of Python and of the main packages, recorded when a run starts."""
    out = {"python": platform.python_version()}
    for package, distribution in PACKAGES.items():
        try:
            out[package] = version(distribution)
        except PackageNotFoundError:
            out[package] = "not installed"
    return out
