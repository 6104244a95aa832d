"""Runs on a local Ray cluster: the same weights as without one, also when its processes are killed; and what is refused."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from turnwise.config.settings import Settings
from turnwise.config.values import Cluster
from turnwise.core.protocols import Action
from turnwise.errors import SettingError
from turnwise.store.ledger import SqliteLedger
from turnwise.training import api
from turnwise.training.cluster import actor_name, number_of, run_key
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import cluster, refuse

SMALL = {
    "env": "guess", "difficulty": (1,), "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 4, "cold_batch": 8,
    "steps": 12, "groups": 2, "group_size": 3, "max_tokens": 12, "context": 160, "eval_tasks": 4, "checkpoint_every": 1,
    "trackers": (), "threads": 1,
}  # fmt: skip
TWO_RANKS = {**SMALL, "ranks": 2}
needs_ray = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]

# --------------------------------------------------------------------- setting


def test_the_setting_is_read():
    options = Cluster.parse("10.0.0.5:6379,generators=8,environments=4,cpus=2,gpus=1,placement=spread,restarts=3")
    assert options == Cluster("10.0.0.5:6379", 8, 4, 2, 1, "spread", 3) and not options.local
    assert Cluster.parse("local") == Cluster("local")


def test_environment_actors_are_counted_or_get_the_cpus_that_are_left():
    assert Cluster.parse("local,environments=3").environment_actors(2) == 3
    assert Cluster.parse("local").environment_actors(64) == 0
    left = Cluster.parse("10.0.0.5:6379,generators=4,cpus=2,environments=auto")
    assert left.environment_actors(32) == 32 - 4 * 2 - 1 and left.environment_actors(4) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ray://head:10001", "write local, or the HOST:PORT"),
        ("head", "write local, or the HOST:PORT"),
        ("local,generators", "generators is ''"),
        ("local,generators=two", "generators is 'two'"),
        ("local,cpus=0", "cpus is 0; write a number >= 1"),
        ("local,gpus=-1", "gpus is -1; write a number >= 0"),
        ("local,environments=many", "environments is 'many'"),
        ("local,environments=-2", "environments is -2; write a number >= 0"),
        ("local,machines=2", "no option 'machines'"),
        ("local,placement=strict", "placement is 'strict'"),
    ],
)
def test_a_setting_that_is_none_is_refused(text, told):
    with pytest.raises(SettingError, match=told):
        Cluster.parse(text)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"cluster": "127.0.0.1:9"}, "no Ray cluster answers at 127.0.0.1:9; start one there: ray start --head"),
        ({"cluster": "local", "generator": ("http://127.0.0.1:9",)}, "leave --generator out"),
        ({"cluster": "local", "opponents": "past"}, "older policies"),
        ({"cluster": "local,environments=2", "env": "prompts"}, "leave environments= out"),
        ({"cluster": "local", "env": "object:Shop"}, "give it by its name"),
        ({"cluster": "local", "method": "own"}, "give it by its name"),
        ({"cluster": "local", "data": "pairs.jsonl"}, "samples nothing"),
    ],
)
def test_what_a_cluster_cannot_run_is_refused(values, told):
    with pytest.raises(SettingError, match=told):
        refuse(RunPlan(Settings(**values)), [cluster])


def test_actors_are_found_by_names_that_no_other_run_has(tmp_path):
    key, other = run_key(tmp_path / "a"), run_key(tmp_path / "b" / "a")
    assert key != other and key == run_key(tmp_path / "b" / ".." / "a")
    name = actor_name("generator", key, 12)
    assert number_of(name, "generator", key) == 12
    assert number_of(name, "learner", key) is number_of(name, "generator", other) is None


# ------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """A cluster of this machine, small."""
    pytest.importorskip("ray")
    pytest.importorskip("uvicorn")
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"})
    import ray

    ray.init(
        "local", num_cpus=4, num_gpus=0, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False,
        namespace="turnwise", logging_level="ERROR",
    )  # fmt: skip
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The weights that a run without a cluster ends with."""
    out = tmp_path_factory.mktemp("local")
    api.train(quiet=True, out=str(out), name="run", **SMALL)
    return digest(out / "run")


def digest(run):
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def kill(ray, name):
    """Kill the process of an actor, as the kernel would."""
    os.kill(ray.get(ray.get_actor(name, namespace="turnwise").process.remote()), signal.SIGKILL)


def listener(at, act, heard):
    """Hears a run, and acts once, after its step ``at``, beside it."""
    acted = threading.Event()

    def listen(event, facts):
        heard.append((event, facts))
        if event == "step" and facts["stage"] == "learn" and facts["step"] == at and not acted.is_set():
            acted.set()
            act()

    return listen


def accounts(run):
    """Groups by state; every step trained on its groups, none twice."""
    with SqliteLedger(run / "ledger.sqlite", readonly=True) as ledger:
        counts, groups = ledger.group_counts(), ledger.groups()
    trained = [g for g in groups if g.state == "trained"]
    numbers = [g.group_id.split("~")[0] for g in trained]
    assert len(set(numbers)) == len(numbers)
    assert Counter(g.step for g in trained) == dict.fromkeys(range(SMALL["steps"]), SMALL["groups"])
    assert counts.issued == counts.trained + counts.dropped + counts.in_flight + counts.finished
    return counts


class TestRuns:
    pytestmark = needs_ray

    def test_a_run_on_a_cluster_with_one_generator_is_bit_identical_to_one_without(self, ray, local, tmp_path):
        heard = []
        summary = api.train(lambda *event: heard.append(event), out=str(tmp_path), name="run", cluster="local", **SMALL)
        assert digest(tmp_path / "run") == local
        assert "generator actors: 1" in summary["engines"]["generator"]
        steps = [facts["step"] for event, facts in heard if event == "step" and facts["stage"] == "learn"]
        assert steps == list(range(1, SMALL["steps"] + 1))
        assert not ray.util.list_named_actors(all_namespaces=True)

    def test_another_process_joins_the_local_cluster_of_a_living_driver(self, ray, tmp_path):
        (tmp_path / "cluster.json").write_text(json.dumps({"address": ray.get_runtime_context().gcs_address}))
        code = (
            "import sys; from pathlib import Path; from turnwise.config.values import Cluster\n"
            "from turnwise.training.cluster.driver import connected, ray\n"
            "with connected(Cluster.parse('local'), Path(sys.argv[1])): print(ray.get_runtime_context().gcs_address)"
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True)
        assert ended.stdout.split()[-1:] == [ray.get_runtime_context().gcs_address], ended.stderr[-400:]

    def test_a_learner_that_is_killed_continues_to_the_same_weights(self, ray, local, tmp_path):
        heard, name = [], actor_name("learner", run_key(tmp_path / "run"))
        api.train(listener(2, lambda: kill(ray, name), heard), out=str(tmp_path), name="run", cluster="local", **SMALL)
        texts = [facts["text"] for event, facts in heard if event == "message"]
        assert any("the process of the learner died" in text for text in texts)
        assert any("the run did not end by itself" in text for text in texts)
        assert digest(tmp_path / "run") == local
        accounts(tmp_path / "run")

    def test_a_generator_that_is_killed_is_started_again_and_samples_from_then_on(self, ray, tmp_path):
        heard, name = [], actor_name("generator", run_key(tmp_path / "run"))
        api.train(listener(2, lambda: kill(ray, name), heard), out=str(tmp_path), name="run", cluster="local", **SMALL)
        texts = [facts["text"] for event, facts in heard if event == "message"]
        assert any("lost the generator" in text and "none is left" in text for text in texts)
        assert any("samples from now on" in text for text in texts)
        accounts(tmp_path / "run")

    def test_generators_are_added_while_the_run_goes_on(self, ray, tmp_path):
        from turnwise.store.rundir import RunDir
        from turnwise.training.cluster.driver import ClusterRun
        from turnwise.training.watch import RunEvents

        heard, values = [], {**SMALL, "steps": 1000, "staleness": 1}

        def grow():
            run_dir = RunDir.open(tmp_path / "run")
            settings = Settings.of({**run_dir.metadata()["settings"], "cluster": "local,generators=2"})
            more = ClusterRun(run_dir, settings, settings.cluster, RunEvents())
            more.start(print, ())  # the learner lives: it is not started again

        after_first_step = listener(1, grow, heard)

        def listen(event, facts):
            after_first_step(event, facts)
            if event == "message" and "samples from now on" in facts["text"]:
                os.kill(os.getpid(), signal.SIGINT)  # it has been seen to join: the run may end

        with pytest.raises(KeyboardInterrupt, match="stopped at step"):
            api.train(listen, out=str(tmp_path), name="run", cluster="local", **values)
        assert not ray.util.list_named_actors(all_namespaces=True)

    def test_ctrl_c_stops_with_a_checkpoint_and_resume_ends_with_the_same_weights(self, ray, local, tmp_path):
        stop = listener(2, lambda: os.kill(os.getpid(), signal.SIGINT), [])
        with pytest.raises(KeyboardInterrupt, match=r"stopped at step \d, with a checkpoint; `turnwise resume"):
            api.train(stop, out=str(tmp_path), name="run", cluster="local", **SMALL)
        assert not ray.util.list_named_actors(all_namespaces=True)
        api.resume(tmp_path / "run", quiet=True)
        assert digest(tmp_path / "run") == local


class TestEnvironmentActors:
    pytestmark = needs_ray
    ON_ACTORS = "local,environments=2"

    def test_a_run_whose_environments_are_actors_ends_with_the_same_weights(self, ray, local, tmp_path):
        api.train(quiet=True, out=str(tmp_path), name="run", cluster=self.ON_ACTORS, **SMALL)
        assert digest(tmp_path / "run") == local
        assert not ray.util.list_named_actors(all_namespaces=True)

    def test_episodes_of_an_actor_that_is_killed_go_on_in_another_one(self, ray, local, tmp_path):
        heard, key = [], run_key(tmp_path / "run")
        seen = set()

        def kill_one(event, facts):
            heard.append((event, facts))
            step = facts.get("step") if event == "step" and facts["stage"] == "learn" else None
            if step in (2, 5, 8) and step not in seen:
                seen.add(step)
                kill(ray, actor_name("environment", key, step % 2))

        api.train(kill_one, out=str(tmp_path), name="run", cluster=self.ON_ACTORS, **SMALL)
        assert digest(tmp_path / "run") == local
        counts = accounts(tmp_path / "run")
        assert counts.dropped == 0

    def test_an_actor_that_hangs_is_killed_and_its_other_episodes_go_on(self, ray, tmp_path):
        """One call of two environments never lets Python run; the other episode of the same actor is not lost."""
        import asyncio

        from turnwise.environments.isolated import IsolatedEnvironment
        from turnwise.errors import EnvironmentFault
        from turnwise.training.cluster.actors import EnvironmentActor
        from turnwise.training.cluster.directory import ActorPool

        tests = os.path.dirname(os.path.dirname(__file__))
        make = ray.remote(EnvironmentActor).options(
            name=actor_name("environment", "hang", 0), namespace="turnwise", lifetime="detached", max_restarts=5, num_cpus=1,
            runtime_env={"env_vars": {"PYTHONPATH": tests}},
        )  # fmt: skip
        actor = make.remote(tests, "support.misbehaving:Patient")

        async def play():
            pool = ActorPool("hang")
            good, bad = (
                IsolatedEnvironment(f"support.misbehaving:{name}", {}, 2.0, pool=pool)
                for name in ("Patient", "HoldsTheInterpreter")
            )
            await asyncio.gather(good.reset(1), bad.reset(2))
            first = await good.step(Action("a"))
            with pytest.raises(EnvironmentFault, match="no answer within 2 s"):
                await bad.step(Action("b"))
            second = await good.step(Action("c"))
            return first, second, good.moves

        try:
            first, second, moves = asyncio.run(play())
        finally:
            ray.kill(actor, no_restart=True)
        assert moves == 1 and first.reward == second.reward == 0.5
        assert second.info["facts"]["process_deaths"] == 1.0

    def test_no_more_calls_are_sent_than_an_actor_takes(self, ray):
        import asyncio

        from turnwise.training.cluster import directory

        calls = {"now": 0, "most": 0}

        class Reply:
            def future(self):
                async def answer():
                    calls["now"] += 1
                    calls["most"] = max(calls["most"], calls["now"])
                    await asyncio.sleep(0.01)
                    calls["now"] -= 1
                    return '{"value": 1}'

                return asyncio.run_coroutine_threadsafe(answer(), self.loop)

        class Method:
            def remote(self, *_):
                return Reply()

        class Actor:
            answer, process = Method(), Method()

        async def ask():
            Reply.loop = asyncio.get_running_loop()
            host = directory.ActorHost(0, Actor())
            host.ended = ""

            async def one():
                async with host.turn():
                    return await host.request({"method": "step"})

            return await asyncio.gather(*(one() for _ in range(40)))

        assert len(asyncio.run(ask())) == 40
        assert calls["most"] == directory.CALLS


class TestRanks:
    pytestmark = needs_ray

    @pytest.fixture(scope="class")
    def sharded(self, tmp_path_factory):
        """The weights that a run with two ranks ends with, without a cluster."""
        out = tmp_path_factory.mktemp("ranks")
        api.train(quiet=True, out=str(out), name="run", **TWO_RANKS)
        return digest(out / "run")

    def test_a_learner_of_two_ranks_on_a_cluster_ends_with_the_weights_of_one_without(self, ray, sharded, tmp_path):
        summary = api.train(quiet=True, out=str(tmp_path), name="run", cluster="local", **TWO_RANKS)
        assert digest(tmp_path / "run") == sharded
        assert "2 ranks" in summary["engines"]["learner"]

    def test_a_rank_that_is_killed_is_started_again_and_the_weights_are_the_same(self, ray, sharded, tmp_path):
        heard, learner = [], actor_name("learner", run_key(tmp_path / "run"))

        def kill_rank():
            parent = ray.get(ray.get_actor(learner, namespace="turnwise").process.remote())
            os.kill(child_with(parent, b"turnwise.engines.sharded.worker"), signal.SIGKILL)

        api.train(listener(3, kill_rank, heard), out=str(tmp_path), name="run", cluster="local", **TWO_RANKS)
        texts = [facts["text"] for event, facts in heard if event == "message"]
        assert any(
            "rank 1 of 2 was ended by SIGKILL; the learner starts again from the checkpoint" in text for text in texts
        )
        assert digest(tmp_path / "run") == sharded
        accounts(tmp_path / "run")


def child_with(parent, word):
    """The child process whose command contains ``word``."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                if word in (folder / "cmdline").read_bytes():
                    return int(folder.name)
    raise LookupError(word)
