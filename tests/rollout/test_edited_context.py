"""A step that replaces the context: the next turn begins a new sequence, and what was sampled before keeps its tokens."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.core.batch import pack
from turnwise.core.chat import ChatReply
from turnwise.core.protocols import Action, Step
from turnwise.core.records import Group, Sampling, Stop, Task
from turnwise.environments.base import text_action, user_message
from turnwise.environments.contract import read_step
from turnwise.environments.isolated import encode_step
from turnwise.errors import EnvironmentFault
from turnwise.rollout.chat_session import ChatSession
from turnwise.rollout.episode import EpisodeLimits
from turnwise.rollout.renderer import Renderer
from turnwise.rollout.scripted import play_scripted
from turnwise.training.build import byte_tokenizer

TASK = "find the key."
SAYINGS = ("look", "note: it is red", "take it")


class Notes:
    """After the second turn the policy reads its task and its own note, and nothing else."""

    max_turns = 3
    inline = True

    def reset(self, seed):
        self.turn = 0
        return [user_message(TASK)]

    def step(self, action: Action) -> Step:
        self.turn += 1
        if self.turn == 2:
            return Step([user_message("go on")], context=[user_message(TASK), user_message(action.text)])
        return Step([user_message(f"a long page {self.turn}")], terminated=self.turn == 3)

    def oracle(self):
        return text_action(SAYINGS[self.turn])


@pytest.fixture(scope="module")
def renderer():
    return Renderer(byte_tokenizer())


@pytest.fixture(scope="module")
def played(renderer):
    return asyncio.run(play_scripted("oracle", Notes(), "x", Task("notes", 0), renderer, EpisodeLimits(context=10**6)))


def test_the_next_turn_reads_the_new_context_and_nothing_else(played, renderer):
    first, second, third = played.turns
    assert (first.restart, second.restart, third.restart) == (False, False, True)
    expected = renderer.open([user_message(TASK), user_message(SAYINGS[1]), user_message("go on")])
    assert list(third.context) == expected.ids
    assert "a long page" in renderer.decode(second.context) and "a long page" not in renderer.decode(third.context)


def test_the_words_of_the_edit_are_sampled_tokens_of_the_one_trajectory(played, renderer):
    said = [renderer.decode(turn.tokens[:-1]) for turn in played.turns]
    assert said == list(SAYINGS)
    batch = pack([Group("g", played.task, (played,))])
    assert list(batch.trajectory_ids) == ["x"]
    assert sum(len(turn.tokens) for turn in played.turns) == played.sampled


def test_the_whole_dialogue_is_kept_for_display(played):
    texts = [message["content"] for message in played.messages]
    assert texts == [TASK, "look", "a long page 1", "note: it is red", "go on", "take it", "a long page 3"]


def test_a_window_applies_to_what_was_kept(renderer):
    dialogue = renderer.open([user_message("a")], history=1)
    renderer.append_sampled(dialogue, renderer.encode_turn("b"))
    renderer.append_observation(dialogue, [user_message("c")], context=[user_message("kept")])
    assert [m["content"] for m in dialogue.visible] == ["kept", "c"]
    renderer.append_sampled(dialogue, renderer.encode_turn("d"))
    renderer.append_observation(dialogue, [user_message("e")])
    assert [m["content"] for m in dialogue.visible] == ["kept", "e"]


def test_an_empty_context_is_refused_unless_the_episode_ends():
    with pytest.raises(EnvironmentFault, match="at least one message"):
        read_step(Step(context=[]))
    with pytest.raises(EnvironmentFault, match="context"):
        read_step(Step([user_message("a")], context="words"))
    assert read_step(Step(context=[], terminated=True)).context == []


def test_another_process_sends_the_context_along():
    step = Step([user_message("a")], context=[user_message("b")])
    assert Step(**encode_step(step)) == step
    assert Step(**encode_step(Step())).context is None


class Server:
    """Answers with the next saying; keeps what it was sent."""

    def __init__(self):
        self.sent = []

    async def reply(self, messages, sampling, seed, tools):
        self.sent.append([(m["role"], m["content"]) for m in messages])
        return ChatReply(text=SAYINGS[len(self.sent) - 1], stop=Stop.TOKEN, tokens=1)


def test_a_served_model_reads_the_edited_context_too():
    server = Server()

    async def play():
        session, env = ChatSession(server, 0), Notes()
        dialogue = session.open(env.reset(0))
        for _ in range(3):
            completion = await session.generate([], Sampling())
            step = env.step(session.append_sampled(dialogue, completion.tokens))
            session.append_observation(dialogue, step.messages, context=step.context)

    asyncio.run(play())
    assert server.sent[2] == [("user", TASK), ("user", SAYINGS[1]), ("user", "go on")]
