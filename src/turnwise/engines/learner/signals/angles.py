"""How concentrated the directions of hidden states are: cosines between the inputs of the last layer's MLP, by prompt.

The context of a prompt is what all prompts begin with, its question is the rest. Knows ids and a model; no task and no sampler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from turnwise.engines.attention_interface import use_eager_attention
from turnwise.errors import SettingError

BATCH = 8  # prompts of a forward pass
MLPS = ("mlp", "feed_forward", "block_sparse_moe")  # what models call it


def concentration(hidden: Tensor, context: int) -> tuple[float, float]:
    """Mean cosine over all pairs of question tokens, and over all pairs of a question and a context token, of ``hidden`` [T, D],
    whose first ``context`` rows are the context. A mean over pairs is the product of the two mean directions."""
    directions = F.normalize(hidden.double(), dim=-1)
    question = directions[context:].mean(0)
    inter = float(question @ directions[:context].mean(0)) if context else 0.0
    return float(question @ question), inter


@torch.no_grad()
def prompt_angles(
    model: PreTrainedModel, layers: Sequence[nn.Module], prompts: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    """``concentration`` of each prompt."""
    same = [len(set(column)) == 1 for column in zip(*prompts)] if len(prompts) > 1 else [False]
    shared = next((n for n, equal in enumerate(same) if not equal), len(same))
    context = min(shared, min(map(len, prompts)) - 1)  # a question has at least one token
    device, angles, seen = next(model.parameters()).device, list[tuple[float, float]](), list[Tensor]()
    mlps = [mlp for part in MLPS if (mlp := getattr(layers[-1], part, None)) is not None]
    if not mlps:
        raise SettingError(
            f"the last layer of {type(model).__name__} has no `mlp`, so angles of its hidden states cannot be measured"
        )
    hook = mlps[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    attention = model.config.get_text_config()._attn_implementation
    use_eager_attention(model)  # for padded ids, whichever attention an engine has given it
    try:
        for first in range(0, len(prompts), BATCH):
            part = [torch.tensor(list(prompt)) for prompt in prompts[first : first + BATCH]]
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
