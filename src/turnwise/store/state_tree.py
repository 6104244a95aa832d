"""A nest of dicts, lists, tensors and plain values as two parts: a JSON skeleton and a flat dict of tensors.

Optimiser states, random-number states and samplers' counters all pass through here, so a checkpoint needs neither
pickle nor a list of what may be in it. Exact: tuples stay tuples, integer keys stay integers, arrays stay arrays.

Does not know about files.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.errors import StoreError

TENSOR, ARRAY, TUPLE, ITEMS = "$tensor", "$array", "$tuple", "$items"


def pack(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """``(skeleton, tensors)``; a tensor at ``tree["a"][0]`` is stored under ``"a.0"``."""
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()

    def keep(value: Tensor, path: str) -> str:
        plain = value.detach().cpu().contiguous()
        pointer = plain.untyped_storage().data_ptr()
        # the file format refuses tensors that share memory (tied weights)
        tensors[name := _free(path, tensors)] = plain.clone() if pointer in storages else plain
        storages.add(pointer)
        return name

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return {TENSOR: keep(value, path)}
        if isinstance(value, np.ndarray):
            return {ARRAY: keep(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape), path)}
        if isinstance(value, Mapping):
            items = {key: walk(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
            plain = all(isinstance(key, str) and not key.startswith("$") for key in items)
            return items if plain else {ITEMS: [[walk(key, path), item] for key, item in items.items()]}
        if isinstance(value, list | tuple):
            members = [walk(item, f"{path}.{place}" if path else str(place)) for place, item in enumerate(value)]
            return members if isinstance(value, list) else {TUPLE: members}
        return _plain(value, path)

    return walk(tree, ""), tensors


def unpack(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`pack`."""
    if isinstance(skeleton, list):
        return [unpack(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    mark = next(iter(skeleton), "")
    if mark == TENSOR:
        return tensors[skeleton[mark]]
    if mark == ARRAY:
        return tensors[skeleton[mark]].numpy()
    if mark == TUPLE:
        return tuple(unpack(item, tensors) for item in skeleton[mark])
    if mark == ITEMS:
        return {unpack(key, tensors): unpack(item, tensors) for key, item in skeleton[mark]}
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


def _free(path: str, taken: Mapping[str, Tensor]) -> str:
    """``{"a.b": x}`` and ``{"a": {"b": y}}`` want the same name."""
    name = path or "value"
    while name in taken:
        name += "'"
    return name
