"""Facts about a model that its files tell without loading it: how many parameters, how many positions it can read.

Reads ``config.json`` and the headers of safetensors files. A model that is only named (a hub id that is not in the local cache)
may tell its size by its name. Asks no host. An unreadable file tells nothing here; loading refuses it in words.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import SettingError
from turnwise.models.fetch import resolve

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
SIZE_IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([mb])(?![a-z])", re.IGNORECASE)
MAX_HEADER = 100_000_000  # bytes of a safetensors header, the limit of the format


@dataclass(frozen=True)
class ModelFacts:
    """0: not known."""

    parameters: int = 0
    max_positions: int = 0

    @property
    def size(self) -> str:
        """``135 M``, ``1.7 B``, or words where it is not known."""
        if not self.parameters:
            return "an unknown number of"
        return f"{self.parameters / 1e9:.1f} B" if self.parameters >= 1e9 else f"{self.parameters / 1e6:.3g} M"


def read_model_facts(model: str) -> ModelFacts:
    """The facts of ``--model``: a folder, the name of a fetched model, or a hub id."""
    folder = _folder(model)
    if folder is None:
        return ModelFacts()
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        value = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = value if isinstance(value, dict) else {}
    config |= config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    positions = next((int(config[name]) for name in POSITIONS if isinstance(config.get(name), int)), 0)
    return ModelFacts(_count_parameters(folder) or _size_in_name(model), positions)


def stored_parameters(model: str) -> int:
    """The parameters in the files of ``--model``, by their headers; 0 where they are not on this machine."""
    folder = _folder(model)
    return _count_parameters(folder) if folder is not None else 0


def _folder(model: str) -> Path | None:
    """Where the files of a model are, or would be; None for a known model that is not fetched yet."""
    try:
        folder = Path(resolve(model))
    except SettingError:
        return None
    if not folder.is_dir():
        with contextlib.suppress(Exception):  # huggingface_hub is not installed, or this is no valid hub id
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(model, "config.json")
            return Path(cached).parent if isinstance(cached, str) else folder
    return folder


def _count_parameters(folder: Path) -> int:
    """The numbers in all safetensors files of a folder; 0 without such files."""
    total = 0
    for file in sorted(folder.glob("model*.safetensors")) if folder.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError), file.open("rb") as opened:
            # a header is 8 bytes of length and a JSON table of shapes
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= MAX_HEADER else {}
            total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def _size_in_name(model: str) -> int:
    """
    >>> _size_in_name("Qwen/Qwen3-0.6B"), _size_in_name("SmolLM2-135M-Instruct"), _size_in_name("mine")
    (600000000, 135000000, 0)
    """
    sizes = SIZE_IN_NAME.findall(Path(model).name)
    number, unit = sizes[0] if sizes else ("0", "m")
    return int(float(number) * (1e9 if unit in "bB" else 1e6))
