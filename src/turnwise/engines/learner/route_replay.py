"""Says how a learner treats the experts that the sampler's routers chose: replayed, or not recorded.

Recorded choices are forced in ``packed_forward``. Knows batches and models; computes nothing.
"""

from __future__ import annotations

import logging

from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.engines.experts import routing_of

log = logging.getLogger(__name__)


def describe(model: PreTrainedModel) -> str:
    """A part of the learner's description; empty for a model without routers."""
    return "" if routing_of(model.get_decoder()) is None else ", experts as recorded by the sampler"


def tell_missing_routes(model: PreTrainedModel, batch: Batch) -> None:
    """Warn once if a batch that a policy sampled carries no routes: routers of sampler and learner may choose differently."""
    routing = routing_of(model.get_decoder())
    if routing is None or routing.told_missing or batch.sequences.routes is not None or bool(batch.expert.x.all()):
        return
    routing.told_missing = True
    log.warning(
        "the samples do not say which experts their routers chose (a server does not return them), so the learner's routers "
        "choose for themselves: importance ratios of a mixture of experts are noisier than with the local generator"
    )
