"""Puts a run together from its settings: environment, tokenizer, model, renderer, engines. No loop, no formula."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from turnwise import environments, recipes
from turnwise.data import Sampling, Task, Trajectory
from turnwise.engines.learner import LearnerSettings, LocalLearner
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.ports import Session
from turnwise.recipe import Recipe
from turnwise.rollout.episode import Episode, Limits
from turnwise.rollout.players import dialogue
from turnwise.rollout.render import CHATML, Renderer
from turnwise.settings import Settings
from turnwise.tasks.budget import Fixed
from turnwise.tasks.sampler import Tasks

TINY = "tiny"
transformers_logging.disable_progress_bar()  # our own progress is enough
CORPUS = 300  # scripted dialogues the tiny tokenizer is trained on


def recipe_of(settings: Settings, own: Recipe | None = None) -> Recipe:
    """The method's recipe, or one's own, with the run's budget and passes."""
    recipe = own or recipes.build(settings.method, **settings.method_options)
    budget = recipe.budget
    return replace(
        recipe,
        budget=Fixed(settings.groups or budget.groups, settings.group_size or budget.size),
        control=recipe.control.repeated(settings.epochs, settings.minibatches),
    )


def examine(settings: Settings, own: Recipe | None = None) -> Recipe:
    """Refuses every setting that can be refused before anything is written or learned; the recipe of the run."""
    recipe, world = recipe_of(settings, own), World.of(settings)
    device_of(settings)
    world.tasks("train")
    sampling_of(settings), sampling_of(settings, settings.eval_temperature)
    learner_settings(settings, recipe)
    if not world.demonstrates and settings.model != TINY and settings.cold_steps > 0:
        raise SettingError(f"{settings.env} has no `demonstrate`, so there is nothing to imitate; write --cold-steps 0")
    if settings.model == TINY:
        _must_demonstrate(world)
    else:
        Renderer(tokenizer_of(settings, world))
        try:
            AutoConfig.from_pretrained(settings.model)
        except (OSError, ValueError, KeyError) as fault:
            raise SettingError(_no_model(settings.model, fault)) from fault
    return recipe


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


@dataclass(frozen=True)
class World:
    """The environment class of a run and how its tasks are opened."""

    settings: Settings
    kind: type

    @classmethod
    def of(cls, settings: Settings) -> World:
        kind = environments.load(settings.env)
        offered = tuple(getattr(kind, "difficulties", (1,)))
        wrong = [d for d in settings.difficulty if d not in offered]
        if wrong:
            raise SettingError(f"{settings.env} has no difficulty {wrong[0]}; it offers {', '.join(map(str, offered))}")
        return cls(settings, kind)

    def open(self, task: Task) -> Any:
        """A fresh episode. A class without splits has other seeds for held-out tasks, and must make do with that."""
        wanted = {"difficulty": task.difficulty, "split": task.split}
        return self.kind(**{key: wanted[key] for key in environments.settings(self.kind)})

    def tasks(self, split: str, purpose: str = "run") -> Tasks:
        seed = self.settings.seed if split == "train" else 0  # held-out tasks are the same for every run
        return Tasks(self.settings.env, split, self.settings.difficulty, seed if purpose == "run" else seed + 1_000_003)

    @property
    def limits(self) -> Limits:
        s = self.settings
        return Limits(s.max_turns or int(getattr(self.kind, "max_turns", 8)), s.context, s.env_seconds)

    @property
    def unbounded(self) -> Limits:
        """For players that are not a model: only the environment itself limits them."""
        return replace(self.limits, context=2**31)

    @property
    def demonstrates(self) -> bool:
        return hasattr(self.kind, "demonstrate") and hasattr(self.kind, "oracle")


def tokenizer_of(settings: Settings, world: World, path: Path | None = None) -> Any:
    """The tokenizer of a saved or given model, or a tiny one trained on the environment's own dialogues."""
    if path is None and settings.model == TINY:
        return tiny_tokenizer(corpus(world), settings.vocabulary)
    source = str(path or settings.model)
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
    """What the tiny tokenizer is trained on."""
    _must_demonstrate(world)
    tasks = world.tasks("train", "tokenizer")

    async def talk() -> list[str]:
        texts: list[str] = []
        for n in range(CORPUS):
            task = tasks.draw(n)
            player = "demonstrator" if n % 2 else "oracle"
            said = await dialogue(player, world.open(task), task.seed, world.limits.turns)
            texts += [m["content"] for m in said]
        return texts

    tools = " ".join(tool["function"]["name"] for tool in getattr(world.kind, "tools", ()))
    return [*asyncio.run(talk()), *[tools] * CORPUS]


def model_of(settings: Settings, vocabulary: int, path: Path | None = None) -> PreTrainedModel:
    if path is None and settings.model == TINY:
        return tiny_model(
            vocabulary, settings.seed, hidden=settings.hidden, layers=settings.layers, context=settings.context
        )
    source = str(path or settings.model)
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as fault:
        raise SettingError(_no_model(source, fault)) from fault


def _no_model(source: str, fault: Exception) -> str:
    first = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
    return (
        f"no model could be loaded from {source!r} ({first}); write a folder in Hugging Face layout, a hub id, or tiny"
    )


def learner_settings(settings: Settings, recipe: Recipe) -> LearnerSettings:
    updates = settings.steps * recipe.control.updates
    return LearnerSettings(
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        clip=settings.clip_norm,
        warmup=min(settings.warmup, updates),
        schedule=settings.schedule,
        total_steps=updates,
        positions=settings.positions,
        dtype=settings.dtype,
        lora_rank=settings.lora_rank,
        value_lr=settings.value_lr,
    )


def learner_of(settings: Settings, model: PreTrainedModel, recipe: Recipe) -> LocalLearner:
    chosen = learner_settings(settings, recipe)
    return LocalLearner(model, chosen, critic=recipe.critics, noise=recipe.smoothing, device=device_of(settings))


def sampling_of(settings: Settings, temperature: float | None = None) -> Sampling:
    return Sampling(
        temperature=settings.temperature if temperature is None else temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
    )


def player(world: World, renderer: Renderer, sampling: Sampling) -> Any:
    """A ``Play``: one episode of one task with one session."""

    async def play(key: str, task: Task, session: Session) -> Trajectory:
        return await Episode(key, task, world.open(task), session, renderer, sampling, world.limits).run()

    return partial(play)
