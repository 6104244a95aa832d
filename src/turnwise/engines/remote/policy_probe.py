"""Log-probabilities of a few tokens under the weights that were published, to compare with what a server says of them.

A server may load weights and still answer with others (a tied head that kept its old values, a cache, a second copy). Versions
and checksums cannot show that; an answer can. Knows models and tensors; no server.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from turnwise.core.seeds import stable_seed

PROMPT, SAMPLED = 12, 12  # token ids of a probe
KEPT = 20  # by top-k, where a server returns what it kept


class PolicyProbe:
    """Reads a prompt with any weights of one architecture. Keeps the model's structure and buffers, none of its weights."""

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        """``vocabulary``: ids below it occur in probes."""
        buffers = {name: value.detach().clone() for name, value in model.named_buffers()}
        parameters = {id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
        self.model = copy.deepcopy(model, {**parameters}).eval()  # the memo stands in for every weight
        self.buffers, self.vocabulary = buffers, vocabulary

    def prompt(self, version: int) -> list[int]:
        """Token ids to continue, others for every version."""
        random = torch.Generator().manual_seed(stable_seed(0, "probe", version) % 2**31)
        return torch.randint(0, self.vocabulary, (PROMPT,), generator=random).tolist()

    @torch.no_grad()
    def logp(
        self, weights: Mapping[str, Tensor], prompt: Sequence[int], tokens: Sequence[int], kept: Sequence[bytes] = ()
    ) -> list[float]:
        """Log-probabilities of ``tokens`` after ``prompt``, at temperature 1, each over the ids that were ``kept`` if there are
        some."""
        wide = lambda t: t.to(torch.promote_types(t.dtype, torch.float32))  # noqa: E731  (a frozen base may be in half precision)
        tensors = {name: wide(value) for name, value in weights.items()}
        device = next(iter(tensors.values())).device
        buffers = {name: value.to(device) for name, value in self.buffers.items()}
        ids = torch.tensor([[*prompt, *tokens]], device=device)
        out = functional_call(self.model, {**tensors, **buffers}, (), {"input_ids": ids, "use_cache": False})
        rows = out.logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        for row, mask in zip(rows, kept):
            row -= row[torch.frombuffer(bytearray(mask), dtype=torch.int32).long()].logsumexp(0)
        return rows.gather(1, ids[0, len(prompt) :, None]).squeeze(1).tolist()


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Mean absolute difference of two lists of log-probabilities."""
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / max(len(ours), 1)
