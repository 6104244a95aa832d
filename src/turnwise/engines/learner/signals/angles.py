"""How concentrated the directions of hidden states are: cosines between the inputs of the last layer's MLP, by prompt.

The context of a prompt is what all prompts begin with, its question is the rest. Knows ids and a model; no task and no sampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from turnwise.engines.attention_interface import use_eager_attention
from turnwise.errors import SettingError

BATCH = 8  # prompts of a forward pass


def concentration(hidden: Tensor, context: int) -> tuple[float, float]:
    """Mean cosine over all pairs of question tokens, and over all pairs of a question and a context token, of ``hidden`` [T, D],
    whose first ``context`` rows are the context. A mean over pairs is the product of the two mean directions."""
    directions = F.normalize(hidden.double(), dim=-1)
    question = directions[context:].mean(0)
    inter = float(question @ directions[:context].mean(0)) if context else 0.0
    return float(question @ question), inter


def last_mlp(layers: Sequence[nn.Module], name: str) -> nn.Module:
    for part in ("mlp", "feed_forward", "block_sparse_moe"):
        if (mlp := getattr(layers[-1], part, None)) is not None:
            return mlp
    raise SettingError(f"the last layer of {name} has no `mlp`, so angles of its hidden states cannot be measured")


@contextmanager
def plain_forward(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model can be called with padded ids, whichever attention an engine has given it."""
    before = model.config.get_text_config()._attn_implementation
    use_eager_attention(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def prompt_angles(
    model: PreTrainedModel, layers: Sequence[nn.Module], prompts: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """``concentration`` of each prompt."""
    same = [len(set(column)) == 1 for column in zip(*prompts)] if len(prompts) > 1 else [False]
    shared = next((n for n, equal in enumerate(same) if not equal), len(same))
    context = min(shared, min(map(len, prompts)) - 1)  # a question has at least one token
    device, angles, seen = next(model.parameters()).device, list[tuple[float, float]](), list[Tensor]()
    hook = last_mlp(layers, type(model).__name__).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        with plain_forward(model):
            for first in range(0, len(prompts), BATCH):
                part = [torch.tensor(list(prompt)) for prompt in prompts[first : first + BATCH]]
                ids, mask = (
                    pad_sequence(rows, batch_first=True) for rows in (part, [torch.ones_like(p) for p in part])
                )
                seen.clear()
                model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
                rows = seen[-1].reshape(len(part), -1, seen[-1].shape[-1])
                angles += [concentration(row[: len(prompt)], context) for row, prompt in zip(rows, part)]
    finally:
        hook.remove()
    return angles


__all__ = ["concentration", "last_mlp", "plain_forward", "prompt_angles"]
