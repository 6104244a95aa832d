"""Config files: settings in YAML or TOML, read with the line of each key, and written as YAML with the help of each setting.
Knows the names and types of settings, no meaning.

    method: grpo
    env: guess
    lr: 1e-4
    method_options:
      clip: 0.3

Keys are those of ``Settings``, flat; the hyper-parameters of the method are under ``method_options``. Relative paths in a file
are relative to the current folder, as those of flags are.
"""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from turnwise.config.convert import convert
from turnwise.config.settings import Settings, setting_type, split_method, with_our_names
from turnwise.errors import SettingError

SUFFIXES = (".yaml", ".yml", ".toml")
NULLS = ("", "~", "null", "Null", "NULL")
BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
MAX_DEPTH = 20  # of a YAML document; an alias may contain itself
PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./+-]*(:[A-Za-z0-9_./+-]+)?")  # text that YAML reads as itself
WIDTH = 110


@dataclass(frozen=True)
class ConfigFile:
    """The settings of a file, converted, and the line of each."""

    path: str
    values: Mapping[str, Any] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    def place(self, name: str) -> str:
        """Where a setting stands: ``run.yaml line 3``."""
        return f"{self.path} line {self.lines[name]}" if name in self.lines else self.path


def merge_config(file: ConfigFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the file under those that are given elsewhere. Hyper-parameters merge one by one; those of a file that
    names another method are refused, because they belong to it."""
    merged = {**file.values, **given}
    for owner, options in (("method", "method_options"), ("credit", "credit_options")):
        ours, theirs = given.get(owner), file.values.get(owner)
        if options not in file.values:
            continue
        if ours and theirs and split_method(ours)[0] != split_method(theirs)[0]:
            raise SettingError(
                f"{file.place(options)} has hyper-parameters of {theirs}, and the {owner} is {ours}; leave them out of the file"
            )
        merged[options] = {**file.values[options], **given.get(options, {})}
    return merged


def read_config(path: str | Path) -> ConfigFile:
    """Read a file; unknown keys and wrong types are refused with their line."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise SettingError(f"{path} is no config file: its name must end in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise SettingError(f"there is no config file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise SettingError(f"{path} cannot be read: {fault}") from fault
    entries = _toml(text, path) if path.suffix == ".toml" else _yaml(text, path)
    values: dict[str, Any] = {}
    for name, entry in with_our_names(entries).items():
        place = f"{path} line {entry.line}" if entry.line else str(path)
        try:
            values[name] = entry.read(name, setting_type(name))
        except SettingError as wrong:
            raise SettingError(f"{place}: {wrong}") from None
    return ConfigFile(
        str(path), values, {name: entry.line for name, entry in with_our_names(entries).items() if entry.line}
    )


@dataclass(frozen=True)
class _Entry:
    """The value of a key. ``text`` has every scalar as it is written: a setting's own type decides what it means."""

    line: int
    text: Any
    typed: Any

    def read(self, name: str, kind: Any) -> Any:
        if typing.get_origin(kind) is not dict or isinstance(self.typed, str):
            return convert(name, self.text, kind)
        if not isinstance(self.typed, dict):
            raise SettingError(f"{name} is {self.typed!r}; write one line for each hyper-parameter: name: value")
        return self.typed


# ------------------------------------------------------------------------ YAML


def _yaml(text: str, path: Path) -> dict[str, _Entry]:
    try:
        import yaml
    except ImportError as missing:
        raise SettingError(f"{path} needs the package PyYAML: pip install pyyaml; or write TOML") from missing
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise SettingError(f"{path} uses YAML aliases (*name); write each value where it belongs")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as wrong:
        mark = getattr(wrong, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise SettingError(f"{path}{line} is not YAML: {getattr(wrong, 'problem', None) or wrong}") from wrong
    except RecursionError:
        raise SettingError(f"{path} is nested too deeply") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise SettingError(f"{path} holds no settings; write one line for each: name: value")
    entries: dict[str, _Entry] = {}
    for key, value in root.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in entries:
            raise SettingError(f"{path} line {line}: {name} is given twice, first in line {entries[name].line}")
        place = f"{path} line {line}"
        entries[name] = _Entry(line, _value(value, False, place), _value(value, True, place))
    return entries


def _value(node: Any, typed: bool, place: str, depth: int = 0) -> Any:
    """A YAML node as Python data. ``typed``: an unquoted scalar as boolean or number where it looks like one; unlike YAML 1.1,
    1e-5 is a number."""
    if depth > MAX_DEPTH:
        raise SettingError(f"{place}: nested more than {MAX_DEPTH} levels deep")
    if node.id == "sequence":
        return [_value(item, typed, place, depth + 1) for item in node.value]
    if node.id == "mapping":
        pairs = [(str(key.value), _value(value, typed, place, depth + 1)) for key, value in node.value]
        if len(dict(pairs)) < len(pairs):
            raise SettingError(f"{place}: a key is given twice")
        return dict(pairs)
    if node.style is None and node.value in NULLS:
        return None
    if not typed or node.style is not None:
        return node.value
    for kind in (BOOLEANS.__getitem__, int, float):
        with contextlib.suppress(ValueError, KeyError):
            return kind(node.value)
    return node.value


# ------------------------------------------------------------------------ TOML


def _toml(text: str, path: Path) -> dict[str, _Entry]:
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as wrong:
        raise SettingError(f"{path} is not TOML: {wrong}") from wrong
    entries: dict[str, _Entry] = {}
    for name, value in values.items():
        # the line that begins with a key or with the table of that name; 0 if none does, as with a quoted key
        start = re.compile(rf"""\s*\[?\s*["']?{re.escape(name)}["']?\s*[\].=]""")
        line = next((n for n, line in enumerate(text.splitlines(), 1) if start.match(line)), 0)
        entries[name] = _Entry(line, value, value)
    return entries


# --------------------------------------------------------------------- writing


def render_config(settings: Settings, origins: Mapping[str, str] | None = None, title: str = "") -> str:
    """YAML that ``read_config`` reads back to the same settings. ``origins``: where a value came from, by setting."""
    lines = [f"# {title}", ""] if title else []
    values = settings.as_dict()
    for f in fields(settings):
        value, origin = values[f.name], (origins or {}).get(f.name, "default")
        if isinstance(value, dict) and not value:
            continue
        comment = f"{f.metadata['help']} [{origin}]" if origins is not None else f.metadata["help"]
        lines += [f"# {line}" for line in textwrap.wrap(" ".join(comment.split()), WIDTH)]
        if isinstance(value, dict):
            lines += [f"{f.name}:", *(f"  {scalar(key)}: {scalar(item)}" for key, item in value.items())]
        else:
            lines.append(f"{f.name}: {scalar(value)}")
    return "\n".join(lines) + "\n"


def scalar(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            float(value)
            return quoted(value)  # text that looks like a number
        return value if PLAIN.fullmatch(value) and value not in {*NULLS, *BOOLEANS} else quoted(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(scalar, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{scalar(str(key))}: {scalar(item)}' for key, item in value.items())}}}"
    return repr(value)


def quoted(text: str) -> str:
    """Double-quoted YAML. JSON's escapes are YAML's, except that a character beyond 16 bits has one escape, not two."""
    return "".join(
        c if 0x20 <= ord(c) < 0x7F else f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
        for c in json.dumps(text, ensure_ascii=False)
    )
