"""What generators are asked for. Sampling is on (temperature 1, nothing cut) and nothing stops early, so that every engine
samples the same number of useful tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Per request: its prompt, and per turn how many tokens are asked for and what the tool answers then."""

    name: str
    prompts: list[list[int]]
    asked: list[list[int]]
    replies: list[list[list[int]]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.asked))


def ids(rng: random.Random, low: int, high: int, vocabulary: int = 512) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(rng.randint(low, high))]


def equal(batch: int, prompt: int, new: int, vocabulary: int = 512, seed: int = 0) -> Load:
    """Prompts and answers of one length; other prompts for each seed, so that no cache helps."""
    rng = random.Random(seed)
    prompts = [ids(rng, prompt, prompt, vocabulary) for _ in range(batch)]
    return Load(f"batch {batch}, {prompt}+{new}", prompts, [[new]] * batch, [[[]]] * batch)


def ragged(requests: int = 256, seed: int = 0, vocabulary: int = 512) -> Load:
    """Prompts 8-64, new tokens geometric with mean 32, at most 256; only asked-for tokens count."""
    rng = random.Random(seed)
    lengths = [min(256, 1 + int(rng.expovariate(1 / 31.5))) for _ in range(requests)]
    return Load("ragged", [ids(rng, 8, 64, vocabulary) for _ in lengths], [[n] for n in lengths], [[[]]] * requests)


def dialogue(sessions: int = 64, seed: int = 0) -> Load:
    """Four turns of 24 tokens, a tool's reply of 8-16 tokens between turns."""
    rng = random.Random(seed)
    replies = [[ids(rng, 8, 16) for _ in range(3)] + [[]] for _ in range(sessions)]
    return Load("dialogue", [ids(rng, 4, 8) for _ in range(sessions)], [[24] * 4] * sessions, replies)


def classics() -> list[Load]:
    """64 equal requests, 256 ragged ones, 64 dialogues."""
    rng = random.Random(0)
    prompts = [ids(rng, 4, 8) for _ in range(64)]
    return [Load("equal", prompts, [[32]] * 64, [[[]]] * 64), ragged(), dialogue()]
