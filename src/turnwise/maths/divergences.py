"""Single-sample estimators of KL(π‖π₀), from x = log π₀(a) − log π(a) of a token a sampled from π.

    k1 = −x                E[k1] = KL; can be negative; its gradient as a loss has mean zero (∇ log π averages out)
    k2 = x²/2              biased, low variance; its gradient as a loss is −x ∇ log π, whose mean is the gradient of KL
    k3 = eˣ − x − 1        E[k3] = KL, never negative; its gradient as a loss is (1 − eˣ) ∇ log π, that of KL(π₀‖π)
    k3+                    the value of k3 with the gradient of k2 (straight through)

k3 is capped: a single token that is e²⁰ times likelier under the reference must not dominate the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.maths.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


def k1(x: Tensor) -> Tensor:
    return -x


def k2(x: Tensor) -> Tensor:
    return x * x / 2


K3_CAP = 10.0


def k3(x: Tensor) -> Tensor:
    return (torch.expm1(x) - x).clamp(max=K3_CAP)


def k3_plus(x: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2."""
    return k2(x) - k2(x).detach() + k3(x).detach()


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}
