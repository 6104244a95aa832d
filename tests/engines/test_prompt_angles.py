"""Angles of hidden states: cosines as defined, equal in any batch of prompts, and a run that ranks its tasks by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise import train
from turnwise.core.stateful import from_json
from turnwise.engines.learner.signals.hidden import concentration, prompt_angles
from turnwise.errors import SettingError
from turnwise.models.tiny import tiny_model
from turnwise.store.checkpoint import latest, load_checkpoint


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(0, 5), st.integers(1, 6))
def test_means_over_pairs_of_tokens(seed, context, question):
    hidden = torch.randn(context + question, 4, generator=torch.Generator().manual_seed(seed))
    unit = [row / row.norm() for row in hidden.double()]
    pairs = [float(a @ b) for a in unit[context:] for b in unit[context:]]
    across = [float(a @ b) for a in unit[context:] for b in unit[:context]]
    intra, inter = concentration(hidden, context)
    assert intra == pytest.approx(np.mean(pairs), abs=1e-9)
    assert inter == pytest.approx(np.mean(across) if across else 0.0, abs=1e-9)
    assert -1e-9 <= intra <= 1 + 1e-9 and -1 - 1e-9 <= inter <= 1 + 1e-9


def test_a_prompt_has_the_same_angles_in_any_batch():
    model = tiny_model(40, 0, hidden=64).eval()
    prompts = [[1, 2, 3, n, *range(5, 5 + n % 4)] for n in range(4, 40)]
    together = prompt_angles(model, prompts)
    pairs = [prompt_angles(model, [prompts[0], p])[1] for p in prompts[1:6]]
    for alone, found in zip(pairs, together[1:6]):
        assert alone == pytest.approx(found, abs=1e-5)
    assert len({round(a, 6) for a, _ in together}) > 10


@pytest.mark.slow
def test_a_run_ranks_its_pool_by_the_model_and_keeps_the_ranking(tmp_path):
    given = {
        "env": "calculator",
        "groups": 2,
        "group_size": 2,
        "cold_steps": 2,
        "eval_tasks": 0,
        "trackers": (),
        "threads": 1,
    }
    common = {**given, "sampler": "gain_rl,pool=16", "out": str(tmp_path), "checkpoint_every": 1, "quiet": True}
    ranks = {}
    for name, seed in (("a", 0), ("b", 0)):
        train(method="dr_grpo", steps=2, name=name, seed=seed, **common)
        state = load_checkpoint(latest(tmp_path / name / "checkpoints")).state["sampler"]["sampler"]
        ranks[name] = from_json(state["order"], np.zeros(1)).tolist()
    assert ranks["a"] == ranks["b"] and sorted(ranks["a"]) == list(range(16))
    assert ranks["a"] != list(range(16))  # by difficulty, all tasks of one difficulty keep their order


def test_an_agent_has_no_prompt_to_rank_by(tmp_path):
    with pytest.raises(SettingError, match="an agent writes its own"):
        train(
            method="dr_grpo", agent=_agent, env="calculator", sampler="gain_rl,pool=4", steps=1, cold_steps=1, groups=1,
            group_size=2, eval_tasks=0, trackers=(), out=str(tmp_path), name="x", quiet=True, threads=1,
        )  # fmt: skip


async def _agent(task, client):
    await client.chat.completions.create(messages=task.messages)
    return 0.0
