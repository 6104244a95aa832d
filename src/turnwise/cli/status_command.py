"""``turnwise status``: what a run is doing, from another shell."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from turnwise.cli.flags import Parser
from turnwise.cli.output import print_json
from turnwise.core.text import printable

SECONDS = 2.0  # between two looks of --watch
ABOUT = (
    "Say which component of a run waits for which, how fast each is, and who holds it up. Works while the run goes on, after it "
    "has ended, and after it was killed. Exit status 1 if it is stuck, failed or was killed."
)


def status(argv: Sequence[str]) -> int:
    """``turnwise status``"""
    parser = Parser(prog="turnwise status", description=ABOUT, allow_abbrev=False)
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "--json", action="store_true", help="print everything as JSON; with --watch one line for each look"
    )
    parser.add_argument("--watch", action="store_true", help="look again every two seconds, until the run has ended")
    namespace = parser.parse(argv)
    import json

    from turnwise.training.status import newest_messages, read_state, status_text

    while True:
        state = read_state(namespace.run)
        if namespace.json:
            print(json.dumps(state.as_dict())) if namespace.watch else print_json(state.as_dict())
        else:
            clear = "\x1b[2J\x1b[H" if namespace.watch and sys.stdout.isatty() else ""
            print(clear + printable(status_text(state, newest_messages(namespace.run))), flush=True)
        if not namespace.watch or state.ended:
            return 0 if state.ok else 1
        sys.stdout.flush()
        time.sleep(SECONDS)
