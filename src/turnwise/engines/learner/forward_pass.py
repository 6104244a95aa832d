"""One micro-batch as one model reads it: a single pass, taken when first asked for, that all signals share.

Legend: L packed positions, N sampled tokens, D width, V vocabulary.

Knows models and states; not what a signal is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.logprobs import token_logprobs

CHUNK = 1 << 22  # numbers in one chunk of [tokens, vocabulary]
During = Callable[[], AbstractContextManager[Any]]
"""What holds while a model reads: its arithmetic, adapters switched off ..."""


class Reading:
    def __init__(
        self,
        batch: Batch,
        model: PreTrainedModel,
        during: During,
        through: bool = False,
        states: packed_forward.States | None = None,
    ) -> None:
        """``through``: the state after each sampled token is wanted too. ``states``: where they are there already."""
        self.batch, self.model, self.during, self.through = batch, model, during, through
        self._scored: tuple[Tensor, Tensor | None] | None = None
        if states is not None:
            self.states = states

    @cached_property
    def states(self) -> packed_forward.States:
        """What the head would read at packed positions."""
        with self.during():
            if self.batch.sequences.ids.numel():
                return packed_forward.read(self.model, self.batch.sequences, self.through)
            return packed_forward.States(
                next(self.model.get_input_embeddings().parameters())[:0], self.batch.sequences.ids
            )

    @cached_property
    def _rounded(self) -> Tensor:
        """``before`` as the model's arithmetic left it: what its head multiplies."""
        return self.states.at(self.batch.sequences.at - 1)

    @cached_property
    def before(self) -> Tensor:
        """The state each token was sampled from, [N, D], in the precision of the weights."""
        return self._rounded.to(next(self.model.parameters()).dtype)

    @cached_property
    def after(self) -> Tensor:
        """The state once the token itself was read, [N, D], in the precision of the weights."""
        assert self.through, "this reading stopped before the last sampled tokens"
        return self.states.at(self.batch.sequences.at).to(next(self.model.parameters()).dtype)

    def logp(self, want_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the sampled tokens and, where wanted, the entropies, [N]."""
        if self._scored is None or (want_entropy and self._scored[1] is None):
            head, target, temperature = (
                packed_forward.head(self.model),
                self.batch.token.x,
                self.batch.temperature.at(TOKEN).x,
            )
            with self.during():
                self._scored = token_logprobs(
                    self._rounded, head.weight, head.bias, target, temperature, want_entropy=want_entropy
                )
        return self._scored

    # ------------------------------------------------- whole distributions
    @cached_property
    def inverse(self) -> Tensor:
        """1/temperature of each token; greedy turns count as temperature 1."""
        t = self.batch.temperature.at(TOKEN).x.to(self.before.dtype)
        return torch.where(t == 0, 1.0, t).reciprocal()

    def distributions(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, log-probabilities of the whole vocabulary for them [rows, V]), a few tokens at a time."""
        head = packed_forward.head(self.model)
        size = max(1, CHUNK // max(1, head.weight.shape[0]))
        for a in range(0, self.before.shape[0], size):
            rows = slice(a, a + size)
            z = torch.nn.functional.linear(self.before[rows], head.weight, head.bias)
            yield rows, torch.log_softmax(z * self.inverse[rows, None], 1)
