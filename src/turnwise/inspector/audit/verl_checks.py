"""``turnwise audit verl``: where verl's losses, averages, penalties and advantages deviate from the recipes in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turnwise.inspector.audit.batches import synthetic_batch
from turnwise.inspector.audit.report import AGREES, AuditDeviation, AuditReport, deviation, recipe_gradient
from turnwise.integrations import padded

Verl = Callable[..., tuple[float, Tensor]]
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
LOSSES = ("vanilla", "gspo", "sapo", "geo_mean", "cispo")
# verl's loss and average, the recipe that computes the same, its settings there
RECIPE_OF: tuple[tuple[str, str, str, dict[str, float]], ...] = (
    ("vanilla", "token-mean", "dapo", {"high": 0.2}),
    ("vanilla", "seq-mean-token-mean", "grpo", {"beta": 0.0}),
    ("vanilla", "seq-mean-token-sum-norm", "dr_grpo", {"length": 12}),
    ("gspo", "seq-mean-token-mean", "gspo", {"low": 0.2, "high": 0.2}),
    ("gspo", "token-mean", "gspo", {"low": 0.2, "high": 0.2}),
    ("sapo", "seq-mean-token-mean", "sapo", {}),
    ("geo_mean", "token-mean", "gmpo", {"low": 0.2, "high": 0.2}),
)
ESTIMATORS = (
    ("grpo", "grpo"),
    ("rloo", "rloo"),
    ("reinforce_plus_plus", "reinforce_pp"),
    ("reinforce_plus_plus_baseline", "reinforce_pp_baseline"),
    ("opo", "opo"),
)


def audit_verl() -> AuditReport:
    """verl's functions on a ragged batch with tool gaps."""
    from turnwise.inspector.audit.verl_loss import verl_advantages, verl_gradient, verl_version

    name = f"verl {verl_version()}"
    checks = [*_against_recipes(verl_gradient), *_cut_and_padded(verl_gradient), *_clipping(verl_gradient)]
    checks += [*_penalties(verl_gradient), *_advantages(verl_advantages)]
    return AuditReport(name, len(checks), tuple(d for d in checks if d.size > AGREES))


def _against_recipes(verl: Verl) -> Iterator[AuditDeviation]:
    batch = replace(synthetic_batch(), reference=None)
    for loss, mode, method, hyper in RECIPE_OF:
        ours = recipe_gradient(method, batch, **hyper)[1]
        theirs = verl([batch], loss, mode)[1]
        yield AuditDeviation(
            "loss", f"{loss} with {mode}, against {method}", deviation(ours, theirs), "gradient by log-probability"
        )
    token_mean = verl([batch], "vanilla", "token-mean")[1]
    for mode in MODES[1:]:
        size = deviation(token_mean, verl([batch], "vanilla", mode)[1])
        yield AuditDeviation("normaliser", mode, size, "against token-mean")


def _cut_and_padded(verl: Verl) -> Iterator[AuditDeviation]:
    """The same rows in micro-batches, with more padding, beside an empty row, with other values at unsampled positions."""
    batch = synthetic_batch()
    parts = [batch.rows(torch.tensor(rows)) for rows in ([0, 1, 2, 3], [4, 5])]
    wider, taller = batch.padded(columns=12), batch.padded(rows=1)
    for loss, mode in [*((loss, "token-mean") for loss in LOSSES), *(("vanilla", mode) for mode in MODES[1:])]:
        subject = f"{loss}, {mode}"
        whole = verl([batch], loss, mode)[1]
        size = deviation(whole, verl(parts, loss, mode)[1])
        yield AuditDeviation("micro-batch dependence", subject, size, "the same rows in parts of 4 and 2")
        size = deviation(whole, verl([wider], loss, mode)[1][:, :12])
        yield AuditDeviation("padding", subject, size, "12 more columns of padding")
        size = deviation(whole, verl([taller], loss, mode)[1][:6])
        yield AuditDeviation("empty row", subject, size, "one more row in which nothing was sampled")
        size = deviation(whole, verl([batch.with_garbage()], loss, mode)[1])
        yield AuditDeviation("mask", subject, size, "other values at positions that were not sampled")


def _clipping(verl: Verl) -> Iterator[AuditDeviation]:
    """A policy that has moved far: ratios above 3 with negative advantages are where the dual clip acts."""
    batch = replace(synthetic_batch(moved=1.5), reference=None)
    ours = recipe_gradient("dapo", batch, high=0.2)[1]
    for bound, text in ((3.0, "verl's default clip_ratio_c = 3"), (1e9, "clip_ratio_c = 1e9")):
        size = deviation(ours, verl([batch], "vanilla", "token-mean", dual_clip=bound)[1])
        yield AuditDeviation(
            "dual clip", f"vanilla, {text}", size, "against a clip without it; the policy has moved far"
        )
    near = replace(synthetic_batch(), reference=None)
    ours = recipe_gradient("cispo", near, high=1.2)[1]
    for low in (0.2, 1.0):
        size = deviation(ours, verl([near], "cispo", "token-mean", low=low)[1])
        yield AuditDeviation(
            "lower clip", f"cispo, clip_ratio_low = {low:g}", size, "against a weight bounded above only"
        )


def _penalties(verl: Verl) -> Iterator[AuditDeviation]:
    """verl's KL terms in the loss, against the recipe's; then with a reference that is five nats away."""
    near = synthetic_batch()
    far = replace(near, reference=near.logp + 5.0)
    for where, batch in (("reference near", near), ("reference 5 nats away", far)):
        ours = recipe_gradient("grpo", batch, beta=0.1)[1]
        for kind in ("k1", "k2", "k3", "k3+", "abs"):
            theirs = verl([batch], "vanilla", "seq-mean-token-mean", kl=kind)[1]
            yield AuditDeviation(
                "KL", f"{kind}, {where}", deviation(ours, theirs), "in the loss, against the recipe's k3"
            )


def _advantages(verl: Callable[..., Tensor]) -> Iterator[AuditDeviation]:
    mask = synthetic_batch().mask
    reward = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.0, 0.5], dtype=torch.float64)
    cases: tuple[tuple[str, Any], ...] = (
        ("groups of three", torch.tensor([0, 0, 0, 1, 1, 1])),
        ("a group of one", torch.tensor([0, 0, 0, 1, 1, 2])),
    )
    for where, group in cases:
        for estimator, method in ESTIMATORS:
            ours = padded.advantages(method, reward, mask, group, **_signals(method, mask))
            theirs = verl(estimator, reward, mask, group)
            subject = f"{estimator} against {method}, {where}"
            yield AuditDeviation("advantage", subject, deviation(ours, theirs * mask), "largest difference of a token")


def _signals(method: str, mask: Tensor) -> dict[str, Tensor]:
    """A method that takes its KL from the reward gets a reference equal to the policy: no KL."""
    wanted = set(map(str, padded.objective_of(method).signals))
    return {name: torch.zeros(mask.shape, dtype=torch.float64) for name in ("reference", "proximal") if name in wanted}
