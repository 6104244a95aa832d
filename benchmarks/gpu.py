"""Generation and learning on one GPU, without TRL: `turnwise bench --parts generation,learning` as a script.

    python benchmarks/gpu.py [--quick] [--parts generation learning] [--out FILE.json]

The model has the architecture of SmolLM2-135M with random weights. The limit is what reading the weights once a step and
every lane's keys and values once a token would take at the measured copy bandwidth.
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
    given = parser.parse_args()
    facts, found = table.measure("cuda", given.quick, parts=tuple(given.parts))
    print(report.markdown(table.title(facts), found))
    if given.out:
        given.out.write_text(report.as_json(facts, found))


if __name__ == "__main__":
    main()
