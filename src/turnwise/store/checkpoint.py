"""Checkpoints: written atomically, verified by checksum when read, the last few kept.

    checkpoints/step-00000012/tensors.safetensors   every tensor
                              state.json            everything else, and the position of each tensor in it
                              model/                optional Hugging Face export
                              manifest.json         sizes and checksums of the above, written last

Tensors that several processes hold are written by these, into one file each (see ``shard_files``); ``tensors.safetensors`` then
holds those of the state alone. One reader serves both forms, and reads a tensor when it is asked for.

Saving the same step again writes ``step-00000012.1`` before it removes the older one, so a valid checkpoint always
exists. Does not know what the tensors mean, nor what else of a run must be rolled back (see ``resume``).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from turnwise.errors import StoreError
from turnwise.store.atomic import atomic_write, remove, remove_temporaries
from turnwise.store.rundir import CHECKPOINT_NAME
from turnwise.store.shard_files import ShardSource, advice, read_index, read_whole_file, write_index
from turnwise.store.state_tree import TENSOR, pack, unpack

FORMAT, SHARDED = 1, 2  # all tensors in one file; one file for each process
TENSORS = "tensors.safetensors"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int  # number of optimiser steps completed: 0 .. step - 1 are contained
    tensors: Any  # nested as it was saved; a plain dict of tensors comes back as ``shard_files.StoredTensors``
    state: Any


def save_checkpoint(
    directory: str | Path,
    step: int,
    tensors: Mapping[str, Any] | ShardSource,
    state: Mapping[str, Any],
    model_export: Callable[[Path], object] | None = None,
    keep: int = 3,
    replaces: int | None = None,
) -> Path:
    """Write the checkpoint of ``step``, remove that of the step it ``replaces`` and those of later steps (an abandoned branch),
    keep the last ``keep`` steps.

    ``tensors`` and ``state`` may be nested; tensors may appear anywhere in either. A ``ShardSource`` writes its tensors itself.
    ``model_export`` is called with an empty directory. On any failure the earlier checkpoints are unchanged and no partial
    checkpoint remains.
    """
    if step < 0 or keep < 1:
        raise StoreError(f"step is {step} and keep is {keep}; the first step is 0 and at least 1 checkpoint is kept")
    directory = Path(directory)
    source = tensors if isinstance(tensors, ShardSource) else None
    skeleton, flat = pack({"state": state} if source else {"tensors": tensors, "state": state})
    remove_temporaries(directory)
    target = _unused_path(directory, step)
    with atomic_write(target) as path:
        path.mkdir()
        shards = source.write_files(path) if source else ()
        if source:
            write_index(path, shards)
        save_file(flat, path / TENSORS)
        (path / "state.json").write_text(json.dumps(skeleton), encoding="ascii")
        if model_export is not None:
            (path / "model").mkdir()
            model_export(path / "model")
        digests = _digests(path, {shard.name: list(shard.digest) for shard in shards})
        manifest = {"format": SHARDED if source else FORMAT, "step": step, "files": digests}
        (path / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    discard_after(directory, step)
    for replaced in [path for path in checkpoints(directory) if _step_and_attempt(path)[0] == replaces != step]:
        remove(replaced)
    keep_newest(directory, keep)
    return target


def save_model(target: str | Path, write: Callable[[Path], object]) -> None:
    """Write a model folder atomically, with a manifest of checksums:
    ``save_model(run.model, lambda path: model.save_pretrained(path))``."""
    with atomic_write(Path(target)) as path:
        path.mkdir()
        write(path)
        manifest = {"format": FORMAT, "files": _digests(path)}
        (path / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def verify_model(path: str | Path) -> None:
    """Check a folder of ``save_model`` against its manifest; raise :class:`StoreError` on any difference."""
    _verified_manifest(Path(path))


def checkpoints(directory: str | Path) -> list[Path]:
    """All checkpoints, newest first, not verified."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    paths = [path for path in directory.iterdir() if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=_step_and_attempt, reverse=True)


def latest(directory: str | Path) -> Path | None:
    """The newest valid checkpoint, or None. Damaged ones are skipped with a warning."""
    for path in checkpoints(directory):
        try:
            verify(path)
        except StoreError as error:
            warnings.warn(f"skipping a damaged checkpoint: {error}", stacklevel=2)
        else:
            return path
    return None


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Load one checkpoint or, given the directory of all of them, the newest valid one. Tensors are on the CPU."""
    path = Path(path)
    if CHECKPOINT_NAME.fullmatch(path.name):
        return _read(path, _verified_manifest(path, advice(path)))
    newest = load_latest(path)
    if newest is None:
        raise StoreError(f"there is no usable checkpoint in {path}")
    return newest


def load_latest(directory: str | Path) -> Checkpoint | None:
    """Load the newest valid checkpoint; None if there is no checkpoint. Raises if there are some and all are damaged: to begin
    again at the first step would remove what is left of them."""
    newest = latest(directory)
    if newest is not None:
        return _read(newest, _manifest(newest))
    for path in checkpoints(directory):
        verify(path)  # says what is wrong with the newest one
    return None


def _read(path: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    """Load a checkpoint that was verified."""
    try:
        skeleton = json.loads((path / "state.json").read_text(encoding="ascii"))
        step, described = int(manifest["step"]), skeleton.get("tensors")
        if manifest["format"] == SHARDED:
            tensors: Any = read_index(path)
        elif isinstance(described, dict) and all(isinstance(row, dict) and TENSOR in row for row in described.values()):
            tensors = read_whole_file(path, TENSORS, {name: row[TENSOR] for name, row in described.items()})
        else:
            tensors = unpack(described, load_file(path / TENSORS))
        return Checkpoint(path, step, tensors, unpack(skeleton["state"], load_file(path / TENSORS)))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def discard_after(directory: str | Path, step: int) -> list[Path]:
    """Remove checkpoints of later steps, valid or not: a run rolled back to ``step`` must not load them again."""
    later = [path for path in checkpoints(directory) if _step_and_attempt(path)[0] > step]
    for path in later:
        remove(path)
    return later


def verify(path: Path) -> int:
    """Check every file against the manifest and return the step; raise :class:`StoreError` on any difference."""
    try:
        return int(_verified_manifest(path, advice(path))["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} has no readable manifest ({error})") from error


def _manifest(path: Path, end: str = "") -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        number, manifest["files"] = manifest["format"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} has no readable manifest ({error}){end}") from error
    if number not in (FORMAT, SHARDED):
        raise StoreError(
            f"{path} was written in checkpoint format {number}, this version reads formats {FORMAT} and {SHARDED}"
        )
    return manifest


def _verified_manifest(path: Path, what_to_do: str = "") -> dict[str, Any]:
    end = f"; {what_to_do}" if what_to_do else ""
    manifest = _manifest(path, end)
    names = list(manifest["files"])
    with ThreadPoolExecutor(max_workers=4) as threads:  # hashing releases the interpreter's lock
        found = list(threads.map(lambda name: _digest_or_error(path / name), names))
    for name, (actual, error) in zip(names, found):
        if error is not None:
            raise StoreError(f"{path} has no file {name} ({error}){end}") from error
        if actual != manifest["files"][name]:
            raise StoreError(f"{path} is damaged: {name} does not match its checksum{end}")
    return manifest


def _digests(path: Path, known: Mapping[str, list[Any]] | None = None) -> dict[str, list[Any]]:
    """Size and checksum of every file under ``path``. ``known``: of those that were measured while they were written."""
    names = {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}
    return {name: (known or {}).get(name) or _digest(file) for name, file in names.items()}


def _digest_or_error(file: Path) -> tuple[list[Any], OSError | None]:
    try:
        return _digest(file), None
    except OSError as error:
        return [], error


def _digest(file: Path) -> list[Any]:
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _step_and_attempt(path: Path) -> tuple[int, int]:
    """``step-00000012.1`` is step 12, attempt 1."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2] or 0)


def _unused_path(directory: Path, step: int) -> Path:
    attempts = [_step_and_attempt(path)[1] for path in checkpoints(directory) if _step_and_attempt(path)[0] == step]
    suffix = f".{max(attempts) + 1}" if attempts else ""
    return directory / f"step-{step:08d}{suffix}"


def keep_newest(directory: Path, keep: int) -> None:
    """Remove all checkpoints but those of the newest ``keep`` steps."""
    kept_steps: set[int] = set()
    for path in checkpoints(directory):
        step = _step_and_attempt(path)[0]
        if step in kept_steps or len(kept_steps) >= keep:
            remove(path)
        kept_steps.add(step)
