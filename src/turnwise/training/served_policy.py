"""Evaluates a model behind an OpenAI-compatible address, with the tasks and records of a run's evaluation.

Needs no tokenizer and imports no torch. Knows no statistics and no HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from turnwise.config.settings import Settings
from turnwise.core.protocols import GroupScorer, Listener
from turnwise.core.records import Sampling, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.engines.remote.chat_server import ChatServer, RetryPolicy, find_model
from turnwise.engines.remote.transport import ServerAddress
from turnwise.errors import SettingError
from turnwise.evaluation.evaluator import scored
from turnwise.evaluation.metrics import Evaluation, evaluate
from turnwise.rollout.chat_session import ChatSession
from turnwise.rollout.episode import Episode
from turnwise.training.env_spec import EnvSpec, resolve_settings

MAX_TOKENS = 1024  # of a turn where the user gives none: an environment suggests what suits the tiny model
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

    def settings(self, overrides: Mapping[str, Any]) -> Settings:
        if "model" in overrides:
            raise SettingError("give either --model or --policy; the model's name on the server is --policy-model")
        return resolve_settings({"max_tokens": MAX_TOKENS, **overrides})

    async def connect(self, listen: Listener) -> ChatServer:
        """The server, after it was reached and the model to ask was found."""
        address = ServerAddress.read(self.url, self.key_variable, "policy")
        model = await find_model(address, self.model, "policy")

        def tell(text: str) -> None:
            listen("message", {"level": "warning", "text": text})

        return ChatServer(address, model, RetryPolicy(self.seconds), self.parallel, tell)


@dataclass
class _Tally:
    """Shows how far an evaluation is."""

    listen: Listener
    total: int
    done: int = 0
    reward: float = 0.0
    successes: int = 0
    reported: int = 0
    turns: int = 0

    def add(self, played: Trajectory) -> None:
        self.done += 1
        self.reward += played.reward
        self.reported += played.success is not None
        self.successes += bool(played.success)
        self.turns += len(played.turns)
        facts = {"reward": self.reward / self.done, "turns": self.turns / self.done}
        success = {"success": self.successes / self.done} if self.reported else {}
        self.listen("step", {"stage": STAGE, "step": self.done, "total": self.total, **success, **facts})


async def evaluate_served(
    env_spec: EnvSpec, server: ChatServer, split: str, listen: Listener, scorer: GroupScorer | None = None
) -> Evaluation:
    """Raises ``ServerFault`` if the server broke down: a table of failed episodes would say nothing about the model."""
    s = env_spec.settings
    sampling = Sampling(s.eval_temperature, s.top_p, s.top_k, s.min_p, s.max_tokens)
    limits = replace(env_spec.scripted_limits, history=s.history)
    tally = _Tally(listen, s.eval_tasks * s.eval_samples)
    listen("stage", {"name": STAGE, "total": tally.total, "of": "episodes"})

    async def play(key: str, task: Task) -> Trajectory:
        session = ChatSession(server, stable_seed(s.seed, "evaluate", key))
        episode = Episode(key, task, env_spec.try_make(task), session, session, sampling, limits)
        played = await episode.run()
        tally.add(played)
        return played

    def one(key: str, task: Task, sample: int) -> Coroutine[Any, Any, Trajectory]:
        return play(key, task)

    evaluation = await evaluate(env_spec.first_tasks(split, s.eval_tasks), s.eval_samples, one, wave=s.slots)
    if server.fatal is not None:
        raise server.fatal
    return evaluation if scorer is None else await scored(evaluation, scorer)


def failures(evaluation: Evaluation) -> dict[str, int]:
    """Why episodes failed, and how many of each reason, the most frequent first."""
    failed = [t.reason for row in evaluation.trajectories for t in row if t.status == Status.FAILED]
    return dict(Counter(failed).most_common(5))
