"""LoRA adapters through PEFT: inject them into a stock model, disable them, merge them into its weights.

Does not know how adapters are trained.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.engines.adapters import AdaptedWeights, Adapter, TensorsWhenRead
from turnwise.engines.experts import is_experts
from turnwise.engines.kernels import four_bit
from turnwise.engines.kernels.four_bit import FourBitLinear, packed_experts, packed_layers
from turnwise.errors import SettingError

ADAPTER, BASE = "default", ".base_layer"
_bases: weakref.WeakKeyDictionary[nn.Module, AdaptedWeights] = weakref.WeakKeyDictionary()
# PEFT refuses them: the fused kernels of state-space models bypass these modules
STATE_SPACE_LAYERS = ["out_proj", "conv1d"]


def _peft() -> Any:
    try:
        import peft
    except ImportError as fault:
        raise SettingError("lora_rank > 0 needs PEFT: install `turnwise-rl[peft]`, or write lora_rank=0") from fault
    return peft


def inject(model: PreTrainedModel, rank: int, alpha: float | None) -> None:
    """Add adapters, which change no output, to every linear layer but the LM head and to unpacked experts. Freeze all else."""
    peft, alpha = _peft(), 2 * rank if alpha is None else alpha
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)  # the same adapters on every machine and in every process
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # PEFT warns about GPT-2's Conv1D, then handles it
        if packed_experts(model):
            warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")  # they get none
        kind: dict[str, Any] = {"lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        # first without exclusions: layers of these names are plain ones in other models
        for excluded in (None, STATE_SPACE_LAYERS):
            settings = peft.LoraConfig(r=rank, lora_alpha=alpha, exclude_modules=excluded, **kind)
            try:
                peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
                break
            except ValueError as fault:
                if excluded or "Incompatible modules" not in str(fault):
                    raise SettingError(
                        f"{type(model).__name__} cannot have adapters: {fault}; write lora_rank=0"
                    ) from fault
    if not any(p.requires_grad for p in model.parameters()):
        raise SettingError(f"{type(model).__name__} has no layer that adapters fit; write lora_rank=0")


def quantise_frozen(model: PreTrainedModel, rank: int, dtype: torch.dtype, device: torch.device) -> None:
    """Keep the decoder's linear layers and stacked experts in 4 bits, from before ``inject``: adapters are trained beside what is
    dequantised, and experts have none. A model that is packed already stays as it is."""
    if not rank:
        raise SettingError(
            "dtype nf4 keeps frozen weights in 4 bits, and without adapters every weight is trained; write --lora-rank 16, or "
            "--dtype auto"
        )
    decoder = model.get_decoder()
    if not packed_layers(decoder) and not four_bit.quantise_linear_layers(decoder, dtype, device):
        raise SettingError(f"{type(model).__name__} has no linear layers to keep in 4 bits; write --dtype auto")
    four_bit.pack_experts(decoder, dtype, device)


@contextmanager
def disabled(model: PreTrainedModel) -> Iterator[None]:
    """Run the base model: adapters are bypassed inside this context."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    flags = {p: p.requires_grad for p in model.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for p, flag in flags.items():  # PEFT toggles requires_grad together with its adapters
            p.requires_grad_(flag)


def merged(model: PreTrainedModel) -> AdaptedWeights:
    """Merged weights under the names the model had before ``inject``. Packed ones are dequantised when they are read."""
    base: Mapping[str, Tensor] = {
        name.replace(BASE, ""): p.detach() for name, p in model.named_parameters() if ".lora_" not in name
    }
    layers, experts = packed_layers(model), packed_experts(model)
    if layers or experts:
        if model not in _bases:  # always the same object: a generator that knows it need not load it again
            plain, made = base, dict[str, Callable[[], Tensor]]()
            for name, m in layers.items():
                made[f"{name.replace(BASE, '')}.weight"] = partial(getattr, m, "weight")
            for name, stack in experts.items():
                made[name.replace(BASE, "")] = partial(four_bit.FourBitStack.dequantised, stack, torch.float32)
            read = lambda name: plain[name] if name in plain else made[name]()  # noqa: E731
            _bases[model] = AdaptedWeights(TensorsWhenRead([*plain, *made], read), {})
        base = _bases[model]
    modules = {name: m for name, m in _adapted_modules(model).items() if name in base}
    adapters = {name: adapter for name, m in modules.items() if is_plain(m) and (adapter := adapter_of(m)) is not None}
    deltas = {name: partial(m.get_delta_weight, ADAPTER) for name, m in modules.items()}  # computed when read
    return AdaptedWeights(base, deltas, adapters)


def _adapted_modules(model: PreTrainedModel) -> dict[str, Any]:
    """Modules with adapters by the plain name of the weight. Layers nest where a module has several adapted parameters."""
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    return {
        f"{(name + '.').replace(BASE + '.', '.')}{getattr(m, 'parameter_name', None) or 'weight'}": m
        for name, m in layers.items()
    }


# ------------------------------------------------------ adapters of one layer


def is_plain(module: Any) -> bool:
    """Whether a module is a linear layer with one plain adapter: no bias of its own, no magnitudes, no dropout."""
    layer, factors = getattr(module, "base_layer", None), getattr(module, "lora_A", {})
    transposed = getattr(module, "fan_in_fan_out", False)
    if type(layer) not in (nn.Linear, FourBitLinear) or set(factors) != {ADAPTER} or transposed:
        return False
    linear = type(module.lora_A[ADAPTER]) is nn.Linear and type(module.lora_B[ADAPTER]) is nn.Linear
    variants = getattr(module, "lora_variant", None) or getattr(module, "use_dora", {}).get(ADAPTER)
    dropout = isinstance(module.lora_dropout[ADAPTER], nn.Identity)
    return linear and not variants and dropout and module.lora_B[ADAPTER].bias is None


def base_layer(module: Any) -> nn.Linear:
    """The linear layer itself, with or without an adapter around it."""
    return module if isinstance(module, nn.Linear) and not hasattr(module, "base_layer") else module.base_layer


def adapter_of(module: Any, weight_of: Callable[[Tensor], Tensor] = lambda p: p) -> Adapter | None:
    """The adapter of a plain module; None: none, or switched off. ``weight_of``: the tensor in place of each parameter."""
    if not hasattr(module, "base_layer") or module.disable_adapters:
        return None
    down, up = (weight_of(part[ADAPTER].weight) for part in (module.lora_A, module.lora_B))
    return Adapter(down, up, float(module.scaling[ADAPTER]))


@contextmanager
def random_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the adapters that ``inject`` made change the outputs: to compare two ways to apply them."""
    ups = [m.lora_B[ADAPTER].weight for m in _adapted_modules(model).values() if is_plain(m)]
    rng = torch.Generator().manual_seed(0)
    for p in ups:
        p.data.copy_(torch.randn(p.shape, generator=rng) * 0.1)
    try:
        yield
    finally:
        for p in ups:
            p.data.zero_()


def narrow_frozen(model: nn.Module, dtype: torch.dtype, embeddings: bool) -> None:
    """Keep frozen matrices in the dtype of the products, which round them to it anyway: half the memory of float32.
    ``embeddings``: also tables of embeddings that lose nothing by it."""
    # A table that would lose something keeps its dtype, and so does a head tied to it.
    tables = [p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)]
    exact = {id(p) for p in tables if not (embeddings and torch.equal(p.data.to(dtype).to(p.dtype), p.data))}
    for module in model.modules():
        rounded = isinstance(module, nn.Linear | nn.Embedding) or is_experts(module)
        for p in module.parameters(recurse=False) if rounded else ():
            if p.dim() > 1 and not p.requires_grad and id(p) not in exact:
                p.data = p.data.to(dtype)


def merged_model(model: PreTrainedModel) -> PreTrainedModel:
    """A model without adapters that holds the merged weights, for saving."""
    with torch.device("meta"):
        out = type(model)(copy.deepcopy(model.config))
    wide = lambda t: t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t  # noqa: E731
    buffers = {name.replace(BASE, ""): b.detach() for name, b in model.named_buffers()}
    # in host memory: a GPU may hold the model only once
    weights = {name: wide(t.cpu()) for name, t in merged(model).items()}
    out.load_state_dict({**buffers, **weights}, strict=False, assign=True)
    out.tie_weights()
    return out


def save_adapter(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write the adapters alone, as ``peft.PeftModel.from_pretrained`` reads them. ``base``: folder or hub id of their model."""
    peft = _peft()
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(folder)
    state = peft.get_peft_model_state_dict(model, adapter_name=ADAPTER)
    tensors = {f"base_model.model.{name}": t.detach().cpu().contiguous() for name, t in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
