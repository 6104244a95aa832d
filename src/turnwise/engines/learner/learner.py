"""The local learner: measures signals of a batch and takes optimiser steps, in this process.

Micro-batches are an affair of memory only: their losses *sum*, and nothing is rescaled. The model never leaves
evaluation mode: dropout would make the learner another policy than the generator.

The learner does not know what it optimises: an objective arrives as a callable that says which signals it needs, and
``measuring`` gives them. It knows no rewards, no advantages, no method's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, Field
from turnwise.core.protocols import Objective
from turnwise.core.signals import LIVE, Signal
from turnwise.engines.kernels.dispatch import calm
from turnwise.engines.learner import llama_layers, lora, optimizer, packed_forward
from turnwise.engines.learner.layer_noise import Noise
from turnwise.engines.learner.optimizer import LearnerSettings
from turnwise.engines.learner.signals.measure import Measuring
from turnwise.engines.learner.value_heads import Critics
from turnwise.errors import SettingError

VALUE_FILE = "value_head.safetensors"
CRITIC = ("value/", "turns/", "critic/")


class LocalLearner:
    """A ``ports.Learner`` around any Transformers causal LM. Takes the model over: do not call it elsewhere."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings | None = None,
        *,
        critic: int = 0,
        turn_critic: bool = False,
        separate_critic: bool = False,
        teacher: PreTrainedModel | None = None,
        noise: Any = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """``critic``: value heads for tokens; ``turn_critic``: judge whole turns too; ``separate_critic``: with a trunk and
        an optimiser of its own. ``teacher``: a frozen model of the same vocabulary."""
        self.settings = settings or LearnerSettings()
        self.device = torch.device(device)
        calm(self.device)
        self.dtype = self.settings.arithmetic(self.device)
        self.master = torch.float64 if self.dtype == torch.float64 else torch.float32
        model.to(device=self.device, dtype=self.master)  # type: ignore[call-arg]
        self.model = packed_forward.adopt(model.eval())
        if self.settings.lora_rank:
            lora.inject(self.model, self.settings.lora_rank, self.settings.lora_alpha)
        if self.settings.recompute:
            packed_forward.recompute(self.model)
        self.head = packed_forward.head(self.model)
        self.critics = Critics(self.model, self.head.weight, int(critic), turn_critic, separate_critic)
        self.critic = self.critics.value
        self.noise = Noise(packed_forward.layers(self.model), noise.sigma, self.device, self.master) if noise else None
        if self.settings.lora_rank or self.noise is not None:  # its layers are not what they were when it was adopted
            llama_layers.forbid(
                self.model.get_decoder(), "adapters" if self.settings.lora_rank else "noise between its layers"
            )
        if self.settings.narrow:
            llama_layers.narrow(self.model.get_decoder())
        self.version = 0
        self.steps = 0  # taken
        self.skipped = 0  # not taken, because a loss or gradient was not finite
        self.measuring = Measuring(self, teacher)
        self._trained = {n: p for n, p in self._named() if p.requires_grad}
        self._own = {n: p for n, p in self._trained.items() if not (separate_critic and n.startswith(CRITIC))}
        rates = {**dict.fromkeys(CRITIC, self.settings.value_lr), "noise/": noise.rate if noise else None}
        self._optimiser = optimizer.adamw(self._own, self.settings, rates)
        apart = {n: p for n, p in self._trained.items() if n not in self._own}
        self._apart = optimizer.adamw(apart, self.settings, rates) if apart else None

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((f"model/{n}", p) for n, p in self.model.named_parameters())
        yield from self.critics.named()
        if self.noise is not None:
            yield "noise/log_sigma", self.noise.log_sigma
        if self.measuring.teacher is not None:
            yield from ((f"teacher/{n}", p) for n, p in self.measuring.teacher.named_parameters())

    def describe(self) -> str:
        """Which path it computes by, for a log."""
        arithmetic, master = (str(kind).removeprefix("torch.") for kind in (self.dtype, self.master))
        how = llama_layers.describe(self.model.get_decoder())
        return f"{how}, {arithmetic} on {self.device.type}" + (f", weights {master}" if master != arithmetic else "")

    @property
    def graphs(self) -> Any:
        """What captures its passes; None where nothing does."""
        fast = llama_layers.of(self.model.get_decoder())
        return None if fast is None else fast.body

    @property
    def _optimisers(self) -> list[torch.optim.Optimizer]:
        """The policy's, then that of a separate critic."""
        return [self._optimiser] if self._apart is None else [self._optimiser, self._apart]

    # ------------------------------------------------------------ measuring
    def measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        """The asked signals of the batch, without gradient, in the batch's own order."""
        return self.measuring.measure(batch, signals)

    def reference(self) -> PreTrainedModel:
        """The frozen initial policy, copied when first asked for; it must be asked for before the first step."""
        return self.measuring.reference()

    def policy(self) -> Iterator[nn.Parameter]:
        """The policy's trained weights."""
        return (p for n, p in self._trained.items() if n.startswith("model/"))

    def preconditioner(self) -> Tensor:
        """lr · P of the head's weights: what AdamW would make of one token's gradient."""
        rate = self.settings.lr * self.settings.factor(self.steps)
        return rate * optimizer.preconditioner(self._optimiser, self.head.weight, self.settings)

    # ------------------------------------------------------------- updating
    def update(
        self, batch: Batch, objective: Objective, meanwhile: Callable[[], object] | None = None
    ) -> dict[str, float]:
        """One optimiser step over the whole batch; if a loss or gradient is not finite, none, and nothing changes.
        ``meanwhile`` is called while a GPU still computes."""
        self.measuring.learn(batch)
        factor = self.settings.factor(self.steps)
        try:
            loss, sums, sides, planned = self._backward(batch, objective)
            scales = objective.scales(planned, self._gradients(), sides)
            optimizer.scale(self._optimiser, scales.gradient)
            if self.settings.offload:
                optimizer.move(self._optimisers, self.device)
            factors = [factor * scales.rate, factor]  # what the objective says of the rate is said of the policy
            movers = dict(zip(self._optimisers, factors))
            norms, taken = optimizer.guarded_step(movers, self.settings.clip, loss)
        finally:
            for mover in self._optimisers:
                mover.zero_grad(set_to_none=True)  # half a gradient must not leak into the next update
        if self.settings.offload:
            optimizer.move(self._optimisers, torch.device("cpu"))
        sums |= dict(zip(("grad_norm", "grad_norm/critic"), norms)) | {"loss": loss, "taken": taken}
        if meanwhile is not None:
            meanwhile()
        told = torch.stack([value.double().to(self.device) for value in sums.values()]).tolist()  # the first look
        found = dict(zip(sums, told))
        if done := bool(found.pop("taken")):
            self.critics.follow(self.settings.follow)
        self.steps += done
        self.skipped += not done
        found |= {"scale/gradient": scales.gradient, "scale/rate": scales.rate}
        return found | {"lr": self.settings.lr * factor * scales.rate, "skipped": float(not done)}

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._own.values() if p.grad is not None]

    def _backward(
        self, batch: Batch, objective: Objective
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, list[Tensor]], Batch]:
        """Add up losses, statistics and gradients over the micro-batches. The host looks at none of them: what it does
        meanwhile, a GPU need not wait for."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: dict[str, Tensor] = {}
        sides: dict[str, list[Tensor]] = {}
        step = batch
        for planned, micro, policy in self._micros(batch, objective):
            step, found = planned, objective(micro, policy)
            for name, side in found.sides.items():
                self._add_side(sides.setdefault(name, []), side)
            if found.loss.requires_grad:  # a micro-batch without sampled tokens has nothing to say
                with llama_layers.adding(self.model.get_decoder(), self.critics.trunk):
                    found.loss.backward()
            total += found.loss.detach()
            for name, value in found.stats.items():  # a GPU is busy with the backward pass
                sums[name] = sums.get(name, 0) + torch.as_tensor(value).detach()
        return total, sums, sides, step

    def _micros(self, batch: Batch, objective: Objective) -> Iterator[tuple[Batch, Batch, dict[Signal, Field]]]:
        """(the planned step, a micro-batch of it, its live signals). Where the step is one micro-batch, planning looks at
        the very forward pass that is differentiated; otherwise it costs a pass of its own."""
        batch = batch.put(vocabulary=batch.tree.full(BATCH, float(self.head.weight.shape[0])))
        parts = list(self._split(batch)) if objective.foresees else []
        if len(parts) == 1 and objective.foresees <= LIVE and self.noise is None:
            micro, policy = self.measuring.live(parts[0], objective.live)
            planned = objective.plan(micro.put({s: f.detach() for s, f in policy.items()}))
            yield planned, planned, policy
            return
        if objective.foresees:
            batch = batch.put(self.measure(batch, objective.foresees))
        planned = objective.plan(batch)
        moving, silent = self._apart_from_silent(planned)
        for part, pulled in ((moving, True), (silent, False)):
            for number, cut in enumerate(() if part is None else self._split(part)):
                with torch.set_grad_enabled(pulled), self.noise.on(self.steps, number) if self.noise else nullcontext():
                    micro, policy = self.measuring.live(cut, objective.live)
                yield planned, micro, policy

    def _apart_from_silent(self, planned: Batch) -> tuple[Batch, Batch | None]:
        """What has a gradient, and what the objective says has none: that is read for its statistics alone. If nothing has one,
        some of it is differentiated all the same: an optimiser with momentum moves on a gradient of zero, not on none."""
        quiet = planned.columns.get("silent")
        if quiet is None or self.noise is not None:
            return planned, None
        rows = quiet.x.to(torch.int64).tolist()
        moving, silent = ([k for k, still in enumerate(rows) if still == kind] for kind in (0, 1))
        if not moving:
            moving, silent = silent[:1], silent[1:]
        return (planned.select(moving), planned.select(silent)) if silent else (planned, None)

    def _split(self, batch: Batch) -> Iterator[Batch]:
        """Micro-batches. Only a GPU reads ragged sequences without padding them."""
        return batch.split(self.settings.positions, padded=self.device.type != "cuda")

    def _add_side(self, grads: list[Tensor], side: Tensor) -> None:
        """Collect the gradient of another scalar beside the main one."""
        trained = list(self._own.values())
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
        tensors |= {f"optimiser/{n}": t for n, t in optimizer.moments(self._optimisers, self._trained).items()}
        tensors |= {f"slow/{n}": p.detach().clone() for n, p in self.critics.slow_tensors().items()}
        tensors |= self.measuring.tensors()
        counts = {"version": self.version, "steps": self.steps, "skipped": self.skipped}
        return {"tensors": tensors, "scalars": {**counts, "frozen": self._frozen()}}

    def _frozen(self) -> float:
        """A fingerprint of the weights that are not trained and therefore not in the state."""
        return sum(float(p.detach().double().abs().sum()) for n, p in self._named() if n not in self._trained)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``, for a learner of the same model and settings."""
        tensors, scalars = state["tensors"], state["scalars"]
        _match(self._trained, {n: t for n, t in tensors.items() if n.startswith(("model/", "noise/", *CRITIC))})
        if not math.isclose(scalars["frozen"], self._frozen(), rel_tol=1e-6):
            raise SettingError(
                "this state belongs to adapters of another base model, or to another teacher: their frozen weights differ"
            )
        for name, p in self._trained.items():
            p.copy_(tensors[name])
        cut = lambda prefix: {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}  # noqa: E731
        optimizer.restore(self._optimisers, self._trained, cut("optimiser/"))
        for name, slow in self.critics.slow_tensors().items():
            slow.copy_(tensors[f"slow/{name}"])
        self.measuring.load(cut)
        self.version, self.steps, self.skipped = (int(scalars[k]) for k in ("version", "steps", "skipped"))


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
