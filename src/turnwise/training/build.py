"""Puts a run together from its settings: tokenizer, model, renderer, engines. No loop, no formula."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from turnwise import recipes
from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator, Session
from turnwise.core.records import Sampling, Task, Trajectory
from turnwise.core.signals import SLOW, UTTERANCE, Signal
from turnwise.engines.generator.drafts import Drafting
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.kernels.dispatch import ids_at_once
from turnwise.engines.learner.learner import LearnerSettings, LocalLearner
from turnwise.engines.learner.policy_check import TOLERANCE, TOLERANCES
from turnwise.errors import SettingError
from turnwise.evaluation.evaluator import Evaluator
from turnwise.models.fetch import resolve
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.recipes import catalogue
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.episode import Episode
from turnwise.rollout.renderer import CHATML, Renderer
from turnwise.rollout.scripted import dialogue
from turnwise.tasks.budgets import Fixed
from turnwise.training import requirements
from turnwise.training.data_sources import Supply, split
from turnwise.training.env_spec import World

TINY = "tiny"
transformers_logging.disable_progress_bar()  # our own progress is enough
CORPUS = 300  # scripted dialogues the tiny tokenizer is trained on
_spoken: dict[Any, list[str]] = {}


def recipe_of(settings: Settings, own: Recipe | None = None) -> Recipe:
    """The method's recipe, or one's own, with another's credit where that is asked for, and the run's budget and passes."""
    recipe = own or recipes.build(settings.method, **settings.method_options)
    if settings.credit:
        recipe = catalogue.lend(recipe, settings.credit, settings.credit_options)
    budget = recipe.budget
    return replace(
        recipe,
        budget=Fixed(settings.groups or budget.groups, settings.group_size or budget.size),
        control=recipe.control.repeated(settings.epochs, settings.minibatches),
    )


def examine(settings: Settings, own: Recipe | None = None) -> Recipe:
    """Refuses every setting that can be refused before anything is written or learned; the recipe of the run."""
    recipe, world = recipe_of(settings, own), World.of(settings)
    settings = precise(settings, recipe)
    device_of(settings)
    _same_numbers(settings, recipe)
    world.tasks("train")
    sampling_of(settings), sampling_of(settings, settings.eval_temperature)
    learner_settings(settings, recipe)
    requirements.examine(recipe, settings, world)
    supply = Supply.of(settings, world, recipe)
    if not settings.eval_tasks and not settings.data:
        raise SettingError("eval_tasks is 0; write at least 1 (only a run on --data can be measured without tasks)")
    if not world.demonstrates and settings.model != TINY and settings.cold_steps > 0:
        raise SettingError(f"{settings.env} has no `demonstrate`, so there is nothing to imitate; write --cold-steps 0")
    if settings.model == TINY:
        _must_demonstrate(world)
    if settings.model != TINY or supply.rows is not None:
        rows = supply.groups(Renderer(tokenizer_of(settings, world)))
        if settings.data:
            split(rows, settings)
    if settings.model != TINY:
        try:
            AutoConfig.from_pretrained(resolve(settings.model))
        except (OSError, ValueError, KeyError) as fault:
            raise SettingError(_no_model(settings.model, fault)) from fault
    if settings.teacher:
        _same_vocabulary(settings, world)
    return recipe


def _same_vocabulary(settings: Settings, world: World) -> None:
    """Refuses a teacher that does not exist or speaks other tokens. A tiny model takes its teacher's tokenizer."""
    theirs = tokenizer_of(replace(settings, model=settings.teacher, teacher=""), world).get_vocab()
    if settings.model == TINY:
        Renderer(tokenizer_of(settings, world))
        return
    ours = tokenizer_of(settings, world).get_vocab()
    if ours != theirs:
        apart = len({*ours.items()} ^ {*theirs.items()})
        raise SettingError(
            f"the teacher {settings.teacher} has another vocabulary than {settings.model} ({apart} entries differ), so its "
            "probabilities cannot be compared token by token; give a teacher of the same family"
        )


def teacher_of(settings: Settings) -> PreTrainedModel | None:
    return model_of(replace(settings, model=settings.teacher), 0) if settings.teacher else None


def device_of(settings: Settings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(settings.device)
    except RuntimeError:
        raise SettingError(f"no device {settings.device!r}; write cpu, cuda or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError("device is cuda, but this machine has no usable GPU; write --device cpu")
    return device


def tokenizer_of(settings: Settings, world: World, path: Path | None = None) -> Any:
    """The tokenizer of a saved or given model, or a tiny one: the teacher's, or trained on the environment's dialogues."""
    if path is None and settings.model == TINY and not settings.teacher:
        return tiny_tokenizer(corpus(world), settings.vocabulary, getattr(world.kind, "symbols", ""))
    source = str(path or resolve(settings.teacher if settings.model == TINY else settings.model))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as fault:
        raise SettingError(_no_model(source, fault)) from fault
    if settings.template:
        tokenizer.chat_template = _template(settings.template)
    return tokenizer


def tokenizer_for_scripts() -> Any:
    """Any lossless tokenizer does for players that speak text: plain bytes."""
    return tiny_tokenizer([], 300)


def _template(name: str) -> str:
    if name == "chatml":
        return CHATML
    if not Path(name).is_file():
        raise SettingError(f"no chat template {name!r}; write chatml or the path of a .jinja file")
    return Path(name).read_text(encoding="utf-8")


def _must_demonstrate(world: World) -> None:
    if not world.demonstrates:
        raise SettingError(
            f"the tiny model knows no language, and {world.settings.env} has no `demonstrate` to start it from; "
            "write one, or give a trained model with --model"
        )


def corpus(world: World) -> list[str]:
    """What the tiny tokenizer is trained on; played once in a process, since a run is examined before it begins."""
    _must_demonstrate(world)
    tasks = world.tasks("train", "tokenizer")
    known = (world.kind, tasks, world.limits.turns)
    if known in _spoken:
        return _spoken[known]

    async def talk() -> list[str]:
        texts: list[str] = []
        for n in range(CORPUS):
            task = tasks.draw(n)
            player = "demonstrator" if n % 2 else "oracle"
            said = await dialogue(player, world.open(task), task.seed, world.limits.turns)
            texts += [m["content"] for m in said]
        return texts

    tools = " ".join(tool["function"]["name"] for tool in getattr(world.kind, "tools", ()))
    _spoken[known] = [*asyncio.run(talk()), *[tools] * CORPUS]
    return _spoken[known]


def model_of(settings: Settings, vocabulary: int, path: Path | None = None) -> PreTrainedModel:
    if path is None and settings.model == TINY:
        s = settings
        return tiny_model(vocabulary, s.seed, hidden=s.hidden, layers=s.layers, context=s.context, copying=s.copying)
    source = str(path or resolve(settings.model))
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as fault:
        raise SettingError(_no_model(source, fault)) from fault


def _no_model(source: str, fault: Exception) -> str:
    why = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
    if _is_path(source) and not os.path.isdir(source):  # the hub would complain of the name of a repository
        why = "this is a file, not a folder" if os.path.exists(source) else "there is no such folder"
    return (
        f"no model could be loaded from {source!r}: {why}; "
        "write a folder in Hugging Face layout, a hub id such as Qwen/Qwen3-0.6B, tiny, "
        "or smollm2 (after `turnwise model fetch smollm2`)"
    )


def _is_path(source: str) -> bool:
    """Whether this can only be a path: a hub id is a name, or an owner and a name."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or os.path.exists(source)


def positions_of(settings: Settings) -> int:
    return settings.positions or ids_at_once(device_of(settings))


def learner_settings(settings: Settings, recipe: Recipe) -> LearnerSettings:
    updates = settings.steps * recipe.control.updates
    return LearnerSettings(
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        clip=settings.clip_norm,
        warmup=min(settings.warmup, updates),
        schedule=settings.schedule,
        total_steps=updates,
        positions=positions_of(settings),
        dtype=settings.dtype,
        lora_rank=settings.lora_rank,
        recompute=settings.recompute,
        offload=settings.offload,
        value_lr=settings.value_lr,
    )


def learner_of(settings: Settings, model: PreTrainedModel, recipe: Recipe) -> LocalLearner:
    chosen, asked = learner_settings(settings, recipe), recipe.objective.needs
    return LocalLearner(
        model,
        chosen,
        critic=recipe.critics,
        turn_critic=bool(asked & {*UTTERANCE, *SLOW}),
        separate_critic=settings.critic == "separate",
        teacher=teacher_of(settings) if Signal.TEACHER in asked else None,
        noise=recipe.smoothing,
        device=device_of(settings),
    )


def cold_learner_of(settings: Settings, model: PreTrainedModel, steps: int) -> LocalLearner:
    """A learner for ``steps`` supervised steps; RL begins with a fresh one."""
    chosen = LearnerSettings(
        lr=settings.cold_lr,
        weight_decay=0.1,
        warmup=min(20, steps),
        schedule="cosine",
        total_steps=steps,
        positions=positions_of(settings),
        dtype=settings.dtype,
    )
    return LocalLearner(model, chosen, device=device_of(settings))


def precise(settings: Settings, recipe: Recipe) -> Settings:
    """The settings with the precision a method asks for, where nobody said otherwise."""
    asked: dict[str, Any] = {"dtype": recipe.precision.learner, "rollout_dtype": recipe.precision.rollouts}
    return replace(settings, **{k: v for k, v in asked.items() if v and getattr(settings, k) == "auto"})


def _same_numbers(settings: Settings, recipe: Recipe) -> None:
    """fp8 rollouts for a learner that computes in other numbers are off-policy data."""
    narrow = LearnerSettings(dtype=settings.dtype).narrow
    if rollout_dtype_of(settings) == torch.float8_e4m3fn and not narrow and not recipe.corrects:
        raise SettingError(
            f"{settings.title} takes its rollouts for samples of the learner's own policy, and in fp8 they are not; write "
            "--dtype fp8 (the learner rounds likewise), or take a method with a ratio (grpo) or one that corrects (tis, mis)"
        )


def drafting_of(
    settings: Settings, recipe: Recipe, model: PreTrainedModel, renderer: Renderer, deterministic: bool, dialogues: int
) -> LocalGenerator | Drafting:
    """The run's generator, with a cheap one before it where the recipe wants drafts in other numbers."""
    exact = generator_of(settings, model, renderer, deterministic, dialogues)
    if not recipe.precision.drafts:
        return exact
    cheap = replace(settings, rollout_dtype=recipe.precision.drafts)
    return Drafting(exact, generator_of(cheap, model, renderer, deterministic))


def generator_of(
    settings: Settings, model: PreTrainedModel, renderer: Renderer, deterministic: bool = True, dialogues: int = 0
) -> LocalGenerator:
    """A generator with its own copy of the model. ``dialogues``: more than so many are never open at once, besides an
    evaluation's; rows beyond that would only be memory (6 GB of it, for 256 rows of 512 ids of a model of 135 M)."""
    needed = max(dialogues, settings.eval_tasks * settings.eval_samples, 1) if dialogues else settings.slots
    return LocalGenerator(
        model,
        renderer.decode,
        slots=min(settings.slots, needed),
        context=settings.context,
        stop_ids=renderer.stop_ids,
        deterministic=deterministic,
        device=device_of(settings),
        dtype=rollout_dtype_of(settings),
    )


def rollout_dtype_of(settings: Settings) -> torch.dtype | None:
    """What rollouts compute in; None: the model's own float32. On a CPU half precision saves nothing unless asked for."""
    if settings.rollout_dtype == "auto":
        device, learner = device_of(settings), LearnerSettings(dtype=settings.dtype)
        if learner.narrow:
            return torch.float8_e4m3fn
        learned = learner.arithmetic(device)
        return torch.bfloat16 if device.type == "cuda" and learned == torch.bfloat16 else None
    kinds = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return kinds.get(settings.rollout_dtype)


def tolerance_of(settings: Settings) -> float:
    """How far generator and learner may be apart on average: what was given, or what the coarser of the two allows. Where both
    round to fp8 they round alike."""
    learner = LearnerSettings(dtype=settings.dtype)
    learned, drawn = learner.arithmetic(device_of(settings)), rollout_dtype_of(settings)
    kinds = [torch.float8_e4m3fn if learner.narrow else learned, drawn]
    if kinds == [torch.float8_e4m3fn] * 2:
        kinds = [learned]
    return settings.probe_tolerance or max(TOLERANCES.get(kind or torch.float32, TOLERANCE) for kind in kinds)


def sampling_of(settings: Settings, temperature: float | None = None) -> Sampling:
    return Sampling(
        temperature=settings.temperature if temperature is None else temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
    )


def player(world: World, renderer: Renderer, sampling: Sampling, blind: bool = False) -> Any:
    """A ``Play``: one episode of one task with one session. ``blind``: what it heard is recorded masked, too."""

    limits = world.limits

    async def play(key: str, task: Task, session: Session, heat: float = 1.0, **more: Any) -> Trajectory:
        env = world.attempt(task)
        return await Episode(key, task, env, session, renderer, sampling, limits, heat, blind, **more).run()

    return partial(play)


def evaluator_of(world: World, renderer: Renderer, generator: Generator) -> Evaluator:
    """Plays held-out tasks with what ``generator`` samples at the temperature of evaluations."""
    s = world.settings
    play = player(world, renderer, sampling_of(s, s.eval_temperature))
    return Evaluator(s, generator, play, world.first)
