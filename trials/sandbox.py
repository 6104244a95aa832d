"""Attacks on the sandbox, on every rung of isolation that this machine has. Lists and grammars are in tests/tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trials.outcome import Outcome, Results

TESTS = Path(__file__).parent.parent / "tests"
SHORT_EVERY, SHORT_DRAWN = 11, 30
SEED, WANTED = 33, 1_600  # on each rung; what the list has too little is drawn from grammars with this seed
BLOCK = 50  # attacks of one row


def trial(short: bool, results: Results, progress: Callable[[str], None], seed: int = SEED) -> Iterator[Outcome]:
    for folder in (TESTS, TESTS / "tools"):
        sys.path.insert(0, str(folder))
    from attack_grammar import GRAMMARS, drawn
    from attack_run import PROMISED, run_attacks
    from attacks import all_attacks
    from support.tool_pools import NAMES, shared

    progress(f"sandbox: attacks from grammars are drawn with seed {seed}")
    listed = [attack for attack in all_attacks() if not attack.slow][::SHORT_EVERY] if short else all_attacks()
    for rung in NAMES:
        missing = shared(rung)
        if isinstance(missing, str):
            progress(f"sandbox: {rung} is not there: {missing}")
            continue
        kinds = PROMISED.get(rung, {attack.kind for attack in listed} | set(GRAMMARS))
        promised = [attack for attack in listed if attack.kind in kinds]
        count = SHORT_DRAWN if short else WANTED - len(promised)
        by_kind = dict[str, list[Any]]()
        for attack in (*promised, *drawn(seed, count, [kind for kind in GRAMMARS if kind in kinds])):
            by_kind.setdefault(attack.kind, []).append(attack)
        for kind, attacks in by_kind.items():
            for first in range(0, len(attacks), BLOCK):
                # one row for those that were held, and one for each that was not
                block = attacks[first : first + BLOCK]
                name = f"{kind}: {first} to {first + len(block) - 1}, seed {seed}"
                escapes = [attack for attack in block if (rung, _name(attack)) in results.outcomes]
                if results.done(rung, name) and all(results.done(rung, _name(attack)) for attack in escapes):
                    continue
                progress(f"sandbox: {rung}, {name}")
                outcomes = run_attacks(rung, block)
                held = [o for o in outcomes if not o.fault and o.attack not in escapes]
                yield Outcome(rung, name, "held", "", max((o.seconds for o in held), default=0.0), len(held), kind)
                for o in outcomes:
                    if o.fault or o.attack in escapes:
                        result = "escaped" if o.fault else "held"
                        yield Outcome(rung, _name(o.attack), result, o.fault, o.seconds, kind=kind)


def _name(attack: Any) -> str:
    return f"{attack.kind}: {attack.name}"
