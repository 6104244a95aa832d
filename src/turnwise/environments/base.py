"""The base class of environments, with the methods and attributes that the rollout loop reads.

An environment object is one single-use episode: ``reset(seed)`` once, then ``step(action)`` until a step ends the episode. The
class describes the whole distribution of tasks: which difficulties exist, how a task is sampled, how an optimal and an
imperfect scripted policy act. Tasks of the two splits are disjoint *by content*, not only by seed.

An environment knows nothing of tokens, log-probabilities or losses.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from turnwise.core.protocols import Action, Step, ToolCall
from turnwise.core.records import Message
from turnwise.errors import SettingError, nearest

SPLITS = ("train", "held_out")
HELD_OUT_SHARE = 10  # one problem in ten belongs to the held-out split


@dataclass(frozen=True)
class PolicyQuestion:
    """A prompt of an environment and the answers whose probabilities say what a policy does there."""

    prompt: str
    answers: tuple[str, ...]


AnswerChances = Mapping[str, Mapping[str, float]]
"""For each prompt, the probability of each answer; the rest of 1 belongs to other texts."""


class Environment(ABC):
    """Base class of built-in environments, and the shortest way to write your own."""

    difficulties: ClassVar[tuple[int, ...]] = (1,)
    max_turns: int = 8  # an instance may set its own for its difficulty
    tools: Sequence[dict[str, Any]] = ()  # OpenAI tool schemas, shown to the model by the chat template
    facts: ClassVar[tuple[str, ...]] = ()  # names of the numbers or labels that ``info["facts"]`` of a step may hold
    inline: ClassVar[bool] = False  # no plain method ever blocks: they are called directly, without a thread
    suggests: ClassVar[Mapping[str, Any]] = {}  # settings that apply where the user gives none: {"history": 1}
    suggests_for_models: ClassVar[
        Mapping[str, Any]
    ] = {}  # the same with a model that is not small: {"max_tokens": 256}
    deterministic: ClassVar[bool] = False  # the same actions lead to the same state: forks may replay them
    wordings: ClassVar[int] = 1  # how many wordings of a task ``reset`` can show
    wording: int = 0  # which of them this episode shows; set before ``reset``
    symbols: ClassVar[str] = (
        ""  # regular expression of texts that the tiny tokenizer must not merge with their neighbours
    )

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        if difficulty not in self.difficulties:
            offered = ", ".join(map(str, self.difficulties))
            raise SettingError(f"{type(self).__name__} has no difficulty {difficulty!r}; write one of {offered}")
        if split not in SPLITS:
            raise SettingError(f"split is {split!r}; {nearest(split, SPLITS)}")
        self.difficulty = difficulty
        self.split = split

    @abstractmethod
    def reset(self, seed: int) -> Sequence[Message]:
        """Start the episode of this seed; returns the first messages the agent reads."""

    @abstractmethod
    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Apply one action. May be ``async``."""

    # ---- optional: None means that the environment does not support it
    def state_key(self) -> str | None:
        """A key that is equal exactly when two episodes of one task are in the same state."""
        return None

    def snapshot(self) -> Any | None:
        """The state as JSON-serialisable data, from which ``restore`` continues."""
        return None

    def restore(self, snapshot: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be restored")

    def answer(self) -> str | None:
        """The reference answer in the form an agent gives it, for credit that measures its log-probability."""
        return None

    def hint(self) -> str | None:
        """Guidance for this task, read after ``reset``: how to solve it, not the answer."""
        return None

    def turns_to_solve(self) -> float | None:
        """A process verifier: how many turns an optimal policy needs from here. None: not known."""
        return None

    def hints(self) -> Sequence[str]:
        """Hints for this task in tiers, from abstract to concrete, read after ``reset``. Tier k is shown with those before it."""
        hint = self.hint()
        return (hint,) if hint else ()

    def close(self) -> None:  # noqa: B027 - most episodes hold nothing
        """Release the resources of the episode."""

    # ---- what is known of a policy without playing: exact numbers, where the world is small enough to be listed
    @classmethod
    def policy_questions(cls) -> Sequence[PolicyQuestion]:
        """Everything a policy could be asked here; empty where nothing exact is computed."""
        return ()

    @classmethod
    def policy_metrics(cls, chances: AnswerChances) -> Mapping[str, float]:
        """Metrics of a policy that answers the questions with these probabilities."""
        return {}

    # ---- scripted policies
    def oracle(self) -> Action:
        """The next action of an optimal policy in the current state."""
        raise NotImplementedError(f"{type(self).__name__} has no oracle policy: write a method `oracle`")

    def random_action(self, rng: random.Random) -> Action:
        """The next action of a policy that knows only the action format."""
        raise NotImplementedError(f"{type(self).__name__} has no random policy: write a method `random_action`")

    def demonstrate(self, rng: random.Random) -> Action:
        """The next action of an *imperfect* demonstrator, so that a cold start leaves something to learn. Default: ``oracle``
        with probability 0.5, otherwise ``random_action``."""
        return self.oracle() if rng.random() < 0.5 else self.random_action(rng)


def overrides(cls: Any, name: str) -> bool:
    """Whether ``cls`` defines method ``name`` itself rather than inheriting the default of :class:`Environment`."""
    method = getattr(cls, name, None)
    return callable(method) and method is not getattr(Environment, name, None)


class SingleAnswerEnvironment(Environment):
    """An episode that ends with one final answer, right or wrong, or at the turn limit."""

    limits: ClassVar[Mapping[int, int]]  # turns by difficulty
    seed: int
    turns: int  # taken so far
    final_answer: str  # empty until it is given

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.max_turns = self.limits[difficulty]

    def begin(self, seed: int) -> None:
        """Reset to the first turn. A subclass also samples the problem of this seed."""
        self.seed, self.turns, self.final_answer = seed, 0, ""

    @property
    @abstractmethod
    def correct_answer(self) -> str:
        """The final answer that is rewarded."""

    @property
    def succeeded(self) -> bool:
        return self.final_answer == self.correct_answer

    @property
    def is_over(self) -> bool:
        return bool(self.final_answer) or self.turns >= self.max_turns

    def reply(
        self, messages: Sequence[Message], reward: float = 0.0, facts: Mapping[str, float] | None = None, **counts: int
    ) -> Step:
        """A step with the ``facts`` of the turn; the last step of the episode also has ``info["success"]``."""
        info: dict[str, Any] = {
            **counts,
            **({"facts": facts} if facts else {}),
            **({"success": self.succeeded} if self.is_over else {}),
        }
        return Step(messages, reward, bool(self.final_answer), self.is_over and not self.final_answer, info)

    def snapshot(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("difficulty", "split", "seed", "turns")}
        return {**state, "said": self.final_answer}

    def restore(self, snapshot: Any) -> None:
        self.difficulty, self.split = snapshot["difficulty"], snapshot["split"]
        self.max_turns = self.limits[self.difficulty]
        self.begin(snapshot["seed"])
        self.turns, self.final_answer = snapshot["turns"], snapshot["said"]


Problem = TypeVar("Problem")


def is_held_out(content: str) -> bool:
    """Whether a problem belongs to the held-out split: a fixed tenth, by a hash of its content."""
    return hashlib.sha256(content.encode()).digest()[0] % HELD_OUT_SHARE == 0


def sample_problem(
    make: Callable[[random.Random], Problem], seed: int, split: str, key: Callable[[Problem], str] = str
) -> Problem:
    """The problem of ``seed`` in ``split``: ``make`` is called until the content of its problem falls into that split."""
    rng = random.Random(f"{split}/{seed}")
    for _ in range(10_000):
        problem = make(rng)
        if is_held_out(key(problem)) == (split != "train"):
            return problem
    raise RuntimeError(f"no {split} problem found for seed {seed}: too few different problems")


def tool_action(tool: str, **arguments: Any) -> Action:
    """An action that calls one tool, in the format the renderer parses."""
    import json

    text = f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"
    return Action(text=text, calls=(ToolCall(tool, arguments),))


def text_action(text: str) -> Action:
    """An action that is plain text."""
    return Action(text=text)


def user_message(text: str) -> Message:
    """An observation as a user message, for environments without tools."""
    return {"role": "user", "content": text}
