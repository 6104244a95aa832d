"""Attacks on the sandbox, on every rung of isolation that this machine has. Lists and grammars are in tests/tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trials.outcome import Outcome, Results

TESTS = Path(__file__).parent.parent / "tests"
SHORT_EVERY, SHORT_DRAWN = 11, 30
SEED, DRAWN = 33, 870  # of the attacks that are drawn from grammars
BLOCK = 20  # attacks between two writes of results


def trial(short: bool, results: Results, progress: Callable[[str], None]) -> Iterator[Outcome]:
    for folder in (TESTS, TESTS / "tools"):
        sys.path.insert(0, str(folder))
    from attack_grammar import drawn
    from attack_run import PROMISED, run_attacks
    from attacks import all_attacks
    from support.tool_pools import NAMES, shared

    attacks = [attack for attack in all_attacks() if not attack.slow][::SHORT_EVERY] if short else all_attacks()
    attacks = [*attacks, *drawn(SEED, SHORT_DRAWN if short else DRAWN)]
    progress(f"sandbox: {len(attacks)} attacks, those from grammars drawn with seed {SEED}")
    for rung in NAMES:
        missing = shared(rung)
        if isinstance(missing, str):
            progress(f"sandbox: {rung} is not there: {missing}")
            continue
        promised = [attack for attack in attacks if attack.kind in PROMISED.get(rung, (attack.kind,))]
        left = [attack for attack in promised if not results.done(rung, _name(attack))]
        for first in range(0, len(left), BLOCK):
            progress(f"sandbox: {rung}, {len(promised) - len(left) + first} of {len(promised)}")
            for outcome in run_attacks(rung, left[first : first + BLOCK]):
                result = "escaped" if outcome.fault else "held"
                kind = outcome.attack.kind
                yield Outcome(rung, _name(outcome.attack), result, outcome.fault, outcome.seconds, kind=kind)


def _name(attack: Any) -> str:
    return f"{attack.kind}: {attack.name}"
