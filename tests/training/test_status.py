"""``turnwise status``: of runs that go on, ended, were killed or stopped, and of folders that are no run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from turnwise.cli.main import main
from turnwise.store.lock import ProcessLock, lock_holder
from turnwise.store.rundir import RunDir
from turnwise.training.watch import RunEvents, read_state, watched, write_status

HOLDER = """
import sys, time
from pathlib import Path
from turnwise.store.lock import ProcessLock
from turnwise.training.watch import RunEvents
from turnwise.training.watch import watched

run = Path(sys.argv[1])
with ProcessLock(run / "run.lock"), watched(run, RunEvents(), "shop", 9):
    print("held", flush=True)
    time.sleep(120)
"""
SCHEMA = {
    "run": str, "state": str, "explanation": str, "process": int, "alive": bool, "age_seconds": float, "step": int, "steps": int,
    "checkpoint": int, "alarm": str, "format": int, "host": str, "started": float, "written": float, "phase": str,
    "still_seconds": float, "components": list, "queues": dict, "episodes": dict, "versions": dict, "throughput": dict,
    "stage": dict,
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "run", {"steps": 9, "env": "shop"}).path


@pytest.fixture
def holder(run):
    """A process that works on the run."""
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def finished_status(run, **values):
    with watched(run, RunEvents(), "shop", 9):
        pass
    status = json.loads((run / "status.json").read_text())
    write_status(run / "status.json", {**status, **values})


def test_a_living_run(run, holder, capsys):
    state = read_state(run)
    assert (state.state, state.process, state.alive, state.ok) == ("running", holder.pid, True, True)
    assert main(["status", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"running, process {holder.pid}" in said and "step      0 of 9, phase prepare, no checkpoint yet" in said
    with pytest.raises(Exception, match="in use by process"):  # asking took no lock, and released none
        ProcessLock(run / "run.lock")


def test_the_schema_of_json(run, holder, capsys):
    assert main(["status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert {name: type(value) for name, value in status.items()} == SCHEMA
    for component in status["components"]:
        assert set(component) == {"name", "state", "doing", "waits_for", "since_progress"}
    assert set(status["versions"]) == {"published", "oldest_in_flight", "newest"}
    assert set(status["throughput"]) == {
        "window_seconds", "sampled_tokens_per_second", "learned_tokens_per_second", "episodes_per_minute",
    }  # fmt: skip


def test_a_killed_run(run, holder, capsys):
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    holder.kill()
    holder.wait()
    assert main(["status", str(run)]) == 1
    said = capsys.readouterr().out
    assert ": killed" in said and f"its process {holder.pid} is dead" in said and "in the phase prepare" in said
    assert (
        "step      4 of 9, newest checkpoint at step 4" in said and f"turnwise resume {run}" in said
    )  # the status knew step 0
    assert read_state(run).as_dict()["alive"] is False


def test_a_stopped_process_is_told_from_a_dead_one(run, holder):
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("no /proc")
    holder.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    status = json.loads((run / "status.json").read_text())
    write_status(run / "status.json", {**status, "written": time.time() - 60})
    state = read_state(run)
    assert state.state == "silent" and not state.ok and "is stopped (SIGSTOP)" in state.explanation
    holder.send_signal(signal.SIGCONT)


def test_a_finished_and_a_failed_run(run, capsys):
    finished_status(run, state="failed", reason="the disk is full")
    assert main(["status", str(run)]) == 1
    assert "ended by an error\n          the disk is full" in capsys.readouterr().out
    (run / "summary.json").write_text("{}")
    assert main(["status", str(run)]) == 0
    assert ": finished" in capsys.readouterr().out


def test_a_run_without_a_status(run, capsys):
    """Of an older release, or before the first look."""
    (run / "metrics.jsonl").write_text('{"step": 7}\n')
    assert main(["status", str(run)]) == 0
    said = capsys.readouterr().out
    assert "stopped\n          no process works on it" in said and "step      7 of 9" in said


def test_the_status_of_an_earlier_process_is_not_believed(run):
    finished_status(run, state="running", process=1, written=time.time() - 999)
    with ProcessLock(run / "run.lock"):
        state = read_state(run)
    assert state.state == "running" and state.status == {} and state.process == os.getpid()


def test_a_run_on_another_machine(run):
    finished_status(run, state="running", host=f"not-{socket.gethostname()}")
    assert read_state(run).state == "running"
    finished_status(run, state="running", host=f"not-{socket.gethostname()}", written=time.time() - 99)
    assert read_state(run).state == "unknown"


def test_a_stuck_run_is_told_by_words_and_exit_status(run, capsys):
    finished_status(run, state="running", alarm="nothing has moved for 34 s: environment shop", process=os.getpid())
    with ProcessLock(run / "run.lock"):
        assert main(["status", str(run)]) == 1
    assert "STUCK     nothing has moved for 34 s: environment shop" in capsys.readouterr().out


def test_watch_ends_with_the_run(run, capsys):
    finished_status(run)
    assert main(["status", str(run), "--watch", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_warnings_are_repeated(run, capsys):
    rows = [{"step": 1, "text": "fine", "level": "info"}, {"step": 2, "text": "not fine", "level": "warning"}]
    (run / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{cut")
    main(["status", str(run)])
    said = capsys.readouterr().out
    assert "warning   not fine" in said and "fine" not in said.replace("not fine", "")


def test_the_holder_of_a_lock(tmp_path):
    path = tmp_path / "run.lock"
    assert lock_holder(path) == (0, False)
    with ProcessLock(path):
        assert lock_holder(path) == (os.getpid(), True)
        with pytest.raises(Exception, match="in use"):  # still held after it was asked for
            ProcessLock(path)
    assert lock_holder(path) == (0, False)
    path.write_text("4711\n")
    assert lock_holder(path) == (4711, False)
