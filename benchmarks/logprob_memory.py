"""Peak memory of log-probabilities: `turnwise.bench.memory` as a script.

python benchmarks/logprob_memory.py [--tokens 4096] [--vocabulary 50000] [--width 64 256] [--json]
"""

from turnwise.bench.memory import main

if __name__ == "__main__":
    raise SystemExit(main())
