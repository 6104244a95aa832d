"""``src/turnwise/__init__.pyi``: what editors and type checkers see of the public names, which are imported when first used.

    python -m trials.stub --write

``train`` takes its settings as keywords. Their names, types and meanings stand once, in ``Settings``; this copies them."""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import turnwise
from turnwise.config.settings import SAME_SETTING, Settings, default_of
from turnwise.training.api import train

FILE = Path(turnwise.__file__).with_suffix(".pyi")
OBJECTS = {"method", "env", "model", "reward", "agent", "data", "eval_data", "tokenizer"}  # an object may stand for the name


def stub() -> str:
    names = defaultdict(list)
    for name, module in sorted(turnwise._PUBLIC.items()):
        if name != "train":
            names[module].append(name)
    imports = [f"from {module} import {n} as {n}" for module, several in sorted(names.items()) for n in several]
    return "\n".join(
        [
            "# Written by `python -m trials.stub --write` from Settings; a test compares.",
            "from collections.abc import Callable",
            "from pathlib import Path",
            "from typing import Any, Literal",
            "",
            "from turnwise.core.protocols import Listener",
            *imports,
            "",
            "__version__: str",
            "",
            "def train(",
            "    listen: Listener | None = None,",
            "    recipe: Recipe | Callable[..., Recipe] | None = None,",
            "    *,",
            '    config: str | Path = "",',
            "    quiet: bool = False,",
            "    tokenizer: Any = None,",
            *(f"    {f.name}: {_type(f.name)} = {_default(f)},  # {f.metadata['help']}" for f in fields(Settings)),
            *(f"    {theirs}: {_type(ours)} = ...,  # TRL's name of {ours}" for theirs, ours in SAME_SETTING.items()),
            ") -> dict[str, Any]:",
            f'    """{inspect.getdoc(train)}"""'.replace("\n", "\n    ").replace("\n    \n", "\n\n"),
            "",
        ]
    )


def _type(name: str) -> str:
    kind = typing.get_type_hints(Settings)[name]
    if name in OBJECTS:
        return "Any"
    if typing.get_origin(kind) is typing.Literal:
        return f"Literal[{', '.join(map(repr, typing.get_args(kind)))}]"
    if kind in (bool, int, float, str):
        return {int: "int", float: "float", str: "str", bool: "bool"}[kind]
    return re.sub(r"\b[a-z_]+(\.[a-z_]+)*\.", "", str(kind)) if str(kind).startswith(("tuple", "dict")) else "Any"


def _default(f: typing.Any) -> str:
    default = default_of(f)
    return repr(default) if isinstance(default, (str, int, float, bool, tuple)) else "..."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file instead of printing it")
    FILE.write_text(stub(), encoding="utf-8") if parser.parse_args().write else print(stub())
