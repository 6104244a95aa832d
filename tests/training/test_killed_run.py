"""Killed with SIGKILL at random moments and resumed: the ledger balances and the weights are bit for bit the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
from safetensors.torch import load_file

from turnwise.errors import SettingError, StoreError
from turnwise.store.ledger import SqliteLedger
from turnwise.training import api

SMALL = {
    "env": "guess",
    "difficulty": (1,),
    "hidden": 32,
    "layers": 1,
    "vocabulary": 320,
    "cold_steps": 4,
    "cold_batch": 8,
    "steps": 8,
    "groups": 2,
    "group_size": 3,
    "max_tokens": 12,
    "context": 160,
    "eval_tasks": 6,
    "checkpoint_every": 2,
    "trackers": (),
}


# A server with everything imported and no thread started forks the children: no import to wait for, so a kill can fall
# anywhere in the run itself; and forking this process would hang them, since its OpenMP threads do not survive a fork.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["turnwise.training.api"])


def in_child(function, *args, **kwargs):
    process = FORKS.Process(target=function, args=args, kwargs=kwargs)
    process.start()
    return process


def finish(process, limit=600.0):
    process.join(limit)
    assert process.exitcode == 0, f"the run ended with {process.exitcode}"


def weights(run):
    return load_file(run / "model" / "model.safetensors")


def balanced(run):
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        counts = ledger.group_counts()
    assert counts.issued == counts.in_flight + counts.finished + counts.trained + counts.dropped
    return counts


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    finish(in_child(time.sleep, 0))  # starts the server
    began = time.perf_counter()
    finish(in_child(api.train, method="grpo", out=str(out), name="run", **SMALL))
    return out / "run", time.perf_counter() - began


def run_for(seconds, run):
    """Wait, but not beyond the last step but one: a machine that was busy when a run was timed may be idle now."""
    end, metrics = time.monotonic() + seconds, run / "metrics.jsonl"
    while time.monotonic() < end and (not metrics.is_file() or metrics.read_text().count("\n") < SMALL["steps"] - 1):
        time.sleep(0.005)


def killed_again_and_again(out, seconds, rng, most, method="grpo", **more):
    """One run from start to end, killed up to ``most`` times on the way; how often it was."""
    run, kills = out / "run", 0
    process = in_child(api.train, method=method, out=str(out), name="run", **SMALL, **more)
    while kills < most:
        run_for(rng.uniform(0.05, 0.6) * seconds, run)
        if not process.is_alive():
            break  # it got to the end between two kills
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        if (run / "ledger.sqlite").is_file():
            balanced(run)
        if (run / "run.json").is_file():
            process = in_child(api.resume, run)
        else:  # killed before the run directory existed: nothing was promised yet
            process = in_child(api.train, method=method, out=str(out), name="run", **SMALL, **more)
    finish(process)
    return kills


@pytest.mark.slow
def test_twenty_kills_change_nothing(uninterrupted, tmp_path):
    whole, seconds = uninterrupted
    rng, kills = random.Random(7), 0
    for attempt in range(20):
        out = tmp_path / str(attempt)
        kills += killed_again_and_again(out, seconds, rng, 20 - kills)
        same_as_if_nothing_had_happened(out / "run", whole)
        if kills == 20:
            return
    pytest.fail(f"only {kills} kills in 20 runs")


def same_as_if_nothing_had_happened(run, whole):
    counts = balanced(run)
    assert counts.in_flight == counts.finished == 0
    assert counts.trained == SMALL["steps"] * SMALL["groups"]  # nothing lost, nothing trained twice
    mine, theirs = weights(run), weights(whole)
    assert mine.keys() == theirs.keys() and all((mine[k] == theirs[k]).all() for k in mine)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, SMALL["steps"] + 1))  # every step logged once


@pytest.mark.slow
def test_kills_change_nothing_for_a_run_with_a_cache_and_demonstrations(uninterrupted, tmp_path):
    method = {"method": "bepa", "demos": "oracle"}
    began = time.perf_counter()
    finish(in_child(api.train, out=str(tmp_path / "whole"), name="run", **method, **SMALL))
    seconds = time.perf_counter() - began
    assert killed_again_and_again(tmp_path / "broken", seconds, random.Random(3), 4, **method)
    same_as_if_nothing_had_happened(tmp_path / "broken" / "run", tmp_path / "whole" / "run")
    used = []
    for name in ("whole", "broken"):
        with SqliteLedger(tmp_path / name / "run" / "ledger.sqlite", readonly=True) as ledger:
            used.append(ledger.mixed())
    assert used[0] == used[1] and used[0], "what was mixed in is accounted for, once"


@pytest.mark.slow
def test_two_runs_of_one_seed_are_bit_identical(uninterrupted, tmp_path):
    whole, _ = uninterrupted
    finish(in_child(api.train, method="grpo", out=str(tmp_path), name="run", **SMALL))
    mine, theirs = weights(tmp_path / "run"), weights(whole)
    assert all((mine[k] == theirs[k]).all() for k in mine)


@pytest.mark.slow
def test_staleness_one_survives_kills_and_accounts_for_everything(tmp_path):
    settings = {**SMALL, "staleness": 1}
    run = tmp_path / "run"
    process = in_child(api.train, method="rloo", out=str(tmp_path), name="run", **settings)
    for pause in (1.0, 1.5, 2.0):
        time.sleep(pause)
        if process.is_alive() and (run / "run.json").is_file():
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            process = in_child(api.resume, run)
    finish(process)
    counts = balanced(run)
    assert counts.finished + counts.in_flight <= 2 * SMALL["groups"]  # what ran ahead when the last step was done
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("staleness", 0.0) for row in rows) <= 1.0


def test_a_finished_run_says_so_and_wrong_names_are_refused(uninterrupted):
    whole, _ = uninterrupted
    assert api.resume(whole)["steps"] == SMALL["steps"]
    with pytest.raises(StoreError, match="run"):
        api.resume(whole.parent / "rum")
    with pytest.raises(SettingError, match="another recipe"):
        facts = json.loads((whole / "run.json").read_text())
        facts["recipe"] = "Recipe(something else)"
        (whole / "run.json").write_text(json.dumps(facts))
        api.resume(whole)
