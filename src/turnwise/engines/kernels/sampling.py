"""Batched token sampling: temperature, truncation, counter-based random numbers.

A token is a pure function of (logits, sampling parameters, seed, position): it does not depend on which rows share a batch, on
their order or on their cache row. Knows neither models nor requests, nor what a token means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from turnwise.core.records import Sampling

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number, and the two multipliers of splitmix64
MIX = ((30, -4658895280553007687), (27, -7723592293110705685))

KEEP_ALL = 1 << 31  # a top-k that truncates nothing
KEPT_LIMIT = 256  # ids of the largest kept set that is recorded
CANDIDATES = 5  # the most likely tokens whose probabilities make the confidence


def signed(seed: int) -> int:
    """Wrap any Python integer to a signed 64-bit one."""
    return ((seed + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64. ``&`` makes the arithmetic shift a logical one."""
    for shift, factor in MIX:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniforms(seed: Tensor, position: Tensor) -> Tensor:
    """Uniform float64 numbers in [0, 1), a hash of (seed, position), broadcast against each other.

    52 bits, so that u·total < total also after rounding: the last token of a CDF is never overshot."""
    x = _mix(_mix(seed + GOLDEN) + position * GOLDEN)
    return ((x >> 12) & ((1 << 52) - 1)).double() * 2.0**-52


class TokenSampler:
    """The sampling parameters of a batch as column tensors. Truncates in the order of Transformers: top-k, top-p, then min-p."""

    def __init__(self, samplings: Sequence[Sampling], device: torch.device) -> None:
        self.greedy = _column([s.greedy for s in samplings], device) if any(s.greedy for s in samplings) else None
        temperatures = [1.0 if s.greedy else s.temperature for s in samplings]
        self.temperature = _column(temperatures, device) if any(t != 1.0 for t in temperatures) else None
        self.truncates = any(not (s.whole or s.greedy) for s in samplings)
        if self.truncates:
            self.whole = _column([s.whole or s.greedy for s in samplings], device)
            self.top_k = _column([s.top_k or KEEP_ALL for s in samplings], device)
            self.top_p = _column([s.top_p for s in samplings], device, torch.float64)
            self.min_p = _column([s.min_p for s in samplings], device, torch.float64)
        self.all_greedy = all(s.greedy for s in samplings)
        # what the last call kept, as ``kept_ids`` returns it; None when no row truncates
        self.kept: Tensor | None = None

    def __call__(
        self, logits: Tensor, u: Tensor, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """logits [B, V], u [B] -> token, logp, mass [B]; mass is None when no row truncates. ``allowed`` [B, V]: the ids that a
        grammar leaves; filters truncate what is left, and ``mass`` is a share of it.

        A greedy row's logp is that of the temperature-1 distribution: its own is always 0 and carries no gradient."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -math.inf)
        if self.temperature is not None:
            logits = logits / self.temperature.to(logits.dtype)
        weight = full = logits.softmax(-1)  # take the log of the sampled entries only: one pass of exp fewer
        mass = None
        if self.truncates:
            weight, mass = truncate(full, self.whole, self.top_k, self.top_p, self.min_p)
            self.kept = kept_ids(weight, self.whole)
        best = logits.argmax(-1, keepdim=True) if self.greedy is not None else None
        if self.all_greedy and best is not None:
            token = best
        else:
            token = pick(weight, u)
            if best is not None and self.greedy is not None:
                token = torch.where(self.greedy, best, token)
        logp = full.gather(1, token)[:, 0].log()
        return token[:, 0], (logp if mass is None else logp - mass), mass

    def certainty(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Entropy and confidence of each row [B] at its temperature, before truncation. A pass of its own, for requests that ask
        for it. Confidence is −mean log p of the ``CANDIDATES`` most likely tokens, less ln of their number: 0 where they share
        all of the mass equally, larger the more peaked the row is."""
        logits = logits.float() if self.temperature is None else logits.float() / self.temperature
        logp = logits.log_softmax(-1)
        count = min(CANDIDATES, logp.shape[-1])
        return -(logp.exp() * logp).sum(-1), -logp.topk(count, dim=-1).values.mean(-1) - math.log(count)


def pick(weight: Tensor, u: Tensor) -> Tensor:
    """Inverse-CDF sampling. weight [B, V], u [B] -> [B, 1]: the entry in which u times the total weight falls."""
    cdf = weight.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)


def truncate(weight: Tensor, whole: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Zero the truncated entries; also return the kept log mass [B]. ``whole`` rows [B, 1] keep all. The entries are sorted to
    find the truncation and sampled unsorted, so that a row does not depend on its neighbours."""
    p, order = weight.sort(dim=-1, descending=True, stable=True)
    p = p.double()
    rank = torch.arange(p.shape[1], device=p.device)
    of_top_k = torch.where(rank < top_k, p, 0.0)
    before = of_top_k.cumsum(-1) - of_top_k
    keep = (rank < top_k) & (before < top_p * of_top_k.sum(-1, keepdim=True)) & (p >= min_p * p[:, :1])
    keep |= whole | (rank == 0)
    keep = torch.zeros_like(keep).scatter_(1, order, keep)
    weight = weight * keep
    mass = weight.sum(-1, dtype=torch.float64).log().clamp_(max=0.0)
    return weight, torch.where(whole[:, 0], 0.0, mass).to(weight.dtype)


def kept_ids(weight: Tensor, whole: Tensor) -> Tensor:
    """The ids of the positive entries of each row, [B, ``KEPT_LIMIT``] int32 in any order; −1 fills the rest. A row with more of
    them, and one that is ``whole`` [B, 1], has none."""
    top = weight.topk(min(KEPT_LIMIT, weight.shape[1]), dim=-1, sorted=False)
    few = ((weight > 0).sum(-1, keepdim=True) <= KEPT_LIMIT) & ~whole
    return torch.where(few & (top.values > 0), top.indices, -1).int()


def kept_bytes(rows: Tensor) -> list[bytes]:
    """Rows of ``kept_ids`` on the host as recorded: the ids of each in ascending order."""
    ordered, sizes = rows.sort(-1).values.numpy(), (rows >= 0).sum(-1).tolist()
    return [row[len(row) - size :].tobytes() for row, size in zip(ordered, sizes)]


def _column(values: Sequence[bool | int | float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, device=device, dtype=dtype)[:, None]
