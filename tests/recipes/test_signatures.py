"""Signatures read from source agree with the imported ones, and importing them does not import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from turnwise import recipes
from turnwise.errors import SettingError
from turnwise.recipes import signatures


def test_every_method_is_found():
    assert set(signatures.method_names()) == set(recipes.METHODS)


def test_every_signature_agrees_with_the_imported_one():
    left_open = 0
    for name in recipes.METHODS:
        read, imported = signatures.parameters(name), recipes.parameters(name)
        assert list(read) == list(imported)
        for key, parameter in read.items():
            assert (parameter.default, parameter.kind) == (imported[key].default, imported[key].kind), (name, key)
            left_open += parameter.annotation is parameter.empty
            assert parameter.annotation in (imported[key].annotation, parameter.empty), (name, key)
    assert left_open <= 10  # a type of another module; everything else is converted before torch is imported


def test_reading_them_does_not_import_torch():
    code = "import sys; from turnwise.recipes import signatures as s; s.method_names(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_options_are_typed_and_refused_by_name():
    assert signatures.typed_options("grpo", {"clip": "0.3"}) == {"clip": 0.3}
    with pytest.raises(SettingError, match="did you mean 'clip'"):
        signatures.typed_options("grpo", {"clib": 1})
    with pytest.raises(SettingError, match="no method 'grop'; did you mean 'grpo'"):
        signatures.parameters("grop")


OWN = """
from turnwise import recipes
from turnwise.recipes.recipe import Recipe

def robust(clip: float = 0.1, size=4) -> Recipe:
    return recipes.build("grpo", clip=clip)

fixed = recipes.build("rloo")

def wrong() -> Recipe:
    return 3
"""


def test_a_recipe_of_ones_own_is_a_method_by_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    name = f"{tmp_path / 'mine.py'}:robust"
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert list(signatures.parameters(name)) == ["clip", "size"]
    assert recipes.build(name, clip="0.3", size="5") == recipes.build("grpo", clip=0.3)
    assert recipes.build(f"{tmp_path / 'mine.py'}:fixed") == recipes.build("rloo")
    with pytest.raises(SettingError, match="returned int, not a Recipe"):
        recipes.build(f"{tmp_path / 'mine.py'}:wrong")
    with pytest.raises(SettingError, match="has no recipe 'robst'; did you mean 'robust'"):
        recipes.build(f"{tmp_path / 'mine.py'}:robst")


def test_the_old_name_of_the_probe_leads_to_the_new_one():
    with pytest.raises(SettingError, match="probe_baseline, a probe of hidden states; V0's allocation is --budget v0"):
        signatures.check_method("v0")
