"""The watch of a run: who waits for whom, who is named when nothing moves, and that a watched run is the same run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from turnwise.environments.calls import call_environment, call_here
from turnwise.environments.isolated import moved
from turnwise.training import api, trainer, watch
from turnwise.training.watch import (
    Activity,
    GeneratorFacts,
    GroupFacts,
    OutsideCalls,
    RankFacts,
    RunEvents,
    RunMoment,
    RunningCall,
    RunParts,
    ServerFacts,
    component_states,
    culprit,
    outside_calls,
    process_state,
    read_status,
    suspects,
    watched,
    write_status,
)

SMALL = {
    "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 2, "cold_batch": 4,
    "steps": 2, "groups": 2, "group_size": 2, "max_tokens": 8, "context": 160, "eval_tasks": 2, "trackers": (), "threads": 1,
}  # fmt: skip


def moment(**values):
    return RunMoment(**{"phase": "rollout", "step": 4, "env": "shop", "still": 0.0, "busy": False, **values})


class Ago(RunningCall):
    """A call that has run for the same time whenever one looks."""

    seconds = property(lambda self: self.began)


def ago(seconds, name="update"):
    return Ago(name, seconds)


HUNG = {"environment": OutsideCalls(3, "step", 34.0, "shop.py, line 12, in step")}
SERVER = ServerFacts("http://a:1", 4, 2, 7, 3, "")

# ---------------------------------------------------------------------- words

CULPRITS = {
    "environment shop, 3 episodes, the longest in step() for 34 s (at shop.py, line 12, in step)": {"calls": HUNG},
    "the learner has been in its update for 31 s and computes nothing": {"learning": ago(31)},
    "still learning: update of step 5 has taken 31 s, the longest before took 9 s": {
        "learning": ago(31), "busy": True, "longest_update": 9.0},
    "still learning on 3 ranks: update of step 5 has taken 31 s": {
        "learning": ago(31), "ranks": [RankFacts(1, 10, "running", 50.0), RankFacts(2, 11, "sleeping", 3.0)],
        "idle_ranks": frozenset({2})},
    "the learner has been in its update for 31 s: rank 2 (process 11) is stopped": {
        "learning": ago(31), "busy": True,
        "ranks": [RankFacts(1, 10, "running", 50.0), RankFacts(2, 11, "stopped", 3.0)]},
    "the learner has been in its update for 31 s: rank 2 (process 11 on b) is ended": {
        "learning": ago(31), "ranks": [RankFacts(1, 10, "running", 50.0), RankFacts(2, 11, "ended", 0.0, "b")]},
    "the learner has been in its update for 31 s and computes nothing; ranks 1 compute nothing either; look at ranks "
    "2 (process 11 on b), 3 (process 12 on b)": {
        "learning": ago(31), "idle_ranks": frozenset({1}),
        "ranks": [RankFacts(1, 10, "sleeping", 50.0), RankFacts(2, 11, "", 0.0, "b"), RankFacts(3, 12, "", 0.0, "b")]},
    "the learner has been in measuring signals for 31 s and computes nothing": {"learning": ago(31, "measure")},
    "generator server http://a:1 has not answered for 33 s (it owes 2 replies)": {
        "servers": [SERVER], "since": {"http://a:1": 33.0}},
    "the checkpoint of step 4 has been written for 40 s": {"saving": ago(40, "save")},
    "the ledger has been writing for 40 s (9 writes queued)": {"recording": ago(40, "flush"), "queued": 9},
    "new weights have been published for 40 s": {"publishing": ago(40, "publish")},
    "the generator has sampled no token for 32 s, with 5 requests in its batch": {
        "generator": GeneratorFacts(running=5), "since": {"generator": 32.0}},
    "2 agents neither ask the policy nor end, the longest in solve() for 50 s": {
        "calls": {"agent": OutsideCalls(2, "solve", 50.0)}, "generator": GeneratorFacts(dialogues=2, silent=2)},
    "4 dialogues open, and the agents that play them neither ask the policy nor end": {
        "generator": GeneratorFacts(dialogues=4, silent=4)},
    "6 groups wait for their scores (reward functions or judge)": {
        "groups": GroupFacts(running=6), "generator": GeneratorFacts()},
    "in the phase prepare; the main thread is at load.py, line 3, in read": {
        "phase": "prepare", "line": "load.py, line 3, in read"},
}  # fmt: skip


@pytest.mark.parametrize("text", CULPRITS)
def test_the_culprit_is_named_in_words(text):
    assert culprit(moment(still=35.0, **CULPRITS[text]), 30.0).text == text


def test_who_computes_is_slow_and_not_stuck():
    assert suspects(moment(learning=ago(31), busy=True), 30.0)[0].computing
    assert not suspects(moment(learning=ago(31)), 30.0)[0].computing
    assert suspects(moment(learning=ago(29), calls={"environment": OutsideCalls(1, "step", 29.0)}), 30.0) == []


def test_a_lost_server_and_one_that_owes_nothing_are_no_suspects():
    quiet = ServerFacts("http://a:1", 4, 0, 7, 3, "")
    lost = ServerFacts("http://b:1", 0, 2, 7, 3, "it was restarted")
    facts = moment(servers=[quiet, lost], since={"http://a:1": 99.0, "http://b:1": 99.0})
    assert suspects(facts, 30.0) == []
    states = {state.name: state for state in component_states(facts)}
    assert states["server http://b:1"].state == "lost" and states["server http://a:1"].state == "idle"


WAITS = {  # component, state, waits for
    ("learner", "waiting", "rollouts"): {"groups": GroupFacts(running=2), "generator": GeneratorFacts(running=1)},
    ("generator", "waiting", "environments"): {"calls": HUNG, "generator": GeneratorFacts(dialogues=3, silent=3)},
    ("generator", "waiting", "learner"): {"learning": ago(1), "generator": GeneratorFacts()},
    ("generator", "waiting", "publication"): {"publishing": ago(1), "generator": GeneratorFacts(running=2)},
    ("environments", "waiting", "generator"): {"generator": GeneratorFacts(running=2, dialogues=2)},
    ("environments", "waiting", "learner"): {"learning": ago(1), "generator": GeneratorFacts()},
    ("environments", "working", ""): {"calls": HUNG},
    ("learner", "working", ""): {"learning": ago(1)},
    ("learner", "waiting", "publication"): {"publishing": ago(1), "generator": GeneratorFacts()},
    ("learner", "waiting", "ledger"): {"saving": ago(1, "save")},
    ("rank 1", "waiting", "rank 0"): {"ranks": [RankFacts(1, 10, "sleeping", 1.0)]},
    ("rank 1", "lost", ""): {"ranks": [RankFacts(1, 10, "ended", 1.0)]},
}


@pytest.mark.parametrize("expected", WAITS, ids=str)
def test_who_waits_for_whom(expected):
    states = [(s.name, s.state, s.waits_for) for s in component_states(moment(**WAITS[expected]))]
    assert expected in states


# ------------------------------------------------------------------- activity


class Part:
    def update(self, value):
        return value + 1


def test_calls_are_listed_while_they_run():
    activity, part = Activity(), Part()
    seen = []

    async def publish():
        seen.append(activity.oldest("publish").name)
        return 7

    with activity.attached(part, "update", "update"), activity.attached(part, "missing", "missing"):
        assert part.update(1) == 2 and "update" in vars(part)
    assert "update" not in vars(part) and activity.ended == {"update": 1} and activity.running == {}
    assert asyncio.run(activity.wrap("publish", publish)()) == 7
    assert seen == ["publish"] and activity.oldest("publish") is None

    def fails():
        raise ValueError

    with pytest.raises(ValueError):
        activity.wrap("fails", fails)()
    assert activity.ended["fails"] == 1 and activity.running == {}


class Shop:
    def __init__(self):
        self.calls = []

    def step(self):
        self.calls.append(outside_calls()["environment"])

    async def slow(self):
        self.calls.append(outside_calls()["environment"])


def test_a_call_into_an_environment_is_listed_once():
    shop = Shop()
    call_here(shop.step, seconds=5.0)
    asyncio.run(call_environment(shop.step, seconds=5.0, inline=False))
    asyncio.run(call_environment(shop.slow, seconds=5.0, inline=True))
    assert [(call.count, call.name) for call in shop.calls] == [(1, "step"), (1, "step"), (1, "slow")]
    assert outside_calls()["environment"] == OutsideCalls()


def test_the_state_of_a_process():
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("no /proc")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 10
        while process_state(process.pid)[0] != "stopped" and time.monotonic() < until:
            time.sleep(0.02)
        assert process_state(process.pid)[0] == "stopped"
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid)[0] == "ended"
    assert process_state(os.getpid())[1] > 0


# ------------------------------------------------------------------ the thread


class FakeGenerator:
    """A generator of which one number moves when a test says so."""

    version = 3

    def __init__(self):
        self.tokens = 0.0

    def stats(self):
        return {"tokens": self.tokens, "open": 2.0}


def fake_loop(**values):
    collector = SimpleNamespace(
        running={1: "a"}, ready=deque(), training=0, dropped=Counter(), issued_in={"a": 2}, collect_step=None
    )
    ledger = SimpleNamespace(queued=5, seal=lambda step: None, flush=lambda: None)
    parts = {"generator": FakeGenerator(), "learner": Part(), "collector": collector, "ledger": ledger}
    return SimpleNamespace(**parts, save=lambda step: None, after_step={}, start=2, steps=9, **values)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "STALL_SECONDS", 0.4)
    monkeypatch.setattr(watch, "PERIOD", 0.05)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


@contextlib.contextmanager
def watching(tmp_path):
    heard = []
    events = RunEvents(lambda event, facts: heard.append((event, dict(facts))))
    with watched(tmp_path, events, "shop", 9):
        yield events, lambda: [facts["text"] for event, facts in heard if event == "message"]


def status_of(tmp_path):
    return read_status(tmp_path / "status.json")


def test_nothing_moves_and_then_it_moves_again(tmp_path, quick):
    with watching(tmp_path) as (events, told):
        loop = fake_loop()
        events.uses(generator=loop.generator, learner=loop.learner)
        with events.loop_stage(loop):
            until(lambda: any("nothing has moved for" in text for text in told()))
            until(lambda: "nothing has moved for" in status_of(tmp_path)["alarm"])
            status = status_of(tmp_path)
            assert status["phase"] == "rollout" and status["step"] == 2 and status["steps"] == 9
            assert status["versions"] == {"published": 3, "oldest_in_flight": 2, "newest": 3}
            assert status["queues"]["ledger_writes"] == 5 and status["queues"]["groups_running"] == 1
            loop.generator.tokens += 1
            until(lambda: "the run moves again" in told())
            until(lambda: status_of(tmp_path)["alarm"] == "")
    assert status_of(tmp_path)["state"] == "finished"


def test_episodes_that_lost_their_process_are_told_with_the_cause(tmp_path, quick):
    moved.clear()
    with watching(tmp_path) as (_, told):
        moved.extend(["the process died (SIGKILL)"] * 3)
        until(lambda: "3 episodes go on in other processes: the process died (SIGKILL)" in told())


def test_what_progresses_is_not_stuck(tmp_path, quick):
    with watching(tmp_path) as (events, told):
        longest = 0.0
        for step in range(20):  # twice and a half the limit
            began = time.monotonic()
            time.sleep(0.05)
            events.step("cold start", step, 20, {"tokens": 3.0})
            longest = max(longest, time.monotonic() - began)
        assert told() == [] or longest > watch.STALL_SECONDS / 2, "unless the machine itself stood still"


def test_a_long_update_is_named_while_others_move(tmp_path, quick):
    with watching(tmp_path) as (events, told):
        loop = fake_loop()
        loop.learner.update = lambda: until(lambda: _moved(loop) and any("its update for" in t for t in told()))
        events.uses(generator=loop.generator, learner=loop.learner)
        with events.loop_stage(loop):
            loop.learner.update()
        assert any(text.endswith("the rest of the run goes on") for text in told())
        assert not any("nothing has moved" in text for text in told())


def _moved(loop):
    loop.generator.tokens += 1
    return True


def test_a_fault_of_the_watch_is_told_and_ends_only_the_watch(tmp_path, quick):
    with watching(tmp_path) as (events, told):
        events.uses(generator=SimpleNamespace(version=0))  # reports nothing
        until(lambda: any("nobody watches this run" in text for text in told()))


@pytest.mark.parametrize("fault, state", [(KeyboardInterrupt("at step 3"), "stopped"), (ValueError("no"), "failed")])
def test_how_a_run_ended_is_written(tmp_path, fault, state):
    with pytest.raises(type(fault)), watching(tmp_path):
        raise fault
    status = status_of(tmp_path)
    assert status["state"] == status["phase"] == state and status["reason"] == str(fault)


def test_a_status_that_cannot_be_written_is_no_fault(tmp_path):
    write_status(tmp_path / "missing" / "status.json", {})
    assert read_status(tmp_path / "missing" / "status.json") is None
    (tmp_path / "status.json").write_text("{")
    assert read_status(tmp_path / "status.json") is None


def test_parts_that_do_not_exist_yet_report_nothing():
    parts = RunParts()
    assert parts.generator_facts() is None and parts.groups() is None
    assert parts.servers() == [] and parts.ranks() == [] and parts.ledger_queue == 0


# ------------------------------------------------------------------ real runs


@pytest.mark.slow
def test_a_watched_run_is_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "PERIOD", 0.002)  # looks as often as it can
    api.train(**SMALL, out=str(tmp_path), name="watched", quiet=True)
    monkeypatch.setattr(trainer, "watched", lambda *_: contextlib.nullcontext())
    api.train(**SMALL, out=str(tmp_path), name="alone", quiet=True)
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("watched", "alone"))
    assert all((one[name] == other[name]).all() for name in one)
    assert not (tmp_path / "alone" / "status.json").exists()
    status = status_of(tmp_path / "watched")
    assert status["state"] == "finished" and status["step"] == 2 and status["episodes"]["in_flight"] == 0


HANGING = """
import time
from turnwise.environments.builtin.guess import Guess

class Hanging(Guess):
    inline = False
    calls = 0

    def step(self, action):
        Hanging.calls += 1
        if Hanging.calls == 30:
            time.sleep({seconds})
        return super().step(action)
"""
PROGRAM = """
import sys
from turnwise.training import watch
watch.STALL_SECONDS = 3.0
from turnwise.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_environment_that_hangs_is_named_in_log_and_status(tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING.format(seconds=12))
    settings = {**SMALL, "eval_tasks": 0, "env": "hanging:Hanging"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if not isinstance(value, tuple)]
    flags += [
        "--difficulty=1",
        "--name=run",
        "--trackers=",
        "--env-seconds=60",
    ]
    command = [sys.executable, "-c", PROGRAM, "train", "grpo", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = tmp_path / "runs" / "run"
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        alarms = set()
        end = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < end:
            alarms.add((read_status(run / "status.json") or {}).get("alarm", ""))
            time.sleep(0.3)
        shown = process.stdout.read()
    assert process.returncode == 0, shown
    rows = [json.loads(line) for line in (run / "messages.jsonl").read_text().splitlines()]
    named = [row for row in rows if "nothing has moved for" in row["text"]]
    expected = "environment hanging:Hanging, 1 episode, the longest in step() for"
    named = [row for row in named if expected in row["text"]]  # a busy machine may stall elsewhere too
    assert named and all(row["level"] == "warning" for row in named)
    assert all("hanging.py, line 12, in step" in row["text"] for row in named)
    assert any(expected in alarm for alarm in alarms)
    assert expected in shown and "the run moves again" in shown
    assert named[0]["text"] in [row["text"] for row in json.loads((run / "summary.json").read_text())["messages"]]


@pytest.mark.slow
@pytest.mark.integration
def test_a_generator_server_that_is_stopped_is_named_in_log_and_status(tmp_path):
    """``turnwise serve tiny`` and a run that samples there: the server gets SIGSTOP until it is named; the threshold is 3 s."""
    pytest.importorskip("uvicorn")
    shared = [f"--{name}={SMALL[name]}" for name in ("env", "hidden", "layers", "vocabulary", "context")]
    shared += ["--difficulty=1", "--threads=1"]
    values = {**SMALL, "steps": 20, "eval_tasks": 0, "name": "run", "generator_seconds": 120}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if not isinstance(value, tuple)]
    options = {"cwd": tmp_path, "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True}
    serve = [sys.executable, "-m", "turnwise.cli.main", "serve", "tiny", "--address=127.0.0.1:0", *shared]
    run, alarms, stopped, states = tmp_path / "runs" / "run", set(), False, set()
    messages = run / "messages.jsonl"
    with subprocess.Popen(serve, stderr=subprocess.PIPE, **options) as server:
        url = server.stderr.readline().split(" at ")[1].split()[0]
        silent = f"generator server {url} has not answered for"
        train = [
            sys.executable,
            "-c",
            PROGRAM,
            "train",
            "grpo",
            *flags,
            "--difficulty=1",
            "--trackers=",
            f"--generator={url}",
        ]
        with subprocess.Popen(train, stdout=subprocess.PIPE, **options) as process:
            end = time.monotonic() + 240
            while process.poll() is None and time.monotonic() < end:
                status = read_status(run / "status.json") or {}
                alarms.add(status.get("alarm", ""))
                states |= {(c["name"], c["state"]) for c in status.get("components", ())}
                if not stopped and (run / "metrics.jsonl").is_file():
                    stopped = True
                    server.send_signal(signal.SIGSTOP)
                if stopped and any(silent in alarm for alarm in alarms) and silent in messages.read_text():
                    server.send_signal(signal.SIGCONT)
                time.sleep(0.05)
            server.send_signal(signal.SIGCONT)
            shown = process.stdout.read()
        server.terminate()
    assert process.returncode == 0, shown
    named = [json.loads(line)["text"] for line in messages.read_text().splitlines()]
    assert any(text.startswith("nothing has moved for") and silent in text for text in named)
    assert any(silent in alarm for alarm in alarms)
    assert (f"server {url}", "working") in states and "the run moves again" in shown
