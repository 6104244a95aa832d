"""Lets the learner multiply a mixture's experts in its compute dtype, where that gives the logits of the loop over experts.

Compared twice on random ids: in the weights' precision, where only the order of sums differs, and on a GPU under autocast with
the experts that the routers chose before, where only rounding differs. Knows models and logits; neither batches nor objectives.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.engines.experts import COMPUTE_DTYPE, EAGER, expert_configs, routing_of, use, using

log = logging.getLogger(__name__)

TOLERANCE = 1e-3  # of the largest logit, in the precision of the weights ...
HALF_TOLERANCE = 0.05  # ... and where products round to half precision


def prepare(model: PreTrainedModel, ids: Tensor) -> None:
    """Compute the experts of this model by grouped products in the compute dtype, or where that fails as it did before."""
    configs = expert_configs(model)
    if not configs:
        return
    before = configs[0]._experts_implementation
    use(model, COMPUTE_DTYPE)
    try:
        fault = fault_of(model, ids, half=ids.is_cuda)
    except (RuntimeError, TypeError, AttributeError, KeyError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        fault = (str(error).splitlines() or [type(error).__name__])[0]
    if fault:
        use(model, before)
        log.warning("the learner computes experts of %s by %s: %s", type(model).__name__, before, fault)


@torch.no_grad()
def fault_of(model: PreTrainedModel, ids: Tensor, half: bool) -> str:
    """What is wrong with the logits of these experts on ids [L]; empty if nothing. ``half``: also under autocast."""
    routing = routing_of(model.get_decoder())
    logits = lambda: model(input_ids=ids[None], use_cache=False).logits[0].float()  # noqa: E731
    with using(expert_configs(model), EAGER):
        expected = logits()
    off = _gap(logits(), expected)
    if not off <= TOLERANCE:
        return f"in the compute dtype their logits were off by {off:.2g}"
    if not half or routing is None:
        return ""
    with routing.recording() as chosen, using(expert_configs(model), EAGER):
        logits()
    with routing.forcing(chosen()), torch.autocast(ids.device.type, torch.bfloat16):
        off = _gap(logits(), expected)
    return "" if off <= HALF_TOLERANCE else f"in half precision their logits were off by {off:.2g}"


def _gap(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / (1e-6 + expected.abs().max()))


__all__ = ["fault_of", "prepare"]
