"""The judge of a run from its settings: a served model or the policy itself, its rubric, its cache. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from turnwise.config.settings import Settings
from turnwise.core.chat import ChatModel
from turnwise.core.protocols import GroupScorer, Listener
from turnwise.engines.remote.chat_server import ChatServer, RetryPolicy, find_model
from turnwise.engines.remote.transport import ServerAddress
from turnwise.errors import ServerFault, SettingError
from turnwise.rewards.judge import DEFAULT_RUBRIC
from turnwise.rewards.verdict_cache import VerdictCache
from turnwise.rollout.first_error_scorer import FirstErrorScorer
from turnwise.rollout.judge_scorer import JudgeScorer
from turnwise.rollout.scoring import ScorerChain
from turnwise.training.events import silent
from turnwise.training.interrupt import run_async

POLICY = "policy"  # the judge is the policy that is trained
FIRST_ERROR = "first_error:"  # begins the value that names the folder of a reward model of first wrong steps
CACHE = "judge.sqlite"
FILE_ENDINGS = (".txt", ".md")
PARALLEL = 16
PROBE = ({"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"})


def with_rubric_text(settings: Settings) -> Settings:
    """The settings with the rubric in words: a run records them, so that a file that changes later cannot change the run."""
    return replace(settings, judge_rubric=read_rubric(settings.judge_rubric)) if settings.judge else settings


def read_rubric(text: str) -> str:
    """The rubric: words, the content of a file, or the default."""
    if not text.strip():
        return DEFAULT_RUBRIC
    if "\n" in text or len(text) > 255 or not (text.endswith(FILE_ENDINGS) or Path(text).is_file()):
        return text
    try:
        words = Path(text).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise SettingError(
            f"the rubric {text!r} cannot be read: {fault}; write a text file, or the rubric itself"
        ) from None
    if not words:
        raise SettingError(f"the rubric {text!r} is empty; write what the judge should look for")
    return words


def check_judge(settings: Settings) -> None:
    """Refuse a judge that cannot be reached, or that gives no verdict on a small example."""
    if not settings.judge or settings.judge == POLICY:
        return
    if settings.judge.startswith(FIRST_ERROR):
        reward_model_folder(settings)
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
    if settings.judge and settings.judge != POLICY and not settings.judge.startswith(FIRST_ERROR):
        run_async(connect(settings, silent))


async def connect(settings: Settings, listen: Listener) -> ChatServer:
    """The served judge of a run, reached and with the model to ask."""
    address = ServerAddress.read(settings.judge, settings.judge_key_env, "judge")
    model = await find_model(address, settings.judge_model, "judge")

    def tell(text: str) -> None:
        listen("message", {"level": "warning", "text": text})

    return ChatServer(address, model, RetryPolicy(settings.judge_seconds), PARALLEL, tell)


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
    cache = VerdictCache(folder / CACHE if folder else None)
    rubric = read_rubric(settings.judge_rubric)
    with contextlib.closing(JudgeScorer(judge, rubric, settings.judge_mode, settings.judge_weight, cache)) as scorer:
        yield scorer


def chained(*scorers: GroupScorer | None) -> GroupScorer | None:
    """Those scorers that exist, one after the other; None if there are none."""
    present = tuple(scorer for scorer in scorers if scorer is not None)
    return ScorerChain(present) if len(present) > 1 else next(iter(present), None)
