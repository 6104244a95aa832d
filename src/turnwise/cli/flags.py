"""The flags of the command line: every setting of a run, then a method's hyper-parameters, then, under ``--credit-``, those of
the method whose credit it takes. A wrong one is refused with the nearest right one. Does not know what any command does with
them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from turnwise.config.convert import convert
from turnwise.config.settings import Settings, default_of, kind_of
from turnwise.errors import SettingError, nearest


class Parser(argparse.ArgumentParser):
    """Refuses in our words: what was seen, and the nearest thing that exists."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        known = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
        space, rest = self.parse_known_args(list(argv))
        for word in rest:
            name = word.split("=")[0]
            raise SettingError(
                f"unknown setting {name!r}; {nearest(name, known)}" if word.startswith("-") else f"unexpected {word!r}"
            )
        return space


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def value_of(argv: Sequence[str], name: str) -> str:
    """What a flag is given, read before the others are known; empty where it is not there."""
    words = list(argv)
    for n, word in enumerate(words):
        if word == name:
            return words[n + 1] if n + 1 < len(words) else ""
        if word.startswith(f"{name}="):
            return word.split("=", 1)[1]
    return ""


def add_settings(parser: argparse.ArgumentParser, method: str, credit: str = "") -> None:
    """Every field of Settings, then the hyper-parameters of the method, and of the one whose credit it takes."""
    from turnwise import recipes  # late: a word of help must not wait for torch

    group = parser.add_argument_group("settings")
    for f in fields(Settings):
        if f.name not in ("method", "method_options", "credit_options"):
            shown = default_of(f)
            shown = ",".join(map(str, shown)) if isinstance(shown, tuple) else shown
            alone: dict[str, Any] = (
                {"nargs": "?", "const": "true"} if kind_of(f) is bool else {}
            )  # a bare --profile means yes
            help_ = f"{f.metadata['help']} [{shown}]"
            group.add_argument(flag(f.name), metavar="X", default=None, help=help_, **alone)
    own = parser.add_argument_group(f"hyper-parameters of {method}")
    for name, parameter in recipes.parameters(method).items():
        own.add_argument(flag(name), dest=f"method.{name}", metavar="X", default=None, help=f"[{parameter.default}]")
    if credit:
        lent = parser.add_argument_group(f"hyper-parameters of the credit of {credit}")
        for name, parameter in recipes.parameters(credit).items():
            dest = f"credit.{name}"
            lent.add_argument(
                flag(f"credit_{name}"), dest=dest, metavar="X", default=None, help=f"[{parameter.default}]"
            )


def settings_from(space: argparse.Namespace, method: str, credit: str = "") -> dict[str, Any]:
    """The given flags as typed settings; what was not given is left to the defaults."""
    kinds = {f.name: kind_of(f) for f in fields(Settings)}
    given = {k: v for k, v in vars(space).items() if v is not None}
    values = {k: convert(k, v, kinds[k]) for k, v in given.items() if k in kinds and k != "method"}
    values |= {"method": method, "method_options": _options(given, "method.", method)}
    return {**values, "credit_options": _options(given, "credit.", credit)} if credit else values


def _options(given: Mapping[str, Any], prefix: str, method: str) -> dict[str, Any]:
    """The hyper-parameters of one method among the flags."""
    from turnwise import recipes

    known = recipes.parameters(method)
    own = {key.removeprefix(prefix): value for key, value in given.items() if key.startswith(prefix)}
    return {key: convert(key, value, known[key].annotation) for key, value in own.items()}
