"""Servers that a run cannot use are refused at the door, and one that dies between the door and the first step is survived."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.generator_servers import served

from turnwise.config.settings import Settings
from turnwise.engines.remote.remote_generator import RemoteGenerator
from turnwise.engines.remote.replica import RemoteLimits
from turnwise.engines.remote.weight_files import WeightFolder
from turnwise.errors import SettingError
from turnwise.training import remote_generators
from turnwise.training.remote_generators import check_generators, make_replicas


def test_a_server_that_reads_fewer_ids_is_refused_before_demonstrations():
    told = r"it reads 64 ids, and the run needs 200; write --context 64, or start the server with --context 200"
    with served(context=64) as server, pytest.raises(SettingError, match=told):
        check_generators(Settings(generator=(server.url,), context=200))


def test_what_an_earlier_run_asked_of_a_server_is_not_its_limit(monkeypatch):
    """A server that was attached with a small context offers more to the next run."""
    with served(context=256) as server:
        server.host.limits = replace(server.host.limits, context=64)
        monkeypatch.setattr(remote_generators, "_compare_files", lambda *_: None)
        check_generators(Settings(generator=(server.url,), context=200))


def test_a_server_that_died_after_the_door_is_lost_and_the_other_serves():
    """Killed during the cold start: later the same loss is survived, too."""
    heard = []
    with served() as server:
        replicas = make_replicas(Settings(generator=("http://127.0.0.1:9", server.url)))

        async def connect():
            gone = {r: reason for r in replicas if (reason := await remote_generators._why_gone(r))}
            limits = RemoteLimits(4, 64, (), True, 1)
            generator = RemoteGenerator(replicas, limits, WeightFolder(), None, str, heard.append)
            await generator.attach(gone)
            return gone, generator.alive()

        gone, alive = asyncio.run(connect())
    assert list(gone) == replicas[:1] and [replica.url for replica in alive] == [server.url]
    assert len(heard) == 1 and "lost the generator http://127.0.0.1:9: no connection" in heard[0]
    assert "its requests go to the other" in heard[0]


def test_with_no_server_left_after_the_door_the_run_is_refused():
    replicas = make_replicas(Settings(generator=("http://127.0.0.1:9",)))

    async def connect():
        generator = RemoteGenerator(replicas, RemoteLimits(4, 64, (), True, 1), WeightFolder(), None, str, print)
        await generator.attach({replicas[0]: await remote_generators._why_gone(replicas[0])})

    with pytest.raises(SettingError, match=r"--generator http://127.0.0.1:9 cannot be used: no connection"):
        asyncio.run(connect())
