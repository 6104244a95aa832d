"""The parameters of a view, from a URL or from flags, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from turnwise.errors import SettingError

WHOLE = ("step", "token", "update", "offset")


@dataclass(frozen=True)
class ViewQuery:
    """What to show: ``ViewQuery(step=3, method="gspo")``. Empty or −1: the view chooses."""

    step: int = -1
    group: str = ""
    trajectory: str = ""
    token: int = -1
    update: int = -1
    method: str = ""
    search: str = ""
    metric: str = ""
    offset: int = 0

    @classmethod
    def parse(cls, values: Mapping[str, str]) -> ViewQuery:
        """Unknown parameters are ignored: a browser or a proxy may add some."""
        known = {f.name for f in fields(cls)}
        parsed: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known or value == "":
                continue
            if name in WHOLE:
                if not value.lstrip("-").isdigit() or len(value) > 12:
                    raise SettingError(f"{name} is {value[:40]!r}; write a whole number")
                parsed[name] = int(value)
            else:
                parsed[name] = value[:500]
        return cls(**parsed)

    def at(self, **changes: Any) -> ViewQuery:
        return replace(self, **changes)
