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
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnwise.errors import StoreError
from turnwise.store.atomic import atomic_write, remove, remove_temporaries
from turnwise.store.rundir import CHECKPOINT_NAME
from turnwise.store.shard_files import ShardSource, advice, read_index, read_whole_file, write_index

FORMAT, SHARDED = 1, 2  # all tensors in one file; one file for each process
TENSORS = "tensors.safetensors"
MANIFEST = "manifest.json"
TENSOR, ARRAY, TUPLE, ITEMS = "$tensor", "$array", "$tuple", "$items"  # tags of what JSON has no form for


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
    attempts = [attempt for at, attempt in map(_step_and_attempt, checkpoints(directory)) if at == step]
    # the same step again gets a new name, so that the older one stays valid until this one is complete
    target = directory / (f"step-{step:08d}" + (f".{max(attempts) + 1}" if attempts else ""))
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
        measured = {shard.name: list(shard.digest) for shard in shards}
        _write_manifest(path, {"format": SHARDED if source else FORMAT, "step": step}, measured)
    discard_after(directory, step)
    for path in checkpoints(directory):
        if _step_and_attempt(path)[0] == replaces != step:
            remove(path)
    keep_newest(directory, keep)
    return target


def save_model(target: str | Path, write: Callable[[Path], object]) -> None:
    """Write a model folder atomically, with a manifest of checksums:
    ``save_model(run.model, lambda path: model.save_pretrained(path))``."""
    with atomic_write(Path(target)) as path:
        path.mkdir()
        write(path)
        _write_manifest(path, {"format": FORMAT})


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
        return _read(path, verify_model(path, advice(path)))
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
        return int(verify_model(path, advice(path))["step"])
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


def verify_model(path: str | Path, what_to_do: str = "") -> dict[str, Any]:
    """The manifest of a folder that ``save_model`` or ``save_checkpoint`` wrote; raises :class:`StoreError` where a file differs
    from it."""
    path, end = Path(path), f"; {what_to_do}" if what_to_do else ""
    manifest = _manifest(path, end)
    with ThreadPoolExecutor(max_workers=4) as threads:  # hashing releases the interpreter's lock
        digests = {name: threads.submit(_digest, path / name) for name in manifest["files"]}
    for name, future in digests.items():
        try:
            actual = future.result()
        except OSError as error:
            raise StoreError(f"{path} has no file {name} ({error}){end}") from error
        if actual != manifest["files"][name]:
            raise StoreError(f"{path} is damaged: {name} does not match its checksum{end}")
    return manifest


def _write_manifest(path: Path, more: Mapping[str, Any], measured: Mapping[str, list[Any]] | None = None) -> None:
    """Size and checksum of every file under ``path``. ``measured``: of those that were hashed while they were written."""
    names = {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}
    files = {name: (measured or {}).get(name) or _digest(file) for name, file in names.items()}
    (path / MANIFEST).write_text(json.dumps({**more, "files": files}, indent=1), encoding="utf-8")


def _digest(file: Path) -> list[Any]:
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _step_and_attempt(path: Path) -> tuple[int, int]:
    """``step-00000012.1`` is step 12, attempt 1."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2] or 0)


def keep_newest(directory: Path, keep: int) -> None:
    """Remove all checkpoints but those of the newest ``keep`` steps."""
    newest: set[int] = set()
    for path in checkpoints(directory):  # newest first; of one step, the latest attempt first
        step = _step_and_attempt(path)[0]
        if step in newest or len(newest) >= keep:
            remove(path)
        newest.add(step)


# ---------------------------------------- trees of tensors and plain values


def pack(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """``(skeleton, tensors)``; a tensor at ``tree["a"][0]`` is stored under ``"a.0"``."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()

    def store(value: Tensor, path: str) -> str:
        tensor = value.detach().cpu().contiguous()
        pointer, name = tensor.untyped_storage().data_ptr(), path or "value"
        while name in tensors:  # {"a.b": x} and {"a": {"b": y}} have the same path
            name += "'"
        # safetensors refuses tensors that share memory (tied weights)
        tensors[name] = tensor.clone() if pointer in storages else tensor
        storages.add(pointer)
        return name

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return {TENSOR: store(value, path)}
        if isinstance(value, np.ndarray):
            return {ARRAY: store(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape), path)}
        if isinstance(value, Mapping):
            items = {key: walk(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
            is_json = all(isinstance(key, str) and not key.startswith("$") for key in items)
            return items if is_json else {ITEMS: [[walk(key, path), item] for key, item in items.items()]}
        if isinstance(value, list | tuple):
            members = [walk(item, f"{path}.{index}" if path else str(index)) for index, item in enumerate(value)]
            return members if isinstance(value, list) else {TUPLE: members}
        return _plain(value, path)

    return walk(tree, ""), tensors


def unpack(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`pack`."""
    if isinstance(skeleton, list):
        return [unpack(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if tag == TENSOR:
        return tensors[skeleton[tag]]
    if tag == ARRAY:
        return tensors[skeleton[tag]].numpy()
    if tag == TUPLE:
        return tuple(unpack(item, tensors) for item in skeleton[tag])
    if tag == ITEMS:
        return {unpack(key, tensors): unpack(item, tensors) for key, item in skeleton[tag]}
    return {key: unpack(item, tensors) for key, item in skeleton.items()}


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, path)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StoreError(
        f"a checkpoint cannot hold a {type(value).__name__} (at {path!r}); "
        "use tensors, arrays, numbers, text, lists, tuples and dicts"
    )
