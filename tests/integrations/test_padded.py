"""Padded tensors: rows of other trainers as batches."""

from __future__ import annotations

import torch

from turnwise.core.levels import TRAJECTORY, TURN
from turnwise.integrations import padded


def test_a_row_without_sampled_tokens_still_counts_among_its_peers():
    mask = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 1, 0]])
    reward, group = torch.tensor([0.0, 3.0, 6.0]), torch.zeros(3, dtype=torch.int64)
    batch = padded.from_padded(mask * 5, mask, logp=mask.float(), reward=reward, group=group)
    assert batch.tree.size(TURN, TRAJECTORY).x.tolist() == [1, 1, 1]
    assert batch.reward.sum(TRAJECTORY).x.tolist() == reward.tolist()
    assert padded.advantages("rloo", reward, mask, group).tolist() == [[0, -4.5, -4.5], [0, 0, 0], [0, 4.5, 0]]


def test_a_batch_of_silent_rows_only_has_no_loss():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    logp = torch.zeros(2, 3, requires_grad=True)
    loss, _ = padded.loss("rloo", logp, logp.detach(), mask, reward=torch.ones(2), group=torch.zeros(2))
    assert loss.item() == 0.0


def test_turns_are_runs_of_the_mask_and_the_last_is_paid():
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 0, 0]])
    batch = padded.from_padded(
        mask, mask, logp=mask.float(), reward=torch.tensor([2.0, 1.0]), group=torch.tensor([7, 7])
    )
    assert batch.tree.size(TURN, TRAJECTORY).x.tolist() == [2, 1]
    assert batch.reward.x.tolist() == [0.0, 2.0, 1.0]
