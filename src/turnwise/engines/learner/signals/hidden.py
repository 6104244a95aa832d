"""Signals that one forward pass holds: distances of distributions, predicted logit changes, candidates beside each token, and the
effective rank of a trajectory's hidden states; and how concentrated the hidden states of prompts are.

    CANDIDATE_MATCHES = #{j : aⱼ = y}         CANDIDATE_LOGP = Σ_{aⱼ ≠ y} log π(aⱼ)
    ER(Z) = exp(−Σ pₖ ln(pₖ + ε)),  p = σ / (Σσ + ε),  σ the singular values of Z without its column means
    mⱼ = ER(Z[: j·stride + 1]),  dⱼ = mⱼ − mean(m₁ … mⱼ₋₁),  velocity = mean dⱼ,  acceleration = mean (dⱼ − dⱼ₋₁)

Candidates are alternatives to each sampled token, drawn when CANDIDATE_MATCHES is measured, from the policy of that moment. The
random numbers depend on the trajectory, the token's index and the number of steps taken, so neither micro-batches nor order
change them. The ids become columns of the batch, and every update on it scores the same candidates. A batch without these columns
samples from the current policy. CANDIDATE_LOGP needs no second softmax: log π(a) = log π(y) + z(a) − z(y).

Legend: N tokens, K trajectories, T states of the longest, D hidden size, J prefixes. Does not know what the numbers are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, Field, Tree
from turnwise.core.signals import Signal
from turnwise.engines.attention_interface import use_eager_attention
from turnwise.engines.kernels.sampling import uniforms
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.packed_forward import ForwardPass
from turnwise.errors import SettingError

PREDICTED_CHANGES = (Signal.PREDICTED_LOGP_CHANGE, Signal.PREDICTED_LOGIT_SQUARE, Signal.PREDICTED_LOGIT_MEAN)
RANKS = (Signal.EFFECTIVE_RANK, Signal.EFFECTIVE_RANK_VELOCITY, Signal.EFFECTIVE_RANK_ACCELERATION)
CANDIDATES = 8  # where the batch does not say how many
STRIDE = 40
LONGEST = 512  # a longer trajectory counts with its last states
EPS = 1e-8
CHUNK = 1 << 26  # elements in the matrices of one call
PROMPTS = 8  # of a forward pass that measures angles
MLPS = ("mlp", "feed_forward", "block_sparse_moe")  # what models call it

# What log π [n, V] of some tokens give, and log π′ of the reference where it is read.
OF_POLICY = {
    Signal.COLLISION: lambda logp: (2 * logp).exp().sum(1),  # Σₐ π(a)²
    Signal.MODE_LOGP: lambda logp: logp.max(1).values,  # of the most likely token; in an update with its gradient
}
OF_BOTH = {
    Signal.HELLINGER: lambda a, b: (1 - (0.5 * (a + b)).exp().sum(1)).clamp(0, 1),  # 1 − Σₐ √(π(a) π′(a))
    # log π(a*) − max log π, a* the reference's most likely token
    Signal.REFERENCE_MODE_GAP: lambda a, b: a.gather(1, b.argmax(1, keepdim=True))[:, 0] - a.max(1).values,
}


def of_distributions(signal: Signal, policy: ForwardPass, reference: ForwardPass | None = None) -> Field:
    """A signal of ``OF_POLICY`` or ``OF_BOTH``, for each sampled token."""
    if reference is None:
        values = [OF_POLICY[signal](logp) for _, logp in policy.distributions()]
    else:
        pairs = zip(policy.distributions(), reference.distributions())
        values = [OF_BOTH[signal](a, b) for (_, a), (_, b) in pairs]
    return Field(policy.batch.tree, TOKEN, torch.cat(values) if values else policy.inverse_temperature)


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
    count = batch.columns.get((Column.CANDIDATE, "count"))
    return CANDIDATES if count is None else int(count.item)


@torch.no_grad()
def sample_candidates(forward: ForwardPass, step: int) -> Tensor:
    """Candidate ids [N, candidates], by inverse transform sampling."""
    batch, count = forward.batch, candidate_count(forward.batch)
    index = batch.tree.index(TOKEN, TRAJECTORY).x[:, None] * count + torch.arange(count, device=batch.tree.device)
    u = uniforms(batch.seed.at(TOKEN).x[:, None] + (step << 33), index)  # a trajectory's seed has 32 bits
    out = torch.empty_like(index)
    for rows, logp in forward.distributions():
        # in float64: a float32 sum over a large vocabulary ends visibly beside 1
        cdf = logp.exp().cumsum(1, dtype=torch.float64)
        out[rows] = torch.searchsorted(cdf, u[rows] * cdf[:, -1:], right=True)
    return out


def stored_candidates(batch: Batch) -> Tensor | None:
    """The candidates drawn when this batch was measured; None if there are none."""
    if (Column.CANDIDATE, 0) not in batch.columns:
        return None
    return torch.stack([batch[Column.CANDIDATE, j].x for j in range(candidate_count(batch))], 1)


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
    directions = F.embedding_bag(rows, head.weight, mode="sum", per_sample_weights=weights)
    gap = (forward.before * directions).sum(1)
    if head.bias is not None:
        gap = gap + (head.bias[rows] * weights).sum(1)
    return Field(batch.tree, TOKEN, count.squeeze(1) * logp + gap * forward.inverse_temperature)


# -------------------------------------------------------------- effective rank


def effective_rank_signals(
    tree: Tree, hidden: Tensor, stride: int = STRIDE, longest: int = LONGEST
) -> dict[Signal, Field]:
    """``hidden`` [N, D]: one state per token. A trajectory without tokens has rank 0; the mean of an empty set is 0."""
    owner, size = tree.ancestor(TOKEN, TRAJECTORY), tree.size(TOKEN, TRAJECTORY).x
    index, length = tree.index(TOKEN, TRAJECTORY).x - (size - longest).clamp(min=0)[owner], size.clamp(max=longest)
    last = index >= 0  # of a longer trajectory, its last states
    # the states [K, T, D], right-padded with zeros
    z = hidden.new_zeros(size.numel(), int(length.max()) if length.numel() else 0, hidden.shape[1], dtype=torch.float64)
    z[owner[last], index[last]] = hidden[last].double()
    whole = torch.where(length > 0, effective_rank(z, length), 0.0)
    sizes = range(stride + 1, int(length.max()) + 1 if length.numel() else 0, stride)
    m = z.new_zeros(z.shape[0], len(sizes))
    for j, n in enumerate(sizes):  # at most a dozen prefixes
        long = (length >= n).nonzero().squeeze(1)
        m[long, j] = effective_rank(z[long, :n], torch.full_like(long, n))
    velocity = acceleration = m.new_zeros(m.shape[0])
    if m.shape[1] >= 2:
        count, number = (length - 1).clamp(min=0) // stride, torch.arange(m.shape[1], device=m.device)
        d = m - F.pad(m.cumsum(1), (1, -1)) / number.clamp(min=1)
        d = torch.where(
            (number > 0) & (number < count[:, None]), d, 0.0
        )  # the first ``count`` ranks of a trajectory exist
        velocity = d.sum(1) / (count - 1).clamp(min=1)
        last = d.gather(1, (count - 1).clamp(min=0)[:, None]).squeeze(1)
        mean_change = (last - d[:, 1]) / (count - 2).clamp(min=1)  # the sum of differences telescopes
        acceleration = torch.where(count > 2, mean_change, 0.0)
    return {s: Field(tree, TRAJECTORY, x) for s, x in zip(RANKS, (whole, velocity, acceleration))}


def effective_rank(z: Tensor, length: Tensor) -> Tensor:
    """``z`` [K, T, D], zero after each ``length`` [K] -> [K]. Singular values are square roots of the eigenvalues of ZZᵀ or ZᵀZ,
    whichever is smaller, for all trajectories at once."""
    real = torch.arange(z.shape[1], device=z.device) < length[:, None]
    z = (z - (z.sum(1) / length.clamp(min=1)[:, None])[:, None]) * real[:, :, None]
    z = z.mT if z.shape[1] > z.shape[2] else z
    size = max(1, CHUNK // max(1, z.shape[1] * z.shape[1]))
    gram = [torch.linalg.eigvalsh(part @ part.mT) for part in z.split(size)] if z.numel() else []
    squares = torch.cat(gram) if gram else z.new_zeros(z.shape[0], 1)
    noise = squares.amax(1, keepdim=True) * squares.shape[1] * torch.finfo(squares.dtype).eps
    sigma = torch.where(squares > noise, squares, 0.0).sqrt()  # an eigenvalue of 0 comes out as rounding noise
    p = sigma / (sigma.sum(1, keepdim=True) + EPS)
    return (-(p * (p + EPS).log()).sum(1)).exp()


# ---------------------------------------------------------- angles of prompts


def concentration(hidden: Tensor, context: int) -> tuple[float, float]:
    """Mean cosine over all pairs of question tokens, and over all pairs of a question and a context token, of ``hidden`` [T, D],
    whose first ``context`` rows are the context. A mean over pairs is the product of the two mean directions."""
    directions = F.normalize(hidden.double(), dim=-1)
    question = directions[context:].mean(0)
    inter = float(question @ directions[:context].mean(0)) if context else 0.0
    return float(question @ question), inter


@torch.no_grad()
def prompt_angles(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """``concentration`` of each prompt, of the inputs of the last layer's MLP. The context of a prompt is what all prompts begin
    with, its question is the rest."""
    last_layer = packed_forward.decoder_layers(model)[-1]
    same = [len(set(column)) == 1 for column in zip(*prompts)] if len(prompts) > 1 else [False]
    shared = next((n for n, equal in enumerate(same) if not equal), len(same))
    context = min(shared, min(map(len, prompts)) - 1)  # a question has at least one token
    device, angles, seen = next(model.parameters()).device, list[tuple[float, float]](), list[Tensor]()
    mlps = [mlp for part in MLPS if (mlp := getattr(last_layer, part, None)) is not None]
    if not mlps:
        raise SettingError(
            f"the last layer of {type(model).__name__} has no `mlp`, so angles of its hidden states cannot be measured"
        )
    hook = mlps[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    attention = model.config.get_text_config()._attn_implementation
    use_eager_attention(model)  # for padded ids, whichever attention an engine has given it
    try:
        for first in range(0, len(prompts), PROMPTS):
            part = [torch.tensor(list(prompt)) for prompt in prompts[first : first + PROMPTS]]
            masks = [torch.ones_like(prompt) for prompt in part]
            ids, mask = (pad_sequence(rows, batch_first=True).to(device) for rows in (part, masks))
            seen.clear()
            model(input_ids=ids, attention_mask=mask, use_cache=False)
            states = seen[-1].reshape(len(part), -1, seen[-1].shape[-1])
            angles += [concentration(rows[: len(prompt)], context) for rows, prompt in zip(states, part)]
    finally:
        hook.remove()
        model.set_attn_implementation(attention)
    return angles
