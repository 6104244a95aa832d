"""Typed answers and forced tools: what clients ask for, as grammars, and what they get from a model that knows nothing."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import pytest
from support.episodes import RENDERER, TASK

from turnwise.core.batch import pack
from turnwise.core.records import Group, Sampling
from turnwise.core.signals import Signal
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.grammar import Grammars
from turnwise.engines.learner.learner import LocalLearner
from turnwise.errors import GrammarError
from turnwise.models.tiny import tiny_model
from turnwise.rollout.agent_client import AgentClient
from turnwise.rollout.agent_episode import AgentEpisode, AgentOutcome
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.parsers.table import SYNTAXES
from turnwise.rollout.typed_output import answer_grammar, read_grammar, read_tool_choice
from turnwise.serve.wires import MESSAGES, RESPONSES

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "nights": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "nights"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
TRIP = f"json_schema:{json.dumps(SCHEMA)}"


def tool(name, schema=SCHEMA):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


MODEL = tiny_model(len(RENDERER.tokenizer), 0, hidden=64)
ASK = [{"role": "user", "content": "where?"}]


def talk(*bodies):
    """The replies to calls of one agent, and its trajectory."""
    grammars = Grammars(RENDERER.tokenizer, RENDERER.stop_ids)
    limits = EpisodeLimits(turns=12, context=800)
    options = {"slots": 2, "context": 800, "stop_ids": RENDERER.stop_ids, "grammars": grammars}
    generator = LocalGenerator(MODEL, RENDERER.tokenizer, **options)
    replies = []

    async def agent(episode):
        client = AgentClient(episode)
        for body in bodies:
            replies.append(await client.chat.completions.create(model="policy", **{"messages": ASK, **body}))
        return AgentOutcome(1.0)

    async def run():
        episode = AgentEpisode("g.0", TASK, generator.open(3), RENDERER, Sampling(max_tokens=120), limits)
        return await episode.run(agent)

    return replies, asyncio.run(run()), grammars


def test_an_answer_matches_the_response_format_and_the_learner_agrees():
    replies, trajectory, grammars = talk(
        {"response_format": FORMAT, "n": 3}, {"regex": "(yes|no)!"}, {"guided_choice": ["a.b", "c"]}, {"guided_json": SCHEMA}
    )
    for choice in (*replies[0].choices, *replies[3].choices):
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert replies[1].choices[0].message.content in ("yes!", "no!")
    assert replies[2].choices[0].message.content in ("a.b", "c")
    assert len(trajectory.turns) == 6 and all(turn.grammar for turn in trajectory.turns)
    batch = pack([Group("0", TASK, (trajectory,))], grammars.replay)
    logp = LocalLearner(tiny_model(len(RENDERER.tokenizer), 0, hidden=64)).measure(batch, frozenset({Signal.LOGP}))
    assert (logp[Signal.LOGP].x - batch.behaviour.x).abs().max() < 5e-6


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
def test_a_forced_tool_is_called_with_arguments_of_its_schema(choice):
    tools = [tool("look", {"type": "object", "properties": {}, "additionalProperties": False}), tool("book")]
    (reply,), trajectory, _ = talk({"tools": tools, "tool_choice": choice})
    (call,) = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls" and not trajectory.turns[0].tool_errors
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
    assert call.function.name == "book" or choice == "required"
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


def test_a_typed_answer_with_tools_is_either():
    for reply in talk(*[{"response_format": FORMAT, "tools": [tool("book")]}] * 6)[0]:
        message = reply.choices[0].message
        text = message.tool_calls[0].function.arguments if message.tool_calls else message.content
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objct"}}}},
        {"regex": "(a"},
        {"tools": [tool("book")], "tool_choice": {"type": "function", "function": {"name": "fly"}}},
        {"tool_choice": "required"},
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_its_name(body):
    _, trajectory, _ = talk(body)
    assert trajectory.facts["agent/ended_by"] == "invalid_grammar" and not trajectory.turns


def test_the_other_formats_ask_for_the_same():
    form = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}}
    ours = {"name": "book", "parameters": SCHEMA, "type": "function"}
    named = {"type": "function", "name": "book"}
    call = RESPONSES.read_request({"input": "where?", "text": form, "tools": [ours], "tool_choice": named})
    assert (call.grammar, call.forced) == (TRIP, "book")
    assert RESPONSES.read_request({"input": "a", "text": {"format": {"type": "text"}, "verbosity": "low"}}).grammar == ""
    theirs = {"messages": ASK, "max_tokens": 9, "tools": [{"name": "book", "input_schema": SCHEMA}]}
    for choice, forced in (({"type": "any"}, ""), ({"type": "tool", "name": "book"}, "book"), ({"type": "auto"}, None)):
        call = MESSAGES.read_request({**theirs, "tool_choice": choice, "output_config": form})
        assert (call.grammar, call.forced) == (TRIP, forced)
    assert not MESSAGES.read_request({**theirs, "tool_choice": {"type": "none"}}).tools


def test_every_syntax_is_forced_or_refused_in_words():
    grammars, forced = Grammars(RENDERER.tokenizer, RENDERER.stop_ids), 0
    for syntax in SYNTAXES.values():
        try:
            grammars.start(answer_grammar(syntax, [tool("book")], forced=""))
            forced += 1
        except GrammarError as fault:
            assert "its arguments are not JSON" in str(fault), (syntax.name, fault)
    assert forced >= 5


def test_fields_are_read_at_the_door():
    assert read_grammar({"response_format": FORMAT}) == TRIP and read_grammar({"response_format": {"type": "text"}}) == ""
    assert read_grammar({"structured_outputs": {"regex": "a+"}}) == "regex:a+" and read_tool_choice("auto") is None
    for body in ({"response_format": "json"}, {"structured_outputs": {"magic": 1}}, {"regex": 3}):
        with pytest.raises(GrammarError, match="write"):
            read_grammar(body)
