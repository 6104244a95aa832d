"""Log-probabilities and entropies of given tokens without materialising all logits.

Legend: N rows, D hidden size, V vocabulary size.

    z = (h·Wᵀ + b) / T        logp = z[y] − lse(z)        H = lse(z) − Σ p·z,  p = softmax(z)
    ∂logp/∂z = onehot(y) − p  ∂H/∂z = −p·(log p + H)

A row whose kept set K is given, listed or as a mask, is normalised over it, logp = z[y] − lse(z over K), with ∂logp/∂z =
onehot(y) − p over K; its entropy stays that of the whole vocabulary.

Rows are processed in chunks; the backward pass recomputes a chunk's logits. If all of them are small, p is kept instead, which
is faster. Fused kernels, where available, read a chunk's logits once and keep p − onehot(y) if memory allows, which leaves two
matrix products for the backward pass. Sums run in float32 (float64 for float64 inputs) whatever the input dtype.

Knows nothing of models, sequences or objectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from turnwise.core.kept_sets import KeptSets
from turnwise.engines.kernels import reference
from turnwise.engines.kernels.dispatch import ops_for

CHUNK_BYTES = 16 << 20  # logits of one chunk; two or three buffers of this size exist at once
CHUNK_BYTES_CUDA = 256 << 20  # smaller chunks make a large GPU wait for kernel launches
KEEP_BYTES = 32 << 20  # keep p (and log p, with entropy) of all rows for the backward pass up to this size
KEEP_BYTES_CUDA = 2 << 30  # the same on a GPU


@dataclass(frozen=True, eq=False)
class KeptChunk:
    """The sets of n rows, with m listed ids."""

    given: Tensor  # [n] whether a row has a set
    allowed: Tensor | None  # [n, V] by masks, where any row has one: all ids, for a row without
    size: Tensor  # [n]
    row: Tensor  # [m] inside the chunk
    ids: Tensor  # [m]
    span: slice  # where its ids are among all M

    def log_sums(self, values: Tensor, z: Tensor, inverse: Tensor | float = 1.0) -> Tensor:
        """log Σ exp over each row's set, [n]; 0 for a row without one: of ``values`` [m] where it is listed, of the logits
        ``z`` [n, V] times ``inverse`` [n] where it is a mask. Differentiable."""
        listed = self.size > 0
        sums = values.new_zeros(len(self.given))
        if self.ids.numel():
            over = lambda x, how, empty: torch.segment_reduce(x, how, lengths=self.size, unsafe=True, initial=empty)  # noqa: E731
            top = over(values.detach(), "max", -torch.inf).where(listed, 0.0)
            sums = top + over((values - top[self.row]).exp(), "sum", 0.0).where(listed, 1.0).log()
        if self.allowed is None:
            return sums
        # a positive factor does not change which logits are left out
        scale = inverse if isinstance(inverse, float) else inverse[:, None]
        over_mask = (z.masked_fill(~self.allowed, -torch.inf) * scale).logsumexp(1)
        return sums.where(listed | ~self.given, over_mask)

    def log_probs(self, z: Tensor, targets: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [n, V] before temperature -> log p of the targets over their sets [n], meaningless for a row without one, p of
        every listed id [m], and the log of each set's sum [n]."""
        values = z[self.row, self.ids] * inverse[self.row]
        sums = self.log_sums(values, z, inverse)
        return z.gather(1, targets[:, None]).squeeze(1) * inverse - sums, (values - sums[self.row]).exp(), sums

    def add_gradient(self, d: Tensor, p: Tensor, targets: Tensor, factor: Tensor) -> None:
        """d(logits) [n, V] += factor · (onehot − p over the set) for rows with a listed set."""
        # no id is twice in a row, so the sum does not depend on an order
        d[self.row, self.ids] += (((self.ids == targets[self.row]).to(p) - p) * factor[self.row]).to(d.dtype)

    def add_mask_gradient(self, d: Tensor, z: Tensor, sums: Tensor, targets: Tensor, factor: Tensor) -> None:
        """The same for rows with a mask. ``z`` [n, V]: logits at their temperature, overwritten; ``sums`` [n]: of the sets."""
        assert self.allowed is not None
        masked = self.given & (self.size == 0)
        p = z.masked_fill_(~(self.allowed & masked[:, None]), -torch.inf).sub_(sums[:, None]).exp_()
        factor = factor.where(masked, 0.0)
        d.sub_(p.mul_(factor[:, None]))
        d.scatter_add_(1, targets[:, None], factor[:, None].to(d.dtype))


class KeptRows:
    """The sets of all rows, in chunks of ``rows`` of them. Reads where they begin from the device once."""

    def __init__(self, sets: KeptSets, rows: int) -> None:
        self.sets, self.rows = sets, rows
        self.given = sets.size > 0 if sets.mask_of is None else (sets.size > 0) | (sets.mask_of >= 0)
        self._size, self._ids = sets.size, sets.ids.long()
        self._row = torch.repeat_interleave(sets.size, output_size=len(sets.ids))
        ends = sets.size.cumsum(0)
        self._ends = [0, *ends[rows - 1 :: rows].tolist(), len(sets.ids)]

    def of_chunk(self, index: int, vocabulary: int) -> KeptChunk:
        rows, span = slice(index * self.rows, (index + 1) * self.rows), slice(self._ends[index], self._ends[index + 1])
        row = self._row[span] - rows.start
        allowed = self.sets.allowed(rows, vocabulary)
        return KeptChunk(self.given[rows], allowed, self._size[rows], row, self._ids[span], span)


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor | float = 1.0, *,
    want_entropy: bool = False, chunk: int | None = None, sets: KeptSets | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``hidden`` [N, D], ``weight`` [V, D], ``bias`` [V], ``targets`` [N] -> log-probabilities [N], entropies [N].

    ``temperature`` is a number or [N]; 0 means greedy decoding and counts as 1. The entropies are None without
    ``want_entropy``. ``chunk``: rows per chunk (default: what fits in a few tens of MB, on a GPU a few hundred).
    ``sets``: of the N rows, which are normalised over them."""
    n, vocabulary = hidden.shape[0], weight.shape[0]
    assert hidden.dim() == 2 and weight.shape[1] == hidden.shape[1], (hidden.shape, weight.shape)
    assert targets.shape == (n,), (targets.shape, n)
    wide = _sum_dtype(hidden)
    row_bytes = vocabulary * wide.itemsize
    no_kernels = ops_for(hidden) is reference
    kept_bytes = row_bytes * (2 if want_entropy else 1) if no_kernels else vocabulary * _product_dtype(hidden).itemsize
    limit = KEEP_BYTES_CUDA if hidden.is_cuda else KEEP_BYTES
    differentiated = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep = chunk is None and n * kept_bytes <= limit and (no_kernels or (not sets and differentiated))
    # p of the whole vocabulary may round to 0 where p over a mask of little mass does not: logits are computed again
    keep = keep and (sets is None or sets.masks is None)
    all_rows = max(1, n) if keep and no_kernels else 0
    size = all_rows or chunk or max(1, (CHUNK_BYTES_CUDA if hidden.is_cuda else CHUNK_BYTES) // row_bytes)
    t = torch.as_tensor(temperature, dtype=wide, device=hidden.device)
    inverse = torch.where(t == 0, torch.ones_like(t), t).reciprocal().expand(n)
    rows_kept = None if sets is None else KeptRows(sets, size)
    return _TokenLogprobs.apply(hidden, weight, bias, targets, inverse, want_entropy, size, keep, rows_kept)


def logprobs_of(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor,
    want_entropy: bool, sets: KeptSets | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same as ``token_logprobs`` for a head that is not linear: ``logits`` maps rows [n, D] to [n, V]."""
    wide = _sum_dtype(hidden)
    inverse = torch.where(temperature == 0, 1.0, temperature).to(wide).reciprocal()

    def rows_of(h: Tensor, target: Tensor, scale: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(logits(h).to(wide) * scale[:, None], 1)
        entropy = -torch.linalg.vecdot(log_p.exp(), log_p) if want_entropy else scale.new_zeros(len(h))
        logp = log_p.gather(1, target[:, None]).squeeze(1)
        if rows_kept is not None:
            part = rows_kept.of_chunk(chunk, log_p.shape[1])
            logp = logp - part.log_sums(log_p[part.row, part.ids], log_p)
        return logp, entropy

    size = max(1, (CHUNK_BYTES_CUDA if hidden.is_cuda else CHUNK_BYTES) // (weight.shape[0] * wide.itemsize))
    rows_kept = None if sets is None else KeptRows(sets, size)
    parts = [  # logits of one chunk exist at a time; the backward pass recomputes them
        checkpoint(rows_of, *arguments, chunk, use_reentrant=False)
        for chunk, arguments in enumerate(zip(hidden.split(size), targets.split(size), inverse.split(size)))
    ]
    logp, entropy = (torch.cat(column) for column in zip(*parts)) if parts else (inverse, inverse)
    return logp, entropy if want_entropy else None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's. Determined once, so that forward and backward pass agree."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a·b accumulated *and returned* in the wide dtype where the device supports it."""
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    return (a @ b).to(wide)


def _logits(h: Tensor, w: Tensor, bias: Tensor | None, wide: torch.dtype) -> Tensor:
    """Logits of some rows in the wide dtype, in a new buffer that the caller may overwrite."""
    z = _product(h, w.T, wide)
    if bias is not None:
        z += bias
    return z


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, inverse: Tensor, want_entropy: bool,
        size: int, keep: bool, rows_kept: KeptRows | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        wide, narrow = _sum_dtype(hidden), _product_dtype(hidden)
        logp, lse = (torch.empty(hidden.shape[0], dtype=wide, device=hidden.device) for _ in range(2))
        entropy = torch.empty_like(logp) if want_entropy else None
        saved: tuple[Tensor | None, Tensor | None] = (None, None)  # p, or p − onehot by kernels; and log p
        over_sets: list[tuple[Tensor, Tensor, Tensor]] = []
        ctx.kernels = kernels = ops_for(hidden)  # chosen under the caller's autocast
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(narrow), weight.to(narrow)
            if keep and kernels is not reference:
                saved = (torch.empty(hidden.shape[0], weight.shape[0], dtype=narrow, device=hidden.device), None)
            for a in range(0, hidden.shape[0], size):
                rows = slice(a, a + size)
                z = _logits(h[rows], w, bias, wide)
                if rows_kept is not None:
                    part = rows_kept.of_chunk(a // size, z.shape[1])
                    over_sets.append(part.log_probs(z, targets[rows], inverse[rows]))
                if kernels is not reference:
                    args = (targets[rows], inverse[rows], want_entropy, None if saved[0] is None else saved[0][rows])
                    results = kernels.log_probs(z, *args)
                    for out, value in zip((logp, lse, entropy), results):
                        if out is not None:
                            out[rows] = value
                    continue
                top = z.mul_(inverse[rows, None]).amax(1, keepdim=True)
                p = z.sub_(top).exp()  # the only exponential of the forward pass
                total = p.sum(1, keepdim=True)
                lse[rows] = (top + total.log()).squeeze(1)
                log_p = z.sub_(total.log())
                logp[rows] = log_p.gather(1, targets[rows, None]).squeeze(1)
                if entropy is not None or keep:
                    p /= total
                if entropy is not None:
                    entropy[rows] = -torch.linalg.vecdot(p, log_p)
                saved = (p if keep else None, log_p if keep and want_entropy else None)
        p_sets = sums = None
        if rows_kept is not None and over_sets:
            over_set, p_sets, sums = (torch.cat(parts) for parts in zip(*over_sets))
            logp = torch.where(rows_kept.given, over_set, logp)
        ctx.save_for_backward(hidden, weight, bias, targets, inverse, lse, entropy, *saved, p_sets, sums)
        ctx.narrow, ctx.size, ctx.rows_kept = narrow, size, rows_kept
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_logp: Tensor | None, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inverse, lse, entropy, kept_p, kept_log_p, p_sets, sums = ctx.saved_tensors
        wide = _sum_dtype(hidden)
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        grad_h = torch.empty_like(hidden) if need_h else None
        grad_w = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_w else None
        grad_b = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if need_b else None
        h, w = hidden.to(ctx.narrow), weight.to(ctx.narrow)
        kernels, sets = ctx.kernels, None if g_logp is None else ctx.rows_kept
        g_whole = g_logp if sets is None or g_logp is None else g_logp.masked_fill(sets.given, 0.0)
        if kernels is not reference and kept_p is not None and g_logp is not None and g_entropy is None:
            # d(logits) = c ⊙ (p − onehot), which kernels kept: c scales the smaller operand of each product instead
            c = (g_logp * -inverse)[:, None]
            grad_h = _product(kept_p, w, wide).mul_(c).to(hidden.dtype) if need_h else None
            grad_w = _product(kept_p.T, (h * c).to(kept_p.dtype), wide) if need_w else None
            grad_b = _product(kept_p.T, c.to(kept_p.dtype), wide).squeeze(1) if need_b else None
            return grad_h, grad_w, grad_b, *[None] * 6
        masked = sets is not None and sets.sets.masks is not None
        for a in range(0, hidden.shape[0], ctx.size):
            rows = slice(a, a + ctx.size)
            args = [None if g is None else g[rows] for g in (g_whole, g_entropy, entropy)]
            if kernels is not reference and grad_b is None:
                z = _logits(h[rows], w, bias, wide)
                scaled = z * inverse[rows, None] if masked else None  # the kernel overwrites z
                d = kernels.log_probs_backward(z, targets[rows], inverse[rows], lse[rows], *args, ctx.narrow)
                del z
            else:
                p, log_p = (kept_p, kept_log_p) if kernels is reference else (None, None)
                if p is None:
                    log_p = _logits(h[rows], w, bias, wide).mul_(inverse[rows, None]).sub_(lse[rows, None])
                    p = log_p.exp()
                d = _logit_gradient(p, log_p, targets[rows], *args)
                d *= inverse[rows, None]
                scaled = log_p + lse[rows, None] if masked and log_p is not None else None
            if sets is not None and g_logp is not None:
                factor = g_logp[rows] * inverse[rows]
                chunk = sets.of_chunk(a // ctx.size, weight.shape[0])
                chunk.add_gradient(d, p_sets[chunk.span], targets[rows], factor)
                if scaled is not None and chunk.allowed is not None:
                    chunk.add_mask_gradient(d, scaled, sums[rows], targets[rows], factor)
            if grad_b is not None:
                grad_b += d.sum(0)
            d = d.to(ctx.narrow)
            if grad_h is not None:
                grad_h[rows] = _product(d, w, wide)
            if grad_w is not None:
                if d.dtype == wide:  # without a temporary
                    grad_w.addmm_(d.T, h[rows])
                else:
                    grad_w += _product(d.T, h[rows], wide)
        grads = (grad_h, None if grad_w is None else grad_w.to(weight.dtype), grad_b)
        return *grads, *[None] * 6


def _logit_gradient(
    p: Tensor, log_p: Tensor | None, targets: Tensor, g_logp: Tensor | None, g_entropy: Tensor | None, entropy: Tensor | None
) -> Tensor:  # fmt: skip
    """g·∂logp/∂z + g′·∂H/∂z for some rows, in a new buffer: a second backward pass may need the kept p."""
    if g_entropy is None or entropy is None or log_p is None:
        d = torch.zeros_like(p) if g_logp is None else p * -g_logp[:, None]
    else:
        d = (log_p + entropy[:, None]).mul_(-g_entropy[:, None])
        if g_logp is not None:
            d -= g_logp[:, None]
        d *= p
    if g_logp is not None:
        d.scatter_add_(1, targets[:, None], g_logp[:, None])
    return d
