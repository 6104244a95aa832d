"""What scores the groups of a run besides its environment: reward functions over rows of a file or episodes, and a judge.

Imports no torch: functions are loaded and a judge is reached before anything else is. Knows no method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.chat import ChatModel
from turnwise.core.protocols import GroupScorer, Listener
from turnwise.core.records import Group
from turnwise.data.prompts import PromptFile, PromptRow
from turnwise.engines.remote.chat_server import ChatServer, RetryPolicy, find_model
from turnwise.engines.remote.http import ServerAddress
from turnwise.environments.base import overrides
from turnwise.environments.calls import call_here
from turnwise.errors import ServerFault, SettingError
from turnwise.rewards.conventions import AnswerGroup, AnswerSample
from turnwise.rewards.functions import RewardFunction, RewardLimits, check_rewards, open_rewards
from turnwise.rewards.judge import VerdictCache
from turnwise.rewards.spec import parse_rewards
from turnwise.rollout.scoring import FirstErrorScorer, FunctionScorer, JudgeScorer, ScorerChain
from turnwise.training.interrupt import run_async
from turnwise.training.plan import prompt_data, read_rubric
from turnwise.training.watch import silent

Decode = Callable[[Sequence[int]], str]
TASK_COLUMNS = ("difficulty", "seed", "split")
POLICY = "policy"  # the judge is the policy that is trained
FIRST_ERROR = "first_error:"  # begins the value that names the folder of a reward model of first wrong steps
CACHE = "judge.sqlite"
PARALLEL = 16
DUMMY = "I do not know."  # an answer to try reward functions on
TRIED_ROWS = 8
PROBE = ({"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"})


def chained(*scorers: GroupScorer | None) -> GroupScorer | None:
    """Those scorers that exist, one after the other; None if there are none."""
    present = tuple(scorer for scorer in scorers if scorer is not None)
    return ScorerChain(present) if len(present) > 1 else next(iter(present), None)


# ---------------------------------------------------------------- reward functions


def _open_functions(settings: Settings, objects: Mapping[str, Callable[..., Any]]) -> tuple[RewardFunction, ...]:
    limits = RewardLimits(settings.reward_seconds, settings.reward_memory)
    return open_rewards(parse_rewards(settings.reward), limits, objects)


def check_reward_functions(settings: Settings, env_class: type, objects: Mapping[str, Callable[..., Any]]) -> None:
    """Load every reward function once, and refuse what cannot be called with the columns there are; or what fails on the first
    row, where there are rows: it would fail on all of them after the model was loaded."""
    data = prompt_data(settings) if settings.uses_prompts else None
    if data is not None:
        columns = data.columns
    else:
        columns = frozenset((*TASK_COLUMNS, *(("answer", "ground_truth") if overrides(env_class, "answer") else ())))
    functions = _open_functions(settings, objects)
    try:
        check_rewards(functions, columns)
        if data is not None and settings.reward_failure == "fail":
            _try_rewards(functions, data.file, settings.reward_seconds, bool(settings.judge))
    finally:
        for function in functions:
            function.close()


def _try_rewards(functions: Sequence[RewardFunction], file: PromptFile, seconds: float, judged: bool) -> None:
    """Score answers to the first row; to further ones while no function applies, which is so for some rows of a mixture."""
    rows = [file.rows[i] for i in range(min(TRIED_ROWS, len(file.rows)))]
    if not any(_scores(functions, file, row, seconds) for row in rows) and not judged:
        raise SettingError(
            f"no reward function gives a number for the first {len(rows)} rows of {file.path}: all return None, as a function "
            "without `return` does; return a number, and None only for rows that another function scores"
        )


def _scores(functions: Sequence[RewardFunction], file: PromptFile, row: PromptRow, seconds: float) -> bool:
    """Whether any function gives a number for the reference answer of a row, where it has one, or for a dummy: two answers, since
    a list must be as long."""
    texts, scored = (DUMMY if row.answer is None else row.answer, DUMMY), False
    samples = tuple(AnswerSample(text, [{"role": "assistant", "content": text}]) for text in texts)
    answers = AnswerGroup(row.prompt if isinstance(row.prompt, str) else list(row.prompt), samples, row.columns)
    for function in functions:
        score = partial(call_here, function.score, seconds=seconds) if function.runs_here else function.score
        with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop, and a function may start one
            outcomes = thread.submit(score, answers).result()
        scored |= any(outcome.score is not None for outcome in outcomes)
        for text, outcome in zip(texts, outcomes):
            if outcome.fault:
                raise SettingError(
                    f"reward {function.spec.label!r} fails on a row (line {row.line} of {file.path}) with the answer "
                    f"{text!r:.60}: {outcome.fault}; mend the function, or write --reward-failure 0 to give 0 where it fails"
                )
    return scored


@contextlib.contextmanager
def open_scorer(
    settings: Settings, objects: Mapping[str, Callable[..., Any]], decode: Decode
) -> Iterator[FunctionScorer | None]:
    """The reward functions of a run, and the weight of its environment's own reward; None if nothing is to be scored."""
    rows = settings.uses_prompts
    if not settings.reward and (rows or not settings.judge):
        yield None  # beside a judge alone, the environment's own reward is still weighed
        return
    data = prompt_data(settings) if rows else None

    def columns(group: Group) -> tuple[Any, Mapping[str, Any]]:
        """The prompt that a function may ask for, and its columns: those of the row, or what is known of a task."""
        if data is not None:
            row = data.row(group.task)
            return (row.prompt if isinstance(row.prompt, str) else list(row.prompt)), row.columns
        answer = next((decode(t.answer) for t in group.trajectories if t.answer), None)
        named = {} if answer is None else {"answer": answer, "ground_truth": answer}
        return None, {**named, **{name: getattr(group.task, name) for name in TASK_COLUMNS}}

    scorer = FunctionScorer(
        _open_functions(settings, objects),
        columns,
        settings.reward_seconds,
        None if rows else settings.env_reward_weight,
        None if settings.reward_failure == "fail" else float(settings.reward_failure),
    )
    with contextlib.closing(scorer):
        yield scorer


def describe_functions(scorer: FunctionScorer | None) -> list[str]:
    """How each reward function is called, for the log."""
    where = "in this process, where a call that hangs cannot be killed", "in a process of its own"
    return [
        f"reward {f.spec.name}, weight {f.spec.weight:g}: {f.signature.describe()}, {where[not f.runs_here]}"
        for f in (scorer.functions if scorer is not None else ())
    ]


# ----------------------------------------------------------------------- the judge


def check_judge(settings: Settings) -> None:
    """Refuse a judge that cannot be reached, or that gives no verdict on a small example."""
    if settings.judge.startswith(FIRST_ERROR):
        reward_model_folder(settings)
    if not _is_served(settings):
        return
    rubric = read_rubric(settings.judge_rubric)

    async def probe() -> None:
        server = await connect(settings, silent)
        try:
            (outcome,) = await JudgeScorer(server, rubric, settings.judge_mode).judged([PROBE])
        except ServerFault as fault:
            raise SettingError(f"the judge at {settings.judge} does not work: {fault}") from None
        if isinstance(outcome, str):
            raise SettingError(f"the judge {server.name} at {settings.judge} does not work: {outcome}")

    run_async(probe())


def reward_model_folder(settings: Settings) -> Path:
    """The folder of ``first_error:FOLDER``; refuses one that holds no model."""
    folder = Path(settings.judge.removeprefix(FIRST_ERROR))
    if not (folder / "config.json").is_file():
        raise SettingError(f"--judge {settings.judge}: {folder} holds no model; write first_error:runs/NAME/model")
    return folder


def check_reachable(settings: Settings) -> None:
    """Refuse a served judge that does not answer; asks for no verdict."""
    if _is_served(settings):
        run_async(connect(settings, silent))


def _is_served(settings: Settings) -> bool:
    return bool(settings.judge) and settings.judge != POLICY and not settings.judge.startswith(FIRST_ERROR)


async def connect(settings: Settings, listen: Listener) -> ChatServer:
    """The served judge of a run."""
    s = settings
    return await chat_server("judge", s.judge, s.judge_key_env, s.judge_model, s.judge_seconds, PARALLEL, listen)


async def chat_server(
    who: str, url: str, key_variable: str, model: str, seconds: float, parallel: int, listen: Listener
) -> ChatServer:
    """A server after it was reached, with the model to ask. ``key_variable`` names what holds its key."""
    address = ServerAddress.read(url, key_variable, who)
    name = await find_model(address, model, who)
    tell = lambda text: listen("message", {"level": "warning", "text": text})  # noqa: E731
    return ChatServer(address, name, RetryPolicy(seconds), parallel, tell)


@contextlib.contextmanager
def open_judge(
    settings: Settings, policy: Callable[[], ChatModel], folder: Path | None = None, listen: Listener = silent
) -> Iterator[JudgeScorer | FirstErrorScorer | None]:
    """The judge of a run or an evaluation; None without one. ``policy`` makes the policy a chat model, where it judges itself.
    ``folder``: where verdicts are kept; None: in memory."""
    if not settings.judge:
        yield None
        return
    if settings.judge.startswith(FIRST_ERROR):
        with contextlib.closing(FirstErrorScorer(policy())) as first_errors:
            yield first_errors
        return
    judge = policy() if settings.judge == POLICY else run_async(connect(settings, listen))
    # a run that is resumed, or evaluated later, does not ask again for a verdict that it has
    cache = VerdictCache(folder / CACHE if folder else None)
    rubric = read_rubric(settings.judge_rubric)
    with contextlib.closing(JudgeScorer(judge, rubric, settings.judge_mode, settings.judge_weight, cache)) as scorer:
        yield scorer
