"""Splits a tree of dicts, lists, tensors and plain values into a JSON skeleton and a flat dict of tensors.

Serves optimiser states, random-number states and samplers' counters alike, so a checkpoint needs neither pickle nor
a schema. Exact: tuples stay tuples, integer keys stay integers, arrays stay arrays.

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

    def store(value: Tensor, path: str) -> str:
        tensor = value.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory (tied weights)
        tensors[name := _unused_name(path, tensors)] = tensor.clone() if pointer in storages else tensor
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


def _unused_name(path: str, taken: Mapping[str, Tensor]) -> str:
    """``{"a.b": x}`` and ``{"a": {"b": y}}`` map to the same path: append an apostrophe."""
    name = path or "value"
    while name in taken:
        name += "'"
    return name
