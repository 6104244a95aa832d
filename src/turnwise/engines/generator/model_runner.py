"""The generator's own copy of a model: read tokens into slots, step running rows, take new weights.

``Network`` runs any causal LM through its stock forward; where a hand-written decoder reproduces it, that one steps.
Knows nothing of requests, sampling or text.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turnwise.engines.attention_interface import adopt
from turnwise.engines.generator.attention_layouts import Job, Reading, Stepping
from turnwise.engines.generator.cuda_graphs import GraphDecoder
from turnwise.engines.generator.kv_cache import Shape, Slots
from turnwise.engines.generator.llama_decoder import Decoder
from turnwise.engines.kernels.dispatch import calm
from turnwise.errors import SettingError

log = logging.getLogger(__name__)

PROOF, SHORTEST = 12, 4  # ids read and stepped to prove a path, and the shortest context in which that says anything
READ_BUDGET = 4096  # tokens of one packed reading: bounds its memory ...
READ_BUDGET_CUDA = 1 << 15  # ... smaller ones leave a large GPU waiting for launches


def kernels_for(device: torch.device) -> tuple[Any, str]:
    """The module of kernels for a device, or why there is none."""
    if device.type != "cuda":
        return None, "no GPU"
    if importlib.util.find_spec("triton") is None:
        return None, "no Triton to compile kernels with"
    return importlib.import_module("turnwise.engines.kernels.triton.decode"), ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Probe:
    """A layout that only looks at shapes."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[Shape, Shape]] = {}
        self.windows: set[int | None] = set()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        self.shapes[layer] = ((k.shape[1], k.shape[3]), (v.shape[1], v.shape[3]))
        self.windows.add(window)
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


class Network:
    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        context: int,
        device: torch.device,
        fast: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``dtype``: of weights and slots; float8_e4m3fn: weights of the layers in fp8, all else in bfloat16 (on a CPU in the
        model's own)."""
        if context < SHORTEST:
            raise SettingError(f"context={context} is too short to prove a model in; write at least {SHORTEST}")
        self.narrow = dtype == torch.float8_e4m3fn
        if self.narrow:
            dtype = torch.bfloat16 if device.type == "cuda" else None
        self.exact = dict(model.named_parameters()) if dtype not in (None, model.dtype) else None  # before rounding
        self.model = copy.deepcopy(model).to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        for p in self.model.parameters():  # not the buffers: rounded rotary frequencies are off by half a turn soon
            p.data = p.data.to(dtype or p.dtype)
        self.device = device
        calm(device)
        many, vocabulary = min(PROOF, context), model.config.get_text_config().vocab_size
        ids = torch.randint(0, vocabulary, (many,), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            reference = self.model(input_ids=ids[None].to(device), use_cache=False).logits[0]
            adopt(self.model)
            probe = _Probe()
            self._forward(ids[None].to(device), torch.arange(many, device=device)[None], probe)
            shapes = [probe.shapes[layer] for layer in sorted(probe.shapes)]
            if list(probe.shapes) != list(range(len(shapes))):
                raise SettingError(f"{type(model).__name__} does not route every layer through its attention interface")
            self.slots = Slots(shapes, rows, context, next(self.model.parameters()).dtype, device)
            self.decoder: Decoder | None = None
            self.path = f"stock forward, {_name(self.slots.dtype)}, because fast is off"
            self._verify(ids, reference, "its stock forward")
            if fast:
                self._accelerate(ids, reference, probe.windows)
        self.exact = None
        log.info("generator steps %s by: %s", type(self.model).__name__, self.describe())

    def _forward(self, tokens: Tensor, position: Tensor, layout: object) -> Tensor:
        return self.model(input_ids=tokens, position_ids=position, layout=layout, use_cache=False).logits

    # ------------------------------------------------------------------ checks

    def _deviation(self, ids: Tensor, reference: Tensor) -> float:
        """Largest error of reading all ids but the last two and stepping those, relative to the logits' scale."""
        self.read([Job(0, 0, ids[:-2].tolist())])
        layout = Stepping(self.slots, [len(ids) - 2], 2)
        rows = []
        for token in ids[-2:].to(self.device):
            rows.append(self.step(token[None], layout)[0])
            layout.advance()
        return float((torch.stack(rows) - reference[-2:]).abs().max() / (1e-6 + reference.abs().max()))

    def _tolerance(self) -> float:
        if self.narrow and self.decoder is not None:
            return 0.25
        return 1e-3 if self.slots.dtype in (torch.float32, torch.float64) else 0.05

    def _verify(self, ids: Tensor, reference: Tensor, what: str) -> None:
        error = self._deviation(ids, reference)
        if not error <= self._tolerance():
            raise SettingError(
                f"{type(self.model).__name__} reads differently through KV slots than by {what} (off by {error:.2g}): "
                "its attention uses something beyond the Transformers attention interface (soft-capping, sinks ...)"
            )

    def _accelerate(self, ids: Tensor, reference: Tensor, windows: set[int | None]) -> None:
        """Step through the best decoder that fits this model, works on this machine and gives the same logits."""
        reasons: list[str] = []
        for what, make in self._decoders(windows):
            try:
                made = make()
                if isinstance(made, str):
                    reasons.append(f"not {what}, because of {made}")
                    continue
                self.decoder = made
                error = self._deviation(ids, reference)
                if error <= self._tolerance():
                    self.decoder.rehearse()
                    self.path = "; ".join(["", *reasons])
                    return
                reasons.append(f"not {what}, because its logits were off by {error:.2g}")
            except Exception as fault:  # no compiler, an old GPU, too little memory: a slower path is better than none
                reasons.append(f"not {what}, because of {type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}")
                log.warning("generator: %s", reasons[-1])
        self.decoder = None
        narrow = "; weights are not rounded to fp8" if self.narrow else ""
        self.path = f"stock forward, {_name(self.slots.dtype)}{narrow}; " + "; ".join(reasons)

    def _decoders(self, windows: set[int | None]) -> list[tuple[str, Callable[[], Decoder | str]]]:
        """Decoders to try, the fastest first; each gives itself or why it does not fit."""

        def replayed(narrow: bool) -> Decoder | str:
            kernels, why = kernels_for(self.device)
            why = why or GraphDecoder.misfit(self.model, windows)
            if why:
                return why
            decoder = GraphDecoder(self.model, self.slots, narrow, kernels)
            decoder.refresh(self.exact)
            return decoder

        def plain() -> Decoder | str:
            return Decoder.misfit(self.model, windows) or Decoder(self.model, self.slots, self.narrow)

        graphs: list[tuple[str, Callable[[], Decoder | str]]] = []
        if kernels_for(self.device)[0] is not None or self.device.type == "cuda":
            graphs = [(f"CUDA graphs{' in fp8' * narrow}", partial(replayed, narrow)) for narrow in (True, False)]
        return [*graphs[0 if self.narrow else 1 :], ("the hand-written decoder", plain)]

    def describe(self) -> str:
        """Which path steps, and why not a faster one."""
        return self.path if self.decoder is None else self.decoder.describe() + self.path

    @property
    def graphs(self) -> GraphDecoder | None:
        """The decoder, if it can draw many tokens without the host."""
        return self.decoder if isinstance(self.decoder, GraphDecoder) else None

    # ------------------------------------------------------------------ use

    def read(self, jobs: Sequence[Job]) -> int:
        """Compute the KV of these ids. Returns how many tokens were read."""
        budget = READ_BUDGET_CUDA if self.device.type == "cuda" else READ_BUDGET
        for part in _parts(jobs, budget, padded=self.graphs is None):
            layout = Reading(self.slots, part)
            if self.decoder is not None:
                self.decoder.read(layout)
            else:
                base, (ids, position, *_) = self.model.base_model, layout.there
                # no logits are needed: a request's last id is read by its first step
                base(input_ids=ids[None], position_ids=position[None], layout=layout, use_cache=False)
        return sum(len(job.ids) for job in jobs)

    def step(self, tokens: Tensor, layout: Stepping) -> Tensor:
        """Feed one token per row [n]; logits [n, V] of the next."""
        if self.decoder is not None:
            return self.decoder.step(tokens, layout)
        return self._forward(tokens[:, None], layout.position[:, None], layout)[:, 0]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights by name. Names may be missing (a tied head), never unknown."""
        own = self.model.state_dict()
        unknown = [name for name in weights if name not in own]
        if unknown:
            raise SettingError(
                f"published weights name {unknown[0]!r}, which {type(self.model).__name__} does not have"
            )
        for name, value in weights.items():
            if own[name].shape != value.shape:
                raise SettingError(
                    f"weight {name!r} has shape {tuple(value.shape)}; the model's is {tuple(own[name].shape)}"
                )
        if weights:
            torch._foreach_copy_([own[name] for name in weights], list(weights.values()))
        if self.decoder is not None:
            self.decoder.refresh(weights)
        self.slots.forget()


def _parts(jobs: Sequence[Job], budget: int, padded: bool) -> list[list[Job]]:
    """Cut into packed passes of a bounded number of tokens, and where jobs are padded to the longest, of at most twice as many
    with the padding; long jobs first, so that like is read with like. The pieces of a long job follow one another."""
    pieces = [
        Job(job.row, job.start + at, job.ids[at : at + budget])
        for job in sorted(jobs, key=lambda job: -len(job.ids))
        for at in range(0, len(job.ids), budget)
    ]
    parts: list[list[Job]] = []
    room = depth = 0
    for piece in pieces:
        depth = max(depth, len(piece.ids))
        wide = padded and bool(parts) and (len(parts[-1]) + 1) * depth > 2 * budget
        if not parts or len(piece.ids) > room or wide or parts[-1][-1].row == piece.row:
            parts.append([])
            room, depth = budget, len(piece.ids)
        parts[-1].append(piece)
        room -= len(piece.ids)
    return parts
