"""Answers labelled one by one: a file of prompt, completion and label, who learns from it, and who refuses it in words."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from turnwise import recipes
from turnwise.cli import sharing as exports
from turnwise.config.settings import Settings
from turnwise.data.dataset import read_dataset
from turnwise.errors import TurnwiseError
from turnwise.training import api
from turnwise.training.plan import DataSources, EnvSpec


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def sources(method: str, path: str) -> DataSources:
    settings = Settings.of({"method": method, "env": "guess", "data": path})
    return DataSources.from_settings(settings, EnvSpec.from_settings(settings), recipes.build(method))


def test_a_boolean_label_is_a_verdict_and_a_number_stays_a_fact(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    good, bad = read_dataset(write(tmp_path / "a.jsonl", rows)).rows
    assert good.examples[0].facts == {"chosen": 1.0} and bad.examples[0].facts == {"chosen": 0.0}
    other = read_dataset(write(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b", "label": 3}])).rows[0]
    assert other.examples[0].facts == {"label": 3.0}


def test_who_takes_them(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    path = write(tmp_path / "labelled.jsonl", rows)
    assert len(sources("kto", path).rows) == 2
    with pytest.raises(TurnwiseError, match="learns from pairs"):
        sources("dpo", path)
    with pytest.raises(TurnwiseError, match="label is false"):
        sources("otr", path)
    with pytest.raises(TurnwiseError, match="no label"):
        sources("kto", write(tmp_path / "plain.jsonl", [{"prompt": "a", "completion": "b"}]))
    mixed = [{"prompt": "a", "chosen": "b", "rejected": "c"}, rows[0]]
    assert len(sources("kto", write(tmp_path / "mixed.jsonl", mixed)).rows) == 2


@pytest.mark.slow
def test_single_rows_teach_what_their_pairs_teach(tmp_path):
    """The same answers as pairs and one by one: the loss knows no pairs, so the first step is the same."""
    exports.export("guess", "pairs", tmp_path / "pairs.jsonl", tasks=8)
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()][:4]
    single = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs
        for side in ("chosen", "rejected")
    ]
    small = {
        "method": "kto", "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 300, "cold_steps": 3,
        "cold_batch": 4, "steps": 1, "group_size": 2, "context": 400, "eval_tasks": 0, "trackers": (), "out": str(tmp_path),
    }  # fmt: skip
    pairs_file = write(tmp_path / "few.jsonl", pairs)
    api.train(**small, data=pairs_file, groups=4, name="paired")
    api.train(**small, data=write(tmp_path / "single.jsonl", single), groups=4, name="single")
    one, two = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("paired", "single"))
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-4, atol=1e-5)
