"""Peak memory of log-probabilities and entropies, forward and backward: chunked against log_softmax of all logits.

Each side runs in a fresh process. The result is the rise of its peak resident memory above the inputs. Knows no models.

    python -m turnwise.bench.memory [--tokens 4096] [--vocabulary 50000] [--width 64 256] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from turnwise.bench.report import BenchRow, with_ratio_to
from turnwise.bench.step_worker import peak_mb

BAR = 0.25  # ours may need at most this fraction of the plain peak


def child(kind: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    import torch

    from turnwise.engines.learner.logprobs import token_logprobs

    def step(h: Any, w: Any, y: Any) -> None:
        if kind == "chunked":
            result: Any = token_logprobs(h, w, None, y, 1.0, want_entropy=True)
            logp, entropy = result
        else:
            log_p = torch.log_softmax(h @ w.T, 1)
            logp = log_p.gather(1, y[:, None]).squeeze(1)
            entropy = -(log_p.exp() * log_p).sum(1)
        (logp + 0.01 * entropy).sum().backward()

    def inputs(n: int, v: int) -> tuple[Any, Any, Any]:
        make = lambda *shape: torch.randn(*shape).requires_grad_()  # noqa: E731
        return make(n, width), make(v, width), torch.randint(v, (n,))

    step(*inputs(64, 512))  # libraries allocate on first use
    data = inputs(tokens, vocabulary)
    # the inputs are there already: only what the step adds counts
    before, began = peak_mb(), time.perf_counter()
    step(*data)
    return {"peak_mb": peak_mb() - before, "seconds": time.perf_counter() - began}


def measure(kind: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    command = [sys.executable, "-m", "turnwise.bench.memory", "--child", kind, "--tokens", str(tokens)]
    command += ["--vocabulary", str(vocabulary), "--width", str(width)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(out.splitlines()[-1]))


def rows(tokens: int = 2048, vocabulary: int = 50_000, width: int = 64) -> list[BenchRow]:
    load = f"log-probs of {tokens:,} tokens, vocabulary {vocabulary:,}"
    sides = {"turnwise": "chunked", "all logits": "plain"}
    peaks = {who: measure(kind, tokens, vocabulary, width)["peak_mb"] for who, kind in sides.items()}
    return with_ratio_to([BenchRow("memory", load, who, mb, "MB") for who, mb in peaks.items()], "all logits")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--child", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.tokens, args.vocabulary, args.width[0])))
        return 0
    results: list[dict[str, Any]] = []
    for width in args.width:
        plain, ours = (measure(kind, args.tokens, args.vocabulary, width) for kind in ("plain", "chunked"))
        ratio = ours["peak_mb"] / plain["peak_mb"]
        results.append({"width": width, "plain": plain, "chunked": ours, "ratio": ratio, "pass": ratio <= BAR})
    if args.json:
        print(json.dumps({"tokens": args.tokens, "vocabulary": args.vocabulary, "bar": BAR, "rows": results}))
    else:
        print(f"{args.tokens} tokens, vocabulary {args.vocabulary}; bar: at most {BAR} of the plain peak")
        for r in results:
            sides = ", ".join(f"{k} {r[k]['peak_mb']:.0f} MB in {r[k]['seconds']:.1f} s" for k in ("plain", "chunked"))
            print(f"width {r['width']}: {sides}; ratio {r['ratio']:.3f} {'ok' if r['pass'] else 'FAIL'}")
    return 0 if all(r["pass"] for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
