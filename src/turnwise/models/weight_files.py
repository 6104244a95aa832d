"""Finds missing and truncated weight files of a model folder without reading them, so that a run refuses them before it begins.

Imports no model library.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from turnwise.errors import SettingError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"


def check_weights(folder: Path) -> None:
    """Refuse a folder whose weights are missing or cut off."""
    files = _weight_files(folder)
    if not files:
        raise SettingError(f"the folder {folder} has no weights: neither {WEIGHTS[0]} nor {WEIGHTS[0]}{INDEX}")
    for file in files:
        if not file.is_file():
            raise SettingError(f"{file} is missing, and {WEIGHTS[0]}{INDEX} lists it; download the model again")
        if file.suffix == ".safetensors":
            _check_safetensors(file)


def _weight_files(folder: Path) -> list[Path]:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}{INDEX}"
        if index.is_file():
            try:
                return [folder / shard for shard in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except (ValueError, KeyError, TypeError, AttributeError) as fault:
                raise SettingError(f"{index} cannot be read: {fault}; download the model again") from fault
    return [*folder.glob("*.safetensors"), *folder.glob("*.bin")]


def _check_safetensors(file: Path) -> None:
    try:
        with safe_open(file, framework="np"):  # compares the header with the size of the file
            pass
    except SafetensorError as fault:
        raise SettingError(f"{file} is cut off or damaged ({fault}); download or copy it again") from fault
