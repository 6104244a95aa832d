"""The critic: value heads for tokens, value heads for whole turns with their target network, and the trunk they read.

    VALUE, SECOND_VALUE  read the state a token is sampled from     V, SECOND_V  the state before a turn's first token
    ACTION_VALUE         the same, with a head for each token of the vocabulary: that of the sampled one
    Q, SECOND_Q          the state after a turn's last token        TARGET_…     the same by targets φ̄ ← (1 − τ) φ̄ + τ φ

A shared critic reads the policy's hidden states: the gradient of VALUE and SECOND_VALUE flows into the policy, except in steps
that train critics alone; that of the others does not. A separate critic has its own trunk, a copy of the initial policy, and its
gradient stays there.

Knows hidden states and turns; knows neither rewards nor losses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TURN, Field
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.engines import compat
from turnwise.engines.learner.packed_forward import ForwardPass
from turnwise.errors import SettingError

TOKEN_VALUES = (Signal.VALUE, Signal.SECOND_VALUE)
STATE_VALUES = frozenset({Signal.V, Signal.SECOND_V})
INNER = 256  # hidden width of a turn head
M = TypeVar("M", bound=nn.Module)


class ValueHeads:
    """``heads`` token heads (−1: one for each token of the vocabulary) and, with ``turns``, turn heads and their targets."""

    def __init__(self, model: PreTrainedModel, like: Tensor, heads: int, turns: bool, separate: bool) -> None:
        """``like`` [V, D]: the LM head's weight, for width, device and dtype."""
        needs_trunk = separate and (bool(heads) or turns)
        self.trunk: PreTrainedModel | None = copy.deepcopy(model.get_decoder()) if needs_trunk else None
        self.of_actions = heads < 0
        heads = like.shape[0] if self.of_actions else heads
        self.token_heads = _zero_init(nn.Linear(like.shape[1], heads, not self.of_actions)).to(like) if heads else None
        self.turn_heads: nn.ModuleDict | None = None
        if turns:  # an MLP for each of Q, V and their second heads: all start at output 0, with different hidden layers
            inner = lambda: (nn.Linear(like.shape[1], INNER), nn.ReLU(), nn.Linear(INNER, INNER), nn.ReLU())  # noqa: E731
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # the same heads on every machine and in every process
                heads_of = {str(s): nn.Sequential(*inner(), _zero_init(nn.Linear(INNER, 1))) for s in TURN_CRITIC}
            self.turn_heads = nn.ModuleDict(heads_of).to(like)
        self.target_trunk = frozen_copy(self.trunk) if turns and self.trunk is not None else None
        self.target_turn_heads = None if self.turn_heads is None else frozen_copy(self.turn_heads)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters by name. The prefixes are keys of saved states."""
        for prefix, module in (("value", self.token_heads), ("turns", self.turn_heads), ("critic", self.trunk)):
            if module is not None:
                yield from ((f"{prefix}/{n}", p) for n, p in module.named_parameters())

    # ------------------------------------------------------------ estimates
    def estimates(self, forward: ForwardPass, signals: frozenset[Signal]) -> dict[Signal, Field]:
        """Estimates of the trained critic. ``forward``: the trunk's pass, or the policy's for a shared critic."""
        self._require_heads(signals)
        out: dict[Signal, Field] = {}
        if self.token_heads is not None and signals & set(TOKEN_VALUES):
            # in steps that train critics alone, a shared critic does not move the policy
            frozen = self.trunk is None and Column.FREEZE_POLICY in forward.batch.columns
            before = forward.before.detach() if frozen else forward.before
            values = self.token_heads(before.to(self.token_heads.weight.dtype)).unbind(1)
            out |= {s: Field(forward.batch.tree, TOKEN, x) for s, x in zip(TOKEN_VALUES, values)}
        if Signal.ACTION_VALUE in signals and self.token_heads is not None:
            rows = self.token_heads.weight[forward.batch.token.x]
            out[Signal.ACTION_VALUE] = Field(
                forward.batch.tree, TOKEN, (rows * forward.before.detach().to(rows)).sum(1)
            )
        if self.turn_heads is not None and signals & set(TURN_CRITIC):
            out |= turn_estimates(self.turn_heads, forward, signals, detach=self.trunk is None)
        return out

    def target_estimates(self, forward: ForwardPass, signals: frozenset[Signal]) -> dict[Signal, Field]:
        """Estimates of the target network."""
        live_of = {target: live for target, live in zip(TURN_CRITIC_TARGET, TURN_CRITIC) if target in signals}
        self._require_heads(frozenset(live_of.values()))
        assert self.target_turn_heads is not None
        estimates = turn_estimates(self.target_turn_heads, forward, frozenset(live_of.values()), detach=True)
        return {target: estimates[live] for target, live in live_of.items()}

    def _require_heads(self, signals: frozenset[Signal]) -> None:
        heads = 0 if self.token_heads is None or self.of_actions else self.token_heads.out_features
        needed = 2 if Signal.SECOND_VALUE in signals else 1 if Signal.VALUE in signals else 0
        wrong = ""
        if Signal.ACTION_VALUE in signals and not self.of_actions:
            wrong = "values of tokens were requested from a learner without a head for each; write critic=-1"
        elif heads < needed:
            wrong = f"token values were requested from a learner with {heads} value heads; write critic=1, or 2 for a second one"
        elif signals & set(TURN_CRITIC) and self.turn_heads is None:
            wrong = "values of turns were requested from a learner without turn heads; write turn_critic=True"
        if wrong:
            raise SettingError(wrong)

    # -------------------------------------------------------- target network
    @torch.no_grad()
    def update_targets(self, tau: float) -> None:
        """Polyak averaging: φ̄ ← (1 − τ) φ̄ + τ φ."""
        for target, live in ((self.target_trunk, self.trunk), (self.target_turn_heads, self.turn_heads)):
            if target is not None and live is not None:
                compat.foreach_lerp_(list(target.parameters()), list(live.parameters()), tau)

    def target_tensors(self) -> dict[str, Tensor]:
        modules = (("turns", self.target_turn_heads), ("critic", self.target_trunk))
        return {f"{prefix}/{n}": p for prefix, m in modules if m is not None for n, p in m.named_parameters()}


def turn_estimates(
    heads: nn.ModuleDict, forward: ForwardPass, signals: frozenset[Signal], detach: bool
) -> dict[Signal, Field]:
    """Estimates at TURN level; 0 for turns without tokens."""
    count = forward.batch.tree.size(TOKEN, TURN).x
    turns = (count > 0).nonzero().squeeze(1)  # those that have tokens
    end = count.cumsum(0)[turns]
    first, last = end - count[turns], end - 1  # tokens of each
    out: dict[Signal, Field] = {}
    for signal in TURN_CRITIC:
        if signal in signals:
            state = forward.before[first] if signal in STATE_VALUES else forward.after[last]
            state = state.detach() if detach else state
            value = heads[signal](state.to(next(heads.parameters()).dtype)).squeeze(1)
            zeros = value.new_zeros(forward.batch.tree.count(TURN))
            out[signal] = Field(forward.batch.tree, TURN, zeros.index_copy(0, turns, value))
    return out


def _zero_init(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def frozen_copy(module: M) -> M:
    return copy.deepcopy(module).requires_grad_(False)
