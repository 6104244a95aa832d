"""Candidate tokens: alternatives to each sampled token, drawn from the policy once per batch.

    CANDIDATE_MATCHES = #{j : aⱼ = y}         CANDIDATE_LOGP = Σ_{aⱼ ≠ y} log π(aⱼ)

Candidates are drawn when CANDIDATE_MATCHES is measured, from the policy of that moment. The random numbers depend on the
trajectory, the token's index and the number of steps taken, so neither micro-batches nor order change them. The ids become
columns of the batch, and every update on it scores the same candidates. A batch without these columns samples from the current
policy.

CANDIDATE_LOGP needs no second softmax: log π(a) = log π(y) + z(a) − z(y). Knows distributions; not what the signals are for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.engines.kernels.sampling import uniforms
from turnwise.engines.learner import packed_forward, stock_forward
from turnwise.engines.learner.forward_pass import ForwardPass

COUNT = 8  # where the batch does not say how many


def number(batch: Batch) -> int:
    """How many candidates to draw at each token of this batch."""
    told = batch.columns.get((Column.CANDIDATE, "count"))
    return COUNT if told is None else int(told.item)


@torch.no_grad()
def sample(forward: ForwardPass, step: int) -> Tensor:
    """Candidate ids [N, K], by inverse transform sampling."""
    batch, count = forward.batch, number(forward.batch)
    index = batch.tree.index(TOKEN, TRAJECTORY).x[:, None] * count + torch.arange(count, device=batch.tree.device)
    u = uniforms(batch.seed.at(TOKEN).x[:, None] + (step << 33), index)  # a trajectory's seed has 32 bits
    out = torch.empty_like(index)
    for rows, logp in forward.distributions():
        cdf = logp.exp().cumsum(1, dtype=torch.float64)
        out[rows] = torch.searchsorted(cdf, u[rows] * cdf[:, -1:], right=True)
    return out


def stored(batch: Batch) -> Tensor | None:
    """The candidates drawn when this batch was measured; None if there are none."""
    if (Column.CANDIDATE, 0) not in batch.columns:
        return None
    return torch.stack([batch[Column.CANDIDATE, j].x for j in range(number(batch))], 1)


def as_columns(batch: Batch, ids: Tensor) -> dict[tuple[Column, int], Field]:
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
    if stock_forward.has_own_head(forward.model):
        gaps = [(log_p.gather(1, rows[part]) * weights[part]).sum(1) for part, log_p in forward.distributions()]
        return Field(batch.tree, TOKEN, count.squeeze(1) * logp + torch.cat(gaps))
    directions = torch.nn.functional.embedding_bag(rows, head.weight, mode="sum", per_sample_weights=weights)
    gap = (forward.before * directions).sum(1)
    if head.bias is not None:
        gap = gap + (head.bias[rows] * weights).sum(1)
    return Field(batch.tree, TOKEN, count.squeeze(1) * logp + gap * forward.inverse_temperature)
