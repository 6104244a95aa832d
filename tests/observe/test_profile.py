"""The profile: own times that sum to the whole, nothing left behind, and nothing done where nobody asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from gzip import decompress
from pathlib import Path

import pytest
import torch

from turnwise.algebra.objective import Objective
from turnwise.core.protocols import LedgerProtocol, PolicyCheckProtocol
from turnwise.data.mixing import Mixture
from turnwise.engines.generator.cuda_graphs import GraphDecoder
from turnwise.engines.generator.generator import LocalGenerator
from turnwise.engines.generator.model_runner import ModelRunner
from turnwise.engines.generator.scheduler import Scheduler
from turnwise.engines.learner.cuda_graphs import CapturedLayers
from turnwise.engines.learner.learner import LocalLearner
from turnwise.observe import profile
from turnwise.observe.profile import (
    PAGE,
    SPANS,
    TRACE,
    Profile,
    SpanTimer,
    operators,
    timed_backward,
    timed_optimisers,
    windows,
)
from turnwise.training.api import train
from turnwise.training.collector import Collector
from turnwise.training.loop import Loop

SMALL = {
    "method": "grpo", "env": "calculator", "difficulty": (1,), "groups": 1, "group_size": 2, "eval_tasks": 1, "hidden": 16,
    "layers": 1, "cold_steps": 1, "cold_demos": 8, "cold_batch": 4, "max_tokens": 8, "max_turns": 2, "trackers": (),
}  # fmt: skip


def numbers(page: str) -> dict[str, float]:
    """Seconds per step, by row of the first table."""
    table = page.split("The most expensive")[0]
    return {name: float(s) for name, s in re.findall(r"^\| ([a-z][^|]*) \| ([\d.]+) \|", table, re.MULTILINE)}


def test_every_span_names_a_method_that_exists():
    """A method that was renamed would be skipped, since another engine may lack it: its time would count for its caller."""
    parts = {
        "collector": [Collector],
        "generator": [LocalGenerator, ModelRunner, Scheduler, GraphDecoder],
        "learner": [LocalLearner, CapturedLayers],
        "mixture": [Mixture],
        "policy_check": [PolicyCheckProtocol],
        "objective": [Objective],
        "ledger": [LedgerProtocol],
        "": [Loop],
    }
    for span, part, path in SPANS:
        *_, method = path.split(".")
        owners = [owner for owner in parts[part] if hasattr(owner, method) or method in owner.__annotations__]
        assert owners, f"{span}: no {part} has a method {method}"


@pytest.mark.parametrize("start", [0, 11])
@pytest.mark.parametrize("left", [*range(1, 12), 23, 24, 100])
def test_windows_lie_within_the_run(start, left):
    timed, traced = windows(start, start + left)
    assert timed and traced
    assert {*timed, *traced} <= {*range(start + 1, start + left + 1)}
    assert left == 1 or not {*timed} & {*traced}


class FakeTime:
    """A time module whose clock moves only by sleeping: no figure depends on how busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def fake_time(monkeypatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(profile, "time", fake)
    return fake


def test_own_times_sum_to_the_whole(fake_time):
    timer = SpanTimer(running=True)
    with timer.span("outer"):
        fake_time.sleep(3.0)
        for _ in range(2):
            with timer.span("inner"):
                fake_time.sleep(1.0)
    assert timer.calls == {("outer",): 1, ("outer", "inner"): 2}
    assert timer.seconds == {("outer",): 3.0, ("outer", "inner"): 2.0}
    assert sum(timer.seconds.values()) == fake_time.now


def test_captures_are_one_row_wherever_they_happen(tmp_path, fake_time):
    profile = Profile(tmp_path)
    profile.timer.running = True
    profile.timed, profile.traced, profile.total, profile.cuda = range(1, 2), range(2, 3), 1.0, False
    for outer in ("update", "measure"):
        with profile.timer.span(outer), profile.timer.span("capture"), profile.timer.span("backward"):
            fake_time.sleep(1.0)
    profile._finish_timing()
    rows = {name: (seconds, calls) for name, seconds, calls in profile.rows()}
    assert {*rows} == {
        "capture graphs of new sizes", "measure signals", "update: forward and loss",
        "other (packing, statistics, the loop itself)",
    }  # fmt: skip
    assert rows["capture graphs of new sizes"] == (2.0, 2)
    assert rows["update: forward and loss"][0] == 0.0


def test_functions_coroutines_and_generators_keep_their_answers():
    timer = SpanTimer(running=True)

    async def later(x):
        return x + 1

    def some(n):
        yield from range(n)

    assert timer.wrap("f", lambda x: 2 * x)(4) == 8
    assert asyncio.run(timer.wrap("g", later)(1)) == 2
    assert list(timer.wrap("h", some)(3)) == [0, 1, 2]
    assert set(timer.seconds) == {("f",), ("g",), ("h",)}


def test_threads_do_not_nest_in_each_other():
    timer = SpanTimer(running=True)
    with timer.span("here"):
        thread = threading.Thread(target=timer.wrap("there", lambda: None))
        thread.start()
        thread.join()
    assert {*timer.seconds} == {("here",), ("there",)}


def test_a_stopped_timer_records_nothing():
    timer = SpanTimer()
    with timer.span("a"):
        pass
    assert not timer.seconds


def test_an_operator_inside_another_is_not_the_others_own():
    at = {"pid": 1, "tid": 1, "ph": "X", "cat": "cpu_op"}
    events = [
        {**at, "name": "outer", "ts": 0.0, "dur": 10.0},
        {**at, "name": "inner", "ts": 1.0, "dur": 4.0},
        {**at, "name": "inner", "ts": 5.0, "dur": 2.0},
        {**at, "name": "outer", "ts": 10.0, "dur": 1.0},
        {**at, "name": "elsewhere", "ts": 2.0, "dur": 3.0, "tid": 2},
        {**at, "name": "a span of ours", "ts": 0.0, "dur": 99.0, "cat": "user_annotation"},
        {"ph": "M", "name": "process_name"},
    ]
    assert operators(events, ("cpu_op",)) == [("inner", 2, 6.0), ("outer", 2, 5.0), ("elsewhere", 1, 3.0)]


def loss_of(weight: torch.Tensor) -> torch.Tensor:
    return (weight * weight).sum()


@pytest.mark.parametrize("fails", [False, True])
def test_backward_is_timed_and_torch_is_restored(fails):
    original = torch.autograd.backward, torch.autograd.grad
    timer, weight = SpanTimer(running=True), torch.ones(2, requires_grad=True)
    with contextlib.suppress(ZeroDivisionError), timed_backward(timer):
        assert torch.autograd.backward is not original[0] and torch.autograd.grad is not original[1]
        loss_of(weight).backward()
        torch.autograd.grad(loss_of(weight), weight)
        if fails:
            raise ZeroDivisionError
    assert torch.autograd.backward is original[0] and torch.autograd.grad is original[1]
    assert timer.calls[("backward",)] == 2 and weight.grad.tolist() == [2.0, 2.0]


def test_nested_profiles_restore_in_order():
    original, outer, inner = torch.autograd.backward, SpanTimer(running=True), SpanTimer(running=True)
    with timed_backward(outer):
        with timed_backward(inner):
            loss_of(torch.ones(1, requires_grad=True)).backward()
        loss_of(torch.ones(1, requires_grad=True)).backward()
    assert torch.autograd.backward is original
    assert (outer.calls[("backward",)], inner.calls[("backward",)]) == (2, 1)


def test_optimiser_steps_are_timed_inside_the_block_only():
    timer, weight = SpanTimer(running=True), torch.ones(1, requires_grad=True)
    optimiser = torch.optim.SGD([weight], lr=0.1)
    loss_of(weight).backward()
    with timed_optimisers(timer):
        optimiser.step()
    optimiser.step()
    assert timer.calls == {("optimiser",): 1}


@pytest.mark.parametrize("steps", [1, 4])
def test_a_run_leaves_a_page_and_a_trace(steps, tmp_path):
    before = torch.autograd.backward, torch.autograd.grad
    said: list[str] = []
    listen = lambda event, facts: said.append(str(facts.get("text", "")))  # noqa: E731
    summary = train(listen, **SMALL, steps=steps, profile=True, out=str(tmp_path), name="watched")
    assert (torch.autograd.backward, torch.autograd.grad) == before
    page = (tmp_path / "watched" / PAGE).read_text()
    rows = numbers(page)
    for part in (
        "rollout: decode",
        "rollout: prefill",
        "rollout: environments",
        "measure",
        "credit",
        "update: forward",
    ):
        assert any(name.startswith(part) for name in rows), (part, page)
    for part in ("update: backward", "update: optimiser", "publish weights", "other"):
        assert any(name.startswith(part) for name in rows), (part, page)
    each = float(re.search(r": ([\d.]+) s each", page).group(1))
    assert sum(rows.values()) == pytest.approx(each, rel=0.02, abs=2e-3)
    assert ("also traced" in page) == (steps == 1)
    events = json.loads(decompress((tmp_path / "watched" / TRACE).read_bytes()))["traceEvents"]
    assert {"update", "rollout", "aten::mm"} <= {event.get("name") for event in events}
    assert any(PAGE in text for text in said) and summary["steps"] == steps


def test_rollouts_beside_the_learner_are_no_part_of_the_sum(tmp_path, fake_time):
    profile = Profile(tmp_path)
    profile.timer.running = True
    profile.timed, profile.traced, profile.total, profile.cuda = range(1, 3), range(3, 4), 3.0, False

    def generate() -> None:
        for name, seconds in (("prefill", 1.0), ("decode", 4.0)):
            with profile.timer.span(name):
                fake_time.sleep(seconds)

    with profile.timer.span("update"):
        thread = threading.Thread(target=generate)  # its outermost spans do not nest in the update
        thread.start()
        thread.join()
    profile._finish_timing()
    page = profile.page()
    assert (
        "Concurrently, in the generator's thread or between steps: prefill 0.5000 s per step, decode 2.0000 s" in page
    )
    assert not any(name.startswith(("prefill", "decode")) for name in numbers(page))
    assert "prefill" not in profile.brief() and "decode" not in profile.brief()


def test_an_asynchronous_run_counts_no_rollouts(tmp_path):
    train(**SMALL, steps=3, staleness=1, profile=True, out=str(tmp_path), name="beside")
    page = (tmp_path / "beside" / PAGE).read_text()
    assert not any(name.startswith(("prefill", "decode")) for name in numbers(page)), page


def test_no_profile_without_the_setting(tmp_path):
    train(**SMALL, steps=1, out=str(tmp_path), name="plain")
    assert not {PAGE, TRACE} & {path.name for path in (tmp_path / "plain").iterdir()}


def test_a_profiled_run_samples_and_learns_the_same(tmp_path):
    runs = [train(**SMALL, steps=2, profile=p, out=str(tmp_path), name=f"p{p}") for p in (False, True)]
    read = lambda run: [json.loads(line) for line in (Path(run["run"]) / "metrics.jsonl").open()]  # noqa: E731
    kept = [
        [{k: v for k, v in row.items() if "second" not in k and "time" not in k} for row in read(run)] for run in runs
    ]
    assert json.dumps(kept[0]) == json.dumps(kept[1])
