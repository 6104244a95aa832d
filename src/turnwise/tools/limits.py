"""Resource limits of one session of untrusted code. Does not know how or where a limit is enforced."""

from __future__ import annotations

from dataclasses import dataclass, fields

from turnwise.errors import SettingError

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """``SandboxLimits(wall_seconds=2.0)``: every other limit keeps its default."""

    wall_seconds: float = 5.0  # of one call
    cpu_seconds: int = 60  # of one process, over the whole session
    memory_bytes: int = 512 * MIB  # address space of one process, and resident memory of all processes together
    output_bytes: int = 4 * KIB  # of one result; the remainder is cut, with a note
    source_bytes: int = 64 * KIB  # of one call
    scratch_bytes: int = 32 * MIB  # of the private scratch directory (at most 4,096 files), and of one file in it
    processes: int = 16  # processes and threads together; 1: the code may start none
    open_files: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise SettingError(f"{field.name} is {value}; write a positive number")
        if self.memory_bytes < 64 * MIB:
            raise SettingError(f"memory_bytes is {self.memory_bytes}; the interpreter itself needs {64 * MIB}")
        if self.open_files < 16:
            raise SettingError(f"open_files is {self.open_files}; the interpreter itself needs 16")
