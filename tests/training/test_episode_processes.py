"""Whole episodes in other processes: the same trajectories as here; a process that dies costs its episodes nothing."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.episodes import FixedSession
from support.untrained import Untrained

from turnwise.config.settings import Settings
from turnwise.core.records import Status, Task
from turnwise.environments.isolated import moved
from turnwise.errors import SettingError
from turnwise.rollout.strategies import EntropyControl, Independent
from turnwise.training import api, episodes
from turnwise.training.build import sampling_settings
from turnwise.training.episodes import PROCESSES, make_play, process_count
from turnwise.training.plan import EnvSpec

HERE = "support.misbehaving"


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    # where the process finds tests/support
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(__file__)))
    moved.clear()
    yield
    PROCESSES.stop()


def timeless(trajectory):
    turns = [replace(turn, seconds_generating=0.0, seconds_acting=0.0) for turn in trajectory.turns]
    return replace(trajectory, turns=tuple(turns))


@pytest.fixture(scope="module")
def policy():
    return Untrained("guess")


def plays(policy, count, env="guess", **more):
    settings = replace(policy.env_spec.settings, env=env, env_processes=count, difficulty=(1,), **more)
    return make_play(EnvSpec.from_settings(settings), policy.renderer, sampling_settings(settings))


def grown(policy, strategy, count):
    policy.play = plays(policy, count)
    return [timeless(t) for seed in (1, 2) for t in policy.grow(strategy, seed).trajectories]


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", [Independent(), EntropyControl(hot=1.5, share=0.5)], ids=lambda s: type(s).__name__)
def test_two_processes_play_what_one_does(policy, strategy):
    assert grown(policy, strategy, 2) == grown(policy, strategy, 1)
    assert len(PROCESSES.workers) == 2


class KillsItsProcess(FixedSession):
    """Kills all processes that play when it is asked for turn ``at``, once."""

    def __init__(self, at):
        super().__init__()
        self.at, self.turns = at, 0

    async def generate(self, ids, sampling):
        self.turns += 1
        if self.turns == self.at:
            for worker in PROCESSES.workers:
                worker.process.kill()
                worker.process.wait()
        return await super().generate(ids, sampling)


def one(play, session, env="guess"):
    return asyncio.run(play("g.0", Task(env, 7), session))


@pytest.mark.thorough
@pytest.mark.parametrize("at", [1, 2])
def test_an_episode_whose_process_is_killed_is_the_same_episode(policy, at):
    undisturbed = one(plays(policy, 1), FixedSession())
    session = KillsItsProcess(at)
    killed = one(plays(policy, 2), session)
    assert timeless(killed) == timeless(undisturbed) and len(killed.turns) > 1
    assert session.turns == len(killed.turns)  # no turn was sampled twice
    assert len(moved) == 1 and "SIGKILL" in moved[0]


@pytest.mark.thorough
def test_an_environment_that_ends_its_process_fails_alone(policy):
    play, patient = plays(policy, 2, f"{HERE}:Exits"), plays(policy, 2, f"{HERE}:Patient")

    async def both():
        return await asyncio.gather(
            play("a", Task("x", 7), FixedSession()), *(patient(f"b{n}", Task("x", 7), FixedSession()) for n in range(4))
        )

    exits, *others = asyncio.run(both())
    assert exits.status == Status.FAILED and "ended with status 3" in exits.reason and "tried 3 times" in exits.reason
    assert [t.reason for t in others] == ["turn limit"] * 4


@pytest.mark.thorough
def test_code_that_never_lets_python_run_is_ended_by_silence(policy, monkeypatch):
    monkeypatch.setattr(episodes, "INTERRUPTS", 1)
    t = one(plays(policy, 2, f"{HERE}:HoldsTheInterpreter", env_seconds=0.5), FixedSession())
    assert t.status == Status.FAILED and "gave no sign of life" in t.reason, t.reason


@pytest.mark.thorough
def test_an_environment_that_cannot_be_made_says_why(policy):
    t = one(plays(policy, 2, f"{HERE}:Odd"), FixedSession())
    assert t.status == Status.FAILED and "expected a Step" in t.reason


class Waits(FixedSession):
    def __init__(self):
        super().__init__()
        self.asked_for, self.closed_by_play = asyncio.Event(), False

    async def generate(self, ids, sampling):
        self.asked_for.set()
        await asyncio.Event().wait()

    def close(self):
        self.closed_by_play = True


@pytest.mark.thorough
def test_a_cancelled_episode_leaves_nothing_behind_and_its_process_goes_on(policy):
    play = plays(policy, 2)

    async def cancelled():
        session = Waits()
        task = asyncio.ensure_future(play("g.0", Task("guess", 7), session))
        await session.asked_for.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (process,) = PROCESSES.workers
        assert session.closed_by_play and process.users == process.watched == 0 and process.watch is None
        played = await play("g.1", Task("guess", 7), FixedSession())
        assert PROCESSES.workers == [process] and len(played.turns) > 1

    asyncio.run(cancelled())


def test_an_episode_with_shared_objects_is_played_here(policy):
    points = []
    played = asyncio.run(plays(policy, 2)("g.0", Task("guess", 7), FixedSession(), fork_points=points))
    assert len(points) == len(played.turns) and not PROCESSES.workers


def test_how_many_processes(monkeypatch):
    monkeypatch.setattr(episodes, "has_gpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    assert process_count(Settings()) == 16
    assert process_count(Settings(device="cpu")) == process_count(Settings(env="object:Mine")) == 1
    assert process_count(Settings(device="cpu", env_processes=3)) == 3 and process_count(Settings(env_processes=1)) == 1
    monkeypatch.setattr(episodes, "has_gpu", lambda: False)
    assert process_count(Settings()) == 1
    with pytest.raises(SettingError, match="another process cannot import object:Mine"):
        process_count(Settings(env="object:Mine", env_processes=2))


def test_only_records_are_read_from_a_process():
    with pytest.raises(Exception, match="SimpleNamespace is among what the environment returned"):
        episodes._read(pickle.dumps(SimpleNamespace(a=1)))


@pytest.mark.thorough
def test_a_run_ends_with_the_same_weights_however_many_processes_play(tmp_path):
    small = {
        "env": "calculator", "difficulty": (1,), "steps": 2, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 160,
        "eval_tasks": 4, "trackers": (), "threads": 1, "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 4,
        "cold_batch": 8, "out": str(tmp_path),
    }  # fmt: skip
    digests = set()
    for count in (1, 3):
        api.train(**small, name=str(count), env_processes=count)
        digests.add(hashlib.sha256((tmp_path / str(count) / "model" / "model.safetensors").read_bytes()).hexdigest())
    assert len(PROCESSES.workers) == 3 and len(digests) == 1
