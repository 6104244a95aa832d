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
from turnwise.engines import gauges, lora, optimiser, packed
from turnwise.engines.logprobs import token_logprobs
from turnwise.engines.noise import Noise
from turnwise.engines.optimiser import LearnerSettings
from turnwise.errors import SettingError
from turnwise.levels import BATCH, TOKEN, TRAJECTORY, TURN, Field
from turnwise.ports import Objective
from turnwise.signals import LIVE, Signal, level_of

SAME = {
    Signal.PROXIMAL: Signal.LOGP,
    Signal.OLD_VALUE: Signal.VALUE,
    Signal.OLD_TWIN: Signal.TWIN,
    Signal.OLD_ENTROPY: Signal.ENTROPY,
}
"""Frozen signals that are a live one, measured early."""

VALUE_FILE = "value_head.safetensors"


class LocalLearner:
    """A ``ports.Learner`` around any Transformers causal LM. Takes the model over: do not call it elsewhere."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings | None = None,
        *,
        critic: int = 0,
        noise: Any = None,
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
        self.critic = self._value_head(int(critic)) if critic else None
        self.noise = Noise(packed.layers(self.model), noise.sigma, self.device, self.master) if noise else None
        self.version = 0
        self.steps = 0  # taken
        self.skipped = 0  # not taken, because a loss or gradient was not finite
        self._reference: PreTrainedModel | None = None
        self._previous: PreTrainedModel | None = None
        self._trained = {n: p for n, p in self._named() if p.requires_grad}
        rates = {"value/": self.settings.value_lr, "noise/": noise.rate if noise else None}
        self._optimiser = optimiser.adamw(self._trained, self.settings, rates)

    def _value_head(self, heads: int) -> nn.Linear:
        linear = nn.Linear(self.head.weight.shape[1], heads, device=self.device, dtype=self.master)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return linear

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((f"model/{n}", p) for n, p in self.model.named_parameters())
        if self.critic is not None:
            yield from ((f"value/{n}", p) for n, p in self.critic.named_parameters())
        if self.noise is not None:
            yield "noise/log_sigma", self.noise.log_sigma

    # ------------------------------------------------------------ measuring
    @torch.no_grad()
    def measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        """The asked signals of the batch, without gradient, in the batch's own order."""
        sizes = {level: batch.tree.count(level) for level in (TOKEN, TURN, TRAJECTORY)}
        rows = {f"_{level.name}": batch.tree.field(level, torch.arange(n)) for level, n in sizes.items()}
        found = {s: torch.zeros(sizes[level_of(s)], dtype=self.master, device=self.device) for s in signals}
        for micro in batch.put(rows).split(self.settings.positions):
            micro = micro.to(self.device)
            for signal, value in self._measured(micro, signals).items():
                found[signal][micro[f"_{value.level.name}"].x] = value.x.to(self.master)
        if Signal.PREVIOUS in signals:  # asked once for each batch, before its first update
            self._previous = _frozen_copy(self.model)
        return {s: Field(batch.tree, level_of(s), x.to(batch.tree.device)) for s, x in found.items()}

    def _measured(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        """One micro-batch."""
        live = self._forward(batch, frozenset(SAME.get(s, s) for s in signals) & LIVE, self.model)
        out = {s: live[SAME.get(s, s)] for s in signals if SAME.get(s, s) in live}
        if Signal.REFERENCE in signals:
            out[Signal.REFERENCE] = self._logp_of_reference(batch)
        if Signal.PREVIOUS in signals:
            model = self._previous or self.model
            out[Signal.PREVIOUS] = self._forward(batch, frozenset({Signal.LOGP}), model)[Signal.LOGP]
        if Signal.GRADIENT_NORM in signals:
            out[Signal.GRADIENT_NORM] = gauges.gradient_norms(batch, self._logp_for_norms, list(self._policy()))
        if Signal.ANSWER in signals:
            out[Signal.ANSWER] = gauges.answers(batch, self._logp_of)
        if Signal.HELLINGER in signals:
            out[Signal.HELLINGER] = gauges.hellinger(batch, self._states(batch), self._reference_states(batch))
        if gauges.PUSHES & signals:
            pushes = gauges.pushes(batch, self._states(batch), self._preconditioner())
            out |= {s: f for s, f in pushes.items() if s in signals}
        return out

    def _policy(self) -> Iterator[nn.Parameter]:
        return (p for n, p in self._trained.items() if n.startswith("model/"))

    def _logp_of(self, batch: Batch) -> Field:
        return self._forward(batch, frozenset({Signal.LOGP}), self.model)[Signal.LOGP]

    @torch.enable_grad()
    def _logp_for_norms(self, batch: Batch) -> Field:
        return self._logp_of(batch)

    def _states(self, batch: Batch, model: PreTrainedModel | None = None) -> gauges.States:
        """What the head reads before each sampled token, and the head."""
        chosen, linear = model or self.model, packed.head(model or self.model)
        with self._autocast():
            h = packed.hidden_states(chosen, batch.sequences) if batch.sequences.ids.numel() else linear.weight[:0]
            h = h[batch.sequences.at - 1]
        return gauges.States(h.to(self.master), linear.weight, linear.bias)

    def _reference_states(self, batch: Batch) -> gauges.States:
        if self.settings.lora_rank:
            with lora.disabled(self.model):
                return self._states(batch)
        return self._states(batch, self.reference())

    def _preconditioner(self) -> Tensor:
        """lr · P of the head's weights: what AdamW would make of one token's gradient."""
        rate = self.settings.lr * self.settings.factor(self.steps)
        weight = self.head.weight
        return rate * optimiser.preconditioner(self._optimiser, weight, self.settings)

    def _forward(self, batch: Batch, wanted: frozenset[Signal], model: PreTrainedModel) -> dict[Signal, Field]:
        """One pass over one micro-batch for LOGP, ENTROPY and VALUE, whichever are wanted."""
        if not wanted:
            return {}
        heads = 0 if self.critic is None else self.critic.out_features
        if wanted & {Signal.VALUE, Signal.TWIN} and heads < (2 if Signal.TWIN in wanted else 1):
            raise SettingError(
                f"values were asked of a learner with {heads} value heads; write critic=1, or 2 for twins"
            )
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
        if wanted & {Signal.VALUE, Signal.TWIN} and self.critic is not None:
            out |= dict(zip((Signal.VALUE, Signal.TWIN), self.critic(h.to(self.master)).unbind(1)))
        return {s: Field(batch.tree, TOKEN, x) for s, x in out.items() if s in wanted}

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype) if self.dtype != self.master else nullcontext()

    def _logp_of_reference(self, batch: Batch) -> Field:
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
            self._reference = _frozen_copy(self.model)
        return self._reference

    # ------------------------------------------------------------- updating
    def update(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """One optimiser step over the whole batch; if a loss or gradient is not finite, none, and nothing changes."""
        factor = self.settings.factor(self.steps)
        norm, taken, rate = math.nan, False, 1.0
        try:
            loss, sums, sides, planned = self._backward(batch, objective)
            if math.isfinite(loss):
                scales = objective.scales(planned, self._gradients(), sides)
                optimiser.scale(self._optimiser, scales.gradient)
                sums |= {"scale/gradient": torch.tensor(scales.gradient), "scale/rate": torch.tensor(scales.rate)}
                rate = scales.rate
                norm, taken = optimiser.guarded_step(self._optimiser, self.settings.clip, factor * rate)
        finally:
            self._optimiser.zero_grad(set_to_none=True)  # half a gradient must not leak into the next update
        self.steps += taken
        self.skipped += not taken
        mine = {"loss": loss, "grad_norm": norm, "lr": self.settings.lr * factor * rate, "skipped": float(not taken)}
        return {name: float(value) for name, value in sums.items()} | mine

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trained.values() if p.grad is not None]

    def _backward(
        self, batch: Batch, objective: Objective
    ) -> tuple[float, dict[str, Tensor], dict[str, list[Tensor]], Batch]:
        """Add up losses, statistics and gradients over the micro-batches; stops at a loss that is not finite."""
        total = 0.0
        sums: dict[str, Tensor] = {}
        sides: dict[str, list[Tensor]] = {}
        step = batch
        for planned, micro, policy in self._micros(batch, objective):
            step, found = planned, objective(micro, policy)
            total += float(found.loss.detach())
            for name, value in found.stats.items():
                sums[name] = sums.get(name, 0) + torch.as_tensor(value).detach()
            if not math.isfinite(total):
                break
            for name, side in found.sides.items():
                self._add_side(sides.setdefault(name, []), side)
            if found.loss.requires_grad:  # a micro-batch without sampled tokens has nothing to say
                found.loss.backward()
        return total, sums, sides, step

    def _micros(self, batch: Batch, objective: Objective) -> Iterator[tuple[Batch, Batch, dict[Signal, Field]]]:
        """(the planned step, a micro-batch of it, its live signals). Where the step is one micro-batch, planning looks at
        the very forward pass that is differentiated; otherwise it costs a pass of its own."""
        batch = batch.put(vocabulary=batch.tree.full(BATCH, float(self.head.weight.shape[0])))
        parts = list(batch.split(self.settings.positions)) if objective.foresees else []
        if len(parts) == 1 and objective.foresees <= LIVE and self.noise is None:
            micro = parts[0].to(self.device)
            policy = self._forward(micro, objective.live, self.model)
            planned = objective.plan(micro.put({s: f.detach() for s, f in policy.items()}))
            yield planned, planned, policy
            return
        if objective.foresees:
            batch = batch.put(self.measure(batch, objective.foresees))
        planned = objective.plan(batch)
        for number, micro in enumerate(planned.split(self.settings.positions)):
            micro = micro.to(self.device)
            with self.noise.on(self.steps, number) if self.noise else nullcontext():
                policy = self._forward(micro, objective.live, self.model)
            yield planned, micro, policy

    def _add_side(self, grads: list[Tensor], side: Tensor) -> None:
        """Collect the gradient of another scalar beside the main one."""
        trained = list(self._trained.values())
        if not grads:
            grads += [torch.zeros_like(p) for p in trained]
        if side.requires_grad:
            found = torch.autograd.grad(side, trained, retain_graph=True, allow_unused=True)
            for total, g in zip(grads, found):
                if g is not None:
                    total += g

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
        for name, model in (("reference", self._reference), ("previous", self._previous)):
            if model is not None:
                tensors |= {f"{name}/{n}": p.detach().clone() for n, p in model.named_parameters()}
        counts = {"version": self.version, "steps": self.steps, "skipped": self.skipped}
        return {"tensors": tensors, "scalars": {**counts, "frozen": self._frozen()}}

    def _frozen(self) -> float:
        """A fingerprint of the weights that are not trained and therefore not in the state."""
        return sum(float(p.detach().double().abs().sum()) for n, p in self._named() if n not in self._trained)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``, for a learner of the same model and settings."""
        tensors, scalars = state["tensors"], state["scalars"]
        _match(self._trained, {n: t for n, t in tensors.items() if n.startswith(("model/", "value/", "noise/"))})
        if not math.isclose(scalars["frozen"], self._frozen(), rel_tol=1e-6):
            raise SettingError("this state belongs to adapters of another base model: their frozen weights differ")
        for name, p in self._trained.items():
            p.copy_(tensors[name])
        cut = lambda prefix: {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}  # noqa: E731
        optimiser.restore(self._optimiser, self._trained, cut("optimiser/"))
        self._reference, self._previous = self._restored(cut("reference/")), self._restored(cut("previous/"))
        self.version, self.steps, self.skipped = (int(scalars[k]) for k in ("version", "steps", "skipped"))

    def _restored(self, saved: Mapping[str, Tensor]) -> PreTrainedModel | None:
        """A frozen copy of the model with saved weights, where there are any."""
        if not saved:
            return None
        model = _frozen_copy(self.model)
        for name, p in model.named_parameters():
            p.copy_(saved[name])
        return model


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).requires_grad_(False)


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
