"""Memory of a run before it starts: an estimate, settings that make it fit, and words where it cannot."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator
from turnwise.core.signals import Signal
from turnwise.engines.generator.cache_choice import CacheChoice
from turnwise.engines.learner.learner import LearnerSettings
from turnwise.engines.memory import GIB, RECOMPUTE_FROM, MemoryPlan, ModelShape
from turnwise.errors import SettingError
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.renderer import Renderer
from turnwise.training import engines

USABLE = 0.9  # of the memory: the rest is fragments, libraries, CUDA graphs
MIN_DIALOGUES = 2  # whole contexts that a cache in pages must hold
TOLD_FROM = 50_000_000  # parameters from which a run tells its estimate


def memory_plan(settings: Settings, recipe: Recipe, model: Any) -> MemoryPlan:
    """What these settings take on their device."""
    device, budget = engines.select_device(settings), recipe.budget
    dtype, rollout = LearnerSettings(dtype=settings.dtype).compute_dtype(device), engines.rollout_dtype(settings)
    compute = torch.finfo(dtype).bits // 8
    dialogues = max(budget.groups * budget.size * (settings.staleness + 1), settings.eval_tasks * settings.eval_samples)
    wanted = {Signal.REFERENCE} & recipe.objective.signals if not settings.lora_rank else set()
    return MemoryPlan(
        ModelShape.of(model.config, sum(p.numel() for p in model.parameters())),
        ids=engines.ids_per_micro_batch(settings),
        dialogues=min(settings.slots, dialogues),
        context=settings.context,
        compute=compute,
        rollout=compute if rollout is None else torch.finfo(rollout).bits // 8,
        lora_rank=settings.lora_rank,
        recompute=settings.recompute,
        offload=settings.offload and device.type == "cuda",
        shared_weights=device.type == "cpu" and settings.staleness == 0 and not settings.lora_rank,
        four_bit=LearnerSettings(dtype=settings.dtype).four_bit,
        models=len(wanted) + bool(settings.teacher),
    )


def device_memory(device: torch.device) -> int:
    """Bytes that the device has, in use or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fit_memory(settings: Settings, plan: MemoryPlan, available: int) -> tuple[Settings, str]:
    """Settings with which the estimate fits, and why they changed. What the user gave is never changed: the micro-batch becomes
    smaller, then layers are recomputed. Neither changes what is learned beyond rounding."""
    room = int(USABLE * available)
    if plan.fixed > room:
        bare = replace(plan, ids=0, dialogues=0)
        raise SettingError(
            f"this model does not fit: {bare.describe()}; the device has {available / GIB:.1f}; {_advice(bare)}"
        )
    if plan.total <= room or settings.micro_batch_tokens:
        return settings, "" if plan.total <= room else pages_text(
            plan, room
        ) or f"memory may not suffice: {_advice(plan)}"
    smaller = _smaller(plan, room)
    if smaller.total > room:
        smaller = _smaller(replace(plan, recompute=True), room)
    text = f"micro_batch_tokens is {smaller.ids}" + ", recompute is true" * (smaller.recompute and not plan.recompute)
    text += f": {plan.ids} would take {plan.total / GIB:.1f} GiB of {available / GIB:.1f}"
    if smaller.total > room:
        text += "; " + (pages_text(smaller, room) or f"even so memory may not suffice: {_advice(smaller)}")
    return replace(settings, micro_batch_tokens=smaller.ids, recompute=smaller.recompute), text


def cache_room(plan: MemoryPlan, room: int) -> int:
    """Bytes that the rest of a run leaves for its KV cache."""
    return max(0, room - plan.total + plan.parts()["KV cache"])


def pages_text(plan: MemoryPlan, room: int) -> str:
    """What a run says whose KV cache fits in pages only; empty where not even a few dialogues fit."""
    left, rows = cache_room(plan, room), plan.parts()["KV cache"]
    if left < MIN_DIALOGUES * plan.shape.cache(1, plan.context, plan.rollout):
        return ""
    wanted = f"{plan.dialogues} rows of {plan.context} ids would take {rows / GIB:.1f}"
    return f"the KV cache has pages in {left / GIB:.1f} GiB: {wanted}"


def cache_choice(settings: Settings, recipe: Recipe, model: Any) -> CacheChoice:
    """Rows where they fit beside the rest of a run, else pages of the memory that is left."""
    plan = memory_plan(settings, recipe, model)
    if plan.shape.parameters < TOLD_FROM or not plan.shape.layers:
        return CacheChoice()
    return CacheChoice(room=cache_room(plan, int(USABLE * device_memory(engines.select_device(settings)))))


def make_generator(
    settings: Settings,
    recipe: Recipe,
    model: Any,
    renderer: Renderer,
    deterministic: bool,
    dialogues: int,
    tell: Callable[[str], None],
) -> Generator:
    """``engines.make_generator`` with a KV cache that fits."""
    cache = cache_choice(settings, recipe, model)
    return engines.make_generator(settings, recipe, model, renderer, deterministic, dialogues, tell=tell, cache=cache)


def _smaller(plan: MemoryPlan, room: int) -> MemoryPlan:
    """With micro-batches halved until it fits, or until recomputing layers costs less."""
    while plan.total > room and plan.ids // 2 >= RECOMPUTE_FROM:
        plan = replace(plan, ids=plan.ids // 2)
    return plan


def _advice(plan: MemoryPlan) -> str:
    """What to write, the largest saving first."""
    parts = plan.parts()
    trained = sum(parts[name] for name in ("weights", "gradients", "optimizer moments"))
    savings = {
        "--lora-rank 16": 0 if plan.lora_rank else trained,
        "--dtype nf4": parts["weights"] * 2 // 3 if plan.lora_rank and not plan.four_bit else 0,
        "--offload": 0 if plan.offload or plan.lora_rank else parts["optimizer moments"],
        "a smaller --context or fewer --slots": parts["KV cache"],
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
    told = f"memory: about {memory_plan(settings, recipe, model).describe()}; the device has {available / GIB:.1f}"
    return settings, [told, *([change] if change else [])]
