"""Frozen weights in 4 bits over several ranks: packed matrices are whole on each, the rest is divided, and 1, 2 and 4 ranks take
the steps of the local learner."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import make_mixture
from support.ranks import FLOAT32, Case, differences, state_differences, update
from support.small_models import make_model
from torch.distributed.tensor import DTensor

from turnwise.engines.kernels.four_bit import FourBitMatrix, packed_layers
from turnwise.engines.sharded.rank_pool import RankPool

pytest.importorskip("bitsandbytes", reason="4-bit weights need bitsandbytes: pip install 'turnwise-rl[quantized]'")
pytest.importorskip("peft", reason="adapters need PEFT")

FOUR_BIT = {"dtype": "nf4", "lora_rank": 2}


def cases() -> list[Case]:
    own = [(make_model, g, {}) for g in ("block", "step")]
    own += [(lambda: make_model("llama_tied"), "block", {}), (lambda: make_model("qwen3"), "step", {"recompute": True})]
    own += [(make_mixture, "block", {}), (make_mixture, "step", {"recompute": True})]
    return [Case("grpo", gather, settings={**FOUR_BIT, **more}, model=model) for model, gather, more in own]


def packed(learner) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{part}": tensor
        for name, m in learner.model.named_modules()
        if isinstance(m, FourBitMatrix)
        for part, tensor in m.named_buffers()
    }


def test_a_rank_holds_packed_matrices_whole_and_shards_of_the_rest():
    case = Case("grpo", settings=FOUR_BIT, model=make_model)
    pool = RankPool(1)
    try:
        local, sharded = case.local(), case.sharded(pool)
        assert "frozen weights in 4 bits" in sharded.describe()
        assert all(isinstance(p, DTensor) for p in sharded.model.parameters())
        assert {n for n, p in sharded.model.named_parameters() if p.requires_grad} == {
            n for n in dict(sharded.model.named_parameters()) if ".lora_" in n
        }
        assert packed(local).keys() == packed(sharded).keys() == packed(sharded.whole).keys()
        for learner in (sharded, sharded.whole):
            assert all(torch.equal(t, packed(learner)[name]) for name, t in packed(local).items())
        assert len(packed_layers(sharded.model)) == 14 and sharded.parameter_count == local.parameter_count
        assert [
            w for gather in ("block", "step") for w in differences(Case("ppo", gather, FOUR_BIT), pool, FLOAT32)
        ] == []
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_take_the_steps_of_the_local_learner_and_continue_each_other(ranks):
    pool = RankPool(ranks)
    try:
        some = cases() if ranks == 2 else cases()[::4]
        assert [wrong for case in some for wrong in differences(case, pool, FLOAT32)] == []
        case = cases()[0]
        local, sharded = case.local(), case.sharded(pool)
        first, second = case.groups(local)
        for learner in (local, sharded):
            update(learner, case.recipe(), [first])
        saved = sharded.state_dict()
        assert not any("matrix" in name for name in saved["tensors"])
        continued, back = case.local(), case.sharded(pool)
        continued.load_state_dict(saved)
        back.load_state_dict(local.checkpoint_state())
        for learner in (local, continued, back):
            update(learner, case.recipe(), [second], first=1)
        assert state_differences("continued locally", local, continued, FLOAT32) == []
        assert state_differences("continued by ranks", local, back, FLOAT32) == []
    finally:
        pool.close()
