"""TRL's own loss function, called with given log-probabilities instead of a model: its value and gradient in float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import SettingError
from turnwise.inspector.audit.batches import AuditBatch


def trl_version() -> str:
    return str(_trl().__version__)


def _trl() -> Any:
    try:
        import trl
    except ImportError:
        raise SettingError("TRL is not installed here; install it: pip install 'turnwise[trl]'") from None
    return trl


def trl_gradient(
    parts: Sequence[AuditBatch],
    loss_type: str,
    level: str = "token",
    beta: float = 0.0,
    correct_kl: bool = False,
    first_update: bool = False,
) -> tuple[float, Tensor]:
    """Loss and gradient by ``logp``, summed over micro-batches as TRL accumulates them; rows in the order of ``parts``."""
    compute = _trl().GRPOTrainer._compute_loss
    tokens = torch.stack([part.mask.sum() for part in parts]).sum()
    total, gradients = 0.0, []
    for part in parts:
        logp = part.logp.clone().requires_grad_(True)
        trainer = _trainer(logp, loss_type, level, beta, correct_kl, len(parts), part.mask.shape[1])
        inputs: dict[str, Any] = {
            "prompt_ids": torch.zeros(len(logp), 1, dtype=torch.int64), "prompt_mask": torch.ones(len(logp), 1),
            "completion_ids": torch.zeros_like(part.mask, dtype=torch.int64), "completion_mask": part.mask.double(),
            "advantages": part.advantages, "num_items_in_batch": tokens.double(),
        }  # fmt: skip
        inputs |= {} if first_update else {"old_per_token_logps": part.old_logp}
        inputs |= {"ref_per_token_logps": part.reference} if beta else {}
        loss = compute(trainer, None, inputs)
        loss.backward()
        total += float(loss.detach())
        assert logp.grad is not None
        gradients.append(logp.grad)
    return total, torch.cat(gradients)


def _trainer(
    logp: Tensor, loss_type: str, level: str, beta: float, correct_kl: bool, accumulate: int, length: int
) -> Any:
    """What ``_compute_loss`` reads of a trainer."""
    arguments = SimpleNamespace(
        use_bias_correction_kl=correct_kl, delta=None, steps_per_generation=accumulate, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, **_: x
    )
    model = SimpleNamespace(training=True)
    entropies = torch.zeros_like(logp.detach())
    return _Stub(
        args=arguments, accelerator=accelerator, model=model, loss_type=loss_type, importance_sampling_level=level, beta=beta,
        epsilon_low=0.2, epsilon_high=0.2, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        current_gradient_accumulation_steps=accumulate, max_completion_length=length, entropy_coef=0.0,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, entropies, None),
    )  # fmt: skip


class _Stub(SimpleNamespace):
    """Attributes that a newer TRL reads and this stub does not name are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
