"""A learner over several ranks: a local learner whose weights, gradients and optimizer state are shards (FSDP2).

Every rank has one. That of rank 0 is the run's: each call of it is broadcast, and all ranks make it (``rank_pool``). They deal
the trajectories of a batch alike, and each runs the model over its own micro-batches. The objective stays with rank 0, which may
be the only process that has its classes (a script, a notebook): it gets the live signals of each round of micro-batches, and
returns the gradient of the loss with respect to them. So only numbers of tokens travel, and no normaliser depends on the number
of ranks.

Every decoder layer is a group of parameters that FSDP gathers before the layer runs; everything else that is trained
(embeddings, head, final norm, value heads) is the root's group. Gradients of all ranks are summed and not averaged: the loss
is already normalised over the whole step. Frozen parameters are divided and gathered like the others, without a gradient. Frozen
matrices in 4 bits are buffers, which FSDP leaves alone: every rank has all of them.

    gather="block"   a layer's weights are whole only while it runs: the least memory. The model's own forward, because the
                     hand-written layers bypass the hooks by which FSDP gathers.
    gather="step"    all weights are whole during a step, and gradients are summed once, after the last micro-batch: fewer
                     collective operations, hand-written layers, and ranks may differ in the number of their forward passes.

Rank 0 also keeps one whole copy of the trained weights in host memory, for the generator and for export. Checkpoints need no
whole copy: every rank writes and reads its own part (``rank_state``).
"""

from __future__ import annotations

import contextlib
import functools
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field
from turnwise.core.protocols import LossProtocol, ObjectiveProtocol, ScalesProtocol
from turnwise.core.signals import WITH_GRADIENT, Signal, level_of
from turnwise.engines.learner import llama_layers, lora, optimizer, packed_forward
from turnwise.engines.learner.learner import LocalLearner
from turnwise.engines.learner.optimizer import LearnerSettings, whole
from turnwise.engines.learner.signals.measure import AUXILIARY, Fields, SignalMeasurer
from turnwise.engines.learner.value_heads import frozen_copy
from turnwise.engines.sharded.dealing import Round, Share, deal, stripped
from turnwise.engines.sharded.rank_pool import RankPool, start_ranks
from turnwise.engines.sharded.rank_state import OwnTensors, RankTensors, write_own
from turnwise.engines.sharded.served import LearnerNeeds, unserved_reason
from turnwise.errors import SettingError
from turnwise.store.shard_files import ShardFile, StoredTensors

Gather = Literal["block", "step"]
VARYING_FORWARDS = frozenset({Signal.ANSWER_LOGP, Signal.LOGP_WITHOUT_FEEDBACK})
"""Signals whose number of forward passes depends on the trajectories: weights stay whole while they are measured."""
REFERENCES = frozenset({Signal.REFERENCE, Signal.HELLINGER})
FIND_SECONDS = 15.0  # a network filesystem may show a file late
Gradients = dict[Signal, Tensor | None]
P = ParamSpec("P")
R = TypeVar("R")


def on_all_ranks(method: Callable[Concatenate[ShardedLearner, P], R]) -> Callable[Concatenate[ShardedLearner, P], R]:
    """Called on rank 0, a method runs on every rank, each time with the same arguments."""

    @functools.wraps(method)
    def call(self: ShardedLearner, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self, *args, **kwargs) if self.pool is None else self.pool.call(method, self, *args)

    return call


class ShardedLearner(LocalLearner):
    """A ``protocols.Learner`` whose weights, gradients and optimizer state are divided among the ranks of a pool."""

    pool: RankPool | None = None  # of rank 0
    files: Any  # a group of all ranks whose operations may take long

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings | None = None,
        *,
        ranks: int,
        signals: frozenset[Signal],
        gather: Gather | None = None,
        threads: int = 1,
        teacher: PreTrainedModel | None = None,
        device: torch.device | str = "cpu",
        pool: RankPool | None = None,
        folder: Path | None = None,
        **critic: Any,
    ) -> None:
        """``signals``: all that will be measured. ``gather``: None: by step on a CPU, where ranks share one memory, and by block
        on GPUs. ``threads``: of each rank. ``pool``: ranks that were started before, and end later. ``folder``: of the
        checkpoints; ranks on several machines also find the model there. ``critic``: as for the local learner."""
        settings = settings or LearnerSettings()
        reason = unserved_reason(LearnerNeeds(signals, dtype=settings.dtype, offload=settings.offload))
        if reason:
            raise SettingError(f"several ranks cannot serve this learner: {reason}; write ranks=1")
        device = torch.device(device)
        gather = gather or ("block" if device.type == "cuda" else "step")
        started = pool or start_ranks(ranks, device, threads)
        try:
            self.device, self.files = started.device, started.files
            place = started.several_machines and folder
            if place:
                self._check_shared(started, place)
            if settings.four_bit:  # packed once: the same numbers on all ranks, and in the copy that is published
                lora.quantise_frozen(model, settings.lora_rank, settings.compute_dtype(device), started.device)
            with tempfile.TemporaryDirectory(prefix="turnwise-ranks-", dir=place or None) as name:
                file = Path(name) / "start.pt"  # too large for a message, and shared by the ranks of a machine
                torch.save((model.cpu(), teacher), file)
                self.whole = LocalLearner(model, settings, teacher=teacher, device="cpu", **critic)
                started.call(ShardedLearner._build, self, file, settings, signals, gather, critic)
        except BaseException:
            if pool is None:
                started.close()
            raise
        self.pool, self._stale = started, False
        weakref.finalize(self, started.close if pool is None else int)

    def _check_shared(self, pool: RankPool, folder: Path) -> None:
        """Refuse a folder in which not every rank sees what rank 0 writes."""
        folder = folder.absolute()
        with tempfile.NamedTemporaryFile(prefix=".shared-", dir=folder) as mark:
            places = pool.call(ShardedLearner._machine_without, self, Path(mark.name))
        if missing := sorted({place for place in places if place}):
            raise SettingError(
                f"{folder} is not the same folder on all machines: {', '.join(missing)} cannot read what rank 0 writes there; "
                "put the run (--out) on a filesystem that they share, because every rank writes its own part of a checkpoint"
            )

    def _machine_without(self, file: Path) -> list[str]:
        """Of each rank, empty where it sees the file, else the name of its machine."""
        until = time.monotonic() + FIND_SECONDS
        while not file.is_file() and time.monotonic() < until:
            time.sleep(0.1)
        return self._gathered("" if file.is_file() else socket.gethostname())

    def _build(
        self,
        file: Path,
        settings: LearnerSettings,
        signals: frozenset[Signal],
        gather: Gather,
        critic: Mapping[str, Any],
    ) -> None:
        """Make this rank's part: a local learner of the whole model, then shards in place of its parameters."""
        model, teacher = torch.load(file, weights_only=False, mmap=True)
        super().__init__(model, settings, teacher=teacher, device=self.device, **critic)
        separate = packed_forward.runs_separately(self.model.get_decoder())  # as many passes as lengths of sequences
        self.gather: Gather = "step" if separate else gather
        self.measurer: RankMeasurer = RankMeasurer(self, self.measurer.teacher, signals)
        dist.barrier(group=self.files)
        self.rank = dist.get_rank()
        self.root = self._shard(init_device_mesh(self.device.type, (dist.get_world_size(),)))
        self.parts = [m for m in self.root.modules() if isinstance(m, FSDPModule)]
        for part in self.parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(
                True
            )  # in float32 FSDP would scale inside the sum, which gloo cannot
        self.head_parameter = self.head.weight
        self._make_optimizers()
        with self._whole_weights(False):
            self.root(dict)  # FSDP decides at the first pass which module is the root

    def _shard(self, mesh: Any) -> RankRoot:
        heads, frozen = self.value_heads, self.measurer.frozen_models()
        trained = {"policy": self.model, "critic": heads.trunk, "target": heads.target_trunk}
        for model in (*trained.values(), *frozen):
            if model is not None:
                decoder = model.get_decoder()
                layers = llama_layers.fast_path(decoder)
                if self.gather == "block":  # hand-written layers read weights where FSDP would not see it
                    llama_layers.disable(decoder, "sharded over ranks")
                elif layers is not None:  # only its dtype: do not keep whole weights alive
                    layers.weights = [w.new_empty(0) for w in layers.weights[:1]]
                for layer in packed_forward.decoder_layers(model):
                    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        modules = {**trained, "values": heads.token_heads, "turns": heads.turn_heads, "slow": heads.target_turn_heads}
        modules |= {f"frozen{n}": model for n, model in enumerate(frozen)}
        root = RankRoot({name: module for name, module in modules.items() if module is not None})
        replicated = {p for model in frozen for p in model.parameters() if not isinstance(p, DTensor)}
        return fully_shard(root, mesh=mesh, ignored_params=replicated)  # type: ignore[return-value]

    def close(self) -> None:
        """End the other ranks."""
        if self.pool is not None:
            self.pool.close()

    def describe(self) -> str:
        how = "layer by layer" if self.gather == "block" else "for each step"
        return f"FSDP2 over {dist.get_world_size()} ranks, weights gathered {how}; {super().describe()}"

    # ---------------------------------------------------------- among ranks
    def _gathered(self, value: Any, group: Any = None) -> list[Any]:
        """The values of all ranks, on rank 0; empty on the others."""
        first = dist.get_rank() == 0
        values: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(value, values, dst=0, group=group)
        return values or []

    def _told(self, value: Any) -> Any:
        """The value of rank 0."""
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    @contextlib.contextmanager
    def _whole_weights(self, needed: bool) -> Iterator[None]:
        """Inside, all weights are whole and no forward pass is collective, if ``needed``. Afterwards all are shards: FSDP leaves
        the root whole after a pass without gradient, and would read it again after the shards have changed."""
        for part in self.parts if needed else ():
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        finally:
            self.root.reshard()  # type: ignore[operator]
            for part in self.parts if needed else ():
                part.reshard()
                part.set_reshard_after_forward(part is not self.root, recurse=False)
                part.set_reshard_after_backward(True, recurse=False)

    def deal(self, batch: Batch) -> list[Round]:
        """Rounds of micro-batches, one for each rank."""
        return deal(batch, dist.get_world_size(), self.settings.positions, padded=self.device.type != "cuda")

    # ------------------------------------------------------------ measuring
    def reference(self) -> Any:
        """The reference was copied before the weights were divided, where ``signals`` name it."""
        return None

    def measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        """Measure ``signals`` without gradient, in the order of the batch."""
        return self._measure(stripped(batch), signals)

    @on_all_ranks
    def _measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        return super().measure(batch, signals)

    def preconditioner(self) -> Tensor:
        state = self._policy_optimizer.state.get(self.head_parameter, {})
        rate = self.settings.lr * self.settings.lr_factor(self.steps)
        weight = whole(self.head_parameter.detach())
        return rate * optimizer.preconditioner({k: whole(t) for k, t in state.items()}, weight, self.settings)

    # ------------------------------------------------------------- updating
    def update(
        self, batch: Batch, objective: ObjectiveProtocol, while_waiting: Callable[[], object] | None = None
    ) -> dict[str, float]:
        """Take one optimizer step over the whole batch, or change nothing if a loss or gradient is not finite."""
        assert self.pool is not None
        elsewhere = AbsentObjective(objective.signals_with_gradient, objective.signals_before_step)
        arguments = (stripped(batch), elsewhere)
        metrics = self.pool.call(ShardedLearner._update, self, batch, objective, of_others=arguments)
        self._stale = True
        if while_waiting is not None:
            while_waiting()
        return metrics

    def _update(self, batch: Batch, objective: ObjectiveProtocol) -> dict[str, float]:
        return super().update(batch, objective)

    def _backward(
        self, batch: Batch, objective: ObjectiveProtocol
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, list[Tensor]], Batch]:
        """Sum gradients over the micro-batches of all ranks; losses and statistics on rank 0, which evaluates the objective."""
        batch = batch.put(vocabulary_size=batch.tree.full(BATCH, float(self.head.weight.shape[0])))
        step, before = StepOfRank(self, objective), objective.signals_before_step
        empty = batch.tree.size(TOKEN, TRAJECTORY).x == 0
        single = self.deal(batch) if before and before <= WITH_GRADIENT and not bool(empty.any()) else []
        if before and len(single) != 1:
            batch = batch.put(self._measure(batch, before))
        with self._whole_weights(self.gather == "step"):
            if len(single) == 1:  # planning reads the pass that is differentiated
                planned = step.plan_and_differentiate(batch, single[0])
            else:
                planned = self._planned(objective, batch)
                with_gradient, without = self.split_by_gradient(planned)
                for part, gradient in ((without, False), (with_gradient, True)):
                    if part is not None:
                        step.differentiate(part, gradient)
        loss, sums = self._told((step.loss, step.sums))
        return loss, sums, {name: [whole(g).cpu() for g in grads] for name, grads in step.sides.items()}, planned

    def _planned(self, objective: ObjectiveProtocol, batch: Batch) -> Batch:
        """The planned step; ranks without the objective learn which trajectories have no gradient."""
        planned = objective.plan(batch)
        silent = self._told(planned.columns[Column.NO_GRADIENT].x if Column.NO_GRADIENT in planned.columns else None)
        return planned if silent is None else planned.put(no_gradient=Field(planned.tree, TRAJECTORY, silent))

    def _scales(
        self, objective: ObjectiveProtocol, planned: Batch, sides: Mapping[str, Sequence[Tensor]]
    ) -> ScalesProtocol:
        """Rank 0 asks the objective. The whole gradient is collected only if it reads that: until rank 0 tells the answer, the
        others may be told to take part."""
        collect = lambda: [whole(p.grad).cpu() for p in self._policy_group.values() if p.grad is not None]  # noqa: E731
        if self.rank == 0:
            gradients = GradientsWhenRead(lambda: (self._told("collect"), collect())[1])
            return self._told(objective.scales(planned, gradients, sides))
        while (answer := self._told(None)) == "collect":
            collect()
        return answer

    # -------------------------------------------------------------- weights
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by the base model's parameter names, adapters merged: the whole copy, valid until the next update."""
        self._refresh()
        return self.whole.weights()

    def export(self, path: str | Path) -> None:
        self._refresh()
        self.whole.export(path)

    def export_adapter(self, path: str | Path, base: str) -> bool:
        self._refresh()
        return self.whole.export_adapter(path, base)

    @torch.no_grad()
    def _refresh(self) -> None:
        """Bring the whole copy up to date."""
        if self._stale:
            weights = self._collected(list(self.trained))
            for name, p in self.whole.trained.items():
                p.copy_(weights[name])
            self._stale = False

    @on_all_ranks
    def _collected(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Whole tensors of the state, and of the reference, in host memory of rank 0; the others only contribute."""
        live = {**self._state_tensors(), **self.measurer.reference_tensors()}
        tensors = {name: whole(live[name]) for name in names}
        return {name: t.cpu() for name, t in tensors.items()} if self.rank == 0 else {}

    # ---------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """A snapshot in host memory of rank 0, with the reference."""
        names = [*self._state_tensors(), *self.measurer.reference_tensors()]
        tensors = {name: t.clone() for name, t in self._collected(names).items()}
        return {"tensors": tensors, "scalars": self._state_scalars()}

    def checkpoint_state(self) -> dict[str, Any]:
        """As the local learner's, under the same names. The tensors stay with their ranks, which write them."""
        tensors = RankTensors(list(self._state_tensors()), self._collected, self._write_files)
        return {"tensors": tensors, "scalars": self._state_scalars()}

    def _frozen(self) -> float:
        return self.whole._frozen()

    @on_all_ranks
    def _write_files(self, folder: Path) -> list[ShardFile]:
        """Every rank writes its part of a checkpoint; no rank waits for another one's disk before that."""
        return self._gathered(write_own(folder, self._state_tensors()), self.files)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state of a local learner, or of one with any number of ranks. If it is in files, each rank reads its own part."""
        self.whole.check_state(state)  # refuses the state of another model before any rank is touched
        tensors = state["tensors"]
        self._restore_own(tensors if isinstance(tensors, StoredTensors) else dict(tensors), state["scalars"])
        self._stale = True

    @on_all_ranks
    def _restore_own(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        self._restore(OwnTensors(tensors, self._like, self.device), scalars)
        dist.barrier(group=self.files)

    def _like(self, name: str) -> Tensor | None:
        """The tensor of this rank that holds what the state calls ``name``, or has its shape."""
        kind, _, rest = name.partition("/")
        if kind == "optimiser":
            return self.trained.get(rest.partition("/")[2])
        if kind == "slow":
            return self.value_heads.target_tensors().get(rest)
        copies = {"reference": self.measurer._reference, "previous": self.measurer.spare}
        if kind in copies:
            model = copies[kind]
            return None if model is None else dict(model.named_parameters()).get(rest)
        return self.trained.get(name)


class RankRoot(nn.Module):
    """The module whose forward FSDP surrounds: all models, and any work with them."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in models.items():
            self.add_module(name, module)

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class RankMeasurer(SignalMeasurer):
    """Measures with sharded models. They cannot be copied, so the models beside the policy are made before sharding."""

    learner: ShardedLearner
    spare: PreTrainedModel | None = None  # becomes the previous policy when a batch has been measured

    def __init__(self, learner: ShardedLearner, teacher: PreTrainedModel | None, signals: frozenset[Signal]) -> None:
        """``teacher``: prepared before."""
        super().__init__(learner, None)
        self.teacher = teacher
        if signals & REFERENCES and not learner.settings.lora_rank:
            self.reference()
        if Signal.PREVIOUS in signals:
            self.spare = frozen_copy(learner.model)

    def frozen_models(self) -> list[PreTrainedModel]:
        """Whole models that are never trained."""
        return [m for m in (self._reference, self.spare, self.teacher) if m is not None]

    def _measured(self, batch: Batch, signals: frozenset[Signal]) -> Iterator[tuple[Batch, Fields]]:
        """The micro-batches of all ranks; each rank measures its own."""
        learner, rank = self.learner, dist.get_rank()
        rounds = learner.deal(batch)
        varying = bool(signals & VARYING_FORWARDS) or any(not s.batch.sequences.ids.numel() for r in rounds for s in r)
        answers = []
        with learner._whole_weights(varying or learner.gather == "step"):
            for share in (shares[rank] for shares in rounds):
                wanted = signals if share.used else signals - AUXILIARY  # unused work must not be trained on
                micro = share.batch.to(learner.device)
                fields = learner.root(lambda b=micro, w=wanted: self.measure_micro_batch(b, w))
                answers.append({key: (f.level, f.x.cpu()) for key, f in fields.items()} if share.used else {})
        models = {s: self.auxiliary_model(s) for s in sorted(signals & AUXILIARY)}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (answers, {s: model.features.contents() for s, model in models.items()}))
        for signal, model in models.items():  # what all ranks have measured: all then train alike
            buffered = [features[signal] for _, features in every if features[signal] is not None]
            model.features.clear()
            for seed, rows in buffered:
                model.features.add(seed.to(learner.device), rows.to(learner.device))
        for n, (of_rank, _) in enumerate(every):
            for shares, fields in zip(rounds, of_rank):
                tree = shares[n].batch.tree
                yield shares[n].batch, {key: Field(tree, level, x) for key, (level, x) in fields.items()}

    @torch.no_grad()
    def _keep_previous(self) -> None:
        assert self.spare is not None
        _copy_weights(self.spare, {n: p.detach() for n, p in self.learner.model.named_parameters()})
        self._previous = self.spare

    def load(self, under: Callable[[str], Mapping[str, Tensor]]) -> None:
        if self._reference is not None and under("reference/"):
            _copy_weights(self._reference, under("reference/"))
        super().load(lambda prefix: {} if prefix in ("reference/", "previous/") else under(prefix))
        if self.spare is not None and under("previous/"):
            _copy_weights(self.spare, under("previous/"))
            self._previous = self.spare


def _copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        same = isinstance(p, DTensor) == isinstance(weights[name], DTensor)
        p.copy_(weights[name] if same else whole(weights[name]))


@dataclass(frozen=True)
class AbsentObjective:
    """Stands for the objective on ranks 1, 2 ...: only rank 0 has it."""

    signals_with_gradient: frozenset[Signal]
    signals_before_step: frozenset[Signal]

    def plan(self, batch: Batch) -> Batch:
        return batch


class StepOfRank:
    """One optimizer step: rank 0's sums of loss and statistics, and the gradients that every rank accumulates."""

    def __init__(self, learner: ShardedLearner, objective: ObjectiveProtocol) -> None:
        self.learner, self.objective, self.live = learner, objective, objective.signals_with_gradient
        self.loss = torch.zeros((), dtype=torch.float64)
        self.sums: dict[str, Tensor] = {}
        self.sides: dict[str, list[Tensor]] = {}  # gradients of additional scalars
        self.reached: set[Signal] = set()  # signals with a gradient so far

    def differentiate(self, part: Batch, gradient: bool) -> None:
        tokens = part.tree.size(TOKEN, TRAJECTORY).x
        empty, filled = ((tokens == 0).nonzero().squeeze(1), (tokens > 0).nonzero().squeeze(1))
        if len(empty) and self.learner.rank == 0:  # no model reads them, but they count in statistics
            share = Share(part.select(empty))
            zeros = {s: torch.zeros(share.batch.tree.count(level_of(s))) for s in self.live}
            self._add(self._loss_of(share, zeros, False)[1])
        rounds = self.learner.deal(part.select(filled)) if len(filled) else []
        for number, shares in enumerate(rounds):
            outputs, signals = self._compute(shares, gradient)
            self._backward(shares, outputs, signals, gradient, last=number + 1 == len(rounds))

    def plan_and_differentiate(self, batch: Batch, shares: Round) -> Batch:
        outputs, signals = self._compute(shares, gradient=True)
        planned = batch
        if signals:
            fields = {
                s: Field(batch.tree, level_of(s), x.new_zeros(batch.tree.count(level_of(s))))
                for s, x in signals[0].items()
            }
            for share, values in zip(shares, signals):
                for signal, x in values.items() if share.used else ():
                    fields[signal].x[share.rows(level_of(signal))] = x
            planned = self.objective.plan(batch.put(fields))
        planned_shares = [Share(planned.select(share.rows(TRAJECTORY)), share.used) for share in shares]
        self._backward(planned_shares, outputs, signals, gradient=True, last=True)
        return planned

    def _compute(self, shares: Round, gradient: bool) -> tuple[dict[Signal, Tensor], list[dict[Signal, Tensor]]]:
        """The live signals of this rank's micro-batch with their graph, and on rank 0 those of all ranks."""
        learner = self.learner
        measure = lambda: learner.measurer.live(shares[learner.rank].batch, self.live)[1]  # noqa: E731
        with torch.set_grad_enabled(gradient):
            # copies, because FSDP loses a view that is changed in place
            outputs = learner.root(lambda: {s: f.x.clone() for s, f in measure().items()})
        return outputs, learner._gathered({s: x.detach().cpu() for s, x in outputs.items()})

    def _backward(
        self,
        shares: Round,
        outputs: Mapping[Signal, Tensor],
        signals: Sequence[Mapping[Signal, Tensor]],
        gradient: bool,
        last: bool,
    ) -> None:
        """Add the objective of these micro-batches, and differentiate each rank's own signals."""
        box: list[Any] = [None]
        dist.scatter_object_list(box, self._evaluate(shares, signals, gradient) if signals else None, src=0)
        main, sides = box[0]
        learner = self.learner
        trained = list(learner._policy_group.values())
        for name, gradients in sides.items():
            running = [p.grad for p in trained]
            totals = self.sides.setdefault(name, [torch.zeros_like(p) for p in trained])
            for p in trained:
                p.grad = None
            if gradients:
                self._differentiate(outputs, gradients, synchronise=True, again=True)
            for p, total, before in zip(trained, totals, running):
                if p.grad is not None:
                    total += p.grad
                p.grad = before
        if main:
            synchronise = last or learner.gather == "block" or bool(self.sides)
            self._differentiate(outputs, main, synchronise)

    def _differentiate(
        self,
        outputs: Mapping[Signal, Tensor],
        gradients: Mapping[Signal, Tensor],
        synchronise: bool,
        again: bool = False,
    ) -> None:
        for part in self.learner.parts:
            part.set_requires_gradient_sync(synchronise, recurse=False)
        values = [g.to(outputs[s]) for s, g in gradients.items()]
        torch.autograd.backward([outputs[s] for s in gradients], values, retain_graph=again)

    # ------------------------------------------------------------ on rank 0
    def _evaluate(
        self, shares: Round, signals: Sequence[Mapping[Signal, Tensor]], gradient: bool
    ) -> list[tuple[dict[Signal, Tensor], dict[str, dict[Signal, Tensor]]]]:
        """For each rank, the gradient of the loss with respect to its signals, and those of additional scalars."""
        main: list[Gradients] = [{} for _ in shares]
        sides: dict[str, list[Gradients]] = {}
        for rank, (share, values) in enumerate(zip(shares, signals)):
            if share.used:
                leaves, result = self._loss_of(share, values, gradient)
                for name, side in result.side_losses.items():
                    sides.setdefault(name, [{} for _ in shares])[rank] = _gradients(side, leaves)
                main[rank] = _gradients(result.loss, leaves)
                self._add(result)
        reached = lambda gradients: {s for of_rank in gradients for s, g in of_rank.items() if g is not None}  # noqa: E731
        self.reached |= reached(main)

        def alike(rank: int, gradients: Sequence[Gradients], some: set[Signal]) -> dict[Signal, Tensor]:
            """Gradients of the same signals on all ranks, 0 where a rank has none: ranks whose backward passes reached different
            weights would wait for each other."""
            return {
                s: torch.zeros_like(signals[rank][s]) if (g := gradients[rank].get(s)) is None else g.cpu()
                for s in sorted(some)
            }

        return [
            (alike(n, main, self.reached), {name: alike(n, side, reached(side)) for name, side in sides.items()})
            for n in range(len(shares))
        ]

    def _loss_of(
        self, share: Share, values: Mapping[Signal, Tensor], gradient: bool
    ) -> tuple[dict[Signal, Tensor], LossProtocol]:
        micro = share.batch.to(self.learner.device)
        leaves = {s: x.to(self.learner.device).requires_grad_(gradient) for s, x in values.items()}
        return leaves, self.objective(micro, {s: Field(micro.tree, level_of(s), x) for s, x in leaves.items()})

    def _add(self, result: LossProtocol) -> None:
        self.loss += result.loss.detach().cpu()
        for name, value in result.stats.items():
            self.sums[name] = self.sums.get(name, 0) + torch.as_tensor(value).detach().cpu()


def _gradients(scalar: Tensor, leaves: Mapping[Signal, Tensor]) -> Gradients:
    """The gradient of a scalar with respect to each signal; None where it does not depend on it."""
    if not scalar.requires_grad:
        return dict.fromkeys(leaves)
    return dict(zip(leaves, torch.autograd.grad(scalar, list(leaves.values()), retain_graph=True, allow_unused=True)))


class GradientsWhenRead(Sequence[Tensor]):
    """The whole gradient of the policy, collected from the ranks when it is first read."""

    def __init__(self, collect: Callable[[], list[Tensor]]) -> None:
        self._collect = functools.cache(collect)

    def __len__(self) -> int:
        return len(self._collect())

    def __getitem__(self, index: Any) -> Any:
        return self._collect()[index]
