"""``turnwise audit trl``: where TRL's losses, averages, packing and advantages deviate from the recipes in float64.

TRL's own functions are called with given tensors instead of a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

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
from turnwise.integrations import padded

Trl = Callable[..., tuple[float, Tensor]]
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
# TRL's loss and level of the ratio, its upper bound, the recipe that computes the same, its settings there
RECIPE_OF: tuple[tuple[str, str, float, str, dict[str, float]], ...] = (
    ("grpo", "token", 0.2, "grpo", {"beta": 0.0}),
    ("dr_grpo", "token", 0.2, "dr_grpo", {"length": 12}),
    ("dapo", "token", 0.2, "dapo", {"high": 0.2}),
    ("grpo", "sequence", 0.2, "gspo", {"low": 0.2, "high": 0.2}),
    ("sapo", "token", 0.2, "sapo", {}),
    ("vespo", "token", 0.2, "vespo", {}),
    ("cispo", "token", 1.2, "cispo", {"high": 1.2}),
    ("cispo", "token", 0.2, "cispo", {"high": 1.2}),
)
EOS, PAD = 7, 0
EXAMPLES = ((1, 2, 3, 4, 5, 6, 7, 8), (9, 10, 11), (12, 13, 14, 15, 16), (17, 18), (19, 20, 21, 22))


def audit_trl() -> AuditReport:
    """TRL's functions on a ragged batch with tool gaps."""
    trl = _trl()
    checks = [*_against_recipes(trl_gradient), *_cut_and_padded(trl_gradient), *_windows(trl_gradient)]
    checks += [*_packing(trl_packed), *_advantages(trl_advantages)]
    return AuditReport.of(f"TRL {trl.__version__}", checks)


def _against_recipes(trl: Trl) -> Iterator[AuditDeviation]:
    batch = synthetic_batch()
    plain = replace(batch, reference=None)
    for loss, level, high, method, hyper in RECIPE_OF:
        size = deviation(recipe_gradient(method, plain, **hyper)[1], trl([plain], loss, level, high=high)[1])
        # a bound above 1 is one of the ratio, not of its distance from 1
        bound = f", epsilon_high = {high:g}" if hyper.get("high", 0.0) > 1 else ""
        subject = f"{loss}, {level} ratio{bound}, against {method}"
        text = "TRL caps the ratio at epsilon_high, not at 1 + epsilon_high" if bound else "gradient by log-probability"
        yield AuditDeviation("loss", subject, size, text)
    token_mean = trl([batch], "dapo")[1]
    for loss, text in (("grpo", "mean of each row's mean"), ("dr_grpo", "divided by rows × the longest completion")):
        size = deviation(token_mean, trl([batch], loss)[1])
        yield AuditDeviation("normaliser", loss, size, f"{text}, against a mean over tokens")
    kl = [trl([batch], "grpo", beta=0.1, correct_kl=corrected)[1] for corrected in (False, True)]
    text = "the KL term is weighted by the ratio"
    yield AuditDeviation("KL times ratio", "grpo, use_bias_correction_kl", deviation(*kl), text)


def _cut_and_padded(trl: Trl) -> Iterator[AuditDeviation]:
    batch = synthetic_batch()
    for loss in LOSSES:
        level = "sequence" if loss == "luspo" else "token"
        call = lambda parts, loss=loss, level=level, **more: trl(parts, loss, level, **more)  # noqa: E731
        cuts = {f"{loss}, equal parts": _halves(batch), f"{loss}, parts of 4 and 2": batch.parts([0, 1, 2, 3], [4, 5])}
        how, empty = (
            "the same rows in two micro-batches",
            "one more row whose tokens are all masked, as a truncated one",
        )
        yield from cut_and_padded(call, loss, cuts, how, empty, length=12)
        same = replace(batch, old_logp=batch.logp)
        size = deviation(call([same])[1], call([batch], first_update=True)[1])
        yield AuditDeviation("ratio at step 0", loss, size, "old log-probabilities left out, against given equal ones")
    whole, cut = (trl(parts, "dapo", top_entropy=0.3)[1] for parts in ([batch], _halves(batch)))
    text = "the entropy bound is the quantile of each micro-batch"
    subject = "dapo with top_entropy_quantile, equal parts"
    yield AuditDeviation("micro-batch dependence", subject, deviation(whole, cut), text)


def _halves(batch: AuditBatch) -> list[AuditBatch]:
    return batch.parts([0, 1, 2], [3, 4, 5])


def _windows(trl: Trl) -> Iterator[AuditDeviation]:
    """Two updates from one generated batch: each loss should be the mean over the tokens of its own update."""
    batch = synthetic_batch()
    halves = _halves(batch)
    for loss in ("dapo", "cispo", "grpo"):
        alone = [trl([half], loss)[1] for half in halves]
        shared = [trl([half], loss, updates=2, step_tokens=int(batch.mask.sum()))[1] for half in halves]
        size = max(deviation(*pair) for pair in zip(alone, shared, strict=True))
        text = "divided by half of the generated tokens, against the tokens of the update"
        yield AuditDeviation("normaliser of an update", f"{loss}, two updates a generation", size, text)


def _packing(pack: Callable[..., list[list[tuple[int, ...]]]]) -> Iterator[AuditDeviation]:
    """Examples packed into rows of 6 tokens by TRL: tokens that are lost, and tokens whose context is not their example's.

    A segment is what one token can attend to. The context of a token is right if it is the beginning of its example."""
    place = {token: (number, i) for number, example in enumerate(EXAMPLES) for i, token in enumerate(example)}
    for strategy in ("bfd", "bfd_split", "wrapped"):
        segments = [segment for row in pack(EXAMPLES, 6, strategy) for segment in row]
        packed = [token for segment in segments for token in segment]
        share = 1 - len(set(packed)) / len(place)
        yield AuditDeviation("packing, lost", strategy, share, "share of the tokens that no row holds")
        right = [
            EXAMPLES[place[token][0]][: place[token][1]] == segment[:i]
            for segment in segments
            for i, token in enumerate(segment)
        ]
        share = 1 - sum(right) / len(packed)
        yield AuditDeviation(
            "packing, context", strategy, share, "share of the tokens whose context is cut or another example's"
        )


def _advantages(trl: Callable[..., Tensor]) -> Iterator[AuditDeviation]:
    """Groups of three. A dropped sibling is masked because it was cut, or has no reward."""
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[:, 0] = False
    reward = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.0, 0.5], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    ours = lambda keep, method: padded.advantages(method, reward[keep], mask[keep], group[keep])[:, 1]  # noqa: E731
    everyone, rest = torch.arange(6), torch.tensor([0, 1, 3, 4, 5])
    for method, scale, text in (
        ("dr_grpo", "none", ""),
        ("grpo", "group", "1e-4 is added to the standard deviation, in the recipe 1e-6"),
    ):
        size = deviation(ours(everyone, method), trl(reward, scale))
        yield AuditDeviation("advantage", f"scale_rewards = {scale}, against {method}", size, text)
    alone = ours(rest, "dr_grpo")
    size = deviation(alone, trl(reward, "none", cut=2)[rest])
    text = "a truncated completion that is not trained on stays in the mean of its group"
    yield AuditDeviation("baseline of dropped siblings", "mask_truncated_completions", size, text)
    size = deviation(alone, trl(reward, "none", unscored=2)[rest])
    yield AuditDeviation("baseline of dropped siblings", "no reward", size, "a completion without any reward")


# ------------------------------------------------------- TRL with given tensors


def _trl() -> Any:
    try:
        import trl
    except ImportError:
        raise SettingError("TRL is not installed here; install it: pip install 'turnwise-rl[trl]'") from None
    return trl


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
    """Loss and gradient by ``logp``, summed over micro-batches.

    ``length``: TRL's ``max_completion_length`` (0: the width of the batch). ``updates`` and ``step_tokens``: how many updates
    share a generated batch, and its tokens. Entropies stand in for the model's: the negative old log-probabilities."""
    trainer_class = _trl().GRPOTrainer
    tokens = step_tokens or sum(int(part.mask.sum()) for part in parts)

    def loss_of(part: AuditBatch, logp: Tensor) -> Tensor:
        trainer = _trainer(
            trainer_class, loss_type=loss_type, importance_sampling_level=level, beta=beta, epsilon_low=0.2, epsilon_high=high,
            top_entropy_quantile=top_entropy, max_completion_length=length or part.mask.shape[1],
            current_gradient_accumulation_steps=len(parts),
            _get_per_token_logps_and_entropies=lambda *a, **k: (logp, -part.old_logp, None),
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
        loss: Tensor = trainer_class._compute_loss(trainer, None, inputs)
        return loss

    return summed_gradient(parts, loss_of)


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

    # its progress bar would break up what the command prints
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
