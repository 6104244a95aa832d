"""Loads configuration, tokenizer and weights of a model, explains in one sentence why that fails, and writes model folders.

Knows no run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from turnwise.errors import SettingError, scarcity
from turnwise.models.hub import check_weights, is_path, no_model
from turnwise.models.trust import FLAG, remote_code_is_trusted

TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
T = TypeVar("T")


def load_config(source: str) -> Any:
    from transformers import AutoConfig

    return _explained(source, lambda: AutoConfig.from_pretrained(source, trust_remote_code=remote_code_is_trusted()))


def load_tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZERS):
        raise SettingError(f"the folder {source} has no tokenizer; copy {TOKENIZERS[0]} and {TOKENIZERS[1]} into it")
    return _explained(source, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=remote_code_is_trusted()))


def load_causal_lm(source: str) -> Any:
    """The model in float32. A folder without some of the weights is refused: they would begin at random values."""
    import torch
    from transformers import AutoModelForCausalLM

    if Path(source).is_dir():
        check_weights(Path(source))
    trusted = remote_code_is_trusted()
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trusted, "output_loading_info": True}
    load: Any = AutoModelForCausalLM.from_pretrained
    model, info = _explained(source, lambda: load(source, **options))
    # Transformers only warns
    missing = sorted(info["missing_keys"])
    if missing:
        raise SettingError(
            f"the model {source!r} lacks {len(missing)} weights that its config.json describes, such as {missing[0]}; they would "
            "begin at random values. Check the number of layers in config.json, or download the model again"
        )
    return model


def save_lossless(model: Any, folder: Path) -> None:
    """``save_pretrained`` in half precision if every weight survives it bit for bit, as those of a model that was published
    in half precision do. Leaves the model unchanged."""
    import torch

    def survives(tensor: torch.Tensor, half: torch.dtype) -> bool:
        return not tensor.is_floating_point() or torch.equal(tensor.to(half).to(tensor.dtype), tensor)

    state, halves = model.state_dict(), (torch.bfloat16, torch.float16)
    dtype = next((half for half in halves if all(survives(t, half) for t in state.values())), None)
    if dtype is None:
        model.save_pretrained(folder)
        return
    cast: dict[tuple[int, torch.Size], torch.Tensor] = {}  # tied weights stay one tensor, so that they are written once
    for t in state.values():
        if t.is_floating_point():
            cast.setdefault((t.data_ptr(), t.shape), t.detach().to(dtype))
    model.save_pretrained(folder, state_dict={name: cast.get((t.data_ptr(), t.shape), t) for name, t in state.items()})


def _explained(source: str, load: Callable[[], T]) -> T:
    """Every exception of a library that reads a user's files becomes one sentence, except want of memory or descriptors."""
    try:
        return load()
    except Exception as fault:
        if scarcity(fault):  # the machine's fault, not the folder's
            raise
        text = str(fault).strip()
        if "trust_remote_code" in text or "allow custom code" in text:
            message = (
                f"the model {source!r} comes with Python code of its own, which is not run unless you allow it; read that code, "
                f"then write {FLAG} (also when you resume the run)"
            )
        elif is_path(source) and not Path(source).is_dir():  # the library would speak of a hub repository
            message = no_model(
                source, "this is a file, not a folder" if Path(source).exists() else "there is no such folder"
            )
        else:
            message = no_model(source, text.splitlines()[0] if text else type(fault).__name__)
        raise SettingError(message) from fault
