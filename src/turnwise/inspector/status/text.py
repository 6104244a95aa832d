"""A run's state as lines for a terminal. Computes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from turnwise.inspector.status.run_state import RunState
from turnwise.observe.metric_names import format_duration

HEADS = {
    "running": "running",
    "silent": "running, but silent",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "ended by an error",
    "killed": "killed",
    "unknown": "unknown",
}


def status_text(state: RunState, warnings: list[str]) -> str:
    """All that is known, the state first."""
    return "\n".join([*_head(state), *_body(state), *(f"warning   {text}" for text in warnings)])


def _head(state: RunState) -> Iterator[str]:
    process = f", process {state.process}" if state.process and state.alive else ""
    yield f"{state.run}: {HEADS[state.state]}{process}"
    if state.explanation:
        yield f"          {state.explanation}"
    status = state.status
    checkpoint = f", newest checkpoint at step {state.checkpoint}" if state.checkpoint else ", no checkpoint yet"
    phase = f", phase {status['phase']}" if state.alive and status else ""
    yield f"step      {state.step} of {state.steps}{phase}{checkpoint}"
    if state.state in ("stopped", "failed", "killed"):
        yield f"next      turnwise resume {state.run}"


def _body(state: RunState) -> Iterator[str]:
    status = state.status
    if not status or state.ended:
        return
    stage, age = status["stage"], state.age or 0.0
    counted = f"{stage['step']} of {stage['total']}" if stage["step"] else f"{stage['total']}"
    counted = f", {counted} {stage['of']}" if stage["total"] else ""
    yield f"stage     {stage['name']}{counted}, for {format_duration(stage['seconds'] + age)}"
    yield f"age       started {format_duration(time.time() - status['started'])} ago, this was written {age:.0f} s ago"
    yield f"moved     {status['still_seconds'] + (age if state.state == 'silent' else 0):.0f} s ago"
    if state.alarm:
        yield f"STUCK     {state.alarm}"
    yield from _numbers(status)
    yield ""
    width = max([13, *(len(component["name"]) for component in status["components"])])
    yield f"{'component':<{width}} {'':<8} {'waits for':<13} {'progress':>9}  doing"
    yield from (_component(component, width) for component in status["components"])


def _numbers(status: Mapping[str, Any]) -> Iterator[str]:
    rates, queues, versions = status["throughput"], status["queues"], status["versions"]
    yield (
        f"rates     {rates['sampled_tokens_per_second']:,.0f} tokens/s sampled, {rates['learned_tokens_per_second']:,.0f} "
        f"tokens/s learned, {rates['episodes_per_minute']:,.0f} episodes/min (of the last {rates['window_seconds']:.0f} s)"
    )
    if not any(component["name"] == "generator" for component in status["components"]):
        return
    yield (
        f"groups    {queues['groups_running']} in rollout, {queues['groups_ready']} ready, {queues['groups_training']} in "
        f"training; {status['episodes']['in_flight']} episodes in flight, {status['episodes']['ended']} ended"
    )
    yield (
        f"queues    {queues['requests_running']} requests running, {queues['requests_waiting']} waiting, "
        f"{queues['environment_calls']} calls in environments, {queues['ledger_writes']} writes of the ledger"
    )
    yield f"versions  {versions['oldest_in_flight']} to {versions['newest']} in flight, {versions['published']} published"


def _component(component: Mapping[str, Any], width: int) -> str:
    since = component["since_progress"]
    ago = "" if since is None else f"{since:.0f} s ago"
    name, waits_for = f"{component['name']:<{width}}", component["waits_for"] or "-"
    return f"{name} {component['state']:<8} {waits_for:<13} {ago:>9}  {component['doing']}"
