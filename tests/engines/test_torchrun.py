"""Ranks that torchrun starts: what it tells them, how they meet and are missed, whole runs over two of its agents (machines, to
torch)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import turnwise
from turnwise.config.settings import Settings
from turnwise.engines.sharded import rank_pool
from turnwise.engines.sharded.rank_pool import (
    ABOUT,
    BEAT,
    END,
    FAULT,
    INTERFACE,
    OVER,
    START,
    RankPool,
    interface_toward,
    say_end,
)
from turnwise.engines.sharded.torchrun import TorchrunRank, check_torchrun, ranks_here, torchrun_rank
from turnwise.errors import RankFault, SettingError
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import RANKS_PER_CORE, rank_places, refuse

VARIABLES = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "1",
}  # fmt: skip
UNREACHABLE = "has ended or cannot be reached; see the output of torchrun"
HERE = TorchrunRank(0, 2, 0, 2, 0, "127.0.0.1")
RUN = {
    "method": "grpo", "env": "parity_environment:Parity", "hidden": 32, "layers": 1, "vocabulary": 320, "cold_steps": 2,
    "cold_batch": 4, "max_tokens": 8, "groups": 2, "group_size": 3, "eval_tasks": 0, "steps": 3, "threads": 1, "ranks": 2,
    "trackers": (),
}  # fmt: skip


@pytest.fixture
def under_torchrun(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def test_a_process_learns_which_rank_it_is(under_torchrun, monkeypatch):
    assert torchrun_rank() == TorchrunRank(5, 16, 1, 4, 1, "node0")
    assert ranks_here(16) == 4
    check_torchrun(16)
    with pytest.raises(SettingError, match="torchrun started 16 processes, and ranks is 1; write --ranks 16"):
        check_torchrun(1)
    with pytest.raises(SettingError, match="torchrun and --cluster both place"):
        check_torchrun(16, on_cluster=True)
    with pytest.raises(SettingError, match="torchrun started 16 processes, and ranks is 2"):
        RankPool(2)
    monkeypatch.delenv("RANK")
    with pytest.raises(SettingError, match=r"did not say which rank it is \('RANK'\)"):
        torchrun_rank()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert torchrun_rank() is None and ranks_here(16) == 16


def test_cores_are_counted_for_the_ranks_of_this_machine(under_torchrun):
    refuse(RunPlan(Settings(ranks=10_000, device="cpu")), [rank_places])  # four of them are here
    assert RANKS_PER_CORE >= 4


@pytest.fixture
def meeting(monkeypatch):
    """The store of a rank 0 that torchrun started, which finds out quickly who is missing."""
    store = dist.HashStore()
    monkeypatch.setattr(rank_pool, "open_store", lambda started: store)
    monkeypatch.setattr(rank_pool, "torchrun_rank", lambda: HERE)
    monkeypatch.setattr(rank_pool, "check_torchrun", lambda size: None)
    monkeypatch.setattr(rank_pool, "START_SECONDS", 0.2)
    monkeypatch.setattr(rank_pool, "NAMING_SECONDS", 0.2)
    return store


@pytest.fixture
def pool(meeting, monkeypatch):
    """Rank 0 of two, and no other process."""
    place = {"host": "there", "process": 7, "node": 1, "address": "127.0.0.1"}
    meeting.set(ABOUT.format(1), json.dumps(place))
    monkeypatch.setattr(rank_pool, "join_group", lambda *arguments: "files")
    return rank_pool.RankPool(2, torch.device("cpu"))


def test_missing_ranks_are_named(meeting):
    with pytest.raises(RankFault, match=r"ranks \[1\] of 2 did not connect to 127\.0\.0\.1 within 0 s"):
        rank_pool.RankPool(2, torch.device("cpu"))
    assert json.loads(meeting.get(START)) == {"device": "cpu", "threads": 1}


def test_a_rank_on_another_machine_is_seen_by_its_signs_of_life(pool, meeting, monkeypatch):
    assert pool.several_machines and meeting.get(INTERFACE) == (b"lo" if sys.platform == "linux" else b"")
    assert pool.processes == [(7, "there", False)]
    monkeypatch.setattr(rank_pool, "SILENT_SECONDS", 0.0)
    assert pool.processes == [(7, "there", True)]
    monkeypatch.setattr(rank_pool, "SILENT_SECONDS", 60.0)
    pool.peers[0].heard = -math.inf
    assert pool.processes == [(7, "there", True)]
    meeting.add(BEAT.format(1), 1)
    assert pool.processes == [(7, "there", False)]


@pytest.mark.parametrize(
    ("said", "fault", "cause"),
    [
        (SettingError("write it otherwise"), "Connection closed by peer: gloo", SettingError("write it otherwise")),
        ("KeyError: 'x'", "Connection closed by peer: gloo", RankFault("rank 1 of 2 failed: KeyError: 'x'")),
        ("", "Connection closed by peer: gloo", None),  # it lost us, not we it
        (None, "out of memory", None),
        (None, "gloo: timed out", RankFault(f"rank 1 of 2 (process 7 on there) {UNREACHABLE}")),
    ],
)  # fmt: skip
def test_who_broke_a_connection_is_named(pool, meeting, said, fault, cause):
    if said is not None:
        say_end(meeting, 1, said)
    fault = RuntimeError(fault)

    def fails(learner):
        raise fault

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_pool, "send_call", lambda *arguments: None)
        with pytest.raises((RuntimeError, SettingError)) as raised:
            pool.call(fails, None)
    assert (
        raised.value is fault if cause is None else (type(raised.value), str(raised.value)) == (type(cause), str(cause))
    )
    assert meeting.check([END])  # the others are told
    with pytest.raises(RankFault, match="have ended"):
        pool.call(fails, None)


def test_who_waits_is_told_that_there_was_no_learner(meeting):
    rank_pool.release_ranks(HERE)
    assert meeting.get(START) == OVER.encode()
    meeting.set(START, "{}")
    rank_pool.release_ranks(HERE)
    assert meeting.get(START) == b"{}"


def test_the_interface_is_the_one_on_the_way_to_the_other_machine():
    assert interface_toward("127.0.0.1") == ("127.0.0.1", "lo" if sys.platform == "linux" else "")
    assert interface_toward("no such machine.invalid") == ("", "")


def test_a_network_that_torch_cannot_use_is_named(pool, meeting, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("Gloo connectFullMesh failed\nand so on")

    monkeypatch.setattr(rank_pool, "join_group", fails)
    with pytest.raises(
        RankFault, match=r"could not connect the ranks \(Gloo connectFullMesh failed\); GLOO_SOCKET_IFNAME"
    ):
        rank_pool.RankPool(2, torch.device("cpu"))
    say_end(meeting, 1, "ImportError: x")
    with pytest.raises(RankFault, match="rank 1 of 2 failed: ImportError: x"):  # and the network has no part in it
        rank_pool.RankPool(2, torch.device("cpu"))
    meeting.delete_key(FAULT.format(1))
    say_end(meeting, 1, "")
    say_end(meeting, 1, "the first word counts")
    with pytest.raises(RankFault, match="GLOO_SOCKET_IFNAME"):  # it ended for want of a connection
        rank_pool.RankPool(2, torch.device("cpu"))


# ------------------------------------------------------------------ whole runs


PARITY = """
from turnwise.core.protocols import Step
from turnwise.environments.builtin.calculator import Calculator


class Parity(Calculator):
    \"\"\"One turn, rewarded by the length of its text, so that untrained policies earn something.\"\"\"

    async def step(self, action):
        return Step((), float(len(action.text) % 2), terminated=True)
"""


@pytest.fixture
def parity(tmp_path, monkeypatch):
    (tmp_path / "parity_environment.py").write_text(PARITY)
    monkeypatch.syspath_prepend(str(tmp_path))  # the agents get this path, too


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def agents(arguments, folder, script, second=1):
    """Two agents of torchrun, as on two machines, with one rank and with ``second``."""
    port, started = free_port(), []
    path = folder / "script.py"
    path.write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        for node in (0, 1):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                f"--nproc-per-node={second if node else 1}", "--master-addr=127.0.0.1", f"--master-port={port}", str(path),
                json.dumps(arguments),
            ]  # fmt: skip
            log = (folder / f"node{node}.log").open("w")
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            process.wait(60)


TRAIN = "import json, sys, turnwise\nturnwise.train(**json.loads(sys.argv[1]), quiet=True)\n"


@pytest.mark.slow
def test_a_run_under_torchrun_equals_one_that_starts_its_ranks(tmp_path, parity):
    turnwise.train(**RUN, out=str(tmp_path), name="own", quiet=True)
    with agents({**RUN, "out": str(tmp_path), "name": "torchrun"}, tmp_path, TRAIN) as started:
        codes = [process.wait(300) for process in started]
    logs = [(tmp_path / f"node{node}.log").read_text() for node in (0, 1)]
    assert codes == [0, 0], logs
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("own", "torchrun"))
    assert all(w.equal(second[name]) for name, w in first.items())
    rows = [json.loads(line) for line in (tmp_path / "torchrun" / "metrics.jsonl").open()]
    assert any(row["grad_norm"] > 0 for row in rows)
    assert len(list((tmp_path / "torchrun" / "checkpoints").glob("*/shard-*"))) == 2  # one file of each rank


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_the_run_resumes(tmp_path, parity):
    """Not the one that loses its connection because of that."""
    values = {**RUN, "ranks": 3, "steps": 500, "checkpoint_every": 1, "out": str(tmp_path), "name": "x"}
    note = "import os\nopen(os.path.join(%r, os.environ['RANK']), 'w').write(str(os.getpid()))\n" % str(tmp_path)  # noqa: UP031
    metrics = tmp_path / "x" / "metrics.jsonl"
    with agents(values, tmp_path, note + TRAIN, second=2) as started:
        until = time.monotonic() + 300
        while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 2):
            assert time.monotonic() < until and all(p.poll() is None for p in started)
            time.sleep(0.1)
        os.kill(int((tmp_path / "2").read_text()), 9)
        assert started[0].wait(300) != 0
    log = (tmp_path / "node0.log").read_text()
    assert "rank 2 of 3 (process" in log and "has ended or cannot be reached" in log, log
    done = len(metrics.read_text().splitlines())
    summary = turnwise.resume(tmp_path / "x", steps=done + 1, quiet=True)  # with ranks of its own
    assert summary["groups"]["trained"] == (done + 1) * RUN["groups"]
    resume = "import json, sys, turnwise\nturnwise.resume(json.loads(sys.argv[1]), quiet=True)\n"
    with agents(str(tmp_path / "x"), tmp_path, resume, second=2) as started:  # finished: no learner is opened
        assert [process.wait(120) for process in started] == [0, 0]
