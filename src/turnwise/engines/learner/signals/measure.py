"""What a learner can say of a batch: each signal, from as few passes as possible.

One micro-batch lies before several models (the policy, its reference, a teacher, a critic's own trunk ...); each reads it at
most once, however many signals are asked of it. Signals that only live in a forward pass come with the gradient when an
update asks for them.

Knows signals; no objective, no method's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.core.batch import Batch
from turnwise.core.levels import TOKEN, TRAJECTORY, TURN, Field
from turnwise.core.signals import LIVE, SLOW, UTTERANCE, Signal, level_of
from turnwise.engines.learner import lora, packed_forward
from turnwise.engines.learner.forward_pass import Reading
from turnwise.engines.learner.optimizer import LearnerSettings
from turnwise.engines.learner.signals import candidates, counterfactual, update_statistics
from turnwise.engines.learner.signals.auxiliary import Pupil
from turnwise.engines.learner.signals.effective_rank import ranks
from turnwise.engines.learner.signals.flow import Flow
from turnwise.engines.learner.signals.reward_probe import Ridge
from turnwise.engines.learner.value_heads import TOKENWISE, Critics, frozen
from turnwise.errors import SettingError

SAME = {
    Signal.PROXIMAL: Signal.LOGP,
    Signal.OLD_VALUE: Signal.VALUE,
    Signal.OLD_TWIN: Signal.TWIN,
    Signal.OLD_ENTROPY: Signal.ENTROPY,
}
"""Frozen signals that are a live one, measured early."""

RANKS = frozenset({Signal.RANK, Signal.RANK_SPEED, Signal.RANK_PUSH})
PUPILS = frozenset({Signal.PROBE, Signal.DEVIATION})
THROUGH = RANKS | PUPILS | {Signal.Q, Signal.Q_TWIN, Signal.SLOW_Q, Signal.SLOW_Q_TWIN}
"""Signals of the state after a sampled token ..."""
ENTERED = ("policy", "critic", "slow")
"""... and whose reading may go so far."""

BY_POLICY = frozenset({Signal.LOGP, Signal.ENTROPY, Signal.RIVALS})

Found = dict[Any, Field]
Read = Callable[[str], Reading]
"""A micro-batch as the named model reads it: policy, reference, previous, teacher, critic, slow."""


class House(Protocol):
    """What measuring asks of its learner."""

    settings: LearnerSettings
    model: PreTrainedModel
    critics: Critics
    device: torch.device
    dtype: torch.dtype  # of the arithmetic
    master: torch.dtype  # of the weights
    steps: int  # taken

    def policy(self) -> Iterator[nn.Parameter]: ...

    def preconditioner(self) -> Tensor: ...


class Measuring:
    def __init__(self, house: House, teacher: PreTrainedModel | None) -> None:
        self.house = house
        self.teacher = None if teacher is None else self._guest(teacher)
        self._reference: PreTrainedModel | None = None
        self._previous: PreTrainedModel | None = None
        self._pupils: dict[Signal, Pupil] = {}
        self._gauges: tuple[tuple[frozenset[Signal], Callable[[Batch, Read, frozenset[Signal]], Found]], ...] = (
            (frozenset({Signal.REFERENCE}), lambda b, read, _: {Signal.REFERENCE: _logp(read("reference"))}),
            (frozenset({Signal.PREVIOUS}), lambda b, read, _: {Signal.PREVIOUS: _logp(read("previous"))}),
            (frozenset({Signal.TEACHER}), lambda b, read, _: {Signal.TEACHER: _logp(read("teacher"))}),
            (frozenset({Signal.GRADIENT_NORM}), self._norms),
            (frozenset({Signal.ANSWER}), self._answers),
            (frozenset({Signal.BLIND}), self._blind),
            (frozenset({Signal.HITS}), self._hits),
            (frozenset({Signal.HELLINGER}), self._hellinger),
            (
                frozenset(update_statistics.PUSHES),
                lambda b, read, _: dict(update_statistics.pushes(read("policy"), house.preconditioner())),
            ),
            (RANKS, lambda b, read, _: dict(ranks(b.tree, read("policy").after))),
            (frozenset(SLOW), lambda b, read, wanted: dict(house.critics.slow(read("slow"), wanted))),
            (PUPILS, lambda b, read, wanted: {s: self._pupil(s).measure(read("policy")) for s in wanted & PUPILS}),
        )

    def _guest(self, teacher: PreTrainedModel) -> PreTrainedModel:
        mine, theirs = (packed_forward.head(model).weight.shape[0] for model in (self.house.model, teacher))
        if mine != theirs:
            raise SettingError(
                f"the teacher's vocabulary has {theirs} entries, the model's {mine}; its log-probabilities would be of other "
                "tokens; take a teacher with the same tokenizer"
            )
        teacher.to(device=self.house.device, dtype=self.house.master)  # type: ignore[call-arg]
        return packed_forward.adopt(teacher.eval()).requires_grad_(False)

    # ------------------------------------------------------------ the whole
    @torch.no_grad()
    def measure(self, batch: Batch, signals: frozenset[Signal]) -> Found:
        """The asked signals of the batch, without gradient, in the batch's own order; and what they need to remember of it."""
        sizes = {level: batch.tree.count(level) for level in (TOKEN, TURN, TRAJECTORY)}
        rows = {f"_{level.name}": batch.tree.field(level, torch.arange(n)) for level, n in sizes.items()}
        blank = lambda level, dtype: torch.zeros(sizes[level], dtype=dtype, device=self.house.device)  # noqa: E731
        found: dict[Any, tuple[Any, Tensor]] = {
            s: (level_of(s), blank(level_of(s), self.house.master)) for s in signals
        }
        for signal in signals & PUPILS:
            self._pupil(signal).open()
        for micro in batch.put(rows).split(self.house.settings.positions, padded=self.house.device.type != "cuda"):
            micro = micro.to(self.house.device)
            for key, value in self._measured(micro, signals).items():
                _, out = found.setdefault(key, (value.level, blank(value.level, value.x.dtype)))
                out[micro[f"_{value.level.name}"].x] = value.x.to(out.dtype)
        if Signal.PREVIOUS in signals:  # asked once for each batch, before its first update
            self._previous = frozen(self.house.model)
        return {key: Field(batch.tree, level, x.to(batch.tree.device)) for key, (level, x) in found.items()}

    def _measured(self, batch: Batch, signals: frozenset[Signal]) -> Found:
        """One micro-batch."""
        wanted = frozenset(SAME.get(s, s) for s in signals)
        read = self._reader(batch, wanted)
        live = self._live(batch, wanted & LIVE, read)
        out: Found = {s: live[SAME.get(s, s)] for s in signals if SAME.get(s, s) in live}
        for offers, gauge in self._gauges:
            if offers & signals:
                out |= {k: f for k, f in gauge(batch, read, signals).items() if k in signals or k not in offers}
        return out

    # ------------------------------------------------------- one micro-batch
    def live(self, batch: Batch, wanted: frozenset[Signal]) -> tuple[Batch, dict[Signal, Field]]:
        """One micro-batch, on the device, and its live signals, with their gradient. The policy begins to read before all else is
        sent: what a GPU does not need yet it need not wait for."""
        early = wanted & BY_POLICY and batch.sequences.ids.numel() and self.house.device.type == "cuda"
        states = self._reader(batch, wanted)("policy").states if early else None
        batch = batch.to(self.house.device)
        return batch, self._live(batch, wanted, self._reader(batch, wanted, states))

    def _live(self, batch: Batch, wanted: frozenset[Signal], read: Read) -> dict[Signal, Field]:
        out: dict[Signal, Field] = {}
        if wanted & BY_POLICY:
            logp, entropy = read("policy").logp(Signal.ENTROPY in wanted)
            out[Signal.LOGP] = Field(batch.tree, TOKEN, logp)
            if entropy is not None:
                out[Signal.ENTROPY] = Field(batch.tree, TOKEN, entropy)
            if Signal.RIVALS in wanted:
                known = candidates.known(batch)
                drawn = candidates.draw(read("policy"), self.house.steps) if known is None else known
                out[Signal.RIVALS] = candidates.rivals(read("policy"), drawn, logp)
        if wanted & {*TOKENWISE, *UTTERANCE}:
            out |= self.house.critics.estimates(read("critic"), wanted)
        return {s: f for s, f in out.items() if s in wanted}

    def logp(self, batch: Batch) -> Field:
        """log π of a batch, with its gradient where gradients are on."""
        return _logp(self._reader(batch, frozenset())("policy"))

    def _reader(self, batch: Batch, wanted: frozenset[Signal], states: packed_forward.States | None = None) -> Read:
        """A micro-batch before every model, read once by each. Nothing here refers to itself, so what was read is forgotten with
        its micro-batch, not when cycles are next looked for. ``states``: what the policy read already."""
        readings: dict[str, Reading] = {}

        def read(who: str) -> Reading:
            model = self._model(who)
            if model is None:
                who, model = "policy", self.house.model
            if who not in readings:
                switched_off = who == "reference" and bool(self.house.settings.lora_rank)
                through = bool(wanted & THROUGH) and who in ENTERED
                known = states if who == "policy" else None
                readings[who] = Reading(batch, model, lambda: self._during(switched_off), through, known)
            return readings[who]

        return read

    def _model(self, who: str) -> PreTrainedModel | None:
        """None: the policy itself."""
        critics = self.house.critics
        if who == "teacher" and self.teacher is None:
            raise SettingError(
                "this method reads a teacher's log-probabilities, and there is none; give one with --teacher"
            )
        if who == "reference":
            return self.house.model if self.house.settings.lora_rank else self.reference()
        return {
            "policy": self.house.model,
            "previous": self._previous,
            "teacher": self.teacher,
            "critic": critics.trunk,
            "slow": critics.slow_trunk,
        }[who]

    def _during(self, switched_off: bool) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(lora.disabled(self.house.model) if switched_off else nullcontext())
        if self.house.dtype != self.house.master:
            stack.enter_context(torch.autocast(self.house.device.type, self.house.dtype))
        return stack

    # --------------------------------------------------------------- gauges
    def _norms(self, batch: Batch, read: Read, wanted: frozenset[Signal]) -> Found:
        return {Signal.GRADIENT_NORM: update_statistics.gradient_norms(batch, self.logp, list(self.house.policy()))}

    def _answers(self, batch: Batch, read: Read, wanted: frozenset[Signal]) -> Found:
        return {Signal.ANSWER: counterfactual.answers(batch, self.logp, self.house.settings.positions)}

    def _blind(self, batch: Batch, read: Read, wanted: frozenset[Signal]) -> Found:
        plain = _logp(read("policy"))
        return {Signal.BLIND: counterfactual.blind(batch, plain, self.logp, self.house.settings.positions)}

    def _hits(self, batch: Batch, read: Read, wanted: frozenset[Signal]) -> Found:
        drawn = candidates.draw(read("policy"), self.house.steps)
        return {Signal.HITS: candidates.hits(batch, drawn), **candidates.columns(batch, drawn)}

    def _hellinger(self, batch: Batch, read: Read, wanted: frozenset[Signal]) -> Found:
        return {Signal.HELLINGER: update_statistics.hellinger(read("policy"), read("reference"))}

    # ------------------------------------------------------ what it remembers
    def _pupil(self, signal: Signal) -> Pupil:
        """What is learned beside the policy, made when first asked for."""
        if signal not in self._pupils:
            h, width = self.house, packed_forward.head(self.house.model).weight.shape[1]
            self._pupils[signal] = Ridge(h.device) if signal == Signal.PROBE else Flow(width, h.device, h.master)
        return self._pupils[signal]

    def learn(self, batch: Batch) -> None:
        """A measured batch has come back with its rewards."""
        for pupil in self._pupils.values():
            pupil.learn(batch.to(self.house.device))

    def reference(self) -> PreTrainedModel:
        """The frozen initial policy, copied when first asked for; it must be asked for before the first step."""
        if self._reference is None:
            if self.house.steps:
                raise SettingError(
                    f"the reference policy was first asked for after {self.house.steps} steps, when the initial weights were "
                    "gone; measure it, or call reference(), before the first update"
                )
            self._reference = frozen(self.house.model)
        return self._reference

    def tensors(self) -> dict[str, Tensor]:
        """All that is remembered, by name. A snapshot."""
        models = (("reference", self._reference), ("previous", self._previous))
        own = {
            f"{name}/{n}": p.detach().clone() for name, m in models if m is not None for n, p in m.named_parameters()
        }
        return own | {f"{s}/{n}": t for s, pupil in self._pupils.items() for n, t in pupil.tensors().items()}

    def load(self, cut: Callable[[str], Mapping[str, Tensor]]) -> None:
        """``cut``: the saved tensors under a prefix."""
        self._reference, self._previous = self._restored(cut("reference/")), self._restored(cut("previous/"))
        for signal in PUPILS:
            if signal in self._pupils or cut(f"{signal}/"):
                self._pupil(signal).load(cut(f"{signal}/"))

    def _restored(self, saved: Mapping[str, Tensor]) -> PreTrainedModel | None:
        """A frozen copy of the model with saved weights, where there are any."""
        if not saved:
            return None
        model = frozen(self.house.model)
        for name, p in model.named_parameters():
            p.copy_(saved[name])
        return model


def _logp(reading: Reading) -> Field:
    return Field(reading.batch.tree, TOKEN, reading.logp()[0])
