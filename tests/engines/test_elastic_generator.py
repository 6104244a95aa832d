"""A generator whose servers come and go: who samples after a publication, and who waits for whom when none is left."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.adapted import adapted_model, turn
from support.generator_servers import LIMITS, served, weights_of
from support.generators import make
from support.prompting import prompts

from turnwise.core.records import Sampling
from turnwise.engines.remote.http import ServerAddress
from turnwise.engines.remote.remote_generator import Directory, PolicyProbe, RemoteGenerator
from turnwise.engines.remote.replica import Replica
from turnwise.engines.remote.weight_files import WeightFolder
from turnwise.errors import GeneratorLost, SettingError

SAMPLING = Sampling(max_tokens=8)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 120))


def elastic(here, model, patience=20.0, told=None):
    """A generator over the servers that the list ``here`` names at any time."""
    probe = PolicyProbe(model, model.config.vocab_size, 1e-3)
    heard = told if told is not None else []
    directory = Directory(
        lambda: [ServerAddress(url) for url in here], lambda address: Replica(address, "test", 5.0), patience
    )
    return RemoteGenerator([], LIMITS, WeightFolder(), probe, str, heard.append, directory)


async def sample(g, count=4):
    """Tokens and versions of some dialogues."""
    sessions = [g.open(n) for n in range(count)]
    done = await asyncio.gather(*(s.generate(ids, SAMPLING) for s, ids in zip(sessions, prompts(count), strict=True)))
    for session in sessions:
        session.close()
    return [(list(part.tokens), list(part.version)) for part in done]


def test_a_server_that_appears_samples_from_the_next_publication_on_and_one_that_is_removed_no_longer():
    model, told = make(seed=2), []

    async def play(one, two):
        here = [one.url]
        g = elastic(here, model, told=told)
        await g.join(1)
        await g.publish(weights_of(model), 1)
        here.append(two.url)
        await sample(g)
        before = two.host.answered
        await g.publish(weights_of(model), 2)
        await sample(g)
        both = (one.host.answered, two.host.answered)
        here.remove(one.url)
        await g.publish(weights_of(model), 3)
        parts = await sample(g)
        return before, both, one.host.answered, parts, g.stats()

    with served(make(seed=1)) as one, served(make(seed=1)) as two:
        before, both, after, parts, stats = run(play(one, two))
    assert before == 0 and both[1] > 0 and after == both[0]
    assert all(set(version) == {3} for _, version in parts)
    assert stats["replicas"] == 1 and stats["joined"] == 2
    assert any(two.url in text and "samples from now on" in text for text in told)


def test_with_none_left_requests_wait_for_another_which_first_gets_the_published_weights():
    model, moved = make(seed=2), make(seed=9)

    async def play():
        with served(make(seed=1)) as one:
            here = [one.url]
            g = elastic(here, model)
            await g.join(1)
            weights = weights_of(model)
            await g.publish(weights, 1)
            wanted = await sample(g)
            one.stop()
        here.clear()
        for name, value in weights_of(moved).items():
            weights[name].copy_(value)  # the learner's weights move on while nobody samples
        waiting = asyncio.ensure_future(sample(g))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        with served(make(seed=4)) as two:
            here.append(two.url)
            return wanted, await waiting

    wanted, got = run(play())
    assert got == wanted


def test_with_none_left_one_that_comes_gets_the_base_and_the_published_adapters():
    pytest.importorskip("peft")
    model = adapted_model()

    async def play():
        with served(make(seed=1)) as one:
            here = [one.url]
            g = elastic(here, make(seed=3))
            await g.join(1)
            await g.publish(turn(model, 1), 1)
            wanted = await sample(g)
            one.stop()
        here.clear()
        turn(model, 2)  # the learner's adapters move on while nobody samples
        waiting = asyncio.ensure_future(sample(g))
        await asyncio.sleep(0.5)
        with served(make(seed=4)) as two:
            here.append(two.url)
            return wanted, await waiting

    wanted, got = run(play())
    assert got == wanted


def test_a_cluster_that_starts_no_server_is_told_with_the_reason():
    model = make(seed=2)
    with pytest.raises(
        SettingError, match=r"no generator came up within 0\.5 s; http://127\.0\.0\.1:9: .*Connection refused"
    ):
        run(elastic(["http://127.0.0.1:9"], model, patience=0.5).join(1))


def test_a_server_that_cannot_serve_the_run_is_refused_at_once():
    model = make(seed=2)
    with (
        served(make(seed=1), context=64) as server,
        pytest.raises(SettingError, match="it reads 64 ids, and the run needs 128"),
    ):
        run(elastic([server.url], model).join(1))


def test_where_no_server_comes_back_the_run_stops():
    model = make(seed=2)

    async def play():
        with served(make(seed=1)) as one:
            here = [one.url]
            g = elastic(here, model, patience=60)
            await g.join(1)
            await g.publish(weights_of(model), 1)
            one.stop()
        g.directory = replace(g.directory, patience=0.5)
        with pytest.raises(GeneratorLost, match=r"no generator came back within 0\.5 s"):
            await sample(g, 1)
        return g.fatal

    assert run(play()) is not None
