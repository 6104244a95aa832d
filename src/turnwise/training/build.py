"""Parts of a run from its settings: recipe, tokenizer, model, episode player, evaluator. No loop, no engine, no formula."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from turnwise import recipes
from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator, Session
from turnwise.core.records import Sampling, Task, Trajectory
from turnwise.errors import SettingError
from turnwise.evaluation.evaluator import Evaluator
from turnwise.models.fetch import resolve
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.recipes import catalogue
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.episode import Episode
from turnwise.rollout.renderer import CHATML, Renderer
from turnwise.rollout.scripted import scripted_messages
from turnwise.tasks.budgets import Fixed
from turnwise.training.env_spec import EnvSpec

TINY = "tiny"
transformers_logging.disable_progress_bar()  # our own progress display is enough
CORPUS = 300  # scripted dialogues the tiny tokenizer is trained on


def make_recipe(settings: Settings, recipe: Recipe | None = None) -> Recipe:
    """The method's recipe, or the user's own, with another method's credit where asked for, and the run's budget and passes."""
    recipe = recipe or recipes.build(settings.method, **settings.method_options)
    if settings.credit:
        recipe = catalogue.with_credit(recipe, settings.credit, settings.credit_options)
    budget = recipe.budget
    return replace(
        recipe,
        budget=Fixed(settings.groups or budget.groups, settings.group_size or budget.size),
        control=recipe.control.with_passes(settings.epochs, settings.minibatches),
    )


# ---------------------------------------------------------- tokenizer, model


def load_tokenizer(settings: Settings, env_spec: EnvSpec, path: Path | None = None) -> Any:
    """The tokenizer of a saved or given model. The tiny model takes its teacher's, or one trained on scripted dialogues."""
    if path is None and settings.model == TINY and not settings.teacher:
        return tiny_tokenizer(
            tokenizer_corpus(env_spec), settings.vocabulary, getattr(env_spec.env_class, "symbols", "")
        )
    source = str(path or resolve(settings.teacher if settings.model == TINY else settings.model))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as fault:
        raise SettingError(no_model(source, fault)) from fault
    if settings.template:
        tokenizer.chat_template = _template(settings.template)
    return tokenizer


def byte_tokenizer() -> Any:
    """A lossless tokenizer of plain bytes: enough for scripted policies, which speak text."""
    return tiny_tokenizer([], 300)


def _template(name: str) -> str:
    if name == "chatml":
        return CHATML
    if not Path(name).is_file():
        raise SettingError(f"no chat template {name!r}; write chatml or the path of a .jinja file")
    return Path(name).read_text(encoding="utf-8")


def require_demonstrations(env_spec: EnvSpec) -> None:
    if not env_spec.can_demonstrate:
        raise SettingError(
            f"the tiny model knows no language, and {env_spec.settings.env} has no `demonstrate` and `oracle` to start it "
            "from; write both, or give a trained model with --model"
        )


def tokenizer_corpus(env_spec: EnvSpec) -> list[str]:
    """The texts the tiny tokenizer is trained on: scripted dialogues, and the names of the tools."""
    require_demonstrations(env_spec)
    tasks = env_spec.tasks("train", "tokenizer")

    async def play() -> list[str]:
        texts: list[str] = []
        for n in range(CORPUS):
            task = tasks.draw(n)
            policy = "demonstrator" if n % 2 else "oracle"
            messages = await scripted_messages(policy, env_spec.make(task), task.seed, env_spec.limits.turns)
            texts += [m["content"] for m in messages]
        return texts

    tool_names = " ".join(tool["function"]["name"] for tool in env_spec.tools)
    return [*asyncio.run(play()), *[tool_names] * CORPUS]


def load_model(settings: Settings, vocabulary: int, path: Path | None = None) -> PreTrainedModel:
    if path is None and settings.model == TINY:
        s = settings
        return tiny_model(vocabulary, s.seed, hidden=s.hidden, layers=s.layers, context=s.context, copying=s.copying)
    source = str(path or resolve(settings.model))
    try:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as fault:
        raise SettingError(no_model(source, fault)) from fault


def load_teacher(settings: Settings) -> PreTrainedModel | None:
    return load_model(replace(settings, model=settings.teacher), 0) if settings.teacher else None


def no_model(source: str, fault: Exception) -> str:
    """The message for a model that could not be loaded."""
    why = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
    if _is_path(source) and not os.path.isdir(source):  # otherwise the message would speak of a hub repository
        why = "this is a file, not a folder" if os.path.exists(source) else "there is no such folder"
    return (
        f"no model could be loaded from {source!r}: {why}; "
        "write a folder in Hugging Face layout, a hub id such as Qwen/Qwen3-0.6B, tiny, "
        "or smollm2 (after `turnwise model fetch smollm2`)"
    )


def _is_path(source: str) -> bool:
    """Whether this can only be a path: a hub id is a name, or an owner and a name."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or os.path.exists(source)


# ------------------------------------------------------------------- episodes


def sampling_settings(settings: Settings, temperature: float | None = None) -> Sampling:
    return Sampling(
        temperature=settings.temperature if temperature is None else temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
    )


def make_play(env_spec: EnvSpec, renderer: Renderer, sampling: Sampling, record_masked: bool = False) -> Any:
    """A ``EpisodeRunner``: one episode of one task with one session. ``record_masked`` also records each prompt with its latest
    observation masked."""

    limits = env_spec.limits

    async def play(key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any) -> Trajectory:
        env = env_spec.try_make(task)
        return await Episode(
            key, task, env, session, renderer, sampling, limits, temperature_scale, record_masked, **more
        ).run()

    return partial(play)


def make_evaluator(env_spec: EnvSpec, renderer: Renderer, generator: Generator) -> Evaluator:
    """Plays held-out tasks with what ``generator`` samples at the temperature of evaluations."""
    s = env_spec.settings
    play = make_play(env_spec, renderer, sampling_settings(s, s.eval_temperature))
    return Evaluator(s, generator, play, env_spec.first_tasks)
