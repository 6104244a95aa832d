"""One run at a time at one of our servers: a second one is refused while the first is alive, and takes over when it is not."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest
from support.dialogues import run
from support.generators import make

from turnwise.engines.remote import replica as presence
from turnwise.errors import GeneratorLost, SettingError

kit = pytest.importorskip("support.generator_servers")
from turnwise.engines.remote.http import ServerAddress  # noqa: E402
from turnwise.engines.remote.remote_generator import RemoteGenerator  # noqa: E402
from turnwise.engines.remote.replica import Replica  # noqa: E402
from turnwise.engines.remote.weight_files import WeightFolder  # noqa: E402
from turnwise.serve import policy_host  # noqa: E402


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(presence, "OWNER_SECONDS", 0.03)


async def another(url, client="other", run=""):
    replica = Replica(ServerAddress(url, ""), client, 20.0)
    replica.run = run
    g = RemoteGenerator([replica], kit.LIMITS, WeightFolder(), None, str, print)
    await replica.identify()
    await g.attach()
    return g


def die(g, host):
    """The process of the run is gone, and a long time passes."""
    g.replicas[0].presence.end()
    host.heard = time.monotonic() - 1e6


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_is_alive_and_gets_the_server_when_it_leaves():
    model = make(seed=3)

    async def play(url):
        first = await kit.connected([url], model)
        await first.publish(kit.weights_of(model), 1)
        session = first.open(1)
        before = await session.generate([1, 2, 3], kit.SAMPLING)
        with pytest.raises(SettingError, match=r"serves the run 'test', heard . s ago; .* start one more"):
            await another(url)
        again = await first.open(1).generate([1, 2, 3], kit.SAMPLING)  # the first run goes on, with its weights
        assert (list(again.tokens), set(again.version)) == (list(before.tokens), {1})
        first.close()
        second = await another(url)
        await second.publish(kit.weights_of(model), 1)
        assert (await second.open(1).generate([1, 2, 3], kit.SAMPLING)).tokens == before.tokens

    with kit.served(make(seed=1)) as server:
        run(play(server.url))


def test_a_server_whose_run_waits_for_replies_is_not_waited_for():
    """Its silence is 0 s at every look: it is alive."""

    class Pool:
        address = ServerAddress("http://a:1", "")

        async def call(self, *asked):
            return SimpleNamespace(json=lambda: {"owner": {"client": "first", "run": "r", "silent": 0.0}})

    run(asyncio.wait_for(presence.until_free(Pool(), "second", ""), 60))


def test_a_run_that_is_silent_is_replaced_and_told_when_it_comes_back():
    model = make(seed=3)

    async def play(server):
        first = await kit.connected([server.url], model)
        await first.publish(kit.weights_of(model), 1)
        session = first.open(1)
        await session.generate([1, 2, 3], kit.SAMPLING)
        die(first, server.host)
        second = await another(server.url)
        await second.publish(kit.weights_of(model), 1)
        with pytest.raises(GeneratorLost, match="another run took it over"):
            await session.generate([1, 2, 3, 4, 5], kit.SAMPLING)
        await first._rejoin(await first._answering())
        assert first.replicas[0].lost, "a lost server is not taken back from a run that is alive"
        await second.open(1).generate([1, 2, 3], kit.SAMPLING)

    with kit.served(make(seed=1)) as server:
        run(play(server))


def test_a_resumed_run_gets_its_server_at_once():
    async def play(url):
        first = await another(url, "one", "runs/first")
        first.replicas[0].presence.end()  # killed a moment ago
        again = await another(url, "two", "runs/first")
        assert not again.replicas[0].lost
        with pytest.raises(SettingError, match="it serves the run 'two'"):
            await another(url, "three", "runs/second")

    with kit.served(make(seed=1)) as server:
        run(play(server.url))


def test_a_run_waits_until_one_that_died_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(policy_host, "SILENT_SECONDS", 0.5)

    async def play(url):
        first = await another(url, "one")
        first.replicas[0].presence.end()
        second = await another(url, "two")
        assert not second.replicas[0].lost

    with kit.served(make(seed=1)) as server:
        run(play(server.url))
    assert "serves the run 'one', silent for 0 s: waiting until the server gives that run up" in caplog.text


def test_a_run_that_asks_for_nothing_is_heard_until_its_generator_is_gone():
    async def play(server):
        g = await another(server.url)
        for _ in range(2):
            before = server.host.heard
            while server.host.heard == before:
                await asyncio.sleep(0.01)
        ended = g.replicas[0].presence._ended
        assert not ended.is_set()
        return ended

    with kit.served(make(seed=1)) as server:
        assert run(play(server)).wait(20), "the thread outlives its run"


def test_only_the_owner_releases_a_server():
    async def play(url):
        g = await another(url, "one")
        reply = await g.replicas[0].pool.call("/turnwise/v1/release", {"client": "two"})
        assert reply.status == 409
        with pytest.raises(SettingError, match="it serves the run 'one'"):
            await another(url, "three")

    with kit.served(make(seed=1)) as server:
        run(play(server.url))
