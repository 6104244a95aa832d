"""Peak memory of log-probabilities and entropies, forward and backward: ours against log_softmax of all the logits.

Each side runs in a fresh process; what counts is how far its peak resident memory rises above the inputs.

    python bench/memory.py [--tokens 4096] [--vocabulary 50000] [--width 64 256] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

BAR = 0.25  # ours must need at most this part of the plain peak


def peak_mb() -> float:
    """Highest resident memory of this process so far."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        unit = 1024**2 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def child(kind: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    import torch

    from turnwise.engines.logprobs import token_logprobs

    def step(h, w, y):
        if kind == "chunked":
            logp, entropy = token_logprobs(h, w, None, y, 1.0, want_entropy=True)
        else:
            whole = torch.log_softmax(h @ w.T, 1)
            logp = whole.gather(1, y[:, None]).squeeze(1)
            entropy = -(whole.exp() * whole).sum(1)
        (logp + 0.01 * entropy).sum().backward()

    def inputs(n, v):
        make = lambda *shape: torch.randn(*shape).requires_grad_()  # noqa: E731
        return make(n, width), make(v, width), torch.randint(v, (n,))

    step(*inputs(64, 512))  # libraries allocate on first use
    data = inputs(tokens, vocabulary)
    before, began = peak_mb(), time.perf_counter()
    step(*data)
    return {"peak_mb": peak_mb() - before, "seconds": time.perf_counter() - began}


def measure(kind: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", kind, "--tokens", str(tokens), "--vocabulary", str(vocabulary)]
    out = subprocess.run([*command, "--width", str(width)], check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--child", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.tokens, args.vocabulary, args.width[0])))
        return 0
    rows = []
    for width in args.width:
        plain, ours = (measure(kind, args.tokens, args.vocabulary, width) for kind in ("plain", "chunked"))
        ratio = ours["peak_mb"] / plain["peak_mb"]
        rows.append({"width": width, "plain": plain, "chunked": ours, "ratio": ratio, "pass": ratio <= BAR})
    if args.json:
        print(json.dumps({"tokens": args.tokens, "vocabulary": args.vocabulary, "bar": BAR, "rows": rows}))
    else:
        print(f"{args.tokens} tokens, vocabulary {args.vocabulary}; bar: at most {BAR} of the plain peak")
        for r in rows:
            sides = ", ".join(f"{k} {r[k]['peak_mb']:.0f} MB in {r[k]['seconds']:.1f} s" for k in ("plain", "chunked"))
            print(f"width {r['width']}: {sides}; ratio {r['ratio']:.3f} {'ok' if r['pass'] else 'FAIL'}")
    return 0 if all(r["pass"] for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
