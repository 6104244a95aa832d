"""Workloads for generators. They sample at temperature 1 without truncation and never stop early, so that every engine produces
the same number of useful tokens. Knows no engine."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Per request its prompt, and per turn the number of tokens to sample and the tool reply that follows."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[list[int]]
    replies: list[list[list[int]]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.new_tokens))


def ids(rng: random.Random, low: int, high: int, vocabulary: int = 512) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(rng.randint(low, high))]


def equal(batch: int, prompt: int, new: int, vocabulary: int = 512, seed: int = 0) -> Workload:
    """Prompts and completions of one length; each seed has other prompts, so that no prefix cache helps."""
    rng = random.Random(seed)
    prompts = [ids(rng, prompt, prompt, vocabulary) for _ in range(batch)]
    return Workload(f"batch {batch}, {prompt}+{new}", prompts, [[new]] * batch, [[[]]] * batch)


def ragged(requests: int = 256, seed: int = 0, vocabulary: int = 512) -> Workload:
    """Prompts 8-64, new tokens geometric with mean 32, at most 256; only requested tokens count."""
    rng = random.Random(seed)
    lengths = [min(256, 1 + int(rng.expovariate(1 / 31.5))) for _ in range(requests)]
    return Workload("ragged", [ids(rng, 8, 64, vocabulary) for _ in lengths], [[n] for n in lengths], [[[]]] * requests)


def dialogue(sessions: int = 64, seed: int = 0) -> Workload:
    """Four turns of 24 tokens, with a tool reply of 8-16 tokens between turns."""
    rng = random.Random(seed)
    replies = [[ids(rng, 8, 16) for _ in range(3)] + [[]] for _ in range(sessions)]
    return Workload("dialogue", [ids(rng, 4, 8) for _ in range(sessions)], [[24] * 4] * sessions, replies)


def standard() -> list[Workload]:
    """64 equal requests, 256 ragged ones, 64 dialogues."""
    rng = random.Random(0)
    prompts = [ids(rng, 4, 8) for _ in range(64)]
    return [Workload("equal", prompts, [[32]] * 64, [[[]]] * 64), ragged(), dialogue()]
