"""Command-line flags: every setting of a run, the method's hyper-parameters and, as ``--credit-...``, those of the method whose
credit it uses. An unknown flag raises with the nearest known one. Does not know what a command does with them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from turnwise.config.convert import convert
from turnwise.config.settings import Settings, default_of, type_of
from turnwise.errors import SettingError, nearest


class Parser(argparse.ArgumentParser):
    """Raises :class:`SettingError` instead of exiting: what was seen, and the nearest flag that exists."""

    def error(self, message: str) -> NoReturn:
        raise SettingError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        options = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
        namespace, unknown = self.parse_known_args(list(argv))
        for word in unknown:
            name = word.split("=")[0]
            raise SettingError(
                f"unknown setting {name!r}; {nearest(name, options)}"
                if word.startswith("-")
                else f"unexpected {word!r}"
            )
        return namespace


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def value_of(argv: Sequence[str], name: str) -> str:
    """The value of a flag, before the other flags are defined; empty if it is absent."""
    words = list(argv)
    for n, word in enumerate(words):
        if word == name:
            return words[n + 1] if n + 1 < len(words) else ""
        if word.startswith(f"{name}="):
            return word.split("=", 1)[1]
    return ""


def add_settings(parser: argparse.ArgumentParser, method: str, credit: str = "") -> None:
    """Add every field of Settings, the hyper-parameters of the method, and those of the method whose credit it uses."""
    from turnwise import recipes  # imported here: `turnwise --help` must not wait for torch

    group = parser.add_argument_group("settings")
    for f in fields(Settings):
        if f.name not in ("method", "method_options", "credit_options"):
            default = default_of(f)
            default = ",".join(map(str, default)) if isinstance(default, tuple) else default
            optional_value: dict[str, Any] = (
                {"nargs": "?", "const": "true"} if type_of(f) is bool else {}
            )  # --profile without a value means true
            help_ = f"{f.metadata['help']} [{default}]"
            group.add_argument(flag(f.name), metavar="X", default=None, help=help_, **optional_value)
    method_group = parser.add_argument_group(f"hyper-parameters of {method}")
    for name, parameter in recipes.parameters(method).items():
        method_group.add_argument(
            flag(name), dest=f"method.{name}", metavar="X", default=None, help=f"[{parameter.default}]"
        )
    if credit:
        credit_group = parser.add_argument_group(f"hyper-parameters of the credit of {credit}")
        for name, parameter in recipes.parameters(credit).items():
            dest = f"credit.{name}"
            credit_group.add_argument(
                flag(f"credit_{name}"), dest=dest, metavar="X", default=None, help=f"[{parameter.default}]"
            )


def settings_from(namespace: argparse.Namespace, method: str, credit: str = "") -> dict[str, Any]:
    """The flags given, as typed settings; the others keep their defaults."""
    types = {f.name: type_of(f) for f in fields(Settings)}
    flags = {k: v for k, v in vars(namespace).items() if v is not None}
    values = {k: convert(k, v, types[k]) for k, v in flags.items() if k in types and k != "method"}
    values |= {"method": method, "method_options": _options(flags, "method.", method)}
    return {**values, "credit_options": _options(flags, "credit.", credit)} if credit else values


def _options(flags: Mapping[str, Any], prefix: str, method: str) -> dict[str, Any]:
    """The hyper-parameters of one method among the flags."""
    from turnwise import recipes

    parameters = recipes.parameters(method)
    options = {key.removeprefix(prefix): value for key, value in flags.items() if key.startswith(prefix)}
    return {key: convert(key, value, parameters[key].annotation) for key, value in options.items()}
