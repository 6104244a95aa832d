"""SIGTERM and SIGINT: the step is finished, a checkpoint is written, the run and the command to resume it are named."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from turnwise import environments
from turnwise.cli.main import main
from turnwise.environments.builtin.guess import Guess
from turnwise.store.rundir import RunDir
from turnwise.training import evaluation
from turnwise.training.interrupt import RunStopped, StopSignals, in_background, run_async

ARGUMENTS = [
    "grpo", "--env", "guess", "--difficulty", "1", "--hidden", "32", "--layers", "1", "--vocabulary", "320",
    "--cold-steps", "2", "--cold-batch", "4", "--steps", "100000", "--groups", "2", "--group-size", "3",
    "--max-tokens", "12", "--context", "160", "--eval-tasks", "2", "--checkpoint-every", "100000", "--trackers", "",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_the_step_with_a_checkpoint(tmp_path, number):
    command = [sys.executable, "-m", "turnwise.cli.main", "train", *ARGUMENTS, "--out", str(tmp_path), "--name", "run"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 600
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    step = RunDir(tmp_path / "run").step
    assert step >= 2
    assert f"stopped at step {step}, with a checkpoint" in errors and f"turnwise resume {tmp_path / 'run'}" in errors
    assert "Traceback" not in errors


def test_a_second_signal_does_not_wait_for_work_in_the_background():
    """asyncio waits for threads of its own at its end, however long they compute."""
    stop, released, waited = StopSignals(), threading.Event(), []

    def endless() -> None:
        main = threading.main_thread().ident
        while (
            sys._current_frames()[main].f_code.co_name != "select"
        ):  # the event loop waits: this thread is fully started
            time.sleep(0.001)
        for number in (signal.SIGTERM, signal.SIGINT):  # two of a kind could be delivered as one
            signal.pthread_kill(main, number)
        waited.append(released.wait(20))

    async def update() -> None:
        with stop.deferred():
            await in_background(endless)

    try:
        with pytest.raises(RunStopped), stop.handled():
            stop.run_loop(update())
        assert not waited
    finally:
        released.set()


COMPUTES_FOR_EVER = """
import os, signal, sys, torch
from turnwise.cli.main import main
from turnwise.training import loop

def update(*_):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    weights = torch.ones(64, 64, requires_grad=True)
    while True:
        (weights @ weights).sum().backward()

loop.update_policy = update
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_process_whose_update_goes_on_ends_with_the_signals_code(tmp_path):
    command = [sys.executable, "-c", COMPUTES_FOR_EVER, "train", *ARGUMENTS, "--staleness", "1", "--out", str(tmp_path)]
    ended = subprocess.run(
        [*command, "--name", "run"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, timeout=300
    )
    assert ended.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert (
        ended.stderr.endswith(f"`turnwise resume {tmp_path / 'run'}` continues it\n")
        and "Traceback" not in ended.stderr
    )


def test_outside_a_step_a_signal_stops_at_once():
    with pytest.raises(RunStopped) as stopped, StopSignals().handled():
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.exit_code == 143


def test_inside_a_step_the_first_signal_waits_and_the_second_does_not():
    stop = StopSignals()
    with stop.handled(), stop.deferred():
        signal.raise_signal(signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(RunStopped):
            signal.raise_signal(signal.SIGINT)


def test_a_step_that_does_not_end_is_stopped_after_the_grace_time():
    stop = StopSignals(grace=0.05)
    with pytest.raises(RunStopped), stop.handled(), stop.deferred():
        signal.raise_signal(signal.SIGTERM)
        began = time.monotonic()
        try:
            time.sleep(300)
        finally:
            assert time.monotonic() - began < 200  # a call that waits is interrupted, not awaited


def test_after_a_signal_unfinished_tasks_are_not_reported(caplog):
    """A stop during an evaluation printed tracebacks of the generator's tasks under its one line."""
    stop = StopSignals()

    async def stopped() -> None:
        async def compute() -> None:
            signal.raise_signal(signal.SIGTERM)

        task = asyncio.get_running_loop().create_task(compute())
        await asyncio.sleep(10)
        await task

    with stop.handled(), pytest.raises(RunStopped):
        stop.run_loop(stopped())
    gc.collect()
    assert not caplog.text


def test_without_a_signal_a_lost_exception_is_reported(caplog):
    async def loses() -> None:
        async def fail() -> None:
            raise ValueError("lost")

        asyncio.get_running_loop().create_task(fail())
        await asyncio.sleep(0.01)

    StopSignals().run_loop(loses())
    gc.collect()
    assert "lost" in caplog.text


def test_a_stop_in_a_task_of_the_demonstrations_leaves_no_traceback(caplog):
    """The signal came while a task wrote to the Python tool: asyncio kept its error in that task, and reported it as lost."""
    stop, tasks = StopSignals(), []

    async def play() -> None:
        async def send() -> None:
            await asyncio.sleep(0)
            signal.raise_signal(signal.SIGTERM)

        tasks.append(asyncio.ensure_future(send()))
        await asyncio.gather(*tasks, asyncio.sleep(10))

    with stop.handled(), pytest.raises(RunStopped):
        run_async(play())
    tasks.clear()
    gc.collect()
    assert not caplog.text


def test_other_errors_that_are_lost_are_still_reported(caplog):
    async def loses() -> None:
        async def fail() -> None:
            raise ValueError("lost")

        asyncio.get_running_loop().create_task(fail())
        await asyncio.sleep(0.01)

    run_async(loses())
    gc.collect()
    assert "lost" in caplog.text


class Interrupting(Guess):
    """Sends a signal to its own process in its first turn, which then never ends."""

    number = signal.SIGINT

    async def step(self, action):
        os.kill(os.getpid(), self.number)
        await asyncio.sleep(3600)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_evaluation_and_says_what_is_kept(number, monkeypatch, tmp_path, capfd, caplog):
    monkeypatch.setattr(Interrupting, "number", number)
    monkeypatch.setattr(environments, "load", lambda name: Interrupting)
    before, saved = signal.getsignal(number), tmp_path / "result.json"
    words = ["eval", "--player", "random", "--env", "guess", "--eval-tasks", "4", "--save", str(saved)]
    assert main(words) == 128 + number
    gc.collect()  # a task that kept the error would report it now
    errors = capfd.readouterr().err
    assert errors.strip() == f"turnwise: the evaluation was stopped and has no result; {saved} was not written"
    assert not caplog.records and not saved.exists() and signal.getsignal(number) == before


def test_an_evaluation_that_is_stopped_names_the_verdicts_it_keeps(tmp_path):
    assert "kept" not in evaluation._stopped_message(str(tmp_path), "", "")
    (tmp_path / "answers.sqlite").touch()
    assert f"kept in {tmp_path / 'answers.sqlite'}" in evaluation._stopped_message(str(tmp_path), "", "")
    assert "kept" not in evaluation._stopped_message(str(tmp_path), "oracle", ""), "a scripted player's are in memory"
