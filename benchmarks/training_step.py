"""Seconds of one whole training step beside TRL's: `turnwise.bench.training_step` as a script.

python benchmarks/training_step.py [--steps 12] [--threads 2] [--json] [--tasks single tools] [--trl-python PATH]
"""

from turnwise.bench.step_worker import RESPONSE, TEMPLATE, add, corpus, question
from turnwise.bench.training_step import main

__all__ = ["RESPONSE", "TEMPLATE", "add", "corpus", "question"]

if __name__ == "__main__":
    raise SystemExit(main())
