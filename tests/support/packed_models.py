"""What the tests of packed forwards share: models of the Llama family, ragged sequences, states with their gradients."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from turnwise.core.batch import Sequences
from turnwise.engines.learner import packed_forward

FAMILY = ["llama", "llama_tied", "qwen3", "qwen2"]
RAGGED = [40, 3, 17, 1, 64, 40, 9]


def make(kit, name):
    if name != "qwen2":
        return kit.make_model(name)
    torch.manual_seed(0)
    sizes = {"vocab_size": kit.vocabulary, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.2)  # biases begin at 0, where an error would not show
    return model


def sequences(lengths, vocabulary, device="cpu", shared=0):
    ids = torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    start = torch.tensor([0, *lengths]).cumsum(0)
    for a, b in zip(start[:-1].tolist(), start[1:].tolist()):
        ids[a : min(b, a + shared)] = torch.arange(shared)[: b - a]
    return Sequences(ids.to(device), start.to(device), torch.arange(len(lengths), device=device), start[:0].to(device))


def pulled(model, s, kind=None, seed=1):
    """States, and the gradient of a random projection of them by every weight."""
    device = s.ids.device.type
    with torch.autocast(device, kind, enabled=kind is not None):
        states = packed_forward.hidden_states(model, s)
    weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed)).to(device)
    model.zero_grad()
    (states.float() * weight).sum().backward()
    return states.detach().float(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def alike(found, expected, tolerance):
    assert found[1].keys() == expected[1].keys()
    assert (found[0] - expected[0]).norm() <= tolerance * expected[0].norm()
    for name, grad in expected[1].items():
        assert (found[1][name] - grad).norm() <= tolerance * grad.norm() + 1e-6, name
