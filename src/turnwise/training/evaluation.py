"""Evaluate a run, a model, a served model or a scripted policy on an environment: what ``turnwise eval`` calls.

A model behind an OpenAI-compatible address plays the tasks of a run's evaluation and is recorded alike; it needs no tokenizer.
Torch is imported only where a model is loaded. Knows no statistics and no HTTP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.chat import ChatModel
from turnwise.core.protocols import GroupScorer, Listener
from turnwise.core.records import Sampling, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.engines.remote.chat_server import ChatServer
from turnwise.environments.base import overrides
from turnwise.errors import SettingError
from turnwise.evaluation.evaluator import Evaluation, evaluate, scored
from turnwise.rollout.chat_session import ChatSession
from turnwise.rollout.episode import Episode
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_scripted
from turnwise.store.atomic import write_json
from turnwise.store.rundir import RunDir
from turnwise.training.interrupt import RunStopped, StopSignals, run_async
from turnwise.training.plan import EnvSpec, resolve_settings
from turnwise.training.refusals import check_device, check_model_name
from turnwise.training.rewards import CACHE, Decode, LocalModels, chained, check_reachable, open_judge, open_scorer
from turnwise.training.watch import silent

SPLITS = ("held_out", "train")
SHARED = ("env", "difficulty", "seed", "eval_tasks", "eval_samples", "eval_temperature", "max_turns", "env_seconds")
# of a served model's turn where the user gives none: an environment suggests what suits the tiny model
MAX_TOKENS = 1024
STAGE = "evaluate"


@dataclass(frozen=True)
class ServedPolicy:
    """Which served model plays. ``key_variable`` names the environment variable that holds the key."""

    url: str
    model: str = ""
    key_variable: str = ""
    seconds: float = 120.0
    parallel: int = 16

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise SettingError(f"--policy-seconds is {self.seconds:g}; write a positive number of seconds")
        if self.parallel < 1:
            raise SettingError(f"--policy-parallel is {self.parallel}; write at least 1")

    def connect(self, listen: Listener) -> Coroutine[Any, Any, ChatServer]:
        p = self
        return ChatServer.reached("policy", p.url, p.key_variable, p.model, p.seconds, p.parallel, listen)


def evaluate_policy(
    run: str,
    player: str,
    split: str,
    given: Mapping[str, Any],
    served: ServedPolicy | None = None,
    listen: Listener = silent,
    save: str = "",
) -> dict[str, Any]:
    """The summary of an evaluation: whose policy, on which environment and split, with which result. ``save``: a file for the
    summary with the first episode of each task. A signal stops it at once."""
    if split not in SPLITS:
        raise SettingError(f"no split {split!r}; known: {', '.join(SPLITS)}")
    if served is not None and (run or player):
        raise SettingError("give one of a run, --player and --policy; a run and --policy together are compared")
    try:
        with StopSignals().handled():
            if served is not None:
                who, settings, evaluation = _served(served, given, split, listen)
            else:
                who, settings, evaluation = _local(run, player, given, split, listen)
    except RunStopped as stopped:
        raise RunStopped(stopped.number, _stopped_message(run, player, save)) from None
    summary = {"who": who, "environment": settings.env, "split": split, **evaluation.summary(settings.seed)}
    if save:
        write_json(Path(save), {"summary": summary, "rows": evaluation.rows()})
    return summary


def _stopped_message(run: str, player: str, save: str) -> str:
    """What an evaluation that was stopped leaves behind."""
    text = "the evaluation was stopped and has no result" + (f"; {save} was not written" if save else "")
    verdicts = Path(run) / CACHE
    if run and not player and verdicts.is_file():
        text += f"; verdicts of the judge are kept in {verdicts} and are not asked for again"
    return text


def compare_policies(
    run: str, split: str, given: Mapping[str, Any], served: ServedPolicy, listen: Listener = silent
) -> list[dict[str, Any]]:
    """The summaries of a run's model and of a served one on the same tasks."""
    settings, _ = select_policy(run, given)
    shared = {name: getattr(settings, name) for name in SHARED}
    # the server first: one that does not answer is refused before the run's own model has played
    theirs = evaluate_policy("", "", split, {**shared, **given}, served, listen)
    return [evaluate_policy(run, "", split, given), theirs]


def select_policy(run: str, given: Mapping[str, Any]) -> tuple[Settings, Path | None]:
    """The settings of a run with ``given`` on top, and the folder of its model."""
    if not run:
        return resolve_settings(given), None
    directory = RunDir.open(run)
    folder = next((p for p in (directory.model, directory.path / "initial") if p.is_dir()), None)
    if folder is None:
        raise SettingError(f"the run {run} has no model yet; `turnwise resume {run}` continues it")
    extra = {k: v for k, v in given.items() if k not in ("method", "method_options")}
    return Settings.of({**directory.metadata()["settings"], **extra}), folder


# ------------------------------------------------------------------------ who plays


def _local(
    run: str, player: str, given: Mapping[str, Any], split: str, listen: Listener
) -> tuple[str, Settings, Evaluation]:
    settings, folder = select_policy(run, given)
    env_spec = _env_spec(settings)
    check_reachable(settings)  # before torch is imported
    if player:
        env_spec.require_policy(player)
        evaluation = _scripted(env_spec, player, split, listen)
    else:
        check_device(settings.device)
        if folder is None:
            if settings.model.tiny:
                raise SettingError(
                    "say what to evaluate: a run directory, --model PATH, --policy URL, or --player oracle"
                )
            check_model_name(settings.model)
        evaluation = _model(env_spec, folder, split, Path(run) if run else None, listen)
    return player or run or str(settings.model), settings, evaluation


def _scripted(env_spec: EnvSpec, player: str, split: str, listen: Listener) -> Evaluation:
    from turnwise.training import build

    s, renderer = env_spec.settings, Renderer(build.byte_tokenizer())

    def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
        return play_scripted(player, env_spec.make(task), key, task, renderer, env_spec.scripted_limits)

    async def play() -> Evaluation:
        played = await evaluate(env_spec.first_tasks(split, s.eval_tasks), s.eval_samples, one)
        return await scored(played, scorer)

    with _scorers(env_spec, renderer.decode, _no_policy, None, listen) as scorer:
        return run_async(play())


def _model(env_spec: EnvSpec, folder: Path | None, split: str, run: Path | None, listen: Listener) -> Evaluation:
    from turnwise.training import build, engines
    from turnwise.training.engines import sampling_cache

    s = env_spec.settings
    tokenizer = build.load_tokenizer(s, env_spec, folder)
    renderer = build.make_renderer(s, tokenizer)
    model = build.load_model(s, len(tokenizer), folder)
    local = engines.make_local_generator(s, model, renderer, dialogues=1, cache=sampling_cache(s, model))
    generator, models = engines.with_local_models(replace(s, helper=""), local, model, renderer)  # nobody helps here
    with _scorers(env_spec, renderer.decode, models, run, listen) as scorer:
        learner = None
        if overrides(env_spec.env_class, "policy_questions"):  # it measures probabilities, which a learner computes
            learner = engines.make_cold_start_learner(s, model, 1)
        return run_async(build.make_evaluator(env_spec, renderer, generator, scorer, learner).run(split))


def _served(
    served: ServedPolicy, given: Mapping[str, Any], split: str, listen: Listener
) -> tuple[str, Settings, Evaluation]:
    if "model" in given:
        raise SettingError("give either --model or --policy; the model's name on the server is --policy-model")
    settings = resolve_settings({"max_tokens": MAX_TOKENS, **given})
    env_spec = _env_spec(settings)
    server = run_async(served.connect(listen))
    with _scorers(env_spec, lambda ids: "", _no_policy, None, listen) as scorer:
        evaluation = run_async(evaluate_served(env_spec, server, split, listen, scorer))
    return f"{server.name} at {server.address.url}", settings, evaluation


async def evaluate_served(
    env_spec: EnvSpec, server: ChatServer, split: str, listen: Listener, scorer: GroupScorer | None = None
) -> Evaluation:
    """Raises ``ServerFault`` if the server broke down: a table of failed episodes would say nothing about the model."""
    s = env_spec.settings
    sampling = Sampling(s.eval_temperature, s.top_p, s.top_k, s.min_p, s.max_tokens)
    limits = replace(env_spec.scripted_limits, history=s.history)
    total, played = s.eval_tasks * s.eval_samples, list[Trajectory]()
    listen("stage", {"name": STAGE, "total": total, "of": "episodes"})

    async def play(key: str, task: Task, sample: int) -> Trajectory:
        session = ChatSession(server, stable_seed(s.seed, "evaluate", key))
        episode = await Episode(key, task, env_spec.try_make(task), session, session, sampling, limits).run()
        played.append(episode)
        done = len(played)  # a server may take minutes: what is known so far is shown
        facts = {"reward": sum(t.reward for t in played) / done, "turns": sum(len(t.turns) for t in played) / done}
        if any(t.success is not None for t in played):
            facts["success"] = sum(bool(t.success) for t in played) / done
        listen("step", {"stage": STAGE, "step": done, "total": total, **facts})
        return episode

    evaluation = await evaluate(env_spec.first_tasks(split, s.eval_tasks), s.eval_samples, play, wave=s.slots)
    if server.fatal is not None:
        raise server.fatal
    return await scored(evaluation, scorer)


# ---------------------------------------------------------------------- what scores


def _env_spec(settings: Settings) -> EnvSpec:
    if not settings.eval_tasks:
        raise SettingError("eval_tasks is 0; write at least 1")
    return EnvSpec.from_settings(settings)


@contextlib.contextmanager
def _scorers(
    env_spec: EnvSpec, decode: Decode, models: LocalModels, folder: Path | None, listen: Listener
) -> Iterator[GroupScorer | None]:
    """Reward functions and judge of an evaluation. ``folder``: a run's, where the judge's verdicts are kept."""
    s = env_spec.settings
    with open_scorer(s, {}, decode) as functions, open_judge(s, models, folder, listen) as judge:
        yield chained(functions, judge)


def _no_policy(address: str) -> ChatModel:
    raise SettingError("the judge is the policy, but what plays here is no local model; write --judge http://HOST/v1")
