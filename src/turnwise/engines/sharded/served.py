"""What a learner over several ranks cannot serve, and why. One table: a new need is one row. Imports no torch.

Knows signals and settings of a learner; does not know a method's name.
"""

from __future__ import annotations

from turnwise.core.signals import Signal


def unserved_reason(
    signals: frozenset[Signal], layer_noise: bool = False, dtype: str = "auto", offload: bool = False,
    resets_reference: bool = False,
) -> str:  # fmt: skip
    """Why several ranks cannot serve what a run asks of its learner; empty if they can."""
    table = (
        (Signal.GRADIENT_NORM in signals,
         "it needs the gradient norm of every single trajectory, and a gradient is spread over all ranks"),
        (Signal.ACTION_VALUE in signals,
         "its values of tokens are published beside the sampler's head, and ranks publish the policy alone"),
        (resets_reference, "it replaces its reference policy during the run, and ranks hold the shards of the first one"),
        (layer_noise,
         "it adds noise between the layers, drawn for each micro-batch, and ranks cut other micro-batches than one process"),
        (dtype == "fp8",
         "it learns in fp8, which needs the hand-written layers on a GPU, and sharded layers run the model's own forward there"),
        (offload, "the optimizer state is already divided among the ranks, and --offload moves only whole state"),
    )  # fmt: skip
    return "; ".join(reason for applies, reason in table if applies)
