"""Signals that cost more than a forward pass: gradient norms, distances of distributions, predicted logit changes.

Does not know what the numbers are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.engines.learner.forward_pass import ForwardPass

PREDICTED_CHANGES = (Signal.PREDICTED_LOGP_CHANGE, Signal.PREDICTED_LOGIT_SQUARE, Signal.PREDICTED_LOGIT_MEAN)


def hellinger(policy: ForwardPass, reference: ForwardPass) -> Field:
    """1 − Σₐ √(π(a) π′(a)) for each sampled token."""
    out = torch.empty_like(policy.inverse_temperature)
    for (rows, a), (_, b) in zip(policy.distributions(), reference.distributions()):
        out[rows] = (1 - (0.5 * (a + b)).exp().sum(1)).clamp(0, 1)
    return Field(policy.batch.tree, TOKEN, out)


def collision(policy: ForwardPass) -> Field:
    """Σₐ π(a)² of the distribution of each sampled token."""
    out = torch.empty_like(policy.inverse_temperature)
    for rows, logp in policy.distributions():
        out[rows] = (2 * logp).exp().sum(1)
    return Field(policy.batch.tree, TOKEN, out)


def mode_logp(policy: ForwardPass) -> Field:
    """The log-probability of the most likely token at each sampled one, with gradient."""
    largest = [logp.max(1).values for _, logp in policy.distributions()]
    return Field(policy.batch.tree, TOKEN, torch.cat(largest) if largest else policy.inverse_temperature)


def reference_mode_gap(policy: ForwardPass, reference: ForwardPass) -> Field:
    """log π(a*) − max log π, a* the reference's most likely token, for each sampled token."""
    out = torch.empty_like(policy.inverse_temperature)
    for (rows, a), (_, b) in zip(policy.distributions(), reference.distributions()):
        out[rows] = a.gather(1, b.argmax(1, keepdim=True))[:, 0] - a.max(1).values
    return Field(policy.batch.tree, TOKEN, out)


def predicted_changes(forward: ForwardPass, preconditioner: Tensor) -> dict[Signal, Field]:
    """Σ v²q, Σ πv²q² and Σ πvq with v = onehot − π and q = P h²: how one step on this token would change its logits."""
    target, sums = forward.batch.token.x, [torch.empty_like(forward.inverse_temperature) for _ in PREDICTED_CHANGES]
    for rows, logp in forward.distributions():
        p = logp.exp()
        v = -p
        v.scatter_add_(1, target[rows, None], torch.ones_like(p[:, :1]))
        q = forward.before[rows].square() @ preconditioner.to(p.dtype).T
        for out, value in zip(sums, (v * v * q, p * (v * q) ** 2, p * v * q)):
            out[rows] = value.sum(1)
    return {name: Field(forward.batch.tree, TOKEN, x) for name, x in zip(PREDICTED_CHANGES, sums)}


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
