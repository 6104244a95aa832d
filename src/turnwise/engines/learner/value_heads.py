"""Value estimates: heads for tokens, heads for whole turns with slow copies, and the trunk they read.

    VALUE, TWIN  read the state a token is sampled from            V, V_TWIN  the state before a turn's first token
    Q, Q_TWIN    the state once a turn's last token was read       SLOW_…     the same by copies φ̄ ← (1 − τ) φ̄ + τ φ

A shared critic reads the policy's states: token heads send their gradient into them, turn heads never do. A separate one
reads a trunk of its own, a copy of the initial policy, and sends its gradient there alone.

Knows states and turns; neither rewards nor losses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TURN, Field
from turnwise.core.signals import SLOW, UTTERANCE, Signal
from turnwise.engines.learner.forward_pass import Reading
from turnwise.errors import SettingError

TOKENWISE = (Signal.VALUE, Signal.TWIN)
STATEWISE = frozenset({Signal.V, Signal.V_TWIN})
INNER = 256  # width inside a turn head
M = TypeVar("M", bound=nn.Module)


class Critics:
    """All of them, or none: ``heads`` for tokens, ``turns`` whether turns are judged too."""

    def __init__(self, model: PreTrainedModel, like: Tensor, heads: int, turns: bool, separate: bool) -> None:
        """``like`` [V, D]: the policy's head, for width, device and precision."""
        wanted = bool(heads) or turns
        self.trunk: PreTrainedModel | None = copy.deepcopy(model.get_decoder()) if separate and wanted else None
        self.value = _zero(nn.Linear(like.shape[1], heads)).to(like) if heads else None
        self.judge = turn_heads(like.shape[1]).to(like) if turns else None
        self.slow_trunk = frozen(self.trunk) if turns and self.trunk is not None else None
        self.slow_judge = None if self.judge is None else frozen(self.judge)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained, by name."""
        for room, module in (("value", self.value), ("turns", self.judge), ("critic", self.trunk)):
            if module is not None:
                yield from ((f"{room}/{n}", p) for n, p in module.named_parameters())

    # ------------------------------------------------------------ estimates
    def estimates(self, reading: Reading, wanted: frozenset[Signal]) -> dict[Signal, Field]:
        """Of the live critic. ``reading``: the trunk's own, or the policy's where it is shared."""
        self._can_tell(wanted)
        out: dict[Signal, Field] = {}
        if self.value is not None and wanted & set(TOKENWISE):
            values = self.value(reading.before.to(self.value.weight.dtype)).unbind(1)
            out |= {s: Field(reading.batch.tree, TOKEN, x) for s, x in zip(TOKENWISE, values)}
        if self.judge is not None and wanted & set(UTTERANCE):
            out |= judged(self.judge, reading, wanted, detach=self.trunk is None)
        return out

    def slow(self, reading: Reading, wanted: frozenset[Signal]) -> dict[Signal, Field]:
        """Of the slow copies."""
        live = {slow: live for slow, live in zip(SLOW, UTTERANCE) if slow in wanted}
        self._can_tell(frozenset(live.values()))
        assert self.slow_judge is not None
        found = judged(self.slow_judge, reading, frozenset(live.values()), detach=True)
        return {slow: found[live] for slow, live in live.items()}

    def _can_tell(self, wanted: frozenset[Signal]) -> None:
        heads = 0 if self.value is None else self.value.out_features
        if wanted & set(TOKENWISE) and heads < (2 if Signal.TWIN in wanted else 1):
            raise SettingError(
                f"values were asked of a learner with {heads} value heads; write critic=1, or 2 for twins"
            )
        if wanted & set(UTTERANCE) and self.judge is None:
            raise SettingError("values of whole turns were asked of a learner that judges none; write turn_critic=True")

    # ----------------------------------------------------------- slow copies
    @torch.no_grad()
    def follow(self, tau: float) -> None:
        for slow, live in ((self.slow_trunk, self.trunk), (self.slow_judge, self.judge)):
            if slow is not None and live is not None:
                torch._foreach_lerp_(list(slow.parameters()), list(live.parameters()), tau)

    def slow_tensors(self) -> dict[str, Tensor]:
        rooms = (("turns", self.slow_judge), ("critic", self.slow_trunk))
        return {f"{room}/{n}": p for room, m in rooms if m is not None for n, p in m.named_parameters()}


def turn_heads(width: int) -> nn.ModuleDict:
    """A small network for each of Q, V and their twins. They begin at 0 and apart: twins differ inside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same on every machine and at every start
        return nn.ModuleDict(
            {
                str(signal): nn.Sequential(
                    nn.Linear(width, INNER), nn.ReLU(), nn.Linear(INNER, INNER), nn.ReLU(), _zero(nn.Linear(INNER, 1))
                )
                for signal in UTTERANCE
            }
        )


def judged(heads: nn.ModuleDict, reading: Reading, wanted: frozenset[Signal], detach: bool) -> dict[Signal, Field]:
    """TURN estimates; 0 for turns without tokens."""
    first, last, turns = ends(reading.batch)
    out: dict[Signal, Field] = {}
    for signal in UTTERANCE:
        if signal in wanted:
            state = reading.before[first] if signal in STATEWISE else reading.after[last]
            state = state.detach() if detach else state
            value = heads[signal](state.to(next(heads.parameters()).dtype)).squeeze(1)
            zeros = value.new_zeros(reading.batch.tree.count(TURN))
            out[signal] = Field(reading.batch.tree, TURN, zeros.index_copy(0, turns, value))
    return out


def ends(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """First token, last token and number of each turn that has tokens."""
    count = batch.tree.size(TOKEN, TURN).x
    turns = (count > 0).nonzero().squeeze(1)
    behind = count.cumsum(0)[turns]
    return behind - count[turns], behind - 1, turns


def _zero(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def frozen(module: M) -> M:
    return copy.deepcopy(module).requires_grad_(False)
