"""One-token rollouts: at each sampled token a few others are drawn from the policy, once per batch.

    HITS   = #{j : aⱼ = y}         RIVALS = Σ_{aⱼ ≠ y} log π(aⱼ)

The draw is made when HITS is measured, from the policy as it then is, by lots that depend on trajectory, place and how
many steps were taken: no cut or order of the batch changes it. The ids travel as columns of the batch, so that every update
on it scores the very same candidates. A batch without these columns draws its own from the present policy.

RIVALS needs no second softmax: log π(a) = log π(y) + z(a) − z(y).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.engines.kernels.sampling import uniforms
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.forward_pass import Reading

COUNT = 8
COLUMNS = tuple(f"candidate {j}" for j in range(COUNT))


@torch.no_grad()
def draw(reading: Reading, step: int) -> Tensor:
    """Ids of the candidates, [N, COUNT], by inverting the cumulative distribution."""
    batch = reading.batch
    place = batch.tree.index(TOKEN, TRAJECTORY).x[:, None] * COUNT + torch.arange(COUNT, device=batch.tree.device)
    u = uniforms(batch.seed.at(TOKEN).x[:, None] + (step << 33), place)  # seeds of trajectories have 32 bits
    out = torch.empty_like(place)
    for rows, logp in reading.distributions():
        cdf = logp.exp().cumsum(1, dtype=torch.float64)
        out[rows] = torch.searchsorted(cdf, u[rows] * cdf[:, -1:], right=True)
    return out


def known(batch: Batch) -> Tensor | None:
    """The candidates drawn when this batch was measured."""
    if COLUMNS[0] not in batch.columns:
        return None
    return torch.stack([batch[name].x for name in COLUMNS], 1)


def columns(batch: Batch, ids: Tensor) -> dict[str, Field]:
    return {name: Field(batch.tree, TOKEN, column) for name, column in zip(COLUMNS, ids.unbind(1))}


def hits(batch: Batch, ids: Tensor) -> Field:
    return Field(batch.tree, TOKEN, (ids == batch.token.x[:, None]).sum(1))


def rivals(reading: Reading, ids: Tensor, logp: Tensor) -> Field:
    """Σ log π of the candidates that are not the token, with the gradient. ``logp`` [N]: the token's own."""
    batch, head = reading.batch, packed_forward.head(reading.model)
    other = (ids != batch.token.x[:, None]).to(head.weight.dtype)
    count = other.sum(1, keepdim=True)
    rows, weights = torch.cat([ids, batch.token.x[:, None]], 1), torch.cat([other, -count], 1)
    if not ids.numel():
        return Field(batch.tree, TOKEN, logp)
    directions = torch.nn.functional.embedding_bag(rows, head.weight, mode="sum", per_sample_weights=weights)
    gap = (reading.before * directions).sum(1)
    if head.bias is not None:
        gap = gap + (head.bias[rows] * weights).sum(1)
    return Field(batch.tree, TOKEN, count.squeeze(1) * logp + gap * reading.inverse)
