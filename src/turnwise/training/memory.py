"""Memory before it is taken: what a run will need, settings that make it fit, words where it cannot; and which KV cache fits, of
a run and of processes that only sample. The size of a model that is not loaded comes from the headers of its files, or from its
configuration.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator
from turnwise.core.signals import Signal
from turnwise.engines.generator.kv_cache import LAYOUTS, CacheChoice
from turnwise.engines.generator.model_runner import PREFILL_BUDGET, PREFILL_BUDGET_CUDA
from turnwise.engines.learner.learner import LearnerSettings
from turnwise.engines.memory import GIB, RECOMPUTE_FROM, MemoryPlan, ModelShape, describe_parts
from turnwise.engines.sharded.torchrun import ranks_here
from turnwise.errors import SettingError
from turnwise.models import loading
from turnwise.models.facts import stored_parameters
from turnwise.models.fetch import resolve
from turnwise.models.trust import remote_code_is_trusted
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.renderer import Renderer
from turnwise.training import engines
from turnwise.training.remote_generators import OWN_PROCESS

USABLE = 0.9  # of the memory: the rest is fragments, libraries, CUDA graphs
MIN_DIALOGUES = 2  # whole contexts that a cache in pages must hold
TOLD_FROM = 50_000_000  # parameters from which a run tells its estimate
LOADED = 4  # bytes of a weight while a model is loaded, on the host: it is read in float32


def memory_plan(settings: Settings, recipe: Recipe, model: Any) -> MemoryPlan:
    """What these settings take on their device. ``model``: it, or its shape."""
    device, budget = engines.select_device(settings), recipe.budget
    dtype, rollout = LearnerSettings(dtype=settings.dtype).compute_dtype(device), engines.rollout_dtype(settings)
    compute = torch.finfo(dtype).bits // 8
    ahead = settings.staleness.capacity(budget.groups, settings.steps)
    dialogues = max(ahead * budget.size, settings.eval_tasks * settings.eval_samples)
    ids = engines.ids_per_micro_batch(settings)
    wanted = {Signal.REFERENCE} & recipe.objective.signals if not settings.lora_rank else set()
    return MemoryPlan(
        model
        if isinstance(model, ModelShape)
        else ModelShape.of(model.config, sum(p.numel() for p in model.parameters())),
        ids=ids,
        dialogues=min(settings.slots, dialogues),
        context=settings.context,
        compute=compute,
        rollout=compute if rollout is None else torch.finfo(rollout).bits // 8,
        lora_rank=settings.lora_rank,
        recompute=settings.recompute,
        offload=settings.offload and device.type == "cuda",
        shared_weights=device.type == "cpu"
        and settings.staleness.deterministic
        and not (settings.lora_rank or settings.generator or settings.cluster),
        four_bit=LearnerSettings(dtype=settings.dtype).four_bit,
        samplers=_samplers(settings, recipe, device),
        models=len(wanted) + bool(settings.teacher),
        one_micro_batch=budget.groups * budget.size * settings.context <= ids,
        ranks=ranks_here(settings.ranks) if device.type == "cpu" else settings.ranks,
        one_memory=device.type == "cpu",
    )


def _samplers(settings: Settings, recipe: Recipe, device: torch.device) -> int:
    """Generators in the learner's memory. Servers have their own, and so have actors on a GPU or, perhaps, on another machine."""
    if settings.cluster:
        return settings.cluster.generators if settings.cluster.local and device.type == "cpu" else 0
    if settings.generator and settings.generator != OWN_PROCESS:
        return 0
    return 1 + (settings.opponents.kind == "past" or bool(recipe.precision.drafts))


def device_memory(device: torch.device) -> int:
    """Bytes that the device has, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that no process uses; of a CPU all."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else device_memory(device)


def fit_memory(settings: Settings, plan: MemoryPlan, available: int) -> tuple[Settings, str]:
    """Settings with which the estimate fits, and why they changed. What the user gave is never changed: the micro-batch becomes
    smaller, then layers are recomputed. Neither changes what is learned beyond rounding. A KV cache in pages takes what is left:
    only a few dialogues must fit."""
    room, layout = int(USABLE * available), settings.model.cache
    if plan.fixed > room:
        bare = replace(plan, ids=0, dialogues=0)
        raise SettingError(
            f"this model does not fit: {bare.describe()}; the device has {available / GIB:.1f}; {_advice(bare)}"
        )
    if layout == "pages":
        plan = replace(plan, dialogues=min(plan.dialogues, MIN_DIALOGUES))
    if plan.total <= room or settings.micro_batch_tokens:
        return settings, "" if in_pages(plan, room, layout) else f"memory may not suffice: {_advice(plan, layout)}"
    smaller = _smaller(plan, room)
    if smaller.total > room:
        smaller = _smaller(replace(plan, recompute=True), room)
    text = f"micro_batch_tokens is {smaller.ids}" + ", recompute is true" * (smaller.recompute and not plan.recompute)
    text += f": {plan.ids} would take {plan.total / GIB:.1f} GiB of {available / GIB:.1f}"
    if smaller.total > room and not in_pages(smaller, room, layout):
        text += f"; even so memory may not suffice: {_advice(smaller, layout)}"
    return replace(settings, micro_batch_tokens=smaller.ids, recompute=smaller.recompute), text


def cache_room(plan: MemoryPlan, room: int) -> int:
    """Bytes that the rest of a run leaves for the KV cache of each generator."""
    return max(0, room - plan.total + plan.parts()["KV cache"]) // max(1, plan.samplers)


def in_pages(plan: MemoryPlan, room: int, layout: str) -> bool:
    """Whether a run fits, if need be with a KV cache in pages: some whole dialogues fit beside the rest."""
    least = MIN_DIALOGUES * plan.shape.cache(1, plan.context, plan.rollout)
    return plan.total <= room or (layout != "rows" and cache_room(plan, room) >= least)


def cache_choice(settings: Settings, recipe: Recipe, model: Any) -> CacheChoice:
    """The KV cache of a run: what the user asks for, else rows where they fit beside the rest, else pages of what is left."""
    plan, page = memory_plan(settings, recipe, model), LAYOUTS.get(settings.model.cache)
    if plan.shape.parameters < TOLD_FROM or not plan.shape.layers:
        return CacheChoice(page=page)
    return CacheChoice(cache_room(plan, int(USABLE * device_memory(engines.select_device(settings)))), page)


def sampling_cache(settings: Settings, model: Any) -> CacheChoice:
    """The KV cache of a process that trains nothing. Beside it are the weights, on a CPU once more as the decoder arranges them,
    and one layer's activations of a prefill."""
    device, rollout = engines.select_device(settings), engines.rollout_dtype(settings) or model.dtype
    shape = ModelShape.of(model.config, sum(p.numel() for p in model.parameters()))
    on_gpu = device.type == "cuda"
    fp8 = rollout == engines.FP8
    dtype = rollout if not fp8 else torch.bfloat16 if on_gpu else model.dtype
    weights = shape.parameters * (dtype.itemsize * (1 if on_gpu else 2) + (fp8 and on_gpu))  # those in fp8 come on top
    prefill = shape.activations(PREFILL_BUDGET_CUDA if on_gpu else PREFILL_BUDGET, dtype.itemsize, False)
    prefill //= max(1, shape.layers)
    available = min(int(USABLE * device_memory(device)), free_memory(device))
    return CacheChoice(max(0, available - weights - prefill), LAYOUTS.get(settings.model.cache))


def make_generator(
    settings: Settings,
    recipe: Recipe,
    model: Any,
    renderer: Renderer,
    deterministic: bool,
    dialogues: int,
    tell: Callable[[str], None],
) -> Generator:
    """``engines.make_generator`` with a KV cache that is asked for, or that fits."""
    cache = cache_choice(settings, recipe, model)
    return engines.make_generator(settings, recipe, model, renderer, deterministic, dialogues, tell=tell, cache=cache)


def _smaller(plan: MemoryPlan, room: int) -> MemoryPlan:
    """With micro-batches halved until it fits, or until recomputing layers costs less."""
    while plan.total > room and plan.ids // 2 >= RECOMPUTE_FROM:
        plan = replace(plan, ids=plan.ids // 2)
    return plan


def _advice(plan: MemoryPlan, layout: str = "") -> str:
    """What to write, the largest saving first."""
    parts = plan.parts()
    trained = sum(parts[name] for name in ("weights", "gradients", "optimizer moments"))
    savings = {
        "--lora-rank 16": 0 if plan.lora_rank else trained,
        "--dtype nf4": parts["weights"] * 2 // 3 if plan.lora_rank and not plan.four_bit else 0,
        "--offload": 0 if plan.offload or plan.lora_rank else parts["optimizer moments"],
        f"{'no cache=rows, ' * (layout == 'rows')}a smaller --context or fewer --slots": parts["KV cache"],
        "--recompute": 0 if plan.recompute else parts["activations"],
        "fewer --micro-batch-tokens": parts["activations"] // 2,
    }
    found = [name for name, saved in sorted(savings.items(), key=lambda pair: -pair[1]) if saved > GIB // 20]
    return "write " + ", ".join(found[:3]) if found else "write a smaller --model"


def report(settings: Settings, recipe: Recipe, model: Any) -> tuple[Settings, list[str]]:
    """The settings to run with, and what to tell about memory. Small models say nothing."""
    plan = memory_plan(settings, recipe, model)
    if plan.shape.parameters < TOLD_FROM or not plan.shape.layers:
        return settings, []
    available = device_memory(engines.select_device(settings))
    settings, change = fit_memory(settings, plan, available)
    parts, room = (plan := memory_plan(settings, recipe, model)).parts(), int(USABLE * available)
    if settings.model.cache != "rows" and in_pages(plan, room, "pages"):
        parts["KV cache"] = min(parts["KV cache"], plan.samplers * cache_room(plan, room))
    about = f"{sum(parts.values()) / GIB:.1f} GiB: {describe_parts(parts)}"
    told = f"memory: about {about}; the device has {available / GIB:.1f}"
    return settings, [told, *([change] if change else [])]


# ------------------------------------------------------- before anything is loaded


def check_memory(settings: Settings, recipe: Recipe, config: Any) -> None:
    """Refuse a model that fits neither the device it is trained on nor the host it is read on. ``config``: that of the model. The
    learner of a cluster works on the machine of this command."""
    shape = ModelShape.of(config, stored_parameters(settings.model.name) or parameters_of(config))
    if shape.parameters < TOLD_FROM or not shape.layers:
        return
    if settings.cluster and settings.device == "auto" and not settings.cluster.gpus:
        settings = replace(settings, device="cpu")  # Ray hides the GPUs from actors that reserve none
    device, host = engines.select_device(settings), torch.device("cpu")
    fit_memory(settings, memory_plan(settings, recipe, shape), device_memory(device))
    needed, available = LOADED * shape.parameters, device_memory(host)
    if needed > USABLE * available:
        raise SettingError(
            f"this model cannot be read: in float32 its {shape.parameters / 1e9:.1f} B parameters take {needed / GIB:.1f} GiB of "
            f"memory on the host, which has {available / GIB:.1f}; write a smaller --model, or take a machine with more memory"
        )


def check_resumed_memory(settings: Settings, recipe: Recipe, initial: Path) -> None:
    """``check_memory`` of a run that goes on. ``initial``: the model that it began with, once it is written."""
    if not initial.is_dir() and settings.model.tiny:
        return
    source = replace(settings.model, name=str(initial)) if initial.is_dir() else settings.model
    check_memory(replace(settings, model=source), recipe, loading.load_config(resolve(source.name)))


def parameters_of(config: Any) -> int:
    """The parameters of the model that a configuration describes, none of them allocated; 0 if it cannot be built."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=remote_code_is_trusted())
    except Exception:  # whatever a stranger's code raises: loading refuses it in words
        return 0
    return sum(p.numel() for p in model.parameters())
