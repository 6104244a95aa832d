"""Nothing lost, nothing trained twice: a random history with crashes, and a real process killed again and again."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turnwise.core.records import Group, Task, Trajectory, Turn
from turnwise.errors import RecordError
from turnwise.store.checkpoint import checkpoints, discard_after, load_checkpoint, save_checkpoint
from turnwise.store.ledger import SqliteLedger


def rollout(name: str, seed: int) -> Group:
    return Group(
        name, Task("toy", seed), (Trajectory(f"{name}/0", Task("toy", seed), (Turn((1,), (seed % 50,), (-1.0,)),)),)
    )


class History(RuleBasedStateMachine):
    """A loop whose "weights" are the list of tasks it trained on, with the ledger beside it."""

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.step, self.drawn, self.name = 0, 0, 0
        self.weights: list[int] = []
        self.flying: dict[str, int] = {}
        self.ready: dict[str, int] = {}
        self.gone: list[int] = []
        self.ledger = SqliteLedger(self.directory / "ledger.sqlite")
        self.sealed = -1
        self.snapshots = [self.snapshot()]

    def snapshot(self):
        live = sorted([*self.flying.values(), *self.ready.values()])
        return self.step, self.drawn, list(self.weights), live, list(self.gone), self.name

    def issue_task(self, seed):
        # ids are counted from the snapshot, as a loop would: after a crash the same ids come again
        name, self.name = f"g{self.name}", self.name + 1
        self.ledger.issue(name, Task("toy", seed), self.step, self.step)
        self.flying[name] = seed

    @rule()
    def issue(self):
        self.issue_task(self.drawn)
        self.drawn += 1

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data):
        name = data.draw(st.sampled_from(sorted(self.flying)))
        self.ready[name] = self.flying.pop(name)
        self.ledger.finish(rollout(name, self.ready[name]), self.step)

    @precondition(lambda self: self.ready)
    @rule(count=st.integers(1, 2))
    def train(self, count):
        names = sorted(self.ready)[:count]
        self.ledger.train(names, self.step)
        self.weights += [self.ready.pop(name) for name in names]
        self.step += 1

    @precondition(lambda self: self.ready or self.flying)
    @rule(data=st.data())
    def drop(self, data):
        name = data.draw(st.sampled_from(sorted([*self.ready, *self.flying])))
        self.gone.append((self.ready if name in self.ready else self.flying).pop(name))
        self.ledger.drop(name, "no spread", self.step)

    @rule(written=st.booleans())
    def checkpoint(self, written):
        """At any moment, also in the midst of a step; not ``written``: killed, or out of disk, before the rename."""
        try:
            self.ledger.seal(self.step)
        except RecordError:
            assert self.sealed == self.step or self.step == 0
            return
        self.sealed = self.step
        if written:
            self.snapshots = [*(s for s in self.snapshots if s[0] < self.step), self.snapshot()][-3:]
            self.ledger.prune(self.snapshots[0][0])

    @rule(back=st.integers(0, 2), keep=st.booleans(), reissue=st.booleans())
    def crash(self, back, keep, reissue):
        """Resume from the newest checkpoint, or from an older one when that one is damaged."""
        self.ledger.close()
        self.ledger = SqliteLedger(self.directory / "ledger.sqlite")
        self.snapshots = self.snapshots[: max(1, len(self.snapshots) - back)]
        self.step, self.drawn, weights, live, gone, self.name = self.snapshots[-1]
        self.weights, self.gone = list(weights), list(gone)
        resumed = self.ledger.resume(self.step, keep_finished=keep)
        owed = [i.task.seed for i in resumed.to_reissue] + [g.task.seed for g in resumed.pending]
        assert sorted(owed) == live, "lost or doubled"
        assert keep or not resumed.pending
        self.sealed = self.step
        self.ready = {g.id: g.task.seed for g in resumed.pending}
        self.flying = {}
        for issued in resumed.to_reissue if reissue else ():
            self.issue_task(issued.task.seed)
        if not reissue:  # killed again before it could issue anything
            self.crash(back=0, keep=keep, reissue=True)

    @invariant()
    def nothing_lost_nothing_twice(self):
        counts = self.ledger.group_counts()
        assert (counts.in_flight, counts.finished) == (len(self.flying), len(self.ready))
        assert counts.trained == len(self.weights) == len(set(self.weights))
        everything = [*self.weights, *self.flying.values(), *self.ready.values(), *self.gone]
        assert sorted(everything) == list(range(self.drawn))

    def teardown(self):
        self.ledger.close()
        shutil.rmtree(self.directory)


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


# ------------------------------------------------------------- a real SIGKILL


def restore(run: Path) -> tuple[int, int, list[int], SqliteLedger, object]:
    """What the resume protocol says: newest whole checkpoint, forget later ones, tell the ledger its step."""
    step, state, weights = 0, {"drawn": 0}, []
    if checkpoints(run / "checkpoints"):
        loaded = load_checkpoint(run / "checkpoints")
        step, state, weights = loaded.step, loaded.state, loaded.tensors["weights"].tolist()
        discard_after(run / "checkpoints", step)
    ledger = SqliteLedger(run / "ledger.sqlite")
    return step, state["drawn"], weights, ledger, ledger.resume(step)


def loop(run: Path, seed: int) -> None:
    """An asynchronous little run that never ends by itself: two groups in flight while one is trained on."""
    dice = random.Random(seed)
    step, drawn, weights, ledger, resumed = restore(run)
    ready = list(resumed.pending)
    flying = {}
    for issued in resumed.to_reissue:
        ledger.issue(name := f"{seed}-again-{issued.task.seed}", issued.task, step, step)
        flying[name] = issued.task.seed
    while True:
        while len(flying) < 3:
            ledger.issue(name := f"{seed}-{drawn}", Task("toy", drawn), step, step)
            flying[name] = drawn
            drawn += 1
        name = dice.choice(sorted(flying))
        ready.append(rollout(name, flying.pop(name)))
        ledger.finish(ready[-1], step)
        if len(ready) < 2:
            continue
        batch = [ready.pop(dice.randrange(len(ready)))]
        ledger.train([g.id for g in batch], step)
        weights += [g.task.seed for g in batch]
        step += 1
        if dice.random() < 0.5:
            ledger.seal(step)
            state = {"drawn": drawn}
            tensors = {"weights": torch.tensor(weights, dtype=torch.int64)}
            save_checkpoint(run / "checkpoints", step, tensors, state, keep=2)
            kept = [int(path.name[5:13]) for path in checkpoints(run / "checkpoints")]
            ledger.prune(min(kept))


@pytest.mark.thorough
def test_twenty_kills(tmp_path):
    context = multiprocessing.get_context("forkserver")  # preloaded in conftest.py
    dice = random.Random(7)
    progress = 0
    for life in range(20):
        child = context.Process(target=loop, args=(tmp_path, life))
        child.start()
        _wait_for_life(tmp_path, child.pid)
        if life % 2:  # just after a rename; otherwise wherever the dice fall
            _wait_for_checkpoint(tmp_path / "checkpoints")
        time.sleep(dice.uniform(0.0, 0.005 if life % 2 else 0.1))
        assert child.is_alive(), "the child ended by itself"
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kill never leaves a damaged checkpoint under its final name
            step, drawn, weights, ledger, resumed = restore(tmp_path)
        with ledger:
            counts = ledger.group_counts()
            trained = sorted(entry.task.seed for entry in ledger.groups() if entry.state == "trained")
            assert trained == sorted(weights) and counts.trained == len(set(weights)) == step
            owed = [i.task.seed for i in resumed.to_reissue] + [g.task.seed for g in resumed.pending]
            assert sorted(owed + weights) == list(range(drawn)), json.dumps([owed, weights, drawn])
        progress = max(progress, step)
    assert progress >= 10, "the children were killed before they did anything"


def _wait_for_checkpoint(directory: Path) -> None:
    seen, end = set(checkpoints(directory)), time.monotonic() + 120
    while set(checkpoints(directory)) <= seen:
        assert time.monotonic() < end, "the child makes no progress"
        time.sleep(0.001)


def _wait_for_life(run: Path, pid: int) -> None:
    """Until the child holds the ledger, so that kills fall inside its work and not inside its imports."""
    lock, end = run / "ledger.sqlite.lock", time.monotonic() + 120
    while time.monotonic() < end:
        if lock.exists() and lock.read_text().strip() == str(pid):
            return
        time.sleep(0.002)
    raise AssertionError("the child never started")
