"""``turnwise audit verl``: where verl's losses, averages, penalties and advantages deviate from the recipes in float64.

verl's own functions are called with given tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.errors import SettingError
from turnwise.inspector.audit.report import (
    AuditBatch,
    AuditDeviation,
    AuditReport,
    cut_and_padded,
    deviation,
    recipe_gradient,
    summed_gradient,
    synthetic_batch,
)
from turnwise.integrations import compat, padded

NO_DUAL_CLIP = 1e9
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
ESTIMATORS = {  # verl's, and the recipe with the same advantage
    "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "opo": "opo",
}  # fmt: skip


def audit_verl() -> AuditReport:
    """verl's functions on a ragged batch with tool gaps."""
    core_algorithms()  # refuses where verl is not installed
    checks = [*_against_recipes(verl_gradient), *_cut_and_padded(verl_gradient), *_clipping(verl_gradient)]
    checks += [*_penalties(verl_gradient), *_advantages(verl_advantages)]
    return AuditReport.of(f"verl {version('verl')}", checks)


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
    parts = synthetic_batch().parts([0, 1, 2, 3], [4, 5])
    for loss, mode in [*((loss, "token-mean") for loss in LOSSES), *(("vanilla", mode) for mode in MODES[1:])]:
        call = lambda parts, loss=loss, mode=mode: verl(parts, loss, mode)  # noqa: E731
        subject = f"{loss}, {mode}"
        how, empty = "the same rows in parts of 4 and 2", "one more row in which nothing was sampled"
        yield from cut_and_padded(call, subject, {subject: parts}, how, empty)


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
        for estimator, method in ESTIMATORS.items():
            # a method that takes its KL from the reward gets a reference equal to the policy: no KL
            wanted = {"reference", "proximal"} & set(map(str, padded.objective_of(method).signals))
            signals = {name: torch.zeros(mask.shape, dtype=torch.float64) for name in wanted}
            ours = padded.advantages(method, reward, mask, group, **signals)
            theirs = verl(estimator, reward, mask, group)
            subject = f"{estimator} against {method}, {where}"
            yield AuditDeviation("advantage", subject, deviation(ours, theirs * mask), "largest difference of a token")


# ------------------------------------------------------ verl with given tensors


def core_algorithms() -> Any:
    try:
        return compat.verl_algorithms()
    except ImportError as error:
        reason = str(error).partition("(")[2].rstrip(")") or str(error)
        raise SettingError(
            f"verl cannot be imported here ({reason}); install it: pip install 'turnwise-rl[verl]'"
        ) from None


def verl_gradient(
    parts: Sequence[AuditBatch],
    loss: str,
    mode: str,
    dual_clip: float = NO_DUAL_CLIP,
    kl: str = "",
    beta: float = 0.1,
    low: float = 0.2,
) -> tuple[float, Tensor]:
    """Loss and gradient by ``logp``, summed over micro-batches, clipping at 0.2 above and ``low`` below. ``kl``: adds verl's
    penalty of that kind."""
    from verl.workers.config import ActorConfig

    core = core_algorithms()
    # verl is told the tokens and rows of the whole step, as its workers do
    tokens, rows = sum(int(part.mask.sum()) for part in parts), sum(len(part.mask) for part in parts)
    info: dict[str, Any] = {"batch_num_tokens": tokens, "global_batch_size": rows, "dp_size": 1}

    def loss_of(part: AuditBatch, logp: Tensor) -> Tensor:
        mask, advantages = part.mask.double(), part.advantages[:, None].expand(part.mask.shape)
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, clip_ratio=0.2, clip_ratio_low=low,
            clip_ratio_high=0.2, clip_ratio_c=dual_clip,
        )  # fmt: skip
        config.global_batch_info.update(info)
        value: Tensor = core.get_policy_loss_fn(loss)(part.old_logp, logp, advantages, mask, mode, config)[0]
        if kl:
            value = value + beta * core.agg_loss(core.kl_penalty(logp, part.reference, kl), mask, mode, **info)
        return value

    return summed_gradient(parts, loss_of)


def verl_advantages(name: str, reward: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """Advantages (B, L) of a verl estimator, where the reward lies on each row's last sampled token."""
    from verl.trainer.config import AlgoConfig

    # verl's estimators expect the reward where a completion ends
    last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
    on_token = torch.zeros(mask.shape, dtype=torch.float64)
    on_token[torch.arange(len(mask)), last] = reward.double()
    estimator = core_algorithms().get_adv_estimator_fn(name)
    index = np.array([str(int(g)) for g in group])
    advantages: Tensor = estimator(
        token_level_rewards=on_token, response_mask=mask.double(), index=index, config=AlgoConfig()
    )[0]
    return advantages
