"""What every oracle method hands back."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Result(NamedTuple):
    """One advantage per token in natural order, the scalar to minimise, and what else the method decides."""

    advantage: list[float]
    loss: Tensor
    extra: dict[str, Any] = {}  # noqa: RUF012
