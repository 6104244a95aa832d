"""``turnwise audit trl|verl|BATCH``: where another trainer's numbers differ from the recipe in float64, and by how much.

The recipe is the reference, because tests hold it against independent float64 oracles. A deviation is the largest difference
of gradients as a share of the reference's largest; below ``AGREES`` nothing is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnwise.inspector.audit.batches import AuditBatch, read_batch
from turnwise.integrations import padded

AGREES = 1e-6
Gradient = tuple[float, Tensor]


@dataclass(frozen=True)
class AuditDeviation:
    """``size``: relative deviation of the gradient or the advantages, or a share of tokens where ``text`` says so."""

    check: str
    subject: str
    size: float
    text: str


@dataclass(frozen=True)
class AuditReport:
    subject: str
    checks: int
    deviations: tuple[AuditDeviation, ...]

    def text(self) -> str:
        lines = [f"{self.subject}: {self.checks} checks, {len(self.deviations)} deviations"]
        lines += [f"  {d.check}, {d.subject}: {d.size:.3g} ({d.text})" for d in self.deviations]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {"subject": self.subject, "checks": self.checks, "deviations": [asdict(d) for d in self.deviations]}


def recipe_gradient(method: str, batch: AuditBatch, **hyper: Any) -> Gradient:
    """Loss and gradient by ``logp`` of a recipe, in float64."""
    logp = batch.logp.clone().requires_grad_(True)
    objective = padded.objective_of(method, **hyper)
    signals = (
        {"reference": batch.reference}
        if batch.reference is not None and "reference" in map(str, objective.signals)
        else {}
    )
    loss, _ = padded.loss(objective, logp, batch.old_logp, batch.mask, advantages=batch.advantages, **signals)
    loss.backward()
    assert logp.grad is not None
    return float(loss.detach()), logp.grad


def deviation(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a share of the largest of ours."""
    return float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-300))


# ------------------------------------------------------------- dumped batches


def audit_batch(path: str | Path, method: str) -> AuditReport:
    """A dumped batch against a recipe: its loss and gradient where they were dumped, and what the batch itself shows."""
    batch = read_batch(path)
    loss, gradient = recipe_gradient(method, batch)
    checks = list(_batch_checks(batch, method, loss, gradient))
    return AuditReport(f"{path} against {method}", len(checks), tuple(d for d in checks if d.size > AGREES))


def _batch_checks(batch: AuditBatch, method: str, loss: float, gradient: Tensor) -> Iterator[AuditDeviation]:
    if batch.loss is not None:
        size = abs(float(batch.loss) - loss) / max(abs(loss), 1e-300)
        yield AuditDeviation("loss", method, size, f"theirs is {float(batch.loss):.6g}, the recipe's {loss:.6g}")
    if batch.gradient is not None:
        yield AuditDeviation("gradient", method, deviation(gradient, batch.gradient), "by log-probability")
        outside = batch.gradient.masked_fill(batch.mask, 0.0).abs().max() / batch.gradient.abs().max().clamp(min=1e-300)
        yield AuditDeviation("mask", method, float(outside), "gradient at positions that were not sampled")
        inside = gradient[batch.mask], batch.gradient[batch.mask]
        scale = float((inside[0] @ inside[1]) / (inside[0] @ inside[0]).clamp(min=1e-300))
        rest = deviation(inside[0] * scale, inside[1])
        if rest < AGREES:
            yield AuditDeviation(
                "normaliser", method, abs(scale - 1), f"their gradient is {scale:.6g} times the recipe's"
            )
    if batch.reward is not None and batch.group is not None:
        ours = padded.advantages(method, batch.reward, batch.mask, batch.group)
        given = batch.advantages if batch.advantages.dim() == 2 else batch.advantages[:, None].expand(batch.mask.shape)
        theirs = torch.where(batch.mask, given, 0.0)
        yield AuditDeviation(
            "baseline", method, deviation(ours, theirs), "advantages of the groups, dropped siblings included"
        )
