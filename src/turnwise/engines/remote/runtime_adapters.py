"""Adapters of a running vLLM: a PEFT folder per version, loaded and unloaded by name, so that nothing is merged.

Requests name the adapter of their version, so several versions sample side by side and none is interrupted. The base is the one
that the server was started with. Knows vLLM's two calls and PEFT's files; no sessions.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file

from turnwise.engines.adapters import Adapter
from turnwise.engines.remote.http_pool import HttpPool
from turnwise.engines.remote.weight_files import FOLDER, WeightFile, checksum
from turnwise.engines.remote.wire import error_text
from turnwise.errors import ServerFault

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SECONDS = 600.0  # for one call


class RuntimeAdapters:
    """The adapters that one server has loaded. ``client`` begins their names."""

    def __init__(self, pool: HttpPool, client: str) -> None:
        self.pool, self.client = pool, client
        self.loaded: set[int] = set()  # versions
        self._in_use: Counter[int] = Counter()

    def name(self, version: int) -> str:
        return f"{self.client}-{version}"

    async def load(self, file: WeightFile, version: int) -> None:
        """Load a version, and unload those that no request uses any longer."""
        await self._call(LOAD, {"lora_name": self.name(version), "lora_path": file.path})
        self.loaded.add(version)
        for old in [v for v in self.loaded if v != version and not self._in_use[v]]:
            self.loaded.discard(old)
            await self._call(UNLOAD, {"lora_name": self.name(old)})

    async def _call(self, path: str, body: Mapping[str, str]) -> None:
        reply = await self.pool.call(path, body, SECONDS)
        if reply.status != 200:
            raise ServerFault(
                f"it answers {path} with {reply.status}: {error_text(reply.json(), reply.text()).rstrip('.')}; start it with "
                "--enable-lora, --max-lora-rank of the run's rank and --max-loras of its staleness plus 2"
            )

    @contextmanager
    def using(self, version: int) -> Iterator[str]:
        """The adapter of ``version``, which stays loaded meanwhile."""
        self._in_use[version] += 1
        try:
            yield self.name(version)
        finally:
            self._in_use[version] -= 1


def fits_peft(adapters: Mapping[str, Adapter]) -> bool:
    """Whether one rank and one scale describe all adapters, as a PEFT configuration needs."""
    return len({(a.down.shape[0], a.scale) for a in adapters.values()}) == 1


def write_peft_folder(folder: Path, adapters: Mapping[str, Adapter]) -> WeightFile:
    """Write adapters as PEFT does; complete or not at all."""
    aside = folder.with_suffix(".writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    first = next(iter(adapters.values()))
    rank, modules = first.down.shape[0], {name: name.removesuffix(".weight") for name in adapters}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": first.scale * rank, "lora_dropout": 0.0,
        "bias": "none", "inference_mode": True, "target_modules": sorted({m.rsplit(".", 1)[-1] for m in modules.values()}),
    }  # fmt: skip
    (aside / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    factors = {
        f"base_model.model.{modules[name]}.lora_{side}.weight": t.detach().to("cpu").contiguous()
        for name, a in adapters.items()
        for side, t in (("A", a.down), ("B", a.up))
    }
    file = aside / "adapter_model.safetensors"
    save_file(factors, file, metadata={"format": "pt"})
    digest, size = checksum(file), sum(path.stat().st_size for path in aside.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    aside.replace(folder)
    return WeightFile(str(folder), digest, size, FOLDER)
