"""How different the answers of one group are: one minus the mean self-BLEU of their tokens. Knows token ids, no text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

ORDERS = (1, 2, 3)
SMOOTHING = 0.1  # replaces a count of 0 matches


def diversity(answers: Sequence[Sequence[int]]) -> float:
    """1 − mean over the answers of BLEU(answer, all others); 0 for fewer than two answers."""
    counts = [[_ngrams(answer, n) for n in ORDERS] for answer in answers]
    if len(counts) < 2:
        return 0.0
    lengths = [len(answer) for answer in answers]
    return 1.0 - sum(_bleu(i, counts, lengths) for i in range(len(counts))) / len(counts)


def _ngrams(answer: Sequence[int], n: int) -> Counter[tuple[int, ...]]:
    return Counter(zip(*(answer[k:] for k in range(n))))


def _bleu(i: int, counts: list[list[Counter[tuple[int, ...]]]], lengths: list[int]) -> float:
    """BLEU of answer ``i`` against the others: geometric mean of clipped n-gram precisions, times the brevity penalty."""
    logs = []
    for order, own in enumerate(counts[i]):
        limit: Counter[tuple[int, ...]] = Counter()
        for j, other in enumerate(counts):
            if j != i:
                limit |= other[order]
        matches, total = (own & limit).total(), own.total()
        logs.append(math.log((matches or SMOOTHING) / max(1, total)))
    closest = min((n for j, n in enumerate(lengths) if j != i), key=lambda n: (abs(n - lengths[i]), n))
    brevity = 1.0 if lengths[i] > closest else math.exp(1 - closest / max(1, lengths[i]))
    return min(1.0, brevity * math.exp(sum(logs) / len(logs)))
