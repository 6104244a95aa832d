"""``turnwise audit trl|verl|BATCH``: where another trainer's numbers differ from the recipe in float64, and by how much.

The recipe is the reference, because tests hold it against independent float64 oracles. A deviation is the largest difference
of gradients as a share of the reference's largest; below ``AGREES`` nothing is printed. Compared is a small ragged batch with
tool gaps, or a batch that another trainer dumped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.errors import SettingError
from turnwise.integrations import padded

AGREES = 1e-6
REQUIRED = ("logp", "old_logp", "mask", "advantages")
OPTIONAL = ("reference", "reward", "group", "loss", "gradient")
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

    @classmethod
    def of(cls, subject: str, checks: Iterable[AuditDeviation]) -> AuditReport:
        """All checks are counted; only what deviates is kept."""
        every = tuple(checks)
        return cls(subject, len(every), tuple(d for d in every if d.size > AGREES))

    def text(self) -> str:
        lines = [f"{self.subject}: {self.checks} checks, {len(self.deviations)} deviations"]
        lines += [f"  {d.check}, {d.subject}: {d.size:.3g} ({d.text})" for d in self.deviations]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {"subject": self.subject, "checks": self.checks, "deviations": [asdict(d) for d in self.deviations]}


@dataclass(frozen=True)
class AuditBatch:
    """(B, L) tensors in float64. ``loss`` and ``gradient`` (by ``logp``) are the other trainer's, where it dumped them."""

    logp: Tensor
    old_logp: Tensor
    mask: Tensor
    advantages: Tensor  # (B,) or (B, L)
    reference: Tensor | None = None
    reward: Tensor | None = None
    group: Tensor | None = None
    loss: Tensor | None = None
    gradient: Tensor | None = None

    def parts(self, *rows: list[int]) -> list[AuditBatch]:
        """Micro-batches of these rows."""
        names = [name for name in (*REQUIRED, "reference") if getattr(self, name) is not None]
        return [AuditBatch(**{name: getattr(self, name)[index] for name in names}) for index in map(torch.tensor, rows)]

    def with_garbage(self) -> AuditBatch:
        """The same batch with other values where nothing was sampled; no result may change."""
        wrong = torch.where(self.mask, torch.zeros_like(self.logp), torch.full_like(self.logp, -7.0))
        return replace(self, logp=self.logp + wrong, old_logp=self.old_logp - wrong)

    def padded(self, columns: int = 0, rows: int = 0) -> AuditBatch:
        """With more columns of padding, and more rows in which nothing was sampled; without the reference."""
        pad = lambda x: torch.nn.functional.pad(x, (0, columns, 0, rows))  # noqa: E731
        advantages = torch.nn.functional.pad(self.advantages, (0, rows), value=1.0)
        return AuditBatch(pad(self.logp), pad(self.old_logp), pad(self.mask), advantages)


def synthetic_batch(seed: int = 0, moved: float = 0.3) -> AuditBatch:
    """Six rows of different lengths in two groups, the third position a tool's. ``moved``: how far the policy has moved."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    lengths = torch.tensor([3, 9, 5, 12, 2, 7])
    mask = torch.arange(12)[None, :] < lengths[:, None]
    # a tool's tokens stand inside a completion
    mask[:, 2] = False
    old = -draw(6, 12).abs() - 0.1
    logp = old + moved * draw(6, 12)
    return AuditBatch(logp, old, mask, draw(6), reference=old + 0.2 * draw(6, 12))


def read_batch(path: str | Path) -> AuditBatch:
    """A dumped batch: .npz, .json or .safetensors with the names of ``REQUIRED``, and of ``OPTIONAL`` where it has them."""
    path = Path(path)
    if not path.is_file():
        raise SettingError(f"there is no file {path}; write trl, verl, or a dumped batch (.npz, .json, .safetensors)")
    if path.suffix not in (".npz", ".json", ".safetensors"):
        raise SettingError(f"{path} is no .npz, .json or .safetensors file")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                values = {name: file[name] for name in file.files}
        elif path.suffix == ".json":
            values = dict(json.loads(path.read_text(encoding="utf-8")))
        else:
            from safetensors.numpy import load_file

            values = dict(load_file(path))
    except (OSError, ValueError, TypeError) as error:
        raise SettingError(f"{path} cannot be read: {error}") from error
    missing = [name for name in REQUIRED if name not in values]
    if missing:
        raise SettingError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(sorted(values)) or 'nothing'}")
    tensors = {
        name: torch.as_tensor(np.asarray(values[name], dtype=np.float64))
        for name in (*REQUIRED, *OPTIONAL)
        if name in values
    }
    shape = tensors["mask"].shape
    for name in ("logp", "old_logp"):
        if tensors[name].shape != shape:
            raise SettingError(
                f"{name} has shape {tuple(tensors[name].shape)}, the mask {tuple(shape)}; give (B, L) for both"
            )
    return AuditBatch(**{**tensors, "mask": tensors["mask"].bool()})


def recipe_gradient(method: str, batch: AuditBatch, **hyper: Any) -> Gradient:
    """Loss and gradient by ``logp`` of a recipe, in float64."""
    objective = padded.objective_of(method, **hyper)
    signals: dict[str, Tensor] = {}
    if batch.reference is not None and "reference" in map(str, objective.signals):
        signals["reference"] = batch.reference
    return summed_gradient(
        [batch],
        lambda part, logp: padded.loss(
            objective, logp, part.old_logp, part.mask, advantages=part.advantages, **signals
        )[0],
    )


def deviation(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a share of the largest of ours."""
    return float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-300))


# ------------------------------------------------- what both trainers are asked


def summed_gradient(parts: Sequence[AuditBatch], loss_of: Callable[[AuditBatch, Tensor], Tensor]) -> Gradient:
    """Loss and gradient by ``logp``, summed over micro-batches as trainers accumulate them; rows in the order of ``parts``."""
    total, gradients = 0.0, []
    for part in parts:
        logp = part.logp.clone().requires_grad_(True)
        loss = loss_of(part, logp)
        loss.backward()
        total += float(loss.detach())
        assert logp.grad is not None
        gradients.append(logp.grad)
    return total, torch.cat(gradients)


def cut_and_padded(
    gradient: Callable[..., Gradient],
    subject: str,
    cuts: Mapping[str, Sequence[AuditBatch]],
    how: str,
    empty: str,
    **length: int,
) -> Iterator[AuditDeviation]:
    """The same rows in micro-batches, with more padding, beside an empty row, with other values at unsampled positions.

    ``cuts``: by subject, the parts; ``how`` they were cut. ``empty``: what an empty row is in this trainer."""
    batch = synthetic_batch()
    whole = gradient([batch])[1]
    for name, parts in cuts.items():
        yield AuditDeviation("micro-batch dependence", name, deviation(whole, gradient(parts)[1]), how)
    wider, taller = gradient([batch.padded(columns=12)], **length)[1], gradient([batch.padded(rows=1)])[1]
    yield AuditDeviation("padding", subject, deviation(whole, wider[:, :12]), "12 more columns of padding")
    yield AuditDeviation("empty row", subject, deviation(whole, taller[:6]), empty)
    other = gradient([batch.with_garbage()])[1]
    yield AuditDeviation("mask", subject, deviation(whole, other), "other values at positions that were not sampled")


# ------------------------------------------------------------- dumped batches


def audit_batch(path: str | Path, method: str) -> AuditReport:
    """A dumped batch against a recipe: its loss and gradient where they were dumped, and what the batch itself shows."""
    batch = read_batch(path)
    loss, gradient = recipe_gradient(method, batch)
    return AuditReport.of(f"{path} against {method}", _batch_checks(batch, method, loss, gradient))


def _batch_checks(batch: AuditBatch, method: str, loss: float, gradient: Tensor) -> Iterator[AuditDeviation]:
    if batch.loss is not None:
        size = abs(float(batch.loss) - loss) / max(abs(loss), 1e-300)
        yield AuditDeviation("loss", method, size, f"theirs is {float(batch.loss):.6g}, the recipe's {loss:.6g}")
    if batch.gradient is not None:
        yield AuditDeviation("gradient", method, deviation(gradient, batch.gradient), "by log-probability")
        outside = batch.gradient.masked_fill(batch.mask, 0.0).abs().max() / batch.gradient.abs().max().clamp(min=1e-300)
        yield AuditDeviation("mask", method, float(outside), "gradient at positions that were not sampled")
        inside = gradient[batch.mask], batch.gradient[batch.mask]
        # the factor that fits best: a wrong normaliser alone leaves no rest
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
