"""Calls that never end are cut within their limit, wherever they run; time in which the process was stopped does not count."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from turnwise.environments.calls import LONGEST_TICK, PERIOD, Watchdog, WatchedCall, call_environment, call_here
from turnwise.errors import EnvironmentFault

LIMIT = 0.3
HANG = 20.0  # what a cut call may take on a busy machine; every call below takes longer if it is not cut


def run(function, *args, inline=False, seconds=LIMIT):
    began = time.monotonic()
    try:
        return asyncio.run(call_environment(function, *args, seconds=seconds, inline=inline))
    finally:
        assert time.monotonic() - began < HANG


def spin():
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass


def spin_and_catch():
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(Exception):
            spin()


def sleep():
    time.sleep(60)


@pytest.mark.parametrize("function", [spin, spin_and_catch, sleep])
def test_an_inline_call_that_never_ends_is_cut(function):
    with pytest.raises(EnvironmentFault, match=r"no answer within 0.3 s \(at test_calls.py, line \d+, in "):
        run(function, inline=True)


@pytest.mark.parametrize("function", [spin, spin_and_catch])
def test_an_endless_loop_in_a_thread_ends(function):
    """Its thread would otherwise compete with the run for ever."""
    threads = []

    def noted():
        threads.append(threading.current_thread())
        function()

    ended = []

    def work():
        try:
            noted()
        finally:
            ended.append(True)

    with pytest.raises(EnvironmentFault, match=r"no answer within 0\.3 s"):
        run(work)
    until = time.monotonic() + HANG
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    assert ended and threads[0] is not threading.main_thread()


def test_an_inline_call_outside_the_main_thread_is_cut():
    faults = []

    def work():
        try:
            call_here(spin, seconds=LIMIT)
        except EnvironmentFault as fault:
            faults.append(str(fault))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HANG)
    assert faults and "no answer within 0.3 s" in faults[0]


@pytest.mark.parametrize("block", [spin, sleep])
def test_a_blocking_call_in_an_async_method_is_cut_and_named(block):
    async def step():
        await asyncio.sleep(0)
        block()

    with pytest.raises(EnvironmentFault, match=r"blocked the event loop for 0.3 s \(at test_calls.py, line \d+"):
        run(step)


def test_a_coroutine_that_swallows_its_cancellation_is_abandoned():
    """Neither the call nor the end of the event loop waits for it."""
    cancellations = []

    async def step():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancellations.append(1)

    with pytest.raises(EnvironmentFault, match=r"no answer within 0\.3 s"):
        run(step)
    assert cancellations


def test_a_cancelled_coroutine_may_clean_up():
    cleaned = []

    async def step():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    with pytest.raises(EnvironmentFault):
        run(step)
    assert cleaned


def test_a_method_that_raises_a_cancellation_cancels_nobody_else():
    async def step():
        raise asyncio.CancelledError

    with pytest.raises(EnvironmentFault, match="CancelledError"):
        run(step)


def test_the_run_goes_on_after_each_cut():
    async def play():
        for inline in (True, False):
            with pytest.raises(EnvironmentFault):
                await call_environment(spin, seconds=0.1, inline=inline)
        return await asyncio.gather(*(call_environment(len, "abc", seconds=5, inline=k % 2 == 0) for k in range(20)))

    assert asyncio.run(play()) == [3] * 20


def test_what_a_coroutine_awaits_reaches_it():
    """Values and exceptions pass through the watched steps as through a plain await."""

    async def step():
        with pytest.raises(ValueError):
            await asyncio.gather(fails())
        done, _ = await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0, "x"))])
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, "y")
        return done.pop().result() + await future

    async def fails():
        await asyncio.sleep(0)
        raise ValueError

    assert run(step, seconds=HANG) == "xy"


def test_a_late_tick_counts_little():
    """The clock of limits, with a stopped process simulated by a clock that jumps."""
    dog, expired = Watchdog(), []
    call = WatchedCall(5.0, lambda: expired.append(True))
    dog.add(call)
    before = dog.now
    time.sleep(3 * PERIOD)
    assert before <= dog.now <= LONGEST_TICK * 3 and not expired
    dog.remove(call)


STOPPED = """
    import asyncio, os, time
    from turnwise.environments.calls import call_environment

    async def step():
        print("started", flush=True)
        await asyncio.sleep(0.2)
        return "answered"

    def plain():
        time.sleep(0.2)
        return "answered"

    async def both():
        return [await call_environment(f, seconds=1.2, inline=False) for f in (step, plain)]

    print(asyncio.run(both()), flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP here")
def test_a_stopped_process_loses_no_time():
    program = [sys.executable, "-c", textwrap.dedent(STOPPED)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # longer than the limit
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "['answered', 'answered']\n"
