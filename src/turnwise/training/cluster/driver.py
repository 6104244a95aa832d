"""The driver of a run on a Ray cluster: starts its actors, or finds those that live, and shows what the learner tells.

The driver holds nothing that the run needs: killed and started again (``turnwise resume RUN``) it finds the actors by name. On a
cluster that Ray keeps (``--cluster HOST:PORT``) they go on meanwhile; a local cluster ends with the process that started it, and
the next driver starts from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no report to Ray's makers
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from turnwise.config.settings import Settings
from turnwise.config.values import Cluster
from turnwise.core.protocols import Listener
from turnwise.errors import ServerFault, SettingError
from turnwise.store.atomic import read_object, write_json
from turnwise.store.rundir import RunDir
from turnwise.training.cluster import ENVIRONMENT, GENERATOR, LEARNER, NAMESPACE, actor_name, run_key
from turnwise.training.cluster.actors import EnvironmentActor, GeneratorActor, LearnerActor, LearnerNews, remove_helpers
from turnwise.training.cluster.directory import find_actors
from turnwise.training.interrupt import StopSignals
from turnwise.training.refusals import answers
from turnwise.training.watch import RunEvents

ADDRESS_FILE = "cluster.json"
OBJECT_STORE = 80 * 2**20  # bytes, about the least that Ray takes: weights travel as files
CONTROL_THREADS = 4  # of the learner's actor, beside the one that learns
PLACE_SECONDS = 120.0  # for the cluster to reserve what the generators need
NEWS_SECONDS = 30.0


def run_on_cluster(
    run_dir: RunDir,
    settings: Settings,
    learn: Callable[..., dict[str, Any]],
    notes: Sequence[str],
    listen: Listener,
    stop: StopSignals,
) -> dict[str, Any]:
    """Run to the end on the cluster of the settings. Returns the summary."""
    options = settings.cluster
    with connected(options, run_dir.path, settings.ranks), stop.handled():
        run = ClusterRun(run_dir, settings, options, RunEvents(listen))
        try:
            with stop.deferred():
                run.start(learn, notes)
                return run.watch(stop)
        finally:
            if run.owner:
                run.remove()


@contextlib.contextmanager
def connected(options: Cluster, folder: Path, ranks: int = 1) -> Iterator[None]:
    """Connect to the cluster, or start one on this machine, with a CPU for each rank of the learner. A program that is connected
    already stays so."""
    if ray.is_initialized():
        yield
        return
    address = _living_address(folder) if options.local else options.address
    logging.getLogger("ray").setLevel(logging.ERROR)
    common: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
    if address:
        if options.local:
            _use_token_of_this_machine()
        try:
            ray.init(address, **common)
        except (RuntimeError, ValueError, OSError) as fault:  # another version of Ray or Python, no token, no cluster
            text = " ".join(str(fault).split())[:300]
            raise SettingError(f"the Ray cluster at {address} cannot be used: {text}") from fault
    else:
        playing = options.environment_actors(os.cpu_count() or 1, ranks)
        reserved = options.generators * options.cpus + playing + ranks
        limits: dict[str, Any] = {"num_cpus": reserved, "object_store_memory": OBJECT_STORE}
        limits |= {} if options.gpus else {"num_gpus": 0}
        ray.init("local", include_dashboard=False, **limits, **common)
        write_json(folder / ADDRESS_FILE, {"address": ray.get_runtime_context().gcs_address})
    # keep Ray from printing deaths of processes to standard output: the run tells them, and `--json` owns it
    from ray._private import worker

    if "print_to_stdstream" in vars(worker):
        vars(worker)["print_to_stdstream"] = lambda *_, **__: None
    try:
        yield
    finally:
        ray.shutdown()


def _use_token_of_this_machine() -> None:
    # newer versions of Ray start a local cluster that wants the user's token, which they send by themselves only to a cluster
    # that they found by themselves; older ones know no token
    with contextlib.suppress(ImportError):
        from ray._private.authentication import authentication_token_setup as setup

        if take := getattr(setup, "maybe_enable_token_auth_if_token_available", None):
            take(warn_if_disabled=False)


def _living_address(folder: Path) -> str:
    """The local cluster of a driver that watches this run; empty if there is none."""
    try:
        address = str(json.loads((folder / ADDRESS_FILE).read_text(encoding="utf-8"))["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return address if answers(address) else ""


class ClusterRun:
    """The actors of one run, as its driver sees them."""

    def __init__(self, run_dir: RunDir, settings: Settings, options: Cluster, events: RunEvents) -> None:
        self.run_dir, self.settings, self.options, self.events = run_dir, settings, options, events
        self.key, self.folder = run_key(run_dir.path), os.getcwd()
        self.owner = False  # whether this driver started the learner, or saw it end: then it removes the actors
        self.node = ray.get_runtime_context().get_node_id()  # of the run directory: the learner works here
        self.anywhere = "SPREAD" if options.placement == "spread" else "DEFAULT"  # of an actor without a reserved place

    # ------------------------------------------------------------------- actors

    def start(self, learn: Callable[..., dict[str, Any]], notes: Sequence[str]) -> None:
        """Start the actors that do not live; end generators and environments that are too many."""
        self.owner = not find_actors(LEARNER, self.key)
        self.learner = self._start_learner(learn, notes)
        living = self._living(GENERATOR, self.options.generators)
        place = self._place() if len(living) < self.options.generators else None
        generators = [self._generator(number, place) for number in range(self.options.generators)]
        self._starting = [generator.address.remote() for generator in generators]
        # those that play need no placement group: each may be anywhere
        cpus = int(ray.cluster_resources().get("CPU", 1))
        wanted = self.options.environment_actors(cpus, self.settings.ranks)
        self._living(ENVIRONMENT, wanted)
        for number in range(wanted):
            name, arguments = actor_name(ENVIRONMENT, self.key, number), (self.settings.env,)
            self._make(EnvironmentActor, name, arguments, num_cpus=1, scheduling_strategy=self.anywhere)

    def _start_learner(self, learn: Callable[..., dict[str, Any]], notes: Sequence[str]) -> Any:
        """The learner on this machine. It gets its place first: the others may be anywhere, and could fill its machine."""
        cpus, gpus = self.settings.ranks, self.settings.ranks if self.options.gpus else 0
        learner = self._make(
            LearnerActor,
            actor_name(LEARNER, self.key),
            (str(self.run_dir.path.resolve()), tuple(notes), learn),
            max_concurrency=CONTROL_THREADS,
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.node, soft=False),
        )
        try:
            ray.get(learner.process.remote(), timeout=PLACE_SECONDS)
        except GetTimeoutError:
            if self.owner:
                raise SettingError(
                    f"the machine of this command has no room for the learner, which needs {cpus} CPUs and {gpus} GPUs "
                    f"of the cluster there (waited {PLACE_SECONDS:g} s); give Ray more there, or run the command on another one"
                ) from None
        except RayError:  # it died, and is started again or not: the watch tells
            pass
        return learner

    def _living(self, kind: str, most: int) -> dict[int, Any]:
        """The actors of a kind; ends those that are too many."""
        living = find_actors(kind, self.key)
        for number in [number for number in living if number >= most]:
            ray.kill(living.pop(number), no_restart=True)
        return living

    def _place(self) -> Any:
        """The placement group of the generators: that of an earlier driver, or a new one."""
        with contextlib.suppress(ValueError):  # there is none
            return ray.util.get_placement_group(self.key)
        o = self.options
        bundle = {"CPU": float(o.cpus), **({"GPU": float(o.gpus)} if o.gpus else {})}
        group = ray.util.placement_group([bundle] * o.generators, o.placement.upper(), self.key, lifetime="detached")
        if not group.wait(PLACE_SECONDS):
            ray.util.remove_placement_group(group)
            raise SettingError(
                f"the cluster has no room for {o.generators} generators with {o.cpus} CPUs and {o.gpus} GPUs each; write fewer "
                f"in --cluster {self.settings.cluster}"
            )
        return group

    def _generator(self, number: int, place: Any) -> Any:
        where: Any = self.anywhere  # one more than places were reserved for
        if place is not None and number < place.bundle_count:
            where = PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=number)
        return self._make(
            GeneratorActor,
            actor_name(GENERATOR, self.key, number),
            (str(self.run_dir.path.resolve()), self.settings.as_dict(), self.node),
            num_cpus=self.options.cpus,
            num_gpus=self.options.gpus,
            scheduling_strategy=where,
        )

    def _make(self, cls: type, name: str, arguments: tuple[Any, ...], **options: Any) -> Any:
        """The actor of this name, started if it does not live."""
        lasting = {"namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        remote: Any = ray.remote(cls)
        made = remote.options(name=name, max_restarts=self.options.restarts, **lasting, **options)
        return made.remote(self.folder, *arguments)

    def remove(self) -> None:
        """End all actors of the run."""
        for learner in find_actors(LEARNER, self.key).values():
            ray.kill(learner, no_restart=True)
        remove_helpers(self.key)

    # -------------------------------------------------------------------- watch

    def watch(self, stop: StopSignals) -> dict[str, Any]:
        """Pass on what the learner tells, until the run ends. Raises what ended it."""
        life, heard, told_stop, absent = "", 0, False, False
        while True:
            if stop.received and not told_stop:
                self.learner.stop.remote(stop.received)
                told_stop = True
            try:
                news: LearnerNews = ray.get(self.learner.news.remote(life, heard), timeout=NEWS_SECONDS)
            except ActorDiedError as death:
                # the summary, if the learner ended after it wrote it: another driver may have removed it
                if self.run_dir.summary.is_file():
                    return read_object(self.run_dir.summary)
                raise ServerFault(
                    f"the learner is gone and is not started again ({' '.join(str(death).split())[:300]}); `turnwise resume "
                    f"{self.run_dir.path}` continues the run"
                ) from None
            except GetTimeoutError:  # busy, or still being started again
                continue
            except (ActorUnavailableError, RayActorError):
                if not absent:
                    self.events.message("the process of the learner died; Ray starts it again", "warning")
                absent, told_stop = True, False
                time.sleep(0.5)
                continue
            absent = False
            self._refuse_failed_start()
            life, heard = news.life, news.happened
            for event, facts in news.events:
                self.events.listen(event, facts)
            if news.ended:
                self.owner = True
                if news.fault:
                    raise pickle.loads(news.fault)
                assert news.summary is not None
                return dict(news.summary)

    def _refuse_failed_start(self) -> None:
        """Raise what kept a generator from starting. One that dies later is restarted."""
        if not self._starting:
            return
        done, self._starting = ray.wait(self._starting, num_returns=len(self._starting), timeout=0)
        for reply in done:
            try:
                ray.get(reply)
            except ActorDiedError as death:
                reason = str(death).strip().splitlines()[-1]
                raise SettingError(f"a generator of the cluster could not be started: {reason}") from None
            except RayError:  # it was killed meanwhile, and is started again
                continue
