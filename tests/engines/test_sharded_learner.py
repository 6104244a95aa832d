"""A learner over several ranks takes the steps of the local learner: loss, gradients, weights and optimizer state.

Starting ranks costs seconds (each imports torch), so every test starts its ranks once and runs all its cases inside them. All
comparisons are in float64, where the two may differ by the order of sums only.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from support.ranks import FLOAT32, Case, differences, state_differences, update
from support.small_models import make_model

from turnwise import recipes
from turnwise.core.signals import Signal
from turnwise.engines.sharded import rank_pool
from turnwise.engines.sharded.rank_pool import RankPool
from turnwise.engines.sharded.served import unserved_reason
from turnwise.engines.sharded.sharded_learner import ShardedLearner
from turnwise.errors import RankFault, SettingError

NEEDS = [  # one method for each need of a learner
    "grpo", "ppo", "bpo", "dpo", "capo", "otr", "poise", "rlfr", "st_ppo", "so_grpo", "igpo", "infopo", "mssr", "opd",
    "verl_rank", "dgpo", "ipa", "archer",
]  # fmt: skip


def served(name: str) -> bool:
    recipe = recipes.build(name)
    return not unserved_reason(recipe.objective.signals, bool(recipe.smoothing), recipe.precision.learner)


def variants() -> list[Case]:
    """Settings and models that change what is sharded."""
    model = lambda name: lambda: make_model(name)  # noqa: E731
    adapters = [Case("dpo", g, settings={"lora_rank": 2}) for g in ("block", "step")] if find_spec("peft") else []
    return [
        *adapters,
        Case("ppo", options={"separate_critic": True}),
        Case("ppo", settings={"recompute": True}),
        Case("grpo", settings={"clip": 1e-3}),
        Case("grpo", settings={"clip": math.inf, "positions": 4096}),
        Case("dpo", model=model("llama_tied")),
        Case("grpo", model=model("gpt2")),
        Case("grpo", model=model("qwen3"), gather="step"),
    ]


def test_one_rank_is_the_local_learner():
    pool = RankPool(1)
    try:
        assert [w for gather in ("block", "step") for w in differences(Case("ppo", gather), pool)] == []
        single = [Case("grpo", gather, settings={"dtype": "float32"}) for gather in ("block", "step")]
        assert [w for case in single for w in differences(case, pool, FLOAT32)] == []
    finally:
        pool.close()


@pytest.mark.slow
def test_two_ranks_serve_every_need():
    pool = RankPool(2)
    try:
        cases = [Case(name, gather) for name in NEEDS for gather in ("block", "step")]
        assert [wrong for case in [*cases, *variants()] for wrong in differences(case, pool)] == []
        single = [Case("grpo", gather, settings={"dtype": "float32"}) for gather in ("block", "step")]
        assert [wrong for case in single for wrong in differences(case, pool, FLOAT32)] == []
    finally:
        pool.close()


@pytest.mark.slow
def test_four_ranks_and_a_resume_with_another_number():
    """More ranks than some batches have trajectories. The state of four ranks continues locally, and back."""
    pool = RankPool(4)
    try:
        assert [wrong for name in ("grpo", "ppo", "mssr", "poise") for wrong in differences(Case(name), pool)] == []
        for case in (Case("mssr"), Case("ppo", "step", options={"separate_critic": True})):
            local, sharded = case.local(), case.sharded(pool)
            first, second = case.groups(local)
            update(local, case.recipe(), [first])
            update(sharded, case.recipe(), [first])
            saved = sharded.state_dict()  # before these ranks hold another learner
            continued, back = case.local(), case.sharded(pool)
            continued.load_state_dict(saved)
            back.load_state_dict(local.checkpoint_state())
            for learner in (local, continued, back):
                update(learner, case.recipe(), [second], first=1)
            assert state_differences("continued locally", local, continued) == []
            assert state_differences("continued by ranks", local, back) == []
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_two_ranks_serve_every_method():
    pool = RankPool(2)
    try:
        names = [name for name in recipes.METHODS if served(name)]
        assert [wrong for name in names for wrong in differences(Case(name), pool)] == []
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads the sockets of Linux")
def test_ranks_of_one_machine_listen_on_loopback_alone():
    """What is sent between ranks is unpickled: from another machine nobody may connect."""
    pool = RankPool(2)
    try:
        held = set()
        for pid in (os.getpid(), pool.processes[0].number):
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    held.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
        addresses = []
        for name in ("tcp", "tcp6"):
            with open(f"/proc/net/{name}", encoding="utf-8") as table:
                rows = [line.split() for line in list(table)[1:]]
            addresses += [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]
        loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
        assert addresses and set(addresses) <= loopback
    finally:
        pool.close()


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_continues_equal(tmp_path):
    case = Case("grpo")
    local = case.local()
    first, second = case.groups(local)
    pool = RankPool(3)
    try:
        sharded = case.sharded(pool)
        update(sharded, case.recipe(), [first])
        saved = sharded.state_dict()
        victim = pool.processes[1].number
        os.kill(victim, signal.SIGKILL)
        others = [process.number for process in pool.processes if process.number != victim]
        begun = time.monotonic()
        with pytest.raises(RankFault, match="rank 2 of 3 was ended by SIGKILL"):
            update(sharded, case.recipe(), [second], first=1)
        assert time.monotonic() - begun < 60  # a hang lasts as long as the time-out, 300 s
        assert not any(os.path.exists(f"/proc/{pid}") for pid in others)
        with pytest.raises(RankFault, match="have ended"):
            sharded.weights()
    finally:
        pool.close()
    pool = RankPool(2)
    try:
        again = case.sharded(pool)
        again.load_state_dict(saved)
        update(again, case.recipe(), [second], first=1)
        update(local, case.recipe(), [first, second])
        assert state_differences("after the kill", local, again) == []
        again.export(tmp_path)
        assert (tmp_path / "model.safetensors").is_file()
    finally:
        pool.close()


@pytest.mark.slow
def test_a_fault_of_one_rank_reaches_the_caller(monkeypatch):
    """A user's mistake keeps its type; a rank that does not answer is named."""
    monkeypatch.setattr(rank_pool, "ANSWER_SECONDS", 3.0)
    pool = RankPool(2)
    try:
        learner = Case("grpo").sharded(pool)
        batch = Case("grpo").groups(Case("grpo").local())[0]
        os.kill(pool.processes[0].number, signal.SIGSTOP)
        with pytest.raises(RankFault, match=r"rank 1 of 2 .*stopped or stuck"):
            update(learner, Case("grpo").recipe(), [batch])
    finally:
        pool.close()


@pytest.mark.slow
def test_a_stopped_rank_is_named_when_a_call_does_not_fit_its_buffers(monkeypatch):
    monkeypatch.setattr(rank_pool, "ANSWER_SECONDS", 3.0)
    monkeypatch.setattr(rank_pool, "NAMING_SECONDS", 0.5)

    def never(learner, message):
        raise AssertionError("rank 0 came to its own part")

    pool = RankPool(2)
    try:
        process = pool.processes[0].number
        os.kill(process, signal.SIGSTOP)
        with pytest.raises(RankFault, match="rank 1 of 2 is stopped or stuck"):
            pool.call(never, None, torch.zeros(1 << 22))
        assert not os.path.exists(f"/proc/{process}")
    finally:
        pool.close()


def test_a_worker_that_cannot_start_is_named(monkeypatch):
    monkeypatch.setattr(rank_pool, "WORKER", "turnwise.no_such_module")
    with pytest.raises(RankFault, match=r"rank 1 of 2 ended with status 1: .*no_such_module"):
        RankPool(2)
    pool = RankPool(1)  # nothing is left of the failed start
    pool.close()


def test_a_second_learner_with_ranks_is_refused_while_one_is_open():
    pool = RankPool(1)
    try:
        with pytest.raises(SettingError, match="already belongs to a torch process group"):
            RankPool(1)
    finally:
        pool.close()
    second = RankPool(1)
    try:
        pool.close()  # again, as when its learner is collected late: the group is not its own any longer
        assert second.call(lambda learner: torch.distributed.get_world_size(), None) == 1
    finally:
        second.close()


def test_a_skipped_step_changes_nothing_on_any_rank():
    """A loss that is not finite: every rank skips, as the local learner does."""
    case, pool = Case("grpo"), RankPool(1)
    try:
        local, sharded = case.local(), case.sharded(pool)
        batch = case.groups(local)[0]
        last = batch[0].trajectories[0].turns[-1]
        poisoned = replace(last, reward=math.inf)
        trajectory = replace(batch[0].trajectories[0], turns=(*batch[0].trajectories[0].turns[:-1], poisoned))
        bad = [replace(batch[0], trajectories=(trajectory, *batch[0].trajectories[1:])), *batch[1:]]
        assert [update(learner, case.recipe(), [bad])[0]["skipped"] for learner in (local, sharded)] == [1.0, 1.0]
        assert (sharded.steps, sharded.skipped) == (0, 1)
        assert state_differences("skipped", local, sharded) == []
    finally:
        pool.close()


# ------------------------------------------------------------- what is refused


def test_what_cannot_be_served_is_refused_with_the_reason():
    refused = {name for name in recipes.METHODS if not served(name)}
    assert refused == {"alp", "alp_sequence", "jet_rl", "oblr_po", "vas", "vcpo"}
    assert not unserved_reason(frozenset())
    with pytest.raises(SettingError, match=r"gradient norm of every single trajectory.*write ranks=1"):
        ShardedLearner(torch.nn.Identity(), ranks=2, signals=frozenset({Signal.GRADIENT_NORM}))
