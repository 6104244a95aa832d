"""TRL's GRPOTrainer with any of our objectives: ``GRPOTrainer(..., method="sapo", method_options={...})``.

TRL does data, generation, tools, rewards, vLLM, accelerate, checkpoints and logs. Turnwise computes the credit (rewards to
advantages) and the loss. TRL cuts a generation into slices and accumulates several of them into one optimiser step: we compute
credit over the whole generation and plan over all slices of a step on all processes, so that slices simply sum. Private
interfaces of TRL are used in ``compat`` only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from turnwise.algebra import diagnostics
from turnwise.algebra.objective import Objective
from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import TOKEN, TRAJECTORY, Field
from turnwise.core.signals import Signal
from turnwise.integrations import compat, padded
from turnwise.integrations.trl_arguments import check, recipe_of
from turnwise.recipes.recipe import Recipe

TRLTrainerBase: Any = compat.trl_trainer_base()  # before the imports below: it says which TRL is needed

from accelerate.utils import gather_object  # noqa: E402
from trl import GRPOConfig  # noqa: E402

ROW, MEMORY_FILE = "turnwise_row", "turnwise.json"
FORWARD_INPUTS = (  # what TRL's forward pass takes besides ids and masks
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


class GRPOTrainer(TRLTrainerBase):
    """TRL's trainer; ``method`` is a name (see ``turnwise list``) or a Recipe, ``method_options`` its hyper-parameters."""

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
        self._current_step: AccumulatedStep | None = None  # the optimiser step being accumulated
        self._rows_generated = 0  # so far: seeds the random numbers of each row
        user_beta = args.beta
        # makes TRL keep a reference policy and compute its log-probabilities; our loss never reads beta
        if Signal.REFERENCE in self.objective.signals:
            args.beta = 1.0
        try:
            super().__init__(model, reward_funcs, args, *others, **more)
        finally:
            args.beta = user_beta

    # ------------------------------------------------------------ credit
    def on_rewards(self, rewards: Tensor) -> None:
        self._rewards: Tensor = rewards  # (rows of all processes, reward functions)

    def on_generation(self, out: dict[str, Any]) -> dict[str, Any]:
        packed = self._pack(out, self.num_generations if self.model.training else self.num_generations_eval)
        if packed.tokens:
            packed = replace(packed, batch=self._objective().credit(packed.batch))
        self._credited = packed
        n, width = out["completion_ids"].shape
        out[ROW] = torch.arange(n, device=packed.position.device) + n * self.accelerator.process_index
        dense = torch.zeros(packed.mask.shape)
        if packed.tokens:
            dense = packed.dense(packed.batch[Column.ADVANTAGE]).float()
        out["advantages"] = dense.to(out[ROW].device)[out[ROW]][:, :width]
        self.replace_logged_advantages((dense.sum(1) / packed.mask.sum(1).clamp(min=1).to(dense.device)).tolist())
        return out

    def _objective(self) -> Objective:
        if self.model.training:
            return self.objective
        # in an evaluation the method's memory must not change
        return replace(self.objective, memory=deepcopy(self.objective.memory))

    def _pack(self, out: dict[str, Any], size: int) -> PackedRows:
        """The generated rows of all processes as one batch, without rows that have no reward or that admission drops."""
        columns = self._measure(out)
        sampled = out["completion_mask"] * out["tool_mask"] if "tool_mask" in out else out["completion_mask"]
        mask = self._gather(sampled).bool()
        reward = (self._rewards * self.reward_weights.to(mask.device)).nansum(1)
        rows = torch.arange(mask.shape[0], device=mask.device)
        trained_rows = admitted_rows(self.recipe, reward, ~self._rewards.isnan().all(1), size, self._rows_generated)
        prepend = padded.PREPEND
        unknown = torch.full(mask.shape, torch.nan, device=mask.device)
        behaviour = columns.pop("behaviour", None)
        batch = padded.from_padded(
            prepend(self._gather(out["completion_ids"])),
            prepend(mask),
            logp=prepend(unknown if behaviour is None else behaviour),
            reward=reward,
            group=rows // size,
            **{name: prepend(value) for name, value in columns.items()},
        )
        named = {n: Field(batch.tree, TRAJECTORY, r) for n, r in zip(self.reward_func_names, self._rewards.float().T)}
        seeds = Field(batch.tree, TRAJECTORY, (self._rows_generated + rows) * 2654435761 % 2**32)
        self._rows_generated += rows.numel() * self.model.training
        batch = replace(batch, reward_components=named, seed=seeds)
        return PackedRows(batch, rows, mask, behaviour is not None).select(trained_rows)

    @torch.no_grad()
    def _measure(self, out: dict[str, Any]) -> dict[str, Tensor]:
        """Signals of the rows before the first update on them, from all processes; TRL's own values where it has them."""
        signals, old, entropy = self.objective.signals, out.get("old_per_token_logps"), None
        if Signal.OLD_ENTROPY in signals or (Signal.PROXIMAL in signals and old is None):
            train = self.model.training
            size = self.args.per_device_train_batch_size if train else self.args.per_device_eval_batch_size
            measured, entropy, _ = self._forward(self.model, out, batch_size=size)
            old = measured if old is None else old
        behaviour = old
        if self.use_vllm and self.vllm_importance_sampling_correction and old is not None:  # TRL then computes both
            sampled = out["sampling_per_token_logps"]  # NaN: vLLM could not score that token
            behaviour = torch.where(sampled.isnan(), old, sampled)
        columns = {
            "behaviour": behaviour,
            str(Signal.PROXIMAL): old,
            str(Signal.OLD_ENTROPY): entropy,
            str(Signal.REFERENCE): out.get("ref_per_token_logps"),
        }
        return {name: self._gather(value.float()) for name, value in columns.items() if value is not None}

    def _gather(self, x: Tensor) -> Tensor:
        return self.accelerator.gather(self.accelerator.pad_across_processes(x, dim=1) if x.dim() > 1 else x)

    # -------------------------------------------------------------- loss
    def _forward(self, model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        options |= {name: inputs[name] for name in FORWARD_INPUTS if name in inputs}
        output: tuple[Tensor, Tensor, Tensor | None] = self.logps_and_entropies(model, ids, attention, width, **options)
        return output

    def policy_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        training = self.model.training
        step = self._current_step if training else None
        slices = [] if step is not None else self.slices_of_step() if training else [inputs]
        before_step = self._signals_before_step(slices)
        logp, entropy, aux = self._forward(model, inputs, compute_aux_loss=self.aux_loss_enabled)
        live = {Signal.LOGP: logp.float(), Signal.ENTROPY: entropy.float()}
        if step is None:
            step = self._plan_step(slices, before_step or [live])
        # undo the averaging of gradients over processes
        loss = step.loss(inputs[ROW], live) * self.accelerator.num_processes
        if not step.remaining:
            # add the step's statistics, summed over slices and processes, to TRL's metrics
            totals: dict[str, float] = {}
            for sums in gather_object([{name: float(value) for name, value in step.sums.items()}]):
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + value
            metrics = self.logged_metrics()
            for name, value in diagnostics.finish(totals).items():
                metrics["entropy" if name == Signal.ENTROPY else f"turnwise/{name}"].append(value)
        if training:
            self._current_step = step if step.remaining else None
        if aux is not None:
            self.logged_metrics()["aux_loss"].append(float(aux.detach()))
            slices_of_mean = self.current_gradient_accumulation_steps if training else 1
            loss = loss + self.router_aux_loss_coef * aux / slices_of_mean
        return loss

    @torch.no_grad()
    def _signals_before_step(self, slices: list[dict[str, Any]]) -> list[dict[Signal, Tensor]]:
        # the current policy's signals on all slices, if the method plans with them. Computed before the pass
        # with gradient, not inside it: sharded weights are gathered and freed in the order of one pass
        if len(slices) < 2 or not self.objective.signals_before_step:
            return []
        outputs = [self._forward(self.model, part) for part in slices]
        return [{Signal.LOGP: logp.float(), Signal.ENTROPY: entropy.float()} for logp, entropy, _ in outputs]

    def _plan_step(self, slices: list[dict[str, Any]], live: list[dict[Signal, Tensor]]) -> AccumulatedStep:
        objective = self._objective()
        rows = self._gather(torch.cat([part[ROW] for part in slices]))
        packed = self._credited.select(rows)
        before_step = {}  # signals of the current policy over the whole step, where the method plans with them
        if objective.signals_before_step:
            for signal in (Signal.LOGP, Signal.ENTROPY):
                values = self._gather(torch.cat([part[signal].detach() for part in live]))
                before_step[signal] = packed.field(values, rows)
        if packed.tokens:
            batch = packed.batch.put(before_step)
            if Signal.LOGP in before_step and not packed.has_behaviour:
                batch = replace(batch, behaviour=before_step[Signal.LOGP])
            packed = replace(packed, batch=objective.plan(batch))
        return AccumulatedStep(objective, packed, len(slices))

    # ------------------------------------------------------- checkpoints
    def save_state(self, folder: str) -> None:
        with open(os.path.join(folder, MEMORY_FILE), "w", encoding="utf-8") as file:
            json.dump({"seen": self._rows_generated, **self.objective.memory.state_dict()}, file)

    def load_state(self, folder: str) -> None:
        path = os.path.join(folder, MEMORY_FILE)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                state = json.load(file)
            self._rows_generated = int(state["seen"])
            self.objective.memory.load_state_dict(state)


# ------------------------------------------------- rows of a generation, as one batch


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Some of the generated rows, packed. ``position``: the trajectory of each row in ``batch`` (−1: not contained)."""

    batch: Batch
    position: Tensor  # [all rows]
    mask: Tensor  # [all rows, L] True at sampled tokens
    # whether behaviour log-probabilities are known; else the current policy is the behaviour policy
    has_behaviour: bool

    @property
    def tokens(self) -> int:
        return self.batch.tree.count(TOKEN)

    def select(self, rows: Tensor) -> PackedRows:
        """Only these rows, in this order, as far as they are contained."""
        contained = rows[self.position[rows] >= 0]
        position = torch.full_like(self.position, -1)
        position[contained] = torch.arange(contained.numel(), device=position.device)
        return replace(self, batch=self.batch.select(self.position[contained]), position=position)

    def field(self, value: Tensor, rows: Tensor) -> Field:
        """Values (rows, L) as a field, for the batch of exactly these rows."""
        contained = self.position[rows] >= 0
        return Field(self.batch.tree, TOKEN, value[contained][self.mask[rows[contained]][:, : value.shape[1]]])

    def dense(self, value: Field) -> Tensor:
        """A field as a tensor (all rows, L), 0 where it has no value."""
        rows = torch.empty_like(self.position[self.position >= 0])
        rows[self.position[self.position >= 0]] = (self.position >= 0).nonzero().squeeze(1)
        part = torch.zeros((rows.numel(), self.mask.shape[1]), dtype=value.x.dtype, device=self.mask.device)
        part[self.mask[rows]] = value.at(TOKEN).x
        out = torch.zeros(self.mask.shape, dtype=value.x.dtype, device=self.mask.device)
        out[rows] = part
        return out


@dataclass
class AccumulatedStep:
    """An optimiser step being accumulated: its plan, the number of remaining slices, and the statistics so far."""

    objective: Objective
    rows: PackedRows
    remaining: int
    sums: dict[str, Tensor] = field(default_factory=dict)

    def loss(self, rows: Tensor, live: dict[Signal, Tensor]) -> Tensor:
        """The summand of these rows in the loss of the whole step."""
        self.remaining -= 1
        part = self.rows.select(rows)
        if not part.tokens:
            return live[Signal.LOGP].sum() * 0.0  # every process must still run its backward pass
        policy = {name: part.field(value, rows) for name, value in live.items()}
        batch = part.batch if part.has_behaviour else replace(part.batch, behaviour=policy[Signal.LOGP].detach())
        output = self.objective(batch, policy)
        for name, value in output.stats.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(value, dtype=torch.float64)) + value.double()
        return output.loss


# ------------------------------------------------------------------ admission


@dataclass(frozen=True)
class ScoredRow:
    """What an admission rule reads of a trajectory."""

    id: str
    reward: float


@dataclass(frozen=True)
class ScoredGroup:
    """What an admission rule reads of a group."""

    trajectories: tuple[ScoredRow, ...]


def admitted_rows(recipe: Recipe, reward: Tensor, scored: Tensor, size: int, first: int) -> Tensor:
    """The rows a method trains on: those with a reward that its admission rule accepts, by groups of ``size`` rows."""
    rewards, has_reward = reward.tolist(), scored.tolist()
    indices: list[int] = []
    for start in range(0, len(rewards), size):
        rows = [k for k in range(start, min(start + size, len(rewards))) if has_reward[k]]
        group = ScoredGroup(tuple(ScoredRow(str(first + k), rewards[k]) for k in rows))
        verdict = recipe.admission(cast(Any, group)) if rows else "nothing to train on"
        if not isinstance(verdict, str):
            indices += [int(row.id) - first for row in verdict.trajectories]
    return torch.tensor(indices, dtype=torch.int64, device=reward.device)


__all__ = ["GRPOTrainer"]
