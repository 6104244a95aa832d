"""What a learner over several ranks cannot serve, and why. One table: a new need is one row. Imports no torch.

Knows signals and settings of a learner; does not know a method's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnwise.core.signals import Signal


@dataclass(frozen=True)
class LearnerNeeds:
    """What a run asks of its learner."""

    signals: frozenset[Signal] = frozenset()
    layer_noise: bool = False
    dtype: str = "auto"
    offload: bool = False
    resets_reference: bool = False


UNSERVED: tuple[tuple[Callable[[LearnerNeeds], bool], str], ...] = (
    (
        lambda needs: Signal.GRADIENT_NORM in needs.signals,
        "it needs the gradient norm of every single trajectory, and a gradient is spread over all ranks",
    ),
    (
        lambda needs: Signal.ACTION_VALUE in needs.signals,
        "its values of tokens are published beside the sampler's head, and ranks publish the policy alone",
    ),
    (
        lambda needs: needs.resets_reference,
        "it replaces its reference policy during the run, and ranks hold the shards of the first one",
    ),
    (
        lambda needs: needs.layer_noise,
        "it adds noise between the layers, drawn for each micro-batch, and ranks cut other micro-batches than one process",
    ),
    (
        lambda needs: needs.dtype == "fp8",
        "it learns in fp8, which needs the hand-written layers on a GPU, and sharded layers run the model's own forward there",
    ),
    (
        lambda needs: needs.offload,
        "the optimizer state is already divided among the ranks, and --offload moves only whole state",
    ),
)


def unserved_reason(needs: LearnerNeeds) -> str:
    """Why several ranks cannot serve these needs; empty if they can."""
    return "; ".join(reason for applies, reason in UNSERVED if applies(needs))
