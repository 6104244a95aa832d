"""What the hand-written layers keep for the backward pass is what the estimate of memory counts."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise.core.batch import Sequences
from turnwise.engines.learner import packed_forward
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.memory import ModelShape

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": None, "num_attention_heads": 4,
}  # fmt: skip
IDS = 480


@pytest.mark.parametrize(("mlp", "keys"), [(224, 2), (160, 4), (480, 1)])
def test_the_layers_keep_what_is_counted(mlp, keys):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, intermediate_size=mlp, num_key_value_heads=keys))
    shape = ModelShape.of(model.config, sum(p.numel() for p in model.parameters()))
    learner = LocalLearner(model, LearnerSettings(dtype="bfloat16"))
    assert "hand-written layers" in learner.describe()
    own = {t.untyped_storage().data_ptr() for t in (*learner.model.parameters(), *learner.model.buffers())}
    kept: list[torch.Tensor] = []
    ids, start = torch.arange(IDS) % 64, torch.tensor([0, IDS])
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        packed_forward.packed_states(
            learner.model, Sequences(ids, start, torch.arange(1), start[:0]), all_positions=True
        )
    sizes = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in kept) if s.data_ptr() not in own}
    ends = (
        4 * IDS * 64 + 2 * 4 * IDS * 8 + 4 * 4 * IDS * 4 + 8 * IDS
    )  # last norm, rotary angles, sums of attention, ids
    counted = shape.kept(IDS, 2, recompute=False)
    assert counted < sum(sizes.values()) <= counted + ends
