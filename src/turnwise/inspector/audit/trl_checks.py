"""``turnwise audit trl``: where TRL's losses, averages, packing and advantages deviate from the recipes in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from turnwise.inspector.audit.batches import synthetic_batch
from turnwise.inspector.audit.report import AGREES, AuditDeviation, AuditReport, deviation, recipe_gradient
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
EXAMPLES = ((1, 2, 3, 4, 5, 6, 7, 8), (9, 10, 11), (12, 13, 14, 15, 16), (17, 18), (19, 20, 21, 22))


def audit_trl() -> AuditReport:
    """TRL's functions on a ragged batch with tool gaps."""
    from turnwise.inspector.audit.trl_loss import trl_advantages, trl_gradient, trl_packed, trl_version

    checks = [*_against_recipes(trl_gradient), *_cut_and_padded(trl_gradient), *_windows(trl_gradient)]
    checks += [*_packing(trl_packed), *_advantages(trl_advantages)]
    return AuditReport(f"TRL {trl_version()}", len(checks), tuple(d for d in checks if d.size > AGREES))


def _against_recipes(trl: Trl) -> Iterator[AuditDeviation]:
    batch = synthetic_batch()
    plain = replace(batch, reference=None)
    for loss, level, high, method, hyper in RECIPE_OF:
        size = deviation(recipe_gradient(method, plain, **hyper)[1], trl([plain], loss, level, high=high)[1])
        bound = (
            f", epsilon_high = {high:g}" if hyper.get("high", 0.0) > 1 else ""
        )  # of the ratio, not of its distance from 1
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
    """The same rows in micro-batches, with more padding, beside an empty row, with other values at unsampled positions."""
    batch = synthetic_batch()
    halves = [batch.rows(torch.tensor(rows)) for rows in ([0, 1, 2], [3, 4, 5])]
    parts = [batch.rows(torch.tensor(rows)) for rows in ([0, 1, 2, 3], [4, 5])]
    for loss in LOSSES:
        level = "sequence" if loss == "luspo" else "token"
        whole = trl([batch], loss, level)[1]
        for name, cut in (("equal parts", halves), ("parts of 4 and 2", parts)):
            size = deviation(whole, trl(cut, loss, level)[1])
            yield AuditDeviation(
                "micro-batch dependence", f"{loss}, {name}", size, "the same rows in two micro-batches"
            )
        size = deviation(whole, trl([batch.padded(columns=12)], loss, level, length=12)[1][:, :12])
        yield AuditDeviation("padding", loss, size, "12 more columns of padding")
        size = deviation(whole, trl([batch.padded(rows=1)], loss, level)[1][:6])
        yield AuditDeviation("empty row", loss, size, "one more row whose tokens are all masked, as a truncated one")
        size = deviation(whole, trl([batch.with_garbage()], loss, level)[1])
        yield AuditDeviation("mask", loss, size, "other values at positions that were not sampled")
        same = replace(batch, old_logp=batch.logp)
        size = deviation(trl([same], loss, level)[1], trl([batch], loss, level, first_update=True)[1])
        yield AuditDeviation("ratio at step 0", loss, size, "old log-probabilities left out, against given equal ones")
    whole = trl([batch], "dapo", top_entropy=0.3)[1]
    size = deviation(whole, trl(halves, "dapo", top_entropy=0.3)[1])
    text = "the entropy bound is the quantile of each micro-batch"
    yield AuditDeviation("micro-batch dependence", "dapo with top_entropy_quantile, equal parts", size, text)


def _windows(trl: Trl) -> Iterator[AuditDeviation]:
    """Two updates from one generated batch: each loss should be the mean over the tokens of its own update."""
    batch = synthetic_batch()
    halves = [batch.rows(torch.tensor(rows)) for rows in ([0, 1, 2], [3, 4, 5])]
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
        kept = [token for segment in segments for token in segment]
        share = 1 - len(set(kept)) / len(place)
        yield AuditDeviation("packing, lost", strategy, share, "share of the tokens that no row holds")
        own = [
            EXAMPLES[place[token][0]][: place[token][1]] == segment[:i]
            for segment in segments
            for i, token in enumerate(segment)
        ]
        share = 1 - sum(own) / len(kept)
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
