"""A generative reward model as judge of the way: asks which step of a success was the first wrong one, and records the fact.

Failed episodes and held-out tasks are not asked about. A reply that is no verdict, or an episode that is too long for the reward
model, counts as no error. Knows neither model nor trainer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from turnwise.core.chat import ChatModel
from turnwise.core.records import Group, Sampling, Trajectory
from turnwise.core.seeds import stable_seed
from turnwise.errors import ContextOverflow
from turnwise.rewards.first_error import NO_ERROR, count_steps, question, read_answer, steps_of
from turnwise.rollout.scoring import scorable
from turnwise.rollout.strategies.base import succeeded

FACT = "error"  # the number of the first wrong step, −1 for none
REPLY_TOKENS = 8


@dataclass
class FirstErrorScorer:
    """A ``GroupScorer`` that changes no reward: the fact ``error`` replaces what the environment told."""

    judge: ChatModel
    counts: dict[str, float] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)

    async def score(self, group: Group) -> Group:
        if group.task.split != "train":
            return group
        asked = {i for i in scorable(group) if succeeded(group.trajectories[i])}
        marked = [await self._marked(t) if i in asked else t for i, t in enumerate(group.trajectories)]
        return replace(group, trajectories=tuple(marked))

    async def _marked(self, trajectory: Trajectory) -> Trajectory:
        error = float(await self._first_error(trajectory))
        self._count("flawed", float(error != NO_ERROR))
        turns = tuple(replace(turn, facts={**turn.facts, FACT: error}) for turn in trajectory.turns)
        return replace(trajectory, turns=turns)

    async def _first_error(self, trajectory: Trajectory) -> int:
        lines = steps_of(trajectory.messages)
        messages = question(lines)
        text = str(messages[0]["content"])
        if text not in self.known:
            began, seed = time.perf_counter(), stable_seed("first error", text)
            try:
                reply = await self.judge.reply(messages, Sampling(temperature=0.0, max_tokens=REPLY_TOKENS), seed)
                said = read_answer(reply.text)
            except ContextOverflow:  # longer than what the reward model reads
                said = None
            self._count("calls")
            self._count("failed", float(said is None))
            self._count("seconds", time.perf_counter() - began)
            self.known[text] = NO_ERROR if said is None or said >= count_steps(lines) else said
        else:
            self._count("cached")
        return self.known[text]

    def describe(self) -> str:
        """One line for the log."""
        return "judge: a reward model that names the first wrong step of each success"

    def metrics(self) -> dict[str, float]:
        """Successes asked about and found flawed, replies from memory and without a verdict, seconds, since the last call."""
        counts, self.counts = self.counts, {}
        return {f"judge/{name}": counts.get(name, 0.0) for name in ("calls", "cached", "failed", "flawed", "seconds")}

    def close(self) -> None:
        self.judge.close()

    def _count(self, name: str, amount: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + amount
