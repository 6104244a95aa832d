"""Checks of an environment under the conditions of training: many episodes at once, calls in changing threads, and how long the
calls take. Each replays recorded episodes and compares. Knows no environment."""

from __future__ import annotations

import asyncio
import inspect
from statistics import median
from typing import Any

from turnwise.environments.calls import CallTimeout, call_environment
from turnwise.environments.checker.driver import (
    EnvironmentDriver,
    EpisodeRecord,
    EpisodeSpec,
    call_in_new_thread,
)
from turnwise.environments.contract import read_messages, read_step

Recorded = tuple[EpisodeSpec, EpisodeRecord]
SLOW_STEP = 1.0  # seconds, median
SLOW_INLINE = 0.1  # seconds of one call that holds up all episodes
QUICK = 0.002  # seconds below which a thread costs more than the call
CHANGED = "several episodes at once change each other; keep state on self, not on the class or in a module"


def check_threads(driver: EnvironmentDriver, recorded: list[Recorded]) -> None:
    """An episode must go on in whichever thread calls it next."""
    driver.call_method = call_in_new_thread
    try:
        for spec, record in recorded:
            env = driver.new(spec)
            lines = [driver.reset(env, spec)]
            lines += [driver.step(env, action, spec, EpisodeRecord()) for action in record.actions]
            driver.optional(env, "close", spec)
            if lines != record.lines:
                driver.problems.add("an episode differs when each call comes from another thread", str(spec))
    finally:
        driver.call_method = call_environment


def check_concurrency(driver: EnvironmentDriver, recorded: list[Recorded]) -> None:
    """Episodes that run at the same time, as the rollouts of a step do, must give what each gives alone."""
    envs = [driver.new(spec) for spec, _ in recorded]

    async def play(env: Any, spec: EpisodeSpec, record: EpisodeRecord) -> list[Any]:
        call = lambda function, *args: call_environment(function, *args, seconds=driver.seconds, inline=driver.inline)  # noqa: E731
        values: list[Any] = [read_messages(await call(env.reset, spec.seed), "reset")]
        for action in record.actions:
            await asyncio.sleep(0)  # a model would answer here, and other episodes go on
            step = read_step(await call(env.step, action))
            values.append((step.messages, float(step.reward), bool(step.terminated), bool(step.truncated)))
        return values

    async def play_all() -> list[Any]:
        together = (play(env, spec, record) for env, (spec, record) in zip(envs, recorded))
        return await asyncio.gather(*together, return_exceptions=True)

    results = driver.loop.run(play_all(), 3 * driver.seconds * sum(len(r.actions) + 1 for _, r in recorded) + 5)
    for (spec, record), result in zip(recorded, results):
        if isinstance(result, CallTimeout):
            driver.problems.add(f"beside other episodes: {result}", str(spec), same="beside other episodes")
        elif isinstance(result, BaseException):
            fault = f"{type(result).__name__}: {result}"
            driver.problems.add(f"beside other episodes it raises {fault:.160}; {CHANGED}", str(spec), same=CHANGED)
        elif driver.comparable(result) != [line.partition(" [")[0] for line in record.lines]:
            driver.problems.add(CHANGED, str(spec))
    for env in envs:
        driver.optional(env, "close", recorded[0][0])


def speed(driver: EnvironmentDriver) -> dict[str, str]:
    """How long the calls took, and whether ``inline`` fits; a finding where it does not."""
    steps, resets = driver.durations.get("step", []), driver.durations.get("reset", [])
    if not steps or not resets:
        return {}
    ordered = sorted([*steps, *resets])
    slowest, usual = (
        ordered[-1],
        ordered[int(0.95 * (len(ordered) - 1))],
    )  # one slow call of twenty may be the machine's
    facts = {
        "speed": f"reset {_milliseconds(median(resets))}, step {_milliseconds(median(steps))}, slowest {_milliseconds(slowest)}"
    }
    is_async = any(inspect.iscoroutinefunction(getattr(driver.cls, name, None)) for name in ("reset", "step"))
    if median(steps) > SLOW_STEP:
        driver.warnings.add(
            f"a step takes {median(steps):.1f} s: a training step waits for the slowest of its episodes"
        )
    if driver.inline and not is_async:
        facts["inline"] = "declared: calls run in the event loop's thread"
        if usual > SLOW_INLINE:
            driver.warnings.add(
                f"calls take {_milliseconds(usual)} although the class says inline = True: every other episode waits for it"
            )
    elif not is_async and usual < QUICK:
        facts["inline"] = "inline = True is safe as far as seen, and saves a thread for each call"
    elif not is_async:
        facts["inline"] = "no: a call may take long, so each runs in a thread"
    return facts


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
