"""Signals that read whole distributions of a forward pass: distances, predicted logit changes, candidates beside each token.

    CANDIDATE_MATCHES = #{j : aⱼ = y}         CANDIDATE_LOGP = Σ_{aⱼ ≠ y} log π(aⱼ)

Candidates are alternatives to each sampled token, drawn when CANDIDATE_MATCHES is measured, from the policy of that moment. The
random numbers depend on the trajectory, the token's index and the number of steps taken, so neither micro-batches nor order
change them. The ids become columns of the batch, and every update on it scores the same candidates. A batch without these columns
samples from the current policy. CANDIDATE_LOGP needs no second softmax: log π(a) = log π(y) + z(a) − z(y).

Does not know what the numbers are for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.engines.kernels.sampling import uniforms
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.forward_pass import ForwardPass

PREDICTED_CHANGES = (Signal.PREDICTED_LOGP_CHANGE, Signal.PREDICTED_LOGIT_SQUARE, Signal.PREDICTED_LOGIT_MEAN)
CANDIDATES = 8  # where the batch does not say how many


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


# ----------------------------------------------------------------- candidates


def candidate_count(batch: Batch) -> int:
    """How many candidates to draw at each token of this batch."""
    count = batch.columns.get((Column.CANDIDATE, "count"))
    return CANDIDATES if count is None else int(count.item)


@torch.no_grad()
def sample_candidates(forward: ForwardPass, step: int) -> Tensor:
    """Candidate ids [N, K], by inverse transform sampling."""
    batch, count = forward.batch, candidate_count(forward.batch)
    index = batch.tree.index(TOKEN, TRAJECTORY).x[:, None] * count + torch.arange(count, device=batch.tree.device)
    u = uniforms(batch.seed.at(TOKEN).x[:, None] + (step << 33), index)  # a trajectory's seed has 32 bits
    out = torch.empty_like(index)
    for rows, logp in forward.distributions():
        cdf = logp.exp().cumsum(1, dtype=torch.float64)
        out[rows] = torch.searchsorted(cdf, u[rows] * cdf[:, -1:], right=True)
    return out


def stored_candidates(batch: Batch) -> Tensor | None:
    """The candidates drawn when this batch was measured; None if there are none."""
    if (Column.CANDIDATE, 0) not in batch.columns:
        return None
    return torch.stack([batch[Column.CANDIDATE, j].x for j in range(candidate_count(batch))], 1)


def candidate_columns(batch: Batch, ids: Tensor) -> dict[tuple[Column, int], Field]:
    return {(Column.CANDIDATE, j): Field(batch.tree, TOKEN, column) for j, column in enumerate(ids.unbind(1))}


def count_matches(batch: Batch, ids: Tensor) -> Field:
    return Field(batch.tree, TOKEN, (ids == batch.token.x[:, None]).sum(1))


def candidate_logp(forward: ForwardPass, ids: Tensor) -> Field:
    """Σ log π of the candidates that differ from the token, with gradient."""
    batch, head, logp = forward.batch, packed_forward.lm_head(forward.model), forward.logp_over_vocabulary()
    other = (ids != batch.token.x[:, None]).to(head.weight.dtype)
    count = other.sum(1, keepdim=True)
    rows, weights = torch.cat([ids, batch.token.x[:, None]], 1), torch.cat([other, -count], 1)
    if not ids.numel():
        return Field(batch.tree, TOKEN, logp)
    if packed_forward.has_own_head(forward.model):
        gaps = [(log_p.gather(1, rows[part]) * weights[part]).sum(1) for part, log_p in forward.distributions()]
        return Field(batch.tree, TOKEN, count.squeeze(1) * logp + torch.cat(gaps))
    directions = torch.nn.functional.embedding_bag(rows, head.weight, mode="sum", per_sample_weights=weights)
    gap = (forward.before * directions).sum(1)
    if head.bias is not None:
        gap = gap + (head.bias[rows] * weights).sum(1)
    return Field(batch.tree, TOKEN, count.squeeze(1) * logp + gap * forward.inverse_temperature)
