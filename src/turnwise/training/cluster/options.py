"""Whether a run is spread over actors of a Ray cluster: the setting ``cluster``.

    local,generators=2,environments=2         a cluster of this machine, which ends with the command
    10.0.0.5:6379,generators=8,gpus=1         a cluster that `ray start` made; the run goes on when the command dies

Read and checked without torch and ray: `training.cluster.driver` starts the actors.
"""

from __future__ import annotations

import importlib.util
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnwise.config.convert import convert
from turnwise.environments import GIVEN_OBJECT, prompts
from turnwise.errors import SettingError, nearest
from turnwise.serve.server import require_packages
from turnwise.training.inputs import OWN

if TYPE_CHECKING:
    from turnwise.config.settings import Settings

LOCAL = "local"
PLACEMENTS = ("pack", "spread")
AUTO = -1
OPTIONS = {"generators": int, "environments": int, "cpus": int, "gpus": int, "placement": str, "restarts": int}


@dataclass(frozen=True)
class ClusterOptions:
    """The setting, read. ``cpus`` and ``gpus`` are reserved for each generator, one CPU for each environment actor."""

    address: str
    generators: int = 1
    environments: int = 0  # actors that play; AUTO: one for each CPU that is left; 0: the learner's process plays
    cpus: int = 1
    gpus: int = 0
    placement: str = "pack"
    restarts: int = 100  # of each actor, before it stays dead

    @property
    def local(self) -> bool:
        return self.address == LOCAL

    def environment_actors(self, cpus: int, ranks: int = 1) -> int:
        """How many, on a cluster with so many CPUs."""
        return max(1, cpus - self.generators * self.cpus - ranks) if self.environments == AUTO else self.environments

    @classmethod
    def parse(cls, text: str) -> ClusterOptions:
        address, *pairs = text.split(",")
        if address != LOCAL and not re.fullmatch(r"[\w.-]+:\d{1,5}", address):
            raise SettingError(
                f"cluster is {text!r}; write local, or the HOST:PORT of a cluster that `ray start` made; then ,key=value: "
                f"{', '.join(OPTIONS)}"
            )
        options: dict[str, Any] = {}
        for pair in pairs:
            key, _, value = pair.partition("=")
            if key not in OPTIONS:
                raise SettingError(f"cluster has no option {key!r}; {nearest(key, OPTIONS)}")
            auto = (key, value) == ("environments", "auto")
            options[key] = AUTO if auto else convert(f"cluster: {key}", value, OPTIONS[key])
        return cls(address, **options)._checked()

    def _checked(self) -> ClusterOptions:
        for name in ("generators", "cpus"):
            if getattr(self, name) < 1:
                raise SettingError(f"cluster: {name} is {getattr(self, name)}; write at least 1")
        for name in ("gpus", "restarts", "environments"):
            if getattr(self, name) < 0 and (name, getattr(self, name)) != ("environments", AUTO):
                raise SettingError(f"cluster: {name} is {getattr(self, name)}; write 0 or more")
        if self.placement not in PLACEMENTS:
            raise SettingError(f"cluster: placement is {self.placement!r}; {nearest(self.placement, PLACEMENTS)}")
        return self


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
    options = ClusterOptions.parse(s.cluster)
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
    if s.opponents.startswith("past"):
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
