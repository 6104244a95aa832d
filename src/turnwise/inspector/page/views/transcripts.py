"""Transcripts as blocks: the messages that were read, and the sampled tokens, coloured by a number of each.

A turn shows at most a few thousand tokens and a message a few ten thousand characters; the rest is a link away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from turnwise.core.records import Message, Trajectory, Turn
from turnwise.core.text import printable
from turnwise.inspector.page.blocks import TokenCell, Transcript, TurnBlock
from turnwise.inspector.page.token_text import token_texts
from turnwise.inspector.queries import RunReader
from turnwise.observe.charts import Link

TOKENS_SHOWN, CHARACTERS_SHOWN = 2000, 20_000
Hint = Callable[[int], str]


def transcript(
    run: RunReader,
    trajectory: Trajectory,
    tones: Sequence[float],
    hint: Hint,
    link: Callable[[int], Link],
    selected: int = -1,
    offset: int = 0,
    title: str = "Transcript",
    about: str = "",
) -> Transcript:
    """``tones``, ``hint``, ``link``: colour, tooltip and target of each sampled token, by its index in the trajectory."""
    turns: list[TurnBlock] = []
    messages = list(trajectory.messages)
    index, cursor = 0, 0
    for number, turn in enumerate(trajectory.turns):
        while cursor < len(messages) and messages[cursor].get("role") != "assistant":
            turns.append(_message(messages[cursor]))
            cursor += 1
        cursor += 1
        start = offset if selected < 0 or not index <= selected < index + len(turn.tokens) else 0
        if index <= selected < index + len(turn.tokens):
            start = max(offset, (selected - index) // TOKENS_SHOWN * TOKENS_SHOWN)
        shown = range(start, min(len(turn.tokens), start + TOKENS_SHOWN)) if start < len(turn.tokens) else range(0)
        texts = token_texts(run.path, [turn.tokens[i] for i in shown])
        cells = [
            TokenCell(text, _tone(tones, index + i), hint(index + i), link(index + i), index + i == selected)
            for text, i in zip(texts, shown)
        ]
        turns.append(TurnBlock(turn.agent, "", cells, _turn_note(number, turn), _more(trajectory.id, turn, shown)))
        index += len(turn.tokens)
    turns += [_message(m) for m in messages[cursor:] if m.get("role") != "assistant"]
    if not any(turn.tokens for turn in trajectory.turns):
        turns = [_message(m) for m in messages]  # the token arrays were pruned
    return Transcript(title, turns, about)


def _tone(tones: Sequence[float], index: int) -> float:
    return float(tones[index]) if index < len(tones) else 0.0


def _message(message: Message) -> TurnBlock:
    content = message.get("content")
    text = printable(content if isinstance(content, str) else "" if content is None else repr(content))
    hidden = len(text) - CHARACTERS_SHOWN
    note = f"{hidden:,} more characters are not shown" if hidden > 0 else ""
    return TurnBlock(printable(message.get("role", "?")), text[:CHARACTERS_SHOWN], (), note)


def _turn_note(number: int, turn: Turn) -> str:
    facts = [f"turn {number}", f"{len(turn.tokens)} tokens", f"reward {turn.reward:g}"]
    facts += ["history rewritten"] if turn.restart else []
    facts += [f"ended by {turn.stop}"] if str(turn.stop) != "token" else []
    return ", ".join(facts)


def _more(trajectory: str, turn: Turn, shown: range) -> Link | None:
    total = len(turn.tokens)
    if shown.stop >= total:
        return None
    return Link(f"tokens {shown.stop} to {total}", "why", {"trajectory": trajectory, "offset": shown.stop})
