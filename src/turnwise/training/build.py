"""Parts of a run from its settings: tokenizer, model, episode player, evaluator. No loop, no engine, no formula."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from turnwise.config.settings import Settings
from turnwise.core.protocols import Generator, GroupScorer, Learner, Session
from turnwise.core.records import Facts, Sampling, Task
from turnwise.core.seeds import stable_seed
from turnwise.engines.experts import free_routing
from turnwise.engines.generator.paired_generators import SelfPlayGenerator
from turnwise.evaluation.evaluator import Evaluator
from turnwise.evaluation.policy_metrics import exact_metrics, reranked
from turnwise.models import loading
from turnwise.models.fetch import resolve
from turnwise.models.tiny import tiny_model, tiny_tokenizer
from turnwise.recipes.recipe import Recipe
from turnwise.rollout.episode import OtherSeats
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import ScriptedSession, scripted_messages, scripted_policy
from turnwise.rollout.typed_output import run_grammar
from turnwise.training.episodes import make_play as make_play
from turnwise.training.episodes import make_renderer as make_renderer
from turnwise.training.interrupt import run_async
from turnwise.training.plan import EnvSpec, read_template

transformers_logging.disable_progress_bar()  # our own progress display is enough
SeatPlan = Callable[[str, Task, Any, Session], OtherSeats]  # of key, task, environment and the policy's session
CORPUS = 300  # scripted dialogues the tiny tokenizer is trained on
CORPUS_WAVE = 100  # of them that are played at the same time


# ---------------------------------------------------------- tokenizer, model


def load_tokenizer(settings: Settings, env_spec: EnvSpec, path: Path | None = None) -> Any:
    """The tokenizer of a saved or given model. The tiny model takes its teacher's, or one trained on scripted dialogues."""
    if path is None and settings.model.tiny and not settings.teacher:
        return tiny_tokenizer(
            tokenizer_corpus(env_spec), settings.vocabulary, getattr(env_spec.env_class, "symbols", "")
        )
    source = str(path or resolve((settings.teacher if settings.model.tiny else settings.model).name))
    tokenizer = loading.load_tokenizer(source)
    if settings.template:
        tokenizer.chat_template = read_template(settings.template)
    return tokenizer


def byte_tokenizer() -> Any:
    """A lossless tokenizer of plain bytes: enough for scripted policies, which speak text."""
    return tiny_tokenizer([], 300)


def tokenizer_corpus(env_spec: EnvSpec) -> list[str]:
    """The texts the tiny tokenizer is trained on: scripted dialogues, and the names of the tools."""
    env_spec.require_demonstrations()
    tasks = env_spec.tasks("train", "tokenizer")

    async def play_one(n: int) -> list[str]:
        task = tasks.draw(n)
        policy = "demonstrator" if n % 2 else "oracle"
        limits, env = env_spec.limits, env_spec.make(task)
        messages = await scripted_messages(policy, env, task.seed, limits.turns, limits.environment_seconds)
        return [m["content"] for m in messages]

    async def play() -> list[str]:
        # `gather` answers in order, so that the tokenizer does not depend on who finishes first
        waves = [range(i, min(CORPUS, i + CORPUS_WAVE)) for i in range(0, CORPUS, CORPUS_WAVE)]
        return [text for wave in waves for texts in await asyncio.gather(*map(play_one, wave)) for text in texts]

    tool_names = " ".join(tool["function"]["name"] for tool in env_spec.tools)
    return [*run_async(play()), *[tool_names] * CORPUS]


def load_model(settings: Settings, vocabulary: int, path: Path | None = None) -> PreTrainedModel:
    if path is None and settings.model.tiny:
        s = settings
        return tiny_model(vocabulary, s.seed, hidden=s.hidden, layers=s.layers, context=s.context, copying=s.copying)
    model: PreTrainedModel = loading.load_causal_lm(str(path or resolve(settings.model.name)))
    if settings.model.routes == "free":
        free_routing(model)
    return model


def load_teacher(settings: Settings) -> PreTrainedModel | None:
    return load_model(replace(settings, model=settings.teacher), 0) if settings.teacher else None


# ------------------------------------------------------------------- episodes


def sampling_settings(settings: Settings, temperature: float | None = None) -> Sampling:
    return Sampling(
        temperature=settings.temperature if temperature is None else temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
        grammar=run_grammar(settings.response_format, settings.regex),
    )


def seat_plan(settings: Settings, env_class: type, renderer: Renderer, generator: Any) -> SeatPlan | None:
    """Who plays the other seats of an episode, by the setting ``opponents``; None: the policy plays all of them. Its own seat
    follows from the task, so all episodes of a group have the same one. In evaluations the policy plays every seat."""
    opponents, seats = settings.opponents, tuple(getattr(env_class, "agents", ()))

    def plan(key: str, task: Task, environment: Any, session: Session) -> OtherSeats:
        seat: str = seats[stable_seed("seat", task.key) % len(seats)]
        if opponents.kind == "past":
            assert isinstance(generator, SelfPlayGenerator)
            facts: Facts = {"seat": seat, "opponent": float(generator.opponents.version)}
            return OtherSeats(seat, generator.open_opponent(session), facts)
        act = scripted_policy(opponents.scripted, environment, stable_seed("opponent", task.key, key))
        plays = ScriptedSession(act, renderer, tuple(getattr(environment, "tools", ())))
        return OtherSeats(seat, plays, {"seat": seat, "opponent": opponents.scripted})

    return None if opponents.kind == "self" else plan


def make_evaluator(
    env_spec: EnvSpec,
    renderer: Renderer,
    generator: Generator,
    scorer: GroupScorer | None = None,
    learner: Learner | None = None,
    recipe: Recipe | None = None,
) -> Evaluator:
    """Plays held-out tasks with what ``generator`` samples at the temperature of evaluations. ``learner`` holds the same policy,
    for the metrics that need its probabilities. ``recipe`` may steer the sampling, or rank several answers."""
    s = env_spec.settings
    play = make_play(env_spec, renderer, sampling_settings(s, s.eval_temperature))
    exact = (
        partial(exact_metrics, env_spec.env_class, renderer, learner, s.eval_temperature or 1.0) if learner else dict
    )
    of_method: dict[str, Any] = {}  # how a method ranks answers and changes what is sampled, where it does
    if recipe is not None and learner is not None:
        of_method["ranked"] = partial(reranked, recipe, learner)
    if steer := getattr(recipe.strategy, "steer", None) if recipe is not None else None:
        of_method["steer"] = steer
    return Evaluator(s, generator, play, env_spec.first_tasks, scorer, exact, **of_method)
