"""TextWorld's package is not safe for threads: its calls are made one at a time. A stand-in replaces the package."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from turnwise.environments.base import text_action
from turnwise.environments.families import textworld as family


class Parser:
    """Fails where two calls overlap, as the parser of the package does."""

    def __init__(self):
        self.busy, self.calls = False, 0

    def use(self):
        assert not self.busy, "two calls at once"
        self.busy = True
        time.sleep(0.002)
        self.busy, self.calls = False, self.calls + 1


class Game:
    def __init__(self, parser):
        self.parser = parser
        self.state = SimpleNamespace(feedback="a room", won=False, max_score=1, admissible_commands=["look"])

    def reset(self):
        self.parser.use()
        return self.state

    def step(self, command):
        self.parser.use()
        return self.state, 0, False


@pytest.fixture
def parser(monkeypatch):
    parser = Parser()

    def start(path, infos):
        parser.use()
        return Game(parser)

    monkeypatch.setitem(sys.modules, "textworld", SimpleNamespace(start=start, EnvInfos=lambda **_: None))
    return parser


def test_games_in_several_threads_do_not_call_the_package_at_once(parser, tmp_path):
    (tmp_path / "game.z8").write_text("")
    cls = family.environment.__wrapped__(str(tmp_path / "game.z8"))
    faults = []

    def play(seed):
        try:
            env = cls()
            env.reset(seed)
            for _ in range(5):
                env.step(text_action("look"))
        except AssertionError as fault:
            faults.append(fault)

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and parser.calls == 6 * 7
