"""What survives a crash, declared: an object names the attributes that a checkpoint holds, and one place writes and reads them.

Everything is JSON. Arrays come back bit for bit; tuples, sets and queues come back as the type they had.
"""

from __future__ import annotations

import base64
from collections import deque
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np

REMEMBERED = 65536  # tasks of which a sampler, budget or guidance remembers anything


class Stateful:
    """``saved`` names the attributes that change during a run; each must exist before ``load_state_dict``."""

    saved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        return {name: to_json(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.saved:
            setattr(self, name, from_json(state[name], getattr(self, name)))


def to_json(value: Any) -> Any:
    """A copy of ``value`` that JSON can hold."""
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}
    if isinstance(value, deque | tuple | set | frozenset):
        return list(value)
    return deepcopy(value)


def from_json(stored: Any, present: Any) -> Any:
    """What ``to_json`` stored, as the type of the ``present`` value."""
    if isinstance(present, np.ndarray):
        data = base64.b64decode(stored["data"])
        return np.frombuffer(data, dtype=stored["dtype"]).reshape(stored["shape"]).copy()
    if isinstance(present, deque):
        return deque(stored, present.maxlen)
    if isinstance(present, tuple | set | frozenset | int | float):
        return type(present)(stored)
    return deepcopy(stored)


def remember(memory: dict[str, Any], key: str, value: Any, most: int = REMEMBERED) -> None:
    """Store ``value`` as the latest entry, and forget the oldest beyond ``most``: a memory by task stays bounded."""
    memory.pop(key, None)
    memory[key] = value
    while len(memory) > most:
        del memory[next(iter(memory))]
