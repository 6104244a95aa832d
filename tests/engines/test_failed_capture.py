"""A capture that fails leaves stream, memory pool and later captures as they were."""

from __future__ import annotations

import pytest
import torch

from turnwise.engines.capture import GraphCapture, exclusive

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_after_a_failed_capture_the_next_one_succeeds():
    captures, x = GraphCapture(), torch.ones(1000, device="cuda")
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError), captures.into(torch.cuda.CUDAGraph()):
        (x * 2).sum().item()  # a host sync: not allowed inside a capture
    assert torch.cuda.current_stream() == before
    graph = torch.cuda.CUDAGraph()
    with captures.into(graph):
        y = x * 2 + 1
    x.fill_(3.0)
    graph.replay()
    assert (y == 7).all()
    with exclusive():  # a lock that was given back
        pass
