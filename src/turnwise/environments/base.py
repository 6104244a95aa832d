"""The base class of environments, with the methods and attributes that the rollout loop reads.

An environment object is one single-use episode: ``reset(seed)`` once, then ``step(action)`` until a step ends the episode. The
class describes the whole distribution of tasks: which difficulties exist, how a task is sampled, how an optimal and an
imperfect scripted policy act. Tasks of the two splits are disjoint *by content*, not only by seed.
An environment knows nothing of tokens, log-probabilities or losses.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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


# for each prompt, the probability of each answer; the rest of 1 belongs to other texts
AnswerChances = Mapping[str, Mapping[str, float]]


class Environment(ABC):
    """Base class of built-in environments, and the shortest way to write your own."""

    difficulties: ClassVar[tuple[int, ...]] = (1,)
    max_turns: int = 8  # an instance may set its own for its difficulty
    tools: Sequence[dict[str, Any]] = ()  # OpenAI tool schemas, shown to the model by the chat template
    facts: ClassVar[tuple[str, ...]] = ()  # names of the numbers or labels that ``info["facts"]`` of a step may hold
    inline: ClassVar[bool] = False  # no plain method ever blocks: they are called directly, without a thread
    suggests: ClassVar[Mapping[str, Any]] = {}  # settings that apply where the user gives none: {"history": 1}
    # the same with a model that is not small: {"max_tokens": 256}
    suggests_for_models: ClassVar[Mapping[str, Any]] = {}
    # the same seed and actions lead to the same replies, so that a fork may play them again. None: tried when a run starts;
    # False: actions have effects outside, which must not happen twice
    deterministic: ClassVar[bool | None] = None
    wordings: ClassVar[int] = 1  # how many wordings of a task ``reset`` can show
    wording: int = 0  # which of them this episode shows; set before ``reset``
    # a regular expression of texts that the tiny tokenizer must not merge with their neighbours
    symbols: ClassVar[str] = ""
    oracle_share: ClassVar[float] = 0.5  # of the turns of a demonstration

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
        """A key that is equal exactly when two episodes of one task are in the same state. None: the latest observation is it."""
        return None

    def snapshot(self) -> Any | None:
        """The state as JSON-serialisable data, from which ``restore`` continues. None: forks play the actions again."""
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

    def solution(self) -> Sequence[str]:
        """The turns of a known solution of this task, read after ``reset``. Empty: ``oracle`` is played, where there is one."""
        return ()

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
        with probability ``oracle_share``, otherwise ``random_action``."""
        return self.oracle() if rng.random() < self.oracle_share else self.random_action(rng)


def overrides(cls: Any, name: str) -> bool:
    """Whether ``cls`` defines method ``name`` itself rather than inheriting the default of :class:`Environment`."""
    method = getattr(cls, name, None)
    return callable(method) and method is not getattr(Environment, name, None)


class LimitedEpisode(Environment):
    """An episode that ends by itself, or has failed at the turn limit.

    A subclass writes ``begin`` and ``act``; this class counts the turns, and answers what comes after the end."""

    limits: ClassVar[Mapping[int, int]] = {}  # turns by difficulty, where they differ
    turns: int = 0  # taken so far
    done: bool = False
    success: bool = False  # of an episode that is done

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        super().__init__(difficulty=difficulty, split=split)
        self.max_turns = self.limits.get(difficulty, self.max_turns)

    @abstractmethod
    def begin(self, seed: int) -> Sequence[Message]:
        """Set up the task of this seed; returns the first messages."""

    @abstractmethod
    def act(self, action: Action) -> Step:
        """Apply an action of an episode that goes on."""

    def succeeded(self) -> bool:
        """Whether an episode that is cut off at the turn limit has succeeded all the same."""
        return False

    def reset(self, seed: int) -> Sequence[Message]:
        self.seed, self.turns, self.done, self.success = seed, 0, False, False
        return self.begin(seed)

    def step(self, action: Action) -> Step:
        if self.done:
            return Step([user_message("it is over.")], terminated=True, info={"success": self.success})
        self.turns += 1
        step = self.act(action)
        if not (step.terminated or step.truncated) and self.turns >= self.max_turns:
            # what the step says of its success itself counts more
            step = replace(step, truncated=True, info={"success": self.succeeded(), **step.info})
        self.done = bool(step.terminated or step.truncated)
        self.success = self.done and bool(step.info.get("success"))
        return step


class WrappedEnvironment(Environment):
    """A class that is put before an environment to change its episodes: ``class KeyDoorPath(ExpertPath, KeyDoor)``."""

    def plain_step(self, action: Action) -> Step:
        """The step of the environment itself."""
        step = super().step(action)  # type: ignore[safe-super]
        assert isinstance(step, Step), f"{type(self).__name__}: its step must not be async"
        return step


class AnsweredEnvironment(Environment):
    """A question with a reference answer, from which the scripted policies follow."""

    @abstractmethod
    def answer(self) -> str: ...

    @abstractmethod
    def other_answer(self, rng: random.Random) -> str:
        """The answer of a random question."""

    def oracle(self) -> Action:
        return text_action(self.answer())

    def random_action(self, rng: random.Random) -> Action:
        return text_action(self.other_answer(rng))

    def demonstrate(self, rng: random.Random) -> Action:
        """Right in half of the episodes. Otherwise a near miss of a whole number, so that an imitator must still read the
        question, or the answer of a random one."""
        if rng.random() < 0.5:
            return self.oracle()
        if re.fullmatch(r"-?[0-9]{1,9}", self.answer()):
            return text_action(str(int(self.answer()) + rng.choice((-10, -2, -1, 1, 2, 10))))
        return self.random_action(rng)


Problem = TypeVar("Problem")


def is_held_out(content: str) -> bool:
    """Whether a problem belongs to the held-out split: a fixed tenth, by a hash of its content."""
    # not hash(): that of a text differs between processes
    return hashlib.sha256(content.encode()).digest()[0] % HELD_OUT_SHARE == 0


def sample_problem(
    make: Callable[[random.Random], Problem], seed: int, split: str, key: Callable[[Problem], str] = str
) -> Problem:
    """The problem of ``seed`` in ``split``: ``make`` is called until the content of its problem falls into that split."""
    # a text seeds by its digest, so a seed is the same task in every process
    rng = random.Random(f"{split}/{seed}")
    for _ in range(10_000):
        problem = make(rng)
        if is_held_out(key(problem)) == (split != "train"):
            return problem
    raise RuntimeError(f"no {split} problem found for seed {seed}: too few different problems")


def split_by_content(tasks: Iterable[Problem], content: Callable[[Problem], str]) -> dict[str, list[Problem]]:
    """Listed tasks by split. Where one split would be empty, it has the tasks of the other."""
    splits: dict[str, list[Problem]] = {split: [] for split in SPLITS}
    for task in tasks:
        splits["held_out" if is_held_out(content(task)) else "train"].append(task)
    # a file of few rows may leave one split empty: better its tasks twice than none
    train, held_out = splits.values()
    return {"train": train or held_out, "held_out": held_out or train}


def listed_task(tasks: Mapping[str, Sequence[Problem]], split: str, seed: int) -> Problem:
    """The task of a seed among those of its split; after the last one the list begins again."""
    return tasks[split][seed % len(tasks[split])]


def read_json_lines(path: str, expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, one in each line, each after the words that say where it stands; ``expected`` shows in a refusal
    what to write."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise SettingError(f"{path} cannot be read: {fault}") from None
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError:
            # an empty line is no row
            if not line.strip():
                continue
            raise SettingError(f"{where}: not JSON; write {expected} in each line") from None
        if not isinstance(row, dict):
            raise SettingError(f"{where}: not an object; write {expected}")
        yield where, row


# ---- actions and messages


def plain_words(text: str) -> str:
    """A text without case and final dot, as commands are compared."""
    return text.strip().lower().rstrip(".")


def text_action(text: str) -> Action:
    """An action that is plain text."""
    return Action(text=text)


def call_action(*calls: ToolCall) -> Action:
    """An action that makes these calls, in the format the renderer parses."""
    # also as text, so that a cold start can imitate the call token by token
    written = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    return Action("".join(f"<tool_call>{text}</tool_call>" for text in written), calls)


def tool_action(tool: str, **arguments: Any) -> Action:
    """An action that calls one tool."""
    return call_action(ToolCall(tool, arguments))


def user_message(text: str) -> Message:
    """An observation as a user message, for environments without tools."""
    return {"role": "user", "content": text}


def tool_message(name: str, text: str, id: str = "") -> Message:
    """The reply of a tool; ``id`` is that of the call, where it has one."""
    message: Message = {"role": "tool", "name": name, "content": text}
    return message | ({"tool_call_id": id} if id else {})


def tool_schema(name: str, description: str, **types: str) -> dict[str, Any]:
    """The OpenAI schema of a tool that needs all its arguments: ``tool_schema("search", "find notes", query="string")``."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
