"""Rollout strategies: how the trajectories of a group are sampled. Know sessions and trajectories; no engine, no loss.

``tree`` and ``retry`` are imported by those who use them: they know episodes, which know this package.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from turnwise.core.limits import Declared, choice, number
from turnwise.core.protocols import Session
from turnwise.core.records import Group, Origin, Status, Task, Trajectory
from turnwise.errors import RecipeError
from turnwise.rollout.helper import Helper
from turnwise.rollout.sampling_correction import PrefixShifts, SamplingCorrection
from turnwise.rollout.support import Support


class EpisodeRunner(Protocol):
    """Plays one episode: trajectory id, task, session → trajectory. Never raises for an error of the environment."""

    def __call__(
        self, key: str, task: Task, session: Session, temperature_scale: float = 1.0, **more: Any
    ) -> Coroutine[Any, Any, Trajectory]:
        """``temperature_scale`` multiplies the sampling temperature; a value other than 1 is recorded as guidance. ``more``:
        ``fork_from``, a fork point to start from; ``fork_points``, a list that receives those of this episode; ``with_hint``,
        whether the prompt contains the environment's hint; ``support``, other help; ``max_turns``, a limit of its own;
        ``wording``, which wording of the task to show."""
        ...


StepMetrics = Mapping[str, float]
"""Metrics of the last training step (entropy, success ...); empty before the first."""


class OpenSession(Protocol):
    """Opens the i-th session of a group; its ``draft`` uses the same random numbers, possibly at lower precision."""

    def __call__(self, i: int, draft: bool = False) -> Session: ...


@dataclass(frozen=True)
class GroupRequest:
    """One group to grow: ``size`` trajectories of ``task``. ``step`` counts training steps. ``helper``: a model to ask."""

    group: str
    task: Task
    size: int
    open_session: OpenSession
    play: EpisodeRunner
    last_metrics: StepMetrics = field(default_factory=dict)
    step: int = 0
    helper: Helper | None = None

    def sessions(self, count: int | None = None, begin: int = 0) -> list[Session]:
        """Open sessions ``begin``, ``begin`` + 1 ...; as many as the group has trajectories unless told otherwise."""
        return [self.open_session(begin + i) for i in range(self.size if count is None else count)]

    def key(self, i: int) -> str:
        """The id of the i-th trajectory."""
        return f"{self.group}.{i}"

    def grown(self, trajectories: Sequence[Trajectory]) -> Group:
        return Group(self.group, self.task, tuple(trajectories))

    async def play_all(self, sessions: Sequence[Session], first: int = 0, **more: Any) -> list[Trajectory]:
        """Play one episode in each session, concurrently; ids are numbered from ``first``."""
        return await self.play_each(sessions, [more] * len(sessions), first)

    async def play_each(
        self, sessions: Sequence[Session], options: Sequence[Mapping[str, Any]], first: int = 0
    ) -> list[Trajectory]:
        """Play one episode in each session with options of its own, concurrently."""
        plays = (self.play(self.key(first + i), self.task, s, **o) for i, (s, o) in enumerate(zip(sessions, options)))
        return list(await asyncio.gather(*plays))


class Strategy(Declared):
    """Interface: how the episodes of a group are produced. ``begin`` opens all sessions synchronously, before anything is
    awaited, so that a generator knows the whole batch of sessions; the coroutine it returns plays the episodes. A subclass plays
    them in ``grow``."""

    requirements: ClassVar[frozenset[str]] = frozenset()  # what the environment must provide
    idle_without: ClassVar[frozenset[str]] = frozenset()  # what it does nothing without: the run begins, and says so
    reads_rewards: ClassVar[bool] = False  # rewards of some trajectories are read before others are played
    shifts_logits: ClassVar[bool] = False  # only the generator of this process can sample so

    def check_group_size(self, size: int) -> None:
        """Raise if the trunks leave no rollout of a group to fork."""
        if (trunks := getattr(self, "trunks", 0)) >= size:
            raise RecipeError(
                f"{trunks} trunks take a whole group of {size}, so nothing would fork; write --group-size {2 * trunks}, or fewer "
                "trunks"
            )

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self.grow(request, request.sessions())

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        raise NotImplementedError


def park(sessions: Sequence[Session]) -> None:
    """Mark sessions idle until they generate: nobody waits for them."""
    for session in sessions:
        session.park()


def close(sessions: Sequence[Session]) -> None:
    """Close sessions that no episode will use."""
    for session in sessions:
        session.close()


def succeeded(trajectory: Trajectory) -> bool:
    """The environment's verdict; a positive reward where it gives none. An episode that broke has not succeeded."""
    return trajectory.status != Status.FAILED and trajectory.solved


def all_failed(trajectories: Sequence[Trajectory]) -> bool:
    """Whether no trajectory succeeded although at least one was played: a hint does not repair a broken environment."""
    played = [t for t in trajectories if t.status != Status.FAILED and t.origin == Origin.POLICY]
    return bool(played) and not any(map(succeeded, played))


GREEDY_REWARD = "greedy_reward"
DRAFT_TOKENS = "draft_tokens"
FORK_RULES = ("surprise", "even", "every")


class Independent(Strategy):
    """Samples all trajectories independently and concurrently."""

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        return request.grown(await request.play_all(sessions))


class OneTurn(Strategy):
    """Independent, with episodes of one turn from the states of an expert: nothing is played after it."""

    requirements = frozenset({"expert turns"})

    async def grow(self, request: GroupRequest, sessions: Sequence[Session]) -> Group:
        return request.grown(await request.play_all(sessions, max_turns=1))


class EntropyControl(Strategy):
    """Independent, with ``share`` of each group sampled at a temperature scaled by ``hot`` while the policy's entropy is at most
    ``target``, by ``cold`` above it.

    Training on samples of a higher temperature raises the entropy, on those of a lower one reduces it."""

    target: float = 0.5
    hot: float = number(1.2, least=1)
    cold: float = number(0.8, above=0, most=1)
    share: float = number(0.25, least=0, below=1)

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        scale = self.hot if request.last_metrics.get("entropy", 0.0) <= self.target else self.cold
        scaled = int(request.size * self.share)
        # a scale of 1 is left out: what is not scaled is not marked as guided
        options: list[dict[str, Any]] = [{"temperature_scale": scale} if scale != 1 else {}] * scaled
        plain: list[dict[str, Any]] = [{}] * (request.size - scaled)
        return request.grown(await request.play_each(sessions, plain + options))


class Reworded(Strategy):
    """Independent; trajectory i reads wording i mod ``wordings`` of its task, so that one group compares wordings of one task."""

    wordings: int = number(4, least=1)

    requirements = frozenset({"wordings"})

    async def grow(self, request: GroupRequest, sessions: Sequence[Session]) -> Group:
        options = [{"wording": w} if (w := i % self.wordings) else {} for i in range(len(sessions))]
        return request.grown(await request.play_each(sessions, options))


class Hinted(Strategy):
    """Independent; a group without a success gets ``more`` further trajectories (0: as many as the group), sampled with the
    environment's hint in the prompt. Their records do not contain the hint; only their log-probabilities depend on it."""

    more: int = number(0, least=0)

    requirements = frozenset({"hints"})
    reads_rewards = True

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self.grow(request, request.sessions(request.size + (self.more or request.size)))

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        plain_sessions, spare = sessions[: request.size], sessions[request.size :]
        park(spare)
        plain = await request.play_all(plain_sessions)
        if all_failed(plain):
            return request.grown([*plain, *await request.play_all(spare, request.size, with_hint=True)])
        close(spare)
        return request.grown(plain)


class GreedyBaseline(Strategy):
    """Independent, and one rollout of the same task at temperature 0. Its return becomes the fact ``greedy_reward`` of each
    trajectory; it is not part of the group, so nothing is trained on it. Its tokens are counted as drafts.

    If the greedy rollout fails, there is no baseline, and the whole group counts as failed."""

    reads_rewards = True

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        return self.grow(request, request.sessions(request.size + 1))

    async def grow(self, request: GroupRequest, sessions: Sequence[Session]) -> Group:
        alone = request.play(f"{request.group}.greedy", request.task, sessions[-1], temperature_scale=0.0)
        sampled, greedy = await asyncio.gather(request.play_all(sessions[:-1]), alone)
        if greedy.status == Status.FAILED:
            reason = f"the greedy rollout that gives the baseline failed: {greedy.reason}"
            return request.grown([t if t.status == Status.FAILED else t.failed(reason, greedy.lost) for t in sampled])
        facts = {GREEDY_REWARD: float(greedy.reward), DRAFT_TOKENS: greedy.sampled / max(1, len(sampled))}
        return request.grown([replace(t, facts={**t.facts, **facts}) for t in sampled])


class DraftSelection(Strategy):
    """Samples ``drafts`` trajectories (0: four times the group) cheaply, selects the best and the worst by reward, half of the
    group each, and resamples those exactly with the same random numbers. Only these are kept; the fact ``draft`` holds the
    reward of the draft."""

    drafts: int = number(0, least=0)

    reads_rewards = True

    def check_group_size(self, size: int) -> None:
        """Raise if a group of ``size`` needs more trajectories than there are drafts."""
        if 0 < self.drafts < size:
            raise RecipeError(f"{self.drafts} drafts for groups of {size}; write at least as many, or 0")

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        self.check_group_size(request.size)
        count = self.drafts or 4 * request.size
        cheap, exact = ([request.open_session(i, draft) for i in range(count)] for draft in (True, False))
        return self._select(request, cheap, exact)

    async def _select(self, request: GroupRequest, cheap: list[Session], exact: list[Session]) -> Group:
        park(exact)  # they generate nothing before the drafts have ended
        group, task, play = request.group, request.task, request.play
        drafts = await asyncio.gather(*(play(f"{group}.draft{i}", task, s) for i, s in enumerate(cheap)))
        valid = [i for i, t in enumerate(drafts) if t.status != Status.FAILED]
        failed = [i for i in range(len(drafts)) if i not in valid]
        best_and_worst = sorted(extremes([drafts[i].reward for i in valid], request.size))
        # failed drafts fill the group where too few are valid: an exact rollout may succeed
        chosen = [valid[k] for k in best_and_worst] + failed[: request.size - len(best_and_worst)]
        close([session for i, session in enumerate(exact) if i not in chosen])
        played = await asyncio.gather(*(play(request.key(i), task, exact[i]) for i in chosen))
        share = sum(t.sampled for t in drafts) / max(1, len(chosen))  # the cost of the drafts, divided among the chosen
        facts = lambda i: {"draft": float(drafts[i].reward), DRAFT_TOKENS: share}  # noqa: E731
        return request.grown([replace(t, facts={**t.facts, **facts(i)}) for i, t in zip(chosen, played)])


def extremes(values: list[float], size: int) -> list[int]:
    """The indices of the best and the worst half of ``size`` values; ties go to the lower index."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    best = (size + 1) // 2
    return order if len(order) <= size else [*order[:best], *order[len(order) - (size - best) :]]


def shift_logits(session: Session, shift: Any) -> Session:
    """Let a session sample by shifted log-probabilities: those that ``shift`` says."""
    if not hasattr(session, "shift"):  # only the generator of this process can
        name = type(session).__name__
        raise RecipeError(f"{name} cannot sample by other log-probabilities than its model's; leave --generator out")
    session.shift = shift
    return session


class ValueSteered(Strategy):
    """Independent. logit(a) + ``weight`` · (Q(s, a) − mean of Q) for the ``candidates`` most likely tokens, others unchanged:
    evaluations sample so, and with ``rollouts`` the rollouts do too. What is recorded are the log-probabilities of that
    distribution, and steered trajectories are marked as guided."""

    weight: float = number(3.0, least=0)
    candidates: int = number(20, least=1)
    rollouts: bool = False

    shifts_logits = True  # only the generator of this process can sample so

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        if not self.rollouts:
            return request.grown(await request.play_all(sessions))
        for session in sessions:
            self.steer(session)
        played = await request.play_all(sessions)
        return request.grown([replace(t, guidance="steered by values") for t in played])

    def steer(self, session: Session) -> Session:
        return shift_logits(session, self)


ENTROPY_SCALE = ("entropy/middle", "entropy/above", "entropy/below")  # of log H over the tokens of a step


@dataclass(frozen=True)
class TokenTemperature:
    """The temperature of a token is T·(1 + ``tau``·h), with h = ±1 at ``above`` and ``below`` the ``middle`` of log H."""

    tau: float
    middle: float
    above: float
    below: float


class EntropyTemperature(Strategy):
    """Independent. The temperature of each token rises with the policy's entropy there, T·(1 + ``tau``·h): h in [−1, 1] is where
    its log lies among the tokens of the last step, as the method's ``NormalisedEntropy`` tells. What is recorded are the
    log-probabilities of the distribution that was sampled from; rollouts of the first step are plain ones."""

    tau: float = number(0.05, least=0, below=1)

    @property
    def shifts_logits(self) -> bool:  # type: ignore[override]
        return self.tau > 0  # only the generator of this process can sample so

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        middle, above, below = (request.last_metrics.get(name, 0.0) for name in ENTROPY_SCALE)
        if not (self.tau and (above or below)):
            return request.grown(await request.play_all(sessions))
        for session in sessions:
            shift_logits(session, TokenTemperature(self.tau, middle, above, below))
        played = await request.play_all(sessions)
        return request.grown([replace(t, guidance="temperature by entropy") for t in played])


class CorrectedSampling(Strategy):
    """Independent rollouts in waves of ``wave``. After each wave a behaviour policy is fitted to all rollouts of the group so far
    (``rollout/sampling_correction.py``), and the next wave is sampled by it: what is recorded are its log-probabilities, and
    trajectories that it sampled are marked as guided."""

    wave: int = number(2, least=1)
    correction: SamplingCorrection = field(default_factory=SamplingCorrection)

    shifts_logits = True  # only the generator of this process can sample so

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        park(sessions)
        shifts, grown = PrefixShifts(self.correction), list[Trajectory]()
        for first in range(0, len(sessions), self.wave):
            wave = sessions[first : first + self.wave]
            for session in wave if first else ():
                shift_logits(session, shifts)
            made = await request.play_all(wave, first)
            shifts.observe(t for t in made if t.status != Status.FAILED)
            grown += [replace(t, guidance="corrected sampling") if first else t for t in made]
        return request.grown(grown)


class Branch(Strategy):
    """Samples ``trunks`` independent trajectories, then forks the other trajectories of the group from their turns.

    ``where`` selects the turns: ``surprise`` takes those whose first tokens had the lowest log-probability (a sampled estimate
    of the entropy there), ``even`` spreads the forks over the turns, ``every`` assigns them to all turns in order, from the
    first on. A fork at a trunk's first turn would be another trunk, so that turn is excluded."""

    trunks: int = number(2, least=1)
    where: str = choice(*FORK_RULES)
    looks: int = 4  # tokens at the start of a turn whose log-probability counts

    requirements = frozenset({"forks", "later turns"})

    async def grow(self, request: GroupRequest, sessions: list[Session]) -> Group:
        trunk_sessions, fork_sessions = sessions[: self.trunks], sessions[self.trunks :]
        park(fork_sessions)  # they generate nothing before the trunks have ended
        points = [list[Any]() for _ in trunk_sessions]
        trunks = await request.play_each(trunk_sessions, [{"fork_points": listed} for listed in points])
        count = len(fork_sessions)
        origins = self._select(trunks, points, count) or [None] * count  # None: more trunks
        options = [{"fork_from": point} for point in origins]
        return request.grown([*trunks, *await request.play_each(fork_sessions, options, len(trunk_sessions))])

    def _select(self, trunks: Sequence[Trajectory], fork_points: list[list[Any]], count: int) -> list[Any]:
        """``count`` fork points, with repetition; none if no trajectory got beyond its first turn."""
        surprise = lambda turn: -sum(turn.logp[: self.looks]) / max(1, len(turn.logp[: self.looks]))  # noqa: E731
        candidates = [
            (surprise(turn), point)
            for trunk, points in zip(trunks, fork_points)
            if trunk.status != Status.FAILED
            for turn, point in list(zip(trunk.turns, points))[1:]
        ]
        if not candidates or not count:
            return []
        if self.where == "surprise":
            candidates.sort(key=lambda pair: -pair[0])
        elif self.where == "even":
            step = len(candidates) / min(count, len(candidates))
            candidates = [candidates[int(i * step)] for i in range(min(count, len(candidates)))]
        return [candidates[i % len(candidates)][1] for i in range(count)]


MODE = "mode"  # fact: the number of the opening that a trajectory begins with, from 0, the cheapest; −1: none of them
FORCED = "forced"  # fact: 1 where the opening was given


class ForcedModes(Strategy):
    """Of each group ``forced`` rollouts begin with each of the ``openings``, texts separated by |, the cheapest mode first. Their
    ids are context and are not trained on. The other rollouts choose for themselves. Facts: ``mode`` and ``forced``.

    Modes are closed: the last one alone has tools. An episode that begins in another cannot call any, chosen or forced: what it
    writes stays text."""

    openings: str = "answer:|<tool_call>"
    forced: int = 2

    idle_without = frozenset({"tools"})

    def __post_init__(self) -> None:
        if self.forced < 0 or not all(self.texts) or len(set(self.texts)) < 2:
            raise RecipeError(f"need forced >= 0 and two or more different openings, separated by |; got {self}")

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self.openings.split("|"))

    def check_group_size(self, size: int) -> None:
        """Raise if a group has no place for every forced rollout."""
        if self.forced * len(self.texts) > size:
            raise RecipeError(
                f"{self.forced} rollouts in each of {len(self.texts)} modes are more than a group of {size}; write --group-size "
                f"{self.forced * len(self.texts)} or more"
            )

    def begin(self, request: GroupRequest) -> Coroutine[Any, Any, Group]:
        self.check_group_size(request.size)
        return super().begin(request)

    async def grow(self, request: GroupRequest, sessions: Sequence[Session]) -> Group:
        given = [text for text in self.texts for _ in range(self.forced)]
        openings = [*given, *[""] * (len(sessions) - len(given))]
        supports = [{"support": Support(opening=text, without_tools=self.texts[:-1])} for text in openings]
        marked = []
        for t, forced in zip(await request.play_each(sessions, supports), map(bool, openings)):
            said = next((str(m.get("content") or "") for m in t.messages if m.get("role") == "assistant"), "")
            mode = next((n for n, text in enumerate(self.texts) if said.lstrip().startswith(text.strip())), -1)
            marked.append(replace(t, facts={**t.facts, MODE: float(mode), FORCED: float(forced)}))
        return request.grown(marked)


@dataclass(frozen=True)
class Precision:
    """Names as in ``--dtype`` and ``--rollout-dtype``; empty: as the settings say. ``rollouts`` defaults to the learner's dtype;
    ``drafts`` are sampled by a separate engine."""

    learner: str = ""
    rollouts: str = ""
    drafts: str = ""
