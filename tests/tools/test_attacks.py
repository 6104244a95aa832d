"""The list of attacks, on every rung of isolation that this machine has: a selection always, all of them with ``slow``."""

from __future__ import annotations

import pytest
from attack_grammar import GRAMMARS, drawn
from attack_run import run_attacks, table
from attacks import all_attacks
from support.tool_pools import ISOLATING, NAMES, use

FAST = [attack for attack in all_attacks() if not attack.slow]


def test_the_list_is_long_and_names_are_unique() -> None:
    attacks = all_attacks()
    assert len(attacks) >= 400
    assert len({(attack.kind, attack.name) for attack in attacks}) == len(attacks)


@pytest.mark.parametrize("rung", ISOLATING)
def test_a_selection_of_attacks_is_held(rung: str) -> None:
    outcomes = run_attacks(use(rung).isolation, FAST[::11])
    assert not [o for o in outcomes if o.fault], table(outcomes)


@pytest.mark.parametrize("rung", ISOLATING)
def test_attacks_drawn_from_grammars_are_held(rung: str) -> None:
    attacks = drawn(7, 12)
    assert attacks == drawn(7, 12) != drawn(8, 12) and {attack.kind for attack in attacks} == set(GRAMMARS)
    outcomes = run_attacks(use(rung).isolation, list(attacks))
    assert not [o for o in outcomes if o.fault], table(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("rung", NAMES)
def test_every_attack_is_held(rung: str) -> None:
    outcomes = run_attacks(use(rung).isolation)
    assert len(outcomes) > (400 if rung in ISOLATING else 80)
    assert not [o for o in outcomes if o.fault], table(outcomes)


def test_an_escape_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same attacks reach their aims where nothing isolates."""
    use("limits")
    monkeypatch.setattr("attack_run.PROMISED", {})
    wanted = {"symbolic link", "datagram pair to a path", "datagram pair to a name", "connect", "pipe of the host"}
    outcomes = run_attacks("limits", [attack for attack in FAST if attack.name in wanted])
    assert {o.attack.name for o in outcomes if o.fault} == wanted
    signs = [attack for attack in FAST if attack.name in ("lock as a sign", "shared lock as a sign", "see the host's lock")]
    outcomes = run_attacks("limits", signs)
    assert all(o.fault for o in outcomes) and len(outcomes) == 3
