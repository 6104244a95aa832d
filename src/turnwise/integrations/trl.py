"""TRL's GRPOTrainer with any of our objectives: ``GRPOTrainer(..., method="sapo", method_options={...})``.

Data, generation, tools, rewards, vLLM, accelerate, checkpoints and logs are TRL's. Ours are the credit, where rewards become
advantages, and the loss. TRL cuts what it generated into slices and accumulates some of them into one optimiser step;
credit is computed of all that was generated, the plan of all slices of a step on all processes. Slices then just sum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from turnwise.algebra import diagnostics
from turnwise.algebra.objective import Objective
from turnwise.core.levels import TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.integrations import padded
from turnwise.integrations.trainer_rows import Held, Step, admitted, begin
from turnwise.integrations.trl_arguments import check, recipe_of
from turnwise.recipes.recipe import Recipe

try:
    import trl
    from accelerate.utils import gather_object
    from trl import GRPOConfig
except ImportError as fault:
    raise ImportError(
        f"turnwise.integrations.trl needs TRL 1.16 or newer: pip install 'trl>=1.16' ({fault})"
    ) from fault

ROW, MEMORY = "turnwise_row", "turnwise.json"
INPUTS = (  # what TRL's forward pass takes besides ids and masks
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's trainer; ``method`` is a name (see ``turnwise list``) or a Recipe, ``method_options`` its hyper-parameters."""

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "turnwise"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *others: Any,
        method: str | Recipe,
        method_options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        name = method if isinstance(method, str) else ""
        args = args or GRPOConfig("turnwise-" + (name or "recipe"))
        self.recipe = recipe_of(method, dict(method_options or {}))
        check(self.recipe, name, args)
        self.objective: Objective = self.recipe.objective
        self._open: Step | None = None  # the optimiser step under way
        self._seen = 0  # rows generated so far: each gets lots of its own
        told = args.beta
        if Signal.REFERENCE in self.objective.needs:
            args.beta = 1.0  # makes TRL keep a reference policy and measure with it; our loss never reads it
        try:
            super().__init__(model, reward_funcs, args, *others, **more)
        finally:
            args.beta = told

    # ------------------------------------------------------------ credit
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards: Tensor = super()._calculate_rewards(*args, **kwargs)  # (rows of all processes, functions)
        return self._rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out: dict[str, Any] = super()._generate_and_score_completions(inputs)
        held = self._hold(out, self.num_generations if self.model.training else self.num_generations_eval)
        if held.tokens:
            held = replace(held, batch=self._objective().credit(held.batch))
        self._credited = held
        n, width = out["completion_ids"].shape
        out[ROW] = torch.arange(n, device=held.place.device) + n * self.accelerator.process_index
        shown = held.dense(held.batch["advantage"]).float() if held.tokens else torch.zeros(held.mask.shape)
        out["advantages"] = shown.to(out[ROW].device)[out[ROW]][:, :width]
        rows = self._logs["advantages"]  # TRL's own, for the table of completions: ours stand there instead
        for _ in range(min(len(rows), shown.shape[0])):
            rows.pop()
        rows.extend((shown.sum(1) / held.mask.sum(1).clamp(min=1).to(shown.device)).tolist())
        return out

    def _objective(self) -> Objective:
        """In an evaluation, what the method remembers stays as it was."""
        return (
            self.objective if self.model.training else replace(self.objective, memory=deepcopy(self.objective.memory))
        )

    def _hold(self, out: dict[str, Any], size: int) -> Held:
        """All generated rows of all processes as one batch, less those without a reward or refused by the method."""
        columns = self._measure(out)
        mask = self._all(_mask(out)).bool()
        reward = (self._rewards * self.reward_weights.to(mask.device)).nansum(1)
        rows = torch.arange(mask.shape[0], device=mask.device)
        kept = admitted(self.recipe, reward, ~self._rewards.isnan().all(1), size, self._seen)
        wide = lambda x: torch.nn.functional.pad(x, (1, 0))  # noqa: E731
        unknown = torch.full(mask.shape, torch.nan, device=mask.device)
        behaviour = columns.pop("behaviour", None)
        batch = padded.from_padded(
            wide(self._all(out["completion_ids"])),
            wide(mask),
            logp=wide(unknown if behaviour is None else behaviour),
            reward=reward,
            group=rows // size,
            **{name: wide(value) for name, value in columns.items()},
        )
        named = {n: Field(batch.tree, TRAJECTORY, r) for n, r in zip(self.reward_func_names, self._rewards.float().T)}
        lots = Field(batch.tree, TRAJECTORY, (self._seen + rows) * 2654435761 % 2**32)
        self._seen += rows.numel() * self.model.training
        return Held(replace(batch, named=named, seed=lots), rows, mask, behaviour is not None).select(kept)

    @torch.no_grad()
    def _measure(self, out: dict[str, Any]) -> dict[str, Tensor]:
        """What is known of the rows before the first update on them, from all processes; TRL's own where it has it."""
        needs, old, entropy = self.objective.needs, out.get("old_per_token_logps"), None
        if Signal.OLD_ENTROPY in needs or (Signal.PROXIMAL in needs and old is None):
            train = self.model.training
            size = self.args.per_device_train_batch_size if train else self.args.per_device_eval_batch_size
            measured, entropy, _ = self._forward(self.model, out, batch_size=size)
            old = measured if old is None else old
        behaviour = old
        if self.use_vllm and self.vllm_importance_sampling_correction and old is not None:  # TRL measures both then
            sampled = out["sampling_per_token_logps"]  # NaN: vLLM could not score that token
            behaviour = torch.where(sampled.isnan(), old, sampled)
        found = {
            "behaviour": behaviour,
            str(Signal.PROXIMAL): old,
            str(Signal.OLD_ENTROPY): entropy,
            str(Signal.REFERENCE): out.get("ref_per_token_logps"),
        }
        return {name: self._all(value.float()) for name, value in found.items() if value is not None}

    def _all(self, x: Tensor) -> Tensor:
        """The rows of all processes."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(x, dim=1) if x.dim() > 1 else x)

    # -------------------------------------------------------------- loss
    def _forward(self, model: Any, inputs: dict[str, Any], **how: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        how |= {name: inputs[name] for name in INPUTS if name in inputs}
        return self._get_per_token_logps_and_entropies(model, ids, attention, width, compute_entropy=True, **how)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training = self.model.training
        step = self._open if training else None
        slices = self._slices(inputs) if step is None else []
        ahead = self._ahead(slices)
        logp, entropy, aux = self._forward(model, inputs, compute_aux_loss=self.aux_loss_enabled)
        live = {Signal.LOGP: logp.float(), Signal.ENTROPY: entropy.float()}
        if step is None:
            step = self._begin(slices, ahead or [live])
        loss = step.loss(inputs[ROW], live) * self.accelerator.num_processes  # gradients of processes are averaged
        if not step.left:
            self._report(step)
        if training:
            self._open = step if step.left else None
        if aux is not None:
            self._metrics["train" if training else "eval"]["aux_loss"].append(float(aux.detach()))
            loss = loss + self.router_aux_loss_coef * aux / (
                self.current_gradient_accumulation_steps if training else 1
            )
        return loss

    def _slices(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """All slices of the optimiser step that begins with this one."""
        if not self.model.training:
            return [inputs]
        first, count = self._step % self.args.steps_per_generation, self.current_gradient_accumulation_steps
        found: list[dict[str, Any]] = self._buffered_inputs[first : first + count]
        assert len(found) == count, "an optimiser step reaches into the next generation"
        return found

    @torch.no_grad()
    def _ahead(self, slices: list[dict[str, Any]]) -> list[dict[Signal, Tensor]]:
        """The present policy on all slices, if the method plans with it. Before the pass with gradient, not inside it:
        sharded weights are gathered and freed in the order of one pass."""
        if len(slices) < 2 or not self.objective.foresees:
            return []
        found = [self._forward(self.model, part) for part in slices]
        return [{Signal.LOGP: logp.float(), Signal.ENTROPY: entropy.float()} for logp, entropy, _ in found]

    def _begin(self, slices: list[dict[str, Any]], seen: list[dict[Signal, Tensor]]) -> Step:
        objective = self._objective()
        rows = self._all(torch.cat([part[ROW] for part in slices]))
        held = self._credited.select(rows)
        foreseen = {}
        if objective.foresees:
            for signal in (Signal.LOGP, Signal.ENTROPY):
                foreseen[signal] = held.field(self._all(torch.cat([part[signal].detach() for part in seen])), rows)
        return begin(objective, held, len(slices), foreseen)

    def _report(self, step: Step) -> None:
        """The step's numbers, summed over slices and processes, into TRL's own metrics."""
        totals: dict[str, float] = {}
        for mine in gather_object([{name: float(value) for name, value in step.sums.items()}]):
            for name, value in mine.items():
                totals[name] = totals.get(name, 0.0) + value
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in diagnostics.finish(totals).items():
            metrics["entropy" if name == Signal.ENTROPY else f"turnwise/{name}"].append(value)

    # ------------------------------------------------------- checkpoints
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            with open(os.path.join(folder, MEMORY), "w", encoding="utf-8") as file:
                json.dump({"seen": self._seen, **self.objective.memory.state_dict()}, file)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = os.path.join(checkpoint or "", MEMORY)
        if checkpoint and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                state = json.load(file)
            self._seen = int(state["seen"])
            self.objective.memory.load_state_dict(state)


def _mask(inputs: dict[str, Any]) -> Tensor:
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


__all__ = ["GRPOTrainer"]
