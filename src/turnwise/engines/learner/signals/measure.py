"""Measure the signals of a batch with as few forward passes as possible.

Several models may run over one micro-batch: the policy, its reference, a teacher, a critic's own trunk ... Each runs at most
once, however many signals need it. Live signals, which exist only during a forward pass, carry their gradient in an update.

Two signals need sequences that were never sampled: the gold answer given at each turn, and each turn without its observation.
Knows signals; does not know objectives or a method's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.core.batch import Batch, Sequences
from turnwise.core.columns import Column
from turnwise.core.kept_sets import KeptSets
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field, Tree
from turnwise.core.signals import POLICY_SIGNALS, TURN_CRITIC, TURN_CRITIC_TARGET, WITH_GRADIENT, Signal, level_of
from turnwise.engines.learner import lora, packed_forward
from turnwise.engines.learner.packed_forward import ForwardPass
from turnwise.engines.learner.signals import hidden
from turnwise.engines.learner.signals.auxiliary import FlowDeviation, RewardProbe
from turnwise.engines.learner.value_heads import TOKEN_VALUES, frozen_copy
from turnwise.errors import SettingError, SignalError

if TYPE_CHECKING:
    from turnwise.engines.learner.learner import LocalLearner

LIVE_COUNTERPART = {
    Signal.PROXIMAL: Signal.LOGP,
    Signal.OLD_VALUE: Signal.VALUE,
    Signal.OLD_SECOND_VALUE: Signal.SECOND_VALUE,
    Signal.OLD_ENTROPY: Signal.ENTROPY,
    Signal.OLD_ACTION_VALUE: Signal.ACTION_VALUE,
}
"""Signals of a batch that equal a live signal, measured before the first update."""
LOGP_OF = {Signal.REFERENCE: "reference", Signal.PREVIOUS: "previous", Signal.TEACHER: "teacher"}
"""Log-probabilities under a model beside the policy."""
AUXILIARY = frozenset({Signal.REWARD_PROBE, Signal.FLOW_DEVIATION})
Q_VALUES = {Signal.Q, Signal.SECOND_Q, Signal.TARGET_Q, Signal.TARGET_SECOND_Q}
AFTER_SAMPLED = frozenset({*hidden.RANKS, *AUXILIARY, *Q_VALUES})
"""Signals that need the hidden state after a sampled token, of the policy or of a critic's trunk."""

Fields = dict[Any, Field]
ForwardOf = Callable[[str], ForwardPass]
"""The forward pass of a named model over one micro-batch: policy, reference, previous, teacher, critic, target."""


class SignalMeasurer:
    """Measures signals, and owns the models beside the policy: reference, previous policy, teacher, auxiliary models."""

    def __init__(self, learner: LocalLearner, teacher: PreTrainedModel | None) -> None:
        self.learner, self.teacher = learner, teacher
        self._reference: PreTrainedModel | None = None
        self._reference_was_reset = False
        self._previous: PreTrainedModel | None = None
        self._auxiliary_models: dict[Signal, RewardProbe | FlowDeviation] = {}
        if teacher is not None:
            policy_size, teacher_size = (packed_forward.lm_head(m).weight.shape[0] for m in (learner.model, teacher))
            if policy_size != teacher_size:
                raise SettingError(
                    f"the teacher's vocabulary has {teacher_size} entries, the model's {policy_size}, so its ids mean other "
                    "tokens; use a teacher with the same tokenizer"
                )
            teacher.to(device=learner.device, dtype=learner.master)  # type: ignore[call-arg]
            self.teacher = packed_forward.prepare(teacher.eval()).requires_grad_(False)

    # -------------------------------------------------------- a whole batch
    @torch.no_grad()
    def measure(self, batch: Batch, signals: frozenset[Signal]) -> Fields:
        """The requested signals without gradient, in the order of the batch, and the columns that later updates need."""
        if Column.RESET_REFERENCE in batch.columns and Signal.REFERENCE in signals:
            if self.learner.settings.lora_rank:
                raise SettingError(
                    "this method replaces its reference policy, and the reference of adapters is the base model; write "
                    "--lora-rank 0"
                )
            # the present policy becomes the reference; from now on checkpoints hold it
            self._reference, self._reference_was_reset = frozen_copy(self.learner.model), True
        sizes = {level: batch.tree.count(level) for level in (TOKEN, TURN, TRAJECTORY)}
        rows = {(Column.ROW, level): batch.tree.field(level, torch.arange(n)) for level, n in sizes.items()}
        blank = lambda level, dtype: torch.zeros(sizes[level], dtype=dtype, device=self.learner.device)  # noqa: E731
        results: dict[Any, tuple[Any, Tensor]] = {
            s: (level_of(s), blank(level_of(s), self.learner.master)) for s in signals
        }
        for signal in signals & AUXILIARY:
            self.auxiliary_model(signal).begin_batch()
        for micro, fields in self._measured(batch.put(rows), signals):
            for key, value in fields.items():
                _, out = results.setdefault(key, (value.level, blank(value.level, value.x.dtype)))
                out[micro[Column.ROW, value.level].x.to(out.device)] = value.x.to(out)
        if Signal.PREVIOUS in signals:  # measured once per batch, before its first update
            self._keep_previous()
        return {key: Field(batch.tree, level, x.to(batch.tree.device)) for key, (level, x) in results.items()}

    def _measured(self, batch: Batch, signals: frozenset[Signal]) -> Iterator[tuple[Batch, Fields]]:
        """Every micro-batch, and what was measured of it."""
        for micro in self.learner.micro_batches(batch):
            micro = micro.to(self.learner.device)
            yield micro, self.measure_micro_batch(micro, signals)

    def _keep_previous(self) -> None:
        """Remember the present policy as the previous one."""
        self._previous = frozen_copy(self.learner.model)

    # ------------------------------------------------------- one micro-batch
    def measure_micro_batch(self, batch: Batch, signals: frozenset[Signal]) -> Fields:
        """The requested signals of one micro-batch on the device, and the columns that later updates need."""
        computed = frozenset(LIVE_COUNTERPART.get(s, s) for s in signals)
        forward = self._forward_cache(batch, computed)
        live = self._live(batch, computed & WITH_GRADIENT, forward)
        out: Fields = {s: live[LIVE_COUNTERPART.get(s, s)] for s in signals if LIVE_COUNTERPART.get(s, s) in live}
        out |= {s: _logp(forward(model)) for s, model in LOGP_OF.items() if s in signals}
        if Signal.GRADIENT_NORM in signals:
            out[Signal.GRADIENT_NORM] = self._gradient_norms(batch)
        if Signal.ANSWER_LOGP in signals:
            out[Signal.ANSWER_LOGP] = self._answer_logp(batch)
        if Signal.LOGP_WITHOUT_FEEDBACK in signals:
            out[Signal.LOGP_WITHOUT_FEEDBACK] = self._logp_without_feedback(batch, _logp(forward("policy")))
        if Signal.CANDIDATE_MATCHES in signals:
            ids = hidden.sample_candidates(forward("policy"), self.learner.steps)
            out |= {(Column.CANDIDATE, j): Field(batch.tree, TOKEN, column) for j, column in enumerate(ids.unbind(1))}
            out[Signal.CANDIDATE_MATCHES] = Field(batch.tree, TOKEN, (ids == batch.token.x[:, None]).sum(1))
        for signal in signals & hidden.OF_POLICY.keys() - WITH_GRADIENT:
            out[signal] = hidden.of_distributions(signal, forward("policy"))
        for signal in signals & hidden.OF_BOTH.keys():
            out[signal] = hidden.of_distributions(signal, forward("policy"), forward("reference"))
        if signals & set(hidden.PREDICTED_CHANGES):
            out |= hidden.predicted_changes(forward("policy"), self.learner.preconditioner())
        if signals & set(hidden.RANKS):
            out |= hidden.effective_rank_signals(batch.tree, forward("policy").after)
        if signals & set(TURN_CRITIC_TARGET):
            out |= self.learner.value_heads.target_estimates(forward("target"), signals)
        for signal in signals & AUXILIARY:
            out[signal] = self.auxiliary_model(signal).measure(forward("policy"))
        return {key: f for key, f in out.items() if key in signals or not isinstance(key, Signal)}

    @torch.enable_grad()
    def _gradient_norms(self, batch: Batch) -> Field:
        """‖∇ Σₜ log π(yₜ)‖ of each trajectory: one backward pass each."""
        out = torch.zeros(len(batch), device=batch.tree.device)
        parameters = [p for name, p in self.learner.trained.items() if name.startswith("model/")]
        for k in range(len(batch)):
            total = self.logp(batch.select([k])).x.sum()
            if total.requires_grad:
                grads = torch.autograd.grad(total, parameters, allow_unused=True)
                out[k] = torch.nn.utils.get_total_norm([g for g in grads if g is not None])
        return Field(batch.tree, TRAJECTORY, out)

    def live(self, batch: Batch, signals: frozenset[Signal]) -> tuple[Batch, dict[Signal, Field]]:
        """One micro-batch on the device, and its live signals with their gradient."""
        # The policy's pass is launched before the other columns are copied, so that the GPU does not wait for them.
        early = signals & POLICY_SIGNALS and batch.sequences.ids.numel() and self.learner.device.type == "cuda"
        states = self._forward_cache(batch, signals)("policy").states if early else None
        batch = batch.to(self.learner.device)
        return batch, self._live(batch, signals, self._forward_cache(batch, signals, states))

    def _live(self, batch: Batch, signals: frozenset[Signal], forward: ForwardOf) -> dict[Signal, Field]:
        out: dict[Signal, Field] = {}
        if signals & POLICY_SIGNALS:
            logp, entropy = forward("policy").logp(Signal.ENTROPY in signals)
            out[Signal.LOGP] = Field(batch.tree, TOKEN, logp)
            if entropy is not None:
                out[Signal.ENTROPY] = Field(batch.tree, TOKEN, entropy)
            if Signal.CANDIDATE_LOGP in signals:
                ids = hidden.stored_candidates(batch)
                ids = hidden.sample_candidates(forward("policy"), self.learner.steps) if ids is None else ids
                out[Signal.CANDIDATE_LOGP] = hidden.candidate_logp(forward("policy"), ids)
            if Signal.MODE_LOGP in signals:
                out[Signal.MODE_LOGP] = hidden.of_distributions(Signal.MODE_LOGP, forward("policy"))
        if signals & {*TOKEN_VALUES, Signal.ACTION_VALUE, *TURN_CRITIC}:
            out |= self.learner.value_heads.estimates(forward("critic"), signals)
        return {s: f for s, f in out.items() if s in signals}

    def logp(self, batch: Batch) -> Field:
        """log π of a batch, with its gradient where gradients are enabled."""
        return _logp(self._forward_cache(batch, frozenset())("policy"))

    def _forward_cache(
        self, batch: Batch, signals: frozenset[Signal], states: packed_forward.PackedStates | None = None
    ) -> ForwardOf:
        """Run each model at most once over a micro-batch. ``states``: hidden states the policy has computed already."""
        # No reference cycle: the states are freed with the micro-batch, and not by the cyclic collector.
        passes: dict[str, ForwardPass] = {}
        learner, heads = self.learner, self.learner.value_heads
        adapters = bool(learner.settings.lora_rank)

        @contextmanager
        def context(without_adapters: bool) -> Iterator[None]:
            mixed = learner.dtype != learner.master
            with (
                lora.disabled(learner.model) if without_adapters else nullcontext(),
                torch.autocast(learner.device.type, learner.dtype) if mixed else nullcontext(),
            ):
                yield

        def forward(name: str) -> ForwardPass:
            model: Any
            match name:
                case "teacher" if self.teacher is None:
                    raise SettingError(
                        "this method needs a teacher's log-probabilities, and there is no teacher; write --teacher MODEL"
                    )
                case "reference":  # that of adapters is the model without them
                    model = learner.model if adapters else self.reference()
                case _:
                    beside = {"previous": self._previous, "teacher": self.teacher, "critic": heads.trunk}
                    model = (beside | {"target": heads.target_trunk}).get(name)
            if model is None:  # a shared critic, or no previous policy yet: the pass of the policy
                name, model = "policy", learner.model
            if name not in passes:
                after_sampled = bool(signals & AFTER_SAMPLED) and name in ("policy", "critic", "target")
                computed = states if name == "policy" else None
                around = partial(context, name == "reference" and adapters)
                passes[name] = ForwardPass(batch, model, around, after_sampled, computed)
            return passes[name]

        return forward

    # -------------------------------------------------- counterfactual sequences
    # Each query is a sequence of its own: the history of one turn, continued or modified. Queries of one trajectory share
    # prefixes, which are computed once.
    def _answer_logp(self, batch: Batch) -> Field:
        """Mean log-probability of the gold answer in place of each turn's own tokens. 0 for turns without tokens."""
        if not batch.answers or not all(batch.answers):
            raise SignalError(
                "this method needs the log-probability of the gold answer, but the environment has no answer for some task; "
                "give the environment an answer(), or use a method that does not need it"
            )
        device, ids = batch.tree.device, batch.sequences.ids
        length = torch.tensor([len(a) for a in batch.answers], device=device)
        gold = torch.tensor([i for answer in batch.answers for i in answer], device=device)
        out = torch.zeros(batch.tree.count(TURN), device=device)
        for turns in _Turns.of(batch).chunks(self.learner.settings.positions):
            trajectory = batch.tree.parents[1][turns.index]
            history, answer = turns.first - turns.begin, length[trajectory]
            source, owner = spans(turns.begin, history + answer)
            gold_ids, _ = spans((length.cumsum(0) - length)[trajectory], answer)
            scored = source >= turns.first[owner]
            packed = ids[source.clamp(max=ids.numel() - 1)].masked_scatter(scored, gold[gold_ids])
            logp = self.logp(_query_batch(batch, turns.index, packed, history + answer, scored, owner)).mean(TURN)
            out[turns.index] = logp.x.to(out.dtype)
        return Field(batch.tree, TURN, out)

    def _logp_without_feedback(self, batch: Batch, logp: Field) -> Field:
        """log π(yₜ) with the ids between this turn and the previously sampled token masked; ``logp`` where nothing is."""
        s = batch.sequences
        if s.masked_ids is None or not s.sampled_at.numel():
            return logp
        here = torch.arange(s.ids.numel(), device=s.ids.device)
        after_last = torch.zeros_like(here).index_copy(0, s.sampled_at, s.sampled_at + 1).cummax(0).values
        # [L] the position after the last token sampled before each position, or the start of its sequence
        observation = torch.maximum(here - s.positions(), torch.cat([after_last.new_zeros(1), after_last[:-1]]))
        turns = _Turns.of(batch)
        changes = torch.cat([s.start[:1], (s.masked_ids != s.ids).cumsum(0)])
        turns = turns.select((changes[turns.first] > changes[observation[turns.first]]).nonzero().squeeze(1))
        out = logp.x.clone()
        for chunk in turns.chunks(self.learner.settings.positions):
            length = chunk.first + chunk.count - chunk.begin
            source, owner = spans(chunk.begin, length)
            scored = source >= chunk.first[owner]
            masked = (source >= observation[chunk.first][owner]) & ~scored
            packed = torch.where(masked, s.masked_ids[source], s.ids[source])
            tokens, _ = spans(chunk.token, chunk.count)
            query = _query_batch(batch, chunk.index, packed, length, scored, owner, s.kept and s.kept.select(tokens))
            out[tokens] = self.logp(query).x.to(out.dtype)
        return Field(batch.tree, TOKEN, out)

    # ---------------------------------------------------------------- models
    def auxiliary_model(self, signal: Signal) -> RewardProbe | FlowDeviation:
        """The model behind an auxiliary signal, created on first use."""
        if signal not in self._auxiliary_models:
            device, dtype = self.learner.device, self.learner.master
            width = packed_forward.lm_head(self.learner.model).weight.shape[1]
            probe = signal == Signal.REWARD_PROBE
            self._auxiliary_models[signal] = RewardProbe(device) if probe else FlowDeviation(width, device, dtype)
        return self._auxiliary_models[signal]

    def train_auxiliary(self, batch: Batch) -> None:
        """Fit the auxiliary models to a batch that was measured before and now has its rewards."""
        for model in self._auxiliary_models.values():
            model.learn(batch.to(self.learner.device))

    def reference(self) -> PreTrainedModel:
        """The frozen initial policy. The first call copies it and must come before the first step."""
        if self._reference is None:
            if self.learner.steps:
                raise SettingError(
                    f"the reference policy was first requested after {self.learner.steps} steps, when the initial weights no "
                    "longer existed; measure it, or call reference(), before the first update"
                )
            self._reference = frozen_copy(self.learner.model)
        return self._reference

    def reference_tensors(self) -> dict[str, Tensor]:
        """The live tensors of the reference, by name."""
        return named("reference", self._reference)

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors of all models, by name; of the reference only if it is not the initial policy."""
        reset = {"reference_reset/flag": torch.ones(1)}
        return (
            (self.reference_tensors() | reset if self._reference_was_reset else {})
            | named("previous", self._previous)
            | {f"{s}/{n}": t for s, model in self._auxiliary_models.items() for n, t in model.tensors().items()}
        )

    def load(self, under: Callable[[str], Mapping[str, Tensor]]) -> None:
        """The inverse of ``tensors``. ``under``: returns the saved tensors under a prefix."""
        self._reference = self._restored_copy(under("reference/")) or self._reference  # not saved: it stays as it is
        self._reference_was_reset = bool(under("reference_reset/"))
        self._previous = self._restored_copy(under("previous/"))
        for signal in AUXILIARY:
            if signal in self._auxiliary_models or under(f"{signal}/"):
                self.auxiliary_model(signal).load(under(f"{signal}/"))

    def _restored_copy(self, saved: Mapping[str, Tensor]) -> PreTrainedModel | None:
        """A frozen copy of the model with the saved weights; None if there are none."""
        model = frozen_copy(self.learner.model) if saved else None
        for name, p in model.named_parameters() if model is not None else ():
            p.copy_(saved[name])
        return model


def named(prefix: str, model: PreTrainedModel | None) -> dict[str, Tensor]:
    return {} if model is None else {f"{prefix}/{n}": p.detach() for n, p in model.named_parameters()}


def _logp(forward: ForwardPass) -> Field:
    return Field(forward.batch.tree, TOKEN, forward.logp()[0])


# ------------------------------------------------------ queries of single turns


@dataclass(frozen=True, eq=False)
class _Turns:
    """Turns with tokens, and their positions in the packed ids. All [A]."""

    index: Tensor  # among all turns
    token: Tensor  # index of the first token
    count: Tensor  # number of tokens
    begin: Tensor  # position where the sequence starts
    first: Tensor  # position of the first token

    @classmethod
    def of(cls, batch: Batch) -> _Turns:
        s, count = batch.sequences, batch.tree.size(TOKEN, TURN).x
        index = (count > 0).nonzero().squeeze(1)
        token = (count.cumsum(0) - count)[index]
        first = s.sampled_at[token]
        return cls(index, token, count[index], s.start[torch.searchsorted(s.start, first, right=True) - 1], first)

    def select(self, rows: Tensor) -> _Turns:
        return _Turns(*(x[rows] for x in (self.index, self.token, self.count, self.begin, self.first)))

    def chunks(self, positions: int) -> Iterator[_Turns]:
        """Consecutive turns in chunks of about ``positions`` ids. Affects memory, never the result."""
        chunk = (self.first + self.count - self.begin).cumsum(0) // max(1, positions)
        for n in chunk.unique().tolist():
            yield self.select((chunk == n).nonzero().squeeze(1))


def spans(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The integers start, start + 1 ... of all spans concatenated, and the span of each."""
    owner = torch.repeat_interleave(length)
    inside = torch.arange(owner.numel(), device=start.device) - (length.cumsum(0) - length)[owner]
    return start[owner] + inside, owner


def _query_batch(
    batch: Batch,
    turns: Tensor,
    ids: Tensor,
    length: Tensor,
    scored: Tensor,
    owner: Tensor,
    sets: KeptSets | None = None,
) -> Batch:
    """A batch whose sampled tokens are the ``scored`` ids: one sequence, turn and trajectory per queried turn."""
    each = torch.arange(turns.numel(), device=ids.device)
    tree = Tree(owner[scored], each, torch.zeros_like(each), 1)
    at = scored.nonzero().squeeze(1)
    sequences = Sequences(ids, torch.cat([length.new_zeros(1), length.cumsum(0)]), each, at, kept=sets)
    token, temperature = Field(tree, TOKEN, ids[at]), Field(tree, TURN, batch.temperature.x[turns])
    return replace(batch, tree=tree, sequences=sequences, token=token, temperature=temperature, columns={}, answers=())
