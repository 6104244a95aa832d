"""Causal variable-length attention with grouped queries, forward and backward, in Triton; and forward over the KV cache.

Legend: S sequences, U rows of queries, R rows of keys and values, M key indices, H query heads, K key heads, D head size.

Sequence s has the queries ``queries[s]:queries[s + 1]`` of q and the key indices ``keys[s]:keys[s + 1]``; key index m is row
``source[m]`` of k and v, or row m without a ``source``. Its last query is aligned with its last key. ``longest``: the most
queries and keys of any sequence. Rows and key indices beyond the last sequence get zeros. ``reference.varlen_attention`` computes
the same.

Softmax uses powers of two: log₂e is folded into the scale, and the logsumexp passed from forward to backward is in base 2. Sums
are float32; probabilities and their gradients are rounded to the inputs' dtype before they are multiplied. No atomics: each
program of the backward pass owns what it writes, first over queries (which store Σ out·dout for the second pass), then over keys
and all query heads of their group. So the same inputs give the same bits. Knows tensors; neither models nor requests.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from turnwise.engines.kernels import reference
from turnwise.engines.kernels.triton import attention_kernels as kernels

log = logging.getLogger(__name__)


class TileShape(NamedTuple):
    """Queries and keys of a tile, warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    forward: TileShape
    d_queries: TileShape
    d_keys: TileShape


PLANS = {  # by head size, for 16-bit dtypes; head size 64 measured on an H200
    16: Plan(TileShape(128, 64, 4, 3), TileShape(64, 64, 4, 3), TileShape(64, 64, 4, 3)),
    32: Plan(TileShape(128, 64, 4, 3), TileShape(64, 64, 4, 3), TileShape(64, 64, 4, 3)),
    64: Plan(TileShape(64, 64, 4, 3), TileShape(64, 32, 4, 3), TileShape(64, 64, 4, 3)),
    128: Plan(TileShape(128, 64, 8, 2), TileShape(64, 32, 4, 2), TileShape(32, 128, 8, 2)),
}
EXACT = Plan(*[TileShape(32, 32, 4, 1)] * 3)  # for float32, where precision matters more than speed
LOG2E = 1.4426950408889634
TOLERANCE = 0.05  # of the norm: bfloat16 is off by 0.005, a bug by much more


@cache
def fits(size: int, device: torch.device) -> bool:
    """Whether the kernels support this head size, compile on this device and agree with the reference."""
    if size not in PLANS:
        return False
    try:
        error = relative_error(size, device, torch.bfloat16)
        reason = "" if error <= TOLERANCE else f"it was off by {error:.2g}"
    except Exception as fault:  # an old GPU, too little shared memory, a new compiler ...
        reason = f"it failed: {(str(fault).strip().splitlines() or [type(fault).__name__])[0]}"
    if reason:
        log.warning("using PyTorch's attention for head size %d, not the Triton kernels: %s", size, reason)
    return not reason


@torch.inference_mode(False)  # the first caller may be in inference mode
def relative_error(size: int, device: torch.device, kind: torch.dtype) -> float:
    """Relative error of the output and all gradients of two sequences of different lengths, against the reference."""
    g, rows, parts = torch.Generator().manual_seed(0), 75, [2, 1, 1]
    make = lambda *shape: torch.randn(*shape, generator=g).to(device)  # noqa: E731
    qkv, d_out, angle = (
        make(rows, sum(parts), size).to(kind),
        make(rows, parts[0], size).to(kind),
        make(rows, size // 2),
    )
    starts, angles, scale = (
        torch.tensor([0, 70, rows], dtype=torch.int32, device=device),
        (angle.cos(), angle.sin()),
        0.3,
    )
    where = (starts, starts, None, (70, 70), scale)
    (q, k, v), d = qkv.split(parts, 1), torch.empty_like(qkv)
    out, stats = forward(q, k, v, *where)
    dq, dk, dv = d.split(parts, 1)
    d_queries(d_out, q, k, v, out, stats, *where, dq, angles)
    d_keys(d_out, q, k, v, stats, *where, dk, dv, angles)
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t
    )  # the first caller may be recomputing a layer
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), keep:
        a, b, c = (x.float().requires_grad_() for x in (q, k, v))
        expected = reference.varlen_attention(a, b, c, starts, starts, None, scale)[0]
        da, db, dc = torch.autograd.grad(expected, (a, b, c), d_out.float())
    pairs = ((out, expected.detach()), (d.flatten(1), reference.rotate_backward(da, db, dc, *angles)))
    return max(float((actual.float() - expected).norm() / expected.norm()) for actual, expected in pairs)


def plan_of(q: Tensor) -> Plan:
    return EXACT if q.dtype == torch.float32 else PLANS[q.shape[2]]


def _heads_adjacent(x: Tensor) -> Tensor:
    """Make the heads of each row adjacent; rows may have any stride."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, source: Tensor | None, longest: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [U, H, D], k and v [R, K, D], queries and keys [S + 1] int32, source [M] -> out [U, H, D], and for the
    backward pass [H, U, 2]: log₂ Σ exp of the scores, and space for Σ out·dout."""
    q, k, v = _heads_adjacent(q), _heads_adjacent(k), _heads_adjacent(v)
    (rows, H, size), S = q.shape, len(queries) - 1
    out, stats = q.new_empty(rows, H, size), q.new_empty(H, rows, 2, dtype=torch.float32)
    m, n, warps, stages = plan_of(q).forward
    if rows:
        kernels.forward[(S * H, triton.cdiv(longest[0], m))](
            q, k, v, out, stats, queries, keys, keys if source is None else source,
            q.stride(0), k.stride(0), v.stride(0), scale * LOG2E, rows, S,
            H, H // k.shape[1], size, source is not None, q.dtype == torch.float32, m, n, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, stats


Angles = tuple[Tensor, Tensor]
"""cos and sin [U, D/2], by which the rows of q and k were rotated."""


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, queries: Tensor, keys: Tensor,
    source: Tensor | None, longest: tuple[int, int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> dq [U, H, D], dk and dv [M, K, D]: of every key index, where there is a ``source``."""
    q, k, v, d_out = _heads_adjacent(q), _heads_adjacent(k), _heads_adjacent(v), _heads_adjacent(d_out)
    where = (queries, keys, source, longest, scale)
    dq = torch.empty_like(out)
    dk, dv = k.new_empty(2, len(k if source is None else source), *k.shape[1:])
    d_queries(d_out, q, k, v, out, stats, *where, dq)
    d_keys(d_out, q, k, v, stats, *where, dk, dv)
    return dq, dk, dv


def d_queries(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, queries: Tensor, keys: Tensor,
    source: Tensor | None, longest: tuple[int, int], scale: float, dq: Tensor, angles: Angles | None = None,
) -> None:  # fmt: skip
    """Fill dq [U, H, D], rotated back by the angles, and the second half of ``stats``; call ``d_keys`` afterwards."""
    (rows, H, size), S = q.shape, len(queries) - 1
    m, n, warps, stages = plan_of(q).d_queries
    if rows:
        kernels.d_queries[(S * H, triton.cdiv(longest[0], m))](
            q, k, v, out, d_out, stats, dq, queries, keys, keys if source is None else source, *(angles or (stats, stats)),
            q.stride(0), k.stride(0), v.stride(0), d_out.stride(0), dq.stride(0), scale * LOG2E, scale, rows, S,
            H, H // k.shape[1], size, source is not None, q.dtype == torch.float32, angles is not None, m, n,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def d_keys(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, queries: Tensor, keys: Tensor,
    source: Tensor | None, longest: tuple[int, int], scale: float, dk: Tensor, dv: Tensor, angles: Angles | None = None,
) -> None:  # fmt: skip
    """Fill dk, rotated back by the angles, and dv [M, K, D]."""
    (rows, H, size), S, K = q.shape, len(queries) - 1, k.shape[1]
    m, n, warps, stages = plan_of(q).d_keys
    if len(dk):
        kernels.d_keys[(S * K, triton.cdiv(longest[1], n))](
            q, k, v, d_out, stats, dk, dv, queries, keys, keys if source is None else source, *(angles or (stats, stats)),
            q.stride(0), k.stride(0), v.stride(0), d_out.stride(0), dk.stride(0), dv.stride(0), scale * LOG2E, scale,
            rows, len(dk), S,
            K, H // K, size, source is not None, q.dtype == torch.float32, angles is not None, m, n,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, boundaries: Tensor, start: Tensor, rows: Tensor, longest: int, out: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    """The queries q[boundaries[j]:boundaries[j + 1]] of chunk j attend to the columns of cache row ``rows[j]``: the first to
    columns up to ``start[j]``, each further one to one more. q and out [N, H D]; no chunk has more than ``longest`` queries."""
    heads, width, size = keys.shape[1:]
    queries, exact = q.shape[1] // size, q.dtype == torch.float32
    m, n, warps, stages = (EXACT if exact or size not in PLANS else PLANS[size]).forward
    kernels.prefill_attention[(len(rows) * queries, triton.cdiv(longest, m))](
        q, keys, values, out, boundaries, start, rows, scale * LOG2E, width, queries, heads, size, exact, m, n,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
