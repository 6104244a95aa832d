"""Settings of a run from a config file and flags, with where each came from. A flag wins over the file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from turnwise.cli.flags import Parser, add_settings, settings_from, value_of
from turnwise.config.files import ConfigFile, merge_config, read_config
from turnwise.config.settings import Settings, default_of, split_method
from turnwise.errors import SettingError
from turnwise.recipes import signatures

CONFIG_HELP = "YAML or TOML file of settings; flags win over it; paths in it are relative to the current folder"
DEFAULT_METHOD = str(default_of(next(f for f in fields(Settings) if f.name == "method")))
METHOD_HELP = (
    "written first; `turnwise list` shows all, `turnwise {command} METHOD --help` their hyper-parameters "
    f"[{DEFAULT_METHOD}]"
)


@dataclass(frozen=True)
class RunFlags:
    """What the user gave: ``values`` are settings, ``origins`` say where each came from."""

    namespace: argparse.Namespace
    values: Mapping[str, Any]
    origins: Mapping[str, str]


def read_run_flags(
    command: str,
    about: str,
    argv: Sequence[str],
    add: Callable[[argparse.ArgumentParser], None],
    positional: bool = True,
) -> RunFlags:
    """Parse ``turnwise COMMAND [METHOD] [--config FILE] [flags]``. ``add`` defines the command's own flags."""
    path = value_of(argv, "--config")
    file = read_config(path) if path else ConfigFile("")
    if positional and argv and not argv[0].strip():
        raise SettingError("the method is an empty text; write its name, or leave it out (`turnwise list` shows all)")
    word = argv[0] if positional and argv and not argv[0].startswith("-") else ""
    method, credit = split_method(word or file.values.get("method", DEFAULT_METHOD))
    signatures.check_method(method)
    credit = value_of(argv, "--credit") or credit or str(file.values.get("credit", ""))
    if credit:
        signatures.check_method(credit)
    parser = Parser(prog=f"turnwise {command} {method}" if positional else f"turnwise {command}", description=about)
    if positional:
        parser.usage = f"turnwise {command} [METHOD] [--config FILE] [flags]"
        parser.add_argument("method", nargs="?", metavar="METHOD", help=METHOD_HELP.format(command=command))
    parser.add_argument("--config", default="", metavar="FILE", help=CONFIG_HELP)
    add(parser)
    add_settings(parser, method, credit)
    namespace = parser.parse(argv)
    if positional and namespace.method not in (None, word):  # its hyper-parameters were not defined when it was found
        raise SettingError(f"write the method first: turnwise {command} {namespace.method} ...")
    flags = settings_from(namespace, method, credit)
    if not word:
        flags.pop("method")
    elif "+" in word:
        flags["credit"] = _one_credit(word, flags.get("credit", ""))
    values = _typed_options(merge_config(file, flags), file)
    origins = {name: file.place(name) for name in file.values} | dict.fromkeys(flags, "flag")
    return RunFlags(namespace, values, {name: origins[name] for name in values if name in origins})


def _one_credit(word: str, flagged: str) -> str:
    """The credit of ``sapo+hgpo``; refuses another one in ``--credit``."""
    named = split_method(word)[1]
    if flagged not in ("", named):
        raise SettingError(f"{word} names the credit {named}, and --credit is {flagged}; name one credit")
    return named


def _typed_options(values: dict[str, Any], file: ConfigFile) -> dict[str, Any]:
    """Hyper-parameters by the types of their method; a mistake in the file is refused with its line."""
    method, credit = split_method(values.get("method", DEFAULT_METHOD))
    for name, owner in (("method_options", method), ("credit_options", values.get("credit") or credit)):
        if not values.get(name) or not owner:
            continue
        try:
            values[name] = signatures.typed_options(owner, values[name])
        except SettingError as wrong:
            raise SettingError(f"{file.place(name)}: {wrong}" if name in file.values else str(wrong)) from None
    return values
