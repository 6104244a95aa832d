"""A short version of each part of `make trial`, and the rows that let a long one continue."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from trials import (
    bad_environments,
    bad_files,
    bad_models,
    bad_runs,
    bad_settings,
    cases,
    fixtures,
    fuzz,
    kills,
    moments,
    sandbox,
    servers,
    starvation,
)
from trials.commands import classify
from trials.outcome import Outcome, Results, faults
from trials.report import page, table

MODULES = (bad_settings, bad_files, bad_environments, bad_models, bad_runs)
SHORT = {  # attempts that reach far and end soon, of each kind of bad input
    "commands": "no such method", "settings": "--lr 'nan'", "config files": "object tag", "data files": "pairs: not UTF-8",
    "prompts": "cut gzip", "rewards": "does not import", "environments": "train: turns are text", "models": "wrong layers",
    "run directories": "ledger empty",
}  # fmt: skip


LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="other processes are listed and limited as on Linux")


def run(outcomes, results):
    for outcome in outcomes:
        results.add(outcome)
    return list(results.outcomes.values())


def no_fault(outcomes):
    assert outcomes and not faults(outcomes), table(outcomes)


# --------------------------------------------------------------------- the parts


@pytest.mark.thorough
def test_servers_hold_and_one_that_admits_everybody_does_not(monkeypatch):
    monkeypatch.setattr(servers, "BLOCK", 25)
    held = run(servers.trial(True, Results(), print), Results())
    no_fault(held)
    assert [(o.kind, o.result, o.count) for o in held] == [("serve", "held", 25), ("endpoint", "held", 25)]
    monkeypatch.setattr("turnwise.serve.front.Front.check", lambda self, request: None)
    open_ = run(servers.trial(True, Results(), print), Results())
    assert {o.kind for o in faults(open_)} == {"serve", "endpoint"} and all("seed 33" in o.name for o in open_)


@pytest.mark.thorough
@LINUX
def test_killed_runs_resume(monkeypatch):
    monkeypatch.setattr(kills, "KINDS", {kind: kills.KINDS[kind] for kind in ("plain groups", "local generator")})
    results = Results()
    no_fault(run(kills.trial(2, results, print, jobs=2), results))
    assert sum(o.count for o in results.outcomes.values()) == 2


def test_kills_are_drawn_from_a_grammar_by_its_seed_and_most_fall_inside_learning_or_publication():
    drawn = [list(itertools.islice(kills.draw(seed), 400)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {(k.kind, k.who) for k in drawn[0]} >= {(n, who) for n, kind in kills.KINDS.items() for who in kind.who}
    assert {k.stage for k in drawn[0]} == set(kills.STAGES)
    assert sum(k.stage in (moments.LEARNING, moments.PUBLICATION) for k in drawn[0]) > 200
    assert len({k.name for k in drawn[0]}) == 400


def test_a_run_notes_what_it_does_and_the_kill_falls_there(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(moments.os, "kill", lambda *words: killed.append(words))
    file = tmp_path / "moments"
    told = moments.Told(file, moments.Moment(moments.PUBLICATION, 1, 5), moments.Victim())
    for _ in range(3):
        with told.inside("update"):
            assert told.stage == moments.LEARNING
        with told.inside("publish"):
            for number in range(20):
                str(number).strip()
    assert killed == [(os.getpid(), signal.SIGKILL)] and moments.hit(file) == (moments.PUBLICATION, 1)
    assert not moments.Told(file, moments.Moment(moments.PUBLICATION, 1, 5), moments.Victim()).armed  # a later life


@pytest.mark.slow
def test_bad_inputs():
    every = [case for module in MODULES for case in module.cases()]
    chosen = [case for case in every if SHORT[case.part] == case.name]
    assert {case.part for case in chosen} == set(SHORT) == {case.part for case in every}
    results = Results()
    try:
        no_fault(run(cases.trial(chosen, results, print), results))
    finally:
        fixtures.remove()


@pytest.mark.slow
def test_fuzzed_episodes():
    results = Results()
    no_fault(run(fuzz.trial(25, results, print), results))
    assert all(o.count == 25 for o in results.outcomes.values())


@pytest.mark.slow
def test_attacks_on_every_rung():
    results = Results()
    no_fault(run(sandbox.trial(True, results, print), results))


@pytest.mark.thorough
@LINUX
def test_starved_runs():
    results = Results()
    no_fault(run(starvation.trial(2, results, print), results))


def test_starvation_is_drawn_from_a_grammar_by_its_seed():
    drawn = [list(itertools.islice(starvation.draw(seed), 40)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert {a.who for a in drawn[0]} == set(starvation.WHO) and {a.what for a in drawn[0]} == set(starvation.WHAT)


@pytest.mark.parametrize(
    ("ended", "result", "fault"),
    [
        ((2, "turnwise: too many open files", 1.0), "stopped", ""),
        ((None, "", 240.0), "hung", "still running"),
        ((-9, "", 1.0), "died", "exit status -9"),
        ((2, "", 1.0), "died", "no message"),
        ((2, "Traceback (most recent call last)\nKeyError: 1", 1.0), "traceback", "KeyError"),
    ],
)
def test_how_a_starved_run_ended(ended, result, fault, tmp_path):
    came_out, wrong = starvation.verdict(ended, tmp_path, tmp_path)
    assert came_out == result and (fault in wrong if fault else not wrong)


# ------------------------------------------------------------------ how it is kept


def test_every_attempt_has_a_name_of_its_own():
    names = [(case.part, case.name) for module in MODULES for case in module.cases()]
    assert len(names) == len(set(names)) >= 200


def test_what_came_out_well_is_not_repeated_and_what_failed_is(tmp_path):
    path = tmp_path / "rows" / "inputs.jsonl"
    results = Results(path)
    results.add(Outcome("models", "a", "refused"))
    results.add(Outcome("models", "b", "hung", "still running after 120 s"))
    again = Results(path)
    assert again.done("models", "a") and not again.done("models", "b") and not again.done("models", "c")
    again.add(Outcome("models", "b", "refused"))
    assert Results(path).done("models", "b") and len(path.read_text().splitlines()) == 3


def test_counts_of_a_kind_leave_failures_out(tmp_path):
    results = Results(tmp_path / "kills.jsonl")
    results.add(Outcome("kills", "critic, run 1", "resumed", count=3, kind="critic"))
    results.add(Outcome("kills", "critic, run 2", "failed", "weights differ", count=2, kind="critic"))
    assert Results(tmp_path / "kills.jsonl").count("kills", "critic") == 3


def test_the_page_counts_attempts_and_lists_every_fault():
    outcomes = [
        Outcome("kills", "critic, run 1", "resumed", count=3, kind="critic"),
        Outcome("kills", "critic, run 2", "failed", "weights differ", count=1, kind="critic"),
    ]
    text = page({"kills": outcomes}, {"kills": 100}, {"0.3.0 on 2026-11-18"})
    assert "| Kills | 4 | 100 | 1 |" in text and "| kills: critic | 4 | 3 resumed, 1 failed | 1 |" in text
    assert "- **kills, critic, run 2**: weights differ" in text


@pytest.mark.parametrize(
    ("ended", "expect", "result", "fault"),
    [
        ((2, "", "turnwise: no", 1.0), "refused", "refused", ""),
        ((2, "", "Traceback (most recent call last)\nKeyError: 1", 1.0), "refused", "traceback", "KeyError"),
        ((None, "", "", 120.0), "refused", "hung", "still running"),
        ((0, "fine", "", 1.0), "refused", "ran", "expected refused"),
        ((-9, "", "", 1.0), "either", "died", "exit status -9"),
        ((2, "", "no", 1.0), "either", "refused", "no message"),
        ((2, "", "turnwise: " + "x" * 2000, 1.0), "refused", "refused", "longer than a page"),
    ],
)
def test_how_a_command_ended(ended, expect, result, fault):
    outcome = classify("commands", "x", ended, expect)
    assert outcome.result == result and (fault in outcome.fault if fault else not outcome.fault)


def test_the_rows_of_the_project_are_readable_and_hold_no_fault():
    for part in ("kills", "inputs", "fuzz", "sandbox", "starvation", "tests"):
        path = Path(__file__).parents[2] / "trials" / "results" / f"{part}.jsonl"
        rows = path.read_text().splitlines()
        assert rows and all(json.loads(row)["tried"] for row in rows)
        no_fault(list(Results(path).outcomes.values()))
