"""verl's own loss and advantage functions, called with given tensors: values and gradients in float64."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.errors import SettingError
from turnwise.inspector.audit.batches import AuditBatch
from turnwise.integrations import compat

NO_DUAL_CLIP = 1e9


def verl_version() -> str:
    core_algorithms()
    return version("verl")


def core_algorithms() -> Any:
    try:
        return compat.verl_algorithms()
    except ImportError as error:
        reason = str(error).partition("(")[2].rstrip(")") or str(error)
        raise SettingError(
            f"verl cannot be imported here ({reason}); install it: pip install 'turnwise[verl]'"
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
    """Loss and gradient by ``logp``, summed over micro-batches; rows in the order of ``parts``.

    verl is told the tokens and rows of the whole step, as its workers do. ``kl``: adds verl's penalty of that kind."""
    core = core_algorithms()
    tokens, rows = sum(int(part.mask.sum()) for part in parts), sum(len(part.mask) for part in parts)
    info: dict[str, Any] = {"batch_num_tokens": tokens, "global_batch_size": rows, "dp_size": 1}
    total, gradients = 0.0, []
    for part in parts:
        logp = part.logp.clone().requires_grad_(True)
        mask = part.mask.double()
        advantages = part.advantages[:, None].expand(part.mask.shape)
        config = _actor(mode, low, dual_clip, info)
        value, _ = core.get_policy_loss_fn(loss)(part.old_logp, logp, advantages, mask, mode, config)
        if kl:
            penalty = core.kl_penalty(logp, part.reference, kl)
            value = value + beta * core.agg_loss(penalty, mask, mode, **info)
        value.backward()
        assert logp.grad is not None
        total += float(value.detach())
        gradients.append(logp.grad)
    return total, torch.cat(gradients)


def verl_advantages(name: str, reward: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """Advantages (B, L) of a verl estimator, where the reward lies on each row's last sampled token."""
    from verl.trainer.config import AlgoConfig

    last = mask.shape[1] - 1 - mask.flip(1).long().argmax(1)
    on_token = torch.zeros(mask.shape, dtype=torch.float64)
    on_token[torch.arange(len(mask)), last] = reward.double()
    estimator = core_algorithms().get_adv_estimator_fn(name)
    index = np.array([str(int(g)) for g in group])
    advantages: Tensor = estimator(
        token_level_rewards=on_token, response_mask=mask.double(), index=index, config=AlgoConfig()
    )[0]
    return advantages


def _actor(mode: str, low: float, dual_clip: float, info: dict[str, Any]) -> Any:
    """verl's settings of an actor, clipping at 0.2 above and ``low`` below."""
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode, clip_ratio=0.2, clip_ratio_low=low,
        clip_ratio_high=0.2, clip_ratio_c=dual_clip,
    )  # fmt: skip
    config.global_batch_info.update(info)
    return config
