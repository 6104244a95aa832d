"""LoRA through vLLM's runtime calls: one adapter per version, nothing merged. The server is a stand-in; no vLLM ran here."""

from __future__ import annotations

import asyncio

import pytest
from support.adapted import RANK, adapted_model, factor_bytes, turn
from support.dialogues import run, two_turns
from support.generators import generator, make
from support.prompting import prompts

from turnwise.core.records import Sampling

pytest.importorskip("peft")
kit = pytest.importorskip("support.generator_servers")
from support.fake_vllm import FakeVllm  # noqa: E402

GREEDY = Sampling(temperature=0, max_tokens=10)


def fake_server(fake):
    return kit.served(make(seed=1), wrap=lambda app: fake.app)


def greedy(parts):
    return [list(part.tokens) for part in parts]


def test_each_version_is_an_adapter_of_its_own_and_old_ones_are_unloaded():
    model, asked, fake = adapted_model(), prompts(3), FakeVllm(lambda: make(seed=3))

    async def play(url):
        g, out, sizes = await kit.connected([url], make(seed=3)), [], []
        for version, seed in enumerate((1, 2, 1), 1):
            await g.publish(turn(model, seed), version)
            assert g.fatal is None
            parts = await two_turns(g, asked, GREEDY)
            assert {v for part in parts for v in part.version} == {version}
            out.append(greedy(parts))
            sizes.append(g.publisher.written)
        return out, sizes, sorted(p.name for p in g.publisher.folder.path.iterdir())

    async def merged(seed):
        g = generator(make(seed=3))
        await g.publish(dict(turn(model, seed).items()), 1)
        return greedy(await two_turns(g, asked, GREEDY))

    with fake_server(fake) as server:
        (first, second, third), sizes, folders = run(play(server.url))
    assert first == third == run(merged(1)) and second == run(merged(2)) != first
    assert fake.most == 2 and list(fake.apps) == ["test-3"] and set(fake.asked) == {"test-1", "test-2", "test-3"}
    assert folders in (["adapter-2", "adapter-3"], ["adapter-3"])
    factors = factor_bytes(turn(model, 1))
    assert all(factors < size < factors + 8192 for size in sizes)


def test_a_request_in_flight_keeps_its_adapter_until_it_ends():
    model, fake = adapted_model(), FakeVllm(lambda: make(seed=3))

    async def play(url):
        g = await kit.connected([url], make(seed=3))
        await g.publish(turn(model, 1), 1)
        replica = g.replicas[0]
        with replica.runtime_adapters.using(1):
            await g.publish(turn(model, 2), 2)
            both = sorted(fake.apps)
        await g.publish(turn(model, 3), 3)
        done = await g.open(1).generate([1, 2, 3], GREEDY)
        return both, set(done.version)

    with fake_server(fake) as server:
        both, versions = run(play(server.url))
    assert both == ["test-1", "test-2"] and list(fake.apps) == ["test-3"] and versions == {3}
    assert [kind for kind, _ in fake.calls] == ["load", "load", "load", "unload", "unload"]


@pytest.mark.parametrize(
    ("fake", "told"),
    [
        (
            FakeVllm(lambda: make(seed=3), max_rank=RANK - 1),
            "greater than max_lora_rank 2; start it with --enable-lora",
        ),
        (FakeVllm(lambda: make(seed=9)), "it answers with other weights than version 1"),
    ],
    ids=["rank", "base"],
)
def test_a_server_with_a_smaller_rank_or_another_base_is_refused(fake, told):
    async def play(url):
        g = await kit.connected([url], make(seed=3))
        await g.publish(turn(adapted_model(), 1), 1)
        return str(g.fatal)

    with fake_server(fake) as server:
        assert told in run(play(server.url))


def test_all_weights_for_a_server_that_takes_adapters_alone_are_refused_in_words():
    async def play(url):
        g = await kit.connected([url], make(seed=3))
        await asyncio.wait_for(g.publish(kit.weights_of(make(seed=3)), 1), 30)
        return str(g.fatal)

    with fake_server(FakeVllm(lambda: make(seed=3))) as server:
        assert "takes adapters alone" in run(play(server.url))
