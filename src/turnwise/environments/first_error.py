"""Find the first wrong step: labelled episodes of another environment, for training a generative reward model.

    --env turnwise.environments.first_error:FirstError,rows=flaws.jsonl

Each row of the file has ``lines``, an episode with numbered steps, and ``error``, the number of its first wrong step or −1. The
reward is that of the step index, from −1 to 1. Rows are divided between the splits by their content.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from turnwise.core.protocols import Action, Step
from turnwise.core.records import Message
from turnwise.environments.base import Environment, read_json_lines, split_by_content, text_action
from turnwise.errors import SettingError
from turnwise.rewards.judge import NO_ERROR, answer, count_steps, question, read_answer, step_index_reward


@lru_cache(maxsize=8)
def read_rows(path: str, changed: int) -> dict[str, list[tuple[tuple[str, ...], int]]]:
    """The rows of a file by split. ``changed``: when the file was last written, so that a new one is read again."""
    rows, expected = [], "{lines: [...], error: 2}"
    for where, row in read_json_lines(path, expected):
        try:
            lines, error = tuple(map(str, row["lines"])), int(row["error"])
        except (ValueError, KeyError, TypeError):
            raise SettingError(f"{where} has no `lines` and `error`; write {expected}") from None
        if not NO_ERROR <= error < max(1, count_steps(lines)):
            raise SettingError(f"{where}: error is {error}, and the episode has {count_steps(lines)} steps")
        rows.append((lines, error))
    splits = split_by_content(rows, lambda row: " ".join(row[0]))
    # where one split is empty, both are the same list
    if not rows or splits["train"] is splits["held_out"]:
        raise SettingError(f"{path} has too few different rows for two splits; write more episodes")
    return splits


class FirstError(Environment):
    """One question, one verdict. Success: the right step was named, or rightly none."""

    max_turns = 1
    inline = True
    suggests: ClassVar[Mapping[str, Any]] = {"context": 256, "max_tokens": 6, "cold_batch": 32}
    symbols: ClassVar[str] = r"step \d|error: ?"

    def __init__(self, *, rows: str, split: str = "train") -> None:
        super().__init__(split=split)
        if not Path(rows).is_file():
            raise SettingError(f"no file {rows!r} of labelled episodes")
        # the time of the last change is part of the cache's key: a file may be written anew during a run
        self.rows = read_rows(rows, Path(rows).stat().st_mtime_ns)[self.split]

    def reset(self, seed: int) -> Sequence[Message]:
        self.lines, self.error = random.Random(f"row/{seed}").choice(self.rows)
        return question(self.lines)

    def step(self, action: Action) -> Step:
        verdict = read_answer(action.text)
        reward = step_index_reward(count_steps(self.lines), self.error, verdict)
        return Step([], reward, terminated=True, info={"success": verdict == self.error})

    def answer(self) -> str:
        return answer(self.error)

    def oracle(self) -> Action:
        return text_action(answer(self.error))

    def random_action(self, rng: random.Random) -> Action:
        return text_action(answer(rng.randrange(NO_ERROR, count_steps(self.lines))))
