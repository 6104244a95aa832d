"""Refuses a Ray cluster that is none, or that cannot run what the settings ask for. Imports neither torch nor ray."""

from __future__ import annotations

import importlib.util
import socket
from typing import TYPE_CHECKING

from turnwise.config.named_object import GIVEN_OBJECT
from turnwise.environments import prompts
from turnwise.errors import SettingError
from turnwise.serve.server import require_packages
from turnwise.training.inputs import OWN

if TYPE_CHECKING:
    from turnwise.config.settings import Settings


def answers(address: str, seconds: float = 2.0) -> bool:
    """Whether anything listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), seconds).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def check_cluster(settings: Settings) -> None:
    """Refuse a cluster that is none, or that cannot run what the settings ask for."""
    s = settings
    if not s.cluster:
        return
    options = s.cluster
    if importlib.util.find_spec("ray") is None:
        raise SettingError("--cluster needs the package ray; write pip install 'turnwise[ray,serve]'")
    require_packages()
    if not options.local and not answers(options.address):
        raise SettingError(
            f"no Ray cluster answers at {options.address}; start one there: ray start --head, or write --cluster local"
        )
    if s.generator:
        raise SettingError("--cluster starts generators of its own; leave --generator out, or --cluster")
    if s.offline:
        raise SettingError("a run that learns from the rows of --data samples nothing; leave --cluster out")
    if s.opponents.kind == "past":
        raise SettingError(
            "older policies are sampled by the learner's process, which a cluster does not do; leave --cluster out"
        )
    if options.environments and s.env == prompts.NAME:
        raise SettingError(
            "cluster: environments cannot play the prompts of --data, which the learner holds; leave environments= out"
        )
    objects = [str(value) for value in (s.env, s.model, s.agent, s.data, *s.reward)]
    if s.method == OWN or any(value.startswith(GIVEN_OBJECT) for value in objects):
        raise SettingError(
            "--cluster runs in other processes, which cannot import an object that was given to train(); give it by its name: "
            "module:Class, module:function, or a folder"
        )
