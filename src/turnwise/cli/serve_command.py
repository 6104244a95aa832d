"""``turnwise serve``: a model behind HTTP that samples for runs on this or other machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields

from turnwise.cli.flags import Parser, default_text, flag, settings_from
from turnwise.cli.output import print_json
from turnwise.cli.run_flags import DEFAULT_METHOD
from turnwise.config.settings import Settings

ABOUT = (
    "Sample for `turnwise train --generator URL` by vLLM's own wire: token ids in, token ids out, pauses, weights. The trainer "
    "sends the weights. Trainers on other machines need a token, read from the variable TURNWISE_ENDPOINT_TOKEN."
)
SETTINGS = (
    "env", "difficulty", "max_turns", "context", "slots", "threads", "device", "rollout_dtype", "template", "tool_syntax",
    "seed", "hidden", "layers", "vocabulary", "copying",
)  # fmt: skip


def serve(argv: Sequence[str]) -> int:
    """``turnwise serve``"""
    parser = Parser(prog="turnwise serve", description=ABOUT, allow_abbrev=False)
    parser.add_argument(
        "model",
        help="a folder in Hugging Face format, a Hub id, a run directory, or tiny (with the run's --env and --difficulty)",
    )
    parser.add_argument(
        "--address", default="127.0.0.1:8800", metavar="HOST:PORT", help="where to listen [127.0.0.1:8800]"
    )
    parser.add_argument("--json", action="store_true", help="print what happened as JSON at the end")
    group = parser.add_argument_group("settings")
    for f in fields(Settings):
        if f.name in SETTINGS:
            group.add_argument(
                flag(f.name), metavar="X", default=None, help=f"{f.metadata['help']} [{default_text(f)}]"
            )
    namespace = parser.parse(argv)
    from turnwise.training.agents import TOKEN_VARIABLE
    from turnwise.training.generator_server import serve_model

    tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    values = {name: value for name, value in settings_from(namespace, DEFAULT_METHOD).items() if name in SETTINGS}
    served = serve_model(namespace.model, namespace.address, os.environ.get(TOKEN_VARIABLE, ""), values, tell)
    if namespace.json:
        print_json(served)
    else:
        print(f"{served['answered']} requests were answered; the last weights: {served['weights']}")
    return 0
