"""Methods as functions over padded (B, L) tensors and a mask, for other trainers. Needs nothing of our training loop.

    adv = padded.advantages("rloo", rewards, mask, group)
    loss, metrics = padded.loss("sapo", logp, old_logp, mask, advantages=adv)

``mask`` marks the sampled tokens; prompt, tool and padding positions are False and may contain anything.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from turnwise import recipes
from turnwise.algebra import diagnostics
from turnwise.algebra.objective import Objective
from turnwise.core.batch import Batch, Sequences
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Tree
from turnwise.core.signals import WITH_GRADIENT, Signal
from turnwise.errors import RecordError, SettingError, SignalError
from turnwise.recipes.recipe import Recipe

# a column of zeros in front: a row may begin with a sampled token, a sequence may not
PREPEND = partial(torch.nn.functional.pad, pad=(1, 0))
EMPTY = {
    (TOKEN, torch.float32): ("mass",),
    (TOKEN, torch.int64): ("version",),
    (TURN, torch.int64): ("action", "agent", "tool_calls"),
    (TRAJECTORY, torch.bool): ("truncated", "expert", "replayed", "guided"),
    (TRAJECTORY, torch.int64): ("fork",),
    (GROUP, torch.int64): ("domain",),
}


def from_padded(
    ids: Tensor,
    mask: Tensor,
    *,
    logp: Tensor,
    reward: Tensor,
    group: Tensor,
    turn: Tensor | None = None,
    **columns: Tensor,
) -> Batch:
    """A batch from the padded (B, L) tensors of other trainers.

    ``mask`` marks the sampled tokens; ``turn`` numbers the turns of each row (default: maximal runs of the mask);
    ``logp`` and ``columns`` are (B, L) too; ``reward`` (B,) is paid at the last turn; ``group`` (B,) labels the peers.
    A row without sampled tokens still counts in its group. Unmasked positions are never read, so padding may contain anything."""
    b, length = ids.shape
    mask = mask.bool()
    if turn is None:
        turn = torch.cumsum((mask & ~PREPEND(mask)[:, :-1]).long(), 1) - 1
    rows = torch.arange(b, device=ids.device)[:, None].expand(b, length)[mask]
    if bool(mask[:, 0].any()):
        raise RecordError("a row begins with a sampled token; the first position must be context")
    # a row without sampled tokens gets an empty turn with its reward, which the group's baseline includes
    without_tokens = (~mask.any(1)).nonzero().squeeze(1)
    keys = torch.cat([rows * (length + 1) + turn[mask], without_tokens * (length + 1)])
    turn_keys, turn_of = torch.unique(keys, return_inverse=True)
    owner = torch.zeros(turn_keys.numel(), dtype=torch.int64, device=ids.device)
    owner[turn_of] = torch.cat([rows, without_tokens])
    turn_of = turn_of[: rows.numel()]
    labels, group_of = torch.unique(group, return_inverse=True)
    tree = Tree(turn_of, owner, group_of, labels.numel())
    turn_reward = torch.zeros(owner.numel(), device=ids.device)
    turn_reward[tree.size(TURN, TRAJECTORY).x.cumsum(0) - 1] = reward.float()
    # what other trainers do not record: as if nothing of it had happened
    unknown: Any = {name: tree.full(level, 0, dtype) for (level, dtype), names in EMPTY.items() for name in names}
    unknown |= {name: tree.full(TRAJECTORY, -1, torch.int64) for name in ("parent", "end")}
    numbers, sampled = torch.arange(b + 1, device=ids.device), mask.reshape(-1).nonzero().squeeze(1)
    sequences = Sequences(ids.reshape(-1), numbers * length, numbers[:-1], sampled)
    return Batch(
        tree=tree,
        sequences=sequences,
        token=Field(tree, TOKEN, ids[mask]),
        behaviour=Field(tree, TOKEN, logp[mask]),
        temperature=tree.full(TURN, 1.0),
        reward=Field(tree, TURN, turn_reward),
        state=tree.full(TURN, -1, torch.int64),
        success=tree.full(TRAJECTORY, float("nan")),
        # Knuth's multiplier spreads the numbers of rows over 32 bits
        seed=Field(tree, TRAJECTORY, numbers[:-1] * 2654435761 % 2**32),
        group=Field(tree, GROUP, torch.arange(labels.numel(), device=ids.device)),
        columns={name: Field(tree, TOKEN, value[mask]) for name, value in columns.items()},
        **unknown,
    )


def to_padded(value: Field, mask: Tensor, fill: float = 0.0) -> Tensor:
    """A field as a padded (B, L) tensor, ``fill`` at positions that were not sampled. Inverse of ``from_padded``."""
    out = torch.full(mask.shape, fill, dtype=value.x.dtype, device=value.x.device)
    out[mask.bool()] = value.at(TOKEN).x
    return out


# --------------------------------------------------------------------- methods


def objective_of(method: str | Recipe | Objective, **hyper: Any) -> Objective:
    """The objective of a method. Keep it between calls if the method has memory (a dual variable, a running mean)."""
    if isinstance(method, str):
        method = recipes.build(method, **hyper)
    elif hyper:
        kind = type(method).__name__
        raise SettingError(f"hyper-parameters {sorted(hyper)} beside a complete {kind}; set them in it")
    return method.objective if isinstance(method, Recipe) else method


def advantages(
    method: str | Recipe | Objective,
    reward: Tensor,
    mask: Tensor,
    group: Tensor,
    *,
    turn: Tensor | None = None,
    **signals: Tensor,
) -> Tensor:
    """The advantage of every sampled token, (B, L), 0 elsewhere. ``reward`` (B,), ``group`` (B,) labels the peers.

    ``signals``: what else the method's credit reads, by name: ``old_value``, ``proximal``, ``reference`` (B, L) ..."""
    objective = objective_of(method)
    zeros = torch.zeros(mask.shape, dtype=reward.dtype, device=reward.device)
    batch = _batch(mask, zeros, reward, group, turn, signals)
    credited = _call_with_batch(objective.credit, batch, method)
    return to_padded(credited[Column.ADVANTAGE], PREPEND(mask)).to(reward.dtype)[:, 1:]


def loss(
    method: str | Recipe | Objective,
    logp: Tensor,
    old_logp: Tensor,
    mask: Tensor,
    *,
    advantages: Tensor | None = None,
    reward: Tensor | None = None,
    group: Tensor | None = None,
    turn: Tensor | None = None,
    **signals: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """The loss to minimise and its metrics. Pass ``advantages`` (B,) or (B, L), or ``reward`` and ``group`` to compute them.
    The tensors are one whole optimiser step: the method averages over all of it.

    ``signals``: what else the method reads, by name. ``entropy``, ``value`` and ``twin`` may carry gradients."""
    objective = objective_of(method)
    if (advantages is None) == (reward is None or group is None):
        raise SettingError("write either advantages=..., or both reward=... and group=...")
    rows = mask.shape[0]
    outcome = torch.zeros(rows, dtype=logp.dtype, device=logp.device) if reward is None else reward
    peers = torch.arange(rows, device=logp.device) if group is None else group
    batch = _batch(mask, old_logp, outcome, peers, turn, signals)
    batch = batch.put({Signal.LOGP: Field(batch.tree, TOKEN, logp[mask.bool()].detach())})
    if advantages is None:
        batch = _call_with_batch(objective.credit, batch, method)
    else:
        per_token = advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages
        clock = batch.tree.full(BATCH, float(objective.memory.clock), torch.float64)
        objective.memory.clock += 1
        batch = batch.put(advantage=Field(batch.tree, TOKEN, per_token[mask.bool()].detach()), batch_index=clock)
    live = {"logp": logp, **{name: value for name, value in signals.items() if name in WITH_GRADIENT}}
    policy = {Signal(name): Field(batch.tree, TOKEN, value[mask.bool()]) for name, value in live.items()}
    output = _call_with_batch(lambda b: objective(objective.plan(b), policy), batch, method)
    return output.loss, diagnostics.finish({name: float(value) for name, value in output.stats.items()})


def _call_with_batch(call: Any, batch: Batch, method: Any) -> Any:
    try:
        return call(batch)
    except SignalError as fault:
        name = method if isinstance(method, str) else type(method).__name__
        raise SignalError(f"{name} reads a signal that was not passed: {fault}") from None


def _batch(
    mask: Tensor, old: Tensor, reward: Tensor, group: Tensor, turn: Tensor | None, signals: dict[str, Tensor]
) -> Batch:
    names = {str(s) for s in Signal}
    for name, value in signals.items():
        if name not in names:
            raise SettingError(f"no signal {name!r}; known: {', '.join(sorted(names))}")
        if value.shape != mask.shape:
            raise SettingError(f"{name} has shape {tuple(value.shape)}; the mask has {tuple(mask.shape)}")
    ids = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    columns = {name: PREPEND(value.detach()) for name, value in signals.items()}
    per_token: Any = {"logp": PREPEND(old.detach()), "turn": None if turn is None else PREPEND(turn)}
    return from_padded(PREPEND(ids), PREPEND(mask.bool()), reward=reward, group=group, **per_token, **columns)


__all__ = ["advantages", "from_padded", "loss", "objective_of", "to_padded"]
