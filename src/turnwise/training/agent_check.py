"""``turnwise check-agent``: tries an agent before a run, with the environment's scripted policies in place of a model, and says
in words what was tried. Trains nothing and loads no model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.core.protocols import Action
from turnwise.core.records import Sampling, Status, Task, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import SettingError
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome
from turnwise.rollout.agent_task import open_task
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import ScriptedSession, next_action, scripted_policy
from turnwise.store.database import EpisodeFacts
from turnwise.training.agents import agent_demonstrator
from turnwise.training.certificate import certificate, certificate_lines
from turnwise.training.env_spec import EnvSpec, resolve_settings

UNKNOWN = '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>'
NONSENSE = ("", "???", UNKNOWN, "<tool_call>{broken", "answer: 0", "x" * 500)


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

    settings = resolve_settings(values)
    if not settings.agent:
        raise SettingError("no agent to check; write --agent module:function or --agent 'python agent.py'")
    spec = EnvSpec.from_settings(settings)
    renderer = Renderer(build.byte_tokenizer())
    policies = ("oracle", "nonsense") if spec.can_demonstrate else ("nonsense",)
    played = {policy: asyncio.run(_play_all(spec, renderer, policy, episodes)) for policy in policies}
    twice = asyncio.run(_play_all(spec, renderer, policies[0], episodes))
    return _report(played, twice, policies[0], settings.env)


async def _play_all(spec: EnvSpec, renderer: Renderer, policy: str, episodes: int) -> list[Trajectory]:
    tasks = spec.first_tasks("train", episodes)
    return list(await asyncio.gather(*(_play(spec, renderer, policy, n, task) for n, task in enumerate(tasks))))


async def _play(spec: EnvSpec, renderer: Renderer, policy: str, number: int, task: Task) -> Trajectory:
    environment, said = spec.try_make(task), iter(NONSENSE * 100)
    wording = agent_demonstrator(spec.agent) or (lambda action: action.text)

    async def act() -> Action:
        if policy == "nonsense":
            return Action(next(said))
        scripted = scripted_policy(policy, environment, stable_seed(policy, task.key))
        return Action(wording(await next_action(scripted)))

    session = ScriptedSession(act, renderer, tuple(getattr(environment, "tools", ())))
    episode = AgentEpisode(f"check.{number}", task, session, renderer, Sampling(), spec.scripted_limits)

    async def run(playing: AgentEpisode) -> AgentOutcome:
        assert spec.agent is not None
        opened = await open_task(task, environment, spec.limits.environment_seconds, spec.columns(task))
        return await spec.agent.play(opened, playing, min(spec.settings.agent_seconds, 60.0))

    try:
        return await episode.run(run, None)
    finally:
        close = getattr(environment, "close", None)
        if callable(close):
            close()


def _report(played: Mapping[str, list[Trajectory]], twice: list[Trajectory], first: str, env: str) -> AgentReport:
    tried, problems = list[str](), list[str]()
    for policy, episodes in played.items():
        failed = [t.reason for t in episodes if t.status == Status.FAILED]
        rewards = sum(t.reward for t in episodes) / len(episodes)
        tried.append(
            f"{len(episodes)} tasks of {env} with the policy {policy}: {len(failed)} failed, mean reward {rewards:.2f}"
        )
        if failed and policy != "nonsense":
            problems.append(f"with the policy {policy} {len(failed)} of {len(episodes)} episodes fail: {failed[0]}")
        elif len(failed) == len(episodes):
            problems.append(
                f"every episode of a policy that talks nonsense fails, and failed episodes are not trained on: {failed[0]}; "
                "catch the model's own mistakes and return a reward"
            )
        if policy == "oracle" and not any(t.reward > 0 or t.success for t in episodes):
            problems.append(
                "a policy that knows the answer never gets a reward: does the agent return it, or call task.step?"
            )
    if [_kept(t) for t in played[first]] != [_kept(t) for t in twice]:
        tried.append("the same tasks again: other calls or rewards, so runs of this agent do not repeat bit for bit")
    else:
        tried.append("the same tasks again: the same calls and rewards")
    rows = [EpisodeFacts(t.status, t.reason, t.sampled, True, t.facts) for t in played[first]]
    tried += certificate_lines(certificate(rows))[:-1]
    return AgentReport(tuple(tried), tuple(problems))


def _kept(t: Trajectory) -> Any:
    return [(turn.context, turn.tokens, turn.reward, turn.restart) for turn in t.turns]
