"""Methods as functions over padded (B, L) tensors and a mask, for other trainers: none of our loop is needed.

    adv = padded.advantages("rloo", rewards, mask, group)
    loss, metrics = padded.loss("sapo", logp, old_logp, mask, advantages=adv)

``mask`` marks the sampled tokens; prompt, tool and padding positions are False and may hold anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnwise import recipes
from turnwise.algebra import diagnostics
from turnwise.algebra.objective import Objective
from turnwise.core.batch import Batch, Sequences
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Tree
from turnwise.core.signals import LIVE, Signal
from turnwise.errors import RecordError, SettingError, SignalError
from turnwise.recipes.recipe import Recipe


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
    """A batch from padded (B, L) tensors, as other trainers hold them.

    ``mask`` marks the sampled tokens; ``turn`` numbers the turns of each row (default: maximal runs of the mask);
    ``logp`` and ``columns`` are (B, L) too; ``reward`` (B,) is paid at the last turn; ``group`` (B,) labels the peers.
    A row without sampled tokens still counts among its peers. Only real rows are read, so padding may hold anything."""
    b, length = ids.shape
    mask = mask.bool()
    if turn is None:
        turn = torch.cumsum((mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]).long(), 1) - 1
    rows = torch.arange(b, device=ids.device)[:, None].expand(b, length)[mask]
    if bool(mask[:, 0].any()):
        raise RecordError("a row begins with a sampled token; the first position must be context")
    silent = (~mask.any(1)).nonzero().squeeze(1)  # an empty turn each, where their reward is paid: siblings count it
    places, turn_of = torch.unique(
        torch.cat([rows * (length + 1) + turn[mask], silent * (length + 1)]), return_inverse=True
    )
    owner = torch.zeros(places.numel(), dtype=torch.int64, device=ids.device)
    owner[turn_of] = torch.cat([rows, silent])
    turn_of = turn_of[: rows.numel()]
    labels, group_of = torch.unique(group, return_inverse=True)
    tree = Tree(turn_of, owner, group_of, labels.numel())
    turns = owner.numel()
    paid = torch.zeros(turns, device=ids.device)
    paid[tree.size(TURN, TRAJECTORY).x.cumsum(0) - 1] = reward.float()
    zeros = lambda level, dtype: Field(tree, level, torch.zeros(tree.count(level), dtype=dtype, device=ids.device))  # noqa: E731
    return Batch(
        tree=tree,
        sequences=Sequences(
            ids.reshape(-1),
            torch.arange(b + 1, device=ids.device) * length,
            torch.arange(b, device=ids.device),
            mask.reshape(-1).nonzero().squeeze(1),
        ),
        token=Field(tree, TOKEN, ids[mask]),
        behaviour=Field(tree, TOKEN, logp[mask]),
        mass=zeros(TOKEN, torch.float32),
        version=zeros(TOKEN, torch.int64),
        temperature=tree.full(TURN, 1.0),
        reward=Field(tree, TURN, paid),
        state=tree.full(TURN, -1, torch.int64),
        action=zeros(TURN, torch.int64),
        agent=zeros(TURN, torch.int64),
        tool_calls=zeros(TURN, torch.int64),
        truncated=zeros(TRAJECTORY, torch.bool),
        expert=zeros(TRAJECTORY, torch.bool),
        replayed=zeros(TRAJECTORY, torch.bool),
        guided=zeros(TRAJECTORY, torch.bool),
        success=tree.full(TRAJECTORY, float("nan")),
        seed=Field(tree, TRAJECTORY, torch.arange(b, device=ids.device) * 2654435761 % 2**32),
        parent=tree.full(TRAJECTORY, -1, torch.int64),
        fork=zeros(TRAJECTORY, torch.int64),
        end=tree.full(TRAJECTORY, -1, torch.int64),
        domain=zeros(GROUP, torch.int64),
        group=Field(tree, GROUP, torch.arange(labels.numel(), device=ids.device)),
        columns={name: Field(tree, TOKEN, value[mask]) for name, value in columns.items()},
    )


def to_padded(value: Field, mask: Tensor, fill: float = 0.0) -> Tensor:
    """A field as a padded (B, L) tensor: sampled positions hold it, all others ``fill``. Inverse of ``from_padded``."""
    out = torch.full(mask.shape, fill, dtype=value.x.dtype, device=value.x.device)
    out[mask.bool()] = value.at(TOKEN).x
    return out


# --------------------------------------------------------------------- methods


def objective_of(method: str | Recipe | Objective, **hyper: Any) -> Objective:
    """The objective of a method. Keep it between calls where the method remembers something (a dual price, a running mean)."""
    if isinstance(method, str):
        method = recipes.build(method, **hyper)
    elif hyper:
        raise SettingError(
            f"hyper-parameters {sorted(hyper)} beside a finished {type(method).__name__}; set them in it"
        )
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

    ``signals``: what the method's credit reads besides, by name: ``old_value``, ``proximal``, ``reference`` (B, L) ..."""
    objective = objective_of(method)
    zeros = torch.zeros(mask.shape, dtype=reward.dtype, device=reward.device)
    batch = _batch(mask, zeros, reward, group, turn, signals)
    credited = _asking(objective.credit, batch, method)
    return to_padded(credited["advantage"], _wider(mask)).to(reward.dtype)[:, 1:]


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
    """The loss to minimise and its metrics. Give ``advantages`` (B,) or (B, L), or ``reward`` and ``group`` to have them
    computed. The tensors are one whole optimiser step: what the method averages, it averages over all of it.

    ``signals``: whatever else the method reads, by name. ``entropy``, ``value`` and ``twin`` may carry gradients."""
    objective = objective_of(method)
    if (advantages is None) == (reward is None or group is None):
        raise SettingError("write either advantages=..., or both reward=... and group=...")
    rows = mask.shape[0]
    outcome = torch.zeros(rows, dtype=logp.dtype, device=logp.device) if reward is None else reward
    peers = torch.arange(rows, device=logp.device) if group is None else group
    live = {name: value for name, value in signals.items() if name in LIVE}
    batch = _batch(mask, old_logp, outcome, peers, turn, signals)
    batch = batch.put({Signal.LOGP: Field(batch.tree, TOKEN, logp[mask.bool()].detach())})
    if advantages is None:
        batch = _asking(objective.credit, batch, method)
    else:
        wide = advantages[:, None].expand(mask.shape) if advantages.dim() == 1 else advantages
        clock = batch.tree.full(BATCH, float(objective.memory.clock), torch.float64)
        objective.memory.clock += 1
        batch = batch.put(advantage=Field(batch.tree, TOKEN, wide[mask.bool()].detach()), clock=clock)
    policy = {
        Signal(name): Field(batch.tree, TOKEN, value[mask.bool()]) for name, value in {**live, "logp": logp}.items()
    }
    found = _asking(lambda b: objective(objective.plan(b), policy), batch, method)
    return found.loss, diagnostics.finish({name: float(value) for name, value in found.stats.items()})


def _asking(call: Any, batch: Batch, method: Any) -> Any:
    try:
        return call(batch)
    except SignalError as fault:
        name = method if isinstance(method, str) else type(method).__name__
        raise SignalError(f"{name} reads a signal that was not given: {fault}") from None


def _wider(x: Tensor) -> Tensor:
    """One column in front: a row may begin with a sampled token, a sequence may not."""
    return torch.nn.functional.pad(x, (1, 0))


def _batch(
    mask: Tensor, old: Tensor, reward: Tensor, group: Tensor, turn: Tensor | None, signals: dict[str, Tensor]
) -> Batch:
    known = {str(s) for s in Signal}
    for name, value in signals.items():
        if name not in known:
            raise SettingError(f"no signal {name!r}; known: {', '.join(sorted(known))}")
        if value.shape != mask.shape:
            raise SettingError(f"{name} has shape {tuple(value.shape)}; the mask has {tuple(mask.shape)}")
    ids = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    columns = {name: _wider(value.detach()) for name, value in signals.items()}
    return from_padded(
        _wider(ids),
        _wider(mask.bool()),
        logp=_wider(old.detach()),
        reward=reward,
        group=group,
        turn=None if turn is None else _wider(turn),
        **columns,
    )


__all__ = ["advantages", "from_padded", "loss", "objective_of", "to_padded"]
