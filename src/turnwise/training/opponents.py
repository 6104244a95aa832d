"""Who holds the seats that are not the policy's own, in environments of several agents: the setting ``opponents``.

    self                        the current policy plays, and is trained on, every seat
    past,keep=8,every=5         older policies of this run; ``pool=latest`` keeps the newest instead of spreading them
    scripted:random             a scripted policy of the environment: oracle, random, demonstrator

Read and checked without torch: `training.seats` seats the players.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turnwise.config.convert import convert
from turnwise.config.settings import Settings
from turnwise.errors import SettingError, nearest
from turnwise.rollout.scripted import SCRIPTED_POLICIES

KINDS = ("self", "past", "scripted")
OPTIONS = {"keep": int, "every": int, "pool": str}
POOLS = ("spread", "latest")
UNMET = {  # requirements of methods that take turns for granted which another player takes
    "forks": "forks episodes at a turn",
    "hints": "writes hints into the prompt",
    "solutions": "plays the beginning of a solution",
    "help": "writes help into the prompt",
    "turn limits": "limits the turns of an episode",
}


@dataclass(frozen=True)
class Opponents:
    """The setting, read."""

    kind: Literal["self", "past", "scripted"] = "self"
    scripted: str = ""
    keep: int = 8
    every: int = 5
    pool: str = "spread"

    @classmethod
    def parse(cls, text: str) -> Opponents:
        head, *pairs = text.split(",")
        kind, _, name = head.partition(":")
        if kind not in KINDS:
            raise SettingError(f"opponents is {text!r}; {nearest(kind, KINDS)}")
        if (kind == "scripted") != bool(name) or (name and name not in SCRIPTED_POLICIES):
            raise SettingError(f"opponents is {text!r}; write scripted:NAME with one of {', '.join(SCRIPTED_POLICIES)}")
        if pairs and kind != "past":
            raise SettingError(f"opponents is {text!r}; only `past` takes options: {', '.join(OPTIONS)}")
        options = {}
        for pair in pairs:
            key, _, value = pair.partition("=")
            if key not in OPTIONS:
                raise SettingError(f"opponents=past has no option {key!r}; {nearest(key, OPTIONS)}")
            options[key] = convert(f"opponents: {key}", value, OPTIONS[key])
        return cls(kind, name, **options)._checked()  # type: ignore[arg-type]

    def _checked(self) -> Opponents:
        if min(self.keep, self.every) < 1:
            raise SettingError(f"opponents: keep is {self.keep} and every is {self.every}; write at least 1")
        if self.pool not in POOLS:
            raise SettingError(f"opponents: pool is {self.pool!r}; {nearest(self.pool, POOLS)}")
        return self


def check_opponents(settings: Settings, requires: frozenset[str], env_class: type, drafts: bool) -> None:
    """Refuse other players where there is one seat, or where a method takes every turn for the policy's."""
    kind = Opponents.parse(settings.opponents).kind
    if kind == "self":
        return
    if len(getattr(env_class, "agents", ())) < 2:
        raise SettingError(
            f"opponents is {settings.opponents!r}, and {settings.env} has one seat that the policy may play; leave "
            "--opponents out, or take an environment of several agents (nim, open_spiel:kuhn_poker without opponent=)"
        )
    if settings.agent or settings.offline:
        raise SettingError("--opponents needs the turn loop of an environment; leave --agent and --data out")
    for word in sorted(requires & UNMET.keys()):
        raise SettingError(f"{settings.title} {UNMET[word]}, which other players share; leave --opponents out")
    if kind == "past" and bool(getattr(settings, "generator", False)):
        raise SettingError("older policies are sampled in this process; leave --generator out, or write scripted:NAME")
    if kind == "past" and drafts:
        raise SettingError(f"{settings.title} samples drafts in another precision; leave --opponents out")
