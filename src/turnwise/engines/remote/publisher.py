"""What a trainer writes for its servers: all weights in the dtype that a server keeps, or the base once and then adapters alone.

A server that has no base gets it before the first adapters; its file is removed once every server has it, and written again for
a server that comes later. A vLLM that loads adapters by name gets a PEFT folder, any other merged weights. Knows files and what
servers say of themselves; sends nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from turnwise.engines.adapters import AdaptedWeights, Adapter, SentBase, adapted_weights, factors_of
from turnwise.engines.remote.replica import Replica
from turnwise.engines.remote.weight_files import (
    ADAPTERS,
    BASE,
    FOLDER,
    WeightFile,
    WeightFolder,
    checksum,
    read_weights,
)

Form = tuple[tuple[str, str], ...]
"""The dtypes of weights that a server does not keep in float32, by name."""


@dataclass
class _Base:
    """Frozen weights, and the files that hold them now; a file that was removed keeps its checksum."""

    sent: SentBase
    digests: dict[Form, str] = field(default_factory=dict)
    files: dict[Form, WeightFile] = field(default_factory=dict)


class WeightPublisher:
    """Writes one version after the other. Files of a version are written when the first server needs them."""

    def __init__(self, folder: WeightFolder) -> None:
        self.folder, self.version, self.written = folder, -1, 0  # written: bytes of this version, its base included
        self._weights: Mapping[str, Tensor] | None = None
        self._whole: dict[Form, WeightFile] = {}
        self._adapters: WeightFile | None = None
        self._base: _Base | None = None
        self._folders: dict[int, WeightFile] = {}  # adapters as PEFT folders, by version
        self._forms: dict[Form, int] = {}

    def begin(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Write ``weights`` from now on. They may change after ``write_for``."""
        self._weights, self.version, self.written = weights, version, 0
        self._whole, self._adapters = {}, None
        if not isinstance(weights, AdaptedWeights) or not weights.mergeless:
            self._base = None
        elif self._base is None or not self._base.sent.is_still(weights.base):
            self._base = _Base(SentBase(weights.base))

    def write_for(self, replicas: Sequence[Replica]) -> None:
        """Write what these servers need and is not written yet; without servers, what one that comes later can use."""
        weights = self._weights
        assert weights is not None, "a run publishes before it samples"
        with_adapters = [replica for replica in replicas if self._sends_adapters(replica)]
        if isinstance(weights, AdaptedWeights) and self._base is not None and self._adapters is None:
            if with_adapters or not replicas:
                factors, described = factors_of(weights.adapters)
                file = self._count(self.folder.write(factors, self.version, kind=ADAPTERS))
                self._adapters = replace(file, adapters=described)
        for replica in with_adapters:
            self._write_base(_base_form(replica), replica.base)
        by_name = [replica for replica in replicas if self._sends_folder(replica)]
        if isinstance(weights, AdaptedWeights) and by_name:
            self._write_folder(weights, by_name)
        rest = [r for r in replicas if r not in with_adapters and r not in by_name and not self._by_device(r)]
        forms = {_form(replica) for replica in rest}
        if not replicas and self._base is None:
            forms = {()}
        for form in forms - self._whole.keys():
            number = self._forms.setdefault(form, len(self._forms))
            self._whole[form] = self._count(self.folder.write(weights, self.version, _dtypes(form), form=number))

    def _write_base(self, form: Form, digest: str) -> None:
        base = self._base
        assert base is not None
        if form in base.files or (digest and digest == base.digests.get(form)):
            return
        number = self._forms.setdefault(form, len(self._forms))
        file = self._count(self.folder.write(base.sent.weights, self.version, _dtypes(form), BASE, number))
        base.files[form], base.digests[form] = file, file.sha256

    def _write_folder(self, weights: AdaptedWeights, replicas: Sequence[Replica]) -> None:
        """Write the version, and remove those that no server has loaded."""
        if self.version not in self._folders:
            folder = self.folder.path / f"adapter-{self.version}"
            self._folders[self.version] = self._count(write_peft_folder(folder, weights.adapters))
        loaded = {v for replica in replicas if replica.runtime_adapters for v in replica.runtime_adapters.loaded}
        for old in [v for v in self._folders if v != self.version and v not in loaded]:
            shutil.rmtree(self._folders.pop(old).path, ignore_errors=True)

    def files_for(self, replica: Replica) -> list[WeightFile]:
        """What to send to a server, in this order; nothing to one that gets weights without files."""
        if self._sends_folder(replica):
            return [self._folders[self.version]]
        if self._by_device(replica):
            return []
        if not self._sends_adapters(replica):
            return [self._whole[_form(replica)]]
        base, form = self._base, _base_form(replica)
        assert base is not None and self._adapters is not None
        adapters = replace(self._adapters, base=base.digests[form])
        return [adapters] if replica.base == adapters.base else [base.files[form], adapters]

    def forget_base(self) -> None:
        """Remove files of the base: every server has it."""
        for file in () if self._base is None else self._base.files.values():
            self.folder.remove(file)
        if self._base is not None:
            self._base.files = {}

    def read_again(self) -> Mapping[str, Tensor]:
        """The weights of this version from their files: the learner's have moved on. A base does not move."""
        if self._adapters is not None and self._base is not None:
            factors, _ = read_weights(self._adapters.as_dict())
            self._weights = adapted_weights(self._base.sent.weights, factors, self._adapters.adapters)
        else:
            self._weights, _ = read_weights(next(iter(self._whole.values())).as_dict())
        return self._weights

    def _sends_adapters(self, replica: Replica) -> bool:
        return self._base is not None and replica.takes_adapters

    def _by_device(self, replica: Replica) -> bool:
        assert self._weights is not None
        return replica.device_weights is not None and replica.device_weights.carries(self._weights)

    def _sends_folder(self, replica: Replica) -> bool:
        weights = self._weights
        return self._base is not None and replica.loads_adapters and fits_peft(getattr(weights, "adapters", {}))

    def _count(self, file: WeightFile) -> WeightFile:
        self.written += file.size
        return file


def _form(replica: Replica) -> Form:
    return tuple(sorted(replica.dtypes.items()))


def _base_form(replica: Replica) -> Form:
    """A base to which adapters are added each time keeps its dtype: rounding it would round the policy."""
    return _form(replica) if replica.adapters_beside else ()


def _dtypes(form: Form) -> dict[str, torch.dtype]:
    return {name: getattr(torch, dtype) for name, dtype in form}


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
