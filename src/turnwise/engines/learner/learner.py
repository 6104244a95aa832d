"""The in-process learner: measures the signals of a batch and takes optimizer steps.

Micro-batches only bound memory: their losses are summed and nothing is rescaled. The model stays in evaluation mode, because
dropout would make the learner a different policy from the generator.

An objective arrives as a callable that declares the signals it needs; ``SignalMeasurer`` provides them. The learner does not
know what it optimises: no rewards, no advantages, no method's name.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as progress_logging

from turnwise.core.batch import Batch
from turnwise.core.columns import Column
from turnwise.core.kept_sets import MaskReplay
from turnwise.core.levels import BATCH, Field
from turnwise.core.protocols import ObjectiveProtocol, Scales
from turnwise.core.signals import WITH_GRADIENT, Signal
from turnwise.engines import compat
from turnwise.engines.adapters import TensorsWhenRead
from turnwise.engines.capture import using_gpu
from turnwise.engines.experts import routing_of
from turnwise.engines.grammar import no_grammars
from turnwise.engines.kernels.dispatch import limit_host_threads
from turnwise.engines.kernels.four_bit import packed_experts, packed_layers
from turnwise.engines.learner import llama_layers, lora, optimizer, packed_forward
from turnwise.engines.learner.optimizer import LearnerSettings, whole
from turnwise.engines.learner.signals.measure import SignalMeasurer
from turnwise.engines.learner.value_heads import ValueHeads
from turnwise.errors import SettingError
from turnwise.store.shard_files import shapes_of

log = logging.getLogger(__name__)

VALUE_FILE = "value_head.safetensors"
CRITIC_PREFIXES = ("value/", "turns/", "critic/")


class LocalLearner:
    """A ``protocols.Learner`` around any Transformers causal LM. It modifies the model in place: do not call it elsewhere.

    ``replay`` needs a tokenizer: whoever has one gives ``Grammars(tokenizer, stop_ids).replay``."""

    replay: MaskReplay = staticmethod(no_grammars)

    def __init__(
        self, model: PreTrainedModel, settings: LearnerSettings | None = None, *, critic: int = 0, turn_critic: bool = False,
        separate_critic: bool = False, teacher: PreTrainedModel | None = None, noise: Any = None,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """``critic``: number of token value heads; ``turn_critic``: also estimate values of whole turns; ``separate_critic``:
        give the critic its own trunk and optimizer. ``teacher``: a frozen model with the same vocabulary. ``noise``: an
        ``algebra.LayerNoise``."""
        self.settings = settings or LearnerSettings()
        self.device = torch.device(device)
        limit_host_threads(self.device)
        self.dtype = self.settings.compute_dtype(self.device)
        self.master = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.settings.four_bit:
            lora.quantise_frozen(model, self.settings.lora_rank, self.dtype, self.device)
        model.to(device=self.device, dtype=self.master)  # type: ignore[call-arg]
        self.model = packed_forward.prepare(model.eval())
        if self.settings.lora_rank:
            lora.inject(self.model, self.settings.lora_rank, self.settings.lora_alpha)
            if self.dtype != self.master and noise is None:  # in float32 the stock forward runs adapters
                packed_forward.run_adapters_by_hand(self.model)
            else:
                llama_layers.disable(self.model.get_decoder(), "adapters")
        if self.settings.recompute:
            packed_forward.enable_checkpointing(self.model)
        self.head = packed_forward.lm_head(self.model)
        self.value_heads = ValueHeads(self.model, self.head.weight, int(critic), turn_critic, separate_critic)
        self.token_value_head = self.value_heads.token_heads
        layers = packed_forward.decoder_layers(self.model) if noise else []
        self.noise = LayerNoiseHooks(layers, noise.sigma, self.device, self.master) if noise else None
        if self.noise is not None:  # the layers changed after ``prepare`` checked them
            llama_layers.disable(self.model.get_decoder(), "noise between its layers")
        if self.settings.lora_rank and self.dtype != self.master:
            # Frozen matrices of the policy and of a critic's trunk in half precision: ``prepare`` verified them in float32.
            trunks = [t for t in (self.value_heads.trunk, self.value_heads.target_trunk) if t is not None]
            for module, decoder in ((self.model, self.model.get_decoder()), *((trunk, trunk) for trunk in trunks)):
                by_hand = llama_layers.fast_path(decoder) is not None
                lora.narrow_frozen(module, self.dtype, embeddings=by_hand)
                if by_hand:
                    llama_layers.run_adapters(decoder)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # the freed half of the weights
        if self.settings.fp8:
            llama_layers.enable_fp8(self.model.get_decoder())
        self.version = 0
        self.steps = 0  # optimizer steps taken
        self.skipped = 0  # steps not taken because a loss or gradient was not finite
        self.measurer = SignalMeasurer(self, teacher)
        self._separate_critic = separate_critic
        self._rates = dict.fromkeys(CRITIC_PREFIXES, self.settings.value_lr) | {"noise/": noise.rate if noise else None}
        self._make_optimizers()

    def _make_optimizers(self) -> None:
        """Collect the trained parameters and make their optimizers; again where shards have replaced the parameters."""
        self.trained = {n: p for n, p in self._named_parameters() if p.requires_grad}
        self._head_parameter = self.head.weight  # with ranks the shard; during a pass the module holds the whole weight
        separate = lambda name: self._separate_critic and name.startswith(CRITIC_PREFIXES)  # noqa: E731
        self._policy_group = {n: p for n, p in self.trained.items() if not separate(n)}
        self._policy_optimizer = optimizer.adamw(self._policy_group, self.settings, self._rates)
        critic_group = {n: p for n, p in self.trained.items() if n not in self._policy_group}
        self._critic_optimizer = optimizer.adamw(critic_group, self.settings, self._rates) if critic_group else None
        self._optimizers = [o for o in (self._policy_optimizer, self._critic_optimizer) if o is not None]

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((f"model/{n}", p) for n, p in self.model.named_parameters())
        yield from self.value_heads.named_parameters()
        if self.noise is not None:
            yield "noise/log_sigma", self.noise.log_sigma
        if self.measurer.teacher is not None:
            yield from ((f"teacher/{n}", p) for n, p in self.measurer.teacher.named_parameters())

    @property
    def parameter_count(self) -> int:
        # weights in 4 bits are buffers, not parameters
        packed = sum(m.in_features * m.out_features for m in packed_layers(self.model).values())
        packed += sum(stack.shape.numel() for stack in packed_experts(self.model).values())
        return packed + sum(p.numel() for p in self.model.parameters())

    def describe(self) -> str:
        """The execution path, for a log."""
        compute, master = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.master))
        layers = llama_layers.describe(self.model.get_decoder())
        layers += ", experts as recorded by the sampler" if routing_of(self.model.get_decoder()) is not None else ""
        layers += ", frozen weights in 4 bits" if self.settings.four_bit else ""
        return f"{layers}, {compute} on {self.device.type}" + (f", weights {master}" if master != compute else "")

    @property
    def graphs(self) -> Any:
        """The CUDA-graph cache of the policy's layers; None where the model runs its stock forward."""
        layers = llama_layers.fast_path(self.model.get_decoder())
        return None if layers is None else layers.captured

    # ------------------------------------------------------------ measuring
    @using_gpu()
    def measure(self, batch: Batch, signals: frozenset[Signal]) -> dict[Signal, Field]:
        """Measure ``signals`` without gradient, in the order of the batch."""
        return self.measurer.measure(batch, signals)

    def reference(self) -> PreTrainedModel:
        """The frozen initial policy. The first call copies it and must come before the first step."""
        return self.measurer.reference()

    def preconditioner(self) -> Tensor:
        """lr · P for the LM head's weights, the step AdamW would make of one token's gradient: P = (1 − β₁)/(√v̂ + ε), and
        1 − β₁ before its first step."""
        state = {key: whole(t) for key, t in self._policy_optimizer.state.get(self._head_parameter, {}).items()}
        (beta1, beta2), rate = self.settings.betas, self.settings.lr * self.settings.lr_factor(self.steps)
        if not state:
            return rate * torch.full_like(whole(self._head_parameter.detach()), 1 - beta1)
        v = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
        # v̂ is zero for tokens that never occurred, which would predict unbounded steps
        return rate * ((1 - beta1) / (v.clamp(min=v.mean()).sqrt() + self.settings.eps))

    # ------------------------------------------------------------- updating
    @using_gpu()
    def update(
        self, batch: Batch, objective: ObjectiveProtocol, while_waiting: Callable[[], object] | None = None
    ) -> dict[str, float]:
        """Take one optimizer step over the whole batch, or change nothing if a loss or gradient is not finite.
        ``while_waiting`` is called while a GPU still computes."""
        tell_missing_records(self.model, batch)
        self.measurer.train_auxiliary(batch)
        factor = self.settings.lr_factor(self.steps)
        try:
            loss, sums, scales = self._backward(batch, objective)
            if scales.gradient != 1.0:
                gradients = [p.grad for p in self._policy_group.values() if p.grad is not None]
                compat.foreach_mul_(gradients, scales.gradient)
            if self.settings.offload:
                optimizer.move_state(self._optimizers, self.device)
            # the objective scales the policy's rate only, not the critic's
            factors = dict(zip(self._optimizers, (factor * scales.rate, factor)))
            norms, taken = optimizer.guarded_step(factors, self.settings.clip, loss)
            if self.settings.offload:
                optimizer.move_state(self._optimizers, torch.device("cpu"))
        finally:
            for each in self._optimizers:
                each.zero_grad(set_to_none=True)  # a partial gradient must not leak into the next update
        sums |= dict(zip(("grad_norm", "grad_norm/critic"), norms)) | {"loss": loss, "taken": taken}
        if self.noise is not None and self.noise.relative:
            sums["noise/relative"] = torch.stack(list(self.noise.relative.values())).mean()
        if while_waiting is not None:
            while_waiting()
        values = torch.stack([value.double().to(self.device) for value in sums.values()]).tolist()  # the only host sync
        metrics = dict(zip(sums, values))
        if stepped := bool(metrics.pop("taken")):
            self.value_heads.update_targets(self.settings.follow)
        self.steps += stepped
        self.skipped += not stepped
        metrics |= {"scale/gradient": scales.gradient, "scale/lr": scales.rate}
        return metrics | {"lr": self.settings.lr * factor * scales.rate, "skipped": float(not stepped)}

    def _backward(self, batch: Batch, objective: ObjectiveProtocol) -> tuple[Tensor, dict[str, Tensor], Scales]:
        """Sum losses, statistics and gradients over the micro-batches."""
        # The host reads none of these sums, so it never stalls the GPU.
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        sums: dict[str, Tensor] = {}
        sides: dict[str, list[Tensor]] = {}
        step, group = batch, list(self._policy_group.values())
        for planned, micro, policy in self._planned_micro_batches(batch, objective):
            step, result = planned, objective(micro, policy)
            for name, side in result.side_losses.items():  # gradients of additional scalars
                grads = sides.setdefault(name, [torch.zeros_like(p) for p in group])
                if side.requires_grad:
                    parts = torch.autograd.grad(side, group, retain_graph=True, allow_unused=True)
                    for side_total, part in zip(grads, parts):
                        if part is not None:
                            side_total += part
            if result.loss.requires_grad:  # false for a micro-batch without sampled tokens
                with llama_layers.accumulating_gradients(self.model.get_decoder(), self.value_heads.trunk):
                    result.loss.backward()
            total += result.loss.detach()
            for name, value in result.stats.items():  # computed while the GPU runs the backward pass
                sums[name] = sums.get(name, 0) + torch.as_tensor(value).detach()
            del micro, policy, result  # their graph holds weights and activations, beside those of the next micro-batch
        return total, sums, objective.scales(step, sides)

    def _planned_micro_batches(
        self, batch: Batch, objective: ObjectiveProtocol
    ) -> Iterator[tuple[Batch, Batch, dict[Signal, Field]]]:
        """(the planned step, one of its micro-batches, its live signals). If the step is one micro-batch, planning reuses the
        forward pass that is differentiated; otherwise planning costs an extra forward pass."""
        batch = batch.put(vocabulary_size=batch.tree.full(BATCH, float(self.head.weight.shape[0])))
        parts = list(self.micro_batches(batch)) if objective.signals_before_step else []
        # noise belongs to the differentiated pass only, and planning reads the policy without it
        if len(parts) == 1 and objective.signals_before_step <= WITH_GRADIENT and self.noise is None:
            micro, policy = self.measurer.live(parts[0], objective.signals_with_gradient)
            planned = objective.plan(micro.put({s: f.detach() for s, f in policy.items()}))
            yield planned, planned, policy
            return
        if objective.signals_before_step:
            batch = batch.put(self.measure(batch, objective.signals_before_step))
        planned = objective.plan(batch)
        with_gradient, without = self.split_by_gradient(planned)
        for part, grad in ((with_gradient, True), (without, False)):
            for number, piece in enumerate(() if part is None else self.micro_batches(part)):
                noise = self.noise.enabled(self.steps, number) if self.noise else nullcontext()
                with torch.set_grad_enabled(grad), noise:
                    micro, policy = self.measurer.live(piece, objective.signals_with_gradient)
                yield planned, micro, policy
                del micro, policy  # before the next forward pass

    def split_by_gradient(self, planned: Batch) -> tuple[Batch, Batch | None]:
        """Trajectories with a gradient, and those the objective marks as having none, which run forward for statistics only."""
        silent = planned.columns.get(Column.NO_GRADIENT)
        if silent is None or self.noise is not None:
            return planned, None
        flags = silent.x.to(torch.int64).tolist()
        with_gradient, without = ([k for k, flag in enumerate(flags) if flag == kind] for kind in (0, 1))
        # Differentiate one all the same: an optimizer with momentum steps on a zero gradient, but not on a missing one.
        if not with_gradient:
            with_gradient, without = without[:1], without[1:]
        return (planned.select(with_gradient), planned.select(without)) if without else (planned, None)

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """Cut into micro-batches. Only a GPU packs sequences of different lengths without padding."""
        return batch.split(self.settings.positions, padded=self.device.type != "cuda")

    # -------------------------------------------------------------- weights
    def weights(self) -> Mapping[str, Tensor]:
        """Weights by the base model's parameter names, adapters merged. They alias the live parameters until the next update."""
        if self.settings.lora_rank:
            return lora.merged(self.model)
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        if self.value_heads.of_actions and self.token_value_head is not None:
            # a value for each token of the vocabulary: the sampler reads its row after those of the LM head
            weights["lm_head.weight"] = torch.cat([self.head.weight.detach(), self.token_value_head.weight.detach()])
        return weights

    def export(self, path: str | Path) -> None:
        """Write a directory that ``AutoModelForCausalLM.from_pretrained`` loads, and the token value head beside the model."""
        folder, bars = Path(path), progress_logging.is_progress_bar_enabled()
        progress_logging.disable_progress_bar()  # one for each written file would break up ours
        try:
            (lora.merged_model(self.model) if self.settings.lora_rank else self.model).save_pretrained(folder)
        finally:
            if bars:
                progress_logging.enable_progress_bar()
        if self.token_value_head is not None:
            save_file({n: p.detach().cpu() for n, p in self.token_value_head.named_parameters()}, folder / VALUE_FILE)

    def export_adapter(self, path: str | Path, base: str) -> bool:
        """Write the LoRA adapters alone as a PEFT folder; False: this learner has none."""
        if not self.settings.lora_rank:
            return False
        lora.save_adapter(self.model, Path(path), base)
        return True

    # ---------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """A snapshot from which training resumes bit for bit: {"tensors": by name, "scalars": JSON-serialisable}."""
        live = {**self._state_tensors(), **self.measurer.reference_tensors()}
        return {"tensors": {name: t.clone() for name, t in live.items()}, "scalars": self._state_scalars()}

    def checkpoint_state(self) -> dict[str, Any]:
        """What ``state_dict`` holds, as live tensors (write them before the next update), without the reference."""
        # A learner of the same initial model makes the reference again; copies of both would take twice the memory of a step.
        return {"tensors": self._state_tensors(), "scalars": self._state_scalars()}

    def _state_tensors(self) -> dict[str, Tensor]:
        tensors = {name: p.detach() for name, p in self.trained.items()}
        tensors |= {f"optimiser/{n}": t for n, t in optimizer.state_tensors(self._optimizers, self.trained).items()}
        tensors |= {f"slow/{n}": p.detach() for n, p in self.value_heads.target_tensors().items()}
        return tensors | self.measurer.tensors()

    def _state_scalars(self) -> dict[str, Any]:
        return {"version": self.version, "steps": self.steps, "skipped": self.skipped, "frozen": self._frozen()}

    def _frozen(self) -> float:
        """A fingerprint of the frozen weights, which the state does not contain."""
        frozen = (p for n, p in self._named_parameters() if n not in self.trained)
        return sum(float(p.detach().double().abs().sum()) for p in frozen)

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse a state that ``load_state_dict`` could not take."""
        prefixes = ("model/", "noise/", *CRITIC_PREFIXES)  # of the names of trained parameters
        shapes = {name: shape for name, shape in shapes_of(state["tensors"]).items() if name.startswith(prefixes)}
        wrong = list(self.trained.keys() ^ shapes.keys()) or [
            name for name, p in self.trained.items() if tuple(p.shape) != shapes[name]
        ]
        if wrong:
            raise SettingError(
                f"this state is of another model or other settings: {len(wrong)} tensors differ, first {sorted(wrong)[0]!r}; "
                "use the model, critic and lora_rank it was saved with"
            )
        if not math.isclose(state["scalars"]["frozen"], self._frozen(), rel_tol=1e-6):
            raise SettingError(
                "this state belongs to adapters of another base model, or to another teacher: their frozen weights differ; "
                "load it into a learner built from the same model and teacher"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``, for a learner of the same model and settings. Tensors may be in files."""
        self.check_state(state)
        self._restore(state["tensors"], state["scalars"])

    @torch.no_grad()
    def _restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        for name, p in self.trained.items():
            p.copy_(tensors[name])

        def under(prefix: str) -> Mapping[str, Tensor]:
            names = (name.removeprefix(prefix) for name in tensors if name.startswith(prefix))
            return TensorsWhenRead(names, lambda name: tensors[prefix + name])

        optimizer.restore_state(self._optimizers, self.trained, under("optimiser/"))
        for name, target in self.value_heads.target_tensors().items():
            target.copy_(tensors[f"slow/{name}"])
        self.measurer.load(under)
        self.version, self.steps, self.skipped = (int(scalars[k]) for k in ("version", "steps", "skipped"))


class LayerNoiseHooks:
    """Gaussian noise at the input of every decoder layer, with a learnable scale per layer; off unless enabled for a pass. It
    depends only on step, micro-batch and layer, so a run is reproducible."""

    def __init__(self, layers: Sequence[nn.Module], sigma: float, device: torch.device, dtype: torch.dtype) -> None:
        self.log_sigma = nn.Parameter(torch.full((len(layers),), math.log(sigma), device=device, dtype=dtype))
        self._seed: int | None = None
        self.relative: dict[int, Tensor] = {}  # by layer: the noise of the latest pass, in units of what it is added to
        for number, layer in enumerate(layers):
            # a function, not a partial: copies of the model keep it as it is, and so follow the noise of the policy
            hook = lambda _, args, kwargs, n=number: self._add(n, args, kwargs)  # noqa: E731
            layer.register_forward_pre_hook(hook, with_kwargs=True)

    def _add(self, layer: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if self._seed is None:
            return None
        h = args[0] if args else kwargs["hidden_states"]
        generator = torch.Generator(h.device).manual_seed(self._seed * 1009 + layer)
        e = torch.randn(h.shape, generator=generator, device=h.device, dtype=h.dtype)
        sigma = self.log_sigma[layer].exp().to(h.dtype)
        noisy = h + sigma * e
        self.relative[layer] = (sigma / h.square().mean().sqrt().clamp(min=1e-30)).detach()
        return ((noisy, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": noisy})

    @contextmanager
    def enabled(self, step: int, micro: int) -> Iterator[None]:
        self._seed = step * 65537 + micro
        try:
            yield
        finally:
            self._seed = None


def tell_missing_records(model: PreTrainedModel, batch: Batch) -> None:
    """Warn once where samples do not say which experts their routers chose, or which ids a filter kept."""
    routing = routing_of(model.get_decoder())
    unknown_routes = routing is not None and batch.sequences.routes is None and not bool(batch.expert.x.all())
    if routing is not None and unknown_routes and not routing.told_missing:
        routing.told_missing = True
        log.warning(
            "the samples do not say which experts their routers chose (a server does not return them), so the learner's routers "
            "choose for themselves: importance ratios of a mixture of experts are noisier than with the local generator"
        )
    if bool((batch.mass.x != 0).any()):
        _say_missing_sets()


@functools.cache
def _say_missing_sets() -> None:
    log.warning(
        "some tokens were sampled under top-p, top-k or min-p without a record of the ids that were kept (the set was too large, "
        "or the server does not return it): only its mass is known, so their ratios are exact only until the policy moves"
    )
