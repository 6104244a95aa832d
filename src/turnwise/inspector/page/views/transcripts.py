"""Transcripts as blocks: the messages that were read, and the sampled tokens, coloured by a number of each.

A turn shows at most a few thousand tokens and a message a few ten thousand characters; the rest is a link away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwise.core.records import Message, Trajectory
from turnwise.core.text import printable
from turnwise.inspector.page.blocks import TokenCell, Transcript, TurnBlock
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import Link

TOKENS_SHOWN, CHARACTERS_SHOWN = 2000, 20_000


@lru_cache(maxsize=8)
def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer  # late: most pages need none

    return Tokenizer.from_file(str(path))


def token_texts(run: Path, ids: Sequence[int]) -> list[str]:
    """One text for each id. Bytes of a split character show as U+FFFD; invisible characters as escapes; a newline as ↵."""
    path = run / "initial" / "tokenizer.json"
    if not path.is_file():
        return [f"[{number}]" for number in ids]
    tokenizer = _tokenizer(path)
    # one by one: decoding together would join bytes of a character that tokens split
    texts = {number: tokenizer.decode([number], skip_special_tokens=False) for number in set(ids)}
    return [printable(texts[number]).replace("\n", "↵\n") or f"[{number}]" for number in ids]


def transcript(
    run: RunReader,
    trajectory: Trajectory,
    values: Sequence[float],
    hint: Callable[[int], str],
    link: Callable[[int], Link],
    selected: int = -1,
    offset: int = 0,
    title: str = "Transcript",
    about: str = "",
    full: float = 0.0,
    like: Sequence[int] = (),
) -> Transcript:
    """``values``, ``hint``, ``link``: what colours each sampled token, its tooltip and target, by its index in the trajectory.
    ``full``: the value of the full colour. ``like``: a sibling's tokens; what it says, too, up to the fork, is shared."""
    turns: list[TurnBlock] = []
    fork = first_difference([token for turn in trajectory.turns for token in turn.tokens], like) if like else 0
    other = "".join(token_texts(run.path, like[fork : fork + 1]))
    messages, index, cursor = trajectory.messages, 0, 0
    for number, turn in enumerate(trajectory.turns):
        while cursor < len(messages) and messages[cursor].get("role") != "assistant":
            turns.append(_message(messages[cursor]))
            cursor += 1
        cursor += 1  # the assistant's message is shown as its tokens
        start, count = offset, len(turn.tokens)
        if index <= selected < index + count:  # the part of the turn that holds the selected token
            start = max(offset, (selected - index) // TOKENS_SHOWN * TOKENS_SHOWN)
        shown = range(start, min(count, start + TOKENS_SHOWN)) if start < count else range(0)
        cells = []
        for text, at in zip(token_texts(run.path, [turn.tokens[i] for i in shown]), (index + i for i in shown)):
            value = float(values[at]) if at < len(values) and math.isfinite(values[at]) else math.nan
            # different tokens may begin with the same characters
            shared = len(text) if at < fork else first_difference(text, other) if at == fork else 0
            cells.append(TokenCell(text, value / full if full else 0.0, hint(at), link(at), at == selected, shared))
        facts = [f"turn {number}", f"{count} tokens", f"reward {turn.reward:g}"]
        facts += ["history rewritten"] if turn.restart else []
        facts += [f"ended by {turn.stop}"] if str(turn.stop) != "token" else []
        rest = Link(f"tokens {shown.stop} to {count}", "why", {"trajectory": trajectory.id, "offset": shown.stop})
        turns.append(TurnBlock(turn.agent, "", cells, ", ".join(facts), rest if shown.stop < count else None))
        index += count
    turns += [_message(m) for m in messages[cursor:] if m.get("role") != "assistant"]
    if not any(turn.tokens for turn in trajectory.turns):
        turns = [_message(m) for m in messages]  # the token arrays were pruned
    return Transcript(title, turns, about, full)


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The first index at which two sequences differ, or at which one of them has ended."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def message_transcript(title: str, messages: Sequence[Message], about: str = "") -> Transcript:
    """An episode of which only the text is stored."""
    return Transcript(title, [_message(message) for message in messages], about)


def _message(message: Message) -> TurnBlock:
    content = message.get("content")
    text = printable(content if isinstance(content, str) else "" if content is None else repr(content))
    hidden = len(text) - CHARACTERS_SHOWN
    note = f"{hidden:,} more characters are not shown" if hidden > 0 else ""
    return TurnBlock(printable(message.get("role", "?")), text[:CHARACTERS_SHOWN], (), note)
