"""Command-line flags: every setting of a run, the method's hyper-parameters and, as ``--credit-...``, those of the method whose
credit it uses. An unknown flag raises with the nearest known one. Does not know what a command does with them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, NoReturn

from turnwise.config.convert import convert
from turnwise.config.settings import OTHER_NAMES, Settings, default_of, type_of
from turnwise.errors import SettingError, nearest
from turnwise.recipes import signatures

if TYPE_CHECKING:
    from turnwise.training.evaluation import ServedPolicy

FEW_FLAGS = 12  # that many are listed in a message
NO_FLAGS = {"method", "method_options", "credit_options"}  # settings that are given in another way


class Parser(argparse.ArgumentParser):
    """Raises :class:`SettingError` instead of exiting: what was seen, and the nearest flag that exists."""

    def error(self, message: str) -> NoReturn:
        name = message.removeprefix("argument ").partition(": expected one argument")[0].split("/")[-1]
        if message.endswith("expected one argument"):
            message += f"; write {name} VALUE, or {name}=VALUE where it begins with a dash"
        elif "arguments are required" in message:
            message += f"; see: {self.prog} --help"
        raise SettingError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        options = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
        self.allow_abbrev = False
        namespace, unknown = self.parse_known_args(list(argv))
        for word in unknown:
            name = word.split("=")[0]
            raise SettingError(
                f"unknown setting {name!r}; {self._hint(name, options)}"
                if word.startswith("-")
                else f"unexpected {word!r}"
            )
        return namespace

    def _hint(self, name: str, options: Sequence[str]) -> str:
        """The flag that was meant, where one is near; a hundred flags in a message would hide it."""
        other = flag(OTHER_NAMES.get(name.lstrip("-").replace("-", "_"), ""))
        if other in options:
            return f"it is called {other} here"
        hint, _, known = nearest(name, options).partition("known: ")
        return hint.strip() or (f"known: {known}" if len(options) <= FEW_FLAGS else f"see: {self.prog} --help")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def with_flags(message: str) -> str:
    """A message that begins with the name of a setting, with its flag instead: a reader of the command line typed the flag.

    >>> with_flags("checkpoint_every is 0; write at least 1")
    '--checkpoint-every is 0; write at least 1'
    """
    name, verb, rest = message.partition(" is ")
    known = {f.name for f in fields(Settings)} - NO_FLAGS
    return f"{flag(name)}{verb}{rest}" if name in known else message


def default_text(f: Field[Any]) -> str:
    """The default of a setting as a flag's value is written."""
    default = default_of(f)
    return ",".join(map(str, default)) if isinstance(default, tuple | dict) else str(default)


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
    group = parser.add_argument_group("settings")
    for f in fields(Settings):
        if f.name not in NO_FLAGS:
            optional_value: dict[str, Any] = (
                {"nargs": "?", "const": "true"} if type_of(f) is bool else {}
            )  # --profile without a value means true
            several = ""
            if isinstance(default_of(f), tuple):
                optional_value, several = {"action": "append"}, "; several: separated by commas, or the flag repeated"
            help_ = f"{f.metadata['help']}{several} [{default_text(f)}]"
            group.add_argument(flag(f.name), metavar="X", default=None, help=help_, **optional_value)
    method_group = parser.add_argument_group(f"hyper-parameters of {method}")
    for name, parameter in signatures.parameters(method).items():
        try:
            method_group.add_argument(
                flag(name), dest=f"method.{name}", metavar="X", default=None, help=f"[{parameter.default}]"
            )
        except argparse.ArgumentError:  # of a user's own recipe; a test keeps the built-in ones apart
            raise SettingError(
                f"{method} has a parameter {name!r}, which is also a flag of the command; rename it"
            ) from None
    if credit:
        credit_group = parser.add_argument_group(f"hyper-parameters of the credit of {credit}")
        for name, parameter in signatures.parameters(credit).items():
            dest = f"credit.{name}"
            credit_group.add_argument(
                flag(f"credit_{name}"), dest=dest, metavar="X", default=None, help=f"[{parameter.default}]"
            )


def settings_from(namespace: argparse.Namespace, method: str, credit: str = "") -> dict[str, Any]:
    """The flags given, as typed settings; the others keep their defaults."""
    types = {f.name: type_of(f) for f in fields(Settings)}
    flags = {k: ",".join(v) if isinstance(v, list) else v for k, v in vars(namespace).items() if v is not None}
    values = {k: convert(flag(k), v, types[k]) for k, v in flags.items() if k in types and k != "method"}
    options = {"method_options": _options(flags, "method.", method)}
    if credit:
        options["credit_options"] = _options(flags, "credit.", credit)
    return {**values, "method": method, **{name: given for name, given in options.items() if given}}


def _options(flags: Mapping[str, Any], prefix: str, method: str) -> dict[str, Any]:
    """The hyper-parameters of one method among the flags."""
    options = {key.removeprefix(prefix): value for key, value in flags.items() if key.startswith(prefix)}
    return signatures.typed_options(method, options)


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``turnwise eval`` that name a served model."""
    parser.add_argument(
        "--policy", default="", metavar="URL", help="a served model: http://HOST/v1 (OpenAI-compatible)"
    )
    parser.add_argument(
        "--policy-model", default="", metavar="NAME", help="its name there; empty: the only one it serves"
    )
    parser.add_argument(
        "--policy-key-env",
        default="",
        metavar="VARIABLE",
        help="environment variable that holds the key; empty: no key",
    )
    parser.add_argument("--policy-seconds", default="120", help="time limit of one reply, in seconds [120]")
    parser.add_argument("--policy-parallel", default="16", help="requests under way at the same time [16]")


def served_policy(namespace: argparse.Namespace) -> ServedPolicy | None:
    """What the flags of :func:`add_policy_flags` say; None if no served model is named."""
    from turnwise.training.evaluation import ServedPolicy

    if not namespace.policy:
        if namespace.policy_model or namespace.policy_key_env:
            raise SettingError("--policy-model and --policy-key-env belong to --policy URL, which is missing")
        return None
    seconds = convert("--policy-seconds", namespace.policy_seconds, float)
    parallel = convert("--policy-parallel", namespace.policy_parallel, int)
    return ServedPolicy(namespace.policy, namespace.policy_model, namespace.policy_key_env, seconds, parallel)
