"""Refuses players beside the policy where a method or an environment has no seat for them: the setting ``opponents``."""

from __future__ import annotations

from turnwise.config.settings import Settings
from turnwise.errors import SettingError
from turnwise.rollout.scripted import SCRIPTED_POLICIES

UNMET = {  # requirements of methods that take turns for granted which another player takes
    "forks": "forks episodes at a turn",
    "hints": "writes hints into the prompt",
    "solutions": "plays the beginning of a solution",
    "help": "writes help into the prompt",
    "turn limits": "limits the turns of an episode",
}


def check_opponents(settings: Settings, requires: frozenset[str], env_class: type, drafts: bool) -> None:
    """Refuse other players where there is one seat, or where a method takes every turn for the policy's."""
    opponents, kind = settings.opponents, settings.opponents.kind
    if kind == "self":
        return
    if opponents.scripted and opponents.scripted not in SCRIPTED_POLICIES:
        raise SettingError(f"opponents is {opponents}; write scripted:NAME with one of {', '.join(SCRIPTED_POLICIES)}")
    if len(getattr(env_class, "agents", ())) < 2:
        raise SettingError(
            f"opponents is {opponents}, and {settings.env} has one seat that the policy may play; leave "
            "--opponents out, or take an environment of several agents (nim, open_spiel:kuhn_poker without opponent=)"
        )
    if settings.agent or settings.offline:
        raise SettingError("--opponents needs the turn loop of an environment; leave --agent and --data out")
    for word in sorted(requires & UNMET.keys()):
        raise SettingError(f"{settings.title} {UNMET[word]}, which other players share; leave --opponents out")
    if kind == "past" and settings.generator:
        raise SettingError("older policies are sampled in this process; leave --generator out, or write scripted:NAME")
    if kind == "past" and drafts:
        raise SettingError(f"{settings.title} samples drafts in another precision; leave --opponents out")
