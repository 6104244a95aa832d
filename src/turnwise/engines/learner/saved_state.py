"""Reading a learner's saved state: tensors by name, in memory or in files, of which only what is asked for is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from turnwise.errors import SettingError
from turnwise.store.shard_files import shapes_of


class UnderPrefix(Mapping[str, Tensor]):
    """The tensors whose names begin with ``prefix``, by the rest of the name."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix
        self._names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_same_shapes(current: Mapping[str, Tensor], saved: Mapping[str, Tensor], prefixes: tuple[str, ...]) -> None:
    """Refuse the state of another model before any tensor is copied. ``prefixes``: of the names of trained parameters."""
    shapes = {name: shape for name, shape in shapes_of(saved).items() if name.startswith(prefixes)}
    wrong = list(current.keys() ^ shapes.keys()) or [n for n in current if tuple(current[n].shape) != shapes[n]]
    if wrong:
        raise SettingError(
            f"this state is of another model or other settings: {len(wrong)} tensors differ, first {sorted(wrong)[0]!r}; "
            "use the model, critic and lora_rank it was saved with"
        )
