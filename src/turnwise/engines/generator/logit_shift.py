"""Requests that are sampled by another distribution than the model's: log-probabilities shifted by what a function of the ids
says, or logits steered by values.

Values come out of the LM head: ``with_value_rows`` gives a model a head of twice as many rows, of which the second half holds the
value of each token. The recorded log-probability is that of the distribution that was sampled from. Knows ids and logits; not why
they are shifted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.errors import SettingError

LogitShift = Callable[[Sequence[int]], Mapping[int, float]]
"""What is added to the log-probabilities of the next token, by id, after these ids."""


class Steering(Protocol):
    """logit(a) + ``weight`` · (value(a) − their mean) for the ``candidates`` most likely tokens."""

    @property
    def weight(self) -> float: ...

    @property
    def candidates(self) -> int: ...


class Tempering(Protocol):
    """The temperature T of each token is T·(1 + ``tau``·h): h is log H − ``middle`` over ``above`` or ``below``, at most ±1; H is
    the entropy at T."""

    @property
    def tau(self) -> float: ...

    @property
    def middle(self) -> float: ...

    @property
    def above(self) -> float: ...

    @property
    def below(self) -> float: ...


class LaneShifts:
    """The shifts of the lanes of one batch; does nothing where no request has any. ``vocabulary``: entries of a row of logits."""

    def __init__(self, lanes: Sequence[Any], vocabulary: int) -> None:
        shifted = [(i, r) for i, r in enumerate(lanes) if r.shift is not None]
        self.vocabulary = vocabulary
        self._tempered = [(i, r.shift, r.sampling.temperature or 1.0) for i, r in shifted if hasattr(r.shift, "tau")]
        self._steered = [(i, r.shift) for i, r in shifted if hasattr(r.shift, "candidates")]
        by_ids = [(i, r) for i, r in shifted if callable(r.shift)]
        self._lanes = [(i, r.shift, list(r.sequence), r.sampling.temperature or 1.0) for i, r in by_ids]

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [n, V], shifted; values [n, V] may follow them. A temperature divides logits later, so a shift of
        log-probabilities is multiplied by it."""
        logits, values = logits[:, : self.vocabulary], logits[:, self.vocabulary :]
        for i, steering in self._steered:
            if not values.shape[1]:
                raise SettingError("this generator's model has no values to steer by; make it with with_value_rows")
            logits[i] = steered(logits[i], values[i], steering.weight, steering.candidates)
        for i, rule, temperature in self._tempered:
            logits[i] = tempered(logits[i], temperature, rule)
        for i, shift, ids, temperature in self._lanes:
            shifts = shift(ids)
            if shifts:
                values = logits.new_tensor([x * temperature for x in shifts.values()])
                logits[i] = logits[i].index_add(0, logits.new_tensor(list(shifts)).long(), values)
        return logits

    def append(self, tokens: Tensor) -> None:
        """Go on after the tokens [n] that were sampled."""
        drawn = tokens.tolist() if self._lanes else []
        for i, _, ids, _ in self._lanes:
            ids.append(drawn[i])


def steered(logits: Tensor, values: Tensor, weight: float, candidates: int) -> Tensor:
    """Logits [V] with weight · (value − mean of the candidates' values) added for the most likely tokens."""
    top = logits.topk(min(candidates, logits.numel())).indices
    top_values = values[top].to(logits.dtype)
    return logits.index_add(0, top, weight * (top_values - top_values.mean()))


def tempered(logits: Tensor, temperature: float, rule: Tempering) -> Tensor:
    """Logits [V] over 1 + tau·h; the temperature itself divides them later."""
    logp = torch.log_softmax(logits.float() / temperature, -1)
    entropy = -torch.where(logp > -torch.inf, logp.exp() * logp, 0.0).sum()
    h = entropy.clamp(min=1e-8).log() - rule.middle
    h = torch.where(h > 0, h / max(rule.above, 1e-30), h / max(rule.below, 1e-30)).clamp(-1, 1)
    return logits / (1 + rule.tau * h).to(logits.dtype)


def with_value_rows(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose LM head has twice as many rows; values are 0 until weights are published."""
    out = copy.deepcopy(model)
    head = out.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise SettingError(f"{type(model).__name__} has no plain LM head to add values to; take another model")
    wide = nn.Linear(head.in_features, 2 * head.out_features, bias=False).to(head.weight)
    with torch.no_grad():
        wide.weight.copy_(torch.cat([head.weight, torch.zeros_like(head.weight)]))
    out.config.get_text_config().tie_word_embeddings = False
    out.set_output_embeddings(wide)
    return out
