"""A model as judge of finished groups: asks it, keeps its verdicts, and adds them as the reward ``judge``.

A reply that is no verdict is answered once with what is wrong; then its trajectories fail with the reason. A judge that cannot be
reached any more raises ``ServerFault``: the run stops and can be resumed. Knows neither the server nor the trainer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from turnwise.core.chat import ChatModel
from turnwise.core.records import Group, Message, Sampling
from turnwise.core.seeds import stable_seed
from turnwise.errors import RequestRefused
from turnwise.rewards.judge import JudgeQuestion, Transcript, Verdict, VerdictError, as_text, complaint
from turnwise.rewards.verdict_cache import StoredVerdicts, VerdictCache
from turnwise.rollout.scoring import RewardScore, apply_scores, scorable

REWARD = "judge"
EACH, GROUP = "each", "group"
MODES = (EACH, GROUP)
REPLY_TOKENS, TOKENS_PER_VERDICT = 2048, 128  # room for a judge that thinks first, and for each further verdict
ATTEMPTS = 2


@dataclass
class JudgeScorer:
    """A ``GroupScorer``. ``mode``: ``each`` trajectory alone, or the whole ``group`` in one verdict."""

    judge: ChatModel
    rubric: str
    mode: str = EACH
    weight: float = 1.0
    cache: VerdictCache = field(default_factory=VerdictCache)
    counts: dict[str, float] = field(default_factory=dict)
    _asking: dict[str, asyncio.Lock] = field(default_factory=dict)

    async def score(self, group: Group) -> Group:
        indices = scorable(group)
        transcripts = [group.trajectories[i].messages for i in indices]
        outcomes = await self.judged(transcripts) if transcripts else []
        scores: dict[int, RewardScore] = {}
        for i, outcome in zip(indices, outcomes):
            if isinstance(outcome, str):
                scores[i] = RewardScore(failure=outcome)
                self._count("failed")
            else:
                scores[i] = RewardScore({REWARD: outcome.score}, self.weight * outcome.score)
                self.cache.record(f"{group.id}/{group.trajectories[i].id}", outcome)
        return apply_scores(group, scores)

    async def judged(self, transcripts: Sequence[Transcript]) -> list[Verdict | str]:
        """The verdict on each transcript, or why there is none."""
        sets = [transcripts] if self.mode == GROUP else [[transcript] for transcript in transcripts]
        questions = [JudgeQuestion.about(self.rubric, some, self.mode == GROUP) for some in sets]
        answers = await asyncio.gather(*map(self._answer, questions))
        by_transcript = [answers[0]] * len(transcripts) if self.mode == GROUP else answers
        return [a.failure or a.verdicts[as_text(transcript)] for a, transcript in zip(by_transcript, transcripts)]

    def describe(self) -> str:
        """One line for the log."""
        what = "each episode alone" if self.mode == EACH else "all episodes of a task in one verdict"
        return f"judge: {self.judge.name}, {what}, weight {self.weight:g}"

    def metrics(self) -> dict[str, float]:
        """Questions asked, found in the cache and failed, and the seconds of asking, since the last call."""
        counts, self.counts = self.counts, {}
        return {f"judge/{name}": counts.get(name, 0.0) for name in ("calls", "cached", "failed", "seconds")}

    def close(self) -> None:
        self.judge.close()
        self.cache.close()

    # ------------------------------------------------------------------- asking
    async def _answer(self, question: JudgeQuestion) -> StoredVerdicts:
        """From the cache, or from the judge. An equal question that is being asked at this moment is waited for."""
        key = f"{self.judge.name}/{question.digest}"
        async with self._asking.setdefault(key, asyncio.Lock()):
            stored = self.cache.find(key)
            if stored is None:
                stored = await self._ask(question)
                self.cache.store(key, stored)
            else:
                self._count("cached")
        self._asking.pop(key, None)
        return stored

    async def _ask(self, question: JudgeQuestion) -> StoredVerdicts:
        messages, fault = question.messages(), VerdictError()
        room = REPLY_TOKENS + TOKENS_PER_VERDICT * len(question.letters)
        sampling, seed = Sampling(temperature=0.0, max_tokens=room), stable_seed("judge", question.digest)
        for _ in range(ATTEMPTS):
            began = time.perf_counter()
            try:
                reply = await self.judge.reply(messages, sampling, seed, schema=question.schema())
            except RequestRefused as refused:
                return StoredVerdicts({}, f"the judge refused to judge: {refused}")
            finally:
                self._count("calls")
                self._count("seconds", time.perf_counter() - began)
            try:
                return StoredVerdicts(question.read(reply.text))
            except VerdictError as unreadable:
                fault = unreadable
            messages = [*messages, _said(reply.text), complaint(fault)]
        return StoredVerdicts({}, f"the judge gave no verdict in {ATTEMPTS} attempts: {fault}")

    def _count(self, name: str, amount: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + amount


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text or "(empty)"}
