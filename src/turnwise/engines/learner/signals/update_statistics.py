"""Signals that cost more than a plain forward pass: gradient norms, whole distributions compared, steps foretold.

This module measures; what the numbers are for it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.engines.learner.forward_pass import Reading

PUSHES = (Signal.PUSH, Signal.PUSH_SQUARE, Signal.PUSH_MEAN)


def hellinger(mine: Reading, theirs: Reading) -> Field:
    """1 − Σₐ √(π(a) π′(a)) for each sampled token."""
    out = torch.empty_like(mine.inverse)
    for (rows, a), (_, b) in zip(mine.distributions(), theirs.distributions()):
        out[rows] = (1 - (0.5 * (a + b)).exp().sum(1)).clamp(0, 1)
    return Field(mine.batch.tree, TOKEN, out)


def pushes(reading: Reading, precondition: Tensor) -> dict[Signal, Field]:
    """Σ v²q, Σ πv²q² and Σ πvq with v = onehot − π and q = P h²: what one step on this token would do to its logits."""
    target, found = reading.batch.token.x, [torch.empty_like(reading.inverse) for _ in PUSHES]
    for rows, logp in reading.distributions():
        p = logp.exp()
        v = -p
        v.scatter_add_(1, target[rows, None], torch.ones_like(p[:, :1]))
        q = reading.before[rows].square() @ precondition.to(p.dtype).T
        for out, value in zip(found, (v * v * q, p * (v * q) ** 2, p * v * q)):
            out[rows] = value.sum(1)
    return {name: Field(reading.batch.tree, TOKEN, x) for name, x in zip(PUSHES, found)}


@torch.enable_grad()
def gradient_norms(batch: Batch, logp: Callable[[Batch], Field], parameters: Sequence[nn.Parameter]) -> Field:
    """‖∇ Σₜ log π(yₜ)‖ of each trajectory: one backward pass each."""
    out = torch.zeros(len(batch), device=batch.tree.device)
    for k in range(len(batch)):
        total = logp(batch.select([k])).x.sum()
        if total.requires_grad:
            grads = torch.autograd.grad(total, parameters, allow_unused=True)
            out[k] = torch.nn.utils.get_total_norm([g for g in grads if g is not None])
    return Field(batch.tree, TRAJECTORY, out)
