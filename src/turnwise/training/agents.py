"""Agents that play the episodes of a run: a function of the user's own, by name or as an object, or a command.

Its tasks are those of the environment, or the rows of ``--data``. Knows no method; says which requirements of methods an episode
that an agent drives cannot meet.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from turnwise.config.named_object import GIVEN_OBJECT, importable_name, load_object
from turnwise.config.settings import Settings
from turnwise.core.protocols import Action, Session
from turnwise.core.records import Origin, Sampling, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.environments.calls import call_environment
from turnwise.errors import SettingError
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome
from turnwise.rollout.agent_task import AgentTask, FunctionAgent, open_task
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import ScriptedSession, next_action, scripted_policy
from turnwise.rollout.strategies import EpisodeRunner
from turnwise.serve.server import EndpointHost, listen_on, read_address, require_packages
from turnwise.workers.sockets import allow_many_files

DEMONSTRATION = 120.0  # seconds that a demonstration may take
EXTERNAL = "external"  # the name of agents that live elsewhere
TOKEN_VARIABLE = "TURNWISE_ENDPOINT_TOKEN"
UNMET = {  # requirements of methods that need the turn loop of an environment
    "forks": "forks episodes at a turn, and the state of an agent cannot be copied",
    "hints": "writes a hint into the prompt, which the agent writes itself",
    "solutions": "shows or plays the beginning of a solution, and the agent writes its prompts itself",
    "help": "writes help into the prompt, which the agent writes itself",
    "wordings": "changes the wording of a task, which the agent reads itself",
    "turn limits": "limits the turns of an episode, and an agent takes as many as it likes",
    "state": "compares the states of turns, which an agent does not tell",
    "feedback": "masks the environment's observations, which the agent words itself",
}


class Agent(Protocol):
    """Plays an episode by calling its policy."""

    async def play(self, task: AgentTask, episode: AgentEpisode, seconds: float) -> AgentOutcome:
        """``seconds`` limit the agent's own work, not the time an episode waits for it."""
        ...


def load_agent(settings: Settings, given: Callable[..., Any] | None = None) -> Agent | None:
    """The agent of a run; None if its environment is played by the turn loop."""
    if given is not None or settings.agent:
        allow_many_files()  # every episode may keep a connection
    if given is not None:
        return FunctionAgent(given, EndpointHost())
    if not settings.agent:
        return None
    if settings.agent.startswith(GIVEN_OBJECT):
        raise SettingError(
            f"the agent {settings.agent.removeprefix(GIVEN_OBJECT)} was given to train() as an object, which no name refers to; "
            "give it again in Python: resume(run, agent=...), or move it into a module"
        )
    if settings.agent == EXTERNAL:
        return external_agent(settings.agent_address)
    if " " in settings.agent.strip():
        return process_agent(settings.agent)
    function = load_object(settings.agent, f"agent {settings.agent!r}", callable, "function")
    return FunctionAgent(function, EndpointHost())


@cache  # training and evaluation share its endpoint
def process_agent(command: str) -> Agent:
    """The agent that is a command with arguments."""
    from turnwise.serve.process_agent import ProcessAgent  # late: only these runs need a server

    program = shlex.split(command)[0]
    if shutil.which(program) is None:
        raise SettingError(
            f"the agent {command!r} is a command, and there is no program {program!r}; or write module:function"
        )
    require_packages()
    return ProcessAgent(command)


@cache  # training and evaluation share its endpoint
def external_agent(address: str) -> Agent:
    """The agents that live elsewhere and take episodes at ``address``."""
    from turnwise.serve.external_agent import ExternalAgent

    require_packages()
    host, port = read_address(address)
    token = os.environ.get(TOKEN_VARIABLE, "")
    listen_on(host, 0, token).close()  # refuses an address that cannot be used, before anything is built
    return ExternalAgent(host, port, token, lambda text: print(text, file=sys.stderr, flush=True))


def name_agent(values: dict[str, Any]) -> Callable[..., Any] | None:
    """Replace an agent function in ``values`` by its name; returns the function."""
    agent = values.get("agent")
    if agent is None or isinstance(agent, str):
        return None
    if not callable(agent):
        raise SettingError(f"agent is {agent!r:.80}; write module:function, or an async function of (task, client)")
    values["agent"] = importable_name(agent) or f"{GIVEN_OBJECT}{getattr(agent, '__name__', type(agent).__name__)}"
    return agent


def check_agent(requires: frozenset[str], settings: Settings) -> None:
    """Refuse a method whose requirements an agent's episode cannot meet."""
    for word in sorted(requires & UNMET.keys()) if settings.agent else ():
        raise SettingError(f"{settings.title} {UNMET[word]}; leave --agent out, or take another method")


def agent_demonstrator(agent: Agent | None) -> Callable[[Action], str] | None:
    """How the environment's demonstrations are worded for an agent: its function's attribute ``demonstrate``. None: an agent
    without it reads the same messages as the turn loop."""
    return getattr(getattr(agent, "function", None), "demonstrate", None)


async def play_demonstration(
    agent: Agent,
    wording: Callable[[Action], str],
    environment: Any,
    key: str,
    task: Task,
    renderer: Renderer,
    limits: EpisodeLimits,
) -> Trajectory:
    """One episode that the agent plays while the environment's demonstrator answers its calls."""
    act = scripted_policy("demonstrator", environment, stable_seed("demonstrator", task.key, key))

    async def worded() -> Action:
        return Action(wording(await next_action(act)))

    session = ScriptedSession(worded, renderer, tuple(getattr(environment, "tools", ())))
    episode = AgentEpisode(key, task, session, renderer, Sampling(), limits)

    async def run(playing: AgentEpisode) -> AgentOutcome:
        return await agent.play(await open_task(task, environment, limits.environment_seconds), playing, DEMONSTRATION)

    played = await episode.run(run, None)
    turns = tuple(replace(turn, logp=(), mass=(), version=()) for turn in played.turns)
    return replace(played, turns=turns, origin=Origin.EXPERT)


def agent_play(
    make: Callable[[Task], Any],
    agent: Agent,
    renderer: Renderer,
    sampling: Sampling,
    limits: EpisodeLimits,
    seconds: float,
    row: Callable[[Task], Any],
) -> EpisodeRunner:
    """An ``EpisodeRunner`` that lets the agent play. ``make`` creates the environment of a task, ``row`` its columns."""

    async def play(key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any) -> Trajectory:
        assert not any(more.values()), f"an agent's episode cannot take {sorted(more)}"
        environment = make(task)

        async def run(episode: AgentEpisode) -> AgentOutcome:
            opened = await open_task(task, environment, limits.environment_seconds, row(task))
            return await agent.play(opened, episode, seconds)

        episode = AgentEpisode(key, task, session, renderer, sampling, limits, temperature_scale)
        try:
            return await episode.run(run, None)
        finally:
            close, inline = getattr(environment, "close", None), bool(getattr(type(environment), "inline", False))
            if callable(close):
                with contextlib.suppress(Exception):  # a close that fails or hangs must not fail the episode
                    await call_environment(close, seconds=limits.environment_seconds, inline=inline)

    return play
