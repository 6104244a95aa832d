"""The tensors an audit works on: a small ragged batch with tool gaps, or a batch that another trainer dumped."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from turnwise.errors import SettingError

REQUIRED = ("logp", "old_logp", "mask", "advantages")
OPTIONAL = ("reference", "reward", "group", "loss", "gradient")


@dataclass(frozen=True)
class AuditBatch:
    """(B, L) tensors in float64. ``loss`` and ``gradient`` (by ``logp``) are the other trainer's, where it dumped them."""

    logp: Tensor
    old_logp: Tensor
    mask: Tensor
    advantages: Tensor  # (B,) or (B, L)
    reference: Tensor | None = None
    reward: Tensor | None = None
    group: Tensor | None = None
    loss: Tensor | None = None
    gradient: Tensor | None = None

    def rows(self, index: Tensor) -> AuditBatch:
        reference = None if self.reference is None else self.reference[index]
        picked = {name: getattr(self, name)[index] for name in REQUIRED}
        return AuditBatch(**picked, reference=reference)

    def with_garbage(self) -> AuditBatch:
        """The same batch with other values where nothing was sampled; no result may change."""
        wrong = torch.where(self.mask, torch.zeros_like(self.logp), torch.full_like(self.logp, -7.0))
        return replace(self, logp=self.logp + wrong, old_logp=self.old_logp - wrong)

    def padded(self, columns: int = 0, rows: int = 0) -> AuditBatch:
        """With more columns of padding, and more rows in which nothing was sampled; without the reference."""
        pad = lambda x: torch.nn.functional.pad(x, (0, columns, 0, rows))  # noqa: E731
        advantages = torch.nn.functional.pad(self.advantages, (0, rows), value=1.0)
        return AuditBatch(pad(self.logp), pad(self.old_logp), pad(self.mask), advantages)


def synthetic_batch(seed: int = 0, moved: float = 0.3) -> AuditBatch:
    """Six rows of different lengths in two groups, the third position a tool's. ``moved``: how far the policy has moved."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    lengths = torch.tensor([3, 9, 5, 12, 2, 7])
    mask = torch.arange(12)[None, :] < lengths[:, None]
    mask[:, 2] = False
    old = -draw(6, 12).abs() - 0.1
    logp = old + moved * draw(6, 12)
    return AuditBatch(logp, old, mask, draw(6), reference=old + 0.2 * draw(6, 12))


def read_batch(path: str | Path) -> AuditBatch:
    """A dumped batch: .npz, .json or .safetensors with the names of ``REQUIRED``, and of ``OPTIONAL`` where it has them."""
    path = Path(path)
    if not path.is_file():
        raise SettingError(f"there is no file {path}; write trl, verl, or a dumped batch (.npz, .json, .safetensors)")
    values = _load(path)
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        raise SettingError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(values)) or 'nothing'}")
    tensors = {
        name: torch.as_tensor(np.asarray(values[name], dtype=np.float64))
        for name in (*REQUIRED, *OPTIONAL)
        if name in values
    }
    shape = tensors["mask"].shape
    for name in ("logp", "old_logp"):
        if tensors[name].shape != shape:
            raise SettingError(
                f"{name} has shape {tuple(tensors[name].shape)}, the mask {tuple(shape)}; give (B, L) for both"
            )
    return AuditBatch(**{**tensors, "mask": tensors["mask"].bool()})


def _load(path: Path) -> dict[str, object]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        if path.suffix == ".json":
            return dict(json.loads(path.read_text(encoding="utf-8")))
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return dict(load_file(path))
    except (OSError, ValueError, TypeError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from error
    raise SettingError(f"{path} is no .npz, .json or .safetensors file")
