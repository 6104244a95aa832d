"""Ranks that torchrun starts: what it tells them, who may connect, whole runs over two of its agents (machines, to torch)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import turnwise
from turnwise.config.settings import Settings
from turnwise.engines.sharded import joined_ranks, messages, rank_pool
from turnwise.engines.sharded.joined_ranks import LISTENING, OVER, JoinedRank, accept_ranks, shared_interface
from turnwise.engines.sharded.sharded_learner import start_ranks
from turnwise.engines.sharded.torchrun import TorchrunRank, check_torchrun, ranks_here, torchrun_rank
from turnwise.errors import RankFault, SettingError
from turnwise.training.plan import RunPlan
from turnwise.training.refusals import RANKS_PER_CORE, rank_places, refuse

VARIABLES = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "MASTER_ADDR": "node0", "MASTER_PORT": "1",
}  # fmt: skip
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
    assert torchrun_rank() == TorchrunRank(5, 16, 1, 4, 1, "node0") and not torchrun_rank().one_machine
    assert ranks_here(16) == 4
    check_torchrun(16)
    with pytest.raises(SettingError, match="torchrun started 16 processes, and ranks is 1; write --ranks 16"):
        check_torchrun(1)
    with pytest.raises(SettingError, match="torchrun and --cluster both place"):
        check_torchrun(16, on_cluster=True)
    with pytest.raises(SettingError, match="torchrun started 16 processes, and ranks is 2"):
        start_ranks(2)
    monkeypatch.delenv("RANK")
    with pytest.raises(SettingError, match=r"did not say which rank it is \('RANK'\)"):
        torchrun_rank()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert torchrun_rank() is None and ranks_here(16) == 16


def test_cores_are_counted_for_the_ranks_of_this_machine(under_torchrun):
    refuse(RunPlan(Settings(ranks=10_000, device="cpu")), [rank_places])  # four of them are here
    assert RANKS_PER_CORE >= 4


def test_only_who_knows_the_key_connects_and_missing_ranks_are_named():
    store, refused = dist.HashStore(), []

    def stranger():
        port, _ = store.get(LISTENING).decode().split()
        try:
            Client(("127.0.0.1", int(port)), authkey=b"guessed")
        except (AuthenticationError, OSError, EOFError) as fault:
            refused.append(fault)

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(RankFault, match=r"ranks \[1\] of 2 did not connect to 127\.0\.0\.1 within 3 s"):
        accept_ranks(store, HERE, seconds=3.0, answer_seconds=1.0)
    thread.join()
    assert refused


def test_a_silent_connection_does_not_keep_the_others_out(monkeypatch):
    monkeypatch.setattr(joined_ranks, "HELLO_SECONDS", 0.3)
    store, held = dist.HashStore(), []

    def silent_then_rank_1():
        port, key = store.get(LISTENING).decode().split()
        address = ("127.0.0.1", int(port))
        held.append(socket.create_connection(address))
        for part in ("work", "watch"):
            held.append(Client(address, authkey=bytes.fromhex(key)))
            messages.send(held[-1], {"rank": 1, "node": 1, "host": "there", "process": 7, "part": part})

    thread = threading.Thread(target=silent_then_rank_1)
    thread.start()
    (rank,) = accept_ranks(store, HERE, seconds=60.0, answer_seconds=1.0)
    thread.join()
    try:
        assert isinstance(rank, JoinedRank) and rank.how_it_ended() == ""
        assert rank.own_interface == ("lo" if sys.platform == "linux" else "")
        rank.send(("verb", ()))
        assert messages.receive(held[1]) == ("verb", ())
        with pytest.raises(RankFault, match="rank 1 on there does not answer: it has read nothing for 1 s"):
            rank.send(b"x" * (1 << 26))
        assert not rank.lost_peer and shared_interface([rank], "lo") == rank.own_interface
        pool = rank_pool.RankPool(2, torch.device("cpu"), workers=[rank], joined=True)
        assert pool.processes == [(7, "there", False)]
        held[2].send_bytes(joined_ranks.LOST_A_PEER)
        held[1].close()
        held[2].close()
        assert "(process 7 on there) has ended or cannot be reached" in rank.how_it_ended()
        assert rank.lost_peer and rank.lost_peer  # it said so, once
        assert pool.processes == [(7, "there", True)]
    finally:
        rank.close()
        for connection in held:
            connection.close()


def test_who_waits_is_told_that_there_was_no_learner(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(joined_ranks, "open_store", lambda started: store)
    joined_ranks.release_ranks(HERE)
    assert store.get(LISTENING) == OVER.encode()
    store.set(LISTENING, "1 key")
    joined_ranks.release_ranks(HERE)
    assert store.get(LISTENING) == b"1 key"
    ranks = [JoinedRank.__new__(JoinedRank) for _ in range(2)]
    for rank in ranks:
        rank.node = 0
    assert shared_interface(ranks, "lo") == "lo"


def test_a_network_that_torch_cannot_use_is_named(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("Gloo connectFullMesh failed\nand so on")

    monkeypatch.setattr(rank_pool, "join_group", fails)
    monkeypatch.setattr(rank_pool, "NAMING_SECONDS", 0.1)
    pool = rank_pool.RankPool(2, torch.device("cpu"), joined=True)
    with pytest.raises(
        RankFault, match=r"could not connect the ranks \(Gloo connectFullMesh failed\); GLOO_SOCKET_IFNAME"
    ):
        pool._form_group(dist.HashStore())
    dead = SimpleNamespace(rank=1, lost_peer=False, how_it_ended=lambda: "was ended by SIGKILL")
    with pytest.raises(RankFault, match="rank 1 of 2 was ended by SIGKILL"):  # and the network has no part in it
        rank_pool.RankPool(2, torch.device("cpu"), workers=[dead], joined=True)._form_group(dist.HashStore())
    dead.lost_peer = True
    with pytest.raises(RankFault, match="GLOO_SOCKET_IFNAME"):  # it ended for want of a connection
        rank_pool.RankPool(2, torch.device("cpu"), workers=[dead], joined=True)._form_group(dist.HashStore())


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
