"""The records of a run: Task, Turn, Trajectory, Group. Frozen, comparable, serialisable.

A trajectory is one episode. The model reads the concatenation of ``context`` and ``tokens`` over its turns; only ``tokens`` were
sampled and only they are trained on. When a chat template rewrites history, or a context is compacted, the turn has ``restart``
set and its context starts a new sequence: the episode stays one trajectory (it is credited once), the model reads two sequences.

These records do not know how anything is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from turnwise.core.limits import check_limits, number
from turnwise.errors import RecordError

Message = dict[str, Any]
"""An OpenAI-style chat message: ``{"role": "tool", "content": "42"}``."""

Facts = Mapping[str, float | str]
"""Annotations of a turn or a trajectory by name: a number or a label. ``{"planner": 1, "kind": "question"}``"""


class Status(StrEnum):
    """How an episode ended."""

    FINISHED = "finished"  # the environment terminated it
    TRUNCATED = "truncated"  # by a turn, token or context limit
    FAILED = "failed"  # an error of the environment or the engine; never trained on


class Limit(StrEnum):
    """What cut an episode. ``Trajectory.reason`` says it in words, which nothing compares."""

    TURNS = "turns"
    CONTEXT = "context"
    TOKENS = "tokens"  # sampled in an agent's whole episode, or in a window of one
    SECONDS = "seconds"  # of an agent's whole episode
    ENVIRONMENT = "environment"  # a limit of its own


class Origin(StrEnum):
    """Where the tokens come from."""

    POLICY = "policy"
    REPLAY = "replay"
    EXPERT = "expert"


class Stop(StrEnum):
    """Why the sampling of one turn ended."""

    TOKEN = "token"  # an end-of-turn token
    STRING = "string"  # a stop string
    LENGTH = "length"  # the token budget of the turn or the context window
    CANCELLED = "cancelled"
    WINDOW = "window"  # the tokens of its episode's present window; another episode goes on from here


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an environment. ``Task("calculator", seed=7, split="train", difficulty=2)``"""

    environment: str
    seed: int
    split: str = "train"
    difficulty: int = 1

    @property
    def key(self) -> str:
        return f"{self.environment}/{self.split}/{self.difficulty}/{self.seed}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. The recorded log-probability is that of exactly this distribution."""

    temperature: float = number(1.0, least=0, below=math.inf, why="0 is greedy")
    top_p: float = number(1.0, above=0, most=1)
    top_k: int = number(0, least=0, why="0 is off")
    min_p: float = number(0.0, least=0, below=1)
    max_tokens: int = number(64, least=1)
    stop: tuple[str, ...] = ()
    entropy: bool = False  # also report entropy and confidence of the policy at each token, before any truncation
    grammar: str = ""  # what the text of the turn must match, "json_schema:…", "regex:…", "lark:…"; "": nothing
    begun: int = 0  # ids at the end of the prompt that this turn has already: its grammar has read them

    def __post_init__(self) -> None:
        check_limits(self, RecordError)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def whole(self) -> bool:
        """No filter (top-p, top-k, min-p) truncates the distribution."""
        return self.top_p == 1 and self.top_k == 0 and self.min_p == 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A generator's output for one turn: lists of equal length."""

    tokens: Sequence[int]
    logp: Sequence[float]  # under the distribution that was sampled from
    mass: Sequence[float]  # log of the probability mass kept by top-p/k, min-p: 0 without a filter
    version: Sequence[int]  # of the policy that sampled each token
    stop: Stop
    seconds: float = 0.0
    entropy: Sequence[float] = ()  # where ``Sampling.entropy`` asks for it and the generator knows it
    confidence: Sequence[float] = ()  # the same: −mean log p of the five most likely tokens, above its minimum ln 5
    routes: Sequence[bytes] = ()  # as in ``Turn``, of all positions from the first
    kept: Sequence[bytes] = ()  # as in ``Turn``
    grammar: str = ""  # as in ``Turn``: the one that the sampler obeyed
    begun: int = 0  # as in ``Turn``


@dataclass(frozen=True, slots=True)
class Turn:
    """One action of one agent: what it read since its last action, and what it sampled.

    Example: ``Turn(context=(1, 17, 2), tokens=(40, 41, 3), logp=(-.2, -.7, -.01), version=(5, 5, 5), reward=1.0)``"""

    context: Sequence[int]
    tokens: Sequence[int]
    logp: Sequence[float] = ()  # empty for expert turns: their behaviour policy is unknown
    mass: Sequence[float] = ()  # empty = 0 everywhere
    version: Sequence[int] = ()
    reward: float = 0.0
    agent: str = "agent"
    state: str | None = None  # key of the state this turn was taken in, if the environment has one
    restart: bool = False  # context starts a new sequence (history rewritten, compacted, another agent)
    stop: Stop = Stop.TOKEN
    temperature: float = 1.0
    tool_calls: int = 0
    tool_errors: int = 0
    facts: Facts = field(default_factory=dict)  # from the environment (``info["facts"]``)
    masked_context: Sequence[int] = ()  # equally long, the environment's message masked; empty = not requested
    routes: Sequence[bytes] = ()  # experts (int16: layers × k) at each position up to the one before the last token
    # ids (int32) that a filter kept at each token; b"": not recorded, ``mass`` stands for them
    kept: Sequence[bytes] = ()
    # what the text had to match: its mask at every token is the kept set of one that lists none. It is found again from the ids:
    # inside a JSON string a mask holds nearly the whole vocabulary, and a turn has as many masks as tokens
    grammar: str = ""
    begun: int = 0  # ids before ``tokens`` that the grammar has read, where the turn was begun elsewhere (a fork)
    seconds_generating: float = 0.0
    seconds_acting: float = 0.0

    def __post_init__(self) -> None:
        for name in ("logp", "mass", "version", "kept"):
            size = len(getattr(self, name))
            if size not in (0, len(self.tokens)):
                raise RecordError(f"a turn has {len(self.tokens)} tokens but {size} values of {name}")
        if len(self.masked_context) not in (0, len(self.context)):
            raise RecordError(f"a masked context has {len(self.masked_context)} ids, its context {len(self.context)}")


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a trajectory branches off another: after ``token`` sampled tokens of turn ``turn`` of ``parent``."""

    parent: str
    turn: int
    token: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode. ``turns`` are its own; a forked one reads its parent's turns up to the fork as context."""

    id: str
    task: Task
    turns: tuple[Turn, ...]
    rewards: Mapping[str, float] = field(default_factory=dict)  # named components, for logs and multi-reward credit
    status: Status = Status.FINISHED
    reason: str = ""
    origin: Origin = Origin.POLICY
    fork: Fork | None = None
    guidance: str = ""
    success: bool | None = None  # the environment's verdict, if it has one
    end: str | None = None  # key of the state after the last turn, if the environment has one
    facts: Facts = field(default_factory=dict)  # from strategies, buffers and readers (pivot, age, chosen ...)
    answer: Sequence[int] = ()  # the gold answer's ids, where the environment provides it; never shown to the policy
    messages: tuple[Message, ...] = ()  # the dialogue as text, for display; never re-encoded
    limit: Limit | None = None  # that cut it
    lost: bool = False  # failed by the machine, not by what was played: no outcome, so nothing of its group may be used

    @property
    def reward(self) -> float:
        return sum(turn.reward for turn in self.turns)

    @property
    def unfinished(self) -> bool:  # a limit ended it: of turns or context, or of tokens in its last turn
        return self.status == Status.TRUNCATED or bool(self.turns and self.turns[-1].stop == Stop.LENGTH)

    @property
    def solved(self) -> bool:
        """The environment's verdict; where it has none, whether anything was earned."""
        return self.reward > 0 if self.success is None else bool(self.success)

    @property
    def sampled(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    def ids(self) -> list[int]:
        """All ids of the last sequence of this trajectory (its own part)."""
        ids: list[int] = []
        for turn in self.turns:
            if turn.restart:
                ids = []
            ids += [*turn.context, *turn.tokens]
        return ids

    def failed(self, reason: str, lost: bool = False) -> Trajectory:
        return replace(self, status=Status.FAILED, reason=reason, lost=lost)


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one task, which are compared with each other."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        ids = {t.id for t in self.trajectories}
        if len(ids) != len(self.trajectories):
            raise RecordError(f"group {self.id} holds two trajectories with the same id")
        for t in self.trajectories:
            if t.fork is not None and t.fork.parent not in ids:
                raise RecordError(f"trajectory {t.id} forks from {t.fork.parent}, which is not in group {self.id}")

    @property
    def outcomes(self) -> list[bool]:
        """Whether each trajectory that the policy itself sampled is solved."""
        return [t.solved for t in self.trajectories if t.origin == Origin.POLICY]
