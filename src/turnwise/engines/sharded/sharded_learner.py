"""The learner over several ranks, as rank 0 and the training loop see it.

Rank 0 plans on the whole batch, deals micro-batches, and evaluates the objective: it receives the live signals of each
micro-batch from the rank that computed them and returns the loss's gradient with respect to them. So only numbers of tokens
travel, no rank but the first knows an objective, and no normaliser depends on the number of ranks.

It also keeps one whole copy of the trained weights in host memory, for the generator and for export. Checkpoints need no whole
copy: every rank writes and reads its own part.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.core.levels import BATCH, TOKEN, TRAJECTORY, Field
from turnwise.core.protocols import LossProtocol, ObjectiveProtocol
from turnwise.core.signals import WITH_GRADIENT, Signal, level_of
from turnwise.engines.learner import lora
from turnwise.engines.learner.learner import LocalLearner
from turnwise.engines.learner.optimizer import LearnerSettings
from turnwise.engines.learner.signals.measure import AUXILIARY
from turnwise.engines.sharded.dealing import Round, Share, deal
from turnwise.engines.sharded.rank_learner import VARYING_FORWARDS, Gather, RankHost, RankLearner, RankSpec
from turnwise.engines.sharded.rank_pool import RankPool, shared_file
from turnwise.engines.sharded.rank_state import FILE_SECONDS, RankTensors, check_shared
from turnwise.engines.sharded.served import LearnerNeeds, unserved_reason
from turnwise.errors import RankFault, SettingError
from turnwise.store.shard_files import StoredTensors

Gradients = dict[Signal, Tensor | None]


def start_ranks(ranks: int, device: torch.device | str = "cpu", threads: int = 1) -> RankPool:
    """Processes that can hold a learner. This one is the first of them."""
    own = torch.device("cuda", 0) if torch.device(device).type == "cuda" else torch.device(device)
    return RankPool(ranks, own, threads).start(RankHost(own))


class ShardedLearner:
    """A ``protocols.Learner`` whose weights, gradients and optimizer state are divided among ``ranks`` processes."""

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
        **critic: Any,
    ) -> None:
        """``signals``: all that will be measured. ``gather``: see ``rank_learner``; None: by step on a CPU, where ranks share
        one memory, and by block on GPUs. ``threads``: of each rank. ``pool``: ranks that were started
        before, and end later. ``critic``: as for the local learner."""
        settings = settings or LearnerSettings()
        reason = unserved_reason(LearnerNeeds(signals, dtype=settings.dtype, offload=settings.offload))
        if reason:
            raise SettingError(f"several ranks cannot serve this learner: {reason}; write ranks=1")
        device = torch.device(device)
        gather = gather or ("block" if device.type == "cuda" else "step")
        self.settings, self.signals, self.version, self._stale = settings, signals, 0, False
        self.skipped = 0
        self.pool = pool or start_ranks(ranks, device, threads)
        weakref.finalize(self, self.pool.close if pool is None else int)
        if settings.four_bit:  # packed once: the same numbers on all ranks, and in the copy that is published
            lora.quantise_frozen(model, settings.lora_rank, settings.compute_dtype(device), self.pool.device)
        with shared_file(self.pool, (model.cpu(), teacher)) as file:
            self.whole = LocalLearner(model, settings, teacher=teacher, device="cpu", **critic)
            self.pool.call("build", RankSpec(file, settings, signals, gather, critic))

    @property
    def own(self) -> RankLearner:
        """Rank 0's part."""
        host = self.pool.host
        if not isinstance(host, RankHost) or host.learner is None:
            raise RankFault("the ranks of this learner have ended")
        return host.learner

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder for checkpoints that other machines do not see."""
        if self.pool.several_machines:
            check_shared(self.pool, folder)

    def close(self) -> None:
        """End the other ranks."""
        self.pool.close()

    @property
    def steps(self) -> int:
        return self.own.steps

    @property
    def parameter_count(self) -> int:
        return self.whole.parameter_count

    def describe(self) -> str:
        how = "layer by layer" if self.own.gather == "block" else "for each step"
        return f"FSDP2 over {self.pool.size} ranks, weights gathered {how}; {self.own.describe()}"

    # ------------------------------------------------------------ measuring
    def reference(self) -> object:
        """The reference was copied before the weights were divided, where ``signals`` name it."""
        return None

    def deal(self, batch: Batch) -> list[Round]:
        """Rounds of micro-batches, one for each rank."""
        return deal(batch, self.pool.size, self.settings.positions, padded=self.pool.device.type != "cuda")

    def measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        """Measure ``signals`` without gradient, in the order of the batch."""
        rounds = self.deal(batch)
        varying = bool(signals & VARYING_FORWARDS) or any(not s.batch.sequences.ids.numel() for r in rounds for s in r)
        each = [([(r[n].stripped(), r[n].used) for r in rounds],) for n in range(self.pool.size)]
        replies = self.pool.call("measure_shares", signals, varying, each=each)
        features = [found for _, found in replies if found]
        if features:
            self.pool.call("share_features", _joined(features))
        master = self.whole.master
        results = {s: Field(batch.tree, level_of(s), _zeros(batch, s).to(master)) for s in signals}
        for rank, (answers, _) in enumerate(replies):
            used = (r[rank] for r in rounds if r[rank].used)
            for share, answer in zip(used, answers):
                for key, (level, x) in answer.items():
                    if key not in results:
                        results[key] = Field(batch.tree, level, x.new_zeros(batch.tree.count(level)))
                    results[key].x[share.rows(level)] = x.to(results[key].x.dtype)
        return results

    # ------------------------------------------------------------- updating
    def update(
        self, batch: Batch, objective: ObjectiveProtocol, while_waiting: Callable[[], object] | None = None
    ) -> dict[str, float]:
        """Take one optimizer step over the whole batch, or change nothing if a loss or gradient is not finite."""
        if self.signals & AUXILIARY:
            self.pool.call("train_auxiliary", Share(batch).stripped())
        factor = self.settings.lr_factor(self.steps)
        step = StepOverRanks(self, objective)
        try:
            planned = step.run(batch)
            sides = self.pool.call("gather_sides")[0] if step.sides else {}
            scales = objective.scales(planned, GatheredGradients(self.pool), sides)
        except BaseException:
            if self.pool.host is not None:
                self.pool.call("abandon_update")
            raise
        norms, taken = self.pool.call("take_step", scales.gradient, scales.rate, float(step.loss))[0]
        self._stale = True
        self.skipped = self.own.skipped
        if while_waiting is not None:
            while_waiting()
        metrics = {name: float(value) for name, value in step.sums.items()}
        metrics |= {**dict(zip(("grad_norm", "grad_norm/critic"), norms)), "loss": float(step.loss)}
        metrics |= {"scale/gradient": scales.gradient, "scale/lr": scales.rate}
        return metrics | {"lr": self.settings.lr * factor * scales.rate, "skipped": float(not taken)}

    # -------------------------------------------------------------- weights
    @torch.no_grad()
    def _gather(self) -> None:
        """Bring the whole copy up to date."""
        if self._stale:
            weights = self.pool.call("gather_weights")[0]
            for name, p in self.whole.trained.items():
                p.copy_(weights[name])
            self._stale = False

    def weights(self) -> Mapping[str, Tensor]:
        """Weights by the base model's parameter names, adapters merged: the whole copy, valid until the next update."""
        self._gather()
        return self.whole.weights()

    def export(self, path: str | Path) -> None:
        self._gather()
        self.whole.export(path)

    def export_adapter(self, path: str | Path, base: str) -> bool:
        self._gather()
        return self.whole.export_adapter(path, base)

    # ---------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """A snapshot in host memory of rank 0, with the reference."""
        tensors = self.pool.call("gather_state", True)[0]
        return {"tensors": {name: t.clone() for name, t in tensors.items()}, "scalars": self._scalars()}

    def checkpoint_state(self) -> dict[str, Any]:
        """As the local learner's, under the same names. The tensors stay with their ranks, which write them."""
        return {
            "tensors": RankTensors(self.pool, list(self.own.checkpoint_state()["tensors"])),
            "scalars": self._scalars(),
        }

    def _scalars(self) -> dict[str, Any]:
        counts = {"version": self.version, "steps": self.own.steps, "skipped": self.own.skipped}
        return {**counts, "frozen": self.whole.checkpoint_state()["scalars"]["frozen"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The state of a local learner, or of one with any number of ranks. If it is in files, each rank reads its own part."""
        self.whole.check_state(state)  # refuses the state of another model before any rank is touched
        tensors, scalars = state["tensors"], state["scalars"]
        if isinstance(tensors, StoredTensors):
            self.pool.call("read_own", scalars, tensors, seconds=FILE_SECONDS)
        else:
            tensors = dict(tensors)  # now: inside a verb no other rank could be asked for a tensor
            shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
            self.pool.call(
                "load_shards", scalars, shapes, each=[(tensors if n == 0 else None,) for n in range(self.pool.size)]
            )
        self.version, self._stale, self.skipped = int(scalars["version"]), True, self.own.skipped


class StepOverRanks:
    """One optimizer step: sums of loss and statistics, and gradients that the ranks accumulate."""

    def __init__(self, learner: ShardedLearner, objective: ObjectiveProtocol) -> None:
        self.learner, self.objective, self.pool = learner, objective, learner.pool
        self.device = learner.pool.device
        self.loss = torch.zeros((), dtype=torch.float64)
        self.sums: dict[str, Tensor] = {}
        self.sides: set[str] = set()
        self.reached: set[Signal] = set()  # signals with a gradient so far

    def run(self, batch: Batch) -> Batch:
        """All passes of the step; returns the planned batch."""
        objective, learner = self.objective, self.learner
        size = float(learner.whole.head.weight.shape[0])
        batch = batch.put(vocabulary_size=batch.tree.full(BATCH, size))
        before = objective.signals_before_step
        usable = before and before <= WITH_GRADIENT and not len(_without_tokens(batch))
        single = learner.deal(batch) if usable else []
        if len(single) != 1 and before:
            batch = batch.put(learner.measure(batch, before))
        self.pool.call("begin_update")
        if len(single) == 1:  # planning reads the pass that is differentiated
            planned = self._plan_and_differentiate(batch, single[0])
        else:
            planned = objective.plan(batch)
            self._differentiate(planned)
        self.pool.call("end_backward")
        return planned

    def _differentiate(self, planned: Batch) -> None:
        with_gradient, without = self.learner.whole.split_by_gradient(planned)
        for part, gradient in ((without, False), (with_gradient, True)):
            if part is None:
                continue
            empty = _without_tokens(part)
            if len(empty):  # no model reads them, but they count in statistics
                share = Share(part.select(empty))
                self._add(self._objective_of(share, {s: _zeros(share.batch, s) for s in self._live}, False)[1])
            rounds = self.learner.deal(part.select(_with_tokens(part))) if len(empty) < len(part) else []
            for number, shares in enumerate(rounds):
                signals = self._compute(shares, gradient)
                self._evaluate(shares, signals, gradient, last=number + 1 == len(rounds))

    @property
    def _live(self) -> frozenset[Signal]:
        return self.objective.signals_with_gradient

    def _plan_and_differentiate(self, batch: Batch, shares: Round) -> Batch:
        signals = self._compute(shares, gradient=True)
        fields = {s: Field(batch.tree, level_of(s), _zeros(batch, s).to(x.dtype)) for s, x in signals[0].items()}
        for share, values in zip(shares, signals):
            for signal, x in values.items() if share.used else ():
                fields[signal].x[share.rows(level_of(signal))] = x
        planned = self.objective.plan(batch.put(fields))
        own = [Share(planned.select(share.rows(TRAJECTORY)), share.used) for share in shares]
        self._evaluate(own, signals, gradient=True, last=True)
        return planned

    def _compute(self, shares: Round, gradient: bool) -> list[dict[Signal, Tensor]]:
        """The live signals of each rank's micro-batch."""
        each = [(share.stripped(),) for share in shares]
        return self.pool.call("compute", self._live, gradient, each=each)

    def _evaluate(self, shares: Round, signals: list[dict[Signal, Tensor]], gradient: bool, last: bool) -> None:
        """Add the objective of these micro-batches, and let the ranks differentiate their signals."""
        main: list[Gradients] = [{} for _ in shares]
        sides: dict[str, list[Gradients]] = {}
        for rank, (share, values) in enumerate(zip(shares, signals)):
            if share.used:
                leaves, result = self._objective_of(share, values, gradient)
                for name, side in result.side_losses.items():
                    sides.setdefault(name, [{} for _ in shares])[rank] = _gradients(side, leaves)
                main[rank] = _gradients(result.loss, leaves)
                self._add(result)
        for name, found in sides.items():
            self.sides.add(name)
            self.pool.call("side_backward", name, each=_alike(found, signals, _reached(found)))
        self.reached |= _reached(main)
        if self.reached:
            self.pool.call("backward", last, each=_alike(main, signals, self.reached))

    def _objective_of(
        self, share: Share, values: Mapping[Signal, Tensor], gradient: bool
    ) -> tuple[dict[Signal, Tensor], LossProtocol]:
        micro = share.batch.to(self.device)
        leaves = {s: x.to(self.device).requires_grad_(gradient) for s, x in values.items()}
        return leaves, self.objective(micro, {s: Field(micro.tree, level_of(s), x) for s, x in leaves.items()})

    def _add(self, result: LossProtocol) -> None:
        self.loss += result.loss.detach().cpu()
        for name, value in result.stats.items():
            self.sums[name] = self.sums.get(name, 0) + torch.as_tensor(value).detach().cpu()


def _gradients(scalar: Tensor, leaves: Mapping[Signal, Tensor]) -> Gradients:
    """The gradient of a scalar with respect to each signal; None where it does not depend on it."""
    if not scalar.requires_grad:
        return dict.fromkeys(leaves)
    found = torch.autograd.grad(scalar, list(leaves.values()), retain_graph=True, allow_unused=True)
    return dict(zip(leaves, found))


def _reached(found: Sequence[Gradients]) -> set[Signal]:
    """Signals that have a gradient on any rank."""
    return {s for own in found for s, g in own.items() if g is not None}


def _alike(
    found: Sequence[Gradients], signals: Sequence[Mapping[Signal, Tensor]], reached: set[Signal]
) -> list[tuple[dict[Signal, Tensor]]]:
    """The arguments of each rank: gradients of the same signals on all ranks, 0 where a rank has none. Ranks whose backward
    passes reached different weights would wait for each other."""

    def of_rank(own: Gradients, values: Mapping[Signal, Tensor]) -> dict[Signal, Tensor]:
        return {s: torch.zeros_like(values[s]) if (g := own.get(s)) is None else g for s in sorted(reached)}

    return [(of_rank(own, values),) for own, values in zip(found, signals)]


class GatheredGradients(Sequence[Tensor]):
    """The whole gradient of the policy, collected from the ranks when it is first read."""

    def __init__(self, pool: RankPool) -> None:
        self._pool, self._tensors = pool, list[Tensor]()

    def _read(self) -> list[Tensor]:
        if not self._tensors:
            self._tensors = self._pool.call("gather_gradients")[0]
        return self._tensors

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._read())


def _without_tokens(batch: Batch) -> Tensor:
    return (batch.tree.size(TOKEN, TRAJECTORY).x == 0).nonzero().squeeze(1)


def _with_tokens(batch: Batch) -> Tensor:
    return (batch.tree.size(TOKEN, TRAJECTORY).x > 0).nonzero().squeeze(1)


def _zeros(batch: Batch, signal: Signal) -> Tensor:
    return torch.zeros(batch.tree.count(level_of(signal)))


def _joined(found: Sequence[Mapping[Signal, tuple[Tensor, Tensor]]]) -> dict[Signal, tuple[Tensor, Tensor]]:
    """The features of all ranks, by signal."""
    signals = {s for features in found for s in features}
    of = lambda s: [features[s] for features in found if s in features]  # noqa: E731
    return {s: (torch.cat([seed for seed, _ in of(s)]), torch.cat([rows for _, rows in of(s)])) for s in signals}
