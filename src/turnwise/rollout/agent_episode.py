"""One episode that an agent drives: its calls become turns of one trajectory, token for token.

The agent is any code that sends chat messages and gets chat messages. It decides what to send, when to stop and what the episode
was worth. An ``AgentEpisode`` stands behind the same ``EpisodeRunner`` as an episode of an environment, so strategies, ledger and
evaluation do not notice. Knows neither the agent's code nor the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from turnwise.core.protocols import OVERRULED, REFUSED, Action, Session
from turnwise.core.records import Completion, Limit, Message, Sampling, Status, Stop, Task, Trajectory, Turn
from turnwise.errors import EnvironmentFault, GrammarError, RenderError, host_fault
from turnwise.rollout.conversion import AS_JSON, as_field
from turnwise.rollout.episode import EpisodeLimits, fault_words, sampled_turn
from turnwise.rollout.lineage import OPENING, SAME_TOKENS, Lineage, Placement, canonical, message_text
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.token_codec import LONG_TEXT
from turnwise.rollout.typed_output import answer_grammar

Result = TypeVar("Result")
MAX_REWARD = 3.4e38  # rewards are float32 on a batch
NO_REWARD = (
    "the agent did not say what its episode was worth; let it return a number, True or False (a command prints it), act with "
    "task.step where --env pays, or write --reward FUNCTION"
)
NO_CALL = "the agent made no call"
OVERFLOW = "context_length_exceeded"  # the code of a call whose messages leave no room
DIFFERENCE = "agent/differs/"  # facts that hold the first differing token of a cause
TURN_LIMIT, TOKEN_LIMIT, CANCELLED = "turn_limit", "token_limit", "cancelled"  # further codes
ENDED_BY = "agent/ended_by"  # the fact that holds the code of the refused call that ended the episode


class CallRefused(EnvironmentFault):
    """A call that gets no answer; ``code`` says why, in the words of the OpenAI protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Misused(AttributeError):
    """An agent asks its task for something that no task has."""


class NoVerdict(EnvironmentFault):
    """What an agent said of its episode is no reward, or says nothing."""


@dataclass(frozen=True)
class CallRequest:
    """What an agent asks for."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    max_tokens: int = 0  # 0: the run's
    n: int = 1
    stop: tuple[str, ...] = ()
    pieces: bool = False  # whether the text of each token is wanted
    most_calls: int | None = None  # of tools in the reply; 0: what looks like a call stays text. None: any number
    overruled: tuple[str, ...] = ()  # fields that the run decides, with values that ask for something else
    grammar: str = ""  # what the answer must match, unless it calls a tool
    forced: str | None = None  # the tool that must be called; "": any


@dataclass(frozen=True)
class CallReply:
    """One answer: the message that the agent may send back, and the ids behind it."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    prompt_ids: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()  # the text of each token, where asked for


@dataclass(frozen=True)
class AgentOutcome:
    """What an agent says of its episode."""

    reward: float | None = None  # None: nothing
    rewards: Mapping[str, float] = field(default_factory=dict)
    success: bool | None = None


def read_outcome(value: Any) -> AgentOutcome:
    """What an agent function returned: a number, True or False, None, or a dict of ``reward``, ``success``, named rewards."""
    if value is None:
        return AgentOutcome()
    if isinstance(value, bool):
        return AgentOutcome(float(value), success=value)
    if isinstance(value, int | float):
        return AgentOutcome(_reward("the reward", value))
    if isinstance(value, Mapping):
        named = {str(k): _reward(str(k), v) for k, v in value.items() if k not in ("reward", "success")}
        total = value.get("reward", sum(named.values()))
        success = None if value.get("success") is None else bool(value["success"])
        return AgentOutcome(_reward("the reward", total), named, success)
    raise NoVerdict(f"the agent returned {value!r:.120}; expected a number, True or False, a dict of rewards, or None")


def _reward(name: str, value: Any) -> float:
    usable = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= MAX_REWARD
    if not usable:
        raise NoVerdict(f"{name} is {value!r:.60}; a reward must be a finite number of at most {MAX_REWARD:g}")
    return float(value)


class OutOfTime(EnvironmentFault):
    """The agent's own work took longer than its budget. Not the ``TimeoutError`` that an agent may raise by itself."""


async def within(seconds: float, work: Awaitable[Result]) -> Result:
    """Await an agent's own work. The time an episode waits for a process or for an agent elsewhere does not count."""
    try:
        async with asyncio.timeout(None if seconds == math.inf else seconds) as budget:
            return await work
    except TimeoutError as late:
        if not budget.expired():
            raise
        raise OutOfTime(f"the agent did not end within {seconds:g} s (--agent-seconds)") from late


class AgentEpisode:
    """Answers the calls of one agent and records them. Calls are answered one after the other, in the order they come."""

    def __init__(
        self,
        key: str,
        task: Task,
        session: Session,
        renderer: Renderer,
        sampling: Sampling,
        limits: EpisodeLimits,
        temperature_scale: float = 1.0,
        paid_from: float = 1,
    ) -> None:
        """``paid_from``: steps in the environment from which on the episode has a reward without a word of the agent. 0: others
        score it; infinite: the tasks are rows, which pay nothing."""
        self.key, self.task, self.session, self.renderer, self.limits = key, task, session, renderer, limits
        self.policy_temperature = sampling.temperature or 1.0
        self.temperature_scale = temperature_scale
        scaled = sampling.temperature * temperature_scale
        self.sampling = sampling if temperature_scale == 1 else replace(sampling, temperature=scaled)
        self.lineage = Lineage(renderer)
        self.turns: list[Turn] = []
        self.rewards: dict[str, float] = {}
        self.success: bool | None = None
        self.limit: Limit | None = None  # that ended the answers to the agent, or its steps in the environment
        self.limit_words = ""
        self.refusals: Counter[str] = Counter()  # by code
        self.refusal: CallRefused | None = None  # of the latest call
        self.overruled: Counter[str] = Counter()
        self.paid_from, self.steps = paid_from, 0  # steps: taken in the environment
        self.ended = self.lost = False
        self.on_failure: Callable[[Exception], None] = lambda fault: (
            None
        )  # hears of it at once, the run at the group's end
        self.messages: tuple[Message, ...] = ()
        self.retries = 0  # calls that were repeated after a lost reply
        self.actions: dict[str, Action] = {}  # what was sampled, by the message that the agent got for it
        self._lock = asyncio.Lock()

    # ------------------------------------------------------------------ calls
    async def call(self, request: CallRequest) -> list[CallReply]:
        """Answer one call. Raises ``CallRefused`` where there is no answer."""
        with self.counting_refusals():
            async with self._lock:
                replies = [await self._answer(request) for _ in range(request.n)]
        self.refusal = None  # the agent went on behind it
        self.overruled.update(request.overruled)
        return replies

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Remember why a call of this episode gets no answer; also one that could not be read."""
        try:
            yield
        except CallRefused as refusal:
            if not self.ended and refusal.code != CANCELLED:  # which the run does, not the agent
                self.refusals[refusal.code] += 1
                self.refusal = refusal
                if refusal.code == OVERFLOW:  # counting tokens meets it, too, and ends nothing
                    self.cut(Limit.CONTEXT, str(refusal))
            raise

    async def count_tokens(self, request: CallRequest) -> int:
        """How many ids the messages take; nothing is sampled."""
        return len((await self._place(request)).dialogue.ids)

    async def _place(self, request: CallRequest) -> Placement:
        """Messages that cannot fit are refused before they are encoded; long ones are encoded while other episodes go on."""
        # what the policy said itself is left out: templates may, too
        size = sum(len(message_text(message)) for message in request.messages if message["role"] != "assistant")
        if size > self.limits.context * self.renderer.longest_token:
            raise self._overflow()
        try:
            if size > LONG_TEXT:
                return await asyncio.to_thread(self.lineage.place, request.messages, request.tools)
            return self.lineage.place(request.messages, request.tools)
        except RenderError as fault:
            raise CallRefused("invalid_messages", str(fault)) from fault

    def _overflow(self) -> CallRefused:
        # the same words for every episode: they are counted by their text
        words = f"the messages leave no room in the context window of {self.limits.context} tokens (--context)"
        return CallRefused(OVERFLOW, words)

    async def _answer(self, request: CallRequest) -> CallReply:
        if self.ended:
            raise CallRefused("episode_ended", "this episode has ended; its reward is final")
        if len(self.turns) >= self.limits.calls:
            words = f"the episode has taken its {self.limits.calls} turns (--max-turns)"
            raise self.cut(Limit.TURNS, words, TURN_LIMIT)
        left = (self.limits.tokens or math.inf) - sum(len(turn.tokens) for turn in self.turns)
        if left < 1:
            raise self.cut(Limit.TOKENS, self._spent, TOKEN_LIMIT)
        placement = await self._place(request)
        if len(placement.dialogue.ids) >= self.limits.context:
            raise self._overflow()
        most = int(min(request.max_tokens or self.sampling.max_tokens, self.sampling.max_tokens, left))
        stop, text = (*self.sampling.stop, *request.stop), request.grammar or self.sampling.grammar
        try:
            grammar = answer_grammar(self.renderer.syntax, request.tools, text, request.forced)
            sampling = replace(self.sampling, max_tokens=most, stop=stop, grammar=grammar)
            completion = await self.session.generate(placement.dialogue.ids, sampling)
        except GrammarError as fault:
            raise CallRefused("invalid_grammar", str(fault)) from fault
        if completion.stop == Stop.CANCELLED:
            raise CallRefused(CANCELLED, "the episode was cancelled")
        if completion.stop == Stop.LENGTH and len(completion.tokens) == left:
            self.cut(Limit.TOKENS, self._spent)  # within this reply, after which an agent may end without another call
        return self._record(placement, completion, request)

    @property
    def _spent(self) -> str:
        return f"the episode has sampled its {self.limits.tokens} tokens (--agent-tokens)"

    def cut(self, limit: Limit, words: str, code: str = "") -> CallRefused:
        """Note which limit the episode has reached; returns the refusal of a call that it ends."""
        self.limit, self.limit_words = limit, words
        return CallRefused(code, words)

    def _record(self, placement: Placement, completion: Completion, request: CallRequest) -> CallReply:
        context, restart = placement.context, placement.restart
        action = self.lineage.sample(placement, completion.tokens)
        action = replace(action, calls=action.calls[: request.most_calls])
        message = reply_message(action, self.renderer, request, len(self.turns))
        self.lineage.record(placement, completion.tokens, message)
        self.actions[canonical(message)] = action
        self.turns.append(
            sampled_turn(
                completion,
                context=context,
                routes=tuple(completion.routes[-(len(context) + len(completion.tokens)) :]),
                restart=restart,
                temperature=self.policy_temperature,
                tool_calls=len(action.calls),
                tool_errors=len(action.faults),
                facts=action.facts,
            )
        )
        self.messages = tuple(placement.dialogue.messages)
        finish = "tool_calls" if action.calls else "length" if completion.stop == Stop.LENGTH else "stop"
        prompt = len(placement.dialogue.ids) - len(completion.tokens)
        pieces = tuple(self.renderer.decode([token]) for token in completion.tokens) if request.pieces else ()
        ids = tuple(placement.dialogue.ids[:prompt])
        return CallReply(message, finish, prompt, tuple(completion.tokens), tuple(completion.logp), ids, pieces)

    # ---------------------------------------------------------------- rewards
    def add_reward(self, reward: float) -> None:
        """Add to the reward of the latest turn."""
        if self.turns and reward:
            self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)

    def finish(self, outcome: AgentOutcome) -> None:
        """Take the agent's verdict; later calls are refused."""
        self.add_reward(outcome.reward or 0.0)
        self.rewards = {**self.rewards, **outcome.rewards}
        self.success = self.success if outcome.success is None else outcome.success
        self.ended = True

    # ---------------------------------------------------------------- episode
    async def run(self, agent: Callable[[AgentEpisode], Awaitable[AgentOutcome]]) -> Trajectory:
        """Let the agent play; never raises for an error of the agent."""
        status, reason = Status.FAILED, "cancelled"
        try:
            outcome = await agent(self)
            if not self.turns:
                raise NoVerdict(NO_CALL)
            if outcome.reward is None and self.steps < self.paid_from:
                raise NoVerdict(NO_REWARD)
            self.finish(outcome)
            status, reason = Status.FINISHED, ""
        except OutOfTime as late:
            reason = str(late)
            self.cut(Limit.SECONDS, reason)
        except Exception as fault:  # raised by the agent, the generator or the machine
            reason, self.lost = fault_words(fault), bool(host_fault(fault))
            self.on_failure(fault)
        finally:
            self.ended = True
            self.session.close()
        cut_off = self.refusal is not None or self.limit == Limit.SECONDS
        if self.limit is not None and (status == Status.FINISHED or (cut_off and self.steps >= max(1, self.paid_from))):
            # cut, and yet its worth is known: from the agent, or step by step from the environment, as in the turn loop
            status, reason = Status.TRUNCATED, str(self.refusal or self.limit_words)
        elif self.refusal is not None and status == Status.FAILED:
            raised = "" if reason == str(self.refusal) else f"; the agent: {reason}"
            reason = f"a refused call ended the episode: {self.refusal} ({self.refusal.code}){raised}"
        return self.trajectory(status, reason)

    def broken_contract(self, fault: Exception) -> str:
        """What is wrong with the agent whatever its policy answers; empty where an answer or the machine may have caused it."""
        if isinstance(fault, NoVerdict):
            return str(fault)
        if isinstance(fault, NameError | ImportError | Misused):
            return f"the agent raised {fault_words(fault)}"
        if self.refusal is not None:
            budget = (TURN_LIMIT, TOKEN_LIMIT, CANCELLED, OVERFLOW)
            return "" if self.refusal.code in budget else f"a call of the agent is refused: {self.refusal}"
        early = not self.turns and not self.lost and not isinstance(fault, OutOfTime)
        awaited = "; write await in front of the call" if "'coroutine' object" in str(fault) else ""
        return f"the agent raised {fault_words(fault)} before its first call was answered{awaited}" if early else ""

    def trajectory(self, status: Status, reason: str) -> Trajectory:
        """The episode as one credited trajectory, however many sequences it needed."""
        scale, causes = self.temperature_scale, self.lineage.causes
        # the certificate: how exactly the calls followed each other, as facts of the trajectory
        facts: dict[str, float | str] = {f"agent/{cause}": float(count) for cause, count in sorted(causes.items())}
        follow_ups = sum(causes.values()) - causes[OPENING]
        facts["agent/exact"] = sum(causes[cause] for cause in SAME_TOKENS) / follow_ups if follow_ups else 1.0
        facts |= {f"{REFUSED}{code}": float(count) for code, count in sorted(self.refusals.items())}
        facts |= {f"{OVERRULED}{name}": float(count) for name, count in sorted(self.overruled.items())}
        if self.refusal is not None and status == Status.FAILED:
            facts[ENDED_BY] = self.refusal.code
        if self.retries:
            facts["agent/retries"] = float(self.retries)
        facts |= {f"{DIFFERENCE}{cause}": text[:200] for cause, text in self.lineage.differences.items()}
        return Trajectory(
            id=self.key,
            task=self.task,
            turns=tuple(self.turns),
            rewards=self.rewards,
            status=status,
            reason=reason,
            success=self.success,
            guidance="" if scale == 1 else f"temperature_scale {scale:g}",
            facts=facts,
            messages=self.messages,
            limit=self.limit,
            lost=self.lost and status == Status.FAILED,
        )


def reply_message(action: Action, renderer: Renderer, request: CallRequest, turn: int) -> Message:
    """The message that an agent gets. Ids of calls are unique within the episode."""
    parsed = renderer.syntax.parse(action.text, request.tools) if action.calls or action.thinking else None
    content = action.text if parsed is None else parsed.text.strip()
    for word in request.stop:
        content = content.split(word)[0]
    message: Message = {"role": "assistant", "content": content}
    if action.thinking:
        message["reasoning_content"] = action.thinking
    if action.calls:
        calls = [replace(call, id=f"call_{turn}_{n}") for n, call in enumerate(action.calls)]
        message |= {"content": content or None, "tool_calls": as_field(calls, AS_JSON)}
    return message
