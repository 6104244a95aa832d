"""Dialogues that tests hold with any generator."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from turnwise.core.records import Sampling

SHORT = Sampling(max_tokens=12)


def run(work):
    return asyncio.run(asyncio.wait_for(work, 120))


async def two_turns(g, asked, sampling=SHORT):
    """Every prompt continued twice, all at once, in dialogues that stay open in between."""

    async def one(session, ids):
        first = await session.generate(ids, sampling)
        second = await session.generate([*ids, *first.tokens, 1, 2], sampling)
        session.close()
        return first, second

    sessions = [g.open(n) for n in range(len(asked))]
    done = await asyncio.gather(*map(one, sessions, asked))
    return [replace(part, seconds=0.0) for pair in done for part in pair]
