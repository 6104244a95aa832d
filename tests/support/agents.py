"""What the tests of agents share: a session that is a policy with a fixed seed."""

from __future__ import annotations

import hashlib

from support.episodes import RENDERER
from turnwise.core.records import Completion, Sampling, Stop

SAMPLING = Sampling(max_tokens=200)
TEXTS = (
    "yes", "answer: 7", '<tool_call>{"name": "python", "arguments": {"code": "t=2*3;t"}}</tool_call>',
    '<tool_call>{"arguments": {"code": "1/0"}, "name": "python"}</tool_call>', "", "<tool_call>{broken", "guess 5",
    'two <tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call><tool_call>{"name": "f"}</tool_call>',
)  # fmt: skip


class HashSession:
    """Says a text that depends only on the ids it reads, as a policy with a fixed seed does."""

    def __init__(self, texts=TEXTS, seed=0):
        self.texts, self.seed, self.read, self.closed = texts, seed, [], False

    async def generate(self, ids, sampling):
        self.read.append(list(ids))
        number = int(hashlib.sha256(f"{self.seed} {list(ids)}".encode()).hexdigest(), 16)
        tokens = RENDERER.encode_turn(self.texts[number % len(self.texts)])[: sampling.max_tokens]
        logp = [-((number >> n) % 97) / 50 for n in range(len(tokens))]
        return Completion(tokens, logp, [0.0] * len(tokens), [3] * len(tokens), Stop.TOKEN)

    def fork(self, seed):
        return HashSession(self.texts, seed)

    def park(self): ...

    def cancel(self): ...

    def close(self):
        self.closed = True
