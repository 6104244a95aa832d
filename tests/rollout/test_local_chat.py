"""A local model that is asked in messages: one request at a time, with the policy's own template."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.core.records import Completion, Sampling, Stop
from turnwise.engines.generator.paired_generators import PairedGenerator
from turnwise.errors import ContextOverflow
from turnwise.models.tiny import tiny_tokenizer
from turnwise.rollout.chat_session import LocalChat
from turnwise.rollout.renderer import Renderer

ASK = [{"role": "user", "content": "hello"}]


class Echo:
    """Says how many ids it read and how many tokens it may sample; notes how many sessions are open."""

    version = 3

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.open_now, self.most = renderer, 0, 0
        self.published: list[int] = []

    def open(self, seed, draft=False):
        self.open_now += 1
        self.most = max(self.most, self.open_now)
        return self

    async def generate(self, ids, sampling):
        await asyncio.sleep(0)
        tokens = self.renderer.encode_turn(f"{len(ids)} {sampling.max_tokens}")
        return Completion(tokens, [0.0] * len(tokens), [0.0] * len(tokens), [3] * len(tokens), Stop.TOKEN)

    def close(self):
        self.open_now -= 1

    async def publish(self, weights, version):
        self.published.append(version)

    def stats(self):
        return {"of": self.version}

    def describe(self):
        return "echo"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tiny_tokenizer([], 300))


def test_a_reply_has_the_policys_version_and_room(renderer):
    chat = LocalChat(Echo(renderer), renderer, context=50)
    ids = len(renderer.open(ASK).ids)
    reply = asyncio.run(chat.reply(ASK, Sampling(0.0, max_tokens=100), 1))
    assert reply.text == f"{ids} {50 - ids}" and reply.tokens > 0
    assert chat.name == "policy@3"
    with pytest.raises(ContextOverflow, match="reads 20 tokens"):
        asyncio.run(LocalChat(Echo(renderer), renderer, context=20).reply(ASK * 9, Sampling(), 1))


def test_requests_are_sampled_one_at_a_time(renderer):
    generator = Echo(renderer)

    async def many():
        chat = LocalChat(generator, renderer, 200)
        return await asyncio.gather(*(chat.reply(ASK, Sampling(0.0, max_tokens=9), n) for n in range(5)))

    replies = asyncio.run(many())
    assert len({reply.text for reply in replies}) == 1 and generator.most == 1 and generator.open_now == 0


def test_weights_reach_both_generators(renderer):
    main, mirror = Echo(renderer), Echo(renderer)
    both = PairedGenerator(main, mirror)
    asyncio.run(both.publish({}, 7))
    assert main.published == mirror.published == [7]
    both.open(1)
    assert (main.open_now, mirror.open_now) == (1, 0)
    both.version = 5
    assert main.version == mirror.version == both.version == 5
    assert both.describe() == "echo" and both.stats() == {"of": 5}
