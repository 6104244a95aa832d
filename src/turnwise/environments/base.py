"""What every environment class is built on, and what the loop may ask it.

An environment object is one single-use episode: ``reset(seed)`` once, ``step(action)`` until it says it is over. The
class itself answers for the whole family of tasks: which difficulties exist, how a task is drawn, how a good and a
mediocre player would act. Tasks of the two splits are disjoint *by content*, not only by seed.

An environment knows nothing of tokens, log-probabilities or losses.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.errors import SettingError, nearest

SPLITS = ("train", "held_out")
HELD_OUT_SHARE = 10  # one problem in ten belongs to the held-out split


class Environment(ABC):
    """Base class of built-in environments, and the shortest way to write your own."""

    difficulties: ClassVar[tuple[int, ...]] = (1,)
    max_turns: int = 8  # an instance may set its own, by difficulty
    tools: Sequence[dict[str, Any]] = ()  # OpenAI tool schemas, shown to the model by the chat template
    facts: ClassVar[tuple[str, ...]] = ()  # what it may say of a turn in ``info["facts"]``: numbers or labels, by name
    inline: ClassVar[bool] = False  # none of its plain methods ever waits: they are called in place, without a thread
    suggests: ClassVar[Mapping[str, Any]] = {}  # settings of a run for which the user gives none: {"history": 1}
    symbols: ClassVar[str] = ""  # a regular expression: what the tiny tokenizer must not merge with its neighbours

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        if difficulty not in self.difficulties:
            known = ", ".join(map(str, self.difficulties))
            raise SettingError(f"{type(self).__name__} has no difficulty {difficulty!r}; write one of {known}")
        if split not in SPLITS:
            raise SettingError(f"split is {split!r}; {nearest(split, SPLITS)}")
        self.difficulty = difficulty
        self.split = split

    @abstractmethod
    def reset(self, seed: int) -> Sequence[Message]:
        """Begin the episode of this seed; the first messages the agent reads."""

    @abstractmethod
    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Answer one action. May be ``async``."""

    # ---- optional powers: None means "this environment cannot"
    def state_key(self) -> str | None:
        """A key that is equal exactly when two moments of two episodes of one task are the same state."""
        return None

    def snapshot(self) -> Any | None:
        """JSON-able state from which ``restore`` goes on."""
        return None

    def restore(self, snapshot: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be restored")

    def answer(self) -> str | None:
        """The reference answer, in the words an agent would say it in, for credit that measures how likely it has become."""
        return None

    def hint(self) -> str | None:
        """Guidance for this task, asked for after ``reset``: how to go about it, not the answer."""
        return None

    def close(self) -> None:  # noqa: B027 - most episodes hold nothing
        """Release what the episode holds."""

    # ---- players and demonstrations
    def oracle(self) -> Action:
        """The next action of a perfect player, from the current state."""
        raise NotImplementedError(f"{type(self).__name__} has no oracle player")

    def random_action(self, rng: random.Random) -> Action:
        """The next action of a player that knows the format but nothing else."""
        raise NotImplementedError(f"{type(self).__name__} has no random player")

    def demonstrate(self, rng: random.Random) -> Action:
        """The next action of a *mediocre* demonstrator, for an honest cold start. Default: half the oracle."""
        return self.oracle() if rng.random() < 0.5 else self.random_action(rng)


class Quiz(Environment):
    """An episode that ends with one final answer, right or wrong, or when its turns are used up."""

    limits: ClassVar[Mapping[int, int]]  # turns, by difficulty
    seed: int
    turns: int  # taken so far
    said: str  # the final answer; empty until there is one

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.max_turns = self.limits[difficulty]

    def begin(self, seed: int) -> None:
        """Back to the first turn. A subclass also draws the problem of this seed."""
        self.seed, self.turns, self.said = seed, 0, ""

    @property
    @abstractmethod
    def right(self) -> str:
        """The final answer that wins."""

    @property
    def won(self) -> bool:
        return self.said == self.right

    @property
    def over(self) -> bool:
        return bool(self.said) or self.turns >= self.max_turns

    def reply(
        self, messages: Sequence[Message], reward: float = 0.0, told: Mapping[str, float] | None = None, **counts: int
    ) -> Step:
        """A step, with the facts ``told`` of the turn; the last one tells whether the answer was right."""
        info: dict[str, Any] = {
            **counts,
            **({"facts": told} if told else {}),
            **({"success": self.won} if self.over else {}),
        }
        return Step(messages, reward, bool(self.said), self.over and not self.said, info)

    def snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("difficulty", "split", "seed", "turns", "said")}

    def restore(self, snapshot: Any) -> None:
        self.difficulty, self.split = snapshot["difficulty"], snapshot["split"]
        self.max_turns = self.limits[self.difficulty]
        self.begin(snapshot["seed"])
        self.turns, self.said = snapshot["turns"], snapshot["said"]


Problem = TypeVar("Problem")


def held_out(content: str) -> bool:
    """Whether a problem belongs to the held-out split: a fixed tenth, by content."""
    return hashlib.sha256(content.encode()).digest()[0] % HELD_OUT_SHARE == 0


def draw(
    make: Callable[[random.Random], Problem], seed: int, split: str, key: Callable[[Problem], str] = str
) -> Problem:
    """The problem of ``seed`` in ``split``: drawn again until its content falls into that split."""
    rng = random.Random(f"{split}/{seed}")
    for _ in range(10_000):
        problem = make(rng)
        if held_out(key(problem)) == (split != "train"):
            return problem
    raise RuntimeError(f"no {split} problem found for seed {seed}: too few different problems")


def call(tool: str, **arguments: Any) -> Action:
    """An action that calls one tool, in the format the renderer parses."""
    import json

    text = f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"
    return Action(text=text, calls=(ToolCall(tool, arguments),))


def say(text: str) -> Action:
    return Action(text=text)


def user(text: str) -> Message:
    """The answer of an environment that has no tools."""
    return {"role": "user", "content": text}
