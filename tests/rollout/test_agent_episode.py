"""Agents that drive their own episodes: every call continues the ids that were sampled, or begins a sequence with its cause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.agents import SAMPLING, TEXTS, HashSession
from support.episodes import RENDERER, TASK

from turnwise import environments
from turnwise.core.records import Limit, Status, Stop, Task
from turnwise.errors import EnvironmentFault
from turnwise.rollout.agent_client import AgentClient, FunctionAgent, open_task, read_request
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome, CallRefused, CallRequest, read_outcome, within
from turnwise.rollout.episode import Episode, EpisodeLimits
from turnwise.rollout.lineage import canonical

LIMITS = EpisodeLimits(turns=12, context=4000, seconds=20.0)


async def solve(task, client):
    """The plainest agent: sends what it has, appends what it gets."""
    messages = list(task.messages)
    while not task.done:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=list(task.tools))
        messages += [reply.choices[0].message, *await task.step(reply.choices[0].message)]


def play_agent(function, env, task=TASK, session=None, limits=LIMITS):
    async def run():
        episode = AgentEpisode("g.0", task, session or HashSession(), RENDERER, SAMPLING, limits)
        opened = await open_task(task, env, 5.0)
        return await episode.run(lambda e: FunctionAgent(function).play(opened, e))

    return asyncio.run(run())


def talk(*calls, session=None, limits=LIMITS):
    """The episode of an agent that makes these calls; a call is a function of the messages it got so far."""

    async def run():
        episode = AgentEpisode("g.0", TASK, session or HashSession(), RENDERER, SAMPLING, limits)
        replies = []
        for call in calls:
            replies += await episode.call(CallRequest(call(replies) if callable(call) else call))
        return episode, replies

    return asyncio.run(run())


def user(text):
    return {"role": "user", "content": text}


# ------------------------------------------------------------------ exactness


@pytest.mark.parametrize("name", ["calculator", "guess", "lookup", "keydoor"])
@pytest.mark.parametrize("seed", range(6))
def test_an_agent_around_an_environment_equals_the_episode_loop(name, seed):
    task = Task(name, seed, "train", 1)

    async def whitebox():
        env = environments.make(name)
        return await Episode("g.0", task, env, HashSession(seed=seed), RENDERER, SAMPLING, LIMITS).run()

    plain, agent = asyncio.run(whitebox()), play_agent(solve, environments.make(name), task, HashSession(seed=seed))
    assert [(t.context, t.tokens, t.logp, t.restart, t.reward) for t in agent.turns] == [
        (t.context, t.tokens, t.logp, t.restart, t.reward) for t in plain.turns
    ]
    assert agent.success == plain.success and dict(agent.rewards) == dict(plain.rewards)
    assert agent.facts["agent/exact"] == 1.0


@given(st.integers(0, 10**6))
def test_every_turn_is_recorded_behind_exactly_the_ids_it_read(seed):
    """Random agents: they continue, branch, compact, rewrite and start sub-agents, in any order."""
    rng, session = random.Random(seed), HashSession(seed=seed)

    def call(_):
        if not histories or rng.random() < 0.15:
            chosen = [user(f"task {rng.randint(0, 3)}")]
        else:
            chosen = list(rng.choice(histories))
            kind = rng.random()
            if kind < 0.15 and len(chosen) > 2:
                chosen = (
                    [chosen[0], user("so far: nothing"), *chosen[-1:]]
                    if chosen[-1]["role"] != "assistant"
                    else chosen[:1]
                )
            elif kind < 0.3:
                chosen = [{**m, "content": "rewritten"} if m["role"] == "assistant" else m for m in chosen]
            if chosen[-1]["role"] == "assistant":
                chosen.append(user(f"go on {rng.randint(0, 2)}"))
        return chosen

    histories: list[list[dict]] = []

    async def run():
        episode = AgentEpisode("g.0", TASK, session, RENDERER, SAMPLING, LIMITS)
        for _ in range(8):
            messages = call(None)
            (reply,) = await episode.call(CallRequest(messages))
            histories.append([*messages, reply.message])
        return episode

    episode = asyncio.run(run())
    sequence: list[int] = []
    for turn, read in zip(episode.turns, session.read):
        sequence = list(turn.context) if turn.restart else [*sequence, *turn.context]
        assert sequence == read
        sequence += turn.tokens
    assert sum(episode.lineage.causes.values()) == 8


# --------------------------------------------------------------------- causes


def test_an_echo_with_other_ids_and_key_order_is_the_same_turn():
    session = HashSession(texts=(TEXTS[2],))

    def back(replies):
        call = replies[0].message["tool_calls"][0]
        arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
        echo = {
            "tool_calls": [{"type": "function", "id": "other", "function": {"arguments": arguments, "name": "python"}}]
        }
        reply = {"role": "tool", "tool_call_id": "other", "content": "6"}
        return [user("a"), {**echo, "role": "assistant", "content": ""}, reply]

    episode, _ = talk([user("a")], back, session=session)
    assert [t.restart for t in episode.turns] == [False, False]
    assert dict(episode.lineage.causes) == {"opening": 1, "continued": 1}


@pytest.mark.parametrize(
    ("second", "cause"),
    [
        (lambda r: [user("a"), r[0].message, user("b")], "continued"),
        (lambda r: [user("another task")], "sub-agent"),
        (lambda r: [user("a"), {"role": "assistant", "content": "no such thing"}, user("b")], "compaction"),
        (lambda r: [user("z"), {"role": "assistant", "content": "no such thing"}, user("b")], "rewritten"),
        (lambda r: [user("a"), user("summary: b")], "compaction"),
    ],
)  # fmt: skip
def test_a_new_sequence_says_why(second, cause):
    episode, _ = talk([user("a")], second)
    assert [*episode.lineage.causes.elements()][1:] == [cause]
    assert episode.turns[1].restart == (cause != "continued")


def test_a_sub_agent_between_two_turns_of_its_parent():
    episode, _ = talk([user("a")], [user("sub")], lambda r: [user("a"), r[0].message, user("b")])
    assert dict(episode.lineage.causes) == {"opening": 1, "sub-agent": 1, "interleaved": 1}
    first, _, third = episode.turns
    assert third.restart and list(third.context[: len(first.context) + len(first.tokens)]) == [
        *first.context,
        *first.tokens,
    ]


def test_two_answers_to_one_prompt_are_branches():
    follow_ups = [lambda r, text=text: [user("a"), r[0].message, user(text)] for text in ("b", "c")]
    episode, replies = talk([user("a")], *follow_ups)
    assert dict(episode.lineage.causes) == {"opening": 1, "continued": 1, "branch": 1}
    assert len(replies) == 3


# --------------------------------------------------------------------- limits


def test_the_turn_limit_and_the_context_limit_are_told_and_truncate():
    async def endless(task, client):
        messages = list(task.messages)
        while True:
            reply = await client.chat.completions.create(messages=messages)
            messages += [reply.choices[0].message, user("on")]

    # nobody says what such an episode was worth: it is not trained on
    t = play_agent(endless, environments.make("guess"), Task("guess", 1), limits=EpisodeLimits(calls=3, context=4000))
    assert (t.status, t.limit, len(t.turns)) == (Status.FAILED, Limit.TURNS, 3) and "--max-turns" in t.reason
    t = play_agent(endless, environments.make("guess"), Task("guess", 1), limits=EpisodeLimits(context=400))
    assert (t.status, t.limit) == (Status.FAILED, Limit.CONTEXT) and "--context" in t.reason and t.sampled
    assert t.facts["agent/refused/context_length_exceeded"] == 1


def test_a_refused_call_that_ends_an_episode_is_named_with_the_agents_own_exception():
    async def wraps(task, client):
        try:
            await client.chat.completions.create(messages=task.messages, logit_bias={"1": 2})
        except CallRefused as refusal:
            raise RuntimeError("the framework gave up") from refusal

    t = play_agent(wraps, environments.make("guess"), Task("guess", 1))
    assert t.status == Status.FAILED and t.facts["agent/ended_by"] == "unsupported_parameter"
    assert "a refused call ended the episode: 'logit_bias'" in t.reason
    assert "the agent: RuntimeError: the framework gave up" in t.reason


def test_an_agent_that_goes_on_behind_a_refused_call_is_not_ended_by_it():
    async def falls_back(task, client):
        try:
            await client.chat.completions.create(messages=task.messages, logit_bias={"1": 2})
        except CallRefused:
            await client.chat.completions.create(messages=task.messages)
        return 1.0

    async def fails_later(task, client):
        await falls_back(task, client)
        raise ValueError("odd")

    t = play_agent(falls_back, environments.make("guess"), Task("guess", 1))
    assert (t.status, t.reward, t.facts["agent/refused/unsupported_parameter"]) == (Status.FINISHED, 1.0, 1)
    t = play_agent(fails_later, environments.make("guess"), Task("guess", 1))
    assert (t.status, t.reason) == (Status.FAILED, "ValueError: odd") and "agent/ended_by" not in t.facts


def test_a_verdict_of_an_agent_that_was_cut_counts():
    async def gives_up(task, client):
        await client.chat.completions.create(messages=task.messages)
        try:
            await client.chat.completions.create(messages=task.messages)
        except CallRefused:
            return 0.25

    t = play_agent(gives_up, environments.make("guess"), Task("guess", 1), limits=EpisodeLimits(calls=1, context=4000))
    assert (t.status, t.limit, t.reward) == (Status.TRUNCATED, Limit.TURNS, 0.25)


def test_the_environments_own_limit_counts_steps_and_ends_the_task_without_a_refused_call():
    async def thinks_first(task, client):
        while not task.done:
            await client.chat.completions.create(messages=[user("think about it")])
            reply = await client.chat.completions.create(messages=task.messages, tools=list(task.tools))
            await task.step(reply.choices[0].message)

    limits = EpisodeLimits(turns=2, context=4000)
    t = play_agent(thinks_first, environments.make("keydoor"), Task("keydoor", 1), limits=limits)
    assert (t.status, t.limit, len(t.turns)) == (Status.TRUNCATED, Limit.TURNS, 4)
    assert not any(name.startswith("agent/refused") for name in t.facts)


def test_an_agent_that_says_nothing_of_its_episode_is_not_trained_on_as_reward_0():
    async def silent(task, client):
        await client.chat.completions.create(messages=task.messages)

    t = play_agent(silent, environments.make("guess"), Task("guess", 1))
    assert t.status == Status.FAILED and "what its episode was worth" in t.reason


def test_overruled_fields_are_counted_unless_they_ask_for_what_is_done_anyway():
    async def particular(task, client):
        create = client.chat.completions.create
        await create(messages=task.messages, temperature=0.2, parallel_tool_calls=True, presence_penalty=0.0)
        await create(messages=task.messages, temperature=0.2, parallel_tool_calls=False, reasoning_effort="low")
        return 1.0

    facts = play_agent(particular, environments.make("guess"), Task("guess", 1)).facts
    counted = {name.rsplit("/", 1)[1]: n for name, n in facts.items() if name.startswith("agent/overruled/")}
    assert counted == {"temperature": 2, "reasoning_effort": 1}


class CutSession(HashSession):
    """Says in its stop where ``max_tokens`` cut a text."""

    async def generate(self, ids, sampling):
        reply = await super().generate(ids, sampling)
        return replace(reply, stop=Stop.LENGTH) if len(reply.tokens) == sampling.max_tokens else reply


async def three_calls(task, client):
    messages = list(task.messages)
    for _ in range(3):
        reply = await client.chat.completions.create(messages=messages)
        messages += [reply.choices[0].message, user("on")]
    return 1.0


async def gives_up(task, client):
    with contextlib.suppress(CallRefused):
        await three_calls(task, client)
    return 0.5


def test_a_budget_of_tokens_cuts_a_reply_and_refuses_the_next_call():
    limits, texts = replace(LIMITS, tokens=10), ("a text of many tokens, more than the budget has",)
    t = play_agent(three_calls, environments.make("guess"), Task("guess", 1), CutSession(texts), limits)
    assert (t.status, t.limit, t.sampled, t.facts["agent/refused/token_limit"]) == (Status.FAILED, Limit.TOKENS, 10, 1)
    assert "sampled its 10 tokens (--agent-tokens) (token_limit)" in t.reason
    t = play_agent(gives_up, environments.make("guess"), Task("guess", 1), CutSession(texts), limits)
    assert (t.status, t.limit, t.reward, t.sampled) == (Status.TRUNCATED, Limit.TOKENS, 0.5, 10)


def test_a_reply_that_the_budget_of_tokens_cut_is_named_though_the_agent_ends_by_itself():
    async def one_call(task, client):
        reply = await client.chat.completions.create(messages=task.messages)
        assert reply.choices[0].finish_reason == "length"
        return 0.25

    limits = replace(LIMITS, tokens=4)
    t = play_agent(one_call, environments.make("guess"), Task("guess", 1), CutSession(("much too long for this",)), limits)
    assert (t.status, t.limit, t.reward) == (Status.TRUNCATED, Limit.TOKENS, 0.25) and "--agent-tokens" in t.reason


def test_a_budget_of_seconds_is_a_named_limit_and_an_environment_that_has_paid_keeps_its_word():
    async def slow(task, client):
        await three_calls(task, client)
        await asyncio.sleep(60)

    async def acts_then_sleeps(task, client):
        reply = await client.chat.completions.create(messages=task.messages, tools=list(task.tools))
        await task.step(reply.choices[0].message)
        await within(0.0, asyncio.sleep(60))  # as the budget ends here, on any machine

    limits = replace(LIMITS, seconds=0.05)
    t = play_agent(slow, environments.make("guess"), Task("guess", 1), limits=limits)
    assert (t.status, t.limit) == (Status.FAILED, Limit.SECONDS) and "within 0.05 s (--agent-seconds)" in t.reason
    t = play_agent(acts_then_sleeps, environments.make("keydoor"), Task("keydoor", 1))
    assert (t.status, t.limit, len(t.turns)) == (Status.TRUNCATED, Limit.SECONDS, 1)


def test_a_timeout_of_the_agents_own_is_not_taken_for_the_budget():
    async def impatient(task, client):
        await client.chat.completions.create(messages=task.messages)
        raise TimeoutError("my tool took too long")

    t = play_agent(impatient, environments.make("guess"), Task("guess", 1))
    assert (t.status, t.limit, t.reason) == (Status.FAILED, None, "TimeoutError: my tool took too long")


TWO_CALLS = "<tool_call>{}</tool_call><tool_call>{}</tool_call>".format(
    *(json.dumps({"name": "search", "arguments": {"query": word}}) for word in ("a", "b"))
)


@pytest.mark.parametrize(
    ("fields", "queries"),
    [({}, ["a", "b"]), ({"parallel_tool_calls": False}, ["a"]), ({"tool_choice": "none"}, [])],
)
def test_a_reply_calls_as_many_tools_as_the_agent_lets_it(fields, queries):
    async def careful(task, client):
        body = {"messages": task.messages, "tools": list(task.tools), **fields}
        message = (await client.chat.completions.create(**body)).choices[0].message
        sent = [json.loads(call.function.arguments)["query"] for call in message.tool_calls or ()]
        assert sent == queries and (queries or message.content == TWO_CALLS)
        results = [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in message.tool_calls or ()]
        await client.chat.completions.create(**{**body, "messages": [*task.messages, message, *(results or [user("on")])]})
        return 1.0

    t = play_agent(careful, environments.make("lookup"), Task("lookup", 1, difficulty=1), HashSession((TWO_CALLS,)))
    assert t.status == Status.FINISHED, t.reason
    assert t.facts["agent/exact"] == 1.0 and not any(name.startswith("agent/overruled") for name in t.facts)


def test_calls_after_the_end_are_refused():
    episode, _ = talk([user("a")])
    episode.finish(AgentOutcome(1.0))
    with pytest.raises(CallRefused, match="ended"):
        asyncio.run(episode.call(CallRequest([user("b")])))
    assert episode.turns[-1].reward == 1.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda task, client: 1.0, "made no call"),
        (lambda task, client: 1 / 0, "ZeroDivisionError"),
        (lambda task, client: "good", "expected a number"),
        (lambda task, client: float("nan"), "finite"),
        (lambda task, client: {"reward": 1e300}, "finite"),
    ],
)  # fmt: skip
def test_an_agent_that_fails_is_a_record(function, words):
    t = play_agent(function, environments.make("guess"), Task("guess", 1))
    assert t.status == Status.FAILED and words in t.reason


def test_what_an_agent_may_return():
    assert read_outcome(True) == AgentOutcome(1.0, success=True)
    assert read_outcome(None) == AgentOutcome()
    assert read_outcome({"exact": 1.0, "style": 0.5}) == AgentOutcome(1.5, {"exact": 1.0, "style": 0.5})
    assert read_outcome({"reward": 2, "success": False}) == AgentOutcome(2.0, success=False)
    with pytest.raises(EnvironmentFault):
        read_outcome([1.0])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "messages"),
        ({"messages": "hello"}, "list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"messages": [user("a")], "logit_bias": {"1": 2}}, "logit_bias"),
        ({"messages": [user("a")], "response_format": {"type": "yaml"}}, "response_format"),
        ({"messages": [user("a")], "response_format": {"type": "json_schema"}}, "write json_schema with name"),
        ({"messages": [user("a")], "guided_choice": []}, "a list of texts"),
        ({"messages": [user("a")], "regex": "a", "guided_regex": "b"}, "different texts"),
        ({"messages": [user("a")], "tool_choice": {"type": "magic"}}, "tool_choice"),
        ({"messages": [user("a")], "n": "two"}, "whole number"),
        ({"messages": [user("a")], "max_tokens": -3}, "whole number"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_meant_is_refused(body, words):
    with pytest.raises(CallRefused, match=words):
        read_request(body)


def test_the_client_gives_replies_by_attribute_and_takes_them_back():
    async def run():
        episode = AgentEpisode("g.0", TASK, HashSession(texts=(TEXTS[2],)), RENDERER, SAMPLING, LIMITS)
        client = AgentClient(episode)
        reply = await client.chat.completions.create(model="x", messages=[user("a")], temperature=0, n=2)
        assert reply.usage.completion_tokens == sum(len(t.tokens) for t in episode.turns) and len(reply.choices) == 2
        message = reply.choices[0].message
        assert message.tool_calls[0].function.name == "python" and message.content is None
        assert canonical(message) == canonical(message.model_dump())
        again = await client.chat.completions.create(messages=[user("a"), message, {"role": "tool", "content": "6"}])
        return again, episode

    again, episode = asyncio.run(run())
    assert again.choices[0].finish_reason == "tool_calls" and len(episode.turns) == 3
