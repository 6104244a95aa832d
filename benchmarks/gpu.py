"""Generation and learning on one GPU, without TRL: `turnwise bench --parts generation,learning` as a script.

    python benchmarks/gpu.py [--quick] [--parts generation learning] [--out FILE.json]

The model has the architecture of SmolLM2-135M with random weights. The limit is the rate at which the measured copy bandwidth
allows reading the weights once per decode step and every sequence's KV cache once per token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from turnwise.bench import report, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", nargs="+", default=["generation", "learning"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    facts, rows = table.measure("cuda", options.quick, parts=tuple(options.parts))
    print(report.markdown(table.title(facts), rows))
    if options.out:
        options.out.write_text(report.as_json(facts, rows))


if __name__ == "__main__":
    main()
