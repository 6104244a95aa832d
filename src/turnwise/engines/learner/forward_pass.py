"""A lazy forward pass of one model over one micro-batch, shared by all signals that need its hidden states.

Legend: L packed positions, N sampled tokens, D hidden size, V vocabulary size.

Knows models and hidden states; does not know what a signal is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.core.kept_sets import KeptSets
from turnwise.core.levels import TOKEN
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.logprobs import logprobs_of, token_logprobs

CHUNK = 1 << 22  # elements in one chunk of logits [tokens, vocabulary]
ForwardContext = Callable[[], AbstractContextManager[Any]]
"""Makes the context a model runs in: autocast, adapters switched off ..."""


class ForwardPass:
    """Hidden states, log-probabilities and distributions of one model, each computed on first use."""

    def __init__(
        self,
        batch: Batch,
        model: PreTrainedModel,
        context: ForwardContext,
        after_sampled: bool = False,
        states: packed_forward.PackedStates | None = None,
    ) -> None:
        """``after_sampled``: also compute the state after each sampled token. ``states``: already computed hidden states."""
        self.batch, self.model, self.context, self.after_sampled = batch, model, context, after_sampled
        self._token_logp: tuple[Tensor, Tensor | None] | None = None
        if states is not None:
            self.states = states

    @cached_property
    def states(self) -> packed_forward.PackedStates:
        """Inputs of the LM head at packed positions."""
        with self.context():
            if self.batch.sequences.ids.numel():
                return packed_forward.packed_states(self.model, self.batch.sequences, self.after_sampled)
            return packed_forward.PackedStates(
                next(self.model.get_input_embeddings().parameters())[:0], self.batch.sequences.ids
            )

    @cached_property
    def _before_in_compute_dtype(self) -> Tensor:
        """``before`` in the compute dtype: the operand of the LM head."""
        return self.states.at(self.batch.sequences.sampled_at - 1)

    @cached_property
    def before(self) -> Tensor:
        """The state each token was sampled from, [N, D], in the dtype of sums."""
        return self._before_in_compute_dtype.to(self._wide)

    @cached_property
    def after(self) -> Tensor:
        """The state after the model has read the token itself, [N, D], in the dtype of sums."""
        assert self.after_sampled, "this forward pass stopped before the last sampled tokens"
        return self.states.at(self.batch.sequences.sampled_at).to(self._wide)

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of sums: that of the weights, and float32 for frozen weights in half precision."""
        return torch.promote_types(next(self.model.parameters()).dtype, torch.float32)

    def logp(self, want_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [N] of the sampled tokens, each over the ids that its sampler kept where these are recorded, and with
        ``want_entropy`` the entropies [N] over the whole vocabulary."""
        if self._token_logp is None or (want_entropy and self._token_logp[1] is None):
            self._token_logp = self._logp_over(self.batch.sequences.kept, want_entropy)
        return self._token_logp

    def logp_over_vocabulary(self) -> Tensor:
        """Log-probabilities [N] of the sampled tokens over the whole vocabulary, whatever their samplers kept."""
        return self.logp()[0] if self.batch.sequences.kept is None else self._logp_over(None, False)[0]

    def _logp_over(self, sets: KeptSets | None, want_entropy: bool) -> tuple[Tensor, Tensor | None]:
        target, temperature = self.batch.token.x, self.batch.temperature.at(TOKEN).x
        head, states = packed_forward.lm_head(self.model), self._before_in_compute_dtype
        with self.context():
            if packed_forward.has_own_head(self.model):
                logits = partial(packed_forward.own_logits, self.model)
                return logprobs_of(logits, states, head.weight, target, temperature, want_entropy, sets)
            return token_logprobs(
                states, head.weight, head.bias, target, temperature, want_entropy=want_entropy, sets=sets
            )

    # -------------------------------------------------- full distributions
    @cached_property
    def inverse_temperature(self) -> Tensor:
        """1/temperature of each token; greedy turns count as temperature 1."""
        t = self.batch.temperature.at(TOKEN).x.to(self.before.dtype)
        return torch.where(t == 0, 1.0, t).reciprocal()

    def distributions(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, their log-probabilities over the whole vocabulary [rows, V]), one chunk of tokens at a time."""
        size = max(1, CHUNK // max(1, packed_forward.lm_head(self.model).weight.shape[0]))
        for a in range(0, self.before.shape[0], size):
            rows = slice(a, a + size)
            z = packed_forward.logits_of(self.model, self.before[rows])
            yield rows, torch.log_softmax(z * self.inverse_temperature[rows, None], 1)
