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
whole copy: every rank writes and reads its own part.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.levels import BATCH, GROUP, TOKEN, TRAJECTORY, TURN, Field, Level
from turnwise.core.protocols import Loss, ObjectiveProtocol, Scales
from turnwise.core.signals import WITH_GRADIENT, Signal, level_of
from turnwise.engines.adapters import TensorsWhenRead
from turnwise.engines.learner import llama_layers, lora, packed_forward
from turnwise.engines.learner.learner import LocalLearner
from turnwise.engines.learner.optimizer import LearnerSettings, whole
from turnwise.engines.learner.signals.measure import AUXILIARY, Fields, SignalMeasurer, named
from turnwise.engines.learner.value_heads import frozen_copy
from turnwise.engines.remote.weight_files import shared_objects
from turnwise.engines.sharded.rank_pool import RankPool
from turnwise.engines.sharded.served import unserved_reason
from turnwise.errors import SettingError
from turnwise.store.shard_files import Position, ShardFile, StoredTensors, TensorSlice, shapes_of, write_shard

Gather = Literal["block", "step"]
VARYING_FORWARDS = frozenset({Signal.ANSWER_LOGP, Signal.LOGP_WITHOUT_FEEDBACK})
"""Signals whose number of forward passes depends on the trajectories: weights stay whole while they are measured."""
REFERENCES = frozenset({Signal.REFERENCE, Signal.HELLINGER})
UNEVEN = 1.1  # load of the fullest rank over the mean above which groups are dealt apart
FIND_SECONDS = 15.0  # a network filesystem may show a file late
Gradients = dict[Signal, Tensor | None]
R = TypeVar("R")


def on_all_ranks(method: Callable[..., R]) -> Callable[..., R]:
    """Called on rank 0, a method runs on every rank, each time with the same arguments."""

    @functools.wraps(method)
    def call(self: ShardedLearner, *args: Any) -> R:
        return method(self, *args) if self.pool is None else self.pool.call(method, self, *args)

    return call


class ShardedLearner(LocalLearner):
    """A ``protocols.Learner`` whose weights, gradients and optimizer state are divided among the ranks of a pool."""

    pool: RankPool | None = None  # of rank 0
    files: Any  # a group of all ranks whose operations may take long

    def __init__(
        self, model: PreTrainedModel, settings: LearnerSettings | None = None, *, ranks: int, signals: frozenset[Signal],
        gather: Gather | None = None, threads: int = 1, teacher: PreTrainedModel | None = None,
        device: torch.device | str = "cpu", pool: RankPool | None = None, folder: Path | None = None, **critic: Any,
    ) -> None:  # fmt: skip
        """``signals``: all that will be measured. ``gather``: None: by step on a CPU, where ranks share one memory, and by block
        on GPUs. ``threads``: of each rank. ``pool``: ranks that were started before, and end later. ``folder``: of the
        checkpoints; ranks on several machines also find the model there. ``critic``: as for the local learner."""
        settings = settings or LearnerSettings()
        if reason := unserved_reason(signals, dtype=settings.dtype, offload=settings.offload):
            raise SettingError(f"several ranks cannot serve this learner: {reason}; write ranks=1")
        device = torch.device(device)
        gather = gather or ("block" if device.type == "cuda" else "step")
        started = pool or RankPool(ranks, device, threads)
        try:
            self.device, self.files = started.device, started.files
            place = started.several_machines and folder
            if place:
                with tempfile.NamedTemporaryFile(prefix=".shared-", dir=place.absolute()) as mark:
                    machines = started.call(ShardedLearner._machine_without, self, Path(mark.name))
                if missing := sorted({machine for machine in machines if machine}):
                    raise SettingError(
                        f"{place.absolute()} is not the same folder on all machines: {', '.join(missing)} cannot read what rank "
                        "0 writes there; put the run (--out) on a filesystem that they share, because every rank writes its own "
                        "part of a checkpoint"
                    )
            if settings.four_bit:  # packed once: the same numbers on all ranks, and in the copy that is published
                lora.quantise_frozen(model, settings.lora_rank, settings.compute_dtype(device), started.device)
            # a file: too large for a message, and shared by the ranks of a machine
            with shared_objects((model.cpu(), teacher), place or None) as file:
                self.whole = LocalLearner(model, settings, teacher=teacher, device="cpu", **critic)
                started.call(ShardedLearner._build, self, file, settings, signals, gather, critic)
        except BaseException:
            if pool is None:
                started.close()
            raise
        self.pool, self._stale = started, False
        weakref.finalize(self, started.close if pool is None else int)

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
            # in float32 FSDP would scale inside the sum, which gloo cannot
            part.set_force_sum_reduction_for_comms(True)
        self._make_optimizers()
        with self._whole_weights(False):
            self.root(dict)  # FSDP decides at the first pass which module is the root

    def _shard(self, mesh: Any) -> RankRoot:
        heads, measurer = self.value_heads, self.measurer
        frozen = [m for m in (measurer._reference, measurer.spare, measurer.teacher) if m is not None]  # never trained
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
        values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, values, dst=0, group=group)
        return values or []

    def _of_rank_0(self, value: Any) -> Any:
        """The value of rank 0, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    @contextlib.contextmanager
    def _whole_weights(self, needed: bool) -> Iterator[None]:
        """Inside, all weights are whole and no forward pass is collective, if ``needed``. Afterwards all are shards."""
        for part in self.parts if needed else ():
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
            part.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        finally:
            # FSDP leaves the root whole after a pass without gradient, and would read it again after the shards have changed
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
        return self._measure(stripped(batch), signals)

    @on_all_ranks
    def _measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        # what rank 0 alone can read of a batch is left out before: see ``stripped``
        return super().measure(batch, signals)

    # ------------------------------------------------------------- updating
    def update(
        self, batch: Batch, objective: ObjectiveProtocol, while_waiting: Callable[[], object] | None = None
    ) -> dict[str, float]:
        if self.pool is None:  # on ranks 1, 2 ..., which rank 0 has called
            return super().update(batch, objective)
        elsewhere = AbsentObjective(objective.signals_with_gradient, objective.signals_before_step)
        arguments = (stripped(batch), elsewhere)
        metrics = self.pool.call(LocalLearner.update, self, batch, objective, of_others=arguments)
        self._stale = True
        if while_waiting is not None:
            while_waiting()
        return metrics

    def _backward(self, batch: Batch, objective: ObjectiveProtocol) -> tuple[Tensor, dict[str, Tensor], Scales]:
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
                planned = objective.plan(batch)
                marks = planned.columns.get(Column.NO_GRADIENT)  # ranks without the objective learn them from rank 0
                silent = self._of_rank_0(None if marks is None else marks.x)
                if silent is not None:
                    planned = planned.put(no_gradient=Field(planned.tree, TRAJECTORY, silent))
                with_gradient, without = self.split_by_gradient(planned)
                for part, gradient in ((without, False), (with_gradient, True)):
                    if part is not None:
                        step.differentiate(part, gradient)
        sides = {name: [whole(g).cpu() for g in grads] for name, grads in step.sides.items()}
        return self._of_rank_0((step.loss, step.sums, objective.scales(planned, sides)) if self.rank == 0 else None)

    # -------------------------------------------------------------- weights
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by the base model's parameter names, adapters merged: the whole copy, valid until the next update."""
        return self._fresh_copy().weights()

    def export(self, path: str | Path) -> None:
        self._fresh_copy().export(path)

    def export_adapter(self, path: str | Path, base: str) -> bool:
        return self._fresh_copy().export_adapter(path, base)

    @torch.no_grad()
    def _fresh_copy(self) -> LocalLearner:
        """The whole copy, brought up to date."""
        if self._stale:
            weights = self._collected(list(self.trained))
            for name, p in self.whole.trained.items():
                p.copy_(weights[name])
            self._stale = False
        return self.whole

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
        return {"tensors": RankTensors(self), "scalars": self._state_scalars()}

    def _frozen(self) -> float:
        return self.whole._frozen()

    @on_all_ranks
    def _write_files(self, folder: Path) -> list[ShardFile]:
        """Every rank writes its slices of a checkpoint; the first one also what all ranks hold alike."""
        # A slice has no meaning without the number of ranks, so the files say which part of the whole tensor each is, and any
        # number of ranks, or a single process, can read them.
        slices = dict[str, TensorSlice]()
        for name, tensor in self._state_tensors().items():
            if isinstance(tensor, DTensor):
                (start, shape), part = shard_range(tensor), tensor.to_local()
                assert tuple(part.shape) == shape, f"rank {self.rank} holds {tuple(part.shape)}, not {shape}, of {name}"
                if self.rank == 0 or (part.numel() and start != (0,) * tensor.dim()):
                    slices[name] = TensorSlice(part, start, tuple(tensor.shape))
            elif self.rank == 0:
                slices[name] = TensorSlice(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        # no rank waits for another one's disk before its own file is written
        return self._gathered(write_shard(folder, self.rank, dist.get_world_size(), slices), self.files)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state of a local learner, or of one with any number of ranks. If it is in files, each rank reads its own part."""
        self.whole.check_state(state)  # refuses the state of another model before any rank is touched
        tensors = state["tensors"]
        self._restore_own(tensors if isinstance(tensors, StoredTensors) else dict(tensors), state["scalars"])
        self._stale = True

    @on_all_ranks
    def _restore_own(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Whole tensors, in files or in memory, become this rank's shards of those that are divided. Of a file it reads nothing
        else."""
        shapes, copies = shapes_of(tensors), {"reference": self.measurer._reference, "previous": self.measurer.spare}
        holders: dict[str, Tensor] = {**self.trained}  # what this rank holds of each tensor of the state
        holders |= {f"slow/{name}": t for name, t in self.value_heads.target_tensors().items()}
        for kind, model in copies.items():
            holders |= named(kind, model)

        def read(name: str) -> Tensor:
            # "optimiser/exp_avg/<parameter>" is divided as the parameter is; a step counter is not
            like = holders.get(name.split("/", 2)[-1] if name.startswith("optimiser/") else name)
            if not isinstance(like, DTensor) or tuple(like.shape) != shapes[name]:
                return tensors[name].to(self.device)
            start, shape = shard_range(like)
            if isinstance(tensors, StoredTensors):
                part = tensors.part(name, start, shape)
            else:
                part = tensors[name][tuple(slice(a, a + n) for a, n in zip(start, shape))]
            mesh, placements, stride = like.device_mesh, like.placements, like.stride()
            part = part.to(self.device)
            return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=stride)

        self._restore(TensorsWhenRead(tensors, read), scalars)
        dist.barrier(group=self.files)


class RankTensors(TensorsWhenRead):
    """The state of all ranks, as rank 0 sees it. Every rank writes its own part; a tensor that is read here is collected from all
    ranks. Valid until the next update."""

    def __init__(self, learner: ShardedLearner) -> None:
        super().__init__(learner._state_tensors(), lambda name: learner._collected([name])[name])
        self._learner = learner

    def write_files(self, folder: Path) -> list[ShardFile]:
        """Let every rank write its file into ``folder``."""
        return self._learner._write_files(folder.absolute())


def shard_range(tensor: DTensor) -> tuple[Position, Position]:
    """Start and shape of this rank's part, as ``torch.chunk`` divides a dimension; all of it where it is not divided."""
    start, shape = [0] * tensor.dim(), list(tensor.shape)
    (placement,) = tensor.placements  # FSDP over a mesh of one dimension
    if isinstance(placement, Shard):
        d, ranks = placement.dim, tensor.device_mesh.size()
        length = -(-shape[d] // ranks)
        start[d] = min(tensor.device_mesh.get_local_rank() * length, shape[d])
        shape[d] = min(length, shape[d] - start[d])
    else:
        assert isinstance(placement, Replicate), f"no rule for {placement}"
    return tuple(start), tuple(shape)


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


# ------------------------------------------------- which rank computes what
# Every rank must run as many forward passes as the others, because a pass is a sequence of collective operations. A rank that has
# less to do repeats the cheapest trajectory, and its result is not used. The cost of a trajectory is the number of ids that the
# model reads for it.


@dataclass(frozen=True, eq=False)
class Share:
    """One micro-batch of one rank. ``used``: false for work that only keeps the ranks in step."""

    batch: Batch
    used: bool = True

    def rows(self, level: Level) -> Tensor:
        """Where its items are in the dealt batch."""
        return self.batch[Column.ROW, level].x


Round = list[Share]
"""One micro-batch for each rank."""


def stripped(batch: Batch) -> Batch:
    """What a model reads of the step: the candidates that every update scores, and whether the policy is frozen."""
    read = lambda key: key == Column.FREEZE_POLICY or (isinstance(key, tuple) and key[0] == Column.CANDIDATE)  # noqa: E731
    columns = {key: f for key, f in batch.columns.items() if read(key)}
    return replace(batch, columns=columns, facts={}, reward_components={})


def deal(batch: Batch, ranks: int, positions: int, padded: bool) -> list[Round]:
    """Rounds of micro-batches of at most ``positions`` ids. An empty batch has no rounds."""
    if not len(batch):
        return []
    sizes = {level: batch.tree.count(level) for level in (TOKEN, TURN, TRAJECTORY)}
    batch = batch.put({(Column.ROW, level): batch.tree.field(level, torch.arange(n)) for level, n in sizes.items()})
    parts = [
        [Share(micro) for micro in batch.select(rows).split(positions, padded)] if rows else []
        for rows in rows_of_ranks(batch, ranks)
    ]
    # the shortest trajectory with a sampled token, so that its gradient reaches every weight that others reach
    cost = batch.positions_per_trajectory()
    cheapest = int(torch.where(batch.tree.size(TOKEN, TRAJECTORY).x > 0, cost, cost.max() + 1).argmin())
    spare = Share(batch.select([cheapest]), used=False)
    return [[part[n] if n < len(part) else spare for part in parts] for n in range(max(map(len, parts)))]


def rows_of_ranks(batch: Batch, ranks: int) -> list[list[int]]:
    """The trajectories of each rank, in the order of the batch."""
    cost = batch.positions_per_trajectory().cpu().tolist()
    members: dict[int, list[int]] = {}
    for row, group in enumerate(batch.tree.ancestor(TRAJECTORY, GROUP).tolist()):
        members.setdefault(group, []).append(row)
    # Groups stay together, because their prompts are read once; they are dealt apart where that would leave a rank idle.
    together = _balance([(sum(cost[k] for k in rows), rows) for rows in members.values()], ranks)
    loads = [sum(cost[k] for k in rows) for rows in together]
    if max(loads) * ranks <= UNEVEN * sum(loads):
        return together
    return _balance([(c, [row]) for row, c in enumerate(cost)], ranks)


def _balance(units: Iterable[tuple[int, list[int]]], ranks: int) -> list[list[int]]:
    """Give the next largest unit to the rank with the least load."""
    loads, rows = [0] * ranks, [list[int]() for _ in range(ranks)]
    # equal costs by their rows: every rank deals by itself, and all must deal alike
    for cost, unit in sorted(units, key=lambda u: (-u[0], u[1])):
        rank = loads.index(min(loads))
        loads[rank] += cost
        rows[rank] += unit
    return [sorted(dealt) for dealt in rows]


# ------------------------------------------------------- one optimizer step


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
            self._loss_of(share, zeros, False)
        rounds = self.learner.deal(part.select(filled)) if len(filled) else []
        for number, shares in enumerate(rounds):
            outputs, signals = self._compute(shares, gradient)
            self._backward(shares, outputs, signals, gradient, last=number + 1 == len(rounds))

    def plan_and_differentiate(self, batch: Batch, shares: Round) -> Batch:
        outputs, signals = self._compute(shares, gradient=True)
        planned = batch
        if signals:
            blank = lambda x, level: Field(batch.tree, level, x.new_zeros(batch.tree.count(level)))  # noqa: E731
            fields = {s: blank(x, level_of(s)) for s, x in signals[0].items()}
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
        self, shares: Round, outputs: Mapping[Signal, Tensor], signals: Sequence[Mapping[Signal, Tensor]], gradient: bool,
        last: bool,
    ) -> None:  # fmt: skip
        """Add the objective of these micro-batches, and differentiate each rank's own signals."""
        box: list[Any] = [None]
        dist.scatter_object_list(box, self._evaluate(shares, signals, gradient) if signals else None, src=0)
        main, sides = box[0]
        learner = self.learner

        def differentiate(gradients: Mapping[Signal, Tensor], synchronise: bool, again: bool = False) -> None:
            for part in learner.parts:
                part.set_requires_gradient_sync(synchronise, recurse=False)
            values = [g.to(outputs[s]) for s, g in gradients.items()]
            torch.autograd.backward([outputs[s] for s in gradients], values, retain_graph=again)

        trained = list(learner._policy_group.values())
        for name, gradients in sides.items():
            running = [p.grad for p in trained]
            totals = self.sides.setdefault(name, [torch.zeros_like(p) for p in trained])
            for p in trained:
                p.grad = None
            if gradients:
                differentiate(gradients, synchronise=True, again=True)
            for p, total, before in zip(trained, totals, running):
                if p.grad is not None:
                    total += p.grad
                p.grad = before
        if main:
            differentiate(main, last or learner.gather == "block" or bool(self.sides))

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
        reached = lambda gradients: {s for of_rank in gradients for s, g in of_rank.items() if g is not None}  # noqa: E731
        self.reached |= reached(main)

        def alike(rank: int, gradients: Sequence[Gradients], some: set[Signal]) -> dict[Signal, Tensor]:
            """Gradients of the same signals on all ranks, 0 where a rank has none."""
            # ranks whose backward passes reached different weights would wait for each other
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
    ) -> tuple[dict[Signal, Tensor], Loss]:
        """The objective of one micro-batch, added to the sums, and the signals to differentiate it by."""
        micro = share.batch.to(self.learner.device)
        leaves = {s: x.to(self.learner.device).requires_grad_(gradient) for s, x in values.items()}
        result = self.objective(micro, {s: Field(micro.tree, level_of(s), x) for s, x in leaves.items()})
        self.loss += result.loss.detach().cpu()
        for name, value in result.stats.items():
            self.sums[name] = self.sums.get(name, 0) + torch.as_tensor(value).detach().cpu()
        return leaves, result


def _gradients(scalar: Tensor, leaves: Mapping[Signal, Tensor]) -> Gradients:
    """The gradient of a scalar with respect to each signal; None where it does not depend on it."""
    if not scalar.requires_grad:
        return dict.fromkeys(leaves)
    return dict(zip(leaves, torch.autograd.grad(scalar, list(leaves.values()), retain_graph=True, allow_unused=True)))
