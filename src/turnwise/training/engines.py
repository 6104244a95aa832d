"""The engines of a run: which generator and learner serve it, on which device, in which precision.

The one module of this room that names an engine class: ``make_generator`` and ``make_learner`` choose. Knows no loop and no
formula.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from turnwise.config.settings import Settings
from turnwise.core.chat import ChatModel
from turnwise.core.protocols import Generator, Learner, PolicyCheckProtocol
from turnwise.core.signals import TURN_CRITIC, TURN_CRITIC_TARGET, Signal
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.generator.kv_cache import LAYOUTS, CacheChoice
from turnwise.engines.generator.logit_shift import with_value_rows
from turnwise.engines.generator.model_runner import PREFILL_BUDGET, PREFILL_BUDGET_CUDA
from turnwise.engines.generator.paired_generators import (
    DraftingGenerator,
    OpponentGenerator,
    OpponentPool,
    PairedGenerator,
    SelfPlayGenerator,
)
from turnwise.engines.grammar import Grammars
from turnwise.engines.kernels.dispatch import default_micro_batch, measured_threads
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.learner.policy_check import TOLERANCE, TOLERANCES, AsynchronousPolicyCheck, PolicyCheck
from turnwise.engines.memory import GIB, RECOMPUTE_FROM, MemoryPlan, ModelShape, describe_parts
from turnwise.engines.remote.generator_process import GeneratorSpec, start_generator
from turnwise.engines.sharded.torchrun import ranks_here
from turnwise.errors import SettingError
from turnwise.models import loading
from turnwise.models.facts import stored_parameters
from turnwise.models.fetch import resolve
from turnwise.models.loading import load_causal_lm, load_tokenizer
from turnwise.models.trust import remote_code_is_trusted
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.chat_session import LocalChat
from turnwise.rollout.renderer import Renderer
from turnwise.serve.policy_host import HostLimits
from turnwise.training.interrupt import run_async
from turnwise.training.remote_generators import OWN_PROCESS, make_remote_generator
from turnwise.training.rewards import POLICY, LocalModels, reward_model_folder

FP8 = torch.float8_e4m3fn
JUDGE_CONTEXT = 8192  # ids that a policy reads when it is asked; fewer if the model cannot


def select_device(settings: Settings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(settings.device)
    except RuntimeError:
        raise SettingError(f"no device {settings.device!r}; write cpu, cuda or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError("device is cuda, but this machine has no usable GPU; write --device cpu")
    return device


def select_threads(settings: Settings) -> int:
    """CPU threads of a run: the setting, else OMP_NUM_THREADS, else the fastest count measured now. On a GPU it is 1."""
    if select_device(settings).type == "cuda":
        return 1
    if settings.threads:
        return settings.threads
    return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else measured_threads()


def describe_machine(settings: Settings, threads: int) -> dict[str, Any]:
    """What results depend on in the last bits: the GPU, or the instruction set of the CPU, and the number of threads."""
    device = select_device(settings)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"device": device.type, "processor": f"{platform.machine()} {name}", "threads": threads}


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads; 0 changes nothing."""
    previous = torch.get_num_threads()
    torch.set_num_threads(count or previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


# ------------------------------------------------------------------ precision


def rollout_dtype(settings: Settings) -> torch.dtype | None:
    """The dtype of rollouts; None is the model's own float32. On a CPU half precision saves nothing unless asked for."""
    if settings.rollout_dtype == "auto":
        device, learner = select_device(settings), LearnerSettings(dtype=settings.dtype)
        if learner.fp8:
            return FP8
        learner_dtype = learner.compute_dtype(device)
        return torch.bfloat16 if device.type == "cuda" and learner_dtype == torch.bfloat16 else None
    dtypes = {"fp8": FP8, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes.get(settings.rollout_dtype)


def policy_check_tolerance(settings: Settings) -> float:
    """Largest mean log-probability difference between generator and learner: the setting, or what the coarser precision
    of the two allows. Where both round to fp8 they round alike."""
    learner = LearnerSettings(dtype=settings.dtype)
    learner_dtype, generator_dtype = learner.compute_dtype(select_device(settings)), rollout_dtype(settings)
    dtypes = [FP8 if learner.fp8 else learner_dtype, generator_dtype]
    if dtypes == [FP8] * 2:
        dtypes = [learner_dtype]
    return settings.mismatch_tolerance or max(TOLERANCES.get(dtype or torch.float32, TOLERANCE) for dtype in dtypes)


def make_policy_check(settings: Settings, recipe: Recipe) -> PolicyCheckProtocol:
    """A recipe that adds noise to the layers needs a forward pass of its own for the check, an asynchronous run a sample."""
    kind = PolicyCheck if settings.staleness.synchronous or settings.offline else AsynchronousPolicyCheck
    return kind(policy_check_tolerance(settings), separate=bool(recipe.smoothing))


# -------------------------------------------------------------------- learner


def ids_per_micro_batch(settings: Settings) -> int:
    return settings.micro_batch_tokens or default_micro_batch(select_device(settings))


def learner_settings(settings: Settings, recipe: Recipe) -> LearnerSettings:
    updates = settings.steps * recipe.control.updates
    return LearnerSettings(
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        clip=settings.clip_norm,
        warmup=min(settings.warmup, updates),
        schedule=settings.schedule,
        total_steps=updates,
        positions=ids_per_micro_batch(settings),
        dtype=settings.dtype,
        lora_rank=settings.lora_rank,
        recompute=settings.recompute,
        offload=settings.offload,
        value_lr=settings.value_lr,
    )


def make_learner(
    settings: Settings,
    model: PreTrainedModel,
    recipe: Recipe,
    teacher: PreTrainedModel | None = None,
    folder: Path | None = None,
    renderer: Renderer | None = None,
) -> Learner:
    """The learner of a run: in this process, or over ``settings.ranks`` processes, each with its share of the CPU threads.
    ``folder``: of its checkpoints. ``renderer``: reads grammars; None where nothing is learnt."""
    signals = recipe.objective.signals
    shared: dict[str, Any] = {
        "critic": recipe.critics,
        "turn_critic": bool(signals & {*TURN_CRITIC, *TURN_CRITIC_TARGET}),
        "separate_critic": settings.critic == "separate",
        "teacher": teacher if Signal.TEACHER in signals else None,
        "device": select_device(settings),
    }
    if settings.ranks == 1:
        learner = LocalLearner(model, learner_settings(settings, recipe), noise=recipe.smoothing, **shared)
    else:
        from turnwise.engines.sharded.sharded_learner import ShardedLearner  # late: imports FSDP

        threads = max(1, torch.get_num_threads() // ranks_here(settings.ranks))
        ranks: dict[str, Any] = {"ranks": settings.ranks, "signals": signals, "threads": threads, "folder": folder}
        learner = ShardedLearner(model, learner_settings(settings, recipe), **ranks, **shared)
    if renderer is not None:
        learner.replay = Grammars(renderer.tokenizer, renderer.stop_ids).replay
    return learner


@contextlib.contextmanager
def closing(*engines: Learner | Generator) -> Iterator[None]:
    """End the processes of engines that have some."""
    try:
        yield
    finally:
        for engine in engines:
            if (close := getattr(engine, "close", None)) is not None:
                close()


def make_cold_start_learner(settings: Settings, model: PreTrainedModel, steps: int) -> Learner:
    """A learner for ``steps`` supervised steps. RL begins with a fresh one."""
    cold_settings = LearnerSettings(
        lr=settings.cold_lr,
        weight_decay=0.1,
        warmup=min(20, steps),
        schedule="cosine",
        total_steps=steps,
        positions=ids_per_micro_batch(settings),
        dtype="auto" if settings.dtype == "nf4" else settings.dtype,  # every weight is trained
    )
    return LocalLearner(model, cold_settings, device=select_device(settings))


# ------------------------------------------------------------------ generator


def cache_rows(settings: Settings, dialogues: int) -> int:
    """Rows of the KV cache: for the dialogues of a run or its evaluation, at most the setting. 0 dialogues: any number."""
    needed = max(dialogues, settings.eval_tasks * settings.eval_samples, 1) if dialogues else settings.slots
    return min(settings.slots, needed)


def make_served_generator(
    settings: Settings, model: PreTrainedModel, renderer: Renderer, limits: HostLimits, cache: CacheChoice
) -> LocalGenerator:
    """The generator of a server, with what a trainer asks for. It computes in a thread, so that the server answers meanwhile."""
    on_cpu = select_device(settings).type == "cpu"
    threads = (limits.threads or torch.get_num_threads()) if on_cpu else 1
    return make_local_generator(
        settings, model, renderer, limits.deterministic, cache=cache, threads=threads, share_weights=on_cpu,
        slots=limits.slots, context=limits.context, stop_ids=limits.stop_ids,
    )  # fmt: skip


def make_local_generator(
    settings: Settings, model: PreTrainedModel, renderer: Renderer, deterministic: bool = True, dialogues: int = 0,
    cache: CacheChoice | None = None, kind: type[LocalGenerator] | None = None, **other: Any,
) -> LocalGenerator:  # fmt: skip
    """A generator with its own copy of the model; on a CPU a synchronous one shares the learner's weights, because it samples
    nothing between an update and its publication (adapters are merged, so they need a copy). ``dialogues`` is the most that are
    ever open at once besides an evaluation's: cache rows beyond that only cost memory (6 GB for 256 rows of 512 ids of a
    model of 135 M). ``other`` options replace what the settings say."""
    options: dict[str, Any] = {
        "slots": cache_rows(settings, dialogues),
        "context": settings.context,
        "stop_ids": renderer.stop_ids,
        "device": select_device(settings),
        "dtype": rollout_dtype(settings),
        "share_weights": deterministic and not settings.lora_rank and select_device(settings).type == "cpu",
    }
    options |= other
    options["grammars"] = Grammars(renderer.tokenizer, options["stop_ids"])
    return (kind or LocalGenerator)(model, renderer.decode, deterministic=deterministic, cache=cache, **options)


def with_opponents(
    settings: Settings, generator: Generator, model: PreTrainedModel, renderer: Renderer
) -> tuple[Generator, SelfPlayGenerator | None]:
    """The generator of a run; where older policies hold other seats, beside one that has its own copy of the weights."""
    setting = settings.opponents
    if setting.kind != "past":
        return generator, None
    assert isinstance(generator, LocalGenerator), "drafts are refused before"
    # as many rows as the policy's own: each dialogue has both sides. Their weights are older, so they are never shared
    opponents = make_local_generator(
        settings, model, renderer, generator.deterministic, cache=generator.cache, kind=OpponentGenerator,
        slots=generator.model_runner.kv_cache.rows, share_weights=False,
    )  # fmt: skip
    assert isinstance(opponents, OpponentGenerator)
    pool = OpponentPool(setting.keep, setting.every, setting.pool == "latest", settings.seed)
    both = SelfPlayGenerator(generator, opponents, pool)
    return both, both


def with_local_models(
    settings: Settings, generator: Generator, model: PreTrainedModel, renderer: Renderer
) -> tuple[Generator, LocalModels]:
    """The generator of a run, and what makes its judge or helper of a model of this process. The policy, where it is asked, has
    a generator of its own, whose weights follow: it reads longer texts, and what it samples cannot change the batches of
    rollouts. A reward model of wrong steps is loaded from its folder."""

    def single(its_model: Any, its_renderer: Renderer, context: int, deterministic: bool) -> LocalChat:
        """Answers one question at a time: it needs one row of a cache."""
        mirror = make_local_generator(settings, its_model, its_renderer, deterministic, slots=1, context=context)
        return LocalChat(mirror, its_renderer, context)

    reads = lambda m: int(getattr(m.config, "max_position_embeddings", None) or JUDGE_CONTEXT)  # noqa: E731
    policy = None
    if POLICY in (settings.judge, settings.helper):
        context = min(reads(model), max(JUDGE_CONTEXT, settings.context))
        policy = single(model, renderer, context, settings.staleness.deterministic)
        generator = PairedGenerator(generator, policy.generator)

    def local(address: str) -> ChatModel:
        if address == POLICY:
            assert policy is not None
            return policy
        judge = load_causal_lm(folder := str(reward_model_folder(settings)))
        return single(judge, Renderer(load_tokenizer(folder)), reads(judge), True)

    return generator, local


GENERATOR_PROGRAM = "turnwise.training.serve"  # of --generator local


def make_generator(
    settings: Settings,
    recipe: Recipe,
    model: PreTrainedModel,
    renderer: Renderer,
    deterministic: bool,
    dialogues: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Generator:
    """The generator of a run, with the KV cache that is asked for or that fits, behind a cheaper one for drafts where the recipe
    samples drafts in lower precision. ``tell`` hears of servers that are lost."""
    cache = cache_choice(settings, recipe, model)
    if settings.generator == OWN_PROCESS:
        # the local generator in a process of its own, on the same device
        rows, device = cache_rows(settings, dialogues), str(select_device(settings))
        limits = (rows, settings.context, tuple(renderer.stop_ids), deterministic)
        spec = GeneratorSpec(*limits, device, rollout_dtype(settings), torch.get_num_threads(), cache)
        seconds = settings.generator_seconds
        return run_async(start_generator(GENERATOR_PROGRAM, spec, model, renderer.tokenizer, renderer.decode, seconds))
    if settings.generator or settings.cluster:
        rows, tolerance = cache_rows(settings, dialogues), policy_check_tolerance(settings)
        threads = torch.get_num_threads() if select_device(settings).type == "cpu" else 0
        directory, count = None, 0
        if settings.cluster:  # where the generator actors of this run are at any time, and how many it should have
            from turnwise.training.cluster.directory import GeneratorDirectory  # late: imports ray

            directory, count = GeneratorDirectory.of_this_actor().addresses, settings.cluster.generators
        return make_remote_generator(
            settings, model, renderer, deterministic, rows, tolerance, threads, tell, directory, count
        )
    model = with_value_rows(model) if recipe.critics < 0 else model
    exact = make_local_generator(settings, model, renderer, deterministic, dialogues, cache)
    if not recipe.precision.drafts:
        return exact
    draft_settings = replace(settings, rollout_dtype=recipe.precision.drafts)  # type: ignore[arg-type]
    return DraftingGenerator(exact, make_local_generator(draft_settings, model, renderer, deterministic, 0, cache))


# ----------------------------------------------------- memory before it is taken


USABLE = 0.9  # of the memory: the rest is fragments, libraries, CUDA graphs
MIN_DIALOGUES = 2  # whole contexts that a cache in pages must hold
TOLD_FROM = 50_000_000  # parameters from which a run tells its estimate
LOADED = 4  # bytes of a weight while a model is loaded, on the host: it is read in float32


def memory_plan(settings: Settings, recipe: Recipe, model: Any) -> MemoryPlan:
    """What these settings take on their device. ``model``: it, or its shape."""
    device, budget = select_device(settings), recipe.budget
    dtype, rollout = LearnerSettings(dtype=settings.dtype).compute_dtype(device), rollout_dtype(settings)
    compute = torch.finfo(dtype).bits // 8
    ahead = settings.staleness.capacity(budget.groups, settings.steps)
    dialogues = max(ahead * budget.size, settings.eval_tasks * settings.eval_samples)
    ids = ids_per_micro_batch(settings)
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
    return CacheChoice(cache_room(plan, int(USABLE * device_memory(select_device(settings)))), page)


def sampling_cache(settings: Settings, model: Any) -> CacheChoice:
    """The KV cache of a process that trains nothing. Beside it are the weights, on a CPU once more as the decoder arranges them,
    and one layer's activations of a prefill."""
    device, rollout = select_device(settings), rollout_dtype(settings) or model.dtype
    shape = ModelShape.of(model.config, sum(p.numel() for p in model.parameters()))
    on_gpu = device.type == "cuda"
    fp8 = rollout == FP8
    dtype = rollout if not fp8 else torch.bfloat16 if on_gpu else model.dtype
    weights = shape.parameters * (dtype.itemsize * (1 if on_gpu else 2) + (fp8 and on_gpu))  # those in fp8 come on top
    prefill = shape.activations(PREFILL_BUDGET_CUDA if on_gpu else PREFILL_BUDGET, dtype.itemsize, False)
    prefill //= max(1, shape.layers)
    # bytes of a GPU that no process uses; of a CPU all
    available = min(
        int(USABLE * device_memory(device)),
        (int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else device_memory(device)),
    )
    return CacheChoice(max(0, available - weights - prefill), LAYOUTS.get(settings.model.cache))


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
    worth_it = [name for name, saved in sorted(savings.items(), key=lambda pair: -pair[1]) if saved > GIB // 20]
    return "write " + ", ".join(worth_it[:3]) if worth_it else "write a smaller --model"


def report(settings: Settings, recipe: Recipe, model: Any) -> tuple[Settings, list[str]]:
    """The settings to run with, and what to tell about memory. Small models say nothing."""
    plan = memory_plan(settings, recipe, model)
    if plan.shape.parameters < TOLD_FROM or not plan.shape.layers:
        return settings, []
    available = device_memory(select_device(settings))
    settings, change = fit_memory(settings, plan, available)
    parts, room = (plan := memory_plan(settings, recipe, model)).parts(), int(USABLE * available)
    if settings.model.cache != "rows" and in_pages(plan, room, "pages"):
        parts["KV cache"] = min(parts["KV cache"], plan.samplers * cache_room(plan, room))
    about = f"{sum(parts.values()) / GIB:.1f} GiB: {describe_parts(parts)}"
    return settings, [f"memory: about {about}; the device has {available / GIB:.1f}", *filter(None, [change])]


# ------------------------------------------------------- before anything is loaded


def check_memory(settings: Settings, recipe: Recipe, config: Any) -> None:
    """Refuse a model that fits neither the device it is trained on nor the host it is read on. ``config``: that of the model. The
    learner of a cluster works on the machine of this command."""
    shape = ModelShape.of(config, stored_parameters(settings.model.name) or parameters_of(config))
    if shape.parameters < TOLD_FROM or not shape.layers:
        return
    if settings.cluster and settings.device == "auto" and not settings.cluster.gpus:
        settings = replace(settings, device="cpu")  # Ray hides the GPUs from actors that reserve none
    device, host = select_device(settings), torch.device("cpu")
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
