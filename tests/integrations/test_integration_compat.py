"""Private interfaces of other packages: the tested versions, and what happens outside them."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import tomllib
import warnings
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from turnwise.integrations import compat

ROOT = Path(__file__).parents[2]
BOUNDS = {"trl": compat.TRL_TESTED, "verl": compat.VERL_TESTED}


def fake_trl(monkeypatch: pytest.MonkeyPatch, number: str, without: str = "") -> ModuleType:
    """A module ``trl`` of some version whose trainer has the private methods, but one."""

    class GRPOTrainer:
        def __init__(self, attributes=compat.TRL_ATTRIBUTES):
            for name in attributes:
                setattr(self, name, {})

    for name, parameters in compat.TRL_METHODS.items():
        if name != without:
            body = f"def {name}(self, {', '.join(parameters)}): return {name!r}"
            scope: dict = {}
            exec(body, scope)
            setattr(GRPOTrainer, name, scope[name])
    module = ModuleType("trl")
    module.__version__, module.GRPOTrainer = number, GRPOTrainer
    monkeypatch.setitem(sys.modules, "trl", module)
    return module


@pytest.mark.parametrize(
    ("installed", "order"),
    [
        ("1.15.9", -1),
        ("1.16", 0),
        ("1.16.0", 0),
        ("1.16.7", 0),
        ("1.17.0.dev0", 1),
        ("1.17", 1),
        ("2.0", 1),
        ("0.99", -1),
    ],
)
def test_versions_are_compared_by_number(installed, order):
    assert compat.compare(installed, (">=1.16", "<1.17")) == order


@pytest.mark.parametrize(("package", "tested"), BOUNDS.items())
def test_bounds_are_two_and_ordered(package, tested):
    low, high = tested
    assert low.startswith(">=") and high.startswith("<")
    assert compat.release(low[2:]) < compat.release(high[1:])
    assert compat.compare(low[2:], tested) == 0 and compat.compare(high[1:], tested) == 1


@pytest.mark.parametrize(("package", "tested"), BOUNDS.items())
def test_the_extra_installs_a_tested_version(package, tested):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras[package] == [package + ",".join(tested)]


def test_an_older_version_is_refused(monkeypatch):
    fake_trl(monkeypatch, "1.15.0")
    with pytest.raises(ImportError, match=r"needs trl >=1\.16,<1\.17, found 1\.15\.0: pip install 'trl>=1\.16,<1\.17'"):
        compat.trl_trainer_base()


def test_a_tested_version_is_accepted_silently(monkeypatch):
    fake_trl(monkeypatch, "1.16.3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compat.trl_trainer_base()._tag_names[-1] == "turnwise"


def test_a_newer_version_with_the_same_interface_warns(monkeypatch):
    fake_trl(monkeypatch, "1.17.1")
    with pytest.warns(UserWarning, match=r"trl 1\.17\.1 is newer than the versions turnwise is tested with"):
        compat.trl_trainer_base()


@pytest.mark.parametrize("name", compat.TRL_METHODS)
@pytest.mark.parametrize("number", ["1.16.0", "1.17.0"])
def test_a_missing_private_method_is_refused(monkeypatch, number, name):
    """Without it our override would never be called, and TRL would train with its own loss."""
    fake_trl(monkeypatch, number, without=name)
    with pytest.raises(ImportError, match=rf"lacks or changed .*: GRPOTrainer\.{name}\."):
        compat.trl_trainer_base()


def test_a_missing_private_attribute_is_refused_at_construction(monkeypatch):
    fake_trl(monkeypatch, "1.16.0")
    base = compat.trl_trainer_base()
    base()
    with pytest.raises(ImportError, match=r"GRPOTrainer\._buffered_inputs"):
        base(attributes=compat.TRL_ATTRIBUTES[:-1])


def test_a_changed_signature_is_found():
    class Owner:
        def same(self, model, inputs): ...
        def fewer(self, model): ...
        def open_ended(self, **inputs): ...

    expected = {"same": ("model", "inputs"), "fewer": ("model", "inputs"), "open_ended": ("model",), "gone": ()}
    assert compat.changed_methods(Owner, expected) == ["Owner.fewer(inputs)", "Owner.gone"]


def test_a_missing_package_says_what_to_install(monkeypatch):
    for package, load in (("trl", compat.trl_trainer_base), ("verl", compat.verl_algorithms)):
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=f"pip install '{package}>="):
            load()


def test_private_interfaces_are_used_in_compat_only():
    """No other module of the integrations names one."""
    private = [*compat.TRL_METHODS, *compat.TRL_ATTRIBUTES]
    for path in (ROOT / "src" / "turnwise" / "integrations").glob("*.py"):
        if path.name != "compat.py":
            text = path.read_text()
            assert "_REGISTRY" not in text, path.name
            assert not [name for name in private if f"self.{name}" in text or f"super().{name}" in text], path.name


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
def test_the_installed_trl_has_the_interface():
    import trl

    assert compat.compare(version("trl"), compat.TRL_TESTED) == 0
    assert compat.changed_methods(trl.GRPOTrainer, compat.TRL_METHODS) == []
    source = inspect.getsource(trl.GRPOTrainer.__init__)
    assert all(f"self.{name}" in source for name in compat.TRL_ATTRIBUTES)


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_the_installed_verl_has_the_interface():
    assert compat.compare(version("verl"), compat.VERL_TESTED) == 0
    assert compat.verl_algorithms() is not None
