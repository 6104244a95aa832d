"""Tasksets of verifiers (0.4, ``verifiers.v1``): each task is a prompt, and the task's own reward functions score the answer.

    load("verifiers:my-taskset,tasks=500")

A taskset is an installed package by its name. An episode is one answer; the reward is the weighted sum of the task's rewards, and
an episode succeeds at ``success`` or more (1 where it is left out). A tenth of the tasks, by their key, is held out. Tasks that
need tool servers, a sandbox or a second agent are refused: the package drives these itself, through an endpoint
(``turnwise endpoint``).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, listed_task, split_by_content, user_message
from turnwise.environments.contract import is_finite
from turnwise.environments.families.adapter import import_package, member_class, refusing, split_options
from turnwise.errors import EnvironmentFault, SettingError

OPTIONS = ("tasks", "success")
TASKS = 1000  # of a taskset that are read


class VerifiersEnvironment(Environment):
    """One task of a taskset. ``environment`` makes a subclass for each."""

    max_turns = 1
    suggests: ClassVar[Mapping[str, Any]] = {"context": 1024, "max_tokens": 256}
    tasks: ClassVar[Mapping[str, Sequence[Any]]]  # by split
    success_at: ClassVar[float] = 1.0

    def reset(self, seed: int) -> Sequence[Message]:
        self.task = listed_task(self.tasks, self.split, seed)
        data = self.task.data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        said = [user_message(data.prompt)] if isinstance(data.prompt, str) else data.prompt
        dumped = [message if isinstance(message, dict) else message.model_dump(exclude_none=True) for message in said]
        self.prompt = [*system, *dumped]
        return self.prompt

    async def step(self, action: Action) -> Step:
        # the dialogue as the package's reward functions read it; the last message is the policy's
        vf, types = importlib.import_module("verifiers.v1"), importlib.import_module("verifiers.v1.types")
        kinds = {"system": types.SystemMessage, "user": types.UserMessage, "assistant": types.AssistantMessage}
        messages = [*self.prompt, {"role": "assistant", "content": action.text}]
        nodes = []
        for number, message in enumerate(messages):
            words, last = kinds[message["role"]](content=message["content"]), number == len(messages) - 1
            nodes.append(vf.MessageNode(parent=number - 1 if number else None, message=words, sampled=last))
        recorded = vf.TraceTask(type=type(self.task).__name__, data=self.task.data)
        agent = vf.AgentInfo(config=vf.AgentConfig())
        trace = vf.Trace(task=recorded, agent=agent, nodes=nodes, is_completed=True, ok=True)
        await self.task.score(trace)
        if not is_finite(trace.reward):
            raise EnvironmentFault(f"the rewards of {type(self.task).__name__} add up to {trace.reward!r}")
        named = {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
        info = {"success": trace.reward >= self.success_at, "rewards": named}
        return Step([], float(trace.reward), terminated=True, info=info)


@cache
def environment(spec: str) -> type[VerifiersEnvironment]:
    """The class of a taskset's name."""
    name, options = split_options("verifiers", spec, OPTIONS)
    vf = import_package("verifiers.v1", "verifiers")
    loaders, generic = (importlib.import_module(f"verifiers.v1.utils.{part}") for part in ("loaders", "generic"))
    with refusing(f"verifiers:{name}"):  # not installed, no taskset inside, or its data cannot be had
        kind = loaders.taskset_class(name)
        config = generic.concrete_type(kind, vf.TasksetConfig) or vf.TasksetConfig
        tasks = list(islice(kind(config(id=name)), int(options.get("tasks", TASKS))))
    if not tasks:
        raise SettingError(f"verifiers:{name} has no tasks")
    task, reason = tasks[0], ""  # what one answer does not settle is refused
    if task.toolsets(task.config):
        reason = "starts tool servers"
    elif task.data.prompt is None:
        reason = "has no prompt: a simulated user speaks first"
    elif any("runtime" in inspect.signature(reward).parameters for reward in task.hooks("reward")):
        reason = "scores in a sandbox"
    elif not task.hooks("reward"):
        reason = "has no reward function"
    if reason:
        raise SettingError(f"verifiers:{name} {reason}, which this adapter cannot; let it call `turnwise endpoint`")
    splits, success = split_by_content(tasks, lambda task: str(task.key)), float(options.get("success", 1.0))
    about = f"The taskset {name} of verifiers."
    return member_class("verifiers", spec, VerifiersEnvironment, about, tasks=splits, success_at=success)
