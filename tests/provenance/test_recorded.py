"""Our numbers against those of released code, taken once and kept as JSON: one file for each method (CONTRIBUTING.md says how).

A file holds one small ragged input and the cases taken on it: repository, commit, file and function, our hyper-parameters for
them, and the numbers: advantage and gradients of each token in order, the loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracles import records
from support.batches import oracle_name
from support.golden import recipe_result

from turnwise.core.signals import WITH_GRADIENT
from turnwise.recipes.catalogue import record_of

FILES = sorted((Path(__file__).parent / "recorded").glob("*.json"))
LIVE = {oracle_name(signal) for signal in WITH_GRADIENT}  # signals that a forward pass gives with their gradient
GRADIENT = {"gradient": "logp", **{f"gradient of {name}": name for name in LIVE}}


def batch_of(groups: list) -> records.Batch:
    """The input as records; a column of tokens that is left out has the default of ``records.token``."""
    return [[trajectory(one) for one in group] for group in groups]


def trajectory(one: dict) -> records.Trajectory:
    turns = [records.Turn(**{**turn, "tokens": tokens_of(turn["tokens"])}) for turn in one["turns"]]
    return records.Trajectory(**{**one, "turns": turns})


def tokens_of(columns: dict) -> list[records.Token]:
    known = records.token.__code__.co_varnames[: records.token.__code__.co_argcount]
    made = []
    for values in zip(*columns.values()):
        row = dict(zip(columns, values))
        one = records.token(**{name: x for name, x in row.items() if name in known})
        for name in set(row) - set(known):
            setattr(one, name, records.leaf(row[name]) if name in LIVE else row[name])
        made.append(one)
    return made


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_of_released_code(path):
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told["cases"]
    for case in told["cases"]:
        batch = batch_of(told["input"])
        advantage, loss, _ = recipe_result(path.stem, batch, **case["settings"])
        ours = {"advantage": advantage, "loss": loss.item()}
        assert case["output"]
        for name, theirs in case["output"].items():
            found = ours[name] if name in ours else records.gradients(batch, loss, GRADIENT[name])
            assert found == pytest.approx(theirs, rel=1e-6, abs=1e-6), (name, case["function"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_record_names_the_code(path):
    """Repository, commit and file of the numbers are those of the method's record."""
    record = record_of(path.stem)
    assert record, "write a record for it"
    named = {(one.address, one.commit) for one in record.code}
    files = {file.partition(":")[0] for one in record.code for file in one.files}
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        assert (case["repository"], case["commit"]) in named and case["file"] in files
