"""Compile ``kernels.c`` once for this machine and load it.

Its OpenMP calls are left open when it is linked: they bind to the runtime PyTorch has loaded. A second runtime would bring a
second team of threads, and two teams on the same cores wake each other up at every product.

``TURNWISE_NATIVE=0`` does without. Knows files and compilers; not what the kernels compute.
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
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
P, N, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float  # a pointer, a whole number, a real one
SIGNATURES = {
    "add_norm": (P, P, P, R, P, P, N, N),
    "norm_backward": (P, P, P, R, P, P, P, P, N, N),
    "rotate": (P, P, P, R, N, N, N, N),
    "swiglu": (P, P, N, N),
    "swiglu_backward": (P, P, P, P, N, N),
    "scores": (P, P, P, P, P, P, P, N, N),
    "pull": (P, P, P, P, P, P, P, N, N),
    "attend": (P, P, P, P, P, P, P, P, N, N, N, N, N, N, R),
    "attend_backward": (P, P, P, P, P, P, P, P, P, P, P, P, N, N, N, N, N, N, N, R),
    "seat": (P, P, P, P, P, P, P, N, N, N, N, N),
    "look": (P, P, P, P, P, P, N, N, N, N, N, N, R),
    "product": (P, P, P, N, P, N, N, N),
    "through": (*[P] * 9, *[N] * 10, R, R),
}


@cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The loaded kernels, or None and why."""
    if os.environ.get("TURNWISE_NATIVE") == "0":
        return None, "TURNWISE_NATIVE is 0"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None, "no C compiler"
    try:
        for runtime in _openmp():
            ctypes.CDLL(runtime, mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        found = ctypes.CDLL(str(_built(compiler)), mode=os.RTLD_NOW)  # what does not bind now would crash later
        for name, kinds in SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = kinds, None
        return found, ""
    except (OSError, AttributeError, subprocess.SubprocessError) as fault:
        said = getattr(fault, "stderr", None) or str(fault)
        log.info("C kernels cannot be had here: %s", said)
        return None, (said.strip().splitlines() or [type(fault).__name__])[0]


def _openmp() -> list[str]:
    """The OpenMP runtime that is loaded already, by its file: PyTorch's own."""
    try:
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
    except OSError:
        return []
    return sorted(path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp")))


def _built(compiler: str) -> Path:
    """The shared library, compiled unless it lies there from an earlier run on such a machine."""
    told = "\n".join((SOURCE.read_text(encoding="utf-8"), *FLAGS, compiler, _machine()))
    name = f"kernels-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnwise"
    if (home / name).is_file():
        return home / name
    with tempfile.TemporaryDirectory() as folder:
        made, linked = Path(folder, "kernels.o"), Path(folder, "kernels.so")
        for order in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(made)],
            [compiler, "-shared", str(made), "-lm", "-o", str(linked)],
        ):
            subprocess.run(order, check=True, capture_output=True, text=True, timeout=120)
        try:
            home.mkdir(parents=True, exist_ok=True)
            aside = Path(shutil.copyfile(linked, home / f"{name}.{os.getpid()}"))
        except OSError:  # no home to keep it in
            home = Path(tempfile.mkdtemp(prefix="turnwise-"))
            aside = Path(shutil.copyfile(linked, home / "kernels.so"))
        aside.replace(home / name)  # in one move: another process may be loading it
    return home / name


def _machine() -> str:
    """What -march=native depends on: a home may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts = {line for line in lines if line.lower().startswith(("flags", "features", "model name", "cpu part"))}
        return platform.machine() + "".join(sorted(facts))
    except OSError:
        return platform.machine() + platform.processor()
