"""Checkpoints of a learner over several ranks: every rank writes and reads its own part, bit for bit, for any number of ranks.

The checkpoint of two ranks is written once. Each test starts ranks once, because that costs seconds.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.ranks import Case, state_differences, update

from turnwise.engines.sharded.rank_pool import RankPool
from turnwise.engines.sharded.sharded_learner import RankTensors
from turnwise.errors import RankFault, SettingError, StoreError
from turnwise.store.checkpoint import checkpoints, load_checkpoint, load_latest, save_checkpoint
from turnwise.store.shard_files import StoredTensors

CASES = {
    "policy": Case("grpo"),
    "models beside the policy": Case("mssr"),
    "critic": Case("ppo", "step", options={"separate_critic": True}),
}
if find_spec("peft"):
    CASES["adapters"] = Case("dpo", "step", settings={"lora_rank": 2})


@contextmanager
def ranks(number: int):
    pool = RankPool(number)
    try:
        yield pool
    finally:
        pool.close()


def save(learner, directory: Path, step: int = 1) -> Path:
    state = learner.checkpoint_state()
    return save_checkpoint(directory, step, state["tensors"], {"learner": state["scalars"]})


def load(learner, path: Path) -> None:
    saved = load_checkpoint(path)
    learner.load_state_dict({"tensors": saved.tensors, "scalars": saved.state["learner"]})


def state_of(learner) -> dict[str, torch.Tensor]:
    """Whole tensors, without the reference, which a checkpoint does not hold."""
    tensors = learner.checkpoint_state()["tensors"]
    return {name: tensors[name].detach().clone() for name in tensors}


def unequal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The checkpoint of two ranks after one update of each case, and the tensors it must hold."""
    folder, tensors = tmp_path_factory.mktemp("two"), {}
    with ranks(2) as pool:
        for name, case in CASES.items():
            learner = case.sharded(pool)
            update(learner, case.recipe(), [case.groups(case.local())[0]])
            tensors[name] = learner.state_dict()["tensors"]
            save(learner, folder / name)
    return folder, tensors


def expected(tensors: dict[str, torch.Tensor], names) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors.items() if name in names}


def continued_locally(case: Case):
    """The local learner after both batches."""
    local = case.local()
    update(local, case.recipe(), case.groups(case.local()))
    return local


@pytest.mark.slow
def test_two_ranks_write_half_each(written):
    folder, _ = written
    (path,) = checkpoints(folder / "policy")
    sizes = [file.stat().st_size for file in sorted(path.glob("shard-*.safetensors"))]
    assert len(sizes) == 2 and max(sizes) < 1.2 * min(sizes)
    weights = [
        t for n, t in load_checkpoint(path).tensors.index.items() if n.startswith(("model/", "optimiser/exp_avg/"))
    ]
    assert weights and all(len(t.slices) == 2 for t in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_process_continues_two_ranks(written, name):
    folder, tensors = written
    case = CASES[name]
    learner = case.local()
    load(learner, folder / name)
    state = state_of(learner)
    assert unequal(state, expected(tensors[name], state)) == []
    assert any(n.startswith("optimiser/exp_avg_sq/") for n in state)
    update(learner, case.recipe(), [case.groups(case.local())[1]], first=1)
    assert state_differences(name, continued_locally(case), learner) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3, 4])  # 3 does not divide the tensors evenly
def test_another_number_of_ranks_continues_two(written, number, tmp_path):
    folder, tensors = written
    with ranks(number) as pool:
        for name, case in CASES.items():
            learner = case.sharded(pool)
            load(learner, folder / name)
            state = state_of(learner)
            assert unequal(state, expected(tensors[name], state)) == [], name
            published = learner.weights()
            local = case.local()
            load(local, folder / name)
            assert all(torch.equal(w, published[n]) for n, w in local.weights().items()), name
            save(learner, tmp_path / name)  # and back: written by this number, read by one process
            again = case.local()
            load(again, tmp_path / name)
            assert unequal(state_of(again), state) == [], name
            update(learner, case.recipe(), [case.groups(case.local())[1]], first=1)
            assert state_differences(name, continued_locally(case), learner) == []


@pytest.mark.slow
def test_a_rank_reads_only_its_part(written, tmp_path, monkeypatch):
    """Also of a checkpoint that one process wrote. Rank 0 is this process, so what it reads can be counted here."""
    folder, _ = written
    case = CASES["policy"]
    local = case.local()
    load(local, folder / "policy")
    save(local, tmp_path)
    read: list[int] = []
    part = StoredTensors.part
    counted = lambda self, name, start, shape: read.append(math.prod(shape)) or part(self, name, start, shape)  # noqa: E731
    with ranks(2) as pool:
        for source in (folder / "policy", tmp_path):
            learner = case.sharded(pool)
            with monkeypatch.context() as patch:
                patch.setattr(StoredTensors, "part", counted)
                load(learner, source)
            whole = state_of(local)
            assert unequal(state_of(learner), whole) == []
            assert 0.4 < sum(read) / sum(t.numel() for t in whole.values()) < 0.6
            read.clear()
        state = learner.checkpoint_state()
        assert isinstance(state["tensors"], RankTensors)
        del (fewer := dict(state["tensors"]))["model/model.norm.weight"]
        with pytest.raises(SettingError, match=r"1 tensors differ, first 'model/model\.norm\.weight'"):
            learner.load_state_dict({**state, "tensors": fewer})
        learner.load_state_dict(state)  # the ranks were not touched
        assert unequal(state_of(learner), whole) == []


@pytest.mark.slow
def test_a_rank_killed_while_it_writes_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    """Its file is a named pipe, so it is certain that the rank is in the middle of writing when it is killed."""
    case = CASES["policy"]
    first, second = case.groups(case.local())
    with ranks(2) as pool:
        learner = case.sharded(pool)
        update(learner, case.recipe(), [first])
        save(learner, tmp_path)
        write_files, victim = RankTensors.write_files, pool.processes[0].number
        begun: list[bytes] = []

        def kill_in_the_middle(fifo: Path) -> None:
            with fifo.open("rb", buffering=0) as stream:
                begun.append(stream.read(16))
                os.kill(victim, signal.SIGKILL)

        def through_a_pipe(self, folder: Path):
            os.mkfifo(fifo := folder / "shard-00002-of-00002.safetensors")
            threading.Thread(target=kill_in_the_middle, args=(fifo,), daemon=True).start()
            return write_files(self, folder)

        update(learner, case.recipe(), [second], first=1)
        monkeypatch.setattr(RankTensors, "write_files", through_a_pipe)
        with pytest.raises(RankFault, match="rank 1 of 2 was ended by SIGKILL"):
            save(learner, tmp_path, step=2)
        assert begun and begun[0]
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]  # neither step 2 nor a temporary folder
    assert load_latest(tmp_path).step == 1
    with ranks(2) as pool:
        again = case.sharded(pool)
        load(again, tmp_path)
        update(again, case.recipe(), [second], first=1)
        assert state_differences("after the kill", continued_locally(case), again) == []


@pytest.mark.slow
def test_a_rank_that_cannot_write_says_so(tmp_path):
    case = CASES["policy"]
    with ranks(2) as pool:
        learner = case.sharded(pool)
        with pytest.raises(StoreError, match=r"could not write .*shard-0000[12]-of-00002\.safetensors"):
            learner.checkpoint_state()["tensors"].write_files(tmp_path / "no such folder")
