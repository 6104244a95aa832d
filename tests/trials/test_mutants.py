"""Mutants: each has one change, parses, and reaches modules that are imported already."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from trials.mutants import mutants
from trials.mutations import drawn_mutants, table, transplant

SOURCE = '''
"""Text that no mutant changes: 1 < 2."""
from dataclasses import dataclass

LIMIT = 2.0


@dataclass(frozen=True)
class Piece:
    scale: float = 3.0

    @property
    def twice(self) -> float:
        return 2 * self.scale


def clip(x: float, low: int = 0) -> float:
    if x < low:
        return -x
    return min(x, LIMIT)
'''


def test_every_kind_of_fault_is_made_and_nothing_else():
    made = mutants(SOURCE, "algebra/piece.py")
    found = {(m.operator, m.function, m.before, m.after) for m in made}
    assert ("comparison", "clip", "x < low", "x <= low") in found and (
        "comparison",
        "clip",
        "x < low",
        "x >= low",
    ) in found
    assert ("sign", "clip", "-x", "x") in found and ("min/max", "clip", "min(x, LIMIT)", "max(x, LIMIT)") in found
    assert ("dropped factor", "Piece.twice", "2 * self.scale", "self.scale") in found
    assert ("constant", "Piece", "3.0", "6.0") in found and ("off by one", "clip", "0", "1") in found
    assert ("constant", "module", "2.0", "4.0") in found
    assert not any("1 < 2" in m.before or m.before == "True" for m in made)
    for mutant in made:
        ast.parse(mutant.apply(SOURCE.encode()).decode())


def test_a_change_reaches_functions_defaults_and_constants_that_were_imported(monkeypatch):
    module = types.ModuleType("mutated_example")
    module.__file__, module.__package__ = "example.py", ""
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(SOURCE, module.__dict__)
    clip, piece = module.clip, module.Piece
    assert (clip(-1.0), clip(5.0), piece().twice) == (1.0, 2.0, 6.0)
    transplant(
        module, SOURCE.replace("-x", "x").replace("LIMIT = 2.0", "LIMIT = 4.0").replace("= 3.0", "= 5.0").encode()
    )
    assert (clip(-1.0), clip(5.0), piece().twice) == (-1.0, 4.0, 10.0)
    assert module.clip is clip and module.Piece is piece


def test_the_same_mutants_are_drawn_each_time():
    first = drawn_mutants(21, 0)
    assert first == drawn_mutants(21, 0) and len(first) == 21
    assert sum(m.file.startswith("algebra/") for m in first) == 3
    assert {m.key for m in first} < {m.key for m in drawn_mutants(49, 0)}, "more mutants are the same ones and others"
    assert {m.key for m in first} != {m.key for m in drawn_mutants(21, 1)}


def test_a_survivor_is_listed_unless_it_is_equivalent():
    row = {"file": "algebra/a.py", "function": "f", "before": "x", "after": "-x", "key": "k", "result": "survived"}
    rows = [row, {**row, "key": "j", "result": "killed"}]
    assert "| `algebra` | 2 | 1 | 0 | 1 | 50.0 % |" in table(rows, {}) and "Survivors" in table(rows, {})
    explained = table(rows, {"k": "x is 0"})
    assert "| `algebra` | 2 | 1 | 1 | 0 | 100.0 % |" in explained and "`-x`: x is 0" in explained
