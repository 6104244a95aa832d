"""The local learner: measures signals of a batch and takes optimiser steps, in this process.

Micro-batches are an affair of memory only: their losses *sum*, and nothing is rescaled. The model never leaves
evaluation mode: dropout would make the learner another policy than the generator.

The learner does not know what it optimises: an objective arrives as a callable that says which signals it needs. It
knows no rewards, no advantages, no method's name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from turnwise.batch import Batch
from turnwise.engines import lora, optimiser, packed
from turnwise.engines.logprobs import token_logprobs
from turnwise.engines.optimiser import LearnerSettings
from turnwise.errors import SettingError
from turnwise.levels import TOKEN, Field
from turnwise.ports import Objective
from turnwise.signals import FROZEN, Signal

LIVE = frozenset(Signal) - FROZEN
SAME = {Signal.PROXIMAL: Signal.LOGP, Signal.OLD_VALUE: Signal.VALUE, Signal.OLD_ENTROPY: Signal.ENTROPY}
"""Frozen signals that are a live one, measured early."""

VALUE_FILE = "value_head.safetensors"


class LocalLearner:
    """A ``ports.Learner`` around any Transformers causal LM. Takes the model over: do not call it elsewhere."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings | None = None,
        *,
        critic: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings = settings or LearnerSettings()
        self.device = torch.device(device)
        self.dtype = self.settings.arithmetic(self.device)
        self.master = torch.float64 if self.dtype == torch.float64 else torch.float32
        model.to(device=self.device, dtype=self.master)  # type: ignore[call-arg]
        self.model = packed.adopt(model.eval())
        if self.settings.lora_rank:
            lora.inject(self.model, self.settings.lora_rank, self.settings.lora_alpha)
        self.head = packed.head(self.model)
        self.critic = self._value_head() if critic else None
        self.version = 0
        self.steps = 0  # taken
        self.skipped = 0  # not taken, because a loss or gradient was not finite
        self._reference: PreTrainedModel | None = None
        self._trained = {n: p for n, p in self._named() if p.requires_grad}
        heads = [n for n in self._trained if n.startswith("value/")]
        self._optimiser = optimiser.adamw(self._trained, self.settings, heads)

    def _value_head(self) -> nn.Linear:
        linear = nn.Linear(self.head.weight.shape[1], 1, device=self.device, dtype=self.master)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return linear

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((f"model/{n}", p) for n, p in self.model.named_parameters())
        if self.critic is not None:
            yield from ((f"value/{n}", p) for n, p in self.critic.named_parameters())

    # ------------------------------------------------------------ measuring
    @torch.no_grad()
    def measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        """The asked signals of every sampled token, without gradient, in the batch's own order."""
        live = frozenset(_live(s) for s in signals) - {Signal.REFERENCE}
        found: dict[Signal, Tensor] = {}
        rows = Field(batch.tree, TOKEN, torch.arange(batch.tree.count(TOKEN), device=batch.tree.device))
        for micro in batch.put(_row=rows).split(self.settings.positions):
            micro = micro.to(self.device)
            values = self._forward(micro, live, self.model)
            if Signal.REFERENCE in signals:
                values[Signal.REFERENCE] = self._measure_reference(micro)
            for signal, value in values.items():
                whole = found.setdefault(signal, value.x.new_zeros(batch.tree.count(TOKEN)))
                whole[micro["_row"].x] = value.x
        empty = torch.zeros(batch.tree.count(TOKEN), dtype=self.master)
        return {s: Field(batch.tree, TOKEN, found.get(_live(s), empty).to(batch.tree.device)) for s in signals}

    def _forward(self, batch: Batch, wanted: frozenset[Signal], model: PreTrainedModel) -> dict[Signal, Field]:
        """One pass over one micro-batch for LOGP, ENTROPY and VALUE, whichever are wanted."""
        if not wanted:
            return {}
        if Signal.VALUE in wanted and self.critic is None:
            raise SettingError("the signal 'value' was asked of a learner without a value head; write critic=True")
        linear = packed.head(model)
        out: dict[Signal, Tensor] = {}
        with self._autocast():
            h = packed.hidden_states(model, batch.sequences) if batch.sequences.ids.numel() else linear.weight[:0]
            h = h[batch.sequences.at - 1]  # the state *before* each sampled token
            if wanted & {Signal.LOGP, Signal.ENTROPY}:
                target, temperature = batch.token.x, batch.temperature.at(TOKEN).x
                ask = Signal.ENTROPY in wanted
                logp, entropy = token_logprobs(h, linear.weight, linear.bias, target, temperature, want_entropy=ask)
                out |= {Signal.LOGP: logp} if entropy is None else {Signal.LOGP: logp, Signal.ENTROPY: entropy}
        if Signal.VALUE in wanted and self.critic is not None:
            out[Signal.VALUE] = self.critic(h.to(self.master)).squeeze(1)
        return {s: Field(batch.tree, TOKEN, x) for s, x in out.items() if s in wanted}

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype) if self.dtype != self.master else nullcontext()

    def _measure_reference(self, batch: Batch) -> Field:
        wanted = frozenset({Signal.LOGP})
        if self.settings.lora_rank:
            with lora.disabled(self.model):
                return self._forward(batch, wanted, self.model)[Signal.LOGP]
        return self._forward(batch, wanted, self.reference())[Signal.LOGP]

    def reference(self) -> PreTrainedModel:
        """The frozen initial policy, copied when first asked for; it must be asked for before the first step."""
        if self._reference is None:
            if self.steps:
                raise SettingError(
                    f"the reference policy was first asked for after {self.steps} steps, when the initial weights were "
                    "gone; measure it, or call reference(), before the first update"
                )
            self._reference = copy.deepcopy(self.model).requires_grad_(False)
        return self._reference

    # ------------------------------------------------------------- updating
    def update(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """One optimiser step over the whole batch; if a loss or gradient is not finite, none, and nothing changes."""
        factor = self.settings.factor(self.steps)
        norm, taken = math.nan, False
        try:
            loss, sums = self._backward(batch, objective)
            if math.isfinite(loss):
                norm, taken = optimiser.guarded_step(self._optimiser, self.settings.clip, factor)
        finally:
            self._optimiser.zero_grad(set_to_none=True)  # half a gradient must not leak into the next update
        self.steps += taken
        self.skipped += not taken
        mine = {"loss": loss, "grad_norm": norm, "lr": self.settings.lr * factor, "skipped": float(not taken)}
        return {name: float(value) for name, value in sums.items()} | mine

    def _backward(self, batch: Batch, objective: Objective) -> tuple[float, dict[str, Tensor]]:
        """Add up losses, statistics and gradients over the micro-batches; stops at a loss that is not finite."""
        total = 0.0
        sums: dict[str, Tensor] = {}
        for micro in batch.split(self.settings.positions):
            micro = micro.to(self.device)
            loss, stats = objective(micro, self._forward(micro, objective.needs & LIVE, self.model))
            total += float(loss.detach())
            for name, value in stats.items():
                sums[name] = sums.get(name, 0) + torch.as_tensor(value).detach()
            if not math.isfinite(total):
                break
            if loss.requires_grad:  # a micro-batch without sampled tokens has nothing to say
                loss.backward()
        return total, sums

    # -------------------------------------------------------- giving weights
    def weights(self) -> Mapping[str, Tensor]:
        """Plain weights (adapters merged) by the base model's parameter names. They are the live ones: copy them before
        the next update."""
        if self.settings.lora_rank:
            return lora.merged(self.model)
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def export(self, path: str | Path) -> None:
        """A directory that ``AutoModelForCausalLM.from_pretrained`` loads; the value head lies beside the model."""
        folder = Path(path)
        with _quiet():
            (lora.plain(self.model) if self.settings.lora_rank else self.model).save_pretrained(folder)
        if self.critic is not None:
            save_file({n: p.detach().cpu() for n, p in self.critic.named_parameters()}, folder / VALUE_FILE)

    # ---------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """A snapshot after which updates go on bit for bit: {"tensors": by name, "scalars": JSON-able}."""
        tensors = {name: p.detach().clone() for name, p in self._trained.items()}
        tensors |= {f"optimiser/{n}": t for n, t in optimiser.moments(self._optimiser, self._trained).items()}
        if self._reference is not None:
            tensors |= {f"reference/{n}": p.detach().clone() for n, p in self._reference.named_parameters()}
        counts = {"version": self.version, "steps": self.steps, "skipped": self.skipped}
        return {"tensors": tensors, "scalars": {**counts, "frozen": self._frozen()}}

    def _frozen(self) -> float:
        """A fingerprint of the weights that are not trained and therefore not in the state."""
        return sum(float(p.detach().double().abs().sum()) for n, p in self._named() if n not in self._trained)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``, for a learner of the same model and settings."""
        tensors, scalars = state["tensors"], state["scalars"]
        _match(self._trained, {n: t for n, t in tensors.items() if n.startswith(("model/", "value/"))})
        if not math.isclose(scalars["frozen"], self._frozen(), rel_tol=1e-6):
            raise SettingError("this state belongs to adapters of another base model: their frozen weights differ")
        for name, p in self._trained.items():
            p.copy_(tensors[name])
        cut = lambda prefix: {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}  # noqa: E731
        optimiser.restore(self._optimiser, self._trained, cut("optimiser/"))
        self._reference = None
        if initial := cut("reference/"):
            self._reference = copy.deepcopy(self.model).requires_grad_(False)
            for name, p in self._reference.named_parameters():
                p.copy_(initial[name])
        self.version, self.steps, self.skipped = (int(scalars[k]) for k in ("version", "steps", "skipped"))


def _live(signal: Signal) -> Signal:
    return SAME.get(signal, signal)


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers draws a progress bar for every file it writes, right through ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _match(mine: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """A state of another model must not load by halves."""
    wrong = list(mine.keys() ^ saved.keys()) or [n for n in mine if mine[n].shape != saved[n].shape]
    if wrong:
        raise SettingError(
            f"this state is of another model or other settings (critic, lora_rank): {len(wrong)} tensors differ, "
            f"first {sorted(wrong)[0]!r}"
        )


__all__ = ["LearnerSettings", "LocalLearner"]
