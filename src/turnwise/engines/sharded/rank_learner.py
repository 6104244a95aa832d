"""One rank's part of a sharded learner: a local learner whose weights, gradients and optimizer state are shards (FSDP2).

Every decoder layer is a group of parameters that FSDP gathers before the layer runs; everything else that is trained
(embeddings, head, final norm, value heads) is the root's group. Gradients of all ranks are summed and not averaged: the loss
is already normalised over the whole step. Frozen parameters are divided and gathered like the others, without a gradient. Frozen
matrices in 4 bits are buffers, which FSDP leaves alone: every rank has all of them.

    gather="block"   a layer's weights are whole only while it runs: the least memory. The model's own forward, because the
                     hand-written layers bypass the hooks by which FSDP gathers.
    gather="step"    all weights are whole during a step, and gradients are summed once, after the last micro-batch: fewer
                     collective operations, hand-written layers, and ranks may differ in the number of their forward passes.

Does not know objectives: it is told the gradient of the loss with respect to the signals that it computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.core.levels import Level
from turnwise.core.signals import Signal
from turnwise.engines.learner import llama_layers, optimizer, packed_forward, stock_forward
from turnwise.engines.learner.learner import LocalLearner
from turnwise.engines.learner.optimizer import LearnerSettings, whole
from turnwise.engines.learner.signals.measure import AUXILIARY, SignalMeasurer
from turnwise.engines.learner.value_heads import frozen_copy
from turnwise.engines.sharded.rank_files import FILE_VERBS
from turnwise.engines.sharded.rank_state import OwnTensors, write_own
from turnwise.store.shard_files import ShardFile, StoredTensors

Gather = Literal["block", "step"]
VARYING_FORWARDS = frozenset({Signal.ANSWER_LOGP, Signal.LOGP_WITHOUT_FEEDBACK})
"""Signals whose number of forward passes depends on the trajectories: weights stay whole while they are measured."""
REFERENCES = frozenset({Signal.REFERENCE, Signal.HELLINGER})
Answers = dict[Any, tuple[Level, Tensor]]
"""Measured values of one micro-batch by key: their level, and one number for each of its items."""


@dataclass(frozen=True)
class RankSpec:
    """What every rank builds its part from."""

    file: Path  # holds the model and the teacher
    settings: LearnerSettings
    signals: frozenset[Signal]
    gather: Gather
    options: Mapping[str, Any] = field(default_factory=dict)  # of the critic

    def build(self, device: torch.device) -> RankLearner:
        model, teacher = torch.load(self.file, weights_only=False, mmap=True)
        return RankLearner(model, self.settings, self.signals, self.gather, teacher, device, self.options)


class RankMeasurer(SignalMeasurer):
    """Measures with sharded models. They cannot be copied, so the models beside the policy are made before sharding."""

    spare: PreTrainedModel | None = None  # becomes the previous policy when a batch has been measured

    def prepare_copies(self, signals: frozenset[Signal]) -> None:
        if signals & REFERENCES and not self.learner.settings.lora_rank:
            self.reference()
        if Signal.PREVIOUS in signals:
            self.spare = frozen_copy(self.learner.model)

    def frozen_models(self) -> list[PreTrainedModel]:
        """Whole models that are never trained."""
        return [m for m in (self._reference, self.spare, self.teacher) if m is not None]

    @torch.no_grad()
    def keep_previous(self) -> None:
        """Remember the present policy as the previous one."""
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


class RankRoot(nn.Module):
    """The module whose forward FSDP surrounds: all models, and any work with them."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in models.items():
            self.add_module(name, module)

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class RankLearner(LocalLearner):
    """A local learner over shards. Its methods without an underscore are the verbs that all ranks do together."""

    measurer_class = RankMeasurer
    measurer: RankMeasurer

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LearnerSettings,
        signals: frozenset[Signal],
        gather: Gather,
        teacher: PreTrainedModel | None,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(model, settings, teacher=teacher, device=device, **options)
        separate = stock_forward.runs_separately(self.model.get_decoder())  # as many passes as lengths of sequences
        self.gather: Gather = "step" if separate else gather
        self.measurer.prepare_copies(signals)
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        self.root = self._shard()
        self.parts = [m for m in self.root.modules() if isinstance(m, FSDPModule)]
        for part in self.parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(
                True
            )  # in float32 FSDP would scale inside the sum, which gloo cannot
        self.head_parameter = self.head.weight
        self._make_optimizers()
        self._expected_frozen = 0.0
        self._outputs: dict[Signal, Tensor] = {}
        self._sides: dict[str, list[Tensor]] = {}
        self._update = contextlib.ExitStack()
        with self._whole_weights(False):
            self.root(dict)  # FSDP decides at the first pass which module is the root

    def _shard(self) -> RankRoot:
        heads = self.value_heads
        frozen = self.measurer.frozen_models()
        trained = {"policy": self.model, "critic": heads.trunk, "target": heads.target_trunk}
        for model in (*trained.values(), *frozen):
            if model is not None:
                self._choose_layers(model)
                for layer in packed_forward.decoder_layers(model):
                    fully_shard(layer, mesh=self.mesh, reshard_after_forward=True)
        modules = {**trained, "values": heads.token_heads, "turns": heads.turn_heads, "slow": heads.target_turn_heads}
        modules |= {f"frozen{n}": model for n, model in enumerate(frozen)}
        root = RankRoot({name: module for name, module in modules.items() if module is not None})
        replicated = {p for model in frozen for p in model.parameters() if not isinstance(p, DTensor)}
        return fully_shard(root, mesh=self.mesh, ignored_params=replicated)  # type: ignore[return-value]

    def _choose_layers(self, model: PreTrainedModel) -> None:
        """Hand-written layers read weights where FSDP would not see it: only whole weights may be read so."""
        decoder = model.get_decoder()
        layers = llama_layers.fast_path(decoder) if self.gather == "step" else None
        if layers is None:
            if self.gather == "block":
                llama_layers.disable(decoder, "sharded over ranks")
            return
        layers.weights = [w.new_empty(0) for w in layers.weights[:1]]  # only its dtype: do not keep whole weights alive

    # ------------------------------------------------------- whole weights
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

    # ------------------------------------------------------------ measuring
    @torch.no_grad()
    def measure_shares(
        self, signals: frozenset[Signal], varying: bool, shares: Sequence[tuple[Batch, bool]]
    ) -> tuple[list[Answers], dict[Signal, tuple[Tensor, Tensor]]]:
        """The answers for each used micro-batch, and what auxiliary models will train on. ``varying``: ranks may need different
        numbers of forward passes."""
        for signal in signals & AUXILIARY:
            self.measurer.auxiliary_model(signal).begin_batch()
        answers = []
        with self._whole_weights(varying or self.gather == "step"):
            for batch, used in shares:
                asked = signals if used else signals - AUXILIARY  # unused work must not be trained on
                fields = self.root(lambda b=batch, a=asked: self.measurer.measure_micro_batch(b.to(self.device), a))
                if used:
                    answers.append({key: (f.level, f.x.cpu()) for key, f in fields.items()})
        if Signal.PREVIOUS in signals:
            self.measurer.keep_previous()
        found = {s: self.measurer.auxiliary_model(s).features.contents() for s in signals & AUXILIARY}
        return answers, {s: features for s, features in found.items() if features is not None}

    def share_features(self, features: Mapping[Signal, tuple[Tensor, Tensor]]) -> None:
        """Give the auxiliary models what all ranks have measured: all then train alike."""
        for signal, (seed, rows) in features.items():
            buffer = self.measurer.auxiliary_model(signal).features
            buffer.clear()
            buffer.add(seed.to(self.device), rows.to(self.device))

    def train_auxiliary(self, batch: Batch) -> None:
        self.measurer.train_auxiliary(batch)

    def preconditioner(self) -> Tensor:
        state = self._policy_optimizer.state.get(self.head_parameter, {})
        rate = self.settings.lr * self.settings.lr_factor(self.steps)
        weight = whole(self.head_parameter.detach())
        return rate * optimizer.preconditioner({k: whole(t) for k, t in state.items()}, weight, self.settings)

    # ------------------------------------------------------------- updating
    def begin_update(self) -> None:
        self._update = contextlib.ExitStack()
        self._update.enter_context(self._whole_weights(self.gather == "step"))
        self._sides = {}

    def compute(self, signals: frozenset[Signal], gradient: bool, batch: Batch) -> dict[Signal, Tensor]:
        """The live signals of one micro-batch; their graph is kept for ``backward``."""
        with torch.set_grad_enabled(gradient):
            # copies, because FSDP loses a view that is changed in place
            self._outputs = self.root(
                lambda: {s: f.x.clone() for s, f in self.measurer.live(batch, signals)[1].items()}
            )
        return {s: x.detach().cpu() for s, x in self._outputs.items()}

    def backward(self, last: bool, gradients: Mapping[Signal, Tensor]) -> None:
        """Add the gradient of the loss, given that with respect to the signals. ``last``: of this step."""
        self._differentiate(gradients, synchronise=last or self.gather == "block" or bool(self._sides))
        self._outputs = {}

    def side_backward(self, name: str, gradients: Mapping[Signal, Tensor]) -> None:
        """The same for an additional scalar, into gradients of its own."""
        trained = list(self._policy_group.values())
        kept = [p.grad for p in trained]
        totals = self._sides.setdefault(name, [torch.zeros_like(p) for p in trained])
        for p in trained:
            p.grad = None
        if gradients:
            self._differentiate(gradients, synchronise=True, again=True)
        for p, total, main in zip(trained, totals, kept):
            if p.grad is not None:
                total += p.grad
            p.grad = main

    def _differentiate(self, gradients: Mapping[Signal, Tensor], synchronise: bool, again: bool = False) -> None:
        for part in self.parts:
            part.set_requires_gradient_sync(synchronise, recurse=False)
        outputs = [self._outputs[signal] for signal in gradients]
        values = [g.to(x) for g, x in zip(gradients.values(), outputs)]
        torch.autograd.backward(outputs, values, retain_graph=again)

    def end_backward(self) -> None:
        """All micro-batches are done: gradients are complete, weights are shards again."""
        self._update.close()

    def take_step(self, gradient: float, rate: float, loss: float) -> tuple[list[float], bool]:
        """The optimizer step, with factors of gradient and learning rate. Gradient norms over all ranks, and whether it was
        taken."""
        try:
            scales = SimpleNamespace(gradient=gradient, rate=rate)
            norms, taken = self._optimize(scales, torch.tensor(loss, dtype=torch.float64))
        finally:
            self.forget_gradients()
        self._count_step(bool(taken))
        return [float(norm) for norm in norms], bool(taken)

    def abandon_update(self) -> None:
        """Forget an update that failed: a partial gradient must not leak into the next one."""
        for p in self.root.parameters():
            p.grad = None  # of whole weights, if they are whole now
        self._update.close()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for each in self._optimizers:
            each.zero_grad(set_to_none=True)
        self._outputs, self._sides = {}, {}

    # ------------------------------------------------------- whole tensors
    def gather_gradients(self) -> list[Tensor] | None:
        return self._collect([p.grad for p in self._policy_group.values() if p.grad is not None])

    def gather_sides(self) -> dict[str, list[Tensor]] | None:
        sides = {name: self._collect(grads) for name, grads in self._sides.items()}
        return sides if dist.get_rank() == 0 else None  # type: ignore[return-value]

    def gather_weights(self) -> dict[str, Tensor] | None:
        """The trained weights."""
        return self._collect_named({name: p.detach() for name, p in self.trained.items()})

    def gather_state(self, with_reference: bool) -> dict[str, Tensor] | None:
        """The tensors of a snapshot, and of the frozen reference."""
        reference = self.measurer.reference_tensors() if with_reference else {}
        return self._collect_named({**self.checkpoint_state()["tensors"], **reference})

    def gather_tensor(self, name: str) -> Tensor | None:
        """One tensor of a checkpoint."""
        collected = self._collect([self.checkpoint_state()["tensors"][name]])
        return None if collected is None else collected[0]

    def _collect(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Whole tensors in host memory, on rank 0; the others only contribute."""
        first = dist.get_rank() == 0
        gathered = [t.cpu() if first else None for t in map(whole, tensors)]
        return gathered if first else None  # type: ignore[return-value]

    def _collect_named(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        values = self._collect(list(tensors.values()))
        return None if values is None else dict(zip(tensors, values))

    # ---------------------------------------------------------------- state
    def _frozen(self) -> float:
        """Rank 0 compares the frozen weights of the whole model."""
        return self._expected_frozen

    def write_own(self, folder: Path) -> ShardFile:
        """Write this rank's part of a checkpoint. Not collective: no rank waits for another one's disk."""
        return write_own(folder, self.checkpoint_state()["tensors"])

    def read_own(self, scalars: Mapping[str, Any], stored: StoredTensors) -> None:
        """Take this rank's part of a checkpoint from its files."""
        self._expected_frozen = scalars["frozen"]
        self.load_state_dict({"tensors": OwnTensors(stored, self._like, self.device), "scalars": scalars})

    def load_shards(
        self, scalars: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], values: Any
    ) -> None:
        """Take this rank's part of a state. ``values``: all of it on rank 0, None on the others."""
        self._expected_frozen = scalars["frozen"]
        tensors = {}
        for name, (shape, dtype) in shapes.items():
            value = torch.zeros(shape, dtype=dtype) if values is None else values[name]
            tensors[name] = self._placed(value.to(self.device), self._like(name))
        self.load_state_dict({"tensors": tensors, "scalars": scalars})

    def _placed(self, value: Tensor, like: Tensor | None) -> Tensor:
        """Rank 0's value, sharded as ``like`` is."""
        value = value.detach().contiguous()
        if isinstance(like, DTensor) and value.shape == like.shape:
            return distribute_tensor(value, self.mesh, like.placements)
        dist.broadcast(value, 0)
        return value

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


class RankHost:
    """What a process of a ``RankPool`` does the verbs with: it builds a part of a learner, then lets it work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.learner: RankLearner | None = None

    def do(self, verb: str, *arguments: Any) -> Any:
        if verb == "build":
            self.learner = None  # its memory first
            self.learner = arguments[0].build(self.device)
            return None
        own = FILE_VERBS.get(verb)
        return own(*arguments) if own is not None else getattr(self.learner, verb)(*arguments)
