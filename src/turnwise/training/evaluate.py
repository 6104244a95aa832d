"""Evaluate a run, a model, a served model or a scripted policy on an environment: what ``turnwise eval`` calls. Knows no
statistics. Torch is imported only where a model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.chat import ChatModel
from turnwise.core.protocols import GroupScorer, Listener
from turnwise.core.records import Task, Trajectory
from turnwise.errors import SettingError
from turnwise.evaluation.evaluator import scored
from turnwise.evaluation.metrics import Evaluation, evaluate
from turnwise.models.options import is_tiny
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_scripted
from turnwise.store.atomic import write_json
from turnwise.store.rundir import RunDir
from turnwise.training.env_spec import EnvSpec, resolve_settings
from turnwise.training.events import silent
from turnwise.training.interrupt import RunStopped, StopSignals, run_async
from turnwise.training.preflight import check_device, check_model_name
from turnwise.training.rewards import CACHE, Decode, chained, check_reachable, open_judge, open_scorer
from turnwise.training.served_policy import ServedPolicy, evaluate_served, failures

SPLITS = ("held_out", "train")
SHARED = ("env", "difficulty", "seed", "eval_tasks", "eval_samples", "eval_temperature", "max_turns", "env_seconds")


def evaluate_policy(
    run: str,
    player: str,
    split: str,
    overrides: Mapping[str, Any],
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
                who, settings, evaluation = _served(served, overrides, split, listen)
            else:
                who, settings, evaluation = _local(run, player, overrides, split, listen)
    except RunStopped as stopped:
        raise RunStopped(stopped.number, _stopped_message(run, player, save)) from None
    summary = {"who": who, "environment": settings.env, "split": split, **evaluation.summary(settings.seed)}
    if reasons := failures(evaluation):
        summary["failures"] = reasons
        summary["note"] = "; ".join(filter(None, (summary.get("note", ""), _failed_note(reasons))))
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
    run: str, split: str, overrides: Mapping[str, Any], served: ServedPolicy, listen: Listener = silent
) -> list[dict[str, Any]]:
    """The summaries of a run's model and of a served one on the same tasks."""
    settings, _ = select_policy(run, overrides)
    shared = {name: getattr(settings, name) for name in SHARED}
    theirs = evaluate_policy("", "", split, {**shared, **overrides}, served, listen)
    return [evaluate_policy(run, "", split, overrides), theirs]


def _failed_note(reasons: Mapping[str, int]) -> str:
    shown = [f"{count} episodes failed: {reason}" for reason, count in list(reasons.items())[:2]]
    return "; ".join(shown) + ("; ..." if len(reasons) > 2 else "")


def _local(
    run: str, player: str, overrides: Mapping[str, Any], split: str, listen: Listener
) -> tuple[str, Settings, Evaluation]:
    settings, folder = select_policy(run, overrides)
    env_spec = _env_spec(settings)
    check_reachable(settings)  # before torch is imported
    if player:
        env_spec.require_policy(player)
        evaluation = _scripted(env_spec, player, split, listen)
    else:
        check_device(settings.device)
        if folder is None:
            if is_tiny(settings.model):
                raise SettingError(
                    "say what to evaluate: a run directory, --model PATH, --policy URL, or --player oracle"
                )
            check_model_name(settings.model)
        evaluation = _model(env_spec, folder, split, Path(run) if run else None, listen)
    return player or run or settings.model, settings, evaluation


def _served(
    served: ServedPolicy, overrides: Mapping[str, Any], split: str, listen: Listener
) -> tuple[str, Settings, Evaluation]:
    settings = served.settings(overrides)
    env_spec = _env_spec(settings)
    server = run_async(served.connect(listen))
    with _scorers(env_spec, lambda ids: "", _no_policy, None, listen) as scorer:
        evaluation = run_async(evaluate_served(env_spec, server, split, listen, scorer))
    return f"{server.name} at {server.address.url}", settings, evaluation


@contextlib.contextmanager
def _scorers(
    env_spec: EnvSpec, decode: Decode, policy: Callable[[], ChatModel], folder: Path | None, listen: Listener
) -> Iterator[GroupScorer | None]:
    """Reward functions and judge of an evaluation. ``folder``: a run's, where the judge's verdicts are kept."""
    s = env_spec.settings
    with open_scorer(s, {}, decode) as functions, open_judge(s, policy, folder, listen) as judge:
        yield chained(functions, judge)


def _no_policy() -> ChatModel:
    raise SettingError("the judge is the policy, but what plays here is no local model; write --judge http://HOST/v1")


def _env_spec(settings: Settings) -> EnvSpec:
    if not settings.eval_tasks:
        raise SettingError("eval_tasks is 0; write at least 1")
    return EnvSpec.from_settings(settings)


def select_policy(run: str, overrides: Mapping[str, Any]) -> tuple[Settings, Path | None]:
    """The settings of a run with ``overrides`` on top, and the folder of its model."""
    if not run:
        return resolve_settings(overrides), None
    directory = RunDir.open(run)
    folder = next((p for p in (directory.model, directory.path / "initial") if p.is_dir()), None)
    if folder is None:
        raise SettingError(f"the run {run} has no model yet; `turnwise resume {run}` continues it")
    extra = {k: v for k, v in overrides.items() if k not in ("method", "method_options")}
    return Settings.of({**directory.metadata()["settings"], **extra}), folder


def _scripted(env_spec: EnvSpec, player: str, split: str, listen: Listener) -> Evaluation:
    from turnwise.training import build

    s, renderer = env_spec.settings, Renderer(build.byte_tokenizer())

    def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
        return play_scripted(player, env_spec.make(task), key, task, renderer, env_spec.scripted_limits)

    async def play() -> Evaluation:
        played = await evaluate(env_spec.first_tasks(split, s.eval_tasks), s.eval_samples, one)
        return played if scorer is None else await scored(played, scorer)

    with _scorers(env_spec, renderer.decode, _no_policy, None, listen) as scorer:
        return run_async(play())


def _model(env_spec: EnvSpec, folder: Path | None, split: str, run: Path | None, listen: Listener) -> Evaluation:
    from turnwise.training import build, engines
    from turnwise.training.exact_metrics import has_exact_metrics
    from turnwise.training.memory import sampling_cache

    s = env_spec.settings
    tokenizer = build.load_tokenizer(s, env_spec, folder)
    renderer = build.make_renderer(s, tokenizer)
    model = build.load_model(s, len(tokenizer), folder)
    local = engines.make_local_generator(s, model, renderer, dialogues=1, cache=sampling_cache(s, model))
    generator, policy = engines.make_policy_judge(s, local, model, renderer)
    with _scorers(env_spec, renderer.decode, policy, run, listen) as scorer:
        learner = engines.make_cold_start_learner(s, model, 1) if has_exact_metrics(env_spec.env_class) else None
        return run_async(build.make_evaluator(env_spec, renderer, generator, scorer, learner).run(split))
