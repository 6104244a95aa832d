"""What each environment offers, for ``turnwise environments``: read from classes and docstrings, never played.

A new family needs nothing here: its row comes from the docstring of its module, whose first line says what it is and which shows
``load("family:member")``. ``PACKAGES`` names the package and extra of a family only where they differ from its name.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

from turnwise.environments import BUILT_IN, FAMILIES, load
from turnwise.environments.base import overrides

OPTIONAL = {  # an optional method, and what it makes possible
    "oracle": "oracle",
    "demonstrate": "demonstrations",
    "snapshot": "snapshot",
    "state_key": "state key",
    "answer": "answer",
    "hint": "hint",
}
PACKAGES = {  # the module that must be importable, and the words after `pip install`
    "demonstrated": ("", ""),
    "prompts": ("", ""),
    "reasoning_gym": ("reasoning_gym", "'turnwise[reasoning]'"),
    "open_spiel": ("pyspiel", "'turnwise[open-spiel]'"),
    "bfcl": ("bfcl_eval", "--no-deps bfcl-eval"),
    "openenv": ("websockets", "'turnwise[openenv]'"),
}


def environment_rows() -> list[dict[str, Any]]:
    """One row for each built-in environment and each family."""
    return [*(describe(name, load(name)) for name in BUILT_IN), *map(describe_family, FAMILIES)]


def describe(name: str, cls: type[Any]) -> dict[str, Any]:
    """What a class offers. Turns are its limit; several where it depends on the difficulty."""
    return {
        "environment": name,
        "kind": "built in",
        "installed": True,
        "about": _about(cls.__module__)[0],
        "difficulties": list(getattr(cls, "difficulties", (1,))),
        "turns": sorted(set(getattr(cls, "limits", {}).values())) or [int(getattr(cls, "max_turns", 8))],
        "tools": [tool["function"]["name"] for tool in getattr(cls, "tools", ())],
        "offers": [word for method, word in OPTIONAL.items() if overrides(cls, method)],
    }


def describe_family(name: str) -> dict[str, Any]:
    """A family by its module's docstring; neither the module nor its package is imported."""
    package, install = PACKAGES.get(name, (name, f"'turnwise[{name}]'"))
    about, doc = _about(FAMILIES[name])
    example = re.search(r'load\("([^"]+)"\)', doc)
    return {
        "environment": f"{name}:...",
        "kind": "family",
        "installed": not package or importlib.util.find_spec(package) is not None,
        "about": about,
        "example": example.group(1) if example else f"{name}:NAME",
        "install": f"pip install {install}" if install else "",
    }


def _about(module: str) -> tuple[str, str]:
    """The first sentence of a module's docstring, on one line, and all of it; the module is not imported."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(doc.split("\n\n")[0].split()))[0], doc
