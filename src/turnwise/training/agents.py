"""Agents that play the episodes of a run: a function of the user's own, by name or as an object, or a command.

Its tasks are those of the environment, or the rows of ``--data``. Knows no method; says which requirements of methods an episode
that an agent drives cannot meet. ``try_agent`` is ``turnwise check-agent``: tries an agent before a run, with the environment's
scripted policies in place of a model, and says in words what was tried.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import math
import os
import select
import shlex
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from turnwise.config.named_object import GIVEN_OBJECT, importable_name, load_object
from turnwise.config.settings import Settings
from turnwise.core.protocols import Action, Session
from turnwise.core.records import Origin, Sampling, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.environments.calls import call_environment
from turnwise.errors import SettingError
from turnwise.rollout.agent_client import AgentTask, FunctionAgent, open_task
from turnwise.rollout.agent_episode import ENDED_BY, NO_REWARD, AgentEpisode, AgentOutcome
from turnwise.rollout.certificate import certificate, certificate_lines
from turnwise.rollout.episode import EpisodeLimits, fault_words
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import ScriptedSession, next_action, scripted_policy
from turnwise.rollout.strategies import EpisodeRunner
from turnwise.serve.server import EndpointHost, listen_on, read_address
from turnwise.store.database import EpisodeFacts
from turnwise.store.ledger import SqliteLedger
from turnwise.workers.child import end_with_parent
from turnwise.workers.sockets import allow_many_files

if TYPE_CHECKING:
    from turnwise.training.plan import EnvSpec

PREFLIGHT = 10.0  # seconds that an episode before the run may take
TRIED_TASKS = 2  # whose episodes are played before a run
DEMONSTRATION = 120.0  # seconds that a demonstration may take
EXTERNAL = "external"  # the name of agents that live elsewhere
TOKEN_VARIABLE = "TURNWISE_ENDPOINT_TOKEN"
UNKNOWN = '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>'
NONSENSE = ("", "???", UNKNOWN, "<tool_call>{broken", "answer: 0", "x" * 500)
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

    async def play(self, task: AgentTask, episode: AgentEpisode) -> AgentOutcome: ...


@dataclass(frozen=True)
class ReportingAgent:
    """Plays as ``agent`` does; ``tell`` hears of an episode that fails at once."""

    agent: Agent
    tell: Callable[[AgentEpisode, Exception], None]

    @property
    def function(self) -> Any:
        return getattr(self.agent, "function", None)

    async def play(self, task: AgentTask, episode: AgentEpisode) -> AgentOutcome:
        episode.on_failure = partial(self.tell, episode)
        return await self.agent.play(task, episode)


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
    from turnwise.serve.agents import ProcessAgent  # late: only these runs need a server

    program = shlex.split(command)[0]
    if shutil.which(program) is None:
        raise SettingError(
            f"the agent {command!r} is a command, and there is no program {program!r}; or write module:function"
        )
    missing = next((word for word in shlex.split(command)[1:] if word.endswith(".py") and not Path(word).is_file()), "")
    if missing:
        raise SettingError(f"the agent {command!r} names {missing}, which is no file in {Path.cwd()}")
    return ProcessAgent(command)


@cache  # training and evaluation share its endpoint
def external_agent(address: str) -> Agent:
    """The agents that live elsewhere and take episodes at ``address``."""
    from turnwise.serve.agents import ExternalAgent

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


def agent_demonstrator(agent: Agent | None) -> Callable[[Action], str] | None:
    """How the environment's demonstrations are worded for an agent: its function's attribute ``demonstrate``. None: an agent
    without it reads the same messages as the turn loop."""
    return getattr(getattr(agent, "function", None), "demonstrate", None)


def unpaid(spec: EnvSpec) -> str:
    """Why no episode of this agent can ever earn a reward, as far as its code shows it; empty if one can."""
    function = getattr(spec.agent, "function", None)
    if spec.paid_from < math.inf or function is None or not _returns_nothing(function):
        return ""
    name = getattr(function, "__name__", type(function).__name__)
    return (
        f"the agent {name} returns nothing, the rows of {spec.settings.data} pay nothing, and there is no --reward, so no "
        f"episode would have a reward; return a number from {name} (or True, False, or a dict with reward and success), or write "
        "--reward FUNCTION"
    )


def _returns_nothing(function: Any) -> bool:
    """Whether the source of a function has no ``return`` with a value; False where there is no source to read."""
    code = inspect.unwrap(function if inspect.isroutine(function) else type(function).__call__)
    try:
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(defined, ast.FunctionDef | ast.AsyncFunctionDef):
        return False  # a lambda returns
    left: list[ast.AST] = list(defined.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Return) and not (node.value is None or getattr(node.value, "value", node) is None):
            return False
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            left += ast.iter_child_nodes(node)  # what an inner function returns is not the agent's word
    return True


async def _episode(
    agent: Agent,
    episode: AgentEpisode,
    environment: Any,
    task: Task,
    row: Mapping[str, Any] | None = None,
) -> Trajectory:
    """The episode of a task of ``environment`` that the agent plays."""
    patience = episode.limits.environment_seconds

    async def run(playing: AgentEpisode) -> AgentOutcome:
        return await agent.play(await open_task(task, environment, patience, row), playing)

    return await episode.run(run)


async def _close(environment: Any, seconds: float) -> None:
    close, inline = getattr(environment, "close", None), bool(getattr(type(environment), "inline", False))
    if callable(close):
        with contextlib.suppress(Exception):  # a close that fails or hangs must not fail the episode
            await call_environment(close, seconds=seconds, inline=inline)


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
    limits = replace(limits, seconds=DEMONSTRATION)
    episode = AgentEpisode(key, task, session, renderer, Sampling(), limits, paid_from=0)
    played = await _episode(agent, episode, environment, task)
    turns = tuple(replace(turn, logp=(), mass=(), version=()) for turn in played.turns)
    return replace(played, turns=turns, origin=Origin.EXPERT)


def agent_play(
    make: Callable[[Task], Any],
    agent: Agent,
    renderer: Renderer,
    sampling: Callable[[Task], Sampling],
    limits: EpisodeLimits,
    row: Callable[[Task], Any],
    paid_from: float = 1,
) -> EpisodeRunner:
    """An ``EpisodeRunner`` that lets the agent play. ``make`` creates the environment of a task, ``row`` its columns."""

    async def play(key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any) -> Trajectory:
        assert not any(more.values()), f"an agent's episode cannot take {sorted(more)}"
        environment = make(task)
        episode = AgentEpisode(key, task, session, renderer, sampling(task), limits, temperature_scale, paid_from)
        try:
            return await _episode(agent, episode, environment, task, row(task))
        finally:
            await _close(environment, limits.environment_seconds)

    return play


def telling(spec: EnvSpec, tell: Callable[[str, str], None]) -> EnvSpec:
    """``spec`` with an agent whose first failure of a kind is told (text, level) in the moment it happens."""
    levels = set[str]()

    def first(episode: AgentEpisode, fault: Exception) -> None:
        broken = episode.broken_contract(fault)
        level = "warning" if broken else "info"
        if level not in levels and not episode.lost:
            levels.add(level)
            tell(f"an episode failed: {broken or fault_words(fault)}; failed episodes are not trained on", level)

    return replace(spec, agent=spec.agent and ReportingAgent(spec.agent, first))


# ----------------------------------------------------------------- tried before a run


def first_fault(spec: EnvSpec) -> str:
    """What the agent does wrong in its first episodes, whatever a policy answers; empty if nothing, or nothing in time. Played in
    a forked process: what an agent opens belongs to the event loop it was opened in, and a run has another."""
    if spec.agent is None or spec.settings.agent == EXTERNAL or not hasattr(os, "fork"):
        return ""
    sys.stdout.flush()
    ours, theirs = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of other threads: the child uses nothing that they may have locked
        child = os.fork()
    if not child:
        try:
            end_with_parent()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.write(theirs, _faults(spec).encode()[: select.PIPE_BUF])
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        ready, _, _ = select.select([ours], [], [], 2 * PREFLIGHT)
        return os.read(ours, select.PIPE_BUF).decode(errors="replace") if ready else ""
    finally:
        os.close(ours)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _faults(spec: EnvSpec) -> str:
    """The first fault, if the episodes of a few tasks all have one: one may fail for reasons of its own."""
    from turnwise.training import build  # late: imports torch

    faults: list[str] = []
    assert spec.agent is not None
    policy = "oracle" if spec.can_demonstrate else "nonsense"

    def note(episode: AgentEpisode, fault: Exception) -> None:
        broken = episode.broken_contract(fault)
        faults.append("" if (policy, broken) == ("nonsense", NO_REWARD) else broken)  # nonsense may be worth no word

    short = replace(spec.settings, agent_seconds=min(spec.settings.agent_seconds, PREFLIGHT))
    tried = replace(spec, settings=short, agent=ReportingAgent(spec.agent, note))
    played = asyncio.run(_try_all(tried, Renderer(build.byte_tokenizer()), policy, TRIED_TASKS))
    return faults[0] if len(faults) == len(played) and all(faults) else ""


@dataclass(frozen=True)
class AgentReport:
    """What was tried, and what is wrong."""

    tried: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def text(self) -> str:
        head = "no problems" if self.ok else f"{len(self.problems)} problems"
        return "\n".join([head, *(f"  problem: {p}" for p in self.problems), *(f"  tried: {t}" for t in self.tried)])


def try_agent(values: Mapping[str, Any], episodes: int = 8) -> AgentReport:
    """Play ``episodes`` episodes with each policy: one that knows the answer, and one that talks nonsense."""
    from turnwise.training import build  # late: imports torch
    from turnwise.training.plan import EnvSpec, resolve_settings  # late: it loads agents by this module

    settings = resolve_settings(values)
    if not settings.agent:
        raise SettingError("no agent to check; write --agent module:function or --agent 'python agent.py'")
    spec = EnvSpec.from_settings(settings)
    renderer = Renderer(build.byte_tokenizer())
    policies = ("oracle", "nonsense") if spec.can_demonstrate else ("nonsense",)

    async def play() -> list[list[Trajectory]]:
        # in one event loop: clients that an agent leaves open are closed in whichever runs when they are collected
        return [await _try_all(spec, renderer, policy, episodes) for policy in (*policies, policies[0])]

    *played, twice = asyncio.run(play())
    return _report(dict(zip(policies, played)), twice, policies[0], spec)


async def _try_all(spec: EnvSpec, renderer: Renderer, policy: str, episodes: int) -> list[Trajectory]:
    """One episode of each task in which ``policy`` answers the agent's calls."""
    agent = spec.agent
    assert agent is not None
    wording = agent_demonstrator(agent) or (lambda action: action.text)

    async def play(number: int, task: Task) -> Trajectory:
        environment, nonsense = spec.try_make(task), iter(NONSENSE * 100)

        async def act() -> Action:
            if policy == "nonsense":
                return Action(next(nonsense))
            scripted = scripted_policy(policy, environment, stable_seed(policy, task.key))
            return Action(wording(await next_action(scripted)))

        session = ScriptedSession(act, renderer, tuple(getattr(environment, "tools", ())))
        limits = replace(spec.scripted_limits, seconds=min(spec.settings.agent_seconds, 60.0))
        episode = AgentEpisode(f"check.{number}", task, session, renderer, Sampling(), limits, 1.0, spec.paid_from)
        try:
            return await _episode(agent, episode, environment, task, spec.columns(task))
        finally:
            await _close(environment, spec.limits.environment_seconds)

    tasks = spec.first_tasks("train", episodes)
    return list(await asyncio.gather(*(play(number, task) for number, task in enumerate(tasks))))


def _report(played: Mapping[str, list[Trajectory]], twice: list[Trajectory], first: str, spec: EnvSpec) -> AgentReport:
    tried, problems = list[str](), [text for text in (unpaid(spec),) if text]
    for policy, episodes in played.items():
        failed = [t.reason for t in episodes if t.status == Status.FAILED]
        refused = [t.reason for t in episodes if ENDED_BY in t.facts]
        rewards = sum(t.reward for t in episodes) / len(episodes)
        tried.append(
            f"{len(episodes)} tasks of {spec.settings.env} with the policy {policy}: {len(failed)} failed, mean reward "
            f"{rewards:.2f}" + ", which reward functions or a judge score in the run" * (spec.paid_from == 0)
        )
        if refused:  # whatever the policy says: the run does not answer a call of the agent
            problems.append(f"with the policy {policy} {len(refused)} of {len(episodes)} episodes: {refused[0]}")
        elif failed and policy != "nonsense":
            problems.append(f"with the policy {policy} {len(failed)} of {len(episodes)} episodes fail: {failed[0]}")
        elif len(failed) == len(episodes) and not any(failed[0] in problem for problem in problems):
            problems.append(
                f"every episode of a policy that talks nonsense fails, and failed episodes are not trained on: {failed[0]}; "
                "catch the model's own mistakes and return a reward"
            )
        unscored = spec.paid_from > 0 and len(failed) < len(episodes)
        if policy == "oracle" and unscored and not any(t.reward > 0 or t.success for t in episodes):
            problems.append(
                "a policy that knows the answer never gets a reward: does the agent return it, or call task.step?"
            )
    rewards_given = {t.reward for episodes in played.values() for t in episodes}
    if spec.paid_from > 0 and len(played) > 1 and len(rewards_given) == 1 and rewards_given != {0.0}:
        problems.append(
            f"a policy that knows the answer and one that talks nonsense get the same reward, {rewards_given.pop():g}: "
            "it does not tell right from wrong, so there is nothing to learn"
        )
    calls, again = (
        [[(turn.context, turn.tokens, turn.reward, turn.restart) for turn in t.turns] for t in episodes]
        for episodes in (played[first], twice)
    )
    if calls != again:
        tried.append("the same tasks again: other calls or rewards, so runs of this agent do not repeat bit for bit")
    else:
        tried.append("the same tasks again: the same calls and rewards")
    rows = [EpisodeFacts(t.status, t.reason, t.sampled, True, t.facts) for t in played[first]]
    tried += certificate_lines(certificate(rows))[:-1]
    return AgentReport(tuple(tried), tuple(problems))


def run_certificate(settings: Settings, ledger: Path) -> dict[str, Any]:
    """The entry of a summary; empty for runs without an agent."""
    if not settings.agent:
        return {}
    with SqliteLedger(ledger, readonly=True) as recorded:
        return {"exactness": certificate(recorded.episode_facts())}
