"""Signals that cost more than a plain forward pass: gradient norms, answer likelihoods, whole distributions compared.

Legend: N sampled tokens, V vocabulary, D width.

This module measures; what the numbers are for it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from turnwise.batch import Batch, Sequences
from turnwise.errors import SignalError
from turnwise.levels import TOKEN, TRAJECTORY, TURN, Field, Tree
from turnwise.signals import Signal

PUSHES = frozenset({Signal.PUSH, Signal.PUSH_SQUARE, Signal.PUSH_MEAN})
CHUNK = 1 << 22  # numbers in one chunk of [tokens, vocabulary]


@dataclass(frozen=True)
class States:
    """What a head reads, [N, D], and the head."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def logp(self, rows: slice, inverse: Tensor) -> Tensor:
        """Log-probabilities of the whole vocabulary for some tokens, [rows, V]."""
        z = torch.nn.functional.linear(self.hidden[rows], self.weight.to(self.hidden.dtype), self.bias)
        return torch.log_softmax(z * inverse[rows, None], 1)


def _chunks(states: States) -> Iterator[slice]:
    size = max(1, CHUNK // max(1, states.weight.shape[0]))
    return (slice(a, a + size) for a in range(0, states.hidden.shape[0], size))


def _inverse(batch: Batch, states: States) -> Tensor:
    t = batch.temperature.at(TOKEN).x.to(states.hidden.dtype)
    return torch.where(t == 0, 1.0, t).reciprocal()


def hellinger(batch: Batch, mine: States, theirs: States) -> Field:
    """1 − Σₐ √(π(a) π′(a)) for each sampled token."""
    inverse, out = _inverse(batch, mine), mine.hidden.new_empty(mine.hidden.shape[0])
    for rows in _chunks(mine):
        overlap = (0.5 * (mine.logp(rows, inverse) + theirs.logp(rows, inverse))).exp().sum(1)
        out[rows] = (1 - overlap).clamp(0, 1)
    return Field(batch.tree, TOKEN, out)


def pushes(batch: Batch, states: States, precondition: Tensor) -> dict[Signal, Field]:
    """Σ v²q, Σ πv²q² and Σ πvq with v = onehot − π and q = P h²: what one step on this token would do to its logits."""
    inverse, target = _inverse(batch, states), batch.token.x
    found = [states.hidden.new_empty(states.hidden.shape[0]) for _ in range(3)]
    for rows in _chunks(states):
        p = states.logp(rows, inverse).exp()
        v = -p
        v.scatter_add_(1, target[rows, None], torch.ones_like(p[:, :1]))
        q = states.hidden[rows].square() @ precondition.to(p.dtype).T
        for out, value in zip(found, (v * v * q, p * (v * q) ** 2, p * v * q)):
            out[rows] = value.sum(1)
    names = (Signal.PUSH, Signal.PUSH_SQUARE, Signal.PUSH_MEAN)
    return {name: Field(batch.tree, TOKEN, x) for name, x in zip(names, found)}


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


def answers(batch: Batch, logp: Callable[[Batch], Field]) -> Field:
    """Mean log-probability of the gold answer at each turn, were it said instead of what was. 0 for turns without tokens."""
    if not batch.answers or not all(batch.answers):
        raise SignalError(
            "the likelihood of the gold answer was asked for, but the environment tells none for some task; "
            "give the environment an answer(), or take a method that does not need it"
        )
    s, tree = batch.sequences, batch.tree
    ids: list[Tensor] = []
    starts, at, owner = [0], list[int](), list[int]()
    first = tree.size(TOKEN, TURN).x.cumsum(0) - tree.size(TOKEN, TURN).x
    turns = (tree.size(TOKEN, TURN).x > 0).nonzero().squeeze(1).tolist()
    trajectory = tree.parents[1].tolist()
    for turn in turns:
        here = int(s.at[first[turn]])
        begin = int(s.start[torch.searchsorted(s.start, here, right=True) - 1])
        answer = list(batch.answers[trajectory[turn]])
        at += range(starts[-1] + here - begin, starts[-1] + here - begin + len(answer))
        ids.append(torch.cat([s.ids[begin:here], s.ids.new_tensor(answer)]))
        starts.append(starts[-1] + ids[-1].numel())
        owner += [len(starts) - 2] * len(answer)
    found = torch.zeros(tree.count(TURN), device=tree.device)
    if turns:
        scores = logp(_asking(batch, ids, starts, at, owner, turns)).mean(TURN)
        found[turns] = scores.x.to(found.dtype)
    return Field(tree, TURN, found)


def _asking(
    batch: Batch, ids: list[Tensor], starts: list[int], at: list[int], owner: list[int], turns: list[int]
) -> Batch:
    """A batch whose sampled tokens are the answers: one sequence, turn and trajectory for each turn asked about."""
    tensor = lambda x: torch.tensor(x, dtype=torch.int64, device=batch.tree.device)  # noqa: E731
    n = len(ids)
    tree = Tree(tensor(owner), torch.arange(n, device=batch.tree.device), tensor([0] * n), 1)
    packed = torch.cat(ids)
    sequences = Sequences(packed, tensor(starts), torch.arange(n, device=batch.tree.device), tensor(at))
    temperature = Field(tree, TURN, batch.temperature.x[tensor(turns)])
    token = Field(tree, TOKEN, packed[tensor(at)])
    return replace(batch, tree=tree, sequences=sequences, token=token, temperature=temperature, columns={}, answers=())
