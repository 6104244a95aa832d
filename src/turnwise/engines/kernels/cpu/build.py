"""Compile ``kernels.c`` once for this machine and load it.

It is linked without an OpenMP runtime, so its OpenMP calls bind to the one that PyTorch has loaded. A second runtime would bring
a second thread team, and two teams on the same cores wake each other up at every product.

``TURNWISE_NATIVE=0`` disables the C kernels. Knows files and compilers; not what the kernels compute.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
# -fno-thread-jumps: GCC would compute both sides of a clamp, and dividing by the constant side gives subnormal numbers, which
# x86-64 handles in microcode: ``swiglu`` took fifteen times as long.
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps", "-fPIC")
P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float  # pointer, integer, float
SIGNATURES = {
    "add_norm": (P, P, P, R, P, P, N, N),
    "norm_backward": (P, P, P, R, P, P, P, P, N, N),
    "rotate": (P, P, P, R, N, N, N, N),
    "swiglu": (P, P, N, N),
    "swiglu_backward": (P, P, P, P, N, N),
    "log_probs": (P, P, P, P, P, P, P, N, N),
    "log_probs_backward": (P, P, P, P, P, P, P, N, N),
    "varlen_attention": (P, P, P, P, P, P, P, P, N, N, N, N, N, N, R),
    "varlen_attention_backward": (P, P, P, P, P, P, P, P, P, P, P, P, N, N, N, N, N, N, N, R),
    "rope_and_cache": (P, P, P, P, P, P, P, P, N, N, N, N, N, N),
    "cached_attention": (P, P, P, P, P, P, P, N, N, N, N, N, N, N, R),
    "panel_matmul": (P, P, P, N, P, N, N, N),
    "forward_layers": (*[P] * 10, *[N] * 11, R, R),
}


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The loaded kernels, or None and the reason."""
    if os.environ.get("TURNWISE_NATIVE") == "0":
        return None, "TURNWISE_NATIVE is 0"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None, "no C compiler"
    try:
        for runtime in _openmp():
            ctypes.CDLL(runtime, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        # RTLD_NOW: a symbol that does not bind now would crash later
        loaded = ctypes.CDLL(str(_built(compiler)), mode=os.RTLD_NOW)
        for name, types in SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, None
        return loaded, ""
    except (OSError, AttributeError, subprocess.SubprocessError) as fault:
        message = getattr(fault, "stderr", None) or str(fault)
        log.info("C kernels are not available: %s", message)
        return None, (message.strip().splitlines() or [type(fault).__name__])[0]


def _openmp() -> list[str]:
    """Files of the OpenMP runtimes that are already loaded: PyTorch's own."""
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
    except OSError:
        return []
    return sorted(path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp")))


def _built(compiler: str) -> Path:
    """The shared library; compiled unless an earlier run on the same kind of machine left it in the cache."""
    key = "\n".join((SOURCE.read_text(encoding="utf-8"), *FLAGS, compiler, _machine()))
    name = f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnwise"
    if (cache_dir / name).is_file():
        return cache_dir / name
    with tempfile.TemporaryDirectory() as folder:
        compiled, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), "-lm", "-o", str(linked)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            temporary = Path(shutil.copyfile(linked, cache_dir / f"{name}.{os.getpid()}"))
        except OSError:  # no writable cache directory
            cache_dir = Path(tempfile.mkdtemp(prefix="turnwise-"))
            temporary = Path(shutil.copyfile(linked, cache_dir / "kernels.so"))
        temporary.replace(cache_dir / name)  # atomically: another process may be loading it
    return cache_dir / name


def _machine() -> str:
    """What -march=native depends on: different machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        features = {line for line in lines if line.lower().startswith(("flags", "features", "model name", "cpu part"))}
        return platform.machine() + "".join(sorted(features))
    except OSError:
        return platform.machine() + platform.processor()
