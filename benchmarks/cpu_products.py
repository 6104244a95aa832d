"""Small batches through a decoder's layers on a CPU: one C call for all layers against C kernels around ``torch.mm``.

    python benchmarks/cpu_products.py [--threads N] [--cpu-time] [--repeats 30] [--rows 1 4 8 16 32 64] [--shapes tiny smollm2]

Times a whole decode step (layers, head) of N rows with 64 cached columns each, for the tiny model's shape and one like
SmolLM2-135M. The two paths take turns; the table shows medians. ``--cpu-time`` counts the process's CPU time, which other load on
the machine hardly changes; use it with one thread. ``kernels/cpu.py`` enables the C call only beside OpenBLAS; this
script measures it beside any library.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from turnwise.engines.generator.attention_layouts import DecodeLayout
from turnwise.engines.generator.model_runner import ModelRunner
from turnwise.engines.kernels import cpu

CACHED = 64  # columns that every row holds
SHAPES = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
}  # fmt: skip


def runner(shape: str, rows: int) -> ModelRunner:
    """A random model whose decoder has the fused layers, whatever library PyTorch uses."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=256, tie_word_embeddings=True)).eval()
    real, cpu.panels_pay = cpu.panels_pay, lambda: True
    try:
        made = ModelRunner(model, rows, 256, torch.device("cpu"))
    finally:
        cpu.panels_pay = real
    assert made.decoder is not None and made.decoder.fused is not None, made.describe()
    return made


def seconds(made: ModelRunner, tokens: torch.Tensor, fused: bool, clock: Callable[[], float]) -> float:
    """Of one decode step; the layout is built outside."""
    layout = DecodeLayout(made.kv_cache, [CACHED] * len(tokens), 1)
    cpu.MAX_ROWS = 64 if fused else 0
    start = clock()
    made.decode_step(tokens, layout)
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    if cpu.library()[0] is None:
        raise SystemExit(f"no C kernels: {cpu.library()[1]}")
    info = torch.__config__.show()
    library = next((name for name in ("mkl", "open", "accelerate") if f"BLAS_INFO={name}" in info), "unknown")
    print(
        f"torch {torch.__version__}, BLAS {library}, {torch.get_num_threads()} threads; ms per decode step, medians\n"
    )
    print("| shape | rows | torch.mm | C call | gain |\n|---|---:|---:|---:|---:|")
    for shape in options.shapes:
        made = runner(shape, max(options.rows))
        for rows in options.rows:
            tokens = torch.randint(0, SHAPES[shape]["vocab_size"], (rows,))
            with torch.inference_mode():
                times: dict[bool, list[float]] = {True: [], False: []}
                for _ in range(options.repeats + 3):
                    for fused in times:
                        times[fused].append(1e3 * seconds(made, tokens, fused, clock))
            plain, ours = (statistics.median(times[fused][3:]) for fused in (False, True))
            print(f"| {shape} | {rows} | {plain:.3f} | {ours:.3f} | {plain / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
