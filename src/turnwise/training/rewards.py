"""What scores the groups of a run besides its environment, reward functions and a judge; and the model that helps its episodes.

Imports no torch: functions are loaded and servers are reached before anything else is. Knows no method.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.config.named_object import load_object
from turnwise.config.settings import Settings
from turnwise.core.chat import ChatModel
from turnwise.core.protocols import GroupScorer, Listener
from turnwise.core.records import Group
from turnwise.data.prompts import PromptFile, PromptRow
from turnwise.engines.remote.chat_server import ChatServer
from turnwise.environments.base import overrides
from turnwise.environments.calls import call_here
from turnwise.errors import ServerFault, SettingError
from turnwise.rewards.conventions import AnswerGroup, AnswerSample
from turnwise.rewards.functions import RewardFunction, RewardLimits, check_rewards, open_rewards
from turnwise.rewards.judge import AnswerCache
from turnwise.rewards.spec import parse_rewards
from turnwise.rollout.helper import ATTEMPTS, FunctionModel, Helper
from turnwise.rollout.scoring import FirstErrorScorer, FunctionScorer, JudgeScorer, ScorerChain
from turnwise.training.interrupt import run_async
from turnwise.training.plan import prompt_data, read_rubric
from turnwise.training.watch import silent

Decode = Callable[[Sequence[int]], str]
TASK_COLUMNS = ("difficulty", "seed", "split")
POLICY = "policy"  # who is asked is the policy that is trained
FIRST_ERROR = "first_error:"  # begins the value that names the folder of a reward model of first wrong steps
CACHE = "answers.sqlite"
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


# ------------------------------------------------------------- the judge and the helper

LocalModels = Callable[[str], ChatModel]  # a model of this process by the setting: policy, or first_error:FOLDER
SERVER, FUNCTION, FOLDER = "server", "function", "folder"  # what may be asked beside the policy
NAMED = re.compile(r"(?!https?:).+:[A-Za-z_][\w.]*")


def check_models(settings: Settings) -> None:
    """Refuse a judge or helper that cannot be reached or loaded, and a judge that gives no verdict on a small example."""
    s, kinds, rubric = settings, (_kind(settings.judge), _kind(settings.helper)), read_rubric(settings.judge_rubric)
    if kinds == (SERVER, SERVER) and s.helper != s.judge and (s.judge_model or s.judge_key_env):
        raise SettingError(
            f"--judge-model and --judge-key-env are those of one server, and the judge is at {s.judge}, the helper at "
            f"{s.helper}; take one server for both, or let one of them be the policy or a function"
        )
    if kinds[1] == FOLDER:
        raise SettingError("a model of first wrong steps can only judge; write --judge first_error:FOLDER")
    if kinds[0] == FOLDER:
        reward_model_folder(s)
    asked = {who: _remote_model(s, who) for who, kind in zip(("judge", "helper"), kinds) if kind in (SERVER, FUNCTION)}
    if "judge" not in asked:
        return
    try:
        scorer = JudgeScorer(Helper(asked["judge"], who="judge"), rubric, s.judge_mode)
        (outcome,) = run_async(scorer.judged([PROBE]))
    except ServerFault as fault:
        raise SettingError(f"the judge at {s.judge} does not work: {fault}") from None
    if isinstance(outcome, str):
        raise SettingError(f"the judge {asked['judge'].name} at {s.judge} does not work: {outcome}")


def _kind(address: str) -> str:
    """What a judge or helper is; empty for none."""
    if address in ("", POLICY):
        return address
    return FOLDER if address.startswith(FIRST_ERROR) else FUNCTION if NAMED.fullmatch(address) else SERVER


def reward_model_folder(settings: Settings) -> Path:
    """The folder of ``first_error:FOLDER``; refuses one that holds no model."""
    folder = Path(settings.judge.removeprefix(FIRST_ERROR))
    if not (folder / "config.json").is_file():
        raise SettingError(f"--judge {settings.judge}: {folder} holds no model; write first_error:runs/NAME/model")
    return folder


def check_reachable(settings: Settings) -> None:
    """Refuse a served judge that does not answer; asks for no verdict."""
    if _kind(settings.judge) == SERVER:
        _remote_model(settings, "judge")


def _remote_model(settings: Settings, who: str, listen: Listener = silent) -> ChatModel:
    """The ``judge`` or ``helper`` of a run: a server that was reached, or a function of a file."""
    s, address = settings, getattr(settings, who)
    if _kind(address) == FUNCTION:
        return FunctionModel(address, load_object(address, f"{who} {address!r}", callable, "function"), s.judge_seconds)
    connect = ChatServer.reached(
        who, address, s.judge_key_env, s.judge_model, s.judge_seconds, PARALLEL, listen, "judge"
    )
    return run_async(connect)


@contextlib.contextmanager
def open_model(
    settings: Settings, who: str, local: LocalModels, folder: Path | None = None, listen: Listener = silent
) -> Iterator[Helper | None]:
    """The ``judge`` or ``helper`` of a run or an evaluation; None without one. ``folder``: where answers are kept, so that a run
    that is resumed, or evaluated later, does not ask again; None: in memory."""
    kind = _kind(address := getattr(settings, who))
    if not kind:
        yield None
        return
    model = local(address) if kind in (POLICY, FOLDER) else _remote_model(settings, who, listen)
    attempts = 1 if kind == FOLDER else ATTEMPTS  # it samples greedily, in one form
    with contextlib.closing(Helper(model, AnswerCache(folder / CACHE if folder else None), who, attempts)) as helper:
        yield helper


@contextlib.contextmanager
def open_judge(
    settings: Settings, local: LocalModels, folder: Path | None = None, listen: Listener = silent
) -> Iterator[JudgeScorer | FirstErrorScorer | None]:
    """The judge as a scorer."""
    s = settings
    with open_model(s, "judge", local, folder, listen) as judge:
        if judge is None or _kind(s.judge) == FOLDER:
            yield None if judge is None else FirstErrorScorer(judge)
        else:
            yield JudgeScorer(judge, read_rubric(s.judge_rubric), s.judge_mode, s.judge_weight)
