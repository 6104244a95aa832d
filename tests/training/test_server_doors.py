"""Servers that a run cannot use are refused at the door, and one that dies between the door and the first step is survived."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace

import pytest
from support.generator_servers import served

from turnwise.cli.flags import read_run_flags
from turnwise.config.settings import Settings
from turnwise.engines.remote.remote_generator import RemoteGenerator
from turnwise.engines.remote.replica import RemoteLimits
from turnwise.engines.remote.weight_files import WeightFolder
from turnwise.errors import SettingError
from turnwise.store.rundir import RunDir
from turnwise.training import remote_generators, serve
from turnwise.training.plan import resolve_settings
from turnwise.training.remote_generators import OF_TINY, check_generators, make_replicas


def test_a_server_that_reads_fewer_ids_is_refused_before_demonstrations():
    told = r"it reads 64 ids, and the run needs 200; write --context 64, or start the server with --context 200"
    with served(context=64) as server, pytest.raises(SettingError, match=told):
        check_generators(Settings(generator=(server.url,), context=200))


def test_what_an_earlier_run_asked_of_a_server_is_not_its_limit(monkeypatch):
    """A server that was attached with a small context offers more to the next run."""
    with served(context=256) as server:
        server.host.limits = replace(server.host.limits, context=64)
        monkeypatch.setattr(remote_generators, "_other_model", lambda *_: "")
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


def command_of(model, **values):
    """What a server prints for trainers, and what differs between its settings and those of that command."""
    settings, folder = serve._select(str(model), values)
    command = serve.train_command(settings, folder)
    run = resolve_settings(read_run_flags("train", "", shlex.split(command)[2:], lambda _: None).values)
    names = serve.SHARED + (() if folder else OF_TINY)
    return command, [name for name in names if getattr(run, name) != getattr(settings, name)]


def test_the_command_that_a_server_prints_makes_the_same_tiny_model():
    assert command_of("tiny") == ("turnwise train --model tiny", [])
    words = "--env guess --difficulty 1,3 --max-turns 3 --context 200 --hidden 32"
    given = {"env": "guess", "difficulty": (1, 3), "max_turns": 3, "context": 200, "hidden": 32}
    assert command_of("tiny,cache=pages", **given) == (f"turnwise train --model tiny,cache=pages {words}", [])
    assert command_of("tiny", env="guess") == ("turnwise train --model tiny --env guess", [])


def test_the_command_for_a_run_directory_names_its_model(tmp_path):
    settings = Settings(env="guess", difficulty=(2,), context=160, hidden=32)
    path = RunDir.create(tmp_path / "my runs", "run", settings.as_dict()).path
    (path / "initial").mkdir()
    words = "--env guess --difficulty 2 --context 160"
    assert command_of(path) == (f"turnwise train --model '{path / 'initial'}' {words}", [])
    (path / "model").mkdir()
    assert command_of(path) == (f"turnwise train --model '{path / 'model'}' {words}", [])


def test_the_command_names_no_environment_that_only_the_run_has(tmp_path):
    settings = Settings(env="prompts", data="rows.jsonl", reward="exact")
    path = RunDir.create(tmp_path, "run", settings.as_dict()).path
    (path / "model").mkdir()
    assert "--env" not in command_of(path)[0]
