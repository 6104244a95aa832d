"""The matrix of credits and objectives: its machinery, on a handful of cells."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from turnwise import recipes
from turnwise.recipes.recipe import Recipe

PATH = Path(__file__).parents[2] / "experiments" / "composition_matrix.py"


@pytest.fixture(scope="module")
def matrix():
    spec = importlib.util.spec_from_file_location("matrix_of_credits", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_cells_and_page(matrix):
    shared = matrix.SharedRollouts.collect()
    credits, objectives = ("ppo", "gigpo", "spo_tree", "dpo"), ("grpo", "gspo", "reinforce_pp", "vcpo", "see_upo")
    found = matrix.run_cells(shared, credits, objectives)
    assert {verdict for (credit, _), (verdict, _) in found.items() if credit != "dpo"} == {"ok"}
    assert {verdict for (credit, _), (verdict, _) in found.items() if credit == "dpo"} == {"refused"}
    page = matrix.page(found, credits, objectives)
    assert "| run | 15 |" in page and "| refused before the run | 5 |" in page
    assert "its credit is part of its loss (PreferenceLoss)" in page
    assert "gigpo" not in page  # pairs that run are counted, not listed

    class Broken(type(recipes.build("grpo").advantage)):
        def __call__(self, batch):
            raise ValueError("on purpose")

    verdict, why = matrix.run_cell(shared, recipes.build("gspo"), Recipe(advantage=Broken()))
    assert verdict == "FAILED" and "on purpose" in why and "test_composition_matrix.py" in why


def test_every_method_is_a_row_a_column_or_neither(matrix):
    kinds = [set(matrix.of_kind(kind)) for kind in ("objective", "credit", "data", "preference")]
    assert set().union(*kinds) == set(recipes.METHODS) and sum(map(len, kinds)) == len(recipes.METHODS)
