"""The file backend inside vLLM: a weight-transfer engine that reads the files of weights our trainer writes.

vLLM finds ``register`` by the entry point ``vllm.general_plugins`` of this package, which must be installed beside it. Written
for vLLM 0.32. Imports vLLM when it is called; nothing else of Turnwise imports this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BACKEND = "turnwise_file"


def register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine_class())


def repack_tied(model: Any) -> None:
    # let layers that share the weight of another one take it over. vLLM reloads the embedding of a tied model and not its head,
    # which on a CPU multiplies by a packed copy of the weight that it made when the model was loaded
    owners: set[int] = set()
    for layer in model.modules():
        weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
        if weight is None or method is None:
            continue
        if id(weight) in owners:
            method.process_weights_after_loading(layer)
        owners.add(id(weight))


def _engine_class() -> Any:
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )

    from turnwise.engines.remote.weight_files import read_weights

    @dataclass
    class FileInitInfo(WeightTransferInitInfo):
        """Nothing to agree on: each update names its file."""

    @dataclass
    class FileUpdateInfo(WeightTransferUpdateInfo):
        path: str
        sha256: str

    class FileWeightEngine(WeightTransferEngine):
        init_info_cls, update_info_cls = FileInitInfo, FileUpdateInfo

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any) -> None:
            tensors, _ = read_weights({"path": update_info.path, "sha256": update_info.sha256})
            self.model.load_weights([(name, value.to(self.device)) for name, value in tensors.items()])

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied(self.model)

        def update_weights(self, update_info: Any) -> None:
            self.receive_weights(
                self.parse_update_info(update_info)
            )  # copies are complete: there is nothing to wait for

        def shutdown(self) -> None:
            pass

    return FileWeightEngine
