"""Seconds of one whole step beside TRL's: `turnwise.bench.steps` as a script.

    python bench/step.py [--steps 12] [--threads 2] [--json] [--tasks single tools] [--trl-python PATH]
"""

from turnwise.bench.peers import RESPONSE, TEMPLATE, add, corpus, question
from turnwise.bench.steps import main

__all__ = ["RESPONSE", "TEMPLATE", "add", "corpus", "question"]

if __name__ == "__main__":
    raise SystemExit(main())
