"""Writes model folders: in the smallest dtype that loses nothing. Knows no run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


def save_lossless(model: Any, folder: Path) -> None:
    """``save_pretrained`` in half precision if every weight survives it bit for bit, as those of a model that was published
    in half precision do. Leaves the model unchanged."""
    state = model.state_dict()
    dtype = next((half for half in HALVES if all(_survives(t, half) for t in state.values())), None)
    if dtype is None:
        model.save_pretrained(folder)
        return
    cast: dict[tuple[int, torch.Size], Tensor] = {}  # tied weights stay one tensor, so that they are written once
    for t in state.values():
        if t.is_floating_point():
            cast.setdefault((t.data_ptr(), t.shape), t.detach().to(dtype))
    model.save_pretrained(folder, state_dict={name: cast.get((t.data_ptr(), t.shape), t) for name, t in state.items()})


def _survives(tensor: Tensor, dtype: torch.dtype) -> bool:
    return not tensor.is_floating_point() or torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
