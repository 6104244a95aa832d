"""A small correct environment, and one faulty copy for each fault the checker reports."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import numpy as np

from turnwise.core.protocols import Action, Step
from turnwise.environments.base import sample_problem, text_action

SECRET_COUNT = 50_000


class Sound:
    """Say the number back, within three turns. Not a subclass of anything: reset and step are enough."""

    difficulties = (1, 2)
    max_turns = 3
    tools = ()

    def __init__(self, *, difficulty: int = 1, split: str = "train") -> None:
        self.difficulty, self.split = difficulty, split

    def reset(self, seed):
        self.number = sample_problem(lambda rng: rng.randrange(SECRET_COUNT), seed, f"{self.split}")
        self.turns = 0
        return [{"role": "user", "content": f"say {self.number}"}]

    def step(self, action):
        self.turns += 1
        right = action.text == str(self.number)
        over = right or self.turns >= self.max_turns
        info = {"success": right} if over else {}
        text = "right" if right else "say the number"
        return Step([{"role": "user", "content": text}], float(right), right, over and not right, info)

    def oracle(self):
        return text_action(str(self.number))

    def random_action(self, rng):
        return text_action(str(rng.randrange(SECRET_COUNT)))

    def state_key(self):
        return f"{self.number} {self.turns}"

    def snapshot(self):
        return {"number": self.number, "turns": self.turns}

    def restore(self, snapshot):
        self.number, self.turns = snapshot["number"], snapshot["turns"]


class Minimal:
    """Only the required methods: no scripted policies, no splits, no turn limit."""

    def reset(self, seed):
        self.left = 2 + seed % 3
        return [{"role": "user", "content": "speak"}]

    async def step(self, action):
        self.left -= 1
        done = self.left == 0
        return Step([{"role": "user", "content": "go on"}], 0.0, done, False, {"success": False} if done else {})


BROKEN: list[tuple[type, str]] = []


def broken(words: str):
    """Mark a class with the text of the problem that the checker must report."""

    def mark(cls: type) -> type:
        BROKEN.append((cls, words))
        return cls

    return mark


def answer(step: Step, **changes) -> Step:
    """The step with some fields replaced by invalid values."""
    parts = {name: getattr(step, name) for name in ("messages", "reward", "terminated", "truncated", "info")}
    return Step(**{**parts, **changes})


@broken("there is no reset that takes one argument")
class NoReset:
    def step(self, action): ...


@broken("there is no reset that takes one argument")
class ResetWithoutSeed(Sound):
    def reset(self):
        return []


@broken("there is no step that takes one argument")
class StepWithTwo(Sound):
    def step(self, action, extra):
        return super().step(action)


@broken("difficulties is 3; write a tuple")
class NumberOfDifficulties(Sound):
    difficulties = 3


@broken("must return a message")
class CannotBeMade(Sound):
    def __init__(self, *, difficulty=1, split="train"):
        raise RuntimeError("no licence")


@broken("reset returns no messages")
class SaysNothing(Sound):
    def reset(self, seed):
        super().reset(seed)
        return []


@broken("expected a list of messages with role and content")
class ResetText(Sound):
    def reset(self, seed):
        return super().reset(seed)[0]["content"]


@broken("reset returned ['say")
class MessageText(Sound):
    def reset(self, seed):
        return [super().reset(seed)[0]["content"]]


@broken("a message has the role 'bot'")
class OddRole(Sound):
    def step(self, action):
        return answer(super().step(action), messages=[{"role": "bot", "content": "x"}])


@broken("step returned [{'role': 'user', 'content': 7}]")
class NumberContent(Sound):
    def step(self, action):
        return answer(super().step(action), messages=[{"role": "user", "content": 7}])


@broken("step returned 'x'; expected a list of messages")
class TextInTuple(Sound):
    def step(self, action):
        return ("x", 0.0, True, False, {})


@broken("expected a Step or (messages, reward, terminated, truncated, info)")
class OldGymTuple(Sound):
    def step(self, action):
        step = super().step(action)
        return step.messages, step.reward, step.terminated, step.info


@broken("expected a Step or (messages, reward, terminated, truncated, info)")
class LooksLikeAStep(Sound):
    def step(self, action):
        step = super().step(action)
        return SimpleNamespace(**{name: getattr(step, name) for name in Step.__slots__})


@broken("the reward nan; expected a finite number")
class NanReward(Sound):
    def step(self, action):
        return answer(super().step(action), reward=float("nan"))


@broken("the reward inf")
class InfReward(Sound):
    def step(self, action):
        return answer(super().step(action), reward=float("inf"))


@broken("the reward '1'")
class TextReward(Sound):
    def step(self, action):
        return answer(super().step(action), reward="1")


@broken("terminated array([ True, False]); expected True or False")
class Vector(Sound):
    def step(self, action):
        return answer(super().step(action), terminated=np.array([True, False]))


@broken("the info []; expected a dict")
class ListInfo(Sound):
    def step(self, action):
        return answer(super().step(action), info=[])


@broken("info['rewards']['style'] nan; expected a finite number")
class NanNamedReward(Sound):
    def step(self, action):
        step = super().step(action)
        return answer(step, info={**step.info, "rewards": {"style": float("nan")}})


@broken("info['tool_errors'] 'two'; expected a finite number")
class WordCount(Sound):
    def step(self, action):
        step = super().step(action)
        return answer(step, info={**step.info, "tool_errors": "two"})


@broken("info['tool_calls'] True; expected a finite number")
class FlagCount(Sound):
    def step(self, action):
        step = super().step(action)
        return answer(step, info={**step.info, "tool_calls": True})


@broken("does not end within max_turns * 4")
class Endless(Sound):
    def step(self, action):
        return answer(super().step(action), truncated=False)


@broken("max_turns is 0")
class NoTurns(Sound):
    max_turns = 0


@broken("the same seed and actions give another episode")
class Moody(Sound):
    def reset(self, seed):
        messages = super().reset(seed)
        return [{**messages[0], "content": f"{messages[0]['content']} {random.random()}"}]


@broken("all seeds give the same episode")
class Deaf(Sound):
    def reset(self, seed):
        return super().reset(0)


@broken("several episodes at once change each other")
class Shared(Sound):
    def reset(self, seed):
        messages = super().reset(seed)
        type(self).number, self.__dict__ = self.number, {k: v for k, v in self.__dict__.items() if k != "number"}
        return messages


@broken("train and held_out share")
class Leaky(Sound):
    def reset(self, seed):
        split, self.split = self.split, "train"
        messages = super().reset(seed)
        self.split = split
        return messages


@broken("step raises ValueError")
class Strict(Sound):
    def step(self, action):
        int(action.text)
        return super().step(action)


@broken("step raises KeyError")
class BadTool(Sound):
    def step(self, action):
        for call in action.calls:
            call.arguments["code"]
        return super().step(action)


@broken("step raises SystemExit")
class Quits(Sound):
    def step(self, action):
        if action.faults:
            raise SystemExit(1)
        return super().step(action)


@broken("did not return within")
class Hangs(Sound):
    def step(self, action):
        if not action.text:
            threading.Event().wait(30)
        return super().step(action)


@broken("the oracle does not succeed")
class Weak(Sound):
    def oracle(self):
        return text_action("7")


@broken("oracle returns a str")
class TextOracle(Sound):
    def oracle(self):
        return str(self.number)


@broken("random_action() raises IndexError")
class BrokenPlayer(Sound):
    def random_action(self, rng) -> Action:
        return [][0]


@broken("state_key returned [")
class ListKey(Sound):
    def state_key(self):
        return [self.number]


@broken("state_key() raises NotImplementedError")
class UnwrittenKey(Sound):
    def state_key(self):
        raise NotImplementedError


@broken("state_key() changes when asked twice")
class RestlessKey(Sound):
    def state_key(self):
        self.asked = getattr(self, "asked", 0) + 1
        return str(self.asked)


@broken("snapshot() cannot be written as JSON")
class SetSnapshot(Sound):
    def snapshot(self):
        return {self.number}


@broken("an episode restored from its snapshot continues differently")
class ForgetfulRestore(Sound):
    def restore(self, snapshot):
        super().restore({**snapshot, "turns": 0})


@broken("a snapshot changes when its episode continues")
class LiveSnapshot(Sound):
    def __init__(self, *, difficulty=1, split="train"):
        super().__init__(difficulty=difficulty, split=split)
        self.live = {}

    def step(self, action):
        step = super().step(action)
        self.live.update(super().snapshot())
        return step

    def snapshot(self):
        self.live.update(super().snapshot())
        return self.live


@broken("restore() raises")
class NoRestore(Sound):
    def restore(self, snapshot):
        raise KeyError("number")


@broken("a tool is {'name': 'search'}")
class FlatTool(Sound):
    tools = ({"name": "search"},)


@broken("must be a JSON schema of type 'object'")
class ToolWithoutParameters(Sound):
    tools = ({"type": "function", "function": {"name": "search"}},)


@broken("requires ['q'], which are not among its properties")
class ToolWithUnknownRequired(Sound):
    tools = ({"type": "function", "function": {"name": "search", "parameters": {
        "type": "object", "properties": {"query": {}}, "required": ["q"]}}},)  # fmt: skip


@broken("info['success'] of the last step is missing")
class NoVerdict(Sound):
    def step(self, action):
        return answer(super().step(action), info={})


@broken("info['success'] of the last step is 1.0")
class NumberVerdict(Sound):
    def step(self, action):
        return answer(super().step(action), info={"success": 1.0})
