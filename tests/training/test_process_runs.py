"""Runs whose generator has a process of its own (``--generator local``): the same weights, a killed process, no process left."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from turnwise.config.settings import Settings
from turnwise.errors import ServerFault, SettingError
from turnwise.store.ledger import SqliteLedger
from turnwise.training import api
from turnwise.training.remote_generators import check_generators

SMALL = {
    "env": "guess", "difficulty": (1,), "steps": 3, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 160,
    "eval_tasks": 4, "checkpoint_every": 1, "trackers": (), "threads": 1, "hidden": 32, "layers": 1, "vocabulary": 320,
    "cold_steps": 4, "cold_batch": 8,
}  # fmt: skip


def digest(run):
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def generator_processes(parent=None):
    """Generator processes that a process has started, this one by default. Those of other tests are not its own."""
    command = ["ps", "-ww", "-eo", "pid,ppid,stat,args"]  # whole lines, however narrow the terminal
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split(None, 3) for line in listed]
    workers = [row for row in rows if len(row) == 4 and "turnwise.training.serve" in row[3]]
    return {int(pid) for pid, owner, state, _ in workers if owner == str(parent or os.getpid()) and state[0] != "Z"}


def alive(pids):
    """Those of the processes that exist, with or without their parent."""
    listed = subprocess.run(["ps", "-eo", "pid,stat"], capture_output=True, text=True, check=True).stdout.splitlines()
    states = dict(line.split() for line in listed)
    return {pid for pid in pids if states.get(str(pid), "Z")[0] != "Z"}


def trained_groups(run):
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        return ledger.group_counts().trained


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The weights that a run with the generator in its own process ends with."""
    out = tmp_path_factory.mktemp("local")
    api.train(quiet=True, out=str(out), name="run", **SMALL)
    return digest(out / "run")


def test_a_run_is_bit_identical_to_one_with_the_generator_in_its_process(local, tmp_path):
    summary = api.train(quiet=True, out=str(tmp_path), name="run", generator=("local",), **SMALL)
    assert digest(tmp_path / "run") == local
    assert "in a process of its own" in summary["engines"]["generator"]
    assert not generator_processes()


@pytest.mark.slow
def test_a_lora_run_is_bit_identical_and_sends_its_base_once(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    from turnwise.engines.remote.remote_generator import RemoteGenerator

    values, sizes, publish = {**SMALL, "lora_rank": 4}, [], RemoteGenerator.publish

    async def recorded(self, weights, version):
        await publish(self, weights, version)
        sizes.append(self.publisher.written)

    monkeypatch.setattr(RemoteGenerator, "publish", recorded)
    api.train(quiet=True, out=str(tmp_path), name="here", **values)
    api.train(quiet=True, out=str(tmp_path), name="there", generator=("local",), **values)
    assert digest(tmp_path / "there") == digest(tmp_path / "here")
    whole = (tmp_path / "here" / "model" / "model.safetensors").stat().st_size
    factors = (tmp_path / "here" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert len(sizes) >= 3 and sizes[0] > whole and set(sizes[1:]) == {sizes[1]} and abs(sizes[1] - factors) < 4096


@pytest.mark.slow
def test_stale_rollouts_survive_publications(tmp_path):
    values = {**SMALL, "staleness": 2, "steps": 5, "eval_tasks": 0}
    api.train(quiet=True, out=str(tmp_path), name="run", generator=("local",), **values)
    assert trained_groups(tmp_path / "run") == values["steps"] * values["groups"]


@pytest.mark.slow
def test_a_killed_generator_stops_the_run_with_a_checkpoint_and_resume_ends_with_the_same_weights(local, tmp_path):
    def kill_after_first_step(event, facts):
        if event == "step" and facts["stage"] == "learn" and facts["step"] == 1:
            for pid in generator_processes():
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(ServerFault, match=r"generator process was ended by SIGKILL; stopped .*`turnwise resume"):
        api.train(kill_after_first_step, out=str(tmp_path), name="run", generator=("local",), **SMALL)
    api.resume(tmp_path / "run", quiet=True)
    assert digest(tmp_path / "run") == local
    assert trained_groups(tmp_path / "run") == SMALL["steps"] * SMALL["groups"]
    assert not generator_processes()


@pytest.mark.slow
def test_ctrl_c_ends_the_generator_process(tmp_path):
    values = json.dumps(
        {**SMALL, "steps": 10_000, "eval_tasks": 0, "out": str(tmp_path), "name": "run", "generator": ["local"]}
    )
    code = f"import json; from turnwise.training import api; api.train(quiet=True, **json.loads({values!r}))"
    run = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < until and (not metrics.is_file() or metrics.read_text().count("\n") < 2):
        time.sleep(0.02)
    started = generator_processes(run.pid)
    assert started
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    _, told = run.communicate(timeout=120)
    assert "with a checkpoint" in told
    assert not alive(started)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"generator": ("local", "http://127.0.0.1:9")}, "cannot be mixed with servers"),
        ({"generator": ("local",), "opponents": "past"}, "write --opponents self, or leave --generator out"),
    ],
)
def test_what_a_process_cannot_do_is_refused(changes, told):
    with pytest.raises(SettingError, match=told):
        check_generators(Settings(**changes))
