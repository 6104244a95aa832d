"""Objects named in text: by module, by file, with arguments typed by the signature."""

from __future__ import annotations

import functools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import environments
from turnwise.config.named_object import (
    importable_name,
    join_arguments,
    load_object,
    split_arguments,
)
from turnwise.environments.builtin.calculator import Calculator
from turnwise.errors import SettingError

SHOP = """
from neighbour import GREETING

class Shop:
    def __init__(self, db, size: int = 2, strict=False, *, difficulty=1, split="train"):
        self.facts = (GREETING, db, size, strict, difficulty, split)

class Loose:
    def __init__(self, **anything):
        self.anything = anything
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A file with two environments that imports a module beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "shop.py").write_text(SHOP)
    (folder / "neighbour.py").write_text("GREETING = 'hello'")
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "raises.py").write_text("raise RuntimeError('no display')")
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_file_is_loaded_once_and_sees_its_neighbours(shop):
    cls = environments.load("theirs/shop.py:Shop,db=x,size=3")
    assert cls(difficulty=2).facts == ("hello", "x", 3, False, 2, "train")
    assert environments.load("theirs/shop.py:Loose") is environments.load("./theirs/shop.py:Loose")


def test_arguments_are_typed_by_annotation_then_default_then_look(shop):
    assert environments.load("theirs/shop.py:Shop,db=7,strict=yes")().facts[1:4] == (7, 2, True)
    assert environments.load("theirs/shop.py:Loose,a=1")().anything == {"a": "1"}


def test_a_bound_class_keeps_what_the_run_asks_of_it(shop):
    cls = environments.load("theirs/shop.py:Shop,db=x")
    assert environments.settings(cls) == {"difficulty", "split"} and cls.__name__ == "Shop"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("theirs/shop.py:Shop,sise=3", "no argument 'sise'; did you mean 'size'"),
        ("theirs/shop.py:Shop,size=many", "size is 'many', which is not int"),
        ("theirs/shop.py:Shop,difficulty=3", "write --difficulty instead"),
        ("theirs/shop.py:Shop,db", "'db' is not an argument"),
        ("theirs/shop.py:Shop,db=1,db=2", "twice"),
        ("theirs/shop.py:Shp", "did you mean 'Shop'"),
        ("theirs/nowhere.py:Shop", "there is no file theirs/nowhere.py"),
        ("theirs/broken.py:Shop", "broken.py line 1"),
        ("theirs/raises.py:Shop", "RuntimeError: no display"),
        ("theirs/shop.py:", "write module:class"),
        ("calculator,size=3", "calculator has no argument 'size'"),
        ("object:Shop", "was given to train() as an object"),
    ],
)
def test_a_wrong_name_is_refused_in_words(shop, spec, words):
    with pytest.raises(SettingError) as caught:
        environments.load(spec)
    assert words in str(caught.value)


def test_the_current_folder_is_importable_from_the_command_line(shop, monkeypatch, capsys):
    from turnwise.cli.main import main

    monkeypatch.chdir(shop)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(shop))])
    assert main(["check-env", "shop:Shp"]) == 2
    assert "did you mean 'Shop'" in capsys.readouterr().err


def test_objects_are_named_where_another_process_would_find_them():
    class Local:
        pass

    assert importable_name(Calculator) == "turnwise.environments.builtin.calculator:Calculator"
    assert importable_name(Local) == ""
    assert environments.name_of(Local) == ("object:Local", Local)


def test_a_partial_of_a_class_is_bound_and_named(shop):
    cls = load_object("theirs/shop.py:Shop", "x", lambda v: isinstance(v, type), "class")
    name, bound = environments.name_of(functools.partial(cls, "x", size=5))
    assert name == "theirs/shop.py:Shop,db=x,size=5" and bound().facts[1:3] == ("x", 5)
    assert environments.load(name)().facts == bound().facts
    assert environments.name_of(functools.partial(cls, db=object()))[0] == "object:Shop"
    with pytest.raises(SettingError, match="write a name, a class, or"):
        environments.name_of(3)


words = st.text(st.characters(exclude_characters=",", exclude_categories=("Cs",)), max_size=8)
names = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)


@given(st.dictionaries(names, words | st.integers() | st.booleans(), max_size=4))
def test_arguments_survive_their_text(arguments):
    spec = join_arguments("shop:Shop", arguments)
    assert split_arguments(spec) == ("shop:Shop", {k: str(v) for k, v in arguments.items()})
