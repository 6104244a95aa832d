"""The file backend inside vLLM, without vLLM: a tied head packs its weight again, and nothing else does."""

from __future__ import annotations

import torch
from torch import nn

from turnwise.engines.remote.vllm_plugin import repack_tied


class PackingMethod:
    """Multiplies by a copy, as vLLM's CPU kernels do."""

    def process_weights_after_loading(self, layer):
        layer.packed = layer.weight.detach().clone()
        layer.times = getattr(layer, "times", 0) + 1


class Layer(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2)) if weight is None else weight
        self.quant_method = PackingMethod()
        self.quant_method.process_weights_after_loading(self)


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding, self.norm = Layer(), nn.LayerNorm(2)
        self.head = Layer(self.embedding.weight if tied else None)

    def reload(self, value):
        """What vLLM does: the layers that get weights pack them; a tied head gets none."""
        for layer in {self.embedding, self.head} if self.head.weight is not self.embedding.weight else {self.embedding}:
            layer.weight.data.fill_(value)
            layer.quant_method.process_weights_after_loading(layer)


def test_a_tied_head_takes_over_every_publication():
    model = Model(tied=True)
    for value in (1.0, 2.0, 1.0):
        model.reload(value)
        assert not (model.head.packed == value).all(), "the fault that repacking repairs is gone"
        repack_tied(model)
        assert (model.head.packed == value).all() and (model.embedding.packed == value).all()


def test_an_untied_head_is_packed_once_for_each_publication():
    model = Model(tied=False)
    model.reload(1.0)
    repack_tied(model)
    assert (model.head.times, model.embedding.times) == (2, 2) and (model.head.packed == 1.0).all()
