"""Checkpoints: whole or absent, checked when read, the last few kept.

    checkpoints/step-00000012/tensors.safetensors   every tensor
                              state.json            everything else, and where each tensor belongs
                              model/                optional Hugging Face export
                              manifest.json         sizes and checksums of the above, written last

Saving the same step again makes ``step-00000012.1``: there is never a moment without a good checkpoint.
Does not know what the tensors mean, nor what else of a run must be rolled back (see ``resume``).
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from turnwise.errors import StoreError
from turnwise.store.atomic import aside, remove, sweep
from turnwise.store.state_tree import pack, unpack

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int  # optimiser steps contained: 0 .. step - 1
    tensors: Any
    state: Any


def save_checkpoint(
    directory: str | Path,
    step: int,
    tensors: Mapping[str, Any],
    state: Mapping[str, Any],
    model_export: Callable[[Path], object] | None = None,
    keep: int = 3,
) -> Path:
    """Write the checkpoint of ``step``, drop any of later steps (an abandoned past), keep the last ``keep`` steps.

    ``tensors`` and ``state`` may be nested; tensors may stand anywhere in either. ``model_export`` gets a directory to
    fill. On any failure the earlier checkpoints are untouched and nothing half-written stays.
    """
    if step < 0 or keep < 1:
        raise StoreError(f"step is {step} and keep is {keep}; the first step is 0 and at least 1 checkpoint is kept")
    directory = Path(directory)
    skeleton, flat = pack({"tensors": tensors, "state": state})
    sweep(directory)
    target = _free(directory, step)
    with aside(target) as path:
        path.mkdir()
        save_file(flat, path / "tensors.safetensors")
        (path / "state.json").write_text(json.dumps(skeleton), encoding="ascii")
        if model_export is not None:
            (path / "model").mkdir()
            model_export(path / "model")
        manifest = {"format": FORMAT, "step": step, "files": _digests(path)}
        (path / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    discard_after(directory, step)
    _prune(directory, keep)
    return target


def save_model(target: str | Path, write: Callable[[Path], object]) -> None:
    """The final model, whole or absent: ``save_model(run.model, lambda path: model.save_pretrained(path))``."""
    with aside(Path(target)) as path:
        path.mkdir()
        write(path)


def checkpoints(directory: str | Path) -> list[Path]:
    """All of them, newest first, unchecked."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=_order, reverse=True)


def latest(directory: str | Path) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are skipped with a warning. None when there is none."""
    for path in checkpoints(directory):
        try:
            verify(path)
        except StoreError as error:
            warnings.warn(f"skipping a damaged checkpoint: {error}", stacklevel=2)
        else:
            return path
    return None


def load_checkpoint(path: str | Path) -> Checkpoint:
    """One checkpoint, or, given their directory, the newest whole one. Tensors come back on the CPU."""
    path = Path(path)
    if not NAME.fullmatch(path.name):
        found = latest(path)
        if found is None:
            raise StoreError(f"there is no usable checkpoint in {path}")
        path, step = found, _order(found)[0]
    else:
        step = verify(path)
    try:
        flat = load_file(path / "tensors.safetensors")
        tree = unpack(json.loads((path / "state.json").read_text(encoding="ascii")), flat)
        return Checkpoint(path, step, tree["tensors"], tree["state"])
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def discard_after(directory: str | Path, step: int) -> list[Path]:
    """Remove checkpoints of later steps, whole or not: a run that went back to ``step`` must not find them again."""
    later = [path for path in checkpoints(directory) if _order(path)[0] > step]
    for path in later:
        remove(path)
    return later


def verify(path: Path) -> int:
    """The step of a checkpoint whose every byte is as it was written; raises :class:`StoreError` otherwise."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        seen, files, step = manifest["format"], manifest["files"], int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} has no readable manifest ({error})") from error
    if seen != FORMAT:
        raise StoreError(f"{path} was written in checkpoint format {seen}, this version reads format {FORMAT}")
    for name, expected in files.items():
        try:
            actual = _digest(path / name)
        except OSError as error:
            raise StoreError(f"{path} lacks {name} ({error})") from error
        if actual != expected:
            raise StoreError(f"{path} is damaged: {name} does not match its checksum")
    return step


def _digests(path: Path) -> dict[str, list[Any]]:
    return {str(file.relative_to(path)): _digest(file) for file in sorted(path.rglob("*")) if file.is_file()}


def _digest(file: Path) -> list[Any]:
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _order(path: Path) -> tuple[int, int]:
    found = NAME.fullmatch(path.name)
    assert found is not None, path
    return int(found[1]), int(found[2] or 0)


def _free(directory: Path, step: int) -> Path:
    taken = [_order(path)[1] for path in checkpoints(directory) if _order(path)[0] == step]
    suffix = f".{max(taken) + 1}" if taken else ""
    return directory / f"step-{step:08d}{suffix}"


def _prune(directory: Path, keep: int) -> None:
    seen: set[int] = set()
    for path in checkpoints(directory):
        step = _order(path)[0]
        if step in seen or len(seen) >= keep:
            remove(path)
        seen.add(step)
