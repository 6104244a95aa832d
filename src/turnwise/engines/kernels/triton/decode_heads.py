"""What decode kernels over rows and over pages share: heads of a token, normalised and rotated, and the size of their blocks."""

from __future__ import annotations

import sys
from typing import NamedTuple

import triton
import triton.language as tl


@triton.jit
def norm_and_rotate(x, other, cos, sin, norm, eps, D: tl.constexpr, NORM: tl.constexpr, norm_other):
    """RMSNorm over the head (optional), then rotate: x·cos + roll(x)·sin."""
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x, other = x * scale * norm, other * scale * norm_other
    return x * cos + other * sin


@triton.jit
def rotated_head(base, at, active, cos, sin, norm, eps, D: tl.constexpr, NORM: tl.constexpr):
    """One head of each row, normalised and rotated, [rows, D]."""
    d = tl.arange(0, D)[None, :]
    roll = (d + D // 2) % D
    x = tl.load(base + at + d, mask=active, other=0.0).to(tl.float32)
    other = tl.load(base + at + roll, mask=active, other=0.0).to(tl.float32)
    w = tl.load(norm + at + d) if NORM else x
    w2 = tl.load(norm + at + roll) if NORM else x
    return norm_and_rotate(x, other, cos, sin, w, eps, D, NORM, w2)


class DecodeTile(NamedTuple):
    """Columns of a row per block, warps per program, and pipeline stages."""

    columns: int
    warps: int
    stages: int


DECODE_TILES = {256: DecodeTile(64, 4, 3), 1024: DecodeTile(64, 2, 2), sys.maxsize: DecodeTile(32, 1, 2)}
"""By number of programs: few must each be fast, many must fit on the GPU at once. Measured on an H200."""
