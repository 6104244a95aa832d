"""TRL's own functions, called with given tensors instead of a model: losses and gradients in float64, advantages, packing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from turnwise.errors import SettingError
from turnwise.inspector.audit.batches import AuditBatch

EOS, PAD = 7, 0


def trl_version() -> str:
    return str(_trl().__version__)


def _trl() -> Any:
    try:
        import trl
    except ImportError:
        raise SettingError("TRL is not installed here; install it: pip install 'turnwise[trl]'") from None
    return trl


# -------------------------------------------------------------------- losses


def trl_gradient(
    parts: Sequence[AuditBatch],
    loss_type: str,
    level: str = "token",
    beta: float = 0.0,
    correct_kl: bool = False,
    first_update: bool = False,
    high: float = 0.2,
    length: int = 0,
    top_entropy: float = 1.0,
    updates: int = 1,
    step_tokens: int = 0,
) -> tuple[float, Tensor]:
    """Loss and gradient by ``logp``, summed over micro-batches as TRL accumulates them; rows in the order of ``parts``.

    ``length``: TRL's ``max_completion_length`` (0: the width of the batch). ``updates`` and ``step_tokens``: how many updates
    share a generated batch, and its tokens. Entropies stand in for the model's: the negative old log-probabilities."""
    trainer_class = _trl().GRPOTrainer
    tokens = step_tokens or sum(int(part.mask.sum()) for part in parts)
    total, gradients = 0.0, []
    for part in parts:
        logp = part.logp.clone().requires_grad_(True)
        trainer = _trainer(
            trainer_class, loss_type=loss_type, importance_sampling_level=level, beta=beta, epsilon_low=0.2, epsilon_high=high,
            top_entropy_quantile=top_entropy, max_completion_length=length or part.mask.shape[1],
            current_gradient_accumulation_steps=len(parts),
            _get_per_token_logps_and_entropies=lambda *a, logp=logp, part=part, **k: (logp, -part.old_logp, None),
        )  # fmt: skip
        trainer.args.steps_per_generation = len(parts) * updates
        trainer.args.use_bias_correction_kl = correct_kl
        inputs: dict[str, Any] = {
            "prompt_ids": torch.zeros(len(logp), 1, dtype=torch.int64), "prompt_mask": torch.ones(len(logp), 1),
            "completion_ids": torch.zeros_like(part.mask, dtype=torch.int64), "completion_mask": part.mask.double(),
            "advantages": part.advantages, "num_items_in_batch": torch.tensor(tokens, dtype=torch.float64),
        }  # fmt: skip
        inputs |= {} if first_update else {"old_per_token_logps": part.old_logp}
        inputs |= {"ref_per_token_logps": part.reference} if beta else {}
        loss = trainer_class._compute_loss(trainer, None, inputs)
        loss.backward()
        total += float(loss.detach())
        assert logp.grad is not None
        gradients.append(logp.grad)
    return total, torch.cat(gradients)


# ------------------------------------------------------ advantages and packing


def trl_advantages(reward: Tensor, scale: str, cut: int | None = None, unscored: int | None = None) -> Tensor:
    """Advantages (B,) of groups of three completions. ``cut``: this completion was truncated, and such ones are masked;
    ``unscored``: this one got no reward."""
    trainer_class = _trl().GRPOTrainer
    rows = len(reward)
    completions = [[1, 2, 3 if i == cut else EOS] for i in range(rows)]
    rewards = reward[:, None].clone()
    if unscored is not None:
        rewards[unscored] = float("nan")
    trainer = _trainer(
        trainer_class, scale_rewards=scale, num_generations=3, multi_objective_aggregation="sum_then_normalize",
        mask_truncated_completions=cut is not None, eos_token_ids=[EOS], beta=0.0, num_iterations=1, tools=[],
        reward_weights=torch.ones(1, dtype=torch.float64), reward_func_names=["reward"], reward_funcs=[None],
        _tokenizer=SimpleNamespace(pad_token_id=PAD), _pending_extra_logs={}, _pending_metrics={},
        _logs=defaultdict(list, rewards=defaultdict(list)),
        _generate=lambda prompts: ([[1]] * rows, completions, None, ["text"] * rows, None, {}, None, None),
        _calculate_rewards=lambda *a: rewards,
    )  # fmt: skip
    prompts = [{"prompt": "text"} for _ in range(rows)]
    advantages: Tensor = trainer_class._generate_and_score_completions(trainer, prompts)["advantages"]
    return advantages


def trl_packed(examples: Sequence[Sequence[int]], length: int, strategy: str) -> list[list[tuple[int, ...]]]:
    """Rows packed by TRL; each as the segments that its collator tells attention to keep apart."""
    trl = _trl()
    import datasets
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        rows = trl.pack_dataset(
            datasets.Dataset.from_dict({"input_ids": [list(e) for e in examples]}), length, strategy
        )
    finally:
        if bars:
            datasets.enable_progress_bars()
    collate = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=strategy != "wrapped")
    packed = []
    for row in rows:
        batch = collate.torch_call([row])
        ids = batch["input_ids"][0].tolist()
        positions = batch["position_ids"][0].tolist() if "position_ids" in batch else list(range(len(ids)))
        starts = [i for i, position in enumerate(positions) if position == 0] + [len(ids)]
        packed.append([tuple(ids[a:b]) for a, b in pairwise(starts)])
    return packed


# --------------------------------------------------------------------- trainer


def _trainer(trainer_class: Any, **attributes: Any) -> Any:
    """What TRL's functions read of a trainer in training; everything else is off."""
    arguments = SimpleNamespace(
        use_bias_correction_kl=False, delta=None, steps_per_generation=1, gradient_accumulation_steps=1, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        per_device_train_batch_size=1, gradient_checkpointing_kwargs=None,
    )  # fmt: skip
    unchanged = lambda x, **_: x  # noqa: E731
    accelerator = SimpleNamespace(
        num_processes=1, process_index=0, device=torch.device("cpu"), gather=unchanged, gather_for_metrics=unchanged,
        reduce=unchanged, pad_across_processes=unchanged,
    )  # fmt: skip
    trainer = _Stub(
        args=arguments, accelerator=accelerator, use_vllm=False, entropy_coef=0.0,
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)}, get_gamma_weights=trainer_class.get_gamma_weights,
    )  # fmt: skip
    trainer.__dict__.update(attributes)
    trainer.get_high_entropy_mask = partial(trainer_class.get_high_entropy_mask, trainer)
    return trainer


class _Stub(SimpleNamespace):
    """Attributes that a newer TRL reads and this stub does not name are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
