"""What is decided by the device alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from turnwise.engines.kernels import dispatch


@pytest.mark.parametrize(("kind", "told"), [("cpu", []), ("cuda", [1])])
def test_the_host_beside_a_gpu_keeps_to_one_thread(monkeypatch, kind, told):
    said: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", said.append)
    dispatch.limit_host_threads(torch.device(kind))
    assert said == told


@pytest.mark.parametrize(("gib", "ids"), [(24, 16384), (80, 24576)])
def test_a_gpu_with_room_reads_more_at_once(monkeypatch, gib, ids):
    card = lambda device: SimpleNamespace(total_memory=gib << 30)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", card)
    assert dispatch.default_micro_batch(torch.device("cuda")) == ids
    assert dispatch.default_micro_batch(torch.device("cpu")) == 8192


def test_attention_on_a_cpu_is_not_tritons():
    assert dispatch.attention_for(torch.zeros(2, 3), 64) is None
